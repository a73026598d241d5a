"""Stages through their real entry points, in this process: the seconds of imports are paid once."""

from __future__ import annotations

import io
import json
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def run(folder: Path, command: str, *, target: str = "tiny") -> str:
    """Run a stage in `folder`; its output. Fails the test when it fails."""
    done = attempt(folder, command, target=target)
    assert done.status == 0, done.out + done.err
    return done.out


def attempt(folder: Path, command: str, *, target: str = "tiny") -> Outcome:
    """What typing the command in `folder` does, without the seconds that a new process imports.

    What the command sets itself wins over what is common to all.
    """
    script, *options = command.split()
    out, err = io.StringIO(), io.StringIO()
    flags = [option for option in options if option.startswith("-")]
    settings = [option for option in options if not option.startswith("-")]
    argv = [script, *flags, *common(folder, target), *settings]
    status = 0
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), patched_argv(argv):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
    return Outcome(status, out.getvalue(), err.getvalue())


@contextmanager
def patched_argv(argv: list[str]) -> Iterator[None]:
    old, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = old


def common(folder: Path, target: str = "tiny") -> list[str]:
    return [f"target={target}", "experiment=tiny", f"paths.cache={folder.parent}/cache"]


def manifest_of(folder: Path, artefact: str) -> dict:
    return json.loads((folder / "artifacts/tiny" / artefact / "manifest.json").read_text())


def appears(folder: Path, pattern: str, *, within_s: float = 30.0) -> bool:
    """Whether such a file is there in time: W&B's are written by a process of its own."""
    until = time.monotonic() + within_s
    while not any(folder.rglob(pattern)):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
