from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from whiflash_infer.costs import CostModel, DeviceIdentity, fit_line, fit_verify
from whiflash_infer.nets.router import RouterConfig, RouterNet, expected_tokens, hazard_loss
from whiflash_infer.policies import EntropyPolicy, HazardPolicy, StaticPolicy
from whiflash_infer.replay import ReplayResult, calibrate_entropy, replay, replay_one, solve_price
from whiflash_infer.rounds import ConversationRounds
from whiflash_infer.types import Decision, RoundState

HERE = DeviceIdentity(device="abacus", threads=1, dtype="float32")
MAX_DRAFT = {"ar": 2, "diffusion": 3}
BELIEF = [1.0, 1.9, 2.5, 2.5, 1.0, 1.8, 2.4, 2.9]  # of both arms, lengths 0 to 3 of each


def costs(*, per_context: float = 0.0, lag: float = 0.0) -> CostModel:
    """Verification of w tokens takes 1 + w / 10 s; AR 0.2 s a token, a block 0.3 s."""
    return CostModel(
        device=HERE,
        target="t",
        verify=[(1.0 + w / 10, per_context) for w in range(1, 5)],
        draft={"ar": [0.0, 0.2, 0.4], "diffusion": [0.0, 0.3, 0.3, 0.3]},
        catch_up={"ar": (0.01, lag), "diffusion": (0.02, lag)},
        overhead=0.05,
    )


def conversation(ar: list[int], diffusion: list[int], *, start: int = 10) -> ConversationRounds:
    length = len(ar)
    return ConversationRounds(
        conversation="c",
        category="chat",
        split="validation",
        positions=np.arange(start, start + length),
        features=torch.zeros(length, 6),
        accepted={"ar": np.array(ar), "diffusion": np.array(diffusion)},
        censored={"ar": np.zeros(length, bool), "diffusion": np.zeros(length, bool)},
    )


def test_a_replayed_static_arm_visits_the_positions_drawn_by_hand() -> None:
    # position   10 11 12 13 14 15: AR commits 3 (10-12), then 1 (13), then 2 (14, 15)
    one = conversation([2, 0, 0, 0, 1, 0], [0] * 6)
    result = replay(StaticPolicy("ar"), [one], costs(), MAX_DRAFT)
    assert (result.tokens, result.rounds, result.switches) == (6, 3, 0)
    per_round = (1.3 + 0.05) + 0.4 + 0.01
    assert result.seconds == pytest.approx(3 * per_round)
    assert result.tau == 2.0


def test_the_last_round_commits_only_what_is_left_of_the_text() -> None:
    result = replay(StaticPolicy("diffusion"), [conversation([0], [3])], costs(), MAX_DRAFT)
    assert (result.tokens, result.rounds) == (1, 1)


def test_lags_and_switches_are_priced_as_they_arise() -> None:
    class Script(StaticPolicy):
        arms = iter(["ar", "plain", "diffusion", "ar"])

        def choose(self, belief: Sequence[float], state: RoundState) -> Decision:
            return Decision(next(self.arms), 0 if state.position == 11 else 1)

    one = conversation([0] * 4, [0] * 4)
    result = replay_one(Script("ar"), [[]] * 4, one, costs(lag=1.0), MAX_DRAFT)
    # ar at 10 (lag 10), plain at 11, diffusion at 12 (lag 12), ar at 13 (lag 3)
    fixed = [1.2 + 0.2 + 0.01, 1.1, 1.2 + 0.3 + 0.02, 1.2 + 0.2 + 0.01]
    assert result.seconds == pytest.approx(sum(fixed) + 4 * 0.05 + 10 + 12 + 3)
    assert result.switches == 3


def test_the_price_is_the_throughput_it_achieves_and_no_other_price_does_better() -> None:
    rng = np.random.default_rng(0)
    texts = [conversation(list(rng.integers(0, 3, 60)), list(rng.integers(0, 4, 60))) for _ in "ab"]

    class Knowing(HazardPolicy):
        """Believes exactly what will be accepted."""

        def __init__(self, lam: float) -> None:
            net = RouterNet(RouterConfig(num_features=6, width=2, max_draft=MAX_DRAFT))
            super().__init__(net, costs(), lam=lam)

    def run(lam: float) -> ReplayResult:
        total = ReplayResult()
        for text in texts:
            gains = np.zeros((len(text), 2, 4))
            for row, (a, d) in enumerate(zip(*text.accepted.values(), strict=True)):
                for k in range(4):
                    gains[row, 0, k] = 1 + min(a, k)
                    gains[row, 1, k] = 1 + min(d, k)
            total.add(
                replay_one(
                    Knowing(lam), gains.reshape(len(text), -1).tolist(), text, costs(), MAX_DRAFT
                )
            )
        return total

    trace = solve_price(run)
    lam, achieved = trace[-1]
    assert achieved == pytest.approx(lam, rel=1e-3)
    best = max(run(price).tokens_per_s for price in np.linspace(0, 3, 61))
    assert achieved >= 0.99 * best


