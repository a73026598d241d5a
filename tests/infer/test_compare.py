from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from whiflash_infer.compare import main

HEADER: dict[str, Any] = {
    "target": "tiny",
    "weights": "w1",
    "chat_template": "c1",
    "chat": {"thinking": None},
    "device": "AMD EPYC",
    "threads": 2,
    "dtype": "float32",
    "temperature": 0.0,
    "max_new_tokens": 64,
    "batch": 1,
    "sync": "lazy",
    "prompts": 24,
    "prompt_set": "p1",
    "bonus_token": "counted",
    "speedup_baseline": "plain arm of the same engine",
    "created": "2026-01-01T00:00:00+00:00",
    "versions": {"torch_build": "2.9.0+cpu"},
}
SPEEDS = {"plain": 40.0, "static_ar": 60.0, "hazard": 80.0}
PROMPTS = 24


def rows_of(
    speeds: Mapping[str, float], *, seed: int = 0, noise: float = 0.02
) -> list[dict[str, Any]]:
    """Two categories; 60 tokens an answer, of which a round brings 1 or, drafting, 3."""
    rng = np.random.default_rng(seed)
    return [
        {
            "policy": policy,
            "prompt_id": f"p{prompt}",
            "category": ("chat", "code")[prompt % 2],
            "turn": 1,
            "decoded_tokens": 60,
            "rounds": 60 if policy == "plain" else 20,
            "decode_seconds": 60 / speed * float(np.exp(rng.normal(0, noise))),
            "output_hash": f"h{prompt}",
        }
        for policy, speed in speeds.items()
        for prompt in range(PROMPTS)
    ]


def write(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    policies: tuple[str, ...] = tuple(SPEEDS),
    **changes: Any,
) -> str:
    folder.mkdir(exist_ok=True)
    metrics = {
        "format": 2,
        "header": {**HEADER, **changes},
        "policies": {policy: {"overall": {}} for policy in policies},
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    pq.write_table(pa.Table.from_pylist(rows), folder / "answers.parquet")
    return str(folder)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: ")
    return written.err


def test_a_second_run_agrees_within_its_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    after = write(tmp_path / "b", rows_of(SPEEDS, seed=1), seed=7)
    found = as_json(capsys, before, after, "--fail-if-slower", "0.03")
    assert list(found["policies"]) == list(SPEEDS)
    assert found["policies"]["plain"]["overall"]["speedup"] is None
    hazard = found["policies"]["hazard"]["overall"]
    ratio, low, high = hazard["ratio"]
    assert low < 1.0 < high
    assert ratio == pytest.approx(hazard["tokens_per_s"][1] / hazard["tokens_per_s"][0])
    assert hazard["speedup"]["agrees"]
    assert hazard["speedup"]["before"][0] == pytest.approx(2.0, rel=0.02)
    assert hazard["tau"] == [3.0, 3.0]
    assert hazard["differing_answers"] == 0
    assert hazard["same_rounds"]


def test_a_slower_policy_is_told_and_the_exit_status_says_so_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    after = write(tmp_path / "b", rows_of({**SPEEDS, "hazard": 72.0}, seed=1))
    assert main([before, after]) == 0
    assert main([before, after, "--fail-if-slower", "0.2"]) == 0
    capsys.readouterr()
    assert main([before, after, "--fail-if-slower", "0.03"]) == 1
    told = capsys.readouterr().err
    assert "hazard is slower by more than 3.0%: 0.90" in told
    assert "static_ar" not in told


def test_a_slower_machine_changes_tokens_per_second_and_no_speed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    halved = {policy: speed / 2 for policy, speed in SPEEDS.items()}
    after = write(tmp_path / "b", rows_of(halved, seed=1), threads=1)
    found = as_json(capsys, before, after, "--allow", "threads")
    assert found["allowed"] == {"threads": [2, 1]}
    hazard = found["policies"]["hazard"]["overall"]
    assert hazard["ratio"][0] == pytest.approx(0.5, rel=0.02)
    assert hazard["speedup"]["change"][0] == pytest.approx(1.0, rel=0.02)
    assert hazard["speedup"]["agrees"]


def test_a_changed_speed_up_does_not_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    after = write(tmp_path / "b", rows_of({**SPEEDS, "hazard": 100.0}, seed=1))
    speedup = as_json(capsys, before, after)["policies"]["hazard"]["overall"]["speedup"]
    assert speedup["change"][0] == pytest.approx(1.25, rel=0.02)
    assert not speedup["agrees"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "w2"),
        ("bonus_token", "left out"),
        ("speedup_baseline", "another engine"),
        ("temperature", 1.0),
        ("max_new_tokens", 128),
        ("prompt_set", "p2"),
        ("chat", {"thinking": True}),
        ("chat_template", "c2"),
        ("dtype", "bfloat16"),
        ("batch", 8),
        ("sync", "eager"),
        ("device", "Apple M4"),
        ("threads", 8),
    ],
)
def test_results_that_were_measured_otherwise_are_refused_with_both_values(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    after = write(tmp_path / "b", rows_of(SPEEDS), **{field: value})
    told = refusal(capsys, before, after)
    assert f"  {field}: {HEADER[field]!r} and {value!r}" in told
    assert len(told.splitlines()) == 2


def test_all_differences_are_named_at_once_and_what_may_be_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    versions = {"torch_build": "2.10.0"}
    after = write(tmp_path / "b", rows_of(SPEEDS), dtype="bfloat16", threads=4, versions=versions)
    told = refusal(capsys, before, after)
    assert "  dtype: 'float32' and 'bfloat16'\n" in told
    assert "  threads: 2 and 4 (--allow threads)\n" in told
    assert "  torch: '2.9.0+cpu' and '2.10.0' (--allow torch)\n" in told
    told = refusal(capsys, before, after, "--allow", "threads", "--allow", "torch")
    assert told.splitlines()[1:] == ["  dtype: 'float32' and 'bfloat16'"]


def test_conventions_may_not_be_allowed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), str(tmp_path), "--allow", "temperature"])


