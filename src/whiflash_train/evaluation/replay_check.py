"""`evaluate.py check=replay`: do replayed rounds and decoded rounds agree, and their times?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from whiflash_infer.benchmark import Question
from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.hindsight import label_answer, priced_arms
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.oracles import best_oracle_round, hedge_of, oracle_path, plans_of
from whiflash_infer.routing.policies import PlannedPolicy, Policy, StaticPolicy
from whiflash_infer.routing.replay import DenseTexts, Replayed, replay, stack_texts
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.routing.router import ROUTED, Router, statics
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Generation
from whiflash_train.evaluation.run import load_all
from whiflash_train.evaluation.suites import load_questions
from whiflash_train.round_logging import read_rows
from whiflash_train.runner import engine_settings

_CLOSE = 0.1  # of measured seconds, that modelled ones may be off
console = Console()


@dataclass(frozen=True, slots=True)
class Comparison:
    """differences: of texts by number, the first round that is not the same, decoded and replayed,
    as (position, arm, accepted). measured, modelled: seconds of all rounds."""

    policy: str
    num_texts: int
    num_rounds: int
    differences: dict[int, tuple[object, object]]
    measured: float
    modelled: float


def check_replay(cfg: DictConfig) -> None:
    """Decode held-out prompts under every policy, label the answers, replay them, and compare.

    In float32 the rounds must be the same; in bfloat16 near ties may part them.
    Raises: UserError (a failing exit status) for rounds that differ in float32.
    """
    target, arms, router = load_all(cfg)
    questions = load_questions(cfg, target, cfg.evaluate.replay_prompts).questions
    options = GenerationOptions(max_new_tokens=cfg.evaluate.max_new_tokens)
    with console.status("decoding and replaying"):
        found = compare(target, arms, router, questions, options, engine_settings(cfg, arms))
    show(found, target, console)
    wrong = [one.policy for one in found if one.differences]
    if wrong and target.dtype == torch.float32:
        raise UserError(f"replay differs from decoding under {', '.join(wrong)}")


def compare(
    target: Target,
    arms: Mapping[str, Arm],
    router: Router,
    questions: Sequence[Question],
    options: GenerationOptions,
    settings: EngineSettings,
) -> list[Comparison]:
    """Of every policy; greedy, one prompt after the other."""
    decoder = RoutedDecoder(target, arms, StaticPolicy(PLAIN), settings)
    prompts = [question.ids for question in questions]
    asked = [replace(options, category=question.category) for question in questions]
    decoder.generate(prompts[:1], options, max_rows=1)  # warm
    plain = decoder.generate(prompts, asked, max_rows=1)
    texts = stack_texts(
        [
            _labelled(target, arms, question, answer, options.max_new_tokens)
            for question, answer in zip(questions, plain, strict=True)
        ],
        priced_arms(arms, router.costs),
    )
    compared = []
    for policy, replayed in _replays(router, texts):
        decoder.policy = policy
        decoded = decoder.generate(prompts, asked, max_rows=1)
        compared.append(_compared(policy.name, decoded, replayed))
    return compared


@torch.inference_mode()
def _labelled(
    target: Target,
    arms: Mapping[str, Arm],
    question: Question,
    answer: Generation,
    max_new_tokens: int,
) -> ConversationRounds:
    """Dense rounds of an answer, with the features that policies read, in float32."""
    labels = label_answer(target, arms, question.ids, answer, max_new_tokens)
    ids = torch.tensor([question.ids + answer.output_ids.tolist()], device=target.device)
    rows = target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
    anchors = torch.from_numpy(labels.positions).to(target.device)
    seen = read_rows(target, ids[0], rows.hidden[0], anchors)
    return replace(
        labels,
        conversation=question.id,
        category=question.category,
        features=seen.features.float().cpu(),
        near_tie=seen.near_tie.cpu().numpy(),
        greedy=seen.greedy.cpu().numpy(),
    )


def _replays(router: Router, texts: DenseTexts) -> list[tuple[Policy, Replayed]]:
    """Every policy as the engine is to use it, and what replay says of it.

    Policies learn, so decoding gets one that has seen nothing. The drift alarm is off: it pools
    over texts, which replay walks through side by side and decoding one after the other.
    """
    steady = replace(router.settings.hazard, drift=None)
    router = replace(router, settings=replace(router.settings, hazard=steady))
    costs, found = router.costs, []
    names = [*statics(texts.arms), *(n for n in ROUTED if router.has_arms_of(n)), "random"]
    for name in names:
        found.append((router.policy(name), replay(router.policy(name), texts, costs)))
    plans = {
        "oracle_round": best_oracle_round(texts, costs)[0],
        "oracle_path": oracle_path(texts, costs)[0],
    }
    for name, plan in plans.items():
        planned = PlannedPolicy(name, texts.arms, plans_of(texts, plan))
        found.append((planned, replay(planned, texts, costs)))
    hedge = hedge_of(texts, costs, router.settings.hazard.lam)
    return [*found, (hedge, replay(hedge, texts, costs))]


def _compared(name: str, decoded: Sequence[Generation], replayed: Replayed) -> Comparison:
    differences: dict[int, tuple[object, object]] = {}
    for text, answer in enumerate(decoded):
        mine = [(r.position, r.arm, r.accepted) for r in answer.rounds]
        theirs = _rounds_of(replayed, text)
        if mine != theirs:
            longest = max(len(mine), len(theirs))
            pairs = [[*part, *[None] * (longest - len(part))] for part in (mine, theirs)]
            differences[text] = next((a, b) for a, b in zip(*pairs, strict=True) if a != b)
    return Comparison(
        policy=name,
        num_texts=len(decoded),
        num_rounds=sum(len(answer.rounds) for answer in decoded),
        differences=differences,
        measured=sum(answer.decode_seconds for answer in decoded),
        modelled=replayed.total_seconds,
    )


def _rounds_of(replayed: Replayed, text: int) -> list[tuple[int, str, int]]:
    rows = np.flatnonzero(replayed.text == text)
    columns = (replayed.position, replayed.arm, replayed.accepted)
    facts = zip(*(column[rows].tolist() for column in columns), strict=True)
    return [(position, replayed.arms[arm], accepted) for position, arm, accepted in facts]


def show(found: Sequence[Comparison], target: Target, console: Console) -> None:
    dtype = str(target.dtype).removeprefix("torch.")
    table = Table(title=f"replay check: {target.name}, {dtype}, {found[0].num_texts} prompts")
    for column in ("policy", "same rounds", "rounds", "measured s", "modelled s", "ratio"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    table.add_column("first difference: decoded, replayed")
    for one in found:
        ratio = one.modelled / one.measured
        mark = "" if abs(ratio - 1) <= _CLOSE else " !"
        first = next(iter(one.differences.items()), None)
        table.add_row(
            one.policy,
            f"{one.num_texts - len(one.differences)}/{one.num_texts}",
            str(one.num_rounds),
            f"{one.measured:.2f}",
            f"{one.modelled:.2f}",
            f"{ratio:.3f}{mark}",
            "" if first is None else f"prompt {first[0]}: {first[1][0]}, {first[1][1]}",
        )
    Console(file=console.file, width=max(console.width, 132)).print(table)
    off = [one.policy for one in found if abs(one.modelled / one.measured - 1) > _CLOSE]
    if off:
        console.print(
            f"modelled seconds are more than {_CLOSE:.0%} off under {', '.join(off)}: measure "
            "again on an idle machine with: python data_prep/profile_costs.py",
            soft_wrap=True,
        )
