"""Losses of the diffusion drafter: one score a slot, then one loss a batch of blocks.

    block      x_n   MASK      MASK      MASK          (S = 4 slots, K = 3 of them drafted)
    slot       0     1         2         3
    label      -     x_{n+1}   x_{n+2}   x_{n+3}
    teacher    -     row n     row n+1   row n+2       (what the target said of the same label)
    before it  -     x_n       x_{n+1}   x_{n+2}       (what a Markov head reads)

Tables have a row a block and a column a drafted slot. `valid` tells which slots are supervised: the
text may end inside a block, and not all of it belongs to an answer. A slot that is not valid weighs
nothing, and inside a product over slots it counts as certainly right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.nets.layers import compute_dtype, widened
from whiflash_infer.target import TargetTables
from whiflash_train.checks import checked
from whiflash_train.distillation import (
    Distributions,
    Scored,
    forward_kl,
    row_chunks,
    total_variation,
    wide_product,
)

Score = Literal["cross_entropy", "divergence", "distance"]
ObjectiveName = Literal["dpace", "decay", "focal", "chain", "e2e_tv", "kd"]


@checked
@dataclass(frozen=True, kw_only=True)
class BlockObjective:
    """Which loss, and the parameters of all of them; each loss reads its own.

    draw_slots: decay and kd take slot k as often as it would weigh, all taken ones weighing the
    same: the same gradient on average, for less work.
    """

    name: ObjectiveName
    smoothing: float
    gamma: float
    draw_slots: bool
    focal_weight: float
    chain_weight: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.smoothing <= 1.0:
            raise ValueError(f"smoothing {self.smoothing} must lie in 0..1")
        if self.gamma <= 0.0:
            raise ValueError(f"gamma {self.gamma} must be above 0; .inf weighs all slots alike")
        if self.draw_slots and self.name not in ("decay", "kd"):
            raise ValueError(f"draw_slots draws by the weights of decay and kd, not of {self.name}")
        for field in ("focal_weight", "chain_weight"):
            if getattr(self, field) < 0.0:
                raise ValueError(f"{field} {getattr(self, field)} must be 0 or more")

    @property
    def score(self) -> Score:
        """What it needs to know of each slot."""
        special: dict[str, Score] = {"kd": "divergence", "e2e_tv": "distance"}
        return special.get(self.name, "cross_entropy")

    def chances(self, num_slots: int, device: torch.device) -> Float[Tensor, " K"]:
        """With what probability a training pass takes each slot."""
        every = torch.ones(1, num_slots, dtype=torch.bool, device=device)
        return decay_weights(every, gamma=self.gamma if self.draw_slots else float("inf"))[0]

    def loss(
        self,
        scores: Float[Tensor, "N K"],
        hits: Bool[Tensor, "N K"],
        valid: Bool[Tensor, "N K"],
        taken: Float[Tensor, " K"],
    ) -> Float[Tensor, ""]:
        """The loss of N blocks, from the score of each slot and whether its draft is right.

        taken: with what probability slots were taken; the others are not valid.
        """
        if self.name == "dpace":
            return dpace_loss(scores, valid, smoothing=self.smoothing)
        if self.name == "e2e_tv":
            return e2e_tv_loss(scores, valid)
        loss = weighted_mean(scores, decay_weights(valid, gamma=self.gamma) / taken)  # decay, kd
        if self.name == "focal":
            first = first_error_loss(scores, hits, valid, gamma=self.gamma)
            loss = loss + self.focal_weight * first
        if self.name == "chain":
            loss = loss - self.chain_weight * chain_reward(scores, valid)
        return loss

    def weight(self, valid: Bool[Tensor, "N K"], taken: Float[Tensor, " K"]) -> float:
        """What the loss was divided by, so that losses of parts of a batch add up to the batch's.

        Of focal and chain this is the first term's; the second is divided by a number of its own.
        """
        if self.name == "dpace":
            return float(valid.any(-1).sum())
        if self.name == "e2e_tv":
            return float(valid.sum())
        return float((decay_weights(valid, gamma=self.gamma) / taken).sum())


def decay_weights(valid: Bool[Tensor, "N K"], *, gamma: float) -> Float[Tensor, "N K"]:
    """DFlash (arXiv 2602.06036, eq. 4): w_k = exp(-(k - 1) / gamma) for slots k = 1..K."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    return torch.exp(-slots / gamma) * valid


