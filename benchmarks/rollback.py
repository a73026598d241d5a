"""What keeping and dropping drafts costs as texts grow: `python benchmarks/rollback.py`.

Behind a context of 128 to 4,096 tokens, with the target's shapes and bfloat16 entries:

    write     all layers take the entries of a verification pass
    chain     some drafts of a chain stay: tokens and features are written, lengths move
    tree      so do some nodes of a tree: their entries move to the slots behind the anchor's

beside a `DynamicCache` of transformers that does the same: `update` writes, `crop` keeps the first
drafts of a chain, and for a tree every layer is cropped and gets the path's entries behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from common import console
from decoding import TAPS, decode_arguments, save_unless_quick
from jaxtyping import Int
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from whiflash_infer.cache import TargetCache, make_span
from whiflash_infer.sequence import Texts
from whiflash_infer.trees import DraftTree, chain
from whiflash_infer.types import TargetRows
from whiflash_infer.verification import Outcome, keep_path

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
LAYERS, HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 30, 3, 64, 576, 49152  # SmolLM2-135M
DRAFTS, NODES, KEPT = 7, 24, 3
WORKS = ("write", "chain", "tree")
CPU = torch.device("cpu")
DTYPE = torch.bfloat16


def main() -> None:
    options = decode_arguments(
        __doc__, quick={"repeats": 3, "longest": 256}, repeats=200, longest=CONTEXTS[-1]
    )
    contexts = [context for context in CONTEXTS if context <= options.longest]
    seconds = measure(contexts, options.repeats)
    results = {work: cell(work, contexts, seconds) for work in WORKS}
    show(results)
    found = {"drafts": DRAFTS, "nodes": NODES, "kept": KEPT, "microseconds": results}
    save_unless_quick("rollback", options, None, found)


Key = tuple[str, str, int]  # work, who does it, context


@torch.inference_mode()
def measure(contexts: Sequence[int], repeats: int) -> dict[Key, list[float]]:
    """In turns, all of them in every round of turns."""
    works: dict[Key, Callable[[], float]] = {}
    for context in contexts:
        torch.manual_seed(0)
        ours, theirs = Ours.filled(context), Theirs.filled(context)
        for work in WORKS:
            works[work, "whiflash", context] = partial(ours.timed, work)
            works[work, "DynamicCache", context] = partial(theirs.timed, work)
    seconds: dict[Key, list[float]] = {key: [] for key in works}
    for repeat in track(range(repeats + 2), description="measuring", console=console):
        for key, work in works.items():
            taken = work()
            if repeat >= 2:
                seconds[key].append(taken)
    return seconds


def draft_tree() -> DraftTree:
    """KEPT nodes of the tree, each the last child of the one before, are a path; the others hang
    on the anchor."""
    ids = torch.arange(NODES)[None]
    parents, depths = torch.full_like(ids, -1), torch.ones_like(ids)
    path = kept_nodes()[0].tolist()
    for depth, (parent, node) in enumerate(zip([-1, *path], path, strict=False), start=1):
        parents[0, node], depths[0, node] = parent, depth
    return DraftTree(ids, parents, depths, torch.tensor([NODES]), is_chain=False)


def kept_nodes() -> Int[Tensor, "1 D"]:
    return torch.linspace(2, NODES - 2, KEPT).long()[None]


def new_entries(width: int) -> Tensor:
    return torch.randn(2, 1, HEADS, width, HEAD_DIM).to(DTYPE)


def outcome_of(path: Int[Tensor, "1 D"]) -> Outcome:
    return Outcome(
        accepted=torch.tensor([KEPT]),
        path=path,
        tokens=torch.arange(path.shape[1] + 1)[None],
        sources=F.pad(path + 1, (1, 0)),
        finite=torch.tensor([True]),
    )


@dataclass(frozen=True, slots=True)
class Ours:
    """One text with its target cache, at a length that every piece of work leaves as it was."""

    context: int
    texts: Texts
    cache: TargetCache

    @classmethod
    def filled(cls, context: int) -> Ours:
        texts, cache = Texts(CPU, keep_taps=True), TargetCache([None] * LAYERS)
        taps = torch.randn(context, len(TAPS) * HIDDEN).to(DTYPE)
        for storage in (texts, cache.kv):
            storage.reserve(1, context + 64)
        texts.begin(0, torch.randint(VOCABULARY, (context,)), taps, torch.tensor(0))
        span = make_span([0], [0], context, CPU)
        for layer in range(LAYERS):
            keys, values = new_entries(context)
            cache.kv.write(layer, keys, values, span)
        cache.kv.lengths[0] = context
        return cls(context, texts, cache)

    def timed(self, work: str) -> float:
        return {"write": self._write, "chain": self._chain, "tree": self._tree}[work]()

    def _write(self) -> float:
        keys, values = new_entries(DRAFTS + 1)
        started = time.perf_counter()
        span = make_span([0], [self.context], DRAFTS + 1, CPU)
        for layer in range(LAYERS):
            self.cache.kv.write(layer, keys, values, span)
        return time.perf_counter() - started

    def _chain(self) -> float:
        return self._keep(chain(torch.arange(DRAFTS)[None]), torch.arange(DRAFTS)[None])

    def _tree(self) -> float:
        self.cache.current = make_span([0], [self.context], NODES + 1, CPU, static=True)
        return self._keep(draft_tree(), kept_nodes())

    def _keep(self, tree: DraftTree, path: Int[Tensor, "1 D"]) -> float:
        width = tree.num_nodes + 1
        rows = TargetRows(
            logits=torch.zeros(1, width, 0),
            hidden=torch.zeros(1, width, 0),
            taps=torch.randn(1, width, len(TAPS) * HIDDEN).to(DTYPE),
        )
        outcome = outcome_of(path)
        started = time.perf_counter()
        keep_path(self.texts, self.cache, tree, rows, outcome)
        self.texts.commit(0, KEPT + 1)
        self.cache.kv.lengths[0] = self.texts.lengths[0] - 1
        taken = time.perf_counter() - started
        self.texts.lengths[0], self.cache.kv.lengths[0] = self.context + 1, self.context
        return taken


@dataclass(slots=True)
class Theirs:
    """A DynamicCache of as many entries."""

    context: int
    cache: DynamicCache

    @classmethod
    def filled(cls, context: int) -> Theirs:
        return cls(context, _dynamic_cache(context))

    def timed(self, work: str) -> float:
        if work == "write":
            taken = self._write(DRAFTS + 1)
        elif work == "chain":
            self._write(DRAFTS + 1)
            taken = self._chain()
        else:
            self._write(NODES + 1)
            taken = self._tree()
        self._crop_to(self.context)
        return taken

    def _write(self, width: int) -> float:
        keys, values = new_entries(width)
        started = time.perf_counter()
        for layer in range(LAYERS):
            self.cache.update(keys, values, layer)
        return time.perf_counter() - started

    def _chain(self) -> float:
        started = time.perf_counter()
        self._crop_to(self.context + 1 + KEPT)
        return time.perf_counter() - started

    def _tree(self) -> float:
        kept = torch.cat([torch.zeros(1, dtype=torch.long), kept_nodes()[0] + 1])
        slots = self.context + kept
        started = time.perf_counter()
        moved = [(layer.keys[:, :, slots], layer.values[:, :, slots]) for layer in self._layers()]
        self._crop_to(self.context)
        for layer, (keys, values) in enumerate(moved):
            self.cache.update(keys, values, layer)
        return time.perf_counter() - started

    def _crop_to(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())

    def _layers(self) -> Sequence[_Filled]:
        return self.cache.layers  # pyright: ignore - filled by now


class _Filled:
    """A layer of a DynamicCache that holds entries."""

    keys: Tensor
    values: Tensor


def _dynamic_cache(context: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(LAYERS):
        keys, values = new_entries(context)
        cache.update(keys, values, layer)
    return cache


def cell(
    work: str, contexts: Sequence[int], seconds: dict[Key, list[float]]
) -> dict[str, dict[str, float]]:
    """growth: the longest context's median over the shortest's."""
    found = {}
    for who in ("whiflash", "DynamicCache"):
        quartiles = {
            context: 1e6 * np.quantile(seconds[work, who, context], [0.25, 0.5, 0.75])
            for context in contexts
        }
        found[who] = {str(context): float(row[1]) for context, row in quartiles.items()}
        found[who]["widest_quartiles"] = max(
            float((row[2] - row[0]) / row[1]) for row in quartiles.values()
        )
        found[who]["growth"] = found[who][str(contexts[-1])] / found[who][str(contexts[0])]
    return found


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="microseconds of one round's work, by context")
    columns = [name for name in results["chain"]["whiflash"] if name != "widest_quartiles"]
    for column in ("", "", *columns):
        table.add_column(column, justify="right", no_wrap=True)
    for work, rows in results.items():
        for who, row in rows.items():
            times = [f"{row[column]:,.0f}" for column in columns if column != "growth"]
            table.add_row(work, who, *times, f"{row['growth']:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
