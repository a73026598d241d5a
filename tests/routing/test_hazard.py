"""The hazard policy against enumeration and hand calculation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.routing.test_replay import costs
from whiflash_infer.nets.router import (
    RouterConfig,
    RouterNet,
    brier_loss,
    cumulative_hazards,
    delta_loss,
    expected_tokens,
    hazard_loss,
)
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.policies import HazardPolicy, HazardSettings
from whiflash_infer.routing.policies.drift import DriftAlarm
from whiflash_infer.routing.policies.hazard import exposures
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates

MAX_DRAFT = {"ar": 2, "diffusion": 3}
HAZARDS = {"ar": [0.1, 0.3, 0.0], "diffusion": [0.2, 0.1, 0.1]}
ARMS = ("plain", "ar", "ar_tree", "diffusion")  # of the engine; the router knows three of them


def policy(lam: float = 0.8, *, lag: float = 0.0, **settings: Any) -> HazardPolicy:
    net = RouterNet(RouterConfig(num_features=6, width=2, max_draft=MAX_DRAFT))
    return HazardPolicy(net, costs(lag=lag), HazardSettings(lam=lam, **settings))


def beliefs(hazards: dict[str, list[float]] = HAZARDS) -> np.ndarray:
    return -np.log1p(-np.array([hazards["ar"], hazards["diffusion"]])).cumsum(1).reshape(1, -1)


def state(**changes: Any) -> RoundStates:
    fields = {
        "texts": np.array([0]),
        "positions": np.array([10]),
        "lags": np.array([[0, 1, 1, 1]]),
        "max_draft": np.array([[0, 2, 2, 3]]),
        "last_arms": np.array([-1]),
        "categories": [""],
    }
    return RoundStates(ARMS, **{**fields, **changes})


def blank(of: HazardPolicy, rows: int = 1) -> np.ndarray:
    return np.zeros((rows, of.memory_size))


def chosen(decisions: Decisions, row: int = 0) -> tuple[str, int]:
    return ARMS[decisions.arms[row]], int(decisions.num_draft[row])


def survival(arm: str, length: int) -> float:
    return float(np.prod([1 - h for h in HAZARDS[arm][:length]]))


def values(lam: float, *, lag: float = 0.0) -> dict[tuple[str, int], float]:
    """Of every arm and draft length, from the definitions."""
    found = {("plain", 0): 1.0 - lam * (1.1 + 0.05)}
    for arm, longest in MAX_DRAFT.items():
        for k in range(1, longest + 1):
            drafting = {"ar": 0.2 * k, "diffusion": 0.3}[arm]
            catch_up = {"ar": 0.01, "diffusion": 0.02}[arm] + lag
            seconds = 1.1 + k / 10 + 0.05 + drafting + catch_up
            expected = 1 + sum(survival(arm, j) for j in range(1, k + 1))
            found[arm, k] = expected - lam * seconds
    return found


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.5, 3.0])
def test_the_best_arm_and_length_are_those_of_enumeration(lam: float) -> None:
    decisions = policy(lam, lag=0.03).decide(beliefs(), state(), blank(policy()))
    options = values(lam, lag=0.03)
    best = max(options, key=lambda option: options[option])
    assert chosen(decisions) == best
    arm, length = best
    expected = 1 + sum(survival(arm, j) for j in range(1, length + 1))
    assert float(decisions.expected[0]) == pytest.approx(expected)
    assert decisions.price.tolist() == [lam]


def test_at_no_price_most_tokens_win_and_at_a_huge_one_the_shortest_round() -> None:
    assert chosen(policy(0.0).decide(beliefs(), state(), blank(policy()))) == ("diffusion", 3)
    assert chosen(policy(100.0).decide(beliefs(), state(), blank(policy()))) == ("plain", 0)


def test_without_adaptive_length_every_arm_drafts_all_it_can() -> None:
    options = values(1.5)
    full = {arm: options[arm] for arm in [("plain", 0), ("ar", 2), ("diffusion", 3)]}
    found = policy(1.5, adaptive_length=False).decide(beliefs(), state(), blank(policy()))
    assert chosen(found) == max(full, key=lambda option: full[option])


def test_an_arm_that_may_draft_nothing_more_is_not_chosen() -> None:
    only_plain = state(max_draft=np.array([[0, 0, 0, 0]]))
    for adaptive in (True, False):
        found = policy(0.0, adaptive_length=adaptive).decide(beliefs(), only_plain, blank(policy()))
        assert chosen(found) == ("plain", 0)


def test_a_request_may_name_its_own_price() -> None:
    asked = state(prices=np.array([100.0]))
    decisions = policy(0.0).decide(beliefs(), asked, blank(policy()))
    assert (chosen(decisions), decisions.price.tolist()) == (("plain", 0), [100.0])
    unasked = state(prices=np.array([np.nan]))
    assert policy(0.0).decide(beliefs(), unasked, blank(policy())).price.tolist() == [0.0]


def test_texts_decided_together_are_each_decided_as_alone() -> None:
    rng = np.random.default_rng(0)
    mine = policy(0.9, frailty=2.0, online_price=3.0, lag=0.05)
    many = np.concatenate([beliefs()] * 6) * rng.uniform(0.2, 4.0, (6, 1))
    memory = rng.uniform(0.0, 2.0, (6, mine.memory_size))
    lags = rng.integers(1, 9, (6, 4))
    states = state(
        texts=np.arange(6),
        positions=np.arange(10, 16),
        lags=lags,
        max_draft=np.repeat([[0, 2, 2, 3]], 6, 0),
        last_arms=np.array([-1, 0, 1, 3, 1, 2]),
        categories=[""] * 6,
    )
    # The price list is of one text at a time for both: the profile has no other.
    together = mine.decide(many, states, memory.copy())
    for row in range(6):
        alone = mine.decide(many[row : row + 1], states.of([row]), memory[row : row + 1].copy())
        assert chosen(alone) == chosen(together, row)


def test_the_price_list_is_that_of_the_texts_decoded_together_not_of_those_asked_for() -> None:
    alone = policy(LAM)
    profile = alone.costs
    assert isinstance(profile, CostModel)
    dear = replace(profile.batches[1], draft={a: [900.0] * 4 for a in ("ar", "diffusion")})
    model = replace(profile, batches={**profile.batches, 8: dear})
    mine = HazardPolicy(alone.net, model, HazardSettings(lam=LAM))
    for together, arm in ((1, "diffusion"), (8, "plain")):
        decisions = mine.decide(beliefs(), state(num_together=together), blank(mine))
        assert chosen(decisions)[0] == arm


# --- hysteresis, dwell, latch --------------------------------------------------------------


LAM = 1.2


def advantage() -> float:
    """By how much the block drafter, which is best at this price, is better than the AR drafter."""
    options = values(LAM)
    best = {
        name: max(value for (arm, _), value in options.items() if arm == name)
        for name in ("plain", "ar", "diffusion")
    }
    assert best["diffusion"] > best["ar"] > best["plain"]
    return best["diffusion"] - best["ar"]


def test_the_last_arm_is_kept_within_the_margin_and_left_beyond_it() -> None:
    after_ar = state(last_arms=np.array([1]))
    for factor, arm in ((1.01, "ar"), (0.99, "diffusion")):
        mine = policy(LAM, switch_margin=factor * advantage())
        decisions = mine.decide(beliefs(), after_ar, blank(mine))
        assert chosen(decisions)[0] == arm
        assert decisions.reasons == ["kept" if arm == "ar" else "best value"]


def test_the_margin_comes_from_price_and_catch_up_when_none_is_given() -> None:
    up_to_date = state(last_arms=np.array([1]), lags=np.zeros((1, 4), int))
    for factor, arm in ((1.01, "ar"), (0.99, "diffusion")):
        mine = policy(LAM, lag=factor * advantage() / LAM, dwell=1)
        assert chosen(mine.decide(beliefs(), up_to_date, blank(mine)))[0] == arm


def rounds_of(mine: HazardPolicy, arms: list[str], memory: np.ndarray) -> RoundStates:
    """Observe rounds of these arms, of two drafts that are both kept; the states after them."""
    last = -1
    for arm in arms:
        column, num = ARMS.index(arm), np.array([0 if arm == "plain" else 2])
        nan = np.array([np.nan])
        decisions = Decisions(np.array([column]), num, nan, nan, [""])
        outcome = Outcomes(num, num + 1, np.array([1.0]), [False])
        before = state(last_arms=np.array([last]))
        mine.observe(beliefs(), before, decisions, outcome, memory)
        last = column
    return state(last_arms=np.array([last]))


def test_after_a_switch_an_arm_is_kept_for_its_dwell() -> None:
    mine = policy(LAM, switch_margin=0.0, dwell=3)
    memory = blank(mine)
    first = rounds_of(mine, ["ar"], memory)
    assert chosen(mine.decide(beliefs(), first, memory))[0] == "diffusion"  # nothing was switched
    for rounds, arm in ((1, "ar"), (2, "ar"), (3, "diffusion")):
        memory = blank(mine)
        states = rounds_of(mine, ["diffusion", *["ar"] * rounds], memory)
        assert chosen(mine.decide(beliefs(), states, memory))[0] == arm


def test_a_switch_that_is_worth_tokens_has_to_last_as_many_rounds_more() -> None:
    # A pass of catch-up takes 0.02 s at most, and a token 0.8 s: at 3 tokens a second a switch is
    # worth 2.46 tokens, so an arm is kept for 1 + 2 rounds.
    mine = policy(3.0, lag=0.8, switch_margin=0.0)
    free = {"ar": [0.9, 0.9, 0.9], "diffusion": [0.9, 0.9, 0.9]}  # plain is best
    for rounds, arm in ((2, "ar"), (3, "plain")):
        memory = blank(mine)
        states = rounds_of(mine, ["plain", *["ar"] * rounds], memory)
        assert chosen(mine.decide(beliefs(free), states, memory))[0] == arm


def test_a_latched_text_keeps_the_arm_that_it_used_most() -> None:
    mine = policy(LAM, switch_margin=0.0, latch=3)
    memory = blank(mine)
    states = rounds_of(mine, ["ar", "diffusion", "ar"], memory)
    assert chosen(mine.decide(beliefs(), states, memory))[0] == "ar"
    states = rounds_of(mine, ["diffusion", "diffusion", "diffusion", "diffusion"], memory)
    assert chosen(mine.decide(beliefs(), states, memory))[0] == "ar"


# --- what follows the text ------------------------------------------------------------------


def observed(
    mine: HazardPolicy, arm: str, drafts: int, kept: int, *, ended: bool = False
) -> np.ndarray:
    memory = blank(mine)
    nan = np.array([np.nan])
    decisions = Decisions(np.array([ARMS.index(arm)]), np.array([drafts]), nan, nan, [""])
    outcome = Outcomes(np.array([kept]), np.array([kept + 1]), np.array([0.5]), [ended])
    mine.observe(beliefs(), state(), decisions, outcome, memory)
    return memory


def gains_after(mine: HazardPolicy, memory: np.ndarray) -> float:
    """Expected tokens of the AR chain's two drafts."""
    only = state(max_draft=np.array([[0, 2, 2, 0]]))
    asked = HazardPolicy(
        mine.net, mine.costs, HazardSettings(lam=0.0, frailty=mine.settings.frailty)
    )
    return float(asked.decide(beliefs(), only, memory).expected[0])


