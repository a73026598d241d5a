"""Labelling all positions against decoding rounds at them: `python benchmarks/labelling.py`.

Dense labelling is one pass of the target over finished texts, the router's features, and the labels
of every arm at every position of the answers. The same could be logged by decoding a round of each
arm at each position; what that takes is reckoned from decoding the same texts with each arm alone,
as the seconds of its mean round. The texts are the target's own answers to the prompts, or those
of a conversations folder (`--conversations`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import console, take_turns
from decoding import Bench, decode_arguments, in_turns, load_bench, save_unless_quick
from rich.table import Table

from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import chains
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.features import router_features
from whiflash_infer.routing.labels import label_arms
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation
from whiflash_train.data.conversations import load_conversations

LIMIT = 20.0
PAD = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """A text, of which the first `prompt` tokens are no answer."""

    ids: list[int]
    prompt: int

    @property
    def num_positions(self) -> int:
        """Anchors behind which something follows."""
        return len(self.ids) - self.prompt - 1


def main() -> None:
    options = decode_arguments(
        __doc__,
        quick={"num_prompts": 2, "new_tokens": 24, "repeats": 1},
        num_prompts=16,
        new_tokens=128,
        repeats=5,
        batch_size=8,
        conversations="",
    )
    bench = load_bench(options, num_prompts=options.num_prompts)
    texts = read_texts(bench, options.conversations, options.num_prompts, options.new_tokens)
    rounds = decoded_rounds(bench, texts)
    sets: dict[str, dict[str, Arm]] = {"all arms": bench.arms, "chains": chains(bench.arms)}
    work = {
        name: labelled_rate(partial(label_texts, bench.target, arms, texts, options.batch_size))
        for name, arms in sets.items()
    }
    rates = take_turns(work, repeats=options.repeats)
    results = {
        name: cell(rates[name], [rounds[arm] for arm in arms]) for name, arms in sets.items()
    }
    show(results, rounds)
    positions = sum(text.num_positions for text in texts)
    found = {"limit": LIMIT, "positions": positions, "round_ms": rounds, "labelling": results}
    save_unless_quick("labelling", options, bench, found)


def read_texts(bench: Bench, folder: str, count: int, new_tokens: int) -> list[Answered]:
    if not folder:
        decoder, wanted = bench.decoder(PLAIN), GenerationOptions(max_new_tokens=new_tokens)
        answers = [decoder.answer(prompt, wanted).output_ids.tolist() for prompt in bench.prompts]
        texts = [Answered(p + a, len(p)) for p, a in zip(bench.prompts, answers, strict=True)]
        return [text for text in texts if text.num_positions > 0]
    try:
        rows, _ = load_conversations(Path(folder), "validation", bench.target.identity())
    except UserError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    picked = rows[: min(count, len(rows))]
    texts = []
    for ids, mask in zip(picked["input_ids"], picked["loss_mask"], strict=True):
        prompt = mask.index(True)
        texts.append(Answered(ids[: prompt + new_tokens], prompt))
    return texts


def decoded_rounds(bench: Bench, texts: Sequence[Answered]) -> dict[str, float]:
    """Milliseconds of each arm's mean round over these texts, decoded again as far as they go."""

    def decode(arm: str) -> Callable[[list[int]], Generation]:
        decoder = bench.decoder(arm)
        return lambda ids: decoder.answer(ids, lengths[tuple(ids)])

    lengths = {
        tuple(text.ids[: text.prompt]): GenerationOptions(
            max_new_tokens=len(text.ids) - text.prompt, stop_ids=frozenset()
        )
        for text in texts
    }
    answers = in_turns({arm: decode(arm) for arm in bench.arms}, [list(ids) for ids in lengths])
    return {
        arm: 1e3 * sum(g.decode_seconds for g in found) / sum(len(g.rounds) for g in found)
        for arm, found in answers.items()
    }


def labelled_rate(work: Callable[[], int]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        positions = work()
        return positions / (time.perf_counter() - started)

    return timed


@torch.inference_mode()
def label_texts(
    target: Target, arms: Mapping[str, Arm], texts: Sequence[Answered], batch_size: int
) -> int:
    """Everything that is written of a position, but for the writing. Returns their number."""
    in_order = sorted(texts, key=lambda text: len(text.ids))
    for start in range(0, len(in_order), batch_size):
        part = in_order[start : start + batch_size]
        lengths = torch.tensor([len(text.ids) for text in part])
        width = max(text.num_positions for text in part)
        ids = torch.full((len(part), int(lengths.max())), PAD)
        for row, text in enumerate(part):
            ids[row, : len(text.ids)] = torch.tensor(text.ids)
        rows = target.teach(ids, torch.arange(ids.shape[1]) < lengths[:, None])
        anchors = torch.tensor([text.prompt for text in part])[:, None] + torch.arange(width)
        anchors = anchors.minimum(lengths[:, None] - 1)  # padded with the last
        for row, text in enumerate(part):
            positions = anchors[row, : text.num_positions]
            hidden = rows.hidden[row, positions - 1]
            router_features(target.tables.logits(hidden), hidden, positions)
        label_arms(arms, ids, lengths, rows, anchors)
    return sum(text.num_positions for text in texts)


def cell(rates: Sequence[float], round_ms: Sequence[float]) -> dict[str, float]:
    """ratio: how much longer rounds at the same positions take."""
    low, middle, high = 1e3 / np.quantile(rates, [0.75, 0.5, 0.25])
    decoding = sum(round_ms)
    return {
        "position_ms": float(middle),
        "position_ms_low": float(low),
        "position_ms_high": float(high),
        "decoding_ms": decoding,
        "ratio": float(decoding / middle),
        "ratio_low": float(decoding / high),
        "ratio_high": float(decoding / low),
    }


def show(results: Mapping[str, Mapping[str, float]], rounds: Mapping[str, float]) -> None:
    table = Table(title=f"labelling a position (at least {LIMIT:.0f} times as fast as decoding)")
    for column in ("", "labelling ms", "decoding ms", "ratio", "quartiles"):
        table.add_column(column, justify="right")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['position_ms']:.2f}",
            f"{found['decoding_ms']:.1f}",
            f"{found['ratio']:.1f}",
            f"{found['ratio_low']:.1f} - {found['ratio_high']:.1f}",
        )
    console.print(table)
    console.print("a round: " + ", ".join(f"{arm} {ms:.1f} ms" for arm, ms in rounds.items()))


if __name__ == "__main__":
    main()
