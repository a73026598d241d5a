from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fakes import random_rows
from whiflash_infer.sequence import Texts

CPU, WIDTH = torch.device("cpu"), 3


def texts_of(*lengths: int) -> Texts:
    """Row r holds the tokens 100 r + i at i, and features that are told by `features`."""
    texts = Texts(CPU, keep_taps=True)
    texts.reserve(len(lengths), 20)
    for row, length in enumerate(lengths):
        ids = 100 * row + torch.arange(length)
        texts.begin(row, ids[:-1], features(row, 0, length - 1), ids[-1])
    return texts


def features(row: int, start: int, end: int) -> Tensor:
    return random_rows(500, WIDTH, seed=row)[start:end]


def extended(texts: Texts, rows: list[int], width: int, kept: list[int]) -> None:
    """Write more than is committed, the rest of it being litter."""
    places = list(zip(texts.anchors(rows), rows, kept, strict=True))
    tokens = torch.full((len(rows), width), 9999)
    taps = torch.full((len(rows), width, WIDTH), 9999.0)
    for place, (anchor, row, count) in enumerate(places):
        tokens[place, :count] = 100 * row + anchor + 1 + torch.arange(count)
        taps[place, :count] = features(row, anchor, anchor + count)
    texts.extend(rows, tokens, taps)
    for row, count in zip(rows, kept, strict=True):
        texts.commit(row, count)


def assert_holds(texts: Texts, *lengths: int) -> None:
    assert texts.lengths == list(lengths)
    for row, length in enumerate(lengths):
        assert texts.ids([row], [0], length)[0].tolist() == [100 * row + i for i in range(length)]
        assert torch.equal(texts.taps([row], [0], length - 1)[0], features(row, 0, length - 1))


def test_a_text_begins_with_its_prompt_and_the_first_answer_as_the_anchor() -> None:
    texts = texts_of(5, 2)
    assert_holds(texts, 5, 2)
    assert texts.anchors([1, 0]) == [1, 4]


def test_a_prompt_of_one_token_has_its_features_and_an_anchor() -> None:
    assert_holds(texts_of(2), 2)


@pytest.mark.parametrize(
    ("rows", "kept"), [([0], [4]), ([1], [1]), ([0, 1, 2], [2, 4, 1]), ([2, 0], [3, 3])]
)
def test_what_is_committed_of_a_round_is_kept_and_the_next_round_overwrites_the_rest(
    rows: list[int], kept: list[int]
) -> None:
    texts, lengths = texts_of(5, 2, 5), [5, 2, 5]
    for _ in range(3):
        extended(texts, rows, 4, kept)
        for row, count in zip(rows, kept, strict=True):
            lengths[row] += count
        assert_holds(texts, *lengths)


@pytest.mark.parametrize("starts", [[1, 1], [0, 3], [4, 0]])
@pytest.mark.parametrize("rows", [[0, 1], [1, 0], [0, 2]])
def test_a_window_shows_each_row_from_its_own_start(rows: list[int], starts: list[int]) -> None:
    texts = texts_of(8, 8, 8)
    ids, taps = texts.ids(rows, starts, 3), texts.taps(rows, starts, 3)
    for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
        assert ids[place].tolist() == [100 * row + start + i for i in range(3)]
        assert torch.equal(taps[place], features(row, start, start + 3))


def test_a_window_that_reaches_behind_the_storage_keeps_its_width() -> None:
    # A row near its end is caught up beside one that lags much further.
    texts = texts_of(8, 60)
    ids, taps = texts.ids([0, 1], [2, 58], 20), texts.taps([0, 1], [2, 58], 20)
    assert (ids.shape, taps.shape) == ((2, 20), (2, 20, WIDTH))
    assert ids[0, :6].tolist() == [2, 3, 4, 5, 6, 7]
    assert ids[1, :2].tolist() == [158, 159]


def test_windows_of_neighbours_with_one_start_are_no_copies() -> None:
    texts = texts_of(8, 8)
    before = texts.taps([0, 1], [2, 2], 4).untyped_storage().data_ptr()
    assert texts.taps([1], [5], 1).untyped_storage().data_ptr() == before


def test_more_rows_and_more_room_leave_the_texts_as_they_were() -> None:
    texts = texts_of(5, 2)
    texts.reserve(4, 300)
    assert texts.lengths == [5, 2, 0, 0]
    ids = 300 + torch.arange(290)
    texts.begin(3, ids[:-1], features(3, 0, 289), ids[-1])
    texts.begin(2, 200 + torch.arange(1), features(2, 0, 1), torch.tensor(201))
    assert_holds(texts, 5, 2, 2, 290)
    texts.reserve(1, 10)
    assert_holds(texts, 5, 2, 2, 290)


def test_a_moved_row_goes_on_by_itself() -> None:
    texts = texts_of(9, 4)
    texts.move(1, 0)
    assert texts.lengths == [4, 4]
    assert texts.ids([0], [0], 4)[0].tolist() == [100, 101, 102, 103]
    assert torch.equal(texts.taps([0], [0], 3)[0], features(1, 0, 3))
    extended(texts, [0], 3, [2])
    assert texts.lengths == [6, 4]
    assert texts.ids([1], [0], 4)[0].tolist() == [100, 101, 102, 103]


def test_a_cleared_row_keeps_no_features_that_overflowed() -> None:
    texts = texts_of(4, 3)
    texts.extend([0], torch.tensor([[7, 8]]), torch.full((1, 2, WIDTH), torch.nan))
    texts.commit(0, 2)
    texts.clear(0)
    assert texts.lengths == [0, 3]
    assert not texts.taps([0], [0], 20).any()
    assert torch.equal(texts.taps([1], [0], 2)[0], features(1, 0, 2))


def test_a_shorter_text_in_a_used_row_shows_nothing_of_the_one_before() -> None:
    texts = texts_of(12)
    texts.begin(0, torch.arange(2), features(0, 0, 2), torch.tensor(2))
    assert_holds(texts, 3)
    extended(texts, [0], 5, [5])
    assert_holds(texts, 8)
