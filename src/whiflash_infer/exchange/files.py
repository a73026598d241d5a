"""A drafter's files: fetched by folder or hub id, read without running anything in them."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from whiflash_infer.artifacts import read_json
from whiflash_infer.errors import ArtifactError

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
_INDEX = f"{WEIGHTS}.index.json"
_PATTERNS = ["*.json", "*.safetensors", "README.md"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    license: str | None


def read_files(source: str | Path, *, allow_pickle: bool) -> DrafterFiles:
    """Raises: ArtifactError naming the folder, hub id or file that is missing or cannot be read."""
    folder = fetch(source, allow_pickle=allow_pickle)
    config = read_json(folder / CONFIG)
    if (folder / "mask_embedding.pt").exists():
        raise ArtifactError(
            f"{folder}: mask_embedding.pt is a mask token of the drafter's own; this version reads "
            "only drafters whose mask is a row of the target's embedding"
        )
    return DrafterFiles(
        path=folder,
        config=config,
        tensors=read_tensors(folder, allow_pickle=allow_pickle),
        license=_license(folder, config),
    )


def fetch(source: str | Path, *, allow_pickle: bool) -> Path:
    """A folder as it is; a hub id downloaded once, code and pickles left where they are."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(str(source)):
        raise ArtifactError(f"{source} is neither a folder nor a hub id (owner/name)")
    patterns = [*_PATTERNS, PICKLE] if allow_pickle else _PATTERNS
    try:
        return Path(snapshot_download(str(source), allow_patterns=patterns))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ArtifactError(
            f"{source} is no folder here, and the hub does not give it: {reason}"
        ) from None


def read_tensors(folder: Path, *, allow_pickle: bool) -> dict[str, Tensor]:
    """Every tensor, by the name it has in its file.

    Raises: ArtifactError; also for a pickle, unless `allow_pickle`.
    """
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    if not (folder / PICKLE).is_file():
        raise ArtifactError(f"{folder} holds no {WEIGHTS}, {_INDEX} or {PICKLE}")
    if not allow_pickle:
        raise ArtifactError(
            f"{folder} holds its weights as {PICKLE} alone, a pickle. Read it with "
            "allow_pickle=true (--allow-pickle; tensors only, no code in it is run)"
        )
    return _read_pickle(folder / PICKLE)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Raises: ArtifactError when the file is missing or damaged."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise ArtifactError(f"{folder / _INDEX}: missing field 'weight_map'")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise ArtifactError(f"{folder / _INDEX}: {shard!r} is no file of this folder")
        tensors |= read_safetensors(folder / shard)
    lost = sorted(places.keys() - tensors.keys())
    if lost:
        raise ArtifactError(f"{folder / _INDEX} names tensors that no shard holds: {lost}")
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ArtifactError(f"{path} is not a plain set of tensors: {reason}") from None
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ArtifactError(f"{path} is not a plain set of tensors, name by name")
    return loaded


def _license(folder: Path, config: dict[str, Any]) -> str | None:
    """From the manifest of a copy of ours, the config, or the front matter of a README."""
    manifest = folder / "manifest.json"
    named = read_json(manifest).get("license") if manifest.is_file() else None
    named = named or config.get("license")
    readme = folder / "README.md"
    if named is None and readme.is_file():
        text = readme.read_text(encoding="utf-8", errors="replace")
        front = re.match(r"\s*---\n(.*?)\n---", text, re.DOTALL)
        line = (
            re.search(r"^license:[ \t]*(\S.*?)[ \t]*$", front[1], re.MULTILINE) if front else None
        )
        named = line[1].strip("'\"") if line else None
    return named
