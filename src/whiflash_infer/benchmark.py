"""Running every policy on the same prompts: paired, interleaved, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.metrics import Answer
from whiflash_infer.policies import Policy
from whiflash_infer.target import Target
from whiflash_infer.types import Generation


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, rendered for the target."""

    id: str
    category: str
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all policies share in one evaluation."""

    max_new_tokens: int
    temperature: float
    seed: int
    warmup_prompts: int


def run_policies(
    target: Target,
    runners: Mapping[str, DraftRunner],
    policies: Sequence[Policy],
    questions: Sequence[Question],
    protocol: Protocol,
) -> Iterator[Answer]:
    """Every prompt under every policy, in a random order of policies prompt by prompt.

    The first `warmup_prompts` prompts are answered once more beforehand, and not reported.
    """
    decoders = {p.name: RoutedDecoder(target, runners, p) for p in policies}
    for question in questions[: protocol.warmup_prompts]:
        for decoder in decoders.values():
            _answer(decoder, question, protocol)
    shuffler = random.Random(protocol.seed)
    for question in questions:
        for name in shuffler.sample(sorted(decoders), len(decoders)):
            generation = _answer(decoders[name], question, protocol)
            yield Answer(question.id, question.category, name, generation)


def _answer(decoder: RoutedDecoder, question: Question, protocol: Protocol) -> Generation:
    return decoder.generate(
        question.ids,
        max_new_tokens=protocol.max_new_tokens,
        temperature=protocol.temperature,
        seed=protocol.seed,
    )
