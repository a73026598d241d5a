from __future__ import annotations

import pytest
import torch

from tests.fakes import TAPS, random_ids
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.target import Target
from whiflash_train.warm_start import start_ar, start_diffusion, start_head


def diffusion(target: Target, num_layers: int) -> DiffusionDrafter:
    return DiffusionDrafter(
        DiffusionDrafterConfig(
            shape=target.drafter_shape,
            num_layers=num_layers,
            block_size=4,
            mask_token_id=3,
            num_target_layers=8,
            tap_layer_ids=TAPS,
        )
    )


@torch.no_grad()
def test_a_started_ar_drafter_attends_like_the_targets_last_layer(target: Target) -> None:
    net = ARDrafter(
        ARDrafterConfig(shape=target.drafter_shape, draft_vocab_size=50, tap_layer_ids=TAPS)
    )
    start_ar(net, target)
    ids = random_ids(9, seed=0)[None]
    taps = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).taps
    source = target.layer(7)
    hidden = taps[..., -64:]
    expected = source.self_attn.v_proj(source.input_layernorm(hidden))  # pyright: ignore
    _, _, values = net.entry(torch.zeros_like(hidden), net.fuse(taps), torch.arange(9)[None])
    similarity = torch.cosine_similarity(values.flatten(2), expected, dim=-1)
    assert similarity.min() > 0.9


@torch.no_grad()
def test_a_started_block_drafter_makes_the_targets_keys_and_values(target: Target) -> None:
    net = diffusion(target, 1)
    start_diffusion(net, target)
    ids = random_ids(9, seed=0)[None]
    taps = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).taps
    source = target.layer(7)
    normed = source.input_layernorm(taps[..., -64:])  # pyright: ignore
    (keys, values) = net.context_entries(taps, torch.zeros(1, 9, dtype=torch.long))[0]
    own_keys = source.self_attn.k_proj(normed)  # pyright: ignore
    own_values = source.self_attn.v_proj(normed)  # pyright: ignore
    assert torch.cosine_similarity(values.flatten(2), own_values, dim=-1).min() > 0.9
    # The per-head norm evens out lengths, so keys agree in direction and in typical size.
    pairs = torch.cosine_similarity(keys, own_keys.view_as(keys), dim=-1)
    assert pairs.min() > 0.9
    assert keys.pow(2).mean().sqrt() == pytest.approx(float(own_keys.pow(2).mean().sqrt()), rel=0.3)


def test_the_head_starts_as_the_targets_rows_of_the_draft_vocabulary(target: Target) -> None:
    net = ARDrafter(
        ARDrafterConfig(shape=target.drafter_shape, draft_vocab_size=3, tap_layer_ids=TAPS)
    )
    net.set_vocabulary(torch.tensor([7, 2, 100]))
    start_head(net, target, trainable=False)
    expected = target.model.get_output_embeddings().weight[[2, 7, 100]]  # pyright: ignore
    assert torch.equal(net.lm_head.weight, expected)
    assert not net.lm_head.weight.requires_grad


def test_more_layers_than_the_target_has_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="num_layers 9 exceeds the target's 8"):
        start_diffusion(diffusion(target, 9), target)
