"""Where a run's numbers go: W&B, CSV, or nowhere."""

from __future__ import annotations

import netrc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from whiflash_infer.errors import UserError


def csv_logger(*, output_dir: str) -> Logger:
    """`csv/version_<n>/metrics.csv` in the run's folder; a resumed run starts the next version."""
    return CSVLogger(output_dir, name="csv")


def no_logger(*, output_dir: str) -> None:
    return None


def wandb_logger(
    *, output_dir: str, project: str, name: str, entity: str | None, tags: list[str]
) -> Logger:
    """A W&B run; without an API key it is kept offline in the run's folder."""
    if find_spec("wandb") is None:
        raise UserError("logger=wandb needs the package wandb: pip install 'whiflash[train]'")
    offline = os.environ.get("WANDB_MODE") == "offline" or not _has_wandb_key()
    settings: dict[str, Any] = {"entity": entity, "tags": tags}
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    logger = WandbLogger(
        project=project, name=name, save_dir=output_dir, offline=offline, **settings
    )
    if offline:
        _tell_offline(logger)
    return logger


@rank_zero_only
def _tell_offline(logger: WandbLogger) -> None:
    """Other processes have no run."""
    folder = Path(logger.experiment.dir).parent
    print(  # noqa: T201 - the user must learn where the run went
        f"W&B runs offline: no API key, or WANDB_MODE=offline. Files: {folder}\n"
        f"Send them later with: wandb sync {folder}"
    )


def close_logger(logger: Logger | None) -> None:
    """End a W&B run, so that the next run of a sweep in this process is one of its own."""
    if isinstance(logger, WandbLogger):
        logger.experiment.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def log_evaluation(settings: dict[str, Any], folder: str, metrics: dict[str, Any]) -> None:
    """Send an evaluation to W&B when `logger=wandb`: numbers by policy, and the files."""
    if settings.get("_target_", "").endswith("wandb_logger"):
        options = {k: v for k, v in settings.items() if k != "_target_"}
        logger = wandb_logger(output_dir=folder, **options)
        assert isinstance(logger, WandbLogger)
        scalars = {
            f"eval/{policy}/{key}": value
            for policy, report in metrics["policies"].items()
            for key, value in report["overall"].items()
            if isinstance(value, int | float)
        }
        logger.experiment.config.update(metrics["header"])
        logger.experiment.log(scalars)
        for name in ("report.html", "metrics.json"):
            logger.experiment.save(str(Path(folder) / name), base_path=folder)
        close_logger(logger)
