"""What a round costs beside its model calls: `python benchmarks/engine_overhead.py`.

Answers of one prompt at a time by every arm, in turns, with a clock at the doors of the networks:
the target's forward pass, and each drafter's projections, layers and output head. What the rounds
took beyond that is overhead: masks, caches' lengths, gathering, choosing, trees, the host. A second
decoder, whose networks have no clocks, tells what the clocks themselves cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from common import console
from decoding import Bench, answer, decode_arguments, in_turns, load_bench, save_unless_quick
from rich.table import Table

import whiflash_infer.drafters.diffusion as diffusion_module
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.layers import head_product
from whiflash_infer.options import GenerationOptions
from whiflash_infer.types import AR, DIFFUSION, PLAIN

LIMIT = 0.06
AR_DOORS = ("fuse", "entry", "step_cached", "logits")
DIFFUSION_DOORS = ("context_entries", "block_cached")


class Clock:
    """Seconds inside functions that it has been put around; one within another counts once."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self._inside = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1
                self._inside = False

        return timed


@dataclass(frozen=True, slots=True)
class Split:
    """Of one answer's rounds."""

    rounds: int
    seconds: float
    in_models: float
    calls: int

    @property
    def overhead(self) -> float:
        return 1.0 - self.in_models / self.seconds


def main() -> None:
    options = decode_arguments(
        __doc__, quick={"num_prompts": 1, "new_tokens": 8}, num_prompts=6, new_tokens=96
    )
    bench = load_bench(options, num_prompts=options.num_prompts)
    wanted = GenerationOptions(max_new_tokens=options.new_tokens)
    decoders = {arm: bench.decoder(arm) for arm in (PLAIN, *bench.arms)}
    contestants: dict[str, Callable[[list[int]], Split]] = {}
    for arm, decoder in decoders.items():
        contestants[arm] = partial(clocked, bench, decoder, wanted)
        contestants[f"{arm}, no clocks"] = partial(unclocked, decoder, wanted)
    splits = in_turns(contestants, bench.prompts)
    results = {arm: cell(splits[arm], splits[f"{arm}, no clocks"]) for arm in decoders}
    show(results)
    save_unless_quick("engine_overhead", options, bench, {"limit": LIMIT, "arms": results})


def clocked(
    bench: Bench, decoder: RoutedDecoder, wanted: GenerationOptions, prompt: list[int]
) -> Split:
    clock = Clock()
    with clocks(bench, clock):
        pieces = iter(decoder.stream(prompt, wanted))
        result = next(pieces).generation  # the prompt pass is no round
        clock.seconds, clock.calls = 0.0, 0
        for piece in pieces:
            result = piece.generation
    assert result is not None
    return Split(len(result.rounds), result.decode_seconds, clock.seconds, clock.calls)


def unclocked(decoder: RoutedDecoder, wanted: GenerationOptions, prompt: list[int]) -> Split:
    result = answer(decoder, prompt, wanted).generation
    return Split(len(result.rounds), result.decode_seconds, 0.0, 0)


@contextmanager
def clocks(bench: Bench, clock: Clock) -> Iterator[None]:
    """Around all doors; gone afterwards."""
    doors: list[tuple[Any, str]] = [(bench.target.model, "forward")]
    for arm, names in ((AR, AR_DOORS), (DIFFUSION, DIFFUSION_DOORS)):
        drafter: Any = bench.arms[arm].drafter
        doors += [(drafter.net, name) for name in names]
        doors += [(drafter.tables, name) for name in ("embed", "logits")]
    for owner, name in doors:
        setattr(owner, name, clock.around(getattr(owner, name)))
    # The block drafter's head is the target's, so no network of its own has a door for it.
    diffusion_module.__dict__["head_product"] = clock.around(head_product)
    try:
        yield
    finally:
        diffusion_module.__dict__["head_product"] = head_product
        for owner, name in doors:
            delattr(owner, name)


def cell(splits: list[Split], without: list[Split]) -> dict[str, float]:
    """Milliseconds are of a round, pooled; the share's quartiles are of prompts."""
    rounds = sum(split.rounds for split in splits)
    seconds = sum(split.seconds for split in splits)
    in_models = sum(split.in_models for split in splits)
    low, middle, high = np.quantile([split.overhead for split in splits], [0.25, 0.5, 0.75])
    slowed = [
        (with_clocks.seconds / with_clocks.rounds) / (bare.seconds / bare.rounds)
        for with_clocks, bare in zip(splits, without, strict=True)
    ]
    return {
        "rounds": rounds,
        "round_ms": 1e3 * seconds / rounds,
        "models_ms": 1e3 * in_models / rounds,
        "overhead_ms": 1e3 * (seconds - in_models) / rounds,
        "overhead": float(middle),
        "overhead_low": float(low),
        "overhead_high": float(high),
        "calls_per_round": sum(split.calls for split in splits) / rounds,
        "with_clocks": float(np.median(slowed)),
    }


def show(results: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"overhead of a round, batch 1 (limit {LIMIT:.0%})")
    for column in ("arm", "round ms", "models", "rest", "share", "quartiles", "clocked"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm, found in results.items():
        table.add_row(
            arm,
            f"{found['round_ms']:.2f}",
            f"{found['models_ms']:.2f}",
            f"{found['overhead_ms']:.2f}",
            f"{found['overhead']:.1%}",
            f"{found['overhead_low']:.1%} - {found['overhead_high']:.1%}",
            f"{found['with_clocks']:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
