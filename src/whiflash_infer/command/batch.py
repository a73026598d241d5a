"""A file of prompts: answered several at a time, written in the order of the file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from whiflash_infer.command.prompts import Question, Questions, prompt_ids
from whiflash_infer.command.summary import rounds_by_arm, summary
from whiflash_infer.command.text import before_stop, decoded
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.requests import check_request
from whiflash_infer.types import Generation

Advance = Callable[[int, int], None]  # by so many answers and so many tokens
_INTERRUPTED = 130
_SHOWN_FAILURES = 20


@runtime_checkable
class Writable(Protocol):
    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...


def answer_file(
    decoder: RoutedDecoder, questions: Questions, told: argparse.Namespace, console: Console
) -> int:
    """Answer what can be answered. Returns the exit status: 1 when any line has no answer."""
    asked, prompts = _encode(decoder, questions, told)
    _tell_failures(questions, console)
    with _destination(told.output) as place:
        run = _Run(decoder, asked, place.file, with_ids=told.output_ids)
        try:
            with _progress(console, len(asked), shown=_has_room(told.output, console)) as advance:
                run.answer(prompts, told.rows, advance)
        except KeyboardInterrupt:
            run.keep(place, console)
            return _INTERRUPTED
        except BaseException:
            run.keep(place, console)
            raise
    return _tell_end(run, questions, told, console)


def _encode(
    decoder: RoutedDecoder, questions: Questions, told: argparse.Namespace
) -> tuple[list[Question], list[list[int]]]:
    """Questions that can be put to the target, and their tokens; the others become failures."""
    asked, prompts = [], []
    for question in questions.read:
        try:
            ids = prompt_ids(
                decoder.target.chat,
                question.asked,
                tools=question.tools,
                system=told.system,
                raw=told.raw,
            )
            check_request(ids, question.options, decoder.target.max_length)
            decoder.check_arm(question.options)
        except UserError as error:
            questions.failures[question.line] = str(error)
        else:
            asked.append(question)
            prompts.append(ids)
    if not asked:
        raise questions.refusal()
    return asked, prompts


class _Run:
    """Answers that come in any order, written as soon as none before them is missing."""

    def __init__(
        self, decoder: RoutedDecoder, asked: list[Question], file: Writable, *, with_ids: bool
    ) -> None:
        self.answered: dict[int, Generation] = {}
        self.seconds = 0.0
        self._decoder, self._asked, self._file, self._with_ids = decoder, asked, file, with_ids
        self._next = 0

    def answer(self, prompts: list[list[int]], max_rows: int, advance: Advance) -> None:
        options = [question.options for question in self._asked]
        started = time.perf_counter()
        for piece in self._decoder.stream_all(prompts, options, max_rows=max_rows):
            advance(int(piece.generation is not None), len(piece.ids))
            if piece.generation is not None:
                self.answered[piece.index] = piece.generation
                self._write_ready()
        self.seconds = time.perf_counter() - started

    @property
    def policy_name(self) -> str:
        return self._decoder.policy.name

    def keep(self, place: _Place, console: Console) -> None:
        """Write the finished answers that wait for others, and say where all of them are."""
        for index in sorted(index for index in self.answered if index >= self._next):
            self._file.write(self._line(index))
        self._file.flush()
        place.keep(console, len(self.answered), len(self._asked))

    def _write_ready(self) -> None:
        while self._next in self.answered:
            line = self._line(self._next)
            self._next += 1
            self._file.write(line)
            self._file.flush()

    def _line(self, index: int) -> str:
        record = self._record(self._asked[index], self.answered[index])
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _record(self, question: Question, generation: Generation) -> dict[str, Any]:
        ids, reason = generation.output_ids.tolist(), generation.finish_reason
        text = decoded(self._decoder.target.tokenizer, ids)
        if reason == "stop_string":
            text = before_stop(text, question.options.stop_strings)
        record: dict[str, Any] = {"id": question.id, "text": text}
        if self._with_ids:
            record["output_ids"] = ids
        record |= {"finish_reason": reason, "tokens": len(ids), "rounds": len(generation.rounds)}
        record["arms"] = dict(rounds_by_arm([generation]))
        if generation.error:
            record["error"] = generation.error
        if generation.fallbacks:
            record["fallbacks"] = dict(generation.fallbacks)
        return record


@dataclass(slots=True)
class _Place:
    """Where answers go. partial: under this name until all are there; None for stdout."""

    file: Writable
    partial: Path | None
    is_kept: bool = False

    def keep(self, console: Console, count: int, total: int) -> None:
        self.is_kept = True
        where = "on stdout" if self.partial is None else f"in {self.partial}"
        text = f"stopped: {count} of {total} answers are finished, and stand {where}"
        console.print(text, markup=False)


@contextmanager
def _destination(path: Path | None) -> Iterator[_Place]:
    """The file appears under its own name when it is complete."""
    if path is None:
        yield _Place(sys.stdout, None)
        return
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = partial.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    with file:
        place = _Place(file, partial)
        yield place
    if not place.is_kept:
        partial.replace(path)


def _has_room(output: Path | None, console: Console) -> bool:
    """A bar needs a terminal which no answers are written to."""
    return console.is_terminal and (output is not None or not sys.stdout.isatty())


@contextmanager
def _progress(console: Console, total: int, *, shown: bool) -> Iterator[Advance]:
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.1f} tokens/s"),
        TimeRemainingColumn(),
    )
    # What is written to stdout stays there: rich would move it to the console of the bar.
    bar = Progress(*columns, console=console, redirect_stdout=False, disable=not shown)
    started, tokens = time.perf_counter(), 0
    with bar:
        task = bar.add_task("answers", total=total, rate=0.0)

        def advance(answers: int, new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            bar.update(task, advance=answers, rate=rate)

        yield advance


def _tell_failures(questions: Questions, console: Console) -> None:
    failed = questions.failed_lines()
    for failure in failed[:_SHOWN_FAILURES]:
        console.print(failure, markup=False)
    if len(failed) > _SHOWN_FAILURES:
        console.print(f"and {len(failed) - _SHOWN_FAILURES} more lines")
    for name, count in sorted(questions.ignored.items()):
        console.print(f"the field {name!r} of {count} lines is not used", markup=False)


def _tell_end(run: _Run, questions: Questions, told: argparse.Namespace, console: Console) -> int:
    generations = list(run.answered.values())
    broken = sum(bool(generation.error) for generation in generations)
    tokens = sum(len(generation.output_ids) for generation in generations)
    rate = f"{tokens / max(run.seconds, 1e-9):,.1f} of all answers together, prompts included"
    title = f"policy {run.policy_name}, {len(generations)} answers"
    console.print(summary(title, generations, rate=rate))
    failed = len(questions.failures) + broken
    total = len(generations) + len(questions.failures)
    where = "" if told.output is None else f"; answers: {told.output}"
    console.print(
        f"answered {total - failed} of {total} lines, failed {failed}{where}", markup=False
    )
    return 1 if failed else 0
