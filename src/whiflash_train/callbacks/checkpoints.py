"""Two checkpoints: the last, to go on from, and the best, to export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from whiflash_infer.artifacts import read_json, write_json


class Checkpoints(Checkpoint):
    """`last.ckpt` every `every` steps and at the end, `best.ckpt` where `monitor` is highest.

    `best.json` holds the validation metrics of the best. Nothing is remembered of the folder's
    name, so a run folder can be moved. Where a validation is due at a step, it comes first.
    """

    def __init__(self, folder: Path, *, monitor: str, every: int, val_every: int) -> None:
        self.best, self.last = folder / "best.ckpt", folder / "last.ckpt"
        self.monitor = monitor
        self._every, self._val_every = every, val_every
        self._saved_step = 0
        self.validated_step = -1

    @property
    def best_metrics(self) -> dict[str, float]:
        """Empty before the first validation."""
        path = self.best.with_suffix(".json")
        return read_json(path) if path.is_file() else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self._val_every:
            self._keep_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated_step = trainer.global_step
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        best = self.best_metrics.get(self.monitor)
        if best is None or metrics.get(self.monitor, float("nan")) > best:
            trainer.save_checkpoint(self.best)
            if trainer.is_global_zero:
                best_json = self.best.with_suffix(".json")
                write_json(best_json, {"step": float(trainer.global_step), **metrics})
            trainer.strategy.barrier()
        self._keep_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_last(trainer, due=True)

    def _keep_last(self, trainer: Trainer, *, due: bool = False) -> None:
        step = trainer.global_step
        if (due or step % self._every == 0) and step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(self.last)
