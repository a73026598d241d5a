"""Policies that look at nothing, at one number, or once a text, against states made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.features import NUM_SCALARS, SCALARS
from whiflash_infer.routing.policies import (
    BasePolicy,
    CategoryPolicy,
    DeltaPolicy,
    EntropyPolicy,
    PlannedPolicy,
    Policy,
    RandomPolicy,
    RequestPolicy,
    StaticPolicy,
    TextPlan,
)
from whiflash_infer.routing.protocol import Decisions, RoundStates

ARMS = ("plain", "ar", "diffusion")
LONGEST = (0, 4, 7)
NUM_FEATURES = NUM_SCALARS + 3


def states_of(
    num_texts: int,
    *,
    arms: tuple[str, ...] = ARMS,
    texts: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    rooms: Sequence[int] | None = None,
    categories: Sequence[str] | None = None,
) -> RoundStates:
    """rooms: drafts that are still of use, of each text."""
    longest: dict[str, int] = dict(zip(ARMS, LONGEST, strict=True))
    room = np.array(rooms or [99] * num_texts)
    return RoundStates(
        arms=arms,
        texts=np.array(texts or range(num_texts), dtype=int),
        positions=np.array(positions or [20] * num_texts, dtype=int),
        lags=np.zeros((num_texts, len(arms)), dtype=int),
        max_draft=np.minimum([longest[arm] for arm in arms], room[:, None]),
        last_arms=np.full(num_texts, -1),
        categories=categories or [""] * num_texts,
    )


def decided(
    policy: Policy,
    states: RoundStates,
    features: torch.Tensor | None = None,
    memory: np.ndarray | None = None,
) -> Decisions:
    """As the engine asks, beliefs from features included."""
    features = torch.zeros(len(states), NUM_FEATURES) if features is None else features
    memory = np.zeros((len(states), policy.memory_size)) if memory is None else memory
    return policy.decide(policy.read(features).double().numpy(), states, memory)


def chosen(decisions: Decisions, states: RoundStates) -> list[tuple[str, int]]:
    made = [decisions.of(row, states) for row in range(len(states))]
    return [(decision.arm, decision.num_draft) for decision in made]


def features_of(name: str, values: Sequence[float]) -> torch.Tensor:
    features = torch.randn(
        len(values), NUM_FEATURES, generator=torch.Generator().manual_seed(len(values))
    )
    features[:, SCALARS.index(name)] = torch.tensor(values)
    return features


def router() -> RouterNet:
    max_draft = {arm: LONGEST[ARMS.index(arm)] for arm in ARMS[1:]}
    config = RouterConfig(num_features=NUM_FEATURES, width=4, max_draft=max_draft)
    return RouterNet(config).requires_grad_(False)


# --- One arm -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "name", "lengths"),
    [
        ("plain", "plain", [0, 0, 0]),
        ("ar", "static_ar", [4, 2, 0]),
        ("diffusion", "static_diffusion", [7, 2, 0]),
    ],
)
def test_a_static_policy_drafts_all_that_is_of_use(arm: str, name: str, lengths: list[int]) -> None:
    policy, states = StaticPolicy(arm), states_of(3, rooms=[99, 2, 0])
    assert (policy.name, policy.arms) == (name, (arm,))
    decisions = decided(policy, states)
    assert chosen(decisions, states) == [(arm, length) for length in lengths]
    assert np.isnan(decisions.expected).all()
    assert np.isnan(decisions.price).all()


def test_arms_are_found_by_name_in_whichever_order_the_states_have_them() -> None:
    states = states_of(2, arms=("plain", "diffusion", "ar"))
    assert chosen(decided(StaticPolicy("ar"), states), states) == [("ar", 4)] * 2


def test_every_policy_is_one_by_the_protocol() -> None:
    policies: list[BasePolicy] = [
        StaticPolicy("ar"),
        RandomPolicy(0),
        PlannedPolicy("planned", ARMS, {}),
        EntropyPolicy(1.0),
        DeltaPolicy(router(), 0.0),
        RequestPolicy(router()),
        CategoryPolicy({}, "plain"),
    ]
    for policy in policies:
        assert isinstance(policy, Policy)


# --- Random ------------------------------------------------------------------------------------


def test_a_random_decision_depends_on_seed_text_and_position_alone() -> None:
    texts, positions = list(range(30)), list(range(50, 80))
    states = states_of(30, texts=texts, positions=positions)
    policy = RandomPolicy(5)
    first = chosen(decided(policy, states), states)
    assert chosen(decided(policy, states), states) == first
    # Alone, and in another order, each decides as before.
    for row in (0, 13, 29):
        alone = states.of([row])
        assert chosen(decided(RandomPolicy(5), alone), alone) == first[row : row + 1]
    turned = states.of(list(range(29, -1, -1)))
    assert chosen(decided(policy, turned), turned) == first[::-1]
    others = [
        states_of(30, texts=[text + 30 for text in texts], positions=positions),
        states_of(30, texts=texts, positions=[position + 30 for position in positions]),
    ]
    for other in others:
        assert chosen(decided(policy, other), other) != first
    assert chosen(decided(RandomPolicy(6), states), states) != first


def test_all_arms_and_lengths_occur_equally_often_and_none_beyond_what_is_of_use() -> None:
    count = 6000
    states = states_of(count, texts=[7] * count, positions=list(range(1, count + 1)))
    made = chosen(decided(RandomPolicy(0), states), states)
    wanted = {("plain", 0): 1 / 3}
    wanted |= {("ar", length): 1 / 12 for length in range(1, 5)}
    wanted |= {("diffusion", length): 1 / 21 for length in range(1, 8)}
    assert set(made) == set(wanted)
    for pair, share in wanted.items():
        spread = (share * (1 - share) / count) ** 0.5
        assert made.count(pair) / count == pytest.approx(share, abs=5 * spread)


def test_a_random_draft_is_cut_to_what_is_of_use() -> None:
    rooms = [0, 1, 2, 5] * 100
    states = states_of(400, rooms=rooms)
    made = chosen(decided(RandomPolicy(1), states), states)
    for (arm, length), room in zip(made, rooms, strict=True):
        longest = min(LONGEST[ARMS.index(arm)], room)
        assert min(longest, 1) <= length <= longest
    assert {length for _, length in made} == {0, 1, 2, 3, 4, 5}


def test_a_random_policy_keeps_to_the_arms_that_it_is_given() -> None:
    states = states_of(200)
    made = chosen(decided(RandomPolicy(0, ["diffusion", "plain"]), states), states)
    assert {arm for arm, _ in made} == {"plain", "diffusion"}


# --- Planned -----------------------------------------------------------------------------------


def test_a_plan_is_looked_up_by_text_and_position_and_cut_to_what_is_of_use() -> None:
    plans = {
        3: TextPlan(10, arms=np.array([0, 1, 2]), num_draft=np.array([0, 3, 6])),
        8: TextPlan(40, arms=np.array([2, 2]), num_draft=np.array([1, 7])),
    }
    policy = PlannedPolicy("hindsight", ("plain", "diffusion", "ar"), plans)
    assert policy.name == "hindsight"
    states = states_of(
        5, texts=[8, 3, 3, 3, 8], positions=[40, 12, 10, 11, 41], rooms=[9, 9, 9, 2, 9]
    )
    assert chosen(decided(policy, states), states) == [
        ("ar", 1),
        ("ar", 4),  # 6 are planned, and the arm makes 4
        ("plain", 0),
        ("diffusion", 2),
        ("ar", 4),
    ]


# --- By one number -----------------------------------------------------------------------------


def test_the_block_drafter_drafts_where_the_entropy_is_below_the_threshold() -> None:
    policy, states = EntropyPolicy(1.5), states_of(4, rooms=[99, 99, 99, 3])
    features = features_of("entropy", [0.2, 1.5, 4.0, 1.49])
    decisions = decided(policy, states, features)
    assert chosen(decisions, states) == [
        ("diffusion", 7),
        ("ar", 4),
        ("ar", 4),
        ("diffusion", 3),
    ]
    assert [decisions.reasons[0], decisions.reasons[2]] == ["entropy 0.20", "entropy 4.00"]


def test_an_entropy_policy_may_choose_between_other_arms() -> None:
    policy, states = EntropyPolicy(1.0, below="ar", above="plain"), states_of(2)
    assert set(policy.arms) == {"ar", "plain"}
    features = features_of("entropy", [0.5, 2.0])
    assert chosen(decided(policy, states, features), states) == [("ar", 4), ("plain", 0)]


def test_the_block_drafter_drafts_where_it_gains_more_than_the_threshold() -> None:
    net = router()
    *weights, bias = net.difference.parameters()
    for weight in weights:
        nn.init.zeros_(weight)
    states = states_of(3)
    for gain, threshold, wanted in (
        (0.7, 0.5, ("diffusion", 7)),
        (0.7, 0.9, ("ar", 4)),
        (-0.2, -0.3, ("diffusion", 7)),
        (-0.2, 0.0, ("ar", 4)),
    ):
        nn.init.constant_(bias, gain)
        decisions = decided(DeltaPolicy(net, threshold), states)
        assert chosen(decisions, states) == [wanted] * 3
        assert decisions.reasons[0] == f"predicts {gain:+.2f} tokens"


# --- Once a text -------------------------------------------------------------------------------


def test_a_request_policy_keeps_the_arm_that_the_prompt_predicts_to_be_the_fastest() -> None:
    net = router()
    # Predicted log seconds a token: of plain 0, of ar the first hidden number, of diffusion the
    # second one.
    net.paces.zero_()
    net.paces[1, NUM_SCALARS] = 1.0
    net.paces[2, NUM_SCALARS + 1] = 1.0
    policy, states = RequestPolicy(net), states_of(3, rooms=[99, 99, 2])
    assert policy.memory_size == 1
    features = torch.zeros(3, NUM_FEATURES)
    features[:, NUM_SCALARS:][:, :2] = torch.tensor([[0.5, 0.2], [-0.3, -0.1], [0.4, -2.0]])
    memory = np.zeros((3, 1))
    first = decided(policy, states, features, memory)
    assert chosen(first, states) == [("plain", 0), ("ar", 4), ("diffusion", 2)]
    # Later anchors predict otherwise, which changes nothing but for a text that is new.
    features[:, NUM_SCALARS:][:, :2] = torch.tensor([-1.0, -3.0])
    memory[0] = 0.0
    later = states_of(3, positions=[30, 31, 32])
    again = decided(policy, later, features, memory)
    assert [arm for arm, _ in chosen(again, later)] == ["diffusion", "ar", "diffusion"]


def test_a_category_policy_uses_the_categorys_arm_and_another_for_kinds_it_does_not_know() -> None:
    policy = CategoryPolicy({"code": "diffusion", "chat": "ar"}, "plain")
    assert set(policy.arms) == set(ARMS)
    states = states_of(4, categories=["chat", "code", "poems", ""], rooms=[99, 5, 99, 99])
    decisions = decided(policy, states)
    assert chosen(decisions, states) == [("ar", 4), ("diffusion", 5), ("plain", 0), ("plain", 0)]
    assert list(decisions.reasons) == ["chat", "code", "poems", "no category"]


# --- States ------------------------------------------------------------------------------------


def test_some_of_the_states_are_those_of_the_named_rows_in_their_order() -> None:
    states = states_of(
        3, texts=[4, 5, 6], positions=[7, 8, 9], rooms=[1, 2, 3], categories=["a", "b", "c"]
    )
    part = states.of([2, 0])
    assert len(part) == 2
    assert part.arms == ARMS
    assert part.texts.tolist() == [6, 4]
    assert part.positions.tolist() == [9, 7]
    assert part.max_draft.tolist() == [[0, 3, 3], [0, 1, 1]]
    assert list(part.categories) == ["c", "a"]
    assert part.prices is None
