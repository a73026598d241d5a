"""The suite itself: which tests run, and which may be skipped (U122, U123)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.budget import ROOT, fewer, is_test_file, never_run, numbers_of, over_budget

pytest_plugins = ["pytester"]
FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_every_function_that_is_named_as_a_test_is_collected_once() -> None:
    told = {str(path): never_run(path.read_text(), collected=is_test_file(path)) for path in FILES}
    assert {path: tests for path, tests in told.items() if tests} == {}
    assert len(FILES) > 100


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def test_a(): ...\ndef test_b(): ...", []),
        ("def test_a(): ...\ndef test_a(): ...", ["2 times test_a"]),
        ("if 1:\n  def test_a(): ...\ndef test_a(): ...", ["2 times test_a"]),
        ("class TestA:\n  def test_a(self): ...\nclass TestB:\n  def test_a(self): ...", []),
        (
            "class TestA:\n  def test_a(self): ...\n  def test_a(self): ...",
            ["2 times test_a"],
        ),
        (
            "def helper():\n  def test_a(): ...",
            ["line 2: test_a, in a function that is not collected"],
        ),
        (
            "class Helper:\n  def test_a(self): ...",
            ["line 2: test_a, in a class that is not collected"],
        ),
        (
            "class TestA:\n  def __init__(self): ...\n  def test_a(self): ...",
            ["line 3: test_a, in a class that is not collected"],
        ),
    ],
)
def test_a_test_that_never_runs_is_told(source: str, told: list[str]) -> None:
    assert never_run(source, collected=True) == told


def test_a_test_in_a_file_of_another_name_never_runs() -> None:
    told = never_run("def test_a(): ...", collected=is_test_file(Path("tests/a_testing.py")))
    assert told == ["line 1: test_a, in a module that is not collected"]


def test_numbers_are_of_folders_and_fewer_of_one_is_told() -> None:
    before = numbers_of(["tests/a/test_x.py::test_1", "tests/a/test_x.py::test_2[3/4]"])
    assert before == {"total": 2, "tests/a": 2}
    now = numbers_of(["tests/b/test_y.py::TestY::test_1", "tests/a/test_x.py::test_1"])
    assert now == {"total": 2, "tests/a": 1, "tests/b": 1}
    assert fewer(before, now) == ["tests/a: 1 tests are collected, 2 were"]
    assert fewer(before, {**before, "tests/b": 1, "total": 3}) == []


def test_a_skip_is_in_the_budget_as_often_as_it_says() -> None:
    budget = {"GPU": 2, "chromium": 0}
    assert over_budget(["needs a GPU", "no GPU"], budget) == []
    assert over_budget(["needs a GPU"] * 3 + ["too slow", "no chromium"], budget) == [
        "not in the budget, 1 times: too slow",
        "3 skipped for 'GPU', at most 2 may be",
        "1 skipped for 'chromium', at most 0 may be",
    ]


CONFTEST = """
from pathlib import Path
from tests.budget import Budget
def pytest_addoption(parser):
    parser.addoption("--write-collected", action="store_true")
def pytest_configure(config):
    config.pluginmanager.register(Budget(config, Path(__file__).with_name("collected.json")))
"""
SUITE = """
import pytest
def test_a(): pass
@pytest.mark.slow
def test_b(): pass
@pytest.mark.skip(reason="needs a GPU")
def test_c(): pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A suite of three tests, whose number is written down."""
    pytester.makeini("[pytest]\ntestpaths = checks\nmarkers = slow\n")
    folder = pytester.mkdir("checks")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_first.py").write_text(SUITE)
    assert pytester.runpytest("--collect-only", "-q", "--write-collected").ret == 0
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> tuple[int, str]:
    done = suite.runpytest("-p", "no:cacheprovider", *arguments)
    return int(done.ret), done.stdout.str()


def test_the_numbers_are_written_when_that_is_asked_for(suite: pytest.Pytester) -> None:
    written = json.loads((suite.path / "checks/collected.json").read_text())
    assert written == {"total": 3, "checks": 3}
    status, told = run(suite)
    assert status == 0
    assert "skipped 1: needs a GPU" in told


def test_a_test_that_is_gone_fails_the_run_and_one_left_out_by_its_mark_does_not(
    suite: pytest.Pytester,
) -> None:
    assert run(suite, "-m", "not slow")[0] == 0
    (suite.path / "checks/test_first.py").write_text(SUITE.replace("test_a", "check_a"))
    status, told = run(suite, "-m", "not slow")
    assert status == 1
    assert "FAILED checks: 2 tests are collected, 3 were" in told
    assert "where that is meant: python -m pytest --collect-only -q --write-collected" in told
    assert run(suite, "--collect-only", "-q")[0] == 1


def test_more_tests_are_told_and_fail_nothing(suite: pytest.Pytester) -> None:
    (suite.path / "checks/test_more.py").write_text("def test_d(): pass")
    status, told = run(suite)
    assert status == 0
    assert "1 tests more than collected.json says" in told


UNKNOWN = {
    "skip": "import pytest\ndef test_a(): pytest.skip('later')",
    "module": "import pytest\nnone = pytest.importorskip('no_such_package')",
    "xfail": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_a(): assert False",
    "xpass": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_a(): pass",
}
REASONS = {
    "skip": "later",
    "module": "could not import 'no_such_package'",
    "xfail": "xfail: known",
    "xpass": "xfail: known",
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_reason_that_is_not_in_the_budget_fails_a_whole_run_and_no_part(
    suite: pytest.Pytester, kind: str
) -> None:
    (suite.path / "checks/test_more.py").write_text(UNKNOWN[kind])
    status, told = run(suite)
    assert status == 1
    assert f"FAILED not in the budget, 1 times: {REASONS[kind]}" in told
    status, told = run(suite, "checks/test_first.py", "checks/test_more.py")
    assert status == 0
    assert "skipped 1:" not in told
