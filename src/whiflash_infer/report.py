"""The evaluation as one HTML file that needs nothing else: numbers, plots and a round viewer.

Tables and plots are drawn here, so they are there without scripts. Only the viewer needs its
script: it reads the rounds from JSON inside the page and shows one answer at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whiflash_infer.types import AR, DIFFUSION, PHASES, PLAIN

_PROMPT = "prompt"  # the arm of the token that the prompt pass yields
_SHARES_OF_TIME = (*PHASES, "host")
_ROUND_FIELDS = ("drafted", "accepted", "committed", "lag", "ms", "context", "reason")

# Numbers of the colours in the template (`paint-N`); the names not listed here share the rest.
_PAINTS = range(8)
_ARM_PAINTS = {AR: 0, DIFFUSION: 1, PLAIN: 2, _PROMPT: 3}
_POLICY_PAINTS = {
    f"static_{AR}": 0,
    f"static_{DIFFUSION}": 1,
    PLAIN: 2,
    "entropy": 4,
    "hazard": 5,
}

# JSON leaves these as they are. "<" could end the script element or open a comment in it.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\x7f"}


def write_report(path: Path, metrics: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """Render the report. A reader sees the old file or the new one, never half of it."""
    page = _environment().get_template("report.html").render(_view(metrics, answers))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    # A name with half of a surrogate pair is no UTF-8; the browser shows the reference as U+FFFD.
    partial.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    partial.replace(path)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("whiflash_infer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "percent": _percent}
    environment.tests["finite"] = _is_finite
    return environment


def _view(metrics: dict[str, Any], answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What the template shows, by the names it uses."""
    policies = metrics["policies"]
    cells = list(_cells(policies))
    arms = _arms(cells, answers)
    policy_paints = _paints(policies, _POLICY_PAINTS)
    return {
        "header": metrics["header"],
        "facts": [(_words(key), _fact(value)) for key, value in metrics["header"].items()],
        "policies": policies,
        "categories": _distinct(c for entry in policies.values() for c in entry["by_category"]),
        "arms": [arm for arm in arms if arm != _PROMPT],
        "phases": _SHARES_OF_TIME,
        "baseline": PLAIN,
        "arm_paints": _paints(arms, _ARM_PAINTS),
        "policy_paints": policy_paints,
        "axis": _speedup_axis(cells),
        "slots": [_slot_plot(arm, policies, policy_paints) for arm in _drafting_arms(policies)],
        "has_answers": bool(answers),
        "data": _script_json(_viewer_data(answers, _paints(arms, _ARM_PAINTS))),
    }


# ---- names and colours ----


def _cells(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in policies.values():
        yield entry["overall"]
        yield from entry["by_category"].values()


def _arms(cells: Iterable[dict[str, Any]], answers: Iterable[dict[str, Any]]) -> list[str]:
    """Every arm that appears anywhere, the known ones first."""
    seen = {arm for cell in cells for arm in cell["arm_ratio"]}
    for answer in answers:
        seen |= {entry["arm"] for rounds in answer["policies"].values() for entry in rounds}
    known = [arm for arm in _ARM_PAINTS if arm in seen]
    return [*known, *sorted(seen.difference(known))]


def _drafting_arms(policies: Mapping[str, Any]) -> list[str]:
    return _distinct(
        arm
        for entry in policies.values()
        for arm, shares in entry["overall"]["acceptance_by_slot"].items()
        if shares
    )


def _paints(names: Iterable[str], known: Mapping[str, int]) -> dict[str, int]:
    spare = cycle(sorted(set(_PAINTS[4:]).difference(known.values())))
    return {name: known[name] if name in known else next(spare) for name in names}


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# ---- numbers as text ----


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any, digits: int = 2) -> str:
    return f"{value:,.{digits}f}" if _is_finite(value) else "n/a"


def _percent(share: Any, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%" if _is_finite(share) else "n/a"


def _words(key: str) -> str:
    return key.replace("_", " ")


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_fact(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_fact(inner) for inner in value)
    return str(value)


# ---- plots ----


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    ticks: list[float]

    def place(self, value: float) -> str:
        """Where the value lies, as a percentage of the axis."""
        return f"{100 * (value - self.low) / (self.high - self.low):.2f}%"


def _speedup_axis(cells: Iterable[dict[str, Any]]) -> _Axis:
    """One scale for all categories, wide enough for every interval and for 1.0."""
    values = [v for cell in cells for v in (cell["speedup"], *cell["speedup_ci"])]
    values = [1.0, *filter(_is_finite, values)]
    span = max(max(values) - min(values), 0.1)
    step = next((s for s in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if span / s <= 4), span / 4)
    first = math.floor(min(values) / step - 0.15)
    last = math.ceil(max(values) / step + 0.15)
    ticks = [round(i * step, 6) for i in range(first, last + 1)]
    return _Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


@dataclass(frozen=True, slots=True)
class _SlotCurve:
    policy: str
    paint: int
    shares: list[float]
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _SlotPlot:
    """Acceptance of one arm. The positions are those of an SVG of 360 x 190."""

    arm: str
    slots: list[tuple[int, float]]
    levels: list[tuple[float, float]]
    curves: list[_SlotCurve]


def _slot_plot(
    arm: str, policies: Mapping[str, Any], policy_paints: Mapping[str, int]
) -> _SlotPlot:
    shares = {
        policy: entry["overall"]["acceptance_by_slot"].get(arm)
        for policy, entry in policies.items()
    }
    drawn = {policy: found for policy, found in shares.items() if found}
    count = max(len(found) for found in drawn.values())
    across = [_between(48.0, 344.0, (i + 0.5) / count) for i in range(count)]
    curves = [
        _SlotCurve(policy, policy_paints[policy], found, _points(across, found))
        for policy, found in drawn.items()
    ]
    return _SlotPlot(
        arm=arm,
        slots=list(enumerate(across, start=1)),
        levels=[(level, _height(level)) for level in (0.0, 0.25, 0.5, 0.75, 1.0)],
        curves=curves,
    )


def _points(across: list[float], shares: list[float]) -> list[tuple[float, float]]:
    pairs = zip(across, shares, strict=False)
    return [(x, _height(share)) for x, share in pairs if _is_finite(share)]


def _height(share: float) -> float:
    return _between(150.0, 10.0, share)


def _between(start: float, end: float, share: float) -> float:
    return round(start + share * (end - start), 1)


# ---- data of the round viewer ----


def _viewer_data(answers: Iterable[dict[str, Any]], paints: Mapping[str, int]) -> dict[str, Any]:
    """Rounds become short lists, for there are tens of thousands of them."""
    arms = list(paints)
    return {
        "fields": _ROUND_FIELDS,
        "arms": [[arm, paint] for arm, paint in paints.items()],
        "answers": [
            {
                "id": answer["prompt_id"],
                "category": answer["category"],
                "prompt": answer["prompt"],
                "policies": [
                    [policy, [_viewer_round(entry, arms) for entry in rounds]]
                    for policy, rounds in answer["policies"].items()
                ],
            }
            for answer in answers
        ],
    }


def _viewer_round(entry: Mapping[str, Any], arms: list[str]) -> list[Any]:
    values = [_viewer_value(entry[field]) for field in _ROUND_FIELDS]
    return [entry["text"], arms.index(entry["arm"]), *values]


def _viewer_value(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 3) if math.isfinite(value) else None


def _script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: nothing in it can end the element.

    It is all ASCII, so line separators, control characters and half surrogate pairs are escapes.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.translate(_ESCAPES))
