"""What every round of an evaluation wrote, and what the best arm would have been worth there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from typing import Any

from whiflash_infer.benchmark import Asked
from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import decode_rounds
from whiflash_infer.hindsight import priced_arms, regrets
from whiflash_infer.kinds import kinds_of_pieces
from whiflash_infer.metrics import Answer, Note, is_identical
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.routing.router import Router
from whiflash_infer.types import PLAIN, Generation


def annotated(
    asked: Asked, tokenizer: Any, arms: Mapping[str, Arm], router: Router
) -> list[Answer]:
    """All answers, with a note of each round. Regret is known where an answer is the labelled one.

    Arms are judged at the router's price, whatever a policy reckons with, so that policies compare.
    """
    labels: Sequence[ConversationRounds | None] = asked.labels or [None] * len(asked.questions)
    found = []
    for answers in asked.answers.values():
        for answer, plain, label in zip(answers, asked.answers[PLAIN], labels, strict=True):
            known = label if is_identical(answer, plain) else None
            kinds = kinds_of_rounds(answer.generation, tokenizer)
            regretted = _regrets(answer, known, arms, router)
            notes = [Note(k, *r) for k, r in zip(kinds, regretted, strict=True)]
            found.append(replace(answer, notes=notes))
    return found


def kinds_of_rounds(generation: Generation, tokenizer: Any) -> Sequence[str]:
    """The first token, which no round brings, may open a block that the rest lies in."""
    first = len(generation.output_ids) - generation.decoded_tokens
    ids = [generation.output_ids[:first], *(part for _, part in decode_rounds(generation))]
    return kinds_of_pieces([tokenizer.decode(part.tolist()) for part in ids])[1:]


def _regrets(
    answer: Answer, labels: ConversationRounds | None, arms: Mapping[str, Arm], router: Router
) -> list[tuple[float, str]]:
    if labels is None:
        return [(nan, "")] * len(answer.rounds)
    priced = priced_arms(arms, router.costs)
    lam = router.settings.hazard.lam
    return regrets(labels, priced, answer.rounds, router.costs, lam=lam)
