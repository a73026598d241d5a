from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiflash_train.data.rows import (
    ANSWERS,
    ROLES,
    SHAPES,
    AnyRow,
    Conversation,
    PlainText,
    TokenRow,
    content_key,
    parse_row,
)
from whiflash_train.data.tally import BadRow

ASKED = {"role": "user", "content": "Hi"}
ANSWERED = [ASKED, {"role": "assistant", "content": "Hello"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def parsed(raw: Any, roles: Mapping[str, str] | None = None) -> AnyRow:
    return parse_row(raw, "rows.jsonl:7", roles=roles or {})


def conversation(raw: Any, roles: Mapping[str, str] | None = None) -> Conversation:
    row = parsed(raw, roles)
    assert isinstance(row, Conversation)
    return row


def refused(raw: Any) -> BadRow:
    with pytest.raises(BadRow) as caught:
        parsed(raw)
    return caught.value


def row_or_reason(raw: Any) -> AnyRow | str:
    try:
        return parsed(raw)
    except BadRow as bad:
        return bad.reason


def message(**changes: Any) -> dict[str, Any]:
    """The assistant's message of a conversation, as it is understood."""
    return conversation({"messages": [ASKED, {"role": "assistant", **changes}]}).messages[1]


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": ANSWERED},
        {"messages": json.dumps(ANSWERED)},
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": ANSWERED},
        {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"]}},
        {"messages": {"role": ["user", "assistant"], "content": ["Hi", "Hello"], "name": None}},
        {"prompt": "Hi", "answer": "Hello"},
        {"prompt": "Hi", "response": "Hello"},
        {"prompt": "Hi", "completion": "Hello"},
        {"prompt": [ASKED], "answer": "Hello"},
        {"prompt": [ASKED], "completion": [ANSWERED[1]]},
        {"prompt": "Hi", "answer": None, "response": "Hello"},
        {"messages": None, "conversations": ANSWERED},
        {"messages": ANSWERED, "prompt": "ignored", "text": "ignored"},
        {"messages": [ASKED, {"role": "Assistant ", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, ANSWERED[1]]},
        {"messages": [{"role": "user", "content": ["H", {"text": "i"}]}, ANSWERED[1]]},
    ],
)
def test_every_shape_of_the_same_conversation_is_the_same_conversation(
    raw: dict[str, Any],
) -> None:
    row = conversation(raw)
    assert row.messages == ANSWERED
    assert (row.tools, row.later_turns) == (None, [])
    assert content_key(row) == content_key(conversation({"messages": ANSWERED}))


@pytest.mark.parametrize(
    ("raw", "messages", "later"),
    [
        ({"prompt": "Hi"}, [ASKED], []),
        ({"prompt": [ASKED]}, [ASKED], []),
        ({"prompt": [*ANSWERED, ASKED]}, [*ANSWERED, ASKED], []),
        ({"turns": ["Hi"]}, [ASKED], []),
        ({"turns": ["Hi", "And?", "So?"]}, [ASKED], ["And?", "So?"]),
        ({"prompt": "Hi", "later_turns": ["And?"]}, [ASKED], ["And?"]),
        ({"messages": [ASKED], "later_turns": ["And?"]}, [ASKED], ["And?"]),
    ],
)
def test_prompts_keep_the_turns_that_are_still_to_be_asked(
    raw: dict[str, Any], messages: list[dict[str, Any]], later: list[str]
) -> None:
    row = conversation(raw)
    assert row.messages == messages
    assert row.later_turns == later
    assert row.user_turns == [m["content"] for m in messages if m["role"] == "user"] + later


def test_text_and_ready_tokens_are_rows_of_their_own_kind() -> None:
    # U11: rows of text became empty conversations.
    head: Any = {"id": "rows.jsonl:7", "category": "all", "place": "rows.jsonl:7"}
    assert parsed({"text": " a\u2028b\x00 "}) == PlainText(text=" a\u2028b\x00 ", **head)
    ready = parsed({"input_ids": [5, 0, 7], "loss_mask": [0, 1, True], "messages": ANSWERED})
    assert ready == TokenRow(input_ids=[5, 0, 7], loss_mask=[False, True, True], **head)


@pytest.mark.parametrize(
    ("raw", "id_", "category", "truncated"),
    [
        ({"id": "a", "category": "code"}, "a", "code", False),
        ({"id": 0, "category": 3}, "0", "3", False),
        ({"id": "", "category": ""}, "rows.jsonl:7", "all", False),
        ({"id": None, "category": None}, "rows.jsonl:7", "all", False),
        ({"id": {"$oid": "5f"}, "category": ["a", "b"]}, "rows.jsonl:7", "all", False),
        ({"truncated": True}, "rows.jsonl:7", "all", True),
        ({"finish_reason": "length"}, "rows.jsonl:7", "all", True),
        ({"truncated": "no", "finish_reason": "stop"}, "rows.jsonl:7", "all", False),
    ],
)
def test_rows_carry_an_id_a_category_and_whether_they_were_cut(
    raw: dict[str, Any], id_: str, category: str, truncated: bool
) -> None:
    row = parsed({"prompt": "Hi", **raw})
    assert (row.id, row.category, row.truncated) == (id_, category, truncated)


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("system", ["system"]),
        ("developer", ["developer"]),
        ("user", ["user", "human", "prompter"]),
        ("assistant", ["assistant", "gpt", "chatgpt", "model", "bot"]),
        ("tool", ["tool", "function", "observation", "ipython", "tool_response"]),
    ],
)
def test_role_names_of_all_data_sets_are_known_in_any_case(role: str, names: list[str]) -> None:
    before = {"assistant": [ASKED], "tool": ANSWERED}.get(role, [])
    after = [ASKED] if role in ("system", "developer") else []
    for name in names:
        for said in (name, name.upper(), f" {name.title()}\n"):
            row = conversation({"messages": [*before, {"role": said, "content": "x"}, *after]})
            assert row.messages[len(before)] == {"role": role, "content": "x"}


