"""`evaluate.py check=lossless`: is every answer the target's own, whatever drafts and switches?"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from whiflash_infer.benchmark import Question
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.lossless import Difference, difference, flips
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.router import statics
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation
from whiflash_train.evaluation.conditions import chosen_policies, policy_names
from whiflash_train.evaluation.run import load_all
from whiflash_train.evaluation.suites import load_questions
from whiflash_train.runner import engine_settings

_ROWS, _WIDTH = 8, 8  # prompts decoded together; tokens that plain decoding's text is read again by
_COLUMNS = (
    "policy",
    "at a time",
    "identical",
    "near ties",
    "rounds",
    "switches",
    "first difference",
)
console = Console()


@dataclass(frozen=True)
class _Bench:
    target: Target
    questions: list[Question]
    plain: list[Generation]


def check_lossless(cfg: DictConfig) -> None:
    """Token identity with plain greedy decoding, for every arm, policy and random switching: one
    prompt at a time, and all of them together.

    In float32 every answer must be the same. In bfloat16 a wider pass rounds otherwise, so answers
    may part where two tokens are nearly equal; the table says how near, and below it stands how
    often plain decoding flips when it reads its own text in wider passes.

    Raises: UserError (a failing exit status) for a difference that rounding does not explain.
    """
    target, arms, router = load_all(cfg, allow_foreign=True)
    questions = load_questions(cfg, target, cfg.evaluate.lossless_prompts).questions
    wanted = policy_names(cfg.evaluate.policies, router, arms)
    policies = chosen_policies(
        router, [*wanted, *statics((PLAIN, *arms)), "random"], arms, cfg.seed
    )
    options = GenerationOptions(max_new_tokens=cfg.evaluate.lossless_max_new_tokens)
    decoder = RoutedDecoder(target, arms, policies[0], engine_settings(cfg, arms))
    prompts = [question.ids for question in questions]
    with console.status("plain decoding"):
        bench = _Bench(target, questions, decoder.generate(prompts, options, max_rows=1))
    table = _table(bench)
    unexplained = 0
    for policy in policies:
        for rows in (1, _ROWS):
            decoder.policy = policy
            with console.status(f"{policy.name}, {rows} at a time"):
                found = decoder.generate(prompts, options, max_rows=rows)
            wrong, cells = _compared(bench, found)
            unexplained += wrong
            table.add_row(policy.name, str(rows), *cells)
    Console(width=max(console.width, 132)).print(table)
    _tell_flips(bench)
    if unexplained:
        raise UserError(f"{unexplained} answers differ from plain greedy decoding")


def _table(bench: _Bench) -> Table:
    dtype = str(bench.target.dtype).removeprefix("torch.")
    title = f"lossless check: {bench.target.name}, {dtype}, greedy, {len(bench.questions)} prompts"
    table = Table(title=title)
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    return table


def _compared(bench: _Bench, found: list[Generation]) -> tuple[int, list[str]]:
    """How many differences are no near ties of rounding, and the cells of their row."""
    differences = [
        (question.id, apart)
        for question, one, other in zip(bench.questions, bench.plain, found, strict=True)
        if (apart := _apart(bench, question, one, other)) is not None
    ]
    exact = str(bench.target.dtype) == "torch.float32"
    near = 0 if exact else sum(apart.is_near_tie for _, apart in differences)
    rounds = [r for answer in found for r in answer.rounds]
    same = len(found) - len(differences)
    first = [
        f"{id_}, token {d.place}, gap {d.gap:.3f}, step {d.step:.3f}" for id_, d in differences
    ]
    return len(differences) - near, [
        f"{same}/{len(found)}",
        str(near),
        str(len(rounds)),
        str(sum(r.switched for r in rounds)),
        first[0] if first else "",
    ]


def _apart(
    bench: _Bench, question: Question, one: Generation, other: Generation
) -> Difference | None:
    expected, found = one.output_ids.tolist(), other.output_ids.tolist()
    return difference(bench.target, question.ids, expected, found)


def _tell_flips(bench: _Bench) -> None:
    with console.status("plain decoding, read again"):
        flipped = sum(
            flips(bench.target, question.ids, answer.output_ids.tolist(), width=_WIDTH)
            for question, answer in zip(bench.questions, bench.plain, strict=True)
        )
    tokens = sum(len(answer.output_ids) for answer in bench.plain)
    console.print(
        f"read again {_WIDTH} tokens at a time, plain decoding would have said {flipped} of its "
        f"{tokens} tokens otherwise",
        soft_wrap=True,
    )
