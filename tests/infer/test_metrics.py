from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch

from whiflash_infer.metrics import Answer, Note, acceptance_by_slot, cell, summarise
from whiflash_infer.statistics import bootstrap_ratio
from whiflash_infer.types import PHASES, Generation, Round


def a_round(arm: str, drafted: int, accepted: int, *, switched: bool = False) -> Round:
    """Ten milliseconds in every phase."""
    return Round(
        position=0,
        arm=arm,
        num_draft=drafted,
        num_nodes=drafted,
        accepted=accepted,
        committed=accepted + 1,
        lag=0,
        switched=switched,
        reason="",
        seconds=dict.fromkeys(PHASES, 0.01),
    )


def answer(
    policy: str,
    rounds: list[Round],
    *,
    seconds: float,
    prompt: str = "a",
    category: str = "chat",
    length: int = 3,
    fallbacks: dict[str, int] | None = None,
) -> Answer:
    tokens = 1 + sum(r.committed for r in rounds)
    generation = Generation(
        prompt_length=length,
        output_ids=torch.arange(tokens),
        rounds=rounds,
        prefill_seconds=0.5,
        decode_seconds=seconds,
        fallbacks=Counter(fallbacks or {}),
    )
    return Answer(prompt, category, policy, generation)


def test_a_cell_holds_the_numbers_worked_by_hand() -> None:
    plain = [answer("plain", [a_round("plain", 0, 0)] * 6, seconds=0.6)]
    rounds = [a_round("ar", 4, 3), a_round("ar", 4, 0), a_round("plain", 0, 0, switched=True)]
    found = cell([(answer("x", rounds, seconds=0.2), plain[0])], bootstrap=50, seed=0)
    assert found["tokens"] == 6
    assert found["rounds"] == 3
    assert found["tokens_per_s"] == pytest.approx(30.0)
    assert found["speedup"] == pytest.approx(3.0)
    assert found["tau"] == pytest.approx(2.0)
    assert found["arm_ratio"] == {"ar": pytest.approx(2 / 3), "plain": pytest.approx(1 / 3)}
    assert found["switches_per_100_rounds"] == pytest.approx(100 / 3)
    assert found["prefill_seconds"] == 0.5
    # 3 rounds x 10 ms a phase of 200 ms; 50 ms lie between the phases
    assert found["time_split"]["verify"] == pytest.approx(0.15)
    assert found["time_split"]["host"] == pytest.approx(0.25)
    assert found["round_ms"]["p50"] == pytest.approx(50.0)
    assert found["identical"] == 1.0


def test_tau_is_pooled_over_rounds_and_also_a_mean_of_prompts() -> None:
    many = answer("x", [a_round("ar", 4, 0)] * 9, seconds=1.0, prompt="a")
    few = answer("x", [a_round("ar", 4, 4)], seconds=1.0, prompt="b")
    found = cell([(many, many), (few, few)], bootstrap=10, seed=0)
    assert found["tau"] == pytest.approx((9 * 1 + 5) / 10)
    assert found["tau_prompt_mean"] == pytest.approx((1 + 5) / 2)


def test_fallbacks_are_counted_by_kind_over_all_prompts() -> None:
    rounds = [a_round("plain", 0, 0)]
    failing = [
        answer("x", rounds, seconds=1.0, fallbacks={"router": 1, "ar drafter": 2}),
        answer("x", rounds, seconds=1.0, fallbacks={"ar drafter": 3}),
    ]
    pairs = [(one, one) for one in failing]
    assert cell(pairs, bootstrap=10, seed=0)["fallbacks"] == {
        "router": 1,
        "ar drafter": 5,
    }
    sound = answer("x", rounds, seconds=1.0)
    assert cell([(sound, sound)], bootstrap=10, seed=0)["fallbacks"] == {}


def test_rounds_that_were_not_timed_have_no_phases() -> None:
    untimed = replace(a_round("ar", 4, 3), seconds={})
    mine = [answer("x", [untimed], seconds=0.2)]
    found = cell([(mine[0], mine[0])], bootstrap=10, seed=0)
    assert found["time_split"] == {**dict.fromkeys(PHASES, 0.0), "host": 1.0}


