from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiflash_infer.kinds import kinds_of_pieces, main_kind, segments

CALL = '{"name": "search", "arguments": {"q": "owls"}}'

# Each text in stretches, as a reader would mark them.
MARKED: list[list[tuple[str, str]]] = [
    [("prose", "Owls turn their heads far.")],
    [("prose", "  \n\n")],
    [("reasoning", "<think>\nOwls?\n</think>\n\n"), ("prose", "They hunt at night.")],
    [("reasoning", "<think>\nOwls? {} ```")],
    [("reasoning", "\n<think>Owls")],
    [("reasoning", "They ask of owls.</think>"), ("prose", "By night.")],
    [("reasoning", "[THINK]Owls[/THINK]"), ("prose", "By night.")],
    [("reasoning", "<thinking>Owls</thinking> "), ("prose", "By night.")],
    [
        ("reasoning", "<|channel|>analysis<|message|>Owls?<|end|>"),
        ("prose", "<|start|>assistant"),
        ("tool_call", "<|channel|>commentary to=functions.search<|message|>{}<|call|>"),
    ],
    [("prose", "Let me see.\n"), ("tool_call", f"<tool_call>\n{CALL}\n</tool_call>")],
    [("tool_call", '<tool_call>\n{"name": "sea')],
    [("tool_call", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>")],
    [("tool_call", f" [TOOL_CALLS][{CALL}]</s>")],
    [("tool_call", "<|python_tag|>search.call(q='owls')")],
    [("tool_call", CALL)],
    [("prose", "I call: "), ("tool_call", CALL)],
    [("tool_call", f"[{CALL},\n {CALL}]")],
    [("tool_call", "```tool_code\nsearch('owls')\n```")],
    [("tool_call", '{"name": "search", "parameters": {"q": "ow')],
    [("json", '{"name": "Ada", "age": 36}\n'), ("prose", "That is all.")],
    [("json", '{"name": "Ada", "tags": ["a", "b"')],
    [("json", '{"name": "Ada", "note": "\\"quoted\\" \\u00e9 } ]"')],
    [("prose", "As JSON:\n"), ("json", '```json\n{"a": [1, 2.5e3, null]}\n```\n')],
    [("json", '```\n{"a": 1}\n```')],
    [("json", "[1, 2, 3]")],
    [("json", '[\n  {"a": 1},\n]')],
    [("prose", "[1] Darwin, 1859.\n[2]: a link\n[a](b) {x} {\n[ ] buy owls")],
    [("prose", 'Set {\'a\': 1} and {"a", "b"} are none.')],
    [("prose", "So:\n\n"), ("code", "```python\nprint(1)\n```\n\n"), ("prose", "Run it.")],
    [("prose", "So:\n  "), ("code", "~~~\nls\n```\n  ~~~~\n"), ("prose", "Run it.")],
    [("code", "```js\nlet a = {")],
    [("code", "````md\n```json\n{}\n```\n````")],
    [("code", "def f(x):\n    return x\n\n"), ("prose", "It gives x back.")],
    [
        (
            "code",
            "import math\nfrom os import path\n\n@cache\ndef f():\n\treturn 1\nx = f()\nprint(x)",
        )
    ],
    [("code", "    for x in y:\n        total += x\n    return total\n")],
    [("code", "    return sum(values)")],
    [("code", "class Owl:\n    pass\n"), ("code", "```\nls\n```")],
    [("reasoning", "<think>hm</think>\n"), ("code", "def f():\n    pass\n"), ("prose", "Done.")],
    [("prose", "import taxes hurt trade\nclass struggle went on\nfrom time to time")],
    [("prose", "    Dear neighbours, come to our feast.")],
    [("prose", "Call it:\nx = f(1)\ndef is a keyword.")],
]


@pytest.mark.parametrize("marked", MARKED, ids=range(len(MARKED)))
def test_a_text_falls_into_the_stretches_that_a_reader_would_mark(
    marked: list[tuple[str, str]],
) -> None:
    text = "".join(part for _, part in marked)
    expected: list[tuple[str, str]] = []
    for kind, part in marked:
        if expected and expected[-1][0] == kind:
            expected[-1] = (kind, expected[-1][1] + part)
        else:
            expected.append((kind, part))
    assert [(s.kind, text[s.start : s.end]) for s in segments(text)] == expected


def test_an_empty_text_has_no_stretch_and_its_pieces_are_prose() -> None:
    assert segments("") == []
    assert kinds_of_pieces([]) == []
    assert kinds_of_pieces(["", ""]) == ["prose", "prose"]
    assert main_kind("") == "prose"


def test_a_piece_is_of_the_kind_where_it_says_something_first() -> None:
    pieces = ["<think>", "a", "</think>", "\n\n", "\n{", '"a": 1}', "", "\n So ", "be it.", ""]
    assert kinds_of_pieces(pieces) == [
        *["reasoning"] * 4,
        *["json"] * 3,
        *["prose"] * 3,
    ]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("I look it up.\n" + CALL, "tool_call"),
        ("First I must look at what is asked and then decide.\n```\nls\n```", "prose"),
        ("<think>" + "hm " * 40 + "</think>" + CALL, "reasoning"),
        ("See:\n```py\nprint('a longer line of code')\n```", "code"),
        ("Here:" + " " * 99 + '{"a": "b"}', "json"),
    ],
)
def test_the_main_kind_holds_most_of_the_characters_that_say_something(
    text: str, kind: str
) -> None:
    assert main_kind(text) == kind


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
        *("```", "```json", "~~~~", "\n", "\n\n", "    ", "\t", " ", '{"', '"}', "{", "}", "["),
        *("]", ":", ",", '"a": 1', "\\", '"', "def f():", "import x", "x = 1", "return", "Words."),
    ]
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_stretches_cover_any_text_in_order_and_neighbours_differ(text: str) -> None:
    found = segments(text)
    assert "".join(text[s.start : s.end] for s in found) == text
    assert all(s.start < s.end for s in found)
    assert all(a.end == b.start and a.kind != b.kind for a, b in pairwise(found))


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.data())
def test_kinds_do_not_depend_on_how_the_text_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    by_character = kinds_of_pieces(list(text))
    start = 0
    for piece, kind in zip(pieces, kinds_of_pieces(pieces), strict=True):
        if piece:
            lead = len(piece) - len(piece.lstrip()) if piece.strip() else 0
            assert kind == by_character[start + lead]
        start += len(piece)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), JSON, min_size=1), st.booleans(), st.data())
def test_any_json_object_is_one_stretch_whole_or_cut_off(
    value: dict[str, object], escaped: bool, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    end = data.draw(st.integers(2, len(text)))
    (stretch,) = segments(text[:end])
    assert stretch.kind in ("json", "tool_call")


@pytest.mark.parametrize(
    "unit",
    [
        *('{"', '{"a":', '{"a":"\\', "{ ", "[\n", "[[", "[1,", "[1]\n", '["', '"', "\\", "`"),
        *("```\n", "~~~x\n", "````\n```\n", "<think>", "</think>", "<tool_call>", "<", "\n", " "),
        *("\t\n", "import a, ", "x, ", "a.", "    x(", "if :", "if x: #", ") ", "def f(:", "- "),
    ],
)
def test_hostile_texts_take_time_that_grows_with_their_length_alone(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        started = time.process_time()
        for opening in ("", "import x\n", "[", "    return (\n", "```\n", "x"):
            segments(opening + text)
        return time.process_time() - started

    # Quadratic time would be 256 times as much.
    assert seconds(8_000) < 80 * seconds(500) + 0.2
