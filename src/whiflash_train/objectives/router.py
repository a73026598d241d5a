"""The router's objective."""

from __future__ import annotations

import torch

from whiflash_infer.nets.router import RouterNet, hazard_loss
from whiflash_train.objectives.common import Mean, Outcome
from whiflash_train.router_data import RouterBatch


def router_objective(net: RouterNet, batch: RouterBatch) -> Outcome:
    """Censored likelihood of each arm's accepted length."""
    longest = torch.tensor(list(net.config.max_draft.values()), device=batch.features.device)
    loss = hazard_loss(net(batch.features), batch.accepted, batch.censored, longest)
    return loss, {"loss": Mean(loss.detach(), len(batch.features))}
