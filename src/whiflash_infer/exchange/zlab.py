"""DFlash as z-lab publishes it: `DFlashDraftModel`, which SGLang, vLLM, SpecForge and MLX read.

    fc.weight [D, L*D]   hidden_norm.weight [D]   norm.weight [D]
    layers.{i}.self_attn.{q,k,v,o}_proj.weight   layers.{i}.self_attn.{q,k}_norm.weight [d]
    layers.{i}.mlp.{gate,up,down}_proj.weight    layers.{i}.{input,post_attention}_layernorm.weight

11 tensors a layer and 3: the embedding and the head are the target's. Layer ids are layer outputs.
The slot convention is added to its fields. A Markov head has no place in this layout, and engines
skip tensors that they do not know; so with one the architecture has a name of its own.

Dialects, all read: `model.` before every name; copies of the target's embedding and head;
`block_size`, `mask_token_id` and `target_layer_ids` at the top level or inside `dflash_config`;
`num_target_layers` left out, or meaning the number of tapped layers (TorchSpec, AngelSpec).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whiflash_infer.errors import UserError
from whiflash_infer.exchange.facts import Given, Published, TargetFacts
from whiflash_infer.exchange.fields import (
    all_layers_full,
    check_layer_ids,
    complete_shape,
    read_shape,
    shape_fields,
)
from whiflash_infer.exchange.tensors import canonical_names, check_fusion, without_copies
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig

PLAIN, MARKOV = "DFlashDraftModel", "DFlashMarkovDraftModel"
ARCHITECTURES = {PLAIN, MARKOV}
FOREIGN_ARCHITECTURES: set[str] = set()
CONVENTION = "same_position"  # slot k of a block predicts the token k behind the anchor
_INNER = ("mask_token_id", "target_layer_ids", "causal")


def config_of(net: DiffusionDrafter) -> dict[str, Any]:
    config = net.config
    return {
        **_architecture(config.markov_rank),
        "model_type": "qwen3",
        "num_hidden_layers": config.num_layers,
        **shape_fields(config.shape),
        **attention_fields(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layer_ids),
            "causal": False,
            "convention": CONVENTION,
        },
    }


def _architecture(markov_rank: int) -> dict[str, Any]:
    if not markov_rank:
        return {"architectures": [PLAIN], "auto_map": {"AutoModel": f"dflash.{PLAIN}"}}
    markov = {"markov_rank": markov_rank, "markov_head_type": "vanilla"}
    return {"architectures": [MARKOV], **markov}


def attention_fields(config: DiffusionDrafterConfig) -> dict[str, Any]:
    """Every layer has the window, or none. Readers take sliding layers for causal in the block
    unless `is_causal` says otherwise."""
    windowed = config.sliding_window is not None
    kind = "sliding_attention" if windowed else "full_attention"
    fields = {
        "layer_types": [kind] * config.num_layers,
        "use_sliding_window": windowed,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if windowed else config.num_layers,  # layers below it have none
    }
    return fields | {"is_causal": False} if windowed else fields


def read_config(config: Mapping[str, Any]) -> DiffusionDrafterConfig:
    convention = config["dflash_config"]["convention"]
    if convention != CONVENTION:
        raise ValueError(
            f"dflash_config.convention is {convention!r}, but only {CONVENTION!r} is read: with "
            "another, slots predict other tokens"
        )
    markov = config["architectures"] == [MARKOV]
    return DiffusionDrafterConfig(
        shape=read_shape(config),
        num_layers=config["num_hidden_layers"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        num_target_layers=config["num_target_layers"],
        tap_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        markov_rank=config["markov_rank"] if markov else 0,
        sliding_window=config["sliding_window"] if config["use_sliding_window"] else None,
    )


def build(config: Mapping[str, Any]) -> DiffusionDrafter:
    """Raises: KeyError for a missing field, ValueError for an impossible value."""
    return DiffusionDrafter(read_config(config))


def written(net: DiffusionDrafter) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """Config and tensors of this layout, and what to tell.

    Raises: UserError for a drafter of another width than its target's.
    """
    shape = net.config.shape
    if shape.target_hidden_size != shape.hidden_size:
        raise UserError(
            f"a diffusion drafter's hidden_size {shape.hidden_size} must be the target's "
            f"{shape.target_hidden_size}: the published format has no field for another"
        )
    return config_of(net), dict(net.state_dict()), []


def refuse_markov_head(net: DiffusionDrafter, format_name: str) -> None:
    """For writers of formats that cannot hold one: left out, it would draft worse in silence."""
    if net.config.markov_rank:
        raise UserError(
            f"the {format_name} format has no Markov head, and this drafter has one "
            f"(markov_rank {net.config.markov_rank}); train one with "
            "diffusion_drafter.markov_rank=0"
        )


def normalise(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    given: Given,
    target: TargetFacts | None,
) -> Published:
    """Any dialect under our names.

    Raises: KeyError for a missing field, ValueError for what does not fit, naming both sides.
    """
    names = canonical_names(tensors, str)
    full, notes = complete_shape(_gathered(config), given, target)
    found, copied = without_copies(
        {name: tensors[there] for name, there in names.items()},
        {
            "embed_tokens.weight": None if target is None else target.embedding,
            "lm_head.weight": None if target is None else target.head,
        },
        names,
        (full["vocab_size"], full["hidden_size"]),
    )
    ids, told = _layer_ids(full, given, target)
    full["dflash_config"]["target_layer_ids"] = list(ids)
    full["num_target_layers"] = _num_target_layers(full, ids, given, target)
    check_fusion(found, names, ids, full["hidden_size"])
    return Published(config=full, tensors=found, names=names, notes=(*notes, *copied, *told))


def _gathered(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every field at its place, with what a silent config means."""
    nested = dict(config.get("dflash_config") or {})
    full = {key: value for key, value in config.items() if key not in _INNER}
    if full.get("target_hidden_size") in {None, full["hidden_size"]}:
        full.pop("target_hidden_size", None)
    for key in _INNER:
        if key in config:
            nested.setdefault(key, config[key])
    if "block_size" in nested:
        full.setdefault("block_size", nested.pop("block_size"))
    markov = config["architectures"] == [MARKOV]
    full |= {"architectures": [MARKOV if markov else PLAIN], **_attention_of(config, nested)}
    return full | {"dflash_config": {"causal": False, "convention": CONVENTION, **nested}}


