"""The README's path from prompts to a report, followed on the tiny target."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import README, Command, commands
from tests.stages import run

_TINY = {"experiment=demo": "experiment=tiny", "artifacts/smollm2_135m": "artifacts/tiny"}
_PUBLISHED = "~/.cache/whiflash/targets/SmolLM2-135M-Instruct.Q4_1"


def followed(factory: pytest.TempPathFactory) -> Path:
    """The folder in which every stage has run; once in a test run."""
    return _followed(factory.getbasetemp() / "readme")


@functools.cache
def _followed(parent: Path) -> Path:
    folder = parent / "work"
    folder.mkdir(parents=True)
    for command in stages():
        run(folder, tiny(command.text, folder).removeprefix("python "))
    return folder


def stages() -> list[Command]:
    """From `generate.py` to `evaluate.py`, as they follow one another."""
    mine = [c for c in commands() if c.page == README.name and "experiment=demo" in c.text]
    return sorted(mine, key=lambda command: README.read_text().index(command.text))


def tiny(text: str, folder: Path) -> str:
    """What the README says of SmolLM2, said of the tiny target."""
    weights = next((folder.parent / "cache" / "targets").glob("*"), Path())
    for told, meant in {**_TINY, _PUBLISHED: str(weights)}.items():
        text = text.replace(told, meant)
    return text


def words_of(module: str) -> list[list[str]]:
    """The arguments of each command of the README that runs the module, its shell variables filled
    in."""
    lines = re.sub(r"\s*\\\n\s*", " ", README.read_text()).splitlines()
    (variables,) = [line for line in lines if re.match(r"T=\S+ A=", line)]
    found = [line for line in lines if line.startswith(f"python -m {module} ")]
    for name, value in (word.split("=", 1) for word in shlex.split(variables)):
        found = [line.replace(f"${name}", value) for line in found]
    return [shlex.split(line, comments=True)[3:] for line in found]
