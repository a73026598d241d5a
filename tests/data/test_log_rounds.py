from __future__ import annotations

import io
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from torch import Tensor

from tests.children import exit_status, free_port, in_child, kill_after, mount_small
from tests.fakes import (
    chain_arm,
    drafted,
    prefilled,
    random_ids,
    tiny_drafter,
    tree_arm,
)
from whiflash_infer.drafters.base import Arm
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.routing.rounds import ConversationRounds, load_rounds
from whiflash_infer.target import Target
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, TeacherRows
from whiflash_train.data.processes import Processes
from whiflash_train.round_logging import (
    RoundSettings,
    near_ties,
    read_rows,
    show_rounds,
    split_answers,
    write_rounds,
)

SETTINGS = RoundSettings(
    mode="dense",
    limits={"train": 0, "router": 5, "validation": None},
    batch_size=2,
    shard_positions=30,  # shards of 5 + 20, 13 + 9, 12 and 7 + 15 + 3 positions
    dtype="float32",
    margin_gb=0.0,
    force=False,
    policy="random",
    decode_limit=1,
)
SIZES = {"train": [4], "router": [5, 20, 13, 9, 12, 6], "validation": [7, 15, 3]}  # anchors
SHARDS = [25, 22, 12, 25]
PROMPT = 6
SKIPPED, RESUMED, DONE, UNCLEAN = 77, 3, 4, 5
ALONE = Processes(0, 1)


def texts(*, seed: int = 0) -> dict[str, Dataset]:
    """Texts of the tiny target's tokens; every second one was cut by the limit of tokens."""
    rows: dict[str, Dataset] = {}
    for split, sizes in SIZES.items():
        lengths = [PROMPT + size + 1 for size in sizes]
        ids = [random_ids(n, seed=100 * seed + 7 * n).to(torch.int32).numpy() for n in lengths]
        rows[split] = Dataset.from_dict(
            {
                "id": [f"{split}-{i}" for i in range(len(sizes))],
                "category": ["chat" if i % 2 else "math" for i in range(len(sizes))],
                "input_ids": ids,
                "loss_mask": [[i >= PROMPT for i in range(n)] for n in lengths],
                "truncated": [i % 2 == 1 for i in range(len(sizes))],
            }
        )
    return rows


@pytest.fixture(scope="module")
def arms(target: Target) -> dict[str, Arm]:
    ar, block = tiny_drafter("ar-classic", target), tiny_drafter("diffusion", target)
    return {
        AR: chain_arm(ar),
        AR_TREE: tree_arm(ar),
        DIFFUSION: chain_arm(block),
        DIFFUSION_TREE: tree_arm(block),
    }


def write(
    path: Path,
    target: Target,
    arms: Mapping[str, Arm],
    settings: RoundSettings = SETTINGS,
    rows: Mapping[str, Dataset] | None = None,
    *,
    lineage: Mapping[str, Any] | None = None,
    free: int = 10**12,
    processes: Processes = ALONE,
) -> str:
    """Write rounds; what was told."""
    said = io.StringIO()
    console = Console(file=said, width=200)
    rows = rows or texts()
    spent = write_rounds(
        path,
        {split: settings.limited(split, part) for split, part in rows.items()},
        target,
        arms,
        settings,
        lineage=lineage or {"drafters": {"ar": "weights"}, "conversations": "c0"},
        console=console,
        processes=processes,
        free_bytes=lambda _: free,
    )
    if processes.is_main:
        show_rounds(path, spent, console)
    return said.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def work_folders(path: Path) -> list[Path]:
    return sorted(p for p in path.parent.iterdir() if p.name.startswith(f".{path.name}"))


class StoppingTarget(Target):
    """The tiny target, until it has read so many batches."""

    def __init__(self, target: Target, batches: int, error: BaseException) -> None:
        self.__dict__.update(target.__dict__)
        self._left, self._error = batches, error

    def teach(self, ids: Tensor, mask: Tensor) -> TeacherRows:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().teach(ids, mask)


