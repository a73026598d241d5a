"""From logits to probabilities to tokens. Temperature 0 is the one-hot case."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


def probabilities(logits: Float[Tensor, "N V"], temperature: float) -> Float[Tensor, "N V"]:
    """The distribution that plain decoding would sample from, in float32."""
    if temperature == 0.0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.float() / temperature).softmax(-1)


def next_tokens(
    logits: Float[Tensor, "N V"], temperature: float, generator: torch.Generator | None
) -> Int[Tensor, " N"]:
    """What plain decoding goes on with. Greedy draws nothing: V random numbers a row cost time."""
    if temperature == 0.0:
        return logits.float().argmax(-1)
    return sample(probabilities(logits, temperature), generator)


def sample(probs: Float[Tensor, "N V"], generator: torch.Generator | None) -> Int[Tensor, " N"]:
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)
