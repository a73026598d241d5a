"""Conversations on disk: token ids and a loss mask, in the splits that the later stages read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from whiflash_infer.artifacts import read_manifest, require_match
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.target import TargetIdentity
from whiflash_train.data.masks import MaskedRow
from whiflash_train.data.tally import Tally

SPLITS = ("train", "router", "validation")
MADE_BY = "python data_prep/generate.py (or prepare.py)"
_ROWS_PER_BATCH = 256

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "category": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "truncated": pa.bool_(),
    }
)


class ConversationWriter:
    """Writes `<split>.arrow` files into a folder, a batch of rows at a time, and counts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digest = hashlib.sha256()
        self.counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
        self._pending: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
        self._files = {
            split: pa.ipc.new_stream(str(folder / f"{split}.arrow"), SCHEMA) for split in SPLITS
        }

    def __enter__(self) -> ConversationWriter:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                for split in SPLITS:
                    self._flush(split)
        finally:
            for file in self._files.values():
                file.close()

    def add(self, split: str, id_: str, category: str, rows: list[MaskedRow]) -> None:
        """The rows of one conversation: one, or one a turn."""
        for row in rows:
            suffix = "" if row.turn is None else f"#{row.turn}"
            self._pending[split].append(
                {
                    "id": f"{id_}{suffix}",
                    "category": category,
                    "input_ids": row.ids,
                    "loss_mask": row.mask,
                    "truncated": row.truncated,
                }
            )
            self._digest.update(f"{split} {id_}{suffix} {row.ids} {row.mask}".encode())
            self.counts[split].update(
                rows=1,
                tokens=len(row.ids),
                supervised=sum(row.mask),
                truncated=int(row.truncated),
            )
        self.counts[split]["conversations"] += 1
        if len(self._pending[split]) >= _ROWS_PER_BATCH:
            self._flush(split)

    def close(self, tally: Tally) -> dict[str, Any]:
        """Write `dropped.jsonl`; what the manifest tells of the rows: fingerprint and counts.

        Raises: UserError when a split that later stages need would be empty.
        """
        for split, counts in self.counts.items():
            if not counts["rows"]:
                told = (
                    f"split {split} would be empty: {tally}. Give more rows, or change "
                    "data.validation_fraction and data.router_fraction"
                )
                raise UserError("\n  ".join([told, *tally.details()]))
        tally.require_kept(sum(c["conversations"] for c in self.counts.values()))
        with (self._folder / "dropped.jsonl").open("w", encoding="utf-8") as file:
            for place, reason, detail in tally.lost:
                line = {"place": place, "reason": reason, "detail": detail}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        splits = {split: dict(counts) for split, counts in self.counts.items()}
        return {
            "fingerprint": self._digest.hexdigest()[:16],
            "counts": {**tally.as_dict(), "splits": splits},
        }

    def _flush(self, split: str) -> None:
        if rows := self._pending[split]:
            self._files[split].write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
            self._pending[split] = []


def load_conversations(
    path: Path, split: str, identity: TargetIdentity
) -> tuple[Dataset, dict[str, Any]]:
    """One split, memory-mapped, and the manifest of all.

    Conversations that another program wrote do not depend on the target's weights: their manifest
    does not name them, and then they are not compared.
    Raises: ArtifactError when it is missing, was made for another target, or is empty.
    """
    manifest = read_manifest(path, made_by=MADE_BY)
    made_for: Mapping[str, Any] = manifest["target"]
    wanted = {k: v for k, v in identity.required().items() if k in made_for}
    require_match(path, made_for, wanted, made_by=MADE_BY)
    rows = Dataset.from_file(str(path / f"{split}.arrow"))
    if len(rows) == 0:
        raise ArtifactError(
            f"{path / split} holds no conversation: {manifest['counts']}. Look at the reasons, "
            f"then make it again with: {MADE_BY}"
        )
    return rows, manifest


def first_row(rows: Dataset) -> tuple[str, list[int], list[bool]]:
    """(id, token ids, loss mask), as `show_masks` takes it."""
    row = rows[0]
    return row["id"], row["input_ids"], row["loss_mask"]
