"""Generation through its entry point: killed, on a full disk, in several processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset

from tests.children import exit_status, in_child, kill_at_random, mount_small
from tests.data.fake_server import FakeServer, Reply, asked, echo, failure
from tests.stages import ROOT, attempt, common, manifest_of, run
from whiflash_infer.sources import byte_tokenizer

COMMAND = (
    "data_prep/generate.py source=file source.file.path=../rows.jsonl data.limit=null "
    "data.validation_fraction=0.2 generate.batch_size=4"
)


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file of an artefact."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def stage(folder: Path, command: str) -> int:
    """For a child: run a stage, and let its log tell what happened."""
    done = attempt(folder, command)
    os.write(1, (done.out + done.err).encode())
    return done.status


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in (folder / "artifacts/tiny").iterdir() if p.name.startswith(".")]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder in which generation ran once undisturbed, and how long it took."""
    folder = tmp_path_factory.mktemp("generate") / "straight"
    folder.mkdir()
    rows = [{"prompt": f"Question {i}: " + "why? " * (i % 7)} for i in range(32)]
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run(folder, COMMAND)  # builds the target
    started = time.perf_counter()
    run(folder, COMMAND)
    return folder, time.perf_counter() - started


def test_killed_twenty_times_it_gives_the_files_of_an_undisturbed_run(
    straight: tuple[Path, float],
) -> None:
    undisturbed, seconds = straight
    folder = undisturbed.with_name("killed")
    folder.mkdir()

    def start() -> int:
        return in_child(lambda: stage(folder, COMMAND), folder / "log")

    killed = kill_at_random(start, times=20, within=seconds, seed=1)
    assert killed > 5
    run(folder, COMMAND)
    artefact = "artifacts/tiny/conversations"
    assert contents(folder / artefact) == contents(undisturbed / artefact)
    assert leftovers(folder) == []


def test_a_place_that_cannot_be_written_is_told_and_leaves_the_old_artefact_alone(
    straight: tuple[Path, float],
) -> None:
    undisturbed, _ = straight
    folder = undisturbed.with_name("resumed")
    shutil.copytree(undisturbed, folder)
    artefact = folder / "artifacts/tiny/conversations"
    before = contents(artefact)
    blocked = attempt(folder, f"{COMMAND} paths.conversations=/dev/null/x")
    assert blocked.status == 2
    assert "cannot write" in blocked.err
    assert contents(artefact) == before


def test_another_seed_or_limit_does_not_take_over_old_answers(
    straight: tuple[Path, float],
) -> None:
    undisturbed, _ = straight
    folder = undisturbed.with_name("other")
    folder.mkdir()
    options = "generate.truncated=drop"  # the tiny target never ends its answers
    for seed in (0, 1):
        done = attempt(folder, f"{COMMAND} {options} seed={seed}")
        assert done.status == 2
        assert "going on after" not in done.out
        assert "answer_truncated" in done.err
    again = attempt(folder, f"{COMMAND} {options} seed=1")
    assert "going on after 32 answers" in again.out
    assert len(leftovers(folder)) == 2


