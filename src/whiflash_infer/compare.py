"""Two evaluations beside each other: `python -m whiflash_infer.compare BEFORE AFTER`.

Also two policies inside one: `python -m whiflash_infer.compare EVALUATION --same-run A B`.

Exit status: 0 done, 1 a policy got slower than `--fail-if-slower` allows, 2 something to mend (one
message says what; also two results that cannot be compared), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whiflash_infer.errors import UserError
from whiflash_infer.statistics import paired_change, paired_gain, tokens_per_second
from whiflash_infer.types import PLAIN

FORMAT = 2
CONVENTIONS = (
    "weights",
    "bonus_token",
    "speedup_baseline",
    "temperature",
    "max_new_tokens",
    "prompt_set",
    "chat",
    "chat_template",
    "dtype",
    "batch",
    "sync",
)
MACHINE = ("device", "threads", "torch")  # what `--allow` may let differ
_FIELDS, _ABSENT = (*CONVENTIONS, *MACHINE), object()
METRICS, ANSWERS = "metrics.json", "answers.parquet"
_AGAIN = "evaluate again with: python evaluate.py"
_SLOWER, _USER_ERROR, _INTERRUPTED = 1, 2, 130
_RESAMPLES, _SEED, _WIDTH = 2000, 0, 132
_BEFORE, _AFTER = 0, 1
_COLUMNS: dict[str, Callable[[pa.DataType], bool]] = {
    "policy": pa.types.is_string,
    "prompt_id": pa.types.is_string,
    "category": pa.types.is_string,
    "turn": pa.types.is_integer,
    "decoded_tokens": pa.types.is_integer,
    "rounds": pa.types.is_integer,
    "decode_seconds": pa.types.is_floating,
    "output_hash": pa.types.is_string,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer as `answers.parquet` has it."""

    category: str
    turn: int
    decoded_tokens: int
    rounds: int
    decode_seconds: float
    output_hash: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """path: of its metrics. policies: without what was varied beside them, which `answers` holds
    too, by policy and prompt."""

    path: Path
    header: dict[str, Any]
    policies: list[str]
    answers: dict[str, dict[str, Measured]]


Key = tuple[int, str]  # number of the evaluation, policy


