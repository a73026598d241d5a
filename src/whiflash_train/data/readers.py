"""Rows of files and data sets as they are, each with its place, or why a line is no row."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from whiflash_infer.errors import UserError
from whiflash_train.data.rows import strict_json
from whiflash_train.data.tally import BadRow

RawRow = tuple[str, Any]  # place, and a mapping or a BadRow
MAX_LINE_BYTES = 16 << 20
_TABLE_ROWS = 256
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_SPLITS = {"train", "training", "validation", "valid", "val", "dev", "eval", "evaluation", "test"}


def read_files(path: str, split: str) -> Iterator[RawRow]:
    """Rows of a file, a folder of files, a glob with `*`, or a folder saved by `datasets`.

    Folders and globs give their files of known kinds in sorted order, but for hidden ones.
    Raises: UserError when nothing is there, the kind is unknown, a file is damaged, or a folder
        holds files of several splits.
    """
    root = Path(path).expanduser()
    if has_splits(path) or {"dataset_info.json", "state.json"} <= {p.name for p in root.glob("*")}:
        yield from _saved_rows(root, split)
        return
    base = root if root.is_dir() else next(p for p in root.parents if "*" not in str(p))
    for file in _files(root, base):
        yield from read_file(file, file.relative_to(base).as_posix())


def has_splits(path: str) -> bool:
    """Whether a local path is a folder with several splits, saved by `datasets`."""
    return (Path(path).expanduser() / "dataset_dict.json").is_file()


def read_file(file: Path, name: str) -> Iterator[RawRow]:
    """Rows of one file. Its kind, and whether it is packed, follow from `name`."""
    kind = _kind(name)
    if kind not in _READERS:
        raise UserError(f"{name}: unknown kind of file; known are {_KNOWN}")
    return _READERS[kind](file, name)


def read_hub(
    path: str, *, name: str | None, split: str, revision: str | None, streaming: bool
) -> Iterator[RawRow]:
    """Rows of a Hugging Face data set.

    Raises: UserError when it cannot be had, or not to its end.
    """
    try:
        rows = datasets.load_dataset(
            path, name, split=split, revision=revision, streaming=streaming
        )
    except Exception as error:  # of the network, the hub or the set: told, not guessed
        raise UserError(
            f"cannot load the data set {path!r}, split {split!r}: {error}. Give a Hugging Face id "
            "or a local path that exists"
        ) from error
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield f"{path}:{split}:{number}", _without_nulls(row)
    except Exception as error:  # streamed rows meet the network and the set only now
        raise UserError(f"{path}:{split}:{number + 1}: cannot be read: {error}") from error


def is_local(path: str) -> bool:
    """Whether a path means files here, even if they are missing, and no Hugging Face id."""
    root = Path(path).expanduser()
    named_as_file = any(s.lower() in {*_READERS, *_COMPRESSED} for s in root.suffixes)
    named_as_path = root.is_absolute() or path.startswith(".") or "*" in path
    return named_as_path or named_as_file or root.exists()


def _files(root: Path, base: Path) -> list[Path]:
    if root.is_file():
        return [root]
    pattern = "**/*" if root == base else str(root.relative_to(base))
    found = base.glob(pattern)
    names = [f.relative_to(base) for f in found if f.is_file() and _kind(f.name) in _READERS]
    names = sorted(
        name
        for name in names
        if name.name not in _ABOUT_DATA and not any(p.startswith(".") for p in name.parts)
    )
    if not names:
        raise UserError(
            f"no data at {root}: it does not exist or holds no file of a known kind, {_KNOWN}"
        )
    if root == base:
        _refuse_mixed_splits(root, names)
    return [base / name for name in names]


def _refuse_mixed_splits(root: Path, names: list[Path]) -> None:
    """A folder such as a copy of a hub's: its test rows would be trained on."""
    words = {word for name in names for word in re.split(r"[^a-z]+", name.as_posix().lower())}
    splits = sorted(words & _SPLITS)
    if len(splits) > 1:
        raise UserError(
            f"{root} holds files of several splits, {' and '.join(splits)}: give a glob such as "
            f"{root}/*{splits[-1]}*, or the folder of one of them"
        )


def _kind(name: str) -> str:
    """The suffix that says what is in a file: .jsonl of `rows.jsonl.gz`."""
    kinds = [s for s in Path(name.lower()).suffixes if s not in _COMPRESSED]
    return kinds[-1] if kinds else ""


