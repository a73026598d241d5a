"""The state features against their plain formulas in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from scipy.special import log_softmax, xlogy
from torch import Tensor

from whiflash_infer.routing.features import (
    NUM_SCALARS,
    SCALARS,
    feature_entropy,
    router_features,
)


def plain_scalars(logits: Float[Tensor, "N V"]) -> np.ndarray:
    """[N, 3]: entropy, the greatest probability, and by how much it leads."""
    probs = np.exp(log_softmax(logits.double().numpy(), axis=-1))
    ordered = np.sort(probs, axis=-1)
    entropy = -xlogy(probs, probs).sum(-1)
    return np.stack([entropy, ordered[:, -1], ordered[:, -1] - ordered[:, -2]], axis=-1)


def scalars(logits: Float[Tensor, "N V"]) -> np.ndarray:
    hidden, positions = torch.zeros(len(logits), 2), torch.arange(len(logits))
    return router_features(logits, hidden, positions)[:, :3].numpy()


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("num_tokens", [2, 7, 64, 640, 49152])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scalars_equal_the_plain_formulas(
    num_rows: int, num_tokens: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    for spread in (0.1, 3.0, 30.0):
        logits = (spread * torch.randn(num_rows, num_tokens, generator=generator)).to(dtype)
        before = logits.clone()
        np.testing.assert_allclose(scalars(logits), plain_scalars(logits), atol=1e-5)
        assert torch.equal(logits, before)


values = st.one_of(
    st.just(-math.inf),
    st.floats(-3e38, 3e38),
    st.floats(-100, 100),
    st.sampled_from([0.0, 1e30, -1e30]),
)


@given(st.lists(values, min_size=2, max_size=12).filter(lambda row: max(row) > -math.inf))
@settings(max_examples=200, deadline=None)
def test_impossible_tokens_and_extreme_logits_give_the_plain_formulas_values(
    row: list[float],
) -> None:
    logits = torch.tensor([row])
    np.testing.assert_allclose(scalars(logits), plain_scalars(logits), atol=1e-5)


def test_impossible_tokens_count_nothing_in_a_wide_vocabulary() -> None:
    logits = torch.full((12, 640), -math.inf)
    logits[0, 17] = 3.0
    logits[1, :4] = 1e4
    expected = [[0.0, 1.0, 1.0], [math.log(4), 0.25, 0.0]]
    # Wherever the second best stands, of 3 : 1 it leaves half the probability as margin.
    for row, second in enumerate((16, 18, 27, 37, 81, 145, 209, 337, 529, 639), start=2):
        logits[row, 17], logits[row, second] = math.log(3.0), 0.0
        expected.append([math.log(4) - 0.75 * math.log(3), 0.75, 0.5])
    np.testing.assert_allclose(scalars(logits), expected, atol=1e-6)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    logits = torch.tensor([[0.0, math.nan, 1.0], [math.inf, 0.0, 0.0], [-math.inf] * 3])
    assert np.isnan(scalars(logits)).all()


def test_features_are_the_scalars_then_the_hidden_state() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    hidden = torch.tensor([[1.5, -2.0, 0.25], [0.0, 4.0, 8.0]]).bfloat16()
    features = router_features(logits, hidden, torch.tensor([0, 99]))
    assert features.dtype == torch.float32
    assert torch.equal(features[:, NUM_SCALARS:], hidden.float())
    assert features[:, SCALARS.index("log_position")].tolist() == pytest.approx([0, math.log(100)])
    assert features[:, SCALARS.index("top1")].tolist() == pytest.approx([0.5, 0.75])
    assert features[:, SCALARS.index("margin")].tolist() == pytest.approx([0.0, 0.5])
    in_nats = [math.log(2), -0.75 * math.log(0.75) - 0.25 * math.log(0.25)]
    assert feature_entropy(features).tolist() == pytest.approx(in_nats)
