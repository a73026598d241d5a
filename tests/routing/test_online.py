"""Policies that learn within a text, without training."""

from __future__ import annotations

import numpy as np
import pytest

from tests.routing.test_replay import costs
from tests.routing.worlds import plain_costs, two_regimes
from whiflash_infer.routing.oracles import hedge_of
from whiflash_infer.routing.policies import BanditPolicy, StaticPolicy
from whiflash_infer.routing.protocol import Outcomes, RoundStates
from whiflash_infer.routing.replay import replay, stack_texts

ARMS = ("plain", "ar", "diffusion")
ONE = {"chat": (1.0, 0.0, 0.0)}  # regime 0 alone, in which the AR chain is the best arm


def state(position: int = 10) -> RoundStates:
    return RoundStates(
        ARMS,
        np.array([0]),
        np.array([position]),
        np.array([[0, 1, 1]]),
        np.array([[0, 2, 3]]),
        np.array([-1]),
        [""],
    )


def play(policy: BanditPolicy, memory: np.ndarray, committed: dict[int, int]) -> int:
    """One round; how many tokens each arm would commit."""
    decisions = policy.decide(np.zeros((1, 0)), state(), memory)
    arm = int(decisions.arms[0])
    tokens = np.array([committed[arm]])
    outcome = Outcomes(tokens - 1, tokens, np.array([9.9]), [False])
    policy.observe(np.zeros((1, 0)), state(), decisions, outcome, memory)
    return arm


def test_a_bandit_tries_every_arm_once_and_then_takes_the_greatest_upper_bound() -> None:
    policy = BanditPolicy(ARMS, costs(), lam=0.5, explore=0.4)
    memory = np.zeros((1, policy.memory_size))
    tokens = {0: 1, 1: 3, 2: 2}
    assert sorted(play(policy, memory, tokens) for _ in range(3)) == [0, 1, 2]
    # Seconds at full length: plain 1.15, AR 1.35 + 0.4 + 0.01, block 1.45 + 0.3 + 0.02
    rewards = {0: 1 - 0.5 * 1.15, 1: 3 - 0.5 * 1.76, 2: 2 - 0.5 * 1.77}
    uses = dict.fromkeys(tokens, 1)
    for rounds in range(3, 40):
        bounds = {
            arm: rewards[arm] + 0.4 * np.sqrt(2 * np.log(rounds) / uses[arm]) for arm in tokens
        }
        best = max(bounds, key=lambda arm: bounds[arm])
        assert play(policy, memory, tokens) == best
        uses[best] += 1
    assert uses[1] > 25


def test_learners_come_close_to_the_best_arm_of_a_text_that_never_changes() -> None:
    world, model = two_regimes(30, 400, 2, shares=ONE), plain_costs()
    texts = stack_texts(world.texts, ARMS)
    best = replay(StaticPolicy("ar"), texts, model).tokens_per_s
    bandit = replay(BanditPolicy(ARMS, model, lam=best), texts, model)
    hedge = replay(hedge_of(texts, model, best), texts, model)
    assert 0.85 * best < bandit.tokens_per_s < best
    assert 0.9 * best < hedge.tokens_per_s <= best


def test_hedge_weighs_arms_by_what_each_would_have_gained_so_far() -> None:
    world, model = two_regimes(1, 60, 5), plain_costs()
    texts = stack_texts(world.texts, ARMS)
    policy = hedge_of(texts, model, 1.0)
    memory = np.zeros((1, 3))
    found = replay(StaticPolicy("plain"), texts, model)
    for position in found.position.tolist():
        now = RoundStates(
            ARMS,
            np.array([0]),
            np.array([position]),
            np.ones((1, 3), int),
            np.array([[0, 4, 7]]),
            np.array([-1]),
            [""],
        )
        decisions = policy.decide(np.zeros((1, 0)), now, memory)
        nothing = np.array([0])
        outcome = Outcomes(nothing, nothing + 1, np.array([1.0]), [False])
        policy.observe(np.zeros((1, 0)), now, decisions, outcome, memory)
    accepted = texts.accepted.sum(0)
    seconds = np.array([1.1, 1.75, 1.8])
    assert memory[0] == pytest.approx(60 + accepted - 60 * 1.0 * seconds)
