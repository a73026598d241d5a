from __future__ import annotations

import ctypes
import io
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from tests.children import exit_status, in_child, kill_after, mount_small
from tests.fakes import (
    SOFT_CE,
    TAP_SIZE,
    TAPS,
    block_objective,
    random_ids,
    tiny_ar,
    tiny_diffusion,
)
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.target import Target
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch, collate, validation_batches
from whiflash_train.data.feature_cache import (
    FeatureCache,
    FeatureCacheSettings,
    decode,
    encode,
    feature_identity,
    free_on_disk,
    write_features,
)
from whiflash_train.objectives import ar_objective, diffusion_objective
from whiflash_train.teacher import CachedTeacher, OnlineTeacher, Teacher, make_teacher

FLOAT32 = FeatureCacheSettings(
    dtype="float32",
    splits=["train", "validation"],
    shard_tokens=60,
    batch_size=2,  # shards of 56, 39, 26 + 17 + 5 and 30 + 7 tokens
    margin_gb=0.0,
    force=False,
)
LENGTHS = {"train": [9, 30, 17, 5, 22, 12, 26, 8, 14], "validation": [11, 19, 7]}
SKIPPED = 77
RESUMED, DONE, UNCLEAN = 3, 4, 5  # what children exit with
NO_MOUNT = "needs the right to mount a file system in a namespace of its own"


def texts(*, seed: int = 0) -> dict[str, Dataset]:
    """A few texts of the tiny target's tokens; the first 3 tokens of each are no answer."""
    rows: dict[str, Dataset] = {}
    for split, lengths in LENGTHS.items():
        ids = [random_ids(n, seed=100 * seed + 7 * n).to(torch.int32).numpy() for n in lengths]
        masks = [[i >= 3 for i in range(n)] for n in lengths]
        names = [f"{split}-{i}" for i in range(len(lengths))]
        columns = {"id": names, "input_ids": ids, "loss_mask": masks}
        rows[split] = Dataset.from_dict(columns)
    return rows


def write(
    path: Path,
    target: Target,
    settings: FeatureCacheSettings = FLOAT32,
    rows: Mapping[str, Dataset] | None = None,
    *,
    conversations: str = "c0",
    free: int = 10**12,
) -> str:
    """Write a cache; what was told."""
    said = io.StringIO()
    write_features(
        path,
        rows or texts(),
        target,
        settings,
        conversations=conversations,
        console=Console(file=said, width=200),
        free_bytes=lambda _: free,
    )
    return said.getvalue()


def wanted(target: Target, *, dtype: str = "float32") -> dict[str, Any]:
    return feature_identity(target, conversations="c0", dtype=dtype)


def teacher_of(path: Path, target: Target, *, dtype: str = "float32") -> CachedTeacher:
    return CachedTeacher(target.tables, FeatureCache.open(path, wanted(target, dtype=dtype)))


def batch_of(rows: Dataset, *indices: int) -> DrafterBatch:
    return collate(rows, np.array(indices), num_anchors=None, rng=None, pad_id=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def shards(folder: Path) -> list[str]:
    return sorted(name for name in contents(folder) if name.endswith(".safetensors"))


def work_folders(path: Path) -> list[Path]:
    return sorted(p for p in path.parent.iterdir() if p.name.startswith(f".{path.name}"))


def valid(rows: Tensor, batch: DrafterBatch) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(rows, batch.lengths.tolist(), strict=True)])


class StoppingTarget(Target):
    """The tiny target, until it has read so many batches."""

    def __init__(self, target: Target, batches: int, error: BaseException) -> None:
        self.__dict__.update(target.__dict__)
        self._left, self._error = batches, error

    def teach(self, ids: Tensor, mask: Tensor) -> TeacherRows:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().teach(ids, mask)


