"""Dense rounds as training batches for the router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import IterableDataset

from whiflash_infer.routing.replay import DenseTexts
from whiflash_train.batches import Share


@dataclass
class RouterBatch:
    """States and what each of the D drafting arms would have had accepted there."""

    features: Float[Tensor, "N F"]
    accepted: Int[Tensor, "N D"]
    censored: Bool[Tensor, "N D"]

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> RouterBatch:
        return RouterBatch(
            self.features.to(device), self.accepted.to(device), self.censored.to(device)
        )

    def take(self, index: np.ndarray) -> RouterBatch:
        return RouterBatch(self.features[index], self.accepted[index], self.censored[index])


def router_batch(texts: DenseTexts) -> RouterBatch:
    """Every labelled position of every conversation."""
    return RouterBatch(
        features=texts.features,
        accepted=torch.from_numpy(texts.accepted[:, 1:]).long(),
        censored=torch.from_numpy(texts.censored[:, 1:]),
    )


class RouterBatches(IterableDataset):
    """A share of the batches of steps start_step .. num_steps - 1, functions of (seed, step)."""

    def __init__(
        self,
        data: RouterBatch,
        *,
        batch_size: int,
        seed: int,
        start_step: int,
        num_steps: int,
        share: Share,
    ) -> None:
        self._data = data
        self._share = share
        self._batch_size = min(batch_size, len(data))
        self._seed = seed
        self._start_step, self._num_steps = start_step, num_steps

    def __len__(self) -> int:
        return self._num_steps * self._share.accumulate

    def __iter__(self) -> Iterator[RouterBatch]:
        per_epoch = len(self._data) // self._batch_size
        for step in range(self._start_step, self._num_steps):
            epoch, index = divmod(step, per_epoch)
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._data))
            batch = order[index * self._batch_size : (index + 1) * self._batch_size]
            for part in self._share.parts(batch):
                yield self._data.take(part)
