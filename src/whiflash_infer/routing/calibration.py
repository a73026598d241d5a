"""How far a router's hazards and expected tokens can be believed: temperatures, and errors.

Dimensions besides the legend: D drafting arms, in the order of the network; M of N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import minimize_scalar

_BOUNDS = (-2.0, 2.0)  # of the logarithm of a temperature


def fit_temperatures(
    hazard_logits: Float[np.ndarray, "N D K"],
    accepted: Int[np.ndarray, "N D"],
    censored: Bool[np.ndarray, "N D"],
    max_draft: Int[np.ndarray, " D"],
) -> Float[np.ndarray, " D"]:
    """The temperature of each arm under which hazard_logits / T make the accepted lengths likeliest
    (`nets.router.hazard_loss`); 1 for an arm of which nothing was observed."""
    temperatures = np.ones(len(max_draft))
    step = np.arange(hazard_logits.shape[-1])
    for arm, longest in enumerate(max_draft):
        lengths = accepted[:, arm, None]
        failed = (step == lengths) & ~censored[:, arm, None]
        observed = ((step < lengths) | failed) & (step < longest)
        if observed.any():
            logits = hazard_logits[:, arm][observed].astype(np.float64)
            temperatures[arm] = _temperature(logits, failed[observed])
    return temperatures


def _temperature(logits: Float[np.ndarray, " M"], failed: Bool[np.ndarray, " M"]) -> float:
    def loss(log_temperature: float) -> float:
        scaled = logits / np.exp(log_temperature)
        return float((np.logaddexp(0.0, scaled) - scaled * failed).mean())

    found: Any = minimize_scalar(loss, bounds=_BOUNDS, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))


def calibration_error(
    expected_tokens: Float[np.ndarray, "N D K1"],
    accepted: Int[np.ndarray, "N D"],
    censored: Bool[np.ndarray, "N D"],
    max_draft: Int[np.ndarray, " D"],
    *,
    arms: Sequence[str],
    num_bins: int = 10,
    categories: Sequence[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """By arm: how far the expected tokens of its longest draft are from those that came.

    error: rows in bins of equal counts by what was expected, mean |expected - observed| of bins.
    bias: expected - observed, over all rows. rows: how many were observed to their end; those that
    the text's end cut short are left out. by_category: the same of each category's rows, where
    `categories` gives one for every row.
    """
    found = {}
    for column, arm in enumerate(arms):
        longest = int(max_draft[column])
        known = ~censored[:, column] | (accepted[:, column] >= longest)
        expected = expected_tokens[:, column, longest].astype(np.float64)
        observed = 1.0 + np.minimum(accepted[:, column], longest)
        found[arm] = _error(expected[known], observed[known], num_bins)
        if categories is not None:
            labels = np.array(categories)
            rows = {name: known & (labels == name) for name in sorted(set(categories))}
            found[arm]["by_category"] = {
                name: _error(expected[mine], observed[mine], num_bins)
                for name, mine in rows.items()
            }
    return found


def _error(
    expected: Float[np.ndarray, " M"], observed: Float[np.ndarray, " M"], num_bins: int
) -> dict[str, Any]:
    if not len(expected):
        return {"error": 0.0, "bias": 0.0, "rows": 0}
    differences = (expected - observed)[expected.argsort(kind="stable")]
    bins = np.array_split(differences, min(num_bins, len(differences)))
    error = sum(abs(float(part.sum())) for part in bins) / len(differences)
    return {"error": error, "bias": float(differences.mean()), "rows": len(differences)}