def test_a_table_of_roles_adds_names_and_overrules_known_ones() -> None:
    # U13: turns under a model's name were skipped, and broken rows were left.
    said = [
        {"from": "visitor", "value": "Hi"},
        {"from": " laguna_s", "value": "Hello"},
        {"from": "human", "value": "Bye"},
    ]
    roles = {"visitor": "user", "laguna_s": "gpt", "human": "user"}
    assert [m["role"] for m in conversation({"messages": said}, roles).messages] == [
        "user",
        "assistant",
        "user",
    ]
    swapped = {"human": "assistant", "visitor": "human"}
    assert conversation({"messages": [said[0], said[2]]}, swapped).messages[1] == {
        "role": "assistant",
        "content": "Bye",
    }


def test_a_role_that_is_unknown_is_named_and_so_is_a_wrong_entry_of_the_table() -> None:
    bad = refused({"messages": [{"role": "wizard", "content": "x"}]})
    assert str(bad) == "unknown_role: 'wizard'; name it in data.roles"
    with pytest.raises(BadRow, match="unknown_role: 'asistant'"):
        parsed({"messages": [ASKED, {"role": "bot2", "content": "x"}]}, {"bot2": "asistant"})


@pytest.mark.parametrize(
    ("raw", "first"),
    [
        ({"system": "Be brief.", "prompt": "Hi"}, {"role": "system", "content": "Be brief."}),
        ({"system": "Be brief.", "conversations": ANSWERED}, None),
        (
            {
                "system": "Be brief.",
                "messages": [{"role": "system", "content": "Be brief."}, ASKED],
            },
            None,
        ),
        ({"system": " ", "prompt": "Hi"}, ASKED),
        ({"system": None, "prompt": "Hi"}, ASKED),
        (
            {"messages": [{"role": "system", "content": ""}, ASKED]},
            {"role": "system", "content": ""},
        ),
        (
            {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]},
            {"role": "developer", "content": "Be brief."},
        ),
    ],
)
def test_a_system_prompt_opens_the_conversation_wherever_it_is_written(
    raw: dict[str, Any], first: dict[str, Any] | None
) -> None:
    messages = conversation(raw).messages
    assert messages[0] == (first or {"role": "system", "content": "Be brief."})
    assert sum(m["role"] == "system" for m in messages) <= 1


