from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.fakes import random_ids, tiny_ar, tiny_diffusion
from tests.infer.test_pretrained import write_router
from whiflash_infer.checkpoint import save_drafter
from whiflash_infer.command.main import main
from whiflash_infer.command.text import TextStream
from whiflash_infer.sources import byte_tokenizer
from whiflash_infer.target import Target

QUESTION = "What is a prime number?"
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXACT = ["--dtype", "float32", "--max-new-tokens", "30"]
Command = Callable[..., int]


@pytest.fixture(scope="module")
def source(target: Target) -> str:
    return str(target.model.config._name_or_path)  # pyright: ignore


@pytest.fixture(scope="module")
def drafters(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    shape = target.drafter_shape
    manifest = {
        "target": target.identity().manifest(),
        "tap_layer_ids": list(target.tap_layer_ids),
        "draft_length": 4,
    }
    save_drafter(folder / "ar", tiny_ar(shape), manifest, token_ids=TOKEN_IDS)
    save_drafter(folder / "diffusion", tiny_diffusion(shape), manifest, token_ids=TOKEN_IDS)
    return folder


@pytest.fixture
def command(source: str, drafters: Path) -> Command:
    """The command on the tiny target and its AR drafter."""

    def run(*arguments: str) -> int:
        return main([source, "--ar", str(drafters / "ar"), *EXACT, *arguments])

    return run


def greedy_ids(target: Target, question: str = QUESTION, *, max_new_tokens: int = 30) -> list[int]:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    output = target.model.generate(  # pyright: ignore
        torch.tensor([prompt_ids]), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, len(prompt_ids) :].tolist()


def greedy_text(target: Target, question: str = QUESTION, *, max_new_tokens: int = 30) -> str:
    answer = greedy_ids(target, question, max_new_tokens=max_new_tokens)
    return target.tokenizer.decode(answer, skip_special_tokens=True)


def jsonl(path: Path, *rows: dict[str, Any] | str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# ---- text that comes in pieces


TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    """A token a byte."""
    return TOKENIZER(text)["input_ids"]  # pyright: ignore


def streamed(*pieces: list[int], stops: tuple[str, ...] = (), stopped: bool = False) -> list[str]:
    text = TextStream(TOKENIZER, stops)
    return [*(text.push(piece) for piece in pieces[:-1]), text.finish(pieces[-1], stopped=stopped)]


def test_a_character_is_held_back_until_its_last_byte_is_there() -> None:
    euro, smile = ids("€"), ids("😀")
    pieces = [ids("a"), euro[:1], euro[1:2], euro[2:] + ids("b"), smile[:3], smile[3:], ids("c")]
    assert streamed(*pieces) == ["a", "", "", "€b", "", "😀", "c"]


def test_half_a_character_that_never_completes_comes_before_what_follows_or_at_the_end() -> None:
    euro = ids("€")
    assert streamed(ids("a"), euro[:2], ids("b"), euro[:1], []) == [
        "a",
        "",
        "\ufffdb",
        "",
        "\ufffd",
    ]


def test_special_tokens_are_no_text() -> None:
    start, end = TOKENIZER.bos_token_id, TOKENIZER.eos_token_id
    assert isinstance(start, int)
    assert isinstance(end, int)
    assert streamed([start], ids("a"), [start, *ids("b")], [end]) == ["", "a", "b", ""]


def test_the_beginning_of_a_stop_string_is_held_back_until_it_turns_out_to_be_none() -> None:
    pieces = [ids("one S"), ids("T"), ids("ART\n"), ids("two S"), ids("TOP")]
    found = streamed(*pieces, stops=("STOP", "\n\n"), stopped=True)
    assert found == ["one ", "", "START", "\ntwo ", ""]


def test_what_follows_a_stop_string_in_its_token_is_not_part_of_the_text() -> None:
    assert streamed(ids("ab"), ids("cdEfgh"), stops=("dE", "E"), stopped=True) == ["ab", "c"]
    assert streamed(ids("abE"), stops=("E", "bE"), stopped=True) == ["a"]


def test_the_beginning_of_a_stop_string_at_the_end_is_text() -> None:
    assert streamed(ids("one S"), ids("TO"), stops=("STOP",)) == ["one ", "STO"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_of_random_bytes_add_up_to_the_text_of_the_whole(size: int) -> None:
    tokens = random_ids(400, seed=size).tolist()
    pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert "".join(streamed(*pieces)) == whole


def test_a_space_that_a_tokenizer_drops_at_the_start_of_a_text_is_kept_between_words() -> None:
    vocab = {"<s>": 0, "\u2581one": 1, "\u2581two": 2, "s": 3}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    text = TextStream(tokenizer)
    found = [text.push([token]) for token in (0, 1, 0, 2, 3)]
    assert found == ["", "one", "", " two", "s"]


# ---- one prompt


def test_an_answer_streams_to_stdout_and_its_numbers_to_stderr(
    command: Command, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--prompt", QUESTION) == 0
    done = capsys.readouterr()
    assert done.out == greedy_text(target) + "\n"
    assert "policy static_ar" in done.err
    for fact in ("tokens", "tokens/s", "time to first token", "tau", "rounds", "switches", "ar "):
        assert fact in done.err
    assert "fallbacks" not in done.err


@pytest.mark.parametrize("policy", ["plain", "static_diffusion_tree", "random"])
def test_no_drafter_changes_what_is_printed(
    policy: str,
    command: Command,
    drafters: Path,
    target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = ["--diffusion", str(drafters / "diffusion"), "--policy", policy]
    assert command("--prompt", QUESTION, *both) == 0
    assert capsys.readouterr().out == greedy_text(target) + "\n"


def test_the_prompt_may_come_from_stdin_and_a_system_message_before_it(
    command: Command,
    target: Target,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert command("--system", "Be brief.") == 0
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    prompt_ids = target.tokenizer(prompt + "<|im_start|>assistant\n")["input_ids"]
    output = target.model.generate(torch.tensor([prompt_ids]), max_new_tokens=30, do_sample=False)  # pyright: ignore
    expected = target.tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True)
    assert capsys.readouterr().out == expected + "\n"


def test_a_raw_prompt_is_gone_on_with(
    command: Command, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--raw", "--prompt", "Once upon a time") == 0
    prompt_ids = target.tokenizer("Once upon a time")["input_ids"]
    output = target.model.generate(torch.tensor([prompt_ids]), max_new_tokens=30, do_sample=False)  # pyright: ignore
    expected = target.tokenizer.decode(output[0, len(prompt_ids) :], skip_special_tokens=True)
    assert capsys.readouterr().out == expected + "\n"


def test_an_answer_ends_before_a_stop_string(
    command: Command, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = greedy_text(target)
    place = next(i for i in range(3, len(whole)) if whole[i : i + 2].isascii() and whole[i].strip())
    stop = whole[place : place + 2]
    assert command("--prompt", QUESTION, "--stop", stop, "--stop", "never") == 0
    done = capsys.readouterr()
    assert done.out == whole[: whole.index(stop)] + "\n"
    assert "stop_string" in done.err


def test_a_seed_gives_the_same_sampled_answer_under_every_policy(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed, policy in (("1", "static_ar"), ("1", "plain"), ("2", "plain")):
        sampled = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed", seed]
        assert command("--prompt", QUESTION, "--policy", policy, *sampled) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


# ---- a file of prompts


@pytest.mark.parametrize("rows", ["1", "3"])
def test_a_file_is_answered_in_its_order_with_the_options_of_its_lines(
    rows: str, command: Command, target: Target, tmp_path: Path
) -> None:
    asked = jsonl(
        tmp_path / "prompts.jsonl",
        {"id": "a", "prompt": QUESTION},
        {"prompt": "Hi", "max_new_tokens": 3},
        {"id": "c", "messages": [{"role": "user", "content": "Why?"}], "temperature": 0},
        {"id": "d", "prompt": QUESTION, "temperature": 1.5, "seed": 4},
    )
    path = tmp_path / "new" / "answers.jsonl"
    assert command("--file", str(asked), "--output", str(path), "--rows", rows, "--output-ids") == 0
    first, second, third, fourth = records(path.read_text(encoding="utf-8"))
    assert (first["id"], first["text"]) == ("a", greedy_text(target))
    assert first["output_ids"] == greedy_ids(target)
    assert first["finish_reason"] == "length"
    assert first["tokens"] == 30
    assert first["arms"] == {"ar": first["rounds"]}
    assert (second["id"], second["tokens"]) == (2, 3)
    assert second["text"] == greedy_text(target, "Hi", max_new_tokens=3)
    assert (third["id"], third["text"]) == ("c", greedy_text(target, "Why?"))
    assert fourth["text"] != first["text"]
    assert list(path.parent.iterdir()) == [path]


def test_answers_go_to_stdout_where_no_file_is_named(
    command: Command, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = jsonl(tmp_path / "prompts.jsonl", {"prompt": QUESTION}, {"prompt": "Hi"})
    assert command("--file", str(asked)) == 0
    done = capsys.readouterr()
    first, second = records(done.out)
    assert (first["text"], second["text"]) == (greedy_text(target), greedy_text(target, "Hi"))
    assert "output_ids" not in first
    assert "answered 2 of 2 lines, failed 0" in done.err


def test_a_bar_on_a_terminal_leaves_the_answers_on_stdout_alone(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = jsonl(tmp_path / "prompts.jsonl", {"prompt": QUESTION}, {"prompt": "Hi"})
    assert command("--file", str(asked)) == 0
    without = capsys.readouterr()
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes any file for a terminal
    assert command("--file", str(asked)) == 0
    with_bar = capsys.readouterr()
    assert with_bar.out == without.out
    assert "2/2" in with_bar.err
    assert "2/2" not in without.err


def test_lines_of_a_file_may_have_their_own_stop_strings(
    command: Command, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = greedy_text(target)
    stop = next(c for c in whole[3:] if c.isascii() and c.isprintable() and c != "<")
    asked = jsonl(tmp_path / "prompts.jsonl", {"prompt": QUESTION, "stop": [stop, "never"]})
    assert command("--file", str(asked)) == 0
    (record,) = records(capsys.readouterr().out)
    assert record["text"] == whole[: whole.index(stop)]
    assert record["finish_reason"] == "stop_string"


# ---- who drafts


@pytest.fixture(scope="module")
def routed(source: str, drafters: Path, target: Target) -> list[str]:
    """Arguments that name a router of random weights and its drafters."""
    write_router(drafters, target)
    folders = [(f"--{name}", str(drafters / name)) for name in ("ar", "diffusion", "router")]
    return [source, *EXACT, *(word for pair in folders for word in pair)]


def test_an_arm_that_is_named_answers_instead_of_the_policy(
    command: Command, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--prompt", QUESTION, "--arm", "ar_tree", "--policy", "plain") == 0
    done = capsys.readouterr()
    assert done.out == greedy_text(target) + "\n"
    assert "arm ar_tree" in done.err
    assert "(100%)" in done.err
    assert "policy" not in done.err


def test_lines_of_a_file_may_name_their_arm_or_leave_it_to_the_policy(
    command: Command, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": QUESTION, **own} for own in ({"arm": "ar_tree"}, {"arm": None}, {})]
    asked = jsonl(tmp_path / "prompts.jsonl", *lines)
    assert command("--file", str(asked), "--arm", "plain", "--policy", "static_ar") == 0
    answers = records(capsys.readouterr().out)
    assert [list(answer["arms"]) for answer in answers] == [["ar_tree"], ["ar"], ["plain"]]
    assert {answer["text"] for answer in answers} == {greedy_text(target)}


def test_a_price_decides_whether_the_router_drafts(
    routed: list[str], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every draft costs something there. The last token of an answer needs none at any price."""
    lines = [{"prompt": QUESTION, **own} for own in ({"price": 0}, {"price": 1e9}, {})]
    asked = jsonl(tmp_path / "prompts.jsonl", *lines)
    assert main([*routed, "--file", str(asked), "--price", "1e9"]) == 0
    free, dear, as_told = records(capsys.readouterr().out)
    assert free["arms"].get("plain", 0) <= 1
    assert free["rounds"] > 1
    assert list(dear["arms"]) == list(as_told["arms"]) == ["plain"]
    assert {a["text"] for a in (free, dear, as_told)} == {greedy_text(target)}
    assert main([*routed, "--prompt", QUESTION, "--price", "1e9"]) == 0
    done = capsys.readouterr()
    assert "plain 29 (100%)" in done.err
    assert "policy hazard" in done.err


def test_without_a_price_the_routers_own_counts(
    routed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": QUESTION}, {"prompt": QUESTION, "price": None}]
    asked = jsonl(tmp_path / "prompts.jsonl", *lines, {"prompt": QUESTION, "price": 50})
    found = []
    for arguments in ([], ["--price", "50"]):  # the router's own is 50
        assert main([*routed, "--file", str(asked), *arguments]) == 0
        found += [record["arms"] for record in records(capsys.readouterr().out)]
    assert found == found[:1] * 6


def test_a_category_chooses_the_arm_of_the_policy_that_looks_at_it(
    routed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": QUESTION, **own} for own in ({"category": "code"}, {"category": ""}, {})]
    asked = jsonl(tmp_path / "prompts.jsonl", *lines)
    assert main([*routed, "--file", str(asked), "--policy", "category"]) == 0
    answers = records(capsys.readouterr().out)
    assert [list(answer["arms"]) for answer in answers] == [["diffusion"], ["plain"], ["plain"]]
    wanted = ["--policy", "category", "--category", "code"]
    assert main([*routed, "--prompt", QUESTION, *wanted]) == 0
    assert "diffusion" in capsys.readouterr().err


BAD_LINES = [
    ('{"prompt": ', "is not JSON"),
    ("[1]", "is no JSON object"),
    ('{"question": "Hi"}', "has to have a prompt or messages, and not both"),
    ('{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}', "and not both"),
    ('{"prompt": " "}', "prompt has to be a text, and not an empty one"),
    ('{"prompt": 3}', "prompt has to be a text"),
    ('{"messages": []}', "messages has to be a list of objects with a role each"),
    ('{"messages": [{"content": "Hi"}]}', "messages has to be a list of objects with a role each"),
    ('{"messages": [{"role": "user", "tool_calls": [{}]}]}', "the chat template refuses it"),
    ('{"prompt": "Hi", "tools": {}}', "tools has to be a list of objects"),
    ('{"prompt": "Hi", "id": [1]}', "id is [1], but has to be a string or a whole number"),
    ('{"prompt": "Hi", "temperature": "hot"}', "temperature is 'hot', but has to be a number"),
    ('{"prompt": "Hi", "temperature": -1}', "temperature is -1.0, but has to be 0"),
    ('{"prompt": "Hi", "top_p": NaN}', "top_p is nan, but has to be"),
    ('{"prompt": "Hi", "max_new_tokens": 0}', "max_new_tokens is 0, but has to be"),
    ('{"prompt": "Hi", "max_new_tokens": 1.5}', "max_new_tokens is 1.5, but has to be a whole"),
    ('{"prompt": "Hi", "seed": true}', "seed is True, but has to be a whole number"),
    ('{"prompt": "Hi", "stop": [""]}', "stop is [''], but has to be a string or a list"),
    ('{"prompt": "Hi", "max_new_tokens": 99999}', "exceeds the target's context of 2048"),
    ('{"prompt": "Hi \\ud800"}', "is not UTF-8 text"),
    ("[" * 100_000, "is not JSON"),
    ('{"prompt": "Hi", "arm": 3}', "arm is 3, but has to be a text"),
    ('{"prompt": "Hi", "arm": "diffusion"}', "arm is 'diffusion': choose from plain, ar, ar_tree"),
    ('{"prompt": "Hi", "price": "cheap"}', "price is 'cheap', but has to be a number"),
    ('{"prompt": "Hi", "price": -1}', "price is -1.0, but has to be a finite number of at least 0"),
    ('{"prompt": "Hi", "category": 3}', "category is 3, but has to be a text"),
]


def test_bad_lines_are_named_with_their_reason_and_the_others_answered(
    command: Command, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = {"id": "good", "prompt": QUESTION, "topic": "maths"}
    some = [line for line, _ in BAD_LINES[:19]]
    asked = jsonl(tmp_path / "prompts.jsonl", *some, "", good)
    assert command("--file", str(asked)) == 1
    done = capsys.readouterr()
    (record,) = records(done.out)
    assert (record["id"], record["text"]) == ("good", greedy_text(target))
    for number, (_, reason) in enumerate(BAD_LINES[:19], start=1):
        (told,) = [line for line in done.err.splitlines() if line.startswith(f"{asked}:{number}: ")]
        assert reason in told
    assert "answered 1 of 20 lines, failed 19" in done.err
    assert "the field 'topic' of 1 lines is not used" in done.err


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_file_without_a_line_that_can_be_answered_is_refused(
    line: str, reason: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = jsonl(tmp_path / "prompts.jsonl", line, "{")
    assert command("--file", str(asked), "--output", str(tmp_path / "answers.jsonl")) == 2
    done = capsys.readouterr()
    assert done.out == ""
    (told,) = done.err.splitlines()
    assert told.startswith("error: no line of the file can be ")
    assert f"{asked}:" in told
    assert reason in told
    assert not (tmp_path / "answers.jsonl").exists()


def test_bytes_that_are_no_utf8_spoil_their_line_alone_and_a_byte_order_mark_none(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "prompt": "Hi"}\r\n{"prompt": "\xff"}\r\n')
    assert command("--file", str(path)) == 1
    done = capsys.readouterr()
    assert [record["id"] for record in records(done.out)] == ["a"]
    assert f"{path}:2: is not UTF-8 text" in done.err


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "Hi", "--temperature", "-1"], "temperature is -1.0, but has to be 0"),
        (["--prompt", "Hi", "--top-p", "nan"], "top_p is nan"),
        (["--prompt", "Hi", "--stop", ""], "stop is ['']"),
        (["--prompt", "Hi", "--max-new-tokens", "5000"], "exceeds the target's context of 2048"),
        (["--prompt", "Hi", "--output", "x"], "--output and --output-ids are for the answers to"),
        (["--prompt", "Hi", "--rows", "0"], "--rows is 0: it must be 1 or more"),
        (["--prompt", "Hi", "--threads", "0"], "--threads is 0: it must be 1 or more"),
        (["--prompt", "Hi", "--raw", "--system", "x"], "--system has no place in it"),
        (["--prompt", "Hi", "--policy", "best"], "unknown policy 'best': choose from plain"),
        (["--prompt", "Hi", "--policy", "bandit"], "bandit takes its numbers from a router"),
        (["--prompt", "Hi", "--arm", "oracle"], "arm is 'oracle': choose from plain, ar, ar_tree"),
        (["--prompt", "Hi", "--price", "-2"], "price is -2.0, but has to be a finite number"),
        (["--prompt", "Hi", "--diffusion", "nowhere"], "nowhere does not exist"),
        (["--prompt", "Hi", "--dtype", "int3"], "dtype is 'int3'"),
        (["--file", "nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file"),
    ],
)
def test_what_the_user_can_mend_is_told_in_one_line_with_exit_status_2(
    arguments: list[str], message: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    (told,) = done.err.splitlines()
    assert told.startswith("error: ")
    assert message in told


def test_an_empty_file_and_an_output_that_cannot_be_written_are_refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = jsonl(tmp_path / "empty.jsonl", "", "  ")
    assert command("--file", str(empty)) == 2
    assert f"{empty} is empty" in capsys.readouterr().err
    asked = jsonl(tmp_path / "prompts.jsonl", {"prompt": "Hi"})
    assert command("--file", str(asked), "--output", str(asked / "answers.jsonl")) == 2
    assert "answers.jsonl cannot be written" in capsys.readouterr().err


def test_a_target_without_chat_template_needs_a_raw_prompt(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.save_pretrained(tmp_path / "base")  # pyright: ignore
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    arguments = [str(tmp_path / "base"), *EXACT, "--prompt", "Once"]
    assert main(arguments) == 2
    assert "the target has no chat template" in capsys.readouterr().err
    assert main([*arguments, "--raw"]) == 0


# ---- as a user runs it


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "whiflash_infer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"} | options,
    )


def test_the_command_answers_in_utf8_whatever_the_locale_and_help_has_an_example(
    source: str, drafters: Path, target: Target
) -> None:
    arguments = ["--diffusion", str(drafters / "diffusion"), *EXACT, "--prompt", QUESTION]
    process = spawn(source, *arguments, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, greedy_text(target) + "\n"), err
    assert "policy static_diffusion" in err
    assert "Traceback" not in err


def test_an_interrupted_file_keeps_the_finished_answers_and_says_where(
    source: str, drafters: Path, target: Target, tmp_path: Path
) -> None:
    rows = [{"id": i, "prompt": "Hi", "max_new_tokens": 20 if i < 4 else 1900} for i in range(40)]
    asked, path = jsonl(tmp_path / "prompts.jsonl", *rows), tmp_path / "answers.jsonl"
    partial = tmp_path / "answers.jsonl.partial"
    process = spawn(source, "--file", str(asked), "--output", str(path), "--dtype", "float32")
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = records(partial.read_text(encoding="utf-8"))
    assert f"{len(kept)} of 40 answers are finished, and stand in {partial}" in err
    assert "Traceback" not in err
    assert not path.exists()
    expected = greedy_text(target, "Hi", max_new_tokens=20)
    assert [(r["id"], r["text"]) for r in kept[:4]] == [(i, expected) for i in range(4)]


def test_help_is_readable_and_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert "examples:\n  python -m whiflash_infer Qwen/Qwen3-8B --ar" in told
    assert "(default: the router's own)" in " ".join(told.split())
    assert "hazard, entropy, delta, request, category and bandit" in " ".join(told.split())
    assert max(len(line) for line in told.splitlines()) <= 120
