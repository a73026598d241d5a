"""Progress of anything that takes more than a few seconds: how far, how fast, how long still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)


class Advance(Protocol):
    def __call__(self, steps: int, *, produced: int = 0) -> None:
        """steps: of the bar. produced: units of the rate that these steps brought."""
        ...


@contextmanager
def rate_bar(console: Console, what: str, *, total: int | None, unit: str) -> Iterator[Advance]:
    """A bar of `total` steps (None: unknown) with a rate in units a second."""
    columns = (
        SpinnerColumn(),
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"{{task.fields[rate]:,.1f}} {unit}/s"),
        TimeRemainingColumn(),
    )
    started, done = time.perf_counter(), 0
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, rate=0.0)

        def advance(steps: int, *, produced: int = 0) -> None:
            nonlocal done
            done += produced
            seconds = time.perf_counter() - started
            progress.update(task, advance=steps, rate=done / max(seconds, 1e-9))

        yield advance
