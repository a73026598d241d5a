"""Which target tokens the AR drafter may draft."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.nets.ar import ARDrafterConfig

_ROWS_PER_BATCH = 1024


def choose_vocabulary(
    rows: Dataset, config: ARDrafterConfig, *, always: Iterable[int]
) -> tuple[Int[Tensor, " W"], float]:
    """The most frequent supervised tokens, ties to the lower id, and their share of all of them.

    `always` (special tokens) are kept whatever their count.
    """
    counts = count_supervised(rows, config.shape.vocab_size)
    ranks = counts.copy()
    ranks[[i for i in always if i < len(ranks)]] = counts.max() + 1
    chosen = np.argsort(-ranks, kind="stable")[: config.draft_vocab_size]
    coverage = float(counts[chosen].sum() / max(1, counts.sum()))
    return torch.from_numpy(np.sort(chosen)), coverage


def count_supervised(rows: Dataset, vocab_size: int) -> np.ndarray:
    """How often each token is supervised."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for table in rows.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH):
        ids = pc.list_flatten(table["input_ids"]).to_numpy()  # pyright: ignore
        mask = pc.list_flatten(table["loss_mask"]).to_numpy()  # pyright: ignore
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return counts
