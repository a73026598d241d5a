"""EAGLE-3 as SafeAI, SGLang, SpecForge and vLLM exchange it: `LlamaForCausalLMEagle3`.

    fc.weight [D, L*Dt]   midlayer.{input_layernorm, hidden_norm, post_attention_layernorm}.weight
    norm.weight [D]       midlayer.self_attn.{q,k,v}_proj.weight [*, 2D]   .o_proj.weight
    lm_head.weight [W, D] midlayer.mlp.{gate,up,down}_proj.weight
    d2t int64 [W], offset of a draft id to its token      t2d bool [V], which tokens are drafted

Layer ids are written in both conventions in use: layer outputs inside `eagle_config` (SGLang,
SpecForge) and layer inputs, one higher, at the top level (vLLM). `fc_norm.{i}.weight` [Dt] and
`norm_output` are EAGLE-3.1's. A layer that norms queries and keys goes by vLLM's own name, so that
an engine without such a layer refuses the folder instead of skipping the norms.

Dialects, all read: `layers.0.` or `model.layers.0.` for `midlayer.` (ModelOpt, `speculators`,
Automodel); maps left out of a full vocabulary, or one of the two; a copied `embed_tokens`; no
`lm_head` where it is the target's; layer ids in `eagle_config` (layer outputs: SpecForge, SGLang,
ModelOpt), at the top level (layer inputs: vLLM) or nowhere (SafeAI: the caller has to know).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whiflash_infer.exchange.facts import Given, Published, TargetFacts
from whiflash_infer.exchange.fields import (
    all_layers_full,
    check_layer_ids,
    complete_shape,
    read_shape,
    shape_fields,
    to_layer_inputs,
    to_layer_outputs,
)
from whiflash_infer.exchange.tensors import (
    canonical_names,
    check_fusion,
    stored_dtype,
    without_copies,
)
from whiflash_infer.exchange.vocabulary import with_vocabulary
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig

PLAIN, QK_NORM = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
ARCHITECTURES = {PLAIN, QK_NORM}
# SafeAI's own files name a plain Llama; `draft_vocab_size` tells them from one.
FOREIGN_ARCHITECTURES = {"LlamaEagle3DraftModel", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_WINDOW_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


def config_of(net: ARDrafter) -> dict[str, Any]:
    config = net.config
    taps = list(config.tap_layer_ids)
    return {
        "architectures": [QK_NORM if config.qk_norm else PLAIN],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": 1,
        **shape_fields(config.shape),
        "target_hidden_size": config.shape.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: to_layer_inputs(taps),
        "eagle_config": {
            LAYER_IDS: taps,
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
        },
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def read_config(config: Mapping[str, Any]) -> ARDrafterConfig:
    return ARDrafterConfig(
        shape=read_shape(config),
        draft_vocab_size=config["draft_vocab_size"],
        tap_layer_ids=tuple(config["eagle_config"][LAYER_IDS]),
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        qk_norm=config["architectures"] == [QK_NORM],
    )


def build(config: Mapping[str, Any]) -> ARDrafter:
    """Raises: KeyError for a missing field, ValueError for an impossible value."""
    return ARDrafter(read_config(config))


def written(net: ARDrafter) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Config and tensors of this layout, and what to tell."""
    tensors = dict(net.state_dict())
    for name in maps_left_out(net):
        del tensors[name]
    return config_of(net), tensors, []


def maps_left_out(net: ARDrafter) -> tuple[str, ...]:
    """Of a draft vocabulary that is the whole one there are no maps: vLLM has no place for them
    then. A new network has them right."""
    whole = net.config.draft_vocab_size == net.config.shape.vocab_size
    return ("d2t", "t2d") if whole else ()


