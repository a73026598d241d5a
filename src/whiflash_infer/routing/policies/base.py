"""Policies that look at nothing, and what all policies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.routing.protocol import Decisions, Outcomes, Policy, RoundStates
from whiflash_infer.types import PLAIN


class BasePolicy:
    """Reads no features and remembers nothing; subclasses say otherwise."""

    name: str
    arms: tuple[str, ...]
    needs_features = False
    memory_size = 0

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return features[:, :0]

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        pass

    def columns(self, states: RoundStates) -> Int[np.ndarray, " P"]:
        """Where this policy's arms stand among those of the states."""
        return np.array([states.arms.index(arm) for arm in self.arms])


def full_length(
    columns: Int[np.ndarray, " N"], states: RoundStates, reasons: str | Sequence[str] = ""
) -> Decisions:
    """These arms at the greatest draft length that each text still has use for."""
    unknown = np.full(len(states), np.nan)
    if isinstance(reasons, str):
        reasons = [reasons] * len(states)
    num_draft = states.max_draft[np.arange(len(states)), columns]
    return Decisions(columns, num_draft, unknown, unknown, reasons)


class StaticPolicy(BasePolicy):
    """One arm for every round, at its full draft length."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self.arms = (arm,)
        self.name = PLAIN if arm == PLAIN else f"static_{arm}"

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        return full_length(np.repeat(self.columns(states), len(states)), states)


class RandomPolicy(BasePolicy):
    """A random arm and draft length each round, for the lossless checks and for logging rounds.

    A function of seed, text and position, so that a text's rounds do not depend on what is decoded
    beside it.
    """

    name = "random"

    def __init__(self, seed: int, arms: Sequence[str] | None = None) -> None:
        self.seed = seed
        self.arms = () if arms is None else tuple(arms)

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        columns = self.columns(states) if self.arms else np.arange(len(states.arms))
        drawn = uniforms(self.seed, states, 2)
        arms = columns[(drawn[:, 0] * len(columns)).astype(int)]
        longest = states.max_draft[np.arange(len(states)), arms]
        num_draft = np.minimum(1 + (drawn[:, 1] * longest).astype(int), longest)
        unknown = np.full(len(states), np.nan)
        return Decisions(arms, num_draft, unknown, unknown, [""] * len(states))


@dataclass(frozen=True, slots=True)
class TextPlan:
    """For every position of a text from `first_position` on, which arm and draft length to use."""

    first_position: int
    arms: Int[np.ndarray, " n"]
    num_draft: Int[np.ndarray, " n"]


class PlannedPolicy(BasePolicy):
    """Follows plans that were made when the whole text was known: hindsight, in engine and replay.

    plans: by the number of the text. arms: what the plans' arm numbers mean, plain first. Where
    rounding made a text longer than the one that was planned, its rest is decoded plainly.
    """

    def __init__(self, name: str, arms: Sequence[str], plans: Mapping[int, TextPlan]) -> None:
        self.name = name
        self.arms = tuple(arms)
        self.plans = plans

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        chosen = np.array(
            [
                self._look_up(text, position)
                for text, position in zip(
                    states.texts.tolist(), states.positions.tolist(), strict=True
                )
            ]
        ).reshape(-1, 2)
        arms = self.columns(states)[chosen[:, 0]]
        longest = states.max_draft[np.arange(len(states)), arms]
        unknown = np.full(len(states), np.nan)
        num_draft = np.minimum(chosen[:, 1], longest)
        return Decisions(arms, num_draft, unknown, unknown, ["planned"] * len(states))

    def _look_up(self, text: int, position: int) -> tuple[int, int]:
        plan = self.plans[text]
        row = position - plan.first_position
        if row >= len(plan.arms):
            return 0, 0
        return int(plan.arms[row]), int(plan.num_draft[row])


class ShortenedPolicy:
    """Another policy, which is told of shorter drafts than the arms can make.

    longest: drafts on a path, by arm.
    """

    def __init__(self, policy: Policy, longest: Mapping[str, int], name: str) -> None:
        self.policy, self.longest, self.name = policy, longest, name

    @property
    def arms(self) -> tuple[str, ...]:
        return self.policy.arms

    @property
    def needs_features(self) -> bool:
        return self.policy.needs_features

    @property
    def memory_size(self) -> int:
        return self.policy.memory_size

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return self.policy.read(features)

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        return self.policy.decide(beliefs, self._shortened(states), memory)

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        self.policy.observe(beliefs, self._shortened(states), decisions, outcomes, memory)

    def _shortened(self, states: RoundStates) -> RoundStates:
        caps = [self.longest.get(arm, np.iinfo(np.int64).max) for arm in states.arms]
        return replace(states, max_draft=np.minimum(states.max_draft, caps))


def uniforms(seed: int, states: RoundStates, count: int) -> Float[np.ndarray, "N _count"]:
    """Random numbers that depend on seed, text and position alone."""
    where = zip(states.texts.tolist(), states.positions.tolist(), strict=True)
    drawn = [np.random.default_rng([seed, *at]).random(count) for at in where]
    return np.array(drawn).reshape(-1, count)
