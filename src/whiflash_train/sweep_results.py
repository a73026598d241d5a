"""What the runs of a sweep left: their numbers, read from the manifests of their artefacts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from whiflash_infer.artifacts import MANIFEST, read_json
from whiflash_infer.errors import UserError

OURS = "hazard"
AUTO = "auto"
EVERYTHING = "every category"
RUN_ERROR = "error.txt"  # in a run's folder: why it ended
_LAM = "router.lam="
_MEASURED = ("tokens_per_s", "tau", "seconds_per_round", "switches_per_100_rounds")


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended well. overrides: those that not all runs of the sweep share."""

    name: str
    overrides: tuple[str, ...]
    manifest: Mapping[str, Any]

    @property
    def label(self) -> str:
        return " ".join(self.overrides)


@dataclass(frozen=True, slots=True)
class Sweep:
    """failed: by run, why it has no numbers."""

    folder: Path
    task: str
    runs: list[Run]
    failed: dict[str, str]


@dataclass(frozen=True, slots=True)
class Point:
    """A policy as replay found it; static arms belong to no run and have no price.

    group: the overrides beside the price. Points of one group lie on one curve.
    """

    run: str
    overrides: str
    group: str
    policy: str
    lam: float | None
    automatic: bool
    tokens_per_s: float
    tau: float
    seconds_per_round: float
    switches_per_100_rounds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """How much faster a router is than the best static arm, on one category of the test.

    relation: "alone" where it was trained on this category only, "left out" where it was trained
    on all but some and this is one of them, else "".
    """

    trained_on: str
    tested_on: str
    gain: float
    best_static: str
    relation: str
    num_runs: int


def read_sweep(folder: Path) -> Sweep:
    """Raises: UserError where the folder holds no runs, or runs of several tasks."""
    found = sorted((p.parent.parent for p in folder.rglob(".hydra/overrides.yaml")), key=_order)
    if not found:
        raise UserError(f"{folder} holds no runs: give the folder of a sweep, <sweep>/<run>/.hydra")
    tasks = {_yaml(run / ".hydra/config.yaml")["task"] for run in found}
    if len(tasks) > 1:
        raise UserError(f"{folder} holds runs of several tasks: {', '.join(sorted(tasks))}")
    task = tasks.pop()
    overrides = {run: list(_yaml(run / ".hydra/overrides.yaml") or []) for run in found}
    shared = set.intersection(*(set(one) for one in overrides.values()))
    runs, failed = [], {}
    for run in found:
        name = str(run.relative_to(folder))
        try:
            manifest = _manifest(run, task)
        except UserError as error:
            failed[name] = str(error)
        else:
            mine = tuple(one for one in overrides[run] if one not in shared)
            runs.append(Run(name, mine, manifest))
    return Sweep(folder, task, runs, failed)


def _order(run: Path) -> tuple[Path, int, str]:
    """By number where folders are numbered: 2 before 10."""
    number = int(run.name) if run.name.isdecimal() else -1
    return run.parent, number, run.name


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _manifest(run: Path, task: str) -> dict[str, Any]:
    """Raises: UserError saying why this run has no numbers."""
    told = run / RUN_ERROR
    if told.is_file():
        raise UserError(told.read_text(encoding="utf-8").strip())
    path = run / task / MANIFEST
    if not path.is_file():
        raise UserError(f"it ended before it wrote {task}/{MANIFEST}")
    manifest = read_json(path)
    if task == "router" and (missing := _missing(manifest)):
        raise UserError(f"{path} has no number for {missing}: train it again")
    return manifest


