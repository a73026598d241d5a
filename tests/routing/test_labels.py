from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.fakes import (
    DRAFTER_KINDS,
    TAP_SIZE,
    chain_arm,
    drafted,
    prefilled,
    random_ids,
    tiny_ar,
    tiny_diffusion,
    tiny_drafter,
    tree_arm,
)
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.routing import labels
from whiflash_infer.routing.labels import (
    DraftLabels,
    following,
    label,
    label_ar,
    label_ar_tree,
    label_arms,
    label_diffusion,
    label_diffusion_tree,
    previous_ids,
)
from whiflash_infer.target import Target, TargetTables
from whiflash_infer.trees import DraftTree
from whiflash_infer.types import TeacherRows

LONGEST = 4


class Drafting:
    """One drafter, both as the decoder runs it and as the labels see it."""

    def __init__(self, kind: str, target: Target) -> None:
        shape, self.target = target.drafter_shape, target
        flavour = "all" if kind == "ar-3.1-qwen3" else "classic"
        self.ar = tiny_ar(shape, seed=2, tap_size=TAP_SIZE, flavour=flavour)
        extras = {"markov_rank": 4, "sliding_window": 6} if kind == "windowed" else {}
        self.diffusion = tiny_diffusion(shape, seed=2, **extras)
        self.kind = kind

    def drafts(self, ids: Tensor) -> list[int]:
        """What a fresh decoder drafts after the last of `ids`."""
        if self.kind.startswith("ar"):
            arm: Arm = ARArm(CachedAR(self.ar, self.target.tables), draft_length=LONGEST)
        else:
            arm = DiffusionArm(CachedDiffusion(self.diffusion, self.target.tables))
        texts, _ = prefilled(self.target, ids)
        return drafted(arm, texts, LONGEST)

    def labels(self, ids: Tensor, lengths: Tensor, anchors: Tensor) -> DraftLabels:
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        with torch.no_grad():
            rows = self.target.teach(ids, mask)
        common = self.target.tables, ids, lengths, rows, anchors
        if self.kind.startswith("ar"):
            return label_ar(self.ar, *common, draft_length=LONGEST)
        return label_diffusion(self.diffusion, *common)

    def text(self, length: int, rng: random.Random) -> Tensor:
        """Some of the drafter's own words and some others, so that matches of all lengths occur."""
        ids = random_ids(4, seed=rng.randint(0, 99))
        while len(ids) < length:
            words = self.drafts(ids)[: rng.randint(0, LONGEST)]
            ids = torch.cat([ids, torch.tensor([*words, rng.randint(5, 260)])])
        return ids[:length]


@pytest.fixture(params=["ar", "ar-3.1-qwen3", "diffusion", "windowed"])
def drafting(request: pytest.FixtureRequest, target: Target) -> Drafting:
    return Drafting(request.param, target)


@torch.no_grad()
def test_labels_are_the_leading_matches_of_what_a_decoder_would_draft(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "_ANCHORS_A_PASS", 5)
    rng = random.Random(0)
    texts = [drafting.text(length, rng) for length in (19, 14)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    # Padding that happens to continue the text must not count: it is no part of it.
    ids[1, 14:18] = torch.tensor(drafting.drafts(texts[1]))
    anchors = torch.arange(1, 14).expand(2, -1)
    found = drafting.labels(ids, torch.tensor([19, 14]), anchors)
    for row, text in enumerate(texts):
        for column, anchor in enumerate(anchors[row].tolist()):
            accepted, failed = 0, False
            for draft, token in zip(
                drafting.drafts(text[: anchor + 1]), text[anchor + 1 :].tolist(), strict=False
            ):
                failed = draft != token
                if failed:
                    break
                accepted += 1
            censored = not failed and accepted < LONGEST
            assert int(found.accepted[row, column]) == accepted
            assert bool(found.censored[row, column]) == censored
    assert set(found.accepted.flatten().tolist()) >= {0, 1, 2, 3}
    assert found.censored.any()


@pytest.mark.parametrize(
    ("anchor", "drafts", "accepted", "censored"),
    [
        # The text is 10 11 12 13 14. After the anchor 12, two drafts can be judged.
        (2, [13, 14, 77, 77], 2, True),
        (2, [13, 14, 0, 0], 2, True),  # agreeing with padding is no match
        (2, [13, 77, 77, 77], 1, False),
        (2, [77, 14, 77, 77], 0, False),
        (2, [13, 14], 2, False),  # the longest draft: nothing is left to know
        (4, [77, 77], 0, True),
    ],
)
def test_a_label_is_censored_where_the_text_ends_before_a_draft_fails(
    anchor: int, drafts: list[int], accepted: int, censored: bool
) -> None:
    ids, lengths = torch.tensor([[10, 11, 12, 13, 14, 0, 0]]), torch.tensor([5])
    found = labels._match(torch.tensor([[drafts]]), ids, lengths, torch.tensor([[anchor]]))
    assert (found.accepted.tolist(), found.censored.tolist()) == ([[accepted]], [[censored]])


def test_following_tokens_stop_where_the_text_stops() -> None:
    ids, lengths = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 0]]), torch.tensor([4, 3])
    tokens, exists = following(ids, lengths, torch.tensor([[0, 2], [1, 2]]), 2)
    t, f = True, False
    assert exists.tolist() == [[[t, t], [t, f]], [[t, f], [f, f]]]
    assert tokens[exists].tolist() == [11, 12, 13, 22]


