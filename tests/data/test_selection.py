from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.common import source
from whiflash_infer.errors import UserError
from whiflash_train.data.masks import MaskRules
from whiflash_train.data.rows import Conversation
from whiflash_train.data.selection import (
    DataSettings,
    Picked,
    as_prompt,
    pick_rows,
    read_evaluation_turns,
    require_rows,
    take_evenly,
)
from whiflash_train.data.sources import DataSource
from whiflash_train.data.tally import BadRow, Tally

BUILTIN = Path(__file__).parents[2] / "data_prep" / "prompts" / "{split}.jsonl"
RULES = MaskRules(
    turns="all", reasoning=True, text="chat", max_length=64, over_long="drop", min_supervised=2
)


def settings(**fields: Any) -> DataSettings:
    defaults: dict[str, Any] = {
        "limit": None,
        "validation_fraction": 0.0,
        "router_fraction": 0.0,
        "roles": {},
        "duplicates": "drop",
        "in_evaluation": "drop",
        "mask": RULES,
    }
    return DataSettings(**{**defaults, **fields})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pick(
    sources: dict[str, DataSource], evaluation: set[str] | None = None, **fields: Any
) -> tuple[list[Picked], Tally]:
    tally = Tally()
    found = pick_rows(sources, settings(**fields), tally, evaluation_turns=evaluation or set())
    return list(found), tally


def ids(picked: list[Picked], split: str | None = None) -> list[str]:
    return [p.row.id for p in picked if split in (None, p.split)]


def test_built_in_splits_share_no_question_and_hold_all_categories() -> None:
    texts: dict[str, set[str]] = {}
    for split in ("train", "validation", "evaluation"):
        tally = Tally()
        rows = list(source(BUILTIN).read(split, tally, roles={}))
        assert tally.read == tally.kept == len(rows)
        assert {r.category for r in rows} == {"chat", "maths", "code", "json"}
        asked = [r.user_turns[-1] for r in rows if isinstance(r, Conversation)]
        texts[split] = {" ".join(turn.lower().split()) for turn in asked}
        assert len(texts[split]) == len(rows)
    assert len(texts["train"]) >= 600
    assert not texts["train"] & texts["validation"]
    assert not (texts["train"] | texts["validation"]) & texts["evaluation"]


def test_a_repeated_row_is_dropped_or_kept_and_told_whatever_its_id(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "one"},
        {"id": "b", "prompt": "one"},
        {"id": "c", "prompt": "two"},
    ]
    data = {"own": source(write(tmp_path / "rows.jsonl", rows))}
    picked, tally = pick(data)
    assert ids(picked) == ["a", "c"]
    assert tally.dropped == {"duplicate": 1}
    assert tally.examples["duplicate"] == ["rows.jsonl:2"]
    picked, tally = pick(data, duplicates="keep")
    assert ids(picked) == ["a", "b", "c"]
    assert tally.notes == {"duplicate_kept": 1}


def test_an_id_that_comes_again_with_other_content_is_dropped_by_name(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "one"}, {"id": "a", "prompt": "two"}]
    picked, tally = pick({"own": source(write(tmp_path / "rows.jsonl", rows))})
    assert ids(picked) == ["a"]
    assert tally.examples["duplicate_id"] == ["rows.jsonl:2 (a)"]


def test_ids_of_several_sources_name_their_source(tmp_path: Path) -> None:
    first = source(write(tmp_path / "a.jsonl", [{"id": "1", "prompt": "one"}]))
    second = source(write(tmp_path / "b.jsonl", [{"id": "1", "prompt": "two"}]))
    assert ids(pick({"a": first, "b": second})[0]) == ["a/1", "b/1"]


def test_rows_that_ask_an_evaluation_prompt_are_dropped(tmp_path: Path) -> None:
    long = "Explain in two sentences why the sky is blue."
    evaluation = {
        "eval": source(write(tmp_path / "eval.jsonl", [{"prompt": "Hi"}, {"prompt": long}]))
    }
    rows = [
        {"id": "other case", "prompt": "  explain in TWO sentences\n why the sky is blue. "},
        {"id": "later turn", "turns": ["Hello", long]},
        {"id": "short first turn", "prompt": "hi"},
        {"id": "short later turn", "turns": ["Something else", "Hi"]},
        {"id": "new", "prompt": "Explain in two sentences why grass is green."},
    ]
    data = {"own": source(write(tmp_path / "rows.jsonl", rows))}
    turns = read_evaluation_turns(evaluation, {})
    picked, tally = pick(data, turns)
    assert ids(picked) == ["short later turn", "new"]
    assert tally.dropped == {"in_evaluation": 3}
    assert len(pick(data, turns, in_evaluation="keep")[0]) == 5