def test_categories_have_lines_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_code = [
        {**row, "decode_seconds": row["decode_seconds"] * (2 if row["category"] == "code" else 1)}
        for row in rows_of(SPEEDS, seed=1)
    ]
    before, after = write(tmp_path / "a", rows_of(SPEEDS)), write(tmp_path / "b", slow_code)
    found = as_json(capsys, before, after, "--by", "category")["policies"]["hazard"]["by_category"]
    assert {name: row["answers"] for name, row in found.items()} == {"chat": 12, "code": 12}
    assert found["chat"]["ratio"][0] == pytest.approx(1.0, rel=0.02)
    assert found["code"]["ratio"][0] == pytest.approx(0.5, rel=0.02)


def test_answers_that_changed_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, rows = write(tmp_path / "a", rows_of(SPEEDS)), rows_of(SPEEDS, seed=1)
    hazard = [row for row in rows if row["policy"] == "hazard"]
    for row in hazard[:3]:
        row["output_hash"] = "other"
    after = write(tmp_path / "b", rows)
    found = as_json(capsys, before, after)["policies"]
    assert found["hazard"]["overall"]["differing_answers"] == 3
    assert main([before, after]) == 0
    assert "3 of 24 differ" in capsys.readouterr().out


def test_the_same_text_in_other_rounds_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, rows = write(tmp_path / "a", rows_of(SPEEDS)), rows_of(SPEEDS)
    rows[-1]["rounds"] = 30
    after = write(tmp_path / "b", rows)
    assert main([before, after]) == 0
    out = capsys.readouterr().out
    assert out.count("same, other rounds") == 1
    assert out.count("same rounds") == 2


