"""Running every policy on the same prompts: paired, interleaved, in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.hindsight import label_answer
from whiflash_infer.metrics import Answer
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import Policy
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, rendered for the target.

    id: of a later turn `<conversation>#<turn>`. then: the question behind this one, if there is
    one, given the ids of the answer to this one.
    """

    id: str
    category: str
    ids: list[int]
    turn: int = 1
    then: Callable[[list[int]], Question | None] | None = None


Hindsight = Callable[[Sequence[ConversationRounds]], Policy]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A policy, and how the engine runs it.

    policy: or, for one that knows the answers, what makes it of the labels of the answers that are
    decoded together. batch: how many those are. baseline: the condition that speed-ups are against.
    slowdown: share of every round's time to wait behind it, to see whether that is seen.
    """

    name: str
    policy: Policy | Hindsight
    settings: EngineSettings
    batch: int = 1
    baseline: str = PLAIN
    slowdown: float = 0.0

    @property
    def in_hindsight(self) -> bool:
        return not isinstance(self.policy, Policy)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all conditions share in one evaluation. label: every answer of the plain condition, for
    policies in hindsight and for regrets; greedy decoding alone can be labelled."""

    max_new_tokens: int
    temperature: float
    seed: int
    warmup_prompts: int
    label: bool = False


@dataclass(slots=True)
class Asked:
    """A few questions, and what was answered. labels: of the plain answers, where asked for."""

    questions: Sequence[Question]
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    labels: list[ConversationRounds] = field(default_factory=list)


class Benchmark:
    """Every question under every condition, in a random order of conditions each time.

    Conditions of the same engine settings share one decoder, so that they share storage and
    whatever is warm. Questions are asked in groups as large as the largest batch; a condition of a
    smaller batch takes several calls for one.
    """

    def __init__(
        self,
        target: Target,
        arms: Mapping[str, Arm],
        conditions: Sequence[Condition],
        protocol: Protocol,
    ) -> None:
        names = [condition.name for condition in conditions]
        if PLAIN not in names:
            raise UserError("there is no `plain` condition: every speed-up is against it")
        self._target, self._arms, self._protocol = target, arms, protocol
        self._conditions = {condition.name: condition for condition in conditions}
        self._decoders: dict[str, RoutedDecoder] = {}
        for one in conditions:
            if repr(one.settings) not in self._decoders:
                first = next(c.policy for c in conditions if isinstance(c.policy, Policy))
                decoder = RoutedDecoder(target, arms, first, one.settings)
                self._decoders[repr(one.settings)] = decoder
        self._shuffler = random.Random(protocol.seed)
        self._group = max(condition.batch for condition in conditions)

    def run(self, questions: Sequence[Question]) -> Iterator[Asked]:
        """The first `warmup_prompts` questions are asked once more beforehand, and not reported."""
        warm = questions[: self._protocol.warmup_prompts]
        for _ in self._groups(warm, follow=False):
            pass
        yield from self._groups(questions)

    def num_answers(self, questions: Sequence[Question]) -> int:
        return len(questions) * len(self._conditions)

    def _groups(self, questions: Sequence[Question], *, follow: bool = True) -> Iterator[Asked]:
        waiting = list(questions)
        while waiting:
            part, waiting = waiting[: self._group], waiting[self._group :]
            asked = self._ask(part)
            yield asked
            if follow:
                waiting = [*_later_turns(asked), *waiting]

    def _ask(self, questions: Sequence[Question]) -> Asked:
        asked = Asked(questions)
        names = self._shuffler.sample(sorted(self._conditions), len(self._conditions))
        known = [name for name in names if not self._conditions[name].in_hindsight]
        for name in known:
            asked.answers[name] = self._answer(self._conditions[name], questions)
        if self._protocol.label:
            asked.labels = self._labels(questions, asked.answers[PLAIN])
        for name in names:
            if name not in known:
                asked.answers[name] = self._answer(self._conditions[name], questions, asked.labels)
        return asked

    def _answer(
        self,
        condition: Condition,
        questions: Sequence[Question],
        labels: Sequence[ConversationRounds] = (),
    ) -> list[Answer]:
        decoder = self._decoders[repr(condition.settings)]
        answers: list[Answer] = []
        for start in range(0, len(questions), condition.batch):
            part = slice(start, start + condition.batch)
            if isinstance(condition.policy, Policy):
                decoder.policy = condition.policy
            else:
                decoder.policy = condition.policy(labels[part])
            found = self._decode(decoder, questions[part], condition)
            answers += [
                Answer(q.id, q.category, condition.name, generation, q.turn)
                for q, generation in zip(questions[part], found, strict=True)
            ]
        return answers

    def _decode(
        self, decoder: RoutedDecoder, questions: Sequence[Question], condition: Condition
    ) -> list[Generation]:
        options = GenerationOptions(
            max_new_tokens=self._protocol.max_new_tokens,
            temperature=float(self._protocol.temperature),
            seed=self._protocol.seed,
        )
        wanted = [replace(options, category=question.category) for question in questions]
        prompts = [question.ids for question in questions]
        found: dict[int, Generation] = {}
        started = last = time.perf_counter()
        for piece in decoder.stream_all(prompts, wanted, max_rows=condition.batch):
            if piece.generation is not None:
                found[piece.index] = piece.generation
            if condition.slowdown and piece.round is not None:
                _wait(condition.slowdown * (time.perf_counter() - last))
            last = time.perf_counter()
        answers = [found[index] for index in range(len(questions))]
        if len(questions) > 1:
            share_time(answers, time.perf_counter() - started)
        return answers

    def _labels(
        self, questions: Sequence[Question], answers: Sequence[Answer]
    ) -> list[ConversationRounds]:
        longest = self._protocol.max_new_tokens
        return [
            label_answer(self._target, self._arms, question.ids, answer.generation, longest)
            for question, answer in zip(questions, answers, strict=True)
        ]


def share_time(answers: Sequence[Generation], seconds: float) -> None:
    """Texts that are decoded together all wait for the same rounds. Give each the part of the wall
    time of decoding that its own rounds took, so that seconds add up to what passed.

    seconds: of prompts and rounds together.
    """
    decoding = seconds - sum(answer.prefill_seconds for answer in answers)
    rounds = [sum(r.total_seconds for r in answer.rounds) for answer in answers]
    total = sum(rounds)
    for answer, own in zip(answers, rounds, strict=True):
        answer.decode_seconds = decoding * own / total if total else 0.0


def _later_turns(asked: Asked) -> list[Question]:
    """All conditions are asked the same: the history holds the plain answers."""
    pairs = zip(asked.questions, asked.answers[PLAIN], strict=True)
    found = [q.then(a.generation.output_ids.tolist()) for q, a in pairs if q.then is not None]
    return [question for question in found if question is not None]


def _wait(seconds: float) -> None:
    """Busy, since sleeping is not exact, and lets the processor rest."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
