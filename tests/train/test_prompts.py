from __future__ import annotations

import json
from pathlib import Path

import pytest

from whiflash_infer.errors import UserError
from whiflash_train.prompts import Prompt, Tally, hold_out, read_prompts, take_evenly

BUILTIN = Path(__file__).parents[2] / "data_prep" / "prompts"


def prompts(*categories: str) -> list[Prompt]:
    return [
        Prompt(f"{c}-{i}", c, [{"role": "user", "content": "?"}]) for i, c in enumerate(categories)
    ]


def test_builtin_splits_share_no_prompt_and_hold_all_categories() -> None:
    texts = {}
    for split in ("train", "validation", "evaluation"):
        tally = Tally()
        rows = read_prompts("builtin", builtin=BUILTIN, split=split, tally=tally)
        assert tally.read == tally.kept == len(rows)
        assert {r.category for r in rows} == {"chat", "maths", "code", "json"}
        texts[split] = {" ".join(r.messages[-1]["content"].lower().split()) for r in rows}
        assert len(texts[split]) == len(rows)
    assert len(texts["train"]) >= 600
    assert not texts["train"] & texts["validation"]
    assert not (texts["train"] | texts["validation"]) & texts["evaluation"]


def test_every_bad_row_is_dropped_with_a_reason_and_the_totals_add_up(tmp_path: Path) -> None:
    good = {"id": "a", "messages": [{"role": "user", "content": "Grüße 你好 \u2028 🙂"}]}
    answered = {"messages": [*good["messages"], {"role": "assistant", "content": "old"}]}
    lines = [
        json.dumps(good, ensure_ascii=False),
        "",
        '{"id": "half", "mess',
        json.dumps({"id": "a", "prompt": "the id again"}),
        json.dumps({"id": "b", "prompt": "plain prompt"}),
        json.dumps(answered),
        json.dumps([1, 2]),
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"role": "wizard", "content": "x"}]}),
        json.dumps({"messages": [{"role": "user", "content": None}]}),
        json.dumps({"messages": [{"role": "system", "content": "only"}]}),
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\ufeff".encode() + "\r\n".join(lines).encode())
    tally = Tally()
    rows = read_prompts(str(path), builtin=BUILTIN, split="train", tally=tally)
    assert [r.id for r in rows] == ["a", "b", "prompts.jsonl:6"]
    assert rows[0].messages == good["messages"]
    assert rows[2].messages == good["messages"]
    assert tally.as_dict() == {
        "read": 11,
        "kept": 3,
        "dropped": {
            "blank_line": 1,
            "duplicate_id": 1,
            "empty_content": 1,
            "invalid_json": 1,
            "no_messages": 1,
            "no_user_turn_to_answer": 1,
            "not_an_object": 1,
            "unknown_role": 1,
        },
    }


def test_a_source_without_a_usable_row_stops_with_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n\n")
    with pytest.raises(UserError, match=r"read 2 = kept 0 \+ dropped 2 \(blank_line 2\)"):
        read_prompts(str(path), builtin=BUILTIN, split="train", tally=Tally())
    with pytest.raises(UserError, match=r"absent\.jsonl does not exist"):
        read_prompts("absent.jsonl", builtin=BUILTIN, split="train", tally=Tally())


def test_a_limit_takes_the_same_number_of_every_category() -> None:
    # A sorted file cut at the front would give one category only.
    rows = prompts(*"aaaaabbbbbccccc")
    assert [r.id for r in take_evenly(rows, 6)] == ["a-0", "a-1", "b-5", "b-6", "c-10", "c-11"]
    assert len(take_evenly(rows, 7)) == 7
    assert take_evenly(rows, None) == rows


def test_holding_out_depends_on_the_id_alone_and_differs_by_purpose() -> None:
    rows = prompts(*"a" * 400)
    kept, held = hold_out(rows, 0.25, purpose="router")
    assert len(kept) + len(held) == 400
    assert 60 < len(held) < 140
    assert hold_out(rows[::-1], 0.25, purpose="router")[1] == held[::-1]
    # With one hash for both purposes nothing would be left for the second.
    assert 30 < len(hold_out(kept, 0.25, purpose="validation")[1]) < 120
