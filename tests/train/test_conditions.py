"""Which conditions an evaluation runs, and what those that know the answer do."""

from __future__ import annotations

from typing import Any

import pytest
from jaxtyping import TypeCheckError

from tests.infer.test_benchmark import TIMED, condition, questions, run
from tests.infer.test_engine_sampling import dice, drafting_trees
from tests.routing.made import cost_model, made_router
from whiflash_infer.benchmark import Benchmark, Condition, Protocol
from whiflash_infer.errors import UserError
from whiflash_infer.hindsight import HINDSIGHT
from whiflash_infer.routing.oracles import oracle_path
from whiflash_infer.routing.policies import ShortenedPolicy
from whiflash_infer.routing.replay import stack_texts
from whiflash_infer.routing.router import ROUTED
from whiflash_infer.types import PLAIN
from whiflash_train.evaluation.conditions import (
    Ablation,
    chosen_conditions,
    chosen_policies,
    hindsight,
    policy_names,
    variations,
)


def chosen(names: list[str], *, temperature: float = 0.0) -> list[Condition]:
    arms = drafting_trees(dice())
    router = made_router(seed=0)
    return chosen_conditions(router, names, arms, TIMED, seed=0, temperature=temperature)


def test_policies_in_hindsight_follow_the_labels_of_these_answers() -> None:
    router, arms = made_router(seed=0), drafting_trees(dice())
    oracles = [
        Condition(name=name, policy=hindsight(name, router, arms), settings=TIMED)
        for name in HINDSIGHT
    ]
    found = run([condition(PLAIN), *oracles], questions(4), label=True)
    for one in found:
        names = (PLAIN, *arms)
        texts = stack_texts(one.labels, names)
        plan, _ = oracle_path(texts, cost_model())
        (answer,) = one.answers["oracle_path"]
        for done in answer.rounds:
            row = done.position - int(texts.positions[0])
            assert names[int(plan.arms[row])] == done.arm
            assert int(plan.num_draft[row]) == done.num_draft
        for (told,) in one.answers.values():
            (plain,) = one.answers[PLAIN]
            assert told.generation.output_ids.tolist() == plain.generation.output_ids.tolist()
            assert not told.generation.fallbacks


def test_an_answer_of_one_token_leaves_nothing_to_plan() -> None:
    router, target = made_router(seed=0), dice()
    arms = drafting_trees(target)
    conditions = [
        condition(PLAIN),
        *(
            Condition(name=name, policy=hindsight(name, router, arms), settings=TIMED, batch=2)
            for name in HINDSIGHT
        ),
    ]
    protocol = Protocol(max_new_tokens=1, temperature=0.0, seed=0, warmup_prompts=0, label=True)
    (asked,) = Benchmark(target, arms, conditions, protocol).run(questions(2))
    assert {len(a.rounds) for answers in asked.answers.values() for a in answers} == {0}


def test_all_arms_and_the_routed_policies_are_measured_unless_told_otherwise() -> None:
    arms, router = drafting_trees(dice()), made_router(seed=0)
    assert policy_names(None, router, arms) == [
        "plain",
        "static_ar",
        "static_diffusion",
        "static_ar_tree",
        "static_diffusion_tree",
        "entropy",
        "hazard",
    ]
    assert policy_names(["plain", "hazard", "hazard", "hazard"], router, arms) == [
        "plain",
        "hazard",
        "hazard#2",
        "hazard#3",
    ]
    everything = policy_names("all", router, arms)
    assert everything[:5] == policy_names(None, router, arms)[:5]
    assert set(everything[5:]) == {*ROUTED, *HINDSIGHT}
    with pytest.raises(UserError, match=r"evaluate\.policies is 'hazard'"):
        policy_names("hazard", router, arms)


