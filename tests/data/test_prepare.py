"""The stage that makes conversations of data with answers, through its entry point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.stages import attempt, manifest_of, run
from whiflash_infer.sources import byte_tokenizer

COMMAND = "data_prep/prepare.py source=file source.file.path=rows.jsonl data.limit=null"


def asked(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def write(folder: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def many(count: int = 60) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "messages": [asked(f"Q{i}"), said(f"A{i}")]} for i in range(count)]


def prepared(folder: Path) -> dict[str, list[dict[str, Any]]]:
    places = {s: folder / f"artifacts/tiny/conversations/{s}.arrow" for s in SPLITS}
    return {split: Dataset.from_file(str(path)).to_list() for split, path in places.items()}


SPLITS = ("train", "router", "validation")


def test_every_row_is_written_once_or_counted_out_and_the_manifest_says_the_same(
    workplace: Path,
) -> None:
    bad = [{"messages": [said("first")]}, {"messages": [asked("Q0"), said("A0")]}, "{", ""]
    write(workplace, [*many(), *bad])
    output = run(workplace, COMMAND)
    line = (
        "read 64 = kept 60 + dropped 4 "
        "(blank_line 1, duplicate 1, invalid_json 1, opens_with_assistant 1) + failed 0"
    )
    assert line in output
    assert "opens_with_assistant: 1 row, rows.jsonl:61" in output
    found = manifest_of(workplace, "conversations")["counts"]
    assert (found["read"], found["kept"], found["failed"]) == (64, 60, 0)
    splits = prepared(workplace)
    ids = [row["id"] for rows in splits.values() for row in rows]
    assert sorted(ids) == sorted(f"r{i}" for i in range(60))
    for split, rows in splits.items():
        assert [int(row["id"][1:]) for row in rows] == sorted(int(row["id"][1:]) for row in rows)
        assert found["splits"][split]["rows"] == len(rows) > 0
        tokens = sum(len(row["input_ids"]) for row in rows)
        supervised = sum(sum(row["loss_mask"]) for row in rows)
        assert found["splits"][split]["tokens"] == tokens
        assert found["splits"][split]["supervised"] == supervised


def test_what_was_dropped_is_listed_with_its_place(workplace: Path) -> None:
    write(workplace, [*many(), "{", {"messages": []}])
    run(workplace, COMMAND)
    lines = (workplace / "artifacts/tiny/conversations/dropped.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(row["place"], row["reason"]) for row in found] == [
        ("rows.jsonl:61", "invalid_json"),
        ("rows.jsonl:62", "no_messages"),
    ]


def test_the_first_rows_are_shown_with_their_trained_tokens_marked(workplace: Path) -> None:
    write(workplace, many())
    assert run(workplace, COMMAND).count("tokens trained") == 1
    output = run(workplace, f"{COMMAND} show_mask=3")
    for index in range(3):
        assert f"⟦A{index}<|im_end|>⟧" in output
    assert "⟦A3" not in output


def test_supervised_tokens_are_the_answers(workplace: Path) -> None:
    write(workplace, many())
    run(workplace, COMMAND)
    tokenizer = byte_tokenizer()
    for row in prepared(workplace)["train"]:
        pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
        answer = tokenizer.decode([token for token, kept in pairs if kept])
        assert answer == f"A{row['id'][1:]}<|im_end|>"


def test_a_run_without_a_row_to_learn_from_stops_and_names_the_marker(workplace: Path) -> None:
    write(workplace, [{"text": f"<start_of_turn>user {i}<end_of_turn>"} for i in range(10)])
    done = attempt(workplace, COMMAND)
    assert done.status == 2
    assert "read 10 = kept 0 + dropped 10 (no_answer 10) + failed 0" in done.err
    assert r"<|im_start|>assistant\n" in done.err
    assert not (workplace / "artifacts/tiny/conversations").exists()


def test_a_failed_run_leaves_the_artefact_before_it_alone(workplace: Path) -> None:
    write(workplace, many())
    run(workplace, COMMAND)
    before = prepared(workplace)
    write(workplace, [*many(300), {"messages": []}])
    assert attempt(workplace, f"{COMMAND} strict=true").status == 2
    assert prepared(workplace) == before
    hidden = [p.name for p in (workplace / "artifacts/tiny").iterdir() if p.name.startswith(".")]
    assert hidden == []


def test_rows_are_the_same_however_they_are_packed(workplace: Path) -> None:
    rows = many()
    write(workplace, rows)
    run(workplace, COMMAND)
    before = manifest_of(workplace, "conversations")["fingerprint"]
    Dataset.from_list(rows).to_parquet(str(workplace / "rows.parquet"))
    run(workplace, COMMAND.replace("rows.jsonl", "rows.parquet"))
    assert manifest_of(workplace, "conversations")["fingerprint"] == before


def test_a_target_without_a_template_takes_one_from_a_file(workplace: Path) -> None:
    write(workplace, many())
    (workplace / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}={{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant={% endif %}"
    )
    output = run(workplace, f"{COMMAND} chat.template_file=own.jinja")
    assert "user=Q0<|im_end|>assistant=⟦A0<|im_end|>⟧" in output
