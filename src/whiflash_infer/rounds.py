"""Dense rounds: every position of every conversation, labelled for every arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from whiflash_infer.artifacts import new_artifact, read_manifest
from whiflash_infer.errors import ArtifactError

TABLE, FEATURES = "rounds.parquet", "features.safetensors"


@dataclass(frozen=True, slots=True)
class ConversationRounds:
    """All anchor positions of one conversation, in order and without gaps.

    positions[i + 1] = positions[i] + 1. accepted and censored are by arm. remaining tokens after
    the anchor at positions[i] are len(positions) - i.
    """

    conversation: str
    category: str
    split: str
    positions: np.ndarray
    features: Float[Tensor, "N F"]
    accepted: dict[str, np.ndarray]
    censored: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.positions)


def save_rounds(
    path: Path, conversations: list[ConversationRounds], manifest: Mapping[str, Any]
) -> None:
    """`rounds.parquet` (one row a position) and `features.safetensors` (bfloat16, same order)."""
    arms = list(conversations[0].accepted)
    columns: dict[str, Any] = {
        "conversation": [c.conversation for c in conversations for _ in range(len(c))],
        "category": [c.category for c in conversations for _ in range(len(c))],
        "split": [c.split for c in conversations for _ in range(len(c))],
        "position": np.concatenate([c.positions for c in conversations]),
    }
    for arm in arms:
        columns[f"accepted_{arm}"] = np.concatenate([c.accepted[arm] for c in conversations])
        columns[f"censored_{arm}"] = np.concatenate([c.censored[arm] for c in conversations])
    features = torch.cat([c.features for c in conversations]).to(torch.bfloat16)
    with new_artifact(path, manifest) as folder:
        pq.write_table(pa.table(columns), folder / TABLE)
        save_file({"features": features.contiguous()}, folder / FEATURES)


def load_rounds(
    path: Path, *, made_by: str
) -> tuple[dict[str, list[ConversationRounds]], dict[str, Any]]:
    """Conversations by split, and the manifest."""
    manifest = read_manifest(path, made_by=made_by)
    table = pq.read_table(path / TABLE).to_pydict()
    features = load_file(path / FEATURES)["features"].float()
    if len(features) != len(table["position"]):
        raise ArtifactError(
            f"{path}: {TABLE} has {len(table['position'])} rows, {FEATURES} has {len(features)}. "
            f"Make it again with: {made_by}"
        )
    arms = [name.removeprefix("accepted_") for name in table if name.startswith("accepted_")]
    names = np.array(table["conversation"])
    starts = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    splits: dict[str, list[ConversationRounds]] = {}
    for start, end in zip(starts, np.r_[starts[1:], len(names)], strict=True):
        span = slice(int(start), int(end))
        one = ConversationRounds(
            conversation=names[start],
            category=table["category"][start],
            split=table["split"][start],
            positions=np.array(table["position"][span]),
            features=features[span],
            accepted={a: np.array(table[f"accepted_{a}"][span]) for a in arms},
            censored={a: np.array(table[f"censored_{a}"][span]) for a in arms},
        )
        splits.setdefault(one.split, []).append(one)
    return splits, manifest
