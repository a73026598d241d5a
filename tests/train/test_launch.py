"""train.py as torchrun, srun, Lightning or a user on two computers start it: two gloo processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.utilities import rank_zero_only
from safetensors.torch import load_file

from tests.children import exit_status, free_port, in_child
from tests.stages import attempt, run
from whiflash_train.loggers import wandb_logger
from whiflash_train.runner import local_rank

TRAIN = (
    "train.py task=ar_drafter dtype=float32 trainer.precision=32-true device=cpu logger=none "
    "ar_drafter.fit.max_steps=6 ar_drafter.fit.val_every=3 ar_drafter.fit.tokens_per_batch=600 "
    "ar_drafter.fit.accumulate=2 ar_drafter.fit.decode_prompts=2 ar_drafter.fit.decode_tokens=8"
)
ONE_COMPUTER = "trainer.strategy=ddp trainer.devices=2"
TWO_COMPUTERS = "trainer.strategy=ddp trainer.devices=1 trainer.num_nodes=2"


def by_torchrun(rank: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
    }


def by_srun(rank: int) -> dict[str, str]:
    return {
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
    }


def by_hand(rank: int) -> dict[str, str]:
    """As Lightning wants it: one start a computer, which says which one it is."""
    return {"NODE_RANK": str(rank)}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations and a drafter that one process trained."""
    folder = tmp_path_factory.mktemp("launch") / "work"
    folder.mkdir()
    run(folder, "data_prep/generate.py")
    run(folder, f"{TRAIN} paths.ar_drafter=alone hydra.run.dir=alone_run")
    return folder


def assert_like_alone(workplace: Path, name: str) -> None:
    alone, found = (load_file(workplace / n / "model.safetensors") for n in ("alone", name))
    assert found.keys() == alone.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("launcher", "machine"),
    [(by_torchrun, ONE_COMPUTER), (by_srun, TWO_COMPUTERS), (by_hand, TWO_COMPUTERS)],
)
def test_processes_that_a_launcher_started_train_together_and_one_of_them_writes(
    launcher: Callable[[int], dict[str, str]],
    machine: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    name = launcher.__name__
    command = f"{TRAIN} {machine} paths.ar_drafter={name} hydra.run.dir={name}_run"

    def process(rank: int) -> int:
        os.environ |= launcher(rank)
        rank_zero_only.rank = _get_rank() or 0  # pyright: ignore - as Lightning does when imported
        done = attempt(workplace, command)
        os.write(1, (done.out + done.err).encode())
        return done.status

    logs = [workplace / f"{name}{rank}.log" for rank in range(2)]
    pids = [in_child(partial(process, rank), log) for rank, log in enumerate(logs)]
    statuses = [exit_status(pid) for pid in pids]
    told = [log.read_text() for log in logs]
    assert statuses == [0, 0], "\n".join(text[-6000:] for text in told)
    assert [text.count(f"written to {name}") for text in told] == [1, 0]
    assert_like_alone(workplace, name)


@pytest.mark.parametrize(
    ("environment", "rank"), [({}, 0), ({"SLURM_LOCALID": "3"}, 3), (by_torchrun(1), 1)]
)
def test_a_process_knows_its_gpu_whoever_started_it(environment: dict[str, str], rank: int) -> None:
    assert local_rank(environment) == rank


def test_a_process_beside_the_first_logs_to_no_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    wandb_logger(output_dir=str(tmp_path), project="p", name="n", entity=None, tags=[])
    assert capsys.readouterr().out == ""
