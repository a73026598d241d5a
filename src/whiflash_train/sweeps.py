"""After a multirun: one table of what each run was and what it reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from whiflash_infer.artifacts import MANIFEST, read_json


class SweepTable(Callback):
    """Hydra callback; reads the manifests that the runs left."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        manifests = sorted(folder.glob(f"*/{config.task}/{MANIFEST}"))
        if not manifests:
            return
        overrides = [set(OmegaConf.load(_run(p) / ".hydra/overrides.yaml")) for p in manifests]
        shared = set.intersection(*overrides)
        table = Table(title=f"{config.task}: {len(manifests)} runs in {folder}")
        table.add_column("run")
        table.add_column("overrides")
        for title in ("price lam", "replayed tokens/s", "tokens/round", "switches/100 rounds"):
            table.add_column(title, justify="right")
        for path, mine in zip(manifests, overrides, strict=True):
            label = " ".join(sorted(mine - shared))
            table.add_row(_run(path).name, label, *_cells(read_json(path)))
        Console().print(table)


def _run(manifest: Path) -> Path:
    """The run's folder, of the manifest of its artefact."""
    return manifest.parent.parent


def _cells(manifest: dict[str, Any]) -> list[str]:
    replayed = manifest.get("replay")
    if replayed is None:
        return [""] * 4
    return [
        f"{replayed['lam']:.2f}",
        f"{replayed['tokens_per_s']['hazard']:.2f}",
        f"{replayed['tau']:.3f}",
        f"{100 * replayed['switches'] / replayed['rounds']:.1f}",
    ]
