"""Training-time attention: every anchor's queries over shared keys and over keys of its own.

    keys          k_0 ... k_{T-1}        own keys of anchor 0, 1, ... A-1 (U each)
    visible to    as `visible` says      that anchor's S queries alone

One softmax over both. Three backends compute the same:

    eager   shared and own keys scored apart: A * S * (T + U) scores, a cacheful at a time
    sdpa    one fused call over all T + A * U keys, most of them masked
    flex    the same keys in one compiled kernel that skips what is masked (GPUs)

A query that sees nothing attends to nothing: its output and its gradients are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, no_type_check

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from whiflash_infer.nets.layers import compute_dtype, widened

Backend = Literal["eager", "sdpa", "flex"]
BACKENDS: tuple[Backend, ...] = ("eager", "sdpa", "flex")

_HIDDEN = torch.finfo(torch.float32).min
_CPU_SCORES, _GPU_SCORES = 2**18, 2**26  # of one part; 1 MiB stays in a core's cache


@dataclass(frozen=True, slots=True)
class Choice:
    """reason: why this one, for the line that tells of it."""

    backend: Backend
    reason: str


def choose_backend(device: torch.device, requested: str, *, head_dim: int) -> Choice:
    """The backend asked for; of `auto` the fastest that works on the device.

    Raises: ValueError for an unknown name, or for flex where its gradients cannot be had.
    """
    if requested not in ("auto", *BACKENDS):
        raise ValueError(f"{requested!r} is none of auto, {', '.join(BACKENDS)}")
    if requested in ("eager", "sdpa"):
        return Choice(cast("Backend", requested), "as asked")
    if device.type == "cpu":
        if requested == "flex":
            raise ValueError("flex trains on GPUs alone: take auto, eager or sdpa")
        return Choice("eager", "on a CPU")
    problem = _flex_problem(device, head_dim)
    if problem is None:
        return Choice("flex", "as asked" if requested == "flex" else "it works on this device")
    if requested == "flex":
        raise ValueError(f"flex does not work here ({problem}): take auto or sdpa")
    return Choice("sdpa", f"flex does not work here: {problem}")


def default_backend(device: torch.device) -> Backend:
    """Where nobody chose: nothing that compiles."""
    return "eager" if device.type == "cpu" else "sdpa"


@functools.cache
def _flex_problem(device: torch.device, head_dim: int) -> str | None:
    """Why the compiled kernel does not train here; some GPUs lack the memory it shares."""
    try:
        rows = torch.zeros(1, 1, 128, head_dim, device=device, requires_grad=True)
        mask = create_block_mask(_all_seen, None, None, 128, 128, device=str(device))
        output = _compiled_flex()(rows, rows, rows, block_mask=mask)
        cast("Tensor", output).sum().backward()
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


@no_type_check
def _all_seen(b, h, query, key):
    return query >= 0


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


class SharedAndOwn:
    """Attention through one mask, which several layers or steps may use.

    visible: the shared keys that an anchor's queries see; with an S where they see different ones.
    backend: None for the device's default.
    """

    def __init__(
        self, visible: Bool[Tensor, "B A T"] | Bool[Tensor, "B A S T"], backend: Backend | None
    ) -> None:
        self._visible = visible if visible.ndim == 4 else visible[:, :, None]
        self._backend: Backend = backend or default_backend(visible.device)
        self._sizes, self._mask = (0, 0), None  # of the last call

    def __call__(
        self,
        queries: Float[Tensor, "B A S H d"],
        shared_keys: Float[Tensor, "B T G d"],
        shared_values: Float[Tensor, "B T G d"],
        own_keys: Float[Tensor, "B A U G d"],
        own_values: Float[Tensor, "B A U G d"],
    ) -> Float[Tensor, "B A S H*d"]:
        """U may be 0. Scores and softmax of float32 at least, products in autocast's type."""
        sizes = queries.shape[2], own_keys.shape[2]
        if sizes != self._sizes:
            self._sizes, self._mask = sizes, _MASKS[self._backend](self._visible, *sizes)
        tensors = (queries, shared_keys, shared_values, own_keys, own_values)
        tensors = tuple(tensor.to(compute_dtype(queries)) for tensor in tensors)
        with torch.autocast(queries.device.type, enabled=False):
            attended = _ATTENTIONS[self._backend](*tensors, self._mask)
        if own_keys.shape[2] == 0:
            attended = attended.masked_fill(~self._visible.any(-1)[..., None, None], 0.0)
        return attended.flatten(3)


