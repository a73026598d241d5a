"""Token ids and loss masks of rows, from where the chat template puts the boundaries.

For the answer at message i the template renders two texts: `opened`, the messages before it and the
generation prompt, and `closed`, the same and the answer. The answer's tokens are the tokens of
`closed` that are not those of `opened`, up to and with the end-of-turn token:

    opened   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    closed   <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    mask     ......................................................##############.

A row ends with its last answer. Where `closed` of every answer opens the whole conversation's text, the conversation is one row.
Where it does not, because the template rewrites history (drops old reasoning, say), every answer
becomes a row of its own, with the history as it would be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from whiflash_infer.chat import Chat, TemplateRejects
from whiflash_train.checks import checked
from whiflash_train.data.rows import AnyRow, Conversation, Message, PlainText, TokenRow
from whiflash_train.data.tally import BadRow


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
    """turn: index of the answer, where a conversation became several rows. notes: what was done."""

    ids: list[int]
    mask: list[bool]
    truncated: bool
    turn: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    """Character positions of one answer; reasoning_end: where its reasoning ends, if left out."""

    start: int
    end: int
    reasoning_end: int | None


@dataclass(slots=True)
class _Rendered:
    """A row's text before it is encoded."""

    text: str
    spans: list[_Span]
    turn: int | None
    notes: tuple[str, ...]

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
            return [_Rendered(whole, list(spans.values()), None, unanswered + lost)]
        notes = (*unanswered, *lost, "one_row_per_turn")
        return [
            _Rendered(closed[i], [spans[i]], turn, notes) for turn, i in enumerate(wanted)
        ]

    def _answer_span(
        self, messages: list[Message], index: int, closed: str, row: Conversation
    ) -> _Span:
        opened = self._text(messages[:index], row, add_generation_prompt=True)
        if not closed.startswith(opened):
            raise BadRow(
                "unstable_template",
                "the text with the answer does not begin with the text that asks for it: "
                f"{_around_difference(opened, closed)}",
            )
        reasoning_end = None
        if not self.rules.reasoning and messages[index].get("reasoning_content"):
            reasoning_end = self._reasoning_end(messages[: index + 1], closed, row)
        return _Span(len(opened), len(closed), reasoning_end)

    def _reasoning_end(self, messages: list[Message], closed: str, row: Conversation) -> int:
        """Where the reasoning of the last message ends: what follows it renders the same
        behind any other reasoning."""
        last = messages[-1]
        other = "x" if not last["reasoning_content"].endswith("x") else "y"
        changed = {**last, "reasoning_content": last["reasoning_content"] + other}
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
            raise BadRow("template_rejects", str(error)[:160]) from None

    def _render_text(self, row: PlainText) -> _Rendered:
        """Running text, or a conversation somebody rendered: answers stand behind the marker."""
        if not row.text.strip():
            raise BadRow("empty_content")
        if self.rules.text == "plain":
            return _Rendered(row.text, [_Span(0, len(row.text), None)], None, ())
        opening, closing = self.chat.answer_marker, self._end_of_turn()
        spans, place = [], 0
        while (found := row.text.find(opening, place)) >= 0:
            start = found + len(opening)
            place = row.text.find(closing, start)
            place = len(row.text) if place < 0 else place + len(closing)
            spans.append(_Span(start, place, None))
        if not spans:
            raise BadRow(
                "no_answer", f"text without {opening!r}; data.mask.text=plain supervises all of it"
            )
        return _Rendered(row.text, spans if self.rules.turns == "all" else spans[-1:], None, ())

    def _end_of_turn(self) -> str:
        probe: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "probe-of-an-answer"},
        ]
        tail = self.chat.render(probe).rpartition("probe-of-an-answer")[2]
        ids = self.chat.encode([tail])[0]
        return self.chat.tokenizer.decode(ids[: self._end_of_answer(ids, 0)])

    # ---- encoding

    def _encode(self, rows: list[_Rendered]):
        """Ids of each text, and how many of them stand before each of its cuts."""
        texts = [row.text[:cut] for row in rows for cut in row.cuts()]
        wholes = self.chat.encode([row.text for row in rows])
        prefixes = iter(self.chat.encode(texts))
        for row, whole in zip(rows, wholes, strict=True):
            parts = {cut: next(prefixes) for cut in row.cuts()}
            if all(whole[: len(part)] == part for part in parts.values()):
                yield whole, {cut: len(part) for cut, part in parts.items()}
            else:
                yield self._encode_in_pieces(row, whole)

    def _encode_in_pieces(
        self, row: _Rendered, whole: list[int]
    ) -> tuple[list[int], dict[int, int]] | BadRow:
        """Tokens that end at every cut, as the server makes them: it encodes the prompt alone."""
        ids: list[int] = []
        counts: dict[int, int] = {}
        edges = [0, *row.cuts(), len(row.text)]
        for start, end in zip(edges, edges[1:], strict=False):
            ids += self.chat.encode([row.text[start:end]])[0]
            counts[end] = len(ids)
        decode = self.chat.tokenizer.decode
        if decode(ids) != decode(whole):
            return BadRow("boundary_inside_token", "the tokenizer cannot split where answers begin")
        return ids, counts

    # ---- finishing

    def _finish_all(
        self,
        row: AnyRow,
        rendered: list[_Rendered],
        tokens: list[tuple[list[int], dict[int, int]] | BadRow],
    ) -> list[MaskedRow]:
        """A conversation that became several rows is bad only when all of them are."""
        pairs = zip(rendered, tokens, strict=True)
        outcomes = [_outcome(self._finish, row, part, encoded) for part, encoded in pairs]
        good = [o for o in outcomes if isinstance(o, MaskedRow)]
        if not good:
            raise next(o for o in outcomes if isinstance(o, BadRow))
        return good

    def _finish(
        self,
        row: AnyRow,
        part: _Rendered,
        encoded: tuple[list[int], dict[int, int]] | BadRow,
    ) -> MaskedRow:
        if isinstance(encoded, BadRow):
            raise encoded
        ids, counts = encoded
        if isinstance(row, PlainText):
            opening = self.chat.opening_ids
            opening = [] if ids[: len(opening)] == opening else opening
            ids, counts = opening + ids, {c: n + len(opening) for c, n in counts.items()}
        return self._mask(part, ids, counts, truncated=row.truncated)

    def _mask(
        self, row: _Rendered, ids: list[int], counts: dict[int, int], *, truncated: bool
    ) -> MaskedRow:
        mask = [False] * len(ids)
        stops = self.chat.stop_ids
        for span in row.spans:
            start = counts.get(span.start, 0)
            end = counts.get(span.end, len(ids))
            end = start + self._end_of_answer(ids[start:end], 0)
            inside = ids[start : end - 1]
            if self.rules.text == "chat" and any(i in stops for i in inside):
                raise BadRow("stop_token_inside_answer")
            first = start if span.reasoning_end is None else self._first_after(row, span, ids, start)
            mask[first:end] = [True] * (end - first)
        end = self._last_supervised(ids, mask, truncated=truncated)
        ids, mask = ids[:end], mask[:end]
        return self._fit(MaskedRow(ids, mask, truncated, row.turn, row.notes))

    def _end_of_answer(self, ids: list[int], start: int) -> int:
        """Behind the end-of-turn token: a special token with at most white space after it."""
        for place in range(len(ids) - 1, start - 1, -1):
            if ids[place] in self.chat.special_ids:
                return place + 1
            if self.chat.tokenizer.decode([ids[place]]).strip():
                break
        return len(ids)

    def _first_after(self, row: _Rendered, span: _Span, ids: list[int], start: int) -> int:
        """The first token that begins at or behind the end of the reasoning."""
        assert span.reasoning_end is not None
        wanted = row.text[span.start : span.reasoning_end]
        decode = self.chat.tokenizer.decode
        low, high = start, len(ids)
        while low < high:  # decoded length grows with the number of tokens
            middle = (low + high) // 2
            if len(decode(ids[start:middle])) < len(wanted):
                low = middle + 1
            else:
                high = middle
        return low

    def _last_supervised(self, ids: list[int], mask: list[bool], *, truncated: bool) -> int:
        """Where the row ends: with its last answer, whose end token is left out if it was cut."""
        last = max((i for i, kept in enumerate(mask) if kept), default=-1)
        return last if truncated and ids[last] in self.chat.special_ids else last + 1

    def _finish_tokens(self, row: TokenRow) -> list[MaskedRow]:
        vocabulary = len(self.chat.tokenizer)
        if any(i >= vocabulary for i in row.input_ids):
            raise BadRow("bad_input_ids", f"an id of {max(row.input_ids)}, {vocabulary} tokens")
        ids, mask, notes = row.input_ids, row.loss_mask, ()
        bos = self.chat.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids, mask, notes = ids[1:], mask[1:], ("second_bos_removed",)
        return [self._fit(MaskedRow(ids, mask, row.truncated, None, notes))]

    def _fit(self, row: MaskedRow) -> MaskedRow:
        """Hold the row to the allowed length; ids and mask are cut alike, and no end is added."""
        length = len(row.ids)
        if length > self.rules.max_length:
            if self.rules.over_long == "drop":
                raise BadRow("over_long", f"{length} tokens")
            cut = self.rules.max_length
            notes = (*row.notes, "cut_to_max_length")
            row = MaskedRow(row.ids[:cut], row.mask[:cut], True, row.turn, notes)
        if sum(row.mask) < self.rules.min_supervised:
            where = "_after_cut" if length > len(row.ids) else ""
            raise BadRow(f"too_few_supervised_tokens{where}", f"{sum(row.mask)} of {length} tokens")
        return row


def _outcome(function, *arguments):
    """What a function returns, or the BadRow it raises."""
    try:
        return function(*arguments)
    except BadRow as bad:
        return bad


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
