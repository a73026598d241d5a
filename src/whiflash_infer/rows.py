"""Everything that is kept of the texts being decoded, row by row."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.drafters.base import Arm, Drafter
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target


class Rows:
    """Row r of the texts, of the target's cache and of every drafter belongs to one text."""

    def __init__(self, target: Target, arms: Mapping[str, Arm]) -> None:
        self.texts = Texts(target.device, keep_taps=bool(arms))
        self.cache = target.new_cache()
        self.drafters: list[Drafter] = []
        for arm in arms.values():
            if arm.drafter not in self.drafters:
                self.drafters.append(arm.drafter)

    def reserve(self, num_rows: int, capacity: int) -> None:
        """Room for so many texts of so many tokens; storage only grows."""
        for part in (self.texts, self.cache.kv, *self.drafters):
            part.reserve(num_rows, capacity)

    def begin(
        self, row: int, ids: Int[Tensor, " T"], taps: Float[Tensor, "T E"], first: Int[Tensor, ""]
    ) -> None:
        """A prompt that the target has just read into its cache, and the token it says first."""
        self.texts.begin(row, ids, taps, first)
        for drafter in self.drafters:
            drafter.clear(row)

    def commit(self, row: int, num_tokens: int) -> None:
        """Tokens stay; what was written behind them is rolled back by this alone."""
        self.texts.commit(row, num_tokens)
        self.cache.kv.lengths[row] = self.texts.lengths[row] - 1

    def wipe(self, row: int) -> None:
        """Roll back what overflowed: a masked entry counts 0 times, which NaN survives."""
        self.texts.wipe(row)
        self.cache.kv.wipe(row)

    def move(self, source: int, target: int) -> None:
        """The row `target` becomes what `source` was."""
        for part in (self.texts, self.cache.kv, *self.drafters):
            part.move(source, target)

    def clear(self, row: int) -> None:
        """Forget a row; what overflowed in it must not reach the next text there."""
        for part in (self.texts, self.cache.kv, *self.drafters):
            part.clear(row)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Of the texts with their features, of the target's cache, and of each drafter's."""
        drafters = {f"drafter {i}": d.kv.num_bytes for i, d in enumerate(self.drafters)}
        return {"texts": self.texts.num_bytes, "target": self.cache.kv.num_bytes, **drafters}
