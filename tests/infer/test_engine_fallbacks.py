"""Failures of drafters, router and target: what is said stays the target's, or ends with a word."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.infer.test_engine import (
    ScriptedChain,
    TextDrafter,
    greedy,
    huggingface_greedy,
    prompt_of,
    real_arms,
    scripted,
    texts_of,
)
from tests.infer.test_engine_properties import THRESHOLDS, arms_of, target_of
from whiflash_infer.drafters.ar import ARArm
from whiflash_infer.drafters.base import Arm, Drafts, DrawDrafts
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.routing.policies import BasePolicy, EntropyPolicy, RandomPolicy, StaticPolicy
from whiflash_infer.routing.protocol import Decisions, RoundStates
from whiflash_infer.sequence import Texts
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import Generation

PROMPTS = [prompt_of(length, vocabulary=64) for length in (3, 37, 1, 12)]
LENGTH = 14


@pytest.fixture(scope="module")
def small() -> Target:
    return target_of(64)


@pytest.fixture(scope="module")
def expected(small: Target) -> list[list[int]]:
    return [huggingface_greedy(small, prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture
def known(expected: list[list[int]]) -> list[list[int]]:
    return [p + e for p, e in zip(PROMPTS, expected, strict=True)]


def arms_used(results: Sequence[Generation]) -> Counter[str]:
    return Counter(r.arm for result in results for r in result.rounds)


def all_fallbacks(results: Sequence[Generation]) -> list[dict[str, int]]:
    return [dict(result.fallbacks) for result in results]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


# --- Drafters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["ar", "diffusion"])
@pytest.mark.parametrize("max_rows", [1, 4])
def test_a_drafter_with_a_weight_that_is_no_number_is_used_once_a_request(
    max_rows: int,
    broken: str,
    small: Target,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arms = real_arms(small)
    arm = arms[broken]
    assert isinstance(arm, ARArm | DiffusionArm)
    arm.net.fc.weight.data[0, 0] = math.nan
    decoder = RoutedDecoder(small, arms, RandomPolicy(3))
    results = decoder.generate(PROMPTS, greedy(LENGTH), max_rows=max_rows)
    assert texts_of(results) == expected
    for result in results:
        drafted = [r for r in result.rounds if r.arm.startswith(broken)]
        assert len(drafted) == sum(result.fallbacks.values()) <= 1
        assert all(r.accepted == 0 for r in drafted)
        assert set(result.fallbacks) <= {f"{broken} drafter", f"{broken}_tree drafter"}
    other = "diffusion" if broken == "ar" else "ar"
    assert arms_used(results)[other] + arms_used(results)[f"{other}_tree"] > 0
    kinds = {kind for result in results for kind in result.fallbacks}
    assert len(warnings_of(caplog)) == len(kinds) > 0


@pytest.mark.parametrize("broken", ["ar_tree", "diffusion_tree"])
def test_a_tree_of_a_drafter_with_a_weight_that_is_no_number_changes_nothing(
    broken: str, small: Target, expected: list[list[int]]
) -> None:
    arms = real_arms(small)
    arm = arms[broken]
    assert isinstance(arm, ARArm | DiffusionArm)
    arm.net.norm.weight.data.fill_(math.nan)
    results = RoutedDecoder(small, arms, StaticPolicy(broken)).generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{f"{broken} drafter": 1}] * 4


class Overflowing(ScriptedChain):
    """Says once that its numbers were not finite, for the row with the longest text."""

    is_told = False

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        drafts = super().draft(texts, rows, num_draft, draw)
        if self.is_told:
            return drafts
        self.is_told = True
        longest = max(texts.lengths[row] for row in rows)
        sound = torch.tensor([texts.lengths[row] < longest for row in rows])
        return Drafts(drafts.tree, sound)


def test_one_overflow_concerns_one_request_only(
    small: Target, expected: list[list[int]], known: list[list[int]]
) -> None:
    arms = {"ar": Overflowing(known, max_draft=3, vocabulary=64)}
    decoder = RoutedDecoder(small, arms, StaticPolicy("ar"))
    results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{}, {"ar drafter": 1}, {}, {}]
    assert [r.arm for r in results[1].rounds[1:]] == ["plain"] * (len(results[1].rounds) - 1)
    assert arms_used([results[0], results[2], results[3]])["plain"] == 0
    again = decoder.generate(PROMPTS, greedy(LENGTH))
    assert all_fallbacks(again) == [{}] * 4


class RaisingDrafter(TextDrafter):
    def _follow(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("cannot follow")


class RaisingArm(ScriptedChain):
    def draft(self, *arguments: Any, **options: Any) -> Drafts:
        raise ValueError("cannot draft")


@pytest.mark.parametrize("sync", ["eager", "lazy_kv_only"])
@pytest.mark.parametrize("fault", ["follow", "draft"])
def test_a_drafter_that_raises_is_not_asked_again(
    fault: str,
    sync: Any,
    small: Target,
    expected: list[list[int]],
    known: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arms = scripted(known, vocabulary=64)
    if fault == "draft":
        arms["ar"] = RaisingArm(known, vocabulary=64)
    else:
        arms["ar"] = ScriptedChain(known, vocabulary=64, drafter=RaisingDrafter())
    settings = EngineSettings(sync=sync, safe_arm="diffusion")
    decoder = RoutedDecoder(small, arms, StaticPolicy("ar"), settings)
    results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{"ar drafter": 1}] * 4
    # That round has no drafts; from the next one on the safe arm drafts.
    for result in results:
        assert [r.arm for r in result.rounds[:2]] == ["plain", "diffusion"][: len(result.rounds)]
    (warning,) = warnings_of(caplog)
    assert f"cannot {fault}" in warning


def test_where_the_safe_arm_fails_too_nothing_is_drafted(
    small: Target, expected: list[list[int]], known: list[list[int]]
) -> None:
    arms: dict[str, Arm] = {"ar": RaisingArm(known, vocabulary=64)}
    decoder = RoutedDecoder(small, arms, StaticPolicy("ar"), EngineSettings(safe_arm="ar"))
    results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{"ar drafter": 1}] * 4
    assert set(arms_used(results)) == {"plain"}


# --- Caches ------------------------------------------------------------------------------------


@contextmanager
def inplace() -> Iterator[None]:
    with torch.inference_mode():
        yield


def interrupted(
    decoder: RoutedDecoder, prompt: list[int], meddle: Callable[[], None]
) -> Generation:
    """Something happens to the caches after the second round."""
    generation = None
    for count, piece in enumerate(decoder.stream(prompt, greedy(LENGTH))):
        if count == 2:
            with inplace():
                meddle()
        generation = piece.generation
    assert generation is not None
    return generation


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("arm", ["ar", "ar_tree", "diffusion", "diffusion_tree"])
def test_a_cache_that_is_ahead_of_its_text_is_not_used(
    arm: str, debug: bool, small: Target, expected: list[list[int]]
) -> None:
    arms = real_arms(small)
    decoder = RoutedDecoder(small, arms, StaticPolicy(arm), EngineSettings(debug=debug))

    def lead() -> None:
        arms[arm].drafter.kv.lengths[0] += 9

    result = interrupted(decoder, PROMPTS[0], lead)
    assert result.output_ids.tolist() == expected[0]
    assert result.fallbacks == {f"{arm} drafter": 1}
    assert {r.arm for r in result.rounds[2:]} == {"plain"}
    after = decoder.answer(PROMPTS[0], greedy(LENGTH))
    assert after.output_ids.tolist() == expected[0]
    assert not after.fallbacks


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("arm", ["ar", "ar_tree", "diffusion", "diffusion_tree"])
def test_a_cache_that_is_behind_is_brought_up_to_date(
    arm: str, debug: bool, small: Target, expected: list[list[int]]
) -> None:
    arms = real_arms(small)
    decoder = RoutedDecoder(small, arms, StaticPolicy(arm), EngineSettings(debug=debug))
    undisturbed = decoder.answer(PROMPTS[1], greedy(LENGTH))

    def lose() -> None:
        arms[arm].drafter.kv.lengths[0] -= 7

    result = interrupted(decoder, PROMPTS[1], lose)
    assert result.output_ids.tolist() == expected[1]
    assert not result.fallbacks
    assert [r.accepted for r in result.rounds] == [r.accepted for r in undisturbed.rounds]


@pytest.mark.parametrize("arm", ["ar", "ar_tree", "diffusion", "diffusion_tree"])
def test_changed_entries_are_found_in_debug_mode_and_harmless_without(
    arm: str, small: Target, expected: list[list[int]]
) -> None:
    for debug in (True, False):
        arms = real_arms(small)
        decoder = RoutedDecoder(small, arms, StaticPolicy(arm), EngineSettings(debug=debug))

        def change(arms: dict[str, Arm] = arms) -> None:
            arms[arm].drafter.kv.entries(0)[:, :, :, 1] += 1.0

        result = interrupted(decoder, PROMPTS[0], change)
        assert result.output_ids.tolist() == expected[0]
        assert result.fallbacks == ({f"{arm} drafter": 1} if debug else {})


@pytest.mark.parametrize("arm", ["ar", "diffusion", "ar_tree", "diffusion_tree"])
def test_a_cache_that_skipped_a_token_is_found_in_debug_mode(
    arm: str, small: Target, expected: list[list[int]]
) -> None:
    arms = real_arms(small)
    decoder = RoutedDecoder(small, arms, StaticPolicy(arm), EngineSettings(debug=True))

    def skip() -> None:
        arms[arm].drafter.kv.lengths[0] += 1

    result = interrupted(decoder, PROMPTS[0], skip)
    assert result.output_ids.tolist() == expected[0]
    assert result.fallbacks == {f"{arm} drafter": 1}


@pytest.mark.parametrize("arm", ["ar", "diffusion", "ar_tree", "diffusion_tree"])
def test_what_overflowed_in_a_drafter_does_not_reach_the_next_text_in_its_row(
    arm: str, small: Target, expected: list[list[int]]
) -> None:
    """Entries behind a row's length are hidden by a mask, and hidden NaN is still NaN."""
    arms = real_arms(small)
    drafting = arms[arm]
    assert isinstance(drafting, ARArm | DiffusionArm)
    decoder = RoutedDecoder(small, arms, StaticPolicy(arm))
    sound = drafting.net.fc.weight.data.clone()
    drafting.net.fc.weight.data[0, 0] = math.nan
    failed = decoder.generate([PROMPTS[1], PROMPTS[1]], greedy(LENGTH))
    assert all_fallbacks(failed) == [{f"{arm} drafter": 1}] * 2
    drafting.net.fc.weight.data.copy_(sound)
    # Of unlike lengths, so that the shorter row's pass reads what lies behind it.
    results = decoder.generate([PROMPTS[0], PROMPTS[3]], greedy(LENGTH))
    assert texts_of(results) == [expected[0], expected[3]]
    assert all_fallbacks(results) == [{}, {}]