@contextmanager
def _damage_told(name: str) -> Iterator[None]:
    """Names the file in errors of the disk and of what decodes it."""
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{name}: the file is damaged or not of its kind: {error}") from error


def _jsonl_rows(file: Path, name: str) -> Iterator[RawRow]:
    """Lines end at newline bytes only, whatever other separators a string may hold."""
    with _open(file, name) as stream:
        for number in count(1):
            place = f"{name}:{number}"
            with _damage_told(place):
                line, complete = _read_line(stream)
            if not line:
                return
            yield place, _parsed_line(line) if complete else BadRow("line_too_long")


def _read_line(stream: io.BufferedReader) -> tuple[bytes, bool]:
    """The next line; of one that is too long only a part, and False."""
    line = stream.readline(MAX_LINE_BYTES + 1)
    complete = len(line) <= MAX_LINE_BYTES or line.endswith(b"\n")
    rest = b"" if complete else line
    while rest and not rest.endswith(b"\n"):
        rest = stream.readline(MAX_LINE_BYTES)
    return line, complete


def _parsed_line(line: bytes) -> Any:
    line = line.removeprefix(b"\xef\xbb\xbf").strip()  # joined files have the mark inside, too
    if not line:
        return BadRow("blank_line")
    try:
        return strict_json(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", str(error))
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", str(error))


def _json_rows(file: Path, name: str) -> Iterator[RawRow]:
    """A file that is one JSON list of rows."""
    with _open(file, name) as stream, _damage_told(name):
        content = stream.read()
    try:
        rows = strict_json(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not a JSON list of rows: {error}") from None
    if not isinstance(rows, list):
        raise UserError(f"{name}: a list of rows is needed; one object a line is .jsonl")
    yield from ((f"{name}[{i}]", row) for i, row in enumerate(rows))


def _traj_rows(file: Path, name: str) -> Iterator[RawRow]:
    """What SWE-agent records of one run: one JSON object."""
    with _open(file, name) as stream, _damage_told(name):
        content = stream.read()
    try:
        yield name, strict_json(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        yield name, BadRow("invalid_json", str(error))


def _parquet_rows(file: Path, name: str) -> Iterator[RawRow]:
    with _damage_told(name), pq.ParquetFile(file) as table:
        batches = table.iter_batches(batch_size=_TABLE_ROWS)
        yield from _numbered(name, (row for batch in batches for row in _batch_rows(batch)))


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """One string that is no UTF-8 must not cost its neighbours."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            yield BadRow("invalid_utf8", str(error))
        else:
            for index in range(len(batch)):
                yield from _batch_rows(batch.slice(index, 1))


def _arrow_rows(file: Path, name: str) -> Iterator[RawRow]:
    with _damage_told(name):
        yield from _numbered(name, datasets.Dataset.from_file(str(file)))


def _saved_rows(folder: Path, split: str) -> Iterator[RawRow]:
    """A data set, or several splits of one, written by `save_to_disk`."""
    with _damage_told(str(folder)):
        saved = datasets.load_from_disk(str(folder))
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise UserError(
                    f"{folder} has no split {split!r}: it has {', '.join(map(str, saved))}"
                )
            saved = saved[split]
        yield from _numbered(f"{folder.name}:{split}", saved)


def _numbered(name: str, rows: Iterable[Any]) -> Iterator[RawRow]:
    yield from ((f"{name}:{i}", _without_nulls(row)) for i, row in enumerate(rows, start=1))


def _without_nulls(value: Any) -> Any:
    """A table gives all rows all keys: one that a row lacks is null in it."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return [_without_nulls(part) for part in value]
    return value


def _open(file: Path, name: str) -> io.BufferedReader:
    """The bytes of a file, unpacked where its name says that it is packed."""
    packing = _COMPRESSED.get(Path(name).suffix.lower())
    with _damage_told(name):
        return io.BufferedReader(pa.input_stream(str(file), compression=packing))  # pyright: ignore


_READERS: dict[str, Callable[[Path, str], Iterator[RawRow]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".traj": _traj_rows,
}
_KNOWN = ", ".join(_READERS) + "; the first two also packed: " + ", ".join(_COMPRESSED)
