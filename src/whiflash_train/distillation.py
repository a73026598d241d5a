"""Learning from the target's distribution: one loss a position, slopes in closed form.

Everything is computed in float32, of two distributions on the draft vocabulary. With
alpha = sum_v min(target_v, draft_v), the chance that a sampled draft is kept:

    soft_ce     - sum_v target_v log draft_v
    kl          soft_ce less the target's entropy: the same slopes
    tv          1 - alpha, the total variation
    lk_alpha    - log alpha: the slopes of tv over alpha, alive where they meet little
    lk_lambda   w kl + (1 - w) tv,  w = kl_scale exp(-kl_decay mean(alpha)), w detached

The last two are the LK losses (arXiv 2602.23881). The mean is over the rows of one group: over one
unroll step of one process's batch. A slope is the derivative with respect to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.nets.layers import compute_dtype, widened
from whiflash_train.checks import checked

LossName = Literal["soft_ce", "kl", "tv", "lk_alpha", "lk_lambda"]
Scored = tuple[Float[Tensor, " N"], Float[Tensor, "N W"]]  # losses and slopes
TargetLogits = Callable[[Int[Tensor, " n"]], Float[Tensor, "n W"]]

_CPU_SCORES, _GPU_SCORES = 2**21, 2**24  # of a chunk; 8 MiB of float32 stay in a CPU's cache
_LEAST_ROWS = 128  # of a chunk: with fewer, a product waits for the head to be read


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


class Distributions:
    """The drafter's and the target's, row by row; what is not asked for is not computed.

    rows: the row of `target_logits` that belongs to each of `draft_logits`; None: its own.
    """

    def __init__(
        self,
        draft_logits: Float[Tensor, "N W"],
        target_logits: Float[Tensor, "R W"],
        rows: Int[Tensor, " N"] | None = None,
    ) -> None:
        self.draft_logp = widened(draft_logits).log_softmax(-1)
        self._target_logp = widened(target_logits).log_softmax(-1)
        self._rows = rows

    @cached_property
    def draft_probs(self) -> Float[Tensor, "N W"]:
        return self.draft_logp.exp()

    @cached_property
    def target_logp(self) -> Float[Tensor, "N W"]:
        return self._by_row(self._target_logp)

    @cached_property
    def target_probs(self) -> Float[Tensor, "N W"]:
        return self._by_row(self._target_logp.exp())

    def _by_row(self, values: Float[Tensor, "R W"]) -> Float[Tensor, "N W"]:
        return values if self._rows is None else values.index_select(0, self._rows)


def soft_cross_entropy(both: Distributions) -> Scored:
    losses = -torch.linalg.vecdot(both.target_probs, both.draft_logp)
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
    target_rows: Int[Tensor, " N"],
    groups: Int[Tensor, " N"],
    loss: SoftLoss,
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """The losses of `hidden @ head.T`, and its argmax, a row each.

    target_logits(rows) gives the target's logits of some of its rows; target_rows says which one
    each row learns from. Chunk by chunk every such row is asked for once: rows that learn from the
    same one should lie together. groups: see lk_lambda. With a frozen head the slopes are carried
    back to `hidden` at once, so that nothing as wide as the vocabulary is kept.
    """
    components = _COMPONENTS[loss.name]
    if head.requires_grad:
        leaf = widened(F.linear(hidden, head))
        parts = _Parts(leaf.detach(), lambda logits: logits, lambda slopes: slopes)
    else:
        leaf, frozen = hidden, head.detach().to(compute_dtype(hidden))
        product = wide_product(frozen)
        parts = _Parts(
            hidden.detach(),
            lambda states: product(states.to(frozen.dtype)),
            lambda slopes: slopes.to(frozen.dtype) @ frozen,
        )
    wanted = torch.is_grad_enabled() and leaf.requires_grad
    scores = _score(parts, len(head), target_logits, target_rows, components, learns=wanted)
    losses = _KnownSlopes.apply(leaf, scores.losses, scores.slopes)
    return _blended(losses, groups, loss), scores.best  # pyright: ignore


def _blended(
    losses: Float[Tensor, "C N"], groups: Int[Tensor, " N"], loss: SoftLoss
) -> Float[Tensor, " N"]:
    if loss.name != "lk_lambda" or not len(groups):
        return losses[0]
    divergence, distance = losses
    acceptance = 1.0 - _group_means(distance.detach(), groups)[groups]
    weight = loss.kl_scale * torch.exp(-loss.kl_decay * acceptance)
    return weight * divergence + (1.0 - weight) * distance


def _group_means(values: Float[Tensor, " N"], groups: Int[Tensor, " N"]) -> Float[Tensor, " _G"]:
    """Of empty groups 0."""
    sums = values.new_zeros(int(groups.max()) + 1)
    counts = torch.zeros_like(sums).index_add_(0, groups, torch.ones_like(values))
    return sums.index_add_(0, groups, values) / counts.clamp(min=1)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is scored: X is W where it is logits already, D where it is hidden states.

    logits: of some rows. carried: slopes by these logits as slopes by the rows.
    """

    rows: Float[Tensor, "N X"]
    logits: Callable[[Float[Tensor, "n X"]], Float[Tensor, "n W"]]
    carried: Callable[[Float[Tensor, "n W"]], Float[Tensor, "n X"]]


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of C components."""

    losses: Float[Tensor, "C N"]
    slopes: Float[Tensor, "C N X"]
    best: Int[Tensor, " N"]


@torch.no_grad()
def _score(
    parts: _Parts,
    num_words: int,
    target_logits: TargetLogits,
    target_rows: Int[Tensor, " N"],
    components: _Components,
    *,
    learns: bool,
) -> _Scores:
    rows = parts.rows
    losses = widened(rows.new_empty(len(components), len(rows)))
    slopes = rows.new_empty(len(components), len(rows), rows.shape[1] if learns else 0)
    best = torch.empty(len(rows), dtype=torch.long, device=rows.device)
    for part in row_chunks(rows, num_words):
        found, which = target_rows[part].unique_consecutive(return_inverse=True)
        logits = parts.logits(rows[part])
        both = Distributions(logits, target_logits(found), which)
        best[part] = logits.argmax(-1)
        for index, component in enumerate(components):
            losses[index, part], by_logits = component(both)
            if learns:
                slopes[index, part] = parts.carried(by_logits).to(rows.dtype)
    return _Scores(losses, slopes, best)


def row_chunks(rows: Float[Tensor, "N _"], num_words: int) -> Iterator[slice]:
    """Slices of rows whose scores over `num_words` words are quick to go over several times."""
    step = rows_a_chunk(rows.device, num_words)
    for start in range(0, len(rows), step):
        yield slice(start, min(start + step, len(rows)))


def rows_a_chunk(device: torch.device, num_words: int) -> int:
    most = _CPU_SCORES if device.type == "cpu" else _GPU_SCORES
    return max(_LEAST_ROWS, most // num_words)


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