@pytest.fixture(scope="module")
def cached(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete cache in float32; for reading only."""
    path = tmp_path_factory.mktemp("caches") / "features"
    write(path, target)
    return path


def test_cached_rows_equal_online_rows_to_the_last_bit_in_float32(
    target: Target, cached: Path
) -> None:
    online, stored = OnlineTeacher(target), teacher_of(cached, target)
    for split in ("train", "validation"):
        rows = texts()[split]
        order = np.argsort([-len(ids) for ids in rows["input_ids"]], kind="stable")
        for start in range(0, len(order), FLOAT32.batch_size):
            # The cache's own batches: another one rounds the last bit otherwise.
            batch = batch_of(rows, *order[start : start + FLOAT32.batch_size])
            expected, found = online(batch), stored(batch)
            assert torch.equal(valid(found.taps, batch), valid(expected.taps, batch))
            assert torch.equal(valid(found.hidden, batch), valid(expected.hidden, batch))
            assert found.taps.shape == expected.taps.shape
            assert found.taps.dtype == found.hidden.dtype == torch.float32


def test_any_batch_finds_its_texts_whatever_their_order(target: Target, cached: Path) -> None:
    online, stored = OnlineTeacher(target), teacher_of(cached, target)
    for indices in ([3], [7, 1, 3], [0, 8, 4, 2, 6], [5, 5]):
        batch = batch_of(texts()["train"], *indices)
        expected, found = online(batch), stored(batch)
        torch.testing.assert_close(
            valid(found.taps, batch), valid(expected.taps, batch), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            valid(found.hidden, batch), valid(expected.hidden, batch), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 1 / 256), ("float8_e4m3", 1 / 16)])
def test_shorter_numbers_are_off_by_half_a_step_at_most(
    target: Target, tmp_path: Path, dtype: Any, step: float
) -> None:
    write(tmp_path / "features", target, replace(FLOAT32, dtype=dtype))
    stored = teacher_of(tmp_path / "features", target, dtype=dtype)
    batch = batch_of(texts()["train"], 1, 6, 4, 2)
    expected, found = OnlineTeacher(target)(batch), stored(batch)
    for name, num_layers in (("taps", len(TAPS)), ("hidden", 1)):
        exact, close = (valid(getattr(r, name), batch) for r in (expected, found))
        layers = exact.unflatten(-1, (num_layers, -1))
        largest = layers.abs().amax(-1, keepdim=True).expand_as(layers).flatten(1)
        floor = largest / 458_752 if dtype == "float8_e4m3" else largest * 0
        assert ((close - exact).abs() <= torch.maximum(exact.abs() * step, floor) + 1e-5).all()
        assert not torch.equal(close, exact)
    assert found.hidden.dtype == target.dtype


def test_float8_keeps_ordinary_channels_beside_an_outlier_of_10000() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 3 * 64, generator=generator)
    rows[:, 70] = 1e4  # in the second of three layers
    rows[5] = 0.0
    part = encode("taps", rows, dtype="float8_e4m3", num_layers=3)
    assert part["taps"].element_size() == 1
    assert part["taps_scale"].shape == (200, 3)
    found = decode(part["taps"], part["taps_scale"], torch.float32)
    error = (found - rows).abs()
    for layer, largest in enumerate([5.0, 1e4, 5.0]):
        span = slice(64 * layer, 64 * layer + 64)
        # A layer's values below 1/28672 of its largest have less than float8's three bits.
        bound = (rows[:, span].abs() / 16).clamp(min=largest / 458_752)
        assert (error[:, span] <= bound).all()
    ordinary = [i for i in range(192) if i != 70]
    assert error[:, ordinary].norm() < rows[:, ordinary].norm() / 16
    assert torch.equal(found[5], rows[5])


@pytest.mark.parametrize("name", ["ar", "diffusion"])
def test_the_loss_from_cached_features_is_that_from_online_ones(
    target: Target, cached: Path, name: str
) -> None:
    batch = validation_batches(texts()["validation"], batch_size=4, pad_id=0)[0]
    losses, gradients = [], []
    teachers: list[Teacher] = [OnlineTeacher(target), teacher_of(cached, target)]
    for teacher in teachers:
        if name == "ar":
            net = tiny_ar(target.drafter_shape, tap_size=TAP_SIZE).requires_grad_(True)
            common = {"draft_length": 3, "step_decay": 0.8, "draw_steps": False, "loss": SOFT_CE}
            loss, _ = ar_objective(net, batch, teacher=teacher, **common)
        else:
            net = tiny_diffusion(target.drafter_shape).requires_grad_(True)
            loss, _ = diffusion_objective(
                net, batch, teacher=teacher, objective=block_objective("dpace")
            )
        loss.backward()
        losses.append(loss)
        gradients.append(net.fc.weight.grad)
    assert losses[0] > 0.1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


def test_the_layers_of_the_target_do_not_run_for_cached_features(
    target: Target, cached: Path
) -> None:
    unable = StoppingTarget(target, 0, AssertionError("the target ran"))
    batch = batch_of(texts()["train"], 0, 1)
    teacher = make_teacher("cached", unable, lambda: FeatureCache.open(cached, wanted(target)))
    assert teacher(batch).taps.shape[:2] == batch.ids.shape
    for features in ("online", "memory"):
        with pytest.raises(AssertionError, match="the target ran"):
            make_teacher(features, unable, lambda: FeatureCache.open(cached, {}))(batch)


def test_the_files_hold_the_texts_one_after_the_other(target: Target, cached: Path) -> None:
    index = pq.read_table(cached / "index.parquet").to_pylist()
    rows = texts()
    for split, lengths in LENGTHS.items():
        here = [entry for entry in index if entry["split"] == split]
        assert sorted(entry["length"] for entry in here) == sorted(lengths)
    manifest = json.loads((cached / "manifest.json").read_text())
    assert manifest["target"]["weights"] == target.identity().weights
    assert manifest["splits"]["train"]["tokens"] == sum(LENGTHS["train"])
    width = target.config.hidden_size
    for name in shards(cached):
        tensors = load_file(cached / name)
        here = [e for e in index if f"{e['split']}/shard-{e['shard']:05d}.safetensors" == name]
        total = sum(entry["length"] for entry in here)
        assert total <= 60 or len(here) <= FLOAT32.batch_size
        assert {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()} == {
            "taps": (torch.float32, (total, 3 * width)),
            "hidden": (torch.float32, (total, width)),
            "ids": (torch.int32, (total,)),
            "mask": (torch.uint8, (total,)),
        }
        for entry in here:
            span = slice(entry["start"], entry["start"] + entry["length"])
            ids = tensors["ids"][span].tolist()
            assert ids in rows[entry["split"]]["input_ids"][:]
            assert tensors["mask"][span].tolist() == [0] * 3 + [1] * (len(ids) - 3)


def test_the_told_size_is_that_of_the_files(target: Target, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16", "float8_e4m3"):
        path = tmp_path / dtype
        said = write(path, target, replace(FLOAT32, dtype=dtype, shard_tokens=10**6))
        size = sum(len(content) for name, content in contents(path).items() if "shard" in name)
        told = float(said.split(" MB in 2 shards")[0].split()[-1]) * 1e6
        assert size <= told + 5000 <= size + 15_000, said


def test_size_and_time_are_told_before_anything_is_written(target: Target, tmp_path: Path) -> None:
    said = write(tmp_path / "features", target)
    assert "features of 12 texts, 180 tokens in float32" in said
    assert "free on the disk: 1,000.00 GB" in said
    assert "minutes at" in said
    assert said.index("minutes at") < said.index("180/180")


def test_what_would_fill_the_disk_is_refused_unless_forced(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "features"
    size = 180 * (4 * 64 * 4 + 5)
    careful = replace(FLOAT32, margin_gb=0.5)
    with pytest.raises(UserError, match=r"need 0\.\d\d MB and features\.margin_gb=0\.5 is to stay"):
        write(path, target, careful, free=size + 499_000_000)
    assert list(tmp_path.iterdir()) == []
    write(path, target, replace(careful, force=True), free=size)
    shutil.rmtree(path)
    write(path, target, careful, free=size + 500_000_000 + 20 * 4096)


def test_a_resumed_run_needs_room_for_the_rest_only(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "features"
    with pytest.raises(KeyboardInterrupt):
        write(path, StoppingTarget(target, 5, KeyboardInterrupt()))
    rest = (48 + 37) * (4 * 64 * 4 + 5) + 2 * 4096
    with pytest.raises(UserError, match="features need"):
        write(path, target, free=rest - 1)
    assert "2 shards are there already" in write(path, target, free=rest)


def test_nothing_is_computed_again_for_a_complete_cache(target: Target, cached: Path) -> None:
    unable = StoppingTarget(target, 0, AssertionError("the target ran"))
    assert "complete already" in write(cached, unable)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_reading_maps_shards_when_they_are_asked_for(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    path = tmp_path / "features"
    shutil.copytree(cached, path)
    stored = teacher_of(path, target)
    assert str(path) not in mapped_files()
    stored(batch_of(texts()["train"], 1))  # the longest text, so the first shard
    mapped = {line.split()[-1] for line in mapped_files().splitlines() if str(path) in line}
    assert mapped == {f"{path}/train/shard-00000.safetensors"}


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_ten_thousand_shards_are_not_touched_before_they_are_asked_for(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    path = tmp_path / "features"
    shutil.copytree(cached, path)
    index = pq.read_table(path / "index.parquet")
    count = 10_000  # none of them is there: opening any would fail
    more = {
        "split": ["train"] * count,
        "shard": [100 + i for i in range(count)],
        "start": [0] * count,
        "length": [3] * count,
        "digest": [i.to_bytes(16, "big") for i in range(count)],
    }
    absent = pa.Table.from_pydict(more, schema=index.schema)
    pq.write_table(pa.concat_tables([absent, index]), path / "index.parquet")
    rows = teacher_of(path, target)(batch_of(texts()["train"], 4, 5))
    assert rows.taps.shape == (2, 22, 3 * 64)


CHANGED = [
    ("target.name", "other"),
    ("target.config_hash", "other"),
    ("target.weights", "other"),
    ("target.tokenizer", "other"),
    ("target.chat_template", "other"),
    ("target.dtype", "bfloat16"),
    ("tap_layer_ids", [1, 2, 4]),
    ("conversations", "other"),  # their data, seed and max_len
    ("feature_dtype", "bfloat16"),
]


@pytest.mark.parametrize(("field", "value"), CHANGED)
def test_a_cache_made_for_something_else_is_refused_by_field(
    target: Target, cached: Path, field: str, value: Any
) -> None:
    asked = wanted(target)
    group, _, name = field.rpartition(".")
    (asked[group] if group else asked)[name] = value
    with pytest.raises(ArtifactError, match=rf"{field}: the artefact has .*, this run has .*"):
        FeatureCache.open(cached, asked)


def test_every_field_of_the_identity_has_been_changed(target: Target) -> None:
    fields = wanted(target)
    names = [f"target.{name}" for name in fields.pop("target")] + list(fields)
    assert sorted(names) == sorted(field for field, _ in CHANGED)


def test_a_text_that_is_not_in_the_cache_is_named(target: Target, cached: Path) -> None:
    other = texts(seed=1)["train"]
    with pytest.raises(ArtifactError, match=r"does not hold row 4, a text of 22 tokens that begin"):
        teacher_of(cached, target)(batch_of(other, 4))


def test_texts_that_are_not_in_the_cache_are_told_before_training(
    target: Target, cached: Path
) -> None:
    cache = FeatureCache.open(cached, wanted(target))
    cache.require(texts())
    stranger = texts(seed=1)["train"].select([0])
    grown = {"train": concatenate_datasets([texts()["train"], stranger])}
    with pytest.raises(ArtifactError, match=r"lacks 1 of the 10 texts of split 'train'.* row 9"):
        cache.require(grown)


@pytest.mark.parametrize("damage", ["cut", "gone", "foreign", "shuffled", "index cut"])
def test_a_damaged_cache_is_refused_by_file(
    target: Target, cached: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "features"
    shutil.copytree(cached, path)
    shard, told = path / "train/shard-00000.safetensors", "train/shard-00000.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "gone":
        shard.unlink()
    elif damage == "foreign":
        write(tmp_path / "other", target, conversations="c1")
        shutil.copy(tmp_path / "other/train/shard-00000.safetensors", shard)
    elif damage == "shuffled":
        shutil.copy(path / "train/shard-00001.safetensors", shard)
    else:
        told = "index.parquet"
        (path / told).write_bytes((path / told).read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=told):
        teacher_of(path, target)(batch_of(texts()["train"], 1))


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_run_goes_on_to_the_very_bytes_of_a_straight_one(
    target: Target, cached: Path, tmp_path: Path, batches: int, error: BaseException
) -> None:
    path = tmp_path / "features"
    with pytest.raises(type(error)):
        write(path, StoppingTarget(target, 2 + batches, error))  # two passes for the estimate
    assert not path.exists()
    left = [p.name for folder in work_folders(path) for p in folder.rglob("*") if p.is_file()]
    assert all(name.startswith("shard-") for name in left)
    write(path, target)
    assert contents(path) == contents(cached)
    assert work_folders(path) == []


def test_whole_shards_are_not_computed_again(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "features"
    with pytest.raises(KeyboardInterrupt):
        write(path, StoppingTarget(target, 5, KeyboardInterrupt()))
    work = work_folders(path)[0]
    assert shards(work) == ["train/shard-00000.safetensors", "train/shard-00001.safetensors"]
    inodes = [(work / name).stat().st_ino for name in shards(work)]
    write(path, target)
    assert [(path / name).stat().st_ino for name in shards(path)[:2]] == inodes


def test_the_old_cache_stays_until_the_new_one_is_complete(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "features"
    write(path, target)
    before = contents(path)
    changed = replace(FLOAT32, batch_size=3)
    with pytest.raises(KeyboardInterrupt):
        write(path, StoppingTarget(target, 4, KeyboardInterrupt()), changed)
    assert contents(path) == before
    write(path, target, changed)
    assert contents(path) != before
    assert work_folders(path) == []


OTHER_RUNS: dict[str, Callable[[Path, Target], Any]] = {
    "data": lambda path, target: write(path, target, rows=texts(seed=1)),
    "conversations": lambda path, target: write(path, target, conversations="c1"),
    "dtype": lambda path, target: write(path, target, replace(FLOAT32, dtype="bfloat16")),
    "splits": lambda path, target: write(path, target, replace(FLOAT32, splits=["train"])),
    "shard_tokens": lambda path, target: write(path, target, replace(FLOAT32, shard_tokens=50)),
    "batch_size": lambda path, target: write(path, target, replace(FLOAT32, batch_size=3)),
}


@pytest.mark.parametrize("changed", OTHER_RUNS)
def test_shards_that_another_run_left_are_not_read(
    target: Target, cached: Path, tmp_path: Path, changed: str
) -> None:
    path = tmp_path / "features"
    with pytest.raises(KeyboardInterrupt):
        OTHER_RUNS[changed](path, StoppingTarget(target, 4, KeyboardInterrupt()))
    assert len(list(work_folders(path)[0].rglob("*.safetensors"))) > 0
    assert "there already" not in write(path, target)
    assert contents(path) == contents(cached)
    assert work_folders(path) == []


def test_a_shard_of_another_run_among_ours_is_written_again(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    path = tmp_path / "features"
    with pytest.raises(KeyboardInterrupt):
        write(path, StoppingTarget(target, 5, KeyboardInterrupt()))
    work = work_folders(path)[0]
    write(tmp_path / "other", target, rows=texts(seed=1))
    for name in shards(tmp_path / "other"):
        (work / name).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "other" / name, work / name)
    write(path, target)
    assert contents(path) == contents(cached)


def test_two_runs_do_not_write_the_same_folder(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "features"

    class Twin(StoppingTarget):
        def teach(self, ids: Tensor, mask: Tensor) -> TeacherRows:
            with pytest.raises(UserError, match="another run is writing"):
                write(path, target)
            return super().teach(ids, mask)

    write(path, Twin(target, 99, AssertionError()))


def test_runs_killed_at_any_moment_end_in_the_very_bytes_of_a_straight_one(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "features", tmp_path / "log"

    def run() -> int:
        write(path, target)
        return 0

    started = time.perf_counter()
    assert exit_status(in_child(run, log)) == 0
    span, rng, killed = time.perf_counter() - started, random.Random(0), 0
    for _ in range(15):
        if path.exists():  # not killed: what it left is whole, the next one starts anew
            assert contents(path) == contents(cached)
            shutil.rmtree(path)
        killed += kill_after(in_child(run, log), rng.uniform(0.0, span)) == -signal.SIGKILL
    assert killed >= 3
    write(path, target)
    assert contents(path) == contents(cached)
    assert work_folders(path) == []


def test_a_run_killed_between_the_last_two_renames_needs_the_renames_only(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    path = tmp_path / "features"
    shutil.copytree(cached, path)
    manifest = json.loads((path / "manifest.json").read_text())
    path.rename(tmp_path / f".features-{manifest['fingerprint']}.work")
    (tmp_path / ".features.old").mkdir()
    write(path, StoppingTarget(target, 0, AssertionError("the target ran")))
    assert contents(path) == contents(cached)
    assert work_folders(path) == []


def test_a_full_disk_stops_the_run_cleanly_and_the_next_one_goes_on(
    target: Target, cached: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    copy, told = tmp_path / "copy", tmp_path / "told"

    def run() -> int:
        if not mount_small(disk, megabytes=1):
            return SKIPPED
        path, ballast = disk / "features", disk / "ballast"
        ballast.write_bytes(bytes(900_000))
        try:
            write(path, target, replace(FLOAT32, force=True))
        except UserError as error:
            told.write_text(str(error))
        else:
            return DONE
        files = [p for p in disk.rglob("*") if p.is_file() and p != ballast]
        if path.exists() or not files or not all(p.name.startswith("shard-") for p in files):
            return UNCLEAN
        ballast.unlink()
        said = write(path, target, replace(FLOAT32, force=True))
        told.write_text(f"{told.read_text()}\n{said}")
        shutil.copytree(path, copy)
        return RESUMED

    status = exit_status(in_child(run, tmp_path / "log"))
    if status == SKIPPED:
        pytest.skip(NO_MOUNT)
    assert status == RESUMED, (tmp_path / "log").read_text()
    first, _, second = told.read_text().partition("\n")
    assert first.startswith(f"cannot write {disk}")
    assert "No space left on device. Free some space and run the same command again" in first
    assert "shards are there already" in second
    assert contents(copy) == contents(cached)


def test_a_cache_on_a_read_only_disk_can_be_read_and_not_written(
    target: Target, tmp_path: Path
) -> None:
    disk, told = tmp_path / "disk", tmp_path / "told"
    disk.mkdir()

    def run() -> int:
        if not mount_small(disk, megabytes=1):
            return SKIPPED
        write(disk / "features", target)
        flags = 1 | 32  # read-only, remount
        assert ctypes.CDLL(None).mount(b"tmpfs", str(disk).encode(), b"tmpfs", flags, None) == 0
        teacher_of(disk / "features", target)(batch_of(texts()["train"], 1))
        assert "complete already" in write(disk / "features", target)
        try:
            write(disk / "features", target, conversations="c1")
        except UserError as error:
            told.write_text(str(error))
        return DONE

    status = exit_status(in_child(run, tmp_path / "log"))
    if status == SKIPPED:
        pytest.skip(NO_MOUNT)
    assert status == DONE, (tmp_path / "log").read_text()
    assert told.read_text().startswith(f"cannot write {disk}/.features-")
    assert ": Read-only file system. Mend that and run the same command again" in told.read_text()


def test_free_room_is_that_of_the_disk_below(tmp_path: Path) -> None:
    found = free_on_disk(tmp_path / "not" / "yet" / "there")
    assert found == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_a_folder_that_cannot_be_written_is_named(target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*file/.*: Not a directory\."):
        write(tmp_path / "file" / "features", target)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("shard_tokens", 0, "shard_tokens is 0"),
        ("batch_size", 0, "batch_size is 0"),
        ("margin_gb", -1.0, r"margin_gb is -1\.0"),
        ("splits", [], "splits is"),
        ("splits", ["train", "train"], "each once"),
        ("splits", ["train", "test"], "splits has 'test': choose from train"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        partial(replace, FLOAT32)(**{field: value})