def normalise(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    given: Given,
    target: TargetFacts | None,
) -> Published:
    """Any dialect under our names.

    Raises: KeyError for a missing field, ValueError for what does not fit, naming both sides.
    """
    names = canonical_names(tensors, _our_name)
    found = {name: tensors[there] for name, there in names.items()}
    full, notes = complete_shape(_without_window(config), given, target)
    ids, told = _layer_ids(full, given, target)
    check_fusion(found, names, ids, full.get("target_hidden_size") or full["hidden_size"])
    if full.get("num_aux_hidden_states") == len(ids):
        del full["num_aux_hidden_states"]
    found, more = _with_head(found, full, target)
    full |= _own_fields(full, ids, found)
    found, copied = _without_embedding(found, names, full, target)
    found, mapped = with_vocabulary(found, names, full)
    notes = [*notes, *told, *more, *copied, *mapped]
    return Published(config=full, tensors=found, names=names, notes=tuple(notes))


def _our_name(name: str) -> str:
    return f"midlayer.{name[9:]}" if name.startswith("layers.0.") else name


def _without_window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Where every layer sees all, the settings of a window say nothing."""
    if not all_layers_full(config):
        return dict(config)
    return {key: value for key, value in config.items() if key not in _WINDOW_FIELDS}


def _own_fields(
    config: Mapping[str, Any], ids: tuple[int, ...], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Fields of this layout, with what a silent config means by them."""
    size = config.get("draft_vocab_size")
    if size is None and "lm_head.weight" in tensors:
        size = len(tensors["lm_head.weight"])
    old = config.get("eagle_config") or {}
    inner = {"use_aux_hidden_state": True, "norm_before_fc": False, **old, LAYER_IDS: list(ids)}
    return {
        "architectures": [QK_NORM if config["architectures"] == [QK_NORM] else PLAIN],
        "draft_vocab_size": config["vocab_size"] if size is None else size,
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        LAYER_IDS: to_layer_inputs(ids),
        "eagle_config": inner,
        "fc_norm": bool(config.get("fc_norm")),
        "norm_output": bool(config.get("norm_output")),
    }


def _layer_ids(
    config: Mapping[str, Any], given: Given, target: TargetFacts | None
) -> tuple[tuple[int, ...], list[str]]:
    num_layers = given.num_target_layers if target is None else target.num_layers
    if given.tap_layer_ids is not None:
        return check_layer_ids(given.tap_layer_ids, num_layers), ["layer ids are those given"]
    inner = (config.get("eagle_config") or {}).get(LAYER_IDS) or None  # ModelOpt may leave it empty
    outer = config.get(LAYER_IDS) or None
    if inner is None and outer is None:
        usual = "" if num_layers is None else f", mostly {[1, num_layers // 2 - 1, num_layers - 4]}"
        raise ValueError(
            f"{LAYER_IDS} is missing: say which layers it was trained on (--layer-ids, 0-based "
            f"layer outputs{usual})"
        )
    if inner is None:
        ids = to_layer_outputs(outer)  # pyright: ignore
        return check_layer_ids(ids, num_layers), [f"layer inputs {outer} are layer outputs {ids}"]
    if outer is not None and to_layer_outputs(outer) != list(inner):
        raise ValueError(
            f"{LAYER_IDS} is {outer} (layer inputs, i.e. outputs {to_layer_outputs(outer)}), but "
            f"eagle_config has {inner} (layer outputs): say which with --layer-ids"
        )
    return check_layer_ids(inner, num_layers), []


def _with_head(
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    target: TargetFacts | None,
) -> tuple[dict[str, Tensor], list[str]]:
    """A drafter without a head of its own reads the target's."""
    if "lm_head.weight" in tensors:
        return tensors, []
    size = config.get("draft_vocab_size")
    if size not in {None, config["vocab_size"]}:
        raise ValueError(f"missing tensor lm_head.weight, of draft_vocab_size {size}")
    if target is None:
        raise ValueError("missing tensor lm_head.weight: it is the target's, so give the target")
    head = target.head.to("cpu", stored_dtype(tensors), copy=True)
    return {**tensors, "lm_head.weight": head}, ["lm_head.weight is the target's"]


def _without_embedding(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    config: Mapping[str, Any],
    target: TargetFacts | None,
) -> tuple[dict[str, Tensor], list[str]]:
    original = None if target is None else target.embedding
    size = (config["vocab_size"], config["target_hidden_size"])
    return without_copies(tensors, {"embed_tokens.weight": original}, names, size)
