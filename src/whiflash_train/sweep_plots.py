"""The pictures of a sweep: PNG to look at, HTML to look into."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from whiflash_train.sweep_results import Cell, Point, curves

# Okabe and Ito's colours, which the colour-blind tell apart.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY, _INK = "#8a8a8a", "#222222"
_TITLE = "Trade-off of the router: tokens and time of a round"
_X, _Y = "time of a round (ms)", "tokens per round"
_SPEED = "tokens/s"
_CONFIG = {
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],  # none that sends data off
}
_DASHES = (0, (4, 4))
_MATRIX_TITLE = "Gain of the router over the best static arm there (%)"
_FRAMES = "solid frame: trained on this category alone; dashed frame: this category left out"
_MANY = 14  # points; beyond it only the best one is named, and they are drawn smaller
_PLACES = [
    (x * far, y * far)
    for far in (1.0, 1.6, 2.4, 3.4)
    for x, y in ((8, -14), (-8, 7), (8, 7), (-8, -14), (0, 11), (0, -19))
]


def curve_png(points: Sequence[Point], references: Sequence[Point]) -> bytes:
    figure = Figure(figsize=(10, 6.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    everything = [*points, *references]
    left, right, low, high = window = _window(everything)
    axes.set(xlim=(left, right), ylim=(low, high))
    axes.set_xlabel(_X, fontsize=12)
    axes.set_ylabel(_Y, fontsize=12)
    axes.set_title(_TITLE, fontsize=13, pad=26)
    _draw_levels(axes, _levels(everything), window)
    level = Line2D([], [], color=_GREY, linewidth=0.8, linestyle=_DASHES, label="equal throughput")
    handles = [*_draw_curves(axes, points), *_draw_points(axes, points, references), level]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=10)
    figure.draw_without_rendering()
    _name_points(axes, points, references)
    return _as_png(figure)


def _window(points: Sequence[Point]) -> tuple[float, float, float, float]:
    """Left, right, low and high of a picture that holds all points with room for their names."""
    x = [_milliseconds(p) for p in points]
    y = [p.tau for p in points]
    across = max(max(x) - min(x), 0.05 * max(x))
    up = max(max(y) - min(y), 0.05 * max(y))
    left, low = max(min(x) - 0.16 * across, 0.0), max(min(y) - 0.16 * up, 0.0)
    return left, max(x) + 0.22 * across, low, max(y) + 0.16 * up


def _milliseconds(point: Point) -> float:
    return 1000.0 * point.seconds_per_round


def _levels(points: Sequence[Point]) -> list[float]:
    """Round throughputs, tokens a second, around those of the points."""
    speeds = [p.tokens_per_s for p in points]
    least, most = 0.85 * min(speeds), 1.15 * max(speeds)
    ticks = MaxNLocator(nbins=8, steps=[1, 2, 5, 10]).tick_values(least, most)
    return [float(t) for t in ticks if t > 0]


def _crosses(level: float, window: tuple[float, float, float, float]) -> bool:
    left, right, low, high = window
    return low / right < level / 1000 and level * left / 1000 < high


def _end(level: float, window: tuple[float, float, float, float]) -> tuple[float, float, bool]:
    """Where the line of a throughput leaves the picture, and whether at the top."""
    _, right, _, high = window
    top = level * right / 1000 > high
    return (1000 * high / level, high, True) if top else (right, level * right / 1000, False)


def _draw_levels(
    axes: Axes, levels: Sequence[float], window: tuple[float, float, float, float]
) -> None:
    shown = [level for level in levels if _crosses(level, window)]
    for level in shown:
        x, y, top = _end(level, window)
        axes.plot([0, x], [0, y], color=_GREY, linewidth=0.8, linestyle=_DASHES, zorder=1)
        axes.annotate(
            f"{level:g} {_SPEED}" if level == shown[0] else f"{level:g}",
            (x, y),
            xytext=(0, 4) if top else (4, 0),
            textcoords="offset points",
            ha="center" if top else "left",
            va="bottom" if top else "center",
            fontsize=9,
            color="#555555",
            annotation_clip=False,
        )


def _draw_curves(axes: Axes, points: Sequence[Point]) -> list[Line2D]:
    """Lines of growing price; where there are several, each has a colour and a name."""
    lines = curves(points)
    handles = []
    for index, (group, members) in enumerate(lines.items()):
        color = _LINES[index % len(_LINES)] if len(lines) > 1 else _INK
        (line,) = axes.plot(
            [_milliseconds(p) for p in members],
            [p.tau for p in members],
            color=color,
            linewidth=1.6,
            zorder=2,
            label=_shortened(group) or "growing price",
        )
        handles.append(line)
    return handles


def _shortened(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _draw_points(axes: Axes, points: Sequence[Point], references: Sequence[Point]) -> list[Line2D]:
    kinds = {
        "router, fixed price": ("o", 90, [p for p in points if not p.automatic]),
        "router, automatic price": ("*", 380, [p for p in points if p.automatic]),
        "static arm": ("s", 80, list(references)),
    }
    speeds = [p.tokens_per_s for p in (*points, *references)]
    scale = 1.0 if len(points) <= _MANY else 0.4
    handles, drawn = [], None
    for label, (marker, size, members) in kinds.items():
        if not members:
            continue
        drawn = axes.scatter(
            [_milliseconds(p) for p in members],
            [p.tau for p in members],
            c=[p.tokens_per_s for p in members],
            cmap="viridis",
            vmin=min(speeds),
            vmax=max(speeds),
            s=scale * size,
            marker=marker,
            edgecolors="black",
            linewidths=0.9,
            zorder=4 if marker == "*" else 3,
        )
        look: dict[str, Any] = {"color": "none", "markeredgecolor": "black", "marker": marker}
        handles.append(Line2D([], [], markersize=13 if marker == "*" else 8, label=label, **look))
    if drawn is not None and axes.figure is not None:
        bar = axes.figure.colorbar(drawn, ax=axes, pad=0.02, fraction=0.04)
        bar.set_label(f"throughput ({_SPEED})", fontsize=12)
    return handles


def _names(points: Sequence[Point], references: Sequence[Point]) -> list[tuple[Point, str]]:
    """What is written beside points, the most important first."""
    ordered = sorted(points, key=lambda p: -p.tokens_per_s)
    statics = [(p, p.policy) for p in references]
    if len(points) > _MANY:
        return [(ordered[0], f"best: run {ordered[0].run}"), *statics]
    alone = sum(p.automatic for p in points) == 1
    return [*((p, _name(p, alone=alone)) for p in ordered), *statics]


def _name(point: Point, *, alone: bool) -> str:
    """By its price; of several automatic ones, which differ in something else, by its run."""
    if point.automatic:
        return f"auto ({point.lam:.3g})" if alone else f"auto, run {point.run}"
    return f"lam {point.lam:.3g}"


def _name_points(axes: Axes, points: Sequence[Point], references: Sequence[Point]) -> None:
    """Write each name where it hides no point, line or other name; nowhere if there is no room."""
    taken = _marks(axes, [*points, *references], 20.0)
    for members in curves(points).values():
        taken += _marks(axes, _between(members), 8.0)
    frame = axes.get_window_extent()
    for point, name in _names(points, references):
        for offset in _PLACES:
            text = _write(axes, point, name, offset)
            box = text.get_window_extent()
            inside = all(frame.contains(x, y) for x, y in box.corners())
            if inside and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()


def _between(members: Sequence[Point], parts: int = 24) -> list[Point]:
    """Points along the lines between points."""
    found = []
    for a, b in pairwise(members):
        up, across = b.tau - a.tau, b.seconds_per_round - a.seconds_per_round
        for t in np.linspace(0.0, 1.0, parts).tolist():
            at = a.seconds_per_round + t * across
            found.append(replace(a, tau=a.tau + t * up, seconds_per_round=at))
    return found


def _marks(axes: Axes, points: Sequence[Point], size: float) -> list[Bbox]:
    """Pixels that the points take."""
    centres = axes.transData.transform([(_milliseconds(p), p.tau) for p in points])
    return [Bbox.from_bounds(x - size / 2, y - size / 2, size, size) for x, y in centres]


def _write(axes: Axes, point: Point, name: str, offset: tuple[float, float]) -> Annotation:
    sides = {1: "left", 0: "center", -1: "right"}
    return axes.annotate(
        name,
        (_milliseconds(point), point.tau),
        xytext=offset,
        textcoords="offset points",
        ha=sides[int(np.sign(offset[0]))],
        fontsize=10.5,
        color=_INK,
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
    )


def _as_png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def curve_html(points: Sequence[Point], references: Sequence[Point]) -> str:
    figure = go.Figure()
    everything = [*points, *references]
    left, right, low, high = window = _window(everything)
    for level in _levels(everything):
        if _crosses(level, window):
            _add_level(figure, level, window)
    _add_curves(figure, points)
    names = dict(_names(points, references))
    fixed, automatic = [[p for p in points if p.automatic is kind] for kind in (False, True)]
    _add_points(figure, fixed, names, kind="router, fixed price", symbol="circle")
    _add_points(figure, automatic, names, kind="router, automatic price", symbol="star")
    _add_points(figure, references, names, kind="static arm", symbol="square")
    bar = {"title": {"text": f"throughput ({_SPEED})", "side": "right"}, "x": 1.08}
    figure.update_layout(coloraxis={"colorscale": "Viridis", "colorbar": bar})
    figure.update_xaxes(title_text=_X, range=[left, right])
    figure.update_yaxes(title_text=_Y, range=[low, high])
    return _as_html(figure, _TITLE)


def _add_curves(figure: go.Figure, points: Sequence[Point]) -> None:
    lines = curves(points)
    for index, (group, members) in enumerate(lines.items()):
        color = _LINES[index % len(_LINES)] if len(lines) > 1 else _INK
        figure.add_scatter(
            x=[_milliseconds(p) for p in members],
            y=[p.tau for p in members],
            mode="lines",
            line={"color": color, "width": 2},
            name=html.escape(group) or "growing price",
            hoverinfo="skip",
        )


def _add_level(figure: go.Figure, level: float, window: tuple[float, float, float, float]) -> None:
    x, y, top = _end(level, window)
    figure.add_scatter(
        x=[0, x],
        y=[0, y],
        mode="lines",
        line={"color": _GREY, "width": 1, "dash": "dash"},
        hoverinfo="skip",
        showlegend=False,
    )
    figure.add_annotation(
        x=x,
        y=y,
        text=f"{level:g} {_SPEED}",
        showarrow=False,
        xanchor="center" if top else "left",
        yanchor="bottom" if top else "middle",
        font={"color": "#555555", "size": 11},
    )


def _add_points(
    figure: go.Figure,
    points: Sequence[Point],
    names: Mapping[Point, str],
    *,
    kind: str,
    symbol: str,
) -> None:
    if not points:
        return
    figure.add_scatter(
        x=[_milliseconds(p) for p in points],
        y=[p.tau for p in points],
        mode="markers+text",
        text=[html.escape(names.get(p, "")) for p in points],
        textposition="bottom right",
        hovertext=[_hover(p) for p in points],
        hoverinfo="text",
        name=kind,
        marker={
            "symbol": symbol,
            "size": 20 if symbol == "star" else 13,
            "color": [p.tokens_per_s for p in points],
            "coloraxis": "coloraxis",
            "line": {"color": "black", "width": 1},
        },
    )


def _hover(point: Point) -> str:
    """Lines of a tooltip; what the user typed is shown as typed."""
    lines = [f"<b>{html.escape(f'run {point.run}' if point.run else point.policy)}</b>"]
    lines += [html.escape(word) for word in point.overrides.split()]
    if point.lam is not None:
        lines.append(f"lam {point.lam:.4g}{' (automatic)' if point.automatic else ''}")
    lines += [
        f"{point.tokens_per_s:.2f} {_SPEED}",
        f"{point.tau:.3f} tokens and {_milliseconds(point):.2f} ms a round",
        f"{point.switches_per_100_rounds:.1f} switches in 100 rounds",
    ]
    return "<br>".join(lines)


def _as_html(figure: go.Figure, title: str) -> str:
    """A page that needs nothing from the network."""
    figure.update_layout(
        title={"text": title, "x": 0.5},
        template="simple_white",
        legend={"orientation": "h", "y": -0.16, "x": 0.5, "xanchor": "center"},
        margin={"t": 90, "r": 120},
    )
    return figure.to_html(include_plotlyjs=True, config=_CONFIG)


def matrix_png(cells: Sequence[Cell]) -> bytes:
    rows, columns, gains = _table(cells)
    figure = Figure(figsize=(3.4 + 1.15 * len(columns), 2.3 + 0.52 * len(rows)), dpi=150)
    figure.set_layout_engine("constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = _most(gains)
    drawn = axes.imshow(100 * gains, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=11)
    axes.set_yticks(range(len(rows)), rows, fontsize=11)
    axes.set_xlabel("tested on", fontsize=12)
    axes.set_ylabel("router trained on", fontsize=12)
    axes.set_title(_MATRIX_TITLE, fontsize=12)
    for row, column in np.argwhere(np.isfinite(gains)):
        gain = 100 * gains[row, column]
        ink = "white" if abs(gain) > 0.62 * most else "black"
        axes.text(column, row, f"{gain:+.1f}", ha="center", va="center", color=ink, fontsize=11)
    for cell in cells:
        if cell.relation:
            _frame(axes, rows.index(cell.trained_on), columns.index(cell.tested_on), cell.relation)
    figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.03).set_label("gain (%)", fontsize=12)
    figure.supxlabel(_FRAMES, fontsize=9.5, color="#555555")
    return _as_png(figure)


def _frame(axes: Axes, row: int, column: int, relation: str) -> None:
    """Black on white, which shows on every colour."""
    dashes = "-" if relation == "alone" else (0, (3, 2))
    for color, width, style in (("white", 5, "-"), ("black", 2, dashes)):
        corner = (column - 0.46, row - 0.44)
        look: dict[str, Any] = {"edgecolor": color, "linewidth": width, "linestyle": style}
        axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, **look))


def _table(cells: Sequence[Cell]) -> tuple[list[str], list[str], np.ndarray]:
    """Names of rows and columns, and gains; a number is missing where nothing was tested."""
    rows = list(dict.fromkeys(cell.trained_on for cell in cells))
    columns = list(dict.fromkeys(cell.tested_on for cell in cells))
    gains = np.full((len(rows), len(columns)), np.nan)
    for cell in cells:
        gains[rows.index(cell.trained_on), columns.index(cell.tested_on)] = cell.gain
    return rows, columns, gains


def _most(gains: np.ndarray) -> float:
    """Per cent at both ends of the colours, so that white is no gain."""
    return max(1.0, 100 * float(np.nanmax(np.abs(gains))))


def matrix_html(cells: Sequence[Cell]) -> str:
    rows, columns, gains = _table(cells)
    most = _most(gains)
    told = {(c.trained_on, c.tested_on): f"best static arm: {c.best_static}" for c in cells}
    heat = go.Heatmap(
        z=100 * gains,
        x=[html.escape(c) for c in columns],
        y=[html.escape(r) for r in rows],
        zmin=-most,
        zmax=most,
        colorscale="PuOr",
        texttemplate="%{z:+.1f}",
        text=[[html.escape(told.get((r, c), "")) for c in columns] for r in rows],
        hovertemplate=(
            "trained on %{y}<br>tested on %{x}<br>%{z:+.2f} %<br>%{text}<extra></extra>"
        ),
        colorbar={"title": {"text": "gain (%)"}},
    )
    figure = go.Figure(heat)
    for cell in cells:
        if cell.relation:
            x, y = columns.index(cell.tested_on), rows.index(cell.trained_on)
            _add_frame(figure, x, y, "solid" if cell.relation == "alone" else "dash")
    figure.update_xaxes(title_text="tested on")
    figure.update_yaxes(title_text="router trained on", autorange="reversed")
    return _as_html(figure, f"{_MATRIX_TITLE}<br><sub>{_FRAMES}</sub>")


def _add_frame(figure: go.Figure, column: int, row: int, dash: str) -> None:
    corners = {"x0": column - 0.46, "x1": column + 0.46, "y0": row - 0.44, "y1": row + 0.44}
    for color, width, style in (("white", 7, "solid"), ("black", 3, dash)):
        line = {"color": color, "width": width, "dash": style}
        figure.add_shape(
            type="rect", **corners, line=line, opacity=1.0, fillcolor="rgba(0, 0, 0, 0)"
        )
