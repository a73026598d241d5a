from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from whiflash_train.batches import (
    WHOLE,
    BatchPlan,
    DrafterBatch,
    Share,
    TrainingBatches,
    collate,
    cut_batches,
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


def training(
    *, start: int, seed: int = 0, share: Share = WHOLE, tokens: int | None = None
) -> TrainingBatches:
    return TrainingBatches(
        conversations(),
        batch_size=3,
        tokens_per_batch=tokens,
        num_anchors=2,
        seed=seed,
        start_step=start,
        num_steps=9,
        pad_id=PAD,
        share=share,
    )


def plan_of(
    lengths: list[int], *, seed: int, batch_size: int = 4, tokens: int | None = None
) -> BatchPlan:
    return BatchPlan(lengths, batch_size=batch_size, tokens_per_batch=tokens, seed=seed)


def realistic_lengths(count: int) -> np.ndarray:
    """Log-normal, as those of chat data: half below 270 tokens, one in forty above 1,200."""
    drawn = np.random.default_rng(0).lognormal(mean=5.6, sigma=0.75, size=count)
    return drawn.clip(24, 2048).astype(int)


def padding(batches: list[np.ndarray], lengths: np.ndarray) -> float:
    """Share of the tokens that goes through the networks for nothing."""
    area = sum(len(rows) * lengths[rows].max() for rows in batches)
    return 1 - lengths[np.concatenate(batches)].sum() / area


def content(batch: DrafterBatch) -> dict[str, Any]:
    parts: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: None if part is None else part.tolist() for name, part in parts.items()}


@pytest.mark.parametrize(("count", "batch_size"), [(11, 3), (12, 3), (2, 5), (90, 4)])
def test_every_row_comes_once_an_epoch(count: int, batch_size: int) -> None:
    plan = plan_of([7 * i % 13 for i in range(count)], batch_size=batch_size, seed=0)
    size = -(-count // batch_size)
    for epoch in range(3):
        batches = [plan.rows(epoch * size + i) for i in range(size)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert max(len(rows) for rows in batches) <= batch_size


@pytest.mark.parametrize("tokens", [None, 30])
def test_a_batch_depends_on_seed_and_step_alone(tokens: int | None) -> None:
    lengths = [7 * i % 13 for i in range(40)]
    plan = plan_of(lengths, tokens=tokens, seed=1)
    forward = [plan.rows(step).tolist() for step in range(25)]
    jumping = plan_of(lengths, tokens=tokens, seed=1)
    for step in [24, 3, 11, 0, 10, 9, 24]:
        assert jumping.rows(step).tolist() == forward[step]
    other = plan_of(lengths, tokens=tokens, seed=2)
    assert [other.rows(step).tolist() for step in range(25)] != forward
    assert forward[:10] != forward[10:20]


def epochs(plan: BatchPlan, count: int, size: int) -> Iterator[list[np.ndarray]]:
    """The batches of each epoch, cut where `size` rows are together."""
    step = 0
    for _ in range(count):
        batches: list[np.ndarray] = []
        while sum(map(len, batches)) < size:
            batches.append(plan.rows(step))
            step += 1
        yield batches


def test_a_token_budget_fills_batches_and_takes_every_row_once_an_epoch() -> None:
    lengths = realistic_lengths(500)
    plan = plan_of(lengths.tolist(), tokens=1500, seed=3)
    for batches in epochs(plan, 3, 500):
        assert sorted(np.concatenate(batches).tolist()) == list(range(500))
        sizes = [len(rows) * lengths[rows].max() for rows in batches]
        assert all(
            size <= 1500 or len(rows) == 1 for rows, size in zip(batches, sizes, strict=True)
        )
        assert np.median(sizes) > 0.8 * 1500


def test_little_is_padded_where_lengths_are_as_in_chat_data() -> None:
    lengths = realistic_lengths(20_000)
    rows = np.arange(len(lengths))
    unsorted = padding([rows[i : i + 8] for i in range(0, len(rows), 8)], lengths)
    shares = {}
    for name, tokens in (("rows", None), ("4k", 4096), ("16k", 16_384)):
        plan = plan_of(lengths.tolist(), batch_size=8, tokens=tokens, seed=0)
        shares[name] = padding(next(epochs(plan, 1, len(lengths))), lengths)
    assert unsorted > 0.5
    assert shares["rows"] < 0.1
    assert max(shares["4k"], shares["16k"]) < 0.06


def test_a_batch_is_cut_before_the_row_that_would_overfill_it() -> None:
    lengths = np.array([2, 3, 3, 5, 9, 40])
    # 3 rows of 3, 4 rows of 5 are 20: one too many; 5 alone since 2 rows of 9 are 18
    found = [rows.tolist() for rows in cut_batches(np.arange(6), lengths, 8, 15)]
    assert found == [[0, 1, 2], [3], [4], [5]]
    assert [r.tolist() for r in cut_batches(np.arange(6), lengths, 4, None)] == [
        [0, 1, 2, 3],
        [4, 5],
    ]


@pytest.mark.parametrize("tokens", [None, 24])
@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 3), (2, 2), (5, 1)])
def test_shares_make_up_the_batch_with_the_same_anchors(
    world: int, accumulate: int, tokens: int | None
) -> None:
    def anchors(batches: list[DrafterBatch]) -> dict[int, list[int]]:
        return {
            int(row): batch.anchors[i][batch.anchor_mask[i]].tolist()
            for batch in batches
            for i, row in enumerate(batch.rows)
            if batch.anchor_mask[i].any()
        }

    whole = list(training(start=0, tokens=tokens))
    ranks = [
        list(training(start=0, tokens=tokens, share=Share(rank, world, accumulate)))
        for rank in range(world)
    ]
    assert {len(batches) for batches in ranks} == {9 * accumulate}
    for step, batch in enumerate(whole):
        passes = slice(step * accumulate, (step + 1) * accumulate)
        parts = [part for batches in ranks for part in batches[passes]]
        assert anchors(parts) == anchors([batch])
        assert sum(int(p.anchor_mask.any(1).sum()) for p in parts) == len(batch.rows)


