"""Running the autoregressive drafter: lazy catch-up, then one pass a level of the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.cache import KVCache, enlarged, make_span
from whiflash_infer.drafters.base import Drafter, Drafts, DrawDrafts, shortened
from whiflash_infer.masks import PassMask, causal
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.sequence import Texts
from whiflash_infer.target import TargetTables
from whiflash_infer.trees import TreeGrower, chain, cut


class CachedAR(Drafter):
    """Cache entry i is (g_i, x_{i+1}). The frontier, row n - 1, is what a chain starts from."""

    def __init__(self, net: ARDrafter, tables: TargetTables) -> None:
        self.net = net
        self.tables = tables
        self.kv = KVCache(1)
        shape = net.config.shape
        self._mask = PassMask(shape.num_heads // shape.num_kv_heads)
        self._joined = torch.empty(0, 2 * shape.hidden_size)
        self._hidden = torch.empty(0, shape.hidden_size)

    def reserve(self, num_rows: int, capacity: int) -> None:
        super().reserve(num_rows, capacity)
        weight = self.net.fc.weight
        self._joined = enlarged(self._joined.to(weight), {0: len(self.kv.lengths)})
        self._hidden = enlarged(self._hidden.to(weight), {0: len(self.kv.lengths)})

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        self._joined[target], self._hidden[target] = self._joined[source], self._hidden[source]

    def _follow(
        self, texts: Texts, rows: Sequence[int], starts: Sequence[int], width: int, *, full: bool
    ) -> None:
        device = texts.device
        last = torch.tensor(
            [texts.lengths[r] - 2 - s for r, s in zip(rows, starts, strict=True)], device=device
        )
        positions = _from(starts, width, device)
        fused = self.net.fuse(texts.taps(rows, starts, width).to(self.net.fc.weight.dtype))
        embeds = self.tables.embed(texts.ids(rows, [s + 1 for s in starts], width)).to(fused.dtype)
        joined, keys, values = self.net.entry(embeds, fused, positions)
        span = make_span(rows, starts, width, device)
        seen = self.kv.write(0, keys.transpose(1, 2), values.transpose(1, 2), span)
        index = torch.tensor(list(rows), device=device)
        own = torch.arange(len(rows), device=device)
        self._joined[index], self._hidden[index] = joined[own, last], fused[own, last]
        if full:
            block = causal(len(rows), width, device)
            mask = self._mask.build(starts, block, span.end, fused.dtype)
            self.net.step_cached(joined, fused, positions, *seen, mask)

    def frontier(
        self, rows: Sequence[int]
    ) -> tuple[Float[Tensor, "B 1 wide"], Float[Tensor, "B 1 D"]]:
        return self._joined[list(rows), None], self._hidden[list(rows), None]

    def attend(
        self,
        joined: Float[Tensor, "B M wide"],
        hidden: Float[Tensor, "B M D"],
        positions: Int[Tensor, "B M"],
        cached: tuple[Tensor, Tensor],
        starts: Sequence[int],
        seen: Bool[Tensor, "B M E"],
    ) -> Float[Tensor, "B M D"]:
        """seen: which drafted entries behind its row's `starts` true ones each query sees."""
        mask = None
        if seen.shape[1] > 1 or len(starts) > 1:
            mask = self._mask.build(starts, seen, cached[0].shape[2], hidden.dtype)
        return self.net.step_cached(joined, hidden, positions, *cached, mask)


