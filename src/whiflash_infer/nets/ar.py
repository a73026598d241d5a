"""The autoregressive drafter: EAGLE-3 (arXiv 2503.01840), one decoder layer over target features.

Options make it EAGLE-3.1 (arXiv 2605.09992: `fc_norm` and `norm_output`) or give its layer Qwen3's
norms of queries and keys (`qk_norm`).

    row i of the drafter   hidden fed           token fed   position   predicts
    step 0                 g_i = fc(taps_i)     x_{i+1}     i          x_{i+2}
    step k                 its own output       x_{i+1+k}   i + k      x_{i+2+k}

An anchor x_n starts its chain at row i = n - 1. Step 0 sees the step-0 keys of rows 0..i; step k
also sees the keys of its own earlier steps, and of no other anchor's. "Own output" is the state
that the step before hands over: the layer's output, behind the final norm if `norm_output`.
Step-0 keys and values depend on (x_{i+1}, g_i) alone, so rows that start no chain need neither
attention, MLP nor head.
Attribute names are the tensor names of the published format (`LlamaForCausalLMEagle3`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from whiflash_infer.nets.attention import Backend, SharedAndOwn
from whiflash_infer.nets.layers import GatedMLP, RMSNorm, Rotary, attend_cached, rotate
from whiflash_infer.nets.shape import DrafterShape


@dataclass(frozen=True, kw_only=True)
class ARDrafterConfig:
    """fc_norm: norm every tap on its own before they are fused.

    norm_output: a step hands over its output behind the final norm, as the head reads it; without
    it the head alone sees the norm. qk_norm: norm queries and keys per head, before rotation.
    """

    shape: DrafterShape
    draft_vocab_size: int
    tap_layer_ids: tuple[int, ...]
    fc_norm: bool
    norm_output: bool
    qk_norm: bool

    def __post_init__(self) -> None:
        if not 0 < self.draft_vocab_size <= self.shape.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.shape.vocab_size}"
            )


class _Attention(nn.Module):
    def __init__(self, shape: DrafterShape, *, qk_norm: bool) -> None:
        super().__init__()
        wide, heads, groups = 2 * shape.hidden_size, shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(wide, heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, groups * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, groups * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.head_dim = shape.head_dim

    def queries(self, x: Float[Tensor, "*N wide"]) -> Float[Tensor, "*N H d"]:
        return self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))

    def keys(self, x: Float[Tensor, "*N wide"]) -> Float[Tensor, "*N G d"]:
        return self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))

    def values(self, x: Float[Tensor, "*N wide"]) -> Float[Tensor, "*N G d"]:
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class _Layer(nn.Module):
    def __init__(self, shape: DrafterShape, *, qk_norm: bool) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(shape, qk_norm=qk_norm)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, shape.hidden_act)

    def join(
        self, embeds: Float[Tensor, "*N D"], hidden: Float[Tensor, "*N D"]
    ) -> Float[Tensor, "*N wide"]:
        """What attention reads: the embedding half first, each half normed on its own."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def finish(
        self, hidden: Float[Tensor, "*N D"], attended: Float[Tensor, "*N Hd"]
    ) -> Float[Tensor, "*N D"]:
        """The residual is the hidden state as fed, not normed; the embedding has none."""
        residual = hidden + self.self_attn.o_proj(attended)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class ARDrafter(nn.Module):
    """attention: the backend of training passes; None for the device's default."""

    d2t: Tensor
    t2d: Tensor
    attention: Backend | None = None

    def __init__(self, config: ARDrafterConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.rotary = Rotary(
            head_dim=shape.head_dim,
            rope_parameters=shape.rope_parameters,
            max_position_embeddings=shape.max_position_embeddings,
        )
        num_taps, tap_size = len(config.tap_layer_ids), shape.target_hidden_size
        self.fc_norm = nn.ModuleList(
            RMSNorm(tap_size, shape.rms_norm_eps) for _ in range(num_taps if config.fc_norm else 0)
        )
        self.fc = nn.Linear(num_taps * tap_size, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape, qk_norm=config.qk_norm)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)
        size = config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(shape.vocab_size) < size)

    def set_vocabulary(self, token_ids: Int[Tensor, " W"]) -> None:
        """Draft only these target tokens. `d2t[j]` is the offset token_ids[j] - j; ids ascend."""
        token_ids = token_ids.sort().values
        if len(token_ids) != self.config.draft_vocab_size or token_ids.unique().shape != (
            token_ids.shape
        ):
            raise ValueError(
                f"expected {self.config.draft_vocab_size} distinct ids, got {len(token_ids)} of "
                f"which {token_ids.unique().numel()} are distinct"
            )
        self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
        self.t2d.zero_()[token_ids] = True

    def vocabulary(self) -> Int[Tensor, " W"]:
        """Target token of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, taps: Float[Tensor, "*N E"]) -> Float[Tensor, "*N D"]:
        if self.config.fc_norm:
            parts = taps.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            taps = torch.cat(normed, dim=-1)
        return self.fc(taps)

    def hand_over(self, output: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The layer's output as the next step is fed it."""
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, state: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """What the head reads of a state that a step hands over: normed once, never twice."""
        return state if self.config.norm_output else self.norm(state)

    def logits(self, state: Float[Tensor, "*N D"]) -> Float[Tensor, "*N W"]:
        return self.lm_head(self.head_input(state))

    def entry(
        self,
        embeds: Float[Tensor, "*N D"],
        hidden: Float[Tensor, "*N D"],
        positions: Int[Tensor, "*N"],
    ) -> tuple[Float[Tensor, "*N wide"], Float[Tensor, "*N G d"], Float[Tensor, "*N G d"]]:
        """A row's attention input, keys and values; all that a caught-up row needs."""
        joined = self.midlayer.join(embeds, hidden)
        keys = rotate(self.midlayer.self_attn.keys(joined), self.rotary(positions))
        return joined, keys, self.midlayer.self_attn.values(joined)

    def query(
        self, joined: Float[Tensor, "*N wide"], positions: Int[Tensor, "*N"]
    ) -> Float[Tensor, "*N H d"]:
        return rotate(self.midlayer.self_attn.queries(joined), self.rotary(positions))

    def step_cached(
        self,
        joined: Float[Tensor, "B Q wide"],
        hidden: Float[Tensor, "B Q D"],
        positions: Int[Tensor, "B Q"],
        keys: Float[Tensor, "B G T d"],
        values: Float[Tensor, "B G T d"],
        mask: Float[Tensor, "B 1 QF T"] | None,
    ) -> Float[Tensor, "B Q D"]:
        """The states that rows hand over; the cache already holds their own entries."""
        queries = self.query(joined, positions).transpose(1, 2)
        attended = attend_cached(queries, keys, values, mask).flatten(2)
        return self.hand_over(self.midlayer.finish(hidden, attended))

    def unroll(
        self,
        embeds: Float[Tensor, "B T D"],
        taps: Float[Tensor, "B T E"],
        anchors: Int[Tensor, "B A"],
        *,
        num_steps: int,
        widths: Sequence[int] | None = None,
    ) -> Iterator[Float[Tensor, "B _A D"]]:
        """Training-time test: yield the state that each step hands over at every anchor.

        Anchors are positions n >= 1 of anchor tokens. Tokens are the sequence's own; where a step
        runs past the end it is fed the last token, and the caller masks it. Gradients flow through
        all steps. widths: how many anchors of each row, the first ones, go on to each step; it
        never rises.
        """
        fused = self.fuse(taps[:, :-1])
        rows = torch.arange(fused.shape[1], device=fused.device)
        joined, keys, values = self.entry(embeds[:, 1:], fused, rows.expand(fused.shape[:2]))
        start = anchors - 1
        visible: Bool[Tensor, "B A T"] = rows <= start[..., None]
        attend = SharedAndOwn(visible, self.attention)
        hidden = _take(fused, start)
        step_input, own_keys, own_values = _take(joined, start), keys[:, :0], values[:, :0]
        own_keys = own_keys[:, None].expand(-1, anchors.shape[1], -1, -1, -1)
        own_values = own_values[:, None].expand(-1, anchors.shape[1], -1, -1, -1)
        for step, width in enumerate(widths or [anchors.shape[1]] * num_steps):
            if width < hidden.shape[1]:
                attend = SharedAndOwn(visible[:, :width], self.attention)
                anchors, start, hidden = anchors[:, :width], start[:, :width], hidden[:, :width]
                step_input = step_input[:, :width]
                own_keys, own_values = own_keys[:, :width], own_values[:, :width]
            if step > 0:
                token = (anchors + step).clamp(max=embeds.shape[1] - 1)
                step_input, new_keys, new_values = self.entry(
                    _take(embeds, token), hidden, start + step
                )
                own_keys = torch.cat([own_keys, new_keys[:, :, None]], dim=2)
                own_values = torch.cat([own_values, new_values[:, :, None]], dim=2)
            queries = self.query(step_input, start + step)[:, :, None]
            attended = attend(queries, keys, values, own_keys, own_values)
            hidden = self.hand_over(self.midlayer.finish(hidden, attended[:, :, 0]))
            yield hidden


def _take(rows: Float[Tensor, "B T X"], index: Int[Tensor, "B A"]) -> Float[Tensor, "B A X"]:
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
