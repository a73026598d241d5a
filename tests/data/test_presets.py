"""The presets of conf/source, each on a row in its set's own schema."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from whiflash_train.data.rows import Conversation
from whiflash_train.data.sources import DataSource
from whiflash_train.data.tally import Tally

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
PRESETS = sorted(p.stem for p in (CONF / "source").glob("[!_]*.yaml"))
FOR_MEASURING = [
    "builtin_evaluation",
    "humaneval",
    "math_500",
    "mbpp",
    "mt_bench",
    "spec_bench",
    "tau_bench",
]
PRIMARY = f"""
defaults:
  - source: [builtin]
  - source@evaluate.source: [builtin_evaluation]
  - _self_
paths: {{root: {ROOT}}}
evaluate: {{limit: null}}
hydra: {{searchpath: ["file://{CONF}"]}}
"""


@dataclass(frozen=True)
class Golden:
    """file: the kind in which the set is published. row: as published, of invented content."""

    file: str
    row: dict[str, Any]
    expected: Conversation


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


HUMANEVAL_CODE = '''def add_all(values: list[int]) -> int:
    """Add the values up.
    >>> add_all([1, 2])
    3
    """
'''

GOLDEN = {
    "builtin": Golden(
        "rows.jsonl",
        {"id": "code-train-9", "category": "code", "messages": [user("Sort a list of words.")]},
        Conversation(
            id="code-train-9",
            category="code",
            place="rows.jsonl:1",
            messages=[user("Sort a list of words.")],
        ),
    ),
    "builtin_evaluation": Golden(
        "rows.jsonl",
        {"id": "json-eval-9", "category": "json", "messages": [user("Two pets as JSON.")]},
        Conversation(
            id="json-eval-9",
            category="json",
            place="rows.jsonl:1",
            messages=[user("Two pets as JSON.")],
        ),
    ),
    "file": Golden(
        "rows.jsonl",
        {"prompt": "Name a river.", "answer": "The Elbe."},
        Conversation(
            id="rows.jsonl:1",
            category="all",
            place="rows.jsonl:1",
            messages=[user("Name a river."), assistant("The Elbe.")],
        ),
    ),
    "hub": Golden(
        "rows.parquet",
        {"messages": [user("Name a lake."), assistant("Lake Constance.")]},
        Conversation(
            id="rows.parquet:1",
            category="all",
            place="rows.parquet:1",
            messages=[user("Name a lake."), assistant("Lake Constance.")],
        ),
    ),
    "ultrachat_200k": Golden(
        "rows.parquet",
        {
            "prompt": "Why is bread brown outside?",
            "prompt_id": "0b1e5d",
            "messages": [
                {"content": "Why is bread brown outside?", "role": "user"},
                {"content": "Its sugars brown in the heat.", "role": "assistant"},
                {"content": "And inside?", "role": "user"},
                {"content": "It stays too wet to brown.", "role": "assistant"},
            ],
        },
        Conversation(
            id="0b1e5d",
            category="chat",
            place="rows.parquet:1",
            messages=[
                user("Why is bread brown outside?"),
                assistant("Its sugars brown in the heat."),
                user("And inside?"),
                assistant("It stays too wet to brown."),
            ],
        ),
    ),
    "sharegpt": Golden(
        "rows.json",
        {
            "id": "kT3xQ_0",
            "conversations": [
                {"from": "human", "value": "A name for a grey cat?"},
                {"from": "gpt", "value": "Ash."},
            ],
        },
        Conversation(
            id="kT3xQ_0",
            category="chat",
            place="rows.json[0]",
            messages=[user("A name for a grey cat?"), assistant("Ash.")],
        ),
    ),
    "open_perfectblend": Golden(
        "rows.parquet",
        {
            "conversations": [
                {"from": "human", "value": "What is 3 times 12?"},
                {"from": "gpt", "value": "It is 36."},
            ],
            "source": "someone/some-maths",
        },
        Conversation(
            id="rows.parquet:1",
            category="someone/some-maths",
            place="rows.parquet:1",
            messages=[user("What is 3 times 12?"), assistant("It is 36.")],
        ),
    ),
    "gsm8k": Golden(
        "rows.parquet",
        {
            "question": "Ina has 4 boxes of 6 eggs. How many eggs?",
            "answer": "She has 4*6=<<4*6=24>>24 eggs.\n#### 24",
        },
        Conversation(
            id="rows.parquet:1",
            category="maths",
            place="rows.parquet:1",
            messages=[
                user("Ina has 4 boxes of 6 eggs. How many eggs?"),
                assistant("She has 4*6=<<4*6=24>>24 eggs.\n#### 24"),
            ],
        ),
    ),
    "humaneval": Golden(
        "rows.parquet",
        {
            "task_id": "HumanEval/999",
            "prompt": HUMANEVAL_CODE,
            "canonical_solution": "    return sum(values)\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n",
            "entry_point": "add_all",
        },
        Conversation(
            id="HumanEval/999",
            category="code",
            place="rows.parquet:1",
            messages=[
                user(
                    "Complete this Python function. "
                    "Answer with the whole function in one code block.\n"
                    "\n"
                    "```python\n"
                    "def add_all(values: list[int]) -> int:\n"
                    '    """Add the values up.\n'
                    "    >>> add_all([1, 2])\n"
                    "    3\n"
                    '    """\n'
                    "\n"
                    "```"
                )
            ],
        ),
    ),
    "mbpp": Golden(
        "rows.parquet",
        {
            "source_file": "Some Problems.ipynb",
            "task_id": 9001,
            "prompt": "Write a function that doubles a number.",
            "code": "def double(n):\n    return 2 * n",
            "test_imports": [],
            "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
        },
        Conversation(
            id="9001",
            category="code",
            place="rows.parquet:1",
            messages=[
                user(
                    "Write a function that doubles a number.\n"
                    "\n"
                    "Answer with Python code that passes these tests:\n"
                    "assert double(2) == 4\nassert double(0) == 0"
                )
            ],
        ),
    ),
    "mt_bench": Golden(
        "rows.parquet",
        {
            "prompt": ["Write a line about rain.", "Now one about snow."],
            "prompt_id": 12345678,
            "category": "writing",
            "reference": [],
        },
        Conversation(
            id="12345678",
            category="writing",
            place="rows.parquet:1",
            messages=[user("Write a line about rain.")],
            later_turns=["Now one about snow."],
        ),
    ),
    "spec_bench": Golden(
        "rows.jsonl",
        {
            "question_id": 999,
            "category": "summarization",
            "turns": ["Summarize: It rained all day."],
            "reference": ["Rain."],
        },
        Conversation(
            id="999",
            category="summarization",
            place="rows.jsonl:1",
            messages=[user("Summarize: It rained all day.")],
        ),
    ),
    "math_500": Golden(
        "rows.jsonl",
        {
            "problem": "What is $2+3$?",
            "solution": "Counting on, $2+3=\\boxed{5}$.",
            "answer": "5",
            "subject": "Prealgebra",
            "level": 1,
            "unique_id": "test/prealgebra/9999.json",
        },
        Conversation(
            id="test/prealgebra/9999.json",
            category="maths",
            place="rows.jsonl:1",
            messages=[user("What is $2+3$?"), assistant("Counting on, $2+3=\\boxed{5}$.")],
        ),
    ),
    "tau_bench": Golden(
        "rows.json",
        {
            "task_id": 7,
            "reward": 1.0,
            "info": {"task": {"user_id": "ada_1", "actions": [], "outputs": []}, "source": "user"},
            "traj": [
                {"role": "system", "content": "Help with bookings."},
                {"role": "user", "content": "I am ada_1. When do I fly?"},
                {
                    "content": None,
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "function": {"arguments": '{"user_id":"ada_1"}', "name": "get_user"},
                            "id": "call_1",
                            "type": "function",
                        }
                    ],
                    "function_call": None,
                },
                {
                    "role": "tool",
                    "tool_call_id": "call_1",
                    "name": "get_user",
                    "content": '{"flight": "May 20"}',
                },
                {"content": "On May 20.", "role": "assistant"},
                {"role": "user", "content": "###STOP###"},
            ],
            "trial": 2,
        },
        Conversation(
            id="7-2",
            category="agent",
            place="rows.json[0]",
            messages=[
                {"role": "system", "content": "Help with bookings."},
                user("I am ada_1. When do I fly?"),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "get_user", "arguments": {"user_id": "ada_1"}},
                        }
                    ],
                },
                {
                    "role": "tool",
                    "content": '{"flight": "May 20"}',
                    "name": "get_user",
                    "tool_call_id": "call_1",
                },
                assistant("On May 20."),
                user("###STOP###"),
            ],
        ),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("conf")
    (path / "primary.yaml").write_text(PRIMARY)
    return path


