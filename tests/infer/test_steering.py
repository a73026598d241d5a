"""Who chooses the arms of a text, and what a policy is told of it: the answer is always plain's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from tests.infer.test_engine import (
    ARMS,
    NO_STOPS,
    ScriptedChain,
    huggingface_greedy,
    prompt_of,
    scripted,
    texts_of,
)
from tests.infer.test_engine_properties import target_of
from whiflash_infer.drafters.base import Arm, Drafts
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.features import NUM_SCALARS, SCALARS
from whiflash_infer.routing.policies import (
    BasePolicy,
    CategoryPolicy,
    HazardPolicy,
    HazardSettings,
    StaticPolicy,
)
from whiflash_infer.routing.policies.base import full_length
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import Generation

PROMPTS = [prompt_of(length, vocabulary=64) for length in (3, 37, 1, 12, 5)]
LIMITS = [14, 5, 11, 2, 9]  # texts leave at different times, and others take their rows


@pytest.fixture(scope="module")
def small() -> Target:
    return target_of(64)


@pytest.fixture(scope="module")
def expected(small: Target) -> list[list[int]]:
    texts = [huggingface_greedy(small, prompt, max(LIMITS)) for prompt in PROMPTS]
    return [text[:limit] for text, limit in zip(texts, LIMITS, strict=True)]


@pytest.fixture
def known(small: Target) -> list[list[int]]:
    return [prompt + huggingface_greedy(small, prompt, max(LIMITS)) for prompt in PROMPTS]


@pytest.fixture
def arms(known: list[list[int]]) -> dict[str, Arm]:
    """Every accepted length occurs."""
    return scripted(known, error_rate=0.3, vocabulary=64)


def asked(**options: Sequence[Any]) -> list[GenerationOptions]:
    """Each text's length, and its own of these options."""
    return [
        GenerationOptions(
            max_new_tokens=limit,
            stop_ids=NO_STOPS,
            **{name: values[text] for name, values in options.items()},
        )
        for text, limit in enumerate(LIMITS)
    ]


def arms_of_rounds(result: Generation) -> set[str]:
    return {done.arm for done in result.rounds}


def fallbacks_of(results: Sequence[Generation]) -> list[dict[str, int]]:
    return [dict(result.fallbacks) for result in results]


class Watching(BasePolicy):
    """Drafts with `ar`, and keeps what it is told: of each text, a state a round."""

    name = "watching"
    arms = ("ar",)

    def __init__(self) -> None:
        self.seen: dict[int, list[dict[str, Any]]] = {}

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        for row, text in enumerate(states.texts.tolist()):
            state = {
                "position": int(states.positions[row]),
                "category": states.categories[row],
                "price": nan if states.prices is None else float(states.prices[row]),
            }
            self.seen.setdefault(text, []).append(state)
        return full_length(np.repeat(self.columns(states), len(states)), states, "watching")


# --- What a request asks for -------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_a_request_that_names_its_arm_uses_it_in_every_round(
    max_rows: int, small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    policy = Watching()
    decoder = RoutedDecoder(small, arms, policy)
    wanted = ["diffusion", None, "ar_tree", "plain", None]
    results = decoder.generate(PROMPTS, asked(arm=wanted), max_rows=max_rows)
    assert texts_of(results) == expected
    for result, arm in zip(results, wanted, strict=True):
        assert arms_of_rounds(result) == {arm or "ar"}
        assert {r.reason for r in result.rounds} == {"watching" if arm is None else "asked for"}
        assert all(r.num_draft > 0 for r in result.rounds[:-1] if arm != "plain")
    assert policy.seen.keys() == {1, 4}  # nobody asks it about the others
    assert fallbacks_of(results) == [{}] * 5


@pytest.mark.parametrize("arm", ARMS)
def test_a_named_arm_needs_nothing_of_a_policy_that_fails(
    arm: str, small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    decoder = RoutedDecoder(small, arms, Unreadable())
    results = decoder.generate(PROMPTS, asked(arm=[arm] * 5), max_rows=3)
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{}] * 5
    assert {r.arm for result in results for r in result.rounds} == {arm}


class Unreadable(Watching):
    needs_features = True

    def read(self, features: Tensor) -> Tensor:
        raise ValueError("cannot read")


class RaisingArm(ScriptedChain):
    def draft(self, *arguments: Any, **options: Any) -> Drafts:
        raise ValueError("cannot draft")


