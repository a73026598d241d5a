"""Noticing that a router's predictions no longer fit what happens."""

from __future__ import annotations

from math import sqrt

import numpy as np
from jaxtyping import Float, Shaped

_WINDOW = 400.0  # expected rejections that count; older ones fade
_OF_A_TEXT = 20.0  # expected rejections of one text, about


class DriftAlarm:
    """Rejections against what was expected, pooled over recent rounds of all texts.

    Where predictions are right, their difference is a martingale, whose variance is that of the
    trials, h * (1 - h) each. Texts differ from each other beyond that, by a factor of variance
    1 / frailty that all rounds of a text share. threshold: standard deviations at which the alarm
    goes on; it goes off again at half of that. None: never on.
    """

    def __init__(self, threshold: float | None, frailty: float | None) -> None:
        self._threshold = threshold
        self._spread = 0.0 if frailty is None else 1.0 / frailty
        self._excess, self._expected, self._variance = 0.0, 0.0, 0.0
        self.is_on = False
        self.times = 0

    @property
    def deviations(self) -> float:
        """How far rejections are from what was expected, positive where there are more."""
        between = self._spread * self._expected * min(self._expected, _OF_A_TEXT)
        return self._excess / sqrt(max(self._variance + between, 1.0))

    def add(
        self,
        failed: Shaped[np.ndarray, " N"],
        expected: Float[np.ndarray, " N"],
        variance: Float[np.ndarray, " N"],
    ) -> None:
        """Rounds: whether a draft was rejected, the chances of it summed over the drafts that were
        judged, and the variance of those trials."""
        if self._threshold is None:
            return
        fade = max(0.0, 1.0 - float(expected.sum()) / _WINDOW)
        self._expected = fade * self._expected + float(expected.sum())
        self._variance = fade * self._variance + float(variance.sum())
        self._excess = fade * self._excess + float(failed.sum()) - float(expected.sum())
        limit = self._threshold / 2 if self.is_on else self._threshold
        was_on, self.is_on = self.is_on, abs(self.deviations) > limit
        self.times += self.is_on and not was_on
