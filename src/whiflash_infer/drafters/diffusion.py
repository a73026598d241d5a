"""Running the block-diffusion drafter: lazy catch-up of the context, then one pass a block."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.cache import KVStore
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import TargetTables


class DiffusionRunner:
    """Context entry i comes from the features of x_i; with anchor x_n it is complete at n."""

    def __init__(self, net: DiffusionDrafter, tables: TargetTables) -> None:
        self.net = net
        self.max_draft = net.config.block_size - 1
        self.tables = tables
        self._stores: list[KVStore] = []

    def start(self, capacity: int) -> None:
        size = capacity + self.net.config.block_size
        self._stores = [KVStore(size) for _ in self.net.layers]

    def lag(self, sequence: Sequence) -> int:
        return sequence.anchor - self._stores[0].length

    def catch_up(self, sequence: Sequence) -> None:
        start, end = self._stores[0].length, sequence.anchor
        if start == end:
            return
        positions = torch.arange(start, end, device=sequence.ids.device)
        taps = sequence.taps(start, end).to(self.net.fc.weight.dtype)
        entries = self.net.context_entries(taps, positions)
        for store, (keys, values) in zip(self._stores, entries, strict=True):
            store.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])

    def draft(self, sequence: Sequence, num_draft: int) -> Int[Tensor, " K"]:
        """The whole block is denoised, as in training; the first `num_draft` slots are used."""
        assert self.lag(sequence) == 0
        config, device = self.net.config, sequence.ids.device
        ids = torch.full((config.block_size,), config.mask_token_id, device=device)
        anchor_id = sequence.ids[sequence.anchor : sequence.length]
        ids[:1] = anchor_id
        positions = torch.arange(config.block_size, device=device) + sequence.anchor
        embeds = self.tables.embed(ids).to(self.net.fc.weight.dtype)
        hidden = self.net.block_cached(embeds, positions, self._stores)
        return self.net.drafts(hidden[1 : num_draft + 1], anchor_id, self.tables.head)
