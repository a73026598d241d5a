"""Which cached slots the queries of a pass may see, as additive masks for fused attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.cache import enlarged, grown


class PassMask:
    """Builds masks in storage that it keeps, so that a round allocates nothing of context length.

    fold: query heads that share a key head become rows beside each other (see `attend_cached`), so
    every query's row stands `fold` times.
    """

    def __init__(self, fold: int) -> None:
        self._fold = fold
        self._buffer: Tensor | None = None

    def build(
        self,
        starts: Sequence[int],
        block: Bool[Tensor, "B Q E"],
        end: int,
        dtype: torch.dtype,
        *,
        window: int | None = None,
        depths: Int[Tensor, "B Q"] | None = None,
    ) -> Float[Tensor, "B 1 QF T"]:
        """0 where seen, -inf where not, for the slots before `end`; valid until the next call.

        Queries of row b see the slots before starts[b], and of the E slots from there on those
        that `block` shows. window: the query at depth d, position starts[b] + d, sees only the last
        so many positions, itself included; the block is seen whatever the window.
        """
        folded = block.repeat_interleave(self._fold, dim=1)
        mask = self._storage(len(starts), folded.shape[1], end, folded.device, dtype)
        mask.fill_(-torch.inf)
        for row, start in enumerate(starts):
            first = 0 if window is None else max(0, start - window + 1)
            mask[row, :, first:start] = 0.0
            mask[row, :, start : start + block.shape[2]].masked_fill_(folded[row], 0.0)
            if window is not None:
                assert depths is not None
                self._slide(mask[row], start - window + 1, start, depths[row])
        return mask[:, None]

    def _slide(
        self, mask: Float[Tensor, "QF T"], edge: int, start: int, depths: Int[Tensor, " Q"]
    ) -> None:
        """Hide from the query at depth d the first d slots behind the window's edge."""
        first, last = max(0, edge), min(start, edge + len(depths))
        if first >= last:
            return
        slots = torch.arange(first, last, device=mask.device)
        passed = slots < edge + depths.repeat_interleave(self._fold)[:, None]
        mask[:, first:last].masked_fill_(passed, -torch.inf)

    def _storage(
        self, num_rows: int, num_queries: int, end: int, device: torch.device, dtype: torch.dtype
    ) -> Float[Tensor, "B QF T"]:
        with torch.inference_mode(False):  # it is used in that mode and outside of it
            if self._buffer is None or self._buffer.dtype != dtype:
                self._buffer = torch.zeros(0, 0, 0, device=device, dtype=dtype)
            rows, queries, slots = self._buffer.shape
            if num_rows > rows or num_queries > queries or end > slots:
                sizes = {0: max(rows, num_rows), 1: max(queries, num_queries), 2: grown(slots, end)}
                self._buffer = enlarged(self._buffer, sizes)
        return self._buffer[:num_rows, :num_queries, :end]


def causal(num_rows: int, width: int, device: torch.device) -> Bool[Tensor, "B Q Q"]:
    return torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(num_rows, -1, -1)
