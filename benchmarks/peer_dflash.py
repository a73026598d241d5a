"""Our decode engine against the `dflash` package's own loop: `python benchmarks/peer_dflash.py`.

The package decodes in a process of its own environment (see `peer_exchange.py`; --venv says where
it is kept), with the same target, the same block drafter, which it reads from our folder as it is,
and the same threads, type, prompts and number of tokens. Greedy, prompt by prompt, in turns: only
one of the two processes works at a time. First in float32, where both texts should be the same,
then in bfloat16. Seconds are the wall time of whole answers, measured inside each process. Also
compared are our tree over the same block, and plain decoding of theirs, a block of one token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import console
from decoding import (
    Bench,
    answer,
    decode_arguments,
    in_turns,
    load_bench,
    save_unless_quick,
    target_folder,
)
from peer_exchange import prepare
from rich.table import Table

from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.statistics import bootstrap_ratio
from whiflash_infer.types import DIFFUSION, DIFFUSION_TREE

OURS, THEIRS, THEIR_PLAIN = "whiflash, block", "dflash, block", "dflash, plain"
OUR_TREE, NODES = "whiflash, tree over the block", 12
DTYPES = ("float32", "bfloat16")
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answered:
    ids: list[int]
    seconds: float
    rounds: int


def main() -> None:
    default = Path(tempfile.gettempdir()) / "whiflash_peers"
    options = decode_arguments(
        __doc__,
        quick={"num_prompts": 1, "new_tokens": 16},
        num_prompts=5,
        new_tokens=128,
        venv=str(default),
    )
    python = prepare(Path(options.venv))
    results: dict[str, Any] = {}
    for dtype in DTYPES:
        bench = load_bench(options, num_prompts=options.num_prompts, dtype=dtype)
        with peer(python, options, bench, dtype) as child:
            answers = in_turns(contestants(bench, child, options.new_tokens), bench.prompts)
            results[dtype] = {name: cell(found, answers) for name, found in answers.items()}
            results["versions"] = child.versions
        show(f"one prompt at a time, greedy, {dtype}", results[dtype])
    settings = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "venv"})
    save_unless_quick("peer_dflash", settings, None, results)


class Peer:
    """The package in its process: a line of JSON in, a line of JSON out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.versions: dict[str, str] = self._read()

    def __call__(self, prompt: list[int], *, new_tokens: int, block_size: int | None) -> Answered:
        asked = {"prompt": prompt, "new_tokens": new_tokens, "block_size": block_size}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return Answered(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the peer's process ended; what it said stands above")
        return json.loads(line)


@contextmanager
def peer(python: Path, options: argparse.Namespace, bench: Bench, dtype: str) -> Iterator[Peer]:
    child = Path(__file__).with_name("peer_dflash_child.py")
    asked = {
        "target": target_folder(),
        "drafter": str(Path(options.artifacts) / "diffusion_drafter"),
        "dtype": dtype,
        "threads": options.threads,
        "stop_ids": sorted(bench.target.stop_ids),
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with subprocess.Popen(
        [python, child, json.dumps(asked)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        yield Peer(process)
        assert process.stdin is not None
        process.stdin.close()  # which ends it


def contestants(
    bench: Bench, child: Peer, new_tokens: int
) -> dict[str, Callable[[list[int]], Answered]]:
    wanted = GenerationOptions(max_new_tokens=new_tokens)
    trees = bench.trees(NODES, NODES)
    return {
        OURS: partial(our_answer, bench.decoder(DIFFUSION), wanted),
        THEIRS: partial(child, new_tokens=new_tokens, block_size=None),
        OUR_TREE: partial(our_answer, bench.decoder(DIFFUSION_TREE, trees), wanted),
        THEIR_PLAIN: partial(child, new_tokens=new_tokens, block_size=1),
    }


def our_answer(decoder: RoutedDecoder, wanted: GenerationOptions, prompt: list[int]) -> Answered:
    timed = answer(decoder, prompt, wanted)
    return Answered(timed.ids, timed.seconds, len(timed.generation.rounds))


def cell(found: Sequence[Answered], answers: dict[str, list[Answered]]) -> dict[str, Any]:
    """to_theirs: rate to the package's loop, pooled; by prompt its range."""
    theirs = answers[THEIRS]
    own, other = throughput(found), throughput(theirs)
    by_prompt = (own[:, 0] / own[:, 1]) / (other[:, 0] / other[:, 1])
    rounds = sum(one.rounds for one in found)
    pairs = list(zip(found, theirs, strict=True))
    return {
        "tokens": int(own[:, 0].sum()),
        "tokens_per_s": pooled(own),
        "to_theirs": pooled(own) / pooled(other),
        "to_theirs_ci": bootstrap_ratio(own, other, resamples=RESAMPLES, seed=0),
        "to_theirs_range": [float(by_prompt.min()), float(by_prompt.max())],
        "tau": (own[:, 0].sum() - len(found)) / rounds if rounds else None,
        "round_ms": 1e3 * own[:, 1].sum() / rounds if rounds else None,
        "same_text": sum(one.ids == two.ids for one, two in pairs) / len(pairs),
        "same_tokens_first": [agreeing(one.ids, two.ids) for one, two in pairs],
    }


def agreeing(ids: Sequence[int], others: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = zip(ids, others, strict=False)
    unlike = (i for i, (a, b) in enumerate(pairs) if a != b)
    return next(unlike, min(len(ids), len(others)))


def throughput(found: Sequence[Answered]) -> np.ndarray:
    """[prompts, 2]: tokens and seconds."""
    return np.array([(len(one.ids), one.seconds) for one in found], dtype=float)


def pooled(table: np.ndarray) -> float:
    return float(table[:, 0].sum() / table[:, 1].sum())


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in ("", "tokens/s", "/ dflash", "95 %", "tau", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in results.items():
        low, high = found["to_theirs_ci"]
        table.add_row(
            name,
            f"{found['tokens_per_s']:.1f}",
            f"{found['to_theirs']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{found['tau']:.2f}",
            f"{found['same_text']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