def test_a_named_arm_that_fails_is_replaced_by_the_safe_one(
    small: Target, arms: dict[str, Arm], known: list[list[int]], expected: list[list[int]]
) -> None:
    arms["ar"] = RaisingArm(known, vocabulary=64)
    settings = EngineSettings(safe_arm="diffusion")
    decoder = RoutedDecoder(small, arms, StaticPolicy("diffusion_tree"), settings)
    results = decoder.generate(PROMPTS, asked(arm=["ar", None, None, None, None]))
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{"ar drafter": 1}, {}, {}, {}, {}]
    assert {r.arm for r in results[0].rounds[1:]} == {"diffusion"}
    assert arms_of_rounds(results[1]) == {"diffusion_tree"}


def test_an_arm_that_is_not_there_is_refused_by_name(small: Target, arms: dict[str, Arm]) -> None:
    decoder = RoutedDecoder(small, {"ar": arms["ar"]}, Watching())
    with pytest.raises(UserError, match=r"arm is 'diffusion': choose from plain, ar$"):
        decoder.answer(PROMPTS[0], GenerationOptions(max_new_tokens=5, arm="diffusion"))
    with pytest.raises(UserError, match=r"prompt 2: arm is 'oracle': choose from plain, ar$"):
        decoder.generate(PROMPTS, asked(arm=["ar", None, "oracle", "plain", None]))


