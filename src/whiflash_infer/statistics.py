"""Ratios of pooled throughput, and how sure they are.

A table holds tokens and seconds of each answer. Two policies (or two runs) have answered the same
prompts, so their tables are drawn together: what makes a prompt slow for both cancels.

An interval is 95 %, Student's t on the log of the ratio, with the standard error from a bootstrap.
Quantiles of the bootstrap (percentile, basic, BCa) cover too seldom with few prompts: see
docs/evaluation.md, "Intervals".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from whiflash_infer.types import PLAIN

STATIC = "static_"  # how policies begin that run one drafting arm in every round
_UNKNOWN = [0.0, 0.0]


def tokens_per_second(table: Float[np.ndarray, "n 2"]) -> float:
    """Pooled over answers; 0 where no time was taken."""
    tokens, seconds = table.sum(0).tolist()
    return tokens / seconds if seconds else 0.0


def bootstrap_ratio(
    own: Float[np.ndarray, "n 2"],
    base: Float[np.ndarray, "n 2"],
    *,
    resamples: int,
    seed: int,
    clusters: Sequence[str] | None = None,
) -> list[float]:
    """95 % interval of pooled throughput over that of `base`, answers drawn in pairs.

    clusters: of each answer; those of one cluster (turns of a conversation) are drawn together.
    One cluster alone gives a point, which says nothing; no throughput at all gives two zeros.
    """
    return _interval(np.stack([own, base]), resamples, seed, clusters)


def paired_gain(
    own: Float[np.ndarray, "n 2"],
    base: Float[np.ndarray, "n 2"],
    *,
    resamples: int,
    seed: int,
    clusters: Sequence[str] | None = None,
) -> list[float]:
    """The ratio, and both ends of its interval."""
    tables = np.stack([own, base])
    return [_ratio(tables), *_interval(tables, resamples, seed, clusters)]


def paired_change(
    own: Float[np.ndarray, "n 2"],
    base: Float[np.ndarray, "n 2"],
    own_before: Float[np.ndarray, "n 2"],
    base_before: Float[np.ndarray, "n 2"],
    *,
    resamples: int,
    seed: int,
    clusters: Sequence[str] | None = None,
) -> list[float]:
    """The ratio of own/base to what it was before, and both ends of its interval."""
    tables = np.stack([own, base, own_before, base_before])
    return [_ratio(tables), *_interval(tables, resamples, seed, clusters)]


def gains(
    tables: Mapping[str, Float[np.ndarray, "n 2"]],
    categories: Sequence[str],
    clusters: Sequence[str],
    *,
    resamples: int,
    seed: int,
) -> dict[str, dict[str, dict[str, object]]]:
    """Of each policy that may change arms over each static one: ratio, low and high.

    tables: by policy, all in one order of answers, which categories and clusters share.
    """
    statics = [name for name in tables if name.startswith(STATIC)]
    return {
        policy: {
            static: _gains_over(
                own, tables[static], categories, clusters, resamples=resamples, seed=seed
            )
            for static in statics
        }
        for policy, own in tables.items()
        if not is_static(policy)
    }


def is_static(policy: str) -> bool:
    """Also of a repetition, `plain#2`."""
    return policy.startswith(STATIC) or policy.partition("#")[0] == PLAIN


def _gains_over(
    own: Float[np.ndarray, "n 2"],
    static: Float[np.ndarray, "n 2"],
    categories: Sequence[str],
    clusters: Sequence[str],
    *,
    resamples: int,
    seed: int,
) -> dict[str, object]:
    found = {}
    for name in sorted(set(categories)):
        part = [row for row, category in enumerate(categories) if category == name]
        theirs = [clusters[row] for row in part]
        found[name] = paired_gain(
            own[part], static[part], resamples=resamples, seed=seed, clusters=theirs
        )
    overall = paired_gain(own, static, resamples=resamples, seed=seed, clusters=clusters)
    return {"overall": overall, "by_category": found}


def _interval(
    tables: Float[np.ndarray, "k n 2"], resamples: int, seed: int, clusters: Sequence[str] | None
) -> list[float]:
    units = tables if clusters is None else _summed(tables, clusters)
    ratio, (num_tables, num_units, _) = _ratio(units), units.shape
    if ratio == 0.0 or num_units < 2:
        return _UNKNOWN.copy() if ratio == 0.0 else [ratio, ratio]
    drawn = _times_drawn(num_units, resamples, seed)
    sums = np.stack([drawn @ units[table] for table in range(num_tables)])
    ratios = _quotient(sums)
    logs = np.log(ratios[np.isfinite(ratios) & (ratios > 0)])
    if len(logs) < 2:
        return _UNKNOWN.copy()
    # a bootstrap of n draws has (n - 1) / n of the variance
    error = float(logs.std()) * (num_units / (num_units - 1)) ** 0.5
    reach = float(np.exp(stdtrit(num_units - 1, 0.975) * error))
    return [ratio / reach, ratio * reach]


def _times_drawn(num_units: int, resamples: int, seed: int) -> Float[np.ndarray, "r n"]:
    """How often each resample holds each unit."""
    drawn = np.random.default_rng(seed).integers(0, num_units, (resamples, num_units))
    of_resample = drawn + num_units * np.arange(resamples)[:, None]
    counts = np.bincount(of_resample.reshape(-1), minlength=resamples * num_units)
    return counts.reshape(resamples, num_units).astype(float)


def _summed(
    tables: Float[np.ndarray, "k n 2"], clusters: Sequence[str]
) -> Float[np.ndarray, "k c 2"]:
    number_of = {name: number for number, name in enumerate(dict.fromkeys(clusters))}
    cluster_of = np.array([number_of[name] for name in clusters], dtype=int)
    is_in = cluster_of == np.arange(len(number_of))[:, None]
    return is_in.astype(float) @ tables


def _ratio(tables: Float[np.ndarray, "k n 2"]) -> float:
    """0 where it is not defined."""
    ratio = float(_quotient(tables.sum(1)))
    return ratio if np.isfinite(ratio) else 0.0


def _quotient(sums: Float[np.ndarray, "k *N 2"]) -> Float[np.ndarray, "*N"]:
    """Throughput of the first table over that of the second; of four tables, that over the same
    of the last two."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = sums[..., 0] / sums[..., 1]
        pairs = rates[::2] / rates[1::2]
        return np.asarray(pairs[0] if len(pairs) == 1 else pairs[0] / pairs[1])
