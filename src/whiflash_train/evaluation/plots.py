"""The plots of an evaluation, drawn once: SVG for the report, PNG beside it."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from whiflash_infer.report import LIGHT, SHARES_OF_TIME, arm_paints, policy_paints, visible
from whiflash_infer.types import PLAIN

_WIDTH = 4.6  # inches; with the page's margin it fits a screen of 480 px
_ROW = 0.21  # inches of a row that holds a mark
_STRIP = 0.42  # of a row that holds a histogram
_TALL = 0.72  # share of a row that a histogram takes
_FEW_BINS = 8  # of a histogram, that can be named by both ends
_LONG = 24  # characters of a name
_MARKERS = "sDo*^ovPsDX*^pvh"  # by paint, as MARKS in the report
_HOLLOW = {2, 8, 9, 11, 12, 14}
_HATCHES = {0: "", 1: "///", 2: "...", 8: "\\\\\\", 9: "xxx"}
_PHASE_HATCHES = dict(
    zip(SHARES_OF_TIME, ("xxxx", "....", "////", "", "\\\\\\\\", "----"), strict=True)
)
_STYLE: Any = {
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.edgecolor": LIGHT["rule"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.linewidth": 0.7,
    "figure.facecolor": LIGHT["page"],
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "text.color": LIGHT["text"],
    "text.parse_math": False,
    "xtick.color": LIGHT["rule"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.color": LIGHT["rule"],
    "ytick.labelcolor": LIGHT["text"],
    "svg.fonttype": "none",
}
_VARIABLES = {colour: name for name, colour in LIGHT.items()}
_FONT = re.compile(r" font-family:[^;]*;")  # the page's font is inherited
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_GEOMETRY = {"d", "x", "y", "width", "height", "transform"}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def draw_all(metrics: Mapping[str, Any]) -> dict[str, Figure]:
    """By name, which is that of the PNG too. A plot without numbers is left out.

    Each figure's label is its title.
    """
    drawn: dict[str, Figure] = {}
    with rc_context(_STYLE):
        for draw in (_speedups, _gains, _tradeoff, _time_split, _slots, _along):
            for wanted, figure in draw(metrics):
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # once is enough for both kinds of file
                drawn[_free_name(wanted, drawn)] = figure
    return drawn


def as_svg(figure: Figure, title: str) -> str:
    """An <svg> element to stand inside a page. Its colours are the page's CSS variables.

    Its ids start with a hash of the title, so figures in one page need titles of their own.
    """
    buffer = io.StringIO()
    with rc_context(_STYLE | {"svg.hashsalt": title}), _any_glyph():
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ElementTree.fromstring(buffer.getvalue())
    _clean(root)
    digest = hashlib.sha256(title.encode(errors="replace")).hexdigest()
    _rename_ids(root, f"p{digest[:8]}")
    root.attrib |= {"class": "plot", "role": "img", "aria-label": visible(title)}
    root.attrib["style"] = (
        "stroke-linejoin: round; stroke-linecap: butt; font-family: system-ui, sans-serif"
    )
    return ElementTree.tostring(root, encoding="unicode")


def as_svgs(figures: Mapping[str, Figure]) -> dict[str, str]:
    return {name: as_svg(figure, str(figure.get_label())) for name, figure in figures.items()}


def write_pngs(figures: Mapping[str, Figure], folder: Path) -> None:
    """In place of those of an evaluation before."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    with rc_context(_STYLE), _any_glyph():
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", dpi=160)


# ---- SVG ----


def _any_glyph() -> warnings.catch_warnings:
    """Names may hold characters that the font of the PNG lacks; it draws a box for them."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _clean(root: ElementTree.Element) -> None:
    """Without name spaces, metadata and rules for the whole page; with the page's colours."""
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
        element.tail = None
        if element.tag != "text":
            element.text = None
        for key in _GEOMETRY & element.attrib.keys():
            value = " ".join(element.attrib[key].split())
            element.attrib[key] = _LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}", value)
        _use_variables(element)


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _use_variables(element: ElementTree.Element) -> None:
    style = element.attrib.get("style", "")
    for key in ("fill", "stroke"):  # as attributes they could not name variables
        if element.attrib.get(key, "").startswith("#"):
            style = f"{key}: {element.attrib.pop(key)}; {style}"
    if style:
        element.attrib["style"] = _COLOUR.sub(_variable, _FONT.sub("", style))


