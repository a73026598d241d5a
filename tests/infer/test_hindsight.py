"""Labels of known answers, and what the best arm would have been worth."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from tests.infer.test_engine import prompt_of
from tests.infer.test_engine_sampling import dice, drafting_trees
from tests.routing.made import cost_model
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.hindsight import label_answer, priced_arms, regrets
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import Policy, RandomPolicy, StaticPolicy
from whiflash_infer.types import DRAFTERS, PLAIN, Generation, Round

PROMPT = prompt_of(9, vocabulary=8)
OPTIONS = GenerationOptions(max_new_tokens=30, stop_ids=frozenset())


def answered(policy: Policy) -> Generation:
    target = dice()
    return RoutedDecoder(target, drafting_trees(target), policy).answer(PROMPT, OPTIONS)


def test_labels_are_what_the_engine_accepts() -> None:
    target, arms = dice(), drafting_trees(dice())
    labels = label_answer(target, arms, PROMPT, answered(StaticPolicy(PLAIN)), 30)
    accepted = 0
    for arm in arms:
        for done in answered(StaticPolicy(arm)).rounds:
            row = done.position - int(labels.positions[0])
            assert min(int(labels.accepted[arm][row]), done.num_draft) == done.accepted
            accepted += done.accepted
    assert accepted > 0


@pytest.mark.parametrize("seed", range(3))
def test_regret_is_that_of_trying_every_arm_and_length(seed: int) -> None:
    target, arms, costs, lam = dice(), drafting_trees(dice()), cost_model(), 0.9
    labels = label_answer(target, arms, PROMPT, answered(StaticPolicy(PLAIN)), 30)
    rounds = answered(RandomPolicy(seed)).rounds
    names = priced_arms(arms, costs)
    found = regrets(labels, names, rounds, costs, lam=lam)
    passes, synced = costs.batches[1], {"ar": 0, "diffusion": 0}
    end = int(labels.positions[-1]) + 1

    def worth(done: Round, arm: str, length: int) -> float:
        row = done.position - int(labels.positions[0])
        label = 0 if arm == PLAIN else int(labels.accepted[arm][row])
        tokens = min(min(label, length) + 1, end - done.position)
        base, slope = passes.verify[0 if arm == PLAIN else costs.nodes[arm][length]]
        seconds = base + slope * done.position + passes.overhead
        if arm != PLAIN:
            pass_, lag = passes.catch_up[DRAFTERS[arm]]
            behind = done.position - synced[DRAFTERS[arm]]
            seconds += passes.draft[arm][length] + pass_ + lag * behind
        return tokens - lam * seconds

    options = [(PLAIN, 0)]
    options += [(a, k) for a, most in costs.max_draft.items() for k in range(1, most + 1)]
    seen = set()
    for done, (regret, best_arm) in zip(rounds, found, strict=True):
        values = {option: worth(done, *option) for option in options}
        taken = (done.arm, done.num_draft) if done.num_draft else (PLAIN, 0)
        assert regret == pytest.approx(max(values.values()) - values[taken])
        best = max(value for (arm, _), value in values.items() if arm == best_arm)
        assert best == pytest.approx(max(values.values()))
        seen.add(best_arm)
        if done.num_draft:
            synced[DRAFTERS[done.arm]] = done.position
    assert len(seen) > 1
    assert min(regret for regret, _ in found) >= 0


def test_regret_of_an_arm_without_a_price_is_not_known() -> None:
    target, arms, costs = dice(), drafting_trees(dice()), cost_model()
    labels = label_answer(target, arms, PROMPT, answered(StaticPolicy(PLAIN)), 30)
    rounds = [done for done in answered(StaticPolicy("ar")).rounds if done.num_draft]
    known = (PLAIN, "diffusion")
    assert all(isnan(regret) for regret, _ in regrets(labels, known, rounds, costs, lam=1.0))
    assert regrets(labels, known, [], costs, lam=1.0) == []
    undrafted = [replace(rounds[0], num_draft=0)]  # decodes as plain does
    ((regret, _),) = regrets(labels, known, undrafted, costs, lam=1.0)
    assert regret >= 0