@pytest.mark.parametrize(
    ("kept", "ended", "rejections", "faced"),
    [
        (2, False, 0, [0.1, 0.3]),  # both drafts survived
        (1, False, 1, [0.1, 0.3]),  # the second failed
        (0, False, 1, [0.1]),
        (0, True, 0, []),  # the text ended: nothing is known of the draft
    ],
)
def test_hazards_of_a_text_follow_its_rejections_as_a_gamma_prior_says(
    kept: int, ended: bool, rejections: int, faced: list[float]
) -> None:
    mine = policy(frailty=1.5)
    memory = observed(mine, "ar", 2, kept, ended=ended)
    # A draft that survives a chance h of rejection faces -log(1 - h) of hazard; one that is
    # rejected the mean of an exponential time below that, 1 - (1 - h) / h * -log(1 - h).
    whole = [-np.log(1 - h) for h in faced]
    exposure = sum(whole[: len(faced) - rejections])
    if rejections:
        exposure += 1 - (1 - faced[-1]) / faced[-1] * whole[-1]
    factor = (1.5 + rejections) / (1.5 + exposure)
    cumulative = -np.log([0.9, 0.9 * 0.7])
    expected = 1 + sum(np.exp(-factor * cumulative))
    assert gains_after(mine, memory) == pytest.approx(expected)


