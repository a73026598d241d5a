"""`evaluate.py`: the full table of policies, and the lossless check."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from whiflash_infer.artifacts import (
    json_hash,
    package_versions,
    read_manifest,
    write_json,
)
from whiflash_infer.benchmark import Protocol, Question, run_policies
from whiflash_infer.chat import TemplateRejects
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import chains
from whiflash_infer.engine import decode_rounds
from whiflash_infer.errors import UserError
from whiflash_infer.metrics import Answer, by_policy, summarise
from whiflash_infer.pretrained import load_fitting_router
from whiflash_infer.report import write_report
from whiflash_infer.routing.costs import DeviceIdentity
from whiflash_infer.routing.policies import Policy
from whiflash_infer.routing.router import Router, statics
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Round
from whiflash_train.data.selection import as_prompt, take_evenly
from whiflash_train.data.sources import read_mixed
from whiflash_train.data.tally import BadRow, Tally
from whiflash_train.loggers import log_evaluation
from whiflash_train.preparation import build_sources
from whiflash_train.progress import rate_bar
from whiflash_train.runner import engine_settings, load_drafters, load_target
from whiflash_train.side_by_side import show_side_by_side, side_by_side

console = Console()


def evaluate(cfg: DictConfig) -> None:
    """Measure all policies and write metrics.json, rounds.parquet and report.html."""
    target, arms, router = load_all(cfg)
    settings = engine_settings(cfg, arms)
    questions, prompt_hash = load_questions(cfg, target, cfg.evaluate.limit)
    names = policy_names(cfg, arms)
    policies = chosen_policies(router, names, arms, cfg.seed)
    protocol = Protocol(
        max_new_tokens=cfg.evaluate.max_new_tokens,
        temperature=cfg.evaluate.temperature,
        seed=cfg.seed,
        warmup_prompts=cfg.evaluate.warmup_prompts,
    )
    answers = answer_with_progress(target, arms, policies, questions, protocol, settings)
    report = summarise(answers, bootstrap=cfg.evaluate.bootstrap, seed=cfg.seed)
    metrics = {
        "header": header(cfg, target, len(questions), prompt_hash),
        "policies": {name: report[name] for name in names},
        "side_by_side": slots_side_by_side(cfg, target, arms, answers, questions),
    }
    folder = Path(cfg.paths.evaluation)
    write_outputs(folder, metrics, answers, questions, target)
    logger: Any = OmegaConf.to_container(cfg.logger, resolve=True)
    log_evaluation(logger, str(folder), metrics)
    show(metrics)
    show_errors(answers)
    show_side_by_side(console, metrics["side_by_side"])
    if cfg.evaluate.note:
        console.print(cfg.evaluate.note)
    console.print(f"[bold]evaluation[/bold] written to {folder}", soft_wrap=True)


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


def load_questions(
    cfg: DictConfig, target: Target, limit: int | None
) -> tuple[list[Question], str]:
    """The evaluation prompts, rendered, and a hash of the set."""
    tally = Tally(strict=cfg.strict)
    sources = build_sources(cfg, "evaluate.source")
    target.chat.require_template()
    questions = []
    for _, row in read_mixed(sources, tally, validation=False, roles=cfg.data.roles):
        try:
            prompt = as_prompt(row)
            ids = target.chat.prompt_ids(prompt.messages, prompt.tools)
        except BadRow as bad:
            tally.drop(row.place, bad)
        except TemplateRejects as error:
            tally.drop(row.place, BadRow("template_rejects", str(error)))
        else:
            questions.append(Question(prompt.id, prompt.category, ids))
    if not questions:
        raise UserError("\n  ".join([f"no prompt to evaluate: {tally}", *tally.details()]))
    if tally.dropped:
        console.print(f"prompts: {tally}")
    questions = take_evenly(questions, limit, lambda q: q.category)
    return questions, json_hash([[q.id, q.ids] for q in questions])


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


def policy_names(cfg: DictConfig, arms: Mapping[str, Arm]) -> list[str]:
    if cfg.evaluate.policies is None:
        return [*statics((PLAIN, *arms)), "entropy", "hazard"]
    return list(cfg.evaluate.policies)


def chosen_policies(
    router: Router, names: list[str], arms: Mapping[str, Arm], seed: int
) -> list[Policy]:
    """Raises: UserError for a policy that does not exist, or whose arm is left out."""
    if PLAIN not in names:
        raise UserError("evaluate.policies must hold `plain`: every speed-up is against it")
    policies = [router.policy(name, seed=seed) for name in names]
    for policy in policies:
        for arm in {*policy.arms} - {PLAIN, *arms}:
            raise UserError(f"policy {policy.name}: arms.{arm} is null, so there is no arm")
    return policies


def answer_with_progress(
    target: Target,
    arms: dict[str, Arm],
    policies: list[Policy],
    questions: list[Question],
    protocol: Protocol,
    settings: EngineSettings,
) -> list[Answer]:
    answers: list[Answer] = []
    total = len(policies) * len(questions)
    with rate_bar(console, "answering", total=total, unit="tokens") as advance:
        for answer in run_policies(target, arms, policies, questions, protocol, settings):
            answers.append(answer)
            advance(1, produced=len(answer.generation.output_ids))
    return answers


def slots_side_by_side(
    cfg: DictConfig,
    target: Target,
    arms: dict[str, Arm],
    answers: list[Answer],
    questions: list[Question],
) -> dict[str, Any]:
    """Acceptance by slot as training and as decoding have it."""
    tasks = {arm: f"{arm}_drafter" for arm in chains(arms)}
    manifests = {
        arm: read_manifest(Path(cfg.paths[task]), made_by=f"python train.py task={task}")
        for arm, task in tasks.items()
    }
    prompts = {q.id: q.ids for q in questions}
    with console.status("training pass over the answers"):
        return side_by_side(target, arms, answers, prompts, manifests)


def header(cfg: DictConfig, target: Target, num_prompts: int, prompt_hash: str) -> dict[str, Any]:
    """Conditions and conventions, without which the numbers mean nothing."""
    device = DeviceIdentity.here(target.device, target.dtype)
    return {
        "target": target.name,
        "weights": target.identity().weights,
        "chat_template": target.identity().chat_template,
        "chat": target.chat.options.manifest(),
        "device": device.device,
        "threads": device.threads,
        "dtype": device.dtype,
        "temperature": cfg.evaluate.temperature,
        "max_new_tokens": cfg.evaluate.max_new_tokens,
        "seed": cfg.seed,
        "batch": 1,
        "prompts": num_prompts,
        "prompt_set": prompt_hash,
        "bonus_token": "counted",
        "speedup_baseline": "plain arm of the same engine",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"torch_build": torch.__version__, **package_versions()},
    }


def write_outputs(
    folder: Path,
    metrics: dict[str, Any],
    answers: list[Answer],
    questions: list[Question],
    target: Target,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "metrics.json", metrics)
    pq.write_table(rounds_table(answers), folder / "rounds.parquet")
    write_report(folder / "report.html", metrics, viewer_rows(answers, questions, target))


def rounds_table(answers: list[Answer]) -> pa.Table:
    """One row a round, with its phases in seconds."""
    rows = [
        {
            "policy": a.policy,
            "prompt_id": a.prompt_id,
            "category": a.category,
            "round": index,
            "position": r.position,
            "arm": r.arm,
            "num_draft": r.num_draft,
            "num_nodes": r.num_nodes,
            "accepted": r.accepted,
            "committed": r.committed,
            "lag": r.lag,
            "switched": r.switched,
            "reason": r.reason,
            "expected": r.expected,
            "price": r.price,
            **{f"{phase}_s": seconds for phase, seconds in r.seconds.items()},
        }
        for a in answers
        for index, r in enumerate(a.rounds)
    ]
    return pa.Table.from_pylist(rows)


def viewer_rows(
    answers: list[Answer], questions: list[Question], target: Target
) -> list[dict[str, Any]]:
    """The text of every round of every answer, for the report's round viewer."""
    decode = target.tokenizer.decode
    texts = {q.id: (q.category, decode(q.ids)) for q in questions}
    rows = {
        id_: {"prompt_id": id_, "category": category, "prompt": prompt, "policies": {}}
        for id_, (category, prompt) in texts.items()
    }
    for policy, mine in by_policy(answers).items():
        for answer in mine:
            rows[answer.prompt_id]["policies"][policy] = _viewer_rounds(answer, decode)
    return list(rows.values())


