"""Config fields that the layouts share: widths, layer ids, rotary positions; and what
else may stand in a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig

from whiflash_infer.exchange.facts import TOKEN_IDS, Given, TargetFacts
from whiflash_infer.nets.shape import DrafterShape, check_tap_layer_ids

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
}
_ROPE_FIELDS = ("rope_parameters", "rope_theta", "rope_scaling")
# Rope types whose angles do not depend on max_position_embeddings.
_UNBOUNDED_ROPE = {"default", "linear"}
# Fields that no drafter's output depends on. The first set is every transformers config's own.
_INERT = (frozenset(PreTrainedConfig().to_dict()) - {"model_type"}) | {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "dtype",
    "initializer_range",
    "license",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    *TOKEN_IDS,
}
# Fields that would change the output, and the values with which they do not.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_multiplier": (1.0,),
    "final_logit_softcapping": (0,),
    "input_embedding_scale": (1.0,),
    "is_causal": (False,),
    "mlp_bias": (False,),
    "next_layer_regular": (True,),
    "norm_before_fc": (False,),
    "norm_before_residual": (False,),
    "output_multiplier": (1.0,),
    "parallel_draft_step": (0, 1),
    "parallel_draft_heads_num_layers": (0, 1),
    "partial_rotary_factor": (1.0,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "use_swa": (False,),
}


def shape_fields(shape: DrafterShape) -> dict[str, Any]:
    return {
        **{public: getattr(shape, ours) for ours, public in _SHAPE_FIELDS.items()},
        **both_rope_schemas(shape.rope_parameters),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def read_shape(config: Mapping[str, Any]) -> DrafterShape:
    values = {ours: config[public] for ours, public in _SHAPE_FIELDS.items()}
    return DrafterShape(
        **values,
        rope_parameters=config["rope_parameters"],
        target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
    )


def to_layer_inputs(layer_outputs: Iterable[int]) -> list[int]:
    """The same tensors by the layer they enter: vLLM and `speculators`, who count the embeddings
    as 0."""
    return [i + 1 for i in layer_outputs]


def to_layer_outputs(layer_inputs: Iterable[int]) -> list[int]:
    """Raises: ValueError for 0, the embeddings, which leave no layer."""
    layer_inputs = list(layer_inputs)
    if min(layer_inputs, default=1) < 1:
        raise ValueError(
            f"layer ids {layer_inputs} are counted from the embeddings (id 0), which are no "
            "layer's output; ids from 1 on can be tapped"
        )
    return [i - 1 for i in layer_inputs]


def check_layer_ids(ids: Iterable[int], num_target_layers: int | None) -> tuple[int, ...]:
    """Layer outputs in the order of the columns of `fc`.

    Raises: ValueError where they do not ascend, or lie outside the target.
    """
    ids = tuple(ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ValueError(f"layer ids {list(ids)} must ascend, each 0 or more, and be at least one")
    if num_target_layers is not None:
        check_tap_layer_ids(list(ids), num_target_layers)
    return ids


def all_layers_full(config: Mapping[str, Any]) -> bool:
    """Whether no layer has a sliding window; without `layer_types`, `use_sliding_window` says."""
    kinds = config.get("layer_types")
    if kinds is None:
        return not (config.get("use_sliding_window") and config.get("sliding_window"))
    return set(kinds) <= {"full_attention"}


def read_rope(config: Mapping[str, Any], given_theta: float | None) -> dict[str, Any]:
    """Rotary positions, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Raises: ValueError where the two schemas disagree, no base is named, or a part of the channels
    is left unturned.
    """
    rope = _joined_schemas(config)
    share = rope.pop("partial_rotary_factor", None) or 1.0
    if share != 1.0:
        raise ValueError(f"partial_rotary_factor is {share}, this version turns all channels")
    if given_theta is not None:
        rope["rope_theta"] = given_theta
    if rope.get("rope_theta") is None:
        raise ValueError(
            "rope_theta is missing: readers then assume their own default, mostly 10000; say which "
            "base it was trained with (--rope-theta)"
        )
    return rope


def _joined_schemas(config: Mapping[str, Any]) -> dict[str, Any]:
    new, theta = _one_rope(config.get("rope_parameters")), config.get("rope_theta")
    old = _one_rope(config.get("rope_scaling"))
    old.setdefault("rope_theta", theta)
    if not new:
        return {"rope_type": "default", **old}
    new = {"rope_type": "default", "rope_theta": theta, **new}
    disagree = theta is not None and new["rope_theta"] != theta
    if disagree or (len(old) > 1 and old != new):
        raise ValueError(
            f"rope_parameters is {new}, but rope_theta is {theta} and rope_scaling "
            f"{config.get('rope_scaling')}"
        )
    return new


def _one_rope(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A rope dictionary under today's names; of one set a layer type, the only one."""
    rope = dict(value or {})
    if rope and all(isinstance(part, dict) for part in rope.values()):
        sets = list(rope.values())
        if any(part != sets[0] for part in sets):
            raise ValueError(f"rotary positions differ by layer type: {rope}")
        rope = dict(sets[0])
    old_name = rope.pop("type", None)
    if old_name is not None:
        rope.setdefault("rope_type", old_name)
    return rope


