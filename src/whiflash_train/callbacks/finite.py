"""A step whose gradients are not finite teaches nothing."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from whiflash_infer.errors import UserError


class SkipNonFinite(Callback):
    """Leaves weights and optimiser as they were, counts, and gives up after so many in a row.

    The schedule goes on, since a batch belongs to its step.
    """

    def __init__(self, *, max_skipped: int) -> None:
        self._max_skipped = max_skipped
        self.skipped = self._in_a_row = 0
        self._rows: list[int] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._rows = []
        rows = getattr(batch, "rows", None)
        self._rows += [] if rows is None else rows.tolist()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if _finite(pl_module):
            self._in_a_row = 0
        else:
            self.skipped += 1
            self._in_a_row += 1
            optimizer.zero_grad(set_to_none=True)  # without gradients, a step changes nothing
        pl_module.log("train/skipped", float(self.skipped), batch_size=1)
        if self._in_a_row >= self._max_skipped:
            raise UserError(
                f"gradients were not finite in {self._in_a_row} steps in a row, the last at step "
                f"{trainer.global_step}, rows {self._rows} of the training data. Lower the "
                "learning rate, raise fit.max_skipped, or look at these rows"
            )

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]


def _finite(module: nn.Module) -> bool:
    """Of summed gradients, so that every process gives the same answer."""
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    norm = get_total_norm(grads)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return bool(torch.isfinite(norm))
