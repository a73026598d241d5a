"""Token ids and loss masks of rows, from where the chat template puts the boundaries.

For the answer at message i the template renders two texts: `opened`, the messages before it and the
generation prompt, and `closed`, the same and the answer. The answer's tokens are the tokens of
`closed` that are not those of `opened`, up to and with the end-of-turn token:

    opened   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    closed   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    mask     ......................................................##############.

A row ends with its last answer. Where `closed` of every answer opens the whole conversation's text,
the conversation is one row. Where it does not, because the template rewrites history (drops old
reasoning, say), every answer becomes a row of its own, with the history as it would be served.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar

from whiflash_infer.chat import Chat, TemplateRejects
from whiflash_train.checks import checked
from whiflash_train.data.markers import Markers, Span
from whiflash_train.data.rows import AnyRow, Conversation, Message, PlainText, TokenRow
from whiflash_train.data.tally import BadRow

T = TypeVar("T")
_Tokens = tuple[list[int], dict[int, int]]  # ids, and how many of them stand before each cut


@checked
@dataclass(frozen=True, kw_only=True)
class MaskRules:
    """What is supervised.

    turns: all answers, or the last one of each conversation.
    reasoning: whether an answer's reasoning is supervised; it stays in the text either way.
    text: rows of running text hold turns in the template's own markers (chat), or every token of
        them is supervised (plain).
    max_length: tokens of a row. over_long: cut what is longer, or drop it.
    min_supervised: a row with fewer supervised tokens is dropped.
    """

    turns: Literal["all", "last"]
    reasoning: bool
    text: Literal["chat", "plain"]
    max_length: int
    over_long: Literal["truncate", "drop"]
    min_supervised: int


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """truncated: the last answer was cut off. notes: what was done.

    turn: index of the answer, where a conversation became several rows.
    """

    ids: list[int]
    mask: list[bool]
    truncated: bool
    turn: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendered:
    """A row's text before it is encoded. plain: stop tokens may stand anywhere in it."""

    text: str
    spans: list[Span]
    truncated: bool
    turn: int | None = None
    notes: tuple[str, ...] = ()
    plain: bool = False

    def cuts(self) -> list[int]:
        """Where tokens must end: at both ends of every answer."""
        return sorted({p for span in self.spans for p in (span.start, span.end)} - {len(self.text)})


