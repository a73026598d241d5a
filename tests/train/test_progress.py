from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from whiflash_train.progress import rate_bar


def test_in_a_file_there_is_a_line_now_and_then_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the start, then each step once more where it is told of, and the end
    clock = iter([0.0, 20.0, 40.0, 40.0, 50.0, 100.0, 100.0, 125.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    written = io.StringIO()
    with rate_bar(Console(file=written), "answering", total=400, unit="tokens") as advance:
        for steps in (50, 50, 50, 250):  # lines are due at 40 and at 100 seconds
            advance(steps, produced=40 * steps)
    assert written.getvalue().splitlines() == [
        "answering: 100/400, 100.0 tokens/s, 2:00 left",
        "answering: 400/400, 160.0 tokens/s",
        "answering: 400/400, 128.0 tokens/s",
    ]


def test_on_a_terminal_there_is_a_bar() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with rate_bar(console, "answering", total=2, unit="tokens") as advance:
        advance(2, produced=10)
    assert "answering" in written.getvalue()
    assert "2/2" in written.getvalue()
