"""Acceptance by slot as training measured it and as decoding did, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import chains
from whiflash_infer.metrics import Answer, acceptance_by_slot
from whiflash_infer.target import Target
from whiflash_infer.training_pass import rounds_of_training_pass

_GAP = 0.1  # between shares of the same drafts, where rounding moves a few in both directions
_ENOUGH = 30  # drafts of a slot
_ROWS = {
    "decoded": "decoded",
    "training_pass": "training pass, same rounds",
    "validation": "validation, every anchor",
}


def side_by_side(
    target: Target,
    arms: Mapping[str, Arm],
    answers: Sequence[Answer],
    prompts: Mapping[str, list[int]],
    manifests: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Of every chain that a static policy used: shares of accepted drafts by slot, and how many.

    decoded and training_pass are of the same rounds, so they agree but for rounding. validation is
    what the drafter's manifest remembers. It counts every anchor of other text, where decoding
    starts behind its last round and so visits hard places more often: it is shown, not judged.
    manifests: by arm.
    """
    report = {}
    for name, arm in chains(arms).items():
        mine = [a for a in answers if a.policy == f"static_{name}"]
        decoded = [r for a in mine for r in a.rounds if r.num_draft]
        if decoded:
            passed = [
                r
                for a in mine
                for r in rounds_of_training_pass(target, arm, prompts[a.prompt_id], a.generation)
            ]
            shares = acceptance_by_slot(decoded)[name]
            report[name] = {
                "drafts": [sum(r.num_draft > slot for r in decoded) for slot in range(len(shares))],
                "decoded": shares,
                "training_pass": acceptance_by_slot(passed)[name],
                "validation": validated(manifests[name]),
            }
    return report


def validated(manifest: Mapping[str, Any]) -> list[float]:
    """Empty for a drafter that was not trained here."""
    metrics = manifest.get("metrics", {})
    names = [f"val/accepted_{slot}" for slot in range(1, len(metrics) + 1)]
    return [metrics[name] for name in names if name in metrics]


def gaps(report: Mapping[str, Any]) -> list[str]:
    """A sentence for every slot that is accepted less often than the training pass says."""
    told = []
    for arm, found in report.items():
        columns = (found[name] for name in ("drafts", "decoded", "training_pass"))
        for slot, (drafts, decoded, passed) in enumerate(zip(*columns, strict=True), start=1):
            if drafts >= _ENOUGH and passed - decoded > _GAP:
                told.append(
                    f"{arm} drafter, slot {slot}: {decoded:.0%} of {drafts} drafts were accepted, "
                    f"and by the training pass over the same text {passed:.0%} are right. The "
                    "decoder does not run this drafter as it was trained"
                )
    return told


def show_side_by_side(console: Console, report: Mapping[str, Any]) -> None:
    for arm, found in report.items():
        table = Table(title=f"accepted by slot, {arm} drafter")
        table.add_column("measured")
        for slot in range(1, len(found["drafts"]) + 1):
            table.add_column(str(slot), justify="right")
        for name, title in _ROWS.items():
            shares = found[name][: len(found["drafts"])]
            table.add_row(title, *(f"{share:.0%}" for share in shares))
        console.print(table)
    for sentence in gaps(report):
        console.print(f"[bold yellow]warning[/bold yellow]: {sentence}", soft_wrap=True)
