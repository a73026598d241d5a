"""Our drafter folders: `config.json` + `model.safetensors` + `manifest.json`.

Config and tensors are those of a published layout, so that engines read the folder as it is:
EAGLE-3's or z-lab's, described in `whiflash_infer.exchange.eagle3` and `.zlab`. Reading one is
strict: a missing or extra tensor or field is an error that names it. Drafters of others, and the
other layouts, come and go through `whiflash_infer.exchange`, which is patient with their dialects.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from whiflash_infer.artifacts import read_json, read_manifest
from whiflash_infer.errors import ArtifactError
from whiflash_infer.exchange import Given, TargetFacts, eagle3, read_drafter, write_drafter, zlab
from whiflash_infer.exchange.facts import TOKEN_IDS, Drafter
from whiflash_infer.exchange.files import CONFIG, WEIGHTS, read_safetensors
from whiflash_infer.exchange.formats import dtype_field, native_layout
from whiflash_infer.exchange.tensors import load_state
from whiflash_infer.nets.ar import ARDrafter

_LAYOUTS: tuple[ModuleType, ...] = (eagle3, zlab)


def save_drafter(path: Path, net: Drafter, manifest: Mapping[str, Any], *, token_ids: dict) -> None:
    """Write a drafter folder atomically. token_ids: bos, eos and pad ids of the target."""
    write_drafter(net, path, layout=native_layout(net), manifest=manifest, token_ids=token_ids)


def load_drafter(
    path: Path, *, made_by: str, dtype: torch.dtype, device: str | torch.device
) -> tuple[Drafter, dict[str, Any]]:
    """The network in evaluation mode, and its manifest.

    Raises: ArtifactError naming the field or tensor that is missing, unknown or misshapen.
    """
    manifest = read_manifest(path, made_by=made_by)
    net = _build(path / CONFIG)
    weights = path / WEIGHTS
    tensors = read_safetensors(weights)
    if isinstance(net, ARDrafter):
        made = dict(net.named_buffers())
        tensors = {**{name: made[name] for name in eagle3.maps_left_out(net)}, **tensors}
    load_state(net, tensors, path=weights, names={})
    return net.to(device=device, dtype=dtype).eval().requires_grad_(False), manifest


def import_drafter(
    source: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    target: TargetFacts | None = None,
    given: Given | None = None,
    allow_pickle: bool = False,
) -> tuple[Drafter, dict[str, Any]]:
    """A public drafter by folder or hub id, as `load_drafter` gives one of ours.

    The manifest holds what is known of it: layout, license, layers, draft length, notes.
    Raises: ArtifactError naming the field or tensor that is missing, unknown or does not fit.
    """
    read = read_drafter(source, target=target, given=given, allow_pickle=allow_pickle)
    return read.net.to(device=device, dtype=dtype), read.manifest(source)


def _build(path: Path) -> Drafter:
    """The network that a config describes, with weights still to be loaded."""
    config = read_json(path)
    named = config.get("architectures")
    try:
        for layout in _LAYOUTS:
            if isinstance(named, list) and len(named) == 1 and named[0] in layout.ARCHITECTURES:
                net: Drafter = layout.build(config)
                _check_config(path, config, layout.config_of(net), dtype_field(native_layout(net)))
                return net
    except KeyError as error:
        raise ArtifactError(f"{path}: missing field {error.args[0]!r}") from None
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    known = sorted(eagle3.ARCHITECTURES | zlab.ARCHITECTURES)
    raise ArtifactError(
        f"{path}: architectures is {named!r}; known are {known}. Another layout is converted by: "
        "python -m whiflash_infer.exchange"
    )


def _check_config(
    path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], dtype_name: str
) -> None:
    wanted = expected.keys() | {*TOKEN_IDS, dtype_name}
    problems = [f"missing field {key!r}" for key in sorted(wanted - found.keys())]
    problems += [f"unknown field {key!r}" for key in sorted(found.keys() - wanted - {"license"})]
    problems += [
        f"field {key!r} is {found[key]!r}, but this version reads only {expected[key]!r}"
        for key in sorted(expected.keys() & found.keys())
        if found[key] != expected[key]
    ]
    if problems:
        raise ArtifactError(f"{path}: " + "; ".join(problems))
