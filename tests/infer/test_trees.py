from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from whiflash_infer.trees import DraftTree, TreeGrower, ancestors, chain, join, top

Path = tuple[int, ...]
Law = Callable[[Path], Tensor]
VOCABULARY = 12


def tree_of(*rows: Sequence[tuple[int, int]], width: int = 0) -> DraftTree:
    """A tree from (parent, id) of every node of every row."""
    width = max(width, *(len(row) for row in rows))
    ids, parents, depths = [], [], []
    for row in rows:
        below = [0]
        for parent, _ in row:
            below.append(below[parent + 1] + 1)
        missing = width - len(row)
        ids.append([token for _, token in row] + [0] * missing)
        parents.append([parent for parent, _ in row] + [-1] * missing)
        depths.append(below[1:] + [1] * missing)
    counts = torch.tensor([len(row) for row in rows])
    return DraftTree(
        torch.tensor(ids, dtype=torch.long).reshape(len(rows), width),
        torch.tensor(parents, dtype=torch.long).reshape(len(rows), width),
        torch.tensor(depths, dtype=torch.long).reshape(len(rows), width),
        counts,
        is_chain=False,
    )


@st.composite
def drawn_rows(draw: st.DrawFn, max_nodes: int = 9, num_ids: int = 4) -> list[tuple[int, int]]:
    """Nodes of any tree whose siblings differ."""
    row: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, max_nodes))):
        node = draw(st.integers(-1, len(row) - 1)), draw(st.integers(0, num_ids - 1))
        if node not in row:
            row.append(node)
    return row


def paths(tree: DraftTree, row: int = 0) -> list[Path]:
    """The tokens from the anchor to every node, in the order of the nodes; checks the records."""
    found: list[Path] = []
    nodes = zip(
        *(part[row].tolist() for part in (tree.ids, tree.parents, tree.depths)), strict=True
    )
    for index, (token, parent, depth) in enumerate(nodes):
        if index >= int(tree.counts[row]):
            assert (token, parent, depth) == (0, -1, 1)
            continue
        assert -1 <= parent < index
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert depth == len(found[-1])
    assert len(set(found)) == len(found)
    return found


# --- Records and masks -------------------------------------------------------------------------


def test_a_node_sees_itself_and_what_lies_between_it_and_the_anchor() -> None:
    # anchor -+- 0 -+- 1 --- 4
    #         |     +- 3
    #         +- 2 --- 5            and one node of padding
    tree = tree_of([(-1, 7), (0, 3), (-1, 5), (0, 4), (1, 9), (2, 9)], width=7)
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert ancestors(tree)[0].long().tolist() == expected