def test_previous_tokens_are_the_anchor_and_then_what_follows_it() -> None:
    ids, lengths = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 0, 0]]), torch.tensor([5, 3])
    found = previous_ids(ids, lengths, torch.tensor([[0, 1], [1, 1]]), 3)
    assert found[0].tolist() == [[10, 11, 12], [11, 12, 13]]
    assert found[1, 0, :2].tolist() == [21, 22]  # behind them the text has ended


# ---- chains and trees, as they are grown


ArmOf = Callable[..., ARArm | DiffusionArm]
ARMS: dict[str, ArmOf] = {
    "chain": chain_arm,
    "tree": lambda drafter: tree_arm(drafter, num_nodes=24),
    "small tree": lambda drafter: tree_arm(drafter, num_nodes=6),
}


@dataclass(frozen=True)
class Decoder:
    """One arm on a drafter with an empty cache every time."""

    kind: str
    target: Target
    arm_of: ArmOf
    softcap: float | None = None

    def arm(self) -> ARArm | DiffusionArm:
        drafter = tiny_drafter(self.kind, self.target, seed=2)
        tables = self.target.tables
        drafter.tables = TargetTables(tables.embedding, tables.head, self.softcap)
        return self.arm_of(drafter)

    @torch.no_grad()
    def tree(self, ids: Tensor, num_draft: int = LONGEST) -> DraftTree:
        """What is drafted after the last of `ids`."""
        texts, _ = prefilled(self.target, ids)
        arm = self.arm()
        arm.drafter.reserve(1, 192)
        arm.drafter.catch_up(texts, [0])
        return arm.draft(texts, [0], [num_draft]).tree

    def text(self, length: int, rng: random.Random) -> Tensor:
        """Ways into its own trees, and other words between them."""
        ids = random_ids(4, seed=rng.randint(0, 99))
        while len(ids) < length:
            paths = paths_of(self.tree(ids))
            path = rng.choice([[], rng.choice(paths), max(paths, key=len)])
            ids = torch.cat([ids, torch.tensor([*path, rng.randint(5, 260)])])
        return ids[:length]


def paths_of(tree: DraftTree) -> list[list[int]]:
    """The tokens from the anchor to each node."""
    paths: list[list[int]] = []
    for node in range(int(tree.counts[0])):
        parent = int(tree.parents[0, node])
        paths.append([*(paths[parent] if parent >= 0 else []), int(tree.ids[0, node])])
    return paths


def met(tree: DraftTree, after: Sequence[int]) -> tuple[int, bool]:
    """How many tokens a tree has of what comes after its anchor, and whether it has yet more."""
    paths = paths_of(tree)
    accepted = 0
    while accepted < len(after) and list(after[: accepted + 1]) in paths:
        accepted += 1
    longer = [p for p in paths if len(p) > accepted and p[:accepted] == list(after[:accepted])]
    return accepted, accepted == len(after) and bool(longer)


@torch.no_grad()
def teach(target: Target, ids: Tensor, lengths: Tensor) -> TeacherRows:
    return target.teach(ids, torch.arange(ids.shape[1]) < lengths[:, None])


@dataclass(frozen=True)
class Labelling:
    """Texts in one padded batch, with what the labelling functions take."""

    texts: list[Tensor]
    ids: Tensor
    lengths: Tensor
    rows: TeacherRows
    anchors: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, TeacherRows, Tensor]:
        return self.ids, self.lengths, self.rows, self.anchors


def labelling(decoder: Decoder, lengths: Sequence[int], seed: int = 0) -> Labelling:
    rng = random.Random(seed)
    texts = [decoder.text(length, rng) for length in lengths]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    for row, text in enumerate(texts):  # padding that continues the text is no part of it
        [*path], rest = paths_of(decoder.tree(text))[-1], ids[row, len(text) :]
        rest[: len(path)] = torch.tensor(path)[: len(rest)]
    anchors = torch.arange(1, min(lengths)).expand(len(texts), -1)
    sizes = torch.tensor(lengths)
    return Labelling(texts, ids, sizes, teach(decoder.target, ids, sizes), anchors)


def check(found: DraftLabels, made: Labelling, decoder: Decoder) -> None:
    """Against a fresh decoder at every anchor."""
    for row, text in enumerate(made.texts):
        for column, anchor in enumerate(made.anchors[row].tolist()):
            expected = met(decoder.tree(text[: anchor + 1]), text[anchor + 1 :].tolist())
            labelled = int(found.accepted[row, column]), bool(found.censored[row, column])
            assert labelled == expected, (row, anchor)


