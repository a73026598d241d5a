from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes import ODD_SHAPE, random_rows, tiny_ar, tiny_diffusion
from whiflash_infer.checkpoint import Drafter, load_drafter, save_drafter
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange.zlab import refuse_markov_head
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": [2, 7], "pad_token_id": 0}
MADE_BY = "python train.py task=some_drafter"
# The z-lab format has no field for a target of another width.
EVEN_SHAPE = replace(ODD_SHAPE, target_hidden_size=ODD_SHAPE.hidden_size)
USED = torch.tensor([2, 3, 7, 11, 30, 39])

AR_TENSORS = {
    "fc.weight": (20, 42),
    "midlayer.input_layernorm.weight": (20,),
    "midlayer.hidden_norm.weight": (20,),
    "midlayer.post_attention_layernorm.weight": (20,),
    "midlayer.self_attn.q_proj.weight": (24, 40),
    "midlayer.self_attn.k_proj.weight": (12, 40),
    "midlayer.self_attn.v_proj.weight": (12, 40),
    "midlayer.self_attn.o_proj.weight": (20, 24),
    "midlayer.mlp.gate_proj.weight": (28, 20),
    "midlayer.mlp.up_proj.weight": (28, 20),
    "midlayer.mlp.down_proj.weight": (20, 28),
    "norm.weight": (20,),
    "lm_head.weight": (6, 20),
    "d2t": (6,),
    "t2d": (40,),
}
FC_NORM_TENSORS = {f"fc_norm.{i}.weight": (14,) for i in range(3)}
QK_NORM_TENSORS = {f"midlayer.self_attn.{name}_norm.weight": (6,) for name in "qk"}
DIFFUSION_LAYER_TENSORS = {
    "self_attn.q_proj.weight": (24, 20),
    "self_attn.k_proj.weight": (12, 20),
    "self_attn.v_proj.weight": (12, 20),
    "self_attn.o_proj.weight": (20, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "mlp.gate_proj.weight": (28, 20),
    "mlp.up_proj.weight": (28, 20),
    "mlp.down_proj.weight": (20, 28),
    "input_layernorm.weight": (20,),
    "post_attention_layernorm.weight": (20,),
}
SHAPE_FIELDS = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "rope_theta": 300.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
AR_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    **SHAPE_FIELDS,
    "target_hidden_size": 14,
    "draft_vocab_size": 6,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],  # layer inputs: what vLLM reads
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # layer outputs: SGLang and SpecForge
        "use_aux_hidden_state": True,
        "norm_before_fc": False,
    },
    "fc_norm": False,
    "norm_output": False,
}
# What an AR drafter with an option has more or otherwise.
AR_OPTIONS = {
    "classic": ({}, {}),
    "fc_norm": (FC_NORM_TENSORS, {"fc_norm": True}),
    "norm_output": ({}, {"norm_output": True}),
    "qk_norm": (QK_NORM_TENSORS, {}),
    "all": (FC_NORM_TENSORS | QK_NORM_TENSORS, {"fc_norm": True, "norm_output": True}),
}
# Engines whose EAGLE-3 layer has no such norms do not know this name, and so cannot skip them.
QK_NORM_CONFIG = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
DIFFUSION_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    **SHAPE_FIELDS,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "block_size": 5,
    "num_target_layers": 8,
    "dflash_config": {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 4],
        "causal": False,
        "convention": "same_position",  # not z-lab's: slot k predicts the token k behind the anchor
    },
}
# A Markov head, which z-lab's format cannot hold, and a window, for which it has fields.
MARKOV_TENSORS = {
    "markov_head.markov_w1.weight": (40, 3),
    "markov_head.markov_w2.weight": (40, 3),
}
MARKOV_CONFIG = {
    **{key: value for key, value in DIFFUSION_CONFIG.items() if key != "auto_map"},
    "architectures": ["DFlashMarkovDraftModel"],
    "markov_rank": 3,
    "markov_head_type": "vanilla",
    "layer_types": ["sliding_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 0,
    "is_causal": False,
}


def make(kind: str) -> Drafter:
    if kind in AR_OPTIONS:
        return tiny_ar(ODD_SHAPE, used=USED, flavour=kind)
    extras = {"markov_rank": 3, "sliding_window": 7} if kind == "markov" else {}
    return tiny_diffusion(EVEN_SHAPE, **extras)


def load(path: Path) -> Drafter:
    return load_drafter(path, made_by=MADE_BY, dtype=torch.float32, device="cpu")[0]


@pytest.fixture(params=[*AR_OPTIONS, "diffusion", "markov"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def saved(kind: str, tmp_path: Path) -> Path:
    save_drafter(tmp_path / kind, make(kind), {"note": "kept"}, token_ids=TOKEN_IDS)
    return tmp_path / kind


@pytest.fixture
def tensors(saved: Path) -> dict[str, Tensor]:
    return load_file(saved / "model.safetensors")


@pytest.fixture
def config(saved: Path) -> dict[str, Any]:
    return json.loads((saved / "config.json").read_text())


def test_tensor_names_and_shapes_are_those_of_the_published_format(
    kind: str, tensors: dict[str, Tensor]
) -> None:
    layers = {
        f"layers.{i}.{name}": size for i in (0, 1) for name, size in DIFFUSION_LAYER_TENSORS.items()
    }
    own = {"fc.weight": (20, 60), "hidden_norm.weight": (20,), "norm.weight": (20,)}
    expected = AR_TENSORS | AR_OPTIONS[kind][0] if kind in AR_OPTIONS else layers | own
    if kind == "markov":
        expected |= MARKOV_TENSORS
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    counts = {"classic": 15, "fc_norm": 18, "norm_output": 15, "qk_norm": 17, "all": 20}
    counts |= {"diffusion": 11 * 2 + 3, "markov": 11 * 2 + 3 + 2}
    assert len(expected) == counts[kind]


def test_config_fields_are_those_of_the_published_format(kind: str, config: dict) -> None:
    if kind in AR_OPTIONS:
        fields = {**AR_CONFIG, **AR_OPTIONS[kind][1], **TOKEN_IDS, "torch_dtype": "float32"}
        qk_norm = kind in {"qk_norm", "all"}
        assert config == (fields | QK_NORM_CONFIG if qk_norm else fields)
    else:
        expected = MARKOV_CONFIG if kind == "markov" else DIFFUSION_CONFIG
        assert config == {**expected, **TOKEN_IDS, "dtype": "float32"}


def test_vocabulary_maps_are_an_offset_and_a_mask(tmp_path: Path) -> None:
    save_drafter(tmp_path / "ar", make("classic").bfloat16(), {}, token_ids=TOKEN_IDS)
    tensors = load_file(tmp_path / "ar" / "model.safetensors")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["d2t"].tolist() == [2, 2, 5, 8, 26, 34]
    assert tensors["t2d"].nonzero().flatten().tolist() == USED.tolist()
    assert tensors["fc.weight"].dtype == torch.bfloat16
    loaded = load(tmp_path / "ar")
    assert isinstance(loaded, ARDrafter)
    assert loaded.vocabulary().tolist() == USED.tolist()


def test_a_loaded_drafter_computes_what_the_saved_one_did(kind: str, saved: Path) -> None:
    before, after = make(kind), load(saved)
    places = torch.tensor([[3, 5]])

    def outputs(net: Drafter) -> list[Tensor]:
        if isinstance(net, ARDrafter):
            embeds, taps = random_rows(1, 9, 20, seed=1), random_rows(1, 9, 42, seed=2)
            return [net.logits(h) for h in net.unroll(embeds, taps, places, num_steps=3)]
        block, taps = random_rows(1, 2, 5, 20, seed=1), random_rows(1, 9, 60, seed=2)
        hidden = net.blocks(block, taps, places)
        return [hidden, net.draft_logits(hidden[0, :, 1], places[0], random_rows(40, 20, seed=3))]

    for found, expected in zip(outputs(after), outputs(before), strict=True):
        assert torch.equal(found, expected)
    assert after.config == before.config
    assert not after.training
    assert not any(p.requires_grad for p in after.parameters())


def test_a_scaled_rope_is_written_where_old_and_new_readers_look(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    net = tiny_diffusion(replace(EVEN_SHAPE, rope_parameters=rope))
    save_drafter(tmp_path / "net", net, {}, token_ids=TOKEN_IDS)
    config = json.loads((tmp_path / "net" / "config.json").read_text())
    assert config["rope_parameters"] == config["rope_scaling"] == rope
    assert config["rope_theta"] == 500.0
    assert load(tmp_path / "net").config.shape.rope_parameters == rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing tensor fc.weight"),
        (lambda t: t.update(embed=torch.zeros(2)), "unknown tensor embed"),
        (lambda t: t.update({"norm.weight": torch.ones(19)}), r"norm.weight has shape \(19,\)"),
    ],
)
def test_a_changed_set_of_tensors_is_refused_by_name(
    change: Callable[[dict], Any], message: str, saved: Path, tensors: dict[str, Tensor]
) -> None:
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ArtifactError, match=message):
        load(saved)


def test_every_missing_tensor_is_refused_by_name(saved: Path, tensors: dict[str, Tensor]) -> None:
    for name in tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        save_file(rest, saved / "model.safetensors")
        with pytest.raises(ArtifactError, match=f"missing tensor {re.escape(name)} "):
            load(saved)


@pytest.mark.parametrize(("saved_as", "read_as"), [("all", "classic"), ("classic", "all")])
def test_norms_that_the_config_denies_or_promises_in_vain_are_refused(
    saved_as: str, read_as: str, tmp_path: Path
) -> None:
    for flavour in ("all", "classic"):
        save_drafter(tmp_path / flavour, make(flavour), {}, token_ids=TOKEN_IDS)
    weights = (tmp_path / saved_as / "model.safetensors").read_bytes()
    (tmp_path / read_as / "model.safetensors").write_bytes(weights)
    fault = "missing" if read_as == "all" else "unknown"
    with pytest.raises(ArtifactError, match=f"{fault} tensor fc_norm.0.weight") as caught:
        load(tmp_path / read_as)
    assert f"{fault} tensor midlayer.self_attn.k_norm.weight" in str(caught.value)


def test_every_missing_config_field_is_refused_by_name(saved: Path, config: dict) -> None:
    for field in config:
        rest = {key: value for key, value in config.items() if key != field}
        (saved / "config.json").write_text(json.dumps(rest))
        named = rf"missing fields? .*'{field}'|{field} is None"
        with pytest.raises(ArtifactError, match=named):
            load(saved)


def test_every_missing_nested_config_field_is_refused_by_name(
    kind: str, saved: Path, config: dict
) -> None:
    outer = "eagle_config" if kind in AR_OPTIONS else "dflash_config"
    for field in config[outer]:
        rest = {key: value for key, value in config[outer].items() if key != field}
        (saved / "config.json").write_text(json.dumps({**config, outer: rest}))
        with pytest.raises(ArtifactError, match=field):
            load(saved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fc_norms", True),
        ("attention_bias", True),
        ("rope_theta", 1e6),
        ("num_attention_heads", 8),
        ("architectures", ["LlamaForCausalLM"]),
    ],
)
def test_an_unknown_field_or_an_unsupported_value_is_refused_by_name(
    field: str, value: Any, saved: Path, config: dict
) -> None:
    (saved / "config.json").write_text(json.dumps({**config, field: value}))
    # Another number of heads is a legal config that the tensors do not fit.
    wanted = "q_proj.weight has shape" if field == "num_attention_heads" else field
    with pytest.raises(ArtifactError, match=wanted):
        load(saved)


