from __future__ import annotations

from pathlib import Path

import pytest

from whiflash_train.data.answer_store import AnswerStore
from whiflash_train.data.engines import Answer

FIRST = Answer("a#0", "stop", ids=[5, 6, 2])
SECOND = Answer("b#0", "length", message={"role": "assistant", "content": "Grüße\u2028\n"})


def test_answers_come_back_as_they_were_put_in(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "conversations", "f")
    assert store.read() == {}
    store.append([FIRST])
    store.append([SECOND])
    assert store.read() == {"a#0": FIRST, "b#0": SECOND}


def test_answers_of_all_processes_are_read_together(tmp_path: Path) -> None:
    for process, answer in enumerate((FIRST, SECOND)):
        AnswerStore(tmp_path / "c", "f", process=process).append([answer])
    assert set(AnswerStore(tmp_path / "c", "f", process=7).read()) == {"a#0", "b#0"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_half_a_line_is_ignored_and_does_not_swallow_the_next_answer(
    tmp_path: Path, cut: int
) -> None:
    # An answer appended behind half a line would share its line, and be lost.
    store = AnswerStore(tmp_path / "c", "f")
    store.append([FIRST])
    file = next(store.folder.glob("*.jsonl"))
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: min(cut, len(whole) - 2)])
    store.append([SECOND])
    assert store.read() == {"a#0": FIRST, "b#0": SECOND}


def test_an_answer_replaces_the_failure_before_it_but_not_the_other_way(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "c", "f")
    failed = Answer("a#0", "failed", error="timeout")
    store.append([failed])
    assert store.read()["a#0"] == failed
    store.append([FIRST])
    store.append([failed])
    assert store.read()["a#0"] == FIRST


def test_the_leftover_of_another_run_is_not_read_and_goes_with_the_next_success(
    tmp_path: Path,
) -> None:
    AnswerStore(tmp_path / "c", "old").append([FIRST])
    store = AnswerStore(tmp_path / "c", "new")
    assert store.read() == {}
    store.append([SECOND])
    store.remove()
    assert list(tmp_path.iterdir()) == []
