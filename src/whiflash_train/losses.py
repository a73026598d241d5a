"""What the losses of both drafters share."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Of matrix products with `hidden`: autocast's, where that is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def chained_hits(hits: Bool[Tensor, "*N K"]) -> Float[Tensor, "*N K"]:
    """1 where this draft and all before it are right: what acceptance counts."""
    return hits.float().cumprod(-1)
