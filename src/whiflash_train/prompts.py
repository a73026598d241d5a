"""Prompt rows from the built-in files, a JSONL file or a Hugging Face data set."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from whiflash_infer.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that ends with a user's turn."""

    id: str
    category: str
    messages: list[dict[str, Any]]


@dataclass
class Tally:
    """What became of every row: read = kept + dropped, by reason."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str) -> None:
        self.read += 1
        self.dropped[reason] += 1

    def keep(self) -> None:
        self.read += 1
        self.kept += 1

    def as_dict(self) -> dict[str, Any]:
        return {"read": self.read, "kept": self.kept, "dropped": dict(sorted(self.dropped.items()))}

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items()))
        return f"read {self.read} = kept {self.kept} + dropped {sum(self.dropped.values())}" + (
            f" ({reasons})" if reasons else ""
        )


def read_prompts(source: str, *, builtin: Path, split: str, tally: Tally) -> list[Prompt]:
    """All usable prompts of a source, in order; the rest is counted in `tally`.

    source: `builtin` (the file of that split below `builtin`), a path ending in .jsonl, or the id
    of a Hugging Face data set. Rows carry `messages` or `prompt`, and may carry `id`, `category`.
    Raises: UserError when the source does not exist or holds no usable row.
    """
    if source == "builtin":
        rows = _jsonl_rows(builtin / f"{split}.jsonl")
    elif source.endswith((".jsonl", ".json")):
        rows = _jsonl_rows(Path(source))
    else:
        rows = _hub_rows(source, split)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for place, row in rows:
        parsed = _parse(row, place)
        if isinstance(parsed, Prompt) and parsed.id in seen:
            parsed = "duplicate_id"
        if isinstance(parsed, str):
            tally.drop(parsed)
            continue
        seen.add(parsed.id)
        tally.keep()
        prompts.append(parsed)
    if not prompts:
        raise UserError(f"{source} ({split}) has no usable prompt: {tally}")
    return prompts


def take_evenly(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """The first prompts of every category, as even as the numbers allow, in the given order."""
    if limit is None or limit >= len(prompts):
        return prompts
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    picked: set[str] = set()
    depth = 0
    while len(picked) < limit:
        for rows in by_category.values():
            if depth < len(rows) and len(picked) < limit:
                picked.add(rows[depth].id)
        depth += 1
    return [p for p in prompts if p.id in picked]


def hold_out(
    prompts: list[Prompt], fraction: float, *, purpose: str
) -> tuple[list[Prompt], list[Prompt]]:
    """Split off a fraction by a hash of the id: stable when rows are added or reordered.

    The purpose enters the hash, so that splits for two purposes are independent of each other.
    """

    def share(prompt: Prompt) -> float:
        digest = hashlib.sha256(f"{purpose}:{prompt.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    held = [p for p in prompts if share(p) < fraction]
    return [p for p in prompts if share(p) >= fraction], held


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise UserError(f"prompt file {path} does not exist")
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                yield f"{path.name}:{number}", "blank_line"
                continue
            try:
                yield f"{path.name}:{number}", json.loads(line)
            except json.JSONDecodeError:
                yield f"{path.name}:{number}", "invalid_json"


def _hub_rows(name: str, split: str) -> Iterable[tuple[str, Any]]:
    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise UserError(
            f"cannot load the data set {name!r}, split {split!r}: {error}. Give a Hugging Face id, "
            "a .jsonl file, or `builtin`"
        ) from error
    return ((f"{name}:{i}", row) for i, row in enumerate(rows))


def _parse(row: Any, place: str) -> Prompt | str:
    """The prompt, or why the row is dropped."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        return "not_an_object"
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    problem = _message_problem(messages)
    if problem is not None:
        return problem
    assert messages is not None
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]  # the target writes its own answer
    if not messages or messages[-1]["role"] != "user":
        return "no_user_turn_to_answer"
    return Prompt(str(row.get("id", place)), str(row.get("category", "all")), list(messages))


def _message_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "no_messages"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return "unknown_role"
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            return "empty_content"
    return None
