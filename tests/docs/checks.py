"""One check for each kind of command that the documentation may hold.

A command of a kind that has none is refused, so that nothing is documented unchecked.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import re
import runpy
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch.distributed.run import get_args_parser

from tests.docs.pages import Command, described_files, make_targets
from tests.stages import ROOT, patched_argv
from whiflash_train.preparation import build_section, build_sources

# Commands of other programs, which are not here: by their beginning, and why that is enough.
FOREIGN = {
    "curl -s http://localhost:8000/": "needs a server",
    "docker run": "needs the images of the engines",
    "python -m pytest": "this is one",
    "python -m sglang.launch_server": "needs a GPU and SGLang; the folder it serves is tested",
    "python -m venv": "the environment that this runs in was made so",
    "python -m vllm.entrypoints.openai.api_server": "needs vLLM; `make vllm-demo` serves the same",
    "vllm serve": "needs a GPU and vLLM; the folder it serves is tested",
    "wandb sync": "needs an account",
}
# Of the Makefile alone: programs of the environment.
TOOLS = ("$(PYTHON) -m venv", "$(VENV)/bin/", "$(error ", "touch ", "grep ")
# Flags that a program of ours passes on to one that is not here.
PASSED_ON = {
    "whiflash_infer.serving.vllm": {
        *("--dtype", "--gpu-memory-utilization", "--host", "--max-model-len"),
        *("--max-num-batched-tokens", "--max-num-seqs", "--no-enable-prefix-caching", "--port"),
        "--served-model-name",
    }
}
_FLAGS = {"-m", "--multirun", "--strict"}
_NOT_BUILT = {"logger"}  # a logger opens files


class Parsed(BaseException):
    """The arguments were read; what would follow is not run."""


def check(command: Command) -> None:
    """Raises: AssertionError, or what reads the command refuses it with."""
    if command.page == "Makefile" and command.text.startswith(TOOLS):
        return
    words = shlex.split(command.text, comments=True)
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    words[:1] = [re.sub(r"^\S+/bin/", "", word) for word in words[:1]]  # of some environment
    if not words or " ".join(words).startswith(tuple(FOREIGN)):
        return
    assert words[0] in CHECKS, f"{command}: no check is written for `{words[0]}`"
    CHECKS[words[0]](words[1:])


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "pip"]:
        check_pip(words[2:])
    elif words[0] == "-m":
        parse_module(words[1], words[2:])
    else:
        check_script(words[0], words[1:])


def check_script(script: str, words: Sequence[str]) -> None:
    assert (ROOT / script).is_file(), f"{script} does not exist"
    if script.startswith("benchmarks/"):
        return parse_benchmark(script, words)
    if script == "evaluate.py":
        words = _limit_as_override(words)
    flags = {word for word in words if word.startswith("-")}
    assert flags <= _FLAGS, f"unknown flags {sorted(flags - _FLAGS)}"
    overrides = [word for word in words if word not in flags]
    for run in runs_of(overrides) if flags & {"-m", "--multirun"} else [overrides]:
        build(composed(Path(script).stem, run))
    return None


def _limit_as_override(words: Sequence[str]) -> list[str]:
    """`--limit N` is `evaluate.limit=N`."""
    whole = re.sub(r"(^|\n)--limit\n(\d+)", r"\1evaluate.limit=\2", "\n".join(words))
    return whole.splitlines()


def runs_of(overrides: list[str]) -> list[list[str]]:
    """So many runs of a sweep that every value is in one of them."""
    parsed = OverridesParser.create().parse_overrides(_of_installed_plugins(overrides))
    seen: set[str] = set()
    chosen = []
    for run in BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]:
        if not seen.issuperset(run):
            chosen.append(run)
            seen.update(run)
    return chosen


def _of_installed_plugins(overrides: list[str]) -> list[str]:
    """Without the launcher of Ray, which is an extra of its own since it is big."""
    return [o for o in overrides if not re.match(r"\+?hydra[/.]launcher(=ray$|\.ray\.)", o)]


def composed(config_name: str, overrides: list[str]) -> DictConfig:
    """The configuration without Hydra's own, every reference in it resolved."""
    with initialize_config_dir(str(_configuration()), version_base="1.3"):
        whole = compose(config_name, overrides=overrides, return_hydra_config=True)
    cfg = OmegaConf.masked_copy(whole, [str(key) for key in whole if key != "hydra"])
    OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return cfg


@functools.cache
def _configuration() -> Path:
    """Ours, with the files that the pages tell to write."""
    folder = Path(tempfile.mkdtemp(prefix="documented"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(ROOT / "conf", folder / "conf")
    for name, text in described_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "conf"


def build(cfg: DictConfig) -> None:
    """Every section that describes an object makes one, which checks its values."""
    for name, section in cfg.items():
        if isinstance(section, DictConfig) and "_target_" in section and name not in _NOT_BUILT:
            build_section(cfg, str(name))
    build_sources(cfg, "source")
    build_sources(cfg, "evaluate.source")


def parse_module(module: str, words: Sequence[str]) -> None:
    with _stopped_at_the_parser([module, *words], PASSED_ON.get(module)):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


def parse_benchmark(script: str, words: Sequence[str]) -> None:
    with _stopped_at_the_parser([script, *words]) as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        runpy.run_path(str(ROOT / script), run_name="__main__")


@contextmanager
def _stopped_at_the_parser(
    argv: list[str], passed_on: set[str] | None = None
) -> Iterator[pytest.MonkeyPatch]:
    """Let a program's own parser read its arguments, and nothing come after it.

    passed_on: flags that it does not read itself, where it passes some on.
    """
    read, read_known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        read(self, args, namespace)
        raise Parsed

    def stop_known(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        _, rest = read_known(self, args, namespace)
        unknown = {word for word in rest if word.startswith("-")} - (passed_on or set())
        assert not unknown, f"unknown flags {sorted(unknown)}"
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, torch.enable_grad(), patched_argv(argv):
        if passed_on is None:
            patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        else:
            patch.setattr(argparse.ArgumentParser, "parse_known_args", stop_known)
        with pytest.raises(Parsed):
            yield patch


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    assert set(targets) <= make_targets(), f"the Makefile does not make {targets}"


def check_accelerate(words: list[str]) -> None:
    assert words[0] == "launch"
    told = launch_command_parser().parse_args(words[1:])
    check_script(told.training_script, told.training_script_args)


def check_torchrun(words: list[str]) -> None:
    told = get_args_parser().parse_args(words)
    check_script(told.training_script, told.training_script_args)


def check_srun(words: list[str]) -> None:
    """Slurm is not here: its options are taken as they stand."""
    check_python(words[words.index("python") + 1 :])


def check_pip(words: list[str]) -> None:
    """What is installed is this project with extras that it has, or what it depends on."""
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        if match := re.match(r"(?:whiflash|\.)\[([\w,$()]+)\]$", word):
            extras = set(match[1].split(","))
            assert extras <= {*project["optional-dependencies"], "$(EXTRAS)"}, extras


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "python": check_python,
    "make": check_make,
    "accelerate": check_accelerate,
    "torchrun": check_torchrun,
    "srun": check_srun,
    "pip": check_pip,
}
