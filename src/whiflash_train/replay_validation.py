"""The router is judged by replayed tokens a second on held-out rounds, not by its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from whiflash_infer.costs import CostModel
from whiflash_infer.nets.router import RouterNet
from whiflash_infer.policies import HazardPolicy, Policy, StaticPolicy
from whiflash_infer.replay import ReplayResult, calibrate_entropy, replay, replay_one, solve_price
from whiflash_infer.rounds import ConversationRounds
from whiflash_infer.types import PLAIN


@dataclass(frozen=True, kw_only=True)
class ReplayOutcome:
    """The hazard policy at its price, beside the policies that need no training."""

    lam: float
    trace: list[tuple[float, float]]
    hazard: ReplayResult
    others: dict[str, float]

    @property
    def best_static(self) -> tuple[str, float]:
        statics = {k: v for k, v in self.others.items() if k != "entropy"}
        name = max(statics, key=lambda k: statics[k])
        return name, statics[name]

    def report(self) -> dict[str, Any]:
        return {
            "lam": self.lam,
            "price_trace": self.trace,
            "tokens_per_s": {**self.others, "hazard": self.hazard.tokens_per_s},
            "tau": self.hazard.tau,
            "rounds": self.hazard.rounds,
            "switches": self.hazard.switches,
            "arms": dict(self.hazard.arms),
        }


class ReplayValidation(Callback):
    def __init__(
        self,
        conversations: list[ConversationRounds],
        costs: CostModel,
        *,
        lam: float | Literal["auto"],
        adaptive_length: bool,
        switch_margin: float,
    ) -> None:
        self._conversations = conversations
        self._costs = costs
        self._lam = lam
        self._options = {"adaptive_length": adaptive_length, "switch_margin": switch_margin}
        self._max_draft = {arm: len(seconds) - 1 for arm, seconds in costs.draft.items()}
        self.num_positions = sum(len(c) for c in conversations)
        self.entropy_threshold, entropy = calibrate_entropy(conversations, costs, self._max_draft)
        statics: list[Policy] = [StaticPolicy(a) for a in (PLAIN, *self._max_draft)]
        self._others = {p.name: self._replay(p).tokens_per_s for p in statics}
        self._others["entropy"] = entropy

    def evaluate(self, net: RouterNet) -> ReplayOutcome:
        """Solve for the price (or take the fixed one) and replay."""
        was_training = net.training
        policy = HazardPolicy(net, self._costs, lam=0.0, **self._options)
        with torch.no_grad():
            device = net.mean.device
            beliefs = [policy.read(c.features.to(device)).tolist() for c in self._conversations]
        net.train(was_training)

        def run(lam: float) -> ReplayResult:
            policy.lam = lam
            total = ReplayResult()
            for belief, conversation in zip(beliefs, self._conversations, strict=True):
                total.add(replay_one(policy, belief, conversation, self._costs, self._max_draft))
            return total

        if self._lam == "auto":
            trace = solve_price(run)
        else:
            lam = float(self._lam)
            trace = [(lam, run(lam).tokens_per_s)]
        lam = trace[-1][0]
        return ReplayOutcome(lam=lam, trace=trace, hazard=run(lam), others=self._others)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = pl_module.net
        assert isinstance(net, RouterNet)
        outcome = self.evaluate(net)
        scalars = {
            "tokens_per_s": outcome.hazard.tokens_per_s,
            "tau": outcome.hazard.tau,
            "lam": outcome.lam,
            "switches_per_100_rounds": 100 * outcome.hazard.switches / outcome.hazard.rounds,
            "gain_over_best_static": outcome.hazard.tokens_per_s / outcome.best_static[1] - 1,
        }
        pl_module.log_dict({f"val/{k}": float(v) for k, v in scalars.items()})

    def show(self, outcome: ReplayOutcome) -> None:
        """The verdict: replayed throughput of every policy, the price trace, a plain sentence."""
        console = Console()
        table = Table(title=f"Replay over {self.num_positions} held-out positions")
        table.add_column("policy")
        table.add_column("tokens/s", justify="right")
        for name, speed in {**outcome.others, "hazard": outcome.hazard.tokens_per_s}.items():
            table.add_row(name, f"{speed:.2f}")
        console.print(table)
        steps = " -> ".join(f"{lam:.1f}" for lam, _ in outcome.trace)
        console.print(f"price lam: {steps} tokens a second")
        name, speed = outcome.best_static
        gain = outcome.hazard.tokens_per_s / speed - 1
        judged = "routing pays here" if gain > 0.01 else "not worth routing here"
        console.print(f"{judged}: hazard {gain:+.1%} against the best static arm, {name}")

    def _replay(self, policy: Policy) -> ReplayResult:
        return replay(policy, self._conversations, self._costs, self._max_draft)
