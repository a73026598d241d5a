"""All the Lightning glue there is: step, log, optimise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from whiflash_train.objectives import Outcome

Objective = Callable[[Any, Any], Outcome]


class TraineeModule(L.LightningModule):
    """Shared by the three trainees. The objective holds the mathematics."""

    def __init__(
        self,
        *,
        net: nn.Module,
        objective: Objective,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self._objective = objective
        self._optimizer = optimizer
        self._scheduler = scheduler

    def training_step(self, batch: Any) -> Tensor:
        loss, means = self._objective(self.net, batch)
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=1)
        if "tau" in means:
            self.log("train/tau", means["tau"].value, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any) -> None:
        _, means = self._objective(self.net, batch)
        for name, mean in means.items():
            # Weighted by its count, so the epoch's value is the mean over items, not over batches.
            self.log(
                f"val/{name}",
                mean.value,
                batch_size=mean.count,
                sync_dist=True,
                prog_bar=name in {"loss", "tau"},
            )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._optimizer(p for p in self.net.parameters() if p.requires_grad)
        scheduler = self._scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def cosine_with_warmup(
    optimizer: Optimizer, *, num_steps: int, warmup_fraction: float, final_fraction: float
) -> LRScheduler:
    """Linear warm-up over a fraction of the steps, then a half cosine down to a fraction."""
    warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
