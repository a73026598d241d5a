"""What changing drafters costs: `python benchmarks/switching.py`.

The two chains take turns, another one every round, so that each round first has to bring its
drafter up to date: `route` and `catch_up` of the round's phases. Once under each way of syncing.
A drafter's first catch-up reads the whole prompt; shares are told with it and without.
A router that reads the target's state does so behind the verification, not in `route`; what that
takes (features and the router's network, as large as the default's) is measured alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import numpy as np
import torch
from common import console, rate_of
from decoding import Bench, Timed, answer, decode_arguments, in_turns, load_bench, save_unless_quick
from jaxtyping import Float
from rich.table import Table

from whiflash_infer.drafters.load import chains
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.router import RouterConfig, RouterNet, expected_tokens
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.features import NUM_SCALARS, router_features
from whiflash_infer.routing.policies import BasePolicy
from whiflash_infer.routing.policies.base import full_length
from whiflash_infer.routing.protocol import Decisions, RoundStates
from whiflash_infer.settings import EngineSettings, Sync
from whiflash_infer.types import AR, DIFFUSION, PHASES, Generation, Round

LIMIT = 0.04
DEFAULT: Sync = "lazy_kv_only"
SYNCS: tuple[Sync, ...] = (DEFAULT, *(sync for sync in get_args(Sync) if sync != DEFAULT))
ROUTER_WIDTH = 128


class Alternate(BasePolicy):
    """The arm that did not draft last."""

    name = "alternate"
    arms = AR, DIFFUSION

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        ar, diffusion = self.columns(states)
        return full_length(np.where(states.last_arms == ar, diffusion, ar), states)


def main() -> None:
    options = decode_arguments(
        __doc__, quick={"num_prompts": 1, "new_tokens": 16}, num_prompts=4, new_tokens=256
    )
    bench = load_bench(options, num_prompts=options.num_prompts)
    wanted = GenerationOptions(max_new_tokens=options.new_tokens, stop_ids=frozenset())
    contestants = {sync: partial(answer, decoder(bench, sync), options=wanted) for sync in SYNCS}
    answers = in_turns(contestants, bench.prompts)
    results = {sync: cell(answers[sync], answers[DEFAULT]) for sync in SYNCS}
    router = router_share(bench, results[DEFAULT]["round_ms"])
    show(results, router)
    found = {"limit": LIMIT, "syncs": results, "router": router}
    save_unless_quick("switching", options, bench, found)


def decoder(bench: Bench, sync: Sync) -> RoutedDecoder:
    arms = chains(bench.arms)
    return RoutedDecoder(bench.target, arms, Alternate(), EngineSettings(sync=sync, timing=True))


def cell(answers: Sequence[Timed], default: Sequence[Timed]) -> dict[str, float]:
    """Shares of round time: medians over prompts. speed: of the default's, a prompt's ratio."""
    generations = [timed.generation for timed in answers]
    shares = [switching_share(g.rounds) for g in generations]
    later = [switching_share(later_rounds(g)) for g in generations]
    rounds = [done for g in generations for done in g.rounds]
    rates = np.array([tokens_per_second(timed) for timed in answers])
    speed = rates / np.array([tokens_per_second(timed) for timed in default])
    found = {
        "rounds": len(rounds),
        "round_ms": 1e3 * float(np.mean([done.total_seconds for done in rounds])),
        "share": float(np.median(shares)),
        "share_low": min(shares),
        "share_high": max(shares),
        "share_later": float(np.median(later)),
        "tokens_per_s": float(np.median(rates)),
        "speed": float(np.median(speed)),
        "speed_low": float(speed.min()),
        "speed_high": float(speed.max()),
        "mean_lag": float(np.mean([done.lag for done in rounds])),
    }
    for phase in PHASES:
        found[f"{phase}_ms"] = 1e3 * float(np.mean([done.seconds[phase] for done in rounds]))
    return found


def switching_share(rounds: Sequence[Round]) -> float:
    switching = sum(done.seconds["route"] + done.seconds["catch_up"] for done in rounds)
    return switching / sum(done.total_seconds for done in rounds)


def later_rounds(generation: Generation) -> list[Round]:
    """Behind the first one of each arm, in which its drafter reads the prompt."""
    return generation.rounds[2:]


def tokens_per_second(timed: Timed) -> float:
    return timed.generation.decoded_tokens / timed.generation.decode_seconds


@torch.inference_mode()
def router_share(bench: Bench, round_ms: float) -> dict[str, float]:
    """What reading the state takes, beside a round under the default."""
    size, vocabulary = bench.target.config.hidden_size, bench.target.config.vocab_size
    config = RouterConfig(
        num_features=NUM_SCALARS + size,
        width=ROUTER_WIDTH,
        max_draft={name: arm.max_draft for name, arm in chains(bench.arms).items()},
    )
    net = RouterNet(config).eval()
    logits = torch.randn(1, vocabulary).to(bench.target.dtype)
    hidden, position = torch.randn(1, size).to(bench.target.dtype), torch.tensor([100])

    def read() -> int:
        for _ in range(10):
            expected_tokens(net(router_features(logits, hidden, position))).tolist()
        return 10

    timed = rate_of(read)
    rates = [timed() for _ in range(11)][1:]
    milliseconds = 1e3 / float(np.median(rates))
    return {"ms": milliseconds, "share": milliseconds / (round_ms + milliseconds)}


def show(results: dict[str, dict[str, float]], router: dict[str, float]) -> None:
    table = Table(title=f"alternating every round (limit of route + catch-up {LIMIT:.0%})")
    columns = ("sync", "share", "range", "later", "catch-up", "round ms", "speed")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for sync, found in results.items():
        table.add_row(
            sync,
            f"{found['share']:.1%}",
            f"{found['share_low']:.1%} - {found['share_high']:.1%}",
            f"{found['share_later']:.1%}",
            f"{found['catch_up_ms']:.2f}",
            f"{found['round_ms']:.2f}",
            f"{found['speed']:.2f}",
        )
    console.print(table)
    console.print(
        f"a router that reads the state: {router['ms']:.2f} ms, {router['share']:.1%} more"
    )


if __name__ == "__main__":
    main()
