from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Json, Value

from whiflash_infer.errors import UserError
from whiflash_train.data.readers import is_local, read_file, read_files, read_hub
from whiflash_train.data.tally import BadRow

ROWS: list[Any] = [
    {"prompt": "Grüße 你好 🙂 a\u2028b", "n": 1},
    {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"a": 1}]},
        ]
    },
    {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def lz4(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(every_key(ROWS)), path)


def write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(every_key(ROWS))
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def every_key(rows: list[Any]) -> list[Any]:
    """As rows of a table: keys that only some rows have are null in the others."""
    return [{key: row.get(key) for other in rows for key in other} for row in rows]


def write_rows(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path | str, split: str = "train") -> list[Any]:
    return [row for _, row in read_files(str(path), split)]


def places(path: Path | str, split: str = "train") -> list[str]:
    return [place for place, _ in read_files(str(path), split)]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("rows.jsonl", bytes),
        ("rows.v1.2.JSONL", bytes),
        ("rows.jsonl.gz", gzip.compress),
        ("rows.jsonl.bz2", bz2.compress),
        ("rows.jsonl.zst", zstd),
        ("rows.jsonl.lz4", lz4),
    ],
)
def test_rows_of_packed_and_plain_lines_are_the_same(
    name: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(pack(LINES))
    assert list(read_files(str(path), "train")) == [
        (f"{name}:{number}", row) for number, row in enumerate(ROWS, start=1)
    ]


def test_files_that_were_packed_in_pieces_are_read_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(LINES) + gzip.compress(LINES))
    assert read(path) == ROWS * 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_json_list_is_read_row_by_row(
    mark: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    name = "rows.json" if pack is bytes else "rows.json.gz"
    (tmp_path / name).write_bytes(pack((mark + json.dumps(ROWS, indent=1)).encode()))
    assert read(tmp_path / name) == ROWS
    assert places(tmp_path / name) == [f"{name}[0]", f"{name}[1]", f"{name}[2]"]


@pytest.mark.parametrize(
    ("name", "write"), [("rows.parquet", write_parquet), ("rows.arrow", write_arrow)]
)
def test_rows_of_tables_come_without_the_keys_that_they_lack(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path / name)
    assert read(tmp_path / name) == ROWS
    assert places(tmp_path / name) == [f"{name}:1", f"{name}:2", f"{name}:3"]


def test_nulls_inside_the_lists_of_a_table_stay(tmp_path: Path) -> None:
    rows = [{"x": [1, None], "y": [{"a": None, "b": 2}, None]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == [{"x": [1, None], "y": [{"b": 2}, None]}]


def test_a_table_of_many_batches_keeps_order_and_numbers(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"n": n} for n in range(1000)])
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    assert [row["n"] for row in read(tmp_path / "rows.parquet")] == list(range(1000))
    assert places(tmp_path / "rows.parquet")[-1] == "rows.parquet:1000"


def test_a_string_of_a_table_that_is_no_utf8_costs_its_own_row_only(tmp_path: Path) -> None:
    bad = pa.array([b"one", b"tw\xff", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "rows.parquet")
    first, second, third = read(tmp_path / "rows.parquet")
    assert (first, third) == ({"prompt": "one"}, {"prompt": "three"})
    assert isinstance(second, BadRow)
    assert second.reason == "invalid_utf8"


def test_a_folder_saved_by_datasets_is_read(tmp_path: Path) -> None:
    Dataset.from_list(every_key(ROWS)).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == ROWS
    assert places(tmp_path / "saved") == ["saved:train:1", "saved:train:2", "saved:train:3"]


def test_json_columns_of_datasets_are_objects_again(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "tools": [{"x": 1}]}, {"prompt": "b", "tools": [{"x": "one"}]}]
    features = Features({"prompt": Value("string"), "tools": Json()})
    Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == rows


def test_a_folder_of_several_splits_gives_the_one_that_is_asked_for(tmp_path: Path) -> None:
    splits = {"train": [{"n": 1}, {"n": 2}], "test": [{"n": 3}]}
    saved = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", "train") == splits["train"]
    assert read(tmp_path / "saved", "test") == splits["test"]
    with pytest.raises(UserError, match=r"saved has no split 'dev': it has train, test"):
        read(tmp_path / "saved", "dev")


def test_a_folder_gives_its_files_of_known_kinds_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_rows(folder / "b.jsonl", {"n": 2})
    (folder / "a.json").write_text('[{"n": 1}]')
    pq.write_table(pa.table({"n": [3]}), folder / "c.parquet")
    write_rows(folder / "deep" / "b.jsonl", {"n": 4})
    (folder / "e.jsonl.gz").write_bytes(gzip.compress(b'{"n": 5}\n'))
    for name in ("README.md", "dataset_infos.json", "rows.csv", ".hidden.jsonl", "._b.jsonl"):
        (folder / name).write_text("no rows")
    write_rows(folder / ".cache" / "b.jsonl", {"n": 6})
    assert [row["n"] for row in read(folder)] == [1, 2, 3, 4, 5]
    # Files of one name in two folders: their rows must not share a place, which is their id.
    assert places(folder) == [
        "a.json[0]",
        "b.jsonl:1",
        "c.parquet:1",
        "deep/b.jsonl:1",
        "e.jsonl.gz:1",
    ]


@pytest.mark.parametrize(
    ("pattern", "numbers", "first"),
    [
        ("*.jsonl", [1, 2], "a.jsonl:1"),
        ("*", [1, 2, 3], "a.jsonl:1"),
        ("b*.jsonl", [2], "b.jsonl:1"),
        ("**/*.jsonl", [1, 2, 4], "a.jsonl:1"),
        ("*/a.jsonl", [4], "deep/a.jsonl:1"),
        ("../data/b*", [2], "b.jsonl:1"),
        ("*.parquet*", [3], "c.parquet:1"),
    ],
)
@pytest.mark.parametrize("relative", [False, True])
def test_globs_are_absolute_or_relative_and_name_rows_from_their_first_folder(
    pattern: str,
    numbers: list[int],
    first: str,
    relative: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "data"
    write_rows(folder / "a.jsonl", {"n": 1})
    write_rows(folder / "b.jsonl", {"n": 2})
    pq.write_table(pa.table({"n": [3]}), folder / "c.parquet")
    write_rows(folder / "deep" / "a.jsonl", {"n": 4})
    (folder / "notes.txt").write_text("no rows")
    monkeypatch.chdir(folder)
    path = pattern if relative else f"{folder}/{pattern}"
    assert [row["n"] for row in read(path)] == numbers
    assert places(path)[0] == first


def test_a_relative_path_needs_no_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "rows.jsonl", {"n": 1})
    monkeypatch.chdir(tmp_path)
    assert is_local("rows.jsonl")
    assert list(read_files("rows.jsonl", "train")) == [("rows.jsonl:1", {"n": 1})]


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", {"n": 1})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/rows.jsonl") == [{"n": 1}]
    assert read("~/*.jsonl") == [{"n": 1}]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
        ("train/a.jsonl", "validation/a.jsonl"),
        ("chat-train_sft.jsonl", "chat-test_sft.jsonl"),
    ],
)
def test_a_folder_with_files_of_several_splits_is_not_read_as_one(
    names: tuple[str, str], tmp_path: Path
) -> None:
    # Its test rows would silently be trained on.
    for name in names:
        write_rows(tmp_path / name, {"n": name})
    with pytest.raises(
        UserError, match=r"several splits, (test and train|train and validation): give"
    ):
        read(tmp_path)
    assert read(f"{tmp_path}/**/{names[0]}") == [{"n": names[0]}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl.gz", gzip.compress(LINES)[:-20]),
        ("rows.jsonl.gz", b"not packed at all"),
        ("rows.jsonl.bz2", bz2.compress(LINES)[:-20]),
        ("rows.jsonl.zst", zstd(LINES)[:-20]),
        ("rows.jsonl.lz4", lz4(LINES)[:-20]),
    ],
)
def test_a_packed_file_that_is_damaged_is_named_with_the_line(
    name: str, content: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"^{name}:1: the file is damaged"):
        read(tmp_path / name)


