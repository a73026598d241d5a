"""The target: a frozen Hugging Face causal language model, with its tapped layers captured."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from whiflash_infer.artifacts import json_hash
from whiflash_infer.cache import Span, TargetCache, make_span
from whiflash_infer.chat import Chat, ChatOptions, find_stop_ids
from whiflash_infer.errors import UserError
from whiflash_infer.masks import PassMask, causal
from whiflash_infer.nets.layers import attend_cached, plain_strides
from whiflash_infer.nets.shape import DrafterShape, check_tap_layer_ids, spread_tap_layer_ids
from whiflash_infer.types import TargetRows, TeacherRows

_MOST_SHAPES = 64  # of compiled passes; torch's own limit of 8 is for code that should be dynamic
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FOLDED = (
    "folded_heads"  # our attention among those of transformers, which read meaning into "flash"
)


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """What an artefact remembers of its target. `dtype` is told, but not required to match."""

    name: str
    config_hash: str
    weights: str
    tokenizer: str
    chat_template: str
    dtype: str

    def manifest(self) -> dict[str, str]:
        return asdict(self)

    def required(self) -> dict[str, str]:
        return {k: v for k, v in self.manifest().items() if k != "dtype"}


class TargetTables:
    """The target's frozen embedding and output head, which both drafters read."""

    def __init__(self, embedding: Tensor, head: Tensor, softcap: float | None) -> None:
        self.embedding = embedding
        self.head = head
        self.softcap = softcap

    def embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        return self.softcapped(F.linear(hidden.to(self.head.dtype), self.head))

    def softcapped(self, logits: Float[Tensor, "*N W"]) -> Float[Tensor, "*N W"]:
        """Monotone, so it never changes an argmax; distributions need it (Gemma 2)."""
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


