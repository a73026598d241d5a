from __future__ import annotations

from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats

from whiflash_infer.statistics import (
    bootstrap_ratio,
    gains,
    paired_change,
    paired_gain,
    tokens_per_second,
)

DRAWS: dict[str, Any] = {"resamples": 1000, "seed": 0}


def timings(
    rng: np.random.Generator, prompts: int, *, slower: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Two policies with the same answers: prompts of unlike speed and length, noise of 3 %, and
    one time in twenty a hiccup of 30 %."""
    tokens = rng.integers(24, 257, prompts).astype(float)
    seconds = tokens / (50 * np.exp(rng.normal(0, 0.25, prompts)))
    own = seconds * slower * _noise(rng, prompts)
    return np.stack([tokens, own], axis=1), np.stack([tokens, seconds * _noise(rng, prompts)], 1)


def _noise(rng: np.random.Generator, prompts: int) -> np.ndarray:
    return np.exp(rng.normal(0, 0.03, prompts)) * np.where(rng.random(prompts) < 0.05, 1.3, 1.0)


def table(*rows: tuple[float, float]) -> np.ndarray:
    return np.array(rows, dtype=float)


def test_a_policy_against_itself_has_1_in_95_of_100_intervals() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        low, high = bootstrap_ratio(*timings(rng, 96), resamples=500, seed=seed)
        held += low <= 1.0 <= high
    assert 0.92 <= held / 400 <= 0.98


def test_intervals_of_eight_prompts_hold_the_truth_nearly_as_often() -> None:
    rng = np.random.default_rng(2)
    held = 0
    for seed in range(400):
        low, high = bootstrap_ratio(*timings(rng, 8), resamples=500, seed=seed)
        held += low <= 1.0 <= high
    assert held / 400 >= 0.92


def test_a_slow_down_of_5_percent_is_found_among_96_prompts() -> None:
    rng = np.random.default_rng(3)
    found = 0
    for seed in range(200):
        _, high = bootstrap_ratio(*timings(rng, 96, slower=1.05), resamples=500, seed=seed)
        found += high < 1.0
    assert found / 200 >= 0.95


def test_the_interval_of_two_prompts_is_that_worked_by_hand() -> None:
    # Ratios are 2 and 8; a draw holds the first twice, the second twice, or each once, one time
    # in four, four and two. Baselines are alike, so each once gives 20 tokens in 2 s against
    # 20 in 6.25 s: 3.2. The logs have this spread; a bootstrap of two has half of the variance.
    own, base = table((10, 1.0), (10, 1.0)), table((10, 2.0), (10, 8.0))
    logs = [log(2), log(8), log(5), log(5)]
    spread = sqrt(sum((value - sum(logs) / 4) ** 2 for value in logs) / 4)
    reach = exp(stats.t(df=1).ppf(0.975) * spread * sqrt(2))
    found = paired_gain(own, base, resamples=200_000, seed=0)
    assert found == [
        pytest.approx(5),
        pytest.approx(5 / reach, 0.05),
        pytest.approx(5 * reach, 0.05),
    ]


def test_the_interval_agrees_with_the_textbook_one_where_that_holds() -> None:
    # Equal tokens, and a baseline that never varies: the ratio is 1 over the mean time.
    seconds = np.random.default_rng(4).normal(1.0, 0.05, 200)
    tokens = np.full(200, 10.0)
    own, base = np.stack([tokens, seconds], 1), np.stack([tokens, np.ones(200)], 1)
    low, high = stats.t.interval(0.95, 199, seconds.mean(), stats.sem(seconds))
    found = bootstrap_ratio(own, base, resamples=20_000, seed=0)
    assert found == [pytest.approx(1 / high, abs=5e-4), pytest.approx(1 / low, abs=5e-4)]


def test_equal_timings_give_a_point() -> None:
    own, _ = timings(np.random.default_rng(5), 12)
    assert bootstrap_ratio(own, own, **DRAWS) == [1.0, 1.0]


def test_the_same_seed_gives_the_same_interval() -> None:
    pair = timings(np.random.default_rng(6), 12)
    assert bootstrap_ratio(*pair, **DRAWS) == bootstrap_ratio(*pair, **DRAWS)
    assert bootstrap_ratio(*pair, **DRAWS) != bootstrap_ratio(*pair, resamples=1000, seed=1)


def test_turns_that_are_alike_make_a_wider_interval_than_as_many_prompts() -> None:
    """Four turns of one timing are worth one prompt, not four."""
    own, base = timings(np.random.default_rng(7), 12)
    conversations = [f"c{row}" for row in range(12) for _ in range(4)]
    alike = [np.repeat(one, 4, axis=0) for one in (own, base)]
    low, high = bootstrap_ratio(own, base, **DRAWS)
    together = bootstrap_ratio(*alike, **DRAWS, clusters=conversations)
    apart = bootstrap_ratio(*alike, **DRAWS)
    assert together == [pytest.approx(low), pytest.approx(high)]
    assert apart[1] - apart[0] < 0.6 * (high - low)


def test_one_conversation_gives_a_point_and_nothing_at_all_gives_noughts() -> None:
    own, base = table((10, 1.0), (20, 1.0)), table((10, 2.0), (20, 2.0))
    assert bootstrap_ratio(own, base, **DRAWS, clusters=["c", "c"]) == [2.0, 2.0]
    assert bootstrap_ratio(own[:1], base[:1], **DRAWS) == [2.0, 2.0]
    assert bootstrap_ratio(own[:0], base[:0], **DRAWS) == [0.0, 0.0]
    assert paired_gain(own, table((0, 0.0), (0, 0.0)), **DRAWS) == [0.0, 0.0, 0.0]


def test_answers_without_a_round_do_not_spoil_the_others() -> None:
    own, base = timings(np.random.default_rng(8), 20)
    own[3] = base[3] = 0.0
    ratio, low, high = paired_gain(own, base, **DRAWS)
    assert 0.8 < low < ratio < high < 1.25


def test_throughput_is_pooled_over_answers() -> None:
    assert tokens_per_second(table((10, 1.0), (50, 2.0))) == 20.0
    assert tokens_per_second(table((0, 0.0))) == 0.0


def test_a_change_of_speed_up_leaves_out_what_slowed_the_whole_machine() -> None:
    own, base = timings(np.random.default_rng(9), 24)
    halved = np.array([1.0, 2.0])
    ratio, low, high = paired_change(own * halved, base * halved, own, base, **DRAWS)
    assert [ratio, low, high] == [pytest.approx(1.0)] * 3
    slow = np.array([1.0, 1.25])
    ratio, low, high = paired_change(own * slow, base, own, base, **DRAWS)
    assert [ratio, low, high] == [pytest.approx(0.8)] * 3


def test_gains_are_of_every_moving_policy_over_every_static_one_by_category() -> None:
    tables = {
        "plain": table((8, 8.0), (8, 8.0)),
        "plain#2": table((8, 8.0), (8, 8.0)),
        "static_ar": table((8, 4.0), (8, 4.0)),
        "static_diffusion": table((8, 2.0), (8, 6.0)),
        "hazard": table((8, 2.0), (8, 3.0)),
        "oracle_round": table((8, 1.0), (8, 3.0)),
    }
    found: Any = gains(tables, ["code", "chat"], ["a", "b"], **DRAWS)
    assert list(found) == ["hazard", "oracle_round"]
    assert list(found["hazard"]) == ["static_ar", "static_diffusion"]
    over_ar = found["hazard"]["static_ar"]
    assert over_ar["overall"][0] == pytest.approx(16 / 5 / 2)
    assert over_ar["by_category"] == {
        "chat": pytest.approx([4 / 3] * 3),
        "code": pytest.approx([2.0] * 3),
    }
    assert found["oracle_round"]["static_diffusion"]["overall"][0] == 2.0
    assert over_ar["overall"] == paired_gain(tables["hazard"], tables["static_ar"], **DRAWS)


def test_gains_draw_turns_of_a_conversation_together() -> None:
    own, base = timings(np.random.default_rng(10), 12)
    tables = {"hazard": np.repeat(own, 4, axis=0), "static_ar": np.repeat(base, 4, axis=0)}
    conversations = [f"c{row}" for row in range(12) for _ in range(4)]
    found: Any = gains(tables, ["chat"] * 48, conversations, **DRAWS)
    expected = paired_gain(own, base, **DRAWS)
    assert found["hazard"]["static_ar"]["overall"] == pytest.approx(expected)
    assert found["hazard"]["static_ar"]["by_category"] == {"chat": pytest.approx(expected)}
