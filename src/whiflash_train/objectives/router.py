"""The router's objective."""

from __future__ import annotations

from typing import Literal

import torch

from whiflash_infer.nets.router import RouterNet, brier_loss, delta_loss, hazard_loss
from whiflash_train.objectives.common import Mean, Outcome
from whiflash_train.router_data import RouterBatch

RouterLoss = Literal["likelihood", "brier"]
_LOSSES = {"likelihood": hazard_loss, "brier": brier_loss}


def router_objective(
    net: RouterNet, batch: RouterBatch, *, loss: RouterLoss = "likelihood"
) -> Outcome:
    """Of each arm's accepted length, and the squared error of the difference that the paper's
    policy predicts; their networks share nothing, so neither weighs on the other."""
    longest = torch.tensor(list(net.config.max_draft.values()), device=batch.features.device)
    count = len(batch.features)
    hazards = _LOSSES[loss](net(batch.features), batch.accepted, batch.censored, longest)
    means = {"hazard_loss": Mean(hazards.detach(), count)}
    if not set(net.config.delta_arms) <= set(net.config.arms):
        return hazards, {"loss": Mean(hazards.detach(), count), **means}
    first, second = (net.config.arms.index(arm) - 1 for arm in net.config.delta_arms)
    difference = delta_loss(
        net.delta(batch.features),
        batch.accepted[:, first],
        batch.accepted[:, second],
        batch.censored[:, first] | batch.censored[:, second],
    )
    both = hazards + difference
    means |= {"delta_loss": Mean(difference.detach(), count)}
    return both, {"loss": Mean(both.detach(), count), **means}