@pytest.mark.parametrize(
    ("kind", "arm"),
    [(kind, arm) for kind in DRAFTER_KINDS for arm in ("chain", "tree")]
    + [(kind, "small tree") for kind in ("ar-all", "diffusion", "markov")],
)
def test_every_arm_is_labelled_with_what_its_decoder_would_accept(
    kind: str, arm: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "_LOGITS_A_PASS", 15)  # several parts
    monkeypatch.setattr(labels, "_BLOCKS_A_PASS", 7)
    decoder = Decoder(kind, target, ARMS[arm])
    made = labelling(decoder, (23, 17))
    found = label(decoder.arm(), *made.arguments)
    check(found, made, decoder)
    assert len(set(found.accepted.flatten().tolist())) >= 3
    assert found.censored.any()


@pytest.mark.parametrize("kind", ["diffusion", "markov"])
def test_a_soft_cap_counts_in_a_labelled_tree(kind: str, target: Target) -> None:
    decoder = Decoder(kind, target, ARMS["small tree"], softcap=6.0)
    made = labelling(decoder, (20, 15))
    capped = label(decoder.arm(), *made.arguments)
    check(capped, made, decoder)
    uncapped = label(Decoder(kind, target, ARMS["small tree"]).arm(), *made.arguments)
    assert not torch.equal(capped.accepted, uncapped.accepted)


def test_trees_may_be_labelled_without_their_arms(target: Target) -> None:
    for kind in ("ar-all", "windowed"):
        decoder = Decoder(kind, target, ARMS["tree"])
        made, arm = labelling(decoder, (12, 12)), decoder.arm()
        if isinstance(arm, ARArm):
            sizes = {"draft_length": LONGEST, "top_k": 3, "num_nodes": 24}
            found = label_ar_tree(arm.net, arm.drafter.tables, *made.arguments, **sizes)
        else:
            found = label_diffusion_tree(arm.net, arm.drafter.tables, *made.arguments, num_nodes=24)
        check(found, made, decoder)


@pytest.mark.parametrize("kind", DRAFTER_KINDS)
def test_labels_of_a_chain_are_those_of_the_training_pass(kind: str, target: Target) -> None:
    decoder = Decoder(kind, target, ARMS["chain"])
    made, arm = labelling(decoder, (20, 27)), decoder.arm()
    tables = arm.drafter.tables
    if isinstance(arm, ARArm):
        trained = label_ar(arm.net, tables, *made.arguments, draft_length=LONGEST)
    else:
        trained = label_diffusion(arm.net, tables, *made.arguments)
    found = label(arm, *made.arguments)
    assert torch.equal(found.accepted, trained.accepted)
    assert torch.equal(found.censored, trained.censored)


def test_arms_labelled_together_have_the_labels_that_they_have_alone(target: Target) -> None:
    nets = {kind: tiny_drafter(kind, target, seed=2) for kind in ("ar-classic", "markov")}
    arms: dict[str, Arm] = {}
    for kind, drafter in nets.items():
        arms |= {f"{kind}-tree": tree_arm(drafter), f"{kind}-chain": chain_arm(drafter)}
    made = labelling(Decoder("markov", target, ARMS["tree"]), (25, 30))
    together = label_arms(arms, *made.arguments)
    assert list(together) == list(arms)
    for name, arm in arms.items():
        alone = label(arm, *made.arguments)
        assert torch.equal(together[name].accepted, alone.accepted)
        assert torch.equal(together[name].censored, alone.censored)


@pytest.mark.parametrize("arm", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["ar-classic", "diffusion", "markov"])
def test_an_arm_that_may_draft_k_has_as_much_accepted_as_the_label_and_k_allow(
    kind: str, arm: str, target: Target
) -> None:
    decoder = Decoder(kind, target, ARMS[arm])
    made = labelling(decoder, (14,))
    found = label(decoder.arm(), *made.arguments).accepted[0].tolist()
    [text] = made.texts
    for anchor, full in zip(made.anchors[0].tolist(), found, strict=True):
        for num_draft in range(1, LONGEST + 1):
            tree = decoder.tree(text[: anchor + 1], num_draft)
            assert met(tree, text[anchor + 1 :].tolist())[0] == min(full, num_draft)


def test_at_the_end_of_a_text_and_in_padding_nothing_is_known(target: Target) -> None:
    decoder = Decoder("ar-classic", target, ARMS["tree"])
    ids, lengths = torch.stack([random_ids(9, seed=1), random_ids(9, seed=2)]), torch.tensor([9, 5])
    anchors = torch.tensor([[8, 8], [4, 7]])
    found = label(decoder.arm(), ids, lengths, teach(target, ids, lengths), anchors)
    assert found.accepted.tolist() == [[0, 0], [0, 0]]
    assert found.censored.all()