def _variable(found: re.Match[str]) -> str:
    colour = found[0]
    return f"var(--{_VARIABLES[colour]}, {colour})" if colour in _VARIABLES else colour


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Short ids that no other figure has, and only those that something refers to."""
    used = _references(root)
    names = {old: f"{prefix}-{number}" for number, old in enumerate(sorted(used))}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                element.attrib.pop(key)
                if value in names:
                    element.attrib[key] = names[value]
            elif key == "href":
                element.attrib[key] = f"#{names[value[1:]]}"
            elif "url(#" in value:
                element.attrib[key] = _REFERENCE.sub(lambda m: f"url(#{names[m[1]]})", value)


def _references(root: ElementTree.Element) -> set[str]:
    values = [(key, value) for element in root.iter() for key, value in element.attrib.items()]
    linked = {value[1:] for key, value in values if key == "href"}
    return linked.union(*(_REFERENCE.findall(value) for _, value in values))


# ---- names and numbers ----


def _label(name: str) -> str:
    """A name as a plot shows it: one line, not too long, control characters as signs."""
    shown = visible(name)
    shown = shown if len(shown) <= _LONG else f"{shown[: _LONG - 1]}…"
    # matplotlib leaves names that start with "_" out of a legend
    return f"\u200b{shown}" if shown.startswith("_") else shown


def _free_name(wanted: str, taken: Mapping[str, Any]) -> str:
    """The same as a file name, and unlike the others."""
    start, dash, rest = wanted.partition("-")
    slug = re.sub(r"[^A-Za-z0-9_]+", "_", rest).strip("_")[:60]
    base = f"{start}{dash}{slug}"
    names = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def _value(value: Any) -> float:
    """nan for what is undefined, which matplotlib leaves out."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def _known(values: Iterable[Any]) -> list[float]:
    return [v for v in map(_value, values) if not math.isnan(v)]


def _paints(metrics: Mapping[str, Any]) -> dict[str, int]:
    ablated = [row["policy"] for row in metrics.get("ablation") or []]
    return policy_paints(dict.fromkeys([*metrics["policies"], *ablated]))


def _overall(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: entry["overall"] for name, entry in metrics["policies"].items()}


