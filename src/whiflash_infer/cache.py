"""Key/value stores: allocated once, written by position, rolled back by moving a length.

One tensor holds every layer of every row; slot p of a row belongs to position p of its text. What
lies behind a row's length is left over from drafts that failed. It is finite and never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_STEP = 64  # capacities are multiples of it, which fused kernels like


@dataclass(frozen=True, slots=True)
class Span:
    """Where a pass writes, `width` slots from starts[b] on in rows[b], and that it reads to `end`.

    index: the rows, a slice where they lie beside each other, so that reading them copies nothing.
    slots: None where one slice says it for all rows.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    width: int
    end: int
    index: slice | Int[Tensor, " B"]
    slots: Int[Tensor, "B N"] | None

    @property
    def is_static(self) -> bool:
        """Whether it reads more than it has to, so that its shapes stay the same."""
        return self.end > max(self.starts) + self.width

    @property
    def row_index(self) -> Int[Tensor, "B 1"]:
        assert self.slots is not None
        if isinstance(self.index, Tensor):
            return self.index[:, None]
        return torch.arange(self.index.start, self.index.stop, device=self.slots.device)[:, None]


def make_span(
    rows: Sequence[int],
    starts: Sequence[int],
    width: int,
    device: torch.device,
    *,
    end: int | None = None,
    static: bool = False,
) -> Span:
    """end: behind the last slot written when None. static: say it in tensors, also where a slice
    would do, so that a compiled pass is not compiled for every length."""
    index = row_index(rows, device)
    slots = None
    if static or isinstance(index, Tensor) or any(start != starts[0] for start in starts):
        first = torch.tensor(starts, device=device)[:, None]
        slots = first + torch.arange(width, device=device)
    last = max(starts) + width if end is None else end
    return Span(tuple(rows), tuple(starts), width, last, index, slots)


def row_index(rows: Sequence[int], device: torch.device) -> slice | Int[Tensor, " B"]:
    """Ascending neighbours as a slice, which makes views; other rows as indices."""
    if all(row == rows[0] + offset for offset, row in enumerate(rows)):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)


class KVCache:
    """Keys and values of L layers for R rows of C slots; both double when they are too few."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.lengths: list[int] = []
        self._capacity = 0
        self._kv: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._kv is None else self._kv.nbytes

    @property
    def capacity(self) -> int:
        return self._capacity

    def reserve(self, num_rows: int, capacity: int) -> None:
        """Room for that many rows and slots; what is there stays."""
        self._capacity = grown(self._capacity, capacity)
        self.lengths.extend([0] * (num_rows - len(self.lengths)))
        if self._kv is not None and self._kv.shape[2:5:2] != (len(self.lengths), self._capacity):
            self._kv = enlarged(self._kv, {2: len(self.lengths), 4: self._capacity})

    def write(
        self,
        layer: int,
        keys: Float[Tensor, "B G N d"],
        values: Float[Tensor, "B G N d"],
        span: Span,
    ) -> tuple[Float[Tensor, "B G T d"], Float[Tensor, "B G T d"]]:
        """Write a pass's entries, which moves no length; return those up to the span's end."""
        if self._kv is None:
            rows, heads, width = len(self.lengths), keys.shape[1], keys.shape[3]
            shape = (self.num_layers, 2, rows, heads, self._capacity, width)
            self._kv = keys.new_zeros(shape)
        store = self._kv[layer]
        if span.slots is None:
            target = slice(span.starts[0], span.starts[0] + span.width)
            store[0, span.index, :, target] = keys
            store[1, span.index, :, target] = values
        else:
            store[0][span.row_index, :, span.slots] = keys.transpose(1, 2)
            store[1][span.row_index, :, span.slots] = values.transpose(1, 2)
        return self.read(layer, span)

    def read(
        self, layer: int, span: Span
    ) -> tuple[Float[Tensor, "B G T d"], Float[Tensor, "B G T d"]]:
        """Keys and values of a span's rows up to its end; views where the rows are neighbours."""
        assert self._kv is not None
        store = self._kv[layer]
        return store[0, span.index, :, : span.end], store[1, span.index, :, : span.end]

    def entries(self, row: int) -> Float[Tensor, "L 2 G T d"]:
        """What a row holds, without a copy."""
        assert self._kv is not None
        return self._kv[:, :, row, :, : self.lengths[row]]

    def truncate(self, row: int, length: int) -> None:
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(
                f"cannot roll back to {length}: only {self.lengths[row]} entries exist"
            )
        self.lengths[row] = length

    def keep_path(self, span: Span, path: Int[Tensor, "B D"]) -> None:
        """Move the entries of tree nodes on a path to the slots behind the anchor's, in order.

        span: the pass that read anchor and nodes, in slots one after the other. path: node indices.
        """
        assert self._kv is not None
        first = torch.tensor(span.starts, device=path.device)[:, None] + 1
        target = first + torch.arange(path.shape[1], device=path.device)
        rows = torch.tensor(span.rows, device=path.device)[:, None]
        self._kv[:, :, rows, :, target] = self._kv[:, :, rows, :, first + path]

    def move(self, source: int, target: int) -> None:
        """The row `target` becomes what `source` was."""
        self.lengths[target] = self.lengths[source]
        if self._kv is not None:
            length = self.lengths[source]
            self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]

    def wipe(self, row: int) -> None:
        """Zero what was written behind a row's length."""
        if self._kv is not None:
            self._kv[:, :, row, :, self.lengths[row] :] = 0.0

    def clear(self, row: int) -> None:
        """Forget a row; what overflowed in it must not reach the next text there."""
        self.lengths[row] = 0
        if self._kv is not None:
            self._kv[:, :, row] = 0.0


def grown(size: int, wanted: int) -> int:
    """The next capacity: `wanted` at first, then at least twice the old one."""
    if wanted <= size:
        return size
    return -(-max(wanted, 2 * size) // _STEP) * _STEP


def enlarged(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
    """A copy with these dimensions longer, filled up with zeros."""
    shape = [sizes.get(dim, size) for dim, size in enumerate(tensor.shape)]
    larger = tensor.new_zeros(shape)
    larger[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return larger


class _Layer(CacheLayerMixin):
    """One layer of a `KVCache` behind the interface that Hugging Face models call.

    It keeps every position also for sliding-window layers, whose mask then does the sliding, and
    so rolling back needs nothing but a length.
    """

    is_sliding = False

    def __init__(self, owner: TargetCache, layer: int, window: int | None) -> None:
        super().__init__()
        self._owner, self._layer, self._window = owner, layer, window
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        return

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        span = self._owner.current
        keys, values = self._owner.kv.write(self._layer, key_states, value_states, span)
        first = self._owner.first_seen(self._window)
        return keys[:, :, first:], values[:, :, first:]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Older releases pass the positions of the queries in place of their number.
        rows = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.get_seq_length() + rows, 0

    def get_seq_length(self) -> int:
        return self._owner.current.starts[0]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class TargetCache(Cache):
    """The target's cache. `current` says where the running pass writes; set it before each.

    windows: of each layer, None for full attention.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.kv = KVCache(len(windows))
        self.current = Span((0,), (0,), 0, 0, slice(0, 1), None)
        super().__init__(layers=[_Layer(self, i, window) for i, window in enumerate(windows)])

    def first_seen(self, window: int | None) -> int:
        """The first slot that a layer's queries may see; 0 where shapes are to stay the same."""
        if window is None or self.current.is_static:
            return 0
        return max(0, min(self.current.starts) - window + 1)
