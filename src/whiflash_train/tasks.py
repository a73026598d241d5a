"""The three trainees. Each task's fields are its section of the configuration, and its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from rich.console import Console
from torch import nn
from torch.utils.data import IterableDataset

from whiflash_infer.artifacts import require_match
from whiflash_infer.checkpoint import Drafter, save_drafter
from whiflash_infer.costs import CostModel
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.rounds import load_rounds
from whiflash_infer.router import RouterSettings, save_router
from whiflash_infer.target import Target
from whiflash_train.batches import TrainingBatches, validation_batches
from whiflash_train.checks import checked
from whiflash_train.data.conversations import first_row, load_conversations
from whiflash_train.data.feature_cache import FeatureCache, feature_identity
from whiflash_train.data.preview import show_masks
from whiflash_train.data.vocabulary import choose_vocabulary
from whiflash_train.module import Objective
from whiflash_train.objectives import ar_objective, diffusion_objective, router_objective
from whiflash_train.replay_validation import ReplayValidation
from whiflash_train.router_data import RouterBatches, stack_rounds
from whiflash_train.teacher import Features, Teacher, make_teacher
from whiflash_train.warm_start import start_ar, start_diffusion, start_head

TASKS = ("ar_drafter", "diffusion_drafter", "router")
ROUNDS_MADE_BY = "python data_prep/log_rounds.py"


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

    train_batches(start_step) yields the batches from that step on. The best checkpoint is the one
    with the highest `monitor`. export(path) writes the artefact from the network as it is then.
    preview(console, count) shows what is learnt from.
    """

    net: nn.Module
    objective: Objective
    train_batches: Callable[[int], IterableDataset]
    val_batches: list[Any]
    monitor: str
    export: Callable[[Path, Mapping[str, float]], None]
    facts: dict[str, str]
    preview: Callable[[Console, int], None] | None = None
    callbacks: list[Callback] = field(default_factory=list)


