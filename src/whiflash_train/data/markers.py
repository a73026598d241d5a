"""Where the answers stand in text that somebody rendered, by the template's own markers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from whiflash_infer.chat import Chat, Message
from whiflash_train.data.tally import BadRow

_ASKED, _THOUGHT, _SAID = "probe-of-a-question", "probe-of-a-thought", "probe-of-an-answer"


@dataclass(frozen=True, slots=True)
class Span:
    """Character positions of one answer; reasoning_end: where its reasoning ends, if left out."""

    start: int
    end: int
    reasoning_end: int | None


@dataclass(frozen=True, slots=True)
class Markers:
    """What text is searched for.

    opening: stands before an answer. closing: ends one. thought: ends its reasoning, if rendered.
    """

    opening: str
    closing: re.Pattern[str]
    thought: str | None

    @classmethod
    def of(cls, chat: Chat) -> Markers:
        """Read from how the template renders a probe.

        An answer ends with what the template ends one with, the last one or an earlier one, or with
        a stop token that another special token follows.
        Raises: TemplateRejects when the template refuses the probe; BadRow when nothing in its text
            tells answers apart.
        """
        asked: Message = {"role": "user", "content": _ASKED}
        said: Message = {"role": "assistant", "content": _SAID}
        probes = ([asked, said], [asked, said, asked])
        tails = [chat.render(probe).rpartition(_SAID)[2] for probe in probes]
        special = _any_of(chat, chat.special_ids)
        ends = {found[0] for tail in tails if (found := re.search(special, tail))}
        ends = ends or {tails[0].strip()} - {""}
        opening = chat.answer_marker
        if not ends or not opening.strip():
            raise BadRow("no_markers", "nothing in the template's text tells answers apart")
        stops = _any_of(chat, chat.stop_ids)
        closing = rf"{_alternatives(ends)}|{stops}(?=\s*(?:{special}|\Z))"
        thinking = chat.render([asked, {**said, "reasoning_content": _THOUGHT}])
        _, found, thought = thinking.rpartition(_SAID)[0].rpartition(_THOUGHT)
        return cls(opening, re.compile(closing), thought if found else None)

    def answers_in(self, text: str) -> list[Span]:
        """Answers begin behind the opening and end with the first closing before the next one.

        Raises: BadRow when there is none, or one without an end.
        """
        said = len(text.rstrip())
        openings = [m for m in re.finditer(re.escape(self.opening), text) if m.end() < said]
        if not openings:
            wanted = f"nothing behind {self.opening!r}"
            raise BadRow("no_answer", f"{wanted}; data.mask.text=plain supervises all of it")
        limits = [*(opening.start() for opening in openings[1:]), len(text)]
        found: list[tuple[int, int]] = []
        for opening, limit in zip(openings, limits, strict=True):
            closing = self.closing.search(text, opening.end(), limit)
            if closing is None and limit < len(text):
                raise BadRow("unclosed_answer", f"no end before the next {self.opening!r}")
            # An answer that goes on behind its closing has several parts, such as channels.
            goes_on = found and found[-1][1] == opening.start()
            start = found.pop()[0] if goes_on else opening.end()
            found.append((start, closing.end() if closing else limit))
        return [Span(start, end, None) for start, end in found]

    def behind_thought(self, text: str, span: Span) -> Span:
        """The answer with the end of its reasoning, where it has any."""
        place = text.find(self.thought, span.start, span.end) if self.thought else -1
        return span if place < 0 else replace(span, reasoning_end=place)


def _any_of(chat: Chat, ids: Iterable[int]) -> str:
    """A pattern of these tokens; a config may name a stop token that the tokenizer lacks."""
    names = chat.tokenizer.convert_ids_to_tokens(sorted(ids))
    return _alternatives(name for name in names if name)


def _alternatives(texts: Iterable[str]) -> str:
    """A pattern of any of them, or of nothing when there is none."""
    escaped = "|".join(map(re.escape, texts))
    return f"(?:{escaped})" if escaped else "(?!)"
