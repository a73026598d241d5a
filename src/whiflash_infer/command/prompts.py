"""From what a user asks to the target's tokens: one prompt, or the lines of a file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from whiflash_infer.chat import Chat, Message, TemplateRejects
from whiflash_infer.command.arguments import OPTION_NAMES, with_overrides
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions

_FIELDS = {"id", "prompt", "messages", "tools", *OPTION_NAMES}
_TEMPLATE_FAULTS = (TemplateRejects, KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, or a conversation, in a line of a file."""

    line: int
    id: str | int
    asked: str | list[Message]
    tools: list[dict[str, Any]] | None
    options: GenerationOptions


@dataclass(frozen=True, slots=True)
class Questions:
    """The lines of a file.

    failures: why a line has no answer, by its number. ignored: fields that say nothing here, with
    how many lines have them.
    """

    path: Path
    read: list[Question]
    failures: dict[int, str]
    ignored: Counter[str]

    def failed_lines(self) -> list[str]:
        return [f"{self.path}:{line}: {why}" for line, why in sorted(self.failures.items())]

    def refusal(self) -> UserError:
        """Of a file with no line that can be answered."""
        first, *others = self.failed_lines()
        more = f" (and {len(others)} more failed)" if others else ""
        return UserError(f"no line of the file can be answered: {first}{more}")


def read_questions(path: Path, told: argparse.Namespace) -> Questions:
    """Raises: UserError when the file cannot be read, or none of its lines."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    found = Questions(path, [], {}, Counter())
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.read.append(_question(number, line, told, found.ignored))
            except UserError as error:
                found.failures[number] = str(error)
    if not found.read and not found.failures:
        raise UserError(f"{path} is empty: it has to hold a JSON object a line, with a prompt each")
    if not found.read:
        raise found.refusal()
    return found


def _question(
    number: int, line: bytes, told: argparse.Namespace, ignored: Counter[str]
) -> Question:
    row = _object(line)
    name = row.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise UserError(f"id is {name!r}, but has to be a string or a whole number")
    options = with_overrides(told, row)
    tools = row.get("tools")
    if tools is not None and not _is_list_of_objects(tools):
        raise UserError("tools has to be a list of objects")
    question = Question(number, name, _asked(row), tools, options)
    ignored.update(row.keys() - _FIELDS)
    return question


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except UnicodeError:
        raise UserError("is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError("is no JSON object")
    return row


def _asked(row: dict[str, Any]) -> str | list[Message]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if (prompt is None) == (messages is None):
        raise UserError("has to have a prompt or messages, and not both")
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    if prompt is not None:
        raise UserError("prompt has to be a text, and not an empty one")
    if not _is_list_of_objects(messages) or not all(
        isinstance(message.get("role"), str) for message in messages
    ):
        raise UserError("messages has to be a list of objects with a role each")
    return messages


def _is_list_of_objects(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def prompt_ids(
    chat: Chat,
    asked: str | list[Message],
    *,
    tools: list[dict[str, Any]] | None = None,
    system: str | None = None,
    raw: bool = False,
) -> list[int]:
    """The tokens that the target reads. raw: a prompt is running text, which it goes on with.

    Raises: UserError when the chat template is missing or refuses the conversation.
    """
    if raw:
        if not isinstance(asked, str):
            raise UserError("has messages, but --raw goes on from a prompt")
        return [*chat.opening_ids, *chat.encode([_text(asked)])[0]]
    chat.require_template()
    try:
        return chat.prompt_ids(_conversation(asked, system), tools)
    except _TEMPLATE_FAULTS as error:
        raise UserError(f"the chat template refuses it: {error}") from None


def _conversation(asked: str | list[Message], system: str | None) -> Sequence[Message]:
    messages = [{"role": "user", "content": _text(asked)}] if isinstance(asked, str) else asked
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": _text(system)}, *messages]


def _text(asked: str) -> str:
    try:
        asked.encode()
    except UnicodeError:
        raise UserError("the prompt is not UTF-8 text") from None
    return asked
