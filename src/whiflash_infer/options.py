"""What a request may ask of its answer, and the changes to the logits that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from whiflash_infer.errors import UserError

_COLDEST = 1e-6  # below it, logits divided by the temperature may leave float32


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to answer one request.

    temperature: 0 is greedy, and then top_k, top_p and min_p have nothing to do.
    seed: fixes one random number per output position, so the answer does not depend on the
        drafter, the batch or the tree.
    stop_ids: None means the target's own.
    repetition_penalty: as Hugging Face has it, over prompt and output.
    presence_penalty: taken once from the logit of every token that is in the output already.
    frequency_penalty: taken as often as the token is in the output.
    processors: called with [1, T] ids and [1, V] float32 logits. They see every verified path, so
        they may depend on their arguments only, never on the order of the calls.
    allowed_tokens: from all ids so far, prompt and output, to those that may follow. It has to
        allow a stop token where the answer may end.
    sample_drafts: draw drafts from the drafter's distribution and accept them by the ratio rule.
        The answer keeps its distribution, but then depends on the drafter.
    arm: draft with this one in every round, whatever the policy says.
    price: what a second is worth to this request, in tokens, in place of the router's price: a
        small one drafts as much as may be accepted, a large one saves seconds.
    category: the kind of prompt, for policies that look at it.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] | None = None
    stop_strings: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    processors: tuple[LogitsProcessor, ...] = ()
    allowed_tokens: Callable[[list[int]], list[int]] | None = None
    sample_drafts: bool = False
    arm: str | None = None
    price: float = math.nan
    category: str = ""

    def __post_init__(self) -> None:
        for field, (is_legal, legal) in _RANGES.items():
            value = getattr(self, field)
            if not is_legal(value):
                raise UserError(f"{field} is {value!r}, but has to be {legal}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def logits_processors(options: GenerationOptions, prompt_length: int) -> list[LogitsProcessor]:
    """In Hugging Face's order; nothing when nothing is asked, so that a caller can skip the ids."""
    processors: list[LogitsProcessor] = []
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    presence, frequency = options.presence_penalty, options.frequency_penalty
    if presence != 0.0 or frequency != 0.0:
        processors.append(OutputPenalties(prompt_length, presence=presence, frequency=frequency))
    if options.allowed_tokens is not None:
        processors.append(OnlyAllowed(options.allowed_tokens))
    return [*processors, *options.processors]


class OutputPenalties(LogitsProcessor):
    """Makes tokens less likely that the output holds already; the prompt does not count."""

    def __init__(self, prompt_length: int, *, presence: float, frequency: float) -> None:
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(
        self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]
    ) -> Float[Tensor, "B V"]:
        output_ids = input_ids[:, self.prompt_length :]
        ones = scores.new_ones(output_ids.shape)
        counts = torch.zeros_like(scores).scatter_add_(1, output_ids, ones)
        return scores - self.frequency * counts - self.presence * (counts > 0)


class OnlyAllowed(LogitsProcessor):
    """Rules out every token that the callback does not name."""

    def __init__(self, allowed_tokens: Callable[[list[int]], list[int]]) -> None:
        self.allowed_tokens = allowed_tokens

    def __call__(
        self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]
    ) -> Float[Tensor, "B V"]:
        only = torch.full_like(scores, -math.inf)
        for row, ids in enumerate(input_ids.tolist()):
            allowed = torch.tensor(self._ask(ids, scores.shape[-1]), device=scores.device)
            only[row, allowed] = scores[row, allowed]
        return only

    def _ask(self, ids: list[int], vocabulary: int) -> list[int]:
        allowed = list(self.allowed_tokens(ids))
        if not allowed:
            raise UserError(f"allowed_tokens allows nothing after {len(ids)} tokens")
        foreign = [token for token in allowed if not 0 <= token < vocabulary]
        if foreign:
            raise UserError(
                f"allowed_tokens allows {foreign[0]}, but ids go from 0 to {vocabulary - 1}"
            )
        return allowed


def _is_whole(value: object, low: int, high: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    """False for NaN, which compares with nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _are_strings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)


def _are_ids(value: object) -> bool:
    return isinstance(value, frozenset | set) and all(_is_whole(token, 0) for token in value)


def _are_processors(value: object) -> bool:
    return isinstance(value, tuple) and all(callable(processor) for processor in value)


_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny
_PENALTY = (lambda value: _is_number(value, -2.0, 2.0), "a number from -2 to 2")
_RANGES: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_new_tokens": (lambda value: _is_whole(value, 1), "a whole number of at least 1"),
    "temperature": (
        lambda value: value == 0 or _is_number(value, _COLDEST, _LARGEST),
        f"0 (greedy), or a finite number of at least {_COLDEST}",
    ),
    "top_k": (
        lambda value: value is None or _is_whole(value, 1),
        "None, or a whole number of at least 1",
    ),
    "top_p": (lambda value: _is_number(value, _SMALLEST, 1.0), "above 0 and at most 1"),
    "min_p": (lambda value: _is_number(value, 0.0, 1.0), "a number from 0 to 1"),
    "seed": (lambda value: _is_whole(value, 0, 2**64 - 1), "a whole number from 0 to 2**64 - 1"),
    "stop_ids": (lambda value: value is None or _are_ids(value), "None, or a set of token ids"),
    "stop_strings": (_are_strings, "a tuple of strings, none of them empty"),
    "repetition_penalty": (
        lambda value: _is_number(value, _SMALLEST, _LARGEST),
        "a finite number above 0",
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "processors": (_are_processors, "a tuple of logits processors"),
    "allowed_tokens": (
        lambda value: value is None or callable(value),
        "None, or a function from ids to ids",
    ),
    "arm": (lambda value: value is None or isinstance(value, str), "None, or the name of an arm"),
    "price": (
        lambda value: isinstance(value, float) and (math.isnan(value) or 0 <= value < math.inf),
        "a finite number of at least 0, or NaN for the router's own",
    ),
    "category": (lambda value: isinstance(value, str), "a text"),
}
