"""What kind of text each piece of an answer is: reasoning, tool call, JSON, code or prose.

One pass from left to right. Every search goes on behind what the one before it has read, so the
time is linear in the length, whatever the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

Kind = Literal["reasoning", "tool_call", "json", "code", "prose"]

_REASONING = {  # what opens it: what ends it
    "<think>": ("</think>",),
    "<thinking>": ("</thinking>",),
    "<thought>": ("</thought>",),
    "<reasoning>": ("</reasoning>",),
    "<seed:think>": ("</seed:think>",),
    "<|begin_of_thought|>": ("<|end_of_thought|>",),
    "[THINK]": ("[/THINK]",),
    "◁think▷": ("◁/think▷",),
    "<|channel|>analysis": ("<|end|>",),
}
_CALLS = {
    "<tool_call>": ("</tool_call>",),
    "<tool_calls>": ("</tool_calls>",),
    "<function_call>": ("</function_call>",),
    "<function=": ("</function>",),
    "<|tool_call|>": ("<|/tool_call|>", "<|end_of_text|>"),
    "<|tool_calls_section_begin|>": ("<|tool_calls_section_end|>",),
    "<｜tool▁calls▁begin｜>": ("<｜tool▁calls▁end｜>",),  # noqa: RUF001
    "[TOOL_CALLS]": ("</s>",),
    "<|python_tag|>": ("<|eom_id|>", "<|eot_id|>"),
    "<|channel|>commentary to=": ("<|call|>",),
}
_JSON_FENCES = {"json", "jsonc", "json5", "jsonl"}
_CALL_FENCES = {"tool_call", "tool_code", "function_call"}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


_ENDS = {opening: _any_of(ends) for opening, ends in {**_REASONING, **_CALLS}.items()}
_THOUGHT_ENDS = {end for ends in _REASONING.values() for end in ends} - {"<|end|>"}
_THOUGHT_EDGE = _any_of((*_REASONING, *_THOUGHT_ENDS))
_TAG = _any_of((*_REASONING, *_CALLS)).pattern
_FENCE = r"^[ \t]*+(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^\n`]*+)$"
_FENCE_LINE = re.compile(_FENCE, re.MULTILINE)
_MARK = re.compile(
    rf"(?P<tag>{_TAG})|{_FENCE}"
    r'|(?P<object>\{)(?=\s*+")'
    r'|^[ \t]*+(?P<array>\[)(?=\s*+(?:["{\[\]0-9-]|true|false|null))',
    re.MULTILINE,
)
_OPENS_OTHERWISE = re.compile(rf"\s*+(?:{_TAG}|[{{\[`])")
_BLANK_LINES = re.compile(r"(?:[ \t]*+\n)*+")
_BEHIND_ARRAY = re.compile(r"[ \t]*+(?:\n|<|\Z)")  # `[1] Smith` is no array


@dataclass(frozen=True, slots=True)
class Segment:
    """Characters [start, end) of a text."""

    start: int
    end: int
    kind: Kind


def segments(text: str) -> list[Segment]:
    """The text in stretches of one kind, in order and without gaps.

    Markers belong to what they mark, and white space between two kinds to what stands before it.
    """
    begins: list[tuple[int, Kind]] = []
    for part in _with_prose(text, _marked(text)):
        start = part.start + _leading_space(text[part.start : part.end])
        if start < part.end and (not begins or part.kind != begins[-1][1]):
            begins.append((start, part.kind))
    if not begins:
        return [Segment(0, len(text), "prose")] if text else []
    starts = [0, *(start for start, _ in begins[1:]), len(text)]
    return [Segment(a, b, kind) for (a, b), (_, kind) in zip(pairwise(starts), begins, strict=True)]


def kinds_of_pieces(pieces: Sequence[str]) -> list[Kind]:
    """The kind of each piece of a text: where its first character lies that is no white space; of
    a blank piece, where it begins."""
    found = segments("".join(pieces))
    ends = [segment.end for segment in found]
    starts = [0, *accumulate(map(len, pieces))]
    kinds: list[Kind] = []
    for start, piece in zip(starts, pieces, strict=False):
        lead = _leading_space(piece) % max(1, len(piece))
        index = min(bisect_right(ends, start + lead), len(found) - 1)
        kinds.append(found[index].kind if found else "prose")
    return kinds


def main_kind(text: str) -> Kind:
    """The kind of most of its characters, white space apart; prose, if there is none."""
    counts: Counter[Kind] = Counter()
    for part in segments(text):
        counts[part.kind] += len("".join(text[part.start : part.end].split()))
    if not counts:
        return "prose"
    return counts.most_common(1)[0][0]


def _leading_space(text: str) -> int:
    return len(text) - len(text.lstrip())


def _with_prose(text: str, marked: Iterable[Segment]) -> Iterator[Segment]:
    at = 0
    for segment in marked:
        if segment.start > at:
            yield Segment(at, segment.start, "prose")
        yield segment
        at = segment.end
    if at < len(text):
        yield Segment(at, len(text), "prose")


def _marked(text: str) -> Iterator[Segment]:
    """Everything that is no prose."""
    at = _end_of_unopened(text)
    if at:
        yield Segment(0, at, "reasoning")
    answer_begins = True
    while at < len(text):
        code = _bare_code(text, at) if answer_begins else None
        if code is not None:
            yield code
            at = code.end
        mark = _MARK.search(text, at)
        if mark is None:
            return
        kind, start, at = _read(text, mark)
        if kind != "prose":
            yield Segment(start, at, kind)
        answer_begins = kind == "reasoning"


def _end_of_unopened(text: str) -> int:
    """Where reasoning ends whose beginning stands in the prompt; 0 if there is none."""
    edge = None if _OPENS_OTHERWISE.match(text) else _THOUGHT_EDGE.search(text)
    return edge.end() if edge and edge[0] in _THOUGHT_ENDS else 0


def _read(text: str, mark: re.Match[str]) -> tuple[Kind, int, int]:
    """Kind, start and end of what a mark opens; prose if it turns out to open nothing."""
    if mark["tag"]:
        end = _ENDS[mark["tag"]].search(text, mark.end())
        kind: Kind = "reasoning" if mark["tag"] in _REASONING else "tool_call"
        return kind, mark.start(), end.end() if end else len(text)
    if mark["fence"]:
        return _read_fence(text, mark)
    start = mark.start("object" if mark["object"] else "array")
    json = _Json(text, start)
    is_json = json.read() and (mark["object"] or _BEHIND_ARRAY.match(text, json.at))
    kind = "tool_call" if json.is_call else "json"
    return (kind if is_json else "prose"), start, json.at


def _read_fence(text: str, mark: re.Match[str]) -> tuple[Kind, int, int]:
    """Up to the line that closes it: of the same character, as many or more, and nothing else."""
    inside, end = mark.end(), len(text)
    closing = None
    for line in _FENCE_LINE.finditer(text, mark.end()):
        if line["fence"].startswith(mark["fence"]) and not line["info"].strip():
            closing, end = line.start(), line.end()
            break
    name = mark["info"].split()[0].lower() if mark["info"].strip() else ""
    if name in _CALL_FENCES:
        return "tool_call", mark.start(), end
    unnamed = not name and _holds_json(text[inside:closing])
    return ("json" if unnamed or name in _JSON_FENCES else "code"), mark.start(), end


def _holds_json(text: str) -> bool:
    stripped = text.strip()
    json = _Json(stripped, 0)
    return stripped[:1] in {"{", "["} and json.read() and json.at == len(stripped)


# Bare code --------------------------------------------------------------------------------------

_STATEMENT = (
    r"(?:async def|def) \w+\(|class \w+[^\n]*:\s*$|@\w+"
    r"|import [\w.]+(?: as \w+)?(?:, ?[\w.]+(?: as \w+)?)*\s*(?:#.*)?$|from [\w.]+ import \S"
)
_STARTS = re.compile(_STATEMENT)
_ASSIGNS = r"[\w.\[\]\"']++(?:, ?[\w.]++)*+ ?[-+*/%]?=(?!=)"
_BODY_STARTS = re.compile(
    r"(?: {4}|\t)[ \t]*+(?:return\b|(?:if|for|while|with) [^\n]*:|try:|raise |assert |pass\s*$|#"
    rf"|\"\"\"|'''|[\w.]++\(|{_ASSIGNS}|{_STATEMENT})"
)
_GOES_ON = re.compile(
    rf"[ \t]{{2}}|\t|{_STATEMENT}|{_ASSIGNS}|#|[)\]}}]|\"\"\"|'''|return\b|raise |assert |print\("
    r"|(?:if|elif|for|while|with|except)\b[^\n]*:\s*(?:#.*)?$|(?:else|try|finally):"
    r"|[\w.]++\([^\n]*\)\s*$"
)
_STOPS = re.compile(rf"{_TAG}|^[ \t]*+(?:```|~~~)")


def _bare_code(text: str, start: int) -> Segment | None:
    """Python without a fence: it opens with a definition, an import, or the body of a function."""
    lead = _BLANK_LINES.match(text, start)
    begin = lead.end() if lead else start
    first = _line(text, begin)
    if not (_STARTS.match(first) or _BODY_STARTS.match(first)) or _STOPS.search(first):
        return None
    at = end = begin + len(first)
    while at < len(text):
        line = _line(text, at)
        if _STOPS.search(line) or not (line.isspace() or _GOES_ON.match(line)):
            break
        at += len(line)
        end = end if line.isspace() else at
    return Segment(begin, end, "code")


def _line(text: str, start: int) -> str:
    """With its newline."""
    end = text.find("\n", start)
    return text[start:] if end < 0 else text[start : end + 1]


# JSON -------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+'
_TOKEN = re.compile(
    rf"\s*+(?:(?P<string>{_STRING}\")|(?P<scalar>-?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?"
    r"|true|false|null)|(?P<sign>[{}\[\]:,]))"
)
_CUT = re.compile(rf"\s*+(?:{_STRING}\\?|[-+.\w]*+)\Z")  # the beginning of a token, or none
_AFTER = {"value": "sv{[", "item": "sv{[]", "key": "s}", "colon": ":"}  # symbols by what is awaited


class _Json:
    """JSON from one place of a text on, as far as it goes; a comma before a bracket is forgiven.

    at: behind what has been read. is_call: it names a function and its arguments.
    """

    def __init__(self, text: str, start: int) -> None:
        self.at = start
        self._text = text
        self._open: list[str] = []
        self._awaits = "value"
        self._keys: set[str] = set()

    @property
    def is_call(self) -> bool:
        return "name" in self._keys and not self._keys.isdisjoint(("arguments", "parameters"))

    def read(self) -> bool:
        """Whether it is a whole value, or one that the end of the text cuts off."""
        while token := _TOKEN.match(self._text, self.at):
            if not self._takes(token):
                return False
            self.at = token.end()
            if not self._open:
                return True
        if not _CUT.match(self._text, self.at):
            return False
        self.at = len(self._text)
        return True

    def _takes(self, token: re.Match[str]) -> bool:
        symbol = token["sign"] or ("s" if token["string"] else "v")
        if symbol not in self._allowed():
            return False
        if symbol in "{[":
            self._open.append(symbol)
        elif symbol in "}]":
            self._open.pop()
        elif self._awaits == "key":
            self._note(token["string"])
        self._awaits = self._next(symbol)
        return True

    def _allowed(self) -> str:
        if self._awaits == "more":
            return ",}" if self._open[-1] == "{" else ",]"
        return _AFTER[self._awaits]

    def _next(self, symbol: str) -> str:
        if symbol in "{[,":
            return "key" if self._open[-1] == "{" else "item"
        if symbol == ":":
            return "value"
        return "colon" if self._awaits == "key" and symbol == "s" else "more"

    def _note(self, key: str) -> None:
        """Keys of the object, or of the objects of a list."""
        if len(self._open) == 1 or self._open == ["[", "{"]:
            self._keys.add(key[1:-1])