def test_a_limit_takes_the_same_number_of_every_category_and_counts_the_rest(
    tmp_path: Path,
) -> None:
    # A sorted file cut at the front would give one category only.
    rows = [{"id": f"{c}{i}", "prompt": f"{c}{i}", "category": c} for c in "abc" for i in range(5)]
    picked, tally = pick({"own": source(write(tmp_path / "rows.jsonl", rows))}, limit=7)
    assert ids(picked) == ["a0", "a1", "a2", "b0", "b1", "c0", "c1"]
    assert tally.dropped == {"over_limit": 8}
    assert tally.kept == 7


def test_taking_evenly_leaves_short_lists_alone() -> None:
    assert take_evenly(["a", "b"], 5, str) == ["a", "b"]
    assert take_evenly(["a", "b"], None, str) == ["a", "b"]


def test_splits_follow_from_the_content_alone_and_from_each_purpose_apart(tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": f"question {i}"} for i in range(400)]
    fractions: dict[str, Any] = {"validation_fraction": 0.25, "router_fraction": 0.25}
    data = source(write(tmp_path / "rows.jsonl", rows))
    picked, _ = pick({"own": data}, **fractions)
    for split, share in (("validation", 0.25), ("router", 0.75 * 0.25)):
        assert abs(len(ids(picked, split)) / 400 - share) < 0.07
    renamed = [{"id": f"x{i}", "prompt": f"question {i}"} for i in reversed(range(400))]
    again, _ = pick({"own": source(write(tmp_path / "renamed.jsonl", renamed))}, **fractions)
    for split in ("train", "router", "validation"):
        assert {f"x{i}" for i in ids(picked, split)} == set(ids(again, split))


def test_other_answers_to_the_same_question_fall_into_the_same_split(tmp_path: Path) -> None:
    # A question in training whose other answer is in validation would flatter the drafter.
    rows = [{"prompt": f"q{i}", "answer": f"{n} of {i}"} for i in range(60) for n in range(3)]
    picked, _ = pick(
        {"own": source(write(tmp_path / "r.jsonl", rows))},
        None,
        validation_fraction=0.3,
        router_fraction=0.3,
    )
    found: dict[str, set[str]] = {}
    for part in picked:
        assert isinstance(part.row, Conversation)
        found.setdefault(part.row.user_turns[0], set()).add(part.split)
    assert len(picked) == 180
    assert all(len(splits) == 1 for splits in found.values())


def test_a_source_with_a_validation_split_holds_nothing_out_of_the_other(tmp_path: Path) -> None:
    for split, count in (("train", 20), ("test", 5)):
        write(tmp_path / f"{split}.jsonl", [{"prompt": f"{split} {i}"} for i in range(count)])
    data = {"own": source(tmp_path / "{split}.jsonl", validation_split="test")}
    picked, _ = pick(data, validation_fraction=0.5)
    assert len(ids(picked, "validation")) == 5
    assert len(ids(picked, "train")) == 20


def test_a_prompt_is_the_conversation_up_to_its_last_question(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "Q"}
    said = {"role": "assistant", "content": "A"}
    rows = [{"messages": [asked, said, asked, said]}, {"text": "running"}]
    data = list(source(write(tmp_path / "r.jsonl", rows)).read("train", Tally(), roles={}))
    assert as_prompt(data[0]).messages == [asked, said, asked]
    with pytest.raises(BadRow, match="no_question"):
        as_prompt(data[1])


def test_nothing_left_is_an_error_that_tells_every_reason(tmp_path: Path) -> None:
    picked, tally = pick({"own": source(write(tmp_path / "r.jsonl", [{"messages": []}]))})
    with pytest.raises(UserError, match=r"read 1 = kept 0 \+ dropped 1 \(no_messages 1\)"):
        require_rows(picked, tally)
