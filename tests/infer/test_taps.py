from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig

from tests.fakes import ar_config, built_target, random_ids, small_config
from whiflash_infer.checkpoint import save_drafter
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.target import Target

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def exported_config(target: Target, folder: Path) -> dict[str, Any]:
    net = ARDrafter(ar_config(target.drafter_shape, 20, tap_layer_ids=target.tap_layer_ids))
    save_drafter(folder, net, {}, token_ids=TOKEN_IDS)
    return json.loads((folder / "config.json").read_text())


def entering(target: Target, boundaries: list[int], ids: Tensor) -> Tensor:
    """What vLLM keeps: the hidden state just before the layers that the config counts."""
    seen: list[Tensor] = []

    def note(_layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        seen.append(inputs[0] if inputs else named["hidden_states"])

    hooks = [target.layer(b).register_forward_pre_hook(note, with_kwargs=True) for b in boundaries]
    target.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, dim=-1)


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_layers", "tap_layer_ids", "boundaries"),
    [
        (5, (0, 1, 3), [1, 2, 4]),
        (8, (1, 3, 4), [2, 4, 5]),  # 2, N // 2, N - 3
        (28, (1, 13, 24), [2, 14, 25]),
        (36, (1, 17, 32), [2, 18, 33]),
        (36, (1, 9, 17, 25, 33), [2, 10, 18, 26, 34]),
    ],
)
def test_taps_are_what_an_engine_captures_by_the_exported_config(
    num_layers: int, tap_layer_ids: tuple[int, ...], boundaries: list[int], tmp_path: Path
) -> None:
    target = built_target(small_config(LlamaConfig, num_layers), tap_layer_ids)
    ids = random_ids(7, seed=num_layers)[None]
    config = exported_config(target, tmp_path / "drafter")
    taps = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).taps
    assert config["eagle_aux_hidden_state_layer_ids"] == boundaries
    torch.testing.assert_close(taps, entering(target, boundaries, ids))
    outputs = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    inner = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert inner == list(tap_layer_ids)
    torch.testing.assert_close(taps, torch.cat([outputs[i + 1] for i in inner], dim=-1))
    cache = target.new_cache()
    cache.kv.reserve(1, 16)
    torch.testing.assert_close(target.prefill([ids[0].tolist()], cache, 0).taps, taps)


def test_the_fusion_is_as_wide_as_there_are_taps() -> None:
    target = built_target(small_config(LlamaConfig, 8), (0, 2, 4, 6))
    for flavour in ("classic", "fc_norm"):
        config = ar_config(
            target.drafter_shape, 20, flavour=flavour, tap_layer_ids=target.tap_layer_ids
        )
        net = ARDrafter(config)
        assert net.fc.weight.shape == (32, 4 * 32)
        assert len(net.fc_norm) == (4 if flavour == "fc_norm" else 0)
        assert net.fuse(torch.zeros(3, 128)).shape == (3, 32)


@torch.no_grad()
def test_a_row_has_the_same_taps_alone_in_a_batch_in_another_order_and_in_a_later_call(
    target: Target,
) -> None:
    # Kept from the request before, hidden states were those of other rows (U35).
    texts = [random_ids(length, seed=length) for length in (9, 4, 7, 1)]
    expected = []
    for ids in texts:
        states = target.model(ids[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[i + 1] for i in target.tap_layer_ids], dim=-1)
        expected.append((taps[0], states[-1][0]))

    def check(order: list[int]) -> None:
        lengths = torch.tensor([len(texts[i]) for i in order])
        ids = torch.nn.utils.rnn.pad_sequence([texts[i] for i in order], batch_first=True)
        rows = target.teach(ids, torch.arange(ids.shape[1]) < lengths[:, None])
        for row, i in enumerate(order):
            for found, wanted in zip((rows.taps, rows.hidden), expected[i], strict=True):
                torch.testing.assert_close(
                    found[row, : len(wanted)],
                    wanted,
                    rtol=1e-5,
                    atol=1e-5 * float(wanted.abs().max()),
                )

    for order in ([0], [1], [2], [3], [0, 1, 2, 3], [3, 2, 1, 0], [2, 2], [0, 1, 2, 3]):
        check(order)


@pytest.mark.parametrize("ids", [(4, 1, 3), (3, 4, 1)])
def test_layer_ids_in_any_order_are_put_in_order(ids: tuple[int, ...]) -> None:
    assert built_target(small_config(LlamaConfig, 8), ids).tap_layer_ids == (1, 3, 4)


@pytest.mark.parametrize("ids", [(-1, 1), (1, 7), (1, 8), (1, 1), ()])
def test_impossible_layer_ids_of_a_target_are_refused_with_the_legal_range(
    ids: tuple[int, ...],
) -> None:
    with pytest.raises(UserError, match=r"each must lie in 0\.\.6 .*last layer excluded"):
        built_target(small_config(LlamaConfig, 8), ids)


@torch.no_grad()
def test_a_tied_targets_head_is_its_embedding(target: Target) -> None:
    # The file of a tied model has no head, and readers that looked for one lost it (U51).
    folder = Path(target.model.config._name_or_path)  # pyright: ignore
    stored = load_file(folder / "model.safetensors")
    assert not any("lm_head" in name for name in stored)
    embedding = stored["model.embed_tokens.weight"]
    assert torch.equal(target.tables.head, embedding)
    assert torch.equal(target.tables.embedding, embedding)
    ids = random_ids(5, seed=1)[None]
    hidden = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).hidden
    expected = target.model(ids).logits
    torch.testing.assert_close(target.tables.logits(hidden), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hidden @ embedding.T, expected, rtol=1e-4, atol=1e-3)
