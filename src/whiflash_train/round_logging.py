"""Dense rounds of conversations, labelled a shard at a time, so that a killed run goes on.

They grow in a hidden folder beside their own, named by everything that their content depends on.
A shard is labelled by itself, in batches of its own, so it has the same bytes whoever labels it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from jaxtyping import Bool, Float, Int
from rich.console import Console
from torch import Tensor

from whiflash_infer.artifacts import (
    FORMAT_VERSION,
    MANIFEST,
    json_hash,
    package_versions,
    read_json,
    write_json,
    write_whole,
)
from whiflash_infer.drafters.base import Arm
from whiflash_infer.errors import UserError
from whiflash_infer.routing.features import NUM_SCALARS, router_features
from whiflash_infer.routing.labels import label_arms
from whiflash_infer.routing.rounds import (
    FEATURE_DTYPES,
    ConversationRounds,
    cut_shards,
    features_name,
    features_tensor,
    is_whole_shard,
    table_bytes,
    table_name,
)
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch, collate, draw_anchors
from whiflash_train.checks import checked
from whiflash_train.data.conversations import SPLITS
from whiflash_train.data.feature_cache import free_on_disk
from whiflash_train.data.processes import Processes
from whiflash_train.data.resumable import resumable_folder, told_writing, write_shard
from whiflash_train.progress import Advance, rate_bar
from whiflash_train.teacher import OnlineTeacher

MADE_BY = "python data_prep/log_rounds.py"
_ROUNDING = ("torch", "transformers")  # a run that another version goes on with would be a mixture
_ROWS_A_PASS = 256  # of the target's head, whose logits are wide
# Of the best logit, or of any: how far logits move when the batch or the width of a pass changes.
_RELATIVE_TIE = {torch.bfloat16: 2 * 2.0**-8, torch.float16: 2 * 2.0**-11}
_ABSOLUTE_TIE = 1e-3
_MANY = 0.1  # not greedy, of all positions


@checked
@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """mode: dense labels every position; decode logs the rounds that are really decoded.

    limits: conversations of each split, None: all. batch_size: conversations that are labelled
    together. shard_positions: of a file, at most. dtype: of the features on disk. margin_gb: what
    must stay free on the disk (1 GB is 1e9 bytes); force: write all the same.
    policy, decode_limit: who chooses the arms in mode=decode, and how many conversations there are.
    """

    mode: Literal["dense", "decode"]
    limits: dict[str, int | None]
    batch_size: int
    shard_positions: int
    dtype: Literal["bfloat16", "float32"]
    margin_gb: float
    force: bool
    policy: str
    decode_limit: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "shard_positions", "decode_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.margin_gb < 0:
            raise ValueError(f"margin_gb is {self.margin_gb}: it must be 0 or more")
        if unknown := [split for split in self.limits if split not in SPLITS]:
            raise ValueError(f"limits has {unknown[0]!r}: choose from {', '.join(SPLITS)}")

    def limited(self, split: str, rows: Dataset) -> Dataset:
        limit = self.limits.get(split)
        return rows if limit is None else rows.select(range(min(limit, len(rows))))


@dataclass(frozen=True, slots=True)
class RoundShard:
    """rows: of the split, ascending. num_positions: in all of them."""

    number: int
    split: str
    rows: np.ndarray
    num_positions: int


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Which conversations go where. The manifest holds everything that the content depends on."""

    shards: list[RoundShard]
    position_bytes: tuple[int, int]
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.manifest["fingerprint"]

    def missing(self, folder: Path) -> list[RoundShard]:
        fingerprint = self.fingerprint
        return [
            shard
            for shard in self.shards
            if not is_whole_shard(folder, shard.number, fingerprint, shard.num_positions)
        ]