def test_two_system_prompts_that_differ_are_refused() -> None:
    raw = {"system": "Be long.", "messages": [{"role": "system", "content": "Be brief."}, ASKED]}
    assert str(refused(raw)) == "roles_out_of_order: system after system"


@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize(
    "tools",
    [[TOOL], [WEATHER], json.dumps([TOOL]), json.dumps([WEATHER]), [json.dumps(TOOL)]],
    ids=["list", "bare", "text", "bare_text", "list_of_text"],
)
def test_tools_come_out_in_one_form(tools: Any, key: str) -> None:
    assert conversation({"prompt": "Hi", key: tools}).tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_no_tools_are_none_however_it_is_said(tools: Any) -> None:
    assert conversation({"prompt": "Hi", "tools": tools}).tools is None


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        [CALL["function"]],
        CALL,
        [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
        [{"name": "weather", "parameters": {"city": "Oslo"}}],
    ],
)
def test_tool_calls_come_out_with_arguments_as_an_object(calls: Any) -> None:
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert message(content=None, tool_calls=calls) == expected
    assert message(content="", tool_calls=calls) == expected
    assert message(tool_calls=calls) == expected
    assert message(content="Let me see.", tool_calls=calls) == expected | {"content": "Let me see."}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        ("{}", {}),
        ("null", {}),
        ('{"unit": null, "days": [1, null]}', {"unit": None, "days": [1, None]}),
        ({"unit": None, "days": [1, None]}, {"unit": None, "days": [1, None]}),
        ({"text": "a\u2028b 🙂"}, {"text": "a\u2028b 🙂"}),
    ],
)
def test_arguments_keep_the_nulls_that_the_model_wrote(given: Any, expected: Any) -> None:
    calls = message(tool_calls=[{"name": "weather", "arguments": given}])["tool_calls"]
    assert calls[0]["function"] == {"name": "weather", "arguments": expected}


@pytest.mark.parametrize("calls", [[], None, "[]", "null", ""])
def test_no_calls_leave_no_trace(calls: Any) -> None:
    assert message(content="Hello", tool_calls=calls) == ANSWERED[1]


def test_a_recorded_agent_run_keeps_calls_ids_and_names() -> None:
    run = [
        {"role": "system", "content": "Help."},
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "function_call": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": ""},
        {"role": "tool", "tool_call_id": 2, "name": "weather", "content": None},
        {"role": "assistant", "content": "Sun."},
    ]
    assert conversation({"messages": run, "tools": [TOOL]}).messages == [
        {"role": "system", "content": "Help."},
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **CALL}]},
        {"role": "tool", "content": "", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "", "tool_call_id": "2", "name": "weather"},
        {"role": "assistant", "content": "Sun."},
    ]


def test_calls_of_sharegpt_and_of_the_old_openai_form_are_calls() -> None:
    call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    sharegpt = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sun."},
    ]
    openai = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": json.loads(call)},
        {"role": "function", "content": "sunny"},
        {"role": "assistant", "content": "Sun."},
    ]
    expected = [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sun."},
    ]
    assert conversation({"conversations": sharegpt}).messages == expected
    assert conversation({"messages": openai}).messages == expected


def test_calls_written_into_the_text_as_hermes_does_stay_text() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    said = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": call},
        {"from": "tool", "value": "<tool_response>sunny</tool_response>"},
        {"from": "gpt", "value": "Sun."},
    ]
    assert [m["content"] for m in conversation({"conversations": said}).messages] == [
        "Hi",
        call,
        "<tool_response>sunny</tool_response>",
        "Sun.",
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_one_name_and_only_of_answers(key: str) -> None:
    assert message(content="Hello", **{key: "Greet."}) == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "Greet.",
    }
    assert message(content="Hello", **{key: None}) == ANSWERED[1]
    assert message(content="Hello", **{key: ""}) == ANSWERED[1]
    assert conversation({"messages": [{**ASKED, key: "x"}]}).messages == [ASKED]


NESTED: Any = "x"
for _ in range(400):
    NESTED = [NESTED]


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


def call(**changes: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"name": "f", **changes}]}]}


