"""Artefacts on disk: written whole or not at all, and refused when they do not fit.

An artefact is a folder with a `manifest.json`. The folder is filled under another name and renamed
into place as the last step, so a folder that exists under its own name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from whiflash_infer.errors import ArtifactError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_PACKAGES = ("whiflash", "torch", "transformers", "safetensors", "lightning", "datasets")


def json_hash(value: Any) -> str:
    """Short, stable hash of any JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: under another name, to the disk, then renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ArtifactError naming the file when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path} is missing") from None
    except json.JSONDecodeError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from None


@contextmanager
def new_artifact(path: Path, manifest: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it replaces `path`, on any failure it is removed.

    `manifest` is read at the end, so counts may be filled in while the block runs.
    """
    staging, retired = path.with_name(f".{path.name}.partial"), _retired(path)
    if retired.exists() and not path.exists():
        retired.rename(path)  # a run was killed between the two renames of `put_in_place`
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        complete = {"format_version": FORMAT_VERSION, **manifest, "packages": package_versions()}
        write_json(staging / MANIFEST, complete)
        _sync_tree(staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    put_in_place(staging, path)


def put_in_place(staging: Path, path: Path) -> None:
    """Rename a complete folder to `path`; what stood there is moved aside first, removed last."""
    retired = _retired(path)
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        path.rename(retired)
    staging.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _retired(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def read_manifest(path: Path, *, made_by: str) -> dict[str, Any]:
    """The manifest of a complete artefact.

    Raises: ArtifactError that names the command which makes the artefact, if it is not there.
    """
    if not (path / MANIFEST).is_file():
        state = "is incomplete (no manifest.json)" if path.exists() else "does not exist"
        raise ArtifactError(f"{path} {state}. Make it with: {made_by}")
    manifest = read_json(path / MANIFEST)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{path / MANIFEST}: format_version is {manifest.get('format_version')}, this version "
            f"reads {FORMAT_VERSION}. Make it again with: {made_by}"
        )
    return manifest


def require_match(
    path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, made_by: str
) -> None:
    """Refuse an artefact made for something else, naming each field with both values."""
    misfits = [
        f"  {key}: the artefact has {found.get(key)!r}, this run has {value!r}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if misfits:
        listing = "\n".join(misfits)
        raise ArtifactError(
            f"{path} was made for something else:\n{listing}\nChange the run, or make the artefact "
            f"again with: {made_by}"
        )


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