class Masker:
    def __init__(self, chat: Chat, rules: MaskRules) -> None:
        self.chat = chat
        self.rules = rules

    def __call__(self, rows: Sequence[AnyRow]) -> list[list[MaskedRow] | BadRow]:
        """For each row its masked rows, or why it has none. One call of the tokenizer for all."""
        rendered: list[list[_Rendered] | BadRow] = [_outcome(self._render, row) for row in rows]
        encoded = self._encode([r for part in rendered if isinstance(part, list) for r in part])
        results: list[list[MaskedRow] | BadRow] = []
        for row, part in zip(rows, rendered, strict=True):
            if isinstance(part, BadRow):
                results.append(part)
            elif isinstance(row, TokenRow):
                results.append(_outcome(self._finish_tokens, row))
            else:
                tokens = [next(encoded) for _ in part]
                results.append(_outcome(self._finish_all, row, part, tokens))
        return results

    def first_supervised(self, answer_ids: list[int]) -> int:
        """How many tokens of an answer that the target wrote are its reasoning, if left out."""
        if self.rules.reasoning:
            return 0
        text = self.chat.tokenizer.decode(answer_ids)
        end = self._markers.behind_thought(text, Span(0, len(text), None)).reasoning_end
        return 0 if end is None else self._first_after(text[:end], answer_ids, 0)

    # ---- rendering

    def _render(self, row: AnyRow) -> list[_Rendered]:
        match row:
            case Conversation():
                return self._render_conversation(row)
            case PlainText():
                return [self._render_text(row)]
            case _:
                return []

    def _render_conversation(self, row: Conversation) -> list[_Rendered]:
        answers = row.answer_indices
        if not answers:
            raise BadRow("no_answer", "no assistant turn to learn from")
        unanswered = ("unanswered_turns_cut",) if answers[-1] + 1 < len(row.messages) else ()
        messages = row.messages[: answers[-1] + 1]
        wanted = answers if self.rules.turns == "all" else answers[-1:]
        closed = {i: self._text(messages[: i + 1], row) for i in wanted}
        spans = {i: self._answer_span(messages, i, closed[i], row) for i in wanted}
        whole = closed[answers[-1]]
        lost = self._lost_reasoning(messages, closed, wanted)
        if all(whole.startswith(text) for text in closed.values()):
            found, notes = list(spans.values()), unanswered + lost
            return [_Rendered(text=whole, spans=found, truncated=row.truncated, notes=notes)]
        notes = (*unanswered, *lost, "one_row_per_turn")
        return [
            _Rendered(
                text=closed[i],
                spans=[spans[i]],
                truncated=row.truncated and i == answers[-1],
                turn=turn,
                notes=notes,
            )
            for turn, i in enumerate(wanted)
        ]

    def _answer_span(
        self, messages: list[Message], index: int, closed: str, row: Conversation
    ) -> Span:
        opened = self._text(messages[:index], row, add_generation_prompt=True)
        if not closed.startswith(opened):
            raise BadRow(
                "unstable_template",
                "the text with the answer does not begin with the text that asks for it: "
                f"{_around_difference(opened, closed)}",
            )
        reasoning_end = None
        if not self.rules.reasoning:
            reasoning_end = self._reasoning_end(messages[: index + 1], closed, row)
        return Span(len(opened), len(closed), reasoning_end)

    def _reasoning_end(self, messages: list[Message], closed: str, row: Conversation) -> int:
        """Where the reasoning of the last message ends: what follows it renders the same
        behind any other reasoning."""
        last = messages[-1]
        thought = last.get("reasoning_content", "")
        changed = {**last, "reasoning_content": thought + ("y" if thought.endswith("x") else "x")}
        text = self._text([*messages[:-1], changed], row)
        return len(closed) - _common_suffix(closed, text) if text != closed else 0

    def _lost_reasoning(
        self, messages: list[Message], closed: dict[int, str], wanted: list[int]
    ) -> tuple[str, ...]:
        """A template that does not know reasoning drops it: the row stays, and it is told."""
        texts = [(messages[i].get("reasoning_content", "").strip(), closed[i]) for i in wanted]
        return ("reasoning_not_rendered",) if any(r not in text for r, text in texts) else ()

    def _text(
        self, messages: list[Message], row: Conversation, *, add_generation_prompt: bool = False
    ) -> str:
        try:
            return self.chat.render(
                messages, row.tools, add_generation_prompt=add_generation_prompt
            )
        except TemplateRejects as error:
            raise BadRow("template_rejects", str(error)) from None

    def _render_text(self, row: PlainText) -> _Rendered:
        """Running text, or a conversation that somebody rendered."""
        if self.rules.text == "plain":
            spans = [Span(0, len(row.text), None)]
            return _Rendered(text=row.text, spans=spans, truncated=row.truncated, plain=True)
        try:
            spans = self._markers.answers_in(row.text)
        except TemplateRejects as error:
            raise BadRow("template_rejects", str(error)) from None
        if not self.rules.reasoning:
            spans = [self._markers.behind_thought(row.text, span) for span in spans]
        spans = spans if self.rules.turns == "all" else spans[-1:]
        return _Rendered(text=row.text, spans=spans, truncated=row.truncated)

    @functools.cached_property
    def _markers(self) -> Markers:
        return Markers.of(self.chat)

    # ---- encoding

    def _encode(self, rows: list[_Rendered]) -> Iterator[_Tokens | BadRow]:
        texts = [row.text[:cut] for row in rows for cut in row.cuts()]
        wholes = self.chat.encode([row.text for row in rows])
        prefixes = iter(self.chat.encode(texts))
        for row, whole in zip(rows, wholes, strict=True):
            parts = {cut: next(prefixes) for cut in row.cuts()}
            if all(whole[: len(part)] == part for part in parts.values()):
                yield whole, {cut: len(part) for cut, part in parts.items()}
            else:
                yield self._encode_in_pieces(row, whole)

    def _encode_in_pieces(self, row: _Rendered, whole: list[int]) -> _Tokens | BadRow:
        """Tokens that end at every cut, as the server makes them: it encodes the prompt alone."""
        ids: list[int] = []
        counts: dict[int, int] = {}
        edges = [0, *row.cuts(), len(row.text)]
        for start, end in pairwise(edges):
            ids += self.chat.encode([row.text[start:end]])[0]
            counts[end] = len(ids)
        decode = self.chat.tokenizer.decode
        if decode(ids) != decode(whole):
            return BadRow("boundary_inside_token", "the tokenizer cannot split where answers begin")
        return ids, counts

    # ---- finishing

    def _finish_all(
        self, row: AnyRow, rendered: list[_Rendered], tokens: list[_Tokens | BadRow]
    ) -> list[MaskedRow]:
        """A conversation that became several rows is bad only when all of them are."""
        pairs = zip(rendered, tokens, strict=True)
        outcomes = [_outcome(self._finish, row, part, encoded) for part, encoded in pairs]
        good = [o for o in outcomes if isinstance(o, MaskedRow)]
        if not good:
            raise next(o for o in outcomes if isinstance(o, BadRow))
        if len(good) < len(outcomes):
            good[0] = replace(good[0], notes=(*good[0].notes, "turns_left_out"))
        return good

    def _finish(self, row: AnyRow, part: _Rendered, encoded: _Tokens | BadRow) -> MaskedRow:
        if isinstance(encoded, BadRow):
            raise encoded
        ids, counts = encoded
        if isinstance(row, PlainText):
            num_bos = self._num_bos(ids)
            opening = ids[:1] if num_bos else self.chat.opening_ids
            ids = opening + ids[num_bos:]
            counts = {cut: max(n - num_bos, 0) + len(opening) for cut, n in counts.items()}
        mask = self._mask(part, ids, counts)
        return self._fit(MaskedRow(ids, mask, part.truncated, part.turn, part.notes))

    def _mask(self, row: _Rendered, ids: list[int], counts: dict[int, int]) -> list[bool]:
        mask = [False] * len(ids)
        for span in row.spans:
            start, end = counts.get(span.start, len(ids)), counts.get(span.end, len(ids))
            end = start + self._end_of_answer(ids[start:end])
            if not row.plain and not self.chat.stop_ids.isdisjoint(ids[start : end - 1]):
                raise BadRow("stop_token_inside_answer")
            if span.reasoning_end is not None:
                start = self._first_after(row.text[span.start : span.reasoning_end], ids, start)
            mask[start:end] = [True] * (end - start)
        last = _num_until_last(mask) - 1
        if row.truncated and last >= 0 and ids[last] in self.chat.special_ids:
            mask[last] = False  # the template ended what was never ended
        return mask

    def _end_of_answer(self, ids: list[int]) -> int:
        """Behind the end-of-turn token: of the special tokens and white space that the answer ends
        with, the first that is a stop token, else the last special one."""
        place = len(ids)
        while place > 0 and not self._is_text(ids[place - 1]):
            place -= 1
        stops = [i for i in range(place, len(ids)) if ids[i] in self.chat.stop_ids]
        special = [i for i in range(place, len(ids)) if ids[i] in self.chat.special_ids]
        return (stops[:1] or special[-1:] or [len(ids) - 1])[0] + 1

    def _is_text(self, id_: int) -> bool:
        return id_ not in self.chat.special_ids and bool(self.chat.tokenizer.decode([id_]).strip())

    def _first_after(self, text: str, ids: list[int], start: int) -> int:
        """The first token, from `start` on, that begins behind this text."""
        decode = self.chat.tokenizer.decode
        text = decode(self.chat.encode([text])[0])  # as the tokenizer spells it
        ends = range(start, len(ids))
        return start + bisect_left(ends, True, key=lambda i: decode(ids[start:i]).startswith(text))

    def _num_bos(self, ids: list[int]) -> int:
        """With how many BOS the ids begin."""
        bos = self.chat.tokenizer.bos_token_id
        return next((n for n, i in enumerate(ids) if i != bos), len(ids))

    def _finish_tokens(self, row: TokenRow) -> list[MaskedRow]:
        vocabulary = len(self.chat.tokenizer)
        if any(i >= vocabulary for i in row.input_ids):
            raise BadRow("bad_input_ids", f"an id of {max(row.input_ids)}, {vocabulary} tokens")
        second = max(self._num_bos(row.input_ids) - 1, 0)
        notes = ("second_bos_removed",) if second else ()
        ids, mask = row.input_ids[second:], row.loss_mask[second:]
        if self.rules.turns == "last":
            mask = last_stretch(mask)
        return [self._fit(MaskedRow(ids, mask, row.truncated, None, notes))]

    def _fit(self, row: MaskedRow) -> MaskedRow:
        """Hold the row to the allowed length; ids and mask are cut alike, and no end is added."""
        length, limit = _num_until_last(row.mask), self.rules.max_length
        truncated, notes, where = row.truncated, row.notes, ""
        if length > limit:
            if self.rules.over_long == "drop":
                raise BadRow("over_long", f"{length} tokens")
            truncated = all(row.mask[limit - 1 : limit + 1])  # the cut goes through an answer
            notes, where = (*notes, "cut_to_max_length"), "_after_cut"
        kept = _num_until_last(row.mask[:limit])
        ids, mask = row.ids[:kept], row.mask[:kept]
        if sum(mask) < max(self.rules.min_supervised, 1):
            raise BadRow(f"too_few_supervised_tokens{where}", f"{sum(mask)} of {length} tokens")
        return MaskedRow(ids, mask, truncated, row.turn, notes)


def _outcome(function: Callable[..., T], *arguments: Any) -> T | BadRow:
    """What a function returns, or the BadRow it raises."""
    try:
        return function(*arguments)
    except BadRow as bad:
        return bad


def _num_until_last(mask: list[bool]) -> int:
    """How many values there are up to the last True."""
    return next((i + 1 for i in reversed(range(len(mask))) if mask[i]), 0)


def last_stretch(mask: list[bool]) -> list[bool]:
    """Only the last of the stretches that are True."""
    end = _num_until_last(mask)
    start = next((i + 1 for i in reversed(range(end)) if not mask[i]), 0)
    return [start <= i < end for i in range(len(mask))]


def _common_suffix(a: str, b: str) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def _around_difference(expected: str, found: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    window = slice(max(0, place - 12), place + 12)
    return f"{expected[window]!r} became {found[window]!r}"
