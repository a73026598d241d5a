"""Running the block-diffusion drafter: lazy catch-up of the context, then one pass a block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.cache import KVCache, Span, make_span
from whiflash_infer.drafters.base import Drafter, Drafts, DrawDrafts, shortened
from whiflash_infer.masks import PassMask
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.nets.layers import head_product
from whiflash_infer.sequence import Texts
from whiflash_infer.target import TargetTables
from whiflash_infer.trees import TreeGrower, chain, cut


class CachedDiffusion(Drafter):
    """Context entry i comes from the features of x_i."""

    def __init__(self, net: DiffusionDrafter, tables: TargetTables) -> None:
        self.net = net
        self.tables = tables
        self.kv = KVCache(net.config.num_layers)
        shape = net.config.shape
        self._mask = PassMask(shape.num_heads // shape.num_kv_heads)

    def _follow(
        self, texts: Texts, rows: Sequence[int], starts: Sequence[int], width: int, *, full: bool
    ) -> None:
        span = make_span(rows, starts, width, texts.device)
        first = torch.tensor(list(starts), device=texts.device)[:, None]
        positions = first + torch.arange(width, device=texts.device)
        taps = texts.taps(rows, starts, width).to(self.net.fc.weight.dtype)
        for layer, (keys, values) in enumerate(self.net.context_entries(taps, positions)):
            self.kv.write(layer, keys.transpose(1, 2), values.transpose(1, 2), span)
        if full:
            self.denoise(texts, rows)

    def denoise(self, texts: Texts, rows: Sequence[int]) -> Float[Tensor, "B S D"]:
        """The block behind each anchor, whole as in training."""
        config, device = self.net.config, texts.device
        anchors = texts.anchors(rows)
        anchor_ids = texts.ids(rows, anchors, 1)
        masked = anchor_ids.new_full((len(rows), config.block_size - 1), config.mask_token_id)
        ids = torch.cat([anchor_ids, masked], dim=1)
        embeds = self.tables.embed(ids).to(self.net.fc.weight.dtype)
        span = make_span(rows, anchors, config.block_size, device)
        slots = torch.arange(config.block_size, device=device)
        positions = torch.tensor(anchors, device=device)[:, None] + slots
        mask = self._block_mask(span, embeds.dtype, slots)
        return self.net.block_cached(embeds, positions, self.kv, span, mask)

    def _block_mask(
        self, span: Span, dtype: torch.dtype, slots: Int[Tensor, " S"]
    ) -> Tensor | None:
        window, num_rows = self.net.config.sliding_window, len(span.rows)
        fits = window is None or max(span.starts) + len(slots) <= window
        if fits and len(set(span.starts)) == 1:
            return None
        block = torch.ones(len(slots), len(slots), dtype=torch.bool, device=slots.device)
        return self._mask.build(
            span.starts,
            block.expand(num_rows, -1, -1),
            span.end,
            dtype,
            window=window,
            depths=slots.expand(num_rows, -1),
        )


class DiffusionArm:
    """The block's most likely tokens; with `num_nodes` DDTree's tree over its marginals.

    A Markov head makes a slot's marginal depend on the token before it. num_nodes: drafts that the
    target reads, the most likely paths first; None drafts one path.
    """

    can_draw = True

    def __init__(self, drafter: CachedDiffusion, *, num_nodes: int | None = None) -> None:
        self.drafter = drafter
        self.max_draft = drafter.net.config.block_size - 1
        self.max_nodes = self.max_draft if num_nodes is None else num_nodes
        self.is_tree = num_nodes is not None

    @property
    def net(self) -> DiffusionDrafter:
        return self.drafter.net

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        """The whole block is denoised, as in training. A chain uses the first slots of it; a tree
        is grown over all and then cut, so that a shorter draft is a part of a longer one."""
        whole = self.is_tree and draw is None
        longest = self.max_draft if whole else max(num_draft)
        hidden = self.drafter.denoise(texts, rows)[:, 1 : longest + 1]
        anchor_ids = texts.ids(rows, texts.anchors(rows), 1)
        logits = head_product(hidden, self.drafter.tables.head)
        if draw is not None:
            return self._drawn(logits, anchor_ids, num_draft, draw)
        paths = self.max_nodes if self.is_tree else 1
        nodes = self.max_nodes if self.is_tree else longest
        grower = TreeGrower(num_nodes=nodes, beam=paths, num_children=paths)
        if self.net.markov_head is None:
            grower.extend_independent(self._marginals(logits))
        else:
            previous = anchor_ids
            for slot in range(longest):
                biased = logits[:, slot, None] + self.net.markov_head(previous)
                previous = grower.extend(self._marginals(biased)).ids
        tree = grower.finish()
        return Drafts(cut(tree, num_draft) if min(num_draft) < longest else tree, grower.finite)

    def _marginals(self, logits: Float[Tensor, "*N V"]) -> Float[Tensor, "*N V"]:
        """A soft cap changes what paths are worth, but never which token is the likeliest."""
        return self.drafter.tables.softcapped(logits) if self.is_tree else logits

    def _drawn(
        self,
        logits: Float[Tensor, "B K V"],
        anchor_ids: Int[Tensor, "B 1"],
        num_draft: Sequence[int],
        draw: DrawDrafts,
    ) -> Drafts:
        ids, probs, previous = [], [], anchor_ids[:, 0]
        for step in range(logits.shape[1]):
            slot = logits[:, step]
            if self.net.markov_head is not None:
                slot = slot + self.net.markov_head(previous)
            previous, law = draw(self.drafter.tables.softcapped(slot.float()), step)
            ids.append(previous)
            probs.append(law)
        finite = logits.amax(-1).isfinite().all(1)
        tree = shortened(chain(torch.stack(ids, dim=1)), num_draft)
        return Drafts(tree, finite, torch.stack(probs, dim=1))