@pytest.fixture(scope="module")
def logged(target: Target, arms: dict[str, Arm], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete rounds in float32; for reading only."""
    path = tmp_path_factory.mktemp("logged") / "rounds"
    write(path, target, arms)
    return path


def by_name(path: Path) -> dict[str, ConversationRounds]:
    splits, _ = load_rounds(path, made_by="log_rounds")
    return {c.conversation: c for found in splits.values() for c in found}


# --- what is logged -------------------------------------------------------------------------------


def test_every_position_of_every_conversation_within_the_limits_is_there_in_order(
    logged: Path,
) -> None:
    splits, manifest = load_rounds(logged, made_by="log_rounds")
    assert list(splits) == ["router", "validation"]
    for split, sizes in (("router", SIZES["router"][:5]), ("validation", SIZES["validation"])):
        assert [c.conversation for c in splits[split]] == [
            f"{split}-{i}" for i in range(len(sizes))
        ]
        for found, size in zip(splits[split], sizes, strict=True):
            assert found.positions.tolist() == list(range(PROMPT, PROMPT + size))
            assert found.split == split
    assert [shard["positions"] for shard in manifest["shards"]] == SHARDS
    assert manifest["arms"] == [AR, AR_TREE, DIFFUSION, DIFFUSION_TREE]
    assert manifest["max_draft"] == {AR: 4, AR_TREE: 4, DIFFUSION: 4, DIFFUSION_TREE: 4}


def test_the_limit_of_a_text_is_known_where_it_was_cut(logged: Path) -> None:
    found = by_name(logged)
    assert found["router-0"].limit is None
    assert found["router-1"].limit == PROMPT + 20 + 1
    assert found["validation-1"].limit == PROMPT + 15 + 1
    assert found["validation-2"].limit is None


def test_features_and_flags_are_those_of_the_rows_of_a_text_read_alone(
    target: Target, logged: Path
) -> None:
    row = texts()["router"][1]
    ids = torch.tensor(row["input_ids"])
    with torch.no_grad():
        hidden = target.teach(ids[None], torch.ones(1, len(ids), dtype=torch.bool)).hidden[0]
        logits = target.tables.logits(hidden)
    found = by_name(logged)[row["id"]]
    for place, position in enumerate(found.positions.tolist()):
        probs = logits[position - 1].softmax(-1)
        entropy = -(probs * probs.log()).sum()
        features = found.features[place]
        torch.testing.assert_close(features[0], entropy, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(features[4:], hidden[position - 1], rtol=1e-3, atol=1e-3)
        choice = int(logits[position].argmax())
        assert found.greedy[place] == (choice == int(ids[position + 1]))
    assert not found.near_tie.all()


def test_labels_are_what_a_fresh_decoder_drafts_right(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    """On a text in which the drafter's own words are mixed."""
    rng = random.Random(0)
    ids = random_ids(PROMPT, seed=3)
    while len(ids) < 30:
        words = fresh_drafts(target, ids)[: rng.randint(0, 4)]
        ids = torch.cat([ids, torch.tensor([*words, rng.randint(5, 260)])])
    write(tmp_path / "rounds", target, arms, rows=only(ids.tolist()))
    found = by_name(tmp_path / "rounds")["only"]
    assert len(found) == len(ids) - PROMPT - 1
    for place, position in enumerate(found.positions.tolist()):
        drafts, following = fresh_drafts(target, ids[: position + 1]), ids[position + 1 :].tolist()
        right = [d == f for d, f in zip(drafts, following, strict=False)]
        assert found.accepted[AR][place] == [*right, False].index(False)
        assert found.censored[AR][place] == (all(right) and len(right) < 4)
    assert set(found.accepted[AR].tolist()) >= {0, 2, 3, 4}


def fresh_drafts(target: Target, ids: Tensor) -> list[int]:
    read, _ = prefilled(target, ids)
    return drafted(chain_arm(tiny_drafter("ar-classic", target)), read, 4)


def only(ids: list[int], mask: list[bool] | None = None) -> dict[str, Dataset]:
    """One conversation, of the router's split."""
    row = {"id": "only", "category": "", "input_ids": ids, "truncated": False}
    row["loss_mask"] = mask or [i >= PROMPT for i in range(len(ids))]
    return {"router": Dataset.from_list([row])}


def test_an_answer_in_the_middle_ends_where_decoding_it_would_end(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    ids = random_ids(30, seed=1).tolist()
    mask = [6 <= i < 12 or i >= 20 for i in range(30)]
    path = tmp_path / "rounds"
    write(path, target, arms, rows=only(ids, mask))
    splits, _ = load_rounds(path, made_by="log_rounds")
    first, second = splits["router"]
    assert first.positions.tolist() == [6, 7, 8, 9, 10]
    assert second.positions.tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28]
    assert first.conversation == second.conversation == "only"


def test_a_label_that_reaches_over_the_end_of_an_answer_is_cut_and_censored() -> None:
    """Anchors 5 6 7 of one answer, which ends at token 8, and 12 13 of one that ends the text."""
    whole = ConversationRounds(
        conversation="c",
        category="",
        split="router",
        positions=np.array([5, 6, 7, 12, 13]),
        features=torch.arange(5.0)[:, None],
        accepted={AR: np.array([4, 2, 0, 2, 0])},
        censored={AR: np.array([False, False, False, True, False])},
        near_tie=np.array([True, False, False, True, False]),
        greedy=np.array([False, True, True, False, True]),
        limit=15,
    )
    first, second = split_answers(whole, 15, {AR: 4})
    assert first.accepted[AR].tolist() == [3, 2, 0]  # 3, 2 and 1 tokens are left in the answer
    assert first.censored[AR].tolist() == [True, True, False]
    assert (first.limit, second.limit) == (None, 15)
    assert second.accepted[AR].tolist() == [2, 0]
    assert second.censored[AR].tolist() == [True, False]
    assert second.features.flatten().tolist() == [3, 4]
    assert second.near_tie.tolist() == [True, False]
    assert second.greedy.tolist() == [False, True]


@pytest.mark.parametrize(
    ("dtype", "best", "second", "is_near"),
    [
        # Of bfloat16 8 bits are kept: two steps of 16 are 2 * 16 / 256 = 0.125.
        (torch.bfloat16, 16.0, 15.9, True),
        (torch.bfloat16, 16.0, 15.8, False),
        (torch.bfloat16, -16.0, -16.1, True),
        (torch.bfloat16, 1.0, 0.9, False),
        (torch.float16, 16.0, 15.99, True),
        (torch.float16, 16.0, 15.9, False),
        (torch.float32, 16.0, 15.9995, True),
        (torch.float32, 16.0, 15.99, False),
        (torch.float32, 3.0, 3.0, True),
    ],
)
def test_a_tie_is_near_when_rounding_may_turn_it(
    dtype: torch.dtype, best: float, second: float, is_near: bool
) -> None:
    logits = torch.tensor([[-50.0, second, best, -20.0], [-50.0, -20.0, second, best]])
    assert near_ties(logits, dtype).tolist() == [is_near, is_near]


def greedy_text(target: Target, length: int, *, seed: int) -> list[int]:
    """A prompt, and what the target says after it."""
    ids = random_ids(PROMPT, seed=seed)
    with torch.no_grad():
        while len(ids) < length:
            hidden = target.teach(ids[None], torch.ones(1, len(ids), dtype=torch.bool)).hidden
            ids = torch.cat([ids, target.tables.logits(hidden[0, -1:]).argmax(-1)])
    return ids.tolist()


def test_greedy_is_where_the_text_goes_on_with_the_targets_own_choice(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    ids = greedy_text(target, 24, seed=5)
    changed = ids.copy()
    changed[15] += 1 if ids[15] < 260 else -1
    for text, other in ((ids, []), (changed, [14])):
        path = tmp_path / f"rounds-{len(other)}"
        write(path, target, arms, rows=only(text))
        greedy = by_name(path)["only"].greedy
        before = [n for n in range(PROMPT, 15) if not greedy[n - PROMPT]]
        assert before == other


def test_ties_are_told_and_texts_that_are_not_the_targets_own_are_warned_of(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    own = write(tmp_path / "own", target, arms, rows=only(greedy_text(target, 40, seed=2)))
    assert "near ties: " in own
    assert "token than the target's own choice: 0.0%" in own
    assert "warning" not in own
    foreign = write(tmp_path / "foreign", target, arms)
    assert "warning: at 100% of positions the text goes on with a token that" in foreign


def test_long_texts_are_read_in_parts_of_the_head(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(40, seed=1)
    with torch.no_grad():
        hidden = target.teach(ids[None], torch.ones(1, 40, dtype=torch.bool)).hidden[0]
    anchors = torch.tensor([3, 4, 5, 20, 21, 38])
    whole = read_rows(target, ids, hidden, anchors)
    monkeypatch.setattr("whiflash_train.round_logging._ROWS_A_PASS", 4)
    parts = read_rows(target, ids, hidden, anchors)
    torch.testing.assert_close(parts.features, whole.features, rtol=1e-4, atol=1e-4)
    assert parts.greedy.tolist() == whole.greedy.tolist()
    assert parts.near_tie.tolist() == whole.near_tie.tolist()


# --- size, and what is refused --------------------------------------------------------------------


def test_size_is_told_before_anything_is_written(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    said = write(tmp_path / "rounds", target, arms)
    size = 84 * (64 + 4) * 4 / 1e6
    assert f"84 rows in 4 shards: {size:.2f} MB of features in float32" in said
    assert "of table at most" in said
    assert "free on the disk: 1,000.00 GB" in said
    assert said.index("of features") < said.index("84/84")
    assert "ms a position for all arms" in said


def test_what_would_fill_the_disk_is_refused_unless_forced(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    path, careful = tmp_path / "rounds", replace(SETTINGS, margin_gb=0.5)
    with pytest.raises(UserError, match=r"need 0\.\d\d MB and rounds\.margin_gb=0\.5 is to stay"):
        write(path, target, arms, careful, free=500_000_000)
    assert list(tmp_path.iterdir()) == []
    write(path, target, arms, replace(careful, force=True), free=0)


def test_limits_that_leave_nothing_are_told(
    target: Target, arms: dict[str, Arm], tmp_path: Path
) -> None:
    nothing = replace(SETTINGS, limits={"train": 0, "router": 0, "validation": 0})
    with pytest.raises(UserError, match=r"rounds\.limits leaves no conversation"):
        write(tmp_path / "rounds", target, arms, nothing)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("batch_size", 0, "batch_size is 0"),
        ("shard_positions", 0, "shard_positions is 0"),
        ("decode_limit", 0, "decode_limit is 0"),
        ("margin_gb", -1.0, "margin_gb is -1"),
        ("limits", {"test": 3}, "limits has 'test': choose from train, router, validation"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replace(SETTINGS, **{field: value})


def test_a_shard_that_is_gone_is_named_with_the_command(logged: Path, tmp_path: Path) -> None:
    shutil.copytree(logged, tmp_path / "rounds")
    (tmp_path / "rounds/rounds-00002.parquet").unlink()
    with pytest.raises(ArtifactError, match=r"rounds-00002\.parquet is missing.*again with: X"):
        load_rounds(tmp_path / "rounds", made_by="X")


# --- interrupted runs -----------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [0, 1, 3, 4])  # of 5
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_run_goes_on_to_the_very_bytes_of_a_straight_one(
    target: Target,
    arms: dict[str, Arm],
    logged: Path,
    tmp_path: Path,
    batches: int,
    error: BaseException,
) -> None:
    path = tmp_path / "rounds"
    with pytest.raises(type(error)):
        write(path, StoppingTarget(target, batches, error), arms)
    assert not path.exists()
    write(path, target, arms)
    assert contents(path) == contents(logged)
    assert work_folders(path) == []


def test_whole_shards_are_not_labelled_again(
    target: Target, arms: dict[str, Arm], logged: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rounds"
    with pytest.raises(KeyboardInterrupt):
        write(path, StoppingTarget(target, 2, KeyboardInterrupt()), arms)  # 1, 1, 1 and 2 batches
    work = work_folders(path)[0]
    assert sorted(contents(work))[2:] == ["rounds-00000.parquet", "rounds-00001.parquet"]
    (work / "features-00000.safetensors").unlink()  # half a shard is none
    (work / "rounds-00002.parquet").write_bytes(b"PAR1")
    said = write(path, target, arms)
    assert "1 shards are there already" in said
    assert "62/62" in said
    assert contents(path) == contents(logged)


def test_nothing_is_labelled_again_when_all_is_there(
    target: Target, arms: dict[str, Arm], logged: Path
) -> None:
    unable = StoppingTarget(target, 0, AssertionError("the target ran"))
    said = write(logged, unable, arms)
    assert "complete already" in said
    assert "ar_tree: " in said


CHANGED: dict[str, dict[str, Any]] = {
    "conversations": {"lineage": {"drafters": {"ar": "weights"}, "conversations": "c1"}},
    "drafters": {"lineage": {"drafters": {"ar": "other"}, "conversations": "c0"}},
    "dtype": {"settings": replace(SETTINGS, dtype="bfloat16")},
    "limits": {"settings": replace(SETTINGS, limits={"router": 5, "train": 0, "validation": 2})},
    "shard_positions": {"settings": replace(SETTINGS, shard_positions=40)},
    "batch_size": {"settings": replace(SETTINGS, batch_size=3)},
}


@pytest.mark.parametrize("changed", [*CHANGED, "arms", "shapes"])
def test_shards_that_another_run_left_are_not_read(
    target: Target, arms: dict[str, Arm], logged: Path, tmp_path: Path, changed: str
) -> None:
    path, others = tmp_path / "rounds", dict(arms)
    if changed == "arms":
        del others[AR_TREE]
    if changed == "shapes":
        others[AR_TREE] = tree_arm(tiny_drafter("ar-classic", target), num_nodes=6)
    unable = StoppingTarget(target, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(path, unable, others, **CHANGED.get(changed, {}))
    assert len(contents(work_folders(path)[0])) > 0
    assert "there already" not in write(path, target, arms)
    assert contents(path) == contents(logged)
    assert work_folders(path) == []


def test_runs_killed_at_any_moment_end_in_the_very_bytes_of_a_straight_one(
    target: Target, arms: dict[str, Arm], logged: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "rounds", tmp_path / "log"

    def run() -> int:
        write(path, target, arms)
        return 0

    started = time.perf_counter()
    assert exit_status(in_child(run, log)) == 0, log.read_text()
    span, rng, killed = time.perf_counter() - started, random.Random(0), 0
    for _ in range(12):
        if path.exists():  # not killed: what it left is whole, the next one starts anew
            assert contents(path) == contents(logged)
            shutil.rmtree(path)
        killed += kill_after(in_child(run, log), rng.uniform(0.0, span)) == -signal.SIGKILL
    assert killed >= 3
    write(path, target, arms)
    assert contents(path) == contents(logged)
    assert work_folders(path) == []


def test_two_processes_share_the_shards_and_give_the_same_files(
    target: Target, arms: dict[str, Arm], logged: Path, tmp_path: Path
) -> None:
    path, port = tmp_path / "rounds", free_port()

    def run(rank: int) -> int:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "1"}
        PartialState._reset_state()  # earlier tests may have asked it where they run
        try:
            PartialState(cpu=True)  # which without GPUs it would not take for several processes
            write(path, target, arms, processes=Processes.here())
        except Exception:
            os.write(2, traceback.format_exc().encode())  # behind what pytest captures
            return 1
        return 0

    children = [in_child(partial(run, rank), tmp_path / f"log{rank}") for rank in range(2)]
    told = [exit_status(child) for child in children]
    logs = [(tmp_path / f"log{rank}").read_text() for rank in range(2)]
    assert told == [0, 0], logs
    assert contents(path) == contents(logged)
    assert work_folders(path) == []


def test_a_full_disk_stops_the_run_cleanly_and_the_next_one_goes_on(
    target: Target, arms: dict[str, Arm], logged: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    copy, told = tmp_path / "copy", tmp_path / "told"

    def run() -> int:
        if not mount_small(disk, megabytes=1):
            return SKIPPED
        path, ballast = disk / "rounds", disk / "ballast"
        ballast.write_bytes(bytes(1_000_000))
        try:
            write(path, target, arms, replace(SETTINGS, force=True))
        except UserError as error:
            told.write_text(str(error))
        else:
            return DONE
        if path.exists():
            return UNCLEAN
        ballast.unlink()
        write(path, target, arms, replace(SETTINGS, force=True))
        shutil.copytree(path, copy)
        return RESUMED

    status = exit_status(in_child(run, tmp_path / "log"))
    if status == SKIPPED:
        pytest.skip("needs the right to mount a file system in a namespace of its own")
    assert status == RESUMED, (tmp_path / "log").read_text()
    assert "No space left on device. Free some space and run the same command" in told.read_text()
    assert contents(copy) == contents(logged)