def test_prices_and_categories_of_requests_reach_the_policy_with_their_texts(
    small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    policy = Watching()
    prices, kinds = [3.0, nan, 0.0, 8.5, nan], ["code", "", "prose", "code", "a b"]
    options = asked(price=prices, category=kinds)
    results = RoutedDecoder(small, arms, policy).generate(PROMPTS, options, max_rows=2)
    assert texts_of(results) == expected
    for text, (price, kind) in enumerate(zip(prices, kinds, strict=True)):
        states = policy.seen[text]
        assert [s["position"] for s in states] == [r.position for r in results[text].rounds]
        assert {s["category"] for s in states} == {kind}
        assert np.array_equal([s["price"] for s in states], [price] * len(states), equal_nan=True)


def test_a_category_chooses_the_arm_of_the_category_policy(
    small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    decoder = RoutedDecoder(small, arms, CategoryPolicy({"code": "diffusion"}, "ar_tree"))
    kinds = ["code", "", "prose", "code", ""]
    results = decoder.generate(PROMPTS, asked(category=kinds), max_rows=3)
    assert texts_of(results) == expected
    for result, kind in zip(results, kinds, strict=True):
        assert arms_of_rounds(result) == {"diffusion" if kind == "code" else "ar_tree"}


def hazard_policy(target: Target, max_draft: int, *, lam: float) -> HazardPolicy:
    """Whatever it sees, every draft is accepted with probability 1/2. A round takes 1 s, and 0.1 s
    more for each draft."""
    num_features = NUM_SCALARS + target.config.hidden_size
    net = RouterNet(RouterConfig(num_features=num_features, width=8, max_draft={"ar": max_draft}))
    for parameter in net.hazards.parameters():
        nn.init.zeros_(parameter)  # a hazard of 1/2
    prices = PassCosts(
        verify=[(0.9 + 0.1 * drafts, 0.0) for drafts in range(max_draft + 1)],
        draft={"ar": [0.0] * (max_draft + 1)},
        catch_up={"ar": (0.0, 0.0)},
        overhead=0.1,
    )
    costs = CostModel(
        device=DeviceIdentity(device="abacus", threads=1, dtype="float32"),
        target=target.name,
        nodes={"ar": list(range(max_draft + 1))},
        batches={1: prices},
    )
    return HazardPolicy(net, costs, HazardSettings(lam=lam))


@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_price_of_nothing_drafts_all_there_is_and_a_huge_one_nothing(
    max_rows: int, small: Target, known: list[list[int]]
) -> None:
    """The k-th draft is worth 1/2 ** k tokens, and costs 0.1 s: at 1 token a second three pay."""
    arm = ScriptedChain(known, max_draft=6, error_rate=0.5, vocabulary=64)
    decoder = RoutedDecoder(small, {"ar": arm}, hazard_policy(small, 6, lam=1.0))
    results = decoder.generate(
        PROMPTS[:3],
        [GenerationOptions(max_new_tokens=14, price=price) for price in (nan, 0.0, 1e6)],
        max_rows=max_rows,
    )
    assert texts_of(results) == [huggingface_greedy(small, prompt, 14) for prompt in PROMPTS[:3]]
    own, nothing, huge = results
    for result, most in ((own, 3), (nothing, 6), (huge, 0)):
        ends = len(PROMPTS[results.index(result)]) + 14
        rooms = [ends - r.position - 2 for r in result.rounds]
        assert [r.num_draft for r in result.rounds] == [min(most, room) for room in rooms]
    assert arms_of_rounds(huge) == {"plain"}
    assert (own.rounds[0].price, own.rounds[0].expected) == pytest.approx((1.0, 1.875))
    assert (nothing.rounds[0].price, nothing.rounds[0].expected) == pytest.approx((0, 1 + 63 / 64))
    assert {(r.price, r.expected) for r in huge.rounds} == {(1e6, 1.0)}


# --- What a round records ----------------------------------------------------------------------


class Opinionated(Watching):
    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        made = super().decide(beliefs, states, memory)
        positions = states.positions.astype(float)
        return Decisions(made.arms, made.num_draft, positions / 2, positions * 3, made.reasons)


def test_a_round_records_what_the_policy_expected_and_at_which_price(
    small: Target, arms: dict[str, Arm]
) -> None:
    wanted = asked(arm=[None, None, "ar", None, None])
    results = RoutedDecoder(small, arms, Opinionated()).generate(PROMPTS, wanted, max_rows=3)
    for result in (results[0], results[1], results[3], results[4]):
        assert [r.expected for r in result.rounds] == [r.position / 2 for r in result.rounds]
        assert [r.price for r in result.rounds] == [3 * r.position for r in result.rounds]
    static = RoutedDecoder(small, arms, StaticPolicy("ar")).generate(PROMPTS, asked())
    for r in (*results[2].rounds, *(r for result in static for r in result.rounds)):
        assert isnan(r.expected)
        assert isnan(r.price)


# --- What a policy remembers and is told -------------------------------------------------------


class Counting(Watching):
    """Counts in memory how often it has decided and observed, and checks what it reads."""

    needs_features = True
    memory_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, list[list[float]]] = {}
        self.told: dict[int, list[tuple[int, int, bool]]] = {}
        self.seconds: list[float] = []

    def read(self, features: Tensor) -> Tensor:
        return features[:, SCALARS.index("log_position") :][:, :1]

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        assert np.expm1(beliefs[:, 0]) == pytest.approx(states.positions, rel=1e-4)
        for text, remembered in zip(states.texts.tolist(), memory.tolist(), strict=True):
            self.counts.setdefault(text, []).append(remembered)
        memory[:, 0] += 1
        return super().decide(beliefs, states, memory)

    def observe(
        self,
        beliefs: np.ndarray,
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: np.ndarray,
    ) -> None:
        assert np.expm1(beliefs[:, 0]) == pytest.approx(states.positions, rel=1e-4)
        assert (decisions.arms == states.arms.index("ar")).all()
        assert len(set(outcomes.seconds.tolist())) == 1  # an equal share each
        memory[:, 1] += 1
        self.seconds += outcomes.seconds.tolist()
        accepted, committed = outcomes.accepted.tolist(), outcomes.committed.tolist()
        ended = np.asarray(outcomes.ended).tolist()
        for text, *told in zip(states.texts.tolist(), accepted, committed, ended, strict=True):
            self.told.setdefault(text, []).append((told[0], told[1], told[2]))


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5])
def test_memory_and_beliefs_follow_their_texts_when_rows_leave_and_others_take_their_places(
    max_rows: int, small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    policy = Counting()
    decoder = RoutedDecoder(small, arms, policy)
    started = time.perf_counter()
    results = decoder.generate(PROMPTS, asked(), max_rows=max_rows)
    seconds = time.perf_counter() - started
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{}] * 5
    for text, result in enumerate(results):
        rounds = result.rounds
        assert policy.counts[text] == [[count, count] for count in range(len(rounds))]
        wanted = [(r.accepted, r.committed, r is rounds[-1]) for r in rounds]
        assert policy.told[text] == wanted
    assert min(policy.seconds) > 0
    assert sum(policy.seconds) < seconds


def test_a_second_call_starts_with_an_empty_memory(small: Target, arms: dict[str, Arm]) -> None:
    policy = Counting()
    decoder = RoutedDecoder(small, arms, policy)
    rounds = [len(decoder.answer(PROMPTS[0], asked()[0]).rounds) for _ in range(2)]
    assert policy.counts[0] == [[count, count] for part in rounds for count in range(part)]


