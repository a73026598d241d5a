"""Parts that both drafters share: norm, rotary positions, gated MLP, attention over a cache."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of matrix products with `x`: autocast's, where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def widened(x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """In float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        normed = F.rms_norm(widened(x), (x.shape[-1],), eps=self.eps)
        return (self.weight * normed.to(x.dtype)).to(x.dtype)


class Rotary:
    """Rotary positions of the target's own kind (default, linear, llama3, yarn...).

    It is no module: `.to(bfloat16)` on a drafter must not round the frequencies.
    """

    def __init__(
        self, *, head_dim: int, rope_parameters: dict[str, Any], max_position_embeddings: int
    ) -> None:
        config = LlamaConfig(
            head_dim=head_dim,
            rope_parameters=dict(rope_parameters),
            max_position_embeddings=max_position_embeddings,
        )
        embedding = LlamaRotaryEmbedding(config)
        self._inv_freq: Tensor = embedding.inv_freq.detach().float().clone()  # pyright: ignore
        self._scaling = float(embedding.attention_scaling)

    def __call__(
        self, positions: Int[Tensor, "*N"]
    ) -> tuple[Float[Tensor, "*N d"], Float[Tensor, "*N d"]]:
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = positions[..., None].float() * self._inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * self._scaling, angles.sin() * self._scaling


def rotate(
    x: Float[Tensor, "*N H d"], angles: tuple[Float[Tensor, "*N r"], Float[Tensor, "*N r"]]
) -> Float[Tensor, "*N H d"]:
    """Rotate the first r of d channels of every head (r = d unless the target rotates fewer)."""
    cos, sin = (part[..., None, :] for part in angles)
    width = cos.shape[-1]
    turned, passed = widened(x[..., :width]), x[..., width:]
    left, right = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), passed], dim=-1)


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        if activation not in ACT2FN:
            raise ValueError(f"hidden_act {activation!r} is not known to transformers")
        self.activation = ACT2FN[activation]

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def attend_cached(
    queries: Float[Tensor, "Q H d"],
    keys: Float[Tensor, "1 G T d"],
    values: Float[Tensor, "1 G T d"],
    mask: Bool[Tensor, "Q T"] | None = None,
) -> Float[Tensor, "Q H*d"]:
    """Every query sees every key: decoding, where the cache holds exactly what may be seen.

    mask: for a window that slides from query to query.
    """
    # Heads that share keys become rows of one query block, so that each key is read once; SDPA's
    # own grouped mode reads them several times on a CPU.
    num_rows = len(queries)
    folded = queries.transpose(0, 1).unflatten(0, (keys.shape[1], -1)).flatten(1, 2)
    if mask is not None:
        mask = mask.repeat(folded.shape[1] // num_rows, 1)
    attended = F.scaled_dot_product_attention(folded[None], keys, values, attn_mask=mask)
    return attended[0].unflatten(1, (-1, num_rows)).flatten(0, 1).transpose(0, 1).flatten(1)
