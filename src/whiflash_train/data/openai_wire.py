"""Conversations as the OpenAI protocol carries them, there and back."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from whiflash_infer.chat import Message
from whiflash_train.data.engines import Answer

_FINISH = {"length": "length", "stop": "stop", "tool_calls": "stop", "function_call": "stop"}


class MalformedError(Exception):
    """What came back is no chat completion."""


def to_wire(messages: Sequence[Message]) -> list[Message]:
    """Calls with their arguments as JSON text, and an id on each call and each result."""
    numbers = itertools.count()
    unanswered: deque[str] = deque()
    wire: list[Message] = []
    for original in messages:
        message = dict(original)
        if message.get("tool_calls"):
            message["tool_calls"] = [_call_to_wire(c, numbers) for c in message["tool_calls"]]
            unanswered = deque(call["id"] for call in message["tool_calls"])
        elif message["role"] == "tool":
            following = unanswered[0] if unanswered else f"call_{next(numbers)}"
            message.setdefault("tool_call_id", following)
            if message["tool_call_id"] in unanswered:
                unanswered.remove(message["tool_call_id"])
        wire.append(message)
    return wire


def _call_to_wire(call: dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{next(numbers)}",
        "type": "function",
        "function": {**function, "arguments": arguments},
    }


def read_answer(job_id: str, choice: dict[str, Any]) -> Answer:
    """The answer in one choice of a response.

    Raises: MalformedError.
    """
    reason = choice.get("finish_reason")
    finish = _FINISH.get(reason) if isinstance(reason, str) else None
    if finish is None:
        return Answer(job_id, "failed", error=f"finish_reason {reason}")
    ids = token_ids(choice.get("token_ids") or choice.get("response_token_ids"))  # vLLM, SGLang
    message = from_wire(choice["message"])
    if ids is None and not any(v for k, v in message.items() if k != "role"):
        return Answer(job_id, "failed", error="empty answer")
    if not _encodes(message):
        return Answer(job_id, "failed", error="half a surrogate pair, which no file can hold")
    calls = [call["function"] for call in message.get("tool_calls", [])]
    if ids is None and not all(isinstance(call["arguments"], dict) for call in calls):
        return Answer(job_id, "failed", error="a tool call's arguments are no JSON object")
    return Answer(job_id, "length" if finish == "length" else "stop", ids=ids, message=message)


def from_wire(raw: dict[str, Any]) -> Message:
    """A message in the shape of our rows: arguments of calls are objects, if they can be read.

    Raises: MalformedError.
    """
    content = raw.get("content") or ""
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")  # vLLM changed the name
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise MalformedError("the content is not text")
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls := raw.get("tool_calls"):
        if not isinstance(calls, list):
            raise MalformedError("the tool calls are no list")
        message["tool_calls"] = [_call_from_wire(call) for call in calls]
    return message


def _call_from_wire(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        ids = {"id": call["id"]} if call.get("id") else {}
    except (LookupError, TypeError, AttributeError):
        raise MalformedError("a tool call without a function") from None
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, TypeError):
        parsed = arguments
    arguments = parsed if isinstance(parsed, dict) else arguments
    return {**ids, "type": "function", "function": {"name": name, "arguments": arguments}}


def first_choice(body: Any) -> dict[str, Any]:
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or not isinstance(first.get("message"), dict):
        raise MalformedError("the body has no choices")
    return first


def _encodes(value: Any) -> bool:
    """JSON may hold half a surrogate pair, which UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def token_ids(value: Any) -> list[int] | None:
    """Token ids, where there are any."""
    if not value:
        return None
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise MalformedError("the token ids are no list of integers")
    return value