def plan_rounds(
    rows: Mapping[str, Dataset],
    target: Target,
    arms: Mapping[str, Arm],
    settings: RoundSettings,
    lineage: Mapping[str, Any],
) -> RoundPlan:
    """A function of its arguments alone, so a resumed run cuts the same shards.

    rows: by split, limited already. lineage: what identifies conversations, drafters and arms.
    Raises: UserError when there is nothing to label.
    """
    shards: list[RoundShard] = []
    for split, found in rows.items():
        shards += _plan_split(split, found, len(shards), settings.shard_positions)
    if not shards:
        raise UserError("rounds.limits leaves no conversation to label")
    content = {
        "format_version": FORMAT_VERSION,
        "target": target.identity().manifest(),
        **lineage,
        "arms": list(arms),
        "max_draft": {name: arm.max_draft for name, arm in arms.items()},
        "max_nodes": {name: arm.max_nodes for name, arm in arms.items()},
        "limits": settings.limits,
        "batch_size": settings.batch_size,
        "feature_dtype": settings.dtype,
        "shards": [
            {"conversations": len(s.rows), "positions": s.num_positions, "split": s.split}
            for s in shards
        ],
        "counts": {
            "conversations": sum(len(s.rows) for s in shards),
            "positions": _positions(shards),
        },
        "device": target.device.type,
        "made_with": {k: v for k, v in package_versions().items() if k in _ROUNDING},
    }
    num_features = target.config.hidden_size + NUM_SCALARS
    of_features = num_features * FEATURE_DTYPES[settings.dtype].itemsize
    of_table = 4 + 4 + 1 + 3 * len(arms)  # before compression
    return RoundPlan(
        shards, (of_features, of_table), {**content, "fingerprint": json_hash(content)}
    )


def _plan_split(
    split: str, rows: Dataset, first_number: int, shard_positions: int
) -> list[RoundShard]:
    if not len(rows):
        return []
    sizes = np.array([len(draw_anchors(np.array(m), None, None)) for m in rows["loss_mask"]])
    labelled = np.flatnonzero(sizes)
    parts = [labelled[part] for part in cut_shards(sizes[labelled].tolist(), shard_positions)]
    return [
        RoundShard(first_number + i, split, part, int(sizes[part].sum()))
        for i, part in enumerate(parts)
    ]


@dataclass(frozen=True, slots=True)
class Spent:
    """What labelling took here; nothing when all shards were there already."""

    positions: int
    seconds: float


@torch.inference_mode()
def write_rounds(
    path: Path,
    rows: Mapping[str, Dataset],
    target: Target,
    arms: Mapping[str, Arm],
    settings: RoundSettings,
    *,
    lineage: Mapping[str, Any],
    console: Console,
    processes: Processes,
    free_bytes: Callable[[Path], int] = free_on_disk,
) -> Spent:
    """Write the rounds, or what is missing of them; each process takes its share of the shards.

    Raises: UserError when the disk is too small, full or read-only; what is complete stays.
    """
    plan = plan_rounds(rows, target, arms, settings, lineage)
    if _is_complete(path, plan):
        console.print(f"{path} is complete already: nothing to do", soft_wrap=True)
        return Spent(0, 0.0)
    with _work_folder(path, plan.fingerprint, processes) as work:
        missing = plan.missing(work)
        free = free_bytes(work)
        _show_size(plan, missing, free, console)
        _require_room(plan, missing, free, settings)
        processes.wait()  # before any of them writes: all see the same shards missing
        own = missing[processes.index :: processes.count]
        started = time.perf_counter()
        with rate_bar(console, "labelling", total=_positions(own), unit="positions") as advance:
            for shard in own:
                found = label_shard(shard, rows[shard.split], target, arms, settings, advance)
                _write_shard(work, shard.number, found, plan.fingerprint, settings.dtype)
        seconds = time.perf_counter() - started
        processes.wait()
        if processes.is_main:
            with told_writing(work):
                manifest = {**plan.manifest, "packages": package_versions()}
                write_json(work / MANIFEST, manifest)
    return Spent(_positions(own), seconds)


@contextmanager
def _work_folder(path: Path, fingerprint: str, processes: Processes) -> Iterator[Path]:
    """The folder in which all processes write; the first one has the lock, and renames it."""
    if processes.is_main:
        with resumable_folder(path, fingerprint) as work:
            _shared(str(work), processes)
            yield work
    else:
        yield Path(_shared("", processes))
    processes.wait()


def _shared(text: str, processes: Processes) -> str:
    """What the first process says."""
    told = [text]
    if processes.count > 1:
        broadcast_object_list(told)
    return told[0]


def _write_shard(
    folder: Path,
    number: int,
    conversations: Sequence[ConversationRounds],
    fingerprint: str,
    dtype: str,
) -> None:
    with told_writing(folder):
        write_whole(folder / table_name(number), table_bytes(conversations, fingerprint))
    features = {"features": features_tensor(conversations, dtype)}
    write_shard(folder / features_name(number), features, fingerprint)


