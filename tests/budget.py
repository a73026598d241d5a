"""What a whole run of the suite is held to: as many tests as before, and no skip that is not known.

Runs of a part are held to nothing. Both are told at the end of the run.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLLECTED = Path(__file__).with_name("collected.json")
UPDATE = "python -m pytest --collect-only -q --write-collected"
TOTAL = "total"

# Of each reason, a regular expression, the most tests that may be skipped or expected to fail.
SKIPS = {
    r"needs a GPU": 8,
    r"there is a GPU": 1,
    r"needs /proc": 1,
    r"mount a file system|no mount": 4,
    r"could not import 'hydra_plugins\.|come with packages of their own": 20,
    r"(?i)chromium|playwright": 30,
    r"(?i)vllm|sglang": 8,
}


def numbers_of(node_ids: Iterable[str]) -> dict[str, int]:
    """Tests in all, and by folder."""
    folders = Counter(node_id.split("::")[0].rpartition("/")[0] for node_id in node_ids)
    return {TOTAL: folders.total(), **dict(sorted(folders.items()))}


def fewer(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    return [
        f"{place}: {now.get(place, 0)} tests are collected, {number} were"
        for place, number in before.items()
        if now.get(place, 0) < number
    ]


def over_budget(reasons: Sequence[str], budget: Mapping[str, int]) -> list[str]:
    """A reason counts for the first pattern that it holds."""
    pattern_of = {
        reason: next((pattern for pattern in budget if re.search(pattern, reason)), None)
        for reason in reasons
    }
    unknown = Counter(reason for reason in reasons if pattern_of[reason] is None)
    known = Counter(filter(None, map(pattern_of.get, reasons)))
    return [
        f"not in the budget, {number} times: {reason}" for reason, number in unknown.items()
    ] + [
        f"{number} skipped for {pattern!r}, at most {budget[pattern]} may be"
        for pattern, number in known.items()
        if number > budget[pattern]
    ]


# --- tests that never run ---------------------------------------------------------------------


def never_run(source: str, *, collected: bool) -> list[str]:
    """Tests of a module that pytest does not see. collected: whether it looks into the file."""
    module = ast.parse(source)
    return [*_hidden(module, "module", seen=collected), *_shadowed(module)]


def _hidden(node: ast.AST, place: str, *, seen: bool) -> Iterator[str]:
    """place: what the node stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name.startswith("test_") and not seen:
                yield f"line {child.lineno}: {child.name}, in a {place} that is not collected"
            yield from _hidden(child, "function", seen=False)
        elif isinstance(child, ast.ClassDef):
            yield from _hidden(child, "class", seen=seen and _is_collected(child))
        else:
            yield from _hidden(child, place, seen=seen)


def _is_collected(node: ast.ClassDef) -> bool:
    made = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    return node.name.startswith("Test") and not made & {"__init__", "__new__"}


def _shadowed(module: ast.Module) -> Iterator[str]:
    for scope in ast.walk(module):
        if isinstance(scope, ast.Module | ast.ClassDef):
            names = Counter(_tests_in(scope))
            yield from (f"{number} times {name}" for name, number in names.items() if number > 1)


def _tests_in(scope: ast.AST) -> Iterator[str]:
    """Names of the tests of a module or class, those under an `if` or `with` included."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name.startswith(("test_", "Test")):
                yield child.name
        else:
            yield from _tests_in(child)


def is_test_file(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in ("test_*.py", "*_test.py"))


# --- in a run -----------------------------------------------------------------------------------


class Budget:
    """A plugin of pytest."""

    def __init__(self, config: pytest.Config, collected: Path = COLLECTED) -> None:
        self._config, self._collected = config, collected
        self._reasons: list[str] = []
        self._told: list[str] = []
        self._numbers: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Comes before some are left out by -m."""
        self._numbers = numbers_of(item.nodeid for item in items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        expected = getattr(report, "wasxfail", None)
        if expected is not None and (report.skipped or report.passed):
            self._reasons.append(f"xfail: {expected}")
        elif report.skipped:
            self._reasons.append(_reason(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._reasons.append(_reason(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not is_whole(self._config) or session.testsfailed:
            return
        if self._config.getoption("write_collected"):
            self._collected.write_text(json.dumps(self._numbers, indent=1) + "\n")
        wrong = self._wrong_numbers() + over_budget(self._reasons, SKIPS)
        if wrong:
            self._told += [f"FAILED {line}" for line in wrong]
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not is_whole(self._config):
            return
        for reason, number in Counter(self._reasons).most_common():
            terminalreporter.write_line(f"skipped {number}: {reason}")
        for line in self._told:
            terminalreporter.write_line(line)

    def _wrong_numbers(self) -> list[str]:
        before = json.loads(self._collected.read_text())
        more = self._numbers[TOTAL] - before[TOTAL]
        if lost := fewer(before, self._numbers):
            return [*lost, f"where that is meant: {UPDATE}"]
        if more:
            self._told.append(f"{more} tests more than {self._collected.name} says: {UPDATE}")
        return []


def is_whole(config: pytest.Config) -> bool:
    """Whether all files are collected. Those left out by -m or -k are, and run another time."""
    option = config.option
    narrowed = (
        option.ignore,
        option.ignore_glob,
        getattr(option, "lf", False),
        getattr(option, "stepwise", False),
    )
    asked = {config.invocation_params.dir / argument for argument in config.args}
    whole = [config.rootpath / place for place in config.getini("testpaths")]
    return all(asked & {place, *place.parents} for place in whole) and not any(narrowed)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")
