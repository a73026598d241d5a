"""Conversations on disk: token ids and a loss mask, answered by the target itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Features, Sequence, Value

from whiflash_infer.artifacts import read_manifest, require_match
from whiflash_infer.errors import ArtifactError
from whiflash_infer.target import TargetIdentity

SPLITS = ("train", "router", "validation")
MADE_BY = "python data_prep/generate.py"

ROW_FEATURES = Features(
    {
        "id": Value("string"),
        "category": Value("string"),
        "input_ids": Sequence(Value("int32")),
        "loss_mask": Sequence(Value("bool")),
        "truncated": Value("bool"),
    }
)


def load_conversations(
    path: Path, split: str, identity: TargetIdentity
) -> tuple[Dataset, dict[str, Any]]:
    """One split, and the manifest of all.

    Raises: ArtifactError when it is missing, was answered by another target, or is empty.
    """
    manifest = read_manifest(path, made_by=MADE_BY)
    require_match(path, manifest["target"], identity.required(), made_by=MADE_BY)
    rows = datasets.load_from_disk(str(path / split))
    assert isinstance(rows, Dataset)
    if len(rows) == 0:
        raise ArtifactError(
            f"{path / split} holds no conversation: {manifest['counts']}. Look at the reasons, "
            f"then make it again with: {MADE_BY}"
        )
    return rows, manifest
