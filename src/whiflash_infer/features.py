"""What the router sees: the state that produced the anchor, and nothing sampled after it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

SCALARS = ("entropy", "top1", "margin", "log_position")
NUM_SCALARS = len(SCALARS)


def router_features(
    logits: Float[Tensor, "N V"], hidden: Float[Tensor, "N D"], positions: Int[Tensor, " N"]
) -> Float[Tensor, "N F"]:
    """F = 4 + D: the scalars in the order of `SCALARS`, then the target's final hidden state.

    Row r describes the anchor at `positions[r]`: `logits` is the distribution that produced it
    (nats, temperature 1), `hidden` the state that made those logits.
    """
    logp = logits.float().log_softmax(-1)
    probs = logp.exp()
    entropy = -(probs * logp).sum(-1)
    top = probs.topk(2, dim=-1).values
    scalars = [entropy, top[:, 0], top[:, 0] - top[:, 1], positions.float().log1p()]
    return torch.cat([torch.stack(scalars, dim=-1), hidden.float()], dim=-1)


def feature_entropy(features: Float[Tensor, "N F"]) -> Float[Tensor, " N"]:
    return features[:, SCALARS.index("entropy")]
