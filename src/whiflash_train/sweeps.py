"""Sweeps: what a run tells the sweeper, and what is shown when all runs are done."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from whiflash_infer.errors import UserError
from whiflash_train.sweep_results import Sweep, read_sweep
from whiflash_train.wandb_runs import begin

_EXIT_USER_ERROR = 2
_GROUP = "WANDB_RUN_GROUP"  # read by wandb in every run, wherever the launcher starts it
_ROUTER_MONITOR = "val/tokens_per_s"


def monitored(cfg: DictConfig, metrics: Mapping[str, float]) -> float:
    """The metric by which the task chooses its best checkpoint; more is better."""
    name = OmegaConf.select(cfg, f"{cfg.task}.fit.monitor") or _ROUTER_MONITOR
    return float(metrics[name])


class SweepTable(Callback):
    """Hydra callback; reads the manifests that the runs left.

    The process ends with status 2 when a run has left no numbers.
    """

    def __init__(self) -> None:
        self._began = False

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _uses_wandb(config) and _GROUP not in os.environ:
            os.environ[_GROUP] = f"{config.task}-{Path(config.hydra.sweep.dir).name}"
            self._began = True

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            complete = _conclude(config)
        except (UserError, OSError) as error:  # Hydra would go on after a warning
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False)
            complete = False
        if self._began:
            os.environ.pop(_GROUP, None)
        if not complete:
            raise SystemExit(_EXIT_USER_ERROR)


def _conclude(config: DictConfig) -> bool:
    """Show and keep what the sweep found; whether every run has left its numbers."""
    # Pictures take a second to import, and callbacks are built in every single run.
    from whiflash_train.tradeoff import summarise  # noqa: PLC0415

    sweep = read_sweep(Path(config.hydra.sweep.dir))
    written = summarise(sweep, Console())
    if written and _uses_wandb(config):
        log_sweep(config, sweep, written)
    return not sweep.failed


def _uses_wandb(config: DictConfig) -> bool:
    return str(OmegaConf.select(config, "logger._target_")).endswith("wandb_logger")


def log_sweep(config: DictConfig, sweep: Sweep, written: Sequence[Path]) -> None:
    """A W&B run of the sweep's own, in one group with its runs: pictures, pages and tables."""
    import pandas  # noqa: PLC0415
    import wandb  # noqa: PLC0415 - as above

    options: dict[str, Any] = OmegaConf.to_container(config.logger, resolve=True)  # pyright: ignore
    del options["_target_"]
    options["name"] = f"{options['name']}/sweep"
    run = begin(sweep.folder, job_type="sweep", **options)
    make = {
        ".png": lambda path: wandb.Image(str(path)),
        ".html": lambda path: wandb.Html(str(path)),
        ".csv": lambda path: wandb.Table(dataframe=pandas.read_csv(path)),
    }
    run.log({path.name: make[path.suffix](path) for path in written})
    run.finish()
