"""Counterfactual labels: what every arm would have drafted correctly, at every position at once.

At temperature 0 the text does not depend on the arms. With the text known, one training-mode pass
says for each anchor how long each drafter's leading match is, which is what the decoder would have
accepted there. Later steps are fed the true tokens; that changes nothing, since they count only
when all earlier drafts matched, and then the draft was the true token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.target import TargetTables
from whiflash_infer.types import TeacherRows

_ANCHORS_A_PASS = 32


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """accepted: drafts that match the text; censored: the text ended before a draft failed."""

    accepted: Int[Tensor, "B A"]
    censored: Bool[Tensor, "B A"]


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
    """Labels of the chain of `draft_length` drafts at every anchor position n >= 1."""
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