# --- eager -----------------------------------------------------------------------------------


def _hidden(visible: Bool[Tensor, "B A _S T"], num_queries: int, num_own: int) -> Tensor:
    return ~visible


def _eager(
    queries: Float[Tensor, "B A S H d"],
    shared_keys: Float[Tensor, "B T G d"],
    shared_values: Float[Tensor, "B T G d"],
    own_keys: Float[Tensor, "B A U G d"],
    own_values: Float[Tensor, "B A U G d"],
    hidden: Bool[Tensor, "B A _S T"],
) -> Float[Tensor, "B A S H d"]:
    """Query heads that share a key head become rows beside each other: N = B * G, M = S * H / G.

    Inside a graph that is being compiled, whole products stand in for the loop over parts.
    """
    if torch.compiler.is_compiling():
        return _whole(queries, shared_keys, shared_values, own_keys, own_values, hidden)
    num_groups, scale = shared_keys.shape[2], queries.shape[-1] ** -0.5
    grouped = queries.unflatten(3, (num_groups, -1)).permute(0, 3, 1, 2, 4, 5)
    folded = grouped.flatten(0, 1).flatten(2, 3).contiguous()
    shared = (shared_keys * scale, shared_values)  # there are fewer keys than queries to scale
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in shared)
    own = [x.permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (own_keys * scale, own_values)]
    attended = cast("Tensor", _TwoPieces.apply(folded, keys, values, *own, hidden))
    unfolded = attended.unflatten(2, (queries.shape[2], -1)).unflatten(0, (-1, num_groups))
    return unfolded.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)


def _whole(
    queries: Float[Tensor, "B A S H d"],
    shared_keys: Float[Tensor, "B T G d"],
    shared_values: Float[Tensor, "B T G d"],
    own_keys: Float[Tensor, "B A U G d"],
    own_values: Float[Tensor, "B A U G d"],
    hidden: Bool[Tensor, "B A _S T"],
) -> Float[Tensor, "B A S H d"]:
    grouped = queries.unflatten(3, (shared_keys.shape[2], -1)) * queries.shape[-1] ** -0.5
    shared = widened(torch.einsum("basghd,btgd->baghst", grouped, shared_keys))
    shared = shared.masked_fill(hidden[:, :, None, None], _HIDDEN)
    own = widened(torch.einsum("basghd,baugd->baghsu", grouped, own_keys))
    weights = torch.cat([shared, own], dim=-1).softmax(-1).to(own_values.dtype)
    from_shared, from_own = weights.split([shared.shape[-1], own.shape[-1]], dim=-1)
    attended = torch.einsum("baghst,btgd->basghd", from_shared, shared_values)
    attended = attended + torch.einsum("baghsu,baugd->basghd", from_own, own_values)
    return attended.flatten(3, 4)


