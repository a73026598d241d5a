"""Which rows are used, and for what: duplicates, evaluation prompts, limits, splits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from whiflash_infer.errors import UserError
from whiflash_train.checks import checked
from whiflash_train.data.masks import MaskRules
from whiflash_train.data.rows import AnyRow, Conversation, content_key
from whiflash_train.data.sources import DataSource, read_mixed
from whiflash_train.data.tally import BadRow, Tally

T = TypeVar("T")
_TELLING = 32  # characters from which on a later user turn names one conversation and no other


@checked
@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """limit: conversations in all, as even over the categories as they allow; null: all.

    validation_fraction: held out of sources without a validation split. router_fraction: kept from
    the drafters for the router. roles: names of roles beyond the known ones.
    duplicates, in_evaluation: what to do with repeated rows, and with rows whose question is one of
    the evaluation prompts.
    """

    limit: int | None
    validation_fraction: float
    router_fraction: float
    roles: dict[str, str]
    duplicates: Literal["drop", "keep"]
    in_evaluation: Literal["drop", "keep"]
    mask: MaskRules

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "router_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must lie in [0, 1)")


@dataclass(frozen=True, slots=True)
class Picked:
    split: str
    row: AnyRow


def pick_rows(
    sources: Mapping[str, DataSource],
    settings: DataSettings,
    tally: Tally,
    *,
    evaluation_turns: set[str],
    convert: Callable[[AnyRow], AnyRow] = lambda row: row,
) -> Iterator[Picked]:
    """The rows to use with their split, in input order, validation splits first.

    Everything else that was read is counted out in `tally`. convert: what is done to each row
    before it is compared with others; it may raise BadRow.
    """
    check = _Check(settings, tally, evaluation_turns)
    for validation in (True, False):
        raw = read_mixed(sources, tally, validation=validation, roles=settings.roles)
        rows = _good(raw, check, convert=convert, named=len(sources) > 1)
        if not validation and settings.limit is not None:
            rows = _limited(list(rows), settings.limit, tally)
        for name, row in rows:
            held_out = 0.0 if sources[name].validation_split else settings.validation_fraction
            split = _split(row, held_out, settings.router_fraction)
            yield Picked("validation" if validation else split, row)


def read_evaluation_turns(sources: Mapping[str, DataSource], roles: Mapping[str, str]) -> set[str]:
    """The user turns of the evaluation prompts, which must not be trained on.

    Raises: UserError when they cannot be read.
    """
    rows = read_mixed(sources, Tally(), validation=False, roles=roles)
    return {turn for _, row in rows for turn in telling_turns(row)}


def telling_turns(row: AnyRow) -> list[str]:
    """The user turns that tell a conversation from others: the first, and all that are not short.

    Case and white space do not count.
    """
    if not isinstance(row, Conversation):
        return []
    turns = [" ".join(turn.lower().split()) for turn in row.user_turns]
    return [turn for i, turn in enumerate(turns) if i == 0 or len(turn) >= _TELLING]


def take_evenly(rows: list[T], limit: int | None, category: Callable[[T], str]) -> list[T]:
    """The first rows of every category, as even as the numbers allow, in the given order."""
    if limit is None or limit >= len(rows):
        return rows
    by_category: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_category.setdefault(category(row), []).append(index)
    picked: set[int] = set()
    depth = 0
    while len(picked) < limit:
        for indices in by_category.values():
            if depth < len(indices) and len(picked) < limit:
                picked.add(indices[depth])
        depth += 1
    return [row for index, row in enumerate(rows) if index in picked]


class _Check:
    """Knows the rows that came before, and the evaluation prompts."""

    def __init__(self, settings: DataSettings, tally: Tally, evaluation_turns: set[str]) -> None:
        self.settings = settings
        self.tally = tally
        self._evaluation = evaluation_turns
        self._contents: set[str] = set()
        self._ids: set[str] = set()

    def __call__(self, row: AnyRow) -> None:
        """Raises: BadRow for a row that is to be left out."""
        content = content_key(row)
        if content in self._contents:
            self._told("duplicate", row, keep=self.settings.duplicates == "keep")
        if any(turn in self._evaluation for turn in telling_turns(row)):
            self._told("in_evaluation", row, keep=self.settings.in_evaluation == "keep")
        if row.id in self._ids:
            raise BadRow("duplicate_id", row.id)
        self._contents.add(content)
        self._ids.add(row.id)

    def _told(self, what: str, row: AnyRow, *, keep: bool) -> None:
        if not keep:
            raise BadRow(what)
        self.tally.note(f"{what}_kept", row.place)


def _good(
    rows: Iterable[tuple[str, AnyRow]],
    check: _Check,
    *,
    convert: Callable[[AnyRow], AnyRow],
    named: bool,
) -> Iterator[tuple[str, AnyRow]]:
    """Rows to use; when there are several sources their ids name theirs."""
    for name, raw in rows:
        try:
            row = convert(replace(raw, id=f"{name}/{raw.id}") if named else raw)
            check(row)
        except BadRow as bad:
            check.tally.drop(raw.place, bad)
        else:
            yield name, row


def _limited(
    rows: list[tuple[str, AnyRow]], limit: int, tally: Tally
) -> Iterator[tuple[str, AnyRow]]:
    picked = {id(pair) for pair in take_evenly(rows, limit, lambda pair: pair[1].category)}
    for pair in rows:
        if id(pair) in picked:
            yield pair
        else:
            tally.drop(pair[1].place, BadRow("over_limit"))


def _split(row: AnyRow, validation_fraction: float, router_fraction: float) -> str:
    """By a hash of what the row asks: stable when rows are added, renamed or reordered, and other
    answers to the same question fall into the same split.

    The purpose enters the hash, so that the two shares are independent of each other.
    """
    content = " ".join(row.user_turns) if isinstance(row, Conversation) else content_key(row)

    def share(purpose: str) -> float:
        digest = hashlib.sha256(f"{purpose}:{content}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    if share("validation") < validation_fraction:
        return "validation"
    return "router" if share("router") < router_fraction else "train"


def as_prompt(row: AnyRow) -> Conversation:
    """The conversation up to its last question, for the target to answer.

    Raises: BadRow when there is no question.
    """
    if not isinstance(row, Conversation):
        raise BadRow("no_question", "only conversations and prompts can be answered")
    messages = row.messages
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise BadRow("no_question")
    return replace(row, messages=messages, truncated=False)


def require_rows(rows: list[Picked], tally: Tally) -> None:
    if not rows:
        raise UserError("\n  ".join([f"no row is left: {tally}", *tally.details()]))
