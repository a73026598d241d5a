"""From logits to probabilities to tokens. Temperature 0 is the one-hot case.

Sampling is coupled: a request's seed fixes a uniform number for every output position, and the
token there is where the target's cumulative distribution passes that number. So what is said does
not depend on who drafted it.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.options import GenerationOptions

_CHUNK = 64  # rows are searched in pieces of this width, where it divides the vocabulary
_FIRST_TRY = 64  # largest probabilities among which top-p is looked for first
_WIDENING = 32


def probabilities(
    logits: Float[Tensor, "N V"],
    temperature: float,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Float[Tensor, "N V"]:
    """The distribution that plain decoding would sample from, in float32.

    The filters come in Hugging Face's order, and each keeps every token that is at least as likely
    as the last one it has to keep. So equals at the cut stay together, in top-p as well.
    """
    if temperature == 0.0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    scores = logits.float() / temperature
    probs = scores.softmax(-1)
    if top_k is not None and top_k < scores.shape[-1]:
        # By scores: scores that differ may have equal probabilities.
        _keep_(probs, scores.ge_(largest(scores, top_k)[:, -1:]))
    if top_p < 1.0:
        _keep_(probs, torch.ge(probs, _top_p_cut(probs, top_p, _FIRST_TRY), out=scores))
    if min_p > 0.0:
        _keep_(probs, torch.ge(probs, min_p * probs.amax(-1, keepdim=True), out=scores))
    return probs


def draw(probs: Float[Tensor, "N V"], uniforms: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The first token at which the cumulative probability passes a number in [0, 1).

    Each token owns an interval as long as its probability. A token of probability 0 owns nothing,
    and the numbers are scaled to the rounded sum of the row, so none falls behind the last token.
    Lengths are right to the rounding of float32.
    """
    chunks = _chunks(probs)
    points = uniforms[:, None].to(probs.device, torch.float64)
    chunk, points = _find(chunks.sum(-1), points)
    token, _ = _find(_pick(chunks, chunk), points)
    return (chunk * chunks.shape[-1] + token).squeeze(-1)


def choose(
    logits: Float[Tensor, "N V"], options: GenerationOptions, uniforms: Float[Tensor, " N"]
) -> Int[Tensor, " N"]:
    """The target's token for each row. Greedy does not look at the numbers."""
    if options.is_greedy:
        return logits.argmax(-1)
    return draw(distribution(logits, options), uniforms)


def distribution(logits: Float[Tensor, "N V"], options: GenerationOptions) -> Float[Tensor, "N V"]:
    """What a request's tokens are drawn from."""
    return probabilities(
        logits,
        options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
    )


def uniforms(seed: int, count: int, stream: int = 0) -> Float64[Tensor, " count"]:
    """The first `count` numbers in [0, 1) of one stream of a seed; streams are independent.

    Made from the bits of the generator, which NumPy promises to keep as they are.
    """
    bits = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)).random_raw(count)
    return torch.from_numpy((bits >> np.uint64(11)) * 2.0**-53)


def largest(values: Float[Tensor, "N V"], count: int) -> Float[Tensor, "N count"]:
    """The largest values of each row, in descending order.

    They all lie in those `count` chunks that have the largest maxima, and these are cheap to find.
    """
    chunks = _chunks(values)
    if count >= chunks.shape[1]:
        return values.topk(count).values
    best = chunks.amax(-1).topk(count, sorted=False).indices
    return _pick(chunks, best).topk(count).values


def _chunks(values: Float[Tensor, "N V"]) -> Float[Tensor, "N G S"]:
    """Rows in pieces; in a single one where they do not come out even."""
    rows, width = values.shape
    size = width if width % _CHUNK else _CHUNK
    return values.reshape(rows, width // size, size)


def _pick(chunks: Float[Tensor, "N G S"], index: Int[Tensor, "N M"]) -> Float[Tensor, "N MS"]:
    """Chosen chunks of each row, one behind the other."""
    every_row = torch.arange(len(chunks), device=chunks.device)[:, None]
    return chunks[every_row, index].flatten(1)


def _find(
    weights: Float[Tensor, "N M"], points: Float64[Tensor, "N 1"]
) -> tuple[Int[Tensor, "N 1"], Float64[Tensor, "N 1"]]:
    """Where a point of [0, 1] falls, and how far into that weight, again from 0 to 1."""
    ends = weights.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    points = (points * total).minimum(total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(ends, points, right=True)
    weight = weights.gather(-1, index)
    start = ends.gather(-1, index) - weight
    return index, ((points - start) / weight).clamp(0.0, 1.0)


def _keep_(probs: Float[Tensor, "N V"], mask: Float[Tensor, "N V"]) -> None:
    """Normalise anew what a mask of 0 and 1 leaves, in place: fresh memory of this size is slow."""
    probs.mul_(mask)
    probs.div_(probs.sum(-1, keepdim=True))


def _top_p_cut(probs: Float[Tensor, "N V"], top_p: float, count: int) -> Float[Tensor, "N 1"]:
    """The probability of the token with which the likeliest tokens come to a mass of top_p.

    Looked for among the `count` likeliest, and among more where their mass falls short.
    """
    count = min(count, probs.shape[-1])
    descending = largest(probs, count)
    mass = descending.cumsum(-1, dtype=torch.float64)
    needed = (mass - descending) < top_p
    cut = descending.gather(-1, needed.sum(-1, keepdim=True) - 1)
    short = (mass[:, -1] < top_p).nonzero().flatten()
    if count < probs.shape[-1] and len(short):
        cut[short] = _top_p_cut(probs[short], top_p, count * _WIDENING)
    return cut
