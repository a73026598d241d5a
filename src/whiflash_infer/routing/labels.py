"""Counterfactual labels: what every arm would have drafted correctly, at every position at once.

At temperature 0 the text does not depend on the arms. With the text known, a pass over it says for
each anchor how far each drafter's leading match reaches, which is what the decoder would have
accepted there. `label_ar` and `label_diffusion` ask the networks' training passes about chains.
`label_arms` grows chains and trees alike as the decoder does, level by level at many anchors
together, and leaves an anchor as soon as no later level can change its answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.drafters.ar import ARArm
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.attention import SharedAndOwn
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.nets.layers import head_product
from whiflash_infer.target import TargetTables
from whiflash_infer.trees import DraftTree, TreeGrower
from whiflash_infer.types import TeacherRows

_ANCHORS_A_PASS = 32  # of a training pass
_BLOCKS_A_PASS = 64  # of a drafter
_LOGITS_A_PASS = 256  # rows as wide as a vocabulary that are held together
_NO_TOKEN = -1  # where the text has ended


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """accepted: drafts that match the text; censored: the text ended before a draft failed."""

    accepted: Int[Tensor, "B A"]
    censored: Bool[Tensor, "B A"]


# --- chains, by training passes ------------------------------------------------------------------


@torch.no_grad()
def label_ar(
    net: ARDrafter,
    tables: TargetTables,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
    *,
    draft_length: int,
) -> DraftLabels:
    """Labels of the chain of `draft_length` drafts at every anchor position n >= 1.

    Later steps are fed the true tokens; that changes nothing, since they count only when all
    earlier drafts matched, and then the draft was the true token.
    """
    dtype = net.fc.weight.dtype
    embeds, taps = tables.embed(ids).to(dtype), rows.taps.to(dtype)
    steps = net.unroll(embeds, taps, anchors, num_steps=draft_length)
    vocabulary = net.vocabulary()
    drafts = torch.stack([vocabulary[net.logits(h).argmax(-1)] for h in steps], dim=-1)
    return _match(drafts, ids, lengths, anchors)


@torch.no_grad()
def label_diffusion(
    net: DiffusionDrafter,
    tables: TargetTables,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
) -> DraftLabels:
    """Labels of the block's S - 1 drafts at every anchor."""
    dtype = net.fc.weight.dtype
    taps = rows.taps.to(dtype)
    drafts = []
    num_drafts = net.config.block_size - 1
    for part in anchors.split(_ANCHORS_A_PASS, dim=1):
        embeds = tables.embed(block_ids(ids, part, net)).to(dtype)
        hidden = net.blocks(embeds, taps, part)[:, :, 1:]
        # One matrix product: on a strided slice, linear would read the head once for each block.
        rows_of_slots = hidden.reshape(-1, hidden.shape[-1])
        previous = previous_ids(ids, lengths, part, num_drafts).flatten()
        logits = net.draft_logits(rows_of_slots, previous, tables.head)
        drafts.append(logits.argmax(-1).view(hidden.shape[:3]))
    return _match(torch.cat(drafts, dim=1), ids, lengths, anchors)


def block_ids(
    ids: Int[Tensor, "B T"], anchors: Int[Tensor, "B A"], net: DiffusionDrafter
) -> Int[Tensor, "B A S"]:
    """The drafter's input tokens: each anchor, then masks."""
    config = net.config
    block = ids.new_full((*anchors.shape, config.block_size), config.mask_token_id)
    block[..., 0] = ids.gather(1, anchors)
    return block


def following(
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    anchors: Int[Tensor, "B A"],
    num_tokens: int,
) -> tuple[Int[Tensor, "B A K"], Bool[Tensor, "B A K"]]:
    """The tokens after each anchor, and whether the sequence is long enough to have them."""
    positions = anchors[..., None] + torch.arange(1, num_tokens + 1, device=ids.device)
    exists = positions < lengths[:, None, None]
    safe = positions.clamp(max=ids.shape[1] - 1)
    return ids.gather(1, safe.flatten(1)).unflatten(1, safe.shape[1:]), exists


def previous_ids(
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    anchors: Int[Tensor, "B A"],
    num_tokens: int,
) -> Int[Tensor, "B A K"]:
    """The token before each of the tokens after an anchor; the anchor itself is the first."""
    after, _ = following(ids, lengths, anchors, num_tokens - 1)
    return torch.cat([ids.gather(1, anchors)[..., None], after], dim=-1)


