"""Our policy: the arm and draft length with the greatest E[tokens] - lam * seconds.

Expected tokens come from predicted hazards, seconds from the cost model. Three things follow the
text as it goes on, each off where its setting is None:

* **Frailty.** A text may be easier or harder for a drafter than its states tell. Its cumulative
  hazards are multiplied by a factor of the text's own, for each drafter, with a gamma prior of mean
  1 and shape `frailty`: after d rejections in an exposure of x, the factor is
  (frailty + d) / (frailty + x), see `exposures`. It is the online bias correction.
* **Price.** Texts of fixed tokens are answered fastest, one by one, when a token is worth what it
  costs in that text: the price moves from `lam` to the text's own tokens a second, `online_price`
  being the seconds for which `lam` counts.
* **Drift.** Rejections and their expectations, pooled over recent texts, tell when predictions are
  off by more than texts differ anyway; the best static arm then takes over until they fit again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.nets.router import RouterNet, cumulative_hazards
from whiflash_infer.routing.costs import Costs
from whiflash_infer.routing.policies.base import BasePolicy, full_length
from whiflash_infer.routing.policies.drift import DriftAlarm
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates
from whiflash_infer.types import CHAINS, DRAFTERS, PLAIN

_ROUNDS, _TOKENS, _SECONDS, _SINCE, _LATCHED, _TALLY = range(6)  # columns of the memory


@dataclass(frozen=True, kw_only=True)
class HazardSettings:
    """lam: tokens that a second is worth.

    adaptive_length: of chains; otherwise every arm drafts its full length.
    switch_margin: tokens by which another arm must be better to be switched to; None: what catching
        up with a round's tokens costs the arm that is left, at the price.
    dwell: rounds that an arm is kept after a switch; None: one, and one more for each token that a
        switch is worth.
    latch: rounds after which a text keeps the arm that it has used most; None: never.
    frailty, online_price: see the module.
    drift: standard deviations at which the alarm goes off; None: never.
    best_static: what takes over then.
    """

    lam: float
    adaptive_length: bool = True
    switch_margin: float | None = None
    dwell: int | None = None
    latch: int | None = None
    frailty: float | None = None
    online_price: float | None = None
    drift: float | None = None
    best_static: str = PLAIN


class HazardPolicy(BasePolicy):
    name = "hazard"
    needs_features = True

    def __init__(
        self,
        net: RouterNet,
        costs: Costs,
        settings: HazardSettings,
        arms: tuple[str, ...] | None = None,
    ) -> None:
        """arms: of the network's, those to choose among, plain first; all when None."""
        self.net = net.eval()
        self.costs = costs
        self.settings = settings
        self.arms = net.config.arms if arms is None else arms
        self._rows = [net.config.arms.index(arm) - 1 for arm in self.arms[1:]]
        self.alarm = DriftAlarm(settings.drift, settings.frailty)
        drafters = [DRAFTERS[arm] for arm in self.arms[1:]]
        names = list(dict.fromkeys(drafters))
        self._drafter_of = np.array([names.index(name) for name in drafters], dtype=int)
        self._num_drafters = len(names)
        # Of each drafter the rejections and how many were expected; of each arm its uses.
        self.memory_size = _TALLY + 2 * len(names) + len(self.arms)
        self._shortest = self._shortest_drafts()

    @torch.inference_mode()
    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        """Cumulative hazards of the drafting arms by draft length, laid out flat."""
        return cumulative_hazards(self.net(features)).flatten(1)

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        columns = self._columns_of(states.arms)
        if self.alarm.is_on:
            static = np.full(len(states), states.arms.index(self.settings.best_static))
            return full_length(static, states, "drift alarm")
        price = self._price(states, memory)
        gains = self._gains(beliefs, memory)
        values = self._values(gains, states, columns, price)
        lengths = values.argmax(2)
        arms, kept = self._choose(values.max(2), states, columns, price, memory)
        rows = np.arange(len(states))
        lengths = lengths[rows, arms]
        reasons = np.where(kept, "kept", "best value").tolist()
        return Decisions(columns[arms], lengths, gains[rows, arms, lengths], price, reasons)

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        columns = self._columns_of(states.arms)
        place = (columns == decisions.arms[:, None]).argmax(1)
        rows = np.arange(len(states))
        switched = (states.last_arms >= 0) & (states.last_arms != decisions.arms)
        memory[:, _ROUNDS] += 1
        memory[:, _TOKENS] += outcomes.committed
        memory[:, _SECONDS] += outcomes.seconds
        memory[:, _SINCE] = np.where(switched, 1, memory[:, _SINCE] + 1)
        memory[rows, _TALLY + 2 * self._num_drafters + place] += 1
        drafted = (decisions.num_draft > 0) & (place > 0)
        if drafted.any():
            self._tally(beliefs, place, decisions, outcomes, memory, rows[drafted])

    # --- what follows the text -----------------------------------------------------------------

    def _tally(
        self,
        beliefs: Float[np.ndarray, "N X"],
        place: Int[np.ndarray, " N"],
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
        rows: Int[np.ndarray, " R"],
    ) -> None:
        """Rejections and exposures of the drafts that were judged. Where the text ended, nothing is
        known of the draft behind it."""
        arm = place[rows] - 1
        accepted = np.minimum(outcomes.accepted[rows], decisions.num_draft[rows])
        failed = (accepted < decisions.num_draft[rows]) & ~np.asarray(outcomes.ended)[rows]
        steps = np.diff(self._by_arm(beliefs)[rows, arm], axis=1, prepend=0.0)
        at = np.arange(steps.shape[1])
        survived = at < accepted[:, None]
        rejected = (at == accepted[:, None]) & failed[:, None]
        drafter = self._drafter_of[arm]
        column = _TALLY + 2 * drafter
        factor = self._factors(memory[rows])[np.arange(len(rows)), drafter]
        exposed = exposures(steps, survived, rejected, factor[:, None]).sum(1)
        memory[rows, column] += failed
        memory[rows, column + 1] += exposed
        chance = -np.expm1(-steps) * (survived | rejected)
        self.alarm.add(failed, chance.sum(1), (chance * (1 - chance)).sum(1))

    def _factors(self, memory: Float[np.ndarray, "N M"]) -> Float[np.ndarray, "N R"]:
        """By which each text multiplies the hazards of each drafter."""
        shape = self.settings.frailty
        if shape is None:
            return np.ones((len(memory), self._num_drafters))
        tally = memory[:, _TALLY : _TALLY + 2 * self._num_drafters].reshape(len(memory), -1, 2)
        return (shape + tally[:, :, 0]) / (shape + tally[:, :, 1])

    def _gains(
        self, beliefs: Float[np.ndarray, "N X"], memory: Float[np.ndarray, "N M"]
    ) -> Float[np.ndarray, "N P K1"]:
        hazards = self._by_arm(beliefs)
        if self.settings.frailty is not None:
            hazards = hazards * self._factors(memory)[:, self._drafter_of, None]
        longest = max([0, *(self.net.config.max_draft[arm] for arm in self.arms[1:])])
        hazards = hazards[:, :, :longest]
        gains = np.ones((len(hazards), len(self.arms), longest + 1))
        gains[:, 1:, 1:] += np.exp(-hazards).cumsum(2)
        return gains

    def _price(
        self, states: RoundStates, memory: Float[np.ndarray, "N M"]
    ) -> Float[np.ndarray, " N"]:
        lam, prior = self.settings.lam, self.settings.online_price
        price = np.full(len(memory), float(lam))
        if prior is not None:
            price = (prior * lam + memory[:, _TOKENS]) / (prior + memory[:, _SECONDS])
        return (
            price
            if states.prices is None
            else np.where(np.isnan(states.prices), price, states.prices)
        )

    def _by_arm(self, beliefs: Float[np.ndarray, "N X"]) -> Float[np.ndarray, "N D K"]:
        by_arm = beliefs.reshape(len(beliefs), len(self.net.config.max_draft), -1)
        return by_arm if len(self._rows) == by_arm.shape[1] else by_arm[:, self._rows]

    # --- the choice ------------------------------------------------------------------------------

    def _values(
        self,
        gains: Float[np.ndarray, "N P K1"],
        states: RoundStates,
        columns: Int[np.ndarray, " P"],
        price: Float[np.ndarray, " N"],
    ) -> Float[np.ndarray, "N P K1"]:
        """-inf where an arm has no such length, or the text no use for it."""
        table = self.costs.table(self.arms, num_texts=states.num_together)
        seconds = table.seconds(states.positions, states.lags[:, columns])
        longest = states.max_draft[:, columns]
        lengths = np.arange(gains.shape[2])
        least = np.minimum(self._shortest, longest)
        legal = (lengths <= longest[:, :, None]) & (lengths >= least[:, :, None])
        legal[:, 1:, 0] = False
        seconds = np.where(legal, seconds, 0.0)
        return np.where(legal, gains - price[:, None, None] * seconds, -np.inf)

    def _choose(
        self,
        by_arm: Float[np.ndarray, "N P"],
        states: RoundStates,
        columns: Int[np.ndarray, " P"],
        price: Float[np.ndarray, " N"],
        memory: Float[np.ndarray, "N M"],
    ) -> tuple[Int[np.ndarray, " N"], np.ndarray]:
        """The best arm of each text, and whether it was kept though another one is better now."""
        best = by_arm.argmax(1)
        rows = np.arange(len(best))
        is_last = columns == states.last_arms[:, None]
        last, has_last = is_last.argmax(1), is_last.any(1)
        margin, dwell = self._hysteresis(price)
        within = by_arm[rows, best] - by_arm[rows, last] <= margin
        young = (memory[:, _SINCE] > 0) & (memory[:, _SINCE] < dwell)
        # A text's first arm has not been switched to: it need not be kept.
        young &= memory[:, _SINCE] < memory[:, _ROUNDS]
        keep = has_last & (within | young) & np.isfinite(by_arm[rows, last])
        chosen = np.where(keep, last, best)
        chosen = self._latched(chosen, by_arm, memory)
        return chosen, chosen != best

    def _latched(
        self,
        chosen: Int[np.ndarray, " N"],
        by_arm: Float[np.ndarray, "N P"],
        memory: Float[np.ndarray, "N M"],
    ) -> Int[np.ndarray, " N"]:
        if self.settings.latch is None:
            return chosen
        uses = memory[:, _TALLY + 2 * self._num_drafters :]
        due = (memory[:, _LATCHED] == 0) & (memory[:, _ROUNDS] >= self.settings.latch)
        memory[due, _LATCHED] = 1 + uses[due].argmax(1)
        latched = memory[:, _LATCHED].astype(int) - 1
        usable = (latched >= 0) & np.isfinite(by_arm[np.arange(len(latched)), latched])
        return np.where(usable, latched, chosen)

    def _hysteresis(
        self, price: Float[np.ndarray, " N"]
    ) -> tuple[Float[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        """Tokens, and rounds."""
        margin, dwell = self.settings.switch_margin, self.settings.dwell
        per_pass, per_token = self.costs.dearest_catch_up
        margins = price * per_token if margin is None else np.full(len(price), margin)
        if dwell is not None:
            return margins, np.full(len(price), dwell)
        return margins, 1 + (price * (per_pass + per_token)).astype(int)

    def _shortest_drafts(self) -> Int[np.ndarray, " P"]:
        """Of each arm."""
        max_draft = self.net.config.max_draft
        adaptive = [a for a in self.arms[1:] if self.settings.adaptive_length and a in CHAINS]
        return np.array([0, *(1 if arm in adaptive else max_draft[arm] for arm in self.arms[1:])])

    @staticmethod
    @lru_cache(16)
    def _columns(arms: tuple[str, ...], wanted: tuple[str, ...]) -> Int[np.ndarray, " P"]:
        return np.array([arms.index(arm) for arm in wanted])

    def _columns_of(self, arms: tuple[str, ...]) -> Int[np.ndarray, " P"]:
        return self._columns(arms, self.arms)


def exposures(
    hazards: Float[np.ndarray, "N K"],
    survived: Bool[np.ndarray, "N K"],
    rejected: Bool[np.ndarray, "N K"],
    factor: Float[np.ndarray, "#N #K"] | float,
) -> Float[np.ndarray, "N K"]:
    """How much hazard each draft faced before its fate was known.

    hazards: cumulative ones of each draft by itself, -log(1 - h). A draft that survives faces all
    of it; one that is rejected, thought of as struck down on the way at a rate of `factor`, faces
    1 / factor - hazard / (exp(factor * hazard) - 1) on average (the E step for the factor).
    """
    rate = np.maximum(factor * hazards, 1e-6)
    struck = hazards * (1.0 / rate - 1.0 / np.expm1(np.minimum(rate, 700.0)))
    return survived * hazards + rejected * struck
