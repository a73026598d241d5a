"""Let the target answer prompts: `python data_prep/generate.py`.

Writes `conversations/` with the splits train (for the drafters), router (kept from the drafters,
so that what the router learns of their acceptance is true of new text) and validation. Answers are
appended to a side file as they come, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from whiflash_infer.artifacts import json_hash, new_artifact
from whiflash_infer.batch import answer_batch
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.conversations import ROW_FEATURES
from whiflash_train.entry import entry_point
from whiflash_train.prompts import Prompt, Tally, hold_out, read_prompts, take_evenly
from whiflash_train.runner import load_target

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ROOT / "data_prep" / "prompts"
console = Console()


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt rendered for the target, and the split its answer belongs to."""

    prompt: Prompt
    split: str
    ids: list[int]


@entry_point("generate", root=ROOT)
def main(cfg: DictConfig) -> None:
    settings = cfg.generate
    tally = Tally()
    splits = choose_splits(settings, tally)
    target = load_target(cfg)
    jobs = render(splits, target, settings.max_prompt_tokens, tally)
    identity = target.identity()
    fingerprint = json_hash(
        [identity.manifest(), OmegaConf.to_container(settings), cfg.seed, [j.ids for j in jobs]]
    )
    path = Path(cfg.paths.conversations)
    side_file = path.with_name(f".answers-{fingerprint}.jsonl")
    answers = read_answers(side_file)
    if answers:
        console.print(f"going on after {len(answers)} answers of an interrupted run")
    for batch in answer_all(jobs, answers, target, settings, cfg.seed):
        append_lines(side_file, batch)
        answers |= batch
    counts = write(path, jobs, answers, target, tally, fingerprint, cfg)
    side_file.unlink(missing_ok=True)
    console.print(f"{tally}; {counts}")
    console.print(f"[bold]conversations[/bold] written to {path}", soft_wrap=True)


def choose_splits(settings: DictConfig, tally: Tally) -> dict[str, list[Prompt]]:
    """Train, router and validation prompts; the last two share nothing with the first."""
    source = settings.source
    prompts = read_prompts(source, builtin=PROMPTS, split=settings.split, tally=tally)
    prompts = take_evenly(prompts, settings.limit)
    if source == "builtin":
        validation = read_prompts(source, builtin=PROMPTS, split="validation", tally=tally)
    else:
        prompts, validation = hold_out(prompts, settings.validation_fraction, purpose="validation")
    train, router = hold_out(prompts, settings.router_fraction, purpose="router")
    splits = {"train": train, "router": router, "validation": validation}
    for name, rows in splits.items():
        if not rows:
            raise UserError(
                f"split {name} would be empty with {len(prompts)} prompts: give more prompts, or "
                "raise generate.validation_fraction and generate.router_fraction"
            )
    return splits


def render(
    splits: dict[str, list[Prompt]], target: Target, max_prompt_tokens: int, tally: Tally
) -> list[Job]:
    jobs = []
    for split, prompts in splits.items():
        for prompt in prompts:
            ids = target.render_prompt(prompt.messages)
            if len(ids) > max_prompt_tokens:
                tally.kept -= 1
                tally.dropped["prompt_too_long"] += 1
                continue
            jobs.append(Job(prompt, split, ids))
    if not jobs:
        raise UserError(f"no prompt is left to answer: {tally}")
    return jobs


def answer_all(
    jobs: list[Job],
    answers: dict[str, list[int]],
    target: Target,
    settings: DictConfig,
    seed: int,
) -> Iterator[dict[str, list[int]]]:
    """Answers by prompt id, a batch of prompts of like length at a time.

    Which prompts share a batch does not depend on what is answered already: rounding follows the
    batch, so a resumed run gives the very answers of a straight one.
    """
    ordered = sorted(jobs, key=lambda j: (len(j.ids), j.prompt.id))
    size = settings.batch_size
    batches = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    columns = (
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("answering", total=len(jobs), rate=0.0)
        started, produced = time.perf_counter(), 0
        for index, batch in enumerate(batches):
            if any(job.prompt.id not in answers for job in batch):
                outputs = answer_batch(
                    target,
                    [job.ids for job in batch],
                    max_new_tokens=settings.max_new_tokens,
                    temperature=settings.temperature,
                    seed=seed + index,
                )
                produced += sum(len(output) for output in outputs)
                ids = [job.prompt.id for job in batch]
                yield dict(zip(ids, outputs, strict=True))
            rate = produced / (time.perf_counter() - started)
            progress.update(bar, advance=len(batch), rate=rate)


def write(
    path: Path,
    jobs: list[Job],
    answers: dict[str, list[int]],
    target: Target,
    tally: Tally,
    fingerprint: str,
    cfg: DictConfig,
) -> dict[str, int]:
    """The artefact, rows in input order. The mask is the rendered boundary: prompt, then answer."""
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "router": [], "validation": []}
    truncated = 0
    for job in jobs:
        answer = answers[job.prompt.id]
        if len(answer) < 2:  # no position has both an anchor and a token to draft
            tally.kept -= 1
            tally.dropped["answer_too_short"] += 1
            continue
        cut = answer[-1] not in target.stop_ids
        truncated += cut
        rows[job.split].append(
            {
                "id": job.prompt.id,
                "category": job.prompt.category,
                "input_ids": job.ids + answer,
                "loss_mask": [False] * len(job.ids) + [True] * len(answer),
                "truncated": cut,
            }
        )
    counts = {split: len(found) for split, found in rows.items()}
    counts["answer_tokens"] = sum(sum(r["loss_mask"]) for found in rows.values() for r in found)
    counts["truncated_answers"] = truncated
    if not rows["train"]:
        raise UserError(f"no conversation is left to train on: {tally}")
    manifest = {
        "target": target.identity().manifest(),
        "fingerprint": fingerprint,
        "counts": {**tally.as_dict(), **counts},
        "seed": cfg.seed,
        "config": OmegaConf.to_container(cfg.generate),
    }
    with new_artifact(path, manifest) as folder:
        for split, found in rows.items():
            Dataset.from_list(found, features=ROW_FEATURES).save_to_disk(str(folder / split))
    return counts


def read_answers(side_file: Path) -> dict[str, list[int]]:
    """Answers of an interrupted run; a half-written last line is ignored."""
    if not side_file.is_file():
        return {}
    found = {}
    for line in side_file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["id"]] = row["answer"]
    return found


def append_lines(path: Path, answers: dict[str, list[int]]) -> None:
    """Append a batch and wait for the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": id_, "answer": answer}) + "\n" for id_, answer in answers.items()]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
