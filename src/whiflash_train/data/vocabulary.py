"""Which target tokens the AR drafter may draft."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from datasets import Dataset
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.nets.ar import ARDrafterConfig


def choose_vocabulary(
    rows: Dataset, config: ARDrafterConfig, always: Iterable[int]
) -> tuple[Int[Tensor, " W"], float]:
    """The most frequent supervised tokens, ties to the lower id, and their share of all of them.

    `always` (the stop tokens) are kept whatever their count.
    """
    counts = np.zeros(config.shape.vocab_size, dtype=np.int64)
    for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True):
        np.add.at(counts, np.asarray(ids)[np.asarray(mask)], 1)
    ranks = counts.copy()
    ranks[list(always)] = counts.max() + 1
    chosen = np.argsort(-ranks, kind="stable")[: config.draft_vocab_size]
    coverage = float(counts[chosen].sum() / max(1, counts.sum()))
    return torch.from_numpy(np.sort(chosen)), coverage
