"""Progress of anything that takes more than a few seconds: how far, how fast, how long still."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)


@runtime_checkable
class Advance(Protocol):
    def __call__(self, steps: int, *, produced: int = 0) -> None:
        """steps: of the bar. produced: units of the rate that these steps brought."""
        ...


_SECONDS_A_LINE = 30.0  # where there is no terminal to draw a bar on


@contextmanager
def rate_bar(console: Console, what: str, *, total: int | None, unit: str) -> Iterator[Advance]:
    """A bar of `total` steps (None: unknown) with a rate in units a second.

    Where output goes to a file, a line now and then in its place.
    """
    if console.is_terminal:
        yield from _bar(console, what, total, unit)
    else:
        yield _lines(console, what, total, unit)


def _bar(console: Console, what: str, total: int | None, unit: str) -> Iterator[Advance]:
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


def _lines(console: Console, what: str, total: int | None, unit: str) -> Advance:
    started = told = time.perf_counter()
    taken = done = 0

    def advance(steps: int, *, produced: int = 0) -> None:
        nonlocal told, taken, done
        taken, done, now = taken + steps, done + produced, time.perf_counter()
        if now - told < _SECONDS_A_LINE:
            return
        told, seconds = now, now - started
        left = "" if total is None or not taken else f", {_left(seconds, taken, total)} left"
        of = "" if total is None else f"/{total:,}"
        rate = f"{done / seconds:,.1f} {unit}/s"
        console.print(f"{what}: {taken:,}{of}, {rate}{left}", soft_wrap=True, highlight=False)

    return advance


def _left(seconds: float, taken: int, total: int) -> str:
    minutes, rest = divmod(round(seconds / taken * (total - taken)), 60)
    return f"{minutes}:{rest:02}"
