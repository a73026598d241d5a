"""What an engine's loader asks of a drafter's folder, as far as names, shapes and ids go.

The table is taken from the loaders of vLLM 0.32 (`llama_eagle3`, `qwen3_eagle3`, `qwen3_dflash`,
`configs/speculators`) and SGLang 0.5.23 (`llama_eagle3`, `dflash`). A folder that breaks a contract
may load all the same, and then drafts badly without a word: SGLang passes over tensors that it does
not know, and both fill in layer ids that are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from whiflash_infer.exchange.facts import Drafter
from whiflash_infer.nets.ar import ARDrafter

Engine = Literal["vllm", "sglang"]
ENGINES: tuple[str, ...] = get_args(Engine)
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_AUX = "eagle_aux_hidden_state_layer_ids"
_UNREAD = {"t2d"}  # by every loader
_OWN_TAPS = "taps layers of its own choice"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """method: what the engine calls the algorithm.

    architectures: names it has a loader for; none where another field decides. fields: those it
    cannot do without, with what it does otherwise; ` or ` parts two places for one. fixed: the only
    value that means what we mean, for fields that may be left out. layer_ids: where it looks for
    tapped layers, in its order, each with the number that it gives to the output of layer 0.
    num_taps: fields that count them; without one, it counts 3. renamed: parts of tensor names and
    its own words for them. prefix: one that tensor names may have. copies: tensors of the target
    that may lie beside. full_maps: whether d2t may be there although the draft vocabulary is the
    whole.
    """

    method: str
    architectures: tuple[str, ...] = ()
    fields: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    layer_ids: Mapping[str, int]
    num_taps: tuple[str, ...] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    copies: frozenset[str]
    full_maps: bool = True


_EMBEDDING = frozenset({"embed_tokens.weight"})
_BOTH_TABLES = _EMBEDDING | {"lm_head.weight"}
_MIDLAYER = {"midlayer.": "layers.0."}
CONTRACTS: dict[tuple[str, str], Contract] = {
    ("vllm", "eagle3"): Contract(
        method="eagle3",
        architectures=(
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "LlamaForCausalLM",
        ),
        fields={_AUX: _OWN_TAPS},
        layer_ids={_AUX: 1},
        num_taps=("num_aux_hidden_states", f"eagle_config.{_AUX}"),
        renamed=_MIDLAYER,
        copies=_EMBEDDING,
        full_maps=False,
    ),
    ("vllm", "zlab"): Contract(
        method="dflash",
        architectures=("DFlashDraftModel",),
        fields={
            "dflash_config.target_layer_ids": _OWN_TAPS,
            "dflash_config.mask_token_id or mask_token_id": "stops, for want of a mask token",
        },
        layer_ids={_AUX: 1, "dflash_config.target_layer_ids": 0},
        copies=_BOTH_TABLES,
    ),
    ("vllm", "speculators eagle3"): Contract(
        method="eagle3",
        fields={_AUX: _OWN_TAPS, "norm_before_residual": "takes it for true"},
        layer_ids={_AUX: 1},
        num_taps=(),
        renamed=_MIDLAYER,
        copies=_EMBEDDING,
        full_maps=False,
    ),
    ("vllm", "speculators dflash"): Contract(
        method="dflash",
        fields={"aux_hidden_state_layer_ids": "stops", "mask_token_id": "stops"},
        fixed={"sliding_window_non_causal": True},  # of layers without a window too
        layer_ids={"aux_hidden_state_layer_ids": 1},
        copies=_BOTH_TABLES,
    ),
    ("sglang", "eagle3"): Contract(
        method="EAGLE3",
        architectures=("LlamaForCausalLMEagle3",),
        fields={
            f"eagle_config.{_AUX}": _OWN_TAPS,
            "draft_vocab_size": "stops, or takes the target's head",
        },
        layer_ids={f"eagle_config.{_AUX}": 0},
        num_taps=("num_aux_hidden_states", f"eagle_config.{_AUX}"),
        renamed=_MIDLAYER,
        prefix="model.",
        copies=_EMBEDDING,
    ),
    ("sglang", "zlab"): Contract(
        method="DFLASH",
        architectures=("DFlashDraftModel",),
        fields={
            "dflash_config.target_layer_ids or target_layer_ids": _OWN_TAPS,
            "dflash_config.mask_token_id or mask_token_id": "looks for the token <|MASK|>",
            "dflash_config.block_size or block_size": "takes blocks of 16",
        },
        layer_ids={"dflash_config.target_layer_ids": 0, "target_layer_ids": 0},
        prefix="model.",
        copies=_BOTH_TABLES,
    ),
}


def breaches(
    contract: Contract, config: Mapping[str, Any], tensors: Iterable[str], net: Drafter
) -> list[str]:
    """Where the engine would read the folder otherwise than as the drafter `net`, if at all."""
    return [
        *_architecture(contract, config),
        *_missing(contract, config),
        *_misread(contract, config),
        *_layer_ids(contract, config, list(net.config.tap_layer_ids)),
        *_tensors(contract, list(tensors), net),
    ]


def looked_up(config: Mapping[str, Any], name: str) -> Any:
    """A field by its dotted name; None where it, or what it stands in, is not there."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _architecture(contract: Contract, config: Mapping[str, Any]) -> list[str]:
    named = list(config.get("architectures") or [])
    if not contract.architectures or (len(named) == 1 and named[0] in contract.architectures):
        return []
    return [f"architectures is {named}, and the engine reads {list(contract.architectures)}"]


