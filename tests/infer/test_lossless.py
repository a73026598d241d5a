from __future__ import annotations

import pytest
import torch

from tests.fakes import random_ids
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.lossless import Difference, difference, first_difference, flips
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.target import Target


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_ids(12, seed=0).tolist()


@pytest.fixture(scope="module")
def plain(target: Target, prompt: list[int]) -> list[int]:
    options = GenerationOptions(max_new_tokens=20, stop_ids=frozenset())
    decoder = RoutedDecoder(target, {}, StaticPolicy("plain"))
    return decoder.answer(prompt, options).output_ids.tolist()


@pytest.mark.parametrize(
    ("found", "place"), [([1, 2, 3], None), ([1, 5, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3)]
)
def test_answers_differ_at_the_first_token_that_is_another(
    found: list[int], place: int | None
) -> None:
    assert first_difference([1, 2, 3], found) == place


def test_the_gap_is_that_of_the_targets_logits(
    target: Target, prompt: list[int], plain: list[int]
) -> None:
    other = [*plain[:7], (plain[7] + 1) % 261, *plain[8:]]
    found = difference(target, prompt, plain, other)
    assert found is not None
    with torch.no_grad():
        logits = target.model(torch.tensor([prompt + plain[:7]])).logits[0, -1]  # pyright: ignore
    assert found.place == 7
    expected = float(logits[plain[7]] - logits[other[7]])
    assert found.gap == pytest.approx(expected, rel=1e-4)
    size = max(abs(float(logits[plain[7]])), abs(float(logits[other[7]])))
    assert found.step == pytest.approx(size / 128)
    assert difference(target, prompt, plain, plain) is None


def test_an_answer_that_ends_early_is_no_near_tie(
    target: Target, prompt: list[int], plain: list[int]
) -> None:
    found = difference(target, prompt, plain, plain[:5])
    assert found is not None
    assert found.place == 5
    assert not found.is_near_tie


def test_a_gap_of_a_few_rounding_steps_is_a_near_tie() -> None:
    assert Difference(0, gap=0.5, step=0.125).is_near_tie
    assert not Difference(0, gap=2.0, step=0.125).is_near_tie


def test_in_float32_no_token_flips_in_wider_passes(
    target: Target, prompt: list[int], plain: list[int]
) -> None:
    for width in (1, 3, 8, 32):
        assert flips(target, prompt, plain, width=width) == 0


def test_tokens_that_the_target_would_not_say_are_counted(
    target: Target, prompt: list[int], plain: list[int]
) -> None:
    # Only the token itself is wrong here: what follows it is counted where it differs, too.
    spoilt = [*plain[:-1], (plain[-1] + 1) % 261]
    assert flips(target, prompt, spoilt, width=4) == 1