def test_rows_before_the_damage_are_read(tmp_path: Path) -> None:
    lines = b"".join(
        json.dumps({"n": n, "x": hash(n * 1.1)}).encode() + b"\n" for n in range(20_000)
    )
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    rows = read_files(str(tmp_path / "rows.jsonl.gz"), "train")
    taken = []
    with pytest.raises(UserError, match=r"^rows\.jsonl\.gz:(\d+): the file is damaged") as caught:
        taken.extend(row["n"] for _, row in rows)
    assert taken == list(range(len(taken)))
    assert len(taken) > 15_000
    assert f"gz:{len(taken) + 1}: " in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
@pytest.mark.parametrize(
    ("name", "write"), [("rows.parquet", write_parquet), ("rows.arrow", write_arrow)]
)
def test_a_table_that_is_cut_off_is_named(
    name: str, write: Callable[[Path], None], share: float, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=rf"^{name}: the file is damaged or not of its kind"):
        read(path)


def test_a_page_of_a_table_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": [f"row {n}" for n in range(5000)]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:600] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"^rows\.parquet: the file is damaged"):
        read(path)


def test_a_saved_folder_that_is_damaged_is_named(tmp_path: Path) -> None:
    Dataset.from_list([{"n": 1}]).save_to_disk(str(tmp_path / "saved"))
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(UserError, match=r"saved: the file is damaged or not of its kind"):
        read(tmp_path / "saved")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not a JSON list of rows"),
        ('[{"n": 1},', "not a JSON list of rows"),
        ('[{"n": NaN}]', "NaN is no JSON value"),
        ('{"n": 1}', "one object a line is .jsonl"),
        ("[" * 100_000, "not a JSON list of rows"),
    ],
)
def test_a_json_file_that_is_no_list_of_rows_says_so(
    content: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(UserError, match=rf"^rows\.json: .*{told}"):
        read(tmp_path / "rows.json")


def test_a_json_list_that_is_cut_in_its_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(b"[1, 2]" * 1000)[:-12])
    with pytest.raises(UserError, match=r"^rows\.json\.gz: the file is damaged"):
        read(tmp_path / "rows.json.gz")