@checked
@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How long and how fast a task is trained."""

    max_steps: int
    batch_size: int
    val_every: int
    checkpoint_every: int
    learning_rate: float
    betas: list[float]
    weight_decay: float
    warmup_fraction: float
    final_fraction: float
    clip: float

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "val_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")


@checked
@dataclass(frozen=True, kw_only=True)
class ARDrafterTask:
    fit: FitSettings
    draft_length: int
    draft_vocab_size: int | None
    init: Literal["target", "random"]
    train_head: bool
    step_decay: float
    num_anchors: int | None
    features: Features

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
        )
        extra = {"draft_length": self.draft_length, "vocabulary_coverage": coverage}
        trainee = _drafter_trainee(self, workspace, target, net, objective, manifest, extra)
        trainee.facts["draft vocabulary"] = (
            f"{net.config.draft_vocab_size} tokens, {coverage:.2%} of supervised tokens"
        )
        return trainee


@checked
@dataclass(frozen=True, kw_only=True)
class DiffusionDrafterTask:
    fit: FitSettings
    num_layers: int
    block_size: int
    init: Literal["target", "random"]
    weighting: Literal["dpace", "decay"]
    smoothing: float
    gamma: float
    num_anchors: int | None
    features: Features

    def build(self, workspace: Workspace) -> Trainee:
        target = workspace.load_target()
        _, manifest = load_conversations(
            workspace.paths["conversations"], "train", target.identity()
        )
        net = DiffusionDrafter(
            DiffusionDrafterConfig(
                shape=target.drafter_shape,
                num_layers=self.num_layers,
                block_size=self.block_size,
                mask_token_id=workspace.mask_token_id,
                num_target_layers=target.num_layers,
                tap_layer_ids=target.tap_layer_ids,
            )
        )
        if self.init == "target":
            start_diffusion(net, target)
        teacher = _teacher(self.features, workspace, target, manifest)
        objective = partial(
            diffusion_objective,
            teacher=teacher,
            weighting=self.weighting,
            smoothing=self.smoothing,
            gamma=self.gamma,
        )
        extra = {"block_size": self.block_size, "mask_token_id": workspace.mask_token_id}
        return _drafter_trainee(self, workspace, target, net, objective, manifest, extra)


@checked
@dataclass(frozen=True, kw_only=True)
class RouterTask:
    """lam: the price in tokens a second, or `auto` for the one that maximises throughput."""

    fit: FitSettings
    lam: float | int | Literal["auto"]
    width: int
    adaptive_length: bool
    switch_margin: float

    def build(self, workspace: Workspace) -> Trainee:
        splits, manifest = load_rounds(workspace.paths["rounds"], made_by=ROUNDS_MADE_BY)
        for split in ("router", "validation"):
            if split not in splits:
                raise UserError(f"{workspace.paths['rounds']} holds no rounds of split {split!r}")
        target = workspace.load_target()
        required = target.identity().required()
        path = workspace.paths["rounds"]
        require_match(path, manifest["target"], required, made_by=ROUNDS_MADE_BY)
        costs = workspace.load_costs(target)
        max_draft: dict[str, int] = manifest["max_draft"]
        _require_priced(workspace.paths["costs"], costs, max_draft)
        train = stack_rounds(splits["router"], tuple(max_draft))
        net = RouterNet(
            RouterConfig(
                num_features=train.features.shape[1], width=self.width, max_draft=max_draft
            )
        )
        net.set_normaliser(train.features)
        validation = ReplayValidation(
            splits["validation"],
            costs,
            lam="auto" if self.lam == "auto" else float(self.lam),
            adaptive_length=self.adaptive_length,
            switch_margin=float(self.switch_margin),
        )

        def export(path: Path, metrics: Mapping[str, float]) -> None:
            outcome = validation.evaluate(net)
            settings = RouterSettings(
                lam=outcome.lam,
                adaptive_length=self.adaptive_length,
                switch_margin=self.switch_margin,
                entropy_threshold=validation.entropy_threshold,
            )
            save_router(
                path,
                net,
                settings,
                costs,
                {
                    **_lineage(workspace, manifest["target"]),
                    "drafters": manifest["drafters"],
                    "replay": outcome.report(),
                },
            )
            validation.show(outcome)

        return Trainee(
            net=net,
            objective=router_objective,
            train_batches=lambda start: RouterBatches(
                train,
                batch_size=self.fit.batch_size,
                seed=workspace.seed,
                start_step=start,
                num_steps=self.fit.max_steps,
            ),
            val_batches=[stack_rounds(splits["validation"], tuple(max_draft))],
            monitor="val/tokens_per_s",
            export=export,
            facts={"rounds": f"{len(train)} to train, {validation.num_positions} to validate"},
            callbacks=[validation],
        )


def _require_priced(path: Path, costs: CostModel, max_draft: Mapping[str, int]) -> None:
    """The cost profile must price exactly the drafts that the rounds label."""
    priced = {arm: len(seconds) - 1 for arm, seconds in costs.draft.items()}
    require_match(
        path,
        {f"longest draft of {arm}": length for arm, length in priced.items()},
        {f"longest draft of {arm}": length for arm, length in max_draft.items()},
        made_by="python data_prep/profile_costs.py",
    )


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
            **_lineage(workspace, target.identity().manifest()),
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
        train_batches=lambda start: TrainingBatches(
            rows,
            batch_size=task.fit.batch_size,
            num_anchors=task.num_anchors,
            seed=workspace.seed,
            start_step=start,
            num_steps=task.fit.max_steps,
            pad_id=pad_id,
        ),
        val_batches=validation_batches(held_out, batch_size=task.fit.batch_size, pad_id=pad_id),
        monitor="val/tau",
        export=export,
        preview=preview,
        facts={
            "target": f"{target.name}, {str(target.dtype).removeprefix('torch.')}, frozen, taps "
            f"{list(target.tap_layer_ids)}",
            "data": f"{len(rows)} rows, {counts['supervised']:,} supervised tokens",
            "start": f"{task.init}; target features {task.features}",
        },
    )


def _lineage(workspace: Workspace, target: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "target": dict(target),
        "seed": workspace.seed,
        "config": dict(workspace.resolved_config),
    }


def parameter_counts(net: nn.Module) -> list[tuple[str, int, bool]]:
    """(module, parameters, trainable) of the network's direct parts."""
    rows = []
    for name, child in net.named_children():
        parameters = list(child.parameters())
        count = sum(p.numel() for p in parameters)
        rows.append((name, count, any(p.requires_grad for p in parameters)))
    return rows


def state_below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries of a Lightning checkpoint below `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
