"""One shape for the rows of every data set: a conversation, running text, or ready tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
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
    "ai": "assistant",
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
_RECORDINGS = ("traj", "history", "trajectory")  # runs of agents
SHAPES = ("input_ids", "messages", "conversations", "turns", "prompt", "text", *_RECORDINGS)
ANSWERS = ("answer", "response", "completion")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_CONTENT = ("content", "value", "text", "system_prompt")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_NO_OUTPUT = "(no output)"
_MAX_DEPTH = 64  # of tools and arguments; some hundreds overflow the stack of whoever walks them


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

    input_ids + loss_mask | messages | conversations | turns | prompt (+ answer) | text | traj,
    history or trajectory, of messages or of steps with thought, action and observation.
    Beside messages of any shape: system, tools, later_turns. A null is an absent key.
    roles: names of roles beyond the known ones, such as {"laguna_s": "assistant"}.
    Raises: BadRow with the reason.
    """
    if not isinstance(raw, Mapping):
        raise BadRow("not_an_object", type(raw).__name__)
    raw = _without_nulls(raw)
    head: dict[str, Any] = {
        "id": _label(raw.get("id"), place),
        "category": _label(raw.get("category"), "all"),
        "place": place,
        "truncated": raw.get("truncated") is True or raw.get("finish_reason") == "length",
    }
    match next((shape for shape in SHAPES if shape in raw), None):
        case None:
            raise BadRow("unknown_shape", f"keys {list(raw)[:8]}")
        case "input_ids":
            return _token_row(raw, head)
        case "text":
            return PlainText(text=_filled(raw["text"]), **head)
        case shape:
            messages, later = _messages(raw, shape, roles)
            tools = _tools(raw.get("tools", raw.get("functions")))
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


def strict_json(text: str) -> Any:
    """The value of JSON text.

    Raises: ValueError or RecursionError, also for NaN and for a key that an object holds twice.
    """
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"twice the key {next(k for k in keys if keys.count(k) > 1)[:40]!r}")
    return found


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if v is not None}


def _label(value: Any, default: str) -> str:
    """An id or category: text or a number; anything else is taken for none."""
    given = isinstance(value, str | int | float) and value != ""
    return _text(str(value)) if given else default


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
    if not ids:
        raise BadRow("empty_content", "no token")
    return TokenRow(input_ids=ids, loss_mask=[bool(m) for m in mask], **head)


def _messages(
    raw: Mapping[str, Any], shape: str, roles: Mapping[str, str]
) -> tuple[list[Message], list[str]]:
    """The messages of a row, and the user turns that come after them."""
    listed, later = _listed(raw, shape)
    messages = [_message(m, roles) for m in listed]
    messages = _users_joined(messages) if shape in _RECORDINGS else messages
    if not messages:
        raise BadRow("no_messages", "the list is empty")
    if not isinstance(later, list):
        raise BadRow("bad_later_turns", type(later).__name__)
    system = raw.get("system")
    if not _is_blank(system):
        opening = {"role": "system", "content": _content(system)}
        messages = messages if messages[0] == opening else [opening, *messages]
    _check_order(messages)
    return messages, [_filled(turn) for turn in later]


def _listed(raw: Mapping[str, Any], shape: str) -> tuple[list[Any], Any]:
    """Messages as they are in the row, and the later turns."""
    value, later = raw[shape], raw.get("later_turns", [])
    if shape == "prompt":
        return _asked_and_answered(raw), later
    if shape in _RECORDINGS:
        return _recorded(_list_of_objects(value), raw.get("problem_statement")), later
    if shape != "turns":
        return _list_of_objects(value), later
    if not isinstance(value, list) or not value:
        raise BadRow("no_messages", "turns is no list of user turns")
    return [{"role": "user", "content": value[0]}], value[1:]


def _asked_and_answered(raw: Mapping[str, Any]) -> list[Any]:
    """`prompt` with or without its answer; either may be text or a list of messages."""
    prompt = raw["prompt"]
    answer = next((raw[name] for name in ANSWERS if name in raw), [])
    return [
        *(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]),
        *(answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]),
    ]


