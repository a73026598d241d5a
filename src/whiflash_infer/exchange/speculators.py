"""Both drafters as vllm-project/speculators keeps them, which vLLM serves as they are.

One flat config with two objects in it: `transformer_layer_config`, a Llama or Qwen3 config of the
drafter's layers that leaves out what equals that class's default, and `speculators_config`, the
algorithm, the number of drafts and the target ("verifier"). Layer ids are layer inputs, counted
from the embeddings. EAGLE-3 tensors say `layers.0.` for `midlayer.`; those of DFlash are z-lab's.
The target's embedding (and for DFlash its head) lies beside them; a full vocabulary has no maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from whiflash_infer.errors import UserError
from whiflash_infer.exchange import eagle3, zlab
from whiflash_infer.exchange.facts import Drafter, TargetFacts
from whiflash_infer.exchange.fields import shape_fields, to_layer_inputs, to_layer_outputs
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter

MARK = "speculators_model_type"
_EAGLE3_IDS, _DFLASH_IDS = eagle3.LAYER_IDS, "aux_hidden_state_layer_ids"
_LAYER_CLASSES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_KINDS = ("eagle3", "dflash")
_COPIES = ("embed_tokens.weight", "lm_head.weight")  # of the target; EAGLE-3 has a head of its own
# About training, or about the package.
_ABOUT = {
    MARK,
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "embed_requires_grad",
    "enable_sp_ulysses",
    "auf",
    "emb_dim",
    "gru_hidden_dim",
    "lambda_base_start",
    "lambda_base_decay_ratio",
    "pure_draft_prefix_len",
}


def to_published(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The layout, eagle3 or zlab, in whose terms the config is put, and the config in them.

    Raises: KeyError for a missing field, ValueError for what neither layout can say.
    """
    kind = config[MARK]
    if kind not in _KINDS:
        raise ValueError(f"{MARK} is {kind!r}; known are {list(_KINDS)}")
    own = {key: value for key, value in config.items() if key not in _ABOUT}
    layers = _complete_layers(config["transformer_layer_config"])
    if kind == "eagle3":
        return "eagle3", {**layers, **_eagle3_fields(own, layers)}
    return "zlab", {**layers, **_dflash_fields(own, layers)}


def draft_length(config: Mapping[str, Any]) -> int | None:
    """Drafts a round, as the config proposes."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def _complete_layers(layers: Mapping[str, Any]) -> dict[str, Any]:
    """What equals a class's default is not written, so the class completes it."""
    kind = layers["model_type"]
    if kind not in _LAYER_CLASSES:
        raise ValueError(
            f"transformer_layer_config.model_type is {kind!r}; known are {sorted(_LAYER_CLASSES)}"
        )
    return _LAYER_CLASSES[kind](**layers).to_dict()


def _eagle3_fields(own: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    if "norm_before_residual" not in own:
        raise ValueError(
            "norm_before_residual is missing: speculators then takes false, vLLM true; write it"
        )
    with_norms = layers["model_type"] == "qwen3"
    fields = {
        **own,
        "architectures": [eagle3.QK_NORM if with_norms else eagle3.PLAIN],
        "target_hidden_size": own.get("target_hidden_size") or layers["hidden_size"],
        "eagle_config": {"norm_before_fc": own.get("norm_before_fc", False)},
    }
    fields.pop("norm_before_fc", None)
    return fields


def _dflash_fields(own: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    drafted, size = own["draft_vocab_size"], layers["vocab_size"]
    if drafted != size:
        raise ValueError(
            f"draft_vocab_size is {drafted} of {size}; this version reads block drafters of the "
            "whole vocabulary alone"
        )
    ids = own.get(_DFLASH_IDS)
    nested = {"mask_token_id": own["mask_token_id"]}
    if ids is not None:
        nested["target_layer_ids"] = to_layer_outputs(ids)
    if own.get("sample_from_anchor"):
        nested["convention"] = "next_token"
    fields = {
        **own,
        "architectures": [zlab.PLAIN],
        "dflash_config": nested,
        "is_causal": _causal_windows(own, layers),
    }
    for read in ("draft_vocab_size", "mask_token_id", "sample_from_anchor", _DFLASH_IDS):
        fields.pop(read, None)
    fields.pop("sliding_window_non_causal", None)
    return fields


def _causal_windows(own: Mapping[str, Any], layers: Mapping[str, Any]) -> bool:
    """Sliding layers are causal in the block unless told otherwise; full ones never are."""
    slides = "sliding_attention" in (layers.get("layer_types") or ())
    return slides and not own.get("sliding_window_non_causal", False)


def written(
    net: Drafter, *, target: TargetFacts | None, num_drafts: int
) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Config and tensors of this layout, and what to tell.

    Raises: UserError for what the layout cannot hold.
    """
    shape = net.config.shape
    if shape.target_hidden_size != shape.hidden_size:
        raise UserError(
            f"hidden_size {shape.hidden_size} must be the target's {shape.target_hidden_size}: the "
            "speculators layout has no drafters of another width"
        )
    if isinstance(net, ARDrafter):
        config, tensors, copied = _eagle3_config(net), _eagle3_tensors(net), _COPIES[:1]
    else:
        zlab.refuse_markov_head(net, "speculators")
        config, tensors, copied = _dflash_config(net), dict(net.state_dict()), _COPIES
    config["speculators_config"] = _proposal(config[MARK], num_drafts, target)
    if target is None:
        return config, tensors, [*_window_note(net), _alone(copied)]
    originals = dict(zip(_COPIES, (target.embedding, target.head), strict=True))
    dtype = tensors["fc.weight"].dtype
    tensors |= {name: originals[name].to("cpu", dtype, copy=True) for name in copied}
    return config, tensors, _window_note(net)


def _proposal(algorithm: str, num_drafts: int, target: TargetFacts | None) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": None if target is None else target.name,
        "architectures": [] if target is None else list(target.architectures),
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }


def _window_note(net: Drafter) -> list[str]:
    if isinstance(net, ARDrafter) or net.config.sliding_window is None:
        return []
    return [
        "the sliding window is counted from each slot, as engines count; speculators' own training "
        "pass counts it from the anchor"
    ]


def _alone(copies: Sequence[str]) -> str:
    return (
        f"left out: {' and '.join(copies)}, and the verifier's name; give the target for a folder "
        "that `vllm serve` takes as it is"
    )


def _eagle3_config(net: ARDrafter) -> dict[str, Any]:
    config = net.config
    return {
        "architectures": ["Eagle3DraftModel"],
        MARK: "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        # Every flag is written: vLLM reads a missing one as true, speculators as false.
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        _EAGLE3_IDS: to_layer_inputs(config.tap_layer_ids),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "num_hidden_layers": 1,
            **shape_fields(config.shape),
            "layer_types": ["full_attention"],
            "mlp_bias": False,
        },
    }


def _eagle3_tensors(net: ARDrafter) -> dict[str, Tensor]:
    full = net.config.draft_vocab_size == net.config.shape.vocab_size
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in net.state_dict().items()
        if not (full and name in {"d2t", "t2d"})
    }


def _dflash_config(net: DiffusionDrafter) -> dict[str, Any]:
    config = net.config
    return {
        "architectures": ["DFlashDraftModel"],
        MARK: "dflash",
        "draft_vocab_size": config.shape.vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None,
        _DFLASH_IDS: to_layer_inputs(config.tap_layer_ids),
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": True,  # if false, vLLM makes layers without a window causal
        "sample_from_anchor": False,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "num_hidden_layers": config.num_layers,
            **shape_fields(config.shape),
            **zlab.attention_fields(config),
        },
    }
