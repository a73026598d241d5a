from __future__ import annotations

from dataclasses import replace

import pytest
from datasets import Dataset

from tests.fakes import ODD_SHAPE, ar_config
from whiflash_train.data.vocabulary import choose_vocabulary


def rows(*texts: tuple[list[int], str]) -> Dataset:
    """Texts with the supervised tokens marked by #."""
    drawn = [{"input_ids": ids, "loss_mask": [c == "#" for c in mask]} for ids, mask in texts]
    return Dataset.from_list(drawn)


def chosen(data: Dataset, size: int, always: tuple[int, ...] = ()) -> tuple[list[int], float]:
    ids, coverage = choose_vocabulary(data, ar_config(ODD_SHAPE, size), always=always)
    return ids.tolist(), coverage


def test_only_supervised_tokens_are_counted() -> None:
    data = rows(([9, 9, 9, 5, 5, 7], "...###"), ([9, 7, 5], ".##"))
    assert chosen(data, 2) == ([5, 7], 1.0)
    assert chosen(data, 1) == ([5], pytest.approx(3 / 5))


def test_ties_go_to_the_lower_id_and_unused_tokens_fill_up_from_the_lowest() -> None:
    data = rows(([30, 20, 10], "###"))
    assert chosen(data, 2)[0] == [10, 20]
    assert chosen(data, 5)[0] == [0, 1, 10, 20, 30]


def test_special_tokens_are_kept_whatever_their_count_and_the_share_is_told_as_it_is() -> None:
    data = rows(([10, 10, 20], "###"))
    assert chosen(data, 2, always=(3, 39)) == ([3, 39], 0.0)
    assert chosen(data, 3, always=(3, 39)) == ([3, 10, 39], pytest.approx(2 / 3))


def test_special_tokens_beyond_the_table_are_no_matter() -> None:
    assert chosen(rows(([10], "#")), 1, always=(ODD_SHAPE.vocab_size,))[0] == [10]


def test_the_whole_vocabulary_is_every_token_in_order() -> None:
    whole = replace(ODD_SHAPE).vocab_size
    assert chosen(rows(([10], "#")), whole) == (list(range(whole)), 1.0)


def test_rows_of_a_selection_are_counted_and_no_others() -> None:
    data = rows(([5], "#"), ([7], "#"), ([7], "#"), ([5, 5], "##"))
    assert chosen(data.select([0, 3]), 1) == ([5], 1.0)


def test_each_size_gives_a_vocabulary_of_its_own_from_the_same_rows() -> None:
    # A mapping that was kept on disk was used again for another size (U48).
    data = rows(([7, 7, 7, 9, 9, 30], "######"))
    assert [chosen(data, size)[0] for size in (1, 3, 2, 1)] == [[7], [7, 9, 30], [7, 9], [7]]
