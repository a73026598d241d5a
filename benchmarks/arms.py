"""Every arm against plain decoding, one prompt at a time: `python benchmarks/arms.py`.

Greedy answers to the same prompts, prompt by prompt, in turns: Hugging Face `generate` with its
cache and a model of its own, our plain arm, both chains, and trees of two sizes each. Rates are
tokens by the wall time of whole answers, prompt pass included; ratios are pooled over prompts, with
a bootstrap interval for which prompts are drawn in pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
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
from rich.table import Table
from transformers import AutoModelForCausalLM

from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.statistics import bootstrap_ratio
from whiflash_infer.types import AR, DIFFUSION, PLAIN

HUGGING_FACE = "hugging face"
SMALLER, LARGER = (15, 12), (27, 24)  # nodes of the AR tree and of the block drafter's
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answered:
    """rounds: 0 where there are none to count."""

    ids: list[int]
    seconds: float
    rounds: int


def main() -> None:
    options = decode_arguments(
        __doc__, quick={"num_prompts": 1, "new_tokens": 8}, num_prompts=8, new_tokens=128
    )
    bench = load_bench(options, num_prompts=options.num_prompts)
    answers = in_turns(contestants(bench, options.new_tokens), bench.prompts)
    results = {name: cell(found, answers) for name, found in answers.items()}
    show(results)
    save_unless_quick("arms", options, bench, results)


def contestants(bench: Bench, new_tokens: int) -> dict[str, Callable[[list[int]], Answered]]:
    untouched = AutoModelForCausalLM.from_pretrained(target_folder(), dtype=bench.target.dtype)
    decoders = {arm: bench.decoder(arm) for arm in (PLAIN, AR, DIFFUSION)}
    for sizes in (SMALLER, LARGER):
        trees = bench.trees(*sizes)
        decoders |= {f"{n} {a.max_nodes}": bench.decoder(n, trees) for n, a in trees.items()}
    theirs = partial(hf_answer, bench, untouched.eval(), new_tokens)
    wanted = GenerationOptions(max_new_tokens=new_tokens)
    ours = {name: partial(our_answer, decoder, wanted) for name, decoder in decoders.items()}
    return {HUGGING_FACE: theirs, **ours}


def our_answer(decoder: RoutedDecoder, wanted: GenerationOptions, prompt: list[int]) -> Answered:
    timed = answer(decoder, prompt, wanted)
    return Answered(timed.ids, timed.seconds, len(timed.generation.rounds))


@torch.inference_mode()
def hf_answer(bench: Bench, model: Any, new_tokens: int, prompt: list[int]) -> Answered:
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=bench.target.chat.pad_id,
    )
    return Answered(output[0, len(prompt) :].tolist(), time.perf_counter() - started, 0)


def cell(found: Sequence[Answered], answers: dict[str, list[Answered]]) -> dict[str, Any]:
    """tau: tokens a round, the prompt pass and its token left out."""
    own, plain = throughput(found), throughput(answers[PLAIN])
    rounds = sum(one.rounds for one in found)
    by_prompt = (own[:, 0] / own[:, 1]) / (plain[:, 0] / plain[:, 1])
    same = [one.ids == other.ids for one, other in zip(found, answers[PLAIN], strict=True)]
    return {
        "tokens": int(own[:, 0].sum()),
        "tokens_per_s": pooled(own),
        "speedup": pooled(own) / pooled(plain),
        "speedup_ci": bootstrap_ratio(own, plain, resamples=RESAMPLES, seed=0),
        "speedup_prompts": [float(q) for q in np.quantile(by_prompt, [0.0, 0.25, 0.5, 0.75, 1.0])],
        "to_hugging_face": pooled(own) / pooled(throughput(answers[HUGGING_FACE])),
        "tau": (own[:, 0].sum() - len(found)) / rounds if rounds else None,
        "identical_to_plain": sum(same) / len(same),
    }


def throughput(found: Sequence[Answered]) -> np.ndarray:
    """[prompts, 2]: tokens and seconds."""
    return np.array([(len(one.ids), one.seconds) for one in found], dtype=float)


def pooled(table: np.ndarray) -> float:
    return float(table[:, 0].sum() / table[:, 1].sum())


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="one prompt at a time, greedy")
    for column in ("arm", "tokens/s", "/ plain", "95 %", "/ HF", "tau", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, found in results.items():
        low, high = found["speedup_ci"]
        table.add_row(
            name,
            f"{found['tokens_per_s']:.1f}",
            f"{found['speedup']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{found['to_hugging_face']:.2f}",
            "" if found["tau"] is None else f"{found['tau']:.2f}",
            f"{found['identical_to_plain']:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
