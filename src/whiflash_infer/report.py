"""The evaluation as one HTML file that needs nothing else: numbers, plots and a round viewer.

Tables and plots are in the page itself, so they are there without scripts. Only the viewer needs
its script: it reads the rounds from JSON inside the page and shows one answer at a time. The
Content-Security-Policy lets exactly that script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from whiflash_infer.artifacts import write_whole
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, PHASES, PLAIN

HOST = "host"  # what no phase accounts for
SHARES_OF_TIME = (*PHASES, HOST)

# Okabe and Ito's colours, some darker so that lines stand out on white. The page has them as CSS
# variables of these names; the plots are drawn in the light ones.
LIGHT = {
    "page": "#ffffff",
    "raised": "#f5f6f7",
    "text": "#1b1f23",
    "muted": "#5a636c",
    "line": "#d9dde1",
    "rule": "#6b747d",
    "c0": "#d55e00",
    "c1": "#0072b2",
    "c2": "#767b80",
    "c3": "#3b2e8c",
    "c4": "#00855f",
    "c5": "#b8588f",
    "c6": "#a87400",
    "c7": "#2b87c0",
    "route": "#cc79a7",
    "catch_up": "#f0e442",
    "draft": "#e69f00",
    "verify": "#56a0cf",
    "commit": "#009e73",
    "host": "#a5aab0",
}
DARK = LIGHT | {
    "page": "#14171a",
    "raised": "#1d2125",
    "text": "#e4e7ea",
    "muted": "#9aa4ae",
    "line": "#343a41",
    "rule": "#8b959f",
    "c0": "#f08a3c",
    "c1": "#56b4e9",
    "c2": "#a3a3a3",
    "c3": "#b0a4f5",
    "c4": "#1fb88c",
    "c5": "#d98fb8",
    "c6": "#e0b040",
    "c7": "#7f9fe0",
    "route": "#b5618f",
    "catch_up": "#a89e1c",
    "draft": "#b67d00",
    "verify": "#2f7dad",
    "commit": "#0b8561",
    "host": "#6d7379",
}

# A paint is a number: colour `paint % 8` and a mark of its own. Names not listed share the rest.
MARKS = "■◆○★▲●▼✚□◇✖☆△⬟▽⬢"
_SPARE_PAINTS = (15, 10, 8, 9, 14, 13)
_UNDERLINES = {0: "solid", 1: "double", 2: "dotted", 8: "dashed", 9: "wavy", 11: "solid"}
_PROMPT = "prompt"  # the arm of the token that the prompt pass yields
_ARM_PAINTS = {AR: 0, DIFFUSION: 1, AR_TREE: 8, DIFFUSION_TREE: 9, PLAIN: 2, _PROMPT: 11}
_POLICY_PAINTS = {
    f"static_{AR}": 0,
    f"static_{AR_TREE}": 8,
    f"static_{DIFFUSION}": 1,
    f"static_{DIFFUSION_TREE}": 9,
    PLAIN: 2,
    f"static_{PLAIN}": 2,
    "entropy": 4,
    "hazard": 5,
    "delta": 6,
    "request": 7,
    "category": 12,
    "bandit": 13,
    "hedge": 14,
    "oracle_round": 3,
    "oracle_path": 11,
}

_ROUND_FIELDS = (
    "drafted",
    "accepted",
    "committed",
    "lag",
    "ms",
    "context",
    "expected",
    "price",
    "regret",
    "best_arm",
    "kind",
    "reason",
)
_INTERNED = {"best_arm", "kind", "reason"}  # strings that many rounds have in common

# Facts of the header that every reader wants, with the words for them. The others are folded away.
_MAIN_FACTS = {
    "target": "Target",
    "device": "Device",
    "threads": "Threads",
    "dtype": "dtype",
    "prompts": "Prompts",
    "prompt_set": "Hash of the prompts",
    "suite": "Suite",
    "chat_template": "Template",
    "temperature": "Temperature",
    "max_new_tokens": "Tokens at most",
    "seed": "Seed",
    "sync": "Catch-up",
    "batch": "Batch",
    "bonus_token": "Bonus token",
    "memory": "Memory",
    "versions": "Versions",
}
_PARTS = {
    "by_category": "category",
    "by_kind": "kind of text",
    "by_prompt_length": "prompt length",
}
# Of every section of plots: the start of the plots' names, its title, what to know to read it.
_PLOTS = (
    (
        "speedup",
        "Speed-up by category",
        "Times the tokens per second of plain decoding of the same prompts, with 95 % intervals. "
        "The line at 1 is plain decoding. All plots share one scale.",
    ),
    (
        "gains",
        "Gain over each static arm",
        "Tokens per second of a policy over those of a static arm, with 95 % intervals. "
        "Right of 1, choosing pays.",
    ),
    (
        "time",
        "Tokens and time",
        "On the left, up is more tokens of a round and left is less time for it; the slanted lines "
        "are of equal tokens per second. The shares are of decoding time, without the prompt pass. "
        "Host is what no phase accounts for.",
    ),
    (
        "slots",
        "Acceptance by slot",
        "Of the drafts made at a slot, the share that was accepted together with all before it.",
    ),
    (
        "along",
        "What the policies choose, and when",
        "Arms along the answer, how far the chosen arm lagged, and how long an arm was kept.",
    ),
)
_OTHER_PLOTS = "Other plots"

# JSON leaves these as they are. "<" could end the script element or open a comment in it.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\x7f"}


def write_report(
    path: Path,
    metrics: dict[str, Any],
    answers: list[dict[str, Any]],
    figures: Mapping[str, str] | None = None,
) -> None:
    """Render the report. A reader sees the old file or the new one, never half of it.

    figures: plots by name, as the text of an <svg> element that goes into the page as it is: names
    in it are escaped already. What a name has before its first "-" says which section it is for.
    """
    page = _environment().get_template("report.html").render(_view(metrics, answers, figures or {}))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name with half of a surrogate pair is no UTF-8; the browser shows the reference as U+FFFD.
    write_whole(path, page.encode("utf-8", errors="xmlcharrefreplace"))


def visible(text: str) -> str:
    """The same with a sign for everything that no font and no XML has: control characters and
    halves of surrogate pairs."""
    return "".join(_sign(character) for character in text)


def policy_paints(names: Iterable[str]) -> dict[str, int]:
    return _paints(names, _POLICY_PAINTS)


def arm_paints(names: Iterable[str]) -> dict[str, int]:
    """Of every arm that appears, the known ones first."""
    seen = set(names)
    known = [arm for arm in _ARM_PAINTS if arm in seen]
    return _paints([*known, *sorted(seen.difference(known))], _ARM_PAINTS)


def _sign(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0xFFFE, 0xFFFF):
        return "\ufffd"
    return character


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("whiflash_infer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "percent": _percent}
    return environment


def _view(
    metrics: Mapping[str, Any], answers: list[dict[str, Any]], figures: Mapping[str, str]
) -> dict[str, Any]:
    """What the template shows, by the names it uses."""
    header, policies = metrics["header"], metrics["policies"]
    overall = {name: entry["overall"] for name, entry in policies.items()}
    arms = arm_paints(_arms(_cells(policies), answers))
    main, rest = _facts(header)
    slots = _slot_tables(overall)
    style, script = _style(), _file("viewer.js")
    return {
        "header": header,
        "facts": main,
        "more_facts": rest,
        "fastest": _fastest(overall),
        "overall": overall,
        "has_regret": any(_is_finite(cell.get("regret")) for cell in overall.values()),
        "parts": [
            _Part(title, policies, key) for key, title in _PARTS.items() if _has(policies, key)
        ],
        "arms": [arm for arm in arms if arm != _PROMPT],
        "phases": SHARES_OF_TIME,
        "baseline": PLAIN,
        "marks": MARKS,
        "arm_paints": arms,
        "policy_paints": policy_paints(_names(metrics)),
        "claims": metrics.get("claims") or [],
        "plots": _plot_sections(figures, {"time", "slots"} if slots else {"time"}),
        "slots": slots,
        "ablation": metrics.get("ablation") or [],
        "side_by_side": metrics.get("side_by_side") or {},
        "has_answers": bool(answers),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": _script_json(_viewer_data(answers, arms)),
    }


def _file(name: str) -> Markup:
    return Markup(files("whiflash_infer").joinpath("templates", name).read_text(encoding="utf-8"))


def _style() -> Markup:
    """Colours and paints as CSS, and the rest of the style."""
    colours = [_variables(LIGHT), f"@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}"]
    paints = [
        f".paint-{paint} {{ --paint: var(--c{paint % 8}); "
        f"--under: {_UNDERLINES.get(paint, 'wavy')}; }}"
        for paint in range(len(MARKS))
    ]
    return Markup("\n".join(["", *colours, *paints, ""])) + _file("report.css")


def _variables(colours: Mapping[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {value};' for name, value in colours.items())} }}"


def _hash(text: str) -> str:
    """Of an inline element, as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- names and colours ----


