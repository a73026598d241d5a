"""Builds what the configuration names, connects it, runs it. No mathematics."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.utils.data import DataLoader

from whiflash_infer.artifacts import read_json, require_match, write_json
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.drafters.load import load_arms
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.attention import choose_backend
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, load_costs
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target, has_fast_bfloat16, resolve_device
from whiflash_infer.types import DIFFUSION, PLAIN
from whiflash_train.batches import Share
from whiflash_train.callbacks import Checkpoints, RealTau, SkipNonFinite
from whiflash_train.loggers import close_logger, log_config, log_result
from whiflash_train.module import (
    ShardedModule,
    TraineeModule,
    compile_training,
    cosine_with_warmup,
)
from whiflash_train.preparation import build_section, chat_options
from whiflash_train.redaction import without_secrets
from whiflash_train.start_up import parts, show_start, training_memory
from whiflash_train.tasks import TASKS, FitSettings, Trainee, Workspace, state_below

console = Console()


def load_target(cfg: DictConfig) -> Target:
    """The configured target on the configured device."""
    apply_threads(cfg)
    source, taps = instantiate(cfg.target.source, _convert_="all"), cfg.target.tap_layer_ids
    with console.status(f"loading target {cfg.target.name}"):
        return Target.from_pretrained(
            source.resolve(),
            name=cfg.target.name,
            tap_layer_ids=taps if isinstance(taps, int) else list(taps),
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


def load_drafters(cfg: DictConfig, target: Target) -> tuple[dict[str, Arm], dict[str, Any]]:
    """The configured arms of both exported drafters, and what identifies the drafters.

    Raises: ArtifactError where one does not fit the target, or has another mask token.
    """
    paths = artifact_paths(cfg)
    path = paths["diffusion_drafter"]
    arms, lineage = load_arms(paths["ar_drafter"], path, target, build_section(cfg, "arms"))
    block = arms[DIFFUSION]
    assert isinstance(block, DiffusionArm)
    trained_with = {"mask_token_id": block.net.config.mask_token_id}
    wanted = {"mask_token_id": cfg.target.mask_token_id}
    require_match(path, trained_with, wanted, made_by="python train.py task=diffusion_drafter")
    return arms, lineage


def engine_settings(cfg: DictConfig, arms: Mapping[str, Arm]) -> EngineSettings:
    """Raises: UserError for a safe arm that there is not."""
    settings: EngineSettings = build_section(cfg, "decode")
    known = (PLAIN, *arms)
    if settings.safe_arm not in known:
        raise UserError(f"decode.safe_arm is {settings.safe_arm!r}: choose from {', '.join(known)}")
    return settings


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

    Raises: UserError for a task that does not exist, a resume without a checkpoint, gradients that
    stay without a number, or a GPU without room.
    """
    if cfg.task not in TASKS:
        raise UserError(f"task is {cfg.task!r}: choose from {', '.join(TASKS)}")
    if (
        HydraConfig.get().mode == RunMode.MULTIRUN
        and cfg.trainer.devices * cfg.trainer.num_nodes > 1
    ):
        raise UserError(
            "a sweep runs in one process: set trainer.devices=1, or start its runs alone"
        )
    L.seed_everything(cfg.seed, verbose=False)
    _use_own_gpu(cfg)
    output_dir = Path(HydraConfig.get().runtime.output_dir)
    task = build_section(cfg, cfg.task)
    workspace = Workspace(
        paths=artifact_paths(cfg),
        seed=cfg.seed,
        load_target=cache(partial(load_target, cfg)),
        load_costs=partial(configured_costs, cfg),
        mask_token_id=cfg.target.mask_token_id,
        resolved_config=_told_config(cfg),
    )
    trainee: Trainee = task.build(workspace)
    _choose_attention(cfg, trainee)
    _tell_start(cfg, task.fit, trainee)
    _same_run(output_dir / "task.json", workspace, cfg.task, resume=cfg.resume)
    with _logger(cfg, output_dir) as logger:
        metrics = train(cfg, task.fit, trainee, output_dir, callbacks=callbacks, logger=logger)
        made = _destination(cfg, output_dir)
        _export(cfg, trainee, made, metrics)
        log_result(logger, cfg.task, workspace.paths, made)
    return metrics