@dataclass(frozen=True, slots=True)
class Paired:
    """Answers to the same prompts, in one order."""

    prompts: list[str]
    answers: dict[Key, list[Measured]]

    def tokens_per_s(self, key: Key) -> float:
        return tokens_per_second(self._table(key))

    def tau(self, key: Key) -> float:
        rounds = sum(a.rounds for a in self.answers[key])
        return sum(a.decoded_tokens for a in self.answers[key]) / rounds if rounds else 0.0

    def gain(self, own: Key, base: Key) -> list[float]:
        return paired_gain(*self._tables(own, base), **self._draw())

    def change(self, own: Key, base: Key, own_before: Key, base_before: Key) -> list[float]:
        return paired_change(*self._tables(own, base, own_before, base_before), **self._draw())

    def differing(self, one: Key, other: Key) -> int:
        return sum(a.output_hash != b.output_hash for a, b in self._pairs(one, other))

    def has_same_rounds(self, one: Key, other: Key) -> bool:
        return all(a.rounds == b.rounds for a, b in self._pairs(one, other))

    def by_category(self) -> dict[str, Paired]:
        categories = [a.category for a in self._some()]
        return {name: self._of(name, categories) for name in sorted(set(categories))}

    def _of(self, category: str, categories: Sequence[str]) -> Paired:
        rows = [row for row, own in enumerate(categories) if own == category]
        answers = {key: [mine[row] for row in rows] for key, mine in self.answers.items()}
        return Paired([self.prompts[row] for row in rows], answers)

    def _tables(self, *keys: Key) -> Iterator[Float[np.ndarray, "n 2"]]:
        return (self._table(key) for key in keys)

    def _table(self, key: Key) -> Float[np.ndarray, "n 2"]:
        rows = [(a.decoded_tokens, a.decode_seconds) for a in self.answers[key]]
        return np.array(rows, dtype=float).reshape(-1, 2)

    def _draw(self) -> dict[str, Any]:
        """Turns of one conversation are alike, so they are drawn together."""
        pairs = zip(self.prompts, self._some(), strict=True)
        clusters = [prompt.removesuffix(f"#{answer.turn}") for prompt, answer in pairs]
        return {"resamples": _RESAMPLES, "seed": _SEED, "clusters": clusters}

    def _pairs(self, one: Key, other: Key) -> Iterator[tuple[Measured, Measured]]:
        return zip(self.answers[one], self.answers[other], strict=True)

    def _some(self) -> list[Measured]:
        return next(iter(self.answers.values()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.after is None) == (options.same_run is None):
        parser.error("give BEFORE and AFTER, or one evaluation with --same-run A B")
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        found = _compared(options)
        if options.json:
            print(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))  # noqa: T201
        else:
            _show(found)
    except UserError as error:
        stderr.print(f"error: {error}", markup=False)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    if options.fail_if_slower is None:
        return 0
    slower = slower_policies(found, options.fail_if_slower)
    for sentence in slower:
        stderr.print(sentence, markup=False)
    return _SLOWER if slower else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_infer.compare",
        description="Compare two evaluations, or two policies inside one.",
    )
    parser.add_argument("before", type=Path, help="folder of an evaluation, or its metrics.json")
    parser.add_argument("after", type=Path, nargs="?", help="the one to compare with it")
    parser.add_argument("--same-run", nargs=2, metavar="POLICY", help="two policies of BEFORE")
    parser.add_argument("--by", choices=("category",), help="a line for every category too")
    parser.add_argument(
        "--allow", action="append", default=[], choices=MACHINE, help="may differ (repeatable)"
    )
    parser.add_argument(
        "--fail-if-slower",
        type=_share,
        metavar="SHARE",
        help="exit with 1 when a policy surely lost more than this share of its tokens/s",
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    return parser


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 <= share < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a share: 0.03 means 3 %")
    return share


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    with_categories = options.by is not None
    before = read_evaluation(options.before)
    if options.same_run is not None:
        return compare_policies(before, *options.same_run, with_categories=with_categories)
    after = read_evaluation(options.after)
    return compare_runs(before, after, allow=options.allow, with_categories=with_categories)


def read_evaluation(path: Path) -> Evaluation:
    """path: the folder, or one of its two files.

    Raises: UserError naming the file and what is wrong with it.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder that `python evaluate.py` wrote")
    folder = path if path.is_dir() else path.parent
    metrics = path if path.suffix == ".json" else folder / METRICS
    header, policies = _read_metrics(metrics)
    rows = path if path.suffix == ".parquet" else folder / ANSWERS
    answers = _read_answers(rows)
    if missing := [policy for policy in policies if policy not in answers]:
        raise UserError(f"{rows} has no answers of {missing[0]}: it is not of the run of {metrics}")
    return Evaluation(metrics, header, policies, answers)


def _read_metrics(path: Path) -> tuple[dict[str, Any], list[str]]:
    _require_file(path)
    try:
        content: Any = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format", "none") if isinstance(content, dict) else "none"
        raise UserError(f"{path}: format is {found}, this version reads {FORMAT}; {_AGAIN}")
    header, policies = content.get("header"), content.get("policies")
    if not isinstance(header, dict) or not isinstance(policies, dict):
        raise UserError(f"{path}: `header` and `policies` must be objects")
    if missing := [field for field in _FIELDS if _fact(header, field) is _ABSENT]:
        raise UserError(f"{path}: the header lacks {', '.join(missing)}")
    return header, list(policies)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; {_AGAIN}")


def _fact(header: Mapping[str, Any], field: str) -> Any:
    if field != "torch":
        return header.get(field, _ABSENT)
    versions = header.get("versions")
    return versions.get("torch_build", _ABSENT) if isinstance(versions, dict) else _ABSENT


def _read_answers(path: Path) -> dict[str, dict[str, Measured]]:
    _require_file(path)
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow)
            table = file.read(columns=list(_COLUMNS))
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} is not readable as parquet: {reason}") from None
    answers: dict[str, dict[str, Measured]] = {}
    for index, row in enumerate(table.to_pylist()):
        policy, prompt = row.pop("policy"), row.pop("prompt_id")
        mine = answers.setdefault(policy, {})
        if None in (policy, prompt, *row.values()) or not isfinite(row["decode_seconds"]):
            raise UserError(f"{path}: row {index} has an empty value")
        if prompt in mine:
            raise UserError(f"{path}: policy {policy} has two answers to prompt {prompt}")
        mine[prompt] = Measured(**row)
    return answers


def _check_columns(path: Path, schema: pa.Schema) -> None:
    for name, is_right in _COLUMNS.items():
        if name not in schema.names:
            raise UserError(f"{path} has no column {name}; {_AGAIN}")
        if not is_right(schema.field(name).type):
            raise UserError(f"{path}: column {name} holds {schema.field(name).type}")


def compare_runs(
    before: Evaluation, after: Evaluation, *, allow: Sequence[str] = (), with_categories: bool
) -> dict[str, Any]:
    """Of each policy that both have. allow: fields of the machine that may differ.

    Raises: UserError naming every field in which the two were not measured alike.
    """
    allowed = require_alike(before, after, allow)
    shared = [policy for policy in after.policies if policy in before.policies]
    if not shared:
        raise UserError(f"{before.path} and {after.path} have no policy in common")
    paired = _pair((before, after), [(run, p) for p in shared for run in (_BEFORE, _AFTER)])
    return {
        "before": _facts(before),
        "after": _facts(after),
        "allowed": allowed,
        "policies": {
            policy: _rows(paired, lambda part, p=policy: _run_row(part, p), with_categories)
            for policy in shared
        },
        "left_out": {
            "policies": sorted(set(before.policies) ^ set(after.policies)),
            "prompts": len(_all_prompts(before, shared) | _all_prompts(after, shared))
            - len(paired.prompts),
        },
    }


def require_alike(
    before: Evaluation, after: Evaluation, allow: Sequence[str]
) -> dict[str, list[Any]]:
    """The fields that differ and may."""
    differing = {
        field: [_fact(before.header, field), _fact(after.header, field)]
        for field in _FIELDS
        if _fact(before.header, field) != _fact(after.header, field)
    }
    allowed = {field: pair for field, pair in differing.items() if field in allow}
    misfits = [
        f"  {field}: {one!r} and {other!r}" + (f" (--allow {field})" if field in MACHINE else "")
        for field, (one, other) in differing.items()
        if field not in allowed
    ]
    if misfits:
        raise UserError(
            "\n".join([f"{before.path} and {after.path} were not measured alike:", *misfits])
        )
    return allowed


def compare_policies(
    run: Evaluation, policy: str, against: str, *, with_categories: bool
) -> dict[str, Any]:
    """Two policies of one evaluation, or what was varied beside them.

    Raises: UserError for a policy that it does not have.
    """
    for name in (policy, against):
        if name not in run.answers:
            raise UserError(f"{run.path} has no policy {name}; it has: {'; '.join(run.answers)}")
    own, base = (_BEFORE, policy), (_BEFORE, against)
    paired = _pair((run,), [own, base])
    rows = _rows(paired, lambda part: _row(part, base, own), with_categories)
    return {"evaluation": _facts(run), "against": against, "policies": {policy: rows}}


def slower_policies(found: Mapping[str, Any], share: float) -> list[str]:
    """A sentence for each policy whose whole interval lies below 1 - share."""
    overall = {name: rows["overall"]["ratio"] for name, rows in found["policies"].items()}
    return [
        f"{name} is slower by more than {share:.1%}: {_told(ratio)} of its tokens/s"
        for name, ratio in overall.items()
        if _is_surely_below(ratio, 1 - share)
    ]


def _is_surely_below(gain: Sequence[float], limit: float) -> bool:
    """A point comes of one conversation and proves nothing; nought is a policy that broke down."""
    _, low, high = gain
    return high < limit and (low < high or high == 0.0)


def _pair(runs: Sequence[Evaluation], keys: Sequence[Key]) -> Paired:
    answers = {(run, policy): runs[run].answers[policy] for run, policy in keys}
    first, *others = answers.values()
    prompts = [prompt for prompt in first if all(prompt in other for other in others)]
    if not prompts:
        raise UserError(f"{' and '.join(str(r.path) for r in runs)}: no prompt has all answers")
    return Paired(prompts, {key: [mine[p] for p in prompts] for key, mine in answers.items()})


def _all_prompts(run: Evaluation, policies: Sequence[str]) -> set[str]:
    return {prompt for policy in policies for prompt in run.answers[policy]}


def _rows(
    paired: Paired, row_of: Callable[[Paired], dict[str, Any]], with_categories: bool
) -> dict[str, Any]:
    parts = paired.by_category() if with_categories else {}
    return {
        "overall": row_of(paired),
        "by_category": {name: row_of(part) for name, part in parts.items()},
    }


def _row(paired: Paired, base: Key, own: Key) -> dict[str, Any]:
    """Pairs are of base and own; ratio: own over base, low, high."""
    return {
        "answers": len(paired.prompts),
        "tokens_per_s": [paired.tokens_per_s(base), paired.tokens_per_s(own)],
        "ratio": paired.gain(own, base),
        "tau": [paired.tau(base), paired.tau(own)],
        "differing_answers": paired.differing(base, own),
        "same_rounds": paired.has_same_rounds(base, own),
    }


def _run_row(paired: Paired, policy: str) -> dict[str, Any]:
    """speedup: None for plain itself, and where one of the two runs lacks it."""
    before, after = (_BEFORE, policy), (_AFTER, policy)
    plain_before, plain_after = (_BEFORE, PLAIN), (_AFTER, PLAIN)
    row = _row(paired, before, after)
    if policy == PLAIN or plain_before not in paired.answers:
        return {**row, "speedup": None}
    earlier, later = paired.gain(before, plain_before), paired.gain(after, plain_after)
    change = paired.change(after, plain_after, before, plain_before)
    return {
        **row,
        "speedup": {
            "before": earlier,
            "after": later,
            "change": change,
            "agrees": _agrees(earlier, later, change),
        },
    }


def _agrees(
    earlier: Sequence[float], later: Sequence[float], change: Sequence[float]
) -> bool | None:
    """None for one conversation, of which there is no interval."""
    _, low, high = change
    if low == high != 1.0:
        return None
    overlaps = max(earlier[1], later[1]) <= min(earlier[2], later[2])
    return overlaps and low <= 1.0 <= high


def _facts(run: Evaluation) -> dict[str, Any]:
    facts = ("target", "device", "dtype", "threads", "prompts", "created")
    return {"path": str(run.path), **{name: run.header.get(name) for name in facts}}


def _show(found: Mapping[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    policies = found["policies"]
    if "against" in found:
        name = next(iter(policies))
        sides = (found["against"], name)
        console.print(_throughput(f"{name} over {sides[0]}", sides, policies))
        return
    for side in ("before", "after"):
        facts = found[side]
        console.print(f"{side}: {facts['path']}, {facts['created']}", markup=False)
    for field, (one, other) in found["allowed"].items():
        console.print(f"differs, as allowed: {field}, {one} and {other}", markup=False)
    console.print(_throughput("after over before", ("before", "after"), policies))
    console.print(_speedups(policies))
    left = found["left_out"]
    if left["policies"]:
        names = ", ".join(left["policies"])
        console.print(f"in one of the two only: {names}", markup=False)
    if left["prompts"]:
        console.print(f"left out, not answered in both: {left['prompts']} prompts")


def _throughput(title: str, sides: tuple[str, str], policies: Mapping[str, Any]) -> Table:
    columns = [f"tokens/s {sides[0]}", sides[1], "ratio", f"tau {sides[0]}", sides[1], "answers"]
    table = _table(title, columns)
    _fill(table, policies, _throughput_cells)
    return table


def _throughput_cells(row: Mapping[str, Any]) -> list[str]:
    speeds = [f"{speed:.1f}" for speed in row["tokens_per_s"]]
    taus = [f"{tau:.2f}" for tau in row["tau"]]
    return [*speeds, _told(row["ratio"]), *taus, _sameness(row)]


def _sameness(row: Mapping[str, Any]) -> str:
    if row["differing_answers"]:
        return f"{row['differing_answers']} of {row['answers']} differ"
    return "same rounds" if row["same_rounds"] else "same, other rounds"


def _speedups(policies: Mapping[str, Any]) -> Table:
    table = _table("speed-up over plain", ["before", "after", "after over before", "agree"])
    _fill(table, policies, _speedup_cells)
    return table


def _speedup_cells(row: Mapping[str, Any]) -> list[str] | None:
    speedup = row["speedup"]
    if speedup is None:
        return None
    cells = [_told(speedup[name]) for name in ("before", "after", "change")]
    return [*cells, {True: "yes", False: "no", None: "-"}[speedup["agrees"]]]


def _told(gain: Sequence[float]) -> str:
    ratio, low, high = gain
    interval = f"{low:.3f} to {high:.3f}" if low < high else "no interval"
    return f"{ratio:.3f} ({interval})"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title))
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    return table


def _fill(
    table: Table,
    policies: Mapping[str, Any],
    cells_of: Callable[[Mapping[str, Any]], list[str] | None],
) -> None:
    """A line a policy, then a section for each category. Names are data, not markup."""
    for policy, rows in policies.items():
        if cells := cells_of(rows["overall"]):
            table.add_row(Text(policy), *cells)
    categories = {name: None for rows in policies.values() for name in rows["by_category"]}
    for category in categories:
        table.add_section()
        table.add_row(Text(category, style="bold"))
        for policy, rows in policies.items():
            if cells := cells_of(rows["by_category"][category]):
                table.add_row(Text(f"  {policy}"), *cells)


if __name__ == "__main__":
    sys.exit(main())
