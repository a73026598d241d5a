"""What an evaluation says where decoding accepts less than the training pass would."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from whiflash_train.evaluation.side_by_side import gaps, show_side_by_side, validated


def report(drafts: list[int], decoded: list[float], passed: list[float]) -> dict[str, Any]:
    shares = {"drafts": drafts, "decoded": decoded, "training_pass": passed}
    return {"ar": shares | {"validation": [0.9, 0.8, 0.7]}}


def test_a_slot_that_decoding_accepts_less_often_is_told_with_both_shares() -> None:
    (told,) = gaps(report([50, 50, 50], [0.8, 0.4, 0.3], [0.8, 0.6, 0.35]))
    assert "ar drafter, slot 2: 40% of 50 drafts" in told
    assert "60% are right" in told


@pytest.mark.parametrize(
    ("drafts", "decoded", "passed"),
    [
        ([29, 29], [0.2, 0.1], [0.8, 0.7]),  # too few
        ([50, 50], [0.9, 0.8], [0.8, 0.6]),  # more than the training pass says
        ([50, 50], [0.75, 0.5], [0.8, 0.58]),  # near-ties
    ],
)
def test_few_drafts_and_small_differences_are_not_told(
    drafts: list[int], decoded: list[float], passed: list[float]
) -> None:
    assert gaps(report(drafts, decoded, passed)) == []


def test_validation_is_read_in_the_order_of_slots_and_may_be_absent() -> None:
    metrics = {"step": 9.0, "val/accepted_2": 0.5, "val/tau": 2.0, "val/accepted_1": 0.7}
    assert validated({"metrics": metrics}) == [0.7, 0.5]
    assert validated({}) == []


def test_all_three_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    show_side_by_side(Console(width=100), report([50, 50], [0.8, 0.5], [0.8, 0.52]))
    told = " ".join(capsys.readouterr().out.split())
    assert "decoded │ 80% │ 50%" in told
    assert "training pass, same rounds │ 80% │ 52%" in told
    assert "validation, every anchor │ 90% │ 80%" in told
    assert "warning" not in told
