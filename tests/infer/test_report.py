"""The report shows every number it is given, stands alone, and runs no text of prompt or model."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser.examples import (
    CATEGORIES,
    HOSTILE,
    POLICIES,
    Page,
    make_answer,
    make_cell,
    make_metrics,
    make_optional_parts,
    make_round,
)
from whiflash_infer.report import DARK, LIGHT, MARKS, policy_paints, write_report


def render(
    folder: Path,
    metrics: dict[str, Any],
    answers: list[dict[str, Any]],
    figures: dict[str, str] | None = None,
) -> Page:
    write_report(folder / "report.html", metrics, answers, figures or {})
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_every_policy_category_and_header_fact_appears(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [make_answer()])
    facts = ("git commit", "ba6eaba", "torch 2.8.0", "counted", "built in eval_small.jsonl")
    for name in (*POLICIES, *CATEGORIES, *facts, "peak process 1,834 MB", "9f31c0d2a7b64e15"):
        assert name in page.text
    assert "peak gpu" not in page.text


def test_the_numbers_of_a_cell_appear_as_text(tmp_path: Path):
    metrics = make_metrics()
    metrics["policies"]["hazard"]["by_category"]["code"] |= {
        "speedup": 3.17,
        "speedup_ci": [2.95, 3.41],
    }
    page = render(tmp_path, metrics, [make_answer()])
    for number in (
        "3.17",
        "2.95",
        "3.41",
        "83.5",
        "12.5",
        "diffusion 30%",
        "60.0%",
        "31.2",
        "3.4%",
        "0.27",
    ):
        assert number in page.text


def test_hostile_text_stays_data_and_comes_back_unchanged(tmp_path: Path):
    rounds = [make_round(HOSTILE, reason=HOSTILE)]
    answer = make_answer(prompt=HOSTILE, policies={"hazard": rounds})
    clean = render(tmp_path, make_metrics(), [make_answer(policies={"hazard": [make_round("x")]})])
    page = render(tmp_path, make_metrics(), [answer])
    assert page.tags == clean.tags
    assert page.text == clean.text
    assert page.scripts["text/javascript"] == clean.scripts["text/javascript"]
    shown = page.data["answers"][0]
    assert shown["prompt"] == HOSTILE
    assert shown["policies"][0][1][0][0] == HOSTILE
    assert round_fields(page, "hazard", 0)["reason"] == HOSTILE


def test_the_embedded_data_is_printable_ascii_without_markup(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [make_answer(prompt=HOSTILE, category=HOSTILE)])
    text = page.scripts["application/json"]
    assert text.isascii()
    assert text.isprintable()
    assert not set("<>&") & set(text)


def test_hostile_names_of_all_sorts_add_no_tag(tmp_path: Path):
    def named(name: str) -> Page:
        metrics, cell = make_metrics(), make_cell("plain")
        cell |= {"arm_ratio": {name: 1.0}, "acceptance_by_slot": {name: [0.5]}}
        cell |= {"fallbacks": {name: 2}}
        metrics["header"] |= {"target": name, "note": name, "versions": {name: name}}
        metrics["policies"][name] = {
            "overall": cell,
            "by_category": {name: cell},
            "by_kind": {name: cell},
            "by_prompt_length": {name: cell},
        }
        parts = make_optional_parts()
        parts["claims"] = [{"claim": name, "paper": name, "here": name, "holds": None}]
        parts["ablation"][0] |= {"policy": name, "varied": name, "value": name}
        parts["side_by_side"] = {name: parts["side_by_side"]["ar"]}
        entry = make_round("x", name, kind=name, best_arm=name)
        answer = make_answer(category=name, prompt_id=name, policies={name: [entry]})
        return render(tmp_path, metrics | parts, [answer])

    expected = [(tag, sorted(attributes)) for tag, attributes in named("h" * len(HOSTILE)).tags]
    assert [(tag, sorted(attributes)) for tag, attributes in named(HOSTILE).tags] == expected


def test_the_page_loads_nothing_from_elsewhere(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [make_answer()])
    loading = {"src", "href", "xlink:href", "srcset", "data", "action", "poster"}
    assert not [tag for tag, attributes in page.tags if loading & set(attributes)]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_script_puts_text_on_the_page_only_as_text(tmp_path: Path):
    script = render(tmp_path, make_metrics(), [make_answer()]).scripts["text/javascript"]
    assert "textContent" in script
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert forbidden not in script


def test_the_policy_lets_that_script_and_that_style_run_and_no_other(tmp_path: Path):
    render(tmp_path, make_metrics(), [make_answer()])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    allowed = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert allowed
    rules = dict(rule.strip().split(" ", 1) for rule in allowed[1].split(";"))
    for rule, tag in (("script-src", "script"), ("style-src-elem", "style")):
        found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert found
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'"


def test_every_round_keeps_its_numbers(tmp_path: Path):
    wanted = {
        "drafted": 5,
        "accepted": 2,
        "committed": 3,
        "lag": 1,
        "ms": 61.235,
        "context": 77,
        "expected": 2.5,
        "price": 26.7,
        "regret": 0.125,
        "best_arm": "ar",
        "kind": "code",
        "reason": "entropy 0.4 < 1.2",
    }
    entry = make_round(" hi", "diffusion", **(wanted | {"ms": 61.23456}))
    page = render(tmp_path, make_metrics(), [make_answer(policies={"entropy": [entry]})])
    text, arm, *_ = page.data["answers"][0]["policies"][0][1][0]
    assert (text, page.data["arms"][arm][0]) == (" hi", "diffusion")
    assert round_fields(page, "entropy", 0) == wanted


def test_a_round_may_lack_what_only_a_router_knows(tmp_path: Path):
    entry = make_round(" hi")
    for field in ("expected", "price", "regret", "best_arm", "kind"):
        del entry[field]
    page = render(tmp_path, make_metrics(), [make_answer(policies={"hazard": [entry]})])
    assert round_fields(page, "hazard", 0)["regret"] is None


def round_fields(page: Page, policy: str, index: int) -> dict[str, Any]:
    """A round's values as the script reads them: of some the page has the number of a string."""
    data = page.data
    _, _, *values = dict(data["answers"][0]["policies"])[policy][index]
    return {
        field: data["strings"][value] if field in data["interned"] and value is not None else value
        for field, value in zip(data["fields"], values, strict=True)
    }


