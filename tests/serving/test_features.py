"""Paged features against a dictionary, and drafters that read them against drafters that do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes import (
    DRAFTER_KINDS,
    chain_arm,
    committed,
    prefilled,
    random_ids,
    random_rows,
    tiny_drafter,
)
from whiflash_infer.drafters.base import SHORT_LAG
from whiflash_infer.sequence import Texts
from whiflash_infer.serving.features import PagedFeatures, ServedTexts
from whiflash_infer.target import Target

CPU, WIDTH, BLOCK = torch.device("cpu"), 2, 4
NUM_BLOCKS, NUM_IDS = 7, 3  # few, so that blocks come back and tokens meet their like


def features_of(num_pages: int, *, block_size: int = BLOCK, width: int = WIDTH) -> PagedFeatures:
    """Its memory holds no numbers before anything is written."""
    features = PagedFeatures(
        block_size=block_size,
        width=width,
        num_tokens=num_pages * block_size,
        dtype=torch.float32,
        device=CPU,
    )
    features._features[: features.capacity] = torch.nan
    return features


def write(features: PagedFeatures, *slots: int, ids: int = 1, value: float = 1.0) -> None:
    """Tokens of one id at the positions 0, 1, ..."""
    number = len(slots)
    rows = torch.full((number, WIDTH), value)
    features.write(np.array(slots), np.full(number, ids), np.arange(number), rows)


def held(features: PagedFeatures, *slots: int, ids: int = 1) -> list[bool]:
    """Whether those tokens are held."""
    number = len(slots)
    return features.holds(np.array(slots), np.full(number, ids), np.arange(number)).tolist()


# ---- pages against a dictionary


class Plain:
    """What `PagedFeatures` should hold, token by token, and which of its pages goes next."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.tokens: dict[int, tuple[int, int, list[float]]] = {}
        self.blocks: list[int] = []  # the least recently used first
        self.evictions = 0

    def write(self, tokens: Sequence[tuple[int, int, int, list[float]]]) -> None:
        asked = [slot // BLOCK for slot, *_ in tokens if slot >= 0]
        in_order = [b for i, b in enumerate(asked) if b not in asked[i + 1 :]]
        winners = in_order[-self.num_pages :]
        for block in winners:
            if block not in self.blocks:
                self._make_room(winners)
                self.blocks.append(block)
        for slot, token, position, vector in tokens:
            if slot >= 0 and slot // BLOCK in winners:
                self.tokens[slot] = token, position, vector
                self._use(slot)

    def read(self, slots: Sequence[int]) -> list[list[float]]:
        for slot in slots:
            if slot in self.tokens:
                self._use(slot)
        return [self.tokens[s][2] if s in self.tokens else [0.0] * WIDTH for s in slots]

    def _make_room(self, winners: Sequence[int]) -> None:
        if len(self.blocks) < self.num_pages:
            return
        lost = next(block for block in self.blocks if block not in winners)
        self.blocks.remove(lost)
        self.evictions += 1
        self.tokens = {s: rest for s, rest in self.tokens.items() if s // BLOCK != lost}

    def _use(self, slot: int) -> None:
        self.blocks.remove(slot // BLOCK)
        self.blocks.append(slot // BLOCK)


SLOTS = st.integers(-1, NUM_BLOCKS * BLOCK - 1)
WRITTEN = st.lists(st.tuples(SLOTS, st.integers(0, NUM_IDS - 1)), unique_by=lambda t: t[0])
ACTS = st.lists(st.one_of(WRITTEN, st.lists(SLOTS)), max_size=12)


def write_both(
    features: PagedFeatures, plain: Plain, act: Sequence[tuple[int, int]], turn: int, dtype: Any
) -> None:
    vectors = random_rows(len(act), WIDTH, seed=turn)
    slots = np.array([slot for slot, _ in act], dtype)
    ids = np.array([token for _, token in act], dtype)
    features.write(slots, ids, slots % 3, vectors)
    columns = slots.tolist(), ids.tolist(), (slots % 3).tolist(), vectors.tolist()
    plain.write(list(zip(*columns, strict=True)))


def assert_same(features: PagedFeatures, plain: Plain, dtype: Any) -> None:
    """For every slot, also those behind all blocks, and every token."""
    slots = np.arange(-1, (NUM_BLOCKS + 2) * BLOCK, dtype=dtype)
    for token in range(-1, NUM_IDS):
        for shift in (0, 1):
            positions = slots % 3 + shift
            found = features.holds(slots, np.full_like(slots, token), positions)
            for place, slot in enumerate(slots.tolist()):
                known = plain.tokens.get(slot)
                expected = known is not None and known[:2] == (token, int(positions[place]))
                assert bool(found[place]) == expected
    assert features.num_pages_used == len(plain.blocks)
    assert features.evictions == plain.evictions


@settings(max_examples=60, deadline=None)
@given(num_pages=st.integers(1, NUM_BLOCKS), acts=ACTS, dtype=st.sampled_from([np.int32, np.int64]))
def test_pages_hold_what_a_dictionary_with_the_same_order_of_use_would_hold(
    num_pages: int, acts: list[list[Any]], dtype: Any
) -> None:
    features, plain = features_of(num_pages), Plain(num_pages)
    for turn, act in enumerate(acts):
        if act and isinstance(act[0], int):
            assert features.read(np.array(act, dtype)).tolist() == plain.read(act)
        else:
            write_both(features, plain, act, turn, dtype)
        assert_same(features, plain, dtype)
    everything = list(range(-1, (NUM_BLOCKS + 2) * BLOCK))
    assert features.read(np.array(everything, dtype)).tolist() == plain.read(everything)


@pytest.mark.parametrize(
    ("num_tokens", "capacity"), [(0, 16), (15, 16), (16, 16), (47, 32), (48, 48)]
)
def test_capacity_is_whole_pages_and_at_least_one(num_tokens: int, capacity: int) -> None:
    features = PagedFeatures(
        block_size=16, width=3, num_tokens=num_tokens, dtype=torch.bfloat16, device=CPU
    )
    assert features.capacity == capacity
    assert features.num_bytes >= capacity * 3 * 2


def test_a_table_of_many_blocks_grows_and_is_counted_but_no_page_is_added() -> None:
    features = features_of(2)
    before = features.num_bytes
    write(features, 1_000_000 * BLOCK)
    assert held(features, 1_000_000 * BLOCK) == [True]
    assert features.num_bytes >= before + 1_000_000 * 8
    assert (features.capacity, features.num_pages_used) == (2 * BLOCK, 1)


def test_features_are_kept_in_their_own_type_whatever_type_they_come_in() -> None:
    features = PagedFeatures(
        block_size=BLOCK, width=WIDTH, num_tokens=BLOCK, dtype=torch.bfloat16, device=CPU
    )
    write(features, 3, value=1.0 + 2**-10)
    found = features.read(np.array([3]))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[1.0, 1.0]]


def test_a_read_has_the_shape_of_its_slots() -> None:
    features = features_of(2)
    write(features, 5, 6, value=3.0)
    found = features.read(np.array([[5, -1, 0], [100_000, 6, 7]]))
    assert found.tolist() == [[[3.0] * 2, [0.0] * 2, [0.0] * 2], [[0.0] * 2, [3.0] * 2, [0.0] * 2]]
    assert features.read(np.zeros((2, 0), np.int64)).shape == (2, 0, WIDTH)


def test_a_page_that_another_block_takes_shows_nothing_of_what_overflowed_in_it() -> None:
    features = features_of(1)
    write(features, 0, 1, 2, 3, value=float("nan"))
    assert features.read(np.array([1])).isnan().all()
    write(features, 9)
    assert features.evictions == 1
    assert held(features, 0, 1) == [False, False]
    assert features.read(np.array([8, 9, 10, 1])).tolist() == [
        [0.0] * 2,
        [1.0] * 2,
        *[[0.0] * 2] * 2,
    ]


def test_of_a_write_that_needs_more_pages_than_there_are_the_last_blocks_are_held() -> None:
    features = features_of(2)
    write(features, 0, ids=2)
    write(features, *range(3 * BLOCK))
    assert held(features, *range(3 * BLOCK)) == [False] * BLOCK + [True] * (2 * BLOCK)
    assert held(features, 0, ids=2) == [False]


def test_a_read_page_outlives_one_that_was_written_later() -> None:
    features = features_of(2)
    write(features, 0)
    write(features, BLOCK)
    features.read(np.array([0]))
    write(features, 2 * BLOCK)
    assert [held(features, block * BLOCK) for block in range(3)] == [[True], [False], [True]]


def test_rewrites_are_told_only_of_slots_that_were_said_to_be_held() -> None:
    features = features_of(2)
    for _ in range(2):
        write(features, 0, 1)
    assert features.version == 0
    assert held(features, 1, ids=1) == [False]  # at another position
    write(features, 0, 1)
    assert features.version == 0
    assert held(features, 0) == [True]
    write(features, 0, 1)
    assert features.rewrites == features.version == 1
    write(features, 0, 1)
    assert features.version == 1
    assert held(features, 0) == [True]
    write(features, BLOCK, 2 * BLOCK)  # takes the page away
    write(features, 0)
    assert (features.evictions, features.rewrites) == (2, 1)


# ---- texts


def served(features: PagedFeatures, *texts: tuple[Sequence[int], Sequence[int]]) -> ServedTexts:
    """Ids and slots of a text for each row."""
    rows = ServedTexts(CPU, features)
    rows.reserve(len(texts), 8)
    for row, (ids, slots) in enumerate(texts):
        rows.put(row, np.array(ids), np.array(slots, np.int64))
    return rows


def store(features: PagedFeatures, texts: ServedTexts, row: int, *, start: int = 0) -> Tensor:
    """Features of a text from a position on, as an engine that reads it would write them."""
    slots, ids = texts.slots(row)[start:], texts.text(row)[start:-1]
    vectors = random_rows(len(slots), WIDTH, seed=row + 10)
    features.write(slots, ids, np.arange(start, start + len(slots)), vectors)
    return vectors


def test_a_text_grows_by_tokens_whose_slots_lag_one_behind() -> None:
    texts = served(features_of(9), ([11, 12, 13], [30, 31]), ([21], []))
    texts.append(0, np.array([14, 15], np.int32), np.array([5, 6], np.int32))
    texts.append(1, np.array([22]), np.array([9]))
    assert texts.lengths == [5, 2]
    assert texts.anchors([1, 0]) == [1, 4]
    assert texts.text(0).tolist() == [11, 12, 13, 14, 15]
    assert texts.slots(0).tolist() == [30, 31, 5, 6]
    assert texts.text(1).tolist() == [21, 22]
    assert texts.slots(1).tolist() == [9]
    assert texts.ids([1, 0], [0, 3], 2).tolist() == [[21, 22], [14, 15]]


def test_texts_outgrow_their_storage_and_stay_what_they_were() -> None:
    features = features_of(100)
    texts = served(features, ([1, 2, 3], [7, 8]), ([4, 5], [0]))
    before = texts.num_bytes
    ids, slots = np.arange(200), np.arange(50, 250)
    texts.append(1, ids, slots)
    texts.reserve(4, 10)
    assert texts.num_bytes >= 4 * before
    assert texts.text(0).tolist() == [1, 2, 3]
    assert texts.slots(0).tolist() == [7, 8]
    assert texts.text(1).tolist() == [4, 5, *ids.tolist()]
    assert texts.slots(1).tolist() == [0, *slots.tolist()]
    assert texts.ids([1], [0], 202)[0].tolist() == texts.text(1).tolist()
    assert texts.lengths == [3, 202, 0, 0]


def test_a_window_shows_zeros_where_a_text_has_no_features() -> None:
    features = features_of(9)
    texts = served(features, ([1, 2, 3, 4], [20, 3, 11]), ([5, 6], [8]))
    first, second = store(features, texts, 0), store(features, texts, 1)
    found = texts.taps([1, 0], [0, 1], 4)
    nothing = torch.zeros(3, WIDTH)
    assert torch.equal(found[0], torch.cat([second, nothing]))
    assert torch.equal(found[1], torch.cat([first[1:], nothing[:2]]))
    assert torch.equal(texts.taps([1, 0], [90, 1], 3)[0], nothing)  # behind the storage, too


def test_a_shared_prefix_is_one_thing_and_what_follows_is_not() -> None:
    features = features_of(9)
    texts = served(
        features,
        ([1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 4]),
        ([1, 2, 3, 4, 7, 8], [8, 9, 10, 11, 28]),
    )
    first = store(features, texts, 0)
    assert texts.holds(0, 0)
    assert not texts.holds(1, 0)
    last = store(features, texts, 1, start=4)
    assert texts.holds(1, 0)
    found = texts.taps([0, 1], [0, 0], 5)
    assert torch.equal(found[0], first)
    assert torch.equal(found[1], torch.cat([first[:4], last]))


def test_a_text_is_held_when_all_positions_before_its_anchor_are_written() -> None:
    features = features_of(9)
    texts = served(features, ([1, 2, 3, 4], [4, 5, 6]), ([1], []))
    assert not texts.holds(0, 0)
    assert texts.holds(0, 3)  # an anchor needs none
    assert texts.holds(1, 0)
    store(features, texts, 0, start=1)
    assert [texts.holds(0, start) for start in range(4)] == [False, True, True, True]
    features.write(np.array([4]), np.array([1]), np.array([0]), torch.zeros(1, WIDTH))
    assert texts.holds(0, 0)


def test_positions_that_were_appended_are_looked_up_though_the_rest_is_known() -> None:
    features = features_of(9)
    texts = served(features, ([1, 2, 3], [4, 5]))
    store(features, texts, 0)
    assert texts.holds(0, 0)
    texts.append(0, np.array([4, 5]), np.array([6, 7]))
    assert [texts.holds(0, start) for start in (0, 3, 4)] == [False, False, True]
    store(features, texts, 0, start=3)
    assert [texts.holds(0, start) for start in (3, 0)] == [True, False]
    store(features, texts, 0, start=2)
    assert texts.holds(0, 0)


@pytest.mark.parametrize(("token", "position"), [(9, 1), (2, 5)])
def test_a_slot_that_was_written_over_is_missed_also_by_a_text_that_had_it(
    token: int, position: int
) -> None:
    features = features_of(9)
    texts = served(features, ([1, 2, 3], [4, 5]))
    store(features, texts, 0)
    assert texts.holds(0, 0)
    features.write(np.array([5]), np.array([token]), np.array([position]), torch.ones(1, WIDTH))
    assert features.evictions == 0
    assert not texts.holds(0, 0)
    assert not texts.holds(0, 1)
    store(features, texts, 0)
    assert texts.holds(0, 0)


def test_a_page_that_was_taken_away_is_missed_and_what_is_left_is_not() -> None:
    features = features_of(2)
    texts = served(features, ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4]))
    store(features, texts, 0)
    assert texts.holds(0, 0)
    write(features, 5 * BLOCK, ids=9)
    assert features.evictions == 1
    assert [texts.holds(0, start) for start in (0, 3, 4, 5)] == [False, False, True, True]


def test_another_text_in_a_row_has_nothing_of_the_one_before() -> None:
    features = features_of(9)
    texts = served(features, ([1, 2, 3], [4, 5]))
    store(features, texts, 0)
    assert texts.holds(0, 0)
    texts.clear(0)
    assert (texts.lengths, texts.text(0).tolist(), texts.slots(0).tolist()) == ([0], [], [])
    assert not texts.taps([0], [0], 3).any()
    texts.put(0, np.array([1, 7]), np.array([12]))
    assert not texts.holds(0, 0)
    assert texts.text(0).tolist() == [1, 7]
    texts.put(0, np.array([1, 2]), np.array([4]))
    assert texts.holds(0, 0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_known_to_be_held_is_what_would_be_found_anew(data: st.DataObject) -> None:
    """Texts of equal tokens in few slots are stored, grow, and take each other's slots."""
    features = features_of(3)
    texts = served(features, ([1, 1], [0]), ([1, 1], [0]))
    for _ in range(data.draw(st.integers(1, 25))):
        row = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, texts.lengths[row] - 1))
        match data.draw(st.sampled_from(["store", "append", "put", "ask", "ask"])):
            case "store":
                store(features, texts, row, start=start)
            case "append":
                free = sorted(set(range(NUM_BLOCKS * BLOCK)) - set(texts.slots(row).tolist()))
                slots = free[start : start + 2]
                texts.append(row, np.full(len(slots), 1), np.array(slots, np.int64))
            case "put":
                texts.put(row, np.full(start + 1, 1), np.arange(start) + BLOCK * start % 12)
            case _:
                slots, ids = texts.slots(row)[start:], texts.text(row)[start:-1]
                anew = features.holds(slots, ids, np.arange(start, start + len(slots)))
                assert texts.holds(row, start) == bool(anew.all())


