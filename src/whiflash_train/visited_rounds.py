"""Rounds that are really decoded, with the seconds of their phases, beside what costs predict.

A folder:

manifest.json     for which target, drafters and conversations; policy
rounds.parquet    a row a round
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from whiflash_infer.artifacts import new_artifact
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.types import PHASES, PLAIN, Generation, Round
from whiflash_train.progress import Advance

VISITED = "rounds.parquet"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a conversation up to its first answer, and that answer in the text."""

    conversation: str
    category: str
    split: str
    ids: list[int]
    answer: list[int]


def prompts_of(rows: Mapping[str, Dataset], limit: int) -> list[Prompt]:
    """The first `limit` conversations, held-out ones first.

    Raises: UserError when there is none.
    """
    found: list[Prompt] = []
    for split in ("validation", "router", "train"):
        part = rows.get(split)
        if part is not None:
            wanted = range(min(limit - len(found), len(part)))
            found += [_prompt(part[i], split) for i in wanted]
    if not found:
        raise UserError("rounds.limits leaves no conversation to decode")
    return found


def _prompt(row: Mapping[str, Any], split: str) -> Prompt:
    mask = np.array(row["loss_mask"], dtype=bool)
    start = int(mask.argmax())
    rest = np.flatnonzero(~mask[start:])
    end = start + int(rest[0]) if len(rest) else len(mask)
    ids = list(row["input_ids"])
    return Prompt(row["id"], row["category"], split, ids[:start], ids[start:end])


def decode_prompts(
    decoder: RoutedDecoder, prompts: Sequence[Prompt], advance: Advance
) -> Iterator[dict[str, Any]]:
    """Rows of the table. The first prompt is decoded twice: first passes are slower."""
    for index, prompt in enumerate([prompts[0], *prompts]):
        options = GenerationOptions(max_new_tokens=max(1, len(prompt.answer)))
        result = decoder.answer(prompt.ids, options)
        if index:
            yield from _rows(prompt, result)
            advance(1, produced=len(result.rounds))


def _rows(prompt: Prompt, result: Generation) -> Iterator[dict[str, Any]]:
    said = result.output_ids.tolist()
    for number, done in enumerate(result.rounds):
        so_far = done.position + 1 - len(prompt.ids)
        yield {
            "conversation": prompt.conversation,
            "category": prompt.category,
            "split": prompt.split,
            "round": number,
            "on_text": said[:so_far] == prompt.answer[:so_far],
            **_facts(done),
        }


def _facts(done: Round) -> dict[str, Any]:
    names = ("position", "arm", "num_draft", "num_nodes", "accepted", "committed", "lag")
    more = ("switched", "expected", "price")
    facts = {name: getattr(done, name) for name in (*names, *more)}
    return facts | {f"{phase}_s": done.seconds[phase] for phase in PHASES}


def save_visited(
    path: Path, rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any]
) -> pa.Table:
    """Raises: UserError when no answer needed a round."""
    table = pa.Table.from_pylist([dict(row) for row in rows])
    if not len(table):
        raise UserError("no answer is long enough for a round: decode other conversations")
    with new_artifact(path, manifest) as folder:
        pq.write_table(table, folder / VISITED)
    return table


def predicted_seconds(table: pa.Table, costs: CostModel) -> Float[np.ndarray, " N"]:
    """What the cost model says of each round, decoded alone; NaN for what it does not price."""
    names = [PLAIN, *costs.max_draft]
    prices = costs.table(names)
    arms = table["arm"].to_pylist()
    num_draft = table["num_draft"].to_numpy()
    known = np.array([arm in names for arm in arms]) & (num_draft < prices.fixed.shape[1])
    row = np.flatnonzero(known)
    arm = np.array([names.index(arms[i]) for i in row], dtype=np.int64)
    lags = np.zeros((len(row), len(names)), dtype=np.int64)
    lags[np.arange(len(row)), arm] = table["lag"].to_numpy()[row]
    seconds = prices.seconds(table["position"].to_numpy()[row], lags)
    found = np.full(len(arms), np.nan)
    found[row] = seconds[np.arange(len(row)), arm, num_draft[row]]
    return np.where(np.isfinite(found), found, np.nan)


def measured_seconds(table: pa.Table) -> Float[np.ndarray, " N"]:
    return np.stack([table[f"{phase}_s"].to_numpy() for phase in PHASES]).sum(0)


def show_visited(table: pa.Table, costs: CostModel | None, console: Console) -> None:
    """By arm: rounds, tau, milliseconds a round, and where costs are known what they predict."""
    arms, committed = np.array(table["arm"].to_pylist()), table["committed"].to_numpy()
    measured = measured_seconds(table)
    predicted = None if costs is None else predicted_seconds(table, costs)
    shown = Table(title="visited rounds")
    shown.add_column("arm")
    for name in ("rounds", "tau", "ms a round"):
        shown.add_column(name, justify="right")
    if predicted is not None:
        shown.add_column("predicted", justify="right")
        shown.add_column("median error", justify="right")
    for arm in sorted(set(arms.tolist())):
        mine = arms == arm
        cells = [f"{mine.sum():,}", f"{committed[mine].mean():.3f}"]
        cells.append(f"{1e3 * measured[mine].mean():.2f}")
        if predicted is not None:
            cells += _prediction(predicted[mine], measured[mine])
        shown.add_row(arm, *cells)
    console.print(shown)


def _prediction(predicted: Float[np.ndarray, " N"], measured: Float[np.ndarray, " N"]) -> list[str]:
    """Mean milliseconds, and the median of how far single rounds are off."""
    priced = np.isfinite(predicted)
    if not priced.any():
        return ["not priced", ""]
    error = np.median(np.abs(predicted[priced] / measured[priced] - 1.0))
    return [f"{1e3 * predicted[priced].mean():.2f}", f"{error:.1%}"]