def _cells(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in policies.values():
        yield entry["overall"]
        yield from entry["by_category"].values()


def _arms(cells: Iterable[dict[str, Any]], answers: Iterable[dict[str, Any]]) -> set[str]:
    """Every arm that appears anywhere."""
    seen = {arm for cell in cells for arm in cell["arm_ratio"]}
    for answer in answers:
        seen |= {entry["arm"] for rounds in answer["policies"].values() for entry in rounds}
    return seen


def _names(metrics: Mapping[str, Any]) -> list[str]:
    ablated = [row["policy"] for row in metrics.get("ablation") or []]
    return _distinct([*metrics["policies"], *ablated])


def _paints(names: Iterable[str], known: Mapping[str, int]) -> dict[str, int]:
    spare = cycle(_SPARE_PAINTS)
    return {name: known[name] if name in known else next(spare) for name in names}


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# ---- tables ----


class _Part:
    """A table of every policy over the parts of the prompts: categories, kinds, lengths."""

    def __init__(self, title: str, policies: Mapping[str, Any], key: str) -> None:
        self.title = title
        self.rows: dict[str, dict[str, Any]] = {p: e.get(key) or {} for p, e in policies.items()}
        self.names = _distinct(name for cells in self.rows.values() for name in cells)
        self.words = {name: _part_words(key, name) for name in self.names}


def _part_words(key: str, name: str) -> str:
    if key == "by_prompt_length" and name.isdecimal():
        return f"to {int(name)}"  # has zeros in front, which keep lengths in order
    return name


def _has(policies: Mapping[str, Any], key: str) -> bool:
    """Whether there is more than one part, for a single one says what the first table says."""
    return len({name for entry in policies.values() for name in entry.get(key) or {}}) > 1


def _fastest(overall: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]] | None:
    """The policy that makes most tokens per second. An oracle is no policy that one can run."""
    real = {
        name: cell
        for name, cell in overall.items()
        if name != PLAIN and not name.startswith("oracle") and _is_finite(cell["tokens_per_s"])
    }
    if not real:
        return None
    name = max(real, key=lambda name: real[name]["tokens_per_s"])
    return name, real[name]