def _viewer_rounds(answer: Answer, decode: Any) -> list[dict[str, Any]]:
    generation = answer.generation
    first = len(generation.output_ids) - generation.decoded_tokens
    entries: list[dict[str, Any]] = [
        {
            "text": decode(generation.output_ids[:first].tolist()),
            "arm": "prompt",
            "drafted": 0,
            "accepted": 0,
            "committed": first,
            "lag": 0,
            "reason": "",
            "ms": 1e3 * generation.prefill_seconds,
            "context": generation.prompt_length,
        }
    ]
    for done, ids in decode_rounds(generation):
        entries.append(
            {
                "text": decode(ids.tolist()),
                "arm": done.arm,
                "drafted": done.num_draft,
                "accepted": done.accepted,
                "committed": done.committed,
                "lag": done.lag,
                "reason": _why(done),
                "ms": 1e3 * done.total_seconds,
                "context": done.position,
            }
        )
    return entries


def _why(done: Round) -> str:
    """The policy's reason, with what it reckoned with."""
    if not isfinite(done.expected):
        return done.reason
    price = f" at {done.price:.1f} tokens/s" if isfinite(done.price) else ""
    return f"{done.reason}: expects {done.expected:.2f} tokens{price}"


def show(metrics: dict[str, Any]) -> None:
    """The table on screen: overall, then by category; and what looks wrong."""
    facts = metrics["header"]
    title = (
        f"{facts['target']}, {facts['dtype']}, {facts['device']}, {facts['threads']} threads, "
        f"{facts['prompts']} prompts, temperature {facts['temperature']:g}"
    )
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("tokens/s", "speed-up", "95 % interval", "tau", "arms", "switches", "identical"):
        table.add_column(name, justify="right", no_wrap=True)
    policies = metrics["policies"]
    for policy, report in policies.items():
        table.add_row(policy, *_cells(report["overall"]))
    for category in next(iter(policies.values()))["by_category"]:
        table.add_section()
        table.add_row(f"[bold]{category}[/bold]")
        for policy, report in policies.items():
            table.add_row(f"  {policy}", *_cells(report["by_category"][category]))
    wide = _wide()
    wide.print(table)
    _show_lengths(policies)
    _show_time_split(policies, wide)
    _show_verdict(policies)
    _show_fallbacks(policies)


