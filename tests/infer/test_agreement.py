"""Dense labels against the decoder, with drafters that have learnt something."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import SOFT_CE, TAPS, ar_config, block_objective, random_ids
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.labels import label_ar, label_diffusion
from whiflash_infer.routing.policies import RandomPolicy, StaticPolicy
from whiflash_infer.target import Target
from whiflash_infer.types import Generation
from whiflash_train.batches import DrafterBatch
from whiflash_train.objectives import ar_objective, diffusion_objective
from whiflash_train.teacher import MemoryTeacher, OnlineTeacher
from whiflash_train.warm_start import start_ar, start_diffusion, start_head

PROMPT, NEW = 12, 36


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    """A prompt and its greedy answer."""
    prompt = random_ids(PROMPT, seed=0).tolist()
    plain = RoutedDecoder(target, {}, StaticPolicy("plain"))
    return prompt + plain.answer(prompt, GenerationOptions(max_new_tokens=NEW)).output_ids.tolist()


def as_batch(text: list[int]) -> DrafterBatch:
    anchors = torch.arange(PROMPT, len(text) - 1)[None]
    return DrafterBatch(
        ids=torch.tensor([text]),
        lengths=torch.tensor([len(text)]),
        supervised=(torch.arange(len(text)) >= PROMPT)[None],
        anchors=anchors,
        anchor_mask=torch.ones_like(anchors, dtype=torch.bool),
        rows=torch.tensor([0]),
    )


@pytest.fixture(scope="module", params=[(0, None), (8, 16)], ids=["plain", "markov-window"])
def arms(
    request: pytest.FixtureRequest, target: Target, text: list[int]
) -> dict[str, ARArm | DiffusionArm]:
    """Drafters trained on the text until they draft much of it, but not all."""
    torch.manual_seed(0)
    shape, tables, batch = target.drafter_shape, target.tables, as_batch(text)
    teacher = MemoryTeacher(target)
    ar = ARDrafter(ar_config(shape, shape.vocab_size))
    start_ar(ar, target)
    start_head(ar, target, trainable=True)
    diffusion = DiffusionDrafter(
        DiffusionDrafterConfig(
            shape=shape,
            num_layers=1,
            block_size=6,
            mask_token_id=3,
            num_target_layers=8,
            tap_layer_ids=TAPS,
            markov_rank=request.param[0],
            sliding_window=request.param[1],
        )
    )
    start_diffusion(diffusion, target)
    objectives = [
        (
            ar,
            lambda: ar_objective(
                ar,
                batch,
                teacher=teacher,
                draft_length=4,
                step_decay=0.8,
                draw_steps=False,
                loss=SOFT_CE,
            ),
        ),
        (
            diffusion,
            lambda: diffusion_objective(
                diffusion, batch, teacher=teacher, objective=block_objective("dpace")
            ),
        ),
    ]
    for net, objective in objectives:
        optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=4e-3)
        for _ in range(40):
            optimizer.zero_grad()
            objective()[0].backward()
            optimizer.step()
        net.eval().requires_grad_(False)
    return {
        "ar": ARArm(CachedAR(ar, tables), draft_length=4),
        "diffusion": DiffusionArm(CachedDiffusion(diffusion, tables)),
    }


@pytest.fixture(scope="module")
def labels(
    target: Target, text: list[int], arms: dict[str, ARArm | DiffusionArm]
) -> dict[str, dict[int, int]]:
    """Accepted drafts by arm and position."""
    batch = as_batch(text)
    rows = OnlineTeacher(target)(batch)
    sequences = batch.ids, batch.lengths, rows, batch.anchors
    ar, diffusion = arms["ar"], arms["diffusion"]
    assert isinstance(ar, ARArm)
    assert isinstance(diffusion, DiffusionArm)
    found = {
        "ar": label_ar(ar.net, ar.drafter.tables, *sequences, draft_length=4),
        "diffusion": label_diffusion(diffusion.net, diffusion.drafter.tables, *sequences),
    }
    positions = batch.anchors[0].tolist()
    return {
        arm: dict(zip(positions, part.accepted[0].tolist(), strict=True))
        for arm, part in found.items()
    }


def decode(
    target: Target,
    text: list[int],
    arms: dict[str, ARArm | DiffusionArm],
    policy: StaticPolicy | RandomPolicy,
) -> Generation:
    decoder = RoutedDecoder(target, arms, policy)
    options = GenerationOptions(max_new_tokens=NEW, stop_ids=frozenset())
    return decoder.answer(text[:PROMPT], options)


@pytest.mark.parametrize(
    "policy",
    [StaticPolicy("ar"), StaticPolicy("diffusion"), RandomPolicy(0), RandomPolicy(1)],
    ids=["ar", "diffusion", "random-0", "random-1"],
)
def test_dense_labels_equal_what_the_decoder_accepts_at_every_visited_position(
    policy: StaticPolicy | RandomPolicy,
    target: Target,
    text: list[int],
    arms: dict[str, ARArm | DiffusionArm],
    labels: dict[str, dict[int, int]],
) -> None:
    result = decode(target, text, arms, policy)
    assert text[PROMPT:] == result.output_ids.tolist()
    visited = [r for r in result.rounds if r.arm != "plain" and r.num_draft]
    for done in visited:
        assert done.accepted == min(labels[done.arm][done.position], done.num_draft)
    # The comparison means something only if drafts of several lengths were accepted.
    assert len({done.accepted for done in visited}) >= 2
    assert max(done.accepted for done in visited) >= 3


def test_trained_drafters_leave_the_greedy_text_in_fewer_rounds(
    target: Target, text: list[int], arms: dict[str, ARArm | DiffusionArm]
) -> None:
    for arm in ("ar", "diffusion"):
        result = decode(target, text, arms, StaticPolicy(arm))
        assert result.decoded_tokens / len(result.rounds) > 1.5
