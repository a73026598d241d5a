"""Label every position for every chain: `python data_prep/log_rounds.py`.

Writes `rounds/`: for each position of each conversation the router's features, and how many drafts
each chain would have had accepted there, at the cost of one training-mode pass a conversation.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import track

from whiflash_infer.drafters.ar import ARArm
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.drafters.load import chains
from whiflash_infer.errors import UserError
from whiflash_infer.features import NUM_SCALARS, router_features
from whiflash_infer.labels import DraftLabels, label_ar, label_diffusion
from whiflash_infer.rounds import ConversationRounds, save_rounds
from whiflash_infer.target import Target
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch, validation_batches
from whiflash_train.data.conversations import SPLITS, load_conversations
from whiflash_train.entry import entry_point
from whiflash_train.runner import load_drafters, load_target
from whiflash_train.teacher import OnlineTeacher

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("log_rounds", root=ROOT)
def main(cfg: DictConfig) -> None:
    target = load_target(cfg)
    arms, lineage = load_drafters(cfg, target)
    arms = chains(arms)
    conversations_path = Path(cfg.paths.conversations)
    rows, manifest = {}, {}
    for split in SPLITS:
        found, manifest = load_conversations(conversations_path, split, target.identity())
        limit = cfg.rounds.limits[split]
        rows[split] = found.select(range(min(len(found), len(found) if limit is None else limit)))
    positions = sum(sum(map(sum, part["loss_mask"])) for part in rows.values() if len(part))
    if not positions:
        raise UserError("rounds.limits leaves no conversation to label")
    size = positions * 2 * (target.config.hidden_size + NUM_SCALARS)
    console.print(f"about {positions} positions, {size / 1e6:.0f} MB of features")
    started = time.perf_counter()
    labelled: list[ConversationRounds] = []
    for split, part in rows.items():
        if len(part):
            labelled += label_split(part, split, target, arms, cfg.rounds.batch_size)
    seconds = time.perf_counter() - started
    path = Path(cfg.paths.rounds)
    save_rounds(
        path,
        labelled,
        {
            "target": target.identity().manifest(),
            "drafters": lineage,
            "max_draft": {name: arm.max_draft for name, arm in arms.items()},
            "conversations": manifest["fingerprint"],
            "counts": {"conversations": len(labelled), "positions": sum(map(len, labelled))},
            "seed": cfg.seed,
            "config": OmegaConf.to_container(cfg.rounds),
        },
    )
    show(labelled, seconds)
    console.print(f"[bold]rounds[/bold] written to {path}", soft_wrap=True)


@torch.inference_mode()
def label_split(
    rows: Dataset, split: str, target: Target, arms: dict[str, Arm], batch_size: int
) -> list[ConversationRounds]:
    """Dense rounds of every conversation, in the data set's order."""
    pad = target.chat.pad_id
    teacher = OnlineTeacher(target)
    found: dict[int, ConversationRounds] = {}
    batches = validation_batches(rows, batch_size=batch_size, pad_id=pad)
    for batch in track(batches, description=f"labelling {split}", console=console):
        moved = batch.to(target.device)
        teacher_rows = teacher(moved)
        labels = {name: label(arm, moved, teacher_rows) for name, arm in arms.items()}
        for i, row in enumerate(batch.rows.tolist()):
            keep = batch.anchor_mask[i]
            anchors = batch.anchors[i][keep].to(target.device)
            hidden = teacher_rows.hidden[i, anchors - 1]
            logits = target.tables.logits(hidden)
            found[row] = ConversationRounds(
                conversation=rows[row]["id"],
                category=rows[row]["category"],
                split=split,
                positions=anchors.cpu().numpy(),
                features=router_features(logits, hidden, anchors).to(torch.bfloat16).cpu(),
                accepted={a: part.accepted[i].cpu()[keep].numpy() for a, part in labels.items()},
                censored={a: part.censored[i].cpu()[keep].numpy() for a, part in labels.items()},
            )
    return [found[row] for row in sorted(found)]


def label(arm: Arm, batch: DrafterBatch, rows: TeacherRows) -> DraftLabels:
    sequences = batch.ids, batch.lengths, rows, batch.anchors
    if isinstance(arm, ARArm):
        return label_ar(arm.net, arm.drafter.tables, *sequences, draft_length=arm.max_draft)
    assert isinstance(arm, DiffusionArm)
    return label_diffusion(arm.net, arm.drafter.tables, *sequences)


def show(conversations: list[ConversationRounds], seconds: float) -> None:
    positions = sum(map(len, conversations))
    console.print(
        f"labelled {positions} positions in {seconds:.1f} s, "
        f"{1e3 * seconds / positions:.2f} ms a position for all arms"
    )
    for arm in conversations[0].accepted:
        accepted = np.concatenate([c.accepted[arm] for c in conversations])
        console.print(f"  {arm}: {1 + accepted.mean():.3f} tokens a round if used everywhere")


if __name__ == "__main__":
    main()
