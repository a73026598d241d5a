"""A router and its costs for the target that throws dice, with real drafters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.infer.test_engine_sampling import dice, drafting_trees
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.policies import HazardSettings
from whiflash_infer.routing.router import Router, RouterSettings


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
