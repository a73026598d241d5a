"""The AR drafter's objective: EAGLE-3's training-time test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.labels import following
from whiflash_infer.nets.ar import ARDrafter
from whiflash_train.batches import DrafterBatch
from whiflash_train.distillation import SoftLoss, soft_losses
from whiflash_train.objectives.common import (
    Mean,
    Outcome,
    acceptance,
    nothing_learnt,
    supervised_at,
)
from whiflash_train.teacher import Teacher


def ar_objective(
    net: ARDrafter,
    batch: DrafterBatch,
    *,
    teacher: Teacher,
    draft_length: int,
    step_decay: float,
    loss: SoftLoss,
) -> Outcome:
    """EAGLE-3 training-time test: a loss at every step, against the target's distribution.

    Step k of anchor x_n is fed x_{n+k} and supervised by the target's distribution at row n + k,
    renormalised on the draft vocabulary; it counts where x_{n+k} belongs to an answer and
    x_{n+k+1} exists and can be drafted. The loss is one mean over all that counts, step k weighing
    step_decay ** k, so it adds up over parts of a batch. Where nothing counts, the loss is 0 and so
    is every gradient, none of them missing.
    """
    labels, exists = following(batch.ids, batch.lengths, batch.anchors, draft_length)
    counted = exists & _inputs_supervised(batch, draft_length) & net.t2d[labels]
    hits = torch.zeros_like(exists)
    if not counted.any():
        return _outcome(nothing_learnt(net), 0.0, hits, exists, batch.anchor_mask)
    rows = teacher(batch)
    embeds = teacher.tables.embed(batch.ids).to(net.fc.weight.dtype)
    target_logits, vocabulary = _target_logits(net, teacher, rows.hidden), net.vocabulary()
    total, mass = embeds.new_zeros((), dtype=torch.float32), 0.0
    unroll = net.unroll(embeds, rows.taps.to(embeds.dtype), batch.anchors, num_steps=draft_length)
    for step, weight in enumerate(step_weights(draft_length, step_decay)):
        state, keep = next(unroll), counted[:, :, step]
        source = target_logits(_row_index(batch, step)[keep])
        losses, best = soft_losses(net.head_input(state[keep]), net.lm_head.weight, source, loss)
        hits[:, :, step][keep] = vocabulary[best] == labels[:, :, step][keep]
        total, mass = total + weight * losses.sum(), mass + weight * len(losses)
    return _outcome(total / mass, mass, hits, exists, batch.anchor_mask)


def _outcome(
    total: Float[Tensor, ""],
    mass: float,
    hits: Bool[Tensor, "B A K"],
    exists: Bool[Tensor, "B A K"],
    anchor_mask: Bool[Tensor, "B A"],
) -> Outcome:
    means = acceptance(total, hits, exists, anchor_mask)
    return total, means | {"loss": Mean(total.detach(), mass)}


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay ** k, scaled to sum to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]


def _target_logits(
    net: ARDrafter, teacher: Teacher, hidden: Float[Tensor, "B T D"]
) -> Callable[[Int[Tensor, "N 2"]], Callable[[slice], Float[Tensor, "n W"]]]:
    """Of some rows, then of a part of them, the target's logits on the draft vocabulary.

    In the target's own number type: its distribution is what it makes of them.
    """
    head = teacher.tables.head[net.t2d]

    def of_part(rows: Float[Tensor, "N D"], part: slice) -> Float[Tensor, "n W"]:
        with torch.autocast(rows.device.type, enabled=False):
            return teacher.tables.softcapped(F.linear(rows[part].to(head.dtype), head))

    return lambda index: partial(of_part, hidden[index.unbind(-1)])


def _inputs_supervised(batch: DrafterBatch, num_steps: int) -> Bool[Tensor, "B A K"]:
    """Whether the token fed at each step belongs to an answer; False at padding anchors."""
    positions = batch.anchors[..., None] + torch.arange(num_steps, device=batch.ids.device)
    return supervised_at(batch, positions)


def _row_index(batch: DrafterBatch, step: int) -> Int[Tensor, "B A 2"]:
    """(batch row, position) of the target row that supervises this step."""
    row = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    return torch.stack([row.expand_as(batch.anchors), batch.anchors + step], dim=-1)
