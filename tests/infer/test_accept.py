from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.infer.test_trees import drawn_rows, tree_of
from whiflash_infer.accept import accept_probs, accept_sampled, residual, walk
from whiflash_infer.trees import DraftTree, TreeGrower, chain, join

Nodes = list[tuple[int, int]]
Law = dict[tuple[tuple[int, ...], int], Fraction]  # of (path of nodes, bonus)


def dirichlet(seed: int, *, zeros: int = 0) -> Tensor:
    weights = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[:zeros] = 0.0
    return weights / weights.sum()


def one_hot(token: int) -> Tensor:
    return torch.eye(8, dtype=torch.float64)[token]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *[(dirichlet(seed), dirichlet(seed + 10)) for seed in range(4)],
        (dirichlet(4), one_hot(5)),
        (dirichlet(5, zeros=3), one_hot(1)),  # a draft that the target never says
        (dirichlet(5, zeros=3), dirichlet(6)),
        (dirichlet(6), dirichlet(7, zeros=5)),
        (one_hot(2), dirichlet(8)),
        (one_hot(2), one_hot(2)),
        (one_hot(2), one_hot(3)),
        (dirichlet(9), dirichlet(9)),
    ],
)
def test_the_emitted_token_is_distributed_as_the_target_whatever_the_draft(
    target: Tensor, draft: Tensor
) -> None:
    drawn = draft.nonzero().flatten()
    rows = (len(drawn), -1)
    keep = accept_probs(target.expand(*rows), draft.expand(*rows), drawn)
    kept = torch.zeros(8, dtype=torch.float64)
    kept[drawn] = draft[drawn] * keep
    rejected = (draft[drawn] * (1.0 - keep)).sum()
    replaced = residual(target, draft)
    assert float(replaced.sum()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(kept + rejected * replaced, target, rtol=0.0, atol=1e-12)


def test_a_draft_is_kept_with_the_ratio_of_target_to_draft_up_to_one() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    draft = torch.tensor([[0.2, 0.6, 0.2]] * 3)
    keep = accept_probs(target, draft, torch.tensor([0, 1, 2]))
    assert keep.tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert residual(target[0], draft[0]).tolist() == pytest.approx([1.0, 0.0, 0.0])


# --- Chains drawn from the drafter's own distribution --------------------------------------------


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    return (uniforms[:, None] >= probs.cumsum(-1)).sum(-1)


def test_a_sampled_chain_emits_every_token_by_the_targets_law() -> None:
    # Quarters everywhere, so four uniforms a draw stand for all of them, and sums are exact.
    target = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.25, 0.5, 0.25]])
    draft = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    uniforms = torch.arange(4) / 4 + 0.125
    emitted, reached = torch.zeros(3, 3), torch.zeros(3)
    for first, second in product(range(3), repeat=2):
        weight = float(draft[0, first] * draft[1, second]) / 64
        for picked in product(range(4), repeat=3):
            *accepts, final = uniforms[list(picked)]
            accepted, bonus = accept_sampled(
                target,
                draft,
                torch.tensor([first, second]),
                torch.stack(accepts),
                final,
                inverse_cdf,
            )
            tokens = [*[first, second][: int(accepted)], int(bonus)]
            for place, token in enumerate(tokens):
                emitted[place, token] += weight
                reached[place] += weight
    assert torch.equal(emitted / reached[:, None], target)
    # 1 - (total variation 1/4) at each place
    assert reached.tolist() == [1.0, 0.75, 0.5625]


@pytest.mark.parametrize(
    ("uniforms", "expected"),
    [([0.9, 0.4], (2, 1)), ([0.9, 0.6], (1, 2)), ([0.9, 0.5], (1, 2)), ([0.0, 0.0], (2, 1))],
)
def test_a_draft_stays_while_its_uniform_is_below_the_ratio(
    uniforms: list[float], expected: tuple[int, int]
) -> None:
    # Ratios 2 and 1/2; the residual after the second draft has all its mass on token 2, and the
    # target after both says token 1.
    target = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]])
    draft = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    found = accept_sampled(
        target,
        draft,
        torch.tensor([0, 0]),
        torch.tensor(uniforms, dtype=torch.float64),
        torch.tensor(0.999, dtype=torch.float64),
        inverse_cdf,
    )
    assert tuple(map(int, found)) == expected


