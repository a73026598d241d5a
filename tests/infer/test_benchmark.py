"""Every question under every condition: paired, interleaved, and the same for all."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.infer.test_engine import prompt_of
from tests.infer.test_engine_sampling import dice, drafting_trees
from whiflash_infer.benchmark import Asked, Benchmark, Condition, Protocol, Question
from whiflash_infer.errors import UserError
from whiflash_infer.routing.policies import ShortenedPolicy, StaticPolicy
from whiflash_infer.settings import EngineSettings
from whiflash_infer.types import PLAIN

TIMED = EngineSettings(timing=True)
PROTOCOL = Protocol(max_new_tokens=24, temperature=0.0, seed=3, warmup_prompts=1)


def questions(count: int) -> list[Question]:
    return [Question(f"q{n}", "a", prompt_of(3 + 4 * n, vocabulary=8)) for n in range(count)]


def condition(arm: str, **fields: object) -> Condition:
    policy = StaticPolicy(arm)
    return Condition(name=policy.name, policy=policy, settings=TIMED, **fields)  # pyright: ignore


def run(conditions: list[Condition], asked: list[Question], *, label: bool = False) -> list[Asked]:
    target = dice()
    protocol = Protocol(max_new_tokens=24, temperature=0.0, seed=3, warmup_prompts=1, label=label)
    return list(Benchmark(target, drafting_trees(target), conditions, protocol).run(asked))


def test_every_question_is_answered_once_under_every_condition_in_changing_order() -> None:
    conditions = [condition(PLAIN), condition("ar"), condition("diffusion")]
    found = run(conditions, questions(12))
    assert [[q.id for q in one.questions] for one in found] == [[f"q{n}"] for n in range(12)]
    orders = {tuple(one.answers) for one in found}
    assert len(orders) > 3
    for one in found:
        outputs = {tuple(a.generation.output_ids.tolist()) for (a,) in one.answers.values()}
        assert len(one.answers) == 3
        assert len(outputs) == 1  # greedy, in float32


def test_a_later_turn_is_asked_of_all_with_the_plain_answer_before_it() -> None:
    heard: list[list[int]] = []

    def then(answer: list[int]) -> Question:
        heard.append(answer)
        return Question("talk#2", "a", [*first.ids, *answer, 1], turn=2)

    first = Question("talk", "a", prompt_of(5, vocabulary=8), then=then)
    other = Question("q", "a", prompt_of(4, vocabulary=8))
    found = run([condition(PLAIN), condition("ar")], [first, other])
    assert [one.questions[0].id for one in found] == ["talk", "talk#2", "q"]
    (plain,) = found[0].answers[PLAIN]
    assert heard == [plain.generation.output_ids.tolist()]  # of the warm-up nothing is asked
    for (answer,) in found[1].answers.values():
        assert answer.turn == 2
        assert answer.generation.prompt_length == len(first.ids) + len(heard[0]) + 1
        assert answer.conversation == "talk"


def test_texts_decoded_together_share_the_time_that_passed() -> None:
    batch = condition("ar", batch=4)
    started = time.perf_counter()
    found = run([condition(PLAIN), batch], questions(6))
    passed = time.perf_counter() - started
    assert [len(one.questions) for one in found] == [4, 2]
    answers = [a for one in found for a in one.answers["static_ar"]]
    assert Counter(a.prompt_id for a in answers) == Counter(f"q{n}" for n in range(6))
    seconds = sum(a.generation.decode_seconds for a in answers)
    rounds = sum(r.total_seconds for a in answers for r in a.rounds)
    assert rounds <= seconds < passed
    alone = run([condition(PLAIN), condition("ar")], questions(6))
    for one, other in zip(answers, [a for o in alone for a in o.answers["static_ar"]], strict=True):
        assert one.generation.output_ids.tolist() == other.generation.output_ids.tolist()


def test_a_slowed_condition_takes_longer_by_what_was_planted() -> None:
    # Half as long again: no noise hides that.
    copies = [condition("ar"), condition("ar", slowdown=0.5)]
    conditions = [condition(PLAIN), copies[0], Condition(**{**vars(copies[1]), "name": "slowed"})]
    found = run(conditions, questions(8))
    seconds = {
        name: sum(a.generation.decode_seconds for one in found for a in one.answers[name])
        for name in ("static_ar", "slowed")
    }
    assert seconds["slowed"] > 1.2 * seconds["static_ar"]


def test_a_shortened_policy_drafts_no_further_and_says_the_same() -> None:
    short = ShortenedPolicy(StaticPolicy("ar"), {"ar": 2}, "short")
    conditions = [condition(PLAIN), condition("ar")]
    conditions.append(Condition(name="short", policy=short, settings=TIMED))
    found = run(conditions, questions(4))
    rounds = [r for one in found for a in one.answers["short"] for r in a.rounds]
    assert max(r.num_draft for r in rounds) == 2
    assert max(r.num_draft for one in found for r in one.answers["static_ar"][0].rounds) > 2
    for one in found:
        assert len({tuple(a.generation.output_ids.tolist()) for (a,) in one.answers.values()}) == 1


def test_without_the_plain_condition_there_is_nothing_to_measure_against() -> None:
    target = dice()
    with pytest.raises(UserError, match="plain"):
        Benchmark(target, drafting_trees(target), [condition("ar")], PROTOCOL)
