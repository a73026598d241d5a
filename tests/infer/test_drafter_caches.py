"""Whatever happened to a text, a drafter's cache is the one that its tokens make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.fakes import (
    DRAFTER_KINDS,
    begin_text,
    chain_arm,
    committed,
    drafted,
    play_round,
    prefilled,
    random_ids,
    tiny_drafter,
    tree_arm,
)
from whiflash_infer.cache import TargetCache
from whiflash_infer.drafters.base import SHORT_LAG
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree
from whiflash_infer.verification import Outcome, keep_path, read_drafts

CAPACITY = 192
LONG_REST, LONG_CAPACITY = 200, 1024


@pytest.fixture(params=DRAFTER_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Scene:
    """Texts under way, the target's cache of them, and one drafter with its two arms."""

    def __init__(self, kind: str, target: Target, *texts_ids: Tensor) -> None:
        self.kind, self.target = kind, target
        self.texts, self.cache = prefilled(target, *texts_ids, capacity=CAPACITY)
        self.drafter = tiny_drafter(kind, target)
        self.drafter.reserve(len(texts_ids), CAPACITY)
        self.chain, self.tree = chain_arm(self.drafter), tree_arm(self.drafter)

    @property
    def rows(self) -> list[int]:
        return list(range(len(self.texts.lengths)))

    def play(self, row: int, drafts: Tensor, *, accepted: int, bonus: int = 9) -> None:
        play_round(
            self.target,
            self.texts,
            self.cache,
            drafts,
            accepted=accepted,
            bonus=bonus,
            row=row,
        )

    def play_at_random(self, row: int, rng: random.Random) -> None:
        """A round of 0..4 drafts by some other arm, with 0 or more of them accepted."""
        drafts = random_ids(rng.randint(0, 4), seed=rng.randint(0, 999))
        accepted = rng.randint(0, len(drafts))
        self.play(row, drafts, accepted=accepted, bonus=rng.randint(5, 260))

    def play_tree(self, rng: random.Random) -> None:
        """A round of all rows with the tree arm, which keeps any path of each row's tree."""
        self.drafter.catch_up(self.texts, self.rows)
        tree = self.tree.draft(self.texts, self.rows, [4] * len(self.rows)).tree
        keep_of_tree(self.target, self.texts, self.cache, tree, rng)

    def differing_rows(self) -> list[int]:
        """Rows whose entries are not those of a drafter prefilled with the committed text."""
        return [row for row in self.rows if not self._is_as_fresh(row)]

    def _is_as_fresh(self, row: int) -> bool:
        text = committed(self.texts, row)
        texts, _ = prefilled(self.target, text, capacity=len(text) + 40)
        fresh = tiny_drafter(self.kind, self.target)
        fresh.reserve(1, len(text) + 40)
        fresh.catch_up(texts, [0])
        found, expected = self.drafter.kv.entries(row), fresh.kv.entries(0)
        assert found.shape[3] == expected.shape[3] == len(text) - 1
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def keep_of_tree(
    target: Target, texts: Texts, cache: TargetCache, tree: DraftTree, rng: random.Random
) -> None:
    """Commit the path to a node of each row's tree, or to none, and some bonus."""
    read = read_drafts(target, texts, cache, tree, static=False)
    paths = []
    for row in range(tree.num_rows):
        node, path = rng.randint(-1, int(tree.counts[row]) - 1), []
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parents[row, node])
        paths.append(path)
    outcome = outcome_of(tree, paths, rng)
    keep_path(texts, cache, tree, read, outcome)
    for row, path in enumerate(paths):
        texts.commit(row, len(path) + 1)
        cache.kv.lengths[row] = texts.lengths[row] - 1


