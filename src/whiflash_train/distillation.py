"""Learning from the target's distribution: one loss a position, slopes in closed form.

Everything is computed in float32, of two distributions on the draft vocabulary. With
alpha = sum_v min(target_v, draft_v), the chance that a sampled draft is kept:

    soft_ce     - sum_v target_v log draft_v
    kl          soft_ce less the target's entropy: the same slopes
    tv          1 - alpha, the total variation
    lk_alpha    - log alpha: the slopes of tv over alpha, alive where they meet little
    lk_lambda   w kl + (1 - w) tv,  w = kl_scale exp(-kl_decay mean(alpha)), w detached

The last two are the LK losses (arXiv 2602.23881). Their mean is over the positions of one call, so
over one unroll step of one process's batch. A slope is the derivative with respect to the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.nets.layers import compute_dtype, widened
from whiflash_train.checks import checked

LossName = Literal["soft_ce", "kl", "tv", "lk_alpha", "lk_lambda"]
Scored = tuple[Float[Tensor, " N"], Float[Tensor, "N W"]]  # losses and slopes
TargetLogits = Callable[[slice], Float[Tensor, "n W"]]

_ROWS_A_CHUNK = 512


@checked
@dataclass(frozen=True, kw_only=True)
class SoftLoss:
    """kl_scale and kl_decay concern lk_lambda alone: its weight of kl, and how fast that falls."""

    name: LossName
    kl_scale: float
    kl_decay: float

    def __post_init__(self) -> None:
        if not 0 <= self.kl_scale <= 1:
            raise ValueError(f"kl_scale is {self.kl_scale}: it must lie in 0..1")
        if self.kl_decay < 0:
            raise ValueError(f"kl_decay is {self.kl_decay}: it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Distributions:
    """The drafter's and the target's, row by row."""

    draft_logp: Float[Tensor, "N W"]
    draft_probs: Float[Tensor, "N W"]
    target_logp: Float[Tensor, "N W"]
    target_probs: Float[Tensor, "N W"]

    @classmethod
    def of(
        cls, draft_logits: Float[Tensor, "N W"], target_logits: Float[Tensor, "N W"]
    ) -> Distributions:
        draft_logp = widened(draft_logits).log_softmax(-1)
        target_logp = widened(target_logits).log_softmax(-1)
        return cls(draft_logp, draft_logp.exp(), target_logp, target_logp.exp())


def soft_cross_entropy(both: Distributions) -> Scored:
    losses = -(both.target_probs * both.draft_logp).sum(-1)
    return losses, both.draft_probs - both.target_probs


def forward_kl(both: Distributions) -> Scored:
    losses = (both.target_probs * (both.target_logp - both.draft_logp)).sum(-1)
    return losses, both.draft_probs - both.target_probs


def total_variation(both: Distributions) -> Scored:
    """1 - alpha. It rises with the logits of tokens that are drafted more often than they come."""
    losses = (both.draft_probs - both.target_probs).abs().sum(-1) / 2
    return losses, _slopes(both, both.draft_probs)


def log_acceptance(both: Distributions) -> Scored:
    """-log alpha, of logarithms throughout: alpha may be too small for float32."""
    shared = torch.minimum(both.draft_logp, both.target_logp)
    log_alpha = shared.logsumexp(-1, keepdim=True)
    return -log_alpha[:, 0], _slopes(both, (shared - log_alpha).exp())


def _slopes(both: Distributions, shares: Float[Tensor, "N W"]) -> Float[Tensor, "N W"]:
    """-d/d logits of alpha's part that the draft limits; shares: the terms of alpha."""
    limited = torch.where(both.draft_probs < both.target_probs, shares, 0.0)
    return both.draft_probs * limited.sum(-1, keepdim=True) - limited


_Components = tuple[Callable[[Distributions], Scored], ...]
_COMPONENTS: dict[LossName, _Components] = {
    "soft_ce": (soft_cross_entropy,),
    "kl": (forward_kl,),
    "tv": (total_variation,),
    "lk_alpha": (log_acceptance,),
    "lk_lambda": (forward_kl, total_variation),
}


