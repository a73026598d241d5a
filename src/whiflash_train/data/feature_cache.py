"""The target's rows on disk, for texts that are trained on many times and do not fit in memory.

A feature cache is a folder:

    manifest.json                       for which target, made of what
    index.parquet                       a row a text: split, shard, start, length, digest of its ids
    <split>/shard-00000.safetensors     taps [N, E], hidden [N, D], ids int32 [N], mask uint8 [N]

The texts of a shard follow one another in N, without padding. In float8_e4m3 the part of each
layer in each row is divided by its own scale: taps_scale [N, L], hidden_scale [N, 1].

It grows in a hidden folder beside its own, named by everything that its content depends on, a whole
shard at a time. So an interrupted run goes on, and a leftover of another run is never read.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Dataset
from jaxtyping import Float, Int
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whiflash_infer.artifacts import (
    FORMAT_VERSION,
    MANIFEST,
    json_hash,
    package_versions,
    read_manifest,
    require_match,
    write_json,
    write_whole,
)
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.target import Target
from whiflash_infer.types import TeacherRows
from whiflash_train.checks import checked
from whiflash_train.data.conversations import SPLITS
from whiflash_train.data.resumable import (
    resumable_folder,
    told_writing,
    write_shard,
)
from whiflash_train.progress import rate_bar

MADE_BY = "python data_prep/cache_features.py"
_REMAKE = f"Delete the folder and make it again with: {MADE_BY}"
INDEX = "index.parquet"
FeatureDtype = Literal["float32", "bfloat16", "float8_e4m3"]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
}
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SHARD_OVERHEAD = 4096  # bytes: header, and the last block of the file system
_OPEN_SHARDS = 64
_ROUNDING = ("torch", "transformers")  # a run that another version goes on with would be a mixture
_INDEX_SCHEMA = pa.schema(
    {
        "split": pa.string(),
        "shard": pa.int32(),
        "start": pa.int64(),
        "length": pa.int32(),
        "digest": pa.binary(16),
    }
)


@checked
@dataclass(frozen=True, kw_only=True)
class FeatureCacheSettings:
    """shard_tokens: of a file, at most. batch_size: texts that go through the target together.

    margin_gb: what must stay free on the disk (1 GB is 1e9 bytes); force: write all the same.
    """

    dtype: FeatureDtype
    splits: list[str]
    shard_tokens: int
    batch_size: int
    margin_gb: float
    force: bool

    def __post_init__(self) -> None:
        for name in ("shard_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.margin_gb < 0:
            raise ValueError(f"margin_gb is {self.margin_gb}: it must be 0 or more")
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise ValueError(f"splits is {self.splits}: it must name splits, each once")
        if unknown := [s for s in self.splits if s not in SPLITS]:
            raise ValueError(f"splits has {unknown[0]!r}: choose from {', '.join(SPLITS)}")


def feature_identity(target: Target, *, conversations: str, dtype: str) -> dict[str, Any]:
    """What the features of a text depend on; the consumer's must equal the cache's.

    conversations: the fingerprint in their manifest. dtype: of the features on disk.
    """
    return {
        "target": target.identity().manifest(),
        "tap_layer_ids": list(target.tap_layer_ids),
        "conversations": conversations,
        "feature_dtype": dtype,
    }


@dataclass(frozen=True, slots=True)
class Shard:
    """The texts of one file. batches: rows of the split that go through the target together."""

    split: str
    number: int
    batches: list[np.ndarray]
    num_tokens: int

    @property
    def name(self) -> str:
        return shard_name(self.split, self.number)


@dataclass(frozen=True, slots=True)
class Texts:
    """Lengths and content digests of a split's rows, in the order of the data set."""

    lengths: np.ndarray
    digests: list[bytes]

    @classmethod
    def of(cls, rows: Dataset) -> Texts:
        lengths, digests = [], []
        for table in rows.with_format("arrow").iter(batch_size=1024):
            for ids in table["input_ids"]:  # pyright: ignore
                tokens = ids.values.to_numpy(zero_copy_only=False)
                lengths.append(len(tokens))
                digests.append(text_digest(tokens))
        return cls(np.array(lengths, dtype=np.int64), digests)

    def summary(self) -> dict[str, Any]:
        """For the manifest: the fingerprint of conversations does not hash their content."""
        digest = hashlib.sha256(b"".join(self.digests)).hexdigest()[:16]
        return {"texts": len(self.digests), "tokens": int(self.lengths.sum()), "ids": digest}


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Which texts go where. The manifest holds everything that the content depends on."""

    texts: dict[str, Texts]
    shards: list[Shard]
    token_bytes: int
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    def num_bytes(self, shards: Sequence[Shard]) -> int:
        return sum(s.num_tokens * self.token_bytes + _SHARD_OVERHEAD for s in shards)


def plan_features(
    rows: Mapping[str, Dataset],
    target: Target,
    settings: FeatureCacheSettings,
    *,
    conversations: str,
) -> FeaturePlan:
    """A function of texts, target and settings alone, so a resumed run cuts the same shards."""
    texts = {split: Texts.of(rows[split]) for split in settings.splits}
    shards = [
        shard
        for split, found in texts.items()
        for shard in plan_shards(
            split,
            found.lengths,
            shard_tokens=settings.shard_tokens,
            batch_size=settings.batch_size,
        )
    ]
    content = {
        "format_version": FORMAT_VERSION,
        **feature_identity(target, conversations=conversations, dtype=settings.dtype),
        "splits": {split: found.summary() for split, found in texts.items()},
        "shard_tokens": settings.shard_tokens,
        "batch_size": settings.batch_size,
        "device": target.device.type,
        "made_with": {k: v for k, v in package_versions().items() if k in _ROUNDING},
    }
    num_taps, width = len(target.tap_layer_ids), target.config.hidden_size
    scales = 4 * (num_taps + 1) if settings.dtype == "float8_e4m3" else 0
    token_bytes = (num_taps + 1) * width * _DTYPES[settings.dtype].itemsize + scales + 5
    return FeaturePlan(texts, shards, token_bytes, {**content, "fingerprint": json_hash(content)})


def plan_shards(
    split: str, lengths: np.ndarray, *, shard_tokens: int, batch_size: int
) -> list[Shard]:
    """Longest texts first: texts of like length share a batch, and a lack of memory shows at once.

    A shard takes whole batches up to `shard_tokens`, and one at least.
    """
    order = np.argsort(-lengths, kind="stable")
    shards: list[Shard] = []
    taken: list[np.ndarray] = []
    tokens = 0
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        size = int(lengths[batch].sum())
        if taken and tokens + size > shard_tokens:
            shards.append(Shard(split, len(shards), taken, tokens))
            taken, tokens = [], 0
        taken, tokens = [*taken, batch], tokens + size
    return [*shards, Shard(split, len(shards), taken, tokens)] if taken else shards


def shard_name(split: str, number: int) -> str:
    return f"{split}/shard-{number:05d}.safetensors"


def text_digest(ids: np.ndarray) -> bytes:
    """16 bytes that stand for the token ids, whatever their integer type."""
    return hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16).digest()


def encode(
    name: str, rows: Float[Tensor, "N E"], *, dtype: str, num_layers: int
) -> dict[str, Tensor]:
    """The tensors that hold `rows`: of `dtype`, and in float8 a scale for each layer of each row.

    The scale brings the layer's largest value to the largest float8; a value is kept within 1/16
    of itself, or within 1/458752 of that largest one.
    """
    if dtype != "float8_e4m3":
        return {name: rows.to(_DTYPES[dtype])}
    layers = rows.float().unflatten(-1, (num_layers, -1))
    scale = layers.abs().amax(-1) / _FLOAT8_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = (layers / scale[..., None]).flatten(1)
    return {name: scaled.to(_DTYPES[dtype]), f"{name}_scale": scale}


def decode(
    values: Float[Tensor, "N E"], scale: Float[Tensor, "N L"] | None, dtype: torch.dtype
) -> Float[Tensor, "N E"]:
    if scale is None:
        return values.to(dtype)
    layers = values.float().unflatten(-1, (scale.shape[1], -1))
    return (layers * scale[..., None]).flatten(1).to(dtype)


def free_on_disk(folder: Path) -> int:
    """Free room on the disk that holds `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@torch.inference_mode()
def write_features(
    path: Path,
    rows: Mapping[str, Dataset],
    target: Target,
    settings: FeatureCacheSettings,
    *,
    conversations: str,
    console: Console,
    free_bytes: Callable[[Path], int] = free_on_disk,
) -> None:
    """Write the cache of the configured splits, or what is missing of it.

    rows: by split, with columns input_ids and loss_mask. conversations: their fingerprint.
    Raises: UserError when the disk is too small, full or read-only; what is complete stays.
    """
    plan = plan_features(rows, target, settings, conversations=conversations)
    if _is_complete(path, plan):
        console.print(f"{path} is complete already: nothing to do", soft_wrap=True)
        return
    with resumable_folder(path, plan.fingerprint) as work:
        missing = _missing(work, plan)
        free = free_bytes(work)
        _show_size(plan, missing, free, console)
        _require_room(plan, missing, free, settings)
        _show_time(rows, missing, target, settings, console)
        total = sum(shard.num_tokens for shard in missing)
        with rate_bar(console, "features", total=total, unit="tokens") as advance:
            for shard in missing:
                tensors = _compute_shard(shard, rows[shard.split], target, settings, advance)
                write_shard(work / shard.name, tensors, plan.fingerprint)
        with told_writing(work):
            write_json(work / MANIFEST, {**plan.manifest, "packages": package_versions()})
            write_whole(work / INDEX, _parquet(index_table(plan)))
    console.print(f"[bold]features[/bold] written to {path}", soft_wrap=True)


def index_table(plan: FeaturePlan) -> pa.Table:
    """Where each text lies. `start` and `length` are rows of its shard."""
    rows: list[dict[str, Any]] = []
    for shard in plan.shards:
        texts, start = plan.texts[shard.split], 0
        for row in np.concatenate(shard.batches):
            length = int(texts.lengths[row])
            place = {"split": shard.split, "shard": shard.number, "start": start, "length": length}
            rows.append({**place, "digest": texts.digests[row]})
            start += length
    return pa.Table.from_pylist(rows, schema=_INDEX_SCHEMA)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _is_complete(path: Path, plan: FeaturePlan) -> bool:
    files = all((path / name).is_file() for name in (MANIFEST, INDEX))
    return files and not _missing(path, plan)


def _missing(folder: Path, plan: FeaturePlan) -> list[Shard]:
    return [s for s in plan.shards if not _is_whole(folder / s.name, plan.fingerprint)]


def _is_whole(path: Path, fingerprint: str) -> bool:
    """Opening compares the file's size with its header; the fingerprint stands for its content."""
    try:
        with safe_open(path, framework="pt") as shard:
            return (shard.metadata() or {}).get("fingerprint") == fingerprint
    except (OSError, SafetensorError):
        return False


def _show_size(plan: FeaturePlan, missing: Sequence[Shard], free: int, console: Console) -> None:
    tokens = sum(shard.num_tokens for shard in plan.shards)
    texts = sum(len(found.digests) for found in plan.texts.values())
    console.print(
        f"features of {texts:,} texts, {tokens:,} tokens in {plan.manifest['feature_dtype']}: "
        f"{_gb(plan.num_bytes(plan.shards))} in {len(plan.shards):,} shards, "
        f"{plan.token_bytes:,} bytes a token",
        soft_wrap=True,
    )
    done = f" ({len(plan.shards) - len(missing):,} shards are there already)"
    console.print(
        f"to write: {_gb(plan.num_bytes(missing))}{done if len(missing) < len(plan.shards) else ''}"
        f"; free on the disk: {_gb(free)}",
        soft_wrap=True,
    )


def _require_room(
    plan: FeaturePlan, missing: Sequence[Shard], free: int, settings: FeatureCacheSettings
) -> None:
    """Raises: UserError when the disk would fill, unless forced."""
    size, margin = plan.num_bytes(missing), int(settings.margin_gb * 1e9)
    if size + margin > free and not settings.force:
        raise UserError(
            f"the features need {_gb(size)} and features.margin_gb={settings.margin_gb} is to stay "
            f"free, but the disk has {_gb(free)} left: choose a smaller features.dtype, fewer "
            "features.splits or another paths.features, or write all the same with "
            "features.force=true"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"


def _show_time(
    rows: Mapping[str, Dataset],
    missing: Sequence[Shard],
    target: Target,
    settings: FeatureCacheSettings,
    console: Console,
) -> None:
    """Time the batch in the middle of what is missing, its second pass."""
    if not missing:
        return
    shard = missing[len(missing) // 2]
    batch = shard.batches[len(shard.batches) // 2]
    _compute(batch, rows[shard.split], target, settings)  # the first pass is slower
    started = time.perf_counter()
    tokens = len(_compute(batch, rows[shard.split], target, settings)["ids"])
    seconds = time.perf_counter() - started
    minutes = sum(s.num_tokens for s in missing) * seconds / tokens / 60
    console.print(
        f"about {max(0.1, minutes):,.1f} minutes at {tokens / seconds:,.0f} tokens/s "
        f"on {target.device}"
    )


def _compute_shard(
    shard: Shard,
    rows: Dataset,
    target: Target,
    settings: FeatureCacheSettings,
    advance: Callable[..., None],
) -> dict[str, Tensor]:
    parts: list[dict[str, Tensor]] = []
    for batch in shard.batches:
        parts.append(_compute(batch, rows, target, settings))
        tokens = len(parts[-1]["ids"])
        advance(tokens, produced=tokens)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _compute(
    batch: np.ndarray, rows: Dataset, target: Target, settings: FeatureCacheSettings
) -> dict[str, Tensor]:
    """The tensors of a shard for the texts of one batch, in its order, on the CPU."""
    picked = rows[batch.tolist()]
    texts = [torch.tensor(ids) for ids in picked["input_ids"]]
    lengths = torch.tensor([len(ids) for ids in texts])
    keep = (torch.arange(int(lengths.max())) < lengths[:, None]).to(target.device)
    found = target.teach(pad_sequence(texts, batch_first=True).to(target.device), keep)
    features = {
        **encode(
            "taps", found.taps[keep], dtype=settings.dtype, num_layers=len(target.tap_layer_ids)
        ),
        **encode("hidden", found.hidden[keep], dtype=settings.dtype, num_layers=1),
    }
    mask = np.concatenate([np.asarray(m, dtype=np.uint8) for m in picked["loss_mask"]])
    own = {"ids": torch.cat(texts).to(torch.int32), "mask": torch.from_numpy(mask)}
    return {**{name: tensor.cpu() for name, tensor in features.items()}, **own}


class FeatureCache:
    """Reads the rows of a batch of texts. Shards are mapped when a text in them is asked for."""

    def __init__(self, path: Path, fingerprint: str, index: pa.Table) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._places = {d: i for i, d in enumerate(index["digest"].to_pylist())}
        self._splits = index["split"].to_pylist()
        self._shards = index["shard"].to_numpy()
        self._starts = index["start"].to_numpy()
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    @classmethod
    def open(cls, path: Path, wanted: Mapping[str, Any]) -> FeatureCache:
        """wanted: `feature_identity` of this run.

        Raises: ArtifactError when the cache is missing, damaged or was made for something else,
        naming each field with both values.
        """
        manifest = read_manifest(path, made_by=MADE_BY)
        require_match(path, _flat(manifest), _flat(wanted), made_by=MADE_BY)
        try:
            index = pq.read_table(path / INDEX, schema=_INDEX_SCHEMA)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"{path / INDEX} cannot be read: {error}. {_REMAKE}") from None
        return cls(path, manifest["fingerprint"], index)

    def require(self, rows: Mapping[str, Dataset]) -> None:
        """Raises: ArtifactError unless every text of these splits is here: best known at once."""
        for split, found in rows.items():
            texts = Texts.of(found)
            absent = [i for i, d in enumerate(texts.digests) if d not in self._places]
            if absent:
                raise ArtifactError(
                    f"{self.path} lacks {len(absent)} of the {len(texts.digests)} texts of split "
                    f"{split!r}, the first is row {absent[0]}: is the split in features.splits? "
                    f"Make it again with: {MADE_BY}"
                )

    def lookup(
        self,
        ids: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        rows: Int[Tensor, " B"],
        *,
        dtype: torch.dtype,
    ) -> TeacherRows:
        """Features of right-padded texts, zero at the padding, of `dtype` on the device of `ids`.

        rows: what to call the texts in errors. Raises: ArtifactError for a text that is not here.
        """
        texts = zip(ids.cpu(), lengths.tolist(), rows.tolist(), strict=True)
        parts = [self._read(text[:length], row) for text, length, row in texts]
        moved = [{name: part.to(ids.device) for name, part in one.items()} for one in parts]
        taps = [decode(one["taps"], one.get("taps_scale"), dtype) for one in moved]
        hidden = [decode(one["hidden"], one.get("hidden_scale"), dtype) for one in moved]
        return TeacherRows(
            pad_sequence(taps, batch_first=True), pad_sequence(hidden, batch_first=True)
        )

    def _read(self, text: Int[Tensor, " T"], row: int) -> dict[str, Tensor]:
        """The features and their scales, as views of the mapped file."""
        place = self._places.get(text_digest(text.numpy()))
        if place is None:
            raise ArtifactError(
                f"{self.path} does not hold row {row}, a text of {len(text)} tokens that begins "
                f"{text[:8].tolist()}: it was made of other texts. Make it again with: {MADE_BY}"
            )
        name = shard_name(self._splits[place], int(self._shards[place]))
        shard, start = self._open(name), int(self._starts[place])
        span = slice(start, start + len(text))
        part = {key: shard.get_slice(key)[span] for key in shard.keys() if key != "mask"}  # noqa: SIM118
        if not torch.equal(part.pop("ids"), text.to(torch.int32)):
            raise ArtifactError(f"{self.path / name} does not hold what {INDEX} says. {_REMAKE}")
        return part

    def _open_shard(self, name: str) -> Any:
        try:
            shard = safe_open(self.path / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{self.path / name} is damaged: {error}. {_REMAKE}") from None
        if (shard.metadata() or {}).get("fingerprint") != self._fingerprint:
            raise ArtifactError(f"{self.path / name} belongs to another cache. {_REMAKE}")
        return shard


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields by dotted name, so that a misfit is told by its own."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": part for key, part in _flat(value).items()}
        else:
            flat[name] = value
    return flat
