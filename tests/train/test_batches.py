from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from datasets import Dataset

from whiflash_train.batches import (
    BatchPlan,
    DrafterBatch,
    TrainingBatches,
    collate,
    draw_anchors,
    validation_batches,
)

PAD = 99


def conversations() -> Dataset:
    """Rows of 4..10 tokens that all begin with their row number; answers start at position 2."""
    lengths = [4 + (5 * i) % 7 for i in range(11)]
    ids = [[i, *range(10, 9 + n)] for i, n in enumerate(lengths)]
    masks = [[0, 0, *[1] * (n - 2)] for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def training(*, start: int, seed: int = 0) -> TrainingBatches:
    return TrainingBatches(
        conversations(),
        batch_size=3,
        num_anchors=2,
        seed=seed,
        start_step=start,
        num_steps=9,
        pad_id=PAD,
    )


def content(batch: DrafterBatch) -> dict[str, list]:
    return {f.name: getattr(batch, f.name).tolist() for f in fields(batch)}


@pytest.mark.parametrize(("count", "batch_size"), [(11, 3), (12, 3), (2, 5), (90, 4)])
def test_every_row_comes_once_an_epoch(count: int, batch_size: int) -> None:
    plan = BatchPlan([7 * i % 13 for i in range(count)], batch_size=batch_size, seed=0)
    size = -(-count // batch_size)
    for epoch in range(3):
        batches = [plan.rows(epoch * size + i) for i in range(size)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert max(len(rows) for rows in batches) <= batch_size


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    lengths = [7 * i % 13 for i in range(40)]
    plan = BatchPlan(lengths, batch_size=4, seed=1)
    forward = [plan.rows(step).tolist() for step in range(25)]
    jumping = BatchPlan(lengths, batch_size=4, seed=1)
    for step in [24, 3, 11, 0, 10, 9, 24]:
        assert jumping.rows(step).tolist() == forward[step]
    other = BatchPlan(lengths, batch_size=4, seed=2)
    assert [other.rows(step).tolist() for step in range(25)] != forward
    assert forward[:10] != forward[10:20]


@pytest.mark.parametrize(
    ("supervised", "expected"),
    [
        ("..#####", [2, 3, 4, 5]),  # the last token has no successor
        ("..##..#.##", [2, 8]),  # the end of an answer has none inside it
        ("####", [1, 2]),  # position 0 has no features before it
        ("##", []),
        ("...#", []),
        (".", []),
        ("....", []),
    ],
)
def test_anchors_are_answer_tokens_that_an_answer_token_follows(
    supervised: str, expected: list[int]
) -> None:
    mask = np.array([c == "#" for c in supervised])
    assert draw_anchors(mask, None, None).tolist() == expected
    assert draw_anchors(mask, 10, np.random.default_rng(0)).tolist() == expected


def test_anchors_are_drawn_without_replacement_in_order_and_all_alike_often() -> None:
    mask, rng = np.array([False, False, *[True] * 9]), np.random.default_rng(0)
    draws = [draw_anchors(mask, 3, rng).tolist() for _ in range(800)]
    assert all(draw == sorted(set(draw)) and len(draw) == 3 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=10)
    assert counts[:2].tolist() == [0, 0]
    assert (abs(counts[2:10] - 300) < 75).all()  # five standard deviations


def test_rows_of_uneven_length_are_padded_on_the_right() -> None:
    rows = Dataset.from_dict(
        {
            "input_ids": [[10, 11, 12, 13, 14], [20, 21], [30, 31, 32, 33]],
            "loss_mask": [[0, 0, 1, 1, 1], [0, 0], [0, 1, 1, 0]],
        }
    )
    batch = collate(rows, np.array([0, 2, 1]), num_anchors=None, rng=None, pad_id=PAD)
    assert content(batch) == {
        "ids": [[10, 11, 12, 13, 14], [30, 31, 32, 33, PAD], [20, 21, PAD, PAD, PAD]],
        "lengths": [5, 4, 2],
        "supervised": [
            [False, False, True, True, True],
            [False, True, True, False, False],
            [False] * 5,
        ],
        "anchors": [[2, 3], [1, 1], [1, 1]],
        "anchor_mask": [[True, True], [True, False], [False, False]],
        "rows": [0, 2, 1],
    }


def test_a_batch_without_anchors_still_has_one_masked_column() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 0]]})
    batch = collate(rows, np.array([0]), num_anchors=4, rng=np.random.default_rng(0), pad_id=PAD)
    assert (batch.anchors.tolist(), batch.anchor_mask.tolist()) == ([[1]], [[False]])


def test_a_run_resumed_at_step_5_sees_what_a_straight_run_sees() -> None:
    straight = [content(batch) for batch in training(start=0)]
    resumed = [content(batch) for batch in training(start=5)]
    assert len(straight) == 9
    assert resumed == straight[5:]
    assert [content(batch) for batch in training(start=0, seed=1)] != straight


def test_validation_covers_every_row_and_every_anchor_once() -> None:
    batches = validation_batches(conversations(), batch_size=4, pad_id=PAD)
    assert sorted(torch.cat([b.rows for b in batches]).tolist()) == list(range(11))
    lengths = torch.cat([b.lengths for b in batches]).tolist()
    assert lengths == sorted(lengths)
    for batch in batches:
        assert batch.anchor_mask.sum(1).tolist() == (batch.lengths - 3).tolist()
