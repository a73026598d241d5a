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

    Where output goes to a file, a line now and then and one at the end in its place.
    """
    if console.is_terminal:
        yield from _bar(console, what, total, unit)
    else:
        lines = _Lines(console, what, total, unit)
        yield lines.advance
        lines.tell()


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


class _Lines:
    def __init__(self, console: Console, what: str, total: int | None, unit: str) -> None:
        self._console, self._what, self._total, self._unit = console, what, total, unit
        self._started = self._told = time.perf_counter()
        self._taken = self._done = 0

    def advance(self, steps: int, *, produced: int = 0) -> None:
        self._taken, self._done = self._taken + steps, self._done + produced
        now = time.perf_counter()
        if now - self._told >= _SECONDS_A_LINE:
            self._told = now
            self.tell()

    def tell(self) -> None:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        taken, total = self._taken, self._total
        of = "" if total is None else f"/{total:,}"
        left = ""
        if total is not None and 0 < taken < total:
            left = f", {_clock(seconds / taken * (total - taken))} left"
        rate = f"{self._done / seconds:,.1f} {self._unit}/s"
        told = f"{self._what}: {taken:,}{of}, {rate}{left}"
        self._console.print(told, soft_wrap=True, highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
