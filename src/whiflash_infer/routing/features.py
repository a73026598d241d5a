"""What the router sees: the state that produced the anchor, and nothing sampled after it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

SCALARS = ("entropy", "top1", "margin", "log_position")
NUM_SCALARS = len(SCALARS)
_NOTHING = -80.0  # nats below the greatest logit: what lies deeper weighs nothing in any sum
_COLUMN = 64  # entries of a vocabulary that are looked at together when the best are searched


def router_features(
    logits: Float[Tensor, "N V"], hidden: Float[Tensor, "N D"], positions: Int[Tensor, " N"]
) -> Float[Tensor, "N F"]:
    """F = 4 + D: the scalars in the order of `SCALARS`, then the target's final hidden state.

    Row r describes the anchor at `positions[r]`: `logits` is the distribution that produced it
    (nats, temperature 1), `hidden` the state that made those logits.
    """
    probs = logits.softmax(-1, dtype=torch.float32)
    first, second = _two_greatest(probs)
    shifted = logits.to(torch.float32, copy=True)
    shifted.sub_(shifted.amax(-1, keepdim=True)).clamp_(min=_NOTHING)
    entropy = -first.log() - shifted.mul_(probs).sum(-1, keepdim=True)
    log_positions = positions[:, None].float().log1p()
    return torch.cat([entropy, first, first - second, log_positions, hidden.float()], dim=-1)


def _two_greatest(
    values: Float[Tensor, "N V"],
) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N 1"]]:
    """On a CPU one pass finds the maxima of columns, and only the best column is searched."""
    if values.device.type != "cpu" or values.shape[-1] % _COLUMN or values.shape[-1] == _COLUMN:
        greatest = values.topk(2, dim=-1).values
        return greatest[:, :1], greatest[:, 1:]
    columns = values.unflatten(-1, (_COLUMN, -1))
    maxima, at = columns.amax(-2).topk(2, dim=-1)
    best = columns.gather(-1, at[:, None, :1].expand(-1, _COLUMN, 1)).squeeze(-1)
    behind = best.topk(2, dim=-1).values
    return maxima[:, :1], torch.maximum(maxima[:, 1:], behind[:, 1:])


def feature_entropy(features: Float[Tensor, "N F"]) -> Float[Tensor, " N"]:
    return features[:, SCALARS.index("entropy")]