def test_the_factor_of_a_text_settles_where_its_hazards_are_multiplied() -> None:
    rng, true = np.random.default_rng(0), 2.5
    mine = policy(frailty=1.0)
    memory = blank(mine)
    for _ in range(4000):
        kept = int(np.argmax([*(rng.random(2) < 1 - (1 - np.array([0.1, 0.3])) ** true), True]))
        nan = np.array([np.nan])
        decisions = Decisions(np.array([1]), np.array([2]), nan, nan, [""])
        outcome = Outcomes(np.array([kept]), np.array([kept + 1]), np.array([0.5]), [False])
        mine.observe(beliefs(), state(), decisions, outcome, memory)
    expected = 1 + 0.9**true + (0.9 * 0.7) ** true
    assert gains_after(mine, memory) == pytest.approx(expected, rel=0.01)


def test_exposures_are_means_over_times_of_rejection_drawn_at_random() -> None:
    rng = np.random.default_rng(1)
    for hazard, factor in ((0.7, 1.0), (0.7, 3.0), (2.0, 0.5)):
        times = rng.exponential(1 / factor, 400_000)
        struck = times[times < hazard].mean()
        found = exposures(
            np.full((1, 2), hazard), np.array([[False, True]]), np.array([[True, False]]), factor
        )
        assert found[0] == pytest.approx([struck, hazard], rel=5e-3)


