"""What one decision of the router costs: `python benchmarks/router_decision.py`.

With the sizes of SmolLM2-135M, a router of random weights over all arms, and made-up prices:

    features  entropy, top-1, margin, position and the target's hidden state, from its logits
    read      the router's network, and its answer on the host
    decide    expected tokens against seconds of every arm and draft length
    decision  the three together
    observe   what the policy learns from the round's outcome

`after a pass` is a decision as decoding has it: the target has just read its weights, and nothing
of the router is left in the CPU's caches but the logits. `at once` repeats the decision right
after that. Shares are of the shortest round, of 40 ms; rounds take 40 to 80 ms here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from common import console
from decoding import decode_arguments, save_unless_quick
from rich.progress import track
from rich.table import Table
from torch import Tensor

from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.features import NUM_SCALARS, router_features
from whiflash_infer.routing.policies import HazardPolicy, HazardSettings
from whiflash_infer.routing.protocol import Outcomes, RoundStates
from whiflash_infer.types import AR, AR_TREE, CHAINS, DIFFUSION, DIFFUSION_TREE, DRAFTERS

LIMIT_MS, LIMIT_SHARE, ROUND_MS = 0.3, 0.01, 40.0
HIDDEN, VOCABULARY = 576, 49152  # SmolLM2-135M
WEIGHTS = 135_000_000  # parameters that a pass of the target reads
WIDTH = 128
MAX_DRAFT = {AR: 5, AR_TREE: 5, DIFFUSION: 7, DIFFUSION_TREE: 7}
NODES = 24
BATCHES = (1, 8)
STAGES = ("features", "read", "decide", "decision", "observe")
STATES = ("after a pass", "at once")


def main() -> None:
    options = decode_arguments(__doc__, quick={"repeats": 5}, repeats=300)
    seconds = measure(options.repeats)
    results = {
        f"batch {batch}, {state}": {stage: cell(seconds[batch, state], stage) for stage in STAGES}
        for batch in BATCHES
        for state in STATES
    }
    show(results)
    found = {"limit_ms": LIMIT_MS, "round_ms": ROUND_MS, "microseconds": results}
    save_unless_quick("router_decision", options, None, found)


@torch.inference_mode()
def measure(repeats: int) -> dict[tuple[int, str], list[list[float]]]:
    """Seconds of the stages; batches and states of the caches take turns."""
    torch.manual_seed(0)
    # A process that has loaded a target has freed large blocks, and its allocator keeps memory.
    torch.ones(30 * 2**20, dtype=torch.int8)
    deciders = {batch: Decider(batch) for batch in BATCHES}
    weights = torch.zeros(WEIGHTS, dtype=torch.bfloat16)
    found: dict[tuple[int, str], list[list[float]]] = {
        (batch, state): [] for batch in BATCHES for state in STATES
    }
    for repeat in track(range(repeats + 3), description="measuring", console=console):
        for batch, decider in deciders.items():
            read_all(weights)
            decider.renew_logits()
            for state in STATES:
                seconds = decider.timed()
                if repeat >= 3:
                    found[batch, state].append(seconds)
    return found


def read_all(weights: Tensor) -> None:
    """As a pass of the target does, which leaves little else in the caches."""
    weights.view(torch.int64).max()


class Decider:
    """A policy and texts in the middle of their answers."""

    def __init__(self, batch: int) -> None:
        config = RouterConfig(
            num_features=NUM_SCALARS + HIDDEN, width=WIDTH, max_draft=dict(MAX_DRAFT)
        )
        self.policy = HazardPolicy(RouterNet(config), made_up_costs(), settings())
        self.source = 3.0 * torch.randn(batch, VOCABULARY, dtype=torch.bfloat16)
        self.logits = self.source.clone()
        self.hidden = torch.randn(batch, HIDDEN, dtype=torch.bfloat16)
        self.positions = torch.arange(batch) + 300
        self.memory = np.zeros((batch, self.policy.memory_size))
        num_arms = len(config.arms)
        self.states = RoundStates(
            arms=config.arms,
            texts=np.arange(batch),
            positions=self.positions.numpy(),
            lags=np.full((batch, num_arms), 3),
            max_draft=np.tile([0, *MAX_DRAFT.values()], (batch, 1)),
            last_arms=np.arange(batch) % num_arms,
            categories=[""] * batch,
        )
        self.outcomes = Outcomes(
            accepted=np.ones(batch, dtype=int),
            committed=np.full(batch, 2),
            seconds=np.full(batch, 0.05),
            ended=[False] * batch,
        )

    def renew_logits(self) -> None:
        """The head has just written them."""
        self.logits.copy_(self.source)

    def timed(self) -> list[float]:
        """Seconds of features, read, decide and observe."""
        times = [time.perf_counter()]
        features = router_features(self.logits, self.hidden, self.positions)
        times.append(time.perf_counter())
        beliefs = self.policy.read(features).double().numpy()
        times.append(time.perf_counter())
        decisions = self.policy.decide(beliefs, self.states, self.memory)
        times.append(time.perf_counter())
        self.policy.observe(beliefs, self.states, decisions, self.outcomes, self.memory)
        times.append(time.perf_counter())
        return np.diff(times).tolist()


def settings() -> HazardSettings:
    """Everything that the policy can do beside the price."""
    return HazardSettings(lam=25.0, frailty=8.0, online_price=4.0, drift=4.0)


def made_up_costs() -> CostModel:
    drafting = {
        arm: [1e-3 * (4 + (2 * k if arm in (AR, AR_TREE) else 6)) for k in range(longest + 1)]
        for arm, longest in MAX_DRAFT.items()
    }
    nodes = {
        arm: [k if arm in CHAINS or k == 0 else NODES for k in range(longest + 1)]
        for arm, longest in MAX_DRAFT.items()
    }

    def together(batch: int) -> PassCosts:
        return PassCosts(
            verify=[(1e-3 * (35 + batch + width), 2e-6) for width in range(1, NODES + 2)],
            draft=drafting,
            catch_up={drafter: (1e-3, 1e-4) for drafter in DRAFTERS.values()},
            overhead=1e-3,
        )

    here = DeviceIdentity(device="made up", threads=2, dtype="bfloat16")
    batches = {batch: together(batch) for batch in BATCHES}
    return CostModel(device=here, target="made up", nodes=nodes, batches=batches)


def cell(samples: Sequence[Sequence[float]], stage: str) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    table = 1e6 * np.array(samples)
    columns = {"features": 0, "read": 1, "decide": 2, "observe": 3}
    values = table[:, :3].sum(1) if stage == "decision" else table[:, columns[stage]]
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return {"median": middle, "quartile_low": low, "quartile_high": high}


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title=f"one decision, microseconds (limit {1e3 * LIMIT_MS:.0f} at batch 1)")
    for column in ("", *STAGES, "of a round"):
        table.add_column(column, justify="right")
    for name, stages in results.items():
        share = stages["decision"]["median"] / (1e3 * ROUND_MS)
        cells = [
            f"{one['median']:.0f}\n{one['quartile_low']:.0f} - {one['quartile_high']:.0f}"
            for one in stages.values()
        ]
        table.add_row(name, *cells, f"{share:.2%}")
    console.print(table)
    first = results[f"batch 1, {STATES[0]}"]["decision"]["median"]
    kept = first <= 1e3 * LIMIT_MS and first <= LIMIT_SHARE * 1e3 * ROUND_MS
    console.print(f"batch 1, {STATES[0]}: {'within' if kept else 'above'} the limits")


if __name__ == "__main__":
    main()
