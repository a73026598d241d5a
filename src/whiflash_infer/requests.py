"""One request on its way through the decode loop, and where its answer ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions, logits_processors
from whiflash_infer.sampling import uniforms
from whiflash_infer.types import Generation

TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM = 0, 1, 2  # of a request's random numbers


@dataclass(slots=True)
class Request:
    """A prompt, what was asked of its answer, and what the loop remembers of it between rounds.

    row: its row of all storage. limit: tokens of prompt and answer at most. belief: the policy's
    of the anchor, and decided_on: that of the round before. memory: what the policy remembers.
    unsafe: arms that failed in this request. streams: random numbers by stream, one an output
    position.
    """

    index: int
    prompt_ids: list[int]
    options: GenerationOptions
    stops: Stops
    processors: list[LogitsProcessor]
    result: Generation
    row: int = -1
    streams: dict[int, Float[Tensor, " N"]] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    last_arm: str | None = None
    belief: list[float] = field(default_factory=list)
    decided_on: list[float] = field(default_factory=list)
    memory: Float[np.ndarray, " M"] = field(default_factory=lambda: np.zeros(0))
    unsafe: set[str] = field(default_factory=set)
    router_failed: bool = False
    started: float = 0.0

    @property
    def limit(self) -> int:
        return len(self.prompt_ids) + self.options.max_new_tokens

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def ended(self) -> bool:
        return bool(self.result.finish_reason)

    @property
    def draws(self) -> bool:
        """Whether its drafts are drawn. Where nothing is random there is nothing to draw."""
        return self.options.sample_drafts and not self.options.is_greedy

    def begin(self, device: torch.device, spare: int) -> None:
        """Make its random numbers. spare: drafts that a round may make beyond the limit."""
        wanted = [] if self.options.is_greedy else [TARGET_STREAM]
        if self.draws:
            wanted += [DRAFT_STREAM, ACCEPT_STREAM]
        count = self.options.max_new_tokens + spare + 1
        for stream in wanted:
            self.streams[stream] = uniforms(self.options.seed, count, stream=stream).to(device)

    def uniforms(self, stream: int, count: int) -> Float[Tensor, " N"]:
        """For the next `count` output positions; behind the limit they mean nothing."""
        start = len(self.output_ids)
        return self.streams[stream][start : start + count]


def make_request(
    index: int,
    prompt_ids: list[int],
    options: GenerationOptions,
    *,
    stop_ids: frozenset[int],
    tokenizer: Any,
) -> Request:
    """stop_ids: the target's own, for a request that names none."""
    ends = stop_ids if options.stop_ids is None else options.stop_ids
    return Request(
        index=index,
        prompt_ids=prompt_ids,
        options=options,
        stops=Stops(ends, options.stop_strings, tokenizer),
        processors=logits_processors(options, len(prompt_ids)),
        result=Generation(len(prompt_ids), torch.empty(0, dtype=torch.long)),
    )


def check_request(prompt_ids: Sequence[int], options: GenerationOptions, max_length: int) -> None:
    """Raises: UserError for an empty prompt, or one that leaves no room in the target's context."""
    if not len(prompt_ids):
        raise UserError("the prompt is empty: the target needs at least one token to start")
    wanted = len(prompt_ids) + options.max_new_tokens
    if wanted > max_length:
        raise UserError(
            f"prompt of {len(prompt_ids)} tokens + max_new_tokens {options.max_new_tokens} = "
            f"{wanted} exceeds the target's context of {max_length}"
        )


class Stops:
    """Stop tokens and stop strings; nothing after the first of them is emitted.

    An answer ends with the token that completes a stop string, as Hugging Face has it.
    """

    def __init__(self, ids: frozenset[int], strings: tuple[str, ...], tokenizer: Any) -> None:
        self.ids = ids
        self.strings = strings
        self._tokenizer = tokenizer
        # A token holds at least one byte of text, but for special and space-only ones.
        self._reach = max((len(text.encode()) for text in strings), default=0) + 8

    def cut(self, before: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], str]:
        """The tokens up to the first end, and what ended there (nothing: an empty string).

        before: the answer so far.
        """
        kept, reason = list(tokens), ""
        for index, token in enumerate(kept):
            if token in self.ids:
                kept, reason = kept[: index + 1], "stop_id"
                break
        if self.strings:
            found = self._completed(before, kept)
            if found is not None and (found < len(kept) or not reason):
                return kept[:found], "stop_string"
        return kept, reason

    def _completed(self, before: Sequence[int], tokens: Sequence[int]) -> int | None:
        """How many of the tokens it takes to complete a stop string."""
        tail = list(before[-self._reach :])
        known = self._text(tail)
        if not self._holds_new(tail, tokens, known, len(tokens)):
            return None
        return next(n for n in range(1, len(tokens) + 1) if self._holds_new(tail, tokens, known, n))

    def _holds_new(self, tail: list[int], tokens: Sequence[int], known: str, count: int) -> bool:
        text = self._text([*tail, *tokens[:count]])
        return any(text.count(stop) > known.count(stop) for stop in self.strings)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def prefix_ids(request: Request, extra: Sequence[int], device: torch.device) -> Int[Tensor, "1 T"]:
    """Prompt, answer so far and some more, as logits processors take it."""
    ids = [*request.prompt_ids, *request.output_ids, *extra]
    return torch.tensor([ids], device=device)
