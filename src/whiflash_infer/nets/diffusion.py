"""The block-diffusion drafter: DFlash, one denoising pass over a block (same-position convention).

DeepSpec's next-token convention, in which slot k predicts x_{n+k+1}, is not this one.

    slot       0          1 ... S-1
    input      x_n        MASK          (x_n is the anchor)
    position   n          n+1 ... n+S-1
    predicts   nothing    x_{n+1} ... x_{n+S-1}

Every slot sees the target features of positions < n and all S slots of its own block, both ways.
The anchor's features do not exist when the block is drafted, hence < n and not <= n. The context
stream is fused once and projected to keys and values by each layer; it has no residual stream.
With a sliding window of W, the slot at position p sees the features of p - W + 1 ... n - 1 alone,
so that it is itself the W-th (as SGLang, SpecForge and Automodel count), and still its whole block.
Attribute names are the tensor names of the published z-lab format (`DFlashDraftModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from whiflash_infer.cache import KVCache, Span
from whiflash_infer.nets.attention import Backend, SharedAndOwn
from whiflash_infer.nets.layers import GatedMLP, RMSNorm, Rotary, attend_cached, rotate
from whiflash_infer.nets.shape import DrafterShape

Angles = tuple[Tensor, Tensor]
SMALLEST_BLOCK, LARGEST_BLOCK = 4, 32


@dataclass(frozen=True, kw_only=True)
class DiffusionDrafterConfig:
    """markov_rank: of the bias over the previous token; 0 for none.

    sliding_window: positions of the context that a slot sees, itself counted; None for all.
    """

    shape: DrafterShape
    num_layers: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    tap_layer_ids: tuple[int, ...]
    markov_rank: int
    sliding_window: int | None

    def __post_init__(self) -> None:
        check_sizes(
            num_layers=self.num_layers,
            block_size=self.block_size,
            markov_rank=self.markov_rank,
            sliding_window=self.sliding_window,
        )
        if not 0 <= self.mask_token_id < self.shape.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.shape.vocab_size}"
            )


def check_sizes(
    *, num_layers: int, block_size: int, markov_rank: int, sliding_window: int | None
) -> None:
    """An error that names the setting and its legal range."""
    if num_layers < 1:
        raise ValueError(f"num_layers {num_layers} must be 1 or more")
    if not SMALLEST_BLOCK <= block_size <= LARGEST_BLOCK:
        raise ValueError(
            f"block_size {block_size} must lie in {SMALLEST_BLOCK}..{LARGEST_BLOCK}, "
            "the anchor included"
        )
    if markov_rank < 0:
        raise ValueError(f"markov_rank {markov_rank} must be 0 (no Markov head) or more")
    if sliding_window is not None and sliding_window < block_size:
        raise ValueError(
            f"sliding_window {sliding_window} must be at least block_size {block_size}, or null: "
            "a slot sees its whole block"
        )


class MarkovHead(nn.Module):
    """DSpark's vanilla head (arXiv 2607.05147): a bias of low rank over the previous token.

    It starts at zero. Attribute names are DeepSpec's tensor names.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, previous_ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N V"]:
        return self.markov_w2(self.markov_w1(previous_ids))


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
    """attention: the backend of training passes; None for the device's default."""

    attention: Backend | None = None

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
        rank = config.markov_rank
        self.markov_head = MarkovHead(shape.vocab_size, rank) if rank else None

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
        embeds: Float[Tensor, "B S D"],
        positions: Int[Tensor, "B S"],
        cache: KVCache,
        span: Span,
        mask: Float[Tensor, "B 1 SF T"] | None,
    ) -> Float[Tensor, "B S D"]:
        """Denoise a block of each row against caches of the context; moves no length."""
        x, angles = embeds, self.rotary(positions)
        for index, layer in enumerate(self.decoder_layers):
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            keys, values = cache.write(
                index,
                attention.keys(normed, angles).transpose(1, 2),
                attention.values(normed).transpose(1, 2),
                span,
            )
            queries = attention.queries(normed, angles).transpose(1, 2)
            x = layer.finish(x, attend_cached(queries, keys, values, mask).flatten(2))
        return self.norm(x)

    def draft_logits(
        self,
        hidden: Float[Tensor, "*N D"],
        previous_ids: Int[Tensor, "*N"],
        head: Float[Tensor, "V D"],
    ) -> Float[Tensor, "*N V"]:
        """What each slot says when the token before it is known; for an argmax (no softcap)."""
        logits = F.linear(hidden.to(head.dtype), head)
        return logits if self.markov_head is None else logits + self.markov_head(previous_ids)

    def blocks(
        self,
        block_embeds: Float[Tensor, "B A S D"],
        taps: Float[Tensor, "B T E"],
        anchors: Int[Tensor, "B A"],
    ) -> Float[Tensor, "B A S D"]:
        """Denoise the block of every anchor in one pass; final-normed, ready for the head."""
        rows = torch.arange(taps.shape[1], device=taps.device)
        context = self.context_entries(taps, rows.expand(taps.shape[:2]))
        visible = self._visible(anchors, taps.shape[1], block_embeds.shape[2])
        attend = SharedAndOwn(visible, self.attention)
        slots = torch.arange(block_embeds.shape[2], device=taps.device)
        angles = self.rotary(anchors[..., None] + slots)
        x = block_embeds
        for layer, (keys, values) in zip(self.decoder_layers, context, strict=True):
            normed = layer.input_layernorm(x)
            attention = layer.self_attn
            attended = attend(
                attention.queries(normed, angles),
                keys,
                values,
                attention.keys(normed, angles),
                attention.values(normed),
            )
            x = layer.finish(x, attended)
        return self.norm(x)

    def _visible(
        self, anchors: Int[Tensor, "B A"], num_rows: int, num_slots: int
    ) -> Bool[Tensor, "B A T"] | Bool[Tensor, "B A S T"]:
        """Which context rows a block may see; by slot where a window slides."""
        rows = torch.arange(num_rows, device=anchors.device)
        before = rows < anchors[..., None]
        if self.config.sliding_window is None:
            return before
        slots = torch.arange(num_slots, device=anchors.device)
        ends = anchors[..., None] + slots - self.config.sliding_window
        return before[:, :, None] & (rows > ends[..., None])
