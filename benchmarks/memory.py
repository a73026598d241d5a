"""Memory of decoding against the sum of its parts: `python benchmarks/memory.py`.

Parts are what has to be there: parameters, the target's cache, features and tokens of the text, and
each drafter's cache. A process of its own for every set of drafters loads target and drafters, and
answers one prompt; what it grows by (resident pages, after imports) is set against the sum of the
parts: once loaded, and at its peak during the answer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import console
from decoding import Bench, decode_arguments, load_bench, save_unless_quick
from rich.table import Table

from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import RandomPolicy
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE

SETS = {
    "no drafter": (),
    "ar": (AR, AR_TREE),
    "diffusion": (DIFFUSION, DIFFUSION_TREE),
    "both": (AR, AR_TREE, DIFFUSION, DIFFUSION_TREE),
}
MIB = 1 << 20


def main() -> None:
    options = decode_arguments(
        __doc__, quick={"prompt_tokens": 32, "new_tokens": 8}, prompt_tokens=1024, new_tokens=128
    )
    results = {}
    for name, arms in SETS.items():
        results[name] = in_new_process(arms, options)
        console.print(f"measured: {name}", style="dim")
    shares = second_shares(results)
    show(results, shares)
    save_unless_quick("memory", options, None, {"sets": results, "second_drafter": shares})


def in_new_process(arms: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(measure, arms, options).result()


def measure(arms: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """MiB of the parts, and of what the process grew by."""
    torch.set_num_threads(options.threads)
    warm_up()
    before = settled()
    bench = load_bench(options, num_prompts=1, only=arms)
    loaded = settled()
    restart_peak()
    decoder = answered(bench, options)
    peak = kib("VmHWM")
    parts = {name: size / MIB for name, size in parts_of(bench, decoder).items()}
    total = sum(parts.values())
    return {
        "parts_mib": parts,
        "sum_mib": total,
        "loaded_mib": (loaded - before) / 1024,
        "peak_mib": (peak - before) / 1024,
        "peak_to_sum": (peak - before) / 1024 / total,
    }


def warm_up() -> None:
    """Kernels of the products that follow, which are nobody's part."""
    rows = torch.ones(64, 64, dtype=torch.bfloat16)
    torch.nn.functional.linear(rows, rows)
    torch.nn.functional.linear(rows.float(), rows.float())


def answered(bench: Bench, options: argparse.Namespace) -> RoutedDecoder:
    """All arms take part; the prompt is words of the file's first prompt over and over."""
    decoder = RoutedDecoder(bench.target, bench.arms, RandomPolicy(0))
    (prompt,) = bench.prompts
    repeated = (prompt * (options.prompt_tokens // len(prompt) + 1))[: options.prompt_tokens]
    wanted = GenerationOptions(max_new_tokens=options.new_tokens, stop_ids=frozenset())
    decoder.answer(repeated, wanted)
    return decoder


def parts_of(bench: Bench, decoder: RoutedDecoder) -> dict[str, int]:
    """Bytes. Networks share the target's embedding and head, which count once."""
    caches = decoder._loop.rows.num_bytes
    parts = {"target": unique_bytes(bench.target.model), "target's cache": caches["target"]}
    parts["text and features"] = caches["texts"]
    for arm in (AR, DIFFUSION):
        if arm in bench.arms:
            drafter: Any = bench.arms[arm].drafter
            parts[arm] = unique_bytes(drafter.net)
            parts[f"{arm}'s cache"] = drafter.kv.num_bytes
    return parts


def unique_bytes(net: torch.nn.Module) -> int:
    """Of parameters and buffers; tied ones once."""
    tensors = [*net.parameters(), *net.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def settled() -> int:
    """KiB resident, once everything that is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return kib("VmRSS")


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def second_shares(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What a drafter adds where the other one is there already, of everything."""
    both = results["both"]
    shares = {}
    for second, first in ((DIFFUSION, AR), (AR, DIFFUSION)):
        alone = results[first]
        shares[second] = {
            "of_parts": (both["sum_mib"] - alone["sum_mib"]) / both["sum_mib"],
            "of_peak": (both["peak_mib"] - alone["peak_mib"]) / both["peak_mib"],
        }
    return shares


def show(
    results: Mapping[str, Mapping[str, Any]], shares: Mapping[str, Mapping[str, float]]
) -> None:
    table = Table(title="MiB that decoding one text takes")
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    for part in results["both"]["parts_mib"]:
        sizes = [found["parts_mib"].get(part) for found in results.values()]
        table.add_row(part, *["" if size is None else f"{size:,.1f}" for size in sizes])
    table.add_section()
    for row in ("sum_mib", "loaded_mib", "peak_mib", "peak_to_sum"):
        decimals = 2 if row == "peak_to_sum" else 1
        cells = [f"{found[row]:,.{decimals}f}" for found in results.values()]
        table.add_row(row.removesuffix("_mib").replace("_", " "), *cells)
    console.print(table)
    for second, share in shares.items():
        console.print(
            f"{second} as the second drafter: {share['of_parts']:.1%} of the parts, "
            f"{share['of_peak']:.1%} of the peak"
        )


if __name__ == "__main__":
    main()
