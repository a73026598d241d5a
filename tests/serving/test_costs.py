"""Measured prices against engines whose costs are known, and against hand calculation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.worlds import MAX_DRAFT, plain_costs
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.costs import Costs
from whiflash_infer.routing.policies import BanditPolicy, HazardPolicy, HazardSettings
from whiflash_infer.routing.protocol import Decisions, Outcomes, RoundStates
from whiflash_infer.routing.router import Router, RouterSettings
from whiflash_infer.serving.costs import MeasuredCosts
from whiflash_infer.types import AR, CHAINS, DIFFUSION, PLAIN

ARMS = (PLAIN, *CHAINS)


def costs(batches: tuple[int, ...] = (1,), *, memory: int = 256) -> MeasuredCosts:
    """A pass of w tokens takes 1 + w / 20 seconds by the profile, see `plain_costs`."""
    return MeasuredCosts(plain_costs(per_lag=0.01, batches=batches), memory=memory)


def noisy(rng: np.random.Generator, seconds: float) -> float:
    return seconds * float(rng.lognormal(0.0, 0.05))


def run_steps(
    mine: MeasuredCosts, base: float, per_token: float, *, steps: int, num_texts: int = 4
) -> None:
    """An engine whose passes cost so much and whose texts draft 0 to 7 tokens."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        num_tokens = int(num_texts + rng.integers(0, 8, num_texts).sum())
        seconds = noisy(rng, base + per_token * num_tokens)
        mine.step(seconds, num_tokens=num_tokens, num_texts=num_texts)


# --- before anything is measured ----------------------------------------------------------------


def test_before_any_measurement_prices_of_one_text_are_those_of_the_profile() -> None:
    profile = plain_costs(per_lag=0.01)
    mine, theirs = costs().table(ARMS), profile.table(ARMS)
    np.testing.assert_allclose(mine.fixed, theirs.fixed)
    np.testing.assert_allclose(mine.per_lag, theirs.per_lag)
    assert not mine.per_context.any()
    assert costs().dearest_catch_up == pytest.approx(profile.dearest_catch_up)


def test_a_profile_that_is_no_line_is_met_closely() -> None:
    profile = plain_costs()
    profile.batches[1].draft[DIFFUSION][:] = [0.0, 0.28, 0.30, 0.29, 0.30, 0.31, 0.33, 0.32]
    mine, theirs = MeasuredCosts(profile).table(ARMS).fixed, profile.table(ARMS).fixed
    there = np.isfinite(theirs)
    np.testing.assert_allclose(mine[there], theirs[there], rtol=0.01)


@pytest.mark.parametrize("arms", [ARMS, (PLAIN,), (PLAIN, AR), (DIFFUSION, AR)])
def test_prices_are_infinite_where_an_arm_has_no_such_length(arms: tuple[str, ...]) -> None:
    measured = costs()
    run_steps(measured, 1.0, 0.1, steps=5)
    found = measured.table(arms, num_texts=3).fixed
    np.testing.assert_array_equal(np.isinf(found), np.isinf(plain_costs().table(arms).fixed))


def test_an_arm_that_the_profile_does_not_price_has_no_price() -> None:
    with pytest.raises(KeyError, match="ar_tree"):
        costs().table((PLAIN, "ar_tree"))


def test_profile_and_measurements_are_both_where_policies_get_their_prices() -> None:
    assert isinstance(costs(), Costs)
    assert isinstance(plain_costs(), Costs)


# --- a text's share, by hand --------------------------------------------------------------------


def test_texts_share_what_a_step_costs_and_pay_for_their_own_tokens() -> None:
    # Four share the pass's 1 second and the 0.05 around it, and 0.05 is paid for each token read.
    # Four texts' drafts cost 7/4 of one's, so each pays 7/16, and 0.05 for a pass of catch-up.
    found = costs((1, 4)).table(ARMS, num_texts=4).fixed
    assert found[0, 0] == pytest.approx(1.05 / 4 + 0.05)
    for length in (1, 2, 3, 4):
        ar = 1.05 / 4 + 0.05 * (1 + length) + 7 / 16 * 0.1 * length + 0.05
        assert found[1, length] == pytest.approx(ar)
    assert found[2, 7] == pytest.approx(1.05 / 4 + 0.05 * 8 + 7 / 16 * 0.3 + 0.05)


