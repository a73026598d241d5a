from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.templates import (
    CHATML,
    CHATML_MERGING,
    CHATML_TAGGED,
    FAMILIES,
    GEMMA,
    HARMONY,
    LLAMA3,
    MISTRAL,
    PHI,
    PLAIN_WORDS,
    REASONING,
    UNSTABLE,
    Family,
    drawn,
    drawn_tokens,
    metaspace_chat,
)
from whiflash_infer.chat import Chat, ChatOptions
from whiflash_infer.errors import UserError
from whiflash_train.data.masks import MaskedRow, Masker, MaskRules
from whiflash_train.data.rows import parse_row
from whiflash_train.data.tally import BadRow

RULES = MaskRules(
    turns="all",
    reasoning=True,
    text="chat",
    max_length=1000,
    over_long="truncate",
    min_supervised=1,
)


@functools.cache
def chat_of(family: str | Family) -> Chat:
    return (FAMILIES[family] if isinstance(family, str) else family).chat()


def talk(*contents: str, **keys: Any) -> dict[str, Any]:
    """A row in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"messages": messages, **keys}


def outcomes(chat: Chat, *raws: dict[str, Any], **rules: Any) -> list[list[MaskedRow] | BadRow]:
    rows = [parse_row(raw, f"rows:{i}", roles={}) for i, raw in enumerate(raws, 1)]
    return Masker(chat, replace(RULES, **rules))(rows)


def masked(chat: Chat, raw: dict[str, Any], **rules: Any) -> list[MaskedRow]:
    (outcome,) = outcomes(chat, raw, **rules)
    assert not isinstance(outcome, BadRow), outcome
    return outcome


def drawings(chat: Chat, raw: dict[str, Any], **rules: Any) -> list[str]:
    return [drawn(chat, row) for row in masked(chat, raw, **rules)]


def reason(chat: Chat, raw: dict[str, Any], **rules: Any) -> str:
    (outcome,) = outcomes(chat, raw, **rules)
    assert isinstance(outcome, BadRow), outcome
    return outcome.reason


def undrawn(drawing: str) -> str:
    return drawing.replace("⟦", "").replace("⟧", "")


MULTI = talk("Hi", "Hello.", "And?", "Bye.")
SYSTEM = {"messages": [{"role": "system", "content": "Be brief."}, *MULTI["messages"]]}
TOOLS: dict[str, Any] = {
    "tools": [{"name": "weather"}],
    "messages": [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]},
        {"role": "tool", "content": "18"},
        {"role": "assistant", "content": "18 degrees."},
    ],
}
THOUGHT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "reasoning_content": "Add.", "content": "4"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "reasoning_content": "Again.", "content": "6"},
    ]
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single": (talk("Hi", "Hello."), {}),
    "multi-turn": (MULTI, {}),
    "last turn": (MULTI, {"turns": "last"}),
    "system": (SYSTEM, {}),
    "tools": (TOOLS, {}),
    "reasoning": (THOUGHT, {}),
    "reasoning out": (THOUGHT, {"reasoning": False}),
    "no reasoning out": (talk("Hi", "Hello."), {"reasoning": False}),
    "truncated": ({**MULTI, "truncated": True}, {}),
}

# What is supervised stands in ⟦ ⟧. A conversation with several drawings fans out to that many rows.
DRAWINGS: dict[tuple[str, str], list[str]] = {
    ("chatml", "single"): [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧"
    ],
    ("chatml", "multi-turn"): [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
    ],
    ("chatml", "last turn"): [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
    ],
    ("chatml", "system"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Bye.<|im_end|>⟧"
    ],
    ("chatml", "tools"): [
        "<|im_start|>tools\nweather<|im_end|>\n"
        "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>⟧\n'
        "<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n⟦18 degrees.<|im_end|>⟧"
    ],
    ("chatml", "reasoning"): [  # this template knows none
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n⟦6<|im_end|>⟧"
    ],
    ("chatml", "reasoning out"): [
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n⟦6<|im_end|>⟧"
    ],
    ("chatml", "truncated"): [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦Bye.⟧"
    ],
    ("llama3", "single"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
    ],
    ("llama3", "multi-turn"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye.<|eot_id|>⟧"
    ],
    ("llama3", "last turn"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye.<|eot_id|>⟧"
    ],
    ("llama3", "system"): [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye.<|eot_id|>⟧"
    ],
    ("llama3", "tools"): [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCall weather<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nRome?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "weather", "arguments": {"city": "Rome"}}<|eom_id|>⟧'
        "<|start_header_id|>ipython<|end_header_id|>\n\n18<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦18 degrees.<|eot_id|>⟧"
    ],
    ("llama3", "reasoning"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "⟦<thinking>Add.</thinking>\n4<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n3+3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "⟦<thinking>Again.</thinking>\n6<|eot_id|>⟧"
    ],
    ("llama3", "reasoning out"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "<thinking>Add.⟦</thinking>\n4<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n3+3?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "<thinking>Again.⟦</thinking>\n6<|eot_id|>⟧"
    ],
    ("llama3", "no reasoning out"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
    ],
    ("llama3", "truncated"): [
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Bye.⟧"
    ],
    ("gemma", "single"): [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello.<end_of_turn>⟧"
    ],
    ("gemma", "multi-turn"): [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello.<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦Bye.<end_of_turn>⟧"
    ],
    ("gemma", "last turn"): [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦Bye.<end_of_turn>⟧"
    ],
    ("gemma", "system"): [
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\n⟦Hello.<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦Bye.<end_of_turn>⟧"
    ],
    ("gemma", "reasoning"): [  # this template knows none
        "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n"
        "<start_of_turn>user\n3+3?<end_of_turn>\n<start_of_turn>model\n⟦6<end_of_turn>⟧"
    ],
    ("gemma", "reasoning out"): [
        "<bos><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n"
        "<start_of_turn>user\n3+3?<end_of_turn>\n<start_of_turn>model\n⟦6<end_of_turn>⟧"
    ],
    ("gemma", "truncated"): [
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello.<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦Bye.⟧"
    ],
    ("mistral", "single"): ["<s>[INST]Hi[/INST]⟦Hello.</s>⟧"],
    ("mistral", "multi-turn"): ["<s>[INST]Hi[/INST]⟦Hello.</s>⟧[INST]And?[/INST]⟦Bye.</s>⟧"],
    ("mistral", "last turn"): ["<s>[INST]Hi[/INST]Hello.</s>[INST]And?[/INST]⟦Bye.</s>⟧"],
    ("mistral", "system"): [  # moves to the last question
        "<s>[INST]Be brief.\n\nHi[/INST]⟦Hello.</s>⟧",
        "<s>[INST]Hi[/INST]Hello.</s>[INST]Be brief.\n\nAnd?[/INST]⟦Bye.</s>⟧",
    ],
    ("mistral", "tools"): [
        "<s>[TOOLS]weather[/TOOLS][INST]Rome?[/INST]"
        '⟦[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]</s>⟧'
        "[TOOL_RESULTS]18[/TOOL_RESULTS]⟦18 degrees.</s>⟧"
    ],
    ("mistral", "reasoning"): ["<s>[INST]2+2?[/INST]⟦4</s>⟧[INST]3+3?[/INST]⟦6</s>⟧"],
    ("mistral", "reasoning out"): ["<s>[INST]2+2?[/INST]⟦4</s>⟧[INST]3+3?[/INST]⟦6</s>⟧"],
    ("mistral", "truncated"): ["<s>[INST]Hi[/INST]⟦Hello.</s>⟧[INST]And?[/INST]⟦Bye.⟧"],
    ("harmony", "single"): [
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hello.<|return|>⟧"
    ],
    ("harmony", "multi-turn"): [
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hello.<|return|>⟧",
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|end|>"
        "<|start|>user<|message|>And?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Bye.<|return|>⟧",
    ],
    ("harmony", "last turn"): [
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|end|>"
        "<|start|>user<|message|>And?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Bye.<|return|>⟧"
    ],
    ("harmony", "system"): [
        "<|start|>system<|message|>Test.<|end|><|start|>developer<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hello.<|return|>⟧",
        "<|start|>system<|message|>Test.<|end|><|start|>developer<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|end|>"
        "<|start|>user<|message|>And?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Bye.<|return|>⟧",
    ],
    ("harmony", "tools"): [
        "<|start|>system<|message|>Test.<|end|><|start|>developer<|message|>weather<|end|>"
        "<|start|>user<|message|>Rome?<|end|>"
        '<|start|>assistant⟦ to=functions.weather<|channel|>commentary<|message|>{"city": "Rome"}'
        "<|call|>⟧<|start|>functions.weather to=assistant<|message|>18<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>18 degrees.<|return|>⟧"
    ],
    ("harmony", "reasoning"): [
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>Add.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|return|>⟧",
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>3+3?<|end|>"
        "<|start|>assistant⟦<|channel|>analysis<|message|>Again.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>6<|return|>⟧",
    ],
    ("harmony", "reasoning out"): [
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Add.⟦<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|return|>⟧",
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>4<|end|>"
        "<|start|>user<|message|>3+3?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Again.⟦<|end|>"
        "<|start|>assistant<|channel|>final<|message|>6<|return|>⟧",
    ],
    ("harmony", "truncated"): [  # only the last answer was cut
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hello.<|return|>⟧",
        "<|start|>system<|message|>Test.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|end|>"
        "<|start|>user<|message|>And?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Bye.⟧",
    ],
    ("reasoning", "single"): [
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧"
    ],
    ("reasoning", "multi-turn"): [
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nBye.<|im_end|>⟧",
    ],
    ("reasoning", "last turn"): [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nBye.<|im_end|>⟧"
    ],
    ("reasoning", "system"): [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nBye.<|im_end|>⟧",
    ],
    ("reasoning", "tools"): [  # the call's empty thinking goes as soon as it is not the last
        "<|im_start|>system\nweather<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>⟧',
        "<|im_start|>system\nweather<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n18<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n18 degrees.<|im_end|>⟧",
    ],
    ("reasoning", "reasoning"): [
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nAdd.\n</think>\n\n4<|im_end|>⟧",
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nAgain.\n</think>\n\n6<|im_end|>⟧",
    ],
    ("reasoning", "reasoning out"): [
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAdd.⟦\n</think>\n\n4<|im_end|>⟧",
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAgain.⟦\n</think>\n\n6<|im_end|>⟧",
    ],
    ("reasoning", "no reasoning out"): [
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦\n</think>\n\nHello.<|im_end|>⟧"
    ],
    ("reasoning", "truncated"): [
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nBye.⟧",
    ],
}


@pytest.mark.parametrize(("family", "case"), DRAWINGS)
def test_a_mask_is_its_drawing(family: str, case: str) -> None:
    raw, rules = CASES[case]
    chat = chat_of(family)
    rows = masked(chat, raw, **rules)
    assert [drawn(chat, row) for row in rows] == DRAWINGS[family, case]
    last_was_cut = [False] * (len(rows) - 1) + [case == "truncated"]
    assert [row.truncated for row in rows] == last_was_cut
    assert [row.turn for row in rows] == ([None] if len(rows) == 1 else [0, 1])


def test_a_conversation_that_the_template_refuses_is_a_bad_row_and_the_others_stay() -> None:
    # FAULTS U14: one such row ended the whole run.
    found = outcomes(GEMMA.chat(), TOOLS, talk("Hi", "Hello."), TOOLS)
    assert isinstance(found[0], BadRow)
    assert (found[0].reason, found[0].detail) == ("template_rejects", "This model calls no tools")
    assert isinstance(found[1], list)
    assert isinstance(found[2], BadRow)


def test_roles_that_the_template_does_not_take_are_a_bad_row() -> None:
    plain = {**TOOLS, "tools": None}
    assert reason(GEMMA.chat(), plain) == "template_rejects"


# ---- every path to a mask

NO_BOS_OF_ITS_OWN = replace(LLAMA3, opens_with_bos=False)

TWINS = [
    (family, case, drawing)
    for (family, case), found in DRAWINGS.items()
    for drawing in found
    if (family, case) != ("mistral", "tools")  # nothing of its own opens its second answer
]


def rules_of(case: str, drawing: str) -> dict[str, Any]:
    """Rules for a whole drawing given as text or tokens: turns of a fanned out row are its last."""
    return {**CASES[case][1], "turns": "last" if drawing.count("⟦") == 1 else "all"}


@pytest.mark.parametrize(("family", "case", "drawing"), TWINS)
def test_text_in_the_markers_has_the_mask_of_the_messages(
    family: str, case: str, drawing: str
) -> None:
    # FAULTS U19: an option was missing in one of the paths to a mask.
    raw = {"text": undrawn(drawing)}
    assert drawings(chat_of(family), raw, **rules_of(case, drawing)) == [drawing]


@pytest.mark.parametrize(("family", "case", "drawing"), TWINS)
def test_ready_tokens_have_the_mask_of_the_messages(family: str, case: str, drawing: str) -> None:
    chat = chat_of(family)
    ids, mask = tokens_of(chat, drawing + "\n")
    raw = {"input_ids": ids, "loss_mask": mask}
    assert drawings(chat, raw, **rules_of(case, drawing)) == [drawing]


def test_the_end_that_a_template_gave_to_a_truncated_answer_is_left_out_in_text_too() -> None:
    whole = undrawn(DRAWINGS["llama3", "multi-turn"][0])
    raw = {"text": whole, "finish_reason": "length"}
    assert drawings(LLAMA3.chat(), raw) == DRAWINGS["llama3", "truncated"]


def test_only_the_last_turn_of_ready_tokens_is_kept_where_that_is_the_rule() -> None:
    chat = CHATML.chat()
    ids, mask = tokens_of(chat, DRAWINGS["chatml", "multi-turn"][0])
    raw = {"input_ids": ids, "loss_mask": mask}
    assert drawings(chat, raw, turns="last") == DRAWINGS["chatml", "last turn"]


def tokens_of(chat: Chat, drawing: str) -> tuple[list[int], list[int]]:
    """Ids and mask as drawn, for tokenizers without merges."""
    ids, mask = [], []
    for i, stretch in enumerate(drawing.replace("⟧", "⟦").split("⟦")):
        part = chat.encode([stretch])[0]
        ids += part
        mask += [i % 2] * len(part)
    return ids, mask


def test_an_answer_that_follows_no_marker_of_its_own_is_not_supervised_in_text() -> None:
    (drawing,) = DRAWINGS["mistral", "tools"]
    unmarked = drawing.replace("⟦18 degrees.</s>⟧", "")  # it follows the tool's result at once
    unmarked = unmarked.removesuffix("[TOOL_RESULTS]18[/TOOL_RESULTS]")
    assert drawings(MISTRAL.chat(), {"text": undrawn(drawing)}) == [unmarked]


def test_text_in_the_markers_of_another_family_is_told_the_marker_that_was_looked_for() -> None:
    # FAULTS U02: hours of training with a loss of zero.
    (chatml,) = DRAWINGS["chatml", "single"]
    (outcome,) = outcomes(LLAMA3.chat(), {"text": undrawn(chatml)})
    assert isinstance(outcome, BadRow)
    assert outcome.reason == "no_answer"
    assert repr("<|start_header_id|>assistant<|end_header_id|>\n\n") in outcome.detail
    assert "data.mask.text=plain" in outcome.detail


def test_a_thousand_rows_of_text_are_a_thousand_rows() -> None:
    # FAULTS U11: such rows were ignored, or cut to the length of a list of one.
    (drawing,) = DRAWINGS["llama3", "single"]
    texts = [undrawn(drawing).replace("Hello", f"Hello {i}") for i in range(1000)]
    found = outcomes(LLAMA3.chat(), *({"text": text} for text in texts))
    assert sum(len(rows) for rows in found if isinstance(rows, list)) == 1000


BARE = r"""
{%- for message in messages %}
    {{- message.content + ('<|im_end|>' if message.role == 'assistant' else '\n') }}
{%- endfor %}
"""


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        # Cut in its first answer: nothing says where that ends, and a question stands behind it.
        (CHATML, "<|im_start|>assistant\nA<|im_start|>assistant\nB<|im_end|>", "unclosed_answer"),
        (PLAIN_WORDS, "user: A\nassistant: B\nuser: C\n", "no_markers"),
        (replace(CHATML, template=BARE), "A\nB<|im_end|>C\n", "no_markers"),
    ],
)
def test_text_whose_answers_have_no_certain_end_is_a_bad_row(
    family: Family, text: str, expected: str
) -> None:
    assert reason(family.chat(), {"text": text}) == expected


@pytest.mark.parametrize(
    ("family", "text", "drawing"),
    [
        (CHATML, "A tale.\n", "⟦A tale.\n⟧"),
        (CHATML, "One.<|endoftext|>Two.", "⟦One.<|endoftext|>Two.⟧"),
        (LLAMA3, "A tale.", "<|begin_of_text|>⟦A tale.⟧"),
        (LLAMA3, "<|begin_of_text|>A tale.", "<|begin_of_text|>⟦A tale.⟧"),
        (LLAMA3, "<|begin_of_text|><|begin_of_text|>A tale.", "<|begin_of_text|>⟦A tale.⟧"),
        (NO_BOS_OF_ITS_OWN, "A tale.", "⟦A tale.⟧"),
        (NO_BOS_OF_ITS_OWN, "<|begin_of_text|>A tale.", "<|begin_of_text|>⟦A tale.⟧"),
    ],
)
def test_all_of_a_plain_text_is_supervised_behind_one_bos(
    family: Family, text: str, drawing: str
) -> None:
    assert drawings(family.chat(), {"text": text}, text="plain") == [drawing]


def test_the_rule_for_running_text_leaves_conversations_alone() -> None:
    for text in ("chat", "plain"):
        assert drawings(CHATML.chat(), MULTI, text=text) == DRAWINGS["chatml", "multi-turn"]
    stopped = talk("Hi", "Hel<|endoftext|>lo.")
    assert reason(CHATML.chat(), stopped, text="plain") == "stop_token_inside_answer"


def test_ready_tokens_open_with_one_bos_and_are_tokens_of_the_target() -> None:
    chat = LLAMA3.chat()
    ids, mask = tokens_of(chat, DRAWINGS["llama3", "single"][0])
    (row,) = masked(chat, {"input_ids": [ids[0], *ids], "loss_mask": [0, *mask]})
    assert (row.ids, row.mask) == (ids, [bool(m) for m in mask])
    assert row.notes == ("second_bos_removed",)
    beyond = {"input_ids": [*ids, len(chat.tokenizer)], "loss_mask": [*mask, 1]}
    assert reason(chat, beyond) == "bad_input_ids"


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral"])
def test_a_template_that_prints_bos_gives_one_with_a_tokenizer_that_adds_one(family: str) -> None:
    # FAULTS U24: the tokenizer adds another.
    chat = chat_of(family)
    bos = chat.tokenizer.bos_token_id
    assert chat.tokenizer("Hi")["input_ids"][0] == bos
    rendered = {"text": undrawn(DRAWINGS[family, "multi-turn"][0])}
    for raw in (MULTI, rendered):
        (row,) = masked(chat, raw)
        assert row.ids[0] == bos
        assert row.ids.count(bos) == 1


# ---- cuts


def test_a_row_that_is_cut_in_an_answer_ends_there_and_no_end_is_added() -> None:
    # FAULTS U17. The prompt is 21 tokens: 4 special ones, 3 newlines, and 14 letters.
    chat = CHATML.chat()
    (row,) = masked(chat, talk("Hi", "Hello."), max_length=24)
    assert drawn(chat, row) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hel⟧"
    assert len(row.ids) == len(row.mask) == 24
    assert row.truncated
    assert row.notes == ("cut_to_max_length",)


@pytest.mark.parametrize(("max_length", "truncated"), [(27, True), (28, False), (52, False)])
def test_a_row_that_is_cut_behind_an_answer_ends_with_it(max_length: int, truncated: bool) -> None:
    chat = CHATML.chat()  # the second answer begins behind 52 tokens
    (row,) = masked(chat, MULTI, max_length=max_length)
    end = "" if truncated else "<|im_end|>"
    assert drawn(chat, row) == (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.{end}⟧"
    )
    assert row.truncated is truncated


@pytest.mark.parametrize("path", ["messages", "text", "tokens"])
def test_a_row_whose_answer_begins_behind_the_cut_is_dropped(path: str) -> None:
    # FAULTS U17: rows of ready tokens passed the filter.
    chat = CHATML.chat()
    (drawing,) = DRAWINGS["chatml", "single"]
    ids, mask = tokens_of(chat, drawing)
    raws = {
        "messages": talk("Hi", "Hello."),
        "text": {"text": undrawn(drawing)},
        "tokens": {"input_ids": ids, "loss_mask": mask},
    }
    bad = "too_few_supervised_tokens_after_cut"
    assert reason(chat, raws[path], max_length=21) == bad
    assert reason(chat, raws[path], max_length=23, min_supervised=3) == bad
    assert len(masked(chat, raws[path], max_length=24, min_supervised=3)) == 1
    assert reason(chat, raws[path], min_supervised=8) == "too_few_supervised_tokens"
    assert reason(chat, raws[path], max_length=27, over_long="drop") == "over_long"
    assert len(masked(chat, raws[path], max_length=28, over_long="drop")) == 1


MUTE = "{% for m in messages if m.role == 'user' %}{{ m.content + '[A]' }}{% endfor %}"


@pytest.mark.parametrize(
    ("raw", "rules", "expected"),
    [
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, {}, "too_few_supervised_tokens"),
        ({"text": "<|endoftext|>"}, {"text": "plain"}, "too_few_supervised_tokens"),
        (talk("Hi", "Hello."), {}, "too_few_supervised_tokens"),
        ({"text": "Hi[A]\n"}, {}, "no_answer"),
    ],
)
def test_a_row_without_anything_to_supervise_is_dropped_however_few_tokens_are_enough(
    raw: dict[str, Any], rules: dict[str, Any], expected: str
) -> None:
    chat = replace(CHATML, template=MUTE, bos="<|endoftext|>").chat()
    assert reason(chat, raw, min_supervised=0, **rules) == expected


def test_a_question_at_the_end_of_a_text_is_no_answer_and_not_the_last_turn() -> None:
    (drawing,) = DRAWINGS["chatml", "single"]
    prompt = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    for turns in ("all", "last"):
        raw = {"text": undrawn(drawing) + prompt}
        assert drawings(CHATML.chat(), raw, turns=turns) == [drawing]


def test_a_conversation_with_one_row_per_turn_keeps_the_turns_that_fit() -> None:
    found = drawings(REASONING.chat(), MULTI, max_length=60, over_long="drop")
    assert found == DRAWINGS["reasoning", "multi-turn"][:1]


def test_turns_behind_the_last_answer_are_cut_and_told() -> None:
    chat = CHATML.chat()
    (row,) = masked(chat, talk("Hi", "Hello.", "And?"))
    assert drawn(chat, row) == DRAWINGS["chatml", "single"][0]
    assert row.notes == ("unanswered_turns_cut",)
    assert reason(chat, talk("Hi")) == "no_answer"


# ---- templates


def test_a_template_that_changes_the_prompt_when_it_is_answered_is_named() -> None:
    (outcome,) = outcomes(UNSTABLE.chat(), talk("Hi", "Hello."))
    assert isinstance(outcome, BadRow)
    assert outcome.reason == "unstable_template"
    assert "'<|im_start|>1\\n" in outcome.detail
    assert "'<|im_start|>2\\n" in outcome.detail


@pytest.mark.parametrize("family", ["chatml", "gemma", "mistral"])
def test_reasoning_that_a_template_does_not_render_is_told(family: str) -> None:
    assert masked(chat_of(family), THOUGHT)[0].notes == ("reasoning_not_rendered",)
    assert masked(chat_of(family), MULTI)[0].notes == ()


def test_one_row_per_turn_is_told() -> None:
    assert [row.notes for row in masked(HARMONY.chat(), MULTI)] == [("one_row_per_turn",)] * 2


@pytest.mark.parametrize(
    ("enable_thinking", "drawing"),
    [
        (None, "⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧"),
        (True, "⟦<think>\n\n</think>\n\nHello.<|im_end|>⟧"),
        (False, "<think>\n\n</think>\n\n⟦Hello.<|im_end|>⟧"),
    ],
)
def test_the_mode_of_thinking_decides_who_writes_the_empty_thought(
    enable_thinking: bool | None, drawing: str
) -> None:
    # FAULTS U03: trained on a rendering that the server never makes.
    chat = REASONING.chat(ChatOptions(enable_thinking=enable_thinking))
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert drawings(chat, talk("Hi", "Hello.")) == [prompt + drawing]
    assert drawings(chat, {"text": undrawn(prompt + drawing)}) == [prompt + drawing]


def test_reasoning_is_refused_where_the_prompt_says_there_is_none() -> None:
    chat = REASONING.chat(ChatOptions(enable_thinking=False))
    assert reason(chat, THOUGHT) == "unstable_template"


def test_generation_tags_and_the_boundary_give_the_same_mask() -> None:
    # FAULTS U07: without the tags, transformers' mask is all zero.
    chat = CHATML_TAGGED.chat()
    theirs = chat.tokenizer.apply_chat_template(
        MULTI["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (row,) = masked(chat, MULTI)
    end = len(row.ids)
    assert row.ids == theirs["input_ids"][:end]
    assert row.mask == [bool(m) for m in theirs["assistant_masks"][:end]]
    assert not any(theirs["assistant_masks"][end:])
    assert drawn(chat, row) == DRAWINGS["chatml", "multi-turn"][0]


def test_a_target_without_a_template_is_told_how_to_give_one() -> None:
    # FAULTS U08
    chat = replace(CHATML, template=None).chat()
    with pytest.raises(UserError, match=r"chat\.template_file"):
        outcomes(chat, MULTI)
    assert drawings(chat, {"text": "A tale."}, text="plain") == ["⟦A tale.⟧"]


# ---- ends of turns


@pytest.mark.parametrize("stops", [("<eos>",), ("<eos>", "<end_of_turn>")])
def test_an_end_of_turn_that_is_not_eos_ends_repeated_answers_all_the_same(
    stops: tuple[str, ...],
) -> None:
    # FAULTS U09: text of the answer was taken for the prompt where the turn does not end with eos.
    chat = replace(GEMMA, stops=stops).chat()
    assert drawings(chat, talk("model", "model", "model", "model")) == [
        "<bos><start_of_turn>user\nmodel<end_of_turn>\n"
        "<start_of_turn>model\n⟦model<end_of_turn>⟧\n"
        "<start_of_turn>user\nmodel<end_of_turn>\n"
        "<start_of_turn>model\n⟦model<end_of_turn>⟧"
    ]


def test_a_special_token_behind_the_end_of_the_turn_is_not_the_answers() -> None:
    # Phi-3's whole text ends with <|endoftext|>, which no answer does: a row for every turn.
    first = "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello.<|end|>⟧"
    second = f"{undrawn(first)}\n<|user|>\nAnd?<|end|>\n<|assistant|>\n⟦Bye.<|end|>⟧"
    assert drawings(PHI.chat(), MULTI) == [first, second]
    both = second.replace("Hello.<|end|>", "⟦Hello.<|end|>⟧")
    assert drawings(PHI.chat(), {"text": undrawn(both) + "\n<|endoftext|>"}) == [both]


@pytest.mark.parametrize(
    "raw",
    [
        talk("Hi", "Hel<|endoftext|>lo."),
        talk("Hi", "Hel<|im_end|>lo."),
        {"text": "<|im_start|>assistant\nHel<|endoftext|>lo.<|im_end|>"},
    ],
)
def test_an_answer_with_a_stop_token_inside_is_dropped(raw: dict[str, Any]) -> None:
    assert reason(CHATML.chat(), raw) == "stop_token_inside_answer"


def test_a_stop_token_that_the_tokenizer_lacks_changes_nothing() -> None:
    chat = CHATML.chat()
    wider = Chat(chat.tokenizer, chat.stop_ids | {len(chat.tokenizer) + 7})
    (drawing,) = DRAWINGS["chatml", "multi-turn"]
    assert drawings(wider, MULTI) == drawings(wider, {"text": undrawn(drawing)}) == [drawing]


def test_a_stop_token_in_a_question_is_no_concern_of_the_mask() -> None:
    assert drawings(CHATML.chat(), talk("<|endoftext|>?", "Hello.")) == [
        "<|im_start|>user\n<|endoftext|>?<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧"
    ]


def test_an_answer_without_any_end_is_supervised_to_its_end() -> None:
    found = drawings(PLAIN_WORDS.chat(), talk("Hi", "Hello."))
    assert found == ["user: Hi\nassistant: ⟦Hello.\n⟧"]


@pytest.mark.parametrize("answer", ["  Hello. \n", "Grüße, 你好 🙂", "assistant\n", "⁂\u2028⁂"])
def test_an_answer_is_supervised_as_it_stands(answer: str) -> None:
    assert drawings(CHATML.chat(), talk("Hi", answer)) == [
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦{answer}<|im_end|>⟧"
    ]


# ---- tokens across a boundary


def test_a_token_that_would_join_prompt_and_answer_is_split_as_the_server_splits_it() -> None:
    chat = CHATML_MERGING.chat()
    (row,) = masked(chat, talk("Q\n\nQ", "\nA"))
    assert drawn_tokens(chat, row) == (
        "<|im_start|>|u|s|e|r|Ċ|Q|ĊĊ|Q|<|im_end|>|Ċ|<|im_start|>|a|s|s|i|s|t|a|n|t|Ċ|#Ċ|#A|#<|im_end|>"
    )
    prompt = chat.prompt_ids([{"role": "user", "content": "Q\n\nQ"}])
    assert row.ids[: len(prompt)] == prompt


def test_reasoning_left_out_ends_with_the_token_that_holds_its_last_letter() -> None:
    chat = replace(REASONING, merges=CHATML_MERGING.merges).chat()
    (row, _) = masked(chat, THOUGHT, reasoning=False)
    assert drawn_tokens(chat, row).endswith("|<think>|Ċ|A|d|d|.Ċ|#</think>|#ĊĊ|#4|#<|im_end|>")


# One byte of the smile already decodes to one letter; an x is what the end is probed with.
@pytest.mark.parametrize("thought", ["Smile 🙂", "Max"])
def test_reasoning_left_out_is_left_out_to_its_last_letter(thought: str) -> None:
    said = {"role": "assistant", "reasoning_content": thought, "content": "🙂"}
    raw = {"messages": [{"role": "user", "content": "Hi"}, said]}
    assert drawings(REASONING.chat(), raw, reasoning=False) == [
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n{thought}⟦\n</think>\n\n🙂<|im_end|>⟧"
    ]


def test_words_that_begin_with_their_space_keep_it_in_the_answer() -> None:
    chat = metaspace_chat()
    (row,) = masked(chat, talk("Hi", "Bye."))
    prompt = "<s>|[|I|N|S|T|]|▁Hi|▁|[|/|I|N|S|T|]|"
    assert drawn_tokens(chat, row) == prompt + "#▁Bye|#.|#</s>"


def test_a_space_that_cannot_be_split_from_its_word_is_a_bad_row() -> None:
    # The prompt ends with the space that the tokenizer holds to be the answer's.
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"
    template += "{{ 'assistant: ' if add_generation_prompt }}"
    assert reason(metaspace_chat(template), talk("Hi", "Bye.")) == "boundary_inside_token"


# ---- any conversation

CONTENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    str.strip
)
THOUGHTS = st.none() | CONTENT
TURNS = st.lists(st.tuples(CONTENT, THOUGHTS, CONTENT), min_size=1, max_size=4)


def conversation(turns: list[tuple[str, str | None, str]]) -> dict[str, Any]:
    messages = []
    for question, thought, answer in turns:
        said = {"role": "assistant", "reasoning_content": thought, "content": answer}
        messages += [{"role": "user", "content": question}, said]
    return {"messages": messages}


def stretches(chat: Chat, row: MaskedRow) -> list[str]:
    """The supervised texts of a row."""
    return [part.partition("⟧")[0] for part in drawn(chat, row).split("⟦")[1:]]


@pytest.mark.parametrize("family", [CHATML, CHATML_MERGING], ids=["bytes", "merges"])
@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_the_supervised_tokens_are_the_answers_and_their_ends(
    family: Family, turns: list[tuple[str, str | None, str]]
) -> None:
    chat = chat_of(family)
    (row,) = masked(chat, conversation(turns))
    assert stretches(chat, row) == [f"{answer}<|im_end|>" for _, _, answer in turns]


@settings(max_examples=40, deadline=None)
@given(turns=TURNS)
def test_every_turn_of_a_history_that_is_rewritten_has_its_own_answer_supervised(
    turns: list[tuple[str, str | None, str]],
) -> None:
    chat = chat_of("reasoning")
    found = [stretches(chat, row) for row in masked(chat, conversation(turns))]
    assert found == [
        [f"<think>\n{thought or ''}\n</think>\n\n{answer}<|im_end|>"]
        for _, thought, answer in turns
    ]
