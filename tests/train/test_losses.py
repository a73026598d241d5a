from __future__ import annotations

import torch

from whiflash_train.losses import chained_hits

T, X = True, False


def test_a_hit_counts_only_behind_hits() -> None:
    hits = torch.tensor([[T, T, X, T], [X, T, T, T], [T, T, T, T]])
    assert chained_hits(hits).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
