"""What rounds cost in a serving engine under its present load.

An engine's step reads the tokens of all its texts in one pass, so prices are lines: seconds of the
pass by tokens read, of a drafter by tokens drafted, of catching up by tokens followed. Lines start
as the profile's and follow what is measured.

* Old measurements fade with the steps of the engine. What is no longer measured (an arm that became
  too dear to be chosen) drifts back to the profile's prices, and is tried again.
* Where all measurements are of one size, they cannot tell base from slope: then both are the
  profile's, multiplied by what the measurements say.
* Drafters that were not measured cost what the profile says, less where the target is faster than
  its profile, never more: a price that is too low is corrected by the first try, a price that is
  too high by nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache, partial
from math import exp, inf
from statistics import median

import numpy as np

from whiflash_infer.routing.costs import CostModel, CostTable, dearest, fit_line
from whiflash_infer.types import DRAFTERS, PLAIN

_PRIOR_WEIGHT = 1.0  # measurements that the profile counts as
_PRIOR_SPREAD = 4.0  # sum of squared distances, in tokens, that the profile's slope counts as
_MOST = 4.0  # a measurement counts as at most so many times what was expected
_NOTHING = 1e-9  # a weight so small that it is none
_RECENT, _PRIOR_COPIES = 64, 8  # of medians


class MeasuredCosts:
    """Prices of a `RoutedProposer`'s rounds; see `whiflash_infer.routing.costs.Costs`.

    Told once a step: `step`, `route`, `outcome`, and `gap` where steps follow each other. Told once
    a call of a drafter: `catch_up`, `draft`.
    """

    def __init__(
        self,
        profile: CostModel,
        *,
        memory: int = 256,
        price: float | None = None,
        price_seconds: float = 1.0,
    ) -> None:
        """memory: steps after which a measurement counts 1 / e.

        price: tokens a second to start from, which counts as so many seconds of decoding; that of
        plain decoding by the profile when None.
        """
        alone = profile.batches[1]
        bases = {width: base for width, (base, _) in enumerate(alone.verify, start=1)}
        self.profile = profile
        self._memory = memory
        self._now = 0
        self._num_texts = 0  # of the latest step
        self._step = _Line(*fit_line(bases), memory)
        self._draft = {arm: _Line(*_draft_line(alone.draft[arm]), memory) for arm in profile.nodes}
        self._catch_up = {name: _Line(*pair, memory) for name, pair in alone.catch_up.items()}
        self._gap, self._route = _Median(alone.overhead), _Median(0.0)
        if price is None:
            price = 1.0 / float(profile.table([PLAIN]).fixed[0, 0])
        self._tokens, self._seconds = price * price_seconds, price_seconds
        self._sharing = cache(partial(_sharing, profile))
        self._tables: dict[tuple[tuple[str, ...], int], CostTable] = {}

    # --- prices ----------------------------------------------------------------------------------

    @property
    def price(self) -> float:
        """Tokens a second of all texts together, over the recent steps."""
        return self._tokens / self._seconds

    @property
    def dearest_catch_up(self) -> tuple[float, float]:
        pace = self._pace()
        return dearest([line.fit(self._now, pace) for line in self._catch_up.values()])

    def table(self, arms: Sequence[str], *, num_texts: int = 1) -> CostTable:
        """Raises: KeyError for an arm that the profile does not price."""
        key = (tuple(arms), num_texts)
        if key not in self._tables:
            self._tables[key] = self._made_table(arms, num_texts)
        return self._tables[key]

    # --- measurements ----------------------------------------------------------------------------

    def step(self, seconds: float, *, num_tokens: int, num_texts: int) -> None:
        """The engine's own part of a decoding step, from the start of the target's pass to the
        sampled tokens. Steps that read prompts too tell little of those that do not.

        num_tokens: read in the pass, of all texts: anchors and drafts.
        """
        self._now += 1
        self._num_texts = num_texts
        self._step.add(float(num_tokens), seconds, self._now)
        self._tables.clear()

    def gap(self, seconds: float) -> None:
        """Between the end of proposing and the next pass, when steps follow each other."""
        self._gap.add(seconds)
        self._tables.clear()

    @property
    def usual_gap(self) -> float:
        """An engine that had nothing to do waits longer, which is nobody's cost."""
        return self._gap.value

    def route(self, seconds: float) -> None:
        """Of deciding, for all texts of a step together."""
        self._route.add(seconds)
        self._tables.clear()

    def catch_up(self, drafter: str, seconds: float, *, num_tokens: int, num_passes: int) -> None:
        """num_tokens: followed, of all texts. num_passes: one for each text that was behind, also
        where texts shared a pass; then what is learned is a text's share of it."""
        line, weight = self._catch_up[drafter], float(num_passes)
        each = num_tokens / num_passes
        line.add(each, seconds / num_passes, self._now, scale=self._pace(), weight=weight)
        self._tables.clear()

    def draft(self, arm: str, seconds: float, *, num_draft: int, num_texts: int) -> None:
        """Of one call of an arm for so many texts, num_draft on the longest path.

        What it cost each of them is what a text pays at the present number of texts, others of
        which use other arms.
        """
        alone = seconds / num_texts / self._sharing(arm, self._num_texts or num_texts)
        self._draft[arm].add(float(num_draft), alone, self._now, scale=self._pace())
        self._tables.clear()

    def outcome(self, *, tokens: int, seconds: float) -> None:
        """tokens: that a step committed, of all texts. seconds: its whole wall time."""
        kept = exp(-1.0 / self._memory)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds

    # --- the model -------------------------------------------------------------------------------

    def _pace(self) -> float:
        """By which prices of the profile are multiplied where nothing was measured."""
        return min(1.0, self._step.ratio(self._now))

    def _made_table(self, arms: Sequence[str], num_texts: int) -> CostTable:
        base, per_token = self._step.fit(self._now)
        everybody = (base + self._gap.value + self._route.value) / num_texts
        rows = [[everybody + own for own in self._own(arm, num_texts, per_token)] for arm in arms]
        longest = max([1, *map(len, rows)])
        fixed = np.array([row + [inf] * (longest - len(row)) for row in rows])
        lags = [0.0 if arm == PLAIN else self._follow(arm)[1] for arm in arms]
        return CostTable(fixed, np.zeros_like(fixed), np.array(lags)).frozen()

    def _own(self, arm: str, num_texts: int, per_token: float) -> list[float]:
        """Seconds by draft length that this text alone causes: its catch-up's pass, its drafts, and
        reading them and the anchor."""
        if arm == PLAIN:
            return [per_token]
        share, per_pass = self._sharing(arm, num_texts), self._follow(arm)[0]
        base, per_draft = (share * part for part in self._draft[arm].fit(self._now, self._pace()))
        lengths = enumerate(self.profile.nodes[arm][1:], start=1)
        drafting = [base + per_draft * k + per_token * (1 + nodes) for k, nodes in lengths]
        return [inf, *(per_pass + seconds for seconds in drafting)]

    def _follow(self, arm: str) -> tuple[float, float]:
        return self._catch_up[DRAFTERS[arm]].fit(self._now, self._pace())


