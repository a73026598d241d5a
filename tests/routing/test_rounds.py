from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.fakes import random_rows
from whiflash_infer.errors import ArtifactError
from whiflash_infer.routing.rounds import (
    ConversationRounds,
    cut_shards,
    is_whole_shard,
    load_rounds,
    save_rounds,
)

ARMS = ("ar", "ar_tree", "diffusion")
MADE_BY = "make them"


def rounds_of(
    name: str, num_rows: int, *, start: int = 7, split: str = "router", limit: int | None = None
) -> ConversationRounds:
    rng = np.random.default_rng(num_rows)
    return ConversationRounds(
        conversation=name,
        category="math" if num_rows % 2 else "chat",
        split=split,
        positions=np.arange(start, start + num_rows),
        features=random_rows(num_rows, 6, seed=num_rows),
        accepted={arm: rng.integers(0, 6, num_rows) for arm in ARMS},
        censored={arm: rng.random(num_rows) < 0.5 for arm in ARMS},
        near_tie=rng.random(num_rows) < 0.5,
        greedy=rng.random(num_rows) < 0.5,
        limit=limit,
    )


def some_rounds() -> list[ConversationRounds]:
    """Of 5, 9, 3 and 4 rows; the last two are two answers of one conversation."""
    return [
        rounds_of("a", 5, limit=13),
        rounds_of("b", 9, start=1),
        rounds_of("c", 3, split="validation"),
        rounds_of("c", 4, start=40, split="validation", limit=45),
    ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Shards of 5, 9 and 3 + 4 rows."""
    path = tmp_path / "rounds"
    save_rounds(path, some_rounds(), {"max_draft": {"ar": 4}}, shard_positions=8, dtype="float32")
    return path


def assert_same(found: ConversationRounds, expected: ConversationRounds) -> None:
    for name in ("conversation", "category", "split", "limit"):
        assert getattr(found, name) == getattr(expected, name)
    for name in ("positions", "near_tie", "greedy"):
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    for name in ("accepted", "censored"):
        assert list(getattr(found, name)) == list(ARMS)
        for arm in ARMS:
            assert getattr(found, name)[arm].tolist() == getattr(expected, name)[arm].tolist()
    assert torch.equal(found.features, expected.features)


def test_what_is_saved_in_float32_is_loaded_by_split_to_the_last_bit(saved: Path) -> None:
    splits, manifest = load_rounds(saved, made_by=MADE_BY)
    a, b, c, again = some_rounds()
    assert list(splits) == ["router", "validation"]
    for found, expected in zip(splits["router"], [a, b], strict=True):
        assert_same(found, expected)
    for found, expected in zip(splits["validation"], [c, again], strict=True):
        assert_same(found, expected)
    assert manifest["max_draft"] == {"ar": 4}
    assert manifest["arms"] == list(ARMS)


def test_features_are_bfloat16_unless_asked_otherwise(tmp_path: Path) -> None:
    save_rounds(tmp_path / "rounds", some_rounds(), {})
    splits, _ = load_rounds(tmp_path / "rounds", made_by=MADE_BY)
    exact = some_rounds()[0].features
    assert torch.equal(splits["router"][0].features, exact.to(torch.bfloat16).float())
    stored = load_file(tmp_path / "rounds/features-00000.safetensors")["features"]
    assert stored.dtype == torch.bfloat16


def test_the_table_can_be_read_by_anything_that_reads_parquet(saved: Path) -> None:
    tables = [pq.read_table(saved / f"rounds-{i:05d}.parquet") for i in range(3)]
    assert [len(table) for table in tables] == [5, 9, 7]
    columns = ["conversation", "category", "split", "position"]
    columns += [f"{part}_{arm}" for arm in ARMS for part in ("accepted", "censored")]
    assert tables[0].column_names == [*columns, "near_tie", "greedy", "limit"]
    assert tables[0]["limit"].to_pylist() == [13] * 5
    assert tables[1]["limit"].to_pylist() == [None] * 9
    assert tables[2]["conversation"].to_pylist() == ["c"] * 7
    assert tables[2]["position"].to_pylist() == [7, 8, 9, 40, 41, 42, 43]


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 20))
def test_shards_hold_whole_conversations_in_order_and_no_more_than_fit(
    sizes: list[int], most: int
) -> None:
    shards = [sizes[part] for part in cut_shards(sizes, most)]
    assert [size for shard in shards for size in shard] == sizes
    assert all(shard and (len(shard) == 1 or sum(shard) <= most) for shard in shards)
    for shard, after in pairwise(shards):
        assert sum(shard) + after[0] > most


def remove_column(path: Path, name: str) -> None:
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([name]), path)


def shorten(path: Path) -> None:
    """A file that is sound, and has a row too few."""
    if path.suffix == ".parquet":
        pq.write_table(pq.read_table(path)[:-1], path)
    else:
        fingerprint = json.loads((path.parent / "manifest.json").read_text())["fingerprint"]
        rows = load_file(path)["features"][:-1].contiguous()
        save_file({"features": rows}, path, metadata={"fingerprint": fingerprint})


def exchange(path: Path) -> None:
    """Put a file of other rounds in its place."""
    other = path.parent.with_name("other")
    changed = [replace(c, category="other") for c in some_rounds()]
    save_rounds(other, changed, {"seed": 1}, shard_positions=8, dtype="float32")
    shutil.copy(other / path.name, path)


TABLE, FEATURES = "rounds-00001.parquet", "features-00002.safetensors"
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (TABLE, Path.unlink, "is missing"),
    (FEATURES, Path.unlink, "is missing"),
    (TABLE, lambda path: path.write_bytes(path.read_bytes()[:-40]), "is damaged"),
    (FEATURES, lambda path: path.write_bytes(path.read_bytes()[:-40]), "is damaged"),
    (TABLE, lambda path: path.write_bytes(b""), "is damaged"),
    (FEATURES, lambda path: path.write_bytes(b""), "is damaged"),
    (TABLE, shorten, "has 8 rows, manifest.json says 9"),
    (FEATURES, shorten, "has 6 rows, manifest.json says 7"),
    (TABLE, exchange, "belongs to other rounds"),
    (FEATURES, exchange, "belongs to other rounds"),
    (TABLE, lambda path: remove_column(path, "accepted_ar_tree"), "no column 'accepted_ar_tree'"),
    (TABLE, lambda path: remove_column(path, "censored_diffusion"), "no column 'censored_diff"),
    (TABLE, lambda path: remove_column(path, "near_tie"), "no column 'near_tie'"),
]


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE)
def test_a_damaged_file_is_named_with_the_remedy(
    saved: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    damage(saved / name)
    with pytest.raises(ArtifactError, match=f"{name}.*{told}.*again with: {MADE_BY}"):
        load_rounds(saved, made_by=MADE_BY)


@pytest.mark.parametrize("field", ["shards", "arms", "fingerprint"])
def test_rounds_of_an_older_format_are_refused_with_the_remedy(saved: Path, field: str) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest[field]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=f"no field '{field}'.*older format.*{MADE_BY}"):
        load_rounds(saved, made_by=MADE_BY)


def test_rounds_that_are_not_there_are_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=f"does not exist. Make it with: {MADE_BY}"):
        load_rounds(tmp_path / "rounds", made_by=MADE_BY)


@pytest.mark.parametrize(("name", "damage", "told"), DAMAGE[:10])
def test_only_a_shard_with_both_files_complete_is_whole(
    saved: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    fingerprint = json.loads((saved / "manifest.json").read_text())["fingerprint"]
    sizes = [5, 9, 7]
    assert all(is_whole_shard(saved, i, fingerprint, n) for i, n in enumerate(sizes)), told
    assert not is_whole_shard(saved, 0, "another", 5)
    damage(saved / name)
    damaged = 1 if name == TABLE else 2
    for number, size in enumerate(sizes):
        assert is_whole_shard(saved, number, fingerprint, size) == (number != damaged)