@pytest.mark.parametrize("lost", ["manifest.json", "config.json", "model.safetensors"])
def test_a_folder_without_one_of_its_files_is_refused_by_name(saved: Path, lost: str) -> None:
    (saved / lost).unlink()
    with pytest.raises(ArtifactError, match=lost):
        load(saved)


def test_a_missing_folder_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"does not exist. Make it with: {MADE_BY}"):
        load(tmp_path / "nowhere")


def test_a_format_that_cannot_hold_a_markov_head_refuses_it_by_name() -> None:
    plain, markov = make("diffusion"), make("markov")
    assert isinstance(plain, DiffusionDrafter)
    assert isinstance(markov, DiffusionDrafter)
    refuse_markov_head(plain, "speculators")
    with pytest.raises(UserError, match=r"speculators format has no Markov head.*markov_rank 3"):
        refuse_markov_head(markov, "speculators")


@pytest.mark.parametrize("kind", ["diffusion"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {"convention": "next_token"}}, "convention is 'next_token'"),
        ({"markov_rank": 3}, "unknown field 'markov_rank'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "field 'layer_types'"),
        ({"sliding_window": 7}, "field 'sliding_window'"),
        ({"use_sliding_window": True, "sliding_window": 7}, "field 'layer_types'"),
        ({"block_size": 3}, "block_size 3 must lie in 4..32"),
    ],
)
def test_another_convention_or_window_than_is_computed_is_refused_by_name(
    change: dict[str, Any], message: str, saved: Path, config: dict
) -> None:
    inner = {**config["dflash_config"], **change.pop("dflash_config", {})}
    (saved / "config.json").write_text(json.dumps({**config, **change, "dflash_config": inner}))
    with pytest.raises(ArtifactError, match=message):
        load(saved)