def test_one_measurement_counts_as_much_as_the_profile() -> None:
    mine = costs()
    # 10 tokens cost 1.5 by the profile. Half way to 2.5 is 2, 4/3 of it: so are base and slope.
    mine.step(2.5, num_tokens=10, num_texts=1)
    assert mine.table((PLAIN,)).fixed[0, 0] == pytest.approx(4 / 3 * 1.05 + 0.05)
    # 4 drafts cost 0.4. Half way to 0.8 is 0.6.
    mine.draft(AR, 0.8, num_draft=4, num_texts=1)
    ar = 4 / 3 * (1 + 0.05 * 5) + 0.05 + 0.6 + 0.05
    assert mine.table(ARMS).fixed[1, 4] == pytest.approx(ar)


def test_deciding_and_waiting_for_the_next_pass_are_shared_by_all_texts() -> None:
    mine = costs()
    for _ in range(64):
        mine.gap(0.3)
        mine.route(0.1)
    assert mine.table((PLAIN,)).fixed[0, 0] == pytest.approx(1.05 + 0.4)
    assert mine.table((PLAIN,), num_texts=8).fixed[0, 0] == pytest.approx(1.4 / 8 + 0.05)


# --- what is measured ---------------------------------------------------------------------------


def test_base_and_slope_of_the_engine_are_recovered_from_noisy_steps() -> None:
    mine = costs()
    run_steps(mine, 0.4, 0.03, steps=1000)
    alone, together = (mine.table((PLAIN,), num_texts=n).fixed[0, 0] for n in (1, 10))
    per_token = (10 * together - alone) / 9  # both have base and gap once
    assert per_token == pytest.approx(0.03, rel=0.1)
    assert alone - per_token - 0.05 == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("num_texts", [1, 3])
def test_base_and_slope_of_an_arm_are_recovered_from_noisy_calls(num_texts: int) -> None:
    mine, rng = costs((1, 4)), np.random.default_rng(1)
    for _ in range(600):
        mine.step(noisy(rng, 1.2), num_tokens=4, num_texts=num_texts)
        length = int(rng.integers(1, 5))
        seconds = noisy(rng, num_texts * (0.2 + 0.03 * length))
        mine.draft(AR, seconds, num_draft=length, num_texts=num_texts)
        mine.catch_up(AR, noisy(rng, 0.05), num_tokens=1, num_passes=1)
    fixed = mine.table(ARMS, num_texts=num_texts).fixed
    # Passes cost what the profile says: 0.05 for each draft that is read.
    drafting = fixed[1, 1:5] - fixed[0, 0] - 0.05 * np.arange(1, 5) - 0.05
    np.testing.assert_allclose(drafting, 0.2 + 0.03 * np.arange(1, 5), rtol=0.05)


def test_seconds_of_a_pass_and_of_a_lagging_token_are_recovered_from_noisy_catch_ups() -> None:
    mine, rng = costs(), np.random.default_rng(2)
    for _ in range(600):
        texts, lag = int(rng.integers(1, 4)), int(rng.integers(1, 30))
        seconds = noisy(rng, texts * 0.2 + 0.004 * texts * lag)
        mine.step(1.2, num_tokens=4, num_texts=4)
        mine.catch_up(DIFFUSION, seconds, num_tokens=texts * lag, num_passes=texts)
    before, after = costs().table(ARMS), mine.table(ARMS)
    assert after.per_lag[2] == pytest.approx(0.004, rel=0.1)
    assert after.fixed[2, 7] - before.fixed[2, 7] == pytest.approx(0.2 - 0.05, abs=0.01)
    # The AR drafter, which was not measured, has the dearer token.
    assert mine.dearest_catch_up == pytest.approx((0.2, 0.01), rel=0.05)


