"""What the losses of both drafters share."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor


def chained_hits(hits: Bool[Tensor, "*N K"]) -> Float[Tensor, "*N K"]:
    """1 where this draft and all before it are right: what acceptance counts."""
    return hits.float().cumprod(-1)