class Target:
    """Wraps a loaded model. Layer taps and the head's input are captured by forward hooks.

    tap_layer_ids: the layers, or how many to spread over the target as z-lab does.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        name: str,
        tap_layer_ids: Sequence[int] | int,
        chat_options: ChatOptions | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.config: PreTrainedConfig = model.config.get_text_config()  # pyright: ignore
        generation = getattr(model, "generation_config", None)
        stop_ids = find_stop_ids(generation, self.config, tokenizer)
        self.chat = Chat(tokenizer, stop_ids, chat_options)
        _refuse_recurrent(model, self.config)
        self.num_layers = int(self.config.num_hidden_layers)
        self._windows = _windows(self.config)
        self._masks = {kind: PassMask(_fold_attention(model)) for kind in (_FULL, _SLIDING)}
        try:
            if isinstance(tap_layer_ids, int):
                tap_layer_ids = spread_tap_layer_ids(tap_layer_ids, self.num_layers)
            self.tap_layer_ids = check_tap_layer_ids(list(tap_layer_ids), self.num_layers)
        except ValueError as error:
            raise UserError(str(error)) from None
        self._decoder: nn.Module = model.get_decoder()  # pyright: ignore
        self._head: nn.Module = model.get_output_embeddings()  # pyright: ignore
        self._captured: dict[int | str, Tensor] = {}
        self._static_pass: Any = model
        self._last: Tensor | None = None  # of each row, the only token whose logits are wanted
        self._cache_argument = _cache_argument(model)
        for layer_id in self.tap_layer_ids:
            self.layer(layer_id).register_forward_hook(self._capture_output(layer_id))
        self._head.register_forward_pre_hook(self._enter_head)

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        name: str,
        tap_layer_ids: Sequence[int] | int,
        dtype: str = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
        chat_options: ChatOptions | None = None,
    ) -> Target:
        """Load a Hugging Face id or local folder. dtype: auto | float32 | bfloat16."""
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        options["dtype"] = resolve_dtype(dtype, device)
        model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
        return cls(
            model.to(device),
            tokenizer,
            name=name,
            tap_layer_ids=tap_layer_ids,
            chat_options=chat_options,
        )

    @property
    def tokenizer(self) -> Any:
        return self.chat.tokenizer

    @property
    def device(self) -> torch.device:
        return self._head.weight.device  # pyright: ignore

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype  # pyright: ignore

    @property
    def tables(self) -> TargetTables:
        embedding = self.model.get_input_embeddings().weight  # pyright: ignore
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return TargetTables(embedding, self._head.weight, softcap)  # pyright: ignore

    @property
    def final_norm(self) -> nn.Module:
        return self._decoder.norm  # pyright: ignore

    def layer(self, index: int) -> nn.Module:
        return self._decoder.layers[index]  # pyright: ignore

    @property
    def stop_ids(self) -> frozenset[int]:
        """Union of the stop tokens named by generation config, model config and tokenizer."""
        return self.chat.stop_ids

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def drafter_shape(self) -> DrafterShape:
        """Sizes of a drafter layer of the target's own width."""
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return DrafterShape(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_heads=c.num_attention_heads,
            num_kv_heads=c.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=float(c.rms_norm_eps),
            hidden_act="silu",
            vocab_size=c.vocab_size,
            max_position_embeddings=c.max_position_embeddings,
            target_hidden_size=c.hidden_size,
            rope_parameters=_rope_parameters(c),
        )

    @functools.cache  # noqa: B019 - a target lives as long as its process, and never changes
    def identity(self) -> TargetIdentity:
        volatile = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
        config = {k: v for k, v in self.config.to_dict().items() if k not in volatile}
        return TargetIdentity(
            name=self.name,
            config_hash=json_hash(config),
            weights=weights_fingerprint(sorted(self.model.state_dict().items())),
            **self.chat.identity(),
            dtype=str(self.dtype).removeprefix("torch."),
        )

    @property
    def required(self) -> dict[str, str]:
        return self.identity().required()

    def compile(self, *, backend: str = "inductor") -> None:
        """Compile passes over static spans, once for every width and number of rows met."""
        if self._static_pass is self.model:
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, _MOST_SHAPES)
            self._static_pass = torch.compile(self.model, dynamic=False, backend=backend)

    def new_cache(self) -> TargetCache:
        return TargetCache(self._windows)

    def prefill(self, prompts: Sequence[list[int]], cache: TargetCache, row: int) -> TargetRows:
        """Read the starts of texts into empty rows, from `row` on, in one pass.

        Shorter ones are padded behind, where no token of theirs looks. logits and hidden are those
        of each one's last token.
        """
        lengths = [len(ids) for ids in prompts]
        rows, width = range(row, row + len(prompts)), max(lengths)
        padded = [[*ids, *[0] * (width - len(ids))] for ids in prompts]
        cache.current = make_span(rows, [0] * len(prompts), width, self.device)
        self._last = torch.tensor(lengths, device=self.device) - 1
        try:
            positions = torch.arange(width, device=self.device).expand(len(prompts), -1)
            ids = torch.tensor(padded, device=self.device)
            read = self._forward(self.model, ids, cache, {"position_ids": positions})
        finally:
            self._last = None
        for index, length in zip(rows, lengths, strict=True):
            cache.kv.lengths[index] = length
        return read

    def read(
        self,
        ids: Int[Tensor, "B Q"],
        depths: Int[Tensor, "B Q"],
        block: Bool[Tensor, "B Q Q"] | None,
        cache: TargetCache,
        span: Span,
    ) -> TargetRows:
        """Read Q tokens of B rows behind what the cache holds of each, in one pass.

        Token q of row b goes to slot starts[b] + q of the span and has the position
        starts[b] + depths[b, q]. block: which of the Q tokens see which (the ancestors in a tree,
        itself included); None: each those before it. The lengths of the cache are left to the
        caller, who knows which of these tokens stay.
        """
        cache.current = span
        starts = torch.tensor(span.starts, device=self.device)[:, None]
        mask = None
        if not self._sees_all(span):
            block = causal(len(ids), span.width, self.device) if block is None else block
            mask = self._mask(span, block, depths, cache)
        options = {"attention_mask": mask, "position_ids": starts + depths}
        model = self._static_pass if span.is_static else self.model
        return self._forward(model, ids, cache, options)

    def _sees_all(self, span: Span) -> bool:
        """Whether every query sees every slot up to the span's end, so that it needs no mask."""
        same = span.width == 1 and len(set(span.starts)) == 1 and not span.is_static
        return same and not any(self._windows)

    def _mask(
        self,
        span: Span,
        block: Bool[Tensor, "B Q Q"],
        depths: Int[Tensor, "B Q"],
        cache: TargetCache,
    ) -> Tensor | dict[str, Tensor]:
        """As models take them: one for all layers, or by layer type where there are types."""
        masks = {}
        for kind, window in {(_SLIDING if window else _FULL, window) for window in self._windows}:
            near = block
            if window is not None:
                near = block & (depths[:, :, None] - depths[:, None] < window)
            mask = self._masks[kind].build(
                span.starts, near, span.end, self.dtype, window=window, depths=depths
            )
            masks[kind] = mask[..., cache.first_seen(window) :]
        typed = getattr(self.config, "layer_types", None)
        return masks if typed and _SLIDING in typed else next(iter(masks.values()))

    def _forward(
        self, model: Any, ids: Int[Tensor, "B Q"], cache: TargetCache, options: dict[str, Any]
    ) -> TargetRows:
        output = model(ids, use_cache=True, **options, **{self._cache_argument: cache})
        return TargetRows(output.logits, self._captured["head"], self._taps())

    def teach(self, ids: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> TeacherRows:
        """Taps and final hidden states of right-padded sequences, without the head."""
        output = self._decoder(ids, attention_mask=mask.long(), use_cache=False)
        return TeacherRows(self._taps(), output.last_hidden_state)

    def _taps(self) -> Float[Tensor, "B T E"]:
        return torch.cat([self._captured[i] for i in self.tap_layer_ids], dim=-1)

    def _capture_output(self, layer_id: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def _enter_head(self, _module: nn.Module, inputs: Any) -> tuple[Tensor]:
        """Keep what the head reads, and give it plain strides. Of the last rows of a batch, and of
        one text's, torch makes a batched product with a frozen head, copying the head for it."""
        hidden: Tensor = inputs[0]
        if self._last is not None:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), self._last][:, None]
        self._captured["head"] = plain_strides(hidden)
        return (self._captured["head"],)


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """auto: bfloat16 where the device multiplies it natively, float32 elsewhere."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if dtype not in named:
        raise UserError(f"dtype is {dtype!r}: it must be auto, float32 or bfloat16")
    return named[dtype]


def has_fast_bfloat16(device: str) -> bool:
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported()
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def resolve_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _cache_argument(model: nn.Module) -> str:
    """The forward argument that takes a cache; transformers 5.2x renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _fold_attention(model: nn.Module) -> int:
    """Give a model that runs on SDPA our attention over caches; query heads to a key head in it.

    Models that Hugging Face runs otherwise (a soft cap, sinks) keep theirs, which folds nothing: 1.
    """
    config = model.config.get_text_config()  # pyright: ignore
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # pyright: ignore - SDPA would drop the cap
    if config._attn_implementation == "sdpa":
        AttentionInterface.register(_FOLDED, _folded_attention)
        AttentionMaskInterface.register(_FOLDED, sdpa_mask)
        model.set_attn_implementation(_FOLDED)  # pyright: ignore
    if config._attn_implementation != _FOLDED:
        return 1
    return config.num_attention_heads // config.num_key_value_heads


