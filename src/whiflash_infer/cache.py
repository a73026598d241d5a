"""Key/value stores: allocated once, written by position, rolled back by moving a length."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVStore:
    """Keys and values of one layer; doubles when it is full."""

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = max(1, capacity)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(
        self, keys: Float[Tensor, "B H N d"], values: Float[Tensor, "B H N d"]
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B H T d"]]:
        """Write N entries behind the present length; return views of everything up to them."""
        end = self.length + keys.shape[2]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            self._grow(keys, values, end)
        assert self._keys is not None
        assert self._values is not None
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def view(self) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B H T d"]]:
        """Everything up to the present length, without a copy."""
        assert self._keys is not None
        assert self._values is not None
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: only {self.length} entries exist")
        self.length = length

    def select(self, rows: Int[Tensor, " N"]) -> None:
        """Keep these rows of a batch."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    def _grow(self, keys: Tensor, values: Tensor, end: int) -> None:
        while self._capacity < end:
            self._capacity *= 2
        shape = (*keys.shape[:2], self._capacity, keys.shape[3])
        new_keys, new_values = keys.new_empty(shape), values.new_empty(shape)
        if self._keys is not None and self._values is not None:
            new_keys[:, :, : self.length] = self._keys[:, :, : self.length]
            new_values[:, :, : self.length] = self._values[:, :, : self.length]
        self._keys, self._values = new_keys, new_values


class _StoreLayer(CacheLayerMixin):
    """A `KVStore` behind the interface that Hugging Face models call.

    It keeps every position also for sliding-window layers, whose mask then does the sliding: the
    model builds it from `get_mask_sizes`, and rolling back needs nothing but a length.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.store = KVStore(capacity)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.store.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Older releases pass the positions of the queries in place of their number.
        rows = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.store.length + rows, 0

    def get_seq_length(self) -> int:
        return self.store.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class TargetCache(Cache):
    """The target's key/value cache with rollback by length."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        self._stores = [_StoreLayer(capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._stores))

    @property
    def length(self) -> int:
        return self._stores[0].store.length

    def truncate(self, length: int) -> None:
        for layer in self._stores:
            layer.store.truncate(length)

    def select(self, rows: Int[Tensor, " N"]) -> None:
        for layer in self._stores:
            layer.store.select(rows)