def composed(folder: Path, *overrides: str, name: str = "primary") -> DictConfig:
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def built(cfg: DictConfig) -> DataSource:
    return instantiate(cfg, _convert_="all")


def write(path: Path, row: dict[str, Any]) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        case ".json":
            path.write_text(json.dumps([row], indent=2))
        case _:
            path.write_text(json.dumps(row) + "\n")


def test_every_preset_has_a_golden_row():
    assert sorted(GOLDEN) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_in_the_schema_of_the_set_becomes_our_conversation(
    name: str, folder: Path, tmp_path: Path
):
    golden = GOLDEN[name]
    write(tmp_path / golden.file, golden.row)
    cfg = composed(
        folder,
        f"source=[{name}]",
        f"source.{name}.path={tmp_path / golden.file}",
        f"source.{name}.hub_file=null",
    )
    source, tally = built(cfg.source[name]), Tally()

    rows = list(source.read(source.split, tally, roles={}))

    assert rows == [golden.expected], tally.details()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_alone_gives_one_source_under_its_own_name(name: str, folder: Path):
    cfg = composed(folder, f"source={name}")

    assert list(cfg.source) == [name]


def test_all_presets_together_keep_apart_and_hold_every_field_in_both_places(folder: Path):
    everything = f"[{','.join(PRESETS)}]"
    cfg = composed(folder, f"source={everything}", f"source@evaluate.source={everything}")

    fields = {"_target_", *(f.name for f in dataclasses.fields(DataSource))}
    for placed in (cfg.source, cfg.evaluate.source):
        assert sorted(placed) == PRESETS
        assert {name: set(placed[name]) for name in PRESETS} == dict.fromkeys(PRESETS, fields)
    assert OmegaConf.to_container(cfg.source) == OmegaConf.to_container(cfg.evaluate.source)


