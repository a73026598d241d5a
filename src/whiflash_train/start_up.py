"""What a run tells before its first step: what is trained, where it comes from, what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.target import Target
from whiflash_train.distillation import rows_a_chunk

_FLOAT = 4  # bytes of a trained number: weights and what is computed from them are float32
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A direct part of a network. source: where its weights come from."""

    name: str
    source: str
    parameters: int
    trained: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSize:
    """What goes through at once, at most. anchors: of all rows, padding counted."""

    tokens: int
    anchors: int
    slots: int


def parts(net: nn.Module, sources: Mapping[str, str]) -> list[Part]:
    """Direct parts, lists of layers one by one; random where `sources` says nothing."""
    return [
        Part(
            name=name,
            source=sources.get(name, "random"),
            parameters=sum(p.numel() for p in child.parameters()),
            trained=any(p.requires_grad for p in child.parameters()),
        )
        for name, child in _children(net)
        if any(True for _ in child.parameters())
    ]


def _children(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{i}", layer) for i, layer in enumerate(child))
        else:
            yield name, child


def drafter_sources(net: nn.Module, init: str, num_target_layers: int) -> dict[str, str]:
    """Where `warm_start` takes each part from."""
    sources = {"lm_head": "target's rows of the vocabulary"}
    if init == "random":
        return sources
    sources |= {"norm": "target's final norm", "fc": "the highest tap, others small"}
    if isinstance(net, ARDrafter):
        norms = {f"fc_norm.{i}": "the usual size of its tap" for i in range(len(net.fc_norm))}
        return {**sources, **norms, "midlayer": f"target layer {num_target_layers - 1}"}
    names = [name for name, _ in _children(net) if name.startswith("layers.")]
    first = num_target_layers - len(names)
    sources["hidden_norm"] = f"input norm of target layer {first}"
    return sources | {name: f"target layer {first + i}" for i, name in enumerate(names)}


def training_memory(net: nn.Module, *, averaged: bool) -> dict[str, int]:
    """Bytes that training a network takes whatever the batch."""
    numel = sum(p.numel() for p in net.parameters())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    memory = {
        "parameters": numel * _FLOAT,
        "gradients": trained * _FLOAT,
        "optimiser states": 2 * trained * _FLOAT,
    }
    return memory | ({"averaged weights": numel * _FLOAT} if averaged else {})


def drafter_memory(
    target: Target, size: PassSize, *, num_layers: int, vocabulary: int, kept_tokens: int
) -> dict[str, int]:
    """Bytes of the frozen target and, roughly, of one pass. kept_tokens: of features=memory."""
    shape = target.drafter_shape
    row = (len(target.tap_layer_ids) + 1) * shape.hidden_size * target.dtype.itemsize
    positions = size.anchors * size.slots
    width = 10 * shape.hidden_size + 3 * shape.intermediate_size
    scored = min(rows_a_chunk(target.device, vocabulary), positions) * vocabulary
    memory = {
        "target's weights": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "target's rows of a pass": size.tokens * row,
        "activations of a pass, roughly": positions * num_layers * width * _FLOAT,
        "logits of a pass, roughly": 3 * scored * _FLOAT,
    }
    return memory | ({"feature cache": kept_tokens * row} if kept_tokens else {})


def show_start(
    console: Console,
    title: str,
    facts: Mapping[str, str],
    found: list[Part],
    memory: Mapping[str, int],
) -> None:
    table = Table(title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    console.print(_parts_table(found))
    console.print(_memory_table(memory))


def _parts_table(found: list[Part]) -> Table:
    table = Table("module", "starts as", "", title="network")
    table.add_column("parameters", justify="right")
    for part in found:
        state = "trained" if part.trained else "frozen"
        table.add_row(part.name, part.source, state, f"{part.parameters:,}")
    trained = sum(p.parameters for p in found if p.trained)
    table.add_row("all", "", f"{trained:,} trained", f"{sum(p.parameters for p in found):,}")
    return table


def _memory_table(memory: Mapping[str, int]) -> Table:
    table = Table("memory, estimated")
    table.add_column("MiB", justify="right")
    for name, size in memory.items():
        table.add_row(name, f"{size / _MIB:,.1f}")
    table.add_row("all", f"{sum(memory.values()) / _MIB:,.1f}")
    if torch.cuda.is_available():
        there = torch.cuda.get_device_properties(0).total_memory
        table.add_row("of the GPU's", f"{there / _MIB:,.1f}")
    return table
