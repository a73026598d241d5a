"""Drafts as trees: their records, their masks, and growing them level by level.

A verification pass reads Q = 1 + N tokens a row: the anchor, then the N nodes of that row's tree.
A chain is the tree with one path. Nothing here waits for the device.

Dimensions besides the legend: N nodes · M nodes of the frontier, which the next level grows from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

_CHUNK = 64  # entries of a vocabulary that are looked at together when the best are searched


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafts of B rows; a parent always comes before its children.

    ids: target ids; children of one parent differ. parents: index of the parent's node, -1 is the
    anchor. depths: a child of the anchor has 1. counts: nodes that exist; the others follow them
    as padding (id 0, parent -1, depth 1). is_chain: every row is one path in order, so what is
    accepted of it is a prefix.
    """

    ids: Int[Tensor, "B N"]
    parents: Int[Tensor, "B N"]
    depths: Int[Tensor, "B N"]
    counts: Int[Tensor, " B"]
    is_chain: bool

    @property
    def num_rows(self) -> int:
        return self.ids.shape[0]

    @property
    def num_nodes(self) -> int:
        """Width with padding."""
        return self.ids.shape[1]

    @property
    def exists(self) -> Bool[Tensor, "B N"]:
        """False at padding."""
        return torch.arange(self.num_nodes, device=self.ids.device) < self.counts[:, None]


def chain(ids: Int[Tensor, "B K"], counts: Int[Tensor, " B"] | None = None) -> DraftTree:
    """Drafts one after the other. counts: how many of a row exist, all when None."""
    num_rows, num_drafts = ids.shape
    depths = torch.arange(1, num_drafts + 1, device=ids.device).expand(num_rows, num_drafts)
    if counts is not None:
        return _padded_after(DraftTree(ids, depths - 2, depths, counts, is_chain=True))
    counts = torch.full((num_rows,), num_drafts, device=ids.device)
    return DraftTree(ids, depths - 2, depths, counts, is_chain=True)


def join(
    parts: Sequence[tuple[Int[Tensor, " _"], DraftTree]],
    *,
    num_rows: int,
    num_nodes: int,
    device: torch.device | None = None,
) -> DraftTree:
    """One tree of all rows from the trees of several arms, each with the rows that it drafts for.

    A row in no part has no drafts. Narrower trees are padded to `num_nodes`.

    Raises: ValueError for a tree that is wider than `num_nodes`.
    """
    device = parts[0][1].ids.device if parts else device
    ids = torch.zeros(num_rows, num_nodes, dtype=torch.long, device=device)
    parents, depths = torch.full_like(ids, -1), torch.ones_like(ids)
    counts = ids.new_zeros(num_rows)
    for rows, tree in parts:
        if tree.num_nodes > num_nodes:
            raise ValueError(f"a tree of {tree.num_nodes} nodes does not fit into {num_nodes}")
        for joined, own in ((ids, tree.ids), (parents, tree.parents), (depths, tree.depths)):
            joined[:, : tree.num_nodes].index_copy_(0, rows, own)
        counts.index_copy_(0, rows, tree.counts)
    is_chain = all(tree.is_chain for _, tree in parts)
    return DraftTree(ids, parents, depths, counts, is_chain)


def cut(tree: DraftTree, longest: Sequence[int]) -> DraftTree:
    """Without the nodes of row b that are deeper than longest[b], which are padding then."""
    limits = torch.tensor(longest, device=tree.ids.device)[:, None]
    keep = tree.exists & (tree.depths <= limits)
    counts = keep.sum(1)
    if tree.is_chain:
        return _padded_after(DraftTree(tree.ids, tree.parents, tree.depths, counts, is_chain=True))
    order = keep.long().argsort(dim=1, descending=True, stable=True)
    place = order.argsort(dim=1)  # where each node stands now
    parents = tree.parents.gather(1, order)
    parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
    nodes = tree.ids.gather(1, order), parents, tree.depths.gather(1, order)
    return _padded_after(DraftTree(*nodes, counts, is_chain=False))


