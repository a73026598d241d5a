"""Keep the target's rows on disk: `python data_prep/cache_features.py`.

Writes `features/`, from which both drafters train with `features=cached`: worth it when the texts
are trained on for many epochs. Tells size and time first. An interrupted run goes on where it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig
from rich.console import Console

from whiflash_train.data.conversations import load_conversations
from whiflash_train.data.feature_cache import FeatureCacheSettings, write_features
from whiflash_train.entry import entry_point
from whiflash_train.preparation import build_section
from whiflash_train.runner import load_target

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("cache_features", root=ROOT)
def main(cfg: DictConfig) -> None:
    settings: FeatureCacheSettings = build_section(cfg, "features")
    target = load_target(cfg)
    rows: dict[str, Dataset] = {}
    manifest: dict[str, Any] = {}
    for split in settings.splits:
        found = load_conversations(Path(cfg.paths.conversations), split, target.identity())
        rows[split], manifest = found
    write_features(
        Path(cfg.paths.features),
        rows,
        target,
        settings,
        conversations=manifest["fingerprint"],
        console=console,
    )


if __name__ == "__main__":
    main()