def _match(
    drafts: Int[Tensor, "B A K"],
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    anchors: Int[Tensor, "B A"],
) -> DraftLabels:
    text, exists = following(ids, lengths, anchors, drafts.shape[-1])
    accepted = ((drafts == text) & exists).long().cumprod(-1).sum(-1)
    available = exists.sum(-1)
    return DraftLabels(accepted, (accepted == available) & (accepted < drafts.shape[-1]))


# --- chains and trees, as they are grown ---------------------------------------------------------


def label(
    arm: Arm,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
) -> DraftLabels:
    """Labels of one arm at every anchor position n >= 1."""
    return label_arms({"": arm}, ids, lengths, rows, anchors)[""]


def label_arms(
    arms: Mapping[str, Arm],
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
) -> dict[str, DraftLabels]:
    """Labels of several arms; those of one network share its first level."""
    found: dict[str, DraftLabels] = {}
    for name, arm in arms.items():
        if name in found:
            continue
        assert isinstance(arm, ARArm | DiffusionArm)
        plans = {n: _plan(a) for n, a in arms.items() if a.drafter is arm.drafter}
        tables = arm.drafter.tables
        found |= _label(arm.net, tables, plans, ids, lengths, rows, anchors)
    return {name: found[name] for name in arms}


def label_ar_tree(
    net: ARDrafter,
    tables: TargetTables,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
    *,
    draft_length: int,
    top_k: int,
    num_nodes: int,
) -> DraftLabels:
    """Labels of the tree's path that is the text, at every anchor position n >= 1."""
    plans = {"": _Plan(draft_length, num_nodes, beam=top_k)}
    return _label(net, tables, plans, ids, lengths, rows, anchors)[""]


