"""What is asked in an evaluation: prompts of one turn or several, and recorded runs of agents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from omegaconf import DictConfig
from rich.console import Console

from whiflash_infer.artifacts import json_hash
from whiflash_infer.benchmark import Question
from whiflash_infer.chat import Chat, TemplateRejects
from whiflash_infer.errors import UserError
from whiflash_infer.kinds import main_kind
from whiflash_infer.target import Target
from whiflash_train.data.readers import is_local
from whiflash_train.data.rows import AnyRow, Conversation, Message
from whiflash_train.data.selection import as_prompt
from whiflash_train.data.sources import DataSource, read_mixed
from whiflash_train.data.tally import BadRow, Tally
from whiflash_train.preparation import build_sources

console = Console()

Ask = Literal["question", "every_turn"]
Turns = Literal["all", "first"]
ToolCalls = Literal["auto", "template", "text"]
Written = Literal["template", "text"]  # who writes tool calls
_CALL, _TOOL, _ARGUMENT, _RESULT = "probe_call", "probe_tool", "probe-argument", "probe-result"
_ID = "probe0001"  # some templates want nine letters or digits
_HOW_TO_CALL = (
    "These functions can be called, one a line:\n{tools}\n"
    "A call is written as <tool_call>, a line with a JSON object that has name and arguments, and "
    "</tool_call>."
)


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """limit: conversations in all, as many of each category. turns: of each conversation.

    ask: the last question of a conversation and what its later turns ask, or every answer that was
    recorded. max_new_tokens: the answer's, which must find room behind the prompt.
    """

    limit: int | None
    ask: Ask
    turns: Turns | int
    tool_calls: ToolCalls
    max_prompt_tokens: int | None
    max_new_tokens: int

    @property
    def num_turns(self) -> int | None:
        match self.turns:
            case "all":
                return None
            case "first":
                return 1
            case count:
                return count


@dataclass(frozen=True, kw_only=True)
class Suite:
    """questions: the first of each conversation, and all of a recorded one.

    prompt_hash: of everything that is asked, later turns too. facts: what was asked and how, for
    the header of the metrics. tally: of conversations; what becomes of later turns is noted in it
    while they are asked.
    """

    questions: list[Question]
    prompt_hash: str
    facts: dict[str, Any]
    tally: Tally


def load_questions(cfg: DictConfig, target: Target, limit: int | None) -> Suite:
    """The questions of the configured suite, rendered for the target.

    Raises: UserError when there is none, or a setting is wrong.
    """
    settings = suite_settings(cfg, limit)
    sources = build_sources(cfg, "evaluate.source")
    target.chat.require_template()
    tally = Tally(strict=cfg.strict)
    rows = _read(sources, tally, cfg.data.roles)
    suite = make_suite(rows, target.chat, settings, tally, context=target.max_length)
    suite.facts["suite"] = {name: _described(source) for name, source in sources.items()}
    for line in _told(suite):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return suite


def suite_settings(cfg: DictConfig, limit: int | None) -> SuiteSettings:
    """Raises: UserError naming the key whose value is none of those there are."""
    asked = cfg.evaluate
    _require("limit", limit, None, number=True)
    _require("ask", asked.ask, *get_args(Ask))
    _require("turns", asked.turns, *get_args(Turns), number=True)
    _require("tool_calls", asked.tool_calls, *get_args(ToolCalls))
    _require("max_prompt_tokens", asked.max_prompt_tokens, None, number=True)
    return SuiteSettings(
        limit=limit,
        ask=asked.ask,
        turns=asked.turns,
        tool_calls=asked.tool_calls,
        max_prompt_tokens=asked.max_prompt_tokens,
        max_new_tokens=max(asked.max_new_tokens, asked.lossless_max_new_tokens),
    )


def _require(name: str, value: Any, *known: str | None, number: bool = False) -> None:
    if value in known or (number and type(value) is int and value > 0):
        return
    choices = [*("null" if one is None else one for one in known), *["a number from 1"] * number]
    raise UserError(f"evaluate.{name} is {value!r}: it must be {' or '.join(choices)}")


def make_suite(
    rows: Sequence[AnyRow], chat: Chat, settings: SuiteSettings, tally: Tally, *, context: int
) -> Suite:
    """context: tokens of prompt and answer that the target has room for.

    Raises: UserError when no row yields a question.
    """
    written = tool_calls_written(rows, chat, settings.tool_calls)
    asker = _Asker(chat, settings, tally, context, written)
    quota = _quota(rows, settings.limit)
    taken: Counter[str] = Counter({row.category: 0 for row in rows})
    asked: list[tuple[Question, list[str]]] = []
    for row in rows:
        try:
            if quota is not None and taken[row.category] >= quota:
                raise BadRow("over_limit")
            asked += asker.ask(row)
        except BadRow as bad:
            tally.drop(row.place, bad)
        else:
            taken[row.category] += 1
    if not asked:
        raise UserError("\n  ".join([f"no prompt to evaluate: {tally}", *tally.details()]))
    return Suite(
        questions=[question for question, _ in asked],
        prompt_hash=json_hash([[q.id, q.ids, *later] for q, later in asked]),
        facts={
            "ask": settings.ask,
            "turns": settings.turns,
            "tool_calls": written,
            "limit": settings.limit,
            "max_prompt_tokens": settings.max_prompt_tokens,
            "of_each_category": quota,
            "conversations": dict(taken),
        },
        tally=tally,
    )


def _read(
    sources: Mapping[str, DataSource], tally: Tally, roles: Mapping[str, str]
) -> list[AnyRow]:
    """All rows; when there are several sources their ids name theirs."""
    found = read_mixed(sources, tally, validation=False, roles=roles)
    if len(sources) == 1:
        return [row for _, row in found]
    return [replace(row, id=f"{name}/{row.id}") for name, row in found]


def _described(source: DataSource) -> str:
    """A URL as it is; of a Hugging Face data set what was chosen of it; of files here the name,
    for where they lie is nobody's business who reads the results."""
    path = source.path.replace("{split}", source.split)
    if "://" in path:
        return path
    if is_local(path):
        return Path(path).name
    parts = (path, source.name, source.hub_file, source.revision, source.split)
    return " ".join(part for part in parts if part)


