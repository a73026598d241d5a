"""The block drafter's objective: DFlash, hard labels at the masked slots."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from whiflash_infer.labels import block_ids, following
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import decay_weights, dpace_weights, head_cross_entropy
from whiflash_train.objectives.common import Outcome, acceptance, supervised_at
from whiflash_train.teacher import Teacher


def diffusion_objective(
    net: DiffusionDrafter,
    batch: DrafterBatch,
    *,
    teacher: Teacher,
    weighting: str,
    smoothing: float,
    gamma: float,
) -> Outcome:
    """DFlash: hard cross-entropy at the masked slots of one block an anchor.

    Slot k is supervised by x_{n+k} where that token belongs to the answer. weighting: `dpace`
    (normalised by the number of blocks) or `decay` (by the sum of weights).
    """
    rows = teacher(batch)
    tables, dtype = teacher.tables, net.fc.weight.dtype
    embeds = tables.embed(block_ids(batch.ids, batch.anchors, net)).to(dtype)
    hidden = net.blocks(embeds, rows.taps.to(dtype), batch.anchors)[:, :, 1:]
    labels, exists = following(batch.ids, batch.lengths, batch.anchors, hidden.shape[2])
    counted = exists & _labels_supervised(batch, hidden.shape[2])
    losses, best = head_cross_entropy(hidden[counted], tables.head, labels[counted])
    table = losses.new_zeros(counted.shape)
    table[counted] = losses
    if weighting == "dpace":
        weights = dpace_weights(table.flatten(0, 1), counted.flatten(0, 1), smoothing=smoothing)
        normaliser = batch.anchor_mask.sum() * hidden.shape[2] / 2
    else:
        weights = decay_weights(counted.flatten(0, 1), gamma=gamma)
        normaliser = weights.sum()
    loss = (weights * table.flatten(0, 1)).sum() / normaliser.clamp(min=1)
    hits = torch.zeros_like(counted)
    hits[counted] = best == labels[counted]
    return loss, acceptance(loss, hits, exists, batch.anchor_mask)


def _labels_supervised(batch: DrafterBatch, num_slots: int) -> Bool[Tensor, "B A K"]:
    positions = batch.anchors[..., None] + torch.arange(1, num_slots + 1, device=batch.ids.device)
    return supervised_at(batch, positions)
