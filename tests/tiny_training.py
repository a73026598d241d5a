"""A training of seconds: a table learns which token follows which, on made-up conversations."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from tests.stages import ROOT
from whiflash_train import runner
from whiflash_train.batches import DrafterBatch, TrainingBatches, validation_batches
from whiflash_train.module import Objective
from whiflash_train.objectives import Mean, Outcome
from whiflash_train.objectives.common import nothing_learnt
from whiflash_train.tasks import FitSettings, Trainee

VOCABULARY, PAD = 20, 0
FIT = FitSettings(
    max_steps=20,
    batch_size=4,
    accumulate=1,
    max_skipped=3,
    ema=None,
    val_every=10,
    checkpoint_every=10,
    learning_rate=0.02,
    betas=[0.9, 0.95],
    weight_decay=0.1,
    warmup_fraction=0.1,
    final_fraction=0.05,
    clip=1.0,
)


def conversations(count: int, *, shortest: int = 4) -> Dataset:
    """Rows of uneven length; the answer begins at the third token."""
    generator = torch.Generator().manual_seed(count)
    ids = [
        torch.randint(1, VOCABULARY, (shortest + (5 * i) % 9,), generator=generator).tolist()
        for i in range(count)
    ]
    return Dataset.from_dict(
        {"input_ids": ids, "loss_mask": [[0, 0, *[1] * (len(row) - 2)] for row in ids]}
    )


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def next_token(net: NextToken, batch: DrafterBatch) -> Outcome:
    if not batch.anchor_mask.any():
        return nothing_learnt(net), {}
    ids = batch.ids.gather(1, batch.anchors)[batch.anchor_mask]
    labels = batch.ids.gather(1, batch.anchors + 1)[batch.anchor_mask]
    logits = net.head(net.table(ids))
    loss = F.cross_entropy(logits, labels)
    hits = (logits.argmax(-1) == labels).float().mean()
    return loss, {"loss": Mean(loss.detach(), len(ids)), "tau": Mean(1 + hits, len(ids))}


@dataclass(eq=False)
class Recorder(Callback):
    """What happened at each step: rows that were learnt from, loss, rate; and each validation."""

    rows: list[list[int]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[float] = field(default_factory=list)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.rows.append(batch.rows[batch.anchor_mask.any(1)].tolist())
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            metrics = trainer.callback_metrics
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.steps.append((trainer.global_step, float(metrics["train/loss"]), rate))
            self.skipped.append(float(metrics["train/skipped"]))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        value = float(trainer.callback_metrics["val/loss"])
        self.validations.append((trainer.global_step, value))

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss, _ in self.steps]


@dataclass(kw_only=True)
class Training:
    """One training through the runner. rows: to train on; held_out: to validate on."""

    folder: Path
    fit: FitSettings = FIT
    net: nn.Module = field(default_factory=NextToken)
    objective: Objective = next_token
    rows: Dataset = field(default_factory=lambda: conversations(11))
    held_out: Dataset = field(default_factory=lambda: conversations(7))
    tokens_per_batch: int | None = None
    num_anchors: int | None = 3
    callbacks: tuple[Callback, ...] = ()
    options: tuple[str, ...] = ()
    exports: list[Path] = field(default_factory=list)

    def run(
        self, *, resume: bool = False, logger: Logger | None = None
    ) -> tuple[Recorder, dict[str, float]]:
        recorder = Recorder()
        cfg = config(f"resume={str(resume).lower()}", *self.options)
        callbacks = (recorder, *self.callbacks)
        metrics = runner.train(
            cfg, self.fit, self.trainee(), self.folder, callbacks=callbacks, logger=logger
        )
        return recorder, metrics

    def trainee(self) -> Trainee:
        return Trainee(
            net=self.net,
            objective=self.objective,
            train_batches=lambda start, share: TrainingBatches(
                self.rows,
                batch_size=self.fit.batch_size,
                tokens_per_batch=self.tokens_per_batch,
                num_anchors=self.num_anchors,
                seed=0,
                start_step=start,
                num_steps=self.fit.max_steps,
                pad_id=PAD,
                share=share,
            ),
            val_batches=lambda share: validation_batches(
                self.held_out, batch_size=4, pad_id=PAD, share=share
            ),
            monitor="val/tau",
            export=lambda path, _metrics: self.exports.append(path),
            facts={},
        )


@functools.cache
def config(*overrides: str) -> DictConfig:
    plain = ("task=ar_drafter", "target=tiny", "logger=none", "device=cpu")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=[*plain, "trainer.precision=32-true", *overrides])


class Stop(Callback):
    """As if the process were killed behind a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            raise InterruptedError


class AfterStep(Callback):
    """Calls `look` with the module behind every pass."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        self._look = look

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(pl_module)


def changed(fit: FitSettings = FIT, **values: Any) -> FitSettings:
    return replace(fit, **values)


def as_rank(rank: int, world: int, port: int, work: Callable[[], Any]) -> int:
    """Do `work` as one of `world` gloo processes here; 1, with a traceback, where it fails."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    rank_zero_only.rank = rank  # pyright: ignore - as Lightning sets it
    try:
        work()
    except Exception:
        os.write(2, traceback.format_exc().encode())  # behind what pytest captures
        return 1
    return 0
