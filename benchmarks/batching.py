"""Tokens a second of texts that are decoded together: `python benchmarks/batching.py`.

The same prompts, 1, 4 and 16 at a time (`max_rows`), by every arm, greedy, in turns. Answers have
all the same length, so that a batch stays full to its end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from common import console, rate_of, summary, take_turns
from decoding import Bench, decode_arguments, load_bench, save_unless_quick
from rich.table import Table

from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.types import PLAIN

BATCHES = (1, 4, 16)


def main() -> None:
    options = decode_arguments(
        __doc__,
        quick={"num_prompts": 2, "new_tokens": 4, "repeats": 1, "warm_up_tokens": 2},
        num_prompts=16,
        new_tokens=24,
        repeats=2,
        warm_up_tokens=2,
    )
    bench = load_bench(options, num_prompts=options.num_prompts)
    rates = take_turns(contestants(bench, options), repeats=options.repeats)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for arm in (PLAIN, *bench.arms):
        own = {str(batch): rates[f"{arm} {batch}"] for batch in BATCHES}
        results[arm] = summary(own, baseline=str(BATCHES[0]))
        for batch, found in results[arm].items():
            plain = summary({arm: own[batch], PLAIN: rates[f"{PLAIN} {batch}"]}, baseline=PLAIN)
            found["to_plain"] = plain[arm]["ratio"]
    show(results)
    save_unless_quick("batching", options, bench, results)


def contestants(bench: Bench, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """A decoder for each arm, whose storage is that of its largest batch."""
    decoders = {arm: bench.decoder(arm) for arm in (PLAIN, *bench.arms)}
    return {
        f"{arm} {batch}": Contestant(decoder, bench.prompts, batch, options)
        for batch in BATCHES
        for arm, decoder in decoders.items()
    }


class Contestant:
    """Tokens a second of all prompts; the first turn, which is not counted, is shorter."""

    def __init__(
        self,
        decoder: RoutedDecoder,
        prompts: list[list[int]],
        batch: int,
        options: argparse.Namespace,
    ) -> None:
        self._answer = partial(answer_all, decoder, prompts, batch)
        self._lengths = iter([options.warm_up_tokens])
        self._length = options.new_tokens

    def __call__(self) -> float:
        length = next(self._lengths, self._length)
        return rate_of(partial(self._answer, length))()


def answer_all(
    decoder: RoutedDecoder, prompts: list[list[int]], batch: int, new_tokens: int
) -> int:
    options = GenerationOptions(max_new_tokens=new_tokens, stop_ids=frozenset())
    return sum(len(g.output_ids) for g in decoder.generate(prompts, options, max_rows=batch))


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    table = Table(title="tokens/s, and to plain decoding in the same batch")
    for column in ("arm", *(f"batch {batch}" for batch in BATCHES), "16 to 1"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm, by_batch in results.items():
        cells = [f"{c['median']:.1f} ({c['to_plain']:.2f})" for c in by_batch.values()]
        table.add_row(arm, *cells, f"{by_batch[str(BATCHES[-1])]['ratio']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
