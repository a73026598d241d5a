"""The texts that the code can tell a user, and whether a quoted one is among them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.docs.pages import prose
from tests.stages import ROOT

_HOLE = "\0"  # what is filled in at run time


def quoted(page: Path) -> list[str]:
    """Code spans with a space in them in the first column of the page's tables."""
    rows = re.findall(r"^\| (.*?[^\\]) \|", prose(page), re.MULTILINE)
    return [span for cell in rows for span in re.findall(r"`([^`]+)`", cell) if " " in span]


def is_told(message: str) -> bool:
    """Whether the code holds a text with these pieces in this order; `...` stands for what is
    filled in."""
    pieces = [piece.strip() for piece in message.split("...") if piece.strip()]
    pattern = re.compile(".*?".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return any(pattern.search(template) for template in templates())


@functools.cache
def templates() -> tuple[str, ...]:
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "data_prep").glob("*.py"), *ROOT.glob("*.py")]
    return tuple(text for path in paths for text in _texts(ast.parse(path.read_text())))


def _texts(tree: ast.AST) -> list[str]:
    """Every string and f-string, but for documentation; what is filled in is a hole."""
    whole = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [_text(node) for node in whole if id(node) not in docs]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]", _HOLE, re.sub(r"\[/?bold[^\]]*\]", "", node.value))
    return _HOLE
