"""The target writes the answers itself, a number of prompts at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from whiflash_infer.chat import Chat
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation
from whiflash_train.checks import checked
from whiflash_train.data.engines import Answer, Job, Sampling, seed_of
from whiflash_train.data.processes import Processes


@checked
@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """batch_size: prompts decoded together."""

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}: it must be 1 or more")

    def connect(self, chat: Chat, load_target: Callable[[], Target]) -> ConnectedLocalEngine:
        return ConnectedLocalEngine(load_target(), self.batch_size)


class ConnectedLocalEngine:
    """Implements `Engine`.

    Every job has a seed of its own, so a sampled answer does not depend on the jobs beside it, on
    what is answered already or on the number of processes; nor does a greedy one. Rounding does:
    where two tokens are equally likely but for it, another run may take the other one.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        self.retries: Counter[str] = Counter()
        self.target = target
        self.batch_size = batch_size
        self._decoder = RoutedDecoder(target, {}, StaticPolicy(PLAIN))

    def answers(
        self, jobs: list[Job], done: Container[str], sampling: Sampling
    ) -> Iterator[list[Answer]]:
        """Each as soon as it ends. Prompts of like length come together: short rows read masked
        slots beside long ones."""
        self._require_room(jobs, sampling.max_new_tokens)
        processes = Processes.here()
        ordered = sorted(jobs, key=lambda job: (len(job.prompt_ids), job.id))
        mine = ordered[processes.index :: processes.count]
        waiting = [job for job in mine if job.id not in done]
        options = [
            GenerationOptions(
                max_new_tokens=sampling.max_new_tokens,
                temperature=float(sampling.temperature),
                seed=seed_of(sampling.seed, job.id),
            )
            for job in waiting
        ]
        prompts = [job.prompt_ids for job in waiting]
        for piece in self._decoder.stream_all(prompts, options, max_rows=self.batch_size):
            if piece.generation is not None:
                yield [_answer(waiting[piece.index].id, piece.generation)]

    def _require_room(self, jobs: list[Job], max_new_tokens: int) -> None:
        """Raises: UserError when a prompt and its answer may be longer than the target reads."""
        longest = max((len(job.prompt_ids) for job in jobs), default=0)
        if longest + max_new_tokens > self.target.max_length:
            raise UserError(
                f"a prompt of {longest} tokens and generate.max_new_tokens={max_new_tokens} are "
                f"more than the {self.target.max_length} that {self.target.name} reads: lower that "
                "or generate.max_prompt_tokens"
            )

    def target_identity(self) -> dict[str, str]:
        """The answers depend on the weights too."""
        found = self.target.identity()
        return {**found.required(), "dtype": found.dtype}

    def facts(self) -> dict[str, Any]:
        return {"kind": "local", "batch_size": self.batch_size}


def _answer(job_id: str, generation: Generation) -> Answer:
    if generation.finish_reason == "error":
        return Answer(job_id, "failed", error=generation.error)
    finish = "stop" if generation.stopped else "length"
    return Answer(job_id, finish, ids=generation.output_ids.tolist())
