"""The router is judged by replayed tokens a second on held-out rounds, not by its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch import Callback, LightningModule, Trainer

from whiflash_infer.nets.router import RouterNet, expected_tokens
from whiflash_infer.routing.calibration import calibration_error, fit_temperatures
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.oracles import best_oracle_round, hedge_of, oracle_path, plans_of
from whiflash_infer.routing.policies import (
    DeltaPolicy,
    EntropyPolicy,
    HazardSettings,
    PlannedPolicy,
    Policy,
)
from whiflash_infer.routing.replay import DenseTexts, Replayed, replay
from whiflash_infer.routing.router import Router, RouterSettings
from whiflash_train.router_fit import (
    CALIBRATION_TEXTS,
    best_threshold,
    hazard_runs,
    part_of,
    solved,
    static_replays,
)
from whiflash_train.verdict import Verdict, after_training, before_training, regret


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """trace: of the price. settings: with the price at its end. hazard: the replay there."""

    trace: list[tuple[float, float]]
    settings: HazardSettings
    hazard: Replayed


@dataclass
class ReplayValidation(Callback):
    """lam: a fixed price, None to solve for it. settings: the hazard policy's, but for the price.
    category_arms: best in training."""

    texts: DenseTexts
    costs: CostModel
    settings: HazardSettings
    lam: float | None
    category_arms: Mapping[str, str]
    ceiling: Replayed | None = None
    statics: dict[str, Replayed] = field(init=False)
    oracles: dict[str, Replayed] = field(init=False)

    def __post_init__(self) -> None:
        self.statics = static_replays(self.texts, self.costs)
        best = max(self.statics, key=lambda name: self.statics[name].tokens_per_s)
        arm = self.texts.arms[list(self.statics).index(best)]
        self.settings = replace(self.settings, best_static=arm)
        plans = {
            "oracle_round": best_oracle_round(self.texts, self.costs)[0],
            "oracle_path": oracle_path(self.texts, self.costs)[0],
        }
        self.oracles = {
            name: self._replay(PlannedPolicy(name, self.texts.arms, plans_of(self.texts, plan)))
            for name, plan in plans.items()
        }

    @property
    def best_static(self) -> Replayed:
        return max(self.statics.values(), key=lambda replayed: replayed.tokens_per_s)

    def before(self) -> Verdict:
        return before_training(self.statics, self.oracles, self.ceiling, self.texts.categories)

    def evaluate(self, net: RouterNet) -> Outcome:
        """Replay the hazard policy at its price."""
        trace, hazard = solved(hazard_runs(net, self.texts, self.costs, self.settings), self.lam)
        return Outcome(
            trace=trace, settings=replace(self.settings, lam=trace[-1][0]), hazard=hazard
        )

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = pl_module.net
        assert isinstance(net, RouterNet)
        outcome = self.evaluate(net)
        hazard = outcome.hazard
        scalars = {
            "tokens_per_s": hazard.tokens_per_s,
            "tau": hazard.tau,
            "lam": outcome.settings.lam,
            "switches_per_100_rounds": 100 * hazard.switches / hazard.rounds,
            "gain_over_best_static": hazard.tokens_per_s / self.best_static.tokens_per_s - 1,
            "regret": regret(hazard, self.statics),
            "share_of_oracle": hazard.tokens_per_s / self.oracles["oracle_path"].tokens_per_s,
            "calibration_error": mean_error(self.calibration(net)),
        }
        if self.ceiling is not None:
            scalars["share_of_ceiling"] = hazard.tokens_per_s / self.ceiling.tokens_per_s
        pl_module.log_dict({f"val/{name}": float(value) for name, value in scalars.items()})

    # --- when training is over -------------------------------------------------------------------

    def finish(self, net: RouterNet) -> tuple[RouterSettings, Outcome]:
        """Calibrate the network's temperatures, and choose what the policies need besides it."""
        max_draft = np.array(list(net.config.max_draft.values()))
        net.temperatures.fill_(1.0)
        logits = _hazard_logits(net, self.texts)
        labels = self.texts.accepted[:, 1:], self.texts.censored[:, 1:]
        net.temperatures.copy_(torch.from_numpy(fit_temperatures(logits, *labels, max_draft)))
        outcome = self.evaluate(net)
        few = part_of(self.texts, range(min(CALIBRATION_TEXTS, len(self.texts))))
        thresholds = {}
        if set(net.config.delta_arms) <= set(net.config.arms):
            for policy in (EntropyPolicy(0.0), DeltaPolicy(net, 0.0)):
                thresholds[f"{policy.name}_threshold"] = best_threshold(policy, few, self.costs)
        return (
            RouterSettings(hazard=outcome.settings, category_arms=self.category_arms, **thresholds),
            outcome,
        )

    def judge(self, router: Router, outcome: Outcome) -> tuple[Verdict, dict[str, Any]]:
        """Every policy over all validation texts: the verdict, and its numbers for the manifest."""
        names = ["entropy", "delta", "request", "category", "bandit"]
        others = {n: self._replay(router.policy(n)) for n in names if router.has_arms_of(n)}
        others["hedge"] = self._replay(hedge_of(self.texts, self.costs, outcome.settings.lam))
        entropy = others.pop("entropy", None)
        verdict = after_training(
            outcome.hazard,
            self.statics,
            self.oracles,
            self.ceiling,
            entropy,
            others,
            self.texts.categories,
        )
        calibration = self.calibration(router.net)
        numbers = {
            **verdict.numbers,
            "lam": outcome.settings.lam,
            "price_trace": [list(step) for step in outcome.trace],
            "calibration_error": mean_error(calibration),
            "calibration": calibration,
            "verdict": list(verdict.sentences),
        }
        return verdict, numbers

    def calibration(self, net: RouterNet) -> dict[str, dict[str, Any]]:
        """By arm and category: how far expected tokens are from those that came."""
        logits = _hazard_logits(net, self.texts)
        counts = np.diff(self.texts.starts)
        return calibration_error(
            expected_tokens(torch.from_numpy(logits)).numpy(),
            self.texts.accepted[:, 1:],
            self.texts.censored[:, 1:],
            np.array(list(net.config.max_draft.values())),
            arms=self.texts.arms[1:],
            categories=np.repeat(self.texts.categories, counts).tolist(),
        )

    def _replay(self, policy: Policy) -> Replayed:
        return replay(policy, self.texts, self.costs)


def mean_error(calibration: Mapping[str, Mapping[str, Any]]) -> float:
    """Tokens, over the arms."""
    return float(np.mean([found["error"] for found in calibration.values()]))


def _hazard_logits(net: RouterNet, texts: DenseTexts) -> Float[np.ndarray, "n D K"]:
    with torch.inference_mode():
        return net(texts.features.to(net.mean.device)).float().cpu().numpy()
