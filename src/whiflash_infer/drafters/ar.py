"""Running the autoregressive drafter: lazy catch-up, then one row a token."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.cache import KVStore
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import TargetTables


class ARRunner:
    """Cache entry i is (g_i, x_{i+1}), so with anchor x_n it is complete at n entries."""

    def __init__(self, net: ARDrafter, tables: TargetTables, *, draft_length: int) -> None:
        self.net = net
        self.max_draft = draft_length
        self.tables = tables
        self._store = KVStore(1)
        self._frontier: tuple[Tensor, Tensor] | None = None

    def start(self, capacity: int) -> None:
        self._store = KVStore(capacity)
        self._frontier = None

    def lag(self, sequence: Sequence) -> int:
        return sequence.anchor - self._store.length

    def catch_up(self, sequence: Sequence) -> None:
        start, end = self._store.length, sequence.anchor
        if start == end:
            return
        positions = torch.arange(start, end, device=sequence.ids.device)
        fused = self.net.fuse(sequence.taps(start, end).to(self.net.fc.weight.dtype))
        embeds = self.tables.embed(sequence.ids[start + 1 : end + 1]).to(fused.dtype)
        joined, keys, values = self.net.entry(embeds, fused, positions)
        self._store.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        self._frontier = joined[-1:], fused[-1:]

    def draft(self, sequence: Sequence, num_draft: int) -> Int[Tensor, " K"]:
        assert self._frontier is not None
        assert self.lag(sequence) == 0
        joined, hidden = self._frontier
        true_length = self._store.length
        tokens: list[Tensor] = []
        for step in range(num_draft):
            position = torch.tensor([sequence.anchor - 1 + step], device=sequence.ids.device)
            if step > 0:
                embeds = self.tables.embed(tokens[-1]).to(hidden.dtype)
                joined, keys, values = self.net.entry(embeds, hidden, position)
                self._store.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            hidden = self.net.step_cached(joined, hidden, position, *self._store.view())
            draft_id = self.net.logits(hidden).argmax(-1)
            tokens.append(draft_id + self.net.d2t[draft_id])
        self._store.truncate(true_length)
        return torch.cat(tokens)
