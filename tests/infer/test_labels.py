from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.fakes import TAP_SIZE, drafted, prefilled, random_ids, tiny_ar, tiny_diffusion
from whiflash_infer import labels
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.labels import (
    DraftLabels,
    following,
    label_ar,
    label_diffusion,
    previous_ids,
)
from whiflash_infer.target import Target

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