def label_diffusion_tree(
    net: DiffusionDrafter,
    tables: TargetTables,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
    *,
    num_nodes: int,
) -> DraftLabels:
    """Labels of the tree's path that is the text, at every anchor."""
    plans = {"": _Plan(net.config.block_size - 1, num_nodes, beam=num_nodes)}
    return _label(net, tables, plans, ids, lengths, rows, anchors)[""]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an arm grows its tree. beam: nodes of a frontier, and children that each proposes."""

    num_levels: int
    num_nodes: int
    beam: int

    @property
    def is_tree(self) -> bool:
        return self.beam > 1

    def grower(self, vocabulary: Int[Tensor, " W"] | None) -> _Grower:
        return _Grower(
            num_nodes=self.num_nodes,
            beam=self.beam,
            num_children=self.beam,
            vocabulary=vocabulary,
        )


def _plan(arm: Arm) -> _Plan:
    if isinstance(arm, ARArm):
        return _Plan(arm.max_draft, arm.max_nodes, arm.top_k)
    assert isinstance(arm, DiffusionArm)
    return _Plan(arm.max_draft, arm.max_nodes, arm.max_nodes if arm.is_tree else 1)


class _Grower(TreeGrower):
    """Trees of many anchors, which may be left one by one."""

    def keep(self, rows: Int[Tensor, " N"]) -> None:
        self._levels = [
            replace(part, ids=part.ids[rows], slots=part.slots[rows], scores=part.scores[rows])
            for part in self._levels
        ]


@runtime_checkable
class _Levels(Protocol):
    """A network evaluated level by level at many anchors. A copy goes on by itself."""

    def logits(self, plan: _Plan) -> Float[Tensor, "A M V"]:
        """Of every node of the present level, or of all alike (M = 1)."""
        ...

    def descend(
        self, ids: Int[Tensor, "N M"], slots: Int[Tensor, "N M"], rows: Int[Tensor, " N"]
    ) -> None:
        """Go on at some of the anchors. ids and slots: their frontier."""
        ...


@runtime_checkable
class _Source(Protocol):
    """What a network makes of one text, for anchors in it."""

    vocabulary: Tensor | None

    def rows_of(self, plan: _Plan) -> int:
        """Rows of logits that an anchor has in a level."""
        ...

    def levels(self, part: Int[Tensor, " N"]) -> _Levels:
        """part: which of the anchors."""
        ...


@torch.no_grad()
def _label(
    net: ARDrafter | DiffusionDrafter,
    tables: TargetTables,
    plans: Mapping[str, _Plan],
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, " B"],
    rows: TeacherRows,
    anchors: Int[Tensor, "B A"],
) -> dict[str, DraftLabels]:
    """Text by text. Where nothing follows an anchor nothing is drafted, and nothing is known."""
    accepted = {name: torch.zeros_like(anchors) for name in plans}
    censored = {name: torch.ones_like(anchors, dtype=torch.bool) for name in plans}
    after, exists = following(ids, lengths, anchors, max(p.num_levels for p in plans.values()))
    after = after.where(exists, _NO_TOKEN)
    for row, length in enumerate(lengths.tolist()):
        columns = exists[row, :, 0].nonzero()[:, 0]
        if not len(columns):
            continue
        taps = rows.taps[row, :length].to(net.fc.weight.dtype)
        source = _source(net, tables, ids[row, :length], taps, anchors[row, columns])
        for name, *grown in _label_text(source, plans, after[row, columns]):
            accepted[name][row, columns], censored[name][row, columns] = grown
    return {name: DraftLabels(accepted[name], censored[name]) for name in plans}


def _source(
    net: ARDrafter | DiffusionDrafter,
    tables: TargetTables,
    ids: Int[Tensor, " T"],
    taps: Float[Tensor, "T E"],
    anchors: Int[Tensor, " A"],
) -> _Source:
    if isinstance(net, ARDrafter):
        return _ARText(net, tables, ids, taps, anchors)
    return _BlockText(net, tables, ids, taps, anchors)


def _label_text(
    source: _Source, plans: Mapping[str, _Plan], words: Int[Tensor, "A K"]
) -> Iterator[tuple[str, Int[Tensor, " A"], Bool[Tensor, " A"]]]:
    """For each plan what `_grow` finds. words: the text behind each anchor."""
    together = max(1, _LOGITS_A_PASS // max(map(source.rows_of, plans.values())))
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in plans}
    for part in torch.arange(len(words), device=words.device).split(together):
        first = source.levels(part)
        for name, plan in plans.items():
            grower, levels = plan.grower(source.vocabulary), copy.copy(first)
            found[name].append(_grow(plan, grower, levels, words[part, : plan.num_levels]))
    for name, parts in found.items():
        accepted, censored = (torch.cat(some) for some in zip(*parts, strict=True))
        yield name, accepted, censored


def _grow(
    plan: _Plan, grower: _Grower, levels: _Levels, words: Int[Tensor, "A K"]
) -> tuple[Int[Tensor, " A"], Bool[Tensor, " A"]]:
    """Accepted and censored of every anchor."""
    rows = torch.arange(len(words), device=words.device)
    accepted, censored = torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    for depth in range(1, plan.num_levels + 1):
        frontier = grower.extend(levels.logits(plan))
        met = _meet(grower.finish(), words[rows], depth)
        accepted[rows], censored[rows] = met.accepted, met.censored
        going = met.is_open.nonzero()[:, 0]
        if depth == plan.num_levels or not len(going):
            break
        rows = rows[going]
        grower.keep(going)
        levels.descend(frontier.ids[going], frontier.slots[going], going)
    return accepted, censored


@dataclass(frozen=True, slots=True)
class _Meeting:
    """How far trees agree with texts. is_open: deeper levels may still change it."""

    accepted: Int[Tensor, " A"]
    censored: Bool[Tensor, " A"]
    is_open: Bool[Tensor, " A"]


def _meet(tree: DraftTree, words: Int[Tensor, "A K"], depth: int) -> _Meeting:
    """Of trees that have grown `depth` levels.

    The deepest node on the text's path is sure of its place once no node of the present level is
    likelier, since none below it will be.
    """
    places = torch.arange(tree.num_nodes, device=words.device)
    exists = tree.exists
    is_word = exists & (tree.ids == words.gather(1, tree.depths - 1))
    on_path = is_word
    for _ in range(depth - 1):
        above = on_path.gather(1, tree.parents.clamp(min=0))
        on_path = is_word & ((tree.parents < 0) | above)
    accepted = on_path.sum(1)
    deepest = places.where(on_path, -1).amax(1, keepdim=True)
    threatened = (exists & (tree.depths == depth) & (places < deepest)).any(1)
    goes_on = (exists & (tree.parents == deepest)).any(1)
    available = (words != _NO_TOKEN).sum(1)
    ended = (accepted == available) & (available < words.shape[1])
    return _Meeting(accepted, ended & goes_on, (accepted == depth) | threatened | ended)


# --- the networks, level by level ----------------------------------------------------------------


class _ARText:
    """Entries that all anchors of a text share."""

    def __init__(
        self,
        net: ARDrafter,
        tables: TargetTables,
        ids: Int[Tensor, " T"],
        taps: Float[Tensor, "T E"],
        anchors: Int[Tensor, " A"],
    ) -> None:
        self.net, self.tables, self.anchors = net, tables, anchors
        self.vocabulary: Tensor | None = net.vocabulary()
        self.fused = net.fuse(taps[:-1])
        positions = torch.arange(len(ids) - 1, device=ids.device)
        embeds = tables.embed(ids[1:]).to(taps.dtype)
        self.joined, self.keys, self.values = net.entry(embeds, self.fused, positions)

    def rows_of(self, plan: _Plan) -> int:
        return plan.beam

    def levels(self, part: Int[Tensor, " N"]) -> _ARLevels:
        return _ARLevels(self, self.anchors[part] - 1)


class _ARLevels:
    """Every node of every anchor's frontier is to the attention an anchor of its own, whose own
    keys are those of the nodes between the true anchor and it."""

    def __init__(self, text: _ARText, starts: Int[Tensor, " A"]) -> None:
        self._text, self._positions = text, starts[:, None]
        num_seen = int(starts.max()) + 1
        self._keys, self._values = text.keys[None, :num_seen], text.values[None, :num_seen]
        self._visible = torch.arange(num_seen, device=starts.device) <= starts[:, None]
        none = text.keys.new_zeros(len(starts), 1, 0, *text.keys.shape[1:])
        self._own_keys, self._own_values = none, none
        self._attend(text.joined[starts][:, None], text.fused[starts][:, None])

    def logits(self, plan: _Plan) -> Float[Tensor, "A M W"]:
        return self._logits

    def descend(
        self, ids: Int[Tensor, "N M"], slots: Int[Tensor, "N M"], rows: Int[Tensor, " N"]
    ) -> None:
        text, parents = self._text, (rows[:, None], slots)
        self._visible, self._positions = self._visible[rows], self._positions[rows] + 1
        hidden = self._hidden[parents]
        embeds = text.tables.embed(ids).to(hidden.dtype)
        joined, keys, values = text.net.entry(embeds, hidden, self._positions.expand_as(ids))
        self._own_keys = torch.cat([self._own_keys[parents], keys[:, :, None]], dim=2)
        self._own_values = torch.cat([self._own_values[parents], values[:, :, None]], dim=2)
        self._attend(joined, hidden)

    def _attend(self, joined: Float[Tensor, "A M wide"], hidden: Float[Tensor, "A M D"]) -> None:
        net, width = self._text.net, joined.shape[1]
        queries = net.query(joined, self._positions.expand(-1, width))
        visible = self._visible.repeat_interleave(width, dim=0)[None]
        attended = SharedAndOwn(visible, net.attention)(
            queries.flatten(0, 1)[None, :, None],
            self._keys,
            self._values,
            self._own_keys.flatten(0, 1)[None],
            self._own_values.flatten(0, 1)[None],
        )
        attended = attended.view(*joined.shape[:2], -1)
        self._hidden = net.hand_over(net.midlayer.finish(hidden, attended))
        self._logits = net.logits(self._hidden)


class _BlockText:
    """The blocks of all anchors of a text."""

    vocabulary: Tensor | None = None

    def __init__(
        self,
        net: DiffusionDrafter,
        tables: TargetTables,
        ids: Int[Tensor, " T"],
        taps: Float[Tensor, "T E"],
        anchors: Int[Tensor, " A"],
    ) -> None:
        self.net, self.tables = net, tables
        self.anchor_ids = ids[anchors]
        hidden = []
        for part in anchors.split(_BLOCKS_A_PASS):
            embeds = tables.embed(block_ids(ids[None], part[None], net)).to(taps.dtype)
            seen = taps[None, : max(1, int(part.max()))]
            hidden.append(net.blocks(embeds, seen, part[None])[0, :, 1:])
        self.hidden = torch.cat(hidden)

    def rows_of(self, plan: _Plan) -> int:
        return 1 if self.net.markov_head is None else plan.beam

    def levels(self, part: Int[Tensor, " N"]) -> _BlockLevels:
        return _BlockLevels(self, self.hidden[part], self.anchor_ids[part, None])


class _BlockLevels:
    def __init__(
        self,
        text: _BlockText,
        hidden: Float[Tensor, "A K D"],
        anchor_ids: Int[Tensor, "A 1"],
    ) -> None:
        self._text, self._hidden = text, hidden
        self._logits = self._first_slot(anchor_ids)

    def logits(self, plan: _Plan) -> Float[Tensor, "A M V"]:
        return self._text.tables.softcapped(self._logits) if plan.is_tree else self._logits

    def descend(
        self, ids: Int[Tensor, "N M"], slots: Int[Tensor, "N M"], rows: Int[Tensor, " N"]
    ) -> None:
        self._hidden = self._hidden[rows, 1:]
        self._logits = self._first_slot(ids)

    def _first_slot(self, previous_ids: Int[Tensor, "A M"]) -> Float[Tensor, "A _M V"]:
        """Of the slots that are left."""
        logits = head_product(self._hidden[:, :1], self._text.tables.head)
        markov_head = self._text.net.markov_head
        return logits if markov_head is None else logits + markov_head(previous_ids)