def train(
    cfg: DictConfig,
    fit: FitSettings,
    trainee: Trainee,
    output_dir: Path,
    *,
    callbacks: tuple[Callback, ...] = (),
    logger: Logger | None = None,
) -> dict[str, float]:
    """Train, and leave the best weights in the network; returns their validation metrics."""
    checkpoints = _checkpoints(output_dir, fit, trainee.monitor, resume=cfg.resume)
    if cfg.trainer.compile:
        _compile(trainee)
    module = _module(cfg, fit, trainee)
    guard = SkipNonFinite(max_skipped=fit.max_skipped)
    beside = [checkpoints, guard, *trainee.callbacks, *callbacks, *_averaging(fit)]
    trainer = _trainer(cfg, fit, output_dir, beside, logger)
    log_config(logger, _told_config(cfg))
    batches = _Batches(trainee, fit.accumulate)
    started = time.perf_counter()
    try:
        with _no_room_told(cfg.task, fit):
            last = checkpoints.last if cfg.resume else None
            trainer.fit(module, datamodule=batches, ckpt_path=last)
            if checkpoints.validated_step != trainer.global_step:
                trainer.validate(module, datamodule=batches, verbose=False)
    except SystemExit:  # how Lightning ends after Ctrl-C
        raise KeyboardInterrupt from None
    metrics = _keep_best(module, checkpoints)
    metrics["minutes"] = (time.perf_counter() - started) / 60
    return metrics


class _Batches(L.LightningDataModule):
    """Starts the training batches at the trainer's step, so a resumed run goes on where it was."""

    def __init__(self, trainee: Trainee, accumulate: int) -> None:
        super().__init__()
        self._trainee = trainee
        self._accumulate = accumulate

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        batches = self._trainee.train_batches(self.trainer.global_step, self._share())
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        batches = self._trainee.val_batches(self._share())
        return DataLoader(batches, batch_size=None)  # pyright: ignore

    def _share(self) -> Share:
        """Validation takes a batch in as many passes as training: it has no more room."""
        assert self.trainer is not None
        return Share(self.trainer.global_rank, self.trainer.world_size, self._accumulate)


def _use_own_gpu(cfg: DictConfig) -> None:
    """The target goes to the same GPU as the network that this process trains."""
    if resolve_device(cfg.device) == "cuda":
        torch.cuda.set_device(local_rank(os.environ))


def local_rank(environment: Mapping[str, str]) -> int:
    """Of this process on its computer, as Lightning, torchrun or srun tells it."""
    return int(environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or 0)


def _choose_attention(cfg: DictConfig, trainee: Trainee) -> None:
    net = trainee.net
    if not isinstance(net, ARDrafter | DiffusionDrafter):
        return
    device = torch.device(resolve_device(cfg.device))
    try:
        choice = choose_backend(device, cfg.trainer.attention, head_dim=net.config.shape.head_dim)
    except ValueError as error:
        raise UserError(f"trainer.attention: {error}") from None
    net.attention = choice.backend
    trainee.facts["attention"] = f"{choice.backend}, {choice.reason}"


@rank_zero_only
def _tell_start(cfg: DictConfig, fit: FitSettings, trainee: Trainee) -> None:
    memory = {**training_memory(trainee.net, averaged=fit.ema is not None), **trainee.memory}
    show_start(console, cfg.task, trainee.facts, parts(trainee.net, trainee.sources), memory)
    if trainee.preview is not None:
        trainee.preview(console, cfg.show_mask)


def _compile(trainee: Trainee) -> None:
    try:
        compile_training(trainee.net)
    except UserError as error:
        console.print(f"{error}; training goes on without it", soft_wrap=True)


def _module(cfg: DictConfig, fit: FitSettings, trainee: Trainee) -> TraineeModule:
    sharded = cfg.trainer.strategy == "fsdp"
    if sharded and (fit.ema or any(isinstance(c, RealTau) for c in trainee.callbacks)):
        raise UserError(
            "trainer.strategy=fsdp divides the weights among processes, which averaging and "
            f"decoding need whole: set {cfg.task}.fit.ema=null and decode_prompts=0, or take ddp"
        )
    beta1, beta2 = fit.betas
    return (ShardedModule if sharded else TraineeModule)(
        net=trainee.net,
        objective=trainee.objective,
        optimizer=partial(
            torch.optim.AdamW,
            lr=fit.learning_rate,
            betas=(beta1, beta2),
            weight_decay=fit.weight_decay,
        ),
        scheduler=partial(
            cosine_with_warmup,
            num_steps=fit.max_steps,
            warmup_fraction=fit.warmup_fraction,
            final_fraction=fit.final_fraction,
        ),
    )


def _averaging(fit: FitSettings) -> list[Callback]:
    """Comes last, since others measure with the averaged weights before it takes them away."""
    return [] if fit.ema is None else [EMAWeightAveraging(decay=fit.ema, use_buffers=False)]


def _checkpoints(output_dir: Path, fit: FitSettings, monitor: str, *, resume: bool) -> Checkpoints:
    folder = output_dir / "checkpoints"
    checkpoints = Checkpoints(
        folder, monitor=monitor, every=fit.checkpoint_every, val_every=_val_every(fit)
    )
    if resume:
        _require_begun(checkpoints.last)
    else:
        rank_zero_only(shutil.rmtree)(folder, ignore_errors=True)
    return checkpoints


