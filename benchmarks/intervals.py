"""How often 95 % intervals of a speed-up hold the true one: `python benchmarks/intervals.py`.

Made-up evaluations, since only there the truth is known. Half of the answers have 256 tokens, the
others 24 to 256; a prompt's own tokens/s vary by 25 %. Each timing has noise of 3 %, and one in
twenty is a hiccup of 30 %. Of two policies, the second is 1.4 times as fast, by prompt more or
less so (`spread`); or it is the same policy again (`A/A`). Percentile, basic and BCa come from
`scipy.stats.bootstrap`; `student` is `whiflash_infer.statistics`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import arguments, console, save
from rich.progress import track
from rich.table import Table
from scipy.stats import bootstrap

from whiflash_infer.statistics import bootstrap_ratio

PROMPTS = (4, 8, 16, 32, 96)
CASES = {"A/A": None, "spread 15 %": 0.15}
METHODS = ("percentile", "basic", "BCa")
MANY = 2_000_000


def main() -> None:
    options = arguments(__doc__, simulations=2000, resamples=1000)
    results = {
        f"{case}, {prompts} prompts": coverage(
            spread, prompts, options.simulations, options.resamples
        )
        for case, spread in CASES.items()
        for prompts in PROMPTS
    }
    show(results)
    seen = slow_downs_seen(options.simulations, options.resamples)
    console.print(f"a slow-down of 5 % among {PROMPTS[-1]} prompts is seen in {seen:.1%}")
    save("intervals", vars(options), {"coverage": results, "slow_downs_seen": seen})


def coverage(
    spread: float | None, prompts: int, simulations: int, resamples: int
) -> dict[str, dict[str, float]]:
    """Share of simulations whose interval holds the truth, and the median width of the interval."""
    rng = np.random.default_rng(0)
    truth = 1.0 if spread is None else ratio(*draw(rng, MANY, spread))
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in track(range(simulations), description=f"{prompts} prompts", console=console):
        own, base = draw(rng, prompts, spread)
        for name, interval in intervals(own, base, resamples, seed).items():
            found.setdefault(name, []).append(interval)
    return {
        name: {
            "coverage": float(np.mean([low <= truth <= high for low, high in pairs])),
            "width": float(np.median([high - low for low, high in pairs])),
        }
        for name, pairs in found.items()
    }


def slow_downs_seen(simulations: int, resamples: int) -> float:
    """Share of simulations in which a policy that got 5 % slower has its interval below 1."""
    rng, seen = np.random.default_rng(1), 0
    for seed in range(simulations):
        own, base = draw(rng, PROMPTS[-1], None)
        slower = own * np.array([1.0, 1.05])
        seen += bootstrap_ratio(slower, base, resamples=resamples, seed=seed)[1] < 1.0
    return seen / simulations


def draw(
    rng: np.random.Generator, prompts: int, spread: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of each answer, of the policy and of its baseline."""
    tokens = rng.integers(24, 257, prompts).astype(float)
    tokens[rng.random(prompts) < 0.5] = 256
    seconds = tokens / (50 * np.exp(rng.normal(0, 0.25, prompts)))
    faster = 1.0 if spread is None else 1.4 * np.exp(rng.normal(0, spread, prompts))
    own = np.stack([tokens, seconds / faster * noise(rng, prompts)], axis=1)
    return own, np.stack([tokens, seconds * noise(rng, prompts)], axis=1)


def noise(rng: np.random.Generator, prompts: int) -> np.ndarray:
    return np.exp(rng.normal(0, 0.03, prompts)) * np.where(rng.random(prompts) < 0.05, 1.3, 1.0)


def ratio(own: np.ndarray, base: np.ndarray) -> float:
    return float(ratio_of(*own.T, *base.T))


def ratio_of(
    tokens: np.ndarray,
    seconds: np.ndarray,
    base_tokens: np.ndarray,
    base_seconds: np.ndarray,
    axis: int = -1,
) -> np.ndarray:
    speed = tokens.sum(axis) / seconds.sum(axis)
    return speed / (base_tokens.sum(axis) / base_seconds.sum(axis))


def intervals(
    own: np.ndarray, base: np.ndarray, resamples: int, seed: int
) -> dict[str, tuple[float, float]]:
    """All quantiles are of the same resamples."""
    found: dict[str, tuple[float, float]] = {}
    drawn: Any = None
    for method in METHODS:
        drawn = bootstrap(
            (*own.T, *base.T),
            ratio_of,
            paired=True,
            vectorized=True,
            n_resamples=0 if drawn else resamples,
            bootstrap_result=drawn,
            method=method,
            rng=np.random.default_rng(seed),
        )
        found[method] = (drawn.confidence_interval.low, drawn.confidence_interval.high)
    low, high = bootstrap_ratio(own, base, resamples=resamples, seed=seed)
    return {**found, "student": (low, high)}


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="coverage of 95 % intervals (median width)")
    for column in ("", *METHODS, "student"):
        table.add_column(column, justify="right")
    for name, cells in results.items():
        shown = [f"{cell['coverage']:.1%} ({cell['width']:.3f})" for cell in cells.values()]
        table.add_row(name, *shown)
    console.print(table)


if __name__ == "__main__":
    main()