def outcome_of(tree: DraftTree, paths: Sequence[Sequence[int]], rng: random.Random) -> Outcome:
    longest = max(1, *map(len, paths))
    path = torch.tensor([[*p, *[0] * (longest - len(p))] for p in paths])
    tokens = []
    for row, kept in enumerate(paths):
        bonus = [rng.randint(5, 260)] * (longest + 1 - len(kept))
        tokens.append([*tree.ids[row, list(kept)].tolist(), *bonus])
    return Outcome(
        accepted=torch.tensor([len(p) for p in paths]),
        path=path,
        tokens=torch.tensor(tokens),
        sources=torch.cat([torch.zeros(len(paths), 1, dtype=torch.long), path + 1], dim=1),
        finite=torch.ones(len(paths), dtype=torch.bool),
    )


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 1])
def test_after_any_rounds_every_row_is_as_if_prefilled_from_scratch(
    kind: str, seed: int, target: Target
) -> None:
    rng = random.Random(seed)
    scene = Scene(kind, target, *(random_ids(n, seed=n + seed) for n in (7, 2, 19)))
    for _ in range(6):
        for row in scene.rows:
            start = scene.texts.lengths[row]
            scene.play_at_random(row, rng)
            assert scene.drafter.lag(scene.texts, row) >= scene.texts.lengths[row] - start
        if rng.random() < 0.5:
            some = rng.sample(scene.rows, rng.randint(1, 3))
            scene.drafter.catch_up(scene.texts, some)
            drafts = scene.chain.draft(scene.texts, some, [3] * len(some)).tree.ids
            for place, row in enumerate(some):
                scene.play(row, drafts[place], accepted=rng.randint(0, 3))
        if rng.random() < 0.5:
            scene.play_tree(rng)
    scene.drafter.catch_up(scene.texts, scene.rows)
    assert scene.differing_rows() == []


@torch.no_grad()
def test_after_a_rejection_at_any_slot_the_cache_is_as_if_prefilled_from_scratch(
    kind: str, target: Target
) -> None:
    scene = Scene(kind, target, random_ids(8, seed=3))
    for accepted in (2, 0, 4, 1, 3):
        drafts = torch.tensor(drafted(scene.chain, scene.texts, 4))
        scene.play(0, drafts, accepted=accepted)
        assert scene.drafter.lag(scene.texts, 0) == accepted + 1
        scene.drafter.catch_up(scene.texts, [0])
        assert scene.differing_rows() == []


@torch.no_grad()
@pytest.mark.parametrize("seed", range(2))
def test_after_any_paths_of_trees_the_cache_is_as_if_prefilled_from_scratch(
    kind: str, seed: int, target: Target
) -> None:
    rng = random.Random(seed)
    scene = Scene(kind, target, random_ids(9, seed=seed), random_ids(4, seed=seed + 9))
    for _ in range(4):
        scene.play_tree(rng)
    scene.drafter.catch_up(scene.texts, scene.rows)
    assert scene.differing_rows() == []


@dataclass
class LongText:
    start: Tensor
    texts: Texts


@pytest.fixture(scope="module")
def long_text(target: Target) -> LongText:
    """A text that went on for 200 rounds, in which no drafter of ours was asked."""
    rng, start = random.Random(7), random_ids(6, seed=7)
    texts, cache = prefilled(target, start, capacity=LONG_CAPACITY)
    for turn in range(LONG_REST):
        drafts = random_ids(rng.randint(0, 4), seed=turn)
        accepted, bonus = rng.randint(0, len(drafts)), rng.randint(5, 260)
        play_round(target, texts, cache, drafts, accepted=accepted, bonus=bonus)
    return LongText(start, texts)


