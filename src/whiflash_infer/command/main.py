"""The command from its arguments to its exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from whiflash_infer.command.arguments import options_of, parser
from whiflash_infer.command.batch import answer_file
from whiflash_infer.command.prompts import prompt_ids, read_questions
from whiflash_infer.command.single import answer_prompt
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.pretrained import load_parts
from whiflash_infer.settings import EngineSettings

_USER_ERROR, _INTERRUPTED, _PIPE_CLOSED = 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    told = parser().parse_args(arguments)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        return _run(told, console)
    except UserError as error:
        console.print(f"error: {error}", markup=False)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED


def _run(told: argparse.Namespace, console: Console) -> int:
    """What can be refused without the target is refused before it is loaded."""
    options = options_of(told)
    _check(told)
    if told.file is not None:
        questions = read_questions(told.file, told)
        return answer_file(_load(told, console), questions, told, console)
    text = _prompt(told, console)
    decoder = _load(told, console)
    ids = prompt_ids(decoder.target.chat, text, system=told.system, raw=told.raw)
    return answer_prompt(decoder, ids, options, console)


def _check(told: argparse.Namespace) -> None:
    for name in ("rows", "threads"):
        value = getattr(told, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be 1 or more")
    if told.file is None and (told.output is not None or told.output_ids):
        raise UserError("--output and --output-ids are for the answers to --file")
    if told.raw and told.system is not None:
        raise UserError("--raw goes on from the prompt alone, so --system has no place in it")


def _prompt(told: argparse.Namespace, console: Console) -> str:
    if told.prompt is None and sys.stdin.isatty():
        console.print("type the prompt; Ctrl-D on a line of its own ends it")
    text = sys.stdin.read() if told.prompt is None else told.prompt
    if not text.strip():
        raise UserError("the prompt is empty: give --prompt TEXT, --file JSONL, or text on stdin")
    return text


def _load(told: argparse.Namespace, console: Console) -> RoutedDecoder:
    transformers_logging.disable_progress_bar()
    if told.threads is not None:
        torch.set_num_threads(told.threads)
    with console.status(f"loading {told.target}"):
        parts = load_parts(
            told.target,
            ar=told.ar,
            diffusion=told.diffusion,
            router=told.router,
            policy=told.policy,
            dtype=told.dtype,
            device=told.device,
            allow_foreign_costs=told.allow_foreign_costs,
            trust_remote_code=told.trust_remote_code,
        )
    settings = EngineSettings(sync=told.sync, debug=told.debug, compile=told.compile)
    return RoutedDecoder(*parts, settings)