@given(st.lists(drawn_rows(), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_ancestors_are_found_by_climbing_from_parent_to_parent(
    rows: list[list[tuple[int, int]]],
) -> None:
    tree = tree_of(*rows, width=10)
    expected = torch.zeros(len(rows), 10, 10, dtype=torch.bool)
    for row, nodes in enumerate(rows):
        for start in range(10):
            node = start
            while node >= 0:
                expected[row, start, node] = True
                node = nodes[node][0] if node < len(nodes) else -1
    assert torch.equal(ancestors(tree), expected)


def test_a_chain_is_the_tree_with_one_path() -> None:
    drafted = chain(torch.tensor([[5, 6, 7], [8, 9, 4]]), torch.tensor([3, 1]))
    same = tree_of([(-1, 5), (0, 6), (1, 7)], [(-1, 8)])
    for part in ("ids", "parents", "depths", "counts"):
        assert torch.equal(getattr(drafted, part), getattr(same, part))
    assert torch.equal(ancestors(drafted), ancestors(same))
    whole = chain(torch.tensor([[5, 6, 7]]))
    assert paths(whole) == [(5,), (5, 6), (5, 6, 7)]
    assert torch.equal(ancestors(whole)[0], torch.ones(3, 3).tril().bool())


def test_trees_of_several_arms_become_one_tree_of_all_rows() -> None:
    tree = tree_of([(-1, 7), (0, 3), (0, 4)], [(-1, 1)])
    joined = join(
        [(torch.tensor([3, 1]), tree), (torch.tensor([0]), chain(torch.tensor([[2, 2]])))],
        num_rows=4,
        num_nodes=5,
    )
    assert not joined.is_chain
    assert (joined.num_rows, joined.num_nodes) == (4, 5)
    assert [paths(joined, row) for row in range(4)] == [
        [(2,), (2, 2)],
        [(1,)],
        [],  # in no part
        [(7,), (7, 3), (7, 4)],
    ]
    assert joined.exists.sum(1).tolist() == [2, 1, 0, 3]


def test_chains_alone_stay_a_chain_and_no_part_at_all_drafts_nothing() -> None:
    drafts = chain(torch.tensor([[2, 3]]))
    joined = join([(torch.tensor([1]), drafts)], num_rows=2, num_nodes=3)
    assert joined.is_chain
    assert paths(joined, 1) == [(2,), (2, 3)]
    nothing = join([], num_rows=2, num_nodes=0, device=torch.device("cpu"))
    assert nothing.is_chain
    assert nothing.counts.tolist() == [0, 0]
    assert ancestors(nothing).shape == (2, 0, 0)


def test_a_tree_wider_than_the_joined_one_is_refused() -> None:
    with pytest.raises(ValueError, match="a tree of 3 nodes does not fit into 2"):
        join([(torch.tensor([0]), chain(torch.ones(1, 3).long()))], num_rows=1, num_nodes=2)


# --- Growing -----------------------------------------------------------------------------------


def marginals(seed: int) -> Law:
    """Logits that depend on the depth only, as a block drafter's."""
    rows = 2.0 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return lambda path: rows[len(path)]


def after_path(seed: int) -> Law:
    """Logits that depend on the whole path."""

    def law(path: Path) -> Tensor:
        own = seed + sum(
            (token + 2) * (VOCABULARY + 3) ** place for place, token in enumerate(path)
        )
        return 2.0 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(own))

    return law


def ranked(law: Law, path: Path) -> list[tuple[float, int]]:
    """Every next token with its log-probability, likeliest first; plain arithmetic."""
    logits = law(path).tolist()
    total = math.log(sum(math.exp(x) for x in logits))
    return sorted(((x - total, token) for token, x in enumerate(logits)), reverse=True)


def best_first(law: Law, depth: int, num_nodes: int) -> list[Path]:
    """DDTree: take the best node from a heap; put in its next sibling and its first child."""
    score, token = ranked(law, ())[0]
    heap: list[tuple[float, Path, float, int]] = [(-score, (token,), 0.0, 0)]
    taken: list[Path] = []
    while heap and len(taken) < num_nodes:
        cost, path, above, rank = heapq.heappop(heap)
        taken.append(path)
        siblings = ranked(law, path[:-1])
        if rank + 1 < len(siblings):
            score, token = siblings[rank + 1]
            heapq.heappush(heap, (-above - score, (*path[:-1], token), above, rank + 1))
        if len(path) < depth:
            score, token = ranked(law, path)[0]
            heapq.heappush(heap, (cost - score, (*path, token), -cost, 0))
    return taken


def expand_and_rerank(law: Law, depth: int, top_k: int, num_nodes: int) -> list[Path]:
    """EAGLE-2: every level expands the top_k best of the level before; the best of all are kept."""
    level: list[tuple[float, Path]] = [(0.0, ())]
    everything: list[tuple[float, Path]] = []
    for _ in range(depth):
        children = [
            (above + score, (*path, token))
            for above, path in level
            for score, token in ranked(law, path)[:top_k]
        ]
        everything += children
        level = sorted(children, reverse=True)[:top_k]
    return [path for _, path in sorted(everything, reverse=True)[:num_nodes]]


def grow(grower: TreeGrower, laws: Sequence[Law], depth: int) -> DraftTree:
    """Grow one row a law, keeping account of the frontier's paths as a drafter would."""
    frontiers: list[list[Path]] = [[()] for _ in laws]
    for _ in range(depth):
        logits = torch.stack(
            [
                torch.stack([law(path) for path in frontier])
                for law, frontier in zip(laws, frontiers, strict=True)
            ]
        )
        grown = grower.extend(logits)
        frontiers = [
            [(*before[slot], token) for token, slot in zip(*row, strict=True)]
            for before, *row in zip(
                frontiers, grown.ids.tolist(), grown.slots.tolist(), strict=True
            )
        ]
    return grower.finish()


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 30])
@pytest.mark.parametrize("make", [marginals, after_path])
def test_an_unrestricted_search_takes_what_a_best_first_heap_takes(
    make: Callable[[int], Law], num_nodes: int
) -> None:
    laws, depth = [make(seed) for seed in (1, 2, 3, 4)], 5
    grower = TreeGrower(num_nodes=num_nodes, beam=num_nodes, num_children=num_nodes)
    tree = grow(grower, laws, depth)
    for row, law in enumerate(laws):
        assert paths(tree, row) == best_first(law, depth, num_nodes)
    assert grower.finite.all()


