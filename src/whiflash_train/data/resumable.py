"""Artefacts that grow over many runs: a folder per fingerprint, files whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import safetensors.torch
from torch import Tensor

from whiflash_infer.artifacts import put_in_place, write_whole
from whiflash_infer.errors import UserError


@contextmanager
def resumable_folder(path: Path, fingerprint: str) -> Iterator[Path]:
    """Yield the folder in which the artefact of this fingerprint grows; on success it is `path`.

    After a failure what is in it stays for the next run with the same fingerprint. Success replaces
    the old artefact and removes what runs with other fingerprints left.
    Raises: UserError when the folder cannot be written, or another run is writing it.
    """
    work = path.with_name(f".{path.name}-{fingerprint}.work")
    with told_writing(work):
        work.mkdir(parents=True, exist_ok=True)
    with _locked(work) as alone:
        if not alone:
            raise UserError(f"another run is writing {work}: wait for it, or stop it")
        try:
            yield work
        except BaseException:
            with suppress(OSError):
                work.rmdir()  # if nothing is in it
            raise
        with told_writing(work):
            put_in_place(work, path)
    _remove_leftovers(path)


def write_shard(path: Path, tensors: Mapping[str, Tensor], fingerprint: str) -> None:
    """Write a safetensors file whole or not at all. Raises: UserError when the disk refuses."""
    # One metadata key: their order in the file is random.
    whole = safetensors.torch.save(dict(tensors), metadata={"fingerprint": fingerprint})
    with told_writing(path.parent):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, whole)


def _remove_leftovers(path: Path) -> None:
    """Other fingerprints' unfinished folders, but for those in which a run is at work."""
    pattern = re.compile(rf"\.{re.escape(path.name)}-[0-9a-f]+\.work")
    for folder in path.parent.iterdir():
        if pattern.fullmatch(folder.name):
            with _locked(folder) as unused:
                if unused:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has the folder for itself; the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def told_writing(folder: Path) -> Iterator[None]:
    """Raises: UserError in one line for what a disk can refuse."""
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        advice = "Free some space" if error.errno == errno.ENOSPC else "Mend that"
        raise UserError(
            f"cannot write {folder}: {cause}. {advice} and run the same command again: it goes on "
            "from what is complete"
        ) from error