def test_a_share_without_rows_holds_one_that_does_not_count() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "loss_mask": [[0, 1, 1, 1]]})
    (batch,) = validation_batches(rows, batch_size=4, pad_id=PAD, share=Share(1, 2))
    assert batch.rows.tolist() == [0]
    assert not batch.anchor_mask.any()
    assert not batch.supervised.any()


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
        "luck": None,
    }


def test_luck_is_spread_evenly_and_padding_anchors_have_the_worst() -> None:
    masks = [[0, *[1] * 400], [0, *[1] * 100]]
    rows = Dataset.from_dict({"input_ids": [[1] * len(m) for m in masks], "loss_mask": masks})
    batch = collate(rows, np.array([0, 1]), num_anchors=None, rng=np.random.default_rng, pad_id=PAD)
    assert batch.luck is not None
    drawn = batch.luck[batch.anchor_mask]
    assert 0 <= float(drawn.min()) < float(drawn.max()) < 1
    counts = torch.histc(drawn, bins=4, min=0.0, max=1.0)
    assert len(drawn) == 399 + 99
    assert counts.min() > 498 / 4 - 4 * 498**0.5 * 0.43  # four standard deviations
    assert batch.luck[~batch.anchor_mask].eq(1.0).all()


def test_a_batch_without_anchors_still_has_one_masked_column() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 0, 0]]})
    batch = collate(rows, np.array([0]), num_anchors=4, rng=np.random.default_rng, pad_id=PAD)
    assert (batch.anchors.tolist(), batch.anchor_mask.tolist()) == ([[1]], [[False]])


@pytest.mark.parametrize("tokens", [None, 24])
def test_a_run_resumed_at_step_5_sees_what_a_straight_run_sees(tokens: int | None) -> None:
    straight = [content(batch) for batch in training(start=0, tokens=tokens)]
    resumed = [content(batch) for batch in training(start=5, tokens=tokens)]
    assert len(straight) == 9
    assert resumed == straight[5:]
    assert [content(batch) for batch in training(start=0, tokens=tokens, seed=1)] != straight


def test_validation_covers_every_row_and_every_anchor_once() -> None:
    batches = validation_batches(conversations(), batch_size=4, pad_id=PAD)
    assert sorted(torch.cat([b.rows for b in batches]).tolist()) == list(range(11))
    lengths = torch.cat([b.lengths for b in batches]).tolist()
    assert lengths == sorted(lengths)
    for batch in batches:
        assert batch.anchor_mask.sum(1).tolist() == (batch.lengths - 3).tolist()


def test_every_rank_validates_as_often_and_together_they_take_each_row_once() -> None:
    rows = conversations().select(range(7))
    ranks = [validation_batches(rows, batch_size=4, pad_id=PAD, share=Share(r, 2)) for r in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == 2
    counted = [b.rows[b.anchor_mask.any(1)].tolist() for batches in ranks for b in batches]
    assert sorted(row for rows_ in counted for row in rows_) == list(range(7))