class ARArm:
    """EAGLE-2's tree, grown `draft_length` levels deep, `top_k` nodes a level; 1 makes a chain.

    num_nodes: drafts of all paths that the target reads, the most likely ones.
    """

    can_draw = True

    def __init__(
        self, drafter: CachedAR, *, draft_length: int, top_k: int = 1, num_nodes: int | None = None
    ) -> None:
        self.drafter = drafter
        self.max_draft = draft_length
        self.max_nodes = draft_length if num_nodes is None else num_nodes
        self.top_k = top_k

    @property
    def net(self) -> ARDrafter:
        return self.drafter.net

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        """A tree is grown whole and then cut, so that a shorter draft is a part of a longer one."""
        depth = max(num_draft) if self.top_k == 1 else self.max_draft
        self._make_room(texts.anchors(rows), depth)
        levels = _Levels(self.drafter, texts, rows)
        if draw is not None:
            return self._drawn(levels, num_draft, draw)
        grower = TreeGrower(
            num_nodes=min(self.max_nodes, depth) if self.top_k == 1 else self.max_nodes,
            beam=self.top_k,
            num_children=self.top_k,
            vocabulary=self.net.vocabulary(),
        )
        for _ in range(depth):
            frontier = grower.extend(levels.logits())
            levels.descend(frontier.ids, frontier.slots)
        tree = grower.finish()
        return Drafts(cut(tree, num_draft) if min(num_draft) < depth else tree, grower.finite)

    def _make_room(self, anchors: Sequence[int], depth: int) -> None:
        """For the entries of all levels but the first, which may be more than a pass reads."""
        cache = self.drafter.kv
        cache.reserve(len(cache.lengths), max(anchors) + (depth - 1) * self.top_k)

    def _drawn(self, levels: _Levels, num_draft: Sequence[int], draw: DrawDrafts) -> Drafts:
        vocabulary = self.net.vocabulary()
        ids, probs, finite = [], [], []
        for step in range(max(num_draft)):
            logits = levels.logits()[:, 0].float()
            finite.append(logits.amax(-1).isfinite())
            size = self.net.config.shape.vocab_size
            wide = logits.new_full((len(logits), size), -torch.inf)
            wide[:, vocabulary] = logits
            token, law = draw(wide, step)
            ids.append(token)
            probs.append(law)
            levels.descend(token[:, None], torch.zeros_like(token)[:, None])
        tree = shortened(chain(torch.stack(ids, dim=1)), num_draft)
        return Drafts(tree, torch.stack(finite).all(0), torch.stack(probs, dim=1))


class _Levels:
    """The network evaluated level by level, its drafted entries behind the true ones."""

    def __init__(self, drafter: CachedAR, texts: Texts, rows: Sequence[int]) -> None:
        self._drafter, self._rows, self._device = drafter, rows, texts.device
        self._starts = texts.anchors(rows)
        self._joined, self._hidden = drafter.frontier(rows)
        self._depth, self._num_entries = 0, 0
        self._seen = torch.ones(len(rows), 1, 0, dtype=torch.bool, device=texts.device)
        self._pending: tuple[Tensor, Tensor] | None = None

    def logits(self) -> Float[Tensor, "B M W"]:
        """Of every node of the present level."""
        width = self._joined.shape[1] if self._pending is None else self._pending[0].shape[1]
        first = torch.tensor([s - 1 + self._depth for s in self._starts], device=self._device)
        positions = first[:, None].expand(-1, width)
        cached = self._enter(positions)
        drafter = self._drafter
        self._hidden = drafter.attend(
            self._joined, self._hidden, positions, cached, self._starts, self._seen
        )
        return drafter.net.logits(self._hidden)

    def descend(self, ids: Int[Tensor, "B M"], slots: Int[Tensor, "B M"]) -> None:
        """Go on to these nodes; slots: the place of each one's parent in the level before."""
        self._pending = ids, slots
        self._depth += 1

    def _enter(self, positions: Int[Tensor, "B M"]) -> tuple[Tensor, Tensor]:
        """Make the entries of the present level, but for the first, whose entry is true."""
        drafter = self._drafter
        if self._pending is None:
            return drafter.kv.read(0, make_span(self._rows, self._starts, 0, self._device))
        ids, slots = self._pending
        width = ids.shape[1]
        embeds = drafter.tables.embed(ids).to(self._hidden.dtype)
        self._hidden = self._hidden.gather(
            1, slots[..., None].expand(-1, -1, self._hidden.shape[-1])
        )
        self._joined, keys, values = drafter.net.entry(embeds, self._hidden, positions)
        own = torch.eye(width, dtype=torch.bool, device=self._device).expand(len(ids), -1, -1)
        above = self._seen.gather(1, slots[..., None].expand(-1, -1, self._seen.shape[-1]))
        self._seen = torch.cat([above, own], dim=-1)
        starts = [start + self._num_entries for start in self._starts]
        self._num_entries += width
        span = make_span(self._rows, starts, width, self._device)
        return drafter.kv.write(0, keys.transpose(1, 2), values.transpose(1, 2), span)


def _from(starts: Sequence[int], width: int, device: torch.device) -> Int[Tensor, "B N"]:
    first = torch.tensor(list(starts), device=device)
    return first[:, None] + torch.arange(width, device=device)
