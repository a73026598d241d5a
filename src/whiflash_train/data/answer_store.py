"""Answers as they come, on disk: a killed run loses none that was reported, and asks none twice."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from whiflash_train.data.engines import Answer


class AnswerStore:
    """A folder with one file a process and one line an answer.

    The folder's name holds the fingerprint of everything that shapes the answers, so another run's
    leftover is never read.
    """

    def __init__(self, artefact: Path, fingerprint: str, *, process: int = 0) -> None:
        self.folder = artefact.with_name(f".{artefact.name}-answers-{fingerprint}")
        self._artefact = artefact
        self._file = self.folder / f"{process:05d}.jsonl"

    def read(self) -> dict[str, Answer]:
        """Every answer so far by job id; of a job that failed and was asked again, the last."""
        found: dict[str, Answer] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_bytes().split(b"\n"):
                answer = _parsed(line)
                if answer is None:
                    continue
                known = found.get(answer.id)
                if known is None or known.finish == "failed":
                    found[answer.id] = answer
        return found

    def append(self, answers: list[Answer]) -> None:
        """Write answers and wait for the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(a.as_dict(), ensure_ascii=False) + "\n" for a in answers]
        with self._file.open("ab") as file:
            _end_line(file, self._file)
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Remove this store and those that other runs for the same artefact left behind."""
        for folder in self._artefact.parent.glob(f".{self._artefact.name}-answers-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _end_line(file, path: Path) -> None:
    """A kill may have left half a line: end it, so that the next answer has a line of its own."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as reader:
        reader.seek(-1, os.SEEK_END)
        if reader.read(1) != b"\n":
            file.write(b"\n")


def _parsed(line: bytes) -> Answer | None:
    try:
        return Answer(**json.loads(line))
    except (ValueError, TypeError):  # half a line
        return None