def label_shard(
    shard: RoundShard,
    rows: Dataset,
    target: Target,
    arms: Mapping[str, Arm],
    settings: RoundSettings,
    advance: Advance,
) -> list[ConversationRounds]:
    """Dense rounds of the shard's conversations, in its order; those of like length together."""
    lengths = np.array([len(ids) for ids in rows[shard.rows.tolist()]["input_ids"]])
    order = shard.rows[np.argsort(lengths, kind="stable")]
    found: dict[int, list[ConversationRounds]] = {}
    for start in range(0, len(order), settings.batch_size):
        indices = order[start : start + settings.batch_size]
        batch = collate(rows, indices, num_anchors=None, rng=None, pad_id=target.chat.pad_id)
        labelled = label_batch(batch, rows, shard.split, target, arms, settings.dtype)
        found |= dict(zip(indices.tolist(), labelled, strict=True))
        positions = int(batch.anchor_mask.sum())
        advance(positions, produced=positions)
    return [answer for row in shard.rows.tolist() for answer in found[row]]


@torch.inference_mode()
def label_batch(
    batch: DrafterBatch,
    rows: Dataset,
    split: str,
    target: Target,
    arms: Mapping[str, Arm],
    dtype: str,
) -> list[list[ConversationRounds]]:
    """Of each conversation of the batch, the rounds of each of its answers."""
    moved = batch.to(target.device)
    teacher_rows = OnlineTeacher(target)(moved)
    labels = label_arms(arms, moved.ids, moved.lengths, teacher_rows, moved.anchors)
    found: list[list[ConversationRounds]] = []
    picked = rows[batch.rows.tolist()]
    for i, length in enumerate(batch.lengths.tolist()):
        keep = batch.anchor_mask[i]
        anchors = moved.anchors[i][keep.to(target.device)]
        seen = read_rows(target, moved.ids[i], teacher_rows.hidden[i], anchors)
        whole = ConversationRounds(
            conversation=picked["id"][i],
            category=picked["category"][i],
            split=split,
            positions=batch.anchors[i][keep].numpy(),
            features=seen.features.to(FEATURE_DTYPES[dtype]).cpu(),
            accepted={a: part.accepted[i].cpu()[keep].numpy() for a, part in labels.items()},
            censored={a: part.censored[i].cpu()[keep].numpy() for a, part in labels.items()},
            near_tie=seen.near_tie.cpu().numpy(),
            greedy=seen.greedy.cpu().numpy(),
            limit=length if picked["truncated"][i] else None,
        )
        max_draft = {name: arm.max_draft for name, arm in arms.items()}
        found.append(split_answers(whole, length, max_draft))
    return found


@dataclass(frozen=True, slots=True)
class SeenRows:
    """Of each anchor: the state that produced it, and what the target says comes after it."""

    features: Float[Tensor, "N F"]
    near_tie: Bool[Tensor, " N"]
    greedy: Bool[Tensor, " N"]


def read_rows(
    target: Target,
    ids: Int[Tensor, " T"],
    hidden: Float[Tensor, "T D"],
    anchors: Int[Tensor, " N"],
) -> SeenRows:
    """Row n - 1 of the target produced the anchor x_n; row n predicts the token after it."""
    rows, places = torch.cat([anchors - 1, anchors]).unique(return_inverse=True)
    of_anchor, after = places.view(2, -1)
    parts: list[SeenRows] = []
    for part in rows.split(_ROWS_A_PASS):
        logits = target.tables.logits(hidden[part])
        features = router_features(logits, hidden[part], part + 1)
        following = ids[(part + 1).clamp(max=len(ids) - 1)]
        greedy = logits.argmax(-1) == following
        parts.append(SeenRows(features, near_ties(logits, target.dtype), greedy))
    return SeenRows(
        torch.cat([part.features for part in parts])[of_anchor],
        torch.cat([part.near_tie for part in parts])[after],
        torch.cat([part.greedy for part in parts])[after],
    )


def near_ties(logits: Float[Tensor, "N V"], dtype: torch.dtype) -> Bool[Tensor, " N"]:
    """Where the best token leads the second by less than rounding in `dtype` may move."""
    best, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    relative = _RELATIVE_TIE.get(dtype)
    tolerance = _ABSOLUTE_TIE if relative is None else relative * best.abs()
    return best - second < tolerance


