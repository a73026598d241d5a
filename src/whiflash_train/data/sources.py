"""Data sets by configuration: where the rows are, and which column is what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
from datasets import DownloadManager

from whiflash_infer.errors import UserError
from whiflash_train.checks import checked
from whiflash_train.data.readers import (
    RawRow,
    has_splits,
    is_local,
    read_file,
    read_files,
    read_hub,
)
from whiflash_train.data.rows import ANSWERS, SHAPES, AnyRow, parse_row
from whiflash_train.data.tally import BadRow, Tally

_FIELD = re.compile(r"\{([\w -]+)\}")


@checked
@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data set.

    path: a local file, folder or glob, a URL of a file, or a Hugging Face id.
    hub_file: a file inside that Hugging Face data set, for sets whose files `datasets` cannot read.
        In both {split} is filled in.
    name, revision: configuration and revision of a Hugging Face data set.
    validation_split: the split to validate on; where null, a share of `split` is held out.
    limit: good rows to take, from the start. weight: share of rows when sources are mixed.
    columns: our key -> their column, or a text with {column} in it. Keys that are not named pass,
        but for another shape of row, or another answer, than the one that is named.
    category: of all rows that bring none.
    """

    path: str
    hub_file: str | None
    name: str | None
    revision: str | None
    split: str
    validation_split: str | None
    streaming: bool
    limit: int | None
    weight: float
    columns: dict[str, str]
    category: str | None

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ValueError(f"weight is {self.weight}: it must be above 0")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}: it must be above 0, or null for all rows")
        if self.validation_split == self.split:
            raise ValueError(f"validation_split is {self.split!r}, which is trained on")

    def read(self, split: str, tally: Tally, *, roles: Mapping[str, str]) -> Iterator[AnyRow]:
        """The good rows of a split; every other one is counted out in `tally`.

        Raises: UserError when the rows cannot be read, or when there is none, good or bad.
        """
        return islice(self._good_rows(split, tally, roles), self.limit)

    def _good_rows(self, split: str, tally: Tally, roles: Mapping[str, str]) -> Iterator[AnyRow]:
        place = None
        for place, raw in self._raw_rows(split):
            tally.read += 1
            try:
                if isinstance(raw, BadRow):
                    raise raw
                row = parse_row(self._renamed(raw), place, roles=roles)
            except BadRow as bad:
                tally.drop(place, bad)
            else:
                yield row
        if place is None:
            raise UserError(f"{self.path} is empty: it holds no row of split {split!r}")

    def _raw_rows(self, split: str) -> Iterator[RawRow]:
        path = self.path.replace("{split}", split)
        hub_file = self.hub_file and self.hub_file.replace("{split}", split)
        is_url = path.startswith(("http://", "https://"))
        if not (hub_file or is_url or is_local(path)):
            return read_hub(
                path,
                name=self.name,
                split=split,
                revision=self.revision,
                streaming=self.streaming,
            )
        one_for_all = (path, hub_file) == (self.path, self.hub_file) and not has_splits(path)
        if split != self.split and one_for_all:
            raise UserError(
                f"{path} holds the same rows for split {split!r} as for {self.split!r}: put "
                "{split} in the path, or set validation_split=null to hold rows out"
            )
        if is_url:
            return read_file(_downloaded(path), _file_name(path))
        if hub_file and not is_local(path):
            path = _hub_file(path, hub_file, self.revision)
        return read_files(path, split)

    def _renamed(self, raw: Any) -> Any:
        """The row under our keys.

        Raises: BadRow when a column that the configuration names is not there.
        """
        if not isinstance(raw, Mapping):
            return raw
        named = {ours: _column(raw, theirs) for ours, theirs in self.columns.items()}
        rivals = {key for keys in (SHAPES, ANSWERS) if named.keys() & keys for key in keys}
        row = {k: v for k, v in raw.items() if k not in rivals} | named
        if self.category is not None and row.get("category") is None:
            row["category"] = self.category
        return row


def read_mixed(
    sources: Mapping[str, DataSource],
    tally: Tally,
    *,
    validation: bool,
    roles: Mapping[str, str],
) -> Iterator[tuple[str, AnyRow]]:
    """(source name, row) of all sources, interleaved by weight; a source that ends drops out.

    validation: read the validation splits, of the sources that have one.
    """
    streams = {}
    for name, source in sources.items():
        split = source.validation_split if validation else source.split
        if split is not None:
            streams[name] = source.read(split, tally, roles=roles)
    taken = dict.fromkeys(streams, 0.0)
    while streams:
        name = min(streams, key=lambda n: taken[n])
        row = next(streams[name], None)
        if row is None:
            del streams[name]
            continue
        taken[name] += 1.0 / sources[name].weight
        yield name, row


def _column(raw: Mapping[str, Any], theirs: str) -> Any:
    absent = [name for name in _FIELD.findall(theirs) or [theirs] if raw.get(name) is None]
    if absent:
        raise BadRow("missing_column", f"{absent[0]!r} is not in {list(raw)[:8]}")
    if theirs in raw:
        return raw[theirs]
    return _FIELD.sub(lambda found: _as_text(raw[found[1]]), theirs)


def _as_text(value: Any) -> str:
    """Several texts, such as the tests of a task, stand on lines of their own."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _hub_file(path: str, file: str, revision: str | None) -> str:
    try:
        return huggingface_hub.hf_hub_download(path, file, repo_type="dataset", revision=revision)
    except Exception as error:
        raise UserError(f"cannot fetch {file} of the data set {path}: {error}") from error


def _downloaded(url: str) -> Path:
    """A local copy, fetched once."""
    try:
        return Path(DownloadManager().download(url))  # pyright: ignore
    except Exception as error:
        raise UserError(f"cannot fetch {url}: {error}") from error


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]
