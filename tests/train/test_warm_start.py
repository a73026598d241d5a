from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from tests.fakes import (
    FLAVOURS,
    TAPS,
    ar_config,
    built_target,
    random_ids,
    random_rows,
    small_config,
)
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
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
            markov_rank=0,
            sliding_window=None,
        )
    )


@torch.no_grad()
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_started_ar_drafter_attends_like_the_targets_last_layer(
    flavour: str, target: Target
) -> None:
    net = ARDrafter(ar_config(target.drafter_shape, 50, flavour=flavour))
    start_ar(net, target)
    ids = random_ids(9, seed=0)[None]
    taps = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).taps
    source = target.layer(7)
    hidden = taps[..., -64:]
    normed = source.input_layernorm(hidden)  # pyright: ignore
    nothing, still = torch.zeros_like(hidden), torch.zeros(1, 9, dtype=torch.long)
    fused = net.fuse(taps)
    _, keys, values = net.entry(nothing, fused, still)
    expected = source.self_attn.v_proj(normed)  # pyright: ignore
    assert torch.cosine_similarity(values.flatten(2), expected, dim=-1).min() > 0.9
    own_keys = source.self_attn.k_proj(normed).view_as(keys)  # pyright: ignore
    assert torch.cosine_similarity(keys, own_keys, dim=-1).min() > 0.9
    assert keys.pow(2).mean().sqrt() == pytest.approx(float(own_keys.pow(2).mean().sqrt()), rel=0.3)
    # The residual stream goes on at the size that the copied layer adds to.
    assert fused.pow(2).mean().sqrt() == pytest.approx(float(hidden.pow(2).mean().sqrt()), rel=0.3)


@torch.no_grad()
@pytest.mark.parametrize("flavour", ["classic", "qk_norm"])
def test_queries_and_keys_start_at_the_size_that_a_qwen3_target_norms_them_to(flavour: str) -> None:
    target = built_target(small_config(Qwen3Config, 8), TAPS)
    net = ARDrafter(ar_config(target.drafter_shape, 50, flavour=flavour))
    start_ar(net, target)
    attention = target.layer(7).get_submodule("self_attn")
    x = target.layer(7).input_layernorm(random_rows(40, 32, seed=1))  # pyright: ignore
    joined = torch.cat([torch.zeros_like(x), x], dim=-1)
    for name, made in (("q", net.midlayer.self_attn.queries), ("k", net.midlayer.self_attn.keys)):
        found = made(joined)
        projected = attention.get_submodule(f"{name}_proj")(x).view_as(found)
        expected = attention.get_submodule(f"{name}_norm")(projected)
        assert torch.cosine_similarity(found, expected, dim=-1).min() > 0.99
        size = float(expected.pow(2).mean().sqrt())
        assert found.pow(2).mean().sqrt() == pytest.approx(size, rel=0.3)


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
    net = ARDrafter(ar_config(target.drafter_shape, 3))
    net.set_vocabulary(torch.tensor([7, 2, 100]))
    start_head(net, target, trainable=False)
    expected = target.model.get_output_embeddings().weight[[2, 7, 100]]  # pyright: ignore
    assert torch.equal(net.lm_head.weight, expected)
    assert not net.lm_head.weight.requires_grad


def test_more_layers_than_the_target_has_are_refused(target: Target) -> None:
    with pytest.raises(UserError, match="num_layers 9 exceeds the target's 8"):
        start_diffusion(diffusion(target, 9), target)
