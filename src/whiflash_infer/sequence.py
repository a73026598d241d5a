"""One request being decoded: its tokens, and the target's view of them."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.cache import TargetCache
from whiflash_infer.types import TargetRows


class Sequence:
    """Committed tokens, the target's cache and the tapped features of all but the anchor.

    Everything is allocated for `capacity` positions at the start. With t committed tokens, rows
    0..t-2 of `taps` are valid: they are the drafters' backlog, kept once and read by both.
    """

    def __init__(self, prompt_ids: Int[Tensor, " T"], cache: TargetCache, *, capacity: int) -> None:
        self.ids = torch.empty(capacity, dtype=torch.long, device=prompt_ids.device)
        self.ids[: len(prompt_ids)] = prompt_ids
        self.length = len(prompt_ids)
        self.cache = cache
        self.anchor_logits: Float[Tensor, " V"] | None = None
        self.anchor_hidden: Float[Tensor, " D"] | None = None
        self._capacity = capacity
        self._taps: Tensor | None = None

    def prefix(self, length: int) -> Sequence:
        """The same request when it had `length` tokens; shares all storage."""
        earlier = copy.copy(self)
        earlier.length = length
        return earlier

    @property
    def anchor(self) -> int:
        """Position n of the last committed token."""
        return self.length - 1

    def taps(self, start: int, end: int) -> Float[Tensor, "N E"]:
        """Features of positions start..end-1; all must lie before the anchor."""
        assert self._taps is not None
        assert end <= self.anchor
        return self._taps[start:end]

    def commit(self, tokens: Int[Tensor, " N"], rows: TargetRows, *, num_read: int) -> None:
        """Append tokens after a target pass whose first `num_read` rows read committed tokens.

        Their features and cache entries are kept, the rest is rolled back. The last of those rows
        produced the new anchor, so its hidden state and logits become the state for routing.
        """
        first = self.cache.length - rows.taps.shape[0]
        if self._taps is None:
            shape = (self._capacity, rows.taps.shape[1])
            self._taps = rows.taps.new_empty(shape)
        self._taps[first : first + num_read] = rows.taps[:num_read]
        self.cache.truncate(first + num_read)
        last = num_read - rows.taps.shape[0] - 1 + rows.logits.shape[0]
        self.anchor_logits, self.anchor_hidden = rows.logits[last], rows.hidden[last]
        self.ids[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)