# ---- drafters


@pytest.fixture(params=DRAFTER_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Served:
    """Texts that a target has read, and the same in slots that a shuffled list gives them."""

    own: Texts
    paged: ServedTexts
    slots: list[np.ndarray]

    def grow(self, row: int, end: int) -> None:
        """Commit a text on to `end` tokens."""
        start = self.paged.lengths[row]
        ids = committed(self.own, row)[start:end].numpy()
        self.paged.append(row, ids, self.slots[row][start - 1 : end - 1])


def served_by(target: Target, lengths: Sequence[int], starts: Sequence[int]) -> Served:
    """The paged ones have their first `starts[row]` tokens so far; features of all are there."""
    own, _ = prefilled(target, *(random_ids(n, seed=n) for n in lengths))
    width = own.taps([0], [0], 1).shape[2]
    features = features_of(1 + sum(lengths) // 8, block_size=16, width=width)
    free = np.random.default_rng(0).permutation(features.capacity)
    paged = ServedTexts(CPU, features)
    paged.reserve(len(lengths), 8)
    slots = np.split(free, np.cumsum([n - 1 for n in lengths]))[: len(lengths)]
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        ids, taps = committed(own, row).numpy(), own.taps([row], [0], length - 1)[0]
        features.write(slots[row], ids[:-1], np.arange(length - 1), taps)
        paged.put(row, ids[:start], slots[row][: start - 1])
    return Served(own, paged, slots)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[3, 0], [0, 1, 2, 3], [2]])
