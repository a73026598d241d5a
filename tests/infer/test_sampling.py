from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from whiflash_infer.options import GenerationOptions
from whiflash_infer.sampling import choose, draw, largest, probabilities, uniforms

JUST_BELOW_ONE = 1.0 - 2.0**-53
WIDE = 8192  # wide enough to look for the largest values in chunks, and to widen the search


def random_logits(seed: int, rows: int, vocabulary: int, *, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * spread


def log(*probs: float) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64).log().float()


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def near_the_cut(scores: Tensor, top_p: float, min_p: float) -> bool:
    """Whether rounding could decide which tokens stay."""
    probs = scores.double().softmax(-1)
    mass = probs.sort(-1, descending=True).values.cumsum(-1)
    ratio = probs / probs.amax(-1, keepdim=True)
    close_mass = top_p < 1.0 and bool(((mass - top_p).abs() < 5e-6).any())
    return close_mass or bool(((ratio - min_p).abs() < 1e-5 * min_p).any())


def warped(scores: Tensor, *warpers: LogitsProcessor) -> Tensor:
    no_ids: Any = torch.zeros(len(scores), 1, dtype=torch.long)
    for warper in warpers:
        scores = warper(no_ids, scores)  # pyright: ignore[reportArgumentType]
    return scores


def agrees_with_hugging_face(
    logits: Tensor, temperature: float, *, top_k: int | None, top_p: float, min_p: float
) -> bool:
    """False where nothing can be said, because rounding decides."""
    by_rank = [TopKLogitsWarper(top_k)] if top_k else []
    by_mass = [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    by_ratio = [MinPLogitsWarper(min_p)] if min_p > 0.0 else []
    scores = warped(logits, TemperatureLogitsWarper(temperature), *by_rank)
    if near_the_cut(scores, top_p, min_p):
        return False
    expected = warped(scores, *by_mass, *by_ratio).softmax(-1)
    probs = probabilities(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert torch.equal(probs > 1e-30, expected > 1e-30)
    torch.testing.assert_close(probs, expected, rtol=1e-4, atol=1e-9)
    return True


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([1, 2, 7, 64, 200]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.just(1.0) | st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
)
def test_the_distribution_is_that_of_hugging_faces_warpers(
    seed: int,
    vocabulary: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
) -> None:
    logits = random_logits(seed, 3, vocabulary)
    assume(agrees_with_hugging_face(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (50, 1.0, 0.0),
        (50, 0.8, 0.01),
        (3000, 0.7, 0.0),
        (None, 0.6, 0.0),
        (None, 0.95, 0.0),
        (None, 0.9, 0.3),
        (None, 1.0, 0.05),
    ],
)
def test_sharp_and_flat_rows_of_a_wide_vocabulary_are_filtered_side_by_side(
    top_k: int | None, top_p: float, min_p: float
) -> None:
    spread = torch.tensor([6.0, 0.5, 3.0, 1.5, 6.0])[:, None]
    drawings = (random_logits(seed, 5, WIDE, spread=1.0) * spread for seed in range(20))
    agreed = [
        agrees_with_hugging_face(logits, 1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        for logits in drawings
    ]
    assert sum(agreed) >= 8


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"top_k": 1}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 2}, [0.5, 0.25, 0.25, 0.0]),  # the third ties with the second
        ({"top_k": 9}, [4 / 9, 2 / 9, 2 / 9, 1 / 9]),
        ({"top_p": 0.4}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_p": 0.45}, [0.5, 0.25, 0.25, 0.0]),  # one of two equals would do: both stay
        ({"top_p": 0.9}, [4 / 9, 2 / 9, 2 / 9, 1 / 9]),
        ({"min_p": 0.3}, [0.5, 0.25, 0.25, 0.0]),
        ({"min_p": 1.0}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 2, "top_p": 0.45}, [1.0, 0.0, 0.0, 0.0]),  # .5 of what top-k left
    ],
)
def test_filters_keep_what_a_hand_calculation_keeps(
    filters: dict[str, Any], expected: list[float]
) -> None:
    probs = probabilities(log(0.4, 0.2, 0.2, 0.1), 1.0, **filters)
    assert probs[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert probs.dtype == torch.float32


def test_temperature_one_half_squares_the_probabilities() -> None:
    probs = probabilities(log(0.4, 0.2, 0.2, 0.1), 0.5)
    assert probs[0].tolist() == pytest.approx([0.64, 0.16, 0.16, 0.04], abs=1e-6)


def test_temperature_zero_is_one_hot_whatever_the_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]], dtype=torch.bfloat16)
    probs = probabilities(logits, 0.0, top_k=2, top_p=0.1, min_p=0.5)
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_tokens_ruled_out_by_minus_infinity_keep_no_probability() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0]])
    filters: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.1}]
    for options in filters:
        assert probabilities(logits, 1.0, **options).tolist() == [[0.0, 0.5, 0.0, 0.5]]


@pytest.mark.parametrize(("width", "count"), [(WIDE, 50), (WIDE, 1), (WIDE, 5000), (1000, 3)])
def test_the_largest_values_are_those_of_a_full_sort(width: int, count: int) -> None:
    values = random_logits(7, 5, width).round(decimals=1)  # with many equals
    expected = np.sort(values.numpy(), axis=-1)[:, ::-1][:, :count]
    assert np.array_equal(largest(values, count).numpy(), expected)