def test_marginals_of_a_block_may_be_shared_by_the_frontier_or_given_all_at_once() -> None:
    laws, depth = [marginals(seed) for seed in (5, 6)], 6
    rows = torch.stack([torch.stack([law((0,) * level) for level in range(depth)]) for law in laws])
    shared, at_once = (TreeGrower(num_nodes=20, beam=20, num_children=20) for _ in range(2))
    for level in range(depth):
        shared.extend(rows[:, level, None])
    at_once.extend_independent(rows)
    for tree in (shared.finish(), at_once.finish()):
        for row, law in enumerate(laws):
            assert paths(tree, row) == best_first(law, depth, 20)


@pytest.mark.parametrize(
    ("depth", "top_k", "num_nodes"), [(1, 3, 3), (4, 3, 10), (5, 4, 31), (3, 2, 14), (4, 5, 3)]
)
def test_a_tree_with_a_beam_is_expanded_and_reranked(
    depth: int, top_k: int, num_nodes: int
) -> None:
    laws = [after_path(seed) for seed in (11, 12, 13)]
    grower = TreeGrower(num_nodes=num_nodes, beam=top_k, num_children=top_k)
    tree = grow(grower, laws, depth)
    for row, law in enumerate(laws):
        assert paths(tree, row) == expand_and_rerank(law, depth, top_k, num_nodes)
    assert not tree.is_chain


def test_with_one_child_a_node_the_tree_is_the_greedy_chain() -> None:
    laws = [after_path(seed) for seed in (21, 22)]
    tree = grow(TreeGrower(num_nodes=4, beam=1, num_children=1), laws, depth=4)
    assert tree.is_chain
    for row, law in enumerate(laws):
        path: Path = ()
        for _ in range(4):
            path = (*path, ranked(law, path)[0][1])
        assert paths(tree, row) == [path[: length + 1] for length in range(4)]


def test_a_chain_is_cut_to_its_number_of_nodes() -> None:
    grower = TreeGrower(num_nodes=2, beam=1, num_children=1)
    grower.extend_independent(torch.eye(5)[[4, 2, 1]][None])
    assert paths(grower.finish()) == [(4,), (4, 2)]


def test_drafter_ids_become_target_ids() -> None:
    # Two drafter tokens that the target knows as 40 and 90; 40 is likelier at every place.
    grower = TreeGrower(num_nodes=4, beam=2, num_children=2, vocabulary=torch.tensor([90, 40]))
    first = grower.extend(torch.tensor([[[0.0, 2.0]]]))
    assert first.ids.tolist() == [[40, 90]]
    assert first.slots.tolist() == [[0, 0]]
    second = grower.extend(torch.tensor([[[0.0, 2.0]]]))
    assert second.ids.tolist() == [[40, 90]]
    assert second.slots.tolist() == [[0, 0]]  # 0.88 * 0.88 and 0.88 * 0.12 lead the level
    tree = grower.finish()
    assert sorted(paths(tree)) == [(40,), (40, 40), (40, 90), (90,)]


