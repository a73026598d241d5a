"""The report shows every number it is given, stands alone, and runs no text of prompt or model."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from whiflash_infer.report import write_report

POLICIES = ("plain", "static_ar", "static_diffusion", "entropy", "hazard", "a_new_policy")
CATEGORIES = ("chat", "code", "creative writing")
HOSTILE = (
    "</script><script>alert(1)</script><!--<script>]]>\"'`&amp;<img src=x onerror=alert(2)>"
    "\u2028\u2029\x00\x1b[31m\x7f\x85\u202e\ud800 {{ 7 * 7 }} {% raw %}"
)


class Page(HTMLParser):
    """Tags with their attributes, the text outside scripts, and the scripts by type."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("type") or "text/javascript"
            assert self._script not in self.scripts, "one script of each type"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            self.scripts[self._script] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts["application/json"])


def make_cell(policy: str, *, speedup: float = 1.4) -> dict[str, Any]:
    ratio = {"plain": {"plain": 1.0}, "static_ar": {"ar": 1.0}}.get(
        policy, {"ar": 0.5, "diffusion": 0.3, "plain": 0.2}
    )
    return {
        "tokens": 1200,
        "rounds": 500,
        "seconds": 30.0,
        "tokens_per_s": 40.0,
        "speedup": speedup,
        "speedup_ci": [speedup - 0.1, speedup + 0.2],
        "tau": 2.4,
        "tau_prompt_mean": 2.3,
        "arm_ratio": ratio,
        "switches_per_100_rounds": 12.5,
        "time_split": {"catch_up": 0.1, "draft": 0.2, "verify": 0.6, "commit": 0.05, "host": 0.05},
        "round_ms": {"p50": 61.0, "p95": 83.5},
        "identical": 1.0,
        "acceptance_by_slot": {arm: [0.8, 0.6, 0.4] for arm in ratio if arm != "plain"},
        "prefill_seconds": 1.5,
    }


def make_metrics() -> dict[str, Any]:
    header = {
        "target": "SmolLM2-135M",
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "prompts": 1,
        "prompt_set": "9f31c0d2a7b64e15",
        "seed": 7,
        "bonus_token": "counted",
        "created": "2025-11-29T15:40:00Z",
        "versions": {"torch": "2.8.0", "jinja2": "3.1.6"},
        "git_commit": "ba6eaba",
    }
    policies = {
        policy: {
            "overall": make_cell(policy),
            "by_category": {category: make_cell(policy) for category in CATEGORIES},
        }
        for policy in POLICIES
    }
    return {"header": header, "policies": policies}


def make_round(text: str, arm: str = "ar", **fields: Any) -> dict[str, Any]:
    entry = {"text": text, "arm": arm, "drafted": 5, "accepted": 2, "committed": 3, "lag": 1}
    return entry | {"reason": "", "ms": 61.25, "context": 40} | fields


def make_answer(**fields: Any) -> dict[str, Any]:
    answer = {"prompt_id": "chat-00", "category": "chat", "prompt": "Say hello."}
    rounds = [make_round("Hello", "prompt"), make_round(" there", "diffusion")]
    return answer | {"policies": {policy: rounds for policy in POLICIES}} | fields


def render(folder: Path, metrics: dict[str, Any], answers: list[dict[str, Any]]) -> Page:
    write_report(folder / "report.html", metrics, answers)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_every_policy_category_and_header_fact_appears(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [make_answer()])
    for name in (*POLICIES, *CATEGORIES, "git commit", "ba6eaba", "torch 2.8.0", "counted"):
        assert name in page.text


def test_the_numbers_of_a_cell_appear_as_text(tmp_path: Path):
    metrics = make_metrics()
    metrics["policies"]["hazard"]["by_category"]["code"] |= {
        "speedup": 3.17,
        "speedup_ci": [2.95, 3.41],
    }
    page = render(tmp_path, metrics, [make_answer()])
    for number in ("3.17", "2.95", "3.41", "83.5", "12.5", "diffusion 30%", "60.0%"):
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
    assert shown["policies"][0][1][0][-1] == HOSTILE


def test_the_embedded_data_is_printable_ascii_without_markup(tmp_path: Path):
    page = render(tmp_path, make_metrics(), [make_answer(prompt=HOSTILE, category=HOSTILE)])
    text = page.scripts["application/json"]
    assert text.isascii()
    assert text.isprintable()
    assert not set("<>&") & set(text)


def test_hostile_names_of_policy_category_arm_and_header_add_no_tag(tmp_path: Path):
    def named(name: str) -> Page:
        metrics, cell = make_metrics(), make_cell("plain")
        cell |= {"arm_ratio": {name: 1.0}, "acceptance_by_slot": {name: [0.5]}}
        metrics["header"] |= {"target": name, "note": name}
        metrics["policies"][name] = {"overall": cell, "by_category": {name: cell}}
        answer = make_answer(category=name, policies={name: [make_round("x", name)]})
        return render(tmp_path, metrics, [answer])

    expected = [(tag, sorted(attributes)) for tag, attributes in named("harmless").tags]
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


def test_every_round_keeps_its_numbers(tmp_path: Path):
    entry = make_round(" hi", "diffusion", reason="entropy 0.4 < 1.2", ms=61.23456, context=77)
    data = render(tmp_path, make_metrics(), [make_answer(policies={"entropy": [entry]})]).data
    text, arm, *values = data["answers"][0]["policies"][0][1][0]
    assert (text, data["arms"][arm][0]) == (" hi", "diffusion")
    assert dict(zip(data["fields"], values, strict=True)) == {
        "drafted": 5,
        "accepted": 2,
        "committed": 3,
        "lag": 1,
        "ms": 61.235,
        "context": 77,
        "reason": "entropy 0.4 < 1.2",
    }


def test_arms_keep_their_colours_whatever_else_appears(tmp_path: Path):
    rounds = [make_round("x", arm) for arm in ("tree", "plain", "diffusion", "ar")]
    data = render(tmp_path, make_metrics(), [make_answer(policies={"hazard": rounds})]).data
    assert data["arms"] == [["ar", 0], ["diffusion", 1], ["plain", 2], ["tree", 4]]


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
        write_report(tmp_path / "report.html", {"header": {}}, [])
    assert (tmp_path / "report.html").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
