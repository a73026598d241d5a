"""Policies that learn within a text from what came of its rounds, without any training."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from whiflash_infer.routing.costs import CostModel, Costs
from whiflash_infer.routing.policies.base import BasePolicy, full_length, uniforms
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates


class BanditPolicy(BasePolicy):
    """UCB1 over the arms of one text (Auer et al. 2002); a round's reward is its value, committed
    tokens - lam * seconds as the cost model has them. explore: tokens that not knowing an arm is
    worth at first."""

    name = "bandit"

    def __init__(
        self, arms: tuple[str, ...], costs: Costs, *, lam: float, explore: float = 0.5
    ) -> None:
        self.arms = arms
        self.lam = lam
        self.explore = explore
        self._costs = costs
        self.memory_size = 2 * len(arms)  # of each arm, its rounds and the sum of their rewards

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        uses, rewards = np.split(memory, 2, axis=1)
        rounds = np.maximum(uses.sum(1, keepdims=True), 1.0)
        known = np.maximum(uses, 1.0)
        bonus = self.explore * np.sqrt(2 * np.log(rounds) / known)
        index = np.where(uses == 0, np.inf, rewards / known + bonus)
        return full_length(self.columns(states)[index.argmax(1)], states)

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        columns, rows = self.columns(states), np.arange(len(states))
        place = (columns == decisions.arms[:, None]).argmax(1)
        priced = np.where(decisions.num_draft > 0, place, 0)  # without drafts an arm is as plain
        prices = self._costs.table(self.arms)
        seconds = prices.seconds(states.positions, states.lags[:, columns])
        values = outcomes.committed - self.lam * seconds[rows, priced, decisions.num_draft]
        memory[rows, place] += 1
        memory[rows, len(self.arms) + place] += values


class HedgePolicy(BasePolicy):
    """Exponential weights with full information (Freund and Schapire 1997): after each round it is
    told what every arm would have gained there, which only dense labels know. In hindsight, then,
    but without a look ahead: what learning within a text could reach at best.

    accepted: of each text, by number, the label of every position from its first one on.
    """

    name = "hedge"

    def __init__(
        self,
        arms: tuple[str, ...],
        costs: CostModel,
        first_positions: dict[int, int],
        accepted: dict[int, Int[np.ndarray, "n P"]],
        *,
        lam: float,
        rate: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.arms = arms
        self.lam = lam
        self.rate = rate
        self.seed = seed
        self.memory_size = len(arms)  # the sum of each arm's gains
        self._first, self._accepted = first_positions, accepted
        self._table = costs.table(arms)
        self._longest = np.array([0, *(costs.max_draft[arm] for arm in arms[1:])])

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        weights = np.exp(self.rate * (memory - memory.max(1, keepdims=True)))
        shares = weights.cumsum(1) / weights.sum(1, keepdims=True)
        drawn = uniforms(self.seed, states, 1)
        place = np.minimum((shares < drawn).sum(1), len(self.arms) - 1)
        return full_length(self.columns(states)[place], states)

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        accepted = np.stack(
            [
                self._accepted[text][position - self._first[text]]
                for text, position in zip(
                    states.texts.tolist(), states.positions.tolist(), strict=True
                )
            ]
        )
        seconds = self._table.seconds(states.positions, np.ones_like(accepted))
        at_full = seconds[:, np.arange(len(self.arms)), self._longest]
        memory += 1 + accepted - self.lam * at_full
