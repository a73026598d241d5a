"""Rotary positions: a drafter turns as its target does, in full precision, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GlmConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from tests.fakes import ODD_SHAPE, built_target, small_config, tiny_ar, tiny_diffusion
from whiflash_infer.checkpoint import Drafter, load_drafter, save_drafter
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
THETA = {"rope_theta": 700.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    **THETA,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    **THETA,
}
MAKERS: list[Callable[..., Drafter]] = [tiny_ar, tiny_diffusion]


def with_rope(
    kind: Callable[..., PreTrainedConfig], rope: dict[str, Any], **values: Any
) -> PreTrainedConfig:
    plain = small_config(kind, 4).to_dict()
    plain = {k: v for k, v in plain.items() if k not in {"rope_parameters", "model_type"}}
    return kind(**{**plain, "rope_parameters": rope, "pad_token_id": 0, **values})


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        (LlamaConfig, {"rope_type": "default", **THETA}),
        (Qwen3Config, {"rope_type": "default", **THETA}),
        (LlamaConfig, {"rope_type": "linear", "factor": 4.0, **THETA}),
        (LlamaConfig, LLAMA3),
        (LlamaConfig, YARN),
    ],
    ids=["llama", "qwen3", "linear", "llama3", "yarn"],
)
def test_a_drafter_turns_by_the_angles_of_its_target(
    kind: Callable[..., PreTrainedConfig], rope: dict[str, Any], make: Callable[..., Drafter]
) -> None:
    target = built_target(with_rope(kind, rope), (0, 1))
    positions = torch.tensor([0, 1, 17, 250])
    own = target.model.get_submodule("model.rotary_emb")
    expected = own(torch.zeros(1, 4, 8), positions[None])
    for found, wanted in zip(make(target.drafter_shape).rotary(positions), expected, strict=True):
        torch.testing.assert_close(found, wanted[0], rtol=1e-6, atol=1e-6)


def test_of_a_target_with_two_kinds_of_layers_a_drafter_turns_as_the_full_ones() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    target = built_target(with_rope(Gemma3TextConfig, rope, layer_types=kinds), (0, 1))
    net, positions = tiny_ar(target.drafter_shape), torch.tensor([3, 40])
    own = target.model.get_submodule("model.rotary_emb")
    expected = own(torch.zeros(1, 2, 8), positions[None], "full_attention")
    for found, wanted in zip(net.rotary(positions), expected, strict=True):
        torch.testing.assert_close(found, wanted[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", MAKERS)
def test_in_a_bfloat16_drafter_frequencies_are_not_rounded(
    make: Callable[..., Drafter], tmp_path: Path
) -> None:
    # Rounded, the slower channels are many turns off at position 5000 (U37).
    net = make(replace(ODD_SHAPE, target_hidden_size=ODD_SHAPE.hidden_size))
    save_drafter(tmp_path / "net", net, {}, token_ids=TOKEN_IDS)
    kind = torch.bfloat16
    loaded, _ = load_drafter(tmp_path / "net", made_by="-", dtype=kind, device="cpu")
    expected = [math.cos(5000 * 300.0 ** (-2 * channel / 6)) for channel in range(3)] * 2
    for cast in (net.to(kind), loaded):
        assert cast.fc.weight.dtype == kind
        cosines, _ = cast.rotary(torch.tensor([5000]))
        assert cosines.dtype == torch.float32
        assert cosines[0].tolist() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("kind", [GlmConfig, Phi3Config])
def test_a_target_that_turns_some_channels_only_is_refused_by_name(
    kind: Callable[..., PreTrainedConfig],
) -> None:
    # Elsewhere the drafter turned all of them, and the engine some (U26).
    part = {"rope_type": "default", "partial_rotary_factor": 0.25, **THETA}
    target = built_target(with_rope(kind, part), (0, 1))
    with pytest.raises(UserError, match=r"partial_rotary_factor is 0\.25"):
        _ = target.drafter_shape
    whole = built_target(with_rope(kind, {**part, "partial_rotary_factor": 1.0}), (0, 1))
    assert isinstance(tiny_ar(whole.drafter_shape), ARDrafter)