def _require_begun(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"resume=true, but {path} does not exist: nothing to resume")


def _val_every(fit: FitSettings) -> int:
    return min(fit.val_every, fit.max_steps)


@contextmanager
def _no_room_told(task: str, fit: FitSettings) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = str(error).strip().splitlines()[0]
        raise UserError(
            f"the GPU's memory is full ({cause}). Raise {task}.fit.accumulate (now "
            f"{fit.accumulate}; the result stays the same), or lower {task}.num_anchors, "
            f"{task}.fit.batch_size or data.mask.max_length; features=cached spares the target's "
            "activations. If much is reserved but unused, set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True"
        ) from None


def _same_run(path: Path, workspace: Workspace, task: str, *, resume: bool) -> None:
    """Remember what a run trains; refuse to resume it as something else.

    The target is known by what it is, not by where its files lie.
    """
    config, target = workspace.resolved_config, workspace.load_target()
    known: dict[str, Any] = target.identity().required()
    known |= {"tap_layer_ids": list(target.tap_layer_ids), "mask_token_id": workspace.mask_token_id}
    settings = {"seed": config["seed"], "dtype": config["dtype"]}
    settings |= {f"target.{key}": value for key, value in known.items()}
    settings |= {f"{task}.{key}": value for key, value in config[task].items()}
    if resume:
        _require_begun(path)
        found = read_json(path)
        require_match(path, found, settings, made_by=f"train.py task={task} without resume=true")
    else:
        rank_zero_only(write_json)(path, settings)


@contextmanager
def _logger(cfg: DictConfig, output_dir: Path) -> Iterator[Logger | None]:
    """The configured logger, closed at the end.

    Raises: UserError where its package is missing.
    """
    options = {"output_dir": str(output_dir), "resume": cfg.resume, "_convert_": "all"}
    try:
        logger = instantiate(cfg.logger, **options)
    except InstantiationException as error:
        raise UserError(str(error.__cause__ or error).splitlines()[0]) from None
    try:
        yield logger
    except BaseException:
        close_logger(logger, failed=True)
        raise
    close_logger(logger)


def _told_config(cfg: DictConfig) -> dict[str, Any]:
    """For manifests and loggers."""
    return without_secrets(OmegaConf.to_container(cfg, resolve=True))


def _trainer(
    cfg: DictConfig,
    fit: FitSettings,
    output_dir: Path,
    callbacks: list[Callback],
    logger: Logger | None,
) -> L.Trainer:
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
        num_nodes=cfg.trainer.num_nodes,
        strategy=_strategy(cfg),
        precision=precision,
        max_steps=fit.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=fit.accumulate,
        val_check_interval=_val_every(fit) * fit.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=fit.clip,
        log_every_n_steps=cfg.trainer.log_every,
        logger=logger or False,
        callbacks=callbacks,
        default_root_dir=output_dir,
        enable_model_summary=False,
        use_distributed_sampler=False,  # batches are shared out by `Share`
    )


def _strategy(cfg: DictConfig) -> Strategy | str:
    if cfg.trainer.strategy not in ("auto", "ddp", "fsdp"):
        raise UserError(f"trainer.strategy is {cfg.trainer.strategy!r}: choose auto, ddp or fsdp")
    if cfg.trainer.strategy != "fsdp":
        return cfg.trainer.strategy
    return ModelParallelStrategy(
        data_parallel_size=cfg.trainer.devices * cfg.trainer.num_nodes,
        tensor_parallel_size=1,
        save_distributed_checkpoint=False,
    )


def _keep_best(module: TraineeModule, checkpoints: Checkpoints) -> dict[str, float]:
    """Put the best checkpoint's weights into the module; its validation metrics."""
    found = torch.load(checkpoints.best, map_location="cpu", weights_only=True)
    module.take_weights(state_below(found["state_dict"], "net."))
    module.net.eval()
    return checkpoints.best_metrics


@rank_zero_only
def _export(
    cfg: DictConfig, trainee: Trainee, destination: Path, metrics: Mapping[str, float]
) -> None:
    trainee.export(destination, metrics)
    told = {name: metrics[name] for name in ("step", trainee.monitor, "minutes")}
    summary = ", ".join(f"{name} {value:.4g}" for name, value in told.items())
    console.print(f"[bold]{cfg.task}[/bold] written to {destination} ({summary})", soft_wrap=True)


def _destination(cfg: DictConfig, output_dir: Path) -> Path:
    """A sweep keeps each run's artefact beside its logs; a single run writes the shared place."""
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return output_dir / cfg.task
    return Path(cfg.paths[cfg.task])