@torch.no_grad()
def test_inactive_for_200_rounds_and_then_chosen_a_drafter_drafts_as_a_fresh_one(
    kind: str, target: Target, long_text: LongText
) -> None:
    before, _ = prefilled(target, long_text.start)
    drafter, texts = tiny_drafter(kind, target), long_text.texts
    drafted(chain_arm(drafter), before, 4)
    drafter.reserve(1, LONG_CAPACITY)
    assert drafter.lag(texts, 0) == texts.lengths[0] - len(long_text.start) > LONG_REST
    found = drafted(chain_arm(drafter), texts, 4, capacity=LONG_CAPACITY)

    anew, _ = prefilled(target, committed(texts), capacity=LONG_CAPACITY)
    fresh = tiny_drafter(kind, target)
    assert found == drafted(chain_arm(fresh), anew, 4, capacity=LONG_CAPACITY)
    torch.testing.assert_close(drafter.kv.entries(0), fresh.kv.entries(0), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("full", [False, True])
def test_in_parts_or_whole_with_or_without_the_shortcut_the_same_entries_are_made(
    kind: str, full: bool, target: Target
) -> None:
    scene = Scene(kind, target, random_ids(SHORT_LAG + 30, seed=1), random_ids(5, seed=2))
    prompt = committed(scene.texts, 0)
    rows = target.teach(prompt[None], torch.ones_like(prompt, dtype=torch.bool)[None])
    for end in (1, 2, 9, SHORT_LAG + 20, SHORT_LAG + 29):  # short and long parts
        scene.texts.begin(0, prompt[:end], rows.taps[0, :end], prompt[end])
        assert scene.drafter.lag(scene.texts, 0) > 0
        scene.drafter.catch_up(scene.texts, [1, 0], full=full)
        assert [scene.drafter.lag(scene.texts, row) for row in scene.rows] == [0, 0]
    assert scene.differing_rows() == []


@torch.no_grad()
def test_the_shortcut_changes_no_draft(kind: str, target: Target) -> None:
    found = []
    for full in (False, True):
        scene = Scene(kind, target, random_ids(14, seed=3), random_ids(7, seed=4))
        scene.drafter.catch_up(scene.texts, [0, 1], full=full)
        found.append(scene.chain.draft(scene.texts, [0, 1], [4, 4]).tree.ids.tolist())
    assert found[0] == found[1]


@torch.no_grad()
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafting_leaves_the_cache_as_it_was(kind: str, shape: str, target: Target) -> None:
    scene = Scene(kind, target, random_ids(9, seed=3), random_ids(4, seed=4))
    arm = scene.chain if shape == "chain" else scene.tree
    assert [scene.drafter.lag(scene.texts, row) for row in (0, 1)] == [8, 3]
    scene.drafter.catch_up(scene.texts, [0, 1])
    before = [scene.drafter.kv.entries(row).clone() for row in (0, 1)]
    first = arm.draft(scene.texts, [0, 1], [4, 4]).tree
    arm.draft(scene.texts, [1], [2])
    second = arm.draft(scene.texts, [0, 1], [4, 4]).tree
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.parents, second.parents)
    for row in (0, 1):
        assert scene.drafter.lag(scene.texts, row) == 0
        assert torch.equal(scene.drafter.kv.entries(row), before[row])


@torch.no_grad()
def test_chain_and_tree_share_a_cache_and_draft_as_if_each_had_its_own(
    kind: str, target: Target
) -> None:
    scene = Scene(kind, target, random_ids(9, seed=5))
    drafted(scene.tree, scene.texts, 4)
    scene.play(0, random_ids(3, seed=6), accepted=2)
    chain = drafted(scene.chain, scene.texts, 4)
    tree = drafted(scene.tree, scene.texts, 4)
    anew, _ = prefilled(target, committed(scene.texts))
    assert chain == drafted(chain_arm(tiny_drafter(kind, target)), anew, 4)
    assert tree == drafted(tree_arm(tiny_drafter(kind, target)), anew, 4)


# ---- rows


