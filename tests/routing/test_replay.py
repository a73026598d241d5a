"""Replay against drawings and a walk written out round by round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.worlds import plain_costs, two_regimes
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.policies import BasePolicy, RandomPolicy, StaticPolicy
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates
from whiflash_infer.routing.replay import DenseTexts, replay, stack_texts
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, DRAFTERS, PLAIN

ARMS = (PLAIN, AR, DIFFUSION)


def costs(*, per_context: float = 0.0, lag: float = 0.0) -> CostModel:
    """Verification of w tokens takes 1 + w / 10 s; AR 0.2 s a token, a block 0.3 s, an AR tree of
    three nodes 0.5 s."""
    return CostModel(
        device=DeviceIdentity(device="abacus", threads=1, dtype="float32"),
        target="t",
        nodes={"ar": [0, 1, 2], "ar_tree": [0, 3, 3], "diffusion": [0, 1, 2, 3]},
        batches={
            1: PassCosts(
                verify=[(1.0 + w / 10, per_context) for w in range(1, 5)],
                draft={
                    "ar": [0.0, 0.2, 0.4],
                    "ar_tree": [0.0, 0.5, 0.5],
                    "diffusion": [0.0, 0.3, 0.3, 0.3],
                },
                catch_up={"ar": (0.01, lag), "diffusion": (0.02, lag)},
                overhead=0.05,
            )
        },
    )


def conversation(
    labels: dict[str, list[int]], *, start: int = 10, limit: int | None = None
) -> ConversationRounds:
    length = len(next(iter(labels.values())))
    return ConversationRounds(
        conversation="c",
        category="chat",
        split="validation",
        positions=np.arange(start, start + length),
        features=torch.zeros(length, 6),
        accepted={arm: np.array(found) for arm, found in labels.items()},
        censored={arm: np.zeros(length, bool) for arm in labels},
        near_tie=np.zeros(length, bool),
        greedy=np.ones(length, bool),
        limit=limit,
    )


class Script(BasePolicy):
    """Arms and draft lengths by position."""

    name = "script"
    arms = ARMS

    def __init__(self, choices: dict[int, tuple[str, int]]) -> None:
        self.choices = choices

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        chosen = [self.choices[position] for position in states.positions.tolist()]
        unknown = np.full(len(states), np.nan)
        arms = np.array([states.arms.index(arm) for arm, _ in chosen])
        return Decisions(
            arms, np.array([k for _, k in chosen]), unknown, unknown, [""] * len(chosen)
        )


def one_text(labels: dict[str, list[int]], arms: Sequence[str] = ARMS, **more: int) -> DenseTexts:
    return stack_texts([conversation(labels, **more)], arms)


def test_a_replayed_static_arm_visits_the_positions_drawn_by_hand() -> None:
    # position   10 11 12 13 14 15: AR commits 3 (10-12), then 1 (13), then 2 (14, 15)
    texts = one_text({"ar": [2, 0, 0, 0, 1, 0], "diffusion": [0] * 6})
    result = replay(StaticPolicy("ar"), texts, costs())
    assert (result.tokens, result.rounds, result.switches, result.tau) == (6, 3, 0, 2.0)
    assert result.position.tolist() == [10, 13, 14]
    assert result.committed.tolist() == [3, 1, 2]
    per_round = (1.3 + 0.05) + 0.4 + 0.01
    assert result.total_seconds == pytest.approx(3 * per_round)
    assert result.by_text() == pytest.approx(np.array([[6, 3 * per_round]]))


def test_the_last_round_commits_only_what_is_left_of_the_text() -> None:
    result = replay(StaticPolicy("diffusion"), one_text({"ar": [0], "diffusion": [3]}), costs())
    assert (result.tokens, result.rounds) == (1, 1)


def test_lags_and_switches_are_priced_as_they_arise() -> None:
    texts = one_text({"ar": [0] * 4, "diffusion": [0] * 4})
    choices = {10: (AR, 1), 11: (PLAIN, 0), 12: (DIFFUSION, 1), 13: (AR, 1)}
    result = replay(Script(choices), texts, costs(lag=1.0))
    # ar at 10 (lag 10), plain at 11, diffusion at 12 (lag 12), ar at 13 (lag 3)
    fixed = [1.2 + 0.2 + 0.01, 1.1, 1.2 + 0.3 + 0.02, 1.2 + 0.2 + 0.01]
    assert result.lag.tolist() == [10, 0, 12, 3]
    assert result.total_seconds == pytest.approx(sum(fixed) + 4 * 0.05 + 10 + 12 + 3)
    assert result.switches == 3
    assert result.arm_shares == {PLAIN: 0.25, AR: 0.5, DIFFUSION: 0.25}


def test_a_tree_and_a_chain_of_one_drafter_share_its_lag() -> None:
    arms = (PLAIN, AR, AR_TREE)
    texts = one_text({"ar": [1, 0, 0, 0], "ar_tree": [0, 0, 2, 0]}, arms)
    result = replay(Script({10: (AR, 2), 12: (AR_TREE, 2)}), texts, costs(lag=1.0))
    assert result.lag.tolist() == [10, 2]
    seconds = [(1.3 + 0.05) + 0.4 + 0.01 + 10, (1.4 + 0.05) + 0.5 + 0.01 + 2]
    assert result.seconds.tolist() == pytest.approx(seconds)


def test_drafts_beyond_the_limit_of_the_text_are_not_made() -> None:
    # The text ends at 15 tokens because it may not be longer: at 10 (11 tokens) there is room for
    # 3 drafts and one more token, at 12 (13 tokens) for one, and at 13 for none: it is plain then.
    texts = one_text({"ar": [1, 0, 0, 0], "diffusion": [1, 0, 0, 0]}, limit=15)
    result = replay(StaticPolicy("diffusion"), texts, costs())
    assert result.num_draft.tolist() == [3, 1, 0]
    plain = 1.1 + 0.05
    assert result.seconds[-1] == pytest.approx(plain)


@pytest.mark.parametrize("num_texts", [1, 4])
def test_texts_that_advance_together_are_each_what_they_are_alone(num_texts: int) -> None:
    world = two_regimes(5, 40, 3, limited=True)
    policy, model = RandomPolicy(5), plain_costs(per_lag=0.01, batches=(1, 4))
    together = replay(policy, stack_texts(world.texts, ARMS), model, num_texts=num_texts)
    for number in range(5):
        # Numbers of texts feed the random policy, so the others stay, without their rounds.
        alone = together.of([number])
        assert alone.text.tolist() == [number] * alone.rounds
        assert alone.tokens == 40
    assert together.by_text()[:, 0].tolist() == [40.0] * 5
    assert sum(together.of([n]).total_seconds for n in range(5)) == pytest.approx(
        together.total_seconds
    )


class Remembering(RandomPolicy):
    """Random, and writes down what it is told of every round of a text."""

    memory_size = 3

    def observe(
        self,
        beliefs: np.ndarray,
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: np.ndarray,
    ) -> None:
        memory[:, 0] += 1
        memory[:, 1] += outcomes.committed
        memory[:, 2] += outcomes.seconds
        if np.any(outcomes.ended):
            self.ends.update(
                {
                    t: m
                    for t, m, e in zip(
                        states.texts.tolist(), memory.tolist(), outcomes.ended, strict=True
                    )
                    if e
                }
            )

    ends: dict[int, list[float]]


def test_a_policy_remembers_each_text_by_itself() -> None:
    world = two_regimes(4, 30, 1)
    policy = Remembering(2)
    policy.ends = {}
    found = replay(policy, stack_texts(world.texts, ARMS), plain_costs())
    for text in range(4):
        part = found.of([text])
        expected = [part.rounds, part.tokens, part.total_seconds]
        assert policy.ends[text] == pytest.approx(expected)


def walked(
    policy: RandomPolicy,
    text: ConversationRounds,
    number: int,
    arms: tuple[str, ...],
    model: CostModel,
) -> list[tuple]:
    """One text, one round after the other, from the definitions."""
    synced: dict[str, int] = {}
    last, index, rounds = -1, 0, []
    costs = model.batches[1]
    while index < len(text):
        position = int(text.positions[index])
        lags = [0, *(position - synced.get(DRAFTERS[arm], 0) for arm in arms[1:])]
        room = 10**9 if text.limit is None else text.limit - position - 2
        longest = [0, *(min(model.max_draft[arm], room) for arm in arms[1:])]
        states = RoundStates(
            arms,
            np.array([number]),
            np.array([position]),
            np.array([lags]),
            np.array([longest]),
            np.array([last]),
            [text.category],
        )
        decisions = policy.decide(np.zeros((1, 0)), states, np.zeros((1, 0)))
        choice, length = int(decisions.arms[0]), int(decisions.num_draft[0])
        arm = arms[choice] if length else PLAIN
        nodes = 0 if arm == PLAIN else model.nodes[arm][length]
        base, slope = costs.verify[nodes]
        seconds = base + slope * position + costs.overhead
        accepted = 0
        if arm != PLAIN:
            per_pass, per_token = costs.catch_up[DRAFTERS[arm]]
            seconds += costs.draft[arm][length] + per_pass + per_token * lags[choice]
            accepted = min(int(text.accepted[arm][index]), length)
            synced[DRAFTERS[arm]] = position
        committed = min(accepted + 1, len(text) - index)
        rounds.append((position, choice, length, accepted, committed, pytest.approx(seconds)))
        index, last = index + committed, choice
    return rounds


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    arms=st.sets(st.sampled_from([AR, AR_TREE, DIFFUSION, DIFFUSION_TREE]), min_size=1),
    limited=st.booleans(),
    per_lag=st.sampled_from([0.0, 0.02]),
)
def test_replay_is_the_walk_that_its_definition_describes(
    seed: int, arms: set[str], limited: bool, per_lag: float
) -> None:
    names = sorted(arms)
    world = two_regimes(3, 25, seed, arms=names, limited=limited)
    model = plain_costs(arms=names, per_context=0.003, per_lag=per_lag)
    all_arms = (PLAIN, *names)
    found = replay(RandomPolicy(seed), stack_texts(world.texts, all_arms), model)
    for number, text in enumerate(world.texts):
        part = found.of([number])
        columns = (
            part.position,
            part.arm,
            part.num_draft,
            part.accepted,
            part.committed,
            part.seconds,
        )
        mine = list(zip(*(column.tolist() for column in columns), strict=True))
        assert mine == walked(RandomPolicy(seed), text, number, all_arms, model)
