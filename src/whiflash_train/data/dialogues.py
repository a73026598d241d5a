"""From prompts to conversations: the turns to ask, and the rows their answers make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from whiflash_infer.chat import Chat, Message, TemplateRejects
from whiflash_train.data.engines import Answer, Job
from whiflash_train.data.masks import MaskedRow, Masker, MaskRules, last_stretch
from whiflash_train.data.rows import Conversation
from whiflash_train.data.selection import Picked
from whiflash_train.data.tally import BadRow, Tally


@dataclass(slots=True)
class Dialogue:
    """A conversation under way. rows: of the turns that are answered; the last may still grow."""

    picked: Picked
    messages: list[Message]
    waiting: list[str]
    rows: list[MaskedRow] = field(default_factory=list)
    turn: int = 0
    job: Job | None = None

    @property
    def conversation(self) -> Conversation:
        assert isinstance(self.picked.row, Conversation)
        return self.picked.row


class Dialogues:
    """Asks turn after turn. What cannot go on is counted out in the tally."""

    def __init__(
        self,
        chat: Chat,
        rules: MaskRules,
        tally: Tally,
        *,
        max_prompt_tokens: int,
        keep_truncated: bool,
    ) -> None:
        self.chat = chat
        self.tally = tally
        self.max_prompt_tokens = max_prompt_tokens
        self.keep_truncated = keep_truncated
        self.rules = rules
        self._masker = Masker(chat, rules)
        # Answers that come as text are rendered behind their prompt, whole.
        self._whole = Masker(chat, replace(rules, turns="last", reasoning=True, max_length=1 << 30))

    def open(self, picked: Iterable[Picked]) -> list[Dialogue]:
        """The dialogues whose first question can be asked."""
        found = []
        for part in picked:
            assert isinstance(part.row, Conversation)
            dialogue = Dialogue(part, list(part.row.messages), list(part.row.later_turns))
            if self._ask(dialogue):
                found.append(dialogue)
        return found

    def jobs(self, dialogues: list[Dialogue]) -> list[Job]:
        return [d.job for d in dialogues if d.job is not None]

    def take(self, dialogue: Dialogue, answer: Answer) -> bool:
        """Append an answer and ask the next turn; whether the dialogue is still in the data."""
        job, dialogue.job = dialogue.job, None
        assert job is not None
        place = dialogue.conversation.place
        if answer.finish == "failed":
            self.tally.fail(place, answer.error or "no answer")
            return False
        try:
            ids = self._answer_ids(dialogue, job, answer)
        except BadRow as bad:
            return self._stopped(dialogue, bad)
        cut = answer.finish == "length"
        _grow(dialogue, job.prompt_ids, ids, self._mask(ids), truncated=cut)
        if cut:
            self.tally.note("answer_cut_at_max_new_tokens", place)
            if dialogue.waiting:
                self.tally.note("later_turns_not_asked", place)
        elif dialogue.waiting:
            self._next_turn(dialogue, answer, ids)
        return True

    def _stopped(self, dialogue: Dialogue, bad: BadRow) -> bool:
        """An answer cannot be used: the turns before it stay, and without any the row goes."""
        if dialogue.rows:
            self.tally.note(f"later_turns_left_out_{bad.reason}", dialogue.conversation.place)
            return True
        self.tally.drop(dialogue.conversation.place, bad)
        return False

    def masked_rows(self, dialogue: Dialogue) -> list[MaskedRow]:
        """One row, or one for every turn whose prompt did not continue the turn before."""
        rows = dialogue.rows
        if self.rules.turns == "last":
            rows = [replace(rows[-1], mask=last_stretch(rows[-1].mask))]
        return rows if len(rows) > 1 else [replace(rows[0], turn=None)]

    def _mask(self, answer_ids: list[int]) -> list[bool]:
        first = self._masker.first_supervised(answer_ids)
        return [index >= first for index in range(len(answer_ids))]

    def _answer_ids(self, dialogue: Dialogue, job: Job, answer: Answer) -> list[int]:
        """Raises: BadRow when there is no answer that can be used."""
        if answer.finish == "length" and not self.keep_truncated:
            raise BadRow("answer_truncated")
        ids = answer.ids
        if ids is None or (answer.message and not self._ends_as_told(answer, ids)):
            ids = self._encoded(dialogue, job, answer)
        if sum(self._mask(ids)) < self.rules.min_supervised:
            raise BadRow("answer_too_short", f"{len(ids)} tokens")
        return ids

    def _ends_as_told(self, answer: Answer, ids: list[int]) -> bool:
        """Some servers leave the stop token out of the ids they tell."""
        return answer.finish == "length" or ids[-1] in self.chat.stop_ids

    def _encoded(self, dialogue: Dialogue, job: Job, answer: Answer) -> list[int]:
        """The tokens of an answer that came as text, as the template renders it."""
        assert answer.message is not None
        told = replace(
            dialogue.conversation,
            messages=[*dialogue.messages, answer.message],
            truncated=answer.finish == "length",
        )
        outcome = self._whole([told])[0]
        if isinstance(outcome, BadRow):
            raise outcome
        ids = outcome[-1].ids
        start = outcome[-1].mask.index(True)
        if ids[:start] != job.prompt_ids:
            raise BadRow("unstable_template", "the prompt is encoded differently before the answer")
        return ids[start:]

    def _next_turn(self, dialogue: Dialogue, answer: Answer, ids: list[int]) -> None:
        said = answer.message or {"role": "assistant", "content": self._spoken(ids)}
        question = {"role": "user", "content": dialogue.waiting.pop(0)}
        dialogue.messages += [said, question]
        dialogue.turn += 1
        if not self._ask(dialogue, required=False):
            self.tally.note("later_turns_not_asked", dialogue.conversation.place)

    def _spoken(self, ids: list[int]) -> str:
        end = len(ids) - 1 if ids[-1] in self.chat.special_ids else len(ids)
        return self.chat.tokenizer.decode(ids[:end])

    def _ask(self, dialogue: Dialogue, *, required: bool = True) -> bool:
        """Set the job of the dialogue's next turn; False when it cannot be asked."""
        row = dialogue.conversation
        try:
            ids = self.chat.prompt_ids(dialogue.messages, row.tools)
            if len(ids) > self.max_prompt_tokens:
                raise BadRow("prompt_too_long", f"{len(ids)} tokens")
        except (BadRow, TemplateRejects) as error:
            if required:
                bad = error if isinstance(error, BadRow) else BadRow("template_rejects", str(error))
                self.tally.drop(row.place, bad)
            return False
        dialogue.job = Job(f"{row.id}#{dialogue.turn}", list(dialogue.messages), row.tools, ids)
        return True


def _grow(
    dialogue: Dialogue,
    prompt: list[int],
    answer: list[int],
    answer_mask: list[bool],
    *,
    truncated: bool,
) -> None:
    """Extend the last row where the prompt continues it; otherwise the answer is a row of its own.

    A template that rewrites history gives prompts that do not continue what was said.
    """
    last = dialogue.rows[-1] if dialogue.rows else None
    if last is not None and prompt[: len(last.ids)] == last.ids:
        between = [False] * (len(prompt) - len(last.ids))
        mask = last.mask + between + answer_mask
        dialogue.rows[-1] = MaskedRow(prompt + answer, mask, truncated, last.turn)
        return
    mask = [False] * len(prompt) + answer_mask
    dialogue.rows.append(MaskedRow(prompt + answer, mask, truncated, dialogue.turn))
