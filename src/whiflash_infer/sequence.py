"""The texts being decoded: their committed tokens, and the target's features of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.cache import enlarged, grown, row_index


class Texts:
    """R rows, a text in each, in storage for C positions that is kept from text to text.

    With t committed tokens of a row, its features of positions 0..t-2 are valid: they are the
    drafters' backlog, kept once and read by all. The anchor, at t-1, has none yet. keep_taps: there
    are drafters who read them.
    """

    def __init__(self, device: torch.device, *, keep_taps: bool) -> None:
        self.device = device
        self._keep_taps = keep_taps
        self.lengths: list[int] = []
        self._ids = torch.zeros(0, 0, dtype=torch.long, device=device)
        self._taps: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self._ids.nbytes + (0 if self._taps is None else self._taps.nbytes)

    def reserve(self, num_rows: int, capacity: int) -> None:
        self.lengths.extend([0] * (num_rows - len(self.lengths)))
        sizes = {0: len(self.lengths), 1: grown(self._ids.shape[1], capacity)}
        if tuple(sizes.values()) != self._ids.shape:
            self._ids = enlarged(self._ids, sizes)
            if self._taps is not None:
                self._taps = enlarged(self._taps, sizes)

    def begin(
        self, row: int, ids: Int[Tensor, " T"], taps: Float[Tensor, "T E"], first: Int[Tensor, ""]
    ) -> None:
        """A new text: a prompt that the target has read, and the token it answers first."""
        self._ids[row, : len(ids)] = ids
        self._ids[row, len(ids)] = first
        self.lengths[row] = len(ids) + 1
        if self._keep_taps:
            if self._taps is None:
                self._taps = taps.new_zeros((*self._ids.shape, taps.shape[1]))
            self._taps[row, : len(ids)] = taps

    def anchors(self, rows: Sequence[int]) -> list[int]:
        """Positions n of the last committed tokens."""
        return [self.lengths[row] - 1 for row in rows]

    def ids(self, rows: Sequence[int], starts: Sequence[int], width: int) -> Int[Tensor, "B N"]:
        """`width` tokens of each row from starts[b] on; behind the anchor they mean nothing."""
        return self._window(self._ids, rows, starts, width)

    def taps(
        self, rows: Sequence[int], starts: Sequence[int], width: int
    ) -> Float[Tensor, "B N E"]:
        """Features of `width` positions of each row; from the anchor on they mean nothing."""
        assert self._taps is not None
        return self._window(self._taps, rows, starts, width)

    def extend(
        self,
        rows: Sequence[int],
        tokens: Int[Tensor, "B N"],
        taps: Float[Tensor, "B N E"],
    ) -> None:
        """Write tokens behind the anchors, and the features of the anchors and of all but the last.

        More may be written than is committed: `commit` says how far the texts reach.
        """
        anchors = self.anchors(rows)
        if len(rows) == 1:
            (row,), (anchor,), width = rows, anchors, tokens.shape[1]
            self._ids[row, anchor + 1 : anchor + 1 + width] = tokens[0]
            if self._taps is not None:
                self._taps[row, anchor : anchor + width] = taps[0]
            return
        index = torch.tensor(rows, device=self.device)[:, None]
        first = torch.tensor(anchors, device=self.device)[:, None]
        slots = first + torch.arange(tokens.shape[1], device=self.device)
        self._ids[index, slots + 1] = tokens
        if self._taps is not None:
            self._taps[index, slots] = taps

    def commit(self, row: int, num_tokens: int) -> None:
        self.lengths[row] += num_tokens

    def move(self, source: int, target: int) -> None:
        """The row `target` becomes what `source` was."""
        length = self.lengths[target] = self.lengths[source]
        self._ids[target, :length] = self._ids[source, :length]
        if self._taps is not None:
            self._taps[target, :length] = self._taps[source, :length]

    def wipe(self, row: int) -> None:
        """Zero the features behind the committed ones."""
        if self._taps is not None:
            self._taps[row, self.lengths[row] - 1 :] = 0.0

    def clear(self, row: int) -> None:
        """Forget a row; what overflowed in it must not reach the next text there."""
        self.lengths[row] = 0
        if self._taps is not None:
            self._taps[row] = 0.0

    def _window(
        self, storage: Tensor, rows: Sequence[int], starts: Sequence[int], width: int
    ) -> Tensor:
        if all(start == starts[0] for start in starts):
            return storage[row_index(rows, self.device), starts[0] : starts[0] + width]
        index = torch.tensor(rows, device=self.device)[:, None]
        first = torch.tensor(starts, device=self.device)[:, None]
        slots = first + torch.arange(width, device=self.device)
        return storage[index, slots.clamp(max=storage.shape[1] - 1)]