@pytest.mark.parametrize("name", ["rows.csv", "rows", "rows.gz", "rows.jsonl.part"])
def test_an_unknown_kind_of_file_is_named_with_the_known_ones(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a,b\n")
    with pytest.raises(UserError, match=rf"^{name}: unknown kind of file; known are .jsonl, .json"):
        read(tmp_path / name)
    with pytest.raises(UserError, match="unknown kind"):
        read_file(tmp_path / name, name)


@pytest.mark.parametrize("name", ["absent.jsonl", "absent", "absent/*.jsonl", "empty", "empty/*"])
def test_a_path_with_nothing_to_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("nothing here")
    with pytest.raises(UserError, match=r"^no data at .*/(absent|empty)"):
        read(tmp_path / name)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert read(tmp_path / "rows.jsonl") == []


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("owner/set", False),
        ("set", False),
        ("owner/set-v1.5", False),
        ("rows.jsonl", True),
        ("rows.json.gz", True),
        ("rows.gz", True),
        ("Rows.PARQUET", True),
        ("data/*", True),
        ("./data", True),
        ("../data", True),
        ("/data/rows", True),
        ("~/rows", True),
    ],
)
def test_paths_are_told_from_ids_of_the_hub(path: str, local: bool) -> None:
    assert is_local(path) is local


def read_set(path: Path | str, *, split: str = "train", streaming: bool = False) -> list[Any]:
    return list(read_hub(str(path), name=None, split=split, revision=None, streaming=streaming))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_at_once_or_as_a_stream(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train.parquet")
    found = read_set(folder, streaming=streaming)
    assert found == [(f"{folder}:train:{i}", row) for i, row in enumerate(ROWS, start=1)]
    with pytest.raises(UserError, match=r"cannot load the data set .*, split 'dev': .*train"):
        read_set(folder, split="dev", streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_that_breaks_on_the_way_is_named(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # U23: text in one row and a list in another break the loader of datasets.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_rows(tmp_path / "set" / "train.jsonl", *({"n": n} for n in range(3)))
    with (tmp_path / "set" / "train.jsonl").open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(UserError, match=r"set.*train"):
        read_set(tmp_path / "set", streaming=streaming)


def test_an_id_that_cannot_be_reached_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"cannot load the data set 'nobody/nothing'.* local path"):
        read_set("nobody/nothing")


def test_mixed_types_in_one_column_are_no_matter_for_lines(tmp_path: Path) -> None:
    rows = [{"content": "text"}, {"content": [{"text": "part"}]}, {"content": 3}, {"content": None}]
    assert read(write_rows(tmp_path / "rows.jsonl", *rows)) == rows


def test_a_recorded_run_is_one_row_of_its_file(tmp_path: Path) -> None:
    run = {"trajectory": [{"query": "Fix it.", "response": "Looking."}], "info": {"exit": "done"}}
    (tmp_path / "a.traj").write_text(json.dumps(run))
    (tmp_path / "b.traj").write_text('{"trajectory": [')
    whole, cut = read_files(str(tmp_path), "train")
    assert whole == ("a.traj", run)
    assert cut[0] == "b.traj"
    assert isinstance(cut[1], BadRow)
    assert cut[1].reason == "invalid_json"
