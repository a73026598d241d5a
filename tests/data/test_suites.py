from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tests.data.templates import CHATML, CHATML_TAGGED, GEMMA, MISTRAL, PHI, PLAIN_WORDS
from tests.fakes import tiny_target
from whiflash_infer.benchmark import Question
from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.data.rows import AnyRow, Conversation, PlainText, parse_row
from whiflash_train.data.tally import Tally
from whiflash_train.entry import check_keys, entry_point
from whiflash_train.evaluation.suites import (
    Suite,
    SuiteSettings,
    load_questions,
    make_suite,
    result_role,
    tool_calls_written,
)

CONF = Path(__file__).parents[2] / "conf"
SETTINGS: dict[str, Any] = {
    "limit": None,
    "ask": "question",
    "turns": "all",
    "tool_calls": "auto",
    "max_prompt_tokens": None,
    "max_new_tokens": 4,
}
ASKED = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"bird": "owl"}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds birds."}}
CALL_TEXT = '<tool_call>\n{"name": "find", "arguments": {"bird": "owl"}}\n</tool_call>'
RUN = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "Owls?"},
    {"role": "assistant", "content": "Which ones?"},
    {"role": "user", "content": "All."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": '{"owls": 2}'},
    {"role": "user", "content": "Bye."},
]


def row(id_: str, category: str = "all", **shape: Any) -> AnyRow:
    return parse_row({"id": id_, "category": category, **shape}, f"rows:{id_}", roles={})


def suite_of(
    rows: list[AnyRow], chat: Chat | None = None, context: int = 4096, **changes: Any
) -> Suite:
    settings = SuiteSettings(**{**SETTINGS, **changes})
    tally = Tally(read=len(rows))
    return make_suite(rows, chat or CHATML.chat(), settings, tally, context=context)


def text_of(question: Question, chat: Chat | None = None) -> str:
    return (chat or CHATML.chat()).tokenizer.decode(question.ids)


# Limits -----------------------------------------------------------------------------------------


def test_a_limit_takes_as_many_of_each_category_and_all_of_one_that_has_fewer() -> None:
    counts = {"a": 5, "b": 1, "c": 3}
    rows = [row(f"{c}{i}", c, prompt=f"{c}{i}") for c, n in counts.items() for i in range(n)]
    suite = suite_of(rows, limit=8)  # 8 / 3: two of each
    assert [q.id for q in suite.questions] == ["a0", "a1", "b0", "c0", "c1"]
    assert suite.facts["conversations"] == {"a": 2, "b": 1, "c": 2}
    assert suite.tally.dropped == {"over_limit": 4}
    assert [q.id for q in suite_of(rows, limit=1).questions] == ["a0", "b0", "c0"]
    assert len(suite_of(rows).questions) == 9


def test_a_row_that_cannot_be_asked_leaves_its_place_in_the_limit_to_the_next() -> None:
    rows = [row("long", prompt="x" * 90), row("short", prompt="x"), row("next", prompt="y")]
    suite = suite_of(rows, limit=1, max_prompt_tokens=60)
    assert [q.id for q in suite.questions] == ["short"]
    assert suite.tally.dropped == {"prompt_too_long": 1, "over_limit": 1}


def test_conversations_are_the_unit_of_a_limit_whatever_their_turns() -> None:
    runs = [row(f"run{i}", "agent", messages=RUN) for i in range(3)]
    rows = [*runs, row("text", "chat", prompt="Hi", answer="Hello")]
    suite = suite_of(rows, limit=4, ask="every_turn")
    assert [q.id for q in suite.questions] == [
        *("run0", "run0#2", "run0#3"),
        *("run1", "run1#2", "run1#3"),
        "text",
    ]


# Turns ------------------------------------------------------------------------------------------