BAD: list[tuple[Any, str]] = [
    (3, "not_an_object"),
    (None, "not_an_object"),
    ([{"prompt": "Hi"}], "not_an_object"),
    ({}, "unknown_shape"),
    ({"question": "Hi", "n" * 10**6: 1}, "unknown_shape"),
    ({"prompt": None}, "unknown_shape"),
    ({"messages": []}, "no_messages"),
    ({"messages": {}}, "no_messages"),
    ({"messages": 3}, "no_messages"),
    ({"messages": {"role": "user", "content": "Hi"}}, "no_messages"),
    ({"messages": {"role": ["user", "assistant"], "content": ["Hi"]}}, "no_messages"),
    ({"messages": "plain"}, "bad_messages_json"),
    ({"messages": "[" * 100_000}, "bad_messages_json"),
    ({"turns": []}, "no_messages"),
    ({"turns": "Hi"}, "no_messages"),
    ({"prompt": []}, "no_messages"),
    ({"prompt": "Hi", "later_turns": "And?"}, "bad_later_turns"),
    ({"turns": ["Hi", ""]}, "empty_content"),
    ({"turns": ["Hi", 3]}, "content_not_text"),
    ({"messages": ["Hi", "Hello"]}, "message_not_an_object"),
    ({"messages": [{"content": "Hi"}]}, "unknown_role"),
    ({"messages": [{"role": 3, "content": "Hi"}]}, "unknown_role"),
    ({"messages": [{"role": NESTED, "content": "Hi"}]}, "unknown_role"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "unknown_role"),
    # U14: a row that the template would refuse.
    (turns("assistant", "user"), "opens_with_assistant"),
    (turns("user", "user"), "roles_out_of_order"),
    (turns("user", "assistant", "assistant"), "roles_out_of_order"),
    (turns("user", "system", "assistant"), "roles_out_of_order"),
    (turns("system", "system", "user"), "roles_out_of_order"),
    (turns("system", "assistant"), "roles_out_of_order"),
    (turns("tool", "assistant"), "roles_out_of_order"),
    (turns("user", "tool"), "roles_out_of_order"),
    (turns("system"), "no_user_turn"),
    (turns("system", "developer"), "no_user_turn"),
    ({"messages": [{"role": "user", "content": None}]}, "null_content"),
    ({"messages": [{"role": "system"}, ASKED]}, "null_content"),
    ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "null_content"),
    ({"messages": [{"role": "user", "content": ""}]}, "empty_content"),
    ({"messages": [{"role": "user", "content": []}]}, "empty_content"),
    ({"prompt": " \n\u2003"}, "empty_content"),
    ({"prompt": "Hi", "answer": ""}, "empty_content"),
    ({"text": "\n"}, "empty_content"),
    ({"text": 3}, "content_not_text"),
    ({"prompt": "Hi", "answer": 42}, "content_not_text"),
    ({"messages": [{"role": "user", "content": {"text": "Hi"}}]}, "content_not_text"),
    ({"prompt": [{"role": "user", "content": [3]}]}, "content_not_text"),
    (
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "text": "a cat"}]}]},
        "content_not_text",
    ),
    ({"prompt": [{"role": "user", "content": [{"type": NESTED}]}]}, "content_not_text"),
    ({"messages": [ASKED, {**ANSWERED[1], "reasoning": ["x"]}]}, "content_not_text"),
    ({"messages": [{**ASKED, "name": {"first": "A"}}]}, "content_not_text"),
    ({"system": ["Be", 3], "prompt": "Hi"}, "content_not_text"),
    ({"prompt": "\ud83d"}, "invalid_unicode"),
    ({"prompt": "Hi", "id": "\ud83d"}, "invalid_unicode"),
    ({"prompt": "Hi", "tools": [{"name": "f", "\udead": 1}]}, "invalid_unicode"),
    (call(arguments={"x": ["\ud83d"]}), "invalid_unicode"),
    (call(arguments='{"x": "\\ud83d"}'), "invalid_unicode"),
    (call(id="\ud83d"), "invalid_unicode"),
    ({"prompt": "Hi", "tools": "{bad"}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": "weather"}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": {"name": "f"}}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": ["f"]}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": [{"description": "no name"}]}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": [{"function": "weather"}]}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": [{"name": "f", "x": NESTED}]}, "bad_tools_json"),
    ({"prompt": "Hi", "tools": [{"name": "f", "x": b"bytes"}]}, "bad_tools_json"),
    (call(arguments="{bad"), "bad_tool_call_json"),
    (call(arguments='{"x": NaN}'), "bad_tool_call_json"),
    (call(arguments='{"x": 1e999}'), "bad_tool_call_json"),
    (call(arguments='{"x": 1, "x": 2}'), "bad_tool_call_json"),
    (call(arguments="[1]"), "bad_tool_call_json"),
    (call(arguments=3), "bad_tool_call_json"),
    (call(arguments={"x": NESTED}), "bad_tool_call_json"),
    (call(arguments={"x": float("nan")}), "bad_tool_call_json"),
    (call(name=None), "bad_tool_call_json"),
    (call(function={"arguments": {}}), "bad_tool_call_json"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": "{"}]}, "bad_tool_call_json"),
    ({"messages": [ASKED, {"role": "assistant", "tool_calls": [3]}]}, "bad_tool_call_json"),
    ({"messages": [ASKED, {"role": "function_call", "content": "run it"}]}, "bad_tool_call_json"),
    ({"messages": [ASKED, {"role": "function_call", "content": ""}]}, "bad_tool_call_json"),
    ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "call_not_by_assistant"),
    ({"input_ids": [1]}, "no_loss_mask"),
    ({"input_ids": "1 2", "loss_mask": [0, 1]}, "bad_input_ids"),
    ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "bad_input_ids"),
    ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "bad_input_ids"),
    ({"input_ids": [1, True], "loss_mask": [0, 1]}, "bad_input_ids"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad_loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": "01"}, "bad_loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "mask_length_differs"),
    ({"input_ids": [], "loss_mask": []}, "empty_content"),
]