@torch.no_grad()
@pytest.mark.parametrize("lag", [0, 3])
def test_a_moved_row_goes_on_in_its_new_place_whether_it_was_caught_up_or_not(
    kind: str, lag: int, target: Target
) -> None:
    scene = Scene(kind, target, *(random_ids(n, seed=n) for n in (15, 6, 8)))
    scene.drafter.catch_up(scene.texts, scene.rows)
    if lag:
        scene.play(2, random_ids(4, seed=9), accepted=lag - 1)
    expected = drafted(
        chain_arm(tiny_drafter(kind, target)), prefilled(target, committed(scene.texts, 2))[0], 4
    )
    for storage in (scene.texts, scene.cache.kv, scene.drafter):
        storage.move(2, 0)
    assert scene.drafter.lag(scene.texts, 0) == lag
    assert drafted(scene.chain, scene.texts, 4) == expected
    scene.play(0, random_ids(3, seed=10), accepted=1)
    scene.drafter.catch_up(scene.texts, scene.rows)
    assert scene.differing_rows() == []


@torch.no_grad()
def test_a_row_that_is_used_again_has_nothing_of_the_text_before(kind: str, target: Target) -> None:
    scene = Scene(kind, target, random_ids(20, seed=6), random_ids(5, seed=7))
    drafted(scene.chain, scene.texts, 4)
    for seed, length in enumerate((2, 9)):
        begin_text(target, scene.texts, scene.cache, random_ids(length, seed=seed), row=0)
        scene.drafter.clear(0)
        assert scene.drafter.lag(scene.texts, 0) == length - 1
        anew, _ = prefilled(target, committed(scene.texts))
        fresh = chain_arm(tiny_drafter(kind, target))
        assert drafted(scene.chain, scene.texts, 4) == drafted(fresh, anew, 4)
    scene.drafter.catch_up(scene.texts, [1])
    assert scene.differing_rows() == []


@torch.no_grad()
def test_after_an_overflow_a_cleared_row_drafts_for_its_next_text_as_a_fresh_one(
    kind: str, target: Target
) -> None:
    scene = Scene(kind, target, random_ids(8, seed=8), random_ids(5, seed=9))
    taps = torch.full_like(scene.texts.taps([0], [0], 30)[0], torch.nan)
    ids = random_ids(31, seed=10)
    scene.texts.begin(0, ids[:-1], taps, ids[-1])
    scene.drafter.catch_up(scene.texts, [0, 1])
    drafts = scene.chain.draft(scene.texts, [0, 1], [4, 4])
    assert drafts.finite.tolist() == [False, True]
    for storage in (scene.texts, scene.cache.kv, scene.drafter):
        storage.clear(0)
    begin_text(target, scene.texts, scene.cache, random_ids(4, seed=11), row=0)
    scene.drafter.clear(0)
    scene.drafter.catch_up(scene.texts, [0, 1])
    again = scene.chain.draft(scene.texts, [0, 1], [4, 4])
    assert again.finite.tolist() == [True, True]
    assert again.tree.ids[1].tolist() == drafts.tree.ids[1].tolist()
    assert scene.differing_rows() == []


@torch.no_grad()
def test_more_rows_and_room_leave_a_drafter_ready(kind: str, target: Target) -> None:
    scene = Scene(kind, target, random_ids(8, seed=12))
    expected = drafted(scene.chain, scene.texts, 4)
    scene.texts.reserve(3, 400)
    scene.drafter.reserve(3, 400)
    assert scene.chain.draft(scene.texts, [0], [4]).tree.ids[0].tolist() == expected


# ---- noticing a cache that is not its text's


@torch.no_grad()
def test_a_cache_that_does_not_fit_its_text_is_told_from_one_that_does(
    kind: str, target: Target
) -> None:
    scene = Scene(kind, target, random_ids(9, seed=13), random_ids(6, seed=14))
    scene.drafter.catch_up(scene.texts, [0, 1])
    scene.play(0, random_ids(4, seed=15), accepted=2)
    scene.drafter.catch_up(scene.texts, [0])
    assert not scene.drafter.differs(scene.texts, 0)
    for position in (2, 0):
        scene.drafter.kv.entries(1)[:, :, :, position] += 0.5
        assert scene.drafter.differs(scene.texts, 1)
        assert not scene.drafter.differs(scene.texts, 1)  # looking at it anew has mended it