def dpace_weights(
    losses: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, smoothing: float
) -> Float[Tensor, "N K"]:
    """D-PACE (arXiv 2605.18810): how much slot j matters for the expected accepted length.

    q_j = exp(-loss_j) smoothed to (1 - a) q + a; C_j = prod_{i<=j} q_i; w_j = sum_{m>=j} C_m.
    Detached.
    """
    chance = (1.0 - smoothing) * torch.exp(-losses.detach()) + smoothing
    chain = torch.where(valid, chance, 1.0).cumprod(-1) * valid
    return chain.flip(-1).cumsum(-1).flip(-1) * valid


def dpace_loss(
    losses: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"], *, smoothing: float
) -> Float[Tensor, ""]:
    """D-PACE: the weighted sum over the number of blocks, as in the paper, and over K / 2."""
    weights = dpace_weights(losses, valid, smoothing=smoothing)
    num_blocks = valid.any(-1).sum()
    return (weights * losses.masked_fill(~valid, 0.0)).sum() / _positive(
        num_blocks * valid.shape[-1] / 2
    )


def first_error_loss(
    losses: Float[Tensor, "N K"],
    hits: Bool[Tensor, "N K"],
    valid: Bool[Tensor, "N K"],
    *,
    gamma: float,
) -> Float[Tensor, ""]:
    """First-error focal (arXiv 2606.11552): the loss of the slot that ends each accepted prefix.

    j* is the first slot whose most likely token is wrong: sum_blocks w_{j*} CE_{j*} over the sum
    of those weights. A block without an error adds nothing. No gradient goes through the choice.
    """
    wrong = valid & ~hits
    first = wrong & (wrong.cumsum(-1) == 1)
    return weighted_mean(losses, decay_weights(first, gamma=gamma))