def _recorded(entries: list[Any], problem: Any) -> list[Any]:
    """The messages of a recording, which may be steps: what was said, and what came of it. Before
    the first step stands what it was asked, or else the problem."""
    steps = [e for e in entries if isinstance(e, Mapping) and {"role", "from"}.isdisjoint(e)]
    if not steps or len(steps) < len(entries):
        return entries
    opening = next((steps[0][key] for key in ("query", "messages") if steps[0].get(key)), None)
    if opening is None and problem is None:
        raise BadRow("no_messages", "the first step tells no `query`: what was it asked?")
    asked = [{"role": "user", "content": problem}] if opening is None else opening
    messages = [*_list_of_objects(asked)]
    for step in steps:
        messages.append({"role": "assistant", "content": step.get("response") or _acted(step)})
        messages.append({"role": "user", "content": step.get("observation") or _NO_OUTPUT})
    return messages


def _acted(raw: Mapping[str, Any]) -> str | None:
    """Thought and action as one text, as agents write them that call no functions."""
    thought, action = raw.get("thought"), raw.get("action")
    fenced = f"```\n{str(action).strip()}\n```" if action else None
    return "\n\n".join(str(part).strip() for part in (thought, fenced) if part) or None


def _users_joined(messages: list[Message]) -> list[Message]:
    """Agents are shown an example and the problem in messages of their own."""
    joined: list[Message] = []
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            text = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**joined[-1], "content": text}
        else:
            joined.append(message)
    return joined


def _list_of_objects(value: Any) -> list[Any]:
    """Some tables hold a list of structs as a struct of lists."""
    if isinstance(value, str):
        value = _json(value, "bad_messages_json")
    if isinstance(value, Mapping):
        value = _turned(_without_nulls(value))
    if not isinstance(value, list):
        raise BadRow("no_messages", f"a list is needed, not {type(value).__name__}")
    return value


