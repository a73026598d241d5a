"""The AR drafter's objective: EAGLE-3's training-time test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.routing.labels import following
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
    draw_steps: bool,
    loss: SoftLoss,
) -> Outcome:
    """EAGLE-3 training-time test: a loss at every step, against the target's distribution.

    Step k of anchor x_n is fed x_{n+k} and supervised by the target's distribution at row n + k,
    renormalised on the draft vocabulary; it counts where x_{n+k} belongs to an answer and
    x_{n+k+1} exists and can be drafted. The loss is one mean over all that counts, step k weighing
    step_decay ** k, so it adds up over parts of a batch. With draw_steps the steps of an anchor end
    by chance instead, step k being taken with probability step_decay ** k and all weighing the
    same: the same gradient on average, for less work. Validation takes and weighs all steps. Where
    nothing counts, the loss is 0 and so is every gradient, none of them missing.
    """
    chances = step_decay ** torch.arange(draft_length, device=batch.ids.device)
    taken = torch.ones_like(chances)
    if draw_steps and batch.luck is not None:
        batch, taken = _luckiest_first(batch), chances
    labels, exists = following(batch.ids, batch.lengths, batch.anchors, draft_length)
    counted = exists & _inputs_supervised(batch, draft_length) & net.t2d[labels]
    if batch.luck is not None:
        counted &= batch.luck[..., None] < taken
    hits = torch.zeros_like(exists)
    if not counted.any():
        return _outcome(nothing_learnt(net), 0.0, hits, exists, batch.anchor_mask, taken)
    rows = teacher(batch)
    embeds = teacher.tables.embed(batch.ids).to(net.fc.weight.dtype)
    widths = _widths(counted)
    unroll = net.unroll(
        embeds,
        rows.taps.to(embeds.dtype),
        batch.anchors,
        num_steps=len(widths),
        widths=widths,
    )
    at, target_rows = _by_target_row(batch, counted)
    losses, best = soft_losses(
        net.head_input(_states(unroll, widths, at)),
        net.lm_head.weight,
        _target_logits(net, teacher, rows.hidden),
        target_rows,
        at.step,
        loss,
    )
    weights = (chances / taken)[at.step]
    hits[at] = net.vocabulary()[best] == labels[at]
    total, mass = (weights * losses).sum(), weights.sum()
    return _outcome(total / mass, float(mass), hits, exists, batch.anchor_mask, taken)


class _At(NamedTuple):
    """Which entries of (B, A, K)."""

    row: Int[Tensor, " N"]
    anchor: Int[Tensor, " N"]
    step: Int[Tensor, " N"]


def _luckiest_first(batch: DrafterBatch) -> DrafterBatch:
    """Anchors that go on longest come first in their row, so that the others can be cut off."""
    assert batch.luck is not None
    order = batch.luck.argsort(dim=1)
    names = ("anchors", "anchor_mask", "luck")
    return replace(batch, **{name: getattr(batch, name).gather(1, order) for name in names})


def _widths(counted: Bool[Tensor, "B A K"]) -> list[int]:
    """How many of the first anchors each step needs, up to the last step that needs any."""
    numbers = torch.arange(1, counted.shape[1] + 1, device=counted.device)
    needed = (counted.any(0) * numbers[:, None]).amax(0)
    return [width for width in needed.flip(0).cummax(0).values.flip(0).tolist() if width]


def _by_target_row(
    batch: DrafterBatch, counted: Bool[Tensor, "B A K"]
) -> tuple[_At, Int[Tensor, " N"]]:
    """All that counts, and the row of (B, T) made flat that teaches it, in the order of these.

    Step k of anchor x_n learns from the target's row n + k.
    """
    at = _At(*counted.nonzero(as_tuple=True))
    target_rows = at.row * batch.ids.shape[1] + batch.anchors[at.row, at.anchor] + at.step
    order = target_rows.argsort(stable=True)
    return _At(*(part[order] for part in at)), target_rows[order]


def _states(
    unroll: Iterable[Float[Tensor, "B _A D"]], widths: list[int], at: _At
) -> Float[Tensor, "N D"]:
    steps = list(unroll)
    width = at.row.new_tensor(widths)
    start = (width * len(steps[0])).cumsum(0) - width * len(steps[0])
    flat = start[at.step] + at.row * width[at.step] + at.anchor
    return torch.cat([states.flatten(0, 1) for states in steps])[flat]


def _outcome(
    total: Float[Tensor, ""],
    mass: float,
    hits: Bool[Tensor, "B A K"],
    exists: Bool[Tensor, "B A K"],
    anchor_mask: Bool[Tensor, "B A"],
    taken: Float[Tensor, " K"],
) -> Outcome:
    means = acceptance(total, hits, exists, anchor_mask, taken)
    return total, means | {"loss": Mean(total.detach(), mass)}


def step_weights(num_steps: int, decay: float) -> list[float]:
    """decay ** k, scaled to sum to 1."""
    raw = [decay**step for step in range(num_steps)]
    return [weight / sum(raw) for weight in raw]


def _target_logits(
    net: ARDrafter, teacher: Teacher, hidden: Float[Tensor, "B T D"]
) -> Callable[[Int[Tensor, " n"]], Float[Tensor, "n W"]]:
    """Of rows of (B, T) made flat, the target's logits on the draft vocabulary.

    In the target's own number type: its distribution is what it makes of them.
    """
    head, flat = teacher.tables.head[net.t2d], hidden.flatten(0, 1)

    def of_rows(rows: Int[Tensor, " n"]) -> Float[Tensor, "n W"]:
        with torch.autocast(flat.device.type, enabled=False):
            return teacher.tables.softcapped(F.linear(flat[rows].to(head.dtype), head))

    return of_rows


def _inputs_supervised(batch: DrafterBatch, num_steps: int) -> Bool[Tensor, "B A K"]:
    """Whether the token fed at each step belongs to an answer; False at padding anchors."""
    positions = batch.anchors[..., None] + torch.arange(num_steps, device=batch.ids.device)
    return supervised_at(batch, positions)
