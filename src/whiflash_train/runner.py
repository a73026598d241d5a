"""Builds what the configuration names, connects it, runs it. No mathematics."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from whiflash_infer.artifacts import read_json, require_match, write_json
from whiflash_infer.costs import CostModel, DeviceIdentity, load_costs
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.drafters.load import load_runners
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target, has_fast_bfloat16, resolve_device
from whiflash_train.loggers import close_logger
from whiflash_train.module import TraineeModule, cosine_with_warmup
from whiflash_train.preparation import build_section, chat_options
from whiflash_train.tasks import (
    TASKS,
    FitSettings,
    Trainee,
    Workspace,
    parameter_counts,
    state_below,
)

console = Console()


def load_target(cfg: DictConfig) -> Target:
    """The configured target on the configured device."""
    apply_threads(cfg)
    source = instantiate(cfg.target.source, _convert_="all")
    with console.status(f"loading target {cfg.target.name}"):
        return Target.from_pretrained(
            source.resolve(),
            name=cfg.target.name,
            tap_layer_ids=list(cfg.target.tap_layer_ids),
            dtype=cfg.dtype,
            device=resolve_device(cfg.device),
            trust_remote_code=cfg.target.trust_remote_code,
            chat_options=chat_options(cfg),
        )


def apply_threads(cfg: DictConfig) -> None:
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)


def artifact_paths(cfg: DictConfig) -> dict[str, Path]:
    return {name: Path(path) for name, path in cfg.paths.items()}


def load_drafters(cfg: DictConfig, target: Target) -> tuple[dict[str, DraftRunner], dict[str, Any]]:
    """Both exported drafters of the configured folders."""
    paths = artifact_paths(cfg)
    return load_runners(paths["ar_drafter"], paths["diffusion_drafter"], target)


def configured_costs(cfg: DictConfig, target: Target) -> CostModel:
    return load_costs(
        Path(cfg.paths.costs),
        here=DeviceIdentity.here(target.device, target.dtype),
        target=target.name,
        allow_foreign=cfg.costs.allow_foreign,
        made_by="python data_prep/profile_costs.py",
    )


def fit(cfg: DictConfig, *, callbacks: tuple[Callback, ...] = ()) -> dict[str, float]:
    """Train one task to the end and export it; returns the metrics of the kept checkpoint.

    Raises: UserError for a task that does not exist, or a resume without a checkpoint.
    """
    if cfg.task not in TASKS:
        raise UserError(f"task is {cfg.task!r}: choose from {', '.join(TASKS)}")
    L.seed_everything(cfg.seed, verbose=False)
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    task = build_section(cfg, cfg.task)
    workspace = Workspace(
        paths=artifact_paths(cfg),
        seed=cfg.seed,
        load_target=partial(load_target, cfg),
        load_costs=partial(configured_costs, cfg),
        mask_token_id=cfg.target.mask_token_id,
        resolved_config=OmegaConf.to_container(cfg, resolve=True),  # pyright: ignore
    )
    trainee: Trainee = task.build(workspace)
    _show_start(cfg.task, trainee)
    if trainee.preview is not None:
        trainee.preview(console, cfg.show_mask)
    checkpoints = _checkpoint_callback(output_dir, task.fit, trainee.monitor, resume=cfg.resume)
    _same_run(output_dir / "task.json", workspace.resolved_config, cfg.task, resume=cfg.resume)
    module = TraineeModule(
        net=trainee.net,
        objective=trainee.objective,
        optimizer=_optimizer(task.fit),
        scheduler=partial(
            cosine_with_warmup,
            num_steps=task.fit.max_steps,
            warmup_fraction=task.fit.warmup_fraction,
            final_fraction=task.fit.final_fraction,
        ),
    )
    trainer = _trainer(cfg, task.fit, output_dir, [checkpoints, *trainee.callbacks, *callbacks])
    if trainer.logger is not None:
        trainer.logger.log_hyperparams(dict(workspace.resolved_config))
    last = Path(checkpoints.dirpath or "") / "last.ckpt" if cfg.resume else None
    started = time.perf_counter()
    try:
        trainer.fit(module, datamodule=_Batches(trainee), ckpt_path=last)
    except SystemExit:  # how Lightning ends after Ctrl-C
        raise KeyboardInterrupt from None
    finally:
        close_logger(trainer.logger)
    metrics = _keep_best(module, checkpoints)
    metrics["minutes"] = (time.perf_counter() - started) / 60
    destination = _destination(cfg, output_dir)
    trainee.export(destination, metrics)
    summary = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()))
    console.print(f"[bold]{cfg.task}[/bold] written to {destination} ({summary})", soft_wrap=True)
    return metrics


class _Batches(L.LightningDataModule):
    """Starts the training batches at the trainer's step, so a resumed run goes on where it was."""

    def __init__(self, trainee: Trainee) -> None:
        super().__init__()
        self._trainee = trainee

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        batches = self._trainee.train_batches(self.trainer.global_step)
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._trainee.val_batches, batch_size=None)  # pyright: ignore


