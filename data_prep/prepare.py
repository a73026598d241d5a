"""Conversations from data that brings its own answers: `python data_prep/prepare.py source=...`.

Rows are rendered with the target's chat template and masked from the rendered boundaries; the
target itself does not run. Writes `conversations/`, as generate.py does.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from whiflash_infer.artifacts import new_artifact
from whiflash_train.data.conversations import ConversationWriter
from whiflash_train.data.masks import MaskedRow, Masker
from whiflash_train.data.preview import show_masks
from whiflash_train.data.selection import Picked, pick_rows
from whiflash_train.data.tally import BadRow, Tally
from whiflash_train.entry import entry_point
from whiflash_train.preparation import (
    conversations_manifest,
    data_settings,
    load_chat,
    show_counts,
)
from whiflash_train.progress import rate_bar

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 512  # rows that are rendered and encoded together
console = Console()


@entry_point("prepare", root=ROOT)
def main(cfg: DictConfig) -> None:
    settings, sources, evaluation_turns = data_settings(cfg)
    chat = load_chat(cfg)
    chat.require_template()
    masker = Masker(chat, settings.mask)
    tally = Tally(strict=cfg.strict)
    picked = pick_rows(sources, settings, tally, evaluation_turns=evaluation_turns)
    path = Path(cfg.paths.conversations)
    manifest = conversations_manifest(cfg, chat.identity())
    to_show = cfg.show_mask
    with (
        new_artifact(path, manifest) as folder,
        ConversationWriter(folder) as writer,
        rate_bar(console, "masking", total=None, unit="rows") as advance,
    ):
        while chunk := list(islice(picked, CHUNK)):
            masked = mask_chunk(masker, chunk, tally)
            show_masks(console, chat, [shown(*pair) for pair in masked[:to_show]])
            to_show -= len(masked[:to_show])
            for part, rows in masked:
                writer.add(part.split, part.row.id, part.row.category, rows)
            advance(len(chunk), produced=len(chunk))
        manifest |= writer.close(tally)
    show_counts(tally, manifest["counts"])
    console.print(f"[bold]conversations[/bold] written to {path}", soft_wrap=True)


def mask_chunk(
    masker: Masker, chunk: list[Picked], tally: Tally
) -> list[tuple[Picked, list[MaskedRow]]]:
    """The rows that could be masked; the others are counted out."""
    kept = []
    for part, outcome in zip(chunk, masker([p.row for p in chunk]), strict=True):
        if isinstance(outcome, BadRow):
            tally.drop(part.row.place, outcome)
            continue
        for what in sorted({note for row in outcome for note in row.notes}):
            tally.note(what, part.row.place)
        kept.append((part, outcome))
    return kept


def shown(part: Picked, rows: list[MaskedRow]) -> tuple[str, list[int], list[bool]]:
    return part.row.id, rows[-1].ids, rows[-1].mask


if __name__ == "__main__":
    main()
