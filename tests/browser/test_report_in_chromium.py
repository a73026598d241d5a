"""The report in Chromium: it loads without complaint, fits, and its viewer does what it says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from tests.browser.examples import HOSTILE, make_answer, make_metrics, make_optional_parts
from tests.browser.examples import make_round as plain_round
from whiflash_infer.report import write_report
from whiflash_train.evaluation.plots import as_svgs, draw_all

POLICIES = (
    "plain",
    "static_ar",
    "static_diffusion",
    "entropy",
    "delta",
    "oracle_round",
    "oracle_path",
    "hazard",
)
CATEGORIES = ("chat", "code", "math", "json", "qa", "rag", "summary", "translation")
ROUNDS = 30
WIDTHS = (400, 480, 1440, 2000)

Open = Callable[..., Any]


def make_answers() -> list[dict[str, Any]]:
    """96 prompts, 12 of each category. What stands out in them, with the policy `hazard`:

    prompt 7, round 3: regret 2.5, kind `tool call`
    prompts 7 and 11, round 5: regret 1.2
    prompts 0 to 19, round 2: regret 0.6
    all others 0.1; an even round is prose and an odd one is code
    """
    return [
        {
            "prompt_id": f"{CATEGORIES[number % 8]}-{number:02d}",
            "category": CATEGORIES[number % 8],
            "prompt": f"Question {number}.\n" + "More of the question. " * 40,
            "policies": {policy: make_rounds(number, policy) for policy in POLICIES},
        }
        for number in range(96)
    ]


def make_rounds(number: int, policy: str) -> list[dict[str, Any]]:
    start = plain_round("Answer", "prompt", drafted=0, accepted=0, committed=1, kind="prose")
    return [start, *(make_round(number, policy, index) for index in range(1, ROUNDS))]


def make_round(number: int, policy: str, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": "code" if index % 2 else "prose", "context": 100 + 3 * index}
    if policy == "hazard":
        fields |= {"expected": 2.75, "price": 30.0, "regret": regret(number, index)}
        fields |= {"best_arm": "diffusion", "reason": "best price"}
        if (number, index) == (7, 3):
            fields["kind"] = "tool call"
    arm = ("ar", "diffusion", "plain")[index % 3]
    accepted = 0 if arm == "plain" else 2
    fields |= {"drafted": 0 if arm == "plain" else 5, "accepted": accepted}
    return plain_round(f" word{index} of", arm, committed=accepted + 1, **fields)


def regret(number: int, index: int) -> float:
    if (number, index) == (7, 3):
        return 2.5
    if number in (7, 11) and index == 5:
        return 1.2
    return 0.6 if number < 20 and index == 2 else 0.1


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metrics = make_metrics(POLICIES, CATEGORIES) | make_optional_parts()
    path = tmp_path_factory.mktemp("evaluation") / "report.html"
    write_report(path, metrics, make_answers(), as_svgs(draw_all(metrics)))
    return path


@pytest.fixture
def show(chromium: Any, report: Path) -> Iterator[Open]:
    """Opens the report, or another page, in a window of some width; complaints fail the test."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(width: int = 1440, path: Path = report, place: str = "", **options: Any) -> Any:
        contexts.append(
            chromium.new_context(viewport={"width": width, "height": 900}, offline=True, **options)
        )
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(path.as_uri() + place)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def details(page: Any) -> dict[str, str]:
    titles = page.locator("#details dt").all_text_contents()
    return dict(zip(titles, page.locator("#details dd").all_text_contents(), strict=True))


def prompts(page: Any) -> list[str]:
    """Ids of the prompts in the list."""
    values = page.locator("#prompt option").evaluate_all("all => all.map((one) => one.value)")
    return [value.removeprefix("=") for value in values]


def place(page: Any) -> dict[str, list[str]]:
    """What the address keeps, once it keeps a new place."""
    page.wait_for_timeout(400)
    return parse_qs(page.evaluate("location.hash").removeprefix("#"))


def focused(page: Any) -> int:
    return int(page.evaluate("document.activeElement.dataset.index"))