def _quota(rows: Sequence[AnyRow], limit: int | None) -> int | None:
    """Conversations of each category."""
    categories = {row.category for row in rows}
    return None if limit is None else max(1, limit // max(1, len(categories)))


def _told(suite: Suite) -> list[str]:
    """What the reader has to know of the questions, a line each."""
    lines = []
    facts, tally, quota = suite.facts, suite.tally, suite.facts["of_each_category"]
    if set(tally.dropped) - {"over_limit"}:
        lines.append(f"prompts: {tally}")
    if tally.notes:
        notes = ", ".join(f"{what} {count}" for what, count in sorted(tally.notes.items()))
        lines.append(f"turns that are not asked: {notes}")
    if quota is not None:
        few = {name: n for name, n in facts["conversations"].items() if n < quota}
        named = ", ".join(f"{name} {count}" for name, count in few.items())
        fewer = f"; fewer there are in {named}" if few else ""
        lines.append(f"a limit of {facts['limit']} takes {quota} of each category{fewer}")
    if facts["tool_calls"] == "text":
        lines.append("tool calls stand in the text of messages: evaluate.tool_calls")
    return lines


class _Asker:
    """Makes questions of rows."""

    def __init__(
        self,
        chat: Chat,
        settings: SuiteSettings,
        tally: Tally,
        context: int,
        written: Written | None,
    ) -> None:
        self._chat = chat
        self._settings = settings
        self._tally = tally
        self._context = context
        self._result_role = result_role(chat) if written == "text" else None
        self._ids: set[str] = set()

    def ask(self, row: AnyRow) -> list[tuple[Question, list[str]]]:
        """Each question with the turns that come after its answer.

        Raises: BadRow when the row asks nothing that can be asked.
        """
        if not isinstance(row, Conversation):
            raise BadRow("no_question", "only conversations and prompts can be answered")
        if row.id in self._ids:
            raise BadRow("duplicate_id", row.id)
        whole = self._settings.ask == "every_turn"
        asked = self._every_turn(row) if whole else [self._question(row)]
        self._ids |= {row.id, *(question.id for question, _ in asked)}
        self._ids |= {_turn_id(row, 2 + index) for index in range(len(row.later_turns))}
        return asked

    def _question(self, row: Conversation) -> tuple[Question, list[str]]:
        count = self._settings.num_turns
        later = row.later_turns[: None if count is None else count - 1]
        prompt = self._written(as_prompt(row))
        ids = self._rendered(prompt.messages, prompt.tools)
        return Question(row.id, row.category, ids, 1, self._then(prompt, later, 2)), later

    def _then(
        self, row: Conversation, later: list[str], turn: int
    ) -> Callable[[list[int]], Question | None] | None:
        """What asks the first of the later turns, given the answer to the row's messages."""
        if not later:
            return None

        def then(answer_ids: list[int]) -> Question | None:
            said = {"role": "assistant", "content": self._text(answer_ids)}
            asked = {"role": "user", "content": later[0]}
            longer = replace(row, messages=[*row.messages, said, asked])
            try:
                ids = self._rendered(longer.messages, longer.tools)
            except BadRow as bad:
                self._tally.note(f"turn_{bad.reason}", row.place)
                return None
            behind = self._then(longer, later[1:], turn + 1)
            return Question(_turn_id(row, turn), row.category, ids, turn, behind)

        return then

    def _every_turn(self, row: Conversation) -> list[tuple[Question, list[str]]]:
        """A question for each recorded answer, in the context that was recorded before it."""
        if not row.answer_indices:
            raise BadRow("no_answer", "nothing was recorded to replay")
        asked: list[tuple[Question, list[str]]] = []
        lost: list[BadRow] = []
        places = row.answer_indices[: self._settings.num_turns]
        for turn, index in enumerate(places, start=1):
            category = f"{row.category}/{main_kind(written_out(row.messages[index]))}"
            prompt = self._written(replace(row, messages=row.messages[:index]))
            try:
                ids = self._rendered(prompt.messages, prompt.tools)
            except BadRow as bad:
                lost.append(bad)
            else:
                asked.append((Question(_turn_id(row, turn), category, ids, turn), []))
        if not asked:
            raise lost[0]
        for bad in lost:
            self._tally.note(f"turn_{bad.reason}", row.place)
        return asked

    def _written(self, row: Conversation) -> Conversation:
        return row if self._result_role is None else as_text(row, self._result_role)

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """Raises: BadRow when the template refuses it or it is too long."""
        try:
            ids = self._chat.prompt_ids(messages, tools)
        except TemplateRejects as error:
            raise BadRow("template_rejects", str(error)) from None
        room = self._context - self._settings.max_new_tokens
        longest = min(room, self._settings.max_prompt_tokens or room)
        if len(ids) > longest:
            raise BadRow("prompt_too_long", f"{len(ids)} tokens, there is room for {longest}")
        return ids

    def _text(self, answer_ids: list[int]) -> str:
        """The answer as a message holds it: up to its stop token, without special tokens."""
        said = list(takewhile(lambda i: i not in self._chat.stop_ids, answer_ids))
        decode = self._chat.tokenizer.decode
        return decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _turn_id(row: Conversation, turn: int) -> str:
    return row.id if turn == 1 else f"{row.id}#{turn}"


# Tool calls -------------------------------------------------------------------------------------


def tool_calls_written(rows: Iterable[AnyRow], chat: Chat, wanted: ToolCalls) -> Written | None:
    """Who writes the tool calls of these rows; None where there are none."""
    talks = [row for row in rows if isinstance(row, Conversation)]
    has_tools = any(row.tools for row in talks)
    if not has_tools and not any("tool_calls" in m for row in talks for m in row.messages):
        return None
    if wanted == "auto":
        return "template" if _renders_calls(chat, with_tools=has_tools) else "text"
    return wanted


def _renders_calls(chat: Chat, *, with_tools: bool) -> bool:
    """Whether calls, their arguments and results, and the tools stand in the template's text."""
    function = {"name": _CALL, "arguments": {"x": _ARGUMENT}}
    call = {"id": _ID, "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _CALL},
    ]
    parameters = {"type": "object", "properties": {}}
    described = {"name": _TOOL, "description": "x", "parameters": parameters}
    tools = [{"type": "function", "function": described}] if with_tools else None
    wanted = [_CALL, _ARGUMENT, _RESULT, *([_TOOL] if with_tools else [])]
    return _stand_in(chat, messages, tools, wanted)


def result_role(chat: Chat) -> str:
    """The role in which the template shows what a tool gave."""
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": _RESULT},
    ]
    return "tool" if _stand_in(chat, messages, None, [_RESULT]) else "user"


