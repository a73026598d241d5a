"""What tests of the data share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whiflash_train.data.sources import DataSource

DEFAULTS: dict[str, Any] = {
    "hub_file": None,
    "name": None,
    "revision": None,
    "split": "train",
    "validation_split": None,
    "streaming": False,
    "limit": None,
    "weight": 1.0,
    "columns": {},
    "category": None,
}


def source(path: Path | str, **changes: Any) -> DataSource:
    """A data source as conf/source/_dataset.yaml has it, but for the changes."""
    return DataSource(**{**DEFAULTS, "path": str(path), **changes})
