"""The three trainees. Each task's fields are its section of the configuration, and its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from lightning.pytorch import Callback
from rich.console import Console
from torch import nn
from torch.utils.data import IterableDataset

from whiflash_infer.checkpoint import Drafter, save_drafter
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import (
    DiffusionDrafter,
    DiffusionDrafterConfig,
    check_sizes,
)
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.target import Target
from whiflash_train.batches import Share, TrainingBatches, validation_batches
from whiflash_train.block_losses import BlockObjective, ObjectiveName
from whiflash_train.callbacks import RealTau, prompts_of
from whiflash_train.checks import checked
from whiflash_train.data.conversations import first_row, load_conversations
from whiflash_train.data.feature_cache import FeatureCache, feature_identity
from whiflash_train.data.preview import show_masks
from whiflash_train.data.vocabulary import choose_vocabulary
from whiflash_train.distillation import LossName, SoftLoss
from whiflash_train.module import Objective
from whiflash_train.objectives import ar_objective, diffusion_objective
from whiflash_train.objectives.ar import step_weights
from whiflash_train.start_up import PassSize, drafter_memory, drafter_sources
from whiflash_train.teacher import Features, Teacher, make_teacher
from whiflash_train.warm_start import start_ar, start_diffusion, start_head

TASKS = ("ar_drafter", "diffusion_drafter", "router")
MAX_DRAFT_LENGTH = 8  # of the AR drafter: later drafts are hardly ever reached


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What tasks share: where artefacts lie, the run's seed, and how to get target and costs."""

    paths: Mapping[str, Path]
    seed: int
    load_target: Callable[[], Target]
    load_costs: Callable[[Target], CostModel]
    mask_token_id: int
    resolved_config: Mapping[str, Any]


