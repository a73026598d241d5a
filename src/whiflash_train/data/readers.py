"""Rows of files and data sets as they are, each with its place; lines that are no rows by reason."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from whiflash_infer.errors import UserError
from whiflash_train.data.tally import BadRow

RawRow = tuple[str, Any]  # place, and a mapping or a BadRow
MAX_LINE_BYTES = 16 << 20
_TABLE_ROWS = 256
_COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}


def read_files(path: str, split: str) -> Iterator[RawRow]:
    """Rows of a file, a folder of files, a glob, or a folder saved by `datasets`.

    Raises: UserError when nothing is there, the kind is unknown, or a file is damaged.
    """
    root = Path(path).expanduser()
    if root.is_dir() and ({"dataset_dict.json", "state.json"} & {p.name for p in root.iterdir()}):
        yield from _saved_rows(root, split)
        return
    for file in _files(root):
        yield from read_file(file, file.name)


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

    Raises: UserError when it cannot be had.
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
    yield from ((f"{path}:{split}:{i}", row) for i, row in enumerate(rows, start=1))


def is_local(path: str) -> bool:
    root = Path(path).expanduser()
    looks_like_file = any(suffix in _READERS or suffix in _COMPRESSED for suffix in root.suffixes)
    return root.exists() or "*" in path or looks_like_file


def _files(root: Path) -> list[Path]:
    if "*" in str(root):
        found = sorted(Path(root.anchor or ".").glob(str(root).removeprefix(root.anchor)))
    elif root.is_dir():
        found = sorted(p for p in root.rglob("*") if p.is_file() and _kind(p.name) in _READERS)
    else:
        found = [root]
    if not found or not all(p.is_file() for p in found):
        raise UserError(f"no data at {root}: it does not exist, or holds no file of a known kind ({_KNOWN})")
    return found


def _kind(name: str) -> str:
    """The suffix that says what is in a file: .jsonl of `rows.jsonl.gz`."""
    kinds = [s for s in Path(name).suffixes if s not in _COMPRESSED]
    return kinds[-1] if kinds else ""


def _jsonl_rows(file: Path, name: str) -> Iterator[RawRow]:
    """Lines end at newline bytes only, whatever other separators a string may hold."""
    with _open(file, name) as stream:
        number = 0
        while True:
            number += 1
            place = f"{name}:{number}"
            try:
                line = stream.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                oversized = len(line) > MAX_LINE_BYTES and not line.endswith(b"\n")
                while oversized and not line.endswith(b"\n") and line:
                    line = stream.readline(MAX_LINE_BYTES)
            except (OSError, EOFError) as error:
                raise UserError(f"{place}: the file is damaged here: {error}") from error
            yield place, _parsed_line(line, number) if not oversized else BadRow("line_too_long")


def _parsed_line(line: bytes, number: int) -> Any:
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if not line.strip():
        return BadRow("blank_line")
    try:
        return _strict_json(line.decode())
    except UnicodeDecodeError as error:
        return BadRow("invalid_utf8", str(error)[:60])
    except (ValueError, RecursionError) as error:
        return BadRow("invalid_json", str(error)[:80])


def _json_rows(file: Path, name: str) -> Iterator[RawRow]:
    """A file that is one JSON list of rows."""
    with _open(file, name) as stream:
        try:
            rows = _strict_json(stream.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: not a JSON list of rows: {error}") from None
    if not isinstance(rows, list):
        raise UserError(f"{name}: a list of rows is needed; one object a line is .jsonl")
    yield from ((f"{name}[{i}]", row) for i, row in enumerate(rows))


def _strict_json(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON value")

    return json.loads(text, parse_constant=refuse)


def _parquet_rows(file: Path, name: str) -> Iterator[RawRow]:
    try:
        table = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{name}: not a readable Parquet file: {error}") from None
    number = 0
    for batch in table.iter_batches(batch_size=_TABLE_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield f"{name}:{number}", row


def _arrow_rows(file: Path, name: str) -> Iterator[RawRow]:
    rows = datasets.Dataset.from_file(str(file))
    yield from ((f"{name}:{i}", row) for i, row in enumerate(rows, start=1))


def _saved_rows(folder: Path, split: str) -> Iterator[RawRow]:
    """A data set, or several splits of one, written by `save_to_disk`."""
    saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(f"{folder} has no split {split!r}: it has {', '.join(saved)}")
        saved = saved[split]
    yield from ((f"{folder.name}:{split}:{i}", row) for i, row in enumerate(saved, start=1))


def _open(file: Path, name: str) -> io.BufferedReader:
    """The bytes of a file, unpacked where its name says that it is packed."""
    packing = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
    kind = packing.get(Path(name).suffix)
    return io.BufferedReader(pa.input_stream(str(file), compression=kind))  # pyright: ignore


_READERS: dict[str, Callable[[Path, str], Iterator[RawRow]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
_KNOWN = ", ".join(_READERS) + "; the first two also packed: " + ", ".join(sorted(_COMPRESSED))
