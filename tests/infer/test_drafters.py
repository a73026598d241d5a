"""What arms draft, against the training passes of their networks, searched by brute force."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.fakes import (
    DRAFTER_KINDS,
    MASK_ID,
    chain_arm,
    committed,
    prefilled,
    random_ids,
    tiny_drafter,
    tree_arm,
)
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm, Drafts, DrawDrafts
from whiflash_infer.drafters.diffusion import CachedDiffusion
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target, TargetTables
from whiflash_infer.trees import DraftTree

AR_KINDS = [kind for kind in DRAFTER_KINDS if kind.startswith("ar-")]
BLOCK_KINDS = [kind for kind in DRAFTER_KINDS if not kind.startswith("ar-")]
LONGEST, VOCABULARY = 4, 261
Path = tuple[int, ...]


@pytest.fixture(params=DRAFTER_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Reference:
    """The logits that a drafter's training pass gives behind a text and some drafts.

    They are the target's ids wide; what is not drafted is -inf.
    """

    def __init__(self, drafter: CachedAR | CachedDiffusion, target: Target, text: Tensor) -> None:
        self.drafter, self.target, self.text = drafter, target, text
        ids = text[None]
        states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
        self.taps = torch.cat([states[i + 1] for i in target.tap_layer_ids], dim=-1)
        self.anchor = torch.tensor([[len(text) - 1]])
        self._known: dict[Path, Tensor] = {}

    def logits(self, drafts: Path) -> Tensor:
        if drafts not in self._known:
            by_net = self._of_chain if isinstance(self.drafter, CachedAR) else self._of_block
            self._known[drafts] = by_net(drafts)
        return self._known[drafts]

    def _of_chain(self, drafts: Path) -> Tensor:
        assert isinstance(self.drafter, CachedAR)
        net = self.drafter.net
        ids = torch.cat([self.text, torch.tensor(drafts, dtype=torch.long)])[None]
        taps = torch.cat([self.taps, torch.zeros(1, len(drafts), self.taps.shape[2])], dim=1)
        embeds = self.target.tables.embed(ids)
        *_, last = net.unroll(embeds, taps, self.anchor, num_steps=len(drafts) + 1)
        wide = torch.full((VOCABULARY,), -torch.inf)
        wide[1::3] = net.logits(last[0, 0])  # every third token is drafted
        return wide

    def _of_block(self, drafts: Path) -> Tensor:
        assert isinstance(self.drafter, CachedDiffusion)
        net, tables = self.drafter.net, self.drafter.tables
        block = torch.tensor([[[int(self.text[-1])] + [MASK_ID] * LONGEST]])
        hidden = net.blocks(tables.embed(block), self.taps, self.anchor)[0, 0, 1 + len(drafts)]
        logits = tables.head @ hidden
        if net.markov_head is not None:
            weights = dict(net.markov_head.named_parameters())
            previous = [int(self.text[-1]), *drafts][-1]
            code = weights["markov_w1.weight"][previous]
            logits = logits + weights["markov_w2.weight"] @ code
        if tables.softcap is not None:
            logits = torch.tanh(logits / tables.softcap) * tables.softcap
        return logits

    def greedy(self, length: int) -> list[int]:
        drafts: Path = ()
        for _ in range(length):
            drafts = (*drafts, int(self.logits(drafts).argmax()))
        return list(drafts)

    def children(self, drafts: Path, num: int) -> list[tuple[float, Path]]:
        """Log-probabilities of the likeliest tokens after some drafts."""
        values, ids = self.logits(drafts).log_softmax(-1).topk(num)
        return [(v, (*drafts, i)) for v, i in zip(values.tolist(), ids.tolist(), strict=True)]


def eagle2(reference: Reference, *, depth: int, beam: int, num_nodes: int) -> set[Path]:
    """Expand the best of each level, each with its best children; then keep the best of all."""
    level: list[tuple[float, Path]] = [(0.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(depth):
        children = [
            (score + gain, path)
            for score, parent in level
            for gain, path in reference.children(parent, beam)
        ]
        found += children
        level = sorted(children, reverse=True)[:beam]
    return {path for _, path in sorted(found, reverse=True)[:num_nodes]}


def best_first(reference: Reference, *, depth: int, num_nodes: int) -> set[Path]:
    """The likeliest paths of all, the next best one taken from a heap."""
    heap = [(-score, path) for score, path in reference.children((), num_nodes)]
    heapq.heapify(heap)
    taken: set[Path] = set()
    while len(taken) < num_nodes and heap:
        cost, path = heapq.heappop(heap)
        taken.add(path)
        if len(path) < depth:
            for gain, longer in reference.children(path, num_nodes):
                heapq.heappush(heap, (cost - gain, longer))
    return taken


def paths_of(tree: DraftTree, row: int = 0) -> list[Path]:
    """The tokens from the anchor to each node."""
    paths: list[Path] = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(tree.ids[row, node])))
        assert int(tree.depths[row, node]) == len(paths[-1])
    return paths


def ready(drafter: CachedAR | CachedDiffusion, target: Target, *texts_ids: Tensor) -> Texts:
    texts, _ = prefilled(target, *texts_ids)
    drafter.reserve(len(texts_ids), 192)
    drafter.catch_up(texts, range(len(texts_ids)))
    return texts


# ---- chains


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 3, 11, 20])
def test_a_chain_is_what_the_training_pass_finds_likeliest_token_by_token(
    kind: str, length: int, target: Target
) -> None:
    text, drafter = random_ids(length, seed=length), tiny_drafter(kind, target)
    texts = ready(drafter, target, text)
    expected = Reference(drafter, target, text).greedy(LONGEST)
    for num_draft in range(1, LONGEST + 1):
        drafts = chain_arm(drafter).draft(texts, [0], [num_draft])
        assert drafts.tree.ids.tolist() == [expected[:num_draft]]
        assert drafts.tree.parents.tolist() == [list(range(-1, num_draft - 1))]
        assert drafts.tree.is_chain
        assert drafts.finite.tolist() == [True]
        assert drafts.probs is None


@dataclass
class Rows:
    """Texts of different lengths that one drafter follows, and what it drafts for each alone."""

    texts: Texts
    alone: list[Drafts]


def rows_of(
    kind: str, target: Target, arm_of: Callable[..., Arm], lengths: Sequence[int], num_draft: int
) -> Rows:
    ids = [random_ids(n, seed=n) for n in lengths]
    alone = []
    for text in ids:
        drafter = tiny_drafter(kind, target)
        alone.append(arm_of(drafter).draft(ready(drafter, target, text), [0], [num_draft]))
    return Rows(prefilled(target, *ids)[0], alone)


@torch.no_grad()
@pytest.mark.parametrize("arm_of", [chain_arm, tree_arm])
def test_a_row_drafts_in_a_batch_what_it_drafts_alone(
    kind: str, arm_of: Callable[..., Arm], target: Target
) -> None:
    rows = rows_of(kind, target, arm_of, (9, 2, 17, 9), LONGEST)
    drafter = tiny_drafter(kind, target)
    drafter.reserve(4, 192)
    drafter.catch_up(rows.texts, [2, 0])  # of different histories, too
    drafter.catch_up(rows.texts, range(4))
    for some in ([0, 1, 2, 3], [3, 1], [1, 2], [2]):
        tree = arm_of(drafter).draft(rows.texts, some, [LONGEST] * len(some)).tree
        for place, row in enumerate(some):
            assert paths_of(tree, place) == paths_of(rows.alone[row].tree)


@torch.no_grad()
@pytest.mark.parametrize("arm_of", [chain_arm, tree_arm])
def test_a_row_that_may_draft_less_has_the_first_levels_of_the_same_drafts(
    kind: str, arm_of: Callable[..., Arm], target: Target
) -> None:
    rows = rows_of(kind, target, arm_of, (9, 5, 12), LONGEST)
    drafter = tiny_drafter(kind, target)
    drafter.reserve(3, 192)
    drafter.catch_up(rows.texts, range(3))
    longest = [1, 4, 2]
    tree = arm_of(drafter).draft(rows.texts, [0, 1, 2], longest).tree
    for row, limit in enumerate(longest):
        whole = paths_of(rows.alone[row].tree)
        assert paths_of(tree, row) == [path for path in whole if len(path) <= limit]


# ---- trees


@torch.no_grad()
@pytest.mark.parametrize("kind", AR_KINDS)
@pytest.mark.parametrize(("depth", "beam", "num_nodes"), [(4, 3, 10), (3, 2, 14), (2, 5, 4)])
def test_the_ar_tree_is_eagle_2s_expansion_found_by_brute_force(
    kind: str, depth: int, beam: int, num_nodes: int, target: Target
) -> None:
    drafter, ids = tiny_drafter(kind, target), [random_ids(n, seed=n) for n in (8, 3)]
    assert isinstance(drafter, CachedAR)
    texts = ready(drafter, target, *ids)
    arm = ARArm(drafter, draft_length=depth, top_k=beam, num_nodes=num_nodes)
    tree = arm.draft(texts, [0, 1], [depth, depth]).tree
    for row, text in enumerate(ids):
        reference = Reference(drafter, target, text)
        expected = eagle2(reference, depth=depth, beam=beam, num_nodes=num_nodes)
        assert set(paths_of(tree, row)) == expected
        assert int(tree.counts[row]) == len(expected)
    assert (arm.max_draft, arm.max_nodes) == (depth, num_nodes)


@torch.no_grad()
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("depth", "num_nodes"), [(4, 12), (4, 3), (2, 20), (1, 5)])
@pytest.mark.parametrize("softcap", [None, 6.0])
def test_the_diffusion_tree_holds_the_likeliest_paths_through_the_blocks_marginals(
    kind: str, depth: int, num_nodes: int, softcap: float | None, target: Target
) -> None:
    drafter, ids = tiny_drafter(kind, target), [random_ids(n, seed=n) for n in (8, 3)]
    drafter.tables = TargetTables(target.tables.embedding, target.tables.head, softcap)
    texts = ready(drafter, target, *ids)
    arm = tree_arm(drafter, num_nodes=num_nodes)
    tree = arm.draft(texts, [0, 1], [depth, depth]).tree
    for row, text in enumerate(ids):
        reference = Reference(drafter, target, text)
        whole = best_first(reference, depth=LONGEST, num_nodes=num_nodes)
        assert set(paths_of(tree, row)) == {path for path in whole if len(path) <= depth}
    assert (arm.max_draft, arm.max_nodes) == (LONGEST, num_nodes)


@torch.no_grad()
def test_nodes_of_a_tree_stand_in_order_of_their_probability(kind: str, target: Target) -> None:
    text, drafter = random_ids(6, seed=6), tiny_drafter(kind, target)
    tree = tree_arm(drafter).draft(ready(drafter, target, text), [0], [LONGEST]).tree
    reference = Reference(drafter, target, text)
    scores = []
    for path in paths_of(tree):
        steps = [reference.logits(path[:k]).log_softmax(-1)[path[k]] for k in range(len(path))]
        scores.append(float(sum(steps)))
    assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert not tree.is_chain


# ---- drawn drafts


class Dice:
    """Draws from a softened softmax, and remembers what it was asked and what it answered."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(0)
        self.logits: list[Tensor] = []
        self.laws: list[Tensor] = []

    def __call__(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert step == len(self.laws)
        self.logits.append(logits.clone())
        law = (logits / self.temperature).softmax(-1)
        self.laws.append(law.clone())
        return torch.multinomial(law, 1, generator=self.generator)[:, 0], law


@torch.no_grad()
def test_drawn_drafts_come_with_the_very_distributions_that_they_were_drawn_from(
    kind: str, target: Target
) -> None:
    drafter, ids = tiny_drafter(kind, target), [random_ids(n, seed=n) for n in (8, 3, 15)]
    texts, dice = ready(drafter, target, *ids), Dice(temperature=4.0)
    drafts = chain_arm(drafter).draft(texts, [0, 1, 2], [LONGEST] * 3, dice)
    assert drafts.probs is not None
    assert torch.equal(drafts.probs, torch.stack(dice.laws, dim=1))
    assert drafts.tree.is_chain
    assert drafts.finite.tolist() == [True] * 3
    for row, text in enumerate(ids):
        tokens, reference = drafts.tree.ids[row].tolist(), Reference(drafter, target, text)
        assert tokens != reference.greedy(LONGEST)
        for step in range(LONGEST):
            expected = reference.logits(tuple(tokens[:step]))
            found = dice.logits[step][row]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            probs = drafts.probs[row, step]
            assert not probs[expected == -torch.inf].any()
            assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
            assert probs[tokens[step]] > 0


@torch.no_grad()
@pytest.mark.parametrize("kind", AR_KINDS)
def test_of_a_reduced_vocabulary_only_its_own_tokens_are_drawn(kind: str, target: Target) -> None:
    drafter = tiny_drafter(kind, target)
    texts = ready(drafter, target, random_ids(7, seed=2))
    arm, dice = chain_arm(drafter), Dice(temperature=50.0)
    found: set[int] = set()
    for _ in range(10):
        dice.logits.clear()
        dice.laws.clear()
        drafts = arm.draft(texts, [0], [LONGEST], dice)
        assert drafts.probs is not None
        assert drafts.probs[0, :, 1::3].gt(0).all()
        assert not drafts.probs[0, :, 0::3].any()
        assert not drafts.probs[0, :, 2::3].any()
        found |= set(drafts.tree.ids[0].tolist())
    assert len(found) > 20
    assert {token % 3 for token in found} == {1}


@torch.no_grad()
def test_rows_that_draw_fewer_drafts_have_the_first_of_them(kind: str, target: Target) -> None:
    drafter = tiny_drafter(kind, target)
    texts = ready(drafter, target, random_ids(7, seed=2), random_ids(5, seed=3))
    whole = chain_arm(drafter).draft(texts, [0, 1], [4, 4], Dice(temperature=4.0))
    fewer = chain_arm(drafter).draft(texts, [0, 1], [2, 4], Dice(temperature=4.0))
    assert fewer.tree.counts.tolist() == [2, 4]
    assert fewer.tree.ids.tolist() == [
        [*whole.tree.ids[0, :2].tolist(), 0, 0],
        whole.tree.ids[1].tolist(),
    ]
    assert fewer.probs is not None
    assert whole.probs is not None
    assert torch.equal(fewer.probs[0, :2], whole.probs[0, :2])


@torch.no_grad()
def test_drawing_leaves_the_cache_as_it_was(kind: str, target: Target) -> None:
    drafter = tiny_drafter(kind, target)
    texts = ready(drafter, target, random_ids(7, seed=2), random_ids(5, seed=3))
    before = [drafter.kv.entries(row).clone() for row in (0, 1)]
    chain_arm(drafter).draft(texts, [0, 1], [4, 4], Dice(temperature=4.0))
    for row, entries in enumerate(before):
        assert torch.equal(drafter.kv.entries(row), entries)


# ---- what overflowed


def overflowing(texts: Texts, row: int) -> None:
    """A text whose features are no numbers."""
    ids = committed(texts, row)
    taps = torch.full_like(texts.taps([row], [0], len(ids) - 1)[0], torch.nan)
    texts.begin(row, ids[:-1], taps, ids[-1])


def drawn_all_the_same(logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
    law = logits.nan_to_num().softmax(-1)
    return law.argmax(-1), law


@torch.no_grad()
@pytest.mark.parametrize("draw", [None, drawn_all_the_same], ids=["chosen", "drawn"])
@pytest.mark.parametrize("arm_of", [chain_arm, tree_arm])
def test_a_row_that_overflowed_is_told_and_does_not_disturb_the_others(
    kind: str, arm_of: Callable[..., Arm], draw: DrawDrafts | None, target: Target
) -> None:
    rows = rows_of(kind, target, arm_of, (9, 4, 7), LONGEST)
    overflowing(rows.texts, 1)
    drafter = tiny_drafter(kind, target)
    drafter.reserve(3, 192)
    drafter.catch_up(rows.texts, range(3))
    drafts = arm_of(drafter).draft(rows.texts, [0, 1, 2], [LONGEST] * 3, draw)
    assert drafts.finite.tolist() == [True, False, True]
    if draw is None:
        for row in (0, 2):
            assert paths_of(drafts.tree, row) == paths_of(rows.alone[row].tree)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
def test_ar_trees_of_any_size_are_the_brute_force_ones(seed: int, target: Target) -> None:
    rng = random.Random(seed)
    depth, beam, num_nodes = rng.randint(1, 6), rng.randint(2, 6), rng.randint(1, 30)
    drafter, text = tiny_drafter("ar-classic", target), random_ids(10, seed=1)
    assert isinstance(drafter, CachedAR)
    texts, reference = ready(drafter, target, text), Reference(drafter, target, text)
    arm = ARArm(drafter, draft_length=depth, top_k=beam, num_nodes=num_nodes)
    tree = arm.draft(texts, [0], [depth]).tree
    assert set(paths_of(tree)) == eagle2(reference, depth=depth, beam=beam, num_nodes=num_nodes)
    assert tree.num_nodes <= arm.max_nodes


@torch.no_grad()
def test_a_tree_that_grows_more_entries_than_there_is_room_for_gets_room(target: Target) -> None:
    text = random_ids(60, seed=1)
    drafter = tiny_drafter("ar-classic", target)
    assert isinstance(drafter, CachedAR)
    texts, _ = prefilled(target, text)
    drafter.reserve(1, 64)
    drafter.catch_up(texts, [0])
    arm = ARArm(drafter, draft_length=6, top_k=5, num_nodes=12)
    tree = arm.draft(texts, [0], [1]).tree
    expected = eagle2(Reference(drafter, target, text), depth=6, beam=5, num_nodes=12)
    assert set(paths_of(tree)) == {path for path in expected if len(path) == 1}
