"""What the command is told, and the options of an answer that follow from it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.settings import Sync

PROGRAM = "python -m whiflash_infer"
_EXAMPLES = f"""\
examples:
  {PROGRAM} Qwen/Qwen3-8B --ar ar_drafter --diffusion diffusion_drafter \\
      --router router --prompt "What is a prime number?"
  {PROGRAM} Qwen/Qwen3-8B --ar ar_drafter --file prompts.jsonl --rows 8 --output answers.jsonl

a line of the file:
  {{"id": "a", "prompt": "Name three primes.", "max_new_tokens": 40, "temperature": 0.7, "seed": 1}}
  it has a prompt or messages ([{{"role": ..., "content": ...}}]), and may have an id, tools, and
  any option of the answer by its name, such as top_p, or stop with a string or a list of them;
  arm, price and category, too

exit status: 0 done, 1 some prompts of a file have no answer (or a fault of ours, with a traceback),
  2 something to mend (one line says what), 130 interrupted
"""
_WHOLE = ("max_new_tokens", "top_k", "seed")
_REAL = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_STEERING = ("arm", "price", "category")
OPTION_NAMES = (*_WHOLE, *_REAL, *_STEERING, "stop")
_HELP = {
    "max_new_tokens": "tokens of an answer at most",
    "temperature": "0 is greedy",
    "top_k": "sample from the K likeliest tokens",
    "top_p": "sample from the likeliest tokens that come to this mass",
    "min_p": "sample from tokens of at least this share of the likeliest one's probability",
    "seed": "of the random numbers; the same seed gives the same answer",
    "repetition_penalty": "divides the score of tokens in prompt and answer",
    "presence_penalty": "taken from the score of tokens in the answer",
    "frequency_penalty": "taken for every time that a token is in the answer",
}


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Answer prompts with a target model, which drafters make faster. The answer is "
        "the target's own, whatever they draft.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("target", help="Hugging Face id or local folder of the target")
    _add_prompts(command.add_argument_group("what is asked (stdin, where nothing is named)"))
    _add_models(command.add_argument_group("drafters and policy"))
    _add_options(command.add_argument_group("the answer"))
    _add_engine(command.add_argument_group("how it is computed"))
    return command


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="one prompt; its answer streams to stdout")
    source.add_argument(
        "--file", type=Path, metavar="JSONL", help="prompts, one JSON object a line"
    )
    group.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    group.add_argument(
        "--raw", action="store_true", help="go on from the prompt as it is, without chat template"
    )
    group.add_argument(
        "--output", type=Path, metavar="JSONL", help="answers to --file (default: stdout)"
    )
    group.add_argument(
        "--output-ids", action="store_true", help="answers to --file hold their token ids, too"
    )


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ar", type=Path, metavar="DIR", help="autoregressive drafter")
    group.add_argument("--diffusion", type=Path, metavar="DIR", help="block-diffusion drafter")
    group.add_argument("--router", type=Path, metavar="DIR", help="router, which chooses the arms")
    group.add_argument(
        "--policy",
        metavar="NAME",
        help="plain, static_ar, static_ar_tree, static_diffusion, static_diffusion_tree, random; "
        "with a router also hazard, entropy, delta, request, category and bandit (default: hazard "
        "with a router, else the drafter)",
    )
    group.add_argument(
        "--arm",
        metavar="NAME",
        help="plain, ar, ar_tree, diffusion or diffusion_tree: use it in every round, whatever the "
        "policy says",
    )
    group.add_argument(
        "--price",
        type=float,
        metavar="TOKENS_PER_SECOND",
        help="what a second is worth, for the policy hazard: a small one drafts as much as may be "
        "accepted, a large one saves seconds (default: the router's own)",
    )
    group.add_argument(
        "--category", default="", metavar="NAME", help="kind of the prompt, for the policy category"
    )
    group.add_argument(
        "--allow-foreign-costs",
        action="store_true",
        help="use the router although its costs were measured on another device",
    )


def _add_options(group: argparse._ArgumentGroup) -> None:
    defaults = GenerationOptions()
    for name in (*_WHOLE, *_REAL):
        default = getattr(defaults, name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=int if name in _WHOLE else float,
            metavar="N" if name in _WHOLE else "X",
            default=default,
            help=_HELP[name] + ("" if default is None else f" (default: {default})"),
        )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="STRING",
        help="end before this string; may be given several times",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rows", type=int, default=8, metavar="N", help="prompts answered at a time (default: 8)"
    )
    group.add_argument(
        "--sync",
        choices=get_args(Sync),
        default="lazy_kv_only",
        help="which drafters follow the text, and how (default: lazy_kv_only)",
    )
    group.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="torch threads (default: torch's)")
    group.add_argument("--compile", action="store_true", help="compile the target's passes")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the target"
    )
    group.add_argument(
        "--debug", action="store_true", help="check the drafters' caches before every use; slow"
    )


def options_of(told: argparse.Namespace) -> GenerationOptions:
    return made_options({name: getattr(told, name) for name in OPTION_NAMES})


def with_overrides(told: argparse.Namespace, own: Mapping[str, Any]) -> GenerationOptions:
    """The command's options, changed by those that a line of the file has.

    Raises: UserError naming the option that is not legal.
    """
    return made_options({name: own.get(name, getattr(told, name)) for name in OPTION_NAMES})


def made_options(values: Mapping[str, Any]) -> GenerationOptions:
    made = {name: values[name] for name in (*_WHOLE, *_REAL)}
    for name in _WHOLE:
        if not (_is_a(int, made[name]) or (name == "top_k" and made[name] is None)):
            raise UserError(f"{name} is {made[name]!r}, but has to be a whole number")
    for name in _REAL:
        made[name] = _real(name, made[name])
    return GenerationOptions(
        **made,
        stop_strings=_stop_strings(values["stop"]),
        arm=None if values["arm"] is None else _text("arm", values["arm"]),
        price=math.nan if values["price"] is None else _real("price", values["price"]),
        category="" if values["category"] is None else _text("category", values["category"]),
    )


def _real(name: str, value: Any) -> float:
    if not _is_a((int, float), value):
        raise UserError(f"{name} is {value!r}, but has to be a number")
    return _as_float(name, value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r}, but has to be a text")
    return value


def _is_a(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _as_float(name: str, value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{name} has {len(str(value))} digits: it is too large") from None


def _stop_strings(value: object) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not all(isinstance(s, str) and s for s in several):
        raise UserError(f"stop is {value!r}, but has to be a string or a list of them, none empty")
    return tuple(several)