def test_a_drafter_learns_nothing_from_the_other_ones_rounds() -> None:
    mine = policy(frailty=1.5)
    memory = observed(mine, "diffusion", 3, 0)
    assert gains_after(mine, memory) == pytest.approx(1 + 0.9 + 0.9 * 0.7)


def test_the_online_price_moves_from_lam_to_the_texts_own_pace() -> None:
    mine = policy(2.0, online_price=4.0)
    memory = observed(mine, "ar", 2, 2)  # three tokens in half a second
    price = mine.decide(beliefs(), state(), memory).price
    assert price.tolist() == pytest.approx([(4.0 * 2.0 + 3) / (4.0 + 0.5)])


def test_a_drifted_router_gives_way_to_the_best_static_arm_and_comes_back() -> None:
    mine = policy(0.0, drift=4.0, best_static="ar")
    assert chosen(mine.decide(beliefs(), state(), blank(mine))) == ("diffusion", 3)
    for _ in range(60):
        observed(mine, "ar", 2, 0)
    assert mine.alarm.is_on
    found = mine.decide(beliefs(), state(), blank(mine))
    assert (chosen(found), found.reasons) == (("ar", 2), ["drift alarm"])
    rng = np.random.default_rng(0)
    for _ in range(6000):
        kept = int(np.argmax([*(rng.random(2) < [0.1, 0.3]), True]))
        observed(mine, "ar", 2, kept)
    assert not mine.alarm.is_on
    assert mine.alarm.times == 1


def test_the_alarm_keeps_quiet_while_predictions_are_right() -> None:
    rng = np.random.default_rng(1)
    alarm = DriftAlarm(5.0, None)
    for _ in range(20000):
        hazards = rng.uniform(0.05, 0.9, 3)
        survived = rng.random(3) > hazards
        kept = int(np.argmin([*survived, False]))
        trials = min(kept + 1, 3)
        h = hazards[:trials]
        alarm.add(np.array([kept < 3]), np.array([h.sum()]), np.array([(h * (1 - h)).sum()]))
        assert not alarm.is_on


def test_a_policy_may_be_confined_to_some_arms_of_its_network() -> None:
    net = policy().net
    only = HazardPolicy(net, costs(), HazardSettings(lam=0.0), ("plain", "ar"))
    found = only.decide(beliefs(), state(), np.zeros((1, only.memory_size)))
    assert only.arms == ("plain", "ar")
    assert (chosen(found), float(found.expected[0])) == (("ar", 2), pytest.approx(1 + 0.9 + 0.63))
    other = HazardPolicy(net, costs(), HazardSettings(lam=0.0), ("plain", "diffusion"))
    found = other.decide(beliefs(), state(), np.zeros((1, other.memory_size)))
    assert chosen(found) == ("diffusion", 3)