def _optimizer(fit: FitSettings) -> Callable[..., torch.optim.Optimizer]:
    beta1, beta2 = fit.betas
    return partial(
        torch.optim.AdamW,
        lr=fit.learning_rate,
        betas=(beta1, beta2),
        weight_decay=fit.weight_decay,
    )


def _checkpoint_callback(
    output_dir: Path, fit: FitSettings, monitor: str, *, resume: bool
) -> ModelCheckpoint:
    folder = output_dir / "checkpoints"
    if resume and not (folder / "last.ckpt").is_file():
        raise UserError(
            f"resume=true, but {folder / 'last.ckpt'} does not exist: nothing to resume"
        )
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    return ModelCheckpoint(
        dirpath=folder,
        filename="best",
        monitor=monitor,
        mode="max",
        save_last=True,
        every_n_train_steps=fit.checkpoint_every,
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )


def _same_run(path: Path, config: Mapping[str, Any], task: str, *, resume: bool) -> None:
    """Remember what a run trains; refuse to resume it as something else."""
    settings = {"seed": config["seed"], "dtype": config["dtype"], "target": config["target"]}
    settings |= {f"{task}.{key}": value for key, value in config[task].items()}
    if resume:
        found = read_json(path)
        require_match(path, found, settings, made_by=f"train.py task={task} without resume=true")
    else:
        write_json(path, settings)


def _trainer(
    cfg: DictConfig, fit: FitSettings, output_dir: Path, callbacks: list[Callback]
) -> L.Trainer:
    logger = instantiate(cfg.logger, output_dir=str(output_dir), _convert_="all")
    device = resolve_device(cfg.device)
    precision = cfg.trainer.precision
    if precision == "auto":
        precision = "bf16-mixed" if has_fast_bfloat16(device) else "32-true"
    callbacks = [*callbacks, TQDMProgressBar(refresh_rate=cfg.trainer.refresh_every)]
    if logger:
        callbacks.append(LearningRateMonitor("step"))
    return L.Trainer(
        accelerator="gpu" if device.startswith("cuda") else "cpu",
        devices=cfg.trainer.devices,
        precision=precision,
        max_steps=fit.max_steps,
        max_epochs=-1,
        val_check_interval=min(fit.val_every, fit.max_steps),
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=fit.clip,
        log_every_n_steps=cfg.trainer.log_every,
        logger=logger or False,
        callbacks=callbacks,
        default_root_dir=output_dir,
        enable_model_summary=False,
    )


def _keep_best(module: TraineeModule, checkpoints: ModelCheckpoint) -> dict[str, float]:
    """Put the best checkpoint's weights into the module; its validation metrics."""
    path = checkpoints.best_model_path or checkpoints.last_model_path
    found = torch.load(path, map_location="cpu", weights_only=True)
    module.net.load_state_dict(state_below(found["state_dict"], "net."))
    module.net.eval()
    best = checkpoints.best_model_score
    metrics = {"step": float(found["global_step"])}
    if best is not None and checkpoints.monitor is not None:
        metrics[checkpoints.monitor] = float(best)
    return metrics


def _destination(cfg: DictConfig, output_dir: Path) -> Path:
    """A sweep keeps each run's artefact beside its logs; a single run writes the shared place."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return output_dir / cfg.task
    return Path(cfg.paths[cfg.task])


def _show_start(task: str, trainee: Trainee) -> None:
    table = Table(title=task, show_header=False)
    for name, value in trainee.facts.items():
        table.add_row(name, value)
    for name, count, trainable in parameter_counts(trainee.net):
        table.add_row(name, f"{count:,} parameters, {'trained' if trainable else 'frozen'}")
    console.print(table)
