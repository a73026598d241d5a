"""The block-diffusion drafter: DFlash, one denoising pass over a block (same-position convention).

    slot       0          1 ... S-1
    input      x_n        MASK          (x_n is the anchor)
    position   n          n+1 ... n+S-1
    predicts   nothing    x_{n+1} ... x_{n+S-1}

Every slot sees the target features of positions < n and all S slots of its own block, both ways.
The anchor's features do not exist when the block is drafted, hence < n and not <= n. The context
stream is fused once and projected to keys and values by each layer; it has no residual stream.
Attribute names are the tensor names of the published z-lab format (`DFlashDraftModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from whiflash_infer.cache import KVStore
from whiflash_infer.nets.layers import (
    GatedMLP,
    RMSNorm,
    Rotary,
    attend_cached,
    attend_shared_and_own,
    rotate,
)
from whiflash_infer.nets.shape import DrafterShape

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class DiffusionDrafterConfig:
    shape: DrafterShape
    num_layers: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    tap_layer_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size} must be 2 or more, the anchor included")
        if not 0 <= self.mask_token_id < self.shape.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.shape.vocab_size}"
            )


class _Attention(nn.Module):
    """Qwen3 attention: queries and keys are normed per head before rotation."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        hidden, heads, groups = shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(hidden, heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, groups * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, groups * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * shape.head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.head_dim = shape.head_dim

    def queries(self, x: Float[Tensor, "*N D"], angles: Angles) -> Float[Tensor, "*N H d"]:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), angles)

    def keys(self, x: Float[Tensor, "*N D"], angles: Angles) -> Float[Tensor, "*N G d"]:
        return rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), angles)

    def values(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N G d"]:
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class _Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, shape.hidden_act)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def finish(
        self, x: Float[Tensor, "*N D"], attended: Float[Tensor, "*N Hd"]
    ) -> Float[Tensor, "*N D"]:
        x = x + self.self_attn.o_proj(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class DiffusionDrafter(nn.Module):
    def __init__(self, config: DiffusionDrafterConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.rotary = Rotary(
            head_dim=shape.head_dim,
            rope_parameters=shape.rope_parameters,
            max_position_embeddings=shape.max_position_embeddings,
        )
        width = len(config.tap_layer_ids) * shape.target_hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    @property
    def decoder_layers(self) -> list[_Layer]:
        """`layers` with its type, which a ModuleList does not carry."""
        return cast("list[_Layer]", list(self.layers))

    def fuse(self, taps: Float[Tensor, "*N E"]) -> Float[Tensor, "*N D"]:
        return self.hidden_norm(self.fc(taps))

    def context_entries(
        self, taps: Float[Tensor, "*N E"], positions: Int[Tensor, "*N"]
    ) -> list[tuple[Float[Tensor, "*N G d"], Float[Tensor, "*N G d"]]]:
        """Keys and values of context positions, one pair a layer; all a caught-up row needs."""
        fused, angles = self.fuse(taps), self.rotary(positions)
        attentions = [layer.self_attn for layer in self.decoder_layers]
        return [(a.keys(fused, angles), a.values(fused)) for a in attentions]

    def block_cached(
        self,
        embeds: Float[Tensor, "S D"],
        positions: Int[Tensor, " S"],
        stores: list[KVStore],
    ) -> Float[Tensor, "S D"]:
        """Denoise one block against caches of the context; leaves the caches as they were."""
        x, angles = embeds, self.rotary(positions)
        for layer, store in zip(self.decoder_layers, stores, strict=True):
            normed = layer.input_layernorm(x)
            length = store.length
            keys, values = store.append(
                layer.self_attn.keys(normed, angles).transpose(0, 1)[None],
                layer.self_attn.values(normed).transpose(0, 1)[None],
            )
            attended = attend_cached(layer.self_attn.queries(normed, angles), keys, values)
            store.truncate(length)
            x = layer.finish(x, attended)
        return self.norm(x)

    def blocks(
        self,
        block_embeds: Float[Tensor, "B A S D"],
        taps: Float[Tensor, "B T E"],
        anchors: Int[Tensor, "B A"],
    ) -> Float[Tensor, "B A S D"]:
        """Denoise the block of every anchor in one pass; final-normed, ready for the head."""
        rows = torch.arange(taps.shape[1], device=taps.device)
        context = self.context_entries(taps, rows.expand(taps.shape[:2]))
        visible = rows < anchors[..., None]
        slots = torch.arange(block_embeds.shape[2], device=taps.device)
        angles = self.rotary(anchors[..., None] + slots)
        x = block_embeds
        for layer, (keys, values) in zip(self.decoder_layers, context, strict=True):
            normed = layer.input_layernorm(x)
            attention = layer.self_attn
            attended = attend_shared_and_own(
                attention.queries(normed, angles),
                keys,
                values,
                visible,
                attention.keys(normed, angles),
                attention.values(normed),
            )
            x = layer.finish(x, attended)
        return self.norm(x)