def test_a_later_turn_is_asked_behind_the_given_answer() -> None:
    chat = CHATML.chat()
    suite = suite_of([row("r", "chat", turns=["One?", "Two?", "Three?"])], chat)
    (first,) = suite.questions
    assert text_of(first) == "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
    assert first.then is not None
    (end,) = chat.encode(["<|im_end|>"])[0]
    second = first.then([*chat.encode(["A one."])[0], end, end])
    assert second is not None
    assert (second.id, second.category, second.turn) == ("r#2", "chat", 2)
    assert text_of(second) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nA one.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.then is not None
    third = second.then(chat.encode(["A two."])[0])
    assert third is not None
    assert (third.id, third.then) == ("r#3", None)
    assert text_of(third).startswith(text_of(second) + "A two.<|im_end|>\n")
    assert first.then([]) is not None  # it can be asked again, with another answer


@pytest.mark.parametrize(("turns", "count"), [("all", 3), ("first", 1), (1, 1), (2, 2), (9, 3)])
def test_only_the_wanted_turns_of_a_conversation_are_asked(turns: Any, count: int) -> None:
    question: Question | None = suite_of(
        [row("r", turns=["One?", "Two?", "Three?"])], turns=turns
    ).questions[0]
    asked = 0
    while question is not None:
        asked += 1
        question = question.then([]) if question.then else None
    assert asked == count
    run = suite_of([row("r", messages=RUN)], ask="every_turn", turns=turns)
    assert len(run.questions) == count


def test_a_later_turn_for_which_there_is_no_room_is_not_asked_but_counted() -> None:
    suite = suite_of([row("r", turns=["One?", "Two?"])], max_prompt_tokens=70)
    (first,) = suite.questions
    assert first.then is not None
    assert first.then([]) is not None
    assert first.then(CHATML.chat().encode(["x" * 50])[0]) is None
    assert suite.tally.notes == {"turn_prompt_too_long": 1}


def test_the_hash_of_the_prompts_covers_every_turn_that_may_be_asked() -> None:
    def hashed(asked: list[str], **changes: Any) -> str:
        return suite_of([row("r", turns=asked)], **changes).prompt_hash

    same = hashed(["One?", "Two?"])
    assert hashed(["One?", "Two?"]) == same
    others = [hashed(["One?", "Three?"]), hashed(["One?"]), hashed(["Two?", "Two?"])]
    assert same not in others
    assert hashed(["One?", "Two?"], turns="first") == hashed(["One?"])


# Recorded runs ----------------------------------------------------------------------------------


def test_a_recorded_run_is_asked_turn_by_turn_in_its_true_context() -> None:
    suite = suite_of([row("r", "agent", messages=RUN)], ask="every_turn")
    assert [(q.id, q.category, q.turn) for q in suite.questions] == [
        ("r", "agent/prose", 1),
        ("r#2", "agent/tool_call", 2),
        ("r#3", "agent/json", 3),
    ]
    opening = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\nOwls?<|im_end|>\n"
    prompt = "<|im_start|>assistant\n"
    middle = f"{prompt}Which ones?<|im_end|>\n<|im_start|>user\nAll.<|im_end|>\n"
    call = '<tool_call>{"name": "find", "arguments": {"bird": "owl"}}</tool_call>'
    called = f"{prompt}{call}<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>\n"
    assert [text_of(q) for q in suite.questions] == [
        opening + prompt,
        opening + middle + prompt,
        opening + middle + called + prompt,
    ]
    assert all(q.then is None for q in suite.questions)
    assert suite.facts["tool_calls"] == "template"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"content": "So it is."}, "prose"),
        ({"content": "I look.", "tool_calls": [CALL]}, "tool_call"),
        ({"content": "Try this:\n```sh\ngrep -rn owl src | head\n```"}, "code"),
        ({"content": "Yes.", "reasoning_content": "They asked for owls, so I count."}, "reasoning"),
        ({"content": "<think>They asked for owls.</think>Two."}, "reasoning"),
    ],
)
def test_the_category_of_a_recorded_turn_names_the_kind_of_most_of_its_text(
    answer: dict[str, Any], kind: str
) -> None:
    messages = [ASKED, {"role": "assistant", **answer}]
    suite = suite_of([row("r", "agent", messages=messages)], ask="every_turn")
    assert [q.category for q in suite.questions] == [f"agent/{kind}"]


