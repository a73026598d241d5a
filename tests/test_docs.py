"""The documentation is held to the code: commands, keys, messages, links, and the README's path."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.docs import keys, messages
from tests.docs.checks import check, composed
from tests.docs.pages import (
    PAGES,
    README,
    Command,
    anchors,
    blocks,
    commands,
    disguised,
    links,
    programs,
)
from tests.docs.readme import followed, stages, tiny, words_of
from tests.stages import ROOT
from whiflash_infer.command.main import main as command_line
from whiflash_infer.exchange.__main__ import main as exchange

TROUBLE = ROOT / "docs" / "troubleshooting.md"
RECIPES = ROOT / "docs" / "recipes.md"
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_every_test_that_the_docs_name_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 30
    existing = {
        (path.name, test)
        for path in (ROOT / "tests").rglob("test_*.py")
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    missing = [pair for pair in named if pair not in existing]
    assert missing == []


def test_the_docs_hold_commands_of_every_entry_point() -> None:
    documented = "\n".join(command.text for command in commands())
    scripts = [*ROOT.glob("*.py"), *(ROOT / "data_prep").glob("*.py")]
    assert [path.name for path in scripts if path.name not in documented] == []
    assert len(commands()) > 100


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_documented_command_is_one_that_works(command: Command) -> None:
    check(command)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("python train.py task=router router.lamb=1", "router.lamb"),
        ("python train.py task=router router.loss=brier,likelihod -m", "section router"),
        ("python train.py task=ar_drafter logger=csw", "csw"),
        ("python train.py", "task"),
        ("python train.py -x task=router", "unknown flags"),
        ("python trian.py task=router", "does not exist"),
        ("accelerate launch --num_processes 2 train.py task=ar_drafter sede=1", "sede"),
        ("torchrun --nnodes 2 train.py task=ar_drafter ar_drafter.los=kl", "ar_drafter.los"),
        ("NODE_RANK=0 python train.py task=ar_drafter machine=one_cpu", "one_cpu"),
        ("make dmeo", "does not make"),
        ("pip install 'whiflash[swepes]'", "swepes"),
        ("curl -O http://host/file", "no check is written"),
    ],
)
def test_a_command_that_does_not_work_is_told(text: str, told: str) -> None:
    with pytest.raises(Exception, match=re.escape(told)):
        check(Command("page.md", text))


@pytest.mark.parametrize("text", ["python -m whiflash_infer T --drafter d", "torchrun"])
def test_options_that_a_program_does_not_have_are_told(text: str) -> None:
    with pytest.raises((SystemExit, AssertionError)):
        check(Command("page.md", text))


@pages
def test_no_command_hides_in_a_block_that_is_marked_as_none(page: Path) -> None:
    assert [line for block in blocks(page) for line in disguised(block)] == []


@pages
def test_programs_that_the_prose_names_exist(page: Path) -> None:
    for program in programs(page):
        module = program.removeprefix("-m ")
        is_module = module != program
        assert importlib.util.find_spec(module) if is_module else (ROOT / program).is_file(), (
            program
        )


@pages
def test_keys_that_the_prose_names_exist(page: Path) -> None:
    assert sorted(key for key in keys.named_keys(page) if not keys.exists(key)) == []


@pages
def test_choices_that_the_prose_names_exist(page: Path) -> None:
    named = keys.named_choices(page)
    assert sorted(choice for choice in named if not keys.can_be_chosen(*choice)) == []


def test_a_key_that_is_not_there_is_told() -> None:
    assert keys.exists("router.lam")
    assert keys.exists("data.mask.*")
    assert keys.exists("fit.accumulate")
    assert keys.exists("source.<name>.limit")
    assert not keys.exists("router.lamb")
    assert not keys.exists("source.<name>.limits")
    assert not keys.can_be_chosen("logger", "csw")


@pages
def test_links_lead_to_what_is_there(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= set(links(README))


def test_messages_that_troubleshooting_quotes_are_told_by_the_code() -> None:
    quoted = messages.quoted(TROUBLE)
    assert len(quoted) > 30
    assert [message for message in quoted if not messages.is_told(message)] == []


def test_a_message_that_no_code_tells_is_found_out() -> None:
    assert messages.is_told("unknown policy ...: choose from ...")
    assert not messages.is_told("unknown policy ... choose among ...")


@pages
def test_python_in_the_docs_is_valid_and_names_what_there_is(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        compile(block.text, page.name, "exec")
        found = re.findall(r"^from (whiflash_\w+(?:\.\w+)*) import ([\w, ]+)$", block.text, re.M)
        for module, names in found:
            missing = [
                n for n in names.split(", ") if not hasattr(importlib.import_module(module), n)
            ]
            assert missing == []


def test_the_submitit_recipe_is_one_that_submitit_and_training_take(tmp_path: Path) -> None:
    (block,) = [b for b in blocks(RECIPES) if "submitit" in b.text]
    prepared = block.text.split("job = ")[0]
    assert "executor.submit(submitit.helpers.CommandFunction(command))" in block.text
    here = prepared.replace('"artifacts/slurm"', f'"{tmp_path}", cluster="debug"')
    names: dict[str, Any] = {}
    exec(compile(here, "recipes.md", "exec"), names)
    check(Command("recipes.md", shlex.join(["python", *names["command"][1:]])))
    # The block's own names were taken; one that submitit does not know is refused.
    with pytest.raises(NameError, match="partitions"):
        names["executor"].update_parameters(slurm_partitions="gpu")
    trainer = composed("train", names["command"][2:]).trainer
    asked = names["executor"].parameters
    assert (asked["nodes"], asked["tasks_per_node"]) == (trainer.num_nodes, trainer.devices)


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return followed(tmp_path_factory)


def test_the_readme_names_every_stage_in_order() -> None:
    assert [shlex.split(command.text)[1] for command in stages()] == [
        "data_prep/generate.py",
        "train.py",
        "train.py",
        "data_prep/profile_costs.py",
        "data_prep/log_rounds.py",
        "train.py",
        "evaluate.py",
    ]


def test_the_demo_is_what_the_readme_says() -> None:
    makefile = (ROOT / "Makefile").read_text()
    told = [command.text.replace("python", "$(PY)") for command in stages()]
    assert "\t" + "\n\t".join(told) in makefile


def test_following_the_readme_ends_in_a_report(newcomer: Path) -> None:
    found = {path.name for path in (newcomer / "artifacts/tiny/evaluation").iterdir()}
    assert {"metrics.json", "rounds.parquet", "report.html"} <= found


def test_the_python_of_the_readme_answers(newcomer: Path) -> None:
    (block,) = [block for block in blocks(README) if block.language == "python"]
    told = StringIO()
    with chdir(newcomer), redirect_stdout(told):
        exec(compile(tiny(block.text, newcomer), "README.md", "exec"), {})
    assert re.search(r"\d+ rounds$", told.getvalue().strip())


def test_the_shell_commands_of_the_readme_answer(newcomer: Path) -> None:
    (newcomer / "prompts.jsonl").write_text('{"prompt": "Name a prime number."}\n')
    told = words_of("whiflash_infer")
    assert len(told) == 2
    for words in told:
        short = [tiny(word, newcomer) for word in [*words, "--max-new-tokens", "8"]]
        with chdir(newcomer):
            assert command_line(short) == 0
    assert (newcomer / "answers.jsonl").read_text().count("\n") == 1


def test_the_drafter_that_the_readme_converts_is_one_of_speculators(newcomer: Path) -> None:
    (words,) = words_of("whiflash_infer.exchange")
    with chdir(newcomer):
        assert exchange([tiny(word, newcomer) for word in words]) == 0
    config = json.loads((newcomer / "artifacts/public/config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
