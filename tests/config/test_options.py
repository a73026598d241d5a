"""Every option of a training changes what is trained, or how, on the tiny target (U113)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tests.config.conftest import EXAMPLE, MOVED, Explored
from tests.config.leaves import CONF
from tests.routing.worlds import NUM_FEATURES, plain_costs, two_regimes
from tests.tiny_training import FIT, NextToken, Stop, Training, next_token
from whiflash_infer.errors import UserError
from whiflash_infer.nets.router import RouterConfig
from whiflash_infer.routing.policies import HazardPolicy, HazardSettings
from whiflash_infer.routing.replay import replay, stack_texts
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch, Share
from whiflash_train.callbacks import RealTau
from whiflash_train.objectives import Outcome
from whiflash_train.preparation import build_section
from whiflash_train.replay_validation import ReplayValidation
from whiflash_train.router_fit import FitRecipe, fit_hazards
from whiflash_train.router_task import RouterTask
from whiflash_train.runner import configured_costs, load_target
from whiflash_train.tasks import (
    ARDrafterTask,
    DiffusionDrafterTask,
    DrafterFitSettings,
    FitSettings,
    Trainee,
    Workspace,
)

# Of each option another value, and what else must be set for it to count.
OPTIONS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "ar_drafter": {
        "draft_length": (3, {}),
        "draft_vocab_size": (100, {}),
        "fc_norm": (True, {}),
        "norm_output": (True, {}),
        "qk_norm": (True, {}),
        "init": ("random", {}),
        "train_head": (True, {}),
        "loss": ("kl", {}),
        "kl_scale": (0.5, {"loss": "lk_lambda"}),
        "kl_decay": (0.5, {"loss": "lk_lambda"}),
        "step_decay": (0.5, {"draw_steps": False}),
        "draw_steps": (False, {}),
        "num_anchors": (5, {}),
        "features": ("online", {}),
    },
    "diffusion_drafter": {
        "num_layers": (2, {}),
        "block_size": (5, {}),
        "markov_rank": (4, {}),
        "sliding_window": (8, {}),
        "init": ("random", {}),
        "objective": ("kd", {}),
        "smoothing": (0.1, {}),
        "gamma": (1.0, {"objective": "decay"}),
        "draw_slots": (True, {"objective": "decay"}),
        "focal_weight": (0.9, {"objective": "focal"}),
        "chain_weight": (3.0, {"objective": "chain"}),
        "num_anchors": (5, {}),
        "features": ("memory", {}),
    },
    "router": {
        "lam": (40.0, {}),
        "width": (16, {}),
        "dropout": (0.1, {}),
        "arms": (["ar"], {}),
        "features": (["entropy"], {}),
        "loss": ("brier", {}),
        "adaptive_length": (False, {}),
        "switch_margin": (0.5, {}),
        "dwell": (3, {}),
        "latch": (4, {}),
        "frailty": (2.0, {}),
        "online_price": (1.0, {}),
        "drift": (2.0, {}),
        "train_on": (["a"], {}),
        "leave_out": (["a"], {}),
        "ceiling_folds": (2, {}),
    },
}
TASKS = {
    "ar_drafter": ARDrafterTask,
    "diffusion_drafter": DiffusionDrafterTask,
    "router": RouterTask,
}
CASES = [(task, option) for task, options in OPTIONS.items() for option in options]


@functools.cache
def configuration(task: str) -> DictConfig:
    """Of the runs of `explored`, and quick to build."""
    moved = [f"paths.{name}=moved/{name}" for name in MOVED]
    options = [f"task={task}", "target=tiny", f"experiment={EXAMPLE}", "device=cpu", *moved]
    quick = ["router.frailty=null", "router.ceiling_folds=0", "costs.allow_foreign=true"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=[*options, *quick, "router.fit.max_steps=2"])


def build(task: str, changes: dict[str, Any], folder: Path, target: Target) -> Trainee:
    cfg = configuration(task).copy()
    for name, value in changes.items():
        OmegaConf.update(cfg, f"{task}.{name}", value, merge=False)
    L.seed_everything(0, verbose=False)
    workspace = Workspace(
        paths={name: folder / "moved" / name for name in MOVED},
        seed=0,
        load_target=lambda: target,
        load_costs=lambda _target: configured_costs(_with_costs(cfg, folder), target),
        mask_token_id=cfg.target.mask_token_id,
        resolved_config=_sections(cfg),
    )
    return build_section(cfg, task).build(workspace)


def _with_costs(cfg: DictConfig, folder: Path) -> DictConfig:
    OmegaConf.update(cfg, "paths.costs", str(folder / "moved/costs"))
    return cfg


def _sections(cfg: DictConfig) -> dict[str, Any]:
    kept = OmegaConf.masked_copy(cfg, ["features", "trainer", "seed"])
    return OmegaConf.to_container(kept, resolve=True)  # pyright: ignore[reportReturnType]


def fingerprint(trainee: Trainee) -> list[Any]:
    """What is learnt, from what, and with which loss."""
    batch = next(iter(trainee.train_batches(0, Share())))
    torch.manual_seed(0)
    loss, _ = trainee.objective(trainee.net.train(), batch)
    learnt = [
        (name, tuple(p.shape), p.requires_grad, float(p.detach().double().sum()))
        for name, p in trainee.net.named_parameters()
    ]
    teacher = getattr(trainee.objective, "keywords", {}).get("teacher")
    judged = [_judged(c) for c in trainee.callbacks if isinstance(c, ReplayValidation)]
    return [
        float(loss.detach()),
        learnt,
        type(teacher).__name__,
        trainee.facts.get("rounds"),
        judged,
    ]


def _judged(judge: ReplayValidation) -> list[Any]:
    return [judge.lam, asdict(judge.settings), judge.ceiling is None, judge.texts.arms]


@pytest.fixture(scope="module")
def made(explored: Explored) -> Callable[..., Trainee]:
    """Makes a trainee from what the stages left, with some options changed."""
    cfg = configuration("ar_drafter").copy()
    OmegaConf.update(cfg, "paths.cache", str(explored.folder.parent / "cache"))
    target = load_target(cfg)
    return lambda task, **changes: build(task, changes, explored.folder, target)


@pytest.fixture(scope="module")
def before(made: Callable[..., Trainee]) -> Callable[..., list[Any]]:
    """The fingerprint of a trainee, made once."""
    known: dict[str, list[Any]] = {}

    def fingerprint_of(task: str, **options: Any) -> list[Any]:
        key = f"{task} {options}"
        return known.setdefault(key, known.get(key) or fingerprint(made(task, **options)))

    return fingerprint_of


@pytest.mark.parametrize(("task", "option"), CASES)
def test_an_option_of_a_task_changes_what_is_learnt(
    task: str, option: str, made: Callable[..., Trainee], before: Callable[..., list[Any]]
) -> None:
    value, beside = OPTIONS[task][option]
    changed = made(task, **{**beside, option: value})
    assert fingerprint(changed) != before(task, **beside)


@pytest.mark.parametrize("task", TASKS)
def test_without_a_change_the_same_is_learnt(
    task: str, made: Callable[..., Trainee], before: Callable[..., list[Any]]
) -> None:
    assert fingerprint(made(task)) == before(task)


@pytest.mark.parametrize("task", TASKS)
def test_every_option_of_a_task_is_among_those_that_are_tried(task: str) -> None:
    assert {f.name for f in fields(TASKS[task])} == {"fit", *OPTIONS[task]}


# --- how long and how fast -----------------------------------------------------------------------

FIT_OPTIONS: dict[str, Any] = {
    "max_steps": 8,
    "batch_size": 2,
    "accumulate": 2,
    "ema": 0.9,
    "val_every": 5,
    "learning_rate": 0.01,
    "betas": [0.5, 0.95],
    "weight_decay": 0.5,
    "warmup_fraction": 0.5,
    "final_fraction": 0.5,
    "clip": 0.01,
}
SHORT = replace(FIT, max_steps=10)


def trained(folder: Path, **changes: Any) -> list[Any]:
    training = Training(folder=folder, fit=replace(SHORT, **changes))
    recorder, _ = training.run()
    weights = [float(p.detach().double().sum()) for p in training.net.parameters()]
    return [recorder.rows, recorder.steps, recorder.validations, weights]


@pytest.fixture(scope="module")
def plainly_trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return trained(tmp_path_factory.mktemp("plain"))


def test_without_a_change_a_training_repeats_itself(
    plainly_trained: list[Any], tmp_path: Path
) -> None:
    assert trained(tmp_path) == plainly_trained


@pytest.mark.parametrize("option", FIT_OPTIONS)
def test_an_option_of_a_fit_changes_the_training(
    option: str, plainly_trained: list[Any], tmp_path: Path
) -> None:
    assert trained(tmp_path, **{option: FIT_OPTIONS[option]}) != plainly_trained


def never_finite(net: NextToken, batch: DrafterBatch) -> Outcome:
    loss, means = next_token(net, batch)
    return loss * float("nan"), means


@pytest.mark.parametrize("most", [2, 4])
def test_steps_without_gradients_end_a_training_after_as_many_as_it_says(
    most: int, tmp_path: Path
) -> None:
    fit = replace(SHORT, max_skipped=most)
    with pytest.raises(UserError, match=f"in {most} steps in a row"):
        Training(folder=tmp_path, fit=fit, objective=never_finite).run()


@pytest.mark.parametrize(("every", "kept"), [(2, 4), (3, 3), (5, None)])
def test_a_checkpoint_is_kept_as_often_as_it_says(
    every: int, kept: int | None, tmp_path: Path
) -> None:
    fit = replace(SHORT, checkpoint_every=every)
    with pytest.raises(InterruptedError):
        Training(folder=tmp_path, fit=fit, callbacks=(Stop(4),)).run()
    last = tmp_path / "checkpoints/last.ckpt"
    found = torch.load(last, weights_only=False)["global_step"] if last.exists() else None
    assert found == kept


def test_every_option_of_a_fit_is_among_those_that_are_tried() -> None:
    assert {f.name for f in fields(FitSettings)} == {
        *FIT_OPTIONS,
        "max_skipped",
        "checkpoint_every",
    }


@pytest.mark.parametrize("task", ["ar_drafter", "diffusion_drafter"])
def test_options_of_a_drafters_fit_change_its_batches_its_decoding_and_its_monitor(
    task: str, made: Callable[..., Trainee]
) -> None:
    decoding = {"fit.decode_prompts": 2, "fit.decode_tokens": 9}
    plain = made(task)
    others = {"fit.monitor": "val/real_tau", "fit.tokens_per_batch": 100}
    changed = made(task, **decoding, **others)
    assert (plain.monitor, changed.monitor) == ("val/tau", "val/real_tau")
    assert plain.callbacks == []
    (real,) = changed.callbacks
    assert isinstance(real, RealTau)
    assert len(real._prompts) == 2
    assert real._options.max_new_tokens == 9
    first, second = (next(iter(t.train_batches(0, Share()))) for t in (plain, changed))
    assert second.ids.numel() <= 100 < first.ids.numel()
    own = {f.name for f in fields(DrafterFitSettings)} - {f.name for f in fields(FitSettings)}
    assert own == {"monitor", "tokens_per_batch", "decode_prompts", "decode_tokens"}


# --- how a router chooses -----------------------------------------------------------------------

CHOICES: dict[str, Any] = {
    "lam": 2.5,
    "adaptive_length": False,
    "switch_margin": 2.0,
    "dwell": 6,
    "latch": 3,
    "frailty": 0.5,
    "online_price": 1.0,
    "drift": 0.5,
}


@pytest.fixture(scope="module")
def choose() -> Callable[..., list[Any]]:
    """What a router that has learned little chooses, round by round, in a made-up world."""
    arms = ("plain", "ar", "diffusion")
    texts = stack_texts(two_regimes(12, 60, 0, noise=1.0).texts, arms)
    config = RouterConfig(num_features=NUM_FEATURES, width=8, max_draft={"ar": 4, "diffusion": 7})
    recipe = FitRecipe(num_steps=60, batch_size=64, learning_rate=0.01, weight_decay=0.0, seed=0)
    net, costs = fit_hazards(config, [texts], recipe), plain_costs(per_lag=0.02)

    def chosen(**changes: Any) -> list[Any]:
        settings = replace(HazardSettings(lam=1.0), **changes)
        done = replay(HazardPolicy(net, costs, settings), texts, costs)
        return np.stack([done.text, done.position, done.arm, done.num_draft]).tolist()

    return chosen


@pytest.mark.parametrize("setting", CHOICES)
def test_a_setting_of_the_router_changes_what_it_chooses(
    setting: str, choose: Callable[..., list[Any]]
) -> None:
    assert choose() == choose()
    assert choose(**{setting: CHOICES[setting]}) != choose()


def test_the_best_static_arm_takes_over_when_the_alarm_is_on(
    choose: Callable[..., list[Any]],
) -> None:
    assert choose(drift=0.5, best_static="ar") != choose(drift=0.5)


def test_every_setting_of_a_router_is_among_those_that_are_tried() -> None:
    assert {f.name for f in fields(HazardSettings)} == {*CHOICES, "best_static"}
