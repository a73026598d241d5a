"""Batches as a function of (seed, step, share): a resumed run sees what a straight run sees.

A batch is what one optimiser step learns from. How many processes share it, and in how many passes
each of them takes its part, changes memory and time and nothing else: rows, their order and their
anchors follow from the seed, the step and the row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import IterableDataset

_SORT_WINDOW = 32  # batches; rows are sorted by length inside such a window to save padding


@dataclass
class DrafterBatch:
    """Right-padded conversations and the anchors to train at.

    supervised: tokens of an answer. anchors: positions n of anchor tokens x_n, ascending, padded
    where anchor_mask is False. rows: indices into the data set. luck: of each anchor, drawn evenly
    from [0, 1) for objectives that draw what they learn; None where nothing is drawn.
    """

    ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    supervised: Bool[Tensor, "B T"]
    anchors: Int[Tensor, "B A"]
    anchor_mask: Bool[Tensor, "B A"]
    rows: Int[Tensor, " B"]
    luck: Float[Tensor, "B A"] | None = None

    def to(self, device: torch.device | str) -> DrafterBatch:
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: None if part is None else part.to(device) for name, part in parts.items()}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every batch that one of `world` processes takes, in `accumulate` passes."""

    rank: int = 0
    world: int = 1
    accumulate: int = 1

    def parts(self, batch: np.ndarray) -> list[np.ndarray]:
        """This process's rows, pass by pass: every so-maniest of the batch, so lengths are even."""
        step = self.world * self.accumulate
        return [batch[i * self.world + self.rank :: step] for i in range(self.accumulate)]


WHOLE = Share()