@dataclass(kw_only=True)
class Trainee:
    """Everything the trainer needs of a task.

    train_batches(start_step, share) yields a share of the batches from that step on. The best
    checkpoint is the one with the highest `monitor`. export(path) writes the artefact from the
    network as it is then. preview(console, count) shows what is learnt from. sources: where parts
    of the network start from. memory: bytes by what takes them, beside the network's own.
    """

    net: nn.Module
    objective: Objective
    train_batches: Callable[[int, Share], IterableDataset]
    val_batches: Callable[[Share], list[Any]]
    monitor: str
    export: Callable[[Path, Mapping[str, float]], None]
    facts: dict[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    preview: Callable[[Console, int], None] | None = None
    callbacks: list[Callback] = field(default_factory=list)


@checked
@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How long and how fast a task is trained.

    batch_size: rows an optimiser step learns from, over all devices. accumulate: passes in which
    each device takes its part; the result stays the same. max_skipped: steps in a row without
    finite gradients that end the run. ema: decay of the averaged weights that are kept.
    """

    max_steps: int
    batch_size: int
    accumulate: int
    max_skipped: int
    ema: float | None
    val_every: int
    checkpoint_every: int
    learning_rate: float
    betas: list[float]
    weight_decay: float
    warmup_fraction: float
    final_fraction: float
    clip: float

    def __post_init__(self) -> None:
        whole = ("max_steps", "batch_size", "accumulate", "max_skipped")
        for name in (*whole, "val_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema}: it must be null or lie between 0 and 1")


@checked
@dataclass(frozen=True, kw_only=True)
class DrafterFitSettings(FitSettings):
    """tokens_per_batch: of an optimiser step, padding counted, in place of batch_size rows.

    decode_prompts: held-out prompts that each validation decodes, up to decode_tokens tokens each.
    monitor: which of the two taus chooses the best checkpoint.
    """

    tokens_per_batch: int | None
    decode_prompts: int
    decode_tokens: int
    monitor: Literal["val/tau", "val/real_tau"]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("tokens_per_batch", 1), ("decode_prompts", 0), ("decode_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be {least} or more")
        if self.monitor == "val/real_tau" and self.decode_prompts == 0:
            raise ValueError("monitor is val/real_tau: then decode_prompts must be above 0")


@checked
@dataclass(frozen=True, kw_only=True)
class ARDrafterTask:
    """kl_scale and kl_decay: of the loss lk_lambda alone, see `SoftLoss`."""

    fit: DrafterFitSettings
    draft_length: int
    draft_vocab_size: int | None
    fc_norm: bool
    norm_output: bool
    qk_norm: bool
    init: Literal["target", "random"]
    train_head: bool
    loss: LossName
    kl_scale: float
    kl_decay: float
    step_decay: float
    draw_steps: bool
    num_anchors: int | None
    features: Features

    def __post_init__(self) -> None:
        if not 1 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ValueError(
                f"draft_length is {self.draft_length}: it must lie in 1..{MAX_DRAFT_LENGTH}"
            )
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"step_decay is {self.step_decay}: it must lie above 0 and up to 1")
        self.soft_loss  # noqa: B018 - its own ranges are checked here

    @property
    def soft_loss(self) -> SoftLoss:
        return SoftLoss(name=self.loss, kl_scale=self.kl_scale, kl_decay=self.kl_decay)

    def build(self, workspace: Workspace) -> Trainee:
        target = workspace.load_target()
        rows, manifest = load_conversations(
            workspace.paths["conversations"], "train", target.identity()
        )
        size = self.draft_vocab_size or target.config.vocab_size
        net = ARDrafter(
            ARDrafterConfig(
                shape=target.drafter_shape,
                draft_vocab_size=min(size, target.config.vocab_size),
                tap_layer_ids=target.tap_layer_ids,
                fc_norm=self.fc_norm,
                norm_output=self.norm_output,
                qk_norm=self.qk_norm,
            )
        )
        vocabulary, coverage = choose_vocabulary(rows, net.config, always=target.chat.special_ids)
        net.set_vocabulary(vocabulary)
        if self.init == "target":
            start_ar(net, target)
        start_head(net, target, trainable=self.train_head)
        teacher = _teacher(self.features, workspace, target, manifest)
        objective = partial(
            ar_objective,
            teacher=teacher,
            draft_length=self.draft_length,
            step_decay=self.step_decay,
            draw_steps=self.draw_steps,
            loss=self.soft_loss,
        )
        extra = {"draft_length": self.draft_length, "vocabulary_coverage": coverage}
        trainee = _drafter_trainee(self, workspace, target, net, objective, manifest, extra)
        trainee.facts["draft vocabulary"] = (
            f"{net.config.draft_vocab_size} tokens, {coverage:.2%} of supervised tokens"
        )
        weights = step_weights(self.draft_length, self.step_decay)
        trainee.facts["loss"] = f"{self.loss}; steps " + " ".join(f"{w:.2f}" for w in weights)
        return trainee


@checked
@dataclass(frozen=True, kw_only=True)
class DiffusionDrafterTask:
    """smoothing to chain_weight: the parameters of the objectives, see `BlockObjective`."""

    fit: DrafterFitSettings
    num_layers: int
    block_size: int
    markov_rank: int
    sliding_window: int | None
    init: Literal["target", "random"]
    objective: ObjectiveName
    smoothing: float
    gamma: float
    draw_slots: bool
    focal_weight: float
    chain_weight: float
    num_anchors: int | None
    features: Features

    def __post_init__(self) -> None:
        check_sizes(**self._sizes)
        self.block_objective  # noqa: B018 - its own ranges are checked here

    @property
    def block_objective(self) -> BlockObjective:
        return BlockObjective(
            name=self.objective,
            smoothing=self.smoothing,
            gamma=self.gamma,
            draw_slots=self.draw_slots,
            focal_weight=self.focal_weight,
            chain_weight=self.chain_weight,
        )

    @property
    def _sizes(self) -> dict[str, Any]:
        names = ("num_layers", "block_size", "markov_rank", "sliding_window")
        return {name: getattr(self, name) for name in names}

    def build(self, workspace: Workspace) -> Trainee:
        target = workspace.load_target()
        _, manifest = load_conversations(
            workspace.paths["conversations"], "train", target.identity()
        )
        net = DiffusionDrafter(
            DiffusionDrafterConfig(
                shape=target.drafter_shape,
                mask_token_id=workspace.mask_token_id,
                num_target_layers=target.num_layers,
                tap_layer_ids=target.tap_layer_ids,
                **self._sizes,
            )
        )
        if self.init == "target":
            start_diffusion(net, target)
        teacher = _teacher(self.features, workspace, target, manifest)
        objective = partial(diffusion_objective, teacher=teacher, objective=self.block_objective)
        extra = {"block_size": self.block_size, "mask_token_id": workspace.mask_token_id}
        return _drafter_trainee(self, workspace, target, net, objective, manifest, extra)


def _teacher(
    features: Features,
    workspace: Workspace,
    target: Target,
    conversations: Mapping[str, Any],
) -> Teacher:
    def open_cache() -> FeatureCache:
        identity = feature_identity(
            target,
            conversations=conversations["fingerprint"],
            dtype=workspace.resolved_config["features"]["dtype"],
        )
        cache = FeatureCache.open(workspace.paths["features"], identity)
        path = workspace.paths["conversations"]
        for split in ("train", "validation"):
            cache.require({split: load_conversations(path, split, target.identity())[0]})
        return cache

    return make_teacher(features, target, open_cache)


def _drafter_trainee(
    task: ARDrafterTask | DiffusionDrafterTask,
    workspace: Workspace,
    target: Target,
    net: Drafter,
    objective: Objective,
    data_manifest: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Trainee:
    path = workspace.paths["conversations"]
    counts = data_manifest["counts"]["splits"]["train"]
    rows, _ = load_conversations(path, "train", target.identity())
    held_out, _ = load_conversations(path, "validation", target.identity())
    pad_id = target.chat.pad_id

    def preview(console: Console, count: int) -> None:
        shown = [first_row(rows.select([i])) for i in range(min(count, len(rows)))]
        show_masks(console, target.chat, shown)

    def export(folder: Path, metrics: Mapping[str, float]) -> None:
        manifest = {
            **lineage(workspace, target.identity().manifest()),
            **extra,
            "tap_layer_ids": list(target.tap_layer_ids),
            "conversations": data_manifest["fingerprint"],
            "chat": data_manifest["chat"],
            "metrics": dict(metrics),
        }
        ids = {name: getattr(target.config, name) for name in ("bos_token_id", "eos_token_id")}
        save_drafter(folder, net, manifest, token_ids={**ids, "pad_token_id": pad_id})

    return Trainee(
        net=net,
        objective=objective,
        train_batches=lambda start, share: TrainingBatches(
            rows,
            batch_size=task.fit.batch_size,
            tokens_per_batch=task.fit.tokens_per_batch,
            num_anchors=task.num_anchors,
            seed=workspace.seed,
            start_step=start,
            num_steps=task.fit.max_steps,
            pad_id=pad_id,
            share=share,
        ),
        val_batches=lambda share: validation_batches(
            held_out,
            batch_size=task.fit.batch_size,
            tokens_per_batch=task.fit.tokens_per_batch,
            pad_id=pad_id,
            share=share,
        ),
        monitor=task.fit.monitor,
        export=export,
        preview=preview,
        callbacks=_real_tau(task, target, net, held_out),
        sources=drafter_sources(net, task.init, target.num_layers),
        memory=_memory(task, target, net, rows, counts, passes=_passes(task.fit, workspace)),
        facts={
            "target": f"{target.name}, {str(target.dtype).removeprefix('torch.')}, frozen, taps "
            f"{list(target.tap_layer_ids)}",
            "data": f"{len(rows)} rows, {counts['supervised']:,} supervised tokens",
            "start": f"{task.init}; target features {task.features}",
        },
    )


def _real_tau(
    task: ARDrafterTask | DiffusionDrafterTask, target: Target, net: Drafter, held_out: Dataset
) -> list[Callback]:
    fit = task.fit
    if fit.decode_prompts == 0:
        return []

    def chain() -> Arm:
        if isinstance(net, ARDrafter):
            assert isinstance(task, ARDrafterTask)
            return ARArm(CachedAR(net, target.tables), draft_length=task.draft_length)
        return DiffusionArm(CachedDiffusion(net, target.tables))

    prompts = prompts_of(held_out, fit.decode_prompts)  # pyright: ignore - rows are dicts
    return [RealTau(target, chain, prompts, max_new_tokens=fit.decode_tokens)]


def _passes(fit: FitSettings, workspace: Workspace) -> int:
    trainer = workspace.resolved_config["trainer"]
    return fit.accumulate * trainer["devices"] * trainer["num_nodes"]


def _memory(
    task: ARDrafterTask | DiffusionDrafterTask,
    target: Target,
    net: Drafter,
    rows: Dataset,
    counts: Mapping[str, int],
    *,
    passes: int,
) -> dict[str, int]:
    """What one device needs beside the network. passes: in how many a batch is taken, over all."""
    fit = task.fit
    longest = max(len(ids) for ids in rows["input_ids"])
    tokens = (fit.tokens_per_batch or fit.batch_size * longest) // passes
    per_row = task.num_anchors or counts["supervised"] // len(rows)
    anchors = per_row * max(1, fit.batch_size // passes)
    if fit.tokens_per_batch is not None:  # short rows are anchors wherever they are supervised
        anchors = max(per_row, tokens * counts["supervised"] // counts["tokens"])
    is_ar = isinstance(task, ARDrafterTask)
    size = PassSize(
        tokens=max(longest, tokens),
        anchors=anchors,
        slots=task.draft_length if is_ar else task.block_size,
    )
    return drafter_memory(
        target,
        size,
        num_layers=1 if is_ar else task.num_layers,
        vocabulary=net.lm_head.out_features
        if isinstance(net, ARDrafter)
        else len(target.tables.head),
        kept_tokens=counts["tokens"] if task.features == "memory" else 0,
    )


def lineage(workspace: Workspace, target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "target": dict(target),
        "seed": workspace.seed,
        "config": dict(workspace.resolved_config),
    }


def state_below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries of a Lightning checkpoint below `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