def test_nothing_is_observed_of_texts_that_name_their_arm(
    small: Target, arms: dict[str, Arm]
) -> None:
    policy = Counting()
    wanted = asked(arm=["ar", None, "plain", "ar", None])
    results = RoutedDecoder(small, arms, policy).generate(PROMPTS, wanted, max_rows=3)
    assert {text: len(told) for text, told in policy.told.items()} == {
        text: len(results[text].rounds) for text in (1, 4)
    }


# --- A policy that fails -----------------------------------------------------------------------


class FailingFor(Counting):
    """Fails in one text, from a position on. fault: in deciding, or with an arm that is none."""

    def __init__(self, fault: str, text: int, position: int) -> None:
        super().__init__()
        self.fault, self.text, self.position = fault, text, position

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        hit = (states.texts == self.text) & (states.positions >= self.position)
        if self.fault == "raises" and hit.any():
            raise ValueError("cannot decide for this one")
        made = super().decide(beliefs, states, memory)
        none = {"behind the last": len(states.arms), "before the first": -1}.get(self.fault, 0)
        wrong = Decisions(
            np.where(hit, none, made.arms),
            np.where(hit, 0, made.num_draft),
            made.expected,
            made.price,
            made.reasons,
        )
        longer = np.where(hit, made.num_draft + 1, made.num_draft)
        too_long = Decisions(made.arms, longer, made.expected, made.price, made.reasons)
        return too_long if self.fault == "too long" else wrong


@pytest.mark.parametrize("max_rows", [1, 3, 5])
@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("fault", ["raises", "behind the last", "before the first", "too long"])
def test_a_policy_that_fails_in_one_text_goes_on_steering_the_others(
    fault: str,
    after: int,
    max_rows: int,
    small: Target,
    arms: dict[str, Arm],
    expected: list[list[int]],
) -> None:
    victim, position = 2, len(PROMPTS[2]) + after
    policy = FailingFor(fault, victim, position)
    decoder = RoutedDecoder(small, arms, policy, EngineSettings(safe_arm="diffusion"))
    results = decoder.generate(PROMPTS, asked(), max_rows=max_rows)
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{}, {}, {"router": 1}, {}, {}]
    for r in results[victim].rounds:
        assert r.arm == ("ar" if r.position < position else "diffusion")
        assert r.reason == ("watching" if r.position < position else "the router failed")
    for text in (0, 1, 3, 4):
        assert arms_of_rounds(results[text]) == {"ar"}
        assert len(policy.told[text]) == len(results[text].rounds)


@pytest.mark.parametrize("fault", ["raises", "behind the last"])
def test_texts_whose_policy_is_asked_again_for_anothers_failure_remember_the_round_once(
    fault: str, small: Target, arms: dict[str, Arm]
) -> None:
    policy = FailingFor(fault, 2, len(PROMPTS[2]) + 4)
    results = RoutedDecoder(small, arms, policy).generate(PROMPTS, asked(), max_rows=5)
    for text in (0, 1, 3, 4):
        # A round that was asked about twice shows the same memory twice.
        counts = list(dict.fromkeys(map(tuple, policy.counts[text])))
        assert counts == [(count, count) for count in range(len(results[text].rounds))]


class Unobservant(Counting):
    def observe(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("cannot observe")


@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_policy_that_cannot_observe_is_not_asked_again(
    max_rows: int, small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    decoder = RoutedDecoder(small, arms, Unobservant(), EngineSettings(safe_arm="diffusion_tree"))
    results = decoder.generate(PROMPTS, asked(), max_rows=max_rows)
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{"router": 1}] * 5
    for result in results:
        assert result.rounds[0].arm == "ar"
        assert {r.arm for r in result.rounds[1:]} <= {"diffusion_tree"}
    assert len(results[0].rounds) > 1


class Forgetful(Watching):
    """Remembers nothing, so nobody tells it what came of its rounds."""

    def observe(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("cannot observe")


def test_a_policy_without_memory_is_not_told_of_outcomes(
    small: Target, arms: dict[str, Arm], expected: list[list[int]]
) -> None:
    results = RoutedDecoder(small, arms, Forgetful()).generate(PROMPTS, asked())
    assert texts_of(results) == expected
    assert fallbacks_of(results) == [{}] * 5
