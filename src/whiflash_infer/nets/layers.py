"""Parts that both drafters share: norm, rotary positions, gated MLP, attention over a cache."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_FEW_ROWS = 16


def compute_dtype(x: Tensor) -> torch.dtype:
    """Of matrix products with `x`: autocast's, where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def widened(x: Float[Tensor, "*N"]) -> Float[Tensor, "*N"]:
    """In float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain_strides(x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
    """A copy laid out row after row; `contiguous` leaves a slice of a batch of one as it is."""
    return x.clone(memory_format=torch.contiguous_format)


def head_product(
    hidden: Float[Tensor, "*N D"], head: Float[Tensor, "V D"]
) -> Float[Tensor, "*N V"]:
    """Logits of a few rows. In float32 on a CPU they come faster as the head times the rows: 8
    against 38 ms for 7 rows of 49,152 words."""
    rows = hidden.reshape(-1, hidden.shape[-1]).to(head.dtype)
    if rows.device.type == "cpu" and head.dtype == torch.float32 and len(rows) <= _FEW_ROWS:
        logits = torch.mm(head, rows.T).T.contiguous()
    else:
        logits = F.linear(rows, head)
    return logits.unflatten(0, hidden.shape[:-1])


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
    queries: Float[Tensor, "B H Q d"],
    keys: Float[Tensor, "B G T d"],
    values: Float[Tensor, "B G T d"],
    mask: Float[Tensor, "B 1 QF T"] | None,
    *,
    scale: float | None = None,
) -> Float[Tensor, "B Q H d"]:
    """Attention over a cache; without a mask every query sees every key.

    The F query heads that share a key head become rows of one query block, a query's heads beside
    each other, so that each key is read once: SDPA's own grouped mode reads them several times on
    a CPU, and with a mask it would copy them for every head.
    """
    groups, width = keys.shape[1], queries.shape[2]
    grouped = queries.unflatten(1, (groups, -1)).transpose(2, 3)
    attended = F.scaled_dot_product_attention(
        grouped.flatten(2, 3), keys, values, attn_mask=mask, scale=scale
    )
    return attended.unflatten(2, (width, -1)).transpose(1, 2).flatten(2, 3)
