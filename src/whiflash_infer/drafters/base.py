"""What the decode loop asks of a drafter."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from whiflash_infer.sequence import Sequence


@runtime_checkable
class DraftRunner(Protocol):
    """A drafter network with its cache for one sequence.

    The cache holds entries made from true target features of committed tokens, and nothing else
    survives a round.
    """

    max_draft: int

    def start(self, capacity: int) -> None:
        """Forget everything; a new sequence of at most `capacity` tokens begins."""
        ...

    def lag(self, sequence: Sequence) -> int:
        """Committed tokens that the cache does not follow yet."""
        ...

    def catch_up(self, sequence: Sequence) -> None:
        """Bring the cache to the frontier in one pass: keys and values only."""
        ...

    def draft(self, sequence: Sequence, num_draft: int) -> Int[Tensor, " K"]:
        """Most likely tokens after the anchor. The cache must be caught up."""
        ...
