"""Objectives: (network, batch) -> loss and named means. All training mathematics lives here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.labels import block_ids, following
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.nets.router import RouterNet, hazard_loss
from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import chained_hits, decay_weights, dpace_weights, head_cross_entropy
from whiflash_train.router_data import RouterBatch
from whiflash_train.teacher import Teacher


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and the number of items behind it, so that uneven batches average right."""

    value: Tensor
    count: int


Outcome = tuple[Tensor, dict[str, Mean]]


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
    return loss, _acceptance(loss, hits, exists, batch.anchor_mask)


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
    return loss, _acceptance(loss, hits, exists, batch.anchor_mask)


def router_objective(net: RouterNet, batch: RouterBatch) -> Outcome:
    """Censored likelihood of each arm's accepted length."""
    longest = torch.tensor(list(net.config.max_draft.values()), device=batch.features.device)
    loss = hazard_loss(net(batch.features), batch.accepted, batch.censored, longest)
    return loss, {"loss": Mean(loss.detach(), len(batch.features))}


def _inputs_supervised(batch: DrafterBatch, num_steps: int) -> Bool[Tensor, "B A K"]:
    """Whether the token fed at each step belongs to an answer; False at padding anchors."""
    positions = batch.anchors[..., None] + torch.arange(num_steps, device=batch.ids.device)
    return _supervised_at(batch, positions)


def _labels_supervised(batch: DrafterBatch, num_slots: int) -> Bool[Tensor, "B A K"]:
    positions = batch.anchors[..., None] + torch.arange(1, num_slots + 1, device=batch.ids.device)
    return _supervised_at(batch, positions)


def _supervised_at(batch: DrafterBatch, positions: Int[Tensor, "B A K"]) -> Bool[Tensor, "B A K"]:
    safe = positions.clamp(max=batch.ids.shape[1] - 1)
    found = batch.supervised.gather(1, safe.flatten(1)).unflatten(1, safe.shape[1:])
    return found & (positions < batch.ids.shape[1]) & batch.anchor_mask[..., None]


def _row_index(batch: DrafterBatch, step: int) -> Int[Tensor, "B A 2"]:
    """(batch row, position) of the target row that supervises this step."""
    row = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]
    return torch.stack([row.expand_as(batch.anchors), batch.anchors + step], dim=-1)


def _acceptance(
    loss: Float[Tensor, ""],
    hits: Bool[Tensor, "B A K"],
    exists: Bool[Tensor, "B A K"],
    anchor_mask: Bool[Tensor, "B A"],
) -> dict[str, Mean]:
    """Chained accuracy by slot, and simulated tau (bonus counted), over real anchors."""
    count = int(anchor_mask.sum())
    chain = chained_hits(hits & exists)[anchor_mask]
    means = {"loss": Mean(loss.detach(), count), "tau": Mean(1.0 + chain.sum(-1).mean(), count)}
    for slot, accuracy in enumerate(chain.mean(0), start=1):
        means[f"accepted_{slot}"] = Mean(accuracy, count)
    return means if count else {}
