"""`evaluate.py check=aa`: does the measurement see a difference, and none where there is none?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from whiflash_infer.artifacts import write_json
from whiflash_infer.benchmark import Condition
from whiflash_infer.errors import UserError
from whiflash_infer.metrics import Answer, by_policy, throughput_table
from whiflash_infer.statistics import bootstrap_ratio
from whiflash_infer.types import PLAIN
from whiflash_train.evaluation.conditions import chosen_conditions
from whiflash_train.evaluation.run import header, load_all, measure
from whiflash_train.evaluation.suites import load_questions
from whiflash_train.runner import engine_settings

console = Console()


@dataclass(frozen=True, slots=True)
class Seen:
    """Throughput of a condition over that of the policy it is a copy of."""

    name: str
    ratio: float
    low: float
    high: float
    planted: float

    @property
    def is_right(self) -> bool:
        """Nothing was planted and nothing is seen, or a slow-down was and is."""
        return self.high < 1 if self.planted else self.low <= 1 <= self.high


def check_measurement(cfg: DictConfig) -> None:
    """The same policy twice (A/A), and once more with every round slowed down, in one evaluation.

    Raises: UserError (a failing exit status) when the interval of the copy leaves 1.00 out, or that
    of the slowed one does not.
    """
    target, arms, router = load_all(cfg)
    settings = engine_settings(cfg, arms)
    wanted, slowdown = cfg.evaluate.measurement.policy, float(cfg.evaluate.measurement.slowdown)
    if slowdown <= 0:
        raise UserError(f"evaluate.measurement.slowdown is {slowdown}: it must be above 0")
    names = list(dict.fromkeys([PLAIN, wanted, f"{wanted}#2"]))
    conditions = chosen_conditions(
        router, names, arms, settings, seed=cfg.seed, temperature=float(cfg.evaluate.temperature)
    )
    slowed = f"{wanted}, slowed"
    conditions.append(replace(_named(conditions, wanted), name=slowed, slowdown=slowdown))
    suite = load_questions(cfg, target, cfg.evaluate.limit)
    measured = measure(cfg, target, arms, router, conditions, suite)
    planted = {f"{wanted}#2": 0.0, slowed: slowdown}
    found = [
        seen(measured.answers, wanted, name, share, bootstrap=cfg.evaluate.bootstrap, seed=cfg.seed)
        for name, share in planted.items()
    ]
    facts = {"header": header(cfg, target, suite, measured), "seen": [_facts(one) for one in found]}
    path = Path(cfg.paths.evaluation) / "measurement.json"
    write_json(path, facts)
    show(found, wanted, len(measured.questions))
    console.print(f"written to {path}", soft_wrap=True)
    wrong = [one.name for one in found if not one.is_right]
    if wrong:
        raise UserError(
            f"the measurement is wrong about {', '.join(wrong)}: leave the machine alone while it "
            "measures, or take more prompts or tokens"
        )


def seen(
    answers: Sequence[Answer], policy: str, name: str, planted: float, *, bootstrap: int, seed: int
) -> Seen:
    grouped = by_policy(answers)
    own, base = throughput_table(grouped[name]), throughput_table(grouped[policy])
    clusters = [answer.conversation for answer in grouped[policy]]
    low, high = bootstrap_ratio(own, base, resamples=bootstrap, seed=seed, clusters=clusters)
    (tokens, seconds), (base_tokens, base_seconds) = own.sum(0), base.sum(0)
    ratio = float(tokens / seconds / (base_tokens / base_seconds))
    return Seen(name, ratio, low, high, planted)


def show(found: Sequence[Seen], policy: str, num_prompts: int) -> None:
    table = Table(title=f"throughput over that of {policy}, {num_prompts} prompts")
    for column in ("condition", "planted", "seen", "95 % interval", "as it should be"):
        table.add_column(column, justify="left" if column == "condition" else "right")
    for one in found:
        table.add_row(
            one.name,
            f"{1 / (1 + one.planted):.3f}",
            f"{one.ratio:.3f}",
            f"{one.low:.3f} - {one.high:.3f}",
            "yes" if one.is_right else "no",
        )
    console.print(table)


def _named(conditions: Sequence[Condition], name: str) -> Condition:
    return next(condition for condition in conditions if condition.name == name)


def _facts(one: Seen) -> dict[str, float | str | bool]:
    interval = {"ratio": one.ratio, "low": one.low, "high": one.high}
    return {"condition": one.name, "planted": one.planted, **interval, "is_right": one.is_right}