def test_answers_are_paired_by_prompt_whatever_order_they_stand_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same times prompt by prompt: a point, where unpaired prompts would have a spread."""
    rows = rows_of(SPEEDS, noise=0.5)
    before, after = write(tmp_path / "a", rows), write(tmp_path / "b", rows[::-1])
    for row in as_json(capsys, before, after)["policies"].values():
        assert row["overall"]["ratio"] == [1.0, 1.0, 1.0]


def test_what_only_one_run_has_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", rows_of(SPEEDS))
    fewer = {"plain": 40.0, "hazard": 80.0, "entropy": 70.0}
    rows = [row for row in rows_of(fewer) if row["prompt_id"] != "p5"]
    after = write(tmp_path / "b", rows, policies=tuple(fewer))
    found = as_json(capsys, before, after)
    assert list(found["policies"]) == ["plain", "hazard"]
    assert found["left_out"] == {"policies": ["entropy", "static_ar"], "prompts": 1}
    assert found["policies"]["hazard"]["overall"]["answers"] == 23
    assert main([before, after]) == 0
    out = capsys.readouterr().out
    assert "in one of the two only: entropy, static_ar" in out
    assert "not answered in both: 1 prompts" in out


def test_two_policies_of_one_run_are_compared_prompt_by_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "a", rows_of(SPEEDS))
    found = as_json(capsys, run, "--same-run", "hazard", "static_ar", "--by", "category")
    row = found["policies"]["hazard"]["overall"]
    assert found["against"] == "static_ar"
    assert row["tokens_per_s"] == pytest.approx([60, 80], rel=0.02)
    assert row["ratio"][0] == pytest.approx(4 / 3, rel=0.02)
    assert 1.0 < row["ratio"][1] < row["ratio"][0] < row["ratio"][2]
    assert list(found["policies"]["hazard"]["by_category"]) == ["chat", "code"]
    assert main([run, "--same-run", "static_ar", "hazard", "--fail-if-slower", "0.1"]) == 1
    out = capsys.readouterr().out
    assert "static_ar over hazard" in out


def test_a_policy_against_its_repetition_has_1_in_its_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "a", rows_of({**SPEEDS, "hazard#2": 80.0}, seed=3))
    found = as_json(capsys, run, "--same-run", "hazard", "hazard#2")
    _, low, high = found["policies"]["hazard"]["overall"]["ratio"]
    assert low < 1.0 < high


def test_what_was_varied_beside_the_policies_counts_inside_one_run_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of({**SPEEDS, "hazard, sync eager": 50.0})
    run = write(tmp_path / "a", rows)
    assert list(as_json(capsys, run, run)["policies"]) == list(SPEEDS)
    found = as_json(capsys, run, "--same-run", "hazard", "hazard, sync eager")
    assert found["policies"]["hazard"]["overall"]["ratio"][0] == pytest.approx(1.6, rel=0.02)


def test_turns_of_a_conversation_are_drawn_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prompt again as three more turns of the same time tells nothing new."""
    rows = rows_of({"plain": 40.0, "hazard": 80.0}, noise=0.2)
    turns = [
        {**row, "prompt_id": f"{row['prompt_id']}#{turn}" if turn > 1 else row["prompt_id"]}
        | {"turn": turn}
        for row in rows
        for turn in (1, 2, 3, 4)
    ]
    names = ("plain", "hazard")
    one = write(tmp_path / "one", rows, policies=names)
    four = write(tmp_path / "four", turns, policies=names)
    ratios = [
        as_json(capsys, run, "--same-run", "hazard", "plain")["policies"]["hazard"]["overall"]
        for run in (one, four)
    ]
    assert [row["answers"] for row in ratios] == [24, 96]
    assert ratios[1]["ratio"] == pytest.approx(ratios[0]["ratio"])


def test_a_single_prompt_proves_nothing_but_a_policy_without_tokens_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in rows_of(SPEEDS) if row["prompt_id"] == "p0"]
    slow = [{**row, "decode_seconds": row["decode_seconds"] * 2} for row in rows]
    slow[0]["decode_seconds"] *= 1.5
    before, after = write(tmp_path / "a", rows), write(tmp_path / "b", slow)
    assert main([before, after, "--fail-if-slower", "0.03"]) == 0
    assert "no interval" in capsys.readouterr().out
    speedup = as_json(capsys, before, after)["policies"]["hazard"]["overall"]["speedup"]
    assert speedup["change"] == pytest.approx([1.5, 1.5, 1.5])
    assert speedup["agrees"] is None
    broken = [{**row, "decoded_tokens": 0, "rounds": 0} for row in rows]
    after = write(tmp_path / "c", broken)
    assert main([before, after, "--fail-if-slower", "0.03"]) == 1


