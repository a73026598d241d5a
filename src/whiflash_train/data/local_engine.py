"""The target writes the answers itself, a batch of prompts of like length at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from whiflash_infer.batch import answer_batch
from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.checks import checked
from whiflash_train.data.engines import Answer, Job, Sampling
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

    Which prompts share a batch follows from the jobs alone, not from what is answered already nor
    from the number of processes: rounding follows the batch, so a resumed run gives the very
    answers of a straight one.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        self.retries: Counter[str] = Counter()
        self.target = target
        self.batch_size = batch_size

    def answers(
        self, jobs: list[Job], done: Container[str], sampling: Sampling
    ) -> Iterator[list[Answer]]:
        self._require_room(jobs, sampling.max_new_tokens)
        ordered = sorted(jobs, key=lambda job: (len(job.prompt_ids), job.id))
        processes = Processes.here()
        for index, start in enumerate(range(0, len(ordered), self.batch_size)):
            batch = ordered[start : start + self.batch_size]
            mine = index % processes.count == processes.index
            if mine and any(job.id not in done for job in batch):
                yield self._answer(batch, sampling, seed=sampling.seed + index)

    def _require_room(self, jobs: list[Job], max_new_tokens: int) -> None:
        """Raises: UserError when a prompt and its answer may be longer than the target reads."""
        longest = max((len(job.prompt_ids) for job in jobs), default=0)
        if longest + max_new_tokens > self.target.max_length:
            raise UserError(
                f"a prompt of {longest} tokens and generate.max_new_tokens={max_new_tokens} are "
                f"more than the {self.target.max_length} that {self.target.name} reads: lower that "
                "or generate.max_prompt_tokens"
            )

    def _answer(self, batch: list[Job], sampling: Sampling, *, seed: int) -> list[Answer]:
        outputs = answer_batch(
            self.target,
            [job.prompt_ids for job in batch],
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed,
        )
        stops = self.target.stop_ids
        return [
            Answer(job.id, "stop" if ids[-1] in stops else "length", ids=ids)
            for job, ids in zip(batch, outputs, strict=True)
        ]

    def target_identity(self) -> dict[str, str]:
        """The answers depend on the weights too."""
        found = self.target.identity()
        return {**found.required(), "dtype": found.dtype}

    def facts(self) -> dict[str, Any]:
        return {"kind": "local", "batch_size": self.batch_size}
