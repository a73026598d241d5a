from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.data.test_selection import RULES
from whiflash_infer.chat import Chat
from whiflash_infer.sources import byte_tokenizer
from whiflash_train.data.dialogues import Dialogue, Dialogues
from whiflash_train.data.engines import Answer
from whiflash_train.data.masks import MaskedRow
from whiflash_train.data.rows import Conversation, parse_row
from whiflash_train.data.selection import Picked
from whiflash_train.data.tally import Tally

END = 2  # <|im_end|>
# Prints answers of the history in brackets, so no prompt continues the row before it.
REWRITING = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ '[' ~ m.content ~ ']' if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


class Table:
    """A chat, a tally, and dialogues that are answered from a script."""

    def __init__(self, template: str | None = None, **options: Any) -> None:
        tokenizer = byte_tokenizer()
        if template is not None:
            tokenizer.chat_template = template
        self.chat = Chat(tokenizer, frozenset({END}))
        self.tally = Tally()
        rules = replace(
            RULES, **{k: options.pop(k) for k in ("turns", "reasoning") if k in options}
        )
        limits: dict[str, Any] = {"max_prompt_tokens": 400, "keep_truncated": True, **options}
        self.dialogues = Dialogues(self.chat, rules, self.tally, **limits)

    def open(self, **raw: Any) -> list[Dialogue]:
        row = parse_row({"id": "r", **raw}, "rows.jsonl:1", roles={})
        assert isinstance(row, Conversation)
        self.tally.read += 1
        return self.dialogues.open([Picked("train", row)])

    def say(self, dialogue: Dialogue, text: str, *, ended: bool = True) -> bool:
        """Answer by tokens."""
        assert dialogue.job is not None
        ids = self.chat.encode([text])[0] + [END] * ended
        answer = Answer(dialogue.job.id, "stop" if ended else "length", ids=ids)
        return self.dialogues.take(dialogue, answer)

    def drawn(self, row: MaskedRow) -> str:
        """The text of a row, supervised stretches in ⟦ ⟧."""
        text, inside = "", False
        for token, kept in zip(row.ids, row.mask, strict=True):
            text += "⟦" * (kept and not inside) + "⟧" * (inside and not kept)
            text += self.chat.tokenizer.decode([token])
            inside = kept
        return text + "⟧" * inside


def test_each_turn_is_asked_behind_the_answer_before_and_all_make_one_row() -> None:
    table = Table()
    (dialogue,) = table.open(turns=["Hi", "More"])
    assert [job.id for job in table.dialogues.jobs([dialogue])] == ["r#0"]
    assert table.say(dialogue, "Hello")
    assert [job.id for job in table.dialogues.jobs([dialogue])] == ["r#1"]
    assert table.say(dialogue, "Yes")
    assert table.dialogues.jobs([dialogue]) == []
    (row,) = table.dialogues.masked_rows(dialogue)
    assert row.turn is None
    assert table.drawn(row) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧"
        "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n⟦Yes<|im_end|>⟧"
    )


def test_a_template_that_rewrites_history_makes_a_row_of_every_turn() -> None:
    table = Table(REWRITING)
    (dialogue,) = table.open(turns=["Hi", "More"])
    table.say(dialogue, "Hello")
    table.say(dialogue, "Yes")
    assert [row.turn for row in table.dialogues.masked_rows(dialogue)] == [0, 1]
    assert [table.drawn(row) for row in table.dialogues.masked_rows(dialogue)] == [
        "user:Hi<|im_end|>assistant:⟦Hello<|im_end|>⟧",
        "user:Hi<|im_end|>assistant:[Hello]<|im_end|>user:More<|im_end|>assistant:⟦Yes<|im_end|>⟧",
    ]


def test_only_the_last_answer_is_supervised_where_that_is_the_rule() -> None:
    for template, turns in ((None, 2), (REWRITING, 2), (None, 1)):
        table = Table(template, turns="last")
        (dialogue,) = table.open(turns=["Hi", "More"][:turns])
        table.say(dialogue, "Hello")
        if turns == 2:
            table.say(dialogue, "Yes")
        (row,) = table.dialogues.masked_rows(dialogue)
        drawn = table.drawn(row)
        assert drawn.endswith("⟦Yes<|im_end|>⟧" if turns == 2 else "⟦Hello<|im_end|>⟧")
        assert drawn.count("⟦") == 1
        assert row.turn is None