def test_turns_whose_context_is_too_long_are_left_out_and_counted() -> None:
    rows = [row("r", messages=RUN), row("s", messages=[{**ASKED, "content": "x" * 200}, *RUN[2:3]])]
    sizes = [len(q.ids) for q in suite_of(rows[:1], ask="every_turn").questions]
    limits: list[dict[str, Any]] = [{"max_prompt_tokens": sizes[1]}, {"context": sizes[1] + 4}]
    for changes in limits:
        suite = suite_of(rows, ask="every_turn", **changes)
        assert [q.id for q in suite.questions] == ["r", "r#2"]
        assert suite.tally.notes == {"turn_prompt_too_long": 1}
        assert suite.tally.dropped == {"prompt_too_long": 1}


def test_a_run_of_a_software_agent_is_replayed_too() -> None:
    steps = [
        {"response": "Look.\n```\nls\n```", "observation": "owl.py", "query": RUN[:2]},
        {"response": "Run it.\n```\npython owl.py --all --verbose\n```", "observation": "ok"},
    ]
    suite = suite_of([row("r", "agent", trajectory=steps)], ask="every_turn")
    assert [q.category for q in suite.questions] == ["agent/code", "agent/code"]
    assert text_of(suite.questions[1]).endswith(
        "<|im_start|>assistant\nLook.\n```\nls\n```<|im_end|>\n"
        "<|im_start|>user\nowl.py<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("rows", "ask", "reason"),
    [
        ([PlainText(id="t", category="all", place="rows:t", text="x")], "question", "no_question"),
        (
            [PlainText(id="t", category="all", place="rows:t", text="x")],
            "every_turn",
            "no_question",
        ),
        ([row("r", prompt="Hi")], "every_turn", "no_answer"),
    ],
)
def test_rows_without_anything_to_ask_are_told_with_their_reason(
    rows: list[AnyRow], ask: str, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"no prompt to evaluate.*{reason} 1"):
        suite_of(rows, ask=ask)


def test_ids_are_unique_even_where_a_row_is_named_like_a_later_turn() -> None:
    rows = [row("r", turns=["One?", "Two?"]), row("r#2", prompt="x"), row("r", prompt="y")]
    suite = suite_of(rows)
    assert [q.id for q in suite.questions] == ["r"]
    assert suite.tally.dropped == {"duplicate_id": 2}


# Tool calls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat", "written", "role"),
    [
        (CHATML.chat(), "template", "tool"),
        (MISTRAL.chat(), "template", "tool"),
        (CHATML_TAGGED.chat(), "text", "tool"),
        (PHI.chat(), "text", "tool"),
        (GEMMA.chat(), "text", "user"),
    ],
    ids=["chatml", "mistral", "tagged", "phi", "gemma"],
)
def test_calls_are_left_to_the_template_where_it_shows_them(
    chat: Chat, written: str, role: str
) -> None:
    rows = [row("r", messages=RUN[1:], tools=[TOOL])]
    assert tool_calls_written(rows, chat, "auto") == written
    assert result_role(chat) == role
    suite = suite_of(rows, chat, ask="every_turn")
    assert [q.id for q in suite.questions] == ["r", "r#2", "r#3"]
    text = text_of(suite.questions[2], chat)
    assert "find" in text
    assert '"bird": "owl"' in text
    assert "two" in text


def test_tools_calls_and_results_can_stand_in_the_text_of_messages() -> None:
    rows = [row("r", "agent", messages=RUN, tools=[TOOL])]
    suite = suite_of(rows, ask="every_turn", tool_calls="text")
    assert suite.facts["tool_calls"] == "text"
    text = text_of(suite.questions[2])
    assert text.startswith("<|im_start|>system\nHelp.\n\n")
    assert '{"name": "find", "description": "Finds birds."}' in text
    assert f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>" in text
    assert [q.category for q in suite.questions][1] == "agent/tool_call"


