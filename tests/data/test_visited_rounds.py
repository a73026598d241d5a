from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from rich.console import Console

from tests.fakes import chain_arm, random_ids, tiny_drafter
from tests.stages import attempt, manifest_of, run
from whiflash_infer.drafters.ar import ARArm
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.pretrained import choose_policy
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.rounds import load_rounds
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, PHASES, PLAIN
from whiflash_train.data.processes import Processes
from whiflash_train.round_logging import RoundSettings, write_rounds
from whiflash_train.visited_rounds import (
    Prompt,
    decode_prompts,
    predicted_seconds,
    prompts_of,
    save_visited,
    show_visited,
)

QUIET = Console(file=io.StringIO(), width=200)
SETTINGS = RoundSettings(
    mode="decode",
    limits={"train": None, "router": None, "validation": None},
    batch_size=2,
    shard_positions=1000,
    dtype="float32",
    margin_gb=0.0,
    force=False,
    policy="random",
    decode_limit=5,
)


@pytest.fixture(scope="module")
def arms(target: Target) -> dict[str, Arm]:
    """Trees so wide that the words of random drafters are accepted now and then."""
    ar, block = tiny_drafter("ar-classic", target), tiny_drafter("diffusion", target)
    return {
        AR: chain_arm(ar),
        AR_TREE: ARArm(ar, draft_length=3, top_k=25, num_nodes=60),  # pyright: ignore
        DIFFUSION: chain_arm(block),
        DIFFUSION_TREE: DiffusionArm(block, num_nodes=60),  # pyright: ignore
    }


@pytest.fixture(scope="module")
def decoder(target: Target, arms: dict[str, Arm]) -> RoutedDecoder:
    policy = choose_policy("random", arms, None)
    return RoutedDecoder(target, arms, policy, EngineSettings(timing=True))


@pytest.fixture(scope="module")
def rows(decoder: RoutedDecoder) -> Dataset:
    """The target's own greedy answers of 40 tokens, cut by that limit."""
    found = []
    for number in range(6):
        prompt = random_ids(8 + 3 * number, seed=number).tolist()
        answer = decoder.answer(prompt, GenerationOptions(max_new_tokens=40))
        ids = prompt + answer.output_ids.tolist()
        mask = [i >= len(prompt) for i in range(len(ids))]
        facts = {"id": f"c{number}", "category": "chat", "truncated": True}
        found.append({**facts, "input_ids": ids, "loss_mask": mask})
    return Dataset.from_list(found)


def ignored(steps: int, *, produced: int = 0) -> None:
    """Progress that nobody looks at."""


def test_every_round_accepts_what_the_dense_label_of_its_position_says(
    target: Target,
    arms: dict[str, Arm],
    decoder: RoutedDecoder,
    rows: Dataset,
    tmp_path: Path,
) -> None:
    write_rounds(
        tmp_path / "rounds",
        {"router": rows},
        target,
        arms,
        SETTINGS,
        lineage={},
        console=QUIET,
        processes=Processes(0, 1),
    )
    splits, _ = load_rounds(tmp_path / "rounds", made_by="log_rounds")
    dense = {c.conversation: c for c in splits["router"]}
    prompts = prompts_of({"router": rows}, 6)
    visited = list(decode_prompts(decoder, prompts, ignored))
    assert {row["conversation"] for row in visited} == set(dense)
    for row in visited:
        assert row["on_text"]
        here = dense[row["conversation"]]
        place = row["position"] - int(here.positions[0])
        full = 0 if row["arm"] == PLAIN else int(here.accepted[row["arm"]][place])
        assert row["accepted"] == min(full, row["num_draft"])
        assert row["committed"] == row["accepted"] + 1
    assert {row["arm"] for row in visited} == {PLAIN, *arms}
    assert sum(row["accepted"] > 0 for row in visited) > 10


def test_rounds_behind_a_token_that_the_text_does_not_have_are_marked(
    decoder: RoutedDecoder, rows: Dataset
) -> None:
    [prompt] = prompts_of({"router": rows}, 1)
    foreign = prompt.answer.copy()
    foreign[9] = foreign[9] - 1 if foreign[9] > 5 else 6
    changed = Prompt("c", "", "router", prompt.ids, foreign)
    for row in decode_prompts(decoder, [changed], ignored):
        # The anchor is the last token that has to be the same: 9 tokens, 0 to 8, are.
        assert row["on_text"] == (row["position"] < len(prompt.ids) + 9)


def test_prompts_end_at_the_first_answer_and_held_out_ones_come_first() -> None:
    def dataset(name: str, *masks: list[bool]) -> Dataset:
        lines = [
            {"id": f"{name}{i}", "category": "k", "input_ids": list(range(len(m))), "loss_mask": m}
            for i, m in enumerate(masks)
        ]
        return Dataset.from_list(lines)

    two_turns = [False, False, True, True, False, True, True]
    one_turn = [False, True, True]
    splits = {
        "train": dataset("t", one_turn),
        "router": dataset("r", one_turn, one_turn),
        "validation": dataset("v", two_turns),
    }
    found = prompts_of(splits, 3)
    assert [(p.conversation, p.split) for p in found] == [
        ("v0", "validation"),
        ("r0", "router"),
        ("r1", "router"),
    ]
    assert (found[0].ids, found[0].answer) == ([0, 1], [2, 3])
    assert (found[1].ids, found[1].answer) == ([0], [1, 2])
    assert len(prompts_of(splits, 99)) == 4
    with pytest.raises(UserError, match="no conversation to decode"):
        prompts_of({"router": splits["router"].select([])}, 3)


