"""Batches as a function of (seed, step), so that a resumed run sees what a straight run sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import IterableDataset

_SORT_WINDOW = 8  # batches; rows are sorted by length inside such a window to save padding


@dataclass
class DrafterBatch:
    """Right-padded conversations and the anchors to train at.

    supervised: tokens of an answer. anchors: positions n of anchor tokens x_n, ascending, padded
    where anchor_mask is False. rows: indices into the data set.
    """

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    supervised: Bool[Tensor, "B T"]
    anchors: Int[Tensor, "B A"]
    anchor_mask: Bool[Tensor, "B A"]
    rows: Int[Tensor, " B"]

    def to(self, device: torch.device | str) -> DrafterBatch:
        moved: dict[str, Any] = {f.name: getattr(self, f.name).to(device) for f in fields(self)}
        return replace(self, **moved)


class BatchPlan:
    """Which rows make up the batch of a step: every row once an epoch, shuffled anew."""

    def __init__(self, lengths: list[int], *, batch_size: int, seed: int) -> None:
        self._lengths = np.array(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._epoch: tuple[int, list[np.ndarray]] | None = None
        self.batches_per_epoch = -(-len(lengths) // batch_size)

    def rows(self, step: int) -> np.ndarray:
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        return self._epoch[1][index]

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        window = self._batch_size * _SORT_WINDOW
        batches: list[np.ndarray] = []
        for start in range(0, len(order), window):
            part = order[start : start + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            batches += [
                part[i : i + self._batch_size] for i in range(0, len(part), self._batch_size)
            ]
        return [batches[i] for i in rng.permutation(len(batches))]


class TrainingBatches(IterableDataset):
    """The batches of steps start_step .. num_steps - 1. `len` is num_steps, for progress bars."""

    def __init__(
        self,
        rows: Dataset,
        *,
        batch_size: int,
        num_anchors: int | None,
        seed: int,
        start_step: int,
        num_steps: int,
        pad_id: int,
    ) -> None:
        self._rows = rows
        self._num_anchors = num_anchors
        self._seed = seed
        self._start_step, self._num_steps = start_step, num_steps
        self._pad_id = pad_id
        self.plan = BatchPlan(
            [len(ids) for ids in rows["input_ids"]], batch_size=batch_size, seed=seed
        )

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[DrafterBatch]:
        for step in range(self._start_step, self._num_steps):
            rng = np.random.default_rng([self._seed, step, 1])
            yield collate(
                self._rows,
                self.plan.rows(step),
                num_anchors=self._num_anchors,
                rng=rng,
                pad_id=self._pad_id,
            )


def validation_batches(rows: Dataset, *, batch_size: int, pad_id: int) -> list[DrafterBatch]:
    """All rows once, sorted by length, at every eligible anchor."""
    order = np.argsort([len(ids) for ids in rows["input_ids"]], kind="stable")
    parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [collate(rows, part, num_anchors=None, rng=None, pad_id=pad_id) for part in parts]


def collate(
    rows: Dataset,
    indices: np.ndarray,
    *,
    num_anchors: int | None,
    rng: np.random.Generator | None,
    pad_id: int,
) -> DrafterBatch:
    """Pad the rows and draw up to `num_anchors` anchors in each (all of them when None)."""
    picked = rows[indices.tolist()]
    lengths = [len(ids) for ids in picked["input_ids"]]
    shape = (len(indices), max(lengths))
    ids = np.full(shape, pad_id)
    supervised = np.zeros(shape, dtype=bool)
    drawn = []
    for i, length in enumerate(lengths):
        ids[i, :length] = picked["input_ids"][i]
        supervised[i, :length] = picked["loss_mask"][i]
        drawn.append(draw_anchors(supervised[i, :length], num_anchors, rng))
    width = max(1, *(len(a) for a in drawn))
    anchors = np.ones((len(indices), width), dtype=np.int64)
    anchor_mask = np.zeros((len(indices), width), dtype=bool)
    for i, positions in enumerate(drawn):
        anchors[i, : len(positions)] = positions
        anchor_mask[i, : len(positions)] = True
    return DrafterBatch(
        ids=torch.from_numpy(ids),
        lengths=torch.tensor(lengths),
        supervised=torch.from_numpy(supervised),
        anchors=torch.from_numpy(anchors),
        anchor_mask=torch.from_numpy(anchor_mask),
        rows=torch.from_numpy(np.asarray(indices)),
    )


def draw_anchors(
    supervised: np.ndarray, num_anchors: int | None, rng: np.random.Generator | None
) -> np.ndarray:
    """Ascending anchor positions n >= 1 where x_n and x_{n+1} both belong to an answer.

    Drawn uniformly without replacement; the last block of an answer may run past its end.
    """
    eligible = np.flatnonzero(supervised[:-1] & supervised[1:])
    eligible = eligible[eligible >= 1]
    if num_anchors is None or len(eligible) <= num_anchors:
        return eligible
    assert rng is not None
    return np.sort(rng.choice(eligible, num_anchors, replace=False))