class _Line:
    """Seconds by size, base + slope * size with neither below zero, by least squares in which old
    measurements fade.

    The profile's line counts as one measurement at the mean size of the others, and holds the slope
    in so far as their sizes differ little. A level that is off is so never taken for a slope.
    """

    def __init__(self, base: float, slope: float, memory: int) -> None:
        self._profile = (base, slope)
        self._memory = memory
        self._now = 0
        self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0

    def add(
        self, size: float, seconds: float, now: int, *, scale: float = 1.0, weight: float = 1.0
    ) -> None:
        base, slope = self.fit(now, scale)
        if (expected := base + slope * size) > 0:
            seconds = min(seconds, _MOST * expected)
        self._weight += weight
        self._sizes += weight * size
        self._seconds += weight * seconds
        self._squares += weight * size * size
        self._products += weight * size * seconds

    def fit(self, now: int, scale: float = 1.0) -> tuple[float, float]:
        """Base and slope. scale: of the profile's line."""
        self._fade(now)
        base, slope = (scale * part for part in self._profile)
        if self._weight < _NOTHING:
            return base, slope
        mean, (level, expected) = self._mean(), self._levels(scale)
        held = slope * level / expected if expected > 0 else slope
        spread = max(0.0, self._squares - self._sizes * mean)
        tilt = self._products - self._seconds * mean
        slope = max(0.0, (tilt + _PRIOR_SPREAD * held) / (spread + _PRIOR_SPREAD))
        if slope * mean > level:  # then the line through the origin and the mean
            return 0.0, level / mean
        return level - slope * mean, slope

    def ratio(self, now: int) -> float:
        """What was measured against the profile."""
        self._fade(now)
        level, expected = self._levels(1.0)
        return level / expected if expected > 0 else 1.0

    def _levels(self, scale: float) -> tuple[float, float]:
        """Seconds at the mean size: all together, and by the profile alone."""
        base, slope = self._profile
        expected = scale * (base + slope * self._mean())
        total = self._seconds + _PRIOR_WEIGHT * expected
        return total / (self._weight + _PRIOR_WEIGHT), expected

    def _mean(self) -> float:
        return self._sizes / self._weight if self._weight >= _NOTHING else 0.0

    def _fade(self, now: int) -> None:
        kept = exp((self._now - now) / self._memory)
        self._now = now
        self._weight *= kept
        self._sizes *= kept
        self._seconds *= kept
        self._squares *= kept
        self._products *= kept


class _Median:
    """Of recent seconds. It starts as a few of the profile's, so that no first one counts alone."""

    def __init__(self, start: float) -> None:
        self._recent = deque([start] * _PRIOR_COPIES, maxlen=_RECENT)
        self.value = start

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)
        self.value = median(self._recent)


def _draft_line(seconds: Sequence[float]) -> tuple[float, float]:
    """Through a profile's seconds of drafting 0, 1, 2... tokens; nothing is drafted at 0."""
    return fit_line(dict(enumerate(seconds[1:], start=1)))


def _sharing(profile: CostModel, arm: str, num_texts: int) -> float:
    """A text's share of drafting for so many together, against drafting for it alone, as a profile
    has it at the arm's full length. Calls are lines between the sizes of the profile, and beyond
    the last one a share falls no more."""
    sizes = sorted(profile.batches)
    calls = [profile.batches[size].draft[arm][-1] for size in sizes]
    within = min(num_texts, sizes[-1])
    return float(np.interp(within, sizes, calls)) / within / calls[0] if calls[0] > 0 else 1.0
