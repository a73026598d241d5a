"""The AR drafter's objective: EAGLE-3's training-time test."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whiflash_infer.labels import following
from whiflash_infer.nets.ar import ARDrafter
from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import head_cross_entropy
from whiflash_train.objectives.common import Outcome, acceptance, supervised_at
from whiflash_train.teacher import Teacher


def ar_objective(
    net: ARDrafter,
    batch: DrafterBatch,
    *,
    teacher: Teacher,
    draft_length: int,
    step_decay: float,
) -> Outcome:
    """EAGLE-3 training-time test: soft cross-entropy at every step, weights step_decay ** k.

    Step k of anchor x_n is fed x_{n+k} and supervised by the target's distribution at row n + k,
    renormalised on the draft vocabulary; it counts where x_{n+k} belongs to an answer and
    x_{n+k+1} exists and can be drafted. Means are over counted positions, weights sum to 1.
    """
    rows = teacher(batch)
    tables, dtype = teacher.tables, net.fc.weight.dtype
    embeds = tables.embed(batch.ids).to(dtype)
    labels, exists = following(batch.ids, batch.lengths, batch.anchors, draft_length)
    counted = exists & _inputs_supervised(batch, draft_length) & net.t2d[labels]
    vocabulary_head = tables.head[net.t2d]
    vocabulary = net.vocabulary()
    loss = embeds.new_zeros(())
    weight_sum = 0.0
    hits = torch.zeros_like(exists)
    unroll = net.unroll(embeds, rows.taps.to(dtype), batch.anchors, num_steps=draft_length)
    for step, hidden in enumerate(unroll):
        keep = counted[:, :, step]
        source_rows = _row_index(batch, step)[keep]
        teacher_logits = tables.softcapped(rows.hidden[source_rows.unbind(-1)] @ vocabulary_head.T)
        probs = teacher_logits.float().softmax(-1)
        losses, best = head_cross_entropy(net.norm(hidden[keep]), net.lm_head.weight, probs)
        hits[:, :, step][keep] = vocabulary[best] == labels[:, :, step][keep]
        weight = step_decay**step
        loss = loss + weight * losses.sum() / max(1, len(losses))
        weight_sum += weight
    loss = loss / weight_sum
    return loss, acceptance(loss, hits, exists, batch.anchor_mask)


def _inputs_supervised(batch: DrafterBatch, num_steps: int) -> Bool[Tensor, "B A K"]:
    """Whether the token fed at each step belongs to an answer; False at padding anchors."""
    positions = batch.anchors[..., None] + torch.arange(num_steps, device=batch.ids.device)
    return supervised_at(batch, positions)


def _row_index(batch: DrafterBatch, step: int) -> Int[Tensor, "B A 2"]:
    """(batch row, position) of the target row that supervises this step."""
    row = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    return torch.stack([row.expand_as(batch.anchors), batch.anchors + step], dim=-1)