def ancestors(tree: DraftTree) -> Bool[Tensor, "B N N"]:
    """[b, i, j]: j is i or lies between the anchor and i. Padding has only itself."""
    num_nodes = tree.num_nodes
    own = torch.eye(num_nodes, dtype=torch.bool, device=tree.ids.device)
    if tree.is_chain:
        exists = tree.exists
        return own.new_ones(num_nodes, num_nodes).tril() & exists[:, :, None] | own
    # One more node, the anchor, is its own parent and nobody's ancestor. After a step, `found`
    # reaches twice as far up, and `above` is the first ancestor that it does not hold yet.
    found = F.pad(own, (0, 0, 0, 1)).expand(tree.num_rows, -1, -1)
    above = F.pad(torch.where(tree.parents < 0, num_nodes, tree.parents), (0, 1), value=num_nodes)
    for _ in range(max(num_nodes - 1, 0).bit_length()):
        found = found | found.gather(1, above[..., None].expand(-1, -1, num_nodes))
        above = above.gather(1, above)
    return found[:, :num_nodes]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes to draft after, best first; never more than the tree may have.

    ids: target ids. slots: place of each node's parent in the frontier before (0 at the first
    level, whose only parent is the anchor).
    """

    ids: Int[Tensor, "B M"]
    slots: Int[Tensor, "B M"]


@dataclass(frozen=True, slots=True)
class _Level:
    """Candidates of one level, best first; slots as in a frontier."""

    ids: Int[Tensor, "B N"]
    slots: Int[Tensor, "B N"]
    scores: Float[Tensor, "B N"]


class TreeGrower:
    """Grows one tree a row from a drafter's logits, one level at a time.

    A node scores the sum of log-probabilities from the anchor to it. At every level each node of
    the frontier proposes its `num_children` likeliest tokens, and the `beam` best proposals are the
    next frontier; `finish` keeps the `num_nodes` best of all levels. With `beam` and
    `num_children` of `num_nodes` these are the best of all paths: whatever is left out on the way
    has `num_nodes` better nodes at its own level or among its siblings. With one child a node
    scores are never needed, and the tree is a chain.

    vocabulary: target id of every drafter id, None when they are the same.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        beam: int,
        num_children: int,
        vocabulary: Int[Tensor, " W"] | None = None,
    ) -> None:
        self.num_nodes = num_nodes
        self.beam = beam
        self.num_children = num_children
        self.vocabulary = vocabulary
        self._levels: list[_Level] = []
        self._maxima: list[Tensor] = []

    def extend(self, logits: Float[Tensor, "B M V"]) -> Frontier:
        """Grow the next level from logits of every node of the frontier, or of all alike (M = 1).

        The first level grows from the anchor alone, M = 1.
        """
        return self._grow(*self._propose(logits))

    def extend_independent(self, logits: Float[Tensor, "B S V"]) -> Frontier:
        """Grow S levels from marginals that do not depend on the tokens before them."""
        ids, log_probs = self._propose(logits)
        for level in range(logits.shape[1] - 1):
            self._grow(ids[:, level, None], log_probs[:, level, None])
        return self._grow(ids[:, -1:], log_probs[:, -1:])

    def finish(self) -> DraftTree:
        """The tree of all levels so far, best nodes first.

        Nodes of probability 0, or below logits that are not finite, are left out; of a chain no
        probability is known, and nothing is left out.
        """
        ids = torch.cat([level.ids for level in self._levels], 1)
        if self.num_children == 1:
            return chain(ids[:, : self.num_nodes])
        parents, depths = self._places()
        scores = torch.cat([level.scores for level in self._levels], 1)
        # No child scores above its parent, and an earlier level wins a tie: parents come first.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, : self.num_nodes], order[:, : self.num_nodes]
        places = torch.arange(order.shape[1], device=ids.device).expand_as(order)
        place = torch.zeros_like(parents).scatter(1, order, places)
        parents = parents.gather(1, order)
        parents = torch.where(parents < 0, -1, place.gather(1, parents.clamp(min=0)))
        counts = scores.isfinite().sum(1)
        nodes = ids.gather(1, order), parents, depths.expand_as(ids).gather(1, order)
        return _padded_after(DraftTree(*nodes, counts, is_chain=False))

    @property
    def finite(self) -> Bool[Tensor, " B"]:
        """Rows where the greatest logit of every distribution so far was a finite number."""
        return torch.cat(self._maxima, 1).isfinite().all(1)

    def _propose(
        self, logits: Float[Tensor, "B M V"]
    ) -> tuple[Int[Tensor, "B M N"], Float[Tensor, "B M N"]]:
        """The likeliest ids and their log-probabilities, -inf where logits are not finite."""
        num_children = min(self.num_children, logits.shape[-1])
        logits = logits.float()
        values, ids = top(logits, num_children)
        self._maxima.append(values[..., 0])
        if self.num_children == 1:
            return ids, torch.zeros_like(values)
        log_probs = logits.log_softmax(-1).gather(-1, ids)
        return ids, log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)

    def _grow(self, ids: Int[Tensor, "B M N"], log_probs: Float[Tensor, "B M N"]) -> Frontier:
        width, num_children = 1, ids.shape[-1]
        if self._levels:
            before = self._levels[-1].scores[:, : self.beam]
            width = before.shape[1]
            log_probs = log_probs + before[:, :, None]
            ids = ids.expand(-1, width, -1)
        keep = min(self.num_nodes, width * num_children)
        if width == 1:  # one distribution, its candidates are in order already
            slots = torch.zeros_like(ids[:, 0])
            level = _Level(ids[:, 0, :keep], slots[:, :keep], log_probs[:, 0, :keep])
        else:
            scores, order = log_probs.flatten(1).topk(keep, dim=1)
            slots = order.div(num_children, rounding_mode="floor")
            level = _Level(ids.flatten(1).gather(1, order), slots, scores)
        if self.vocabulary is not None:
            level = _Level(self.vocabulary[level.ids], level.slots, level.scores)
        self._levels.append(level)
        return Frontier(level.ids[:, : self.beam], level.slots[:, : self.beam])

    def _places(self) -> tuple[Int[Tensor, "B N"], Int[Tensor, " N"]]:
        """Of every candidate of all levels in a row: where its parent stands, and its depth."""
        parents, depths, start, previous_start = [], [], 0, -1
        for depth, level in enumerate(self._levels, start=1):
            parents.append(level.slots + previous_start)  # the only parent at depth 1 is the anchor
            depths.append(level.slots.new_full(level.slots.shape[1:], depth))
            start, previous_start = start + level.slots.shape[1], start
        return torch.cat(parents, 1), torch.cat(depths)