def test_acceptance_of_a_slot_is_the_share_of_drafts_made_there() -> None:
    rounds = [a_round("ar", 3, 3), a_round("ar", 3, 1), a_round("ar", 1, 0), a_round("plain", 0, 0)]
    assert acceptance_by_slot(rounds) == {"ar": [2 / 3, 1 / 2, 1 / 2]}


def test_the_interval_covers_the_ratio_and_is_a_point_for_equal_prompts() -> None:
    rng = np.random.default_rng(0)
    plain = np.stack([np.full(40, 50.0), rng.uniform(1.8, 2.2, 40)], axis=1)
    own = np.stack([np.full(40, 50.0), plain[:, 1] / rng.uniform(1.1, 1.5, 40)], axis=1)
    low, high = bootstrap_ratio(own, plain, resamples=500, seed=0)
    ratio = plain[:, 1].sum() / own[:, 1].sum()
    assert low < ratio < high
    assert high - low < 0.2
    assert bootstrap_ratio(plain, plain, resamples=50, seed=0) == [1.0, 1.0]


def test_the_summary_pairs_prompts_whatever_order_they_were_answered_in() -> None:
    one = [a_round("plain", 0, 0)] * 2
    answers = [
        answer("plain", one, seconds=0.1, prompt="b"),
        answer("x", one, seconds=0.2, prompt="a"),
        answer("x", one, seconds=0.1, prompt="b"),
        answer("plain", one, seconds=0.4, prompt="a"),
    ]
    report = summarise(answers, bootstrap=20, seed=0)
    assert report["x"]["overall"]["speedup"] == pytest.approx(0.5 / 0.3)
    assert report["plain"]["by_category"]["chat"]["speedup"] == 1.0


def test_every_category_and_every_bucket_of_prompt_lengths_has_its_own_tau() -> None:
    # One number for all hid that a drafter knew one language, or short prompts, only (U46, U86).
    answers = []
    for prompt, category, length, accepted in (
        ("a", "en", 64, 5),
        ("b", "en", 65, 3),
        ("c", "zh", 40, 1),
        ("d", "zh", 3000, 0),
    ):
        place: dict[str, Any] = {"prompt": prompt, "category": category, "length": length}
        plain = [a_round("plain", 0, 0)] * 4
        answers.append(answer("plain", plain, seconds=0.4, **place))
        answers.append(answer("x", [a_round("ar", 7, accepted)] * 2, seconds=0.2, **place))
    report = summarise(answers, bootstrap=20, seed=0)["x"]
    assert {name: one["tau"] for name, one in report["by_category"].items()} == {
        "en": (6 + 4) / 2,
        "zh": (2 + 1) / 2,
    }
    by_length = report["by_prompt_length"]
    assert {int(name): one["tau"] for name, one in by_length.items()} == {64: 4, 128: 4, 4096: 1}
    assert [int(name) for name in by_length] == [64, 128, 4096]
    assert [one["prompts"] for one in by_length.values()] == [2, 1, 1]
    # 2 tokens in 0.2 s against 4 in 0.4 s
    assert by_length["004096"]["speedup"] == pytest.approx(1.0)


def noted(one: Answer, kinds: list[str], regrets: list[float]) -> Answer:
    notes = [Note(kind, regret, "ar") for kind, regret in zip(kinds, regrets, strict=True)]
    return replace(one, notes=notes)


def test_histograms_count_lags_of_drafts_and_stretches_of_one_arm() -> None:
    lags = [0, 1, 3, 4, 9]
    rounds = [replace(a_round("ar", 4, 0), lag=lag) for lag in lags]
    rounds += [replace(a_round("plain", 0, 0), lag=0)] * 3
    mine = answer("x", rounds, seconds=1.0)
    found = cell([(mine, mine)], bootstrap=10, seed=0)
    # lags 0 | 1 | 2-3 | 4-7 | 8-15
    assert found["lags"] == {"edges": [0, 1, 2, 4, 8], "counts": [1, 1, 1, 1, 1]}
    # five rounds of ar, then three of plain: bins 1 | 2-3 | 4-7
    assert found["stretches"] == {"edges": [1, 2, 4], "counts": [0, 1, 1]}