def test_a_file_may_be_named_in_place_of_its_folder(tmp_path: Path) -> None:
    run = write(tmp_path / "a", rows_of(SPEEDS))
    assert main([f"{run}/metrics.json", f"{run}/answers.parquet"]) == 0


def test_names_are_data_and_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "category": "[red]x[/oops]"} for row in rows_of(SPEEDS)]
    run = write(tmp_path / "a", rows)
    assert main([run, run, "--by", "category"]) == 0
    assert "[red]x[/oops]" in capsys.readouterr().out


def _no_metrics(folder: Path) -> None:
    (folder / "metrics.json").unlink()


def _no_json(folder: Path) -> None:
    (folder / "metrics.json").write_text("{")


def _no_text(folder: Path) -> None:
    (folder / "metrics.json").write_bytes(b"\xff\xfe{")


def _older(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"header": {}, "policies": {}}')


def _newer(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"format": 3}')


def _a_list(folder: Path) -> None:
    (folder / "metrics.json").write_text("[]")


def _no_header(folder: Path) -> None:
    (folder / "metrics.json").write_text('{"format": 2, "policies": {}}')


def _bare_header(folder: Path) -> None:
    bare = {name: value for name, value in HEADER.items() if name not in ("sync", "versions")}
    content = {"format": 2, "header": bare, "policies": {}}
    (folder / "metrics.json").write_text(json.dumps(content))


def _no_answers(folder: Path) -> None:
    (folder / "answers.parquet").unlink()


def _no_parquet(folder: Path) -> None:
    (folder / "answers.parquet").write_bytes(b"PAR1 and no more")


def _rows(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        rows = rows_of(SPEEDS)
        change(rows)
        pq.write_table(pa.Table.from_pylist(rows), folder / "answers.parquet")

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_no_metrics, "metrics.json is missing"),
        (_no_json, "metrics.json is not valid JSON"),
        (_no_text, "metrics.json is not valid JSON"),
        (_older, "metrics.json: format is none, this version reads 2; evaluate again"),
        (_newer, "metrics.json: format is 3, this version reads 2"),
        (_a_list, "metrics.json: format is none"),
        (_no_header, "metrics.json: `header` and `policies` must be objects"),
        (_bare_header, "metrics.json: the header lacks sync, torch"),
        (_no_answers, "answers.parquet is missing"),
        (_no_parquet, "answers.parquet is not readable as parquet"),
        (_rows(lambda rows: [row.pop("rounds") for row in rows]), "has no column rounds"),
        (
            _rows(lambda rows: [row.update(decode_seconds="1 s") for row in rows]),
            "column decode_seconds holds string",
        ),
        (_rows(lambda rows: rows[3].update(category=None)), "row 3 has an empty value"),
        (_rows(lambda rows: rows[3].update(decode_seconds=float("nan"))), "row 3 has an empty"),
        (
            _rows(lambda rows: rows.append(rows[0])),
            "policy plain has two answers to prompt p0",
        ),
        (_rows(lambda rows: rows.__delitem__(slice(24))), "has no answers of plain"),
    ],
)
def test_a_damaged_or_older_file_is_named_in_one_line(
    damage: Callable[[Path], None],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = write(tmp_path / "a", rows_of(SPEEDS))
    bad = write(tmp_path / "b", rows_of(SPEEDS))
    damage(tmp_path / "b")
    for arguments in ((bad, whole), (whole, bad)):
        error = refusal(capsys, *arguments)
        assert told in error
        assert str(tmp_path / "b") in error
        assert len(error.splitlines()) == 1


def test_what_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "a", rows_of(SPEEDS))
    assert "nowhere does not exist" in refusal(capsys, str(tmp_path / "nowhere"), run)
    told = refusal(capsys, run, "--same-run", "hazzard", "plain")
    assert "has no policy hazzard; it has: plain; static_ar; hazard" in told
    lonely = write(tmp_path / "b", rows_of({"entropy": 50.0}), policies=("entropy",))
    assert "no policy in common" in refusal(capsys, run, lonely)


@pytest.mark.parametrize(
    "arguments", [["a"], ["a", "b", "--same-run", "x", "y"], ["a", "b", "--fail-if-slower", "3"]]
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
