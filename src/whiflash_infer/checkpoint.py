"""Drafter folders in the published formats: `config.json` + `model.safetensors` + `manifest.json`.

AR: `LlamaForCausalLMEagle3` as SGLang, SpecForge and vLLM read it. Layer ids are written in both
conventions in use: layer outputs inside `eagle_config` (SGLang, SpecForge) and layer inputs, one
higher, at the top level (vLLM). Diffusion: z-lab `DFlashDraftModel`.
Reading is strict: a missing or extra tensor or field is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whiflash_infer.artifacts import new_artifact, read_json, read_manifest, write_json
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.shape import DrafterShape

Drafter = ARDrafter | DiffusionDrafter
WEIGHTS, CONFIG = "model.safetensors", "config.json"

_SHAPE_FIELDS = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "hidden_act": "hidden_act",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rope_parameters": "rope_parameters",
}


def save_drafter(path: Path, net: Drafter, manifest: Mapping[str, Any], *, token_ids: dict) -> None:
    """Write a drafter folder atomically. token_ids: bos, eos and pad ids of the target."""
    shape = net.config.shape
    if isinstance(net, DiffusionDrafter) and shape.target_hidden_size != shape.hidden_size:
        raise UserError(
            f"a diffusion drafter's hidden_size {shape.hidden_size} must be the target's "
            f"{shape.target_hidden_size}: the published format has no field for another"
        )
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    config = _ar_config(net) if isinstance(net, ARDrafter) else _diffusion_config(net)
    dtype_field = "torch_dtype" if isinstance(net, ARDrafter) else "dtype"
    config |= {**token_ids, dtype_field: str(dtype).removeprefix("torch.")}
    with new_artifact(path, manifest) as folder:
        write_json(folder / CONFIG, config)
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def load_drafter(
    path: Path, *, made_by: str, dtype: torch.dtype, device: str | torch.device
) -> tuple[Drafter, dict[str, Any]]:
    """The network in evaluation mode, and its manifest.

    Raises: ArtifactError naming the field or tensor that is missing, unknown or misshapen.
    """
    manifest = read_manifest(path, made_by=made_by)
    net = _build(path / CONFIG)
    _load_state(path / WEIGHTS, net)
    return net.to(device=device, dtype=dtype).eval().requires_grad_(False), manifest


def _build(path: Path) -> Drafter:
    """The network that a config describes, with weights still to be loaded."""
    config = read_json(path)
    architectures = config.get("architectures")
    try:
        if architectures == ["LlamaForCausalLMEagle3"]:
            net: Drafter = ARDrafter(_read_ar_config(config))
            expected = _ar_config(net)
        elif architectures == ["DFlashDraftModel"]:
            net = DiffusionDrafter(_read_diffusion_config(config))
            expected = _diffusion_config(net)
        else:
            raise ValueError(
                f"architectures is {architectures!r}; known are ['LlamaForCausalLMEagle3'] and "
                "['DFlashDraftModel']"
            )
    except KeyError as error:
        raise ArtifactError(f"{path}: missing field {error.args[0]!r}") from None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    _check_config(path, config, expected)
    return net


def _shape_config(shape: DrafterShape) -> dict[str, Any]:
    rope = dict(shape.rope_parameters)
    scaling = None if rope["rope_type"] == "default" else rope
    common = {public: getattr(shape, ours) for ours, public in _SHAPE_FIELDS.items()}
    return {
        **common,
        # Older readers look for these two, transformers 5 for rope_parameters.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _ar_config(net: ARDrafter) -> dict[str, Any]:
    config = net.config
    taps = list(config.tap_layer_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **_shape_config(config.shape),
        "target_hidden_size": config.shape.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in taps],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": taps,
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
        },
        "fc_norm": False,
        "norm_output": False,
    }


def _diffusion_config(net: DiffusionDrafter) -> dict[str, Any]:
    config = net.config
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        **_shape_config(config.shape),
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layer_ids),
            "causal": False,
        },
    }


def _read_shape(config: Mapping[str, Any]) -> DrafterShape:
    values = {ours: config[public] for ours, public in _SHAPE_FIELDS.items()}
    return DrafterShape(
        **values, target_hidden_size=config.get("target_hidden_size", config["hidden_size"])
    )


def _read_ar_config(config: Mapping[str, Any]) -> ARDrafterConfig:
    return ARDrafterConfig(
        shape=_read_shape(config),
        draft_vocab_size=config["draft_vocab_size"],
        tap_layer_ids=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    )


def _read_diffusion_config(config: Mapping[str, Any]) -> DiffusionDrafterConfig:
    return DiffusionDrafterConfig(
        shape=_read_shape(config),
        num_layers=config["num_hidden_layers"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        num_target_layers=config["num_target_layers"],
        tap_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
    )


def _check_config(path: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    dtype_field = "torch_dtype" if expected["model_type"] == "llama" else "dtype"
    stored_only = {"bos_token_id", "eos_token_id", "pad_token_id", dtype_field}
    wanted = expected.keys() | stored_only
    problems = [f"missing field {key!r}" for key in sorted(wanted - found.keys())]
    problems += [f"unknown field {key!r}" for key in sorted(found.keys() - wanted)]
    problems += [
        f"field {key!r} is {found[key]!r}, but this version reads only {expected[key]!r}"
        for key in sorted(expected.keys() & found.keys())
        if found[key] != expected[key]
    ]
    if problems:
        raise ArtifactError(f"{path}: " + "; ".join(problems))


def _load_state(path: Path, net: nn.Module) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing")
    try:
        found: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    expected = net.state_dict()
    problems = [f"missing tensor {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown tensor {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"tensor {name} has shape {tuple(found[name].shape)}, config.json asks for "
        f"{tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if problems:
        raise ArtifactError(f"{path}: " + "; ".join(problems))
    net.load_state_dict(found)
