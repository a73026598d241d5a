"""Dense rounds: every position of every conversation, labelled for every arm.

On disk they are a folder:

    manifest.json                 for which target, drafters and conversations; arms; shards
    rounds-00000.parquet          a row a position: conversation, category, split, position, limit,
                                  accepted_<arm> and censored_<arm>, near_tie, greedy
    features-00000.safetensors    router features [N, F] of the same rows

Conversations are whole: none goes on in another shard.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whiflash_infer.artifacts import MANIFEST, json_hash, new_artifact, read_manifest
from whiflash_infer.errors import ArtifactError

FEATURE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_POSITIONS = 16384
_FINGERPRINT = "fingerprint"
_OF_EVERY_ARM = ("accepted", "censored")


@dataclass(frozen=True, slots=True)
class ConversationRounds:
    """All anchor positions of one answer of a conversation, in order and without gaps.

    positions[i + 1] = positions[i] + 1. After the anchor at positions[i] the text has
    len(positions) - i more tokens. accepted and censored are by drafting arm; of a tree, the length
    of the text's path in it. near_tie: the target prefers its token by so little that decoding may
    say another. greedy: the token after the anchor is the one that the target prefers. limit:
    tokens of the whole text at which decoding would have stopped, None where it was the stop
    token that ended it, or nobody knows.
    """

    conversation: str
    category: str
    split: str
    positions: np.ndarray
    features: Float[Tensor, "N F"]
    accepted: dict[str, np.ndarray]
    censored: dict[str, np.ndarray]
    near_tie: np.ndarray
    greedy: np.ndarray
    limit: int | None = None

    def __len__(self) -> int:
        return len(self.positions)


def table_name(shard: int) -> str:
    return f"rounds-{shard:05d}.parquet"


def features_name(shard: int) -> str:
    return f"features-{shard:05d}.safetensors"


def table_bytes(conversations: Sequence[ConversationRounds], fingerprint: str) -> bytes:
    """The parquet file of a shard."""
    sizes = [len(c) for c in conversations]
    columns: dict[str, Any] = {
        name: pa.array([getattr(c, name) for c in conversations], pa.string())
        .dictionary_encode()
        .take(pa.array(np.repeat(np.arange(len(sizes)), sizes)))
        for name in ("conversation", "category", "split")
    }
    columns["position"] = _joined([c.positions for c in conversations], np.int32)
    for arm in conversations[0].accepted:
        columns[f"accepted_{arm}"] = _joined([c.accepted[arm] for c in conversations], np.int16)
        columns[f"censored_{arm}"] = _joined([c.censored[arm] for c in conversations], bool)
    for name in ("near_tie", "greedy"):
        columns[name] = _joined([getattr(c, name) for c in conversations], bool)
    limits = [limit for c in conversations for limit in [c.limit] * len(c)]
    columns["limit"] = pa.array(limits, pa.int32())
    table = pa.table(columns).replace_schema_metadata({_FINGERPRINT: fingerprint})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def features_tensor(
    conversations: Sequence[ConversationRounds], dtype: str
) -> Float[Tensor, "N F"]:
    """What the safetensors file of a shard holds."""
    return torch.cat([c.features for c in conversations]).to(FEATURE_DTYPES[dtype]).contiguous()


def shard_facts(conversations: Sequence[ConversationRounds]) -> dict[str, int]:
    """What the manifest tells of a shard."""
    return {"conversations": len(conversations), "positions": sum(map(len, conversations))}


def save_rounds(
    path: Path,
    conversations: Sequence[ConversationRounds],
    manifest: Mapping[str, Any],
    *,
    shard_positions: int = SHARD_POSITIONS,
    dtype: str = "bfloat16",
) -> None:
    """Write rounds that are in memory. `write_rounds` of the training package labels and writes
    shard by shard."""
    fingerprint = manifest.get(_FINGERPRINT) or json_hash(manifest)
    sizes = [len(c) for c in conversations]
    shards = [conversations[part] for part in cut_shards(sizes, shard_positions)]
    complete = {
        **manifest,
        _FINGERPRINT: fingerprint,
        "arms": list(conversations[0].accepted),
        "shards": [shard_facts(shard) for shard in shards],
    }
    with new_artifact(path, complete) as folder:
        for number, shard in enumerate(shards):
            (folder / table_name(number)).write_bytes(table_bytes(shard, fingerprint))
            features = {"features": features_tensor(shard, dtype)}
            whole = safetensors.torch.save(features, metadata={_FINGERPRINT: fingerprint})
            (folder / features_name(number)).write_bytes(whole)


def cut_shards(sizes: Sequence[int], shard_positions: int) -> list[slice]:
    """Whole conversations up to `shard_positions`, and one at least."""
    shards, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > shard_positions:
            shards.append(slice(start, index))
            start, filled = index, 0
        filled += size
    return [*shards, slice(start, len(sizes))] if sizes else []


def load_rounds(
    path: Path, *, made_by: str
) -> tuple[dict[str, list[ConversationRounds]], dict[str, Any]]:
    """Conversations by split, in the order of the shards, and the manifest.

    Raises: ArtifactError that names the file which is missing, damaged or lacks something.
    """
    manifest = read_manifest(path, made_by=made_by)
    lacking = [key for key in ("shards", "arms", _FINGERPRINT) if key not in manifest]
    if lacking:
        raise ArtifactError(
            f"{path / MANIFEST} has no field {lacking[0]!r}: it is of an older format. Make it "
            f"again with: {made_by}"
        )
    splits: dict[str, list[ConversationRounds]] = {}
    for number, facts in enumerate(manifest["shards"]):
        shard = _Shard(path, number, manifest, made_by)
        for one in shard.conversations(facts["positions"]):
            splits.setdefault(one.split, []).append(one)
    return splits, manifest


def is_whole_shard(folder: Path, number: int, fingerprint: str, num_positions: int) -> bool:
    """Whether both files of a shard are there, complete, and of this run."""
    try:
        table = pq.read_metadata(folder / table_name(number))
        with safe_open(folder / features_name(number), framework="pt") as file:
            features = file.get_slice("features").get_shape()
            told = [file.metadata() or {}, _decoded(table.metadata)]
    except (OSError, pa.ArrowException, SafetensorError):
        return False
    ours = all(found.get(_FINGERPRINT) == fingerprint for found in told)
    return ours and table.num_rows == features[0] == num_positions


@dataclass(frozen=True, slots=True)
class _Shard:
    folder: Path
    number: int
    manifest: Mapping[str, Any]
    made_by: str

    def conversations(self, num_positions: int) -> Iterator[ConversationRounds]:
        table, features = self._table(), self._features()
        files = {table_name(self.number): len(table), features_name(self.number): len(features)}
        for name, found in files.items():
            if found != num_positions:
                self._refuse(name, f"has {found} rows, {MANIFEST} says {num_positions}")
        arms: list[str] = self.manifest["arms"]
        columns = self._columns(table, arms)
        names, positions = columns["conversation"], columns["position"].astype(np.int64)
        new = (names[1:] != names[:-1]) | (np.diff(positions) != 1)
        bounds = [0, *(np.flatnonzero(new) + 1).tolist(), len(names)]
        for start, end in pairwise(bounds):
            span = slice(start, end)
            limit = columns["limit"][start]
            yield ConversationRounds(
                conversation=str(names[start]),
                category=str(columns["category"][start]),
                split=str(columns["split"][start]),
                positions=positions[span],
                features=features[span].float(),
                accepted={a: columns[f"accepted_{a}"][span].astype(np.int64) for a in arms},
                censored={a: columns[f"censored_{a}"][span] for a in arms},
                near_tie=columns["near_tie"][span],
                greedy=columns["greedy"][span],
                limit=None if limit < 0 else int(limit),
            )

    def _columns(self, table: pa.Table, arms: Sequence[str]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        wanted = ("conversation", "category", "split", "position", "near_tie", "greedy", "limit")
        for name in (*wanted, *(f"{part}_{arm}" for arm in arms for part in _OF_EVERY_ARM)):
            if name not in table.column_names:
                self._refuse(table_name(self.number), f"has no column {name!r}")
            column = table[name]
            found[name] = (column.fill_null(-1) if name == "limit" else column).to_numpy()
        return found

    def _table(self) -> pa.Table:
        name = table_name(self.number)
        self._require_file(name)
        try:
            table = pq.read_table(self.folder / name)
        except (OSError, pa.ArrowException) as error:
            self._refuse(name, f"is damaged: {error}")
        self._require_ours(name, _decoded(table.schema.metadata))
        return table

    def _features(self) -> Float[Tensor, "N F"]:
        name = features_name(self.number)
        self._require_file(name)
        try:
            with safe_open(self.folder / name, framework="pt") as file:
                features, told = file.get_tensor("features"), file.metadata()
        except (OSError, SafetensorError) as error:
            self._refuse(name, f"is damaged: {error}")
        self._require_ours(name, told or {})
        return features

    def _require_file(self, name: str) -> None:
        if not (self.folder / name).is_file():
            self._refuse(name, "is missing")

    def _require_ours(self, name: str, told: Mapping[str, str]) -> None:
        if told.get(_FINGERPRINT) != self.manifest[_FINGERPRINT]:
            self._refuse(name, "belongs to other rounds")

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise ArtifactError(
            f"{self.folder / name} {what}. Delete the folder and make it again with: {self.made_by}"
        )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype)


def _decoded(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in (metadata or {}).items() if k == b"fingerprint"}