class _TwoPieces(torch.autograd.Function):
    """Weights of the shared keys are computed again for the backward pass, so none are kept.

    Both passes go part by part through what fits in a cache, after FlashAttention
    (arXiv 2205.14135). In letters: s = q k, w = softmax(s), o = w v; then
    ds = w * (do v - <do, o>), dq = ds k, dk = ds q, dv = w do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Float[Tensor, "N A M d"],
        keys: Float[Tensor, "N T d"],
        values: Float[Tensor, "N T d"],
        own_keys: Float[Tensor, "N A U d"],
        own_values: Float[Tensor, "N A U d"],
        hidden: Bool[Tensor, "B A _S T"],
    ) -> Float[Tensor, "N A M d"]:
        own_scores = widened(queries @ own_keys.mT)
        own_weights = own_scores.to(queries.dtype, copy=True)
        attended = torch.empty_like(queries)
        num_shared = keys.shape[1]
        for part, mask in _parts(queries, num_shared, hidden):
            weights = _weights(queries[part], keys[part], own_scores[part], mask)
            own_weights[part] = weights[..., num_shared:]
            attended[part] = own_weights[part] @ own_values[part]
            shared = weights[..., :num_shared].to(values.dtype)
            attended[part].flatten(1, 2).baddbmm_(shared.flatten(1, 2), values[part])
        kept = (queries, keys, values, own_keys, own_values, hidden)
        ctx.save_for_backward(*kept, own_scores, own_weights, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, hidden, *rest = ctx.saved_tensors
        own_scores, own_weights, attended = rest
        dtype, num_shared, grad = queries.dtype, keys.shape[1], grads[0].contiguous()
        by_own = torch.empty_like(own_weights)
        by_queries, by_keys, by_values = (torch.empty_like(x) for x in (queries, keys, values))
        for part, mask in _parts(queries, num_shared, hidden):
            common = (grad[part] * attended[part]).sum(-1, keepdim=True, dtype=own_scores.dtype)
            by_own[part] = (grad[part] @ own_values[part].mT - common) * own_weights[part]
            by_queries[part] = by_own[part] @ own_keys[part]
            weights = _weights(queries[part], keys[part], own_scores[part], mask)
            weights = weights[..., :num_shared].flatten(1, 2)
            pull, rows = grad[part].flatten(1, 2), queries[part].flatten(1, 2)
            slopes = widened(torch.bmm(pull, values[part].mT)).sub_(common.flatten(1, 2))
            slopes = slopes.mul_(weights).to(dtype)
            by_values[part] = torch.bmm(weights.to(dtype).mT, pull)
            by_keys[part] = torch.bmm(slopes.mT, rows)
            by_queries[part].flatten(1, 2).baddbmm_(slopes, keys[part])
        return by_queries, by_keys, by_values, by_own.mT @ queries, own_weights.mT @ grad, None


def _parts(
    queries: Float[Tensor, "N A M d"], num_shared: int, hidden: Bool[Tensor, "B A _S T"]
) -> Iterator[tuple[slice, Bool[Tensor, "n A _S T"]]]:
    """Slices of N whose scores fit in a cache, each with its mask."""
    most = _CPU_SCORES if queries.device.type == "cpu" else _GPU_SCORES
    num_parts, num_groups = len(queries), len(queries) // max(1, len(hidden))
    step = max(1, most // max(1, queries[0, ..., 0].numel() * num_shared))
    owner = torch.arange(num_parts, device=hidden.device) // max(1, num_groups)
    for start in range(0, num_parts, step):
        part = slice(start, min(start + step, num_parts))
        yield part, hidden[owner[part]]


def _weights(
    queries: Float[Tensor, "n A M d"],
    keys: Float[Tensor, "n T d"],
    own_scores: Float[Tensor, "n A M U"],
    hidden: Bool[Tensor, "n A _S T"],
) -> Float[Tensor, "n A M T+U"]:
    num_shared = keys.shape[1]
    scores = own_scores.new_empty(*queries.shape[:3], num_shared + own_scores.shape[3])
    scores[..., num_shared:] = own_scores
    shared, rows = scores.flatten(1, 2)[..., :num_shared], queries.flatten(1, 2)
    if scores.dtype == queries.dtype:
        torch.bmm(rows, keys.mT, out=shared)
    else:
        shared.copy_(torch.bmm(rows, keys.mT))
    by_query = scores.unflatten(2, (hidden.shape[2], -1))[..., :num_shared]
    by_query.masked_fill_(hidden[:, :, :, None], _HIDDEN)
    return scores.softmax(-1)


# --- sdpa and flex: all keys beside each other --------------------------------------------------


def _dense_mask(
    visible: Bool[Tensor, "B A _S T"], num_queries: int, num_own: int
) -> Bool[Tensor, "B 1 _Q _K"]:
    num_anchors = visible.shape[1]
    shared = visible.expand(-1, -1, num_queries, -1).flatten(1, 2)
    if num_own == 0:  # kernels may answer NaN to a query that sees nothing
        shared = shared | ~shared.any(-1, keepdim=True)
    anchors = torch.arange(num_anchors, device=visible.device)
    own = anchors.repeat_interleave(num_queries)[:, None] == anchors.repeat_interleave(num_own)
    return torch.cat([shared, own.expand(len(visible), -1, -1)], dim=-1)[:, None]


@torch.compiler.disable
def _block_mask(visible: Bool[Tensor, "B A _S T"], num_queries: int, num_own: int) -> BlockMask:
    """All it reads are tensors: a number would be compiled in, and every new length once more."""
    device, num_shared = visible.device, visible.shape[3]
    anchors = torch.arange(visible.shape[1], device=device)
    of_query = anchors.repeat_interleave(num_queries)
    of_key = torch.cat([of_query.new_full((num_shared,), -1), anchors.repeat_interleave(num_own)])
    shared = visible.expand(-1, -1, num_queries, -1).flatten(1, 2)
    column = torch.arange(len(of_key), device=device).clamp(max=num_shared - 1)

    @no_type_check
    def seen(b, h, query, key):
        is_own = of_key[key] == of_query[query]
        return is_own | ((of_key[key] < 0) & shared[b, query, column[key]])

    return create_block_mask(
        seen,
        B=len(visible),
        H=None,
        Q_LEN=len(of_query),
        KV_LEN=len(of_key),
        device=str(device),
        _compile=device.type != "cpu",
    )


def _sdpa(
    queries: Float[Tensor, "B A S H d"],
    shared_keys: Float[Tensor, "B T G d"],
    shared_values: Float[Tensor, "B T G d"],
    own_keys: Float[Tensor, "B A U G d"],
    own_values: Float[Tensor, "B A U G d"],
    mask: Bool[Tensor, "B 1 _Q _K"],
) -> Float[Tensor, "B A S H d"]:
    """Keys are repeated for every query head: fused kernels that take a mask do not group."""
    repeats = queries.shape[3] // shared_keys.shape[2]
    keys = _joined(shared_keys, own_keys).repeat_interleave(repeats, 1)
    values = _joined(shared_values, own_values).repeat_interleave(repeats, 1)
    rows = queries.flatten(1, 2).transpose(1, 2)
    attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask)
    return attended.transpose(1, 2).unflatten(1, queries.shape[1:3])


def _flex(
    queries: Float[Tensor, "B A S H d"],
    shared_keys: Float[Tensor, "B T G d"],
    shared_values: Float[Tensor, "B T G d"],
    own_keys: Float[Tensor, "B A U G d"],
    own_values: Float[Tensor, "B A U G d"],
    mask: BlockMask,
) -> Float[Tensor, "B A S H d"]:
    kernel = flex_attention if queries.device.type == "cpu" else _compiled_flex()
    rows = queries.flatten(1, 2).transpose(1, 2)
    keys, values = _joined(shared_keys, own_keys), _joined(shared_values, own_values)
    attended = cast("Tensor", kernel(rows, keys, values, block_mask=mask, enable_gqa=True))
    return attended.transpose(1, 2).unflatten(1, queries.shape[1:3])


def _joined(
    shared: Float[Tensor, "B T G d"], own: Float[Tensor, "B A U G d"]
) -> Float[Tensor, "B G T+A*U d"]:
    return torch.cat([shared, own.flatten(1, 2)], dim=1).transpose(1, 2)


_MASKS: dict[Backend, Callable[..., Any]] = {
    "eager": _hidden,
    "sdpa": _dense_mask,
    "flex": cast("Callable[..., Any]", _block_mask),
}
_ATTENTIONS: dict[Backend, Callable[..., Tensor]] = {"eager": _eager, "sdpa": _sdpa, "flex": _flex}