def test_a_change_of_load_is_followed_within_the_memory() -> None:
    mine = costs(memory=50)

    def share() -> float:
        """A text's of a pass in which each of four reads five tokens."""
        return float(mine.table(ARMS, num_texts=4).fixed[2, 4]) - 0.3 - 0.05

    run_steps(mine, 1.0, 0.05, steps=300)
    before, after = 1.05 / 4 + 5 * 0.05, 2.05 / 4 + 5 * 0.1
    assert share() == pytest.approx(before, rel=0.05)
    run_steps(mine, 2.0, 0.1, steps=50)
    assert share() == pytest.approx(after - np.exp(-1) * (after - before), rel=0.05)
    run_steps(mine, 2.0, 0.1, steps=200)
    assert share() == pytest.approx(after, rel=0.05)


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_steps_that_all_read_as_much_leave_slope_and_base_in_the_profiles_proportion(
    num_tokens: int,
) -> None:
    mine = costs(memory=1000)
    for _ in range(5000):
        mine.step(2 * (1 + num_tokens / 20), num_tokens=num_tokens, num_texts=1)
    np.testing.assert_allclose(mine.table((PLAIN,)).fixed, [[2 * 1.05 + 0.05]], rtol=1e-3)
    reading_eight = mine.table(ARMS).fixed[2, 7] - mine.table(ARMS).fixed[0, 0] - 0.3 - 0.05
    assert reading_eight == pytest.approx(7 * 0.1, rel=1e-2)


def test_where_reading_more_costs_nothing_more_drafts_are_read_for_nothing() -> None:
    mine = costs()
    run_steps(mine, 0.5, 0.0, steps=1000)
    fixed = mine.table(ARMS).fixed
    assert fixed[0, 0] == pytest.approx(0.55, rel=0.02)
    assert fixed[2, 7] - fixed[2, 1] == pytest.approx(0.0, abs=0.02)


def test_a_pass_that_seems_to_cost_less_than_nothing_at_no_tokens_starts_at_zero() -> None:
    mine = costs()
    for _ in range(1000):
        for num_tokens in (10, 20):  # the line through both is below zero under 5
            mine.step((num_tokens - 5) / 10, num_tokens=num_tokens, num_texts=1)
    # Through the origin and their mean, 1 second at 15 tokens.
    assert mine.table((PLAIN,)).fixed[0, 0] == pytest.approx(1 / 15 + 0.05, rel=0.02)


measurements = st.tuples(
    st.sampled_from(("step", "gap", "route", "draft", "catch_up")),
    st.floats(0.0, 100.0),
    st.integers(1, 7),
    st.integers(1, 8),
)


@given(st.lists(measurements, max_size=40))
def test_whatever_is_measured_prices_are_finite_and_more_drafts_never_cost_less(
    found: list[tuple[str, float, int, int]],
) -> None:
    mine = costs((1, 4), memory=4)
    for kind, seconds, size, texts in found:
        if kind == "step":
            mine.step(seconds, num_tokens=size * texts, num_texts=texts)
        elif kind == "draft":
            mine.draft(DIFFUSION, seconds, num_draft=size, num_texts=texts)
        elif kind == "catch_up":
            mine.catch_up(DIFFUSION, seconds, num_tokens=size * texts, num_passes=texts)
        else:
            {"gap": mine.gap, "route": mine.route}[kind](seconds)
    table = mine.table(ARMS, num_texts=4)
    assert (table.per_lag >= 0).all()
    assert (np.array(mine.dearest_catch_up) >= 0).all()
    for row, longest in ((1, MAX_DRAFT[AR]), (2, MAX_DRAFT[DIFFUSION])):
        prices = table.fixed[row, 1 : longest + 1]
        assert np.isfinite(prices).all()
        assert (prices >= 0).all()
        assert (np.diff(prices) >= -1e-9 * prices[:-1]).all()


# --- what must not count ------------------------------------------------------------------------


def test_gaps_in_which_the_engine_was_idle_do_not_count() -> None:
    mine = costs()
    for number in range(300):
        mine.gap(3600.0 if number % 4 == 0 else 0.02)
    assert mine.table((PLAIN,)).fixed[0, 0] == pytest.approx(1.05 + 0.02)


def test_not_even_the_first_gap_counts_when_it_is_an_outlier() -> None:
    mine = costs()
    mine.gap(3600.0)
    assert mine.table((PLAIN,)).fixed[0, 0] == pytest.approx(1.05 + 0.05)


