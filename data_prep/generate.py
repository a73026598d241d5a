"""Let the target answer prompts: `python data_prep/generate.py`.

Writes `conversations/` with the splits train (for the drafters), router (kept from the drafters,
so that what the router learns of their acceptance is true of new text) and validation. Answers are
kept as they come, so a run that is killed goes on where it was.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console

from whiflash_infer.artifacts import json_hash, new_artifact
from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_train.data.answer_store import AnswerStore
from whiflash_train.data.conversations import ConversationWriter
from whiflash_train.data.dialogues import Dialogue, Dialogues
from whiflash_train.data.engines import Answer, Engine, Job, Sampling
from whiflash_train.data.masks import MaskedRow
from whiflash_train.data.preview import show_masks
from whiflash_train.data.processes import Processes
from whiflash_train.data.selection import as_prompt, pick_rows, require_rows
from whiflash_train.data.tally import Tally
from whiflash_train.entry import entry_point
from whiflash_train.preparation import (
    build_section,
    conversations_manifest,
    data_settings,
    load_chat,
    show_counts,
)
from whiflash_train.progress import rate_bar
from whiflash_train.redaction import without_secrets
from whiflash_train.runner import load_target

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("generate", root=ROOT)
def main(cfg: DictConfig) -> None:
    generate(cfg)


def generate(cfg: DictConfig) -> None:
    processes = Processes.here()
    console.quiet = not processes.is_main
    settings, sources, evaluation_turns = data_settings(cfg)
    require_room(cfg.generate, settings.mask.max_length)
    tally = Tally(strict=cfg.strict)
    picked = list(
        pick_rows(sources, settings, tally, evaluation_turns=evaluation_turns, convert=as_prompt)
    )
    require_rows(picked, tally)
    chat = load_chat(cfg)
    chat.require_template()
    asking = Dialogues(
        chat,
        settings.mask,
        tally,
        max_prompt_tokens=cfg.generate.max_prompt_tokens,
        keep_truncated=cfg.generate.truncated == "keep",
    )
    dialogues = asking.open(picked)
    require_rows([d.picked for d in dialogues], tally)
    engine = build_section(cfg, "engine").connect(chat, lambda: load_target(cfg))
    manifest = conversations_manifest(cfg, engine.target_identity() or chat.identity())
    manifest["engine"] = without_secrets(engine.facts())
    path = Path(cfg.paths.conversations)
    options = sampling(cfg)
    fingerprint = _fingerprint(manifest, options, dialogues)
    store = AnswerStore(path, fingerprint, process=processes.index)
    dialogues = answer_all(asking, dialogues, engine, store, options, processes)
    if processes.is_main:
        conversations = [(d, asking.masked_rows(d)) for d in dialogues]
        finish(cfg, path, manifest, conversations, chat, tally, store)
    processes.wait()


def require_room(section: DictConfig, max_length: int) -> None:
    """Raises: UserError when a row may become longer than rows may be: its end would be lost."""
    longest = section.max_prompt_tokens + section.max_new_tokens
    if longest > max_length:
        raise UserError(
            f"generate.max_prompt_tokens + generate.max_new_tokens = {longest} is more than "
            f"data.mask.max_length={max_length}: raise that, or lower one of them"
        )


def sampling(cfg: DictConfig) -> Sampling:
    section = cfg.generate
    return Sampling(
        max_new_tokens=section.max_new_tokens, temperature=section.temperature, seed=cfg.seed
    )


def _fingerprint(manifest: dict[str, Any], options: Sampling, dialogues: list[Dialogue]) -> str:
    """Of everything that shapes the answers."""
    prompts = [[d.conversation.id, d.job and d.job.prompt_ids, d.waiting] for d in dialogues]
    shaping = [manifest[name] for name in ("target", "chat", "engine")]
    return json_hash([shaping, asdict(options), prompts])


def answer_all(
    asking: Dialogues,
    dialogues: list[Dialogue],
    engine: Engine,
    store: AnswerStore,
    options: Sampling,
    processes: Processes,
) -> list[Dialogue]:
    """Ask turn after turn until no dialogue waits for an answer; those that are in the data."""
    answers = store.read()
    resumed = sum(a.finish != "failed" for a in answers.values())
    if resumed and processes.is_main:
        console.print(f"going on after {resumed} answers of an interrupted run")
    while jobs := asking.jobs(dialogues):
        done = {id_: a for id_, a in answers.items() if a.finish != "failed"}
        ask(jobs, done, engine, store, options)
        processes.wait()
        answers = store.read()
        dialogues = [d for d in dialogues if d.job is None or asking.take(d, _of(answers, d.job))]
    if engine.retries:
        told = ", ".join(f"{what} {n}" for what, n in engine.retries.most_common())
        console.print(f"tried again {engine.retries.total()} times: {told}")
    return dialogues


def ask(
    jobs: list[Job],
    done: dict[str, Answer],
    engine: Engine,
    store: AnswerStore,
    options: Sampling,
) -> None:
    left = sum(job.id not in done for job in jobs)
    with rate_bar(console, "answering", total=len(jobs), unit="tokens") as advance:
        advance(len(jobs) - left)
        for batch in engine.answers(jobs, done, options):
            store.append(batch)
            new = sum(answer.id not in done for answer in batch)
            advance(new, produced=sum(len(a.ids or []) for a in batch))


def _of(answers: dict[str, Answer], job: Job) -> Answer:
    return answers.get(job.id) or Answer(job.id, "failed", error="the engine gave no answer")


def finish(
    cfg: DictConfig,
    path: Path,
    manifest: dict[str, Any],
    conversations: list[tuple[Dialogue, list[MaskedRow]]],
    chat: Chat,
    tally: Tally,
    store: AnswerStore,
) -> None:
    """Write the artefact, rows in input order, and remove the answers it is made of."""
    if tally.failed and not cfg.generate.allow_failed:
        told = "; ".join(tally.examples["failed"])
        raise UserError(
            f"{tally.failed} of {tally.read} rows got no answer: {told}. Run again to ask only "
            "these once more, or add generate.allow_failed=true to go on without them"
        )
    shown = [(d.conversation.id, rows[-1].ids, rows[-1].mask) for d, rows in conversations]
    show_masks(console, chat, shown[: cfg.show_mask])
    with new_artifact(path, manifest) as folder, ConversationWriter(folder) as writer:
        for d, rows in conversations:
            writer.add(d.picked.split, d.conversation.id, d.conversation.category, rows)
        manifest |= writer.close(tally)
    store.remove()
    show_counts(tally, manifest["counts"])
    console.print(f"[bold]conversations[/bold] written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