def _layer_ids(contract: Contract, config: Mapping[str, Any], taps: list[int]) -> list[str]:
    """The first place that holds ids decides, in the engine's own count."""
    for name, first in contract.layer_ids.items():
        written = looked_up(config, name)
        if written:
            meant = [tap + first for tap in taps]
            wrong = [] if list(written) == meant else [f"{name} is {written}, it must be {meant}"]
            return wrong + _number_of_taps(contract, config, len(taps))
    return []


def _number_of_taps(contract: Contract, config: Mapping[str, Any], number: int) -> list[str]:
    if contract.num_taps is None:
        return []
    written = [looked_up(config, name) for name in contract.num_taps]
    counted = next((n if isinstance(n, int) else len(n) for n in written if n), 3)
    if counted == number:
        return []
    where = " or ".join(contract.num_taps) or "no field of this layout"
    return [f"{number} layers are tapped, and the engine counts {counted} (it reads {where})"]


def _missing(contract: Contract, config: Mapping[str, Any]) -> list[str]:
    return [
        f"{names} is missing, and without it the engine {otherwise}"
        for names, otherwise in contract.fields.items()
        if all(looked_up(config, name) is None for name in names.split(" or "))
    ]


def _misread(contract: Contract, config: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {looked_up(config, name)!r}, and the engine reads the drafter right only with "
        f"{value!r}"
        for name, value in {**contract.fixed, "tie_word_embeddings": False}.items()
        if looked_up(config, name) not in (None, value)
    ]


def _tensors(contract: Contract, found: list[str], net: Drafter) -> list[str]:
    """Shapes are compared with the config where the drafter is read."""
    wanted = {_renamed(contract, name) for name in net.state_dict()} - _UNREAD
    there = {_renamed(contract, name.removeprefix(contract.prefix)) for name in found} - _UNREAD
    whole = _has_whole_vocabulary(net)
    if whole:
        wanted -= {"d2t"}
    spare = contract.copies | ({"d2t"} if whole and contract.full_maps else set())
    problems = []
    if whole and "d2t" in there - spare:
        there -= {"d2t"}
        problems = ["tensor d2t is there, and the engine has none for a whole vocabulary"]
    problems += [f"tensor {name} is missing" for name in sorted(wanted - there)]
    return problems + [f"tensor {n} is unknown to it" for n in sorted(there - wanted - spare)]


def _renamed(contract: Contract, name: str) -> str:
    for old, new in contract.renamed.items():
        name = name.replace(old, new)
    return name


def _has_whole_vocabulary(net: Drafter) -> bool:
    config = net.config
    return isinstance(net, ARDrafter) and net.config.draft_vocab_size == config.shape.vocab_size
