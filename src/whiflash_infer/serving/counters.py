"""What is counted while drafters serve: plain numbers, which logs and metrics read."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import sub
from typing import Any

LAG_EDGES = (0, *(1 << power for power in range(13)))  # 0, 1, 2, 4, ..., 4096
TARGET_PHASE = "target"


@dataclass
class Histogram:
    """How many values fell into each bin, and the sum of those; a bin ends with its edge, the last
    one has no end."""

    edges: tuple[int, ...]
    counts: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.edges) + 1)
        self.sums = self.sums or [0] * (len(self.edges) + 1)

    def add(self, values: Iterable[int]) -> None:
        for value in values:
            index = bisect_left(self.edges, value)
            self.counts[index] += 1
            self.sums[index] += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def sum(self) -> int:
        return sum(self.sums)

    def copy(self) -> Histogram:
        return Histogram(self.edges, list(self.counts), list(self.sums))

    def since(self, before: Histogram) -> list[tuple[int, int]]:
        """Of each bin, how many values came after `before` was copied, and their sum."""
        counts = map(sub, self.counts, before.counts)
        return list(zip(counts, map(sub, self.sums, before.sums), strict=True))

    def named_counts(self) -> dict[str, int]:
        """By the last value of each bin."""
        names = [*map(str, self.edges), "more"]
        return dict(zip(names, self.counts, strict=True))


@dataclass
class Counters:
    """Those of one proposer. What is kept by arm stands under the arm of the round.

    rounds: decisions, one for each row and step. ended: rounds of which the outcome is known; the
    rest were cut off. drafted, accepted, committed: tokens, `committed` with the bonus token.
    fallbacks: rows that got no drafts although some were asked for, by reason. seconds: by phase;
    `target` is the engine's own part. lags: tokens that a chosen drafter had to catch up on.

    The rest are gauges, except `feature_evictions`, which only grows. requests: states alive;
    memory: bytes, by part; price: tokens a second that the policy reckons with, NaN before there is
    one; feature_tokens: tokens whose features are kept.
    """

    steps: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    committed: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    lags: Histogram = field(default_factory=lambda: Histogram(LAG_EDGES))
    requests: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    price: float = math.nan
    feature_tokens: int = 0
    feature_evictions: int = 0

    def end_round(self, arm: str, *, accepted: int, committed: int) -> None:
        self.ended[arm] += 1
        self.accepted[arm] += accepted
        self.committed[arm] += committed

    def spend(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def arm_ratio(self) -> dict[str, float]:
        """Share of the rounds that each arm was chosen for."""
        total = self.rounds.total()
        return {arm: number / total for arm, number in self.rounds.items() if total}

    def acceptance_length(self) -> float:
        """Tokens that a round committed, on average; NaN before one has ended."""
        return _ratio(self.committed.total(), self.ended.total())

    def acceptance_lengths(self) -> dict[str, float]:
        """The same by arm, of those with a round that ended."""
        return {arm: _ratio(self.committed[arm], number) for arm, number in self.ended.items()}

    def summary(self) -> dict[str, Any]:
        """All of it as JSON; what is not known yet is None."""
        return {
            "steps": self.steps,
            "requests": self.requests,
            "acceptance_length": _finite(self.acceptance_length()),
            "arms": {arm: self._of_arm(arm) for arm in self.rounds},
            "switches": self.switches,
            "fallbacks": dict(self.fallbacks),
            "seconds": dict(self.seconds),
            "proposer_seconds_per_step": _finite(_ratio(self._own_seconds(), self.steps)),
            "lags": {
                "mean": _finite(_ratio(self.lags.sum, self.lags.count)),
                "counts": self.lags.named_counts(),
            },
            "price": _finite(self.price),
            "memory": dict(self.memory),
            "feature_tokens": self.feature_tokens,
            "feature_evictions": self.feature_evictions,
        }

    def _of_arm(self, arm: str) -> dict[str, Any]:
        return {
            "share": self.arm_ratio()[arm],
            "rounds": self.rounds[arm],
            "drafted": self.drafted[arm],
            "accepted": self.accepted[arm],
            "committed": self.committed[arm],
            "acceptance_length": _finite(_ratio(self.committed[arm], self.ended[arm])),
        }

    def _own_seconds(self) -> float:
        return math.fsum(spent for phase, spent in self.seconds.items() if phase != TARGET_PHASE)


def _ratio(part: int | float, whole: int) -> float:
    return part / whole if whole else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