def test_with_no_drafts_the_token_is_the_targets_own() -> None:
    found = accept_sampled(
        torch.tensor([[0.5, 0.25, 0.25]]),
        torch.empty(0, 3),
        torch.empty(0, dtype=torch.long),
        torch.empty(0),
        torch.tensor(0.6),
        inverse_cdf,
    )
    assert tuple(map(int, found)) == (0, 1)


# --- Following the target's choices --------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "drafts", "accepted", "bonus"),
    [
        ([4, 1, 6, 2], [5, 1, 6], 0, 4),  # a later match counts for nothing
        ([4, 1, 6, 2], [4, 1, 6], 3, 2),
        ([4, 1, 6, 2], [4, 3, 6], 1, 1),
        ([4, 1, 6, 2], [4, 1, 7], 2, 6),
        ([4], [], 0, 4),
    ],
)
@pytest.mark.parametrize("is_chain", [True, False])
def test_drafts_count_up_to_the_first_that_the_target_would_not_say(
    said: list[int], drafts: list[int], accepted: int, bonus: int, is_chain: bool
) -> None:
    tree = chain(torch.tensor([drafts], dtype=torch.long))
    tree = DraftTree(tree.ids, tree.parents, tree.depths, tree.counts, is_chain)
    found = walk(torch.tensor([said]), tree)
    assert (found.accepted.tolist(), found.bonus.tolist()) == ([accepted], [bonus])
    assert found.path[0, :accepted].tolist() == list(range(accepted))


# anchor -+- 0 "7" -+- 1 "3" --- 4 "9"
#         |         +- 3 "4"
#         +- 2 "5" --- 5 "9"
DRAWN: Nodes = [(-1, 7), (0, 3), (-1, 5), (0, 4), (1, 9), (2, 9)]


@pytest.mark.parametrize(
    ("choices", "path", "bonus"),
    [
        # after: anchor, 0, 1, 2, 3, 4, 5
        ([7, 4, 9, 9, 1, 1, 2], [0, 3], 1),
        ([7, 3, 9, 9, 1, 6, 2], [0, 1, 4], 6),
        ([7, 3, 8, 9, 1, 6, 2], [0, 1], 8),
        ([5, 3, 9, 9, 1, 6, 2], [2, 5], 2),
        ([5, 3, 9, 0, 1, 6, 2], [2], 0),
        ([9, 3, 9, 9, 1, 6, 2], [], 9),  # deeper nodes hold 9, none under the anchor
    ],
)
def test_the_walk_takes_the_child_that_equals_the_choice(
    choices: list[int], path: list[int], bonus: int
) -> None:
    found = walk(torch.tensor([choices]), tree_of(DRAWN))
    assert found.accepted.tolist() == [len(path)]
    assert found.path[0, : len(path)].tolist() == path
    assert found.bonus.tolist() == [bonus]


def walk_by_hand(choices: list[int], nodes: Nodes) -> tuple[tuple[int, ...], int]:
    path: list[int] = []
    at = -1
    while True:
        said = choices[at + 1]
        equal = [i for i, (parent, token) in enumerate(nodes) if parent == at and token == said]
        if not equal:
            return tuple(path), said
        (at,) = equal
        path.append(at)


@given(st.lists(drawn_rows(num_ids=2), min_size=1, max_size=4), st.data())
@settings(max_examples=150, deadline=None)
def test_all_rows_are_walked_as_one_by_one(rows: list[Nodes], data: st.DataObject) -> None:
    width = max(map(len, rows)) + data.draw(st.integers(0, 2))
    line = st.lists(st.integers(0, 1), min_size=width + 1, max_size=width + 1)
    choices = [data.draw(line) for _ in rows]
    found = walk(torch.tensor(choices), tree_of(*rows, width=width))
    for row, nodes in enumerate(rows):
        path, bonus = walk_by_hand(choices[row], nodes)
        accepted = int(found.accepted[row])
        assert (tuple(found.path[row, :accepted].tolist()), int(found.bonus[row])) == (path, bonus)
    assert ((found.path >= 0) & (found.path < max(width, 1))).all()


@pytest.mark.parametrize("is_chain", [True, False])
def test_padding_is_never_accepted(is_chain: bool) -> None:
    # The target says 0, the token of padding, everywhere.
    drafts = chain(torch.tensor([[0, 0, 0]]), torch.tensor([2]))
    joined = join([(torch.tensor([1]), drafts)], num_rows=2, num_nodes=5)
    tree = DraftTree(joined.ids, joined.parents, joined.depths, joined.counts, is_chain)
    found = walk(torch.zeros(2, 6, dtype=torch.long), tree)
    assert found.accepted.tolist() == [0, 2]
    assert found.bonus.tolist() == [0, 0]