class BatchPlan:
    """Which rows make up the batch of a step: every row once an epoch, shuffled anew.

    A batch holds `batch_size` rows, or with `tokens_per_batch` as many as fit in that many tokens,
    padding counted (one row at least).
    """

    def __init__(
        self, lengths: list[int], *, batch_size: int, tokens_per_batch: int | None, seed: int
    ) -> None:
        self._lengths = np.array(lengths)
        self._size = (batch_size, tokens_per_batch)
        self._seed = seed
        rows = batch_size
        if tokens_per_batch is not None:
            rows = max(1, tokens_per_batch // max(1, int(self._lengths.mean())))
        self._window = _SORT_WINDOW * rows
        self._starts = [0]  # the first step of each epoch that was looked at, and of the next
        self._epoch: tuple[int, list[np.ndarray]] = (-1, [])

    def rows(self, step: int) -> np.ndarray:
        while self._starts[-1] <= step:
            epoch = len(self._starts) - 1
            self._starts.append(self._starts[-1] + len(self._batches(epoch)))
        epoch = bisect_right(self._starts, step) - 1
        return self._batches(epoch)[step - self._starts[epoch]]

    def _batches(self, epoch: int) -> list[np.ndarray]:
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        return self._epoch[1]

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        batches: list[np.ndarray] = []
        for start in range(0, len(order), self._window):
            part = order[start : start + self._window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            batches += cut_batches(part, self._lengths[part], *self._size)
        return [batches[i] for i in rng.permutation(len(batches))]


def cut_batches(
    order: np.ndarray, lengths: np.ndarray, batch_size: int, tokens_per_batch: int | None
) -> list[np.ndarray]:
    """Rows in ascending order of length, cut where a batch is full."""
    if tokens_per_batch is None:
        return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    batches, start = [], 0
    for end in range(1, len(order) + 1):
        full = end == len(order) or (end + 1 - start) * lengths[end] > tokens_per_batch
        if full:
            batches.append(order[start:end])
            start = end
    return batches


class TrainingBatches(IterableDataset):
    """A share of the batches of steps start_step .. num_steps - 1, one item a pass.

    `len` is that of all steps, for progress bars.
    """

    def __init__(
        self,
        rows: Dataset,
        *,
        batch_size: int,
        tokens_per_batch: int | None,
        num_anchors: int | None,
        seed: int,
        start_step: int,
        num_steps: int,
        pad_id: int,
        share: Share,
    ) -> None:
        self._rows = rows
        self._num_anchors = num_anchors
        self._seed = seed
        self._start_step, self._num_steps = start_step, num_steps
        self._pad_id = pad_id
        self._share = share
        self.plan = BatchPlan(
            [len(ids) for ids in rows["input_ids"]],
            batch_size=batch_size,
            tokens_per_batch=tokens_per_batch,
            seed=seed,
        )

    def __len__(self) -> int:
        return self._num_steps * self._share.accumulate

    def __iter__(self) -> Iterator[DrafterBatch]:
        for step in range(self._start_step, self._num_steps):
            batch = self.plan.rows(step)
            for part in self._share.parts(batch):
                yield _collate_part(
                    self._rows,
                    part,
                    batch,
                    num_anchors=self._num_anchors,
                    rng=lambda row, step=step: np.random.default_rng([self._seed, step, row]),
                    pad_id=self._pad_id,
                )


def validation_batches(
    rows: Dataset,
    *,
    batch_size: int,
    pad_id: int,
    tokens_per_batch: int | None = None,
    share: Share = WHOLE,
) -> list[DrafterBatch]:
    """All rows once, sorted by length, at every eligible anchor; as many batches on every rank."""
    lengths = np.array([len(ids) for ids in rows["input_ids"]])
    order = np.argsort(lengths, kind="stable")
    batches = cut_batches(order, lengths[order], batch_size, tokens_per_batch)
    return [
        _collate_part(rows, part, batch, num_anchors=None, rng=None, pad_id=pad_id)
        for batch in batches
        for part in share.parts(batch)
    ]


def _collate_part(
    rows: Dataset, part: np.ndarray, batch: np.ndarray, **options: Any
) -> DrafterBatch:
    """Where no row is left for a part, one that does not count: all processes step alike."""
    if len(part):
        return collate(rows, part, **options)
    stand_in = collate(rows, batch[:1], **options)
    return replace(
        stand_in,
        supervised=torch.zeros_like(stand_in.supervised),
        anchor_mask=torch.zeros_like(stand_in.anchor_mask),
    )


def collate(
    rows: Dataset,
    indices: np.ndarray,
    *,
    num_anchors: int | None,
    rng: Callable[[int], np.random.Generator] | None,
    pad_id: int,
) -> DrafterBatch:
    """Pad the rows and draw up to `num_anchors` anchors in each (all of them when None).

    rng: the generator of a row; None draws nothing, and takes all anchors.
    """
    picked = rows[indices.tolist()]
    lengths = [len(ids) for ids in picked["input_ids"]]
    shape = (len(indices), max(lengths))
    ids = np.full(shape, pad_id)
    supervised = np.zeros(shape, dtype=bool)
    drawn, luck = [], []
    for i, (row, length) in enumerate(zip(indices.tolist(), lengths, strict=True)):
        ids[i, :length] = picked["input_ids"][i]
        supervised[i, :length] = picked["loss_mask"][i]
        of_row = rng and rng(row)
        drawn.append(draw_anchors(supervised[i, :length], num_anchors, of_row))
        luck.append(of_row.random(len(drawn[i]), np.float32) if of_row else [])
    width = max(1, *(len(a) for a in drawn))
    anchors = np.ones((len(indices), width), dtype=np.int64)
    anchor_mask = np.zeros((len(indices), width), dtype=bool)
    lucks = np.ones((len(indices), width), dtype=np.float32)
    for i, positions in enumerate(drawn):
        anchors[i, : len(positions)] = positions
        anchor_mask[i, : len(positions)] = True
        lucks[i, : len(luck[i])] = luck[i]
    return DrafterBatch(
        ids=torch.from_numpy(ids),
        lengths=torch.tensor(lengths),
        supervised=torch.from_numpy(supervised),
        anchors=torch.from_numpy(anchors),
        anchor_mask=torch.from_numpy(anchor_mask),
        rows=torch.from_numpy(np.asarray(indices)),
        luck=torch.from_numpy(lucks) if rng else None,
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