def test_the_entropy_threshold_found_is_the_best_of_all() -> None:
    rng = np.random.default_rng(1)
    one = conversation(list(rng.integers(0, 3, 50)), list(rng.integers(0, 4, 50)))
    entropies = torch.rand(50, generator=torch.Generator().manual_seed(0))
    one.features[:, 0] = entropies
    threshold, speed = calibrate_entropy([one], costs(), MAX_DRAFT, num_thresholds=50)
    every = [0.0, *entropies.tolist(), 2.0]
    speeds = [replay(EntropyPolicy(t), [one], costs(), MAX_DRAFT).tokens_per_s for t in every]
    assert speed == pytest.approx(max(speeds))
    assert replay(EntropyPolicy(threshold), [one], costs(), MAX_DRAFT).tokens_per_s == speed


def state(**changes) -> RoundState:
    fields = {
        "position": 10,
        "lags": {"ar": 1, "diffusion": 1},
        "max_draft": {"plain": 0, **MAX_DRAFT},
        "last_arm": None,
    }
    return RoundState(**{**fields, **changes})


@pytest.mark.parametrize("lam", [0.0, 0.8, 3.0])
def test_the_hazard_policy_takes_the_best_arm_and_length_by_enumeration(lam: float) -> None:
    net = RouterNet(RouterConfig(num_features=6, width=2, max_draft=MAX_DRAFT))
    model = costs(lag=0.03)
    policy = HazardPolicy(net, model, lam=lam)
    options = {("plain", 0): 1.0 - lam * (1.1 + 0.05)}
    for (row, arm), longest in zip(enumerate(MAX_DRAFT), MAX_DRAFT.values(), strict=True):
        for k in range(1, longest + 1):
            drafting = {"ar": 0.2 * k, "diffusion": 0.3}[arm]
            catch_up = {"ar": 0.01, "diffusion": 0.02}[arm] + 0.03
            seconds = 1.1 + k / 10 + 0.05 + drafting + catch_up
            options[arm, k] = BELIEF[4 * row + k] - lam * seconds
    decision = policy.choose(BELIEF, state())
    assert (decision.arm, decision.num_draft) == max(options, key=lambda o: options[o])


def test_an_arm_that_may_draft_nothing_more_is_not_chosen() -> None:
    net = RouterNet(RouterConfig(num_features=6, width=2, max_draft=MAX_DRAFT))
    policy = HazardPolicy(net, costs(), lam=0.0)
    only_plain = state(max_draft={"plain": 0, "ar": 0, "diffusion": 0})
    assert policy.choose(BELIEF, only_plain).arm == "plain"


def test_expected_tokens_sum_the_chances_of_surviving() -> None:
    hazards = torch.tensor([0.5, 0.2, 0.1])
    gains = expected_tokens(hazards.logit()[None, None])[0, 0]
    survive = [0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.9]
    expected = [1.0, *(1.0 + s for s in itertools.accumulate(survive))]
    assert gains.tolist() == pytest.approx(expected)


def test_the_hazard_loss_counts_only_what_was_observed() -> None:
    # Arm of at most 2 drafts, padded to 3: accepted 1 -> survive, fail; accepted 2 -> survive
    # twice; accepted 1 and censored -> survive once.
    hazards = torch.tensor([0.3, 0.6, 0.9])
    logits = hazards.logit().expand(3, 1, 3).contiguous()
    accepted, censored = torch.tensor([[1], [2], [1]]), torch.tensor([[False], [False], [True]])
    found = hazard_loss(logits, accepted, censored, torch.tensor([2]))
    trials = [0.7, 0.6, 0.7, 0.4, 0.7]
    assert float(found) == pytest.approx(-np.log(trials).mean(), rel=1e-5)


def test_verification_fits_are_monotone_and_follow_clean_measurements() -> None:
    clean = {c: {w: 0.01 + 0.001 * w + 1e-5 * c for w in (1, 2, 4)} for c in (100, 200)}
    lines = fit_verify(clean)
    assert len(lines) == 4
    for width, (base, slope) in enumerate(lines, start=1):
        assert base + slope * 150 == pytest.approx(0.01 + 0.001 * width + 1e-5 * 150)
    noisy = {100: {1: 0.02, 2: 0.01, 4: 0.03}, 200: {1: 0.015, 2: 0.02, 4: 0.025}}
    bases, slopes = zip(*fit_verify(noisy), strict=True)
    assert list(bases) == sorted(bases)
    assert list(slopes) == sorted(slopes)
    assert min(slopes) >= 0


def test_lines_recover_intercept_and_slope() -> None:
    assert fit_line({1: 0.3, 3: 0.5, 5: 0.7}) == pytest.approx((0.2, 0.1))
    assert fit_line({4: 0.7}) == (0.7, 0.0)