@pytest.mark.parametrize(("raw", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_refused_with_a_reason_that_fits_on_a_line(raw: Any, reason: str) -> None:
    bad = refused(raw)
    assert bad.reason == reason
    assert len(str(bad)) < 250
    assert str(bad).encode().splitlines() == [str(bad).encode()]


def test_a_reason_names_what_is_wrong() -> None:
    assert str(refused({"question": "Hi"})) == "unknown_shape: keys ['question']"
    assert str(refused(turns("user", "user"))) == "roles_out_of_order: user after user"
    assert str(refused(turns("tool"))) == "roles_out_of_order: tool first"
    picture = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    assert str(refused(picture)) == "content_not_text: a part of type 'image_url'"
    twice = refused(call(arguments='{"x": 1, "x": 2}'))
    assert str(twice) == "bad_tool_call_json: twice the key 'x'"


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ({"prompt": "Hi", "id": "a"}, {"prompt": "Hi", "id": "b"}, True),
        ({"prompt": "Hi"}, {"turns": ["Hi"]}, True),
        ({"prompt": "Hi"}, {"text": "Hi"}, False),
        ({"prompt": "Hi"}, {"prompt": "hi"}, False),
        ({"prompt": "Hi"}, {"prompt": "Hi", "tools": [TOOL]}, False),
        ({"prompt": "Hi"}, {"turns": ["Hi", "And?"]}, False),
        (call(arguments={"a": 1, "b": 2}), call(arguments={"b": 2, "a": 1}), True),
        (call(arguments={"a": 1}), call(arguments={"a": "1"}), False),
    ],
)
def test_rows_are_duplicates_when_they_say_the_same(first: Any, second: Any, equal: bool) -> None:
    assert (content_key(parsed(first)) == content_key(parsed(second))) is equal


WORDS = st.just("x") | st.text(st.characters(codec=None), max_size=4)  # lone surrogates, too
JSON_TEXTS = st.sampled_from(["[]", "{}", '{"a": [1, null]}', '[{"name": "f"}]', '{"a"', "null"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | JSON_TEXTS
KEYS = st.sampled_from([*SHAPES, *ANSWERS, "tools", "role", "content", "function", "name"]) | WORDS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries({"name": st.just("f")}, optional={"arguments": JSON})
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.just("x")},
    optional={"tool_calls": st.lists(CALLS, min_size=1) | JSON, "thinking": WORDS, "name": WORDS},
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(list(ROLES)), "content": WORDS | JSON})
MESSAGES = st.tuples(st.just(ASKED), ANSWER).map(list) | st.lists(MESSAGE, max_size=4)
TOOLS = st.lists(st.dictionaries(KEYS, JSON, max_size=3).map(lambda tool: {"name": "f", **tool}))
ROWS = st.fixed_dictionaries(
    {"messages": MESSAGES}, optional={"tools": TOOLS, "system": WORDS, "id": SCALARS}
)