def test_certain_tokens_tie_with_their_parents_and_come_after_them() -> None:
    # 1000 above the rest: log-probability exactly 0, so all nodes of the certain path score 0.
    grower = TreeGrower(num_nodes=4, beam=4, num_children=4)
    grower.extend_independent(1000.0 * torch.eye(6)[[3, 1, 4, 1, 5]][None])
    assert paths(grower.finish()) == [(3,), (3, 1), (3, 1, 4), (3, 1, 4, 1)]


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 1000.0, -math.inf]), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    ),
    st.integers(2, 12),
    st.integers(1, 4),
    st.integers(2, 3),
)
@settings(max_examples=200, deadline=None)
def test_parents_come_before_their_children_whatever_ties(
    rows: list[list[float]], num_nodes: int, beam: int, num_children: int
) -> None:
    grower = TreeGrower(num_nodes=num_nodes, beam=beam, num_children=num_children)
    for row in rows:
        grower.extend(torch.tensor([[row]]))
    paths(grower.finish())


def test_tokens_that_cannot_be_said_are_not_drafted() -> None:
    grower = TreeGrower(num_nodes=6, beam=6, num_children=6)
    off = -math.inf
    grower.extend_independent(torch.tensor([[[off, 2.0, off, 1.0], [off, off, 0.0, off]]]))
    tree = grower.finish()
    assert tree.num_nodes == 6
    assert sorted(paths(tree)) == [(1,), (1, 2), (3,), (3, 2)]
    assert grower.finite.tolist() == [True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_children", [1, 3])
@pytest.mark.parametrize("level", [0, 1])
def test_logits_that_are_not_finite_are_noticed_and_do_no_harm(
    bad: float, num_children: int, level: int
) -> None:
    rows = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0))
    rows[1, level] = bad
    grower = TreeGrower(num_nodes=5, beam=num_children, num_children=num_children)
    for depth in range(3):
        frontier = grower.extend(rows[:, depth, None])
        assert 0 <= int(frontier.ids.min()) <= int(frontier.ids.max()) < 256
        assert 0 <= int(frontier.slots.min()) <= int(frontier.slots.max()) < num_children
    tree = grower.finish()
    assert grower.finite.tolist() == [True, False]
    assert len(paths(tree, 0)) == min(5, 3 * num_children**2)
    found = paths(tree, 1)
    if num_children > 1:
        assert len(found) == (0 if level == 0 else 3)


def test_one_nan_among_good_logits_is_noticed() -> None:
    rows = torch.randn(2, 1, 256, generator=torch.Generator().manual_seed(0))
    rows[0, 0, 17] = math.nan
    for num_children in (1, 3):
        grower = TreeGrower(num_nodes=3, beam=1, num_children=num_children)
        grower.extend(rows)
        assert grower.finite.tolist() == [False, True]


@pytest.mark.parametrize("size", [7, 64, 128, 640, 641])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_the_search_by_chunks_finds_the_greatest_in_order(size: int, num: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(3, 2, size, generator=generator)
    logits[0, 0] = logits[0, 0].round()  # equals
    values, ids = top(logits, num)
    for row, found, at in zip(
        logits.flatten(0, 1).tolist(),
        values.flatten(0, 1).tolist(),
        ids.flatten(0, 1).tolist(),
        strict=True,
    ):
        assert found == sorted(row, reverse=True)[:num]
        assert [row[index] for index in at] == found
        assert len(set(at)) == num
        if num == 1:
            assert at == [row.index(max(row))]
    assert all(a >= b for a, b in pairwise(values[0, 0].tolist()))
