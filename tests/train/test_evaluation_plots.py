"""The plots of an evaluation show the numbers as they are and names as they are written."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread

from tests.browser.examples import HOSTILE, Page, make_cell, make_metrics, make_optional_parts
from whiflash_infer.report import write_report
from whiflash_train.evaluation.plots import as_svg, as_svgs, draw_all, write_pngs


def make_all() -> dict[str, Any]:
    return make_metrics() | make_optional_parts()


def points(figure: Figure) -> list[tuple[float, float]]:
    """Where marks stand."""
    lines = figure.axes[0].lines
    marked = [line for line in lines if line.get_marker() not in ("None", "", None)]
    return [(float(x), float(y)) for line in marked for x, y in np.asarray(line.get_xydata())]


def bars(figure: Figure) -> list[Any]:
    containers = [c for c in figure.axes[0].containers if isinstance(c, BarContainer)]
    return [bar for container in containers for bar in container]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter("text")]


def test_every_question_has_its_plot():
    assert set(draw_all(make_all())) == {
        "speedup-all",
        "speedup-chat",
        "speedup-code",
        "speedup-creative_writing",
        "gains-hazard",
        "time-tradeoff",
        "time-split",
        "slots-ar",
        "slots-diffusion",
        "along-arms",
        "along-lags",
        "along-stretches",
    }


def test_metrics_of_the_older_format_give_the_plots_that_they_can():
    metrics = make_metrics()
    for entry in metrics["policies"].values():
        for key in ("lags", "stretches", "arms_along", "seconds_per_round"):
            del entry["overall"][key]
    names = set(draw_all(metrics))
    assert {"speedup-all", "time-tradeoff", "time-split", "slots-ar"} <= names
    assert not {"along-arms", "along-lags", "gains-hazard"} & names


def test_a_speed_up_stands_where_its_number_says_with_its_interval():
    metrics = make_metrics(("plain", "static_ar", "hazard"))
    metrics["policies"]["hazard"]["by_category"]["code"] |= {
        "speedup": 3.0,
        "speedup_ci": [2.5, 3.75],
    }
    figure = draw_all(metrics)["speedup-code"]
    assert points(figure) == [(1.4, 0.0), (3.0, 1.0)]
    spans = [line.get_xdata() for line in figure.axes[0].lines if line.get_marker() == "None"]
    assert [2.5, 3.75] in [np.asarray(span).tolist() for span in spans]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "static_ar",
        "hazard",
    ]


def test_all_speed_up_plots_have_one_scale_that_holds_every_interval():
    metrics = make_metrics()
    metrics["policies"]["hazard"]["by_category"]["code"] |= {
        "speedup": 6.0,
        "speedup_ci": [0.5, 9.0],
    }
    figures = draw_all(metrics)
    scales = {figures[name].axes[0].get_xlim() for name in figures if name.startswith("speedup")}
    assert len(scales) == 1
    low, high = scales.pop()
    assert low <= 0.5
    assert high >= 9.0


def test_a_policy_stands_at_the_time_and_tokens_of_its_rounds():
    metrics = make_metrics(("plain", "hazard"))
    metrics["policies"]["plain"]["overall"] |= {"seconds_per_round": 0.045, "tau": 1.0}
    metrics["policies"]["hazard"]["overall"] |= {"seconds_per_round": 0.06, "tau": 2.4}
    metrics["ablation"] = [
        {"policy": "hazard", "tau": 2.0, "tokens_per_s": 25.0},  # 2 / 25 s = 80 ms
    ]
    assert set(points(draw_all(metrics)["time-tradeoff"])) == {(45, 1.0), (60, 2.4), (80, 2.0)}


def test_lines_of_equal_throughput_go_through_points_of_it():
    axes = draw_all(make_metrics())["time-tradeoff"].axes[0]
    levels = [text.get_text() for text in axes.texts]
    assert levels
    firsts = [np.asarray(line.get_xydata())[0] for line in axes.lines]
    slopes = {round(1e3 * float(y) / float(x), 6) for x, y in firsts}
    assert {float(level.removesuffix("/s")) for level in levels} <= slopes


def test_shares_of_time_fill_the_bar_of_each_policy():
    figure = draw_all(make_metrics(("plain", "hazard")))["time-split"]
    for row in (0, 1):
        widths = [b.get_width() for b in bars(figure) if round(b.get_y() + 0.33) == row]
        assert widths == pytest.approx([0.02, 0.08, 0.2, 0.6, 0.05, 0.05])


def test_histograms_are_shares_and_name_their_bins():
    figure = draw_all(make_metrics(("plain", "hazard")))["along-lags"]
    heights = [bar.get_height() for bar in bars(figure)]
    assert [height / heights[0] for height in heights] == pytest.approx([1, 2, 3, 2.5, 1.5])
    names = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert names == ["0", "1", "2\u20133", "4\u20137", "8+"]
    assert [t.get_text() for t in figure.axes[0].texts] == ["10%", "20%", "30%", "25%", "15%"]


def test_arms_along_the_answer_fill_every_bin():
    figure = draw_all(make_metrics(("plain", "hazard")))["along-arms"]
    for left in (0, 8, 16):
        mine = [bar for bar in bars(figure) if bar.get_x() == left]
        assert {bar.get_width() for bar in mine} == {8}
        whole = sum(bar.get_height() for bar in mine)
        assert [bar.get_height() / whole for bar in mine] == pytest.approx([0.5, 0.3, 0.2])


def test_gains_stand_in_the_row_of_their_category():
    figure = draw_all(make_all())["gains-hazard"]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["all prompts", "chat"]
    assert points(figure) == [(1.08, 0.0), (0.97, 1.0)]


def test_undefined_numbers_are_left_out_and_the_rest_is_drawn():
    metrics = make_all()
    metrics["policies"]["hazard"]["overall"] |= {
        "speedup": float("nan"),
        "speedup_ci": [None, float("inf")],
        "tokens_per_s": 0.0,
        "seconds_per_round": None,
        "acceptance_by_slot": {"ar": [0.5, None]},
        "lags": {"edges": [0, 1], "counts": [0, 0]},
    }
    figures = draw_all(metrics)
    assert "n/a" in texts(as_svg(figures["speedup-all"], "x"))
    assert len(as_svgs(figures)) == len(figures)


def test_the_only_category_is_not_drawn_twice():
    names = draw_all(make_metrics(categories=("chat",)))
    assert [name for name in names if name.startswith("speedup")] == ["speedup-all"]


def test_a_name_appears_as_it_is_written():
    names = ("$x_1$", "<b>bold</b>", "_hidden", "a & b", "{{ 7 * 7 }}", "100%")
    metrics = make_metrics(names, (names[0], "other"))
    ratio = [1.0, 0.9, 1.1]
    metrics["gains"] = {
        "hazard": {name: {"overall": ratio, "by_category": {name: ratio}} for name in names}
    }
    figures = draw_all(metrics)
    for plot in ("speedup-all", "gains-hazard", "time-tradeoff", "time-split", "along-lags"):
        shown = texts(as_svg(figures[plot], plot))
        assert set(names) <= {text.removeprefix("\u200b") for text in shown}
    assert f"Speed-up: {names[0]}" in texts(as_svg(figures["speedup-x_1"], "x"))


def test_two_names_that_are_one_as_file_names_keep_two_plots():
    names = list(draw_all(make_metrics(categories=("a/b", "a b", "../a_b"))))
    assert [n for n in names if n.startswith("speedup")] == [
        "speedup-all",
        "speedup-a_b",
        "speedup-a_b-2",
        "speedup-a_b-3",
    ]


def test_hostile_names_add_no_tag_to_the_report(tmp_path: Path):
    def named(name: str) -> Page:
        metrics = make_metrics(("plain", name), (name, "other"))
        cell = make_cell(name)
        cell |= {"arm_ratio": {name: 0.5, "ar": 0.5}, "acceptance_by_slot": {name: [0.5]}}
        cell["arms_along"] = {"edges": [0], "shares": {name: [0.5], "ar": [0.5]}}
        metrics["policies"][name]["overall"] = cell
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            svgs = as_svgs(draw_all(metrics))
        write_report(tmp_path / "report.html", metrics, [], svgs)
        return Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    assert [tag for tag, _ in named(HOSTILE).tags] == [t for t, _ in named("h" * len(HOSTILE)).tags]


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    return as_svgs(draw_all(make_all()))


def test_a_figure_refers_to_its_own_parts_only(svgs: dict[str, str]):
    seen: set[str] = set()
    for svg in svgs.values():
        own = [e.attrib["id"] for e in ElementTree.fromstring(svg).iter() if "id" in e.attrib]
        assert len(own) == len(set(own))
        assert not seen & set(own)
        seen |= set(own)
        named = set(re.findall(r"url\(#([^)]+)\)", svg)) | set(re.findall(r'href="#([^"]+)"', svg))
        assert named == set(own)


def test_an_svg_says_what_it_is():
    figure = draw_all(make_metrics(("plain", "hazard")))["time-split"]
    root = ElementTree.fromstring(as_svg(figure, 'Shares of "time"'))
    assert root.tag == "svg"
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == 'Shares of "time"'


def test_an_svg_stands_alone_and_touches_nothing_else(svgs: dict[str, str]):
    for svg in svgs.values():
        root = ElementTree.fromstring(svg)
        assert "://" not in svg
        assert not {"style", "script", "metadata", "image"} & {e.tag for e in root.iter()}


def test_every_colour_of_an_svg_follows_the_page(svgs: dict[str, str]):
    for svg in svgs.values():
        colours = re.findall(r"(var\(--\w+, )?#[0-9a-f]{6}", svg)
        assert colours
        assert all(colours)


def test_pngs_have_the_names_of_the_plots(tmp_path: Path):
    figures = draw_all(make_metrics(("plain", "hazard")))
    write_pngs(figures, tmp_path / "plots")
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {f"{name}.png" for name in figures}
    height, width, _ = imread(tmp_path / "plots" / "time-split.png").shape
    assert width > height > 200


def test_the_same_metrics_give_the_same_svg(svgs: dict[str, str]):
    assert as_svgs(draw_all(make_all())) == svgs


def test_many_bins_are_named_by_where_they_begin():
    metrics = make_metrics()
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for report in metrics["policies"].values():
        report["overall"]["lags"] = {"edges": edges, "counts": [1] * len(edges)}
    (axes,) = draw_all(metrics)["along-lags"].axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == [*map(str, edges[:-1]), "1k+"]
    assert axes.get_xlabel().endswith("at least")