def _wide() -> Console:
    return Console(width=max(console.width, 132))


def _cells(one: dict[str, Any]) -> list[str]:
    low, high = one["speedup_ci"]
    arms = " ".join(f"{arm} {share:.0%}" for arm, share in one["arm_ratio"].items())
    return [
        f"{one['tokens_per_s']:.1f}",
        f"{one['speedup']:.2f}x",
        f"{low:.2f} - {high:.2f}",
        f"{one['tau']:.2f}",
        arms,
        f"{one['switches_per_100_rounds']:.0f}/100",
        f"{one['identical']:.0%}",
    ]


def _show_lengths(policies: dict[str, Any]) -> None:
    """tau where prompts are of several lengths: a drafter may know short ones only."""
    buckets = next(iter(policies.values()))["by_prompt_length"]
    if len(buckets) < 2:
        return
    table = Table(title="tau by prompt length")
    table.add_column("policy")
    for bucket, one in buckets.items():
        table.add_column(f"to {int(bucket)} ({one['prompts']})", justify="right")
    for policy, report in policies.items():
        taus = [f"{one['tau']:.2f}" for one in report["by_prompt_length"].values()]
        table.add_row(policy, *taus)
    console.print(table)


def _show_time_split(policies: dict[str, Any], wide: Console) -> None:
    table = Table(title="share of decode time")
    table.add_column("policy")
    phases = list(next(iter(policies.values()))["overall"]["time_split"])
    for phase in phases:
        table.add_column(phase.replace("_", "-"), justify="right")
    table.add_column("round p50 ms", justify="right")
    table.add_column("p95 ms", justify="right")
    for policy, report in policies.items():
        split, latency = report["overall"]["time_split"], report["overall"]["round_ms"]
        shares = [f"{split[phase]:.1%}" for phase in phases]
        table.add_row(policy, *shares, f"{latency['p50']:.1f}", f"{latency['p95']:.1f}")
    wide.print(table)


def _show_verdict(policies: dict[str, Any]) -> None:
    overall = {name: report["overall"] for name, report in policies.items()}
    drafting = {n: c for n, c in overall.items() if n.startswith("static_")}
    if drafting:
        best = max(drafting, key=lambda n: drafting[n]["tokens_per_s"])
        speedup = drafting[best]["speedup"]
        verb = "beats" if speedup > 1 else "does not beat"
        console.print(f"{best} {verb} plain decoding: {speedup:.2f}x")
    for name, one in drafting.items():
        if one["tau"] < 1.1:
            console.print(
                f"{name}: tau {one['tau']:.2f} is that of a nearly untrained drafter. Check the "
                "chat template, tap layers, draft vocabulary, rope settings, dtype, training steps"
            )


def _show_fallbacks(policies: dict[str, Any]) -> None:
    for name, report in policies.items():
        if counts := report["overall"]["fallbacks"]:
            told = ", ".join(f"{what} {count}" for what, count in counts.items())
            warn(f"{name}: something failed and a safe arm answered in its place: {told}")


def show_errors(answers: list[Answer]) -> None:
    """Answers that ended before their end, which every number above counts as they are."""
    for answer in answers:
        if error := answer.generation.error:
            warn(f"{answer.policy}, prompt {answer.prompt_id}: {error}; its answer ends there")


def warn(sentence: str) -> None:
    console.print(f"[bold yellow]warning[/bold yellow]: {sentence}", soft_wrap=True)
