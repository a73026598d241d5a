"""Temperatures and calibration errors on labels drawn from hazards that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Int

from whiflash_infer.nets.router import expected_tokens, hazard_loss
from whiflash_infer.routing.calibration import calibration_error, fit_temperatures

ARMS = ("ar", "diffusion")
MAX_DRAFT = np.array([4, 7])


def drawn(
    num_rows: int, seed: int, *, room: int = 100
) -> tuple[Float[np.ndarray, "N D K"], Int[np.ndarray, "N D"], Bool[np.ndarray, "N P"]]:
    """True hazard logits, and lengths drawn from them; texts of `room` rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-0.5, 1.0, (num_rows, 2, 1)) + rng.normal(0.0, 0.7, (num_rows, 2, 7))
    survives = rng.random(logits.shape) >= 1 / (1 + np.exp(-logits))
    full = np.minimum(survives.cumprod(-1).sum(-1), MAX_DRAFT)
    left = (room - np.arange(num_rows) % room)[:, None]
    return logits, np.minimum(full, left), (full >= left) & (left < MAX_DRAFT)


def expected_of(logits: Float[np.ndarray, "N D K"]) -> Float[np.ndarray, "N D K1"]:
    return expected_tokens(torch.from_numpy(logits)).numpy()


@pytest.mark.parametrize("temperatures", [(1.0, 1.0), (0.5, 2.0), (3.0, 0.7)])
def test_the_temperature_that_hazards_were_scaled_by_is_found(
    temperatures: tuple[float, float],
) -> None:
    logits, accepted, censored = drawn(30_000, seed=1)
    assert censored.any()
    scaled = logits * np.array(temperatures)[:, None]
    found = fit_temperatures(scaled, accepted, censored, MAX_DRAFT)
    np.testing.assert_allclose(found, temperatures, rtol=0.04)


def test_no_other_temperature_has_a_lower_loss_of_training() -> None:
    logits, accepted, censored = drawn(500, seed=2, room=6)
    found = fit_temperatures(logits * 1.7, accepted, censored, MAX_DRAFT)
    labels = torch.from_numpy(accepted), torch.from_numpy(censored), torch.from_numpy(MAX_DRAFT)

    def loss(temperatures: Float[np.ndarray, " D"]) -> float:
        scaled = torch.from_numpy(logits * 1.7 / temperatures[:, None])
        return float(hazard_loss(scaled, *labels))

    for factor in (0.9, 0.98, 1.02, 1.1):
        for arm in range(2):
            other = found.copy()
            other[arm] *= factor
            assert loss(found) < loss(other)


def test_an_arm_of_which_nothing_is_known_keeps_its_hazards() -> None:
    logits, accepted, censored = drawn(200, seed=3)
    accepted[:, 1], censored[:, 1] = 0, True
    found = fit_temperatures(logits, accepted, censored, MAX_DRAFT)
    assert found[1] == 1.0
    assert found[0] != 1.0


def test_what_lies_beyond_the_longest_draft_or_the_text_changes_nothing() -> None:
    logits, accepted, censored = drawn(2_000, seed=4, room=5)
    found = fit_temperatures(logits, accepted, censored, MAX_DRAFT)
    step = np.arange(7)
    unseen = (step > accepted[..., None]) | ((step == accepted[..., None]) & censored[..., None])
    unseen |= step >= MAX_DRAFT[:, None]
    other = np.where(unseen, 50.0, logits)
    np.testing.assert_array_equal(fit_temperatures(other, accepted, censored, MAX_DRAFT), found)


def test_true_hazards_have_hardly_any_error_and_scaled_ones_have_one() -> None:
    logits, accepted, censored = drawn(40_000, seed=5, room=40_000)
    true = calibration_error(expected_of(logits), accepted, censored, MAX_DRAFT, arms=ARMS)
    sure = calibration_error(expected_of(3 * logits), accepted, censored, MAX_DRAFT, arms=ARMS)
    for arm in ARMS:
        assert abs(true[arm]["bias"]) < 0.03
        assert true[arm]["error"] < 0.06
        assert sure[arm]["error"] > 0.3


def test_a_constant_bias_is_found_exactly() -> None:
    # Expected 2.5 of the AR chain, which got 1, 3 and 5 tokens: 3 on average, half a token less
    # than that was expected. Of the block drafter 4 were expected, and 4 came on average.
    expected = np.zeros((3, 2, 8))
    expected[:, 0, 4], expected[:, 1, 7] = 2.5, 4.0
    accepted = np.array([[0, 0], [2, 4], [4, 5]])
    censored = np.zeros((3, 2), dtype=bool)
    found = calibration_error(expected, accepted, censored, MAX_DRAFT, arms=ARMS, num_bins=1)
    assert found["ar"] == {"error": 0.5, "bias": -0.5, "rows": 3}
    assert found["diffusion"] == {"error": 0.0, "bias": 0.0, "rows": 3}


def test_bins_show_errors_that_cancel_in_the_bias() -> None:
    # Two rows expect 1.5 and get 1, two expect 2.5 and get 3.
    expected = np.zeros((4, 1, 3))
    expected[:, 0, 2] = [1.5, 2.5, 1.5, 2.5]
    accepted, censored = np.array([[0], [2], [0], [2]]), np.zeros((4, 1), dtype=bool)
    found = calibration_error(expected, accepted, censored, np.array([2]), arms=("ar",), num_bins=2)
    assert found["ar"] == {"error": 0.5, "bias": 0.0, "rows": 4}


def test_rows_cut_by_the_end_of_text_are_left_out() -> None:
    expected = np.full((3, 1, 3), 2.0)
    accepted, censored = np.array([[1], [0], [2]]), np.array([[False], [True], [True]])
    found = calibration_error(expected, accepted, censored, np.array([2]), arms=("ar",))
    # The third had accepted all that can be drafted: its length is known, and so 3 tokens.
    assert found["ar"] == {"error": 0.5, "bias": -0.5, "rows": 2}


def test_categories_are_told_apart() -> None:
    expected = np.full((4, 1, 2), 1.5)
    accepted, censored = np.array([[0], [1], [1], [1]]), np.zeros((4, 1), dtype=bool)
    censored[3] = True
    accepted[3] = 0
    found = calibration_error(
        expected,
        accepted,
        censored,
        np.array([1]),
        arms=("ar",),
        categories=["code", "json", "json", "maths"],
    )
    assert found["ar"]["by_category"] == {
        "code": {"error": 0.5, "bias": 0.5, "rows": 1},
        "json": {"error": 0.5, "bias": -0.5, "rows": 2},
        "maths": {"error": 0.0, "bias": 0.0, "rows": 0},
    }
