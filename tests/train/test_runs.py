"""Trainings through train.py, on the tiny target."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.stages import attempt, manifest_of, run
from whiflash_infer.checkpoint import load_drafter
from whiflash_infer.nets.ar import ARDrafter

EXACT = "dtype=float32 trainer.precision=32-true"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations."""
    folder = tmp_path_factory.mktemp("runs") / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py")
    return folder


@pytest.fixture(scope="module")
def answered(workplace: Path) -> str:
    """Conversations that another program wrote: what they hold does not depend on the weights."""
    rows = [{"prompt": f"Question {i}?", "answer": "ZYXWVUT" * 9} for i in range(60)]
    (workplace / "other.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    data = "paths.conversations=other/conversations"
    run(
        workplace,
        f"data_prep/prepare.py {data} source=file source.file.path=other.jsonl data.limit=null",
    )
    return data


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


def test_a_resumed_drafter_keeps_the_vocabulary_it_began_with(
    workplace: Path, answered: str
) -> None:
    # Chosen anew from changed data, the map no longer fitted the head's rows (U49).
    train = f"train.py task=ar_drafter {EXACT} hydra.run.dir=vocabulary paths.ar_drafter=vocab"
    run(workplace, train)
    first = load_file(workplace / "vocab/model.safetensors")
    checkpoint = workplace / "vocabulary/checkpoints/last.ckpt"
    found = torch.load(checkpoint, weights_only=True)
    run(workplace, f"{train.replace('vocab', 'fresh')} {answered}")
    fresh = load_file(workplace / "fresh/model.safetensors")["d2t"]
    assert not torch.equal(fresh, first["d2t"])
    shutil.rmtree(workplace / "vocab")
    for path in (workplace / "vocabulary").rglob("*"):
        if path.is_file() and path.name not in {"last.ckpt", "task.json"}:
            path.unlink()
    run(workplace, f"{train} {answered} resume=true")
    resumed = load_file(workplace / "vocab/model.safetensors")
    for name in ("d2t", "t2d"):
        assert torch.equal(resumed[name], first[name])
        assert torch.equal(resumed[name], found["state_dict"][f"net.{name}"])


def test_a_copied_run_goes_on_and_one_of_changed_weights_is_refused_with_both_values(
    workplace: Path, answered: str
) -> None:
    # A new mount had other times and places, and the same weights were refused (U99).
    train = (
        f"train.py task=ar_drafter {EXACT} {answered} ar_drafter.fit.max_steps=2 "
        "ar_drafter.fit.checkpoint_every=1"
    )
    run(workplace, f"{train} hydra.run.dir=first paths.ar_drafter=first/ar")
    shutil.copytree(workplace / "first", workplace / "copied")
    shutil.copytree(workplace.parent / "cache/targets", workplace / "moved")
    for path in [*(workplace / "copied").rglob("*"), *(workplace / "moved").rglob("*")]:
        path.touch()
    again = (
        f"{train} hydra.run.dir=copied paths.ar_drafter=copied/ar resume=true "
        "target.source.cache_dir=moved"
    )
    run(workplace, again)
    kept = [load_file(workplace / f"{name}/ar/model.safetensors") for name in ("first", "copied")]
    assert all(torch.equal(kept[1][name], tensor) for name, tensor in kept[0].items())

    weights = next((workplace / "moved").glob("*/model.safetensors"))
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, weights, metadata={"format": "pt"})
    refused = attempt(workplace, again)
    assert refused.status == 2
    told = re.search(r"target.weights: the artefact has '(\w+)', this run has '(\w+)'", refused.err)
    assert told is not None
    trained = json.loads((workplace / "first/ar/manifest.json").read_text())["target"]["weights"]
    assert told[1] == trained
    assert told[2] != trained


@pytest.mark.parametrize(("size", "tokens"), [("100", 100), ("null", 261)])
def test_a_run_that_ends_between_its_checkpoints_exports_the_vocabulary_asked_for(
    size: str, tokens: int, workplace: Path
) -> None:
    # Nothing was left of the last steps (U97); a map of another size was used again (U48).
    fit = "ar_drafter.fit.max_steps=3 ar_drafter.fit.val_every=2 ar_drafter.fit.checkpoint_every=2"
    run(
        workplace,
        f"train.py task=ar_drafter {EXACT} {fit} ar_drafter.draft_vocab_size={size} "
        "hydra.run.dir=short paths.ar_drafter=short/ar",
    )
    last = torch.load(workplace / "short/checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 3
    net, manifest = load_drafter(
        workplace / "short/ar", made_by="-", dtype=torch.float32, device="cpu"
    )
    assert isinstance(net, ARDrafter)
    assert manifest["metrics"]["step"] in (2, 3)
    assert len(net.d2t) == int(net.t2d.sum()) == tokens