def test_nothing_waits_for_the_device() -> None:
    # Tensors of the meta device hold no values, so reading one on the host fails.
    with torch.device("meta"):
        grower = TreeGrower(num_nodes=6, beam=2, num_children=3)
        grower.extend(torch.zeros(2, 1, 64))
        grower.extend(torch.zeros(2, 2, 64))
        part = torch.zeros(2, dtype=torch.long), grower.finish()
        tree = join([part], num_rows=3, num_nodes=8)
        assert walk(torch.zeros(3, 9, dtype=torch.long), tree).bonus.shape == (3,)
        drafts = chain(torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, dtype=torch.long))
        assert walk(torch.zeros(2, 5, dtype=torch.long), drafts).bonus.shape == (2,)
        assert grower.finite.shape == (2,)
        ids, uniforms = torch.zeros(4, dtype=torch.long), torch.zeros(4)
        probs = torch.zeros(5, 64)
        found = accept_sampled(probs, probs[1:], ids, uniforms, uniforms[0], inverse_cdf)
        assert found[1].shape == ()


# The law of what is emitted, in exact fractions ---------------------------------------------------

# anchor -+- 0 "2" -+- 2 "1"
#         |         +- 3 "3"
#         +- 1 "0" --- 4 "1"
SMALL: Nodes = [(-1, 2), (-1, 0), (0, 1), (0, 3), (1, 1)]
NUM_IDS = 4


def target_law(row: int) -> list[Fraction]:
    """The target after row `row` of the pass; one of them never says what is drafted there."""
    weights = [[3, 1, 4, 2], [2, 5, 1, 7], [6, 0, 3, 1], [1, 1, 1, 1], [9, 2, 2, 5], [0, 0, 1, 0]]
    return [Fraction(weight, sum(weights[row])) for weight in weights[row]]


def children_in_order(at: int, path: tuple[int, ...], chance: Fraction, law: Law) -> None:
    """Try the children one after the other, each against what refused ones left of the target."""
    left = target_law(at + 1)
    for child, (parent, token) in enumerate(SMALL):
        if parent != at or not left[token] * chance:
            continue
        children_in_order(child, (*path, child), chance * left[token], law)
        chance *= 1 - left[token]
        rest = 1 - left[token]
        left[token] = Fraction(0)
        left = [part / rest for part in left] if rest else left
    for bonus, part in enumerate(left):
        law[path, bonus] += chance * part


def plain_decoding() -> Law:
    """What the target says by itself, cut where it leaves the tree."""
    law: Law = defaultdict(Fraction)

    def go_on(at: int, path: tuple[int, ...], chance: Fraction) -> None:
        for token, part in enumerate(target_law(at + 1)):
            if (at, token) in SMALL:
                child = SMALL.index((at, token))
                go_on(child, (*path, child), chance * part)
            else:
                law[path, token] += chance * part

    go_on(-1, (), Fraction(1))
    return law


def said(law: Law) -> Law:
    return {outcome: chance for outcome, chance in law.items() if chance}


def test_drawing_the_target_and_following_the_equal_child_is_trying_children_with_residuals() -> (
    None
):
    in_order: Law = defaultdict(Fraction)
    children_in_order(-1, (), Fraction(1), in_order)

    all_choices = list(product(range(NUM_IDS), repeat=len(SMALL) + 1))
    found = walk(torch.tensor(all_choices), tree_of(*[SMALL] * len(all_choices)))
    followed: Law = defaultdict(Fraction)
    for choices, accepted, path, bonus in zip(
        all_choices, found.accepted.tolist(), found.path.tolist(), found.bonus.tolist(), strict=True
    ):
        chance = Fraction(1)
        for row, token in enumerate(choices):
            chance *= target_law(row)[token]
        followed[tuple(path[:accepted]), bonus] += chance

    assert said(followed) == said(in_order) == said(plain_decoding())
    assert sum(followed.values()) == 1
    first = [Fraction(0)] * NUM_IDS
    for (path, bonus), chance in followed.items():
        first[SMALL[path[0]][1] if path else bonus] += chance
    assert first == target_law(0)
