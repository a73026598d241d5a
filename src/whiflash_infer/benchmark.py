"""Running every policy on the same prompts: paired, interleaved, in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.metrics import Answer
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import Policy
from whiflash_infer.settings import EngineSettings
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
    arms: Mapping[str, Arm],
    policies: Sequence[Policy],
    questions: Sequence[Question],
    protocol: Protocol,
    settings: EngineSettings,
) -> Iterator[Answer]:
    """Every prompt under every policy, in a random order of policies prompt by prompt.

    One decoder serves them all, so that they share arms, storage and whatever is warm.

    The first `warmup_prompts` prompts are answered once more beforehand, and not reported.
    """
    by_name = {policy.name: policy for policy in policies}
    decoder = RoutedDecoder(target, arms, policies[0], settings)
    options = GenerationOptions(
        max_new_tokens=protocol.max_new_tokens,
        temperature=float(protocol.temperature),
        seed=protocol.seed,
    )

    def answer(question: Question, name: str) -> Generation:
        decoder.policy = by_name[name]
        return decoder.answer(question.ids, replace(options, category=question.category))

    for question in questions[: protocol.warmup_prompts]:
        for name in by_name:
            answer(question, name)
    shuffler = random.Random(protocol.seed)
    for question in questions:
        for name in shuffler.sample(sorted(by_name), len(by_name)):
            yield Answer(question.id, question.category, name, answer(question, name))