def _missing(manifest: Mapping[str, Any]) -> str | None:
    """What a point cannot do without, and is not there."""
    replay = manifest.get("replay") or {}
    ours = replay.get("policies", {}).get(OURS) or {}
    numbers = {"replay.lam": replay.get("lam")}
    numbers |= {f"replay.policies.{OURS}.{key}": ours.get(key) for key in _MEASURED}
    return next((key for key, value in numbers.items() if not _is_number(value)), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def curve_points(runs: Sequence[Run]) -> list[Point]:
    """Of each run the router, in the order of the runs."""
    return [_point(run, OURS) for run in runs]


def reference_points(runs: Sequence[Run]) -> list[Point]:
    """The static arms, of the first run that replayed them."""
    found: dict[str, Point] = {}
    for run in runs:
        for name in _statics(run.manifest["replay"]["policies"]):
            found.setdefault(name, _point(run, name))
    return list(found.values())


def _point(run: Run, policy: str) -> Point:
    replay, ours = run.manifest["replay"], policy == OURS
    numbers = {key: float(replay["policies"][policy][key]) for key in _MEASURED}
    return Point(
        run=run.name if ours else "",
        overrides=run.label if ours else "",
        group=" ".join(one for one in run.overrides if not one.startswith(_LAM)) if ours else "",
        policy=policy,
        lam=float(replay["lam"]) if ours else None,
        automatic=ours and run.manifest["config"]["router"]["lam"] == AUTO,
        **numbers,
    )


def curves(points: Sequence[Point]) -> dict[str, list[Point]]:
    """By group those of two points or more, in the order of the price."""
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.group].append(point)
    return {
        group: sorted(members, key=lambda point: point.lam or 0.0)
        for group, members in groups.items()
        if len(members) > 1
    }


def _statics(policies: Mapping[str, Any]) -> list[str]:
    return [name for name in policies if name == "plain" or name.startswith("static_")]


def shift_matrix(runs: Sequence[Run]) -> list[Cell]:
    """By row, what the router was trained on; runs of one row are averaged."""
    rows: dict[str, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=_breadth):
        rows[trained_on(run)].append(run)
    return [cell for row in rows.values() for cell in _row(row)]


def differs_in_training_data(runs: Sequence[Run]) -> bool:
    return len({trained_on(run) for run in runs}) > 1


def trained_on(run: Run) -> str:
    """`json`, `code + json`, `all`, or `all but json`."""
    chosen, left_out = _training_data(run)
    label = "all" if chosen is None else " + ".join(chosen)
    return f"{label} but {' + '.join(left_out)}" if left_out else label


def _training_data(run: Run) -> tuple[list[str] | None, list[str]]:
    config = run.manifest["config"]["router"]
    chosen = config.get("train_on")
    return None if chosen is None else list(chosen), list(config.get("leave_out") or [])


def _breadth(run: Run) -> tuple[bool, bool]:
    """Single categories first, then all, then all but one."""
    chosen, left_out = _training_data(run)
    return bool(left_out), chosen is None


def _row(runs: Sequence[Run]) -> list[Cell]:
    chosen, left_out = _training_data(runs[0])
    found = [_gains(run) for run in runs]
    cells = []
    for tested, (_, best) in found[0].items():
        gains = [gains[tested][0] for gains in found if tested in gains]
        alone = "alone" if chosen == [tested] and not left_out else ""
        relation = "left out" if tested in left_out else alone
        mean = sum(gains) / len(gains)
        cells.append(Cell(trained_on(runs[0]), tested, mean, best, relation, len(gains)))
    return cells


def _gains(run: Run) -> dict[str, tuple[float, str]]:
    """By tested category the router's gain over the best static arm there, and that arm."""
    policies = run.manifest["replay"]["policies"]
    speeds: dict[str, dict[str, float]] = defaultdict(dict)
    for name in (OURS, *_statics(policies)):
        for category, numbers in policies[name]["by_category"].items():
            speeds[category][name] = numbers["tokens_per_s"]
        speeds[EVERYTHING][name] = policies[name]["tokens_per_s"]
    last = speeds.pop(EVERYTHING)
    return {tested: _gain(one) for tested, one in [*speeds.items(), (EVERYTHING, last)]}


def _gain(speeds: Mapping[str, float]) -> tuple[float, str]:
    best = max((name for name in speeds if name != OURS), key=speeds.__getitem__)
    return speeds[OURS] / speeds[best] - 1.0, best