def test_a_stall_counts_as_at_most_four_times_what_was_expected() -> None:
    mine = costs()
    mine.draft(AR, 3600.0, num_draft=4, num_texts=1)  # by the profile 0.4: (0.4 + 4 * 0.4) / 2 = 1
    assert mine.table(ARMS).fixed[1, 4] == pytest.approx(1.3 + 1.0 + 0.05)


# --- what is not measured -----------------------------------------------------------------------


def test_a_faster_target_makes_unmeasured_drafters_cheaper_a_slower_one_not_dearer() -> None:
    faster, slower = costs(), costs()
    run_steps(faster, 0.5, 0.025, steps=1000)
    run_steps(slower, 2.0, 0.1, steps=1000)
    for mine, scale, reading in ((faster, 0.5, 0.025), (slower, 1.0, 0.1)):
        fixed = mine.table(ARMS).fixed
        drafting = fixed[2, 7] - fixed[0, 0] - 7 * reading
        assert drafting == pytest.approx(scale * (0.3 + 0.05), rel=0.15)


def test_a_price_that_is_no_longer_measured_drifts_back_to_the_profiles() -> None:
    mine = costs(memory=20)
    for _ in range(50):
        mine.draft(AR, 2.0, num_draft=4, num_texts=1)
    assert mine.table(ARMS).fixed[1, 4] > 3.0
    for _ in range(200):
        mine.step(1.2, num_tokens=4, num_texts=1)
    assert mine.table(ARMS).fixed[1, 4] == pytest.approx(1.3 + 0.4 + 0.05, rel=0.02)


def test_other_numbers_of_texts_are_reckoned_from_those_that_were_measured() -> None:
    mine = costs((1, 4), memory=1000)
    for _ in range(4000):
        mine.step(1.2, num_tokens=4, num_texts=4)
        mine.draft(DIFFUSION, 2 * 7 / 4 * 0.3, num_draft=7, num_texts=4)  # twice the profile's
    fixed = mine.table(ARMS).fixed
    assert fixed[2, 7] - fixed[0, 0] - 7 * 0.05 - 0.05 == pytest.approx(0.6, rel=0.01)


# --- the price of a second ----------------------------------------------------------------------


def test_the_price_of_a_constant_stream_is_its_tokens_a_second() -> None:
    mine = MeasuredCosts(plain_costs(), memory=32, price=7.0)
    assert mine.price == pytest.approx(7.0)
    for _ in range(1000):
        mine.outcome(tokens=10, seconds=0.25)
    assert mine.price == pytest.approx(40.0)


def test_the_starting_price_counts_as_its_seconds() -> None:
    mine = MeasuredCosts(plain_costs(), memory=10**9, price=7.0, price_seconds=2.0)
    mine.outcome(tokens=10, seconds=0.5)
    assert mine.price == pytest.approx((2.0 * 7.0 + 10) / 2.5)


def test_without_any_better_start_a_second_is_worth_the_tokens_of_plain_decoding() -> None:
    assert costs().price == pytest.approx(1 / 1.1)


# --- policies that read them --------------------------------------------------------------------


def state() -> RoundStates:
    return RoundStates(
        arms=ARMS,
        texts=np.array([0]),
        positions=np.array([10]),
        lags=np.array([[0, 1, 1]]),
        max_draft=np.array([[0, MAX_DRAFT[AR], MAX_DRAFT[DIFFUSION]]]),
        last_arms=np.array([-1]),
        categories=[""],
    )


def test_the_router_leaves_an_arm_that_became_dear_and_comes_back_when_it_is_cheap_again() -> None:
    mine = costs()
    config = RouterConfig(num_features=6, width=2, max_draft={a: MAX_DRAFT[a] for a in CHAINS})
    policy = HazardPolicy(RouterNet(config), mine, HazardSettings(lam=1.0))
    hazards = np.repeat([[0.1], [0.95]], 7, axis=1)
    beliefs = -np.log1p(-hazards).cumsum(1).reshape(1, -1)

    def chosen() -> str:
        decisions = policy.decide(beliefs, state(), np.zeros((1, policy.memory_size)))
        return ARMS[decisions.arms[0]]

    assert chosen() == AR  # 4.1 tokens for 1.75 seconds; plain decoding 1 for 1.1
    for _ in range(50):
        mine.draft(AR, 5.0, num_draft=4, num_texts=1)
    assert chosen() == PLAIN
    for _ in range(2000):
        mine.step(1.2, num_tokens=4, num_texts=1)
        mine.draft(AR, 0.4, num_draft=4, num_texts=1)
    assert chosen() == AR