def test_arms_are_told_along_the_answer() -> None:
    prompt = 3  # anchors of rounds: output token 0, 4, 8
    rounds = [
        replace(a_round("ar", 4, 3), position=prompt + 0),
        replace(a_round("plain", 0, 0), position=prompt + 4),
        replace(a_round("plain", 0, 0), position=prompt + 8),
    ]
    mine = answer("x", rounds, seconds=1.0, length=prompt)
    # one token of the answer is there when its first round begins
    assert cell([(mine, mine)], bootstrap=10, seed=0)["arms_along"] == {
        "edges": [0, 8],
        "shares": {"ar": [0.5, 0.0], "plain": [0.5, 1.0]},
    }


def test_time_of_a_kind_of_text_is_that_of_the_rounds_that_wrote_it() -> None:
    rounds = [a_round("ar", 4, 3), a_round("ar", 4, 0), a_round("ar", 4, 1)]
    own = noted(answer("x", rounds, seconds=0.3), ["code", "prose", "code"], [0.0, 0.5, 1.0])
    plain = [a_round("plain", 0, 0)] * 7
    base = noted(answer("plain", plain, seconds=1.4), ["code"] * 5 + ["prose"] * 2, [nan] * 7)
    other = noted(answer("x", rounds, seconds=0.3, prompt="b"), ["prose"] * 3, [nan] * 3)
    beside = noted(answer("plain", plain, seconds=1.4, prompt="b"), ["prose"] * 7, [nan] * 7)
    report = summarise([own, base, other, beside], bootstrap=10, seed=0)["x"]
    code = report["by_kind"]["code"]
    assert code["prompts"] == 1  # the other answer holds no code
    # 6 tokens in two thirds of 0.3 s, against 5 tokens in five sevenths of 1.4 s
    assert code["tokens_per_s"] == pytest.approx(6 / 0.2)
    assert code["speedup"] == pytest.approx((6 / 0.2) / (5 / 1.0))
    assert report["overall"]["regret"] == pytest.approx(0.5)
    assert code["regret"] == pytest.approx(0.5)


def test_turns_of_one_conversation_are_one_observation() -> None:
    """Drawn apart, turns that are alike would make the interval too narrow."""

    def interval(ids: list[str]) -> float:
        answers = []
        for number, id_ in enumerate(ids):
            slow = 1.0 + 0.5 * (number // 4)  # each four are alike
            plain = answer("plain", [a_round("plain", 0, 0)] * 4, seconds=0.4, prompt=id_)
            own = answer("x", [a_round("ar", 4, 3)], seconds=0.1 * slow, prompt=id_)
            answers += [replace(one, turn=number % 4 + 1) for one in (plain, own)]
        low, high = summarise(answers, bootstrap=500, seed=0)["x"]["overall"]["speedup_ci"]
        return high / low

    apart = interval([f"p{n:02d}" for n in range(16)])
    together = interval([f"c{n // 4}#{n % 4 + 1}" for n in range(16)])
    assert together > 1.2 * apart


def test_a_policy_is_measured_against_its_own_baseline() -> None:
    one = [a_round("plain", 0, 0)] * 2
    answers = [
        answer("plain", one, seconds=0.4),
        answer("plain, batch 4", one, seconds=0.1),
        answer("x, batch 4", one, seconds=0.05),
    ]
    report = summarise(answers, bootstrap=10, seed=0, baselines={"x, batch 4": "plain, batch 4"})
    assert report["x, batch 4"]["overall"]["speedup"] == pytest.approx(2.0)
    assert report["plain, batch 4"]["overall"]["speedup"] == pytest.approx(4.0)