def split_answers(
    whole: ConversationRounds, length: int, max_draft: Mapping[str, int]
) -> list[ConversationRounds]:
    """The answers of a conversation: decoding stops at the end of each, so a label never reaches
    over it. length: of the whole text."""
    positions = whole.positions
    bounds = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [_answer(whole, slice(start, end), length, max_draft) for start, end in pairwise(bounds)]


def _answer(
    whole: ConversationRounds, span: slice, length: int, max_draft: Mapping[str, int]
) -> ConversationRounds:
    positions = whole.positions[span]
    left = len(positions) - np.arange(len(positions))
    is_last = int(positions[-1]) + 2 == length  # then labels end with the text already
    accepted, censored = {}, {}
    for arm, longest in max_draft.items():
        full, cut = whole.accepted[arm][span], whole.censored[arm][span]
        accepted[arm] = np.minimum(full, left)
        censored[arm] = cut if is_last else cut | ((full >= left) & (left < longest))
    return ConversationRounds(
        conversation=whole.conversation,
        category=whole.category,
        split=whole.split,
        positions=positions,
        features=whole.features[span],
        accepted=accepted,
        censored=censored,
        near_tie=whole.near_tie[span],
        greedy=whole.greedy[span],
        limit=whole.limit if is_last else None,
    )


def show_rounds(path: Path, spent: Spent, console: Console) -> None:
    """What the artefact holds, read without its features."""
    manifest = read_json(path / MANIFEST)
    tables = [pq.read_table(path / table_name(i)) for i in range(len(manifest["shards"]))]
    table = pa.concat_tables([t.drop_columns(["conversation", "category"]) for t in tables])
    if spent.positions:
        console.print(
            f"labelled {spent.positions:,} positions in {spent.seconds:.1f} s, "
            f"{1e3 * spent.seconds / spent.positions:.2f} ms a position for all arms"
        )
    for arm in manifest["arms"]:
        accepted = _column(table, f"accepted_{arm}").mean()
        console.print(f"  {arm}: {1 + accepted:.3f} tokens a round if used everywhere")
    other = 1.0 - _column(table, "greedy").mean()
    console.print(
        f"near ties: {_column(table, 'near_tie').mean():.1%} of positions; followed by another "
        f"token than the target's own choice: {other:.1%}",
        soft_wrap=True,
    )
    if other > _MANY:
        console.print(
            f"[bold]warning[/bold]: at {other:.0%} of positions the text goes on with a token that "
            "the target would not choose, as sampled answers and those of other models do. "
            "Decoding would leave the text there, so these labels are not what it would meet: "
            "label greedy answers of the target (data_prep/generate.py, generate.temperature=0)",
            soft_wrap=True,
        )


def _column(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy().astype(float)


def _positions(shards: Sequence[RoundShard]) -> int:
    return sum(shard.num_positions for shard in shards)


def _is_complete(path: Path, plan: RoundPlan) -> bool:
    if not (path / MANIFEST).is_file():
        return False
    found = read_json(path / MANIFEST)
    return found.get("fingerprint") == plan.fingerprint and not plan.missing(path)


def _show_size(plan: RoundPlan, missing: Sequence[RoundShard], free: int, console: Console) -> None:
    positions = _positions(plan.shards)
    of_features, of_table = (positions * size for size in plan.position_bytes)
    console.print(
        f"{positions:,} rows in {len(plan.shards):,} shards: {_size(of_features)} of features in "
        f"{plan.manifest['feature_dtype']}, {_size(of_table)} of table at most",
        soft_wrap=True,
    )
    there = len(plan.shards) - len(missing)
    done = f" ({there:,} shards are there already)" if there else ""
    console.print(
        f"to write: {_size(_bytes(plan, missing))}{done}; free on the disk: {_size(free)}",
        soft_wrap=True,
    )


def _require_room(
    plan: RoundPlan, missing: Sequence[RoundShard], free: int, settings: RoundSettings
) -> None:
    """Raises: UserError when the disk would fill, unless forced."""
    size, margin = _bytes(plan, missing), int(settings.margin_gb * 1e9)
    if size + margin > free and not settings.force:
        raise UserError(
            f"the rounds need {_size(size)} and rounds.margin_gb={settings.margin_gb} is to stay "
            f"free, but the disk has {_size(free)} left: choose rounds.dtype=bfloat16, smaller "
            "rounds.limits or another paths.rounds, or write all the same with rounds.force=true"
        )


def _bytes(plan: RoundPlan, shards: Sequence[RoundShard]) -> int:
    return _positions(shards) * sum(plan.position_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.2f} MB"