def _stand_in(
    chat: Chat, messages: list[Message], tools: list[dict[str, Any]] | None, wanted: list[str]
) -> bool:
    try:
        text = chat.render(messages, tools, add_generation_prompt=True)
    except TemplateRejects:
        return False
    return all(part in text for part in wanted)


def as_text(row: Conversation, result_role: str) -> Conversation:
    """The conversation with tools, calls and their results in the text of its messages."""
    messages = []
    for message in row.messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            kept = {k: v for k, v in message.items() if k == "reasoning_content"}
            messages.append({"role": role, "content": _with_calls(message), **kept})
        elif role == "tool" and result_role != "tool":
            _append_result(messages, content, result_role)
        else:
            messages.append({"role": role, "content": content})
    return replace(row, messages=_with_tools(messages, row.tools), tools=None)


def written_out(message: Message) -> str:
    """A recorded answer as one text: its reasoning, what it says, and what it calls."""
    thought = message.get("reasoning_content")
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + _with_calls(message)


def _with_calls(message: Message) -> str:
    """The content, and behind it the calls."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    written = [f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls]
    content = message["content"]
    return "\n".join([*([content] if content.strip() or not calls else []), *written])


def _append_result(messages: list[Message], content: str, role: str) -> None:
    """Results that come together are one message, since roles have to take turns."""
    text = f"<tool_response>\n{content}\n</tool_response>"
    if messages and messages[-1]["role"] == role:
        text = f"{messages.pop()['content']}\n{text}"
    messages.append({"role": role, "content": text})


def _with_tools(messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    if not tools:
        return messages
    functions = "\n".join(_json(tool["function"]) for tool in tools)
    text = _HOW_TO_CALL.format(tools=functions)
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    opening = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
    return [opening, *messages[1:]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