def test_arms_keep_their_colours_whatever_else_appears(tmp_path: Path):
    rounds = [make_round("x", arm) for arm in ("tree", "plain", "diffusion", "ar")]
    data = render(tmp_path, make_metrics(), [make_answer(policies={"hazard": rounds})]).data
    assert data["arms"][:3] == [["ar", 0], ["diffusion", 1], ["plain", 2]]
    assert data["arms"][3][0] == "tree"
    assert data["arms"][3][1] not in (0, 1, 2)


def test_undefined_numbers_are_shown_as_not_available(tmp_path: Path):
    metrics = make_metrics()
    undefined = {"speedup": float("nan"), "speedup_ci": [None, float("inf")], "rounds": 0}
    metrics["policies"]["hazard"]["by_category"]["code"] |= undefined
    metrics["policies"]["hazard"]["overall"] |= undefined
    page = render(
        tmp_path, metrics, [make_answer(policies={"hazard": [make_round("x", ms=1e400)]})]
    )
    assert "n/a" in page.text
    assert "nan" not in page.text
    assert None in page.data["answers"][0]["policies"][0][1][0]


def test_a_policy_may_lack_a_category(tmp_path: Path):
    metrics = make_metrics()
    del metrics["policies"]["plain"]["by_category"]["code"]
    assert "code" in render(tmp_path, metrics, []).text


def test_output_that_differs_from_plain_stands_out_at_temperature_zero_only(tmp_path: Path):
    metrics = make_metrics()
    metrics["policies"]["hazard"]["overall"]["identical"] = 0.975
    render(tmp_path, metrics, [])
    assert "<strong>97.5%</strong>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    metrics["header"]["temperature"] = 0.7
    render(tmp_path, metrics, [])
    assert "<strong>9" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_answers_the_page_needs_no_script(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [])
    assert not page.scripts
    assert "No answers were recorded" in page.text


