"""`evaluate.py`: all policies on the same prompts, measured beside each other."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from whiflash_infer.artifacts import package_versions, read_manifest
from whiflash_infer.benchmark import Benchmark, Condition, Protocol, Question
from whiflash_infer.claims import claims
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import chains
from whiflash_infer.metrics import FORMAT, Answer, gains_over_static, summarise
from whiflash_infer.pretrained import load_fitting_router
from whiflash_infer.routing.costs import DeviceIdentity
from whiflash_infer.routing.router import Router
from whiflash_infer.target import Target
from whiflash_train.evaluation.annotate import annotated
from whiflash_train.evaluation.conditions import (
    Variation,
    chosen_conditions,
    policy_names,
    variations,
)
from whiflash_train.evaluation.files import write_outputs
from whiflash_train.evaluation.side_by_side import show_side_by_side, side_by_side
from whiflash_train.evaluation.suites import Suite, load_questions
from whiflash_train.evaluation.tables import show, show_errors, warn
from whiflash_train.loggers import log_evaluation, require_logger
from whiflash_train.preparation import build_section
from whiflash_train.progress import rate_bar
from whiflash_train.runner import engine_settings, load_drafters, load_target

console = Console()


@dataclass(frozen=True, slots=True)
class Measured:
    """answers: of all conditions, annotated. questions: all that were asked, by id."""

    answers: list[Answer]
    questions: dict[str, Question]


def evaluate(cfg: DictConfig) -> None:
    """Measure all policies and write the files of the evaluation."""
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    logger = config["logger"]
    require_logger(logger)
    target, arms, router = load_all(cfg)
    settings = engine_settings(cfg, arms)
    suite = load_questions(cfg, target, cfg.evaluate.limit)
    names = policy_names(cfg.evaluate.policies, router, arms)
    temperature = float(cfg.evaluate.temperature)
    conditions = chosen_conditions(
        router, names, arms, settings, seed=cfg.seed, temperature=temperature
    )
    varied = variations(build_section(cfg, "evaluate.ablate"), conditions, settings)
    everything = [*conditions, *(variation.condition for variation in varied)]
    label = temperature == 0 and cfg.evaluate.regret
    measured = measure(cfg, target, arms, router, everything, suite, label=label)
    dtype = str(target.dtype).removeprefix("torch.")
    metrics = {
        "format": FORMAT,
        "header": header(cfg, target, suite, measured),
        **summed_up(cfg, names, varied, measured, dtype=dtype),
        "side_by_side": slots_side_by_side(cfg, target, arms, measured),
    }
    folder = Path(cfg.paths.evaluation)
    write_outputs(folder, metrics, measured.answers, measured.questions, target)
    log_evaluation(
        logger,
        str(folder),
        metrics,
        config=config,
        inputs=inputs(cfg),
    )
    show(metrics)
    show_errors(measured.answers)
    for note, count in suite.tally.notes.items():
        console.print(f"{note}: {count}")
    show_side_by_side(console, metrics["side_by_side"])
    if cfg.evaluate.note:
        console.print(cfg.evaluate.note)
    console.print(f"[bold]evaluation[/bold] written to {folder}", soft_wrap=True)


def inputs(cfg: DictConfig) -> dict[str, Path]:
    """The folders that an evaluation judges."""
    return {
        "router": Path(cfg.checkpoint),
        "ar_drafter": Path(cfg.paths.ar_drafter),
        "diffusion_drafter": Path(cfg.paths.diffusion_drafter),
    }


def load_all(
    cfg: DictConfig, *, allow_foreign: bool = False
) -> tuple[Target, dict[str, Arm], Router]:
    """Target, drafters and router, each refused when it was not made for the others."""
    target = load_target(cfg)
    arms, lineage = load_drafters(cfg, target)
    foreign = allow_foreign or cfg.costs.allow_foreign
    router = load_fitting_router(Path(cfg.checkpoint), target, arms, lineage, foreign)
    warn_of_other_rendering(target, lineage)
    return target, arms, router


def warn_of_other_rendering(target: Target, drafters: dict[str, Any]) -> None:
    """Drafters trained on conversations rendered in another way accept less, and nothing else
    would say why."""
    here = target.chat.options.manifest()
    for arm, facts in drafters.items():
        there = facts["chat"]
        if there is not None and there != here:
            warn(
                f"the {arm} drafter was trained on conversations rendered with {there}, and this "
                f"run renders with {here}: give both the same chat.* options"
            )


def measure(
    cfg: DictConfig,
    target: Target,
    arms: dict[str, Arm],
    router: Router,
    conditions: Sequence[Condition],
    suite: Suite,
    *,
    label: bool = False,
) -> Measured:
    """Ask all questions under all conditions, with progress.

    label: the plain answers, for regrets; it is done too where a condition needs it.
    """
    protocol = Protocol(
        max_new_tokens=cfg.evaluate.max_new_tokens,
        temperature=float(cfg.evaluate.temperature),
        seed=cfg.seed,
        warmup_prompts=cfg.evaluate.warmup_prompts,
        label=label or any(condition.in_hindsight for condition in conditions),
    )
    benchmark = Benchmark(target, arms, conditions, protocol)
    measured = Measured([], {})
    total = None if any(q.then for q in suite.questions) else benchmark.num_answers(suite.questions)
    with rate_bar(console, "answering", total=total, unit="tokens") as advance:
        for asked in benchmark.run(suite.questions):
            answers = annotated(asked, target.tokenizer, arms, router)
            measured.answers.extend(answers)
            measured.questions.update({q.id: q for q in asked.questions})
            produced = sum(len(answer.generation.output_ids) for answer in answers)
            advance(len(answers), produced=produced)
    return measured


def summed_up(
    cfg: DictConfig,
    names: Sequence[str],
    varied: Sequence[Variation],
    measured: Measured,
    *,
    dtype: str,
) -> dict[str, Any]:
    """The numbers of metrics.json."""
    temperature = float(cfg.evaluate.temperature)
    bootstrap: dict[str, int] = {"bootstrap": cfg.evaluate.bootstrap, "seed": cfg.seed}
    baselines = {v.condition.name: v.condition.baseline for v in varied}
    cells = summarise(measured.answers, baselines=baselines, **bootstrap)
    policies = {name: cells[name] for name in names}
    own = [answer for answer in measured.answers if answer.policy in policies]
    gains = gains_over_static(own, **bootstrap)
    return {
        "policies": policies,
        "gains": gains,
        "claims": claims(policies, gains, temperature=temperature, dtype=dtype),
        "ablation": [_ablation_row(v, cells[v.condition.name]["overall"]) for v in varied],
    }


def _ablation_row(variation: Variation, cell: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("tokens_per_s", "speedup", "speedup_ci", "tau", "seconds_per_round", "switching_share")
    return {
        "policy": variation.policy,
        "varied": variation.varied,
        "value": variation.value,
        **{name: cell[name] for name in shown},
    }


def slots_side_by_side(
    cfg: DictConfig,
    target: Target,
    arms: dict[str, Arm],
    measured: Measured,
) -> dict[str, Any]:
    """Acceptance by slot as training and as decoding have it."""
    tasks = {arm: f"{arm}_drafter" for arm in chains(arms)}
    manifests = {
        arm: read_manifest(Path(cfg.paths[task]), made_by=f"python train.py task={task}")
        for arm, task in tasks.items()
    }
    prompts = {id_: question.ids for id_, question in measured.questions.items()}
    with console.status("training pass over the answers"):
        return side_by_side(target, arms, measured.answers, prompts, manifests)


def header(cfg: DictConfig, target: Target, suite: Suite, measured: Measured) -> dict[str, Any]:
    """Conditions and conventions, without which the numbers mean nothing."""
    device = DeviceIdentity.here(target.device, target.dtype)
    return {
        "target": target.name,
        "weights": target.identity().weights,
        "chat_template": target.identity().chat_template,
        "chat": target.chat.options.manifest(),
        "tap_layer_ids": list(target.tap_layer_ids),
        "device": device.device,
        "threads": device.threads,
        "dtype": device.dtype,
        "temperature": cfg.evaluate.temperature,
        "max_new_tokens": cfg.evaluate.max_new_tokens,
        "seed": cfg.seed,
        "batch": 1,
        "sync": cfg.decode.sync,
        "suite": suite.facts["suite"],
        "asked": {name: fact for name, fact in suite.facts.items() if name != "suite"},
        "prompts": len(measured.questions),
        "prompt_set": suite.prompt_hash,
        "bonus_token": "counted",
        "speedup_baseline": "plain arm of the same engine",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"torch_build": torch.__version__, **package_versions()},
        "memory": peak_memory(target.device),
    }


def peak_memory(device: torch.device) -> dict[str, float]:
    """Of this process so far, in MB."""
    units = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    peak = {"peak_process_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units / 1e6}
    if device.type == "cuda":
        peak["peak_gpu_mb"] = torch.cuda.max_memory_allocated(device) / 1e6
    return {name: round(value, 1) for name, value in peak.items()}