def test_an_artefact_without_rounds_is_not_written(tmp_path: Path) -> None:
    def nothing() -> Iterator[dict]:
        yield from ()

    with pytest.raises(UserError, match="long enough for a round"):
        save_visited(tmp_path / "visited", nothing(), {})
    assert list(tmp_path.iterdir()) == []


def abacus() -> CostModel:
    """Round numbers: reading w tokens costs w seconds, and 0.01 more for each of context."""
    return CostModel(
        device=DeviceIdentity(device="abacus", threads=1, dtype="float32"),
        target="tiny",
        nodes={AR: [0, 1, 2], DIFFUSION_TREE: [0, 4, 4]},
        batches={
            1: PassCosts(
                verify=[(float(w), 0.01) for w in range(1, 6)],
                draft={AR: [0.0, 0.5, 1.0], DIFFUSION_TREE: [0.0, 3.0, 3.0]},
                catch_up={AR: (0.1, 0.02), DIFFUSION: (0.2, 0.05)},
                overhead=0.25,
            )
        },
    )


def visited_table(*rounds: tuple[str, int, int, int, float]) -> pa.Table:
    """From arm, num_draft, position, lag and measured seconds."""
    lines = []
    for arm, num_draft, position, lag, seconds in rounds:
        phases = {f"{phase}_s": seconds / len(PHASES) for phase in PHASES}
        facts = {"arm": arm, "num_draft": num_draft, "position": position, "lag": lag}
        lines.append({**facts, "committed": 2, **phases})
    return pa.Table.from_pylist(lines)


ROUNDS = (
    (PLAIN, 0, 100, 0, 2.5),
    (AR, 2, 100, 10, 5.55),
    (AR, 1, 0, 0, 2.85),
    (DIFFUSION_TREE, 1, 200, 4, 10.65),
    (DIFFUSION, 2, 100, 0, 1.0),  # not in the profile
    (AR, 7, 100, 0, 1.0),  # longer than in the profile
)
# verify + context + draft + catch-up + overhead
PREDICTED = (1 + 1 + 0.25, 3 + 1 + 1 + 0.1 + 0.2 + 0.25, 2 + 0.5 + 0.1 + 0.25)
PREDICTED_TREE = 5 + 2 + 3 + 0.2 + 0.2 + 0.25


def test_rounds_are_priced_as_the_cost_model_says() -> None:
    found = predicted_seconds(visited_table(*ROUNDS), abacus())
    expected = [*PREDICTED, PREDICTED_TREE, np.nan, np.nan]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_table_tells_by_arm_what_was_measured_and_predicted() -> None:
    said = io.StringIO()
    show_visited(visited_table(*ROUNDS[:5]), abacus(), Console(file=said, width=200))
    lines = {line.split()[1]: line for line in said.getvalue().splitlines() if "│" in line}
    # plain: 2250 ms predicted of 2500 measured; AR: both rounds as predicted.
    assert "2500.00" in lines[PLAIN]
    assert "2250.00" in lines[PLAIN]
    assert "10.0%" in lines[PLAIN]
    assert "4200.00" in lines[AR]
    assert "0.0%" in lines[AR]
    assert "not priced" in lines[DIFFUSION]
    said = io.StringIO()
    show_visited(visited_table(*ROUNDS[:5]), None, Console(file=said, width=200))
    assert "predicted" not in said.getvalue()
    assert "2.000" in said.getvalue()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few conversations and drafters that learnt nothing."""
    folder = tmp_path_factory.mktemp("visited") / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py data.limit=24")
    for arm in ("ar", "diffusion"):
        run(folder, f"train.py task={arm}_drafter {arm}_drafter.fit.max_steps=1")
    return folder


def test_decode_mode_writes_a_row_a_round_through_the_entry_point(workplace: Path) -> None:
    command = "data_prep/log_rounds.py rounds.mode=decode rounds.decode_limit=3"
    said = run(workplace, command)
    assert "visited rounds written to artifacts/tiny/visited_rounds" in said
    table = pq.read_table(workplace / "artifacts/tiny/visited_rounds/rounds.parquet")
    assert len(set(table["conversation"].to_pylist())) == 3
    assert set(table["split"].to_pylist()) == {"validation"}
    for phase in PHASES:
        assert min(table[f"{phase}_s"].to_pylist()) >= 0
    assert sum(table["verify_s"].to_pylist()) > 0
    manifest = manifest_of(workplace, "visited_rounds")
    assert manifest["policy"] == "random"
    assert manifest["target"]["name"] == "tiny"
    run(workplace, f"{command} rounds.policy=static_ar_tree")
    table = pq.read_table(workplace / "artifacts/tiny/visited_rounds/rounds.parquet")
    assert set(table["arm"].to_pylist()) <= {"ar_tree", "plain"}
    unknown = attempt(workplace, f"{command} rounds.policy=static_other")
    assert unknown.status == 2
    assert "unknown policy 'static_other'" in unknown.err


def test_dense_mode_goes_on_and_says_when_nothing_is_left(workplace: Path) -> None:
    said = run(workplace, "data_prep/log_rounds.py rounds.limits.validation=4")
    assert "ms a position for all arms" in said
    assert "warning" not in said  # greedy answers of the target itself
    again = run(workplace, "data_prep/log_rounds.py rounds.limits.validation=4")
    assert "complete already" in again
    wrong = attempt(workplace, "data_prep/log_rounds.py rounds.limits.validation=0 rounds.mode=x")
    assert wrong.status == 2
    assert "section rounds" in wrong.err