def test_a_fine_grid_of_numbers_gives_every_token_exactly_its_share() -> None:
    pmf = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125])
    grid = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    tokens = draw(pmf.expand(800, -1), grid)
    assert tokens.bincount(minlength=5).tolist() == [100, 0, 400, 200, 100]
    assert torch.equal(tokens, tokens.sort().values)


def test_shares_are_exact_in_a_vocabulary_that_is_searched_in_pieces() -> None:
    pmf = torch.zeros(256)
    pmf[[0, 63, 64, 130, 131, 255]] = torch.tensor([0.125, 0.25, 0.125, 0.0625, 0.1875, 0.25])
    grid = (torch.arange(1600, dtype=torch.float64) + 0.5) / 1600
    counts = draw(pmf.expand(1600, -1), grid).bincount(minlength=256)
    assert counts.tolist() == (pmf * 1600).tolist()


def test_an_interval_holds_its_lower_bound_and_not_its_upper() -> None:
    pmf = torch.tensor([0.125, 0.0, 0.5, 0.375])
    bounds = numbers(0.0, 0.125 - 1e-12, 0.125, 0.625 - 1e-12, 0.625, JUST_BELOW_ONE)
    assert draw(pmf.expand(6, -1), bounds).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("scale", [1.0, 0.9999, 1.0001, 1.0 + 2.0**-22])
def test_numbers_at_both_ends_reach_possible_tokens_whatever_the_sum(scale: float) -> None:
    pmf = torch.tensor([0.0, 1 / 3, 0.0, 1 / 3, 1 / 3, 0.0, 0.0]) * scale
    ends = numbers(0.0, JUST_BELOW_ONE, 1.0)
    assert draw(pmf.expand(3, -1), ends).tolist() == [1, 4, 4]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), share=st.floats(0.0, 0.99), width=st.sampled_from([3, 50, 6400])
)
def test_a_token_of_probability_zero_is_never_drawn(seed: int, share: float, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(1, width, generator=generator)
    probs[torch.rand(1, width, generator=generator) < share] = 0.0
    probs[0, seed % width] = 1e-3
    probs = probs / probs.sum()
    points = torch.cat([torch.rand(60, generator=generator).double(), numbers(0, JUST_BELOW_ONE)])
    tokens = draw(probs.expand(len(points), -1), points)
    assert bool((probs[0, tokens] > 0).all())
    # By NumPy, the cumulative probability brackets every number.
    cumulative = np.cumsum(probs[0].double().numpy())
    bounds = np.concatenate([[0.0], cumulative]) / cumulative[-1]
    chosen, points = tokens.numpy(), points.numpy()
    assert (bounds[chosen] <= points + 1e-6).all()
    assert (bounds[chosen + 1] >= points - 1e-6).all()


def test_chosen_tokens_follow_the_filtered_distribution() -> None:
    logits = log(0.3, 0.05, 0.2, 0.4, 0.05)
    options = GenerationOptions(temperature=1.0, top_k=3)
    count = 9_000
    tokens = choose(logits.expand(count, -1), options, uniforms(5, count))
    counts = tokens.bincount(minlength=5).numpy()
    assert counts[[1, 4]].tolist() == [0, 0]
    assert chisquare(counts[[0, 2, 3]], [3_000, 2_000, 4_000]).pvalue > 0.01


def test_greedy_choices_are_the_likeliest_tokens_whatever_the_numbers() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    for number in (0.0, JUST_BELOW_ONE):
        assert choose(logits, GenerationOptions(), numbers(number, number)).tolist() == [1, 0]


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_a_row_is_answered_alike_alone_and_among_others(filters: dict[str, Any]) -> None:
    options = GenerationOptions(temperature=0.8, **filters)
    logits, points = random_logits(11, 9, WIDE, spread=4.0), uniforms(1, 9)
    together = choose(logits, options, points)
    alone = [choose(logits[row : row + 1], options, points[row : row + 1]) for row in range(9)]
    assert torch.equal(together, torch.cat(alone))
    assert len(set(together.tolist())) > 3


def test_no_rows_give_no_tokens() -> None:
    options = GenerationOptions(temperature=1.0, top_k=50, top_p=0.9, min_p=0.1)
    assert choose(torch.zeros(0, WIDE), options, numbers()).tolist() == []


def test_numbers_do_not_depend_on_how_many_are_asked_for() -> None:
    long = uniforms(3, 1000)
    for count in (0, 1, 2, 3, 5, 64, 999):
        assert torch.equal(uniforms(3, count), long[:count])


def test_numbers_are_those_of_numpys_generator() -> None:
    bits = np.random.Philox(key=np.array([12, 2], dtype=np.uint64))
    expected = np.random.Generator(bits).random(50)
    drawn = uniforms(12, 50, stream=2)
    assert np.array_equal(drawn.numpy(), expected)
    assert drawn.dtype == torch.float64


def test_seeds_and_streams_give_independent_uniform_numbers() -> None:
    columns = [uniforms(seed, 4000, stream) for seed in (0, 1, 2**64 - 1) for stream in (0, 1, 2)]
    table = torch.stack(columns)
    assert all(kstest(row.numpy(), "uniform").pvalue > 0.001 for row in table)
    related = torch.corrcoef(table) - torch.eye(len(table), dtype=torch.float64)
    assert float(related.abs().max()) < 0.06  # 4 standard errors of 4000 pairs
    assert len(table.unique()) == table.numel()