def test_what_is_read_and_what_is_measured_on_are_chosen_apart(folder: Path):
    cfg = composed(
        folder,
        "source=[ultrachat_200k,gsm8k]",
        "source@evaluate.source=[mt_bench,gsm8k]",
        "source.gsm8k.weight=2.5",
        "evaluate.source.gsm8k.split=test",
    )

    assert list(cfg.source) == ["ultrachat_200k", "gsm8k"]
    assert list(cfg.evaluate.source) == ["mt_bench", "gsm8k"]
    assert (cfg.source.gsm8k.weight, cfg.source.gsm8k.split) == (2.5, "train")
    assert (cfg.evaluate.source.gsm8k.weight, cfg.evaluate.source.gsm8k.split) == (1.0, "test")


def test_the_real_tree_takes_presets_and_their_fields_from_the_command_line():
    cfg = composed(
        CONF,
        "source=[ultrachat_200k,gsm8k]",
        "source.gsm8k.limit=100",
        "source.gsm8k.weight=2.5",
        name="base",
    )

    assert list(cfg.source) == ["ultrachat_200k", "gsm8k"]
    gsm8k = built(cfg.source.gsm8k)
    assert (gsm8k.limit, gsm8k.weight, gsm8k.path) == (100, 2.5, "openai/gsm8k")


def test_columns_of_an_own_file_are_named_on_the_command_line(folder: Path, tmp_path: Path):
    write(tmp_path / "own.jsonl", {"question": "Name a hill.", "reply": "The Brocken."})
    cfg = composed(
        folder,
        "source=file",
        f"source.file.path={tmp_path / 'own.jsonl'}",
        "+source.file.columns.prompt=question",
        "+source.file.columns.answer=reply",
    )

    (row,) = built(cfg.source.file).read("train", Tally(), roles={})

    assert isinstance(row, Conversation)
    assert row.messages == [user("Name a hill."), assistant("The Brocken.")]


def test_the_builtin_presets_read_the_prompts_of_this_repository(folder: Path):
    cfg = composed(folder)
    source, evaluation = built(cfg.source.builtin), built(cfg.evaluate.source.builtin_evaluation)
    assert source.validation_split is not None

    first = [
        next(read.read(split, Tally(), roles={})).id
        for read, split in [
            (source, source.split),
            (source, source.validation_split),
            (evaluation, evaluation.split),
        ]
    ]

    assert first == ["chat-train-0001", "chat-val-0001", "chat-eval-0001"]


@pytest.mark.parametrize("name", ["file", "hub"])
def test_a_preset_for_own_data_asks_for_its_path(name: str, folder: Path):
    cfg = composed(folder, f"source={name}")

    assert OmegaConf.missing_keys(cfg.source) == {f"source.{name}.path"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_at_its_top_what_it_is_and_whether_it_only_measures(name: str):
    lines = (CONF / "source" / f"{name}.yaml").read_text().splitlines()
    comments = " ".join(line for line in lines if line.startswith("#"))

    assert re.match(r"# .+\(.+\): ", lines[0])
    only_measures = re.search(r"For measuring.*, not training\.", comments) is not None
    assert only_measures == (name in FOR_MEASURING)
