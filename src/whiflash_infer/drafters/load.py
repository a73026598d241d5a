"""Exported drafters, checked against the target, and the arms that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from whiflash_infer.artifacts import file_hash, require_match
from whiflash_infer.checkpoint import WEIGHTS, load_drafter
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.target import TargetTables
from whiflash_infer.types import AR, AR_TREE, CHAINS, DIFFUSION, DIFFUSION_TREE

MAX_DEPTH = 32


def _require(field: str, value: object, low: int, high: int | None = None) -> None:
    is_bool = isinstance(value, bool)
    if isinstance(value, int) and not is_bool and low <= value and (high is None or value <= high):
        return
    legal = f"at least {low}" if high is None else f"from {low} to {high}"
    raise UserError(f"arms.{field} is {value!r}, but has to be a whole number {legal}")


@dataclass(frozen=True, kw_only=True)
class ARTree:
    """depth: levels. top_k: nodes a level, and children that each proposes. num_nodes: kept of all
    levels, for the target to read."""

    depth: int = 5
    top_k: int = 4
    num_nodes: int = 27

    def __post_init__(self) -> None:
        _require("ar_tree.depth", self.depth, 1, MAX_DEPTH)
        _require("ar_tree.top_k", self.top_k, 2)
        grown = self.top_k + (self.depth - 1) * self.top_k**2
        _require("ar_tree.num_nodes", self.num_nodes, self.depth, grown)


@dataclass(frozen=True, kw_only=True)
class ArmSettings:
    """The arms besides the chain `ar` and the block `diffusion`; None leaves one out.

    draft_length: of the chain, as trained when None. diffusion_tree: nodes that the target reads.
    """

    draft_length: int | None = None
    ar_tree: ARTree | None = ARTree()
    diffusion_tree: int | None = 24

    def __post_init__(self) -> None:
        if self.draft_length is not None:
            _require("draft_length", self.draft_length, 1, MAX_DEPTH)
        if self.diffusion_tree is not None:
            _require("diffusion_tree", self.diffusion_tree, 2)


_DEFAULTS = ArmSettings()


def arm_settings(found: Mapping[str, Any]) -> ArmSettings:
    """From what `asdict` made of them."""
    tree = found["ar_tree"]
    return ArmSettings(
        draft_length=found["draft_length"],
        ar_tree=None if tree is None else ARTree(**tree),
        diffusion_tree=found["diffusion_tree"],
    )


def shapes_of(arms: Mapping[str, Arm]) -> dict[str, dict[str, int]]:
    """What labels and prices of an arm depend on, besides its drafter."""
    return {
        name: {"max_draft": arm.max_draft, "max_nodes": arm.max_nodes} for name, arm in arms.items()
    }


@runtime_checkable
class DraftTarget(Protocol):
    """What drafters ask of a target, whoever runs it.

    required: what a manifest says of the target (`TargetIdentity`) and has to agree with; as much
    of it as is known here.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tables(self) -> TargetTables: ...

    @property
    def tap_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def required(self) -> dict[str, str]: ...


def load_arms(
    ar_drafter: Path | None,
    diffusion_drafter: Path | None,
    target: DraftTarget,
    settings: ArmSettings = _DEFAULTS,
) -> tuple[dict[str, Arm], dict[str, Any]]:
    """The arms of up to two drafter folders, and for each drafter what identifies it.

    Raises: ArtifactError when a drafter is missing or was trained for another target or other taps;
    UserError when a tree asks for more than a drafter's vocabulary has.
    """
    arms: dict[str, Arm] = {}
    lineage: dict[str, Any] = {}
    for drafter, path in ((AR, ar_drafter), (DIFFUSION, diffusion_drafter)):
        if path is None:
            continue
        net, manifest = _load(drafter, path, target)
        arms |= _arms(net, target, manifest, settings)
        if drafter not in arms:
            raise ArtifactError(
                f"{path} holds a {type(net).__name__}, which is no {drafter} drafter: give it in "
                "the other's place"
            )
        lineage[drafter] = {
            "weights": file_hash(path / WEIGHTS),
            "max_draft": arms[drafter].max_draft,
            "chat": manifest.get("chat"),
        }
    return arms, lineage


def chains(arms: Mapping[str, Arm]) -> dict[str, Arm]:
    """Of these arms those that draft one path."""
    return {name: arm for name, arm in arms.items() if name in CHAINS}


def _load(
    drafter: str, path: Path, target: DraftTarget
) -> tuple[ARDrafter | DiffusionDrafter, Mapping[str, Any]]:
    made_by = f"python train.py task={drafter}_drafter"
    net, manifest = load_drafter(path, made_by=made_by, dtype=target.dtype, device=target.device)
    require_match(path, manifest.get("target", {}), target.required, made_by=made_by)
    taps = {"tap_layer_ids": list(target.tap_layer_ids)}
    require_match(path, manifest, taps, made_by=made_by)
    if net.config.shape.vocab_size != target.vocab_size:
        raise ArtifactError(
            f"{path}: vocab_size is {net.config.shape.vocab_size}, the target's is "
            f"{target.vocab_size}"
        )
    return net, manifest


def _arms(
    net: ARDrafter | DiffusionDrafter,
    target: DraftTarget,
    manifest: Mapping[str, Any],
    settings: ArmSettings,
) -> dict[str, Arm]:
    """All arms of one network, which share its cache."""
    if isinstance(net, ARDrafter):
        return _ar_arms(CachedAR(net, target.tables), manifest, settings)
    return _diffusion_arms(CachedDiffusion(net, target.tables), settings.diffusion_tree)


def _ar_arms(
    drafter: CachedAR, manifest: Mapping[str, Any], settings: ArmSettings
) -> dict[str, Arm]:
    length, tree = settings.draft_length, settings.ar_tree
    length = manifest["draft_length"] if length is None else length
    arms: dict[str, Arm] = {AR: ARArm(drafter, draft_length=length)}
    if tree is not None:
        _require("ar_tree.top_k", tree.top_k, 2, drafter.net.config.draft_vocab_size)
        arms[AR_TREE] = ARArm(
            drafter, draft_length=tree.depth, top_k=tree.top_k, num_nodes=tree.num_nodes
        )
    return arms


def _diffusion_arms(drafter: CachedDiffusion, num_nodes: int | None) -> dict[str, Arm]:
    arms: dict[str, Arm] = {DIFFUSION: DiffusionArm(drafter)}
    if num_nodes is not None:
        _require("diffusion_tree", num_nodes, 2, drafter.net.config.shape.vocab_size)
        arms[DIFFUSION_TREE] = DiffusionArm(drafter, num_nodes=num_nodes)
    return arms
