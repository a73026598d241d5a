"""The block drafter's objective: DFlash, one pass over the blocks of a batch's anchors."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.routing.labels import block_ids, following, previous_ids
from whiflash_train.batches import DrafterBatch
from whiflash_train.block_losses import Bias, BlockObjective, slot_scores
from whiflash_train.objectives.common import (
    Mean,
    Outcome,
    acceptance,
    nothing_learnt,
    supervised_at,
)
from whiflash_train.teacher import Teacher


def diffusion_objective(
    net: DiffusionDrafter,
    batch: DrafterBatch,
    *,
    teacher: Teacher,
    objective: BlockObjective,
) -> Outcome:
    """DFlash: score the masked slots of one block an anchor, and weigh them as `objective` says.

    Slot k is supervised where x_{n+k} belongs to the answer: by that token, or by the target's
    distribution at row n + k - 1. In training an objective may take slots by chance; validation
    takes all. A batch without a supervised slot gives a loss of zero that
    still reaches every parameter, as data-parallel training needs.
    """
    num_drafts = net.config.block_size - 1
    labels, exists = following(batch.ids, batch.lengths, batch.anchors, num_drafts)
    counted = exists & _labels_supervised(batch, num_drafts)
    taken = torch.ones(num_drafts, device=batch.ids.device)
    if batch.luck is not None:
        taken = objective.chances(num_drafts, batch.ids.device)
        counted &= batch.luck[..., None] < taken
    hits = torch.zeros_like(counted)
    if not counted.any():
        loss = nothing_learnt(net)
        return loss, acceptance(loss, hits, exists, batch.anchor_mask)
    rows = teacher(batch)
    tables, dtype = teacher.tables, net.fc.weight.dtype
    embeds = tables.embed(block_ids(batch.ids, batch.anchors, net)).to(dtype)
    hidden = net.blocks(embeds, rows.taps.to(dtype), batch.anchors)[:, :, 1:]
    wanted = labels[counted]
    if objective.score != "cross_entropy":
        wanted = _teacher_hidden(rows.hidden, batch.anchors, counted)
    scores, best = slot_scores(
        objective.score, hidden[counted], wanted, tables, _bias(net, batch, counted)
    )
    table = scores.new_zeros(counted.shape)
    table[counted] = scores
    hits[counted] = best == labels[counted]
    blocks = counted.flatten(0, 1)
    loss = objective.loss(table.flatten(0, 1), hits.flatten(0, 1), blocks, taken)
    means = acceptance(loss, hits, exists, batch.anchor_mask, taken)
    means["loss"] = Mean(loss.detach(), objective.weight(blocks, taken))
    return loss, means


def _labels_supervised(batch: DrafterBatch, num_slots: int) -> Bool[Tensor, "B A K"]:
    positions = batch.anchors[..., None] + torch.arange(1, num_slots + 1, device=batch.ids.device)
    return supervised_at(batch, positions)


def _teacher_hidden(
    hidden: Float[Tensor, "B T D"], anchors: Int[Tensor, "B A"], counted: Bool[Tensor, "B A K"]
) -> Float[Tensor, "N D"]:
    """The target's final hidden state at row n + k - 1, which predicts what slot k drafts."""
    row, anchor, column = counted.nonzero(as_tuple=True)  # column k - 1 is slot k
    return hidden[row, anchors[row, anchor] + column]


def _bias(
    net: DiffusionDrafter, batch: DrafterBatch, counted: Bool[Tensor, "B A K"]
) -> Bias | None:
    """The Markov head reads the true token before each slot: x_{n+k-1} at slot k."""
    head = net.markov_head
    if head is None:
        return None
    previous = previous_ids(batch.ids, batch.lengths, batch.anchors, counted.shape[2])
    return Bias(head.markov_w1(previous[counted]), head.markov_w2.weight)
