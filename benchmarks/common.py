"""What benchmarks share: turns taken in one run, medians with spread, a table, a result file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from whiflash_infer.artifacts import package_versions, write_json
from whiflash_infer.routing.costs import DeviceIdentity

RESULTS = Path(__file__).parent / "results"
console = Console()


def arguments(description: str | None, **options: Any) -> argparse.Namespace:
    """Command line with these options (name -> default) and `--threads`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=None, help="torch threads")
    for name, default in options.items():
        kind = type(default) if default is not None else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    parsed = parser.parse_args()
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    return parsed


def take_turns(
    contestants: Mapping[str, Callable[[], float]], *, repeats: int
) -> dict[str, list[float]]:
    """What each contestant returns (units a second), A B A B ..., so that drift hits all alike.

    The first turn of each is for warming up and is not counted.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in track(range(repeats + 1), description="measuring", console=console):
        for name, run in contestants.items():
            rate = run()
            if repeat:
                rates[name].append(rate)
    return rates


def rate_of(work: Callable[[], int]) -> Callable[[], float]:
    """Units a second of `work`, which returns how many units it did."""

    def timed() -> float:
        started = time.perf_counter()
        units = work()
        return units / (time.perf_counter() - started)

    return timed


def summary(rates: Mapping[str, Sequence[float]], *, baseline: str) -> dict[str, dict[str, float]]:
    """Median and quartiles of each contestant, and its median ratio to the baseline by turn."""
    table = {}
    for name, values in rates.items():
        ratios = np.array(values) / np.array(rates[baseline])
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        table[name] = {
            "median": float(middle),
            "quartile_low": float(low),
            "quartile_high": float(high),
            "ratio": float(np.median(ratios)),
            "ratio_low": float(ratios.min()),
            "ratio_high": float(ratios.max()),
        }
    return table


def show(title: str, unit: str, cells: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title=title)
    for column in ("", unit, "quartiles", "ratio", "range"):
        table.add_column(column, justify="right")
    for name, cell in cells.items():
        table.add_row(
            name,
            f"{cell['median']:,.1f}",
            f"{cell['quartile_low']:,.1f} - {cell['quartile_high']:,.1f}",
            f"{cell['ratio']:.2f}",
            f"{cell['ratio_low']:.2f} - {cell['ratio_high']:.2f}",
        )
    console.print(table)


def save(name: str, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """benchmarks/results/<name>.json, with everything needed to run it again."""
    here = DeviceIdentity.here(torch.device("cpu"), torch.get_default_dtype())
    path = RESULTS / f"{name}.json"
    write_json(
        path,
        {
            "command": " ".join(["python", *sys.argv]),
            "device": here.device,
            "threads": here.threads,
            "versions": {"torch_build": torch.__version__, **package_versions()},
            "settings": dict(settings),
            "results": dict(results),
        },
    )
    console.print(f"written to benchmarks/results/{path.name}")