def test_without_a_role_for_results_they_are_one_user_turn() -> None:
    chat = GEMMA.chat()
    results = [{"role": "tool", "content": "two"}, {"role": "tool", "content": "three"}]
    messages = [*RUN[1:4], {**RUN[4], "content": "I look."}, *results, RUN[6]]
    suite = suite_of([row("r", messages=messages)], chat, ask="every_turn")
    assert text_of(suite.questions[2], chat).endswith(
        f"<start_of_turn>model\nI look.\n{CALL_TEXT}<end_of_turn>\n<start_of_turn>user\n"
        "<tool_response>\ntwo\n</tool_response>\n<tool_response>\nthree\n</tool_response>"
        "<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_template_that_shows_no_call_loses_the_turns_behind_it_when_it_must_write_them() -> None:
    rows = [row("r", messages=RUN)]
    suite = suite_of(rows, PLAIN_WORDS.chat(), ask="every_turn", tool_calls="template")
    assert [q.id for q in suite.questions] == ["r", "r#2"]
    assert suite.tally.notes == {"turn_template_rejects": 1}


def test_rows_without_tools_are_written_as_they_are() -> None:
    for wanted in ("auto", "template", "text"):
        suite = suite_of([row("r", prompt="Hi")], tool_calls=wanted)
        assert suite.facts["tool_calls"] is None
        assert text_of(suite.questions[0]).startswith("<|im_start|>user\nHi<|im_end|>")


# Configuration ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(str(tmp_path_factory.mktemp("target")))


def composed(*overrides: str) -> DictConfig:
    root = [f"paths.root={CONF.parent}", *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("evaluate", overrides=root)


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


MEASURED = {  # suite: source, split
    "builtin": ("builtin_evaluation", "evaluation"),
    "spec_bench": ("spec_bench", "train"),
    "mt_bench": ("mt_bench", "train"),
    "gsm8k": ("gsm8k", "test"),
    "humaneval": ("humaneval", "test"),
    "mbpp": ("mbpp", "test"),
    "math_500": ("math_500", "test"),
    "tau_bench": ("tau_bench", "gpt-4o-airline"),
    "file": ("file", "train"),
    "agent": ("file", "train"),
}


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONF / "suite").glob("*.yaml")))
def test_a_suite_is_one_source_with_the_split_that_is_for_measuring(name: str) -> None:
    source, split = MEASURED[name]
    own = source == "file"
    overrides = [f"suite={name}", *(["evaluate.source.file.path=x.jsonl"] if own else [])]
    check_keys(CONF, "evaluate", overrides)
    cfg = composed(*overrides)
    assert list(cfg.evaluate.source) == [source]
    assert cfg.evaluate.source[source].split == split
    replayed = name in ("agent", "tau_bench")
    assert cfg.evaluate.ask == ("every_turn" if replayed else "question")
    assert composed(*overrides, "evaluate.ask=question").evaluate.ask == "question"


@pytest.mark.parametrize("name", ["file", "agent"])
def test_a_suite_of_own_data_asks_for_its_path(name: str) -> None:
    with pytest.raises(UserError, match=r"must also give: evaluate\.source\.file\.path="):
        check_keys(CONF, "evaluate", [f"suite={name}"])


def test_sources_may_still_be_chosen_one_by_one() -> None:
    chosen = ["source@evaluate.source=[mt_bench,gsm8k]", "evaluate.source.gsm8k.split=test"]
    check_keys(CONF, "evaluate", chosen)
    cfg = composed(*chosen)
    assert list(cfg.evaluate.source) == ["mt_bench", "gsm8k"]


def test_keys_of_a_source_that_is_not_chosen_are_told(target: Target) -> None:
    chosen = ["source@evaluate.source=[mt_bench]", "+evaluate.source.gsm8k.split=test"]
    told = r"evaluate\.source\.gsm8k is set in part only \(split\): name gsm8k in source@evaluate"
    with pytest.raises(UserError, match=told):
        load_questions(composed(*chosen), target, None)


def test_the_builtin_suite_has_every_prompt_of_its_file(target: Target) -> None:
    suite = load_questions(composed(), target, None)
    lines = (CONF.parent / "data_prep/prompts/evaluation.jsonl").read_text().splitlines()
    assert [q.id for q in suite.questions] == [json.loads(line)["id"] for line in lines]
    assert list(suite.facts["suite"]) == ["builtin_evaluation"]
    assert suite.facts["suite"]["builtin_evaluation"].endswith("evaluation.jsonl")


