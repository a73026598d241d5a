"""The engine's rounds and replayed ones, under every policy, with real drafters in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.infer.test_engine import prompt_of
from tests.infer.test_engine_sampling import dice, drafting_trees
from whiflash_infer.benchmark import Question
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.policies import HazardSettings
from whiflash_infer.routing.router import ROUTED, Router, RouterSettings
from whiflash_infer.settings import EngineSettings
from whiflash_train.replay_check import HINDSIGHT, Comparison, compare

QUESTIONS = [
    Question(f"q{n}", category, prompt_of(length, vocabulary=8))
    for n, (length, category) in enumerate([(3, "a"), (17, "b"), (1, "a"), (9, "c"), (24, "b")])
]


def cost_model() -> CostModel:
    """Round numbers, at which every arm is worth it somewhere."""
    arms = drafting_trees(dice())
    lengths = {name: arm.max_draft for name, arm in arms.items()}
    nodes = {name: list(range(length + 1)) for name, length in lengths.items()}
    nodes |= {t: [0, *[arms[t].max_nodes] * lengths[t]] for t in ("ar_tree", "diffusion_tree")}
    passes = PassCosts(
        verify=[(1.0 + w / 100, 0.001) for w in range(1, 12)],
        draft={
            "ar": [0.1 * length for length in range(lengths["ar"] + 1)],
            "ar_tree": [0.0, *[0.2] * lengths["ar_tree"]],
            "diffusion": [0.0, *[0.15] * lengths["diffusion"]],
            "diffusion_tree": [0.0, *[0.18] * lengths["diffusion_tree"]],
        },
        catch_up={"ar": (0.01, 0.001), "diffusion": (0.02, 0.0005)},
        overhead=0.01,
    )
    here = DeviceIdentity(device="abacus", threads=1, dtype="float32")
    # Together, drafting is never worth it; these texts are decoded one by one.
    together = replace(passes, draft={arm: [9.0 * s for s in d] for arm, d in passes.draft.items()})
    batches = {1: passes, 4: together, 16: together}
    return CostModel(device=here, target="dice", nodes=nodes, batches=batches)


def made_router(*, seed: int, **settings: Any) -> Router:
    """Random networks: what they say does not matter, only that both sides hear it."""
    arms = drafting_trees(dice())
    max_draft = {
        arm: arms[arm].max_draft for arm in ("ar", "diffusion", "ar_tree", "diffusion_tree")
    }
    hidden = dice().config.hidden_size
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = RouterNet(RouterConfig(num_features=4 + hidden, width=16, max_draft=max_draft)).eval()
        net.paces.normal_()
        for network in (net.hazards, net.difference):
            for parameter in network.parameters():
                parameter.data.mul_(2.0)
    return Router(
        net=net.requires_grad_(False),
        settings=RouterSettings(
            hazard=HazardSettings(lam=1.2, frailty=3.0, **settings),
            entropy_threshold=1.7,
            delta_threshold=0.0,
            category_arms={"a": "diffusion", "b": "ar_tree"},
        ),
        costs=cost_model(),
        manifest={},
    )


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
