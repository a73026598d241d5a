"""Does the measurement see a slow-down, and none where there is none? Timings are drawn here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from whiflash_infer.metrics import Answer
from whiflash_infer.types import PHASES, Generation, Round
from whiflash_train.evaluation.measurement_check import Seen, seen, show


def answers_of(policy: str, seconds: np.ndarray) -> list[Answer]:
    """Twenty tokens each, in one round."""
    found = []
    for number, total in enumerate(seconds.tolist()):
        done = Round(3, "ar", 19, 19, 19, 20, 0, False, "", dict.fromkeys(PHASES, total / 5))
        generation = Generation(4, torch.arange(21), [done], 0.1, total)
        found.append(Answer(f"p{number:03d}", "a", policy, generation))
    return found


def judged(slowdown: float, *, seed: int, noise: float = 0.03) -> Seen:
    """96 prompts of all speeds; runs of one prompt differ by noise."""
    rng = np.random.default_rng(seed)
    speeds = rng.lognormal(0.0, 0.4, 96)
    runs = [speeds * (1 + factor) * rng.lognormal(0.0, noise, 96) for factor in (0.0, slowdown)]
    answers = [*answers_of("x", runs[0]), *answers_of("y", runs[1])]
    return seen(answers, "x", "y", slowdown, bootstrap=400, seed=0)


def test_five_percent_are_seen_and_nothing_is_seen_where_nothing_is() -> None:
    slowed = [judged(0.05, seed=seed) for seed in range(40)]
    assert np.mean([one.ratio for one in slowed]) == pytest.approx(1 / 1.05, abs=0.002)
    assert sum(one.is_right for one in slowed) >= 38
    copies = [judged(0.0, seed=seed) for seed in range(40)]
    assert sum(one.is_right for one in copies) >= 35  # 38 are expected


def test_noise_that_hides_the_slow_down_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    one = judged(0.05, seed=1, noise=0.8)
    assert not one.is_right
    show([one], "x", 96)
    told = " ".join(capsys.readouterr().out.split())
    assert "0.952" in told
    assert told.split("│")[-2].strip() == "no"