def _folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Of passes over a cache, whose masks are a `PassMask`; any other pass is left to SDPA.

    A mask of ours has a row for every query and folded head, so its height tells it apart.
    """
    fold, width = query.shape[1] // key.shape[1], query.shape[2]
    ours = attention_mask is not None and attention_mask.shape[2] == width * fold
    if not ours and (attention_mask is not None or width > 1):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    return attend_cached(query, key, value, attention_mask, scale=scaling), None


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Of each layer, the positions it sees, itself included; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:  # all layers are alike (Mistral)
        return [window] * config.num_hidden_layers
    return [window if kind == _SLIDING else None for kind in kinds]


def _refuse_recurrent(model: nn.Module, config: PreTrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or [_FULL])
    odd = sorted(kinds - {_FULL, _SLIDING})
    if odd or getattr(model, "_is_stateful", False):
        raise UserError(
            f"{config.model_type}: {f'layers of type {odd}' if odd else 'its layers'} keep a "
            "recurrent state that cannot be rolled back; only attention targets are supported"
        )


def _rope_parameters(config: PreTrainedConfig) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    if "full_attention" in rope:  # one set a layer type (Gemma 3)
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    share = rope.pop("partial_rotary_factor", None) or 1.0
    if share != 1.0:
        raise UserError(
            f"{config.model_type}: partial_rotary_factor is {share}, but drafters turn all "
            "channels of a head, and engines would not"
        )
    return rope


def weights_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of names, shapes and 64 spread values of each tensor, rounded to bfloat16.

    The rounding makes the same weights loaded in float32 and in bfloat16 agree. tensors: those of
    a model's `state_dict`, sorted by name.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.flatten()
        picked = flat[:: max(1, flat.numel() // 64)][:64].to(torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(picked.cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
