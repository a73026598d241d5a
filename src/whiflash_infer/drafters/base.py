"""What the decode loop asks of a drafter, and what all drafters do alike.

An *arm* is one way to draft. Its *drafter* is the network with its cache, which several arms may
share: a chain and a tree of the same network follow the text once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.cache import KVCache
from whiflash_infer.sequence import Texts
from whiflash_infer.trees import DraftTree, cut

# Rows that lag further are caught up one by one, so that no short backlog is padded to a prompt.
SHORT_LAG = 32


@dataclass(frozen=True, slots=True)
class Drafts:
    """finite: False for rows where the drafter's numbers overflowed; their drafts mean nothing.

    probs: of drafts that were drawn, the distributions that they were drawn from.
    """

    tree: DraftTree
    finite: Bool[Tensor, " B"]
    probs: Float[Tensor, "B K V"] | None = None


# Draws draft number `step` (from 0) of every row from logits over the target's vocabulary.
DrawDrafts = Callable[[Float[Tensor, "B V"], int], tuple[Int[Tensor, " B"], Float[Tensor, "B V"]]]


class Drafter(ABC):
    """A network with its cache of R texts.

    The cache holds entries made from true target features of committed tokens, and nothing else
    survives a round. With the anchor x_n it is complete at n entries.
    """

    kv: KVCache

    def reserve(self, num_rows: int, capacity: int) -> None:
        self.kv.reserve(num_rows, capacity)

    def lag(self, texts: Texts, row: int) -> int:
        """Committed tokens that the cache does not follow yet."""
        return texts.lengths[row] - 1 - self.kv.lengths[row]

    def catch_up(self, texts: Texts, rows: Sequence[int], *, full: bool = False) -> None:
        """Bring rows to their anchors: keys and values only. full: run the whole network over the
        backlog all the same, as a drafter without that shortcut has to (for comparison)."""
        lags = {row: self.lag(texts, row) for row in rows}
        short = [row for row in rows if 0 < lags[row] <= SHORT_LAG]
        groups = [[row] for row in rows if lags[row] > SHORT_LAG]
        for group in [*groups, short] if short else groups:
            starts = [self.kv.lengths[row] for row in group]
            self._follow(texts, group, starts, max(lags[row] for row in group), full=full)
            for row in group:
                self.kv.lengths[row] += lags[row]

    @abstractmethod
    def _follow(
        self, texts: Texts, rows: Sequence[int], starts: Sequence[int], width: int, *, full: bool
    ) -> None:
        """Write `width` entries of each row from starts[b] on. A row with a shorter backlog gets
        entries that mean nothing behind its own."""

    def move(self, source: int, target: int) -> None:
        self.kv.move(source, target)

    def clear(self, row: int) -> None:
        """Forget a row; what overflowed in it must not reach the next text there."""
        self.kv.clear(row)

    def differs(self, texts: Texts, row: int) -> bool:
        """Whether a row's entries are not those of its text read anew. Costs a whole catch-up."""
        found = self.kv.entries(row).clone()
        self.kv.lengths[row] = 0
        self.catch_up(texts, [row])
        anew = self.kv.entries(row)
        tolerance = 1e-3 if found.dtype == torch.float32 else 0.1
        same = found.shape == anew.shape and torch.allclose(
            found, anew, rtol=tolerance, atol=tolerance * float(anew.abs().max())
        )
        return not same


@runtime_checkable
class Arm(Protocol):
    """One way to draft.

    max_draft: drafts on its longest path. max_nodes: drafts that the target reads, all paths.
    can_draw: it can draw drafts from the drafter's distribution, too.
    """

    max_draft: int
    max_nodes: int
    can_draw: bool

    @property
    def drafter(self) -> Drafter: ...

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        """Likely tokens behind each row's anchor, num_draft[b] >= 1 of them on the longest path.

        The drafter must be caught up. draw: how to draw drafts; the most likely ones when None.
        """
        ...


def shortened(tree: DraftTree, num_draft: Sequence[int]) -> DraftTree:
    """Grown for the row that drafts most; the others' deeper nodes are taken off."""
    return tree if min(num_draft) == max(num_draft) else cut(tree, num_draft)