def _routed(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of the policies that used more than one arm."""
    return {name: cell for name, cell in _overall(metrics).items() if len(cell["arm_ratio"]) > 1}


def _arm_paints(metrics: Mapping[str, Any]) -> dict[str, int]:
    return arm_paints(arm for cell in _overall(metrics).values() for arm in cell["arm_ratio"])


# ---- parts of figures ----


def _figure(title: str, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.set_label(title)
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
    axes = figure.add_subplot()
    axes.tick_params(length=2.5)
    axes.set_axisbelow(True)
    return figure, axes


def _mark(paint: int) -> dict[str, Any]:
    colour = LIGHT[f"c{paint % 8}"]
    return {
        "color": colour,
        "marker": _MARKERS[paint],
        "markersize": 7.5 if _MARKERS[paint] == "*" else 5.5,
        "markerfacecolor": LIGHT["page"] if paint in _HOLLOW else colour,
        "markeredgewidth": 1.2,
    }


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names down the left side, the first on top; they have no ticks."""
    axes.set_yticks(range(len(names)), [_label(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.spines["left"].set_visible(False)


def _intervals(axes: Axes, row: float | int, triple: Sequence[Any], paint: int) -> None:
    """value, low, high"""
    value, low, high = map(_value, triple)
    axes.plot([low, high], [row, row], color=LIGHT[f"c{paint % 8}"], linewidth=1.6)
    axes.plot([value], [row], linestyle="none", **_mark(paint))


def _line_at_one(axes: Axes) -> None:
    axes.axvline(1.0, color=LIGHT["rule"], linewidth=1.0, zorder=0.5)
    axes.grid(axis="x")


def _window(values: Iterable[Any], least: float = 0.1) -> tuple[float, float]:
    known = _known(values)
    low, high = min(known), max(known)
    margin = max(0.06 * (high - low), (least - (high - low)) / 2, 0.02 * abs(high))
    return low - margin, high + margin


def _columns(entries: int) -> int:
    return 2 if entries in (2, 4) else 3


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=_columns(len(handles)),
        fontsize=8,
        handlelength=1.4,
        columnspacing=1.2,
        handletextpad=0.5,
    )


def _policy_handles(paints: Mapping[str, int], *, line: bool) -> list[Line2D]:
    style = "-" if line else "none"
    return [
        Line2D([], [], label=_label(name), linestyle=style, linewidth=1.2, **_mark(paint))
        for name, paint in paints.items()
    ]


def _legend_height(entries: int) -> float:
    return 0.19 * math.ceil(entries / _columns(entries)) + 0.1


# ---- the plots ----

_Named = Iterator[tuple[str, Figure]]


def _speedups(metrics: Mapping[str, Any]) -> _Named:
    """One figure for all prompts and one for each category, all of one scale."""
    policies, paints = metrics["policies"], _paints(metrics)
    columns = {"all": _overall(metrics)}
    for category in dict.fromkeys(c for entry in policies.values() for c in entry["by_category"]):
        columns[f"-{category}"] = {
            name: entry["by_category"][category]
            for name, entry in policies.items()
            if category in entry["by_category"]
        }
    drafting = [{n: c for n, c in cells.items() if n != PLAIN} for cells in columns.values()]
    shown = [v for cells in drafting for c in cells.values() for v in (c["speedup"], *_pair(c))]
    if not _known(shown):
        return
    window = _window([1.0, *shown])
    single = len(columns) == 2  # then the only category says what all prompts say
    for name, cells in list(columns.items())[: 1 if single else None]:
        title = "All prompts" if name == "all" else _label(name[1:])
        yield f"speedup-{name.removeprefix('-')}", _speedup(title, cells, paints, window)


def _pair(cell: Mapping[str, Any]) -> tuple[Any, Any]:
    low, high = cell["speedup_ci"]
    return low, high


def _speedup(
    title: str,
    cells: Mapping[str, Any],
    paints: Mapping[str, int],
    window: tuple[float, float],
) -> Figure:
    drawn = [name for name in cells if name != PLAIN]
    figure, axes = _figure(f"Speed-up: {title}", _ROW * len(drawn) + 0.85)
    _line_at_one(axes)
    for row, name in enumerate(drawn):
        value = _value(cells[name]["speedup"])
        _intervals(axes, row, (value, *cells[name]["speedup_ci"]), paints[name])
        axes.text(
            1.01, row, "n/a" if math.isnan(value) else f"{value:.2f}\u00d7", ha="left", va="center",
            transform=axes.get_yaxis_transform(), color=LIGHT["muted"],
        )  # fmt: skip
    _name_rows(axes, drawn)
    axes.set_xlim(*window)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    plain = cells.get(PLAIN, {}).get("tokens_per_s")
    pace = "" if plain is None else f" ({_value(plain):.1f} tokens/s)"
    axes.set_xlabel(f"times {PLAIN} decoding{pace}")
    return figure


def _gains(metrics: Mapping[str, Any]) -> _Named:
    """Of each policy, one figure: rows are categories, marks are the static arms."""
    paints = policy_paints(
        dict.fromkeys(arm for against in (metrics.get("gains") or {}).values() for arm in against)
    )
    for policy, against in (metrics.get("gains") or {}).items():
        rows = {"all prompts": {arm: found["overall"] for arm, found in against.items()}}
        for arm, found in against.items():
            for category, triple in found["by_category"].items():
                rows.setdefault(f"-{category}", {})[arm] = triple
        if _known(v for cells in rows.values() for triple in cells.values() for v in triple):
            yield f"gains-{policy}", _gain(policy, rows, {arm: paints[arm] for arm in against})


def _gain(
    policy: str, rows: Mapping[str, Mapping[str, Sequence[Any]]], paints: Mapping[str, int]
) -> Figure:
    height = 0.12 * (len(paints) + 1) * len(rows) + 0.8 + _legend_height(len(paints))
    figure, axes = _figure(f"Gain of {_label(policy)} over static arms", height)
    _line_at_one(axes)
    step = 0.8 / max(len(paints), 1)
    for row, cells in enumerate(rows.values()):
        for number, (arm, paint) in enumerate(paints.items()):
            if arm in cells:
                offset = (number - (len(paints) - 1) / 2) * step
                _intervals(axes, row + offset, cells[arm], paint)
    _name_rows(axes, [name.removeprefix("-") for name in rows])
    axes.hlines(
        np.arange(len(rows) - 1) + 0.5, 0, 1, transform=axes.get_yaxis_transform(),
        color=LIGHT["line"], linewidth=0.7,
    )  # fmt: skip
    values = [v for cells in rows.values() for triple in cells.values() for v in triple]
    axes.set_xlim(*_window([1.0, *values]))
    axes.set_xlabel("tokens/s of the policy over those of the arm")
    _legend(figure, _policy_handles(paints, line=False))
    return figure


def _tradeoff(metrics: Mapping[str, Any]) -> _Named:
    points = {name: _point(cell) for name, cell in _overall(metrics).items()}
    points = {name: point for name, point in points.items() if all(map(math.isfinite, point))}
    if not points:
        return
    every_paint = _paints(metrics)
    paints = {name: every_paint[name] for name in points}
    small = [(row["policy"], _point(row)) for row in metrics.get("ablation") or []]
    small = [(name, point) for name, point in small if all(map(math.isfinite, point))]
    height = 3.2 + _legend_height(len(paints))
    figure, axes = _figure("Tokens and time of a round", height)
    every = [*points.values(), *(point for _, point in small)]
    axes.set_xlim(*_window([x for x, _ in every], 2.0))
    axes.set_ylim(*_window([y for _, y in every], 0.2))
    _levels(axes, every)
    for name, (x, y) in small:
        axes.plot([x], [y], linestyle="none", alpha=0.7, **(_mark(every_paint[name]) | _SMALL))
    for name, (x, y) in points.items():
        axes.plot([x], [y], linestyle="none", **_mark(paints[name]))
    axes.set_xlabel("ms per round" + ("; small marks: ablations" if small else ""))
    axes.set_ylabel("tokens per round")
    _legend(figure, _policy_handles(paints, line=False))
    yield "time-tradeoff", figure


_SMALL: dict[str, Any] = {"markersize": 3.0, "markeredgewidth": 0.7}


def _point(cell: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds and tokens of a round. An ablation has tokens per round and per second."""
    tau, rate = _value(cell["tau"]), _value(cell["tokens_per_s"])
    seconds = _value(cell.get("seconds_per_round"))
    if math.isnan(seconds) and rate > 0:
        seconds = tau / rate
    return 1e3 * seconds, tau


def _levels(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Lines of equal tokens per second, each labelled where it leaves the window."""
    rates = [1e3 * y / x for x, y in points if x > 0]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for rate in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(
        min(rates, default=1.0), max(rates, default=1.0)
    ):
        at_right, leaves_top = rate * right / 1e3, 1e3 * high / rate if rate > 0 else math.inf
        if rate <= 0 or at_right < low or leaves_top < left:
            continue
        axes.plot([left, right], [rate * left / 1e3, at_right], color=LIGHT["line"], linewidth=0.9)
        x, y = (right, at_right) if at_right <= high else (leaves_top, high)
        top = at_right > high
        axes.annotate(
            f"{rate:g}/s", (x, y), xytext=(0, 2) if top else (2, 0),
            textcoords="offset points", ha="center" if top else "left",
            va="bottom" if top else "center", fontsize=7.5, color=LIGHT["muted"],
            annotation_clip=False,
        )  # fmt: skip


def _time_split(metrics: Mapping[str, Any]) -> _Named:
    splits = {name: cell["time_split"] for name, cell in _overall(metrics).items()}
    height = _ROW * len(splits) + 0.85 + _legend_height(len(SHARES_OF_TIME))
    figure, axes = _figure("Share of decoding time", height)
    left = np.zeros(len(splits))
    handles = []
    for phase in SHARES_OF_TIME:
        shares = np.array([_value(split.get(phase, 0.0)) for split in splits.values()])
        style = _fill(LIGHT[phase], _PHASE_HATCHES[phase])
        axes.barh(range(len(splits)), shares, height=0.66, left=left, **style)
        left += np.nan_to_num(shares)
        handles.append(Patch(label=phase.replace("_", "-"), **style))
    _name_rows(axes, list(splits))
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(figure, handles)
    yield "time-split", figure


def _fill(colour: str, hatch: str) -> dict[str, Any]:
    return {"facecolor": colour, "hatch": hatch, "edgecolor": LIGHT["text"], "linewidth": 0.4}


def _slots(metrics: Mapping[str, Any]) -> _Named:
    """One figure an arm: a line for every policy that used it."""
    paints = _paints(metrics)
    found: dict[str, dict[str, list[float]]] = {}
    for policy, cell in _overall(metrics).items():
        for arm, shares in cell["acceptance_by_slot"].items():
            if _known(shares):
                found.setdefault(arm, {})[policy] = [_value(share) for share in shares]
    for arm, curves in found.items():
        height = 2.3 + _legend_height(len(curves))
        figure, axes = _figure(f"Acceptance by slot: {_label(arm)}", height)
        for policy, shares in curves.items():
            slots = range(1, len(shares) + 1)
            axes.plot(slots, shares, linewidth=1.2, **_mark(paints[policy]))
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y")
        axes.set_xlabel("slot of the draft")
        _legend(figure, _policy_handles({p: paints[p] for p in curves}, line=True))
        yield f"slots-{arm}", figure


def _along(metrics: Mapping[str, Any]) -> _Named:
    """Of the policies that choose: their arms along the answer, lags and stretches."""
    routed = _routed(metrics)
    along = {name: cell["arms_along"] for name, cell in routed.items() if cell.get("arms_along")}
    if any(found["shares"] for found in along.values()):
        yield "along-arms", _arms_along(along, _arm_paints(metrics))
    for key, title, axis in (
        ("lags", "Lag of the chosen drafter", "tokens behind when chosen to draft"),
        ("stretches", "Rounds between switches", "rounds that one arm was kept"),
    ):
        counted = {n: c[key] for n, c in routed.items() if sum((c.get(key) or _NONE)["counts"])}
        if counted:
            figure = _histograms(title, axis, counted, _paints(metrics))
            yield f"along-{key}", figure


_NONE: dict[str, list[int]] = {"counts": []}


def _arms_along(along: Mapping[str, Any], paints: Mapping[str, int]) -> Figure:
    height = _STRIP * len(along) + 0.85 + _legend_height(len(paints))
    figure, axes = _figure("Share of the arms along the answer", height)
    for row, found in enumerate(along.values()):
        edges = np.asarray(found["edges"], dtype=float)
        step = np.median(np.diff(edges)) if len(edges) > 1 else 1.0
        widths = np.append(np.diff(edges), step)
        base = np.full(len(edges), row + _TALL / 2)
        for arm, shares in found["shares"].items():
            heights = _TALL * np.nan_to_num([_value(share) for share in shares])
            base = base - heights
            style = _fill(*_arm_fill(paints[arm]))
            axes.bar(edges, heights, widths, bottom=base, align="edge", **style)
    _name_rows(axes, list(along))
    axes.margins(x=0)
    axes.set_xlabel("tokens of the answer before the round")
    handles = [Patch(label=_label(arm), **_fill(*_arm_fill(p))) for arm, p in paints.items()]
    _legend(figure, handles)
    return figure


def _arm_fill(paint: int) -> tuple[str, str]:
    return LIGHT[f"c{paint % 8}"], _HATCHES.get(paint, "++++")


def _histograms(
    title: str, axis: str, counted: Mapping[str, Any], paints: Mapping[str, int]
) -> Figure:
    """A row for each policy: the shares of the bins, of the same height in all rows."""
    figure, axes = _figure(title, _STRIP * len(counted) + 0.85)
    shares = {n: np.divide(found["counts"], sum(found["counts"])) for n, found in counted.items()}
    longest = max(counted.values(), key=lambda found: len(found["edges"]))["edges"]
    tallest = max(float(found.max()) for found in shares.values())
    for row, (name, found) in enumerate(shares.items()):
        heights = 0.62 * _TALL * found / tallest
        colour = LIGHT[f"c{paints[name] % 8}"]
        floor = row + _TALL / 2
        axes.bar(range(len(found)), heights, 0.8, bottom=floor - heights, color=colour)
        axes.axhline(floor, color=LIGHT["line"], linewidth=0.7)
        for bin_, (height, share) in enumerate(zip(heights, found, strict=True)):
            if share:
                axes.text(
                    bin_, floor - height - 0.03, f"{share:.0%}" if share >= 0.005 else "<1%",
                    ha="center", va="bottom", fontsize=7, color=LIGHT["muted"],
                )  # fmt: skip
    _name_rows(axes, list(counted))
    axes.set_ylim(len(counted) - 0.6, -0.6)
    axes.set_xticks(range(len(longest)), _bins(longest))
    axes.set_xlabel(axis if len(longest) <= _FEW_BINS else f"{axis}, at least")
    return figure


def _bins(edges: Sequence[int]) -> list[str]:
    """Where there are many bins, there is room for where each begins only."""
    if len(edges) > _FEW_BINS:
        names = [str(edge) if edge < 1024 else f"{edge // 1024}k" for edge in edges]
        return [*names[:-1], f"{names[-1]}+"]
    names = [str(a) if b == a + 1 else f"{a}\u2013{b - 1}" for a, b in pairwise(edges)]
    return [*names, f"{edges[-1]}+"]