# --- Router ------------------------------------------------------------------------------------


class FaultyPolicy(BasePolicy):
    name = "faulty"
    arms = ("ar",)
    needs_features = True

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def read(self, features: Tensor) -> Tensor:
        if self.fault == "read":
            raise ValueError("cannot read")
        return features[:, :2]

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        if self.fault == "decide":
            raise ValueError("cannot decide")
        if self.fault == "nothing":
            return None  # pyright: ignore
        ar = states.arms.index("ar")
        longest = states.max_draft[:, ar]
        arm = {"arm behind the last": len(states.arms), "arm before the first": -1}
        drafts = {"too many drafts": longest + 1, "fewer than none": np.full_like(longest, -1)}
        unknown = np.full(len(states), np.nan)
        return Decisions(
            arms=np.full(len(states), arm.get(self.fault, ar)),
            num_draft=drafts.get(self.fault, longest),
            expected=unknown,
            price=unknown,
            reasons=[""] * len(states),
        )


FAULTS = [
    "read",
    "decide",
    "nothing",
    "arm behind the last",
    "arm before the first",
    "too many drafts",
    "fewer than none",
]


@pytest.mark.parametrize("safe_arm", ["plain", "diffusion_tree"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_router_that_fails_is_not_asked_again(
    fault: str,
    safe_arm: str,
    small: Target,
    expected: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = EngineSettings(safe_arm=safe_arm)
    decoder = RoutedDecoder(small, arms_of(64), FaultyPolicy(fault), settings)
    results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{"router": 1}] * 4
    assert set(arms_used(results)) == {safe_arm}
    assert len(warnings_of(caplog)) == 1
    decoder.policy = EntropyPolicy(THRESHOLDS[64])
    assert all_fallbacks(decoder.generate(PROMPTS, greedy(LENGTH))) == [{}] * 4


def test_a_router_that_works_falls_back_nowhere(small: Target, expected: list[list[int]]) -> None:
    decoder = RoutedDecoder(small, arms_of(64), FaultyPolicy("none"))
    results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert texts_of(results) == expected
    assert all_fallbacks(results) == [{}] * 4


# --- The target --------------------------------------------------------------------------------


@contextmanager
def overflow_at(target: Target, token: int, value: float) -> Iterator[None]:
    """Whatever the target reads at this token turns into numbers that are none."""

    def spoil(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return torch.where((inputs[0] == token)[..., None], value, output)

    handle = target.model.get_input_embeddings().register_forward_hook(spoil)  # pyright: ignore
    try:
        yield
    finally:
        handle.remove()


@pytest.fixture(scope="module")
def fatal(small: Target, expected: list[list[int]]) -> tuple[int, int, int]:
    """Which answer says a token that no other text has, which token, and where."""
    texts = [p + e for p, e in zip(PROMPTS, expected, strict=True)]
    everything = Counter(token for text in texts for token in text)
    found = [
        (index, token, place)
        for index, answer in enumerate(expected)
        for place, token in enumerate(answer[:-1])
        if place >= 3 and everything[token] == 1 and token > 5 and token not in small.stop_ids
    ]
    return found[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("arm", ["plain", "ar", "diffusion", "random"])
@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_an_answer_ends_where_the_target_overflows_and_the_others_go_on(
    max_rows: int,
    arm: str,
    value: float,
    small: Target,
    expected: list[list[int]],
    known: list[list[int]],
    fatal: tuple[int, int, int],
) -> None:
    victim, token, place = fatal
    arms = {
        name: ScriptedChain(known, max_draft=longest, vocabulary=5)
        for name, longest in (("ar", 3), ("diffusion", 5))
    }
    policy = RandomPolicy(3) if arm == "random" else StaticPolicy(arm)
    decoder = RoutedDecoder(small, arms, policy)
    with overflow_at(small, token, value):
        results = decoder.generate(PROMPTS, greedy(LENGTH), max_rows=max_rows)
    failed = results[victim]
    assert failed.finish_reason == "error"
    assert not failed.stopped
    said = failed.output_ids.tolist()
    assert said == expected[victim][: len(said)]
    assert len(said) <= place + 1
    if arm == "plain":
        assert len(said) == place + 1
    position = len(PROMPTS[victim]) + len(said) - 1
    assert failed.error == f"the target's logits behind position {position} are not numbers"
    wanted = [said if i == victim else text for i, text in enumerate(expected)]
    assert texts_of(results) == wanted
    assert [r.finish_reason for r in results].count("error") == 1
    # Nothing of it is left in the rows for those who come after.
    again = decoder.generate(PROMPTS, greedy(LENGTH), max_rows=max_rows)
    assert texts_of(again) == expected
    assert {r.finish_reason for r in again} <= {"length", "stop_id"}


def unsaid(expected: list[list[int]]) -> int:
    said = {token for text in (*PROMPTS, *expected) for token in text}
    return next(token for token in range(5, 64) if token not in said)


@pytest.mark.parametrize("arm", ["plain", "ar"])
@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_prompt_that_overflows_has_an_empty_answer_and_spoils_no_row(
    max_rows: int,
    arm: str,
    small: Target,
    expected: list[list[int]],
    known: list[list[int]],
) -> None:
    token = unsaid(expected)
    prompts = [[token, *PROMPTS[0]], *PROMPTS, [7, token]]
    arms = {"ar": ScriptedChain(known, max_draft=3, vocabulary=5)}
    decoder = RoutedDecoder(small, arms, StaticPolicy(arm))
    with overflow_at(small, token, math.nan):
        answers = decoder.generate(prompts, greedy(LENGTH), max_rows=max_rows)
    for failed in (answers[0], answers[5]):
        assert failed.finish_reason == "error"
        assert failed.output_ids.tolist() == []
        assert failed.rounds == []
        assert "behind position" in failed.error
    assert texts_of(answers[1:5]) == expected


class WrongIdea(ScriptedChain):
    """Its second draft is always the same wrong token."""

    wrong = 0

    def _ahead(self, texts: Texts, row: int, count: int) -> list[int]:
        ahead = super()._ahead(texts, row, count)
        return [*ahead[:1], self.wrong, *ahead[2:]][:count]


@pytest.mark.parametrize("max_rows", [1, 4])
def test_a_wrong_draft_on_which_the_target_overflows_changes_no_answer(
    max_rows: int, small: Target, expected: list[list[int]], known: list[list[int]]
) -> None:
    """Plain decoding never reads it."""
    arm = WrongIdea(known, max_draft=4, vocabulary=64)
    arm.wrong = unsaid(expected)
    decoder = RoutedDecoder(small, {"ar": arm}, StaticPolicy("ar"))
    with overflow_at(small, arm.wrong, math.nan):
        results = decoder.generate(PROMPTS, greedy(LENGTH), max_rows=max_rows)
    assert texts_of(results) == expected


def test_an_answer_that_stops_before_the_target_overflows_is_whole(
    small: Target, expected: list[list[int]], known: list[list[int]], fatal: tuple[int, int, int]
) -> None:
    """What the target holds behind a stop that was drafted is of no concern."""
    victim, token, place = fatal
    arm = ScriptedChain(known, max_draft=6, vocabulary=5)
    for name in ("plain", "ar"):
        decoder = RoutedDecoder(small, {"ar": arm}, StaticPolicy(name))
        with overflow_at(small, token, math.nan):
            result = decoder.answer(PROMPTS[victim], greedy(LENGTH, stop_ids=frozenset({token})))
        assert result.finish_reason == "stop_id"
        assert result.output_ids.tolist() == expected[victim][: place + 1]


def test_a_router_is_not_blamed_for_a_target_that_overflows(
    small: Target, known: list[list[int]], fatal: tuple[int, int, int]
) -> None:
    victim, token, _ = fatal
    arms = {
        name: ScriptedChain(known, max_draft=longest, vocabulary=5)
        for name, longest in (("ar", 3), ("diffusion", 5))
    }
    decoder = RoutedDecoder(small, arms, EntropyPolicy(THRESHOLDS[64]))
    with overflow_at(small, token, math.nan):
        results = decoder.generate(PROMPTS, greedy(LENGTH))
    assert [r.finish_reason == "error" for r in results] == [i == victim for i in range(4)]
    assert [bool(r.fallbacks.get("router")) for r in results] == [False] * 4