def test_a_failed_report_leaves_the_old_one_alone(tmp_path: Path):
    render(tmp_path, make_metrics(), [make_answer()])
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(KeyError):
        write_report(tmp_path / "report.html", {"header": {}}, [], {})
    assert (tmp_path / "report.html").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_optional_parts_are_shown_when_there_and_left_out_when_not(tmp_path: Path):
    titles = ("The paper's claims", "Ablations", "Acceptance when decoding and when training")
    with_parts = render(tmp_path, make_metrics() | make_optional_parts(), [])
    for text in (*titles, "Switching is cheap", "✓ yes", "✗ no", "unknown", "draft length", "31.7"):
        assert text in with_parts.text
    empty = {"gains": {}, "claims": [], "ablation": [], "side_by_side": {}}
    for metrics in (make_metrics(), make_metrics() | empty):
        without = render(tmp_path, metrics, [])
        assert not [title for title in titles if title in without.text]


def test_metrics_of_the_older_format_still_make_a_page(tmp_path: Path):
    metrics = make_metrics()
    for entry in metrics["policies"].values():
        del entry["by_kind"], entry["by_prompt_length"]
        for cell in (entry["overall"], *entry["by_category"].values()):
            for key in ("prompts", "regret", "switches_p95", "switching_share", "fallbacks"):
                del cell[key]
    page = render(tmp_path, metrics, [make_answer()])
    assert "Regret" not in page.text
    assert "n/a" in page.text


def test_kinds_and_lengths_have_tables_when_there_are_several(tmp_path: Path):
    metrics = make_metrics()
    page = render(tmp_path, metrics, [])
    assert "By kind of text" in page.text
    assert "tool call" in page.text
    assert "By prompt length" not in page.text
    for entry in metrics["policies"].values():
        entry["by_prompt_length"]["000128"] = entry["overall"]
    page = render(tmp_path, metrics, [])
    assert "By prompt length" in page.text
    assert "to 128" in page.text


def test_plots_stand_in_the_section_that_their_name_starts_with(tmp_path: Path):
    figures = {
        "slots-ar": "<svg><text>plot-1</text></svg>",
        "speedup-all": "<svg><text>plot-2</text></svg>",
        "mine": "<svg><text>plot-3</text></svg>",
    }
    text = render(tmp_path, make_metrics(), [], figures).text
    places = ["Speed-up by category", "plot-2", "Acceptance by slot", "plot-1", "Other plots"]
    assert sorted([*places, "plot-3"], key=text.index) == [*places, "plot-3"]
    assert "What the policies choose" not in text


def test_the_fastest_policy_that_one_can_run_is_named_first(tmp_path: Path):
    metrics = make_metrics((*POLICIES, "oracle_path"))
    metrics["policies"]["oracle_path"]["overall"]["tokens_per_s"] = 99.0
    metrics["policies"]["plain"]["overall"]["tokens_per_s"] = 98.0
    metrics["policies"]["entropy"]["overall"]["tokens_per_s"] = 55.5
    assert "Fastest: entropy, 55.5 tokens/s" in render(tmp_path, metrics, []).text


def test_failures_that_a_safe_arm_hid_are_told(tmp_path: Path):
    metrics = make_metrics()
    metrics["policies"]["hazard"]["overall"]["fallbacks"] = {"draft failed": 3}
    assert "draft failed 3" in render(tmp_path, metrics, []).text


def test_policies_that_are_known_differ_in_mark_and_colour_together(tmp_path: Path):
    names = ("plain", "static_ar", "static_ar_tree", "static_diffusion", "static_diffusion_tree")
    names += ("request", "category", "entropy", "delta", "hazard", "oracle_round", "oracle_path")
    paints = policy_paints(names)
    assert len({MARKS[paint] for paint in paints.values()}) == len(names)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_enough_contrast_to_be_read(colours: dict[str, str]):
    for ink in ("text", "muted"):
        for ground in ("page", "raised"):
            assert contrast(colours[ink], colours[ground]) >= 4.5


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_marks_have_enough_contrast_to_be_seen(colours: dict[str, str]):
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["page"]) >= 3.0


def contrast(one: str, other: str) -> float:
    """As the Web Content Accessibility Guidelines 2 define it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