@pytest.mark.parametrize("width", [480, 1440])
def test_a_report_of_96_prompts_loads_quickly_and_without_complaint(show: Open, width: int):
    page = show(width)
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    sys.stdout.write(f"loaded in {loaded / 1000:.2f} s at {width} px\n")
    assert 0 < loaded < 10_000
    assert len(prompts(page)) == 96
    assert page.locator("#answer .round").count() == ROUNDS
    assert page.locator("#policy").input_value() == "=hazard"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_never_scrolls_sideways(show: Open, width: int):
    page = show(width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate(
        """() => [...document.querySelectorAll("svg.plot, .controls, .viewer, .scroll, p, h1, h2")]
        .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
        .map((one) => one.className.baseVal ?? one.className)"""
    )
    assert beyond == []


def test_every_plot_is_drawn_with_some_size(show: Open):
    sizes = show(480).evaluate(
        """() => [...document.querySelectorAll("svg.plot")].map((one) => {
          const box = one.getBoundingClientRect(); return [box.width, box.height]; })"""
    )
    assert len(sizes) > 12
    assert all(300 <= width <= 480 and height > 100 for width, height in sizes)


def test_pointing_at_a_round_shows_its_details_until_one_points_elsewhere(show: Open):
    page = show()
    page.locator("#answer .round").nth(7).hover()
    assert details(page) == {
        "Round": "7 of 29",
        "Arm": "diffusion",
        "Drafts": "●●○○○",
        "Drafted": "5",
        "Accepted": "2",
        "Committed": "3",
        "Expected": "2.75",
        "Time, ms": "61.3",
        "Price, tokens": "1.84",  # 30 tokens/s for 61.25 ms
        "Lag": "1",
        "Context": "121",
        "Kind of text": "code",
        "Regret, tokens": "0.10",
        "Best arm": "diffusion",
        "Reason": "best price",
    }
    page.locator("#viewer-title").hover()
    assert details(page)["Round"] == "0 of 29"


def test_a_tap_shows_a_round_and_keeps_it(show: Open):
    page = show(480, has_touch=True)
    page.locator("#answer .round").nth(4).tap()
    assert details(page)["Round"] == "4 of 29"
    assert place(page)["round"] == ["4"]


def test_the_keyboard_reaches_the_rounds_and_moves_between_them(show: Open):
    page = show()
    page.locator("#prompt-text").focus()
    page.keyboard.press("Tab")
    assert focused(page) == 0
    steps = {"ArrowRight": 1, "ArrowDown": 2, "ArrowLeft": 1, "End": ROUNDS - 1, "ArrowUp": 28}
    for key, index in steps.items():
        page.keyboard.press(key)
        assert focused(page) == index
        assert details(page)["Round"] == f"{index} of 29"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert focused(page) == 0


def test_the_focused_round_has_a_visible_ring(show: Open):
    page = show()
    page.locator("#prompt-text").focus()
    page.keyboard.press("Tab")
    style = page.evaluate(
        """() => { const style = getComputedStyle(document.activeElement);
        return [style.outlineStyle, parseFloat(style.outlineWidth)]; }"""
    )
    assert style[0] == "solid"
    assert style[1] >= 2


def test_categories_leave_their_prompts(show: Open):
    page = show()
    page.select_option("#category", label="math")
    assert prompts(page) == [f"math-{number:02d}" for number in range(2, 96, 8)]
    assert page.locator("#prompt-text").text_content().startswith("Question 2.\n")


def test_a_search_leaves_prompts_whose_id_holds_it(show: Open):
    page = show()
    page.fill("#search", "QA-1")
    assert prompts(page) == ["qa-12"]
    page.fill("#search", "no such prompt")
    assert prompts(page) == []
    assert page.locator("#prompt-text").text_content() == "No prompt passes all filters."
    page.fill("#search", "")
    assert len(prompts(page)) == 96


@pytest.mark.parametrize(
    ("least", "left"), [("0.5", [*range(20)]), ("1", [7, 11]), ("2", [7])], ids=str
)
def test_regret_leaves_prompts_with_such_a_round(show: Open, least: str, left: list[int]):
    page = show()
    page.select_option("#regret", least)
    assert [int(id_[-2:]) for id_ in prompts(page)] == left


def test_rounds_of_less_regret_are_dimmed_and_up_and_down_pass_over_them(show: Open):
    page = show()
    page.select_option("#regret", "1")
    bright = page.locator("#answer .round:not(.dim)")
    assert [int(box.get_attribute("data-index")) for box in bright.all()] == [3, 5]
    assert details(page)["Regret, tokens"] == "2.50"
    bright.first.focus()
    page.keyboard.press("ArrowDown")
    assert focused(page) == 5
    page.keyboard.press("ArrowDown")
    assert focused(page) == 5
    page.keyboard.press("ArrowLeft")
    assert focused(page) == 4


def test_a_kind_leaves_prompts_and_rounds_of_it(show: Open):
    page = show()
    page.select_option("#kind", label="tool call")
    assert prompts(page) == ["translation-07"]
    bright = page.locator("#answer .round:not(.dim)")
    assert [box.get_attribute("data-index") for box in bright.all()] == ["3"]


def test_prompts_are_sorted_by_all_their_regret(show: Open):
    page = show()
    page.select_option("#sort", "regret")
    assert [int(id_[-2:]) for id_ in prompts(page)[:4]] == [7, 11, 0, 1]
    first = page.locator("#prompt option").first.text_content()
    assert first.split()[0] == "6.9"  # 2.5 + 1.2 + 0.6, and 0.1 of the other 26 rounds


def test_another_policy_shows_its_own_answer(show: Open):
    page = show()
    page.select_option("#policy", label="static_ar")
    page.locator("#answer .round").nth(7).hover()
    assert details(page)["Regret, tokens"] == "\u2013"
    page.select_option("#regret", "0.5")
    assert prompts(page) == []


def test_the_address_leads_back_to_the_same_place(show: Open):
    page = show()
    page.select_option("#policy", label="delta")
    page.select_option("#category", label="code")
    page.select_option("#prompt", "=code-09")
    page.locator("#answer .round").nth(12).click()
    kept = place(page)
    assert kept == {
        "policy": ["delta"],
        "category": ["code"],
        "prompt": ["code-09"],
        "round": ["12"],
    }
    other = show(place=page.evaluate("location.hash"))
    assert other.locator("#policy").input_value() == "=delta"
    assert other.locator("#prompt").input_value() == "=code-09"
    assert len(prompts(other)) == 12
    assert details(other)["Round"] == "12 of 29"


@pytest.mark.parametrize("place", ["#nonsense", "#policy=none&prompt=%00&round=-4&regret=x&kind=y"])
def test_an_address_that_leads_nowhere_opens_the_start(show: Open, place: str):
    page = show(place=place)
    assert len(prompts(page)) == 96
    assert details(page)["Round"] == "0 of 29"


def test_hostile_text_is_shown_and_never_run(show: Open, tmp_path: Path):
    metrics = make_metrics(("plain", HOSTILE), (HOSTILE, "other")) | make_optional_parts()
    metrics["header"] |= {"target": HOSTILE, "note": HOSTILE}
    metrics["claims"] = [{"claim": HOSTILE, "paper": HOSTILE, "here": HOSTILE, "holds": None}]
    entry = plain_round(HOSTILE, HOSTILE, reason=HOSTILE, kind=HOSTILE, best_arm=HOSTILE)
    rounds = [plain_round("x", "prompt"), entry]
    answer = make_answer(
        prompt=HOSTILE, category=HOSTILE, prompt_id=HOSTILE, policies={HOSTILE: rounds}
    )
    path = tmp_path / "hostile.html"
    write_report(path, metrics, [answer], as_svgs(draw_all(metrics)))
    page = show(480, path)
    assert page.locator("script").count() == 2
    assert page.locator("img").count() == 0
    page.locator("#answer .round").nth(1).click()
    shown = details(page)["Reason"]
    assert shown.startswith("</script><script>alert(1)</script>")
    assert "\u2400\u241b[31m\u2421" in shown
    assert page.locator("#prompt-text").text_content() == shown
    assert page.evaluate("document.documentElement.scrollWidth") <= 480
    page.select_option("#kind", index=2)  # behind all and prose
    assert len(prompts(page)) == 1
    page.reload()
    assert page.locator("#answer .round").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_and_page_follow_the_colour_scheme(show: Open, scheme: str):
    page = show(color_scheme=scheme)
    ground, ink = page.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector("svg.plot text")).fill]"""
    )
    brightness = [sum(map(int, colour[4:-1].split(","))) for colour in (ground, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")
