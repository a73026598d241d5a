from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from whiflash_train.entry import check_keys

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_commands() -> list[str]:
    """Every command in a code block that runs an entry point, lines joined at backslashes."""
    found = []
    for path in DOCS:
        for block in re.findall(r"^```\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
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
