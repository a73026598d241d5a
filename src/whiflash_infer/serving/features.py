"""Features and texts as a serving engine keeps them: by slot, and by row of what it answers.

An engine writes a token's keys and values into a *slot*, a place in one of its blocks, and every
text that shares the block shares them. The target's features are kept under the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.cache import enlarged, grown
from whiflash_infer.sequence import Texts


class PagedFeatures:
    """Features of the tokens in an engine's blocks, in pages of one block each.

    Block ids may be any, pages are few: the least recently written or read page is taken away for
    a block that has none. A slot holds what it was written for last, a token at a position; it
    never shows what another token left there.

    evictions: pages that were taken from another block. rewrites: slots that were written again
    after `holds` had answered that they hold something.
    """

    def __init__(
        self,
        *,
        block_size: int,
        width: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size, self.device = block_size, device
        self.num_pages = max(1, num_tokens // block_size)
        self.evictions = 0
        self.rewrites = 0
        # What is not held has the place behind the last page, where there are only zeros.
        self._nowhere = self.num_pages * block_size
        self._features = torch.empty(self._nowhere + 1, width, dtype=dtype, device=device)
        self._features[self._nowhere] = 0.0
        self._ids = np.full(self._nowhere + 1, -1, dtype=np.int32)
        self._positions = np.full(self._nowhere + 1, -1, dtype=np.int32)
        self._relied_on = np.zeros(self._nowhere + 1, dtype=np.bool_)
        # By block; the last entry is that of all blocks that are not in the table.
        self._page_of = np.full(1, self.num_pages)
        self._block_of = np.full(self.num_pages, -1)
        self._last_used = np.zeros(self.num_pages + 1, dtype=np.int64)
        self._num_pages_used, self._clock = 0, 1

    @property
    def capacity(self) -> int:
        """In tokens."""
        return self._nowhere

    @property
    def num_pages_used(self) -> int:
        return self._num_pages_used

    @property
    def num_bytes(self) -> int:
        token_arrays = self._ids.nbytes + self._positions.nbytes + self._relied_on.nbytes
        page_arrays = self._page_of.nbytes + self._block_of.nbytes + self._last_used.nbytes
        return self._features.nbytes + token_arrays + page_arrays

    @property
    def version(self) -> int:
        """While it stays the same, what `holds` said is held is still held."""
        return self.evictions + self.rewrites

    def write(
        self,
        slots: Int[np.ndarray, " N"],
        ids: Int[np.ndarray, " N"],
        positions: Int[np.ndarray, " N"],
        features: Float[Tensor, "N E"],
    ) -> None:
        """No slot may come twice; negative ones are left out.

        When there are fewer pages than blocks, the blocks that come last get them.
        """
        self._make_pages(slots[slots >= 0] // self.block_size)
        places = self._places(slots)
        kept = places < self._nowhere
        if not kept.all():
            places, ids, positions = places[kept], ids[kept], positions[kept]
            features = features[torch.from_numpy(kept).to(features.device)]
        self.rewrites += int(self._relied_on[places].sum())
        self._relied_on[places] = False
        self._ids[places] = -1  # should the next line fail
        self._features.index_copy_(0, self._on_device(places), features.to(self._features))
        self._ids[places] = ids
        self._positions[places] = positions
        self._touch(places)

    def holds(
        self,
        slots: Int[np.ndarray, " N"],
        ids: Int[np.ndarray, " N"],
        positions: Int[np.ndarray, " N"],
    ) -> Bool[np.ndarray, " N"]:
        """Which slots were written for exactly this token at this position."""
        places = self._places(slots)
        found = self._ids[places]
        held = (found == ids) & (found >= 0) & (self._positions[places] == positions)
        self._relied_on[places] |= held
        return held

    def read(self, slots: Int[np.ndarray, "*N"]) -> Float[Tensor, "*N E"]:
        """Slots that hold nothing, negative ones too, give zeros."""
        places = self._places(slots.reshape(-1))
        places[self._ids[places] < 0] = self._nowhere
        self._touch(places)
        found = self._features.index_select(0, self._on_device(places))
        return found.view(*slots.shape, self._features.shape[1])

    def forget(self) -> None:
        """Hold nothing any more: the engine may have written what was not seen."""
        self._ids[:] = -1
        self._relied_on[:] = False
        self.rewrites += 1

    def _places(self, slots: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        blocks, offsets = np.divmod(slots, self.block_size)
        pages = self._page_of[blocks.clip(-1, len(self._page_of) - 1)]
        return np.minimum(pages * self.block_size + offsets, self._nowhere)

    def _on_device(self, places: Int[np.ndarray, " N"]) -> Int[Tensor, " N"]:
        return torch.from_numpy(places).to(self.device)

    def _touch(self, places: Int[np.ndarray, " N"]) -> None:
        """Of a page with several places the last one counts."""
        pages = places // self.block_size
        self._last_used[pages] = self._clock + np.arange(len(pages))
        self._clock += len(pages)

    def _make_pages(self, blocks: Int[np.ndarray, " N"]) -> None:
        """A page for each of these blocks, or for the last of them."""
        self._enlarge_table(int(blocks.max(initial=-1)) + 1)
        if (self._page_of[blocks] < self.num_pages).all():
            return
        wanted = _distinct(blocks)[-self.num_pages :]
        pages = self._page_of[wanted]
        missing = wanted[pages == self.num_pages]
        taken = self._take_pages(len(missing), pages[pages < self.num_pages])
        self._page_of[missing] = taken
        self._block_of[taken] = missing

    def _enlarge_table(self, num_blocks: int) -> None:
        size = len(self._page_of)
        if num_blocks < size:
            return
        table = np.full(grown(size, num_blocks + 1), self.num_pages)
        table[:size] = self._page_of
        self._page_of = table

    def _take_pages(
        self, number: int, needed: Int[np.ndarray, " M"]
    ) -> Int[np.ndarray, " {number}"]:
        """Pages that hold nothing: free ones, then the least recently used but for the needed."""
        start = self._num_pages_used
        self._num_pages_used = min(start + number, self.num_pages)
        free = np.arange(start, self._num_pages_used)
        self._last_used[needed] = self._clock
        used = self._last_used[:start].argsort(kind="stable")[: number - len(free)]
        self.evictions += len(used)
        self._page_of[self._block_of[used]] = self.num_pages
        taken = np.concatenate([free, used])
        for storage, empty in ((self._ids, -1), (self._relied_on, False)):
            storage[: self._nowhere].reshape(self.num_pages, -1)[taken] = empty
        return taken


@dataclass(frozen=True, slots=True)
class _Held:
    """Positions start..end - 1 of a text were found to be held when the features had `version`."""

    start: int
    end: int
    version: int


class ServedTexts(Texts):
    """Texts whose features are read through the slots that an engine gave their tokens.

    Ids and slots are on the host, too. Texts are changed by `put`, `append` and `clear` alone; what
    else the base can do to a text is for decoding by ourselves.
    """

    def __init__(self, device: torch.device, features: PagedFeatures) -> None:
        super().__init__(device, keep_taps=False)
        self.features = features
        self._host_ids = np.zeros((0, 0), dtype=np.int64)
        self._host_slots = np.zeros((0, 0), dtype=np.int64)
        self._held: list[_Held | None] = []

    @property
    def num_bytes(self) -> int:
        """Without the features, which count themselves."""
        return super().num_bytes + self._host_ids.nbytes + self._host_slots.nbytes

    def reserve(self, num_rows: int, capacity: int) -> None:
        super().reserve(num_rows, capacity)
        self._held.extend([None] * (len(self.lengths) - len(self._held)))
        if self._host_ids.shape != tuple(self._ids.shape):
            sizes = dict(enumerate(self._ids.shape))
            self._host_ids = enlarged(torch.from_numpy(self._host_ids), sizes).numpy()
            self._host_slots = enlarged(torch.from_numpy(self._host_slots), sizes).numpy()

    def put(self, row: int, ids: Int[np.ndarray, " T"], slots: Int[np.ndarray, " T-1"]) -> None:
        """A new text, all of it committed, and the slots of all but its anchor."""
        self.clear(row)
        self._write(row, ids, slots, 0)

    def append(self, row: int, ids: Int[np.ndarray, " N"], slots: Int[np.ndarray, " N"]) -> None:
        """More committed tokens; the slots are those of the old anchor and of all but the last."""
        self._write(row, ids, slots, self.lengths[row] - 1)

    def text(self, row: int) -> Int[np.ndarray, " T"]:
        """The committed ids, a view."""
        return self._host_ids[row, : self.lengths[row]]

    def slots(self, row: int) -> Int[np.ndarray, " S"]:
        """Of all positions but the anchor's, a view."""
        return self._host_slots[row, : max(0, self.lengths[row] - 1)]

    def holds(self, row: int, start: int) -> bool:
        """Whether the features of all positions from `start` to the one before the anchor are held.

        What is known to be held is not looked up again while nothing that was held got lost.
        """
        end, version, known = self.lengths[row] - 1, self.features.version, self._held[row]
        is_behind = known is not None and known.version == version and start >= known.start
        first = max(start, known.end) if known is not None and is_behind else start
        if first < end and not self._look_up(row, first, end):
            return False
        if known is None or not is_behind:
            self._held[row] = _Held(start, end, version)
        elif start <= known.end < end:
            self._held[row] = _Held(known.start, end, version)
        return True

    def taps(
        self, rows: Sequence[int], starts: Sequence[int], width: int
    ) -> Float[Tensor, "B N E"]:
        """Features of `width` positions of each row; zeros from the anchor on."""
        index = np.asarray(rows)[:, None]
        positions = np.asarray(starts)[:, None] + np.arange(width)
        anchors = np.asarray(self.anchors(rows))[:, None]
        slots = self._host_slots[index, positions.clip(max=self._host_slots.shape[1] - 1)]
        return self.features.read(np.where(positions < anchors, slots, -1))

    def clear(self, row: int) -> None:
        super().clear(row)
        self._held[row] = None

    def _look_up(self, row: int, start: int, end: int) -> bool:
        slots, ids = self._host_slots[row, start:end], self._host_ids[row, start:end]
        return bool(self.features.holds(slots, ids, np.arange(start, end)).all())

    def _write(
        self, row: int, ids: Int[np.ndarray, " N"], slots: Int[np.ndarray, " S"], first_slot: int
    ) -> None:
        start = self.lengths[row]
        end = start + len(ids)
        self.reserve(len(self.lengths), end)
        self._host_ids[row, start:end] = ids
        self._host_slots[row, first_slot : end - 1] = slots
        self._ids[row, start:end] = torch.from_numpy(self._host_ids[row, start:end])
        self.lengths[row] = end


def _distinct(blocks: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """Each block once, in the order in which they come last."""
    found, from_end = np.unique(blocks[::-1], return_index=True)
    return found[from_end.argsort()[::-1]]