def _attention_of(config: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: ValueError for sliding layers that leave open whether they are causal."""
    num_layers = config["num_hidden_layers"]
    if all_layers_full(config):
        return {
            "layer_types": ["full_attention"] * num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": num_layers,
        }
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    if causal is None:
        raise ValueError(
            "is_causal is missing: layers with a sliding window are then taken for causal in the "
            "block, which this version does not read (it reads is_causal false)"
        )
    return {"use_sliding_window": True, "max_window_layers": 0, "is_causal": causal}


def _layer_ids(
    config: Mapping[str, Any], given: Given, target: TargetFacts | None
) -> tuple[tuple[int, ...], list[str]]:
    num_layers = given.num_target_layers if target is None else target.num_layers
    if given.tap_layer_ids is not None:
        return check_layer_ids(given.tap_layer_ids, num_layers), ["layer ids are those given"]
    ids = config["dflash_config"].get("target_layer_ids")
    if ids is None:
        raise ValueError(
            "dflash_config.target_layer_ids is missing: say which layers it was trained on "
            "(--layer-ids, 0-based layer outputs)"
        )
    return check_layer_ids(ids, num_layers), []


def _num_target_layers(
    config: Mapping[str, Any], ids: tuple[int, ...], given: Given, target: TargetFacts | None
) -> int:
    """Raises: ValueError where it is unknown, or not the target's."""
    found: int | None = config.get("num_target_layers")
    if found is not None and found == len(ids) and ids[-1] >= found:
        found = None  # some mean the number of tapped layers by it
    known = given.num_target_layers if target is None else target.num_layers
    if found is None and known is None:
        raise ValueError(
            "num_target_layers is missing: give the target, or its number of layers "
            "(--num-target-layers)"
        )
    if found is not None and known is not None and found != known:
        raise ValueError(f"num_target_layers is {found}, the target has {known} layers")
    number = known if found is None else found
    check_layer_ids(ids, number)
    return int(number)  # pyright: ignore
