"""What a sweep found, as tables, pictures and files: at its end, or at any time by
`python -m whiflash_train.tradeoff <sweep folder>`.

Exit status: 0 done, 2 something to mend (one line says what).
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whiflash_infer.artifacts import write_whole
from whiflash_infer.errors import UserError
from whiflash_train.sweep_plots import curve_html, curve_png, matrix_html, matrix_png
from whiflash_train.sweep_results import (
    Cell,
    Point,
    Run,
    Sweep,
    curve_points,
    differs_in_training_data,
    read_sweep,
    reference_points,
    shift_matrix,
)

_USER_ERROR = 2
_REACHED = ("val/tokens_per_s", "val/tau", "val/real_tau", "val/loss", "step", "minutes")
_EXTRA = ("calibration_error", "regret", "share_of_oracle", "share_of_ceiling")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_train.tradeoff",
        description="Tables and pictures of a sweep, from the artefacts that its runs left.",
    )
    parser.add_argument("folder", type=Path, help="the sweep's folder, which holds 0/, 1/, ...")
    folder = parser.parse_args(arguments).folder
    try:
        summarise(read_sweep(folder), Console())
    except UserError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return _USER_ERROR
    return 0


def summarise(sweep: Sweep, console: Console) -> list[Path]:
    """Print the tables, write the files of a router sweep into its folder; which ones."""
    written: list[Path] = []
    console = Console(file=console.file, width=max(console.width, 132))
    if sweep.runs:
        _print_runs(sweep, console)
    if sweep.runs and sweep.task == "router":
        written += _write_curve(sweep)
        if differs_in_training_data(sweep.runs):
            written += _write_shift(sweep, console)
    for name, reason in sweep.failed.items():
        console.print(Text(f"left out: run {name}: {reason}"), soft_wrap=True)
    for path in written:
        console.print(Text(f"written: {path}"), soft_wrap=True)
    return written


def _print_runs(sweep: Sweep, console: Console) -> None:
    router = sweep.task == "router"
    titles, rows = _router_cells(sweep.runs) if router else _reached_cells(sweep.runs)
    table = Table(title=Text(f"{sweep.task}: {len(sweep.runs)} runs in {sweep.folder}"))
    table.add_column("run")
    table.add_column("overrides", overflow="fold")
    for title in titles:
        table.add_column(title, justify="right")
    for run, cells in zip(sweep.runs, rows, strict=True):
        table.add_row(Text(run.name), Text(run.label), *cells)
    console.print(table)


def _router_cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    points = curve_points(runs)
    fastest = max(p.tokens_per_s for p in points)
    titles = ["price lam", "replayed tokens/s", "tokens/round", "ms/round", "switches/100 rounds"]
    rows = [
        [
            f"{p.lam:.2f}{' auto' if p.automatic else ''}",
            f"{'[bold]' if p.tokens_per_s == fastest else ''}{p.tokens_per_s:.2f}",
            f"{p.tau:.3f}",
            f"{1000 * p.seconds_per_round:.2f}",
            f"{p.switches_per_100_rounds:.1f}",
        ]
        for p in points
    ]
    return titles, rows


def _reached_cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Of drafters, what the kept checkpoints reached."""
    found = [run.manifest.get("metrics", {}) for run in runs]
    titles = [name for name in _REACHED if any(name in metrics for metrics in found)]
    rows = [[f"{m[name]:.4g}" if name in m else "" for name in titles] for m in found]
    return titles, rows


def _write_curve(sweep: Sweep) -> list[Path]:
    points, references = curve_points(sweep.runs), reference_points(sweep.runs)
    extra = {run.name: run.manifest["replay"] for run in sweep.runs}
    header = ["run", "overrides", "policy", "lam", "automatic", "tokens_per_s", "tokens_per_round"]
    header += ["seconds_per_round", "switches_per_100_rounds", *_EXTRA]
    rows = [_curve_row(p, extra.get(p.run, {})) for p in (*points, *references)]
    files = {
        "csv": _as_csv([header, *rows]),
        "html": curve_html(points, references).encode(),
        "png": curve_png(points, references),
    }
    return _write(sweep.folder, "tradeoff", files)


def _curve_row(point: Point, replay: dict[str, object]) -> list[object]:
    return [
        point.run,
        point.overrides,
        point.policy,
        point.lam,
        str(point.automatic).lower(),
        point.tokens_per_s,
        point.tau,
        point.seconds_per_round,
        point.switches_per_100_rounds,
        *(replay.get(key) for key in _EXTRA),
    ]


def _write_shift(sweep: Sweep, console: Console) -> list[Path]:
    cells = shift_matrix(sweep.runs)
    _print_shift(cells, console)
    header = ["trained_on", "tested_on", "gain", "best_static", "relation", "runs"]
    rows = [
        [c.trained_on, c.tested_on, c.gain, c.best_static, c.relation, c.num_runs] for c in cells
    ]
    files = {
        "csv": _as_csv([header, *rows]),
        "html": matrix_html(cells).encode(),
        "png": matrix_png(cells),
    }
    return _write(sweep.folder, "shift", files)


def _print_shift(cells: Sequence[Cell], console: Console) -> None:
    table = Table(title="gain of the router over the best static arm, by what it is tested on")
    table.add_column("trained on")
    columns = list(dict.fromkeys(cell.tested_on for cell in cells))
    for column in columns:
        table.add_column(Text(column), justify="right")
    for row in dict.fromkeys(cell.trained_on for cell in cells):
        gains = {c.tested_on: f"{100 * c.gain:+.1f} %" for c in cells if c.trained_on == row}
        table.add_row(Text(row), *(gains.get(column, "") for column in columns))
    console.print(table)


def _as_csv(rows: Iterable[Sequence[object]]) -> bytes:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def _write(folder: Path, name: str, files: dict[str, bytes]) -> list[Path]:
    written = []
    for suffix, content in files.items():
        path = folder / f"{name}.{suffix}"
        write_whole(path, content)
        written.append(path)
    return written


if __name__ == "__main__":
    raise SystemExit(main())