def test_checks_that_need_no_answer_leave_out_policies_that_know_it_and_copies() -> None:
    arms, router = drafting_trees(dice()), made_router(seed=0)
    names = ["plain", "hazard", "hazard#2", "oracle_path", "plain"]
    assert [p.name for p in chosen_policies(router, names, arms, 0)] == ["plain", "hazard"]


def test_a_policy_named_twice_is_two_conditions_with_a_policy_each() -> None:
    conditions = chosen(["plain", "bandit", "bandit#2"])
    assert [c.name for c in conditions] == ["plain", "bandit", "bandit#2"]
    assert conditions[1].policy is not conditions[2].policy


@pytest.mark.parametrize(
    ("names", "temperature", "message"),
    [
        (["hazard"], 0.0, "must hold `plain`"),
        (["plain", "hazrd"], 0.0, "unknown policy 'hazrd': choose from .*oracle_path"),
        (["plain", "oracle_path"], 0.7, "evaluate.temperature=0"),
    ],
)
def test_policies_that_cannot_be_measured_are_refused(
    names: list[str], temperature: float, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chosen(names, temperature=temperature)


def ablation(**fields: Any) -> Ablation:
    none: dict[str, Any] = {"sync": [], "draft_length": [], "block_size": [], "batch": []}
    return Ablation(**{**none, **fields})


def varied(conditions: list[Condition], wanted: Ablation) -> dict[str, tuple[str, Any]]:
    return {v.condition.name: (v.varied, v.value) for v in variations(wanted, conditions, TIMED)}


def test_one_thing_is_varied_at_a_time_and_only_where_it_matters() -> None:
    conditions = chosen(["plain", "static_ar", "static_diffusion", "hazard", "oracle_path"])
    found = varied(
        conditions,
        ablation(sync=["eager", "lazy_kv_only"], draft_length=[2], block_size=[4], batch=[1, 4]),
    )
    drafting = ("static_ar", "static_diffusion", "hazard", "oracle_path")
    assert found == {
        **{f"{name}, sync eager": ("sync", "eager") for name in drafting},
        **{f"{name}, draft_length 2": ("draft_length", 2) for name in ("static_ar", "hazard")},
        **{f"{name}, block_size 4": ("block_size", 4) for name in ("static_diffusion", "hazard")},
        **{f"{name}, batch 4": ("batch", 4) for name in ("plain", *drafting)},
    }
    assert varied(conditions, ablation()) == {}


def test_a_block_of_four_slots_drafts_three_and_a_batch_has_its_own_baseline() -> None:
    conditions = chosen(["plain", "hazard"])
    found = variations(ablation(draft_length=[2], block_size=[4], batch=[4]), conditions, TIMED)
    by_name = {v.condition.name: v.condition for v in found}
    shortened = by_name["hazard, block_size 4"].policy
    assert isinstance(shortened, ShortenedPolicy)
    assert shortened.longest == {"diffusion": 3, "diffusion_tree": 3}
    assert by_name["hazard, batch 4"].baseline == "plain, batch 4"
    assert by_name["hazard, draft_length 2"].baseline == PLAIN


def test_every_variation_says_what_the_policy_says() -> None:
    conditions = chosen(["plain", "static_ar", "static_diffusion", "hazard", "oracle_path"])
    wanted = ablation(sync=["eager", "lazy"], draft_length=[1], block_size=[3], batch=[3])
    everything = [*conditions, *(v.condition for v in variations(wanted, conditions, TIMED))]
    for one in run(everything, questions(3), label=True):
        for place in range(len(one.questions)):
            outputs = {
                tuple(answers[place].generation.output_ids.tolist())
                for answers in one.answers.values()
            }
            assert len(outputs) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_length": [0]}, "draft_length holds 0"),
        ({"block_size": [1]}, "block_size holds 1"),
        ({"batch": [0]}, "batch holds 0"),
    ],
)
def test_a_variation_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ablation(**fields)


def test_another_way_to_follow_has_to_exist() -> None:
    with pytest.raises(TypeCheckError, match="eagre"):
        ablation(sync=["eagre"])