THINKING = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}"
    "<t>{{ m.reasoning_content }}</t>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_reasoning_that_the_target_wrote_is_supervised_or_left_out() -> None:
    for reasoning, expected in (
        (True, "user:Hi<|im_end|>assistant:⟦<t>hm, well</t>Hello<|im_end|>⟧"),
        (False, "user:Hi<|im_end|>assistant:<t>hm, well⟦</t>Hello<|im_end|>⟧"),
    ):
        table = Table(THINKING, reasoning=reasoning)
        (dialogue,) = table.open(prompt="Hi")
        table.say(dialogue, "<t>hm, well</t>Hello")
        assert table.drawn(table.dialogues.masked_rows(dialogue)[0]) == expected


def test_recorded_answers_of_the_history_are_not_supervised() -> None:
    table = Table()
    history = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "recorded"}]
    (dialogue,) = table.open(messages=[*history, {"role": "user", "content": "B"}])
    table.say(dialogue, "own")
    drawn = table.drawn(table.dialogues.masked_rows(dialogue)[0])
    assert "⟦own<|im_end|>⟧" in drawn
    assert drawn.count("⟦") == 1


def test_an_answer_that_comes_as_text_gives_the_same_row_as_its_tokens() -> None:
    told, tokens = Table(), Table()
    (first,), (second,) = told.open(turns=["Hi", "More"]), tokens.open(turns=["Hi", "More"])
    for text in ("\nHello", "Yes"):
        assert first.job is not None
        message = {"role": "assistant", "content": text}
        assert told.dialogues.take(first, Answer(first.job.id, "stop", message=message))
        tokens.say(second, text)
    assert told.dialogues.masked_rows(first) == tokens.dialogues.masked_rows(second)


def test_a_cut_answer_has_no_end_and_later_turns_are_not_asked() -> None:
    for as_text in (False, True):
        table = Table()
        (dialogue,) = table.open(turns=["Hi", "More"])
        assert dialogue.job is not None
        if as_text:
            message = {"role": "assistant", "content": "Hel"}
            answer = Answer(dialogue.job.id, "length", message=message)
            assert table.dialogues.take(dialogue, answer)
        else:
            assert table.say(dialogue, "Hel", ended=False)
        (row,) = table.dialogues.masked_rows(dialogue)
        assert row.truncated
        assert table.drawn(row).endswith("assistant\n⟦Hel⟧")
        assert dialogue.job is None
        assert table.tally.notes == {"answer_cut_at_max_new_tokens": 1, "later_turns_not_asked": 1}
        assert table.tally.kept == 1


def test_cut_answers_are_dropped_when_asked_to() -> None:
    table = Table(keep_truncated=False)
    (dialogue,) = table.open(prompt="Hi")
    assert not table.say(dialogue, "Hel", ended=False)
    assert table.tally.dropped == {"answer_truncated": 1}


def test_what_cannot_be_asked_or_answered_is_counted_out() -> None:
    table = Table(max_prompt_tokens=40)
    assert table.open(prompt="x" * 50) == []
    (failed,) = table.open(prompt="Hi")
    assert failed.job is not None
    assert not table.dialogues.take(failed, Answer(failed.job.id, "failed", error="timeout"))
    (short,) = table.open(prompt="Hi")
    assert not table.say(short, "")
    assert table.tally.dropped == {"prompt_too_long": 1, "answer_too_short": 1}
    assert str(table.tally) == (
        "read 3 = kept 0 + dropped 2 (answer_too_short 1, prompt_too_long 1) + failed 1"
    )


def test_a_later_answer_that_cannot_be_used_keeps_the_turns_before_it() -> None:
    table = Table()
    (dialogue,) = table.open(turns=["Hi", "More"])
    table.say(dialogue, "Hello")
    assert table.say(dialogue, "")
    assert dialogue.job is None
    (row,) = table.dialogues.masked_rows(dialogue)
    assert table.drawn(row).endswith("⟦Hello<|im_end|>⟧")
    assert table.tally.notes == {"later_turns_left_out_answer_too_short": 1}
    assert table.tally.kept == 1


def test_a_later_turn_that_is_too_long_keeps_the_turns_before_it() -> None:
    table = Table(max_prompt_tokens=40)
    (dialogue,) = table.open(turns=["Hi", "y" * 50])
    assert table.say(dialogue, "Hello")
    assert dialogue.job is None
    assert table.drawn(table.dialogues.masked_rows(dialogue)[0]).endswith("⟦Hello<|im_end|>⟧")
    assert table.tally.notes == {"later_turns_not_asked": 1}


def test_a_prompt_the_template_rejects_is_dropped_with_its_words() -> None:
    table = Table("{{ raise_exception('no such conversation') }}")
    assert table.open(prompt="Hi") == []
    assert table.tally.examples["template_rejects"] == ["rows.jsonl:1 (no such conversation)"]
