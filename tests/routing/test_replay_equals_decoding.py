"""The engine's rounds and replayed ones, under every policy, with real drafters in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.infer.test_engine import prompt_of
from tests.infer.test_engine_sampling import dice, drafting_trees
from tests.routing.made import made_router
from whiflash_infer.benchmark import Question
from whiflash_infer.hindsight import HINDSIGHT
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.router import ROUTED, Router
from whiflash_infer.settings import EngineSettings
from whiflash_train.evaluation.replay_check import Comparison, compare

QUESTIONS = [
    Question(f"q{n}", category, prompt_of(length, vocabulary=8))
    for n, (length, category) in enumerate([(3, "a"), (17, "b"), (1, "a"), (9, "c"), (24, "b")])
]


def compared(router: Router) -> dict[str, Comparison]:
    target = dice()
    options = GenerationOptions(max_new_tokens=40, stop_ids=frozenset({5}))
    found = compare(target, drafting_trees(target), router, QUESTIONS, options, EngineSettings())
    return {one.policy: one for one in found}


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        (0, {}),
        (1, {"switch_margin": 0.05, "dwell": 3}),
        (2, {"latch": 4}),
        (3, {"adaptive_length": False}),
    ],
)
def test_every_policy_visits_the_rounds_that_its_replay_visits(
    seed: int, settings: dict[str, Any]
) -> None:
    found = compared(made_router(seed=seed, **settings))
    wanted = {"plain", *ROUTED, *HINDSIGHT, "random", "static_ar_tree", "static_diffusion_tree"}
    assert wanted <= found.keys()
    assert {name: one.differences for name, one in found.items() if one.differences} == {}
    plain = found["plain"].num_rounds
    assert found["static_ar_tree"].num_rounds < plain  # drafts are accepted
    assert found["oracle_path"].modelled == min(one.modelled for one in found.values())


def test_hazard_decisions_there_are_of_all_kinds() -> None:
    """Otherwise the comparison would show little."""
    rounds = [compared(made_router(seed=seed))["hazard"].num_rounds for seed in range(2)]
    plain = compared(made_router(seed=0))["plain"].num_rounds
    assert np.all(np.array(rounds) < plain)
