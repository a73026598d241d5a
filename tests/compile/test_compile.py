from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WIDTHS = 4  # of a chain of 3 and a tree of 7: 1, 2, 4, 8


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Traced in full, but run without a compiler, which would take minutes."""
    command = [sys.executable, "-m", "tests.compile.decoding", "eager"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_compiled_passes_give_the_same_tokens_alone_and_in_a_batch(told: dict[str, Any]) -> None:
    assert told["compiled"] == told["plain"]


def test_a_shape_is_compiled_once_however_long_the_text_gets(told: dict[str, Any]) -> None:
    before, together, alone, again = told["graphs"][2:]
    assert before == 0  # a decoder that was not asked to compile does not
    assert 0 < together <= alone <= 3 * WIDTHS  # 3, 2 and 1 rows
    assert again == alone
    assert told["breaks"] == {}
