"""The files of an evaluation: metrics.json, answers.parquet, rounds.parquet, report.html, plots."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whiflash_infer.artifacts import json_hash, write_json, write_whole
from whiflash_infer.benchmark import Question
from whiflash_infer.engine import decode_rounds
from whiflash_infer.metrics import Answer, Note, by_policy, is_identical
from whiflash_infer.report import write_report
from whiflash_infer.target import Target
from whiflash_infer.types import PHASES, PLAIN, Round
from whiflash_train.evaluation.plots import as_svgs, draw_all, write_pngs

ROUND_COLUMNS = {
    "policy": pa.string(),
    "prompt_id": pa.string(),
    "category": pa.string(),
    "turn": pa.int64(),
    "round": pa.int64(),
    "position": pa.int64(),
    "arm": pa.string(),
    "num_draft": pa.int64(),
    "num_nodes": pa.int64(),
    "accepted": pa.int64(),
    "committed": pa.int64(),
    "lag": pa.int64(),
    "switched": pa.bool_(),
    "reason": pa.string(),
    "expected": pa.float64(),
    "price": pa.float64(),
    "kind": pa.string(),
    "regret": pa.float64(),
    "best_arm": pa.string(),
    **{f"{phase}_s": pa.float64() for phase in PHASES},
}
ANSWER_COLUMNS = {
    "policy": pa.string(),
    "prompt_id": pa.string(),
    "category": pa.string(),
    "turn": pa.int64(),
    "prompt_tokens": pa.int64(),
    "output_tokens": pa.int64(),
    "decoded_tokens": pa.int64(),
    "rounds": pa.int64(),
    "decode_seconds": pa.float64(),
    "prefill_seconds": pa.float64(),
    "identical": pa.bool_(),
    "finish_reason": pa.string(),
    "error": pa.string(),
    "output_hash": pa.string(),
}


def write_outputs(
    folder: Path,
    metrics: dict[str, Any],
    answers: Sequence[Answer],
    questions: Mapping[str, Question],
    target: Target,
) -> None:
    """The report last: who sees a new one finds the numbers that it shows.

    answers: of all conditions; the report has those that `metrics` names.
    questions: all that were asked, by id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", metrics)
    write_table(folder / "answers.parquet", answer_rows(answers), ANSWER_COLUMNS)
    write_table(folder / "rounds.parquet", round_rows(answers), ROUND_COLUMNS)
    figures = draw_all(metrics)
    write_pngs(figures, folder / "plots")
    shown = [a for policy in metrics["policies"] for a in answers if a.policy == policy]
    viewed = viewer_rows(shown, questions, target)
    write_report(folder / "report.html", metrics, viewed, as_svgs(figures))


def write_table(path: Path, rows: list[dict[str, Any]], columns: dict[str, pa.DataType]) -> None:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(columns)), content)
    write_whole(path, content.getvalue())


def answer_rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """identical: to the plain answer to the same question."""
    plain = {a.prompt_id: a for a in answers if a.policy == PLAIN}
    return [
        {
            "policy": a.policy,
            "prompt_id": a.prompt_id,
            "category": a.category,
            "turn": a.turn,
            "prompt_tokens": a.generation.prompt_length,
            "output_tokens": len(a.generation.output_ids),
            "decoded_tokens": a.generation.decoded_tokens,
            "rounds": len(a.rounds),
            "decode_seconds": a.generation.decode_seconds,
            "prefill_seconds": a.generation.prefill_seconds,
            "identical": is_identical(a, plain[a.prompt_id]),
            "finish_reason": a.generation.finish_reason,
            "error": a.generation.error,
            "output_hash": json_hash(a.generation.output_ids.tolist()),
        }
        for a in answers
    ]


def round_rows(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """One row a round, with its phases in seconds."""
    return [
        {
            "policy": a.policy,
            "prompt_id": a.prompt_id,
            "category": a.category,
            "turn": a.turn,
            "round": index,
            "position": r.position,
            "arm": r.arm,
            "num_draft": r.num_draft,
            "num_nodes": r.num_nodes,
            "accepted": r.accepted,
            "committed": r.committed,
            "lag": r.lag,
            "switched": r.switched,
            "reason": r.reason,
            "expected": r.expected,
            "price": r.price,
            "kind": note.kind,
            "regret": note.regret,
            "best_arm": note.best_arm,
            **{f"{phase}_s": seconds for phase, seconds in r.seconds.items()},
        }
        for a in answers
        for index, (r, note) in enumerate(zip(a.rounds, a.notes, strict=True))
    ]


def viewer_rows(
    answers: Sequence[Answer], questions: Mapping[str, Question], target: Target
) -> list[dict[str, Any]]:
    """The text of every round of every answer, for the report's round viewer."""
    decode = target.tokenizer.decode
    rows = {
        q.id: {"prompt_id": q.id, "category": q.category, "prompt": decode(q.ids), "policies": {}}
        for q in questions.values()
    }
    for policy, mine in by_policy(answers).items():
        for answer in mine:
            rows[answer.prompt_id]["policies"][policy] = _viewer_rounds(answer, decode)
    return list(rows.values())


def _viewer_rounds(answer: Answer, decode: Any) -> list[dict[str, Any]]:
    generation = answer.generation
    first = len(generation.output_ids) - generation.decoded_tokens
    prompt_pass: dict[str, Any] = {
        "text": decode(generation.output_ids[:first].tolist()),
        "arm": "prompt",
        "drafted": 0,
        "accepted": 0,
        "committed": first,
        "lag": 0,
        "reason": "",
        "ms": 1e3 * generation.prefill_seconds,
        "context": generation.prompt_length,
        "expected": None,
        "price": None,
        "regret": None,
        "best_arm": None,
        "kind": answer.notes[0].kind if answer.notes else "",
    }
    rounds = zip(decode_rounds(generation), answer.notes, strict=True)
    return [
        prompt_pass,
        *(_viewer_round(done, decode(ids.tolist()), note) for (done, ids), note in rounds),
    ]


def _viewer_round(done: Round, text: str, note: Note) -> dict[str, Any]:
    return {
        "text": text,
        "arm": done.arm,
        "drafted": done.num_draft,
        "accepted": done.accepted,
        "committed": done.committed,
        "lag": done.lag,
        "reason": done.reason,
        "ms": 1e3 * done.total_seconds,
        "context": done.position,
        "expected": _known(done.expected),
        "price": _known(done.price),
        "regret": _known(note.regret),
        "best_arm": note.best_arm or None,
        "kind": note.kind,
    }


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