def test_a_drafter_makes_of_paged_features_the_drafts_and_entries_that_it_makes_of_its_own(
    kind: str, rows: list[int], target: Target
) -> None:
    lengths = [9, 2, SHORT_LAG + 20, 17]
    texts = served_by(target, lengths, lengths)
    drafters = [tiny_drafter(kind, target) for _ in range(2)]
    drafts = []
    for drafter, some in zip(drafters, (texts.own, texts.paged), strict=True):
        drafter.reserve(4, 192)
        drafter.catch_up(some, rows)
        drafts.append(chain_arm(drafter).draft(some, rows, [4] * len(rows)))
    assert torch.equal(drafts[0].tree.ids, drafts[1].tree.ids)
    assert drafts[1].finite.all()
    for row in rows:
        own, paged = (drafter.kv.entries(row) for drafter in drafters)
        assert own.shape[3] == lengths[row] - 1
        assert torch.allclose(own, paged, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_drafter_that_follows_a_served_text_in_parts_ends_where_it_would_have_at_once(
    kind: str, target: Target
) -> None:
    texts = served_by(target, [40, 23, 60], [2, 1, 30])
    drafter, fresh = tiny_drafter(kind, target), tiny_drafter(kind, target)
    drafter.reserve(3, 192)
    for rows, ends in (([2, 0], (31, 9)), ([0, 1], (39, 20)), ([0, 1, 2], (40, 23, 60))):
        for row, end in zip(rows, ends, strict=True):
            texts.grow(row, end)
        drafter.catch_up(texts.paged, rows)
        assert [drafter.lag(texts.paged, row) for row in rows] == [0] * len(rows)
    fresh.reserve(3, 192)
    fresh.catch_up(texts.own, [0, 1, 2])
    for row in range(3):
        found, expected = drafter.kv.entries(row), fresh.kv.entries(row)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found = chain_arm(drafter).draft(texts.paged, [2, 0, 1], [4, 2, 3]).tree.ids
    expected = chain_arm(fresh).draft(texts.own, [2, 0, 1], [4, 2, 3]).tree.ids
    assert torch.equal(found, expected)
