"""The frozen target inside the training process: taps and final hidden states of each batch."""

from __future__ import annotations

import torch
from torch import Tensor

from whiflash_infer.target import Target
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch


class Teacher:
    """Computes the target's rows online, or keeps them in memory after the first epoch.

    It is no module: the target must not enter checkpoints, nor be moved by the trainer.
    """

    def __init__(self, target: Target, *, keep: bool) -> None:
        self.target = target
        self.tables = target.tables
        self._kept: dict[bytes, tuple[Tensor, Tensor]] | None = {} if keep else None

    @torch.no_grad()
    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        if self._kept is None:
            return self._compute(batch)
        # Kept by content: indices would confuse the rows of training and validation.
        lengths = batch.lengths.tolist()
        texts = zip(batch.ids.cpu(), lengths, strict=True)
        keys = [ids[:length].numpy().tobytes() for ids, length in texts]
        if any(key not in self._kept for key in keys):
            rows = self._compute(batch)
            for i, (key, length) in enumerate(zip(keys, lengths, strict=True)):
                self._kept[key] = (rows.taps[i, :length].clone(), rows.hidden[i, :length].clone())
            return rows
        taps, hidden = zip(*(self._kept[key] for key in keys), strict=True)
        return TeacherRows(_pad(taps), _pad(hidden))

    def _compute(self, batch: DrafterBatch) -> TeacherRows:
        mask = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
        device_type = batch.ids.device.type
        with torch.autocast(device_type, enabled=False):
            return self.target.teach(batch.ids, mask)


def _pad(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
