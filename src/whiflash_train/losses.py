"""Losses: one value a position. Weights and means are the objectives' business."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

_ROWS_A_CHUNK = 512


def head_cross_entropy(
    hidden: Float[Tensor, "N D"],
    head: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"] | Float[Tensor, "N V"],
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """Cross-entropy of `hidden @ head.T` with ids or distributions, and the argmax, a row each.

    With a frozen head the gradient of each row is computed beside its loss, chunk by chunk, so no
    logits are kept for the backward pass.
    """
    if head.requires_grad:
        logits = F.linear(hidden, head).float()
        return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1)
    return _FrozenHeadCrossEntropy.apply(hidden, head, targets)  # pyright: ignore


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head = head.to(_compute_dtype(hidden))
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        slopes = torch.empty_like(hidden)
        for start in range(0, len(hidden), _ROWS_A_CHUNK):
            part = slice(start, start + _ROWS_A_CHUNK)
            logits = F.linear(hidden[part].to(head.dtype), head).float()
            target = targets[part]
            losses[part] = F.cross_entropy(logits, target, reduction="none")
            best[part] = logits.argmax(-1)
            slope = logits.softmax(-1)
            if target.is_floating_point():
                slope -= target
            else:
                slope[torch.arange(len(slope)), target] -= 1.0
            slopes[part] = (slope.to(head.dtype) @ head).to(hidden.dtype)
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(best)
        return losses, best

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grads[0][:, None].to(slopes.dtype), None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def dpace_weights(
    losses: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, smoothing: float
) -> Float[Tensor, "N K"]:
    """D-PACE (arXiv 2605.18810): how much slot j matters for the expected accepted length.

    q_j = exp(-loss_j) smoothed to (1 - a) q + a; C_j = prod_{i<=j} q_i; w_j = sum_{m>=j} C_m.
    Invalid slots count as q = 1, add nothing and weigh nothing. Detached.
    """
    chance = (1.0 - smoothing) * torch.exp(-losses.detach()) + smoothing
    chain = torch.where(valid, chance, 1.0).cumprod(-1) * valid
    return chain.flip(-1).cumsum(-1).flip(-1) * valid


def decay_weights(valid: Bool[Tensor, "N K"], *, gamma: float) -> Float[Tensor, "N K"]:
    """DFlash (eq. 4): w_k = exp(-(k - 1) / gamma) for slots k = 1..K."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    return torch.exp(-slots / gamma) * valid


def chained_hits(hits: Bool[Tensor, "*N K"]) -> Float[Tensor, "*N K"]:
    """1 where this draft and all before it are right: what acceptance counts."""
    return hits.float().cumprod(-1)