def test_a_router_makes_policies_that_follow_other_prices_than_its_own() -> None:
    net = RouterNet(
        RouterConfig(num_features=6, width=2, max_draft={a: MAX_DRAFT[a] for a in CHAINS})
    )
    settings = RouterSettings(hazard=HazardSettings(lam=1.0, switch_margin=0.0, dwell=1))
    router = Router(net=net, settings=settings, costs=plain_costs(), manifest={})
    dear = costs()
    for _ in range(100):
        dear.draft(AR, 9.0, num_draft=4, num_texts=1)
        dear.draft(DIFFUSION, 9.0, num_draft=4, num_texts=1)
    beliefs = np.zeros((1, 14))  # every draft will be kept
    chosen = []
    for prices in (None, dear):
        policy = router.policy("hazard", costs=prices)
        decisions = policy.decide(beliefs, state(), np.zeros((1, policy.memory_size)))
        chosen.append(ARMS[decisions.arms[0]])
    assert chosen == [DIFFUSION, PLAIN]


def test_a_switch_must_be_worth_what_catching_up_costs_now() -> None:
    mine = costs()
    config = RouterConfig(num_features=6, width=2, max_draft={a: MAX_DRAFT[a] for a in CHAINS})
    policy = HazardPolicy(RouterNet(config), mine, HazardSettings(lam=1.0))
    # 3.4 tokens of the AR chain, which drafted last, for 1.75 seconds; 5.7 of the block for 1.8.
    hazards = np.repeat([[0.2], [0.1]], 7, axis=1)
    beliefs = -np.log1p(-hazards).cumsum(1).reshape(1, -1)
    last = replace(state(), last_arms=np.array([1]), lags=np.zeros((1, 3), int))

    def reason() -> str:
        return policy.decide(beliefs, last, np.zeros((1, policy.memory_size))).reasons[0]

    assert reason() == "best value"
    for _ in range(400):  # 5 seconds a token; no text lags here, so only the margin knows
        mine.catch_up(DIFFUSION, 50.05, num_tokens=10, num_passes=1)
        mine.catch_up(DIFFUSION, 100.05, num_tokens=20, num_passes=1)
    assert mine.dearest_catch_up[1] == pytest.approx(5.0, rel=0.05)
    assert reason() == "kept"


def test_a_bandit_reckons_with_the_prices_of_the_round() -> None:
    mine = costs()
    bandit = BanditPolicy(ARMS, mine, lam=0.5)
    nothing, memory = np.zeros((1, 0)), np.zeros((1, bandit.memory_size))
    decisions = Decisions(np.array([0]), np.array([0]), np.ones(1), np.ones(1), [""])
    outcomes = Outcomes(np.array([0]), np.array([1]), np.array([9.9]), [False])
    bandit.observe(nothing, state(), decisions, outcomes, memory)
    for _ in range(64):
        mine.gap(1.05)
    bandit.observe(nothing, state(), decisions, outcomes, memory)
    assert memory[0, len(ARMS)] == pytest.approx((1 - 0.5 * 1.1) + (1 - 0.5 * 2.1))


def test_prices_that_were_handed_out_do_not_change_and_cannot_be_changed() -> None:
    mine = costs()
    before = mine.table(ARMS)
    kept = before.fixed.copy()
    assert mine.table(ARMS) is before
    mine.step(2.5, num_tokens=10, num_texts=1)
    assert mine.table(ARMS) is not before
    np.testing.assert_array_equal(before.fixed, kept)
    for table in (before, plain_costs().table(ARMS)):
        with pytest.raises(ValueError, match="read-only"):
            table.fixed[0, 0] = 0.0
