"""One shape for the rows of every data set: a conversation, running text, or ready tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whiflash_train.data.tally import BadRow

Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALLERS = {"function_call", "tool_call"}  # roles whose content is the call itself
_OPENERS = {"system", "developer"}
_FOLLOWS = {  # what may come after what; None is the start
    None: {"system", "developer", "user"},
    "system": {"developer", "user"},
    "developer": {"user"},
    "user": {"assistant"},
    "assistant": {"user", "tool"},
    "tool": {"tool", "assistant"},
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ANSWERS = ("answer", "response", "completion")


@dataclass(frozen=True, kw_only=True)
class Row:
    """place: where it was read, as file:line. truncated: its last answer was cut off."""

    id: str
    category: str
    place: str
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Conversation(Row):
    """messages: role, content, and where present reasoning_content, tool_calls, tool_call_id, name.

    later_turns: user turns still to be asked, after the answer to the last message.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    later_turns: list[str] = field(default_factory=list)

    @property
    def user_turns(self) -> list[str]:
        asked = [m["content"] for m in self.messages if m["role"] == "user"]
        return asked + self.later_turns

    @property
    def answer_indices(self) -> list[int]:
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant"]


@dataclass(frozen=True, kw_only=True)
class PlainText(Row):
    text: str


@dataclass(frozen=True, kw_only=True)
class TokenRow(Row):
    input_ids: list[int]
    loss_mask: list[bool]


AnyRow = Conversation | PlainText | TokenRow


def parse_row(raw: Any, place: str, *, roles: Mapping[str, str]) -> AnyRow:
    """A row from any of the known shapes; the first of these keys that it holds decides.

    input_ids + loss_mask | messages | conversations | turns | prompt (+ answer) | text.
    roles: names of roles beyond the known ones, such as {"laguna_s": "assistant"}.
    Raises: BadRow with the reason.
    """
    if not isinstance(raw, Mapping):
        raise BadRow("not_an_object", type(raw).__name__)
    raw = {k: v for k, v in raw.items() if v is not None}
    head: dict[str, Any] = {
        "id": str(raw.get("id", place)),
        "category": str(raw.get("category", "all")),
        "place": place,
        "truncated": raw.get("truncated") is True or raw.get("finish_reason") == "length",
    }
    _require_unicode(head["id"] + head["category"])
    if "input_ids" in raw:
        return _token_row(raw, head)
    if "text" in raw and not ({"messages", "conversations", "turns", "prompt"} & set(raw)):
        return PlainText(text=_text(raw["text"]), **head)
    messages, later = _messages(raw, roles)
    _check_order(messages)
    tools = _tools(raw["tools"]) if raw.get("tools") else None
    return Conversation(messages=messages, tools=tools, later_turns=later, **head)


def content_key(row: AnyRow) -> str:
    """Hash of what a row says, whatever its id or place: equal for duplicates."""
    match row:
        case Conversation():
            value: Any = [row.messages, row.tools, row.later_turns]
        case PlainText():
            value = row.text
        case TokenRow():
            value = row.input_ids
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _token_row(raw: Mapping[str, Any], head: dict[str, Any]) -> TokenRow:
    ids, mask = raw["input_ids"], raw.get("loss_mask")
    if mask is None:
        raise BadRow("no_loss_mask", "input_ids come with a loss_mask of the same length")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise BadRow("bad_input_ids", "a list of token ids is needed")
    if not isinstance(mask, list) or not all(m in (0, 1) for m in mask):
        raise BadRow("bad_loss_mask", "a list of 0 and 1 is needed")
    if len(ids) != len(mask):
        raise BadRow("mask_length_differs", f"{len(ids)} ids, {len(mask)} mask values")
    return TokenRow(input_ids=ids, loss_mask=[bool(m) for m in mask], **head)


def _messages(raw: Mapping[str, Any], roles: Mapping[str, str]) -> tuple[list[Message], list[str]]:
    """The messages of a row, and the user turns that come after them."""
    listed = raw.get("messages", raw.get("conversations"))
    later = raw.get("later_turns", [])
    if listed is None and "turns" in raw:
        turns = raw["turns"]
        if not isinstance(turns, list) or not turns:
            raise BadRow("no_messages", "turns is no list of user turns")
        listed, later = [{"role": "user", "content": turns[0]}], turns[1:]
    if listed is None and "prompt" in raw:
        listed = _asked_and_answered(raw)
    if listed is None:
        raise BadRow("unknown_shape", f"keys {sorted(raw)[:8]}")
    parsed = [_message(m, roles) for m in _list_of_objects(listed)]
    if not parsed:
        raise BadRow("no_messages", "the list is empty")
    if not isinstance(later, list):
        raise BadRow("bad_later_turns", type(later).__name__)
    return parsed, [_text(turn) for turn in later]


