"""Data sets by configuration: where the rows are, and which column is what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import DownloadManager
from huggingface_hub import hf_hub_download

from whiflash_infer.errors import UserError
from whiflash_train.checks import checked
from whiflash_train.data.readers import RawRow, is_local, read_file, read_files, read_hub
from whiflash_train.data.rows import AnyRow, parse_row
from whiflash_train.data.tally import BadRow, Tally

_FIELD = re.compile(r"\{(\w+)\}")


@checked
@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One data set.

    path: a local file, folder or glob ({split} is filled in), a URL of a file, or a Hugging Face id.
    hub_file: a file inside that Hugging Face data set, for sets whose files `datasets` cannot read.
    name, revision: configuration and revision of a Hugging Face data set.
    validation_split: the split to validate on; where null, a share of `split` is held out.
    limit: good rows to take, from the start. weight: share of rows when sources are mixed.
    columns: our key -> their column, or a text with {column} in it. Keys that are not named pass.
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
        if self.weight <= 0:
            raise ValueError(f"weight is {self.weight}: it must be above 0")

    def read(self, split: str, tally: Tally, *, roles: Mapping[str, str]) -> Iterator[AnyRow]:
        """The good rows of a split; every other one is counted out in `tally`."""
        return islice(self._good_rows(split, tally, roles), self.limit)

    def _good_rows(
        self, split: str, tally: Tally, roles: Mapping[str, str]
    ) -> Iterator[AnyRow]:
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

    def _raw_rows(self, split: str) -> Iterator[RawRow]:
        path = self.path.replace("{split}", split)
        if self.hub_file is not None and not is_local(path):
            path = _hub_file(path, self.hub_file, self.revision)
        elif path.startswith(("http://", "https://")):
            return read_file(_downloaded(path), path.rpartition("/")[2])
        if is_local(path):
            return read_files(path, split)
        return read_hub(
            path,
            name=self.name,
            split=split,
            revision=self.revision,
            streaming=self.streaming,
        )

    def _renamed(self, raw: Any) -> Any:
        """The row under our keys.

        Raises: BadRow when a column that the configuration names is not there.
        """
        if not isinstance(raw, Mapping):
            return raw
        row = dict(raw)
        if self.category is not None:
            row.setdefault("category", self.category)
        for ours, theirs in self.columns.items():
            names = _FIELD.findall(theirs)
            absent = [n for n in (names or [theirs]) if raw.get(n) is None]
            if absent:
                raise BadRow("missing_column", f"{absent[0]!r} is not in {sorted(raw)[:8]}")
            row[ours] = (
                _FIELD.sub(lambda found: str(raw[found[1]]), theirs) if names else raw[theirs]
            )
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


def _hub_file(path: str, file: str, revision: str | None) -> str:
    try:
        return hf_hub_download(path, file, repo_type="dataset", revision=revision)
    except Exception as error:
        raise UserError(f"cannot fetch {file} of the data set {path}: {error}") from error


def _downloaded(url: str) -> Path:
    """A local copy, fetched once."""
    try:
        return Path(DownloadManager().download(url))  # pyright: ignore
    except Exception as error:
        raise UserError(f"cannot fetch {url}: {error}") from error
