"""Drafters of any layout, read into our networks and written from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import save_file

from whiflash_infer.artifacts import new_artifact, write_json
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange import eagle3, speculators, zlab
from whiflash_infer.exchange.facts import TOKEN_IDS, Drafter, Given, Published, TargetFacts
from whiflash_infer.exchange.fields import check_fields
from whiflash_infer.exchange.files import CONFIG, WEIGHTS, DrafterFiles, read_files
from whiflash_infer.exchange.tensors import load_state, stored_dtype
from whiflash_infer.nets.ar import ARDrafter

LAYOUTS = ("eagle3", "zlab", "speculators")
_PUBLISHED: dict[str, ModuleType] = {"eagle3": eagle3, "zlab": zlab}
_USUAL_DRAFTS = 5  # where nothing says how many tokens an EAGLE-3 drafter drafts a round


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A drafter from elsewhere. `notes`: what was filled in, left out or not compared."""

    net: Drafter
    layout: str
    token_ids: dict[str, Any]
    license: str | None
    draft_length: int
    notes: tuple[str, ...]

    def manifest(self, source: str | Path) -> dict[str, Any]:
        """What our copy of it remembers."""
        known = {
            "source": str(source),
            "source_layout": self.layout,
            "license": self.license,
            "tap_layer_ids": list(self.net.config.tap_layer_ids),
            "notes": list(self.notes),
        }
        return known | ({"draft_length": self.draft_length} if _is_ar(self.net) else {})


def _is_ar(net: Drafter) -> bool:
    return isinstance(net, ARDrafter)


def native_layout(net: Drafter) -> str:
    return "eagle3" if _is_ar(net) else "zlab"


def detect(config: Mapping[str, Any]) -> str:
    """The layout of a config.json.

    Raises: ValueError naming the architectures that are known.
    """
    if speculators.MARK in config:
        return "speculators"
    named = config.get("architectures") or []
    architecture = named[0] if len(named) == 1 else None
    if architecture == "LlamaForCausalLM" and "draft_vocab_size" not in config:
        raise ValueError(
            "architectures is ['LlamaForCausalLM'] without draft_vocab_size: no drafter"
        )
    for layout, module in _PUBLISHED.items():
        if architecture in module.ARCHITECTURES | module.FOREIGN_ARCHITECTURES:
            return layout
    known = sorted(eagle3.ARCHITECTURES | zlab.ARCHITECTURES)
    raise ValueError(
        f"architectures is {named!r}; known are {known}, and configs with {speculators.MARK}"
    )


def read_drafter(
    source: str | Path,
    *,
    target: TargetFacts | None = None,
    given: Given | None = None,
    allow_pickle: bool = False,
) -> Imported:
    """A drafter of any layout, by folder or hub id, in the type its tensors have.

    Code in the folder is never run. Given the target, copies of its tensors are compared with it.
    Raises: ArtifactError naming the field or tensor that is missing, unknown or does not fit, with
    what was found and what is expected.
    """
    given = given or Given()
    files = read_files(source, allow_pickle=allow_pickle)
    path = files.path / CONFIG
    try:
        layout = detect(files.config)
        published, module = _normalised(layout, files, given, target)
        net: Drafter = module.build(published.config)
        check_fields(published.config, module.config_of(net), given.ignored_fields)
    except KeyError as error:
        raise ArtifactError(f"{path}: missing field {error.args[0]!r}") from None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    net = net.to(stored_dtype(published.tensors))
    load_state(net, published.tensors, path=files.path, names=published.names)
    return Imported(
        net=net.eval().requires_grad_(False),
        layout=layout,
        token_ids={name: published.config.get(name) for name in TOKEN_IDS},
        license=files.license,
        draft_length=_num_drafts(net, {"draft_length": speculators.draft_length(files.config)}),
        notes=(*published.notes, *_dtype_note(files, net)),
    )


def _normalised(
    layout: str, files: DrafterFiles, given: Given, target: TargetFacts | None
) -> tuple[Published, ModuleType]:
    config = files.config
    if layout == "speculators":
        layout, config = speculators.to_published(config)
    module = _PUBLISHED[layout]
    return module.normalise(config, files.tensors, given, target), module


def _dtype_note(files: DrafterFiles, net: Drafter) -> list[str]:
    named = files.config.get("dtype") or files.config.get("torch_dtype")
    stored = str(net.fc.weight.dtype).removeprefix("torch.")
    if named in {None, stored}:
        return []
    return [f"the config says {named}, the tensors are {stored} and stay so"]


def _num_drafts(net: Drafter, manifest: Mapping[str, Any]) -> int:
    if not isinstance(net, ARDrafter):
        return net.config.block_size - 1
    return manifest.get("draft_length") or _USUAL_DRAFTS


def write_drafter(
    net: Drafter,
    path: Path,
    *,
    layout: str,
    manifest: Mapping[str, Any],
    token_ids: Mapping[str, Any],
    target: TargetFacts | None = None,
) -> tuple[str, ...]:
    """Write a drafter folder atomically; notes for the user.

    `license` and `draft_length` are taken from the manifest. token_ids: bos, eos and pad ids of the
    target. target: for what a layout says of it, or copies from it.
    Raises: UserError for what the layout cannot hold.
    """
    if layout not in {native_layout(net), "speculators"}:
        raise UserError(
            f"the {layout} layout holds no such drafter: this one goes into {native_layout(net)} "
            "or speculators"
        )
    if layout == "speculators":
        config, tensors, notes = speculators.written(
            net, target=target, num_drafts=_num_drafts(net, manifest)
        )
        config["transformer_layer_config"] |= dict(token_ids)
    else:
        config, tensors, notes = _PUBLISHED[layout].written(net)
        config |= token_ids
    config[dtype_field(layout)] = _one_dtype(net)
    if manifest.get("license"):
        config["license"] = manifest["license"]
    with new_artifact(path, manifest) as folder:
        write_json(folder / CONFIG, config)
        stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    return tuple(notes)


def dtype_field(layout: str) -> str:
    return "torch_dtype" if layout == "eagle3" else "dtype"


def _one_dtype(net: Drafter) -> str:
    """Raises: UserError where tensors have several, since a config names one."""
    kinds = {t.dtype for t in net.state_dict().values() if t.is_floating_point()}
    if len(kinds) > 1:
        raise UserError(f"the drafter's tensors are of several types: {sorted(map(str, kinds))}")
    return str(kinds.pop()).removeprefix("torch.")
