"""Where a run's numbers go: CSV, TensorBoard, W&B, or nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from whiflash_infer.errors import UserError
from whiflash_train.redaction import without_secrets
from whiflash_train.wandb_runs import (
    TrainingRun,
    artifact_name,
    begin,
    identity_of,
    log_folder,
    log_made,
    log_used,
    training_run,
)

_EVALUATION_FILES = ["report.html", "metrics.json", "answers.parquet", "rounds.parquet"]
_PARTS = ("by_category", "by_kind", "by_prompt_length")


def csv_logger(*, output_dir: str, resume: bool = False) -> Logger:
    """`csv/version_<n>/metrics.csv` in the run's folder; a resumed run starts the next version."""
    return CSVLogger(output_dir, name="csv")


def no_logger(*, output_dir: str, resume: bool = False) -> None:
    return None


def tensorboard_logger(*, output_dir: str, resume: bool = False) -> Logger:
    """`tensorboard/version_<n>` in the run's folder; a resumed run starts the next version."""
    _require("tensorboard")
    return TensorBoardLogger(output_dir, name="tensorboard", default_hp_metric=False)


def wandb_logger(
    *,
    output_dir: str,
    project: str,
    name: str,
    entity: str | None,
    tags: list[str],
    resume: bool = False,
) -> Logger:
    """A W&B run; kept offline in the run's folder without an API key, or without a network."""
    _require("wandb")
    return training_run(
        Path(output_dir), resume=resume, project=project, name=name, entity=entity, tags=tags
    )


def require_logger(settings: Mapping[str, Any]) -> None:
    """Raises: UserError when the package behind `logger=` is missing."""
    package = _kind(settings).removesuffix("_logger")
    if package in ("wandb", "tensorboard"):
        _require(package)


def close_logger(logger: Logger | None, *, failed: bool = False) -> None:
    """End a W&B run, so that the next run of a sweep in this process is one of its own."""
    if isinstance(logger, TrainingRun):
        logger.experiment.finish(exit_code=int(failed))


@rank_zero_only
def log_config(logger: Logger | None, config: Mapping[str, Any]) -> None:
    if logger is not None:
        logger.log_hyperparams(without_secrets(config))


@rank_zero_only
def log_result(logger: Logger | None, task: str, paths: Mapping[str, Path], made: Path) -> None:
    """What a training has made as an artefact of W&B, with what it was made from.

    paths: of all artefacts, by name. made: the drafter's or router's folder.
    """
    if not isinstance(logger, TrainingRun) or logger.experiment.disabled:
        return
    uses = ("ar_drafter", "diffusion_drafter") if task == "router" else ()
    reads = ("rounds", "visited_rounds", "costs") if task == "router" else ("conversations",)
    facts = {name: identity_of(paths[name]) for name in reads}
    log_used(logger.experiment, {name: paths[name] for name in uses})
    log_made(logger.experiment, made, task=task, facts={"made_from": facts})


def log_evaluation(
    settings: dict[str, Any],
    folder: str,
    metrics: dict[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Path] | None = None,
) -> None:
    """Send an evaluation to TensorBoard or W&B; for other loggers its files serve.

    settings: those of the logger. inputs: folders of the router and the drafters, by task.
    """
    options = {key: value for key, value in settings.items() if key != "_target_"}
    known = without_secrets({**(config or {}), "header": metrics["header"]})
    if _kind(settings) == "tensorboard_logger":
        logger = tensorboard_logger(output_dir=folder, **options)
        assert isinstance(logger, TensorBoardLogger)
        _to_tensorboard(logger, Path(folder), metrics, known)
    elif _kind(settings) == "wandb_logger":
        _require("wandb")
        run = begin(Path(folder), job_type="evaluation", **options)
        try:
            if not run.disabled:
                _to_wandb(run, Path(folder), metrics, known, inputs or {})
        finally:
            run.finish()


def _to_tensorboard(
    logger: TensorBoardLogger, folder: Path, metrics: dict[str, Any], config: dict[str, Any]
) -> None:
    from matplotlib.image import imread  # noqa: PLC0415 - takes half a second

    scalars = dict(_scalars(metrics))
    logger.log_hyperparams(config)
    logger.log_metrics(scalars, step=0)
    for path in _pictures(folder):
        logger.experiment.add_image(path.stem, imread(path)[..., :3], dataformats="HWC")
    logger.finalize("success")


def _to_wandb(
    run: Any,
    folder: Path,
    metrics: dict[str, Any],
    config: dict[str, Any],
    inputs: Mapping[str, Path],
) -> None:
    import wandb  # noqa: PLC0415 - only where it is asked for

    run.config.update(config, allow_val_change=True)
    log_used(run, inputs)
    logged: dict[str, Any] = dict(_scalars(metrics))
    for name, rows in _tables(metrics).items():
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data: list[Any] = [[row.get(column) for column in columns] for row in rows]
        logged[f"tables/{name}"] = wandb.Table(columns, data, allow_mixed_types=True)
    for path in _pictures(folder):
        logged[f"plots/{path.stem}"] = wandb.Image(str(path))
    run.log(logged)
    header = metrics["header"]
    log_folder(
        run,
        folder,
        kind="evaluation",
        name=artifact_name(header["target"], "evaluation"),
        metadata={"header": header},
        files=_EVALUATION_FILES,
    )


def _scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """`eval/<policy>/<metric>` overall, `eval/<policy>/<category>/<metric>` of each category."""
    for policy, report in metrics["policies"].items():
        cells = {"": report["overall"]}
        cells |= {f"{category}/": cell for category, cell in report["by_category"].items()}
        for part, cell in cells.items():
            for key, value in _numbers(cell).items():
                yield f"eval/{policy}/{part}{key}", value


def _tables(metrics: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """A row for each policy and part; and what else the metrics tell in rows."""
    policies = metrics["policies"]
    tables = {"overall": [{"policy": p, **_numbers(r["overall"])} for p, r in policies.items()]}
    for name in _PARTS:
        tables[name] = [
            {"policy": policy, name.removeprefix("by_"): part, **_numbers(cell)}
            for policy, report in policies.items()
            for part, cell in report.get(name, {}).items()
        ]
    for name in ("ablation", "claims"):
        tables[name] = [_flat(row) for row in metrics.get(name, ())]
    return {name: rows for name, rows in tables.items() if rows}


def _numbers(cell: Mapping[str, Any]) -> dict[str, int | float]:
    """What of a cell is one number; of an interval both ends."""
    return {k: v for k, v in _flat(cell).items() if isinstance(v, int | float)}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in row.items():
        if key.endswith("_ci") and isinstance(value, list | tuple):
            plain |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        elif isinstance(value, Mapping) and all(isinstance(v, float) for v in value.values()):
            plain |= {f"{key}_{name}": number for name, number in value.items()}
        elif value is None or isinstance(value, str | int | float):
            plain[key] = value
    return plain


def _pictures(folder: Path) -> list[Path]:
    return sorted((folder / "plots").glob("*.png"))


def _kind(settings: Mapping[str, Any]) -> str:
    return str(settings.get("_target_", "")).rpartition(".")[2]


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise UserError(
            f"logger={package} needs the package {package}: pip install 'whiflash[train]'"
        )
