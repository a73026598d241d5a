"""Files of an evaluation: tables whose rows add up, and texts that come back as they were."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.infer.test_benchmark import TIMED, condition, questions
from tests.infer.test_engine_sampling import dice, drafting_trees
from tests.routing.made import made_router
from whiflash_infer.benchmark import Asked, Benchmark, Condition, Protocol
from whiflash_infer.metrics import Answer
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN
from whiflash_train.evaluation.annotate import annotated
from whiflash_train.evaluation.files import (
    ANSWER_COLUMNS,
    ROUND_COLUMNS,
    answer_rows,
    round_rows,
    viewer_rows,
    write_table,
)


def measured(*, label: bool) -> tuple[Target, list[Asked], list[Answer]]:
    target, router = dice(), made_router(seed=0)
    arms = drafting_trees(target)
    conditions = [
        condition(PLAIN),
        condition("ar"),
        Condition(name="hazard", policy=router.policy("hazard"), settings=TIMED),
    ]
    protocol = Protocol(max_new_tokens=24, temperature=0.0, seed=0, warmup_prompts=0, label=label)
    asked = list(Benchmark(target, arms, conditions, protocol).run(questions(3)))
    answers = [a for one in asked for a in annotated(one, target.tokenizer, arms, router)]
    return target, asked, answers


def test_rounds_and_answers_add_up(tmp_path: Path) -> None:
    _, _, answers = measured(label=True)
    write_table(tmp_path / "rounds.parquet", round_rows(answers), ROUND_COLUMNS)
    write_table(tmp_path / "answers.parquet", answer_rows(answers), ANSWER_COLUMNS)
    rounds = pq.read_table(tmp_path / "rounds.parquet").to_pylist()
    for row in pq.read_table(tmp_path / "answers.parquet").to_pylist():
        of = ("policy", "prompt_id")
        mine = [r for r in rounds if all(r[name] == row[name] for name in of)]
        assert len(mine) == row["rounds"]
        assert sum(r["committed"] for r in mine) == row["decoded_tokens"]
        assert row["output_tokens"] == row["decoded_tokens"] + 1
        assert row["identical"]
    assert len({row["output_hash"] for row in answer_rows(answers)}) == 3  # one of each question
    assert not list(tmp_path.glob(".*"))


def test_regret_is_known_where_answers_are_labelled_and_never_negative() -> None:
    _, _, answers = measured(label=True)
    regrets = [note.regret for answer in answers for note in answer.notes]
    assert min(regrets) >= 0
    assert max(regrets) > 0
    _, _, unlabelled = measured(label=False)
    assert all(isnan(note.regret) for answer in unlabelled for note in answer.notes)


@pytest.mark.parametrize("label", [True, False])
def test_the_viewer_has_the_text_of_every_answer_in_pieces(label: bool) -> None:
    target, asked, answers = measured(label=label)
    by_id = {q.id: q for one in asked for q in one.questions}
    rows = viewer_rows(answers, by_id, target)
    assert [row["prompt_id"] for row in rows] == list(by_id)
    for row in rows:
        assert set(row["policies"]) == {PLAIN, "static_ar", "hazard"}
        for policy, rounds in row["policies"].items():
            (answer,) = [
                a for a in answers if (a.policy, a.prompt_id) == (policy, row["prompt_id"])
            ]
            assert rounds[0]["arm"] == "prompt"
            assert len(rounds) == len(answer.rounds) + 1
            ids = answer.generation.output_ids.tolist()
            assert "".join(r["text"] for r in rounds) == target.tokenizer.decode(ids)
            known = [r["regret"] is not None for r in rounds[1:]]
            assert all(known) if label else not any(known)
