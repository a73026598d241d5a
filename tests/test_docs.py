from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from whiflash_train.entry import check_keys

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXPERIMENTS = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))


def blocks() -> Iterator[str]:
    """Code blocks of the pages, and the commands in the headers of the experiment files."""
    for path in DOCS:
        yield from re.findall(r"^```\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    for path in EXPERIMENTS:
        yield "\n".join(re.findall(r"^# {3,}(.*)$", path.read_text(), re.MULTILINE))


def documented_commands() -> list[str]:
    """Every command that runs an entry point, lines joined at backslashes."""
    found = []
    for block in blocks():
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found += [line for line in lines if re.search(r"\b\w+\.py\b", line)]
    return sorted({re.sub(r"\s+#.*", "", line) for line in found if "benchmarks/" not in line})


def test_every_test_that_the_docs_name_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 30
    existing = {
        (path.name, test)
        for path in (ROOT / "tests").rglob("test_*.py")
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    missing = [pair for pair in named if pair not in existing]
    assert missing == []


@pytest.mark.parametrize("command", documented_commands())
def test_a_documented_command_composes(command: str) -> None:
    words = shlex.split(command)
    script = next(word for word in words if word.endswith(".py"))
    assert (ROOT / script).is_file()
    arguments = [word for word in words[words.index(script) + 1 :] if "=" in word]
    check_keys(ROOT / "conf", Path(script).stem, arguments)


def test_the_docs_hold_commands() -> None:
    assert len(documented_commands()) > 20
