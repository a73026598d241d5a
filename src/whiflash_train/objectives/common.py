"""What objectives share: means with counts, which positions count, acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import chained_hits


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and the number, or weight, of items behind it: so uneven batches average right."""

    value: Tensor
    count: int | float


Outcome = tuple[Tensor, dict[str, Mean]]


def supervised_at(batch: DrafterBatch, positions: Int[Tensor, "B A K"]) -> Bool[Tensor, "B A K"]:
    safe = positions.clamp(max=batch.ids.shape[1] - 1)
    found = batch.supervised.gather(1, safe.flatten(1)).unflatten(1, safe.shape[1:])
    return found & (positions < batch.ids.shape[1]) & batch.anchor_mask[..., None]


def nothing_learnt(net: nn.Module) -> Float[Tensor, ""]:
    """A loss of 0 that reaches every trainable parameter.

    Distributed training waits for a gradient of each, on a process that had nothing to learn too.
    """
    zero = torch.zeros((), device=next(net.parameters()).device)
    return zero + sum((0.0 * p).sum() for p in net.parameters() if p.requires_grad)


def acceptance(
    loss: Float[Tensor, ""],
    hits: Bool[Tensor, "B A K"],
    exists: Bool[Tensor, "B A K"],
    anchor_mask: Bool[Tensor, "B A"],
    taken: Float[Tensor, " K"] | None = None,
) -> dict[str, Mean]:
    """Chained accuracy by slot, and simulated tau (bonus counted), over real anchors.

    taken: with what probability a slot was looked at, where that was drawn; None: always.
    """
    count = int(anchor_mask.sum())
    chain = chained_hits(hits & exists)[anchor_mask]
    if taken is not None:
        chain = chain / taken
    means = {"loss": Mean(loss.detach(), count), "tau": Mean(1.0 + chain.sum(-1).mean(), count)}
    for slot, accuracy in enumerate(chain.mean(0), start=1):
        means[f"accepted_{slot}"] = Mean(accuracy, count)
    return means if count else {}