def _turned(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    lists = list(columns.values())
    if not all(isinstance(v, list) and len(v) == len(lists[0]) for v in lists):
        raise BadRow("no_messages", "an object, and not one of lists of one length")
    return [dict(zip(columns, parts, strict=True)) for parts in zip(*lists, strict=True)]


def _message(raw: Any, roles: Mapping[str, str]) -> Message:
    if not isinstance(raw, Mapping):
        raise BadRow("message_not_an_object", type(raw).__name__)
    raw = _without_nulls(raw)
    name, role = _role(raw.get("role", raw.get("from")), roles)
    content = next((raw[key] for key in _CONTENT if key in raw), None)
    content = _acted(raw) if content is None else content
    calls = _tool_calls(raw.get("tool_calls") or raw.get("function_call"))
    if name in _CALLERS:
        content, calls = None, calls or _tool_calls(content)
        if not calls:
            raise BadRow("bad_tool_call_json", "no call")
    if calls and role != "assistant":
        raise BadRow("call_not_by_assistant", role)
    optional = bool(calls) or role == "tool"
    content = "" if content is None and optional else content
    message = {"role": role, "content": _content(content, blank=optional or role in _OPENERS)}
    return {**message, **({"tool_calls": calls} if calls else {}), **_extras(raw, role)}


def _role(said: Any, roles: Mapping[str, str]) -> tuple[str, str]:
    """The known name of a role, and the role."""
    if not isinstance(said, str):
        raise BadRow("unknown_role", "none is given" if said is None else type(said).__name__)
    said = said.strip()
    name = roles.get(said, said)
    known = name.lower()
    if known not in ROLES:
        raise BadRow("unknown_role", f"{name[:40]!r}; name it in data.roles")
    return known, ROLES[known]


def _extras(raw: Mapping[str, Any], role: str) -> Message:
    reasoning = next((raw[key] for key in _REASONING if raw.get(key)), None)
    kept = {} if reasoning is None or role != "assistant" else {"reasoning_content": reasoning}
    ids = raw.get("tool_call_ids")
    raw = {"tool_call_id": ids[0], **raw} if isinstance(ids, list) and ids else raw
    kept |= {k: raw[k] for k in ("name", "tool_call_id") if not _is_blank(raw.get(k))}
    return {k: _text(str(v) if isinstance(v, int) else v) for k, v in kept.items()}


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _content(value: Any, *, blank: bool = False) -> str:
    """The text of content, which may be given in parts. blank: whether it may say nothing."""
    if value is None:
        raise BadRow("null_content")
    if isinstance(value, list):
        value = "".join(_part(part) for part in value)
    return _text(value) if blank else _filled(value)


def _part(part: Any) -> str:
    """The text of a part of content, as in the OpenAI format."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRow("content_not_text", f"a part is {type(part).__name__}")
    kind, text = part.get("type"), part.get("text")
    if isinstance(text, str) and kind in _TEXT_PARTS:
        return text
    raise BadRow("content_not_text", f"a part of type {kind if isinstance(kind, str) else '?'!r}")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools in the OpenAI form; an empty list is none."""
    reason = "bad_tools_json"
    value = _object(value, reason)
    if not isinstance(value, list | None):
        raise BadRow(reason, "a list is needed")
    tools = []
    for tool in [_object(tool, reason) for tool in value or []]:
        function = _function(tool, reason)
        tools.append(tool if "function" in tool else {"type": "function", "function": function})
    _require_json(tools, reason)
    return tools or None


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls in the OpenAI form, arguments as an object, as chat templates expect them."""
    reason = "bad_tool_call_json"
    value = _object(value, reason)
    value = [value] if isinstance(value, Mapping) else value
    if not isinstance(value, list | None):
        raise BadRow(reason, "a call or a list of calls is needed")
    calls = []
    for call in [_object(call, reason) for call in value or []]:
        function = _function(call, reason)
        arguments = _object(function.get("arguments", function.get("parameters")), reason)
        if not isinstance(arguments, Mapping | None):
            raise BadRow(reason, "arguments are an object")
        ids = {"id": str(call["id"])} if isinstance(call.get("id"), str | int) else {}
        named = {"name": function["name"], "arguments": arguments or {}}
        calls.append({**ids, "type": "function", "function": named})
    _require_json(calls, reason)
    return calls


def _function(value: Any, reason: str) -> Mapping[str, Any]:
    """The function of a tool or a call, which lies under that key or is all there is."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow(reason, "the name of a function is needed")
    return function


def _check_order(messages: list[Message]) -> None:
    if messages[0]["role"] == "assistant":
        raise BadRow("opens_with_assistant")
    if all(m["role"] in _OPENERS for m in messages):
        raise BadRow("no_user_turn", "system only")
    before = None
    for message in messages:
        role = message["role"]
        if role not in _FOLLOWS[before]:
            raise BadRow("roles_out_of_order", f"{role} {f'after {before}' if before else 'first'}")
        before = role


def _json(text: str, reason: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, str(error)) from None


def _object(value: Any, reason: str) -> Any:
    """A value given as it is or as JSON text, of which blank text is null."""
    if not isinstance(value, str):
        return value
    return None if _is_blank(value) else _json(value, reason)


def _require_json(value: Any, reason: str, depth: int = 0) -> None:
    """Templates print it and hashes cover it, so it must be something that JSON can hold."""
    if depth > _MAX_DEPTH:
        raise BadRow(reason, f"more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for part in value:
            _require_json(part, reason, depth + 1)
    elif isinstance(value, str):
        _text(value)
    elif not isinstance(value, int | None) and not (isinstance(value, float) and isfinite(value)):
        raise BadRow(reason, f"a {type(value).__name__} that JSON cannot hold")


def _filled(value: Any) -> str:
    text = _text(value)
    if not text.strip():
        raise BadRow("empty_content")
    return text


def _text(value: Any) -> str:
    """JSON may hold half a surrogate pair, which no tokenizer can encode."""
    if not isinstance(value, str):
        raise BadRow("content_not_text", type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow("invalid_unicode", "a lone surrogate") from None
    return value
