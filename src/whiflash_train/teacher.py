"""The frozen target inside the training process: taps and final hidden states of each batch.

Teachers are no modules: the target must not enter checkpoints, nor be moved by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whiflash_infer.target import Target, TargetTables
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch
from whiflash_train.data.feature_cache import FeatureCache

Features = Literal["online", "memory", "cached"]


@runtime_checkable
class Teacher(Protocol):
    """Knows the target's rows of a batch. What it gives at padding is without meaning."""

    tables: TargetTables

    def __call__(self, batch: DrafterBatch) -> TeacherRows: ...


def make_teacher(
    features: Features, target: Target, open_cache: Callable[[], FeatureCache]
) -> Teacher:
    """open_cache is called for `cached` alone; then the target's layers do not run."""
    if features == "cached":
        return CachedTeacher(target.tables, open_cache())
    return MemoryTeacher(target) if features == "memory" else OnlineTeacher(target)


class OnlineTeacher:
    """Runs the target on every batch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.tables = target.tables

    @torch.no_grad()
    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        mask = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self.target.teach(batch.ids, mask)


class MemoryTeacher:
    """Runs the target on texts that are new to it, and keeps their rows."""

    def __init__(self, target: Target) -> None:
        self.tables = target.tables
        self._online = OnlineTeacher(target)
        self._kept: dict[bytes, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        # Kept by content: indices would confuse the rows of training and validation.
        lengths = batch.lengths.tolist()
        texts = zip(batch.ids.cpu(), lengths, strict=True)
        keys = [ids[:length].numpy().tobytes() for ids, length in texts]
        if any(key not in self._kept for key in keys):
            rows = self._online(batch)
            for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
                self._kept[key] = (rows.taps[i, :length].clone(), rows.hidden[i, :length].clone())
            return rows
        taps, hidden = zip(*(self._kept[key] for key in keys), strict=True)
        return TeacherRows(_pad(taps), _pad(hidden))


class CachedTeacher:
    """Reads the rows from disk, in the number type of the target's head."""

    def __init__(self, tables: TargetTables, cache: FeatureCache) -> None:
        self.tables = tables
        self._cache = cache

    @torch.no_grad()
    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        dtype = self.tables.head.dtype
        return self._cache.lookup(batch.ids, batch.lengths, batch.rows, dtype=dtype)


def _pad(parts: tuple[Tensor, ...]) -> Tensor:
    return pad_sequence(list(parts), batch_first=True)