def _asked_and_answered(raw: Mapping[str, Any]) -> list[Any]:
    """`prompt` with or without its answer; either may be text or a list of messages."""
    prompt = raw["prompt"]
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    answer = next((raw[name] for name in _ANSWERS if name in raw), None)
    if answer is None:
        return asked
    return asked + (
        answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    )


def _list_of_objects(value: Any) -> list[Any]:
    """Some tables hold a list of structs as a struct of lists."""
    if isinstance(value, str):
        value = _json(value, "bad_messages_json")
    if isinstance(value, Mapping) and all(isinstance(v, list) for v in value.values()):
        names = list(value)
        return [dict(zip(names, parts, strict=False)) for parts in zip(*value.values(), strict=False)]
    if not isinstance(value, list):
        raise BadRow("no_messages", f"a list is needed, not {type(value).__name__}")
    return value


def _message(raw: Any, roles: Mapping[str, str]) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow("message_not_an_object", type(raw).__name__)
    raw = {k: v for k, v in raw.items() if v is not None}
    name = raw.get("role", raw.get("from"))
    if not isinstance(name, str):
        raise BadRow("unknown_role", repr(name)[:40])
    name = name.strip()
    role = roles.get(name) or ROLES.get(name.lower())
    if role is None:
        raise BadRow("unknown_role", f"{name[:40]!r}; name it in data.roles")
    content = raw.get("content", raw.get("value"))
    if name.lower() in _CALLERS:
        return {"role": role, "content": "", "tool_calls": _tool_calls(content)}
    message: Message = {"role": role}
    if raw.get("tool_calls"):
        message["tool_calls"] = _tool_calls(raw["tool_calls"])
    message["content"] = _content(content, may_be_empty="tool_calls" in message or role == "tool")
    reasoning = next((raw[key] for key in _REASONING if raw.get(key)), None)
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = _text(reasoning)
    message |= {k: _text(raw[k]) for k in ("name", "tool_call_id") if raw.get(k)}
    return message


def _content(value: Any, *, may_be_empty: bool) -> str:
    if value is None:
        if may_be_empty:
            return ""
        raise BadRow("null_content")
    if isinstance(value, list):
        value = _joined_parts(value)
    if not isinstance(value, str):
        raise BadRow("content_not_text", type(value).__name__)
    if not value.strip() and not may_be_empty:
        raise BadRow("empty_content")
    return _text(value)


def _joined_parts(parts: list[Any]) -> str:
    """The text of content given in parts, as in the OpenAI format."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise BadRow("content_not_text", f"a part of type {kind!r}")
    return "".join(texts)


def _tools(value: Any) -> list[dict[str, Any]]:
    value = _object(value, "bad_tools_json")
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow("bad_tools_json", "a list of objects is needed")
    return [t if "function" in t else {"type": "function", "function": t} for t in value]


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls in the OpenAI form, arguments as an object, as chat templates expect them."""
    value = _object(value, "bad_tool_call_json")
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list) or not value:
        raise BadRow("bad_tool_call_json", "a call or a list of calls is needed")
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow("bad_tool_call_json", "a call needs the name of a function")
        arguments = _object(function.get("arguments") or {}, "bad_tool_call_json")
        if not isinstance(arguments, Mapping):
            raise BadRow("bad_tool_call_json", "arguments are an object")
        named = {"name": _text(function["name"]), "arguments": arguments}
        ids = {"id": _text(call["id"])} if isinstance(call.get("id"), str) else {}
        calls.append({**ids, "type": "function", "function": named})
    return calls


def _check_order(messages: list[Message]) -> None:
    if messages[0]["role"] == "assistant":
        raise BadRow("opens_with_assistant")
    if all(m["role"] in _OPENERS for m in messages):
        raise BadRow("no_user_turn", "system only")
    before: Message | None = None
    for message in messages:
        role, last = message["role"], before["role"] if before else None
        uncalled = role == "tool" and last == "assistant" and "tool_calls" not in (before or {})
        if role not in _FOLLOWS[last] or uncalled:
            raise BadRow("roles_out_of_order", f"{role} after {last}")
        before = message


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, str(error)[:80]) from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _object(value: Any, reason: str) -> Any:
    """A value given as JSON text, or as it is. In a table's struct a null is an absent key."""
    return _json(value, reason) if isinstance(value, str) else _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(v) for v in value]
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow("content_not_text", type(value).__name__)
    _require_unicode(value)
    return value


def _require_unicode(text: str) -> None:
    """JSON may hold half a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("invalid_unicode", "a lone surrogate") from None