@given(ROWS | st.dictionaries(KEYS, JSON) | JSON)
@settings(max_examples=300, deadline=None)
def test_any_value_gives_a_row_or_a_reason_and_nothing_else(raw: Any) -> None:
    result = row_or_reason(raw)
    if isinstance(result, str):
        assert result.isidentifier()
    else:
        content_key(result)
        json.dumps(result.__dict__, allow_nan=False, ensure_ascii=False).encode()


OPENING = [{"role": "system", "content": "Fix bugs."}, {"role": "user", "content": "It crashes."}]
REPLIED = {"role": "assistant", "content": "I look.\n\n```\nls\n```"}
SEEN = {"role": "user", "content": "owl.py"}


@pytest.mark.parametrize(
    "raw",
    [
        # Messages that also tell thought and action.
        {"history": [*OPENING, {**REPLIED, "thought": "I look.", "action": "ls\n"}, SEEN]},
        # Without the answer as one text.
        {"history": [*OPENING, {"role": "assistant", "thought": "I look.", "action": "ls"}, SEEN]},
        # Steps, whose first one tells what it was asked.
        {
            "trajectory": [
                {
                    "response": REPLIED["content"],
                    "thought": "I look.",
                    "action": "ls\n",
                    "observation": "owl.py",
                    "query": OPENING,
                }
            ]
        },
        {"trajectory": [{"thought": "I look.", "action": "ls", "observation": "owl.py",
                         "messages": OPENING}]},
        # The history is what the steps were taken in.
        {"history": [*OPENING, REPLIED, SEEN], "trajectory": [{"action": "rm"}]},
        # Roles and texts under other names.
        {
            "trajectory": [
                {"role": "system", "system_prompt": "Fix bugs.", "text": None},
                {"role": "user", "system_prompt": None, "text": "It crashes."},
                {"role": "ai", "system_prompt": None, "text": REPLIED["content"]},
                {"role": "user", "system_prompt": None, "text": "owl.py"},
            ]
        },
        {"traj": [*OPENING, REPLIED, SEEN]},
    ],
)  # fmt: skip
def test_every_shape_of_the_same_recorded_run_is_the_same_conversation(raw: Any) -> None:
    assert conversation(raw).messages == [*OPENING, REPLIED, SEEN]


def test_an_example_and_the_problem_of_a_recorded_run_are_one_user_turn() -> None:
    shown = {"role": "user", "content": "An example.", "is_demo": True}
    row = conversation({"history": [OPENING[0], shown, OPENING[1], REPLIED]})
    assert [m["content"] for m in row.messages[:2]] == ["Fix bugs.", "An example.\n\nIt crashes."]
    assert refused({"messages": [shown, OPENING[1], REPLIED]}).reason == "roles_out_of_order"


def test_steps_without_a_query_begin_with_the_problem_and_an_empty_observation_is_told() -> None:
    steps = [{"response": "ls", "observation": ""}, {"response": "rm", "observation": "gone"}]
    row = conversation({"trajectory": steps, "problem_statement": "It crashes."})
    said = [(m["role"], m["content"]) for m in row.messages]
    assert said == [
        ("user", "It crashes."),
        ("assistant", "ls"),
        ("user", "(no output)"),
        ("assistant", "rm"),
        ("user", "gone"),
    ]
    assert refused({"trajectory": steps}).reason == "no_messages"
    assert refused({"trajectory": [{**steps[0], "query": 3}]}).reason == "no_messages"
    assert refused({"trajectory": [{"query": OPENING}]}).reason == "null_content"


def test_results_of_recorded_calls_keep_the_first_of_their_ids() -> None:
    calls = [{"id": "call_1", "function": {"name": "weather", "arguments": "{}"}}]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "content": "rain", "tool_call_ids": ["call_1"]}
    row = conversation({"history": [ASKED, asked, result]})
    assert row.messages[2] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
