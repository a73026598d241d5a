"""Trainings through train.py, on the tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.stages import attempt, manifest_of, run

EXACT = "dtype=float32 trainer.precision=32-true"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations."""
    folder = tmp_path_factory.mktemp("runs") / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py")
    return folder


def test_a_training_that_diverges_exits_with_2_and_names_the_rows(workplace: Path) -> None:
    # A failed training ended with exit 0, and the next jobs ran on its leftovers (U101).
    done = attempt(
        workplace,
        f"train.py task=ar_drafter {EXACT} ar_drafter.fit.learning_rate=1e30 "
        "ar_drafter.fit.max_skipped=2 paths.ar_drafter=diverged",
    )
    assert done.status == 2
    assert "not finite in 2 steps in a row" in done.err.replace("\n", " ")
    assert "of the training data" in done.err.replace("\n", " ")
    assert not (workplace / "diverged").exists()


def test_a_sweep_on_several_devices_is_refused_before_it_hangs(workplace: Path) -> None:
    done = attempt(workplace, "train.py -m task=ar_drafter trainer.devices=2 seed=0,1")
    assert done.status == 2
    assert "a sweep runs in one process: set trainer.devices=1" in done.err.replace("\n", " ")


@pytest.mark.parametrize("task", ["ar_drafter", "diffusion_drafter"])
def test_both_drafters_log_the_same_metrics_and_keep_the_best_by_real_tau(
    task: str, workplace: Path
) -> None:
    fit = f"{task}.fit"
    output = run(
        workplace,
        f"train.py task={task} {EXACT} {fit}.decode_prompts=2 {fit}.decode_tokens=8 "
        f"{fit}.monitor=val/real_tau {fit}.ema=0.9 {fit}.accumulate=2 {fit}.tokens_per_batch=600",
    )
    for told in ("starts as", "target layer", "memory, estimated", "optimiser states"):
        assert told in output
    metrics = manifest_of(workplace, task)["metrics"]
    assert {"step", "minutes", "val/loss", "val/tau", "val/real_tau", "val/accepted_1"} <= set(
        metrics
    )
    assert 1.0 <= metrics["val/real_tau"] <= 8.0
    best = json.loads((workplace / f"artifacts/tiny/runs/{task}/checkpoints/best.json").read_text())
    assert best["val/real_tau"] == metrics["val/real_tau"]


def test_a_resumed_drafter_keeps_the_vocabulary_it_began_with(workplace: Path) -> None:
    # Chosen anew from changed data, the map no longer fitted the head's rows (U49).
    train = f"train.py task=ar_drafter {EXACT} hydra.run.dir=vocabulary paths.ar_drafter=vocab"
    run(workplace, train)
    first = load_file(workplace / "vocab/model.safetensors")["d2t"]
    checkpoint = workplace / "vocabulary/checkpoints/last.ckpt"
    found = torch.load(checkpoint, weights_only=True)
    rows = [{"prompt": f"Question {i}?", "answer": "ZYXWVUT" * 9} for i in range(60)]
    (workplace / "other.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    data = "paths.conversations=other/conversations"
    run(
        workplace,
        f"data_prep/prepare.py {data} source=file source.file.path=other.jsonl data.limit=null",
    )
    run(workplace, f"{train.replace('vocab', 'fresh')} {data}")
    fresh = load_file(workplace / "fresh/model.safetensors")["d2t"]
    assert not torch.equal(fresh, first)
    run(workplace, f"{train} {data} resume=true")
    resumed = load_file(workplace / "vocab/model.safetensors")["d2t"]
    assert torch.equal(resumed, first)
    assert torch.equal(resumed, found["state_dict"]["net.d2t"])