# --- the network's outputs ------------------------------------------------------------------


def test_expected_tokens_sum_the_chances_of_surviving() -> None:
    hazards = torch.tensor([0.5, 0.2, 0.1])
    survive = [0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.9]
    gains = expected_tokens(hazards.logit()[None, None])[0, 0]
    assert gains.tolist() == pytest.approx([1.0, *(1.0 + s for s in itertools.accumulate(survive))])
    cumulative = cumulative_hazards(hazards.logit()[None, None])[0, 0]
    assert cumulative.tolist() == pytest.approx((-np.log(survive)).tolist())


def test_the_hazard_loss_counts_only_what_was_observed() -> None:
    # Arm of at most 2 drafts, padded to 3: accepted 1 -> survive, fail; accepted 2 -> survive
    # twice; accepted 1 and censored -> survive once.
    hazards = torch.tensor([0.3, 0.6, 0.9])
    logits = hazards.logit().expand(3, 1, 3).contiguous()
    accepted, censored = torch.tensor([[1], [2], [1]]), torch.tensor([[False], [False], [True]])
    found = hazard_loss(logits, accepted, censored, torch.tensor([2]))
    trials = [0.7, 0.6, 0.7, 0.4, 0.7]
    assert float(found) == pytest.approx(-np.log(trials).mean(), rel=1e-5)


def test_the_brier_loss_compares_chances_with_what_came() -> None:
    hazards = torch.tensor([0.3, 0.6, 0.9])
    logits = hazards.logit().expand(3, 1, 3).contiguous()
    accepted, censored = torch.tensor([[0], [2], [1]]), torch.tensor([[False], [False], [True]])
    chances = [0.7, 0.7 * 0.4]  # of the first and the second draft; there is no third
    errors = [chances[0] ** 2, chances[1] ** 2, (1 - chances[0]) ** 2, (1 - chances[1]) ** 2]
    errors += [(1 - chances[0]) ** 2]  # the second draft of the last row is not known
    found = brier_loss(logits, accepted, censored, torch.tensor([2]))
    assert float(found) == pytest.approx(np.mean(errors), rel=1e-5)


def test_unused_features_say_nothing() -> None:
    net = RouterNet(RouterConfig(num_features=6, width=4, max_draft=MAX_DRAFT)).eval()
    features = torch.randn(50, 6)
    net.set_normaliser(features, unused=[1, 4])
    changed = features.clone()
    changed[:, [1, 4]] = torch.randn(50, 2) * 1e3
    assert torch.equal(net(features), net(changed))
    changed[:, 0] += 1
    assert not torch.equal(net(features), net(changed))


def test_the_difference_of_arms_is_judged_where_both_are_known() -> None:
    first, second = torch.tensor([1, 2, 0]), torch.tensor([4, 1, 0])
    censored = torch.tensor([False, False, True])
    found = delta_loss(torch.tensor([2.0, 1.0, 9.0]), first, second, censored)
    assert float(found) == pytest.approx(((3 - 2) ** 2 + (-1 - 1) ** 2) / 2)


def test_temperatures_divide_the_logits_of_their_arm() -> None:
    net = RouterNet(RouterConfig(num_features=6, width=2, max_draft=MAX_DRAFT)).eval()
    features = torch.randn(3, 6)
    before = net(features)
    net.temperatures.copy_(torch.tensor([2.0, 0.5]))
    torch.testing.assert_close(net(features), before / torch.tensor([2.0, 0.5])[:, None])


def test_a_router_of_more_than_three_million_parameters_is_refused() -> None:
    RouterNet(RouterConfig(num_features=580, width=500, max_draft=MAX_DRAFT))
    with pytest.raises(ValueError, match="at most 3,000,000"):
        RouterConfig(num_features=4100, width=400, max_draft=MAX_DRAFT)
    biggest = RouterConfig(num_features=4100, width=330, max_draft=MAX_DRAFT)
    assert sum(p.numel() for p in RouterNet(biggest).state_dict().values()) < 3_000_000