def both_rope_schemas(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Older readers look for two of these fields, transformers 5 for `rope_parameters`."""
    scaled = rope["rope_type"] != "default"
    return {
        "rope_parameters": dict(rope),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": dict(rope) if scaled else None,
    }


def complete_shape(
    config: Mapping[str, Any], given: Given, target: TargetFacts | None
) -> tuple[dict[str, Any], list[str]]:
    """The config with head_dim, rope in both schemas, positions of the target; and what to tell.

    Raises: ValueError naming both sides where the target differs.
    """
    notes: list[str] = []
    rope = read_rope(config, given.rope_theta)
    named = {field: config[field] for field in _ROPE_FIELDS if config.get(field) is not None}
    full = {**config, **both_rope_schemas(rope), "tie_word_embeddings": False}
    full.setdefault("attention_bias", False)
    if given.rope_theta is not None and named and _joined_schemas(config) != rope:
        notes.append(f"rope_theta {given.rope_theta} was given in place of {named}")
    if full.get("head_dim") is None:
        full["head_dim"] = _even_head_dim(config)
        notes.append(f"head_dim is missing, so it is hidden_size / heads = {full['head_dim']}")
    if target is not None:
        notes += _compare_with_target(full, rope, target)
    return full, notes


def _even_head_dim(config: Mapping[str, Any]) -> int:
    size, rest = divmod(config["hidden_size"], config["num_attention_heads"])
    if rest:
        raise ValueError(
            f"head_dim is missing and hidden_size {config['hidden_size']} is no multiple of "
            f"num_attention_heads {config['num_attention_heads']}"
        )
    return size


def _compare_with_target(
    full: dict[str, Any], rope: Mapping[str, Any], target: TargetFacts
) -> list[str]:
    shape, notes = target.shape, []
    for field, wanted in (
        ("vocab_size", shape.vocab_size),
        ("target_hidden_size", shape.hidden_size),
    ):
        found = full.get(field) or full["hidden_size"]
        if found != wanted:
            raise ValueError(f"{field} is {found}, that of the target {target.name} is {wanted}")
    if dict(rope) != dict(shape.rope_parameters):
        notes.append(f"rotary positions are {dict(rope)}, the target's {shape.rope_parameters}")
    length, wanted = full["max_position_embeddings"], shape.max_position_embeddings
    if length < wanted and rope["rope_type"] in _UNBOUNDED_ROPE:
        full["max_position_embeddings"] = wanted
        notes.append(f"max_position_embeddings raised from {length} to the target's {wanted}")
    return notes


def check_fields(
    found: Mapping[str, Any], expected: Mapping[str, Any], ignored: Iterable[str]
) -> None:
    """Raises: ValueError naming every field that would change the output and is not reproduced."""
    problems = _differences(found, expected, frozenset(ignored), "")
    if problems:
        raise ValueError("; ".join(problems))


def _differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], ignored: frozenset[str], prefix: str
) -> list[str]:
    problems: list[str] = []
    for key in sorted(found.keys() - ignored - _INERT):
        value, name = found[key], prefix + key
        if key not in expected:
            if value is not None and value not in _OFF.get(key, ()):
                problems.append(
                    f"field {name!r} is {value!r}, which this version does not know (--ignore-field"
                    f" {key} if it changes no output)"
                )
        elif isinstance(value, dict) and isinstance(expected[key], dict) and key[:4] != "rope":
            problems += _differences(value, expected[key], ignored, f"{name}.")
        elif value != expected[key]:
            problems.append(f"field {name!r} is {value!r}, this version reads {expected[key]!r}")
    return problems