def chain_reward(losses: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"]) -> Float[Tensor, ""]:
    """Chain (arXiv 2606.11552): the mean of exp(sum_{j<=k} log q_j) over slots k, log q = -loss.

    The expected accepted length of independent drafts, over the number of drafted slots.
    """
    chain = torch.exp(-losses.masked_fill(~valid, 0.0).cumsum(-1))
    return weighted_mean(chain, valid.to(chain.dtype))


def e2e_tv_loss(distances: Float[Tensor, "N K"], valid: Bool[Tensor, "N K"]) -> Float[Tensor, ""]:
    """End-to-end total variation (Bebop, arXiv 2606.12370, eq. 13; AngelSpec, arXiv 2607.25852).

    1 - mean_k prod_{j<=k} alpha_j, where alpha_j = 1 - distance_j is the chance that a sampled
    draft is accepted; the gradient goes through all factors. Where the drafter still knows little,
    that gradient is small: a second stage, rather than a start.
    """
    chain = (1.0 - distances.masked_fill(~valid, 0.0)).cumprod(-1)
    return weighted_mean(1.0 - chain, valid.to(chain.dtype))


def weighted_mean(values: Float[Tensor, "N K"], weights: Float[Tensor, "N K"]) -> Float[Tensor, ""]:
    """0 without weights. A value that weighs nothing may be anything."""
    total = (weights * values.masked_fill(weights == 0, 0.0)).sum()
    return total / _positive(weights.sum())


def _positive(count: Tensor) -> Tensor:
    return torch.where(count > 0, count, 1.0)


@dataclass(frozen=True, slots=True)
class Bias:
    """A Markov head at N slots: `codes @ readout.T` is added to their logits."""

    codes: Float[Tensor, "N R"]
    readout: Float[Tensor, "V R"]


def slot_scores(
    score: Score,
    hidden: Float[Tensor, "N D"],
    wanted: Int[Tensor, " N"] | Float[Tensor, "N D"],
    tables: TargetTables,
    bias: Bias | None,
) -> tuple[Float[Tensor, " N"], Int[Tensor, " N"]]:
    """A score of each slot, and its most likely token.

    `cross_entropy` with the labels in `wanted`; `divergence`, KL(target || draft), and `distance`,
    their total variation, with the distributions of the target's final hidden states in `wanted`.
    The output head is frozen. It is read in chunks, and the gradient of each row is computed beside
    its score, so no logits are kept for the backward pass. The weights of a Markov head alone need
    them once more; there they are computed again.
    """
    if bias is None:
        bias = Bias(hidden.new_zeros(len(hidden), 0), hidden.new_zeros(len(tables.head), 0))
    scorer = _Scorer(score, wanted, tables, compute_dtype(hidden))
    return _SlotScores.apply(hidden, bias.codes, bias.readout, scorer)  # pyright: ignore


def _cross_entropy(logits: Float[Tensor, "N V"], labels: Int[Tensor, " N"]) -> Scored:
    logp = logits.log_softmax(-1)
    slopes = logp.exp()
    rows = torch.arange(len(labels), device=labels.device)
    slopes[rows, labels] -= 1.0
    return -logp[rows, labels], slopes


class _Scorer:
    """Scores N slots part by part, with their slopes by the logits; holds all that is frozen."""

    def __init__(
        self, score: Score, wanted: Tensor, tables: TargetTables, dtype: torch.dtype
    ) -> None:
        self.head = tables.head.detach().to(dtype)
        self._score, self._wanted, self._tables = score, wanted, tables
        self._soft = score != "cross_entropy"
        self._product = self.product(self.head)
        self._target_product = wide_product(tables.head.detach()) if self._soft else None

    def product(self, matrix: Float[Tensor, "V X"]) -> Callable[[Tensor], Tensor]:
        """`rows @ matrix.T`: with labels of one token each, products may be rounded where exact
        ones cost twice the time."""
        if self._soft or matrix.is_cuda:
            return wide_product(matrix)
        return lambda rows: widened(F.linear(rows, matrix))

    def __call__(
        self,
        part: slice,
        hidden: Float[Tensor, "N D"],
        codes: Float[Tensor, "N R"],
        bias: Callable[[Tensor], Tensor],
    ) -> tuple[Scored, Int[Tensor, " N"]]:
        """Of the slots `part`, to which `hidden` and `codes` belong; and their likeliest tokens."""
        logits = self._product(hidden.to(self.head.dtype))
        if codes.shape[1]:
            logits = logits + bias(codes.to(self.head.dtype))
        return self._scored(logits, self._wanted[part]), logits.argmax(-1)

    def _scored(self, logits: Tensor, wanted: Tensor) -> Scored:
        if self._target_product is None:
            return _cross_entropy(logits, wanted)
        both = Distributions(logits, self._tables.softcapped(self._target_product(wanted)))
        return forward_kl(both) if self._score == "divergence" else total_variation(both)


class _SlotScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, codes: Tensor, readout: Tensor, scorer: _Scorer
    ) -> tuple[Tensor, Tensor]:
        dtype, learns = scorer.head.dtype, any(ctx.needs_input_grad)
        out = readout.to(dtype)
        bias = scorer.product(out)
        scores = widened(hidden.new_empty(len(hidden), dtype=dtype))
        best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        slopes, code_slopes = (torch.empty_like(t if learns else t[:0]) for t in (hidden, codes))
        for part in row_chunks(hidden, len(scorer.head)):
            (scores[part], by_logits), best[part] = scorer(part, hidden[part], codes[part], bias)
            if learns:
                narrow = by_logits.to(dtype)
                slopes[part] = (narrow @ scorer.head).to(hidden.dtype)
                code_slopes[part] = (narrow @ out).to(codes.dtype)
        ctx.save_for_backward(hidden, codes, readout, slopes, code_slopes)
        ctx.scorer = scorer
        ctx.mark_non_differentiable(best)
        return scores, best

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor | None, None]:
        hidden, codes, readout, slopes, code_slopes = ctx.saved_tensors
        pull = grads[0][:, None]
        by_readout = None
        if ctx.needs_input_grad[2]:
            by_readout = _slopes_by_readout(ctx.scorer, hidden, codes, readout, pull)
        return slopes * pull.to(slopes.dtype), code_slopes * pull.to(codes.dtype), by_readout, None


def _slopes_by_readout(
    scorer: _Scorer, hidden: Tensor, codes: Tensor, readout: Tensor, pull: Tensor
) -> Float[Tensor, "V R"]:
    dtype = scorer.head.dtype
    found, bias = torch.zeros_like(readout), scorer.product(readout.to(dtype))
    for part in row_chunks(hidden, len(scorer.head)):
        (_, by_logits), _ = scorer(part, hidden[part], codes[part], bias)
        pulled = (by_logits * pull[part]).to(dtype)
        found += (pulled.T @ codes[part].to(dtype)).to(found.dtype)
    return found
