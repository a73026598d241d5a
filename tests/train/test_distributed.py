"""Two gloo processes on the CPU against one: the same batches, losses and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from tests.children import exit_status, free_port, in_child
from tests.fakes import TAP_SIZE, tiny_ar, tiny_diffusion
from tests.tiny_training import (
    Recorder,
    Stop,
    Training,
    as_rank,
    changed,
    conversations,
    next_token,
)
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch
from whiflash_train.block_losses import BlockObjective, ObjectiveName
from whiflash_train.distillation import SoftLoss
from whiflash_train.module import Objective
from whiflash_train.objectives import Mean, Outcome, ar_objective, diffusion_objective
from whiflash_train.teacher import OnlineTeacher


def two_ranks(
    folder: Path, make: Callable[[], Training], strategy: str = "ddp", *, resume: bool = False
) -> list[dict]:
    """Train as two processes; of each its curve, rows, validations and the weights that it kept."""

    def rank_of(rank: int) -> None:
        training = make()
        training.options = ("trainer.devices=2", f"trainer.strategy={strategy}")
        recorder, metrics = training.run(resume=resume)
        found = {"metrics": metrics, "weights": dict(training.net.state_dict())}
        seen = {f.name: getattr(recorder, f.name) for f in fields(recorder)}
        torch.save({**seen, **found}, folder / f"rank{rank}.pt")

    port = free_port()
    pids = [
        in_child(partial(as_rank, rank, 2, port, partial(rank_of, rank)), folder / f"{rank}.log")
        for rank in range(2)
    ]
    statuses = [exit_status(pid) for pid in pids]
    logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    assert statuses == [0, 0], "\n".join(log[-6000:] for log in logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_like_one(
    both: list[dict], alone: Recorder, metrics: dict[str, float], weights: dict[str, Any]
) -> None:
    expected = [loss for _, loss, _ in alone.steps]
    for found in both:
        assert [loss for _, loss, _ in found["steps"]] == pytest.approx(expected, abs=1e-5)
        for name in ("val/loss", "val/tau"):
            assert found["metrics"][name] == pytest.approx(metrics[name], abs=1e-5)
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=2e-5)
    for mine, other, whole in zip(both[0]["rows"], both[1]["rows"], alone.rows, strict=True):
        assert sorted([*mine, *other]) == sorted(whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_learns_from_twice_the_rows(
    strategy: str, tmp_path: Path
) -> None:
    # 11 rows in batches of 4: shares of 2 and 2, and of 2 and 1 (U89, U92, and the gate).
    def make() -> Training:
        return Training(folder=tmp_path / strategy)

    both = two_ranks(tmp_path, make, strategy)
    alone = Training(folder=tmp_path / "alone")
    recorder, metrics = alone.run()
    assert_like_one(both, recorder, metrics, alone.net.state_dict())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_that_were_stopped_go_on_where_they_were(
    strategy: str, tmp_path: Path
) -> None:
    def make(*callbacks: Callback) -> Training:
        return Training(folder=tmp_path / "two", callbacks=callbacks)

    with pytest.raises(AssertionError, match="InterruptedError"):
        two_ranks(tmp_path, partial(make, Stop(15)), strategy)
    both = two_ranks(tmp_path, make, strategy, resume=True)
    straight, _ = Training(folder=tmp_path / "alone").run()
    for found in both:
        assert [step for step, *_ in found["steps"]] == list(range(11, 21))
        losses = [loss for _, loss, _ in found["steps"]]
        assert losses == pytest.approx(straight.losses[10:], abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_process_without_a_row_or_an_anchor_steps_along(strategy: str, tmp_path: Path) -> None:
    # Batches of one row leave the second process none, and rows of three tokens have no anchor; a
    # process that skipped its step waited for the other forever (U89, U91).
    rows = conversations(9, shortest=3)

    def make(name: str = "two") -> Training:
        return Training(folder=tmp_path / name, fit=changed(batch_size=1), rows=rows)

    both = two_ranks(tmp_path, make, strategy)
    assert not any(both[1]["rows"])
    alone = make("alone")
    recorder, metrics = alone.run()
    assert_like_one(both, recorder, metrics, alone.net.state_dict())


def test_seven_validation_rows_are_counted_once_each_by_two_processes(tmp_path: Path) -> None:
    # Summed twice, an accuracy was 1.42 (U90, U92).
    def counting(net: Any, batch: DrafterBatch) -> Outcome:
        loss, means = next_token(net, batch)
        if torch.is_grad_enabled():
            return loss, means
        rows = batch.rows[batch.anchor_mask.any(1)].tolist()
        for row in rows:
            means[f"row_{row}"] = Mean(torch.tensor(1.0), 1)
        return loss, {**means, "share": Mean(torch.tensor(0.5), len(rows))} if rows else {}

    fit = changed(max_steps=2)

    def make(name: str = "two") -> Training:
        return Training(folder=tmp_path / name, fit=fit, objective=counting)

    both = two_ranks(tmp_path, make)
    _, metrics = make("alone").run()
    for found in both:
        assert {f"val/row_{i}" for i in range(7)} <= set(found["metrics"])
        assert found["metrics"]["val/share"] == 0.5
        assert 1.0 <= found["metrics"]["val/tau"] <= 2.0
        assert found["metrics"]["val/tau"] == pytest.approx(metrics["val/tau"], abs=1e-6)


def test_accumulating_in_two_processes_is_one_batch_still(tmp_path: Path) -> None:
    def make() -> Training:
        return Training(folder=tmp_path / "two", fit=changed(accumulate=2))

    both = two_ranks(tmp_path, make)
    alone = Training(folder=tmp_path / "alone")
    recorder, _ = alone.run()
    for found in both:
        losses = [loss for _, loss, _ in found["steps"]]
        assert losses == pytest.approx(recorder.losses, abs=1e-5)


def ar_drafter(target: Target) -> tuple[nn.Module, Objective]:
    loss = SoftLoss(name="soft_ce", kl_scale=1.0, kl_decay=3.0)
    settings = {"draft_length": 3, "step_decay": 0.8, "draw_steps": True, "loss": loss}
    net = tiny_ar(target.drafter_shape, tap_size=TAP_SIZE)
    return net, partial(ar_objective, teacher=OnlineTeacher(target), **settings)


def block_drafter(target: Target, name: ObjectiveName) -> tuple[nn.Module, Objective]:
    loss = BlockObjective(
        name=name,
        smoothing=0.5,
        gamma=4.0,
        draw_slots=name == "decay",
        focal_weight=0.3,
        chain_weight=1.0,
    )
    net = tiny_diffusion(target.drafter_shape, num_layers=1)
    net.fc.weight.data /= TAP_SIZE
    return net, partial(diffusion_objective, teacher=OnlineTeacher(target), objective=loss)


@pytest.mark.parametrize(
    "drafter",
    [ar_drafter, partial(block_drafter, name="dpace"), partial(block_drafter, name="decay")],
    ids=["ar", "dpace", "decay"],
)
def test_a_drafter_learns_in_two_processes_what_it_learns_in_one(
    drafter: Callable[[Target], tuple[nn.Module, Objective]], target: Target, tmp_path: Path
) -> None:
    fit = changed(learning_rate=0.002)

    def make(name: str = "two") -> Training:
        net, objective = drafter(target)
        net.requires_grad_(True)
        return Training(folder=tmp_path / name, fit=fit, net=net, objective=objective)

    both = two_ranks(tmp_path, make)
    recorder, _ = make("alone").run()
    assert recorder.losses[-1] < recorder.losses[0]
    for found in both:
        losses = [loss for _, loss, _ in found["steps"]]
        assert losses == pytest.approx(recorder.losses, abs=1e-5)


def test_divided_weights_cannot_be_averaged_and_the_run_says_so(tmp_path: Path) -> None:
    options = ("trainer.strategy=fsdp", "trainer.devices=2")
    training = Training(folder=tmp_path, fit=changed(ema=0.9), options=options)
    with pytest.raises(UserError, match=r"set ar_drafter.fit.ema=null and decode_prompts=0"):
        training.run()