def test_a_full_disk_stops_it_cleanly_and_elsewhere_it_completes(
    straight: tuple[Path, float],
) -> None:
    undisturbed, _ = straight
    folder = undisturbed.with_name("full")
    small = folder / "small"
    small.mkdir(parents=True)
    rows = [{"prompt": f"{i} " + "long question " * 30, "answer": "yes"} for i in range(1500)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = (
        "data_prep/prepare.py source=file source.file.path=rows.jsonl data.limit=null "
        "paths.artifacts=small/tiny hydra.run.dir=run"
    )

    def on_small_disk() -> int:
        if not mount_small(small, megabytes=1):
            return 77
        done = attempt(folder, command)
        os.write(1, (done.out + done.err).encode())
        (folder / "told").write_text(done.err)
        found = [str(p) for p in small.rglob("*") if p.is_file()]
        (folder / "found").write_text(json.dumps(found))
        return done.status

    status = exit_status(in_child(on_small_disk, folder / "log"))
    if status == 77:
        pytest.skip("this machine lets no process mount a file system of its own")
    assert status == 2, (folder / "log").read_text()
    assert "no space" in (folder / "told").read_text().lower()
    assert json.loads((folder / "found").read_text()) == []
    assert attempt(folder, command.replace("small/tiny", "artifacts/tiny")).status == 0
    assert manifest_of(folder, "conversations")["counts"]["kept"] == 1500


def test_two_launched_processes_share_the_work_and_give_the_same_files(
    straight: tuple[Path, float],
) -> None:
    undisturbed, _ = straight
    folder = undisturbed.with_name("launched")
    folder.mkdir()
    script, *options = COMMAND.split()
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command = [*launch, str(ROOT / script), *options, *common(folder)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "HYDRA_FULL_ERROR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    artefact = "artifacts/tiny/conversations"
    assert contents(folder / artefact) == contents(undisturbed / artefact)
    assert done.stdout.count("conversations written") == 1


def served(server: FakeServer) -> str:
    return f"{COMMAND} engine=openai engine.urls=[{server.url}] engine.backoff_s=0.01"


def rows_of(folder: Path) -> list[dict]:
    found = []
    for split in ("train", "router", "validation"):
        path = folder / f"artifacts/tiny/conversations/{split}.arrow"
        found += Dataset.from_file(str(path)).to_list()
    return found


def test_answers_of_a_server_stand_in_input_order_once_each_and_are_masked_like_any_other(
    straight: tuple[Path, float],
) -> None:
    folder = straight[0].with_name("served")
    folder.mkdir()

    def late_and_flaky(request: dict) -> Reply:
        luck = random.Random(f"{asked(request)} {len(server.requests)}")
        fault = luck.choice([None, None, None, "drop", "cut"])
        return replace(echo(request), delay=luck.uniform(0, 0.02), fault=fault)

    with FakeServer(late_and_flaky) as server:
        output = run(folder, f"{served(server)} engine.max_retries=30")
    assert "tried again" in output
    by_split = [int(row["id"].rpartition(":")[2]) for row in rows_of(folder)]
    assert sorted(by_split) == list(range(1, 33))
    tokenizer = byte_tokenizer()
    for row in rows_of(folder):
        kept = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
        text = str(tokenizer.decode(kept))
        assert text.startswith("answer to Question")
        assert text.endswith("<|im_end|>")
        assert not row["truncated"]
    target = manifest_of(folder, "conversations")["target"]
    assert "weights" not in target
    assert target["chat_template"]


def test_prompts_that_got_no_answer_fail_the_run_and_alone_are_asked_again(
    straight: tuple[Path, float],
) -> None:
    folder = straight[0].with_name("unanswered")
    folder.mkdir()

    def picky(request: dict) -> Reply:
        return failure(400, "too long") if "Question 7:" in asked(request) else echo(request)

    with FakeServer(picky) as server:
        done = attempt(folder, served(server))
        assert done.status == 2
        assert "1 of 32 rows got no answer" in done.err
        assert "too long" in done.err
        assert len(server.requests) == 32
        server.script = echo
        output = run(folder, served(server))
        assert len(server.requests) == 33
    assert "going on after 31 answers" in output
    assert manifest_of(folder, "conversations")["counts"]["failed"] == 0
    assert len(rows_of(folder)) == 32


def test_a_run_may_go_on_without_the_prompts_that_got_no_answer(
    straight: tuple[Path, float],
) -> None:
    folder = straight[0].with_name("allowed")
    folder.mkdir()

    def picky(request: dict) -> Reply:
        return failure(400, "too long") if "Question 7:" in asked(request) else echo(request)

    with FakeServer(picky) as server:
        output = run(folder, f"{served(server)} generate.allow_failed=true")
    assert "read 32 = kept 31 + dropped 0 + failed 1" in output
    assert len(rows_of(folder)) == 31


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("generate.max_prompt_tokens=2030", "more than data.mask.max_length=2048"),
        (
            "generate.max_new_tokens=2040 generate.max_prompt_tokens=60 data.mask.max_length=9999",
            "more than the 2048 that tiny reads",
        ),
    ],
)
def test_rows_that_would_be_too_long_are_told_before_anything_is_answered(
    straight: tuple[Path, float], options: str, message: str
) -> None:
    done = attempt(straight[0], f"{COMMAND} {options}")
    assert done.status == 2
    assert message in done.err


def test_strict_stops_at_the_first_bad_row_with_its_place(straight: tuple[Path, float]) -> None:
    folder, _ = straight
    (folder / "bad.jsonl").write_text('{"prompt": "good"}\n\n{"messages": []}\n')
    done = attempt(
        folder, "data_prep/generate.py source=file source.file.path=bad.jsonl strict=true"
    )
    assert done.status == 2
    assert "bad.jsonl:3: no_messages" in done.err
    flag = attempt(folder, "data_prep/generate.py --strict source=file source.file.path=bad.jsonl")
    assert flag.err == done.err