def test_a_file_of_runs_is_replayed_and_what_was_left_out_is_told(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [{"id": f"r{i}", "traj": RUN} for i in range(3)]
    path = written(tmp_path / "runs.jsonl", [*runs, {"id": "bad", "traj": []}])
    cfg = composed("suite=agent", f"evaluate.source.file.path={path}")
    suite = load_questions(cfg, target, 2)
    assert [q.id for q in suite.questions] == ["r0", "r0#2", "r0#3", "r1", "r1#2", "r1#3"]
    assert {q.category for q in suite.questions} == {
        "agent/prose", "agent/tool_call", "agent/json"
    }  # fmt: skip
    assert suite.facts["suite"] == {"file": path.name}
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "dropped 2 (no_messages 1, over_limit 1)" in told
    assert "a limit of 2 takes 2 of each category" in told
    assert "tool calls stand in the text of messages" in told


def test_a_category_that_has_too_few_is_named(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "x", "category": c} for c in ("many", "many", "few", "many")]
    path = written(tmp_path / "rows.jsonl", rows)
    load_questions(composed("suite=file", f"evaluate.source.file.path={path}"), target, 4)
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "a limit of 4 takes 2 of each category; fewer there are in few 1" in told


def test_rows_of_several_sources_are_told_apart_by_their_ids(
    target: Target, tmp_path: Path
) -> None:
    path = written(tmp_path / "rows.jsonl", [{"id": "chat-eval-0001", "prompt": "x"}])
    chosen = "source@evaluate.source=[builtin_evaluation,file]"
    suite = load_questions(composed(chosen, f"evaluate.source.file.path={path}"), target, None)
    found = {q.id for q in suite.questions}
    assert {"file/chat-eval-0001", "builtin_evaluation/chat-eval-0001"} <= found


def test_a_recording_of_the_hub_is_named_with_what_was_chosen_of_it(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + 1?", "answer": "x"} for i in range(3)]
    path = written(tmp_path / "gsm8k.jsonl", rows)
    cfg = composed("suite=gsm8k", f"evaluate.source.gsm8k.path={path}")
    suite = load_questions(cfg, tiny_target(str(tmp_path)), 2)
    assert [q.category for q in suite.questions] == ["maths", "maths"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("ask=everything", "evaluate.ask is 'everything': it must be question or every_turn"),
        ("turns=0", "evaluate.turns is 0: it must be all or first or a number from 1"),
        ("turns=none", "evaluate.turns is 'none'"),
        ("tool_calls=json", "evaluate.tool_calls is 'json': it must be auto or template or text"),
        ("max_prompt_tokens=0", "evaluate.max_prompt_tokens is 0"),
    ],
)
def test_a_setting_that_is_none_of_those_there_are_is_refused_by_its_key(
    override: str, told: str, target: Target
) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        load_questions(composed(f"evaluate.{override}"), target, None)


def test_a_limit_of_nothing_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match=r"evaluate\.limit is 0"):
        load_questions(composed(), target, 0)


@pytest.mark.parametrize("typed", [["--limit", "3"], ["--limit=3"], ["evaluate.limit=3"]])
def test_the_limit_of_an_evaluation_can_be_typed_as_a_flag(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "hydra.run.dir=run", *typed])
    entry_point("evaluate", root=CONF.parent)(lambda cfg: found.append(cfg.evaluate.limit))()
    assert found == [3]


@pytest.mark.parametrize("typed", [["--limit"], ["--limit", "many"], ["--limit="]])
def test_a_limit_without_a_number_is_refused_in_one_line(
    typed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *typed])
    with pytest.raises(SystemExit) as stopped:
        entry_point("evaluate", root=CONF.parent)(lambda _: None)()
    assert stopped.value.code == 2
    assert "--limit needs a number" in capsys.readouterr().err


def test_a_conversation_is_asked_up_to_its_last_question_with_its_recorded_answers() -> None:
    (question,) = suite_of([row("r", messages=RUN[:3])]).questions
    assert text_of(question).endswith("user\nOwls?<|im_end|>\n<|im_start|>assistant\n")
    (question,) = suite_of([row("r", messages=RUN)]).questions
    assert text_of(question).endswith("user\nBye.<|im_end|>\n<|im_start|>assistant\n")
    assert isinstance(row("r", messages=RUN), Conversation)