def soft_losses(
    hidden: Float[Tensor, "N D"],
    head: Float[Tensor, "W D"],
    target_logits: TargetLogits,
    loss: SoftLoss,
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """The losses of `hidden @ head.T`, and its argmax, a row each.

    target_logits(part) gives the target's logits of some rows; they are asked for in chunks. With
    a frozen head the slopes are carried back to `hidden` at once, so that nothing as wide as the
    vocabulary is kept.
    """
    components = _COMPONENTS[loss.name]
    if head.requires_grad:
        leaf = widened(F.linear(hidden, head))
        scores = _score_logits(leaf.detach(), target_logits(slice(len(leaf))), components)
    else:
        leaf = hidden
        scores = _score_by_chunks(hidden, head, target_logits, components)
    losses = _KnownSlopes.apply(leaf, scores.losses, scores.slopes)
    return _blended(losses, loss), scores.best  # pyright: ignore


def _blended(losses: Float[Tensor, "C N"], loss: SoftLoss) -> Float[Tensor, " N"]:
    if loss.name != "lk_lambda":
        return losses[0]
    divergence, distance = losses
    acceptance = 1.0 - distance.detach().mean()
    weight = loss.kl_scale * torch.exp(-loss.kl_decay * acceptance)
    return weight * divergence + (1.0 - weight) * distance


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of C components; X is W where slopes are of logits, D where they are of hidden states."""

    losses: Float[Tensor, "C N"]
    slopes: Float[Tensor, "C N X"]
    best: Int[Tensor, " N"]


@torch.no_grad()
def _score_logits(
    logits: Float[Tensor, "N W"], target_logits: Float[Tensor, "N W"], components: _Components
) -> _Scores:
    both = Distributions.of(logits, target_logits)
    losses, slopes = zip(*(component(both) for component in components), strict=True)
    return _Scores(torch.stack(losses), torch.stack(slopes), logits.argmax(-1))


def _score_by_chunks(
    hidden: Float[Tensor, "N D"],
    head: Float[Tensor, "W D"],
    target_logits: TargetLogits,
    components: _Components,
) -> _Scores:
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    hidden, head = hidden.detach(), head.detach().to(compute_dtype(hidden))
    logits_of = wide_product(head)
    losses = widened(hidden.new_empty(len(components), len(hidden)))
    slopes = hidden.new_empty(len(components), len(hidden), hidden.shape[1] if wanted else 0)
    best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
    with torch.no_grad():
        for start in range(0, len(hidden), _ROWS_A_CHUNK):
            part = slice(start, min(start + _ROWS_A_CHUNK, len(hidden)))
            logits = logits_of(hidden[part].to(head.dtype))
            scores = _score_logits(logits, target_logits(part), components)
            losses[:, part], best[part] = scores.losses, scores.best
            if wanted:
                slopes[:, part] = (scores.slopes.to(head.dtype) @ head).to(hidden.dtype)
    return _Scores(losses, slopes, best)


def wide_product(
    head: Float[Tensor, "W D"],
) -> Callable[[Float[Tensor, "n D"]], Float[Tensor, "n W"]]:
    """`rows @ head.T` in float32 of whatever number type.

    Rounding draft logits to bfloat16 puts the gradient wrong by 2 % at alpha .7 and by 20 % at .95,
    where it is a difference of near equals. It costs nothing on a GPU; a CPU multiplies in float32.
    """
    if head.is_cuda and head.dtype in {torch.bfloat16, torch.float16}:
        return lambda rows: torch.mm(rows, head.T, out_dtype=torch.float32)
    wide = widened(head)

    def product(rows: Float[Tensor, "n D"]) -> Float[Tensor, "n W"]:
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(widened(rows), wide)

    return product


class _KnownSlopes(torch.autograd.Function):
    """Losses of C components whose slopes with respect to N rows of `leaf` are known already."""

    @staticmethod
    def forward(ctx: Any, _leaf: Tensor, losses: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return (grads[0][..., None].to(slopes.dtype) * slopes).sum(0), None, None
