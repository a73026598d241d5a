"""Who writes the answers: the interface of the engines."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from whiflash_infer.chat import Chat, Message
from whiflash_infer.target import Target


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be written. id: stable, of the row and the turn. prompt_ids: the rendering."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """finish: stop, length (cut at the limit), or failed (error says why; nothing else is set).

    ids: the very tokens, with the stop token, where the engine knows them.
    message: role, content, and where present reasoning_content and tool_calls; where it does not.
    """

    id: str
    finish: Literal["stop", "length", "failed"]
    ids: list[int] | None = None
    message: Message | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy. The seed and the job shape an answer, not what became of others."""

    max_new_tokens: int
    temperature: float
    seed: int


class EngineSettings(Protocol):
    """What conf/engine builds."""

    def connect(self, chat: Chat, load_target: Callable[[], Target]) -> Engine:
        """Raises: UserError when the engine cannot be had."""
        ...


class Engine(Protocol):
    """retries: how often something was tried again, by the name of what went wrong."""

    retries: Counter[str]

    def answers(
        self, jobs: list[Job], done: Container[str], sampling: Sampling
    ) -> Iterator[list[Answer]]:
        """Answers to the jobs whose id is not in `done`, some at a time, in any order.

        Every such job gets exactly one answer; one that cannot be had is `failed`.
        """
        ...

    def target_identity(self) -> dict[str, str] | None:
        """What the answers depend on of the target; None when another program wrote them."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest tells of the engine: its kind, the model, whatever shapes answers."""
        ...


def seed_of(seed: int, job_id: str) -> int:
    """An answer's own seed. Below 2**31, as servers want it."""
    digest = hashlib.sha256(f"{seed} {job_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 2**31
