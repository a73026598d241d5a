from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions, logits_processors

IDS = torch.tensor([[0, 1, 1, 2, 2, 4]])
PROMPT_LENGTH = 2  # the output is 1 2 2 4


class Doubled(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * 2.0


def processed(options: GenerationOptions, logits: list[float]) -> list[float]:
    scores = torch.tensor([logits])
    for processor in logits_processors(options, PROMPT_LENGTH):
        scores = processor(IDS, scores)  # pyright: ignore[reportArgumentType]
    return scores[0].tolist()


def test_by_default_an_answer_is_greedy_and_logits_stay_as_they_are() -> None:
    options = GenerationOptions()
    assert options.is_greedy
    assert logits_processors(options, PROMPT_LENGTH) == []


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("temperature", -0.1, "0 (greedy)"),
        ("temperature", math.nan, "0 (greedy)"),
        ("temperature", math.inf, "finite"),
        ("temperature", 1e-30, "at least 1e-06"),
        ("top_k", 0, "at least 1"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("seed", -1, "from 0 to 2**64 - 1"),
        ("seed", 2**64, "from 0 to 2**64 - 1"),
        ("stop_ids", frozenset({-1}), "set of token ids"),
        ("stop_strings", ("end", ""), "none of them empty"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", math.inf, "finite"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
    ],
)
def test_an_illegal_option_is_named_with_its_value_and_its_range(
    field: str, value: Any, legal: str
) -> None:
    with pytest.raises(UserError) as caught:
        GenerationOptions(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} is {value!r}, ")
    assert legal in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "value", "legal"),
    [
        ("max_new_tokens", 2.5, "whole number"),
        ("max_new_tokens", True, "whole number"),
        ("temperature", "warm", "0 (greedy)"),
        ("top_k", 1.0, "whole number"),
        ("stop_ids", 2, "set of token ids"),
        ("stop_strings", "end", "a tuple of strings"),
        ("processors", (3,), "logits processors"),
        ("allowed_tokens", [1, 2], "a function"),
    ],
)
def test_a_value_of_another_type_is_named_as_well(field: str, value: Any, legal: str) -> None:
    options = GenerationOptions()
    object.__setattr__(options, field, value)  # past the type checks that only tests have
    with pytest.raises(UserError) as caught:
        options.__post_init__()
    assert str(caught.value).startswith(f"{field} is {value!r}, ")
    assert legal in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-6, "top_k": 1, "top_p": 1e-9, "min_p": 1.0},
        {"temperature": 100.0, "min_p": 0.0, "seed": 2**64 - 1, "max_new_tokens": 1},
        {"stop_ids": frozenset(), "stop_strings": ("\n",), "repetition_penalty": 0.5},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "processors": (Doubled(),)},
    ],
)
def test_the_ends_of_every_range_are_legal(options: dict[str, Any]) -> None:
    made = GenerationOptions(**options)
    assert made.is_greedy == ("temperature" not in options)


def test_presence_is_taken_once_and_frequency_by_the_count_in_the_output_alone() -> None:
    logits = [1.0, 1.0, 1.0, 1.0, -math.inf]
    present = GenerationOptions(presence_penalty=0.5)
    assert processed(present, logits) == [1.0, 0.5, 0.5, 1.0, -math.inf]
    frequent = GenerationOptions(frequency_penalty=0.25)
    assert processed(frequent, logits) == [1.0, 0.75, 0.5, 1.0, -math.inf]
    both = GenerationOptions(presence_penalty=0.5, frequency_penalty=-0.25)
    assert processed(both, logits) == [1.0, 0.75, 1.0, 1.0, -math.inf]


def test_an_empty_output_is_not_penalised() -> None:
    options = GenerationOptions(presence_penalty=0.5, frequency_penalty=0.5)
    (penalty,) = logits_processors(options, prompt_length=IDS.shape[1])
    assert penalty(IDS, torch.ones(1, 5)).tolist() == [[1.0] * 5]  # pyright: ignore[reportArgumentType]


def test_repetition_counts_the_prompt_and_divides_or_multiplies_by_the_sign() -> None:
    options = GenerationOptions(repetition_penalty=2.0)
    logits = [1.0, -1.0, 4.0, 3.0, -2.0]
    assert processed(options, logits) == [0.5, -2.0, 2.0, 3.0, -4.0]
    huggingface = RepetitionPenaltyLogitsProcessor(2.0)
    expected = huggingface(IDS, torch.tensor([logits]))  # pyright: ignore[reportArgumentType]
    assert processed(options, logits) == expected[0].tolist()


def test_only_allowed_tokens_keep_their_logits_and_the_callback_sees_all_ids() -> None:
    asked: list[list[int]] = []

    def allow(ids: list[int]) -> list[int]:
        asked.append(ids)
        return [3, 1]

    options = GenerationOptions(allowed_tokens=allow)
    out = -math.inf
    assert processed(options, [0.0, 1.0, 2.0, 3.0, 4.0]) == [out, 1.0, out, 3.0, out]
    assert asked == [[0, 1, 1, 2, 2, 4]]


@pytest.mark.parametrize(
    ("allowed", "message"),
    [([], "allows nothing after 6 tokens"), ([1, 5], "allows 5"), ([-1], "allows -1")],
)
def test_a_callback_that_leaves_no_possible_token_is_an_error(
    allowed: list[int], message: str
) -> None:
    options = GenerationOptions(allowed_tokens=lambda _: allowed)
    with pytest.raises(UserError, match=message):
        processed(options, [0.0] * 5)


def test_penalties_come_before_the_allowed_tokens_and_those_before_the_callers_own() -> None:
    options = GenerationOptions(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        allowed_tokens=lambda _: [1, 3],
        processors=(Doubled(),),
    )
    out = -math.inf
    # Token 1: (4 / 2 - 1) * 2; token 3, not said yet: 4 * 2.
    assert processed(options, [4.0] * 5) == [out, 2.0, out, 8.0, out]
