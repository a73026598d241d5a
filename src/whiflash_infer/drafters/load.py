"""Both exported drafters, checked against the target and each other, ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whiflash_infer.artifacts import file_hash, require_match
from whiflash_infer.checkpoint import WEIGHTS, load_drafter
from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.errors import ArtifactError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.target import Target
from whiflash_infer.types import AR, DIFFUSION


def load_runners(
    ar_drafter: Path, diffusion_drafter: Path, target: Target
) -> tuple[dict[str, DraftRunner], dict[str, Any]]:
    """The runners by arm, from two drafter folders, and for each arm what identifies its drafter.

    Raises: ArtifactError when a drafter is missing or was trained for another target or other taps.
    """
    runners: dict[str, DraftRunner] = {}
    lineage: dict[str, Any] = {}
    for arm, path in ((AR, ar_drafter), (DIFFUSION, diffusion_drafter)):
        made_by = f"python train.py task={arm}_drafter"
        net, manifest = load_drafter(
            path, made_by=made_by, dtype=target.dtype, device=target.device
        )
        wanted = target.identity().required()
        require_match(path, manifest.get("target", {}), wanted, made_by=made_by)
        taps = {"tap_layer_ids": list(target.tap_layer_ids)}
        require_match(path, manifest, taps, made_by=made_by)
        runners[arm] = _runner(net, target, manifest, path)
        lineage[arm] = {
            "weights": file_hash(path / WEIGHTS),
            "max_draft": runners[arm].max_draft,
            "chat": manifest.get("chat"),
        }
    return runners, lineage


def _runner(
    net: ARDrafter | DiffusionDrafter, target: Target, manifest: Mapping[str, Any], path: Path
) -> DraftRunner:
    if net.config.shape.vocab_size != target.config.vocab_size:
        raise ArtifactError(
            f"{path}: vocab_size is {net.config.shape.vocab_size}, the target's is "
            f"{target.config.vocab_size}"
        )
    if isinstance(net, ARDrafter):
        return ARRunner(net, target.tables, draft_length=manifest["draft_length"])
    return DiffusionRunner(net, target.tables)