def top(
    logits: Float[Tensor, "*N V"], num: int
) -> tuple[Float[Tensor, "*N K"], Int[Tensor, "*N K"]]:
    """The `num` greatest values in order and their indices; NaN counts as greatest.

    On a CPU one pass finds the maxima of chunks, and only the best chunks are searched.
    """
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size % _CHUNK or size // _CHUNK < num:
        return _greatest(logits, num)
    chunks = logits.unflatten(-1, (-1, _CHUNK))
    best = _greatest(chunks.amax(-1), num)[1]
    found = chunks.gather(-2, best[..., None].expand(*best.shape, _CHUNK)).flatten(-2)
    values, at = _greatest(found, num)
    chunk = best.gather(-1, at.div(_CHUNK, rounding_mode="floor"))
    return values, chunk * _CHUNK + at % _CHUNK


def _greatest(
    logits: Float[Tensor, "*N V"], num: int
) -> tuple[Float[Tensor, "*N K"], Int[Tensor, "*N K"]]:
    if num == 1:  # the first of equals, as argmax
        values, ids = logits.max(-1, keepdim=True)
        return values, ids
    values, ids = logits.topk(num, dim=-1)
    return values, ids


def _padded_after(tree: DraftTree) -> DraftTree:
    """The same tree with padding from `counts` on."""
    exists = tree.exists
    return DraftTree(
        torch.where(exists, tree.ids, 0),
        torch.where(exists, tree.parents, -1),
        torch.where(exists, tree.depths, 1),
        tree.counts,
        tree.is_chain,
    )