def _slot_tables(overall: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Of each drafting arm, by policy: the shares of its slots."""
    tables: dict[str, dict[str, list[float]]] = {}
    for policy, cell in overall.items():
        for arm, shares in cell["acceptance_by_slot"].items():
            if shares:
                tables.setdefault(arm, {})[policy] = shares
    return tables


def _facts(header: Mapping[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    main = [(words, _fact(header[key])) for key, words in _MAIN_FACTS.items() if key in header]
    rest = [(_words(key), _fact(value)) for key, value in header.items() if key not in _MAIN_FACTS]
    return main, rest


def _fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            _named_fact(str(key), inner)
            for key, inner in value.items()
            if not (str(key).endswith("_mb") and inner is None)  # no GPU, no memory of it
        )
    if isinstance(value, list | tuple):
        return ", ".join(_fact(inner) for inner in value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return "none" if value is None else str(value)


def _named_fact(key: str, value: Any) -> str:
    if key.endswith("_mb"):
        return f"{_words(key.removesuffix('_mb'))} {_number(value, 0)} MB"
    return f"{_words(key)} {_fact(value)}"


def _words(key: str) -> str:
    return key.replace("_", " ")


# ---- numbers as text ----


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any, digits: int = 2) -> str:
    return f"{value:,.{digits}f}" if _is_finite(value) else "n/a"


def _percent(share: Any, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}%" if _is_finite(share) else "n/a"


# ---- plots ----


def _plot_sections(figures: Mapping[str, str], tables: set[str]) -> list[dict[str, Any]]:
    """Each section that has plots, or a table of numbers, with its plots."""
    by_start: dict[str, list[Markup]] = {}
    known = {start for start, _, _ in _PLOTS}
    for name, svg in figures.items():
        start = name.partition("-")[0]
        by_start.setdefault(start if start in known else "", []).append(Markup(svg))
    return [
        {"start": start, "title": title, "note": note, "svgs": by_start.get(start, [])}
        for start, title, note in (*_PLOTS, ("", _OTHER_PLOTS, ""))
        if start in by_start or start in tables
    ]


# ---- data of the round viewer ----


class _Strings:
    """Strings that repeat, each once; rounds hold their numbers."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        return None if text is None else self.numbers.setdefault(text, len(self.numbers))


def _viewer_data(answers: Iterable[dict[str, Any]], paints: Mapping[str, int]) -> dict[str, Any]:
    """Rounds become short lists, for there are tens of thousands of them."""
    arms = {arm: index for index, arm in enumerate(paints)}
    strings = _Strings()
    shown = [_viewer_answer(answer, arms, strings) for answer in answers]
    return {
        "fields": _ROUND_FIELDS,
        "arms": [[arm, paint] for arm, paint in paints.items()],
        "start": _PROMPT,
        "interned": sorted(_INTERNED),
        "strings": list(strings.numbers),
        "policy": _first_shown(answers),
        "answers": shown,
    }


def _first_shown(answers: Iterable[dict[str, Any]]) -> str | None:
    """The policy to open with: of those that most prompts have, the last that is no oracle."""
    counts = Counter(policy for answer in answers for policy in answer["policies"])
    names = [name for name in counts if counts[name] == max(counts.values())]
    return next((n for n in reversed(names) if not n.startswith("oracle")), next(iter(names), None))


def _viewer_answer(
    answer: Mapping[str, Any], arms: Mapping[str, int], strings: _Strings
) -> dict[str, Any]:
    return {
        "id": answer["prompt_id"],
        "category": answer["category"],
        "prompt": answer["prompt"],
        "policies": [
            [policy, [_viewer_round(entry, arms, strings) for entry in rounds]]
            for policy, rounds in answer["policies"].items()
        ],
    }


def _viewer_round(
    entry: Mapping[str, Any], arms: Mapping[str, int], strings: _Strings
) -> list[Any]:
    values = [
        strings.number(entry.get(field))
        if field in _INTERNED
        else _viewer_value(entry.get(field), 5 if field == "price" else 3)
        for field in _ROUND_FIELDS
    ]
    return [entry["text"], arms[entry["arm"]], *values]


def _viewer_value(value: Any, digits: int) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else round(value, digits)


def _script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element: nothing in it can end the element.

    It is all ASCII, so line separators, control characters and half surrogate pairs are escapes.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.translate(_ESCAPES))
