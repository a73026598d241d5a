"""What hindsight would have done: arms and draft lengths chosen with all labels known.

No policy can have this, since what a round accepts is partly luck. `oracle_path` is the least time
in which the texts can be decoded at all; `oracle_round` shows what is left of it to a rule that
looks at one round only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from whiflash_infer.routing.costs import CostModel, CostTable
from whiflash_infer.routing.policies import HedgePolicy, TextPlan
from whiflash_infer.routing.replay import DenseTexts
from whiflash_infer.types import DRAFTERS, PLAIN


@dataclass(frozen=True, slots=True)
class Plan:
    """For every row of `DenseTexts`, the arm, by number, and the draft length of a round there."""

    arms: Int[np.ndarray, " n"]
    num_draft: Int[np.ndarray, " n"]


def oracle_round(texts: DenseTexts, costs: CostModel, *, lam: float, num_texts: int = 1) -> Plan:
    """At every row the greatest tokens - lam * seconds; of equals the first arm, and of its lengths
    the shortest.

    Seconds are those of a drafter that is up to date but for the anchor (lag 1), since the lag at a
    row depends on the rounds before, which the choice does not look at.
    """
    table = costs.table(texts.arms, num_texts=num_texts)
    return _most_valuable(round_tokens(texts, table), _seconds(texts, table, lag=1), lam)


def best_oracle_round(
    texts: DenseTexts,
    costs: CostModel,
    *,
    num_texts: int = 1,
    tolerance: float = 1e-4,
    max_iterations: int = 20,
) -> tuple[Plan, float]:
    """`oracle_round` at the price under which it achieves that very throughput, and the price.

    Dinkelbach iteration, real lags included in what is achieved. Since the rule does not look past
    its round, the iteration may fail to settle; the plan is the fastest that it came across.
    """
    table = costs.table(texts.arms, num_texts=num_texts)
    tokens, seconds = round_tokens(texts, table), _seconds(texts, table, lag=1)
    lam, tried = 0.0, []
    for _ in range(max_iterations):
        plan = _most_valuable(tokens, seconds, lam)
        achieved = _throughput(follow(texts, plan, costs, num_texts=num_texts))
        tried.append((plan, lam, achieved))
        if abs(achieved - lam) <= tolerance * achieved:
            break
        lam = achieved
    plan, price, _ = max(reversed(tried), key=lambda one: one[2])
    return plan, price


def oracle_path(texts: DenseTexts, costs: CostModel, *, num_texts: int = 1) -> tuple[Plan, float]:
    """The plan that decodes the texts in the least time, and that time.

    Exact, with lags: from its first use to its last, a drafter reads every position once, so all
    its uses in a text together cost the position of the last of them in lagging tokens. A path
    therefore pays for a drafter's tokens once, where the drafter is not used again, and what a row
    must know of the rest of its path is which drafters are used on it.

    Rows that the best path does not visit get the best start of an answer that begins there, with
    drafters that have read nothing.
    """
    table = costs.table(texts.arms, num_texts=num_texts)
    tokens = round_tokens(texts, table)
    paths = _shortest_paths(texts, table, tokens)
    best = paths.seconds.argmin(-1)
    arms, num_draft, _ = paths.steps_of(np.arange(len(best)), best)
    has_rows = np.diff(texts.starts) > 0
    rows, ends = texts.starts[:-1][has_rows], texts.starts[1:][has_rows]
    total, sets = float(paths.seconds[rows, best[rows]].sum()), best[rows]
    while rows.size:
        arms[rows], num_draft[rows], sets = paths.steps_of(rows, sets)
        rows = rows + tokens[rows, arms[rows], num_draft[rows]]
        goes_on = rows < ends
        rows, ends, sets = rows[goes_on], ends[goes_on], sets[goes_on]
    return Plan(arms, num_draft), total


def plans_of(texts: DenseTexts, plan: Plan) -> dict[int, TextPlan]:
    """The plan of each text by its number, as `PlannedPolicy` takes them; none without rounds."""
    parts = {}
    for text in np.flatnonzero(np.diff(texts.starts)).tolist():
        rows = slice(int(texts.starts[text]), int(texts.starts[text + 1]))
        first = int(texts.positions[rows][0])
        parts[text] = TextPlan(first, plan.arms[rows], plan.num_draft[rows])
    return parts


def hedge_of(texts: DenseTexts, costs: CostModel, lam: float) -> HedgePolicy:
    """The policy that is told after each round what every arm would have gained there."""
    spans = {t: span for t, span in enumerate(pairwise(texts.starts.tolist())) if span[0] < span[1]}
    return HedgePolicy(
        texts.arms,
        costs,
        {text: int(texts.positions[span[0]]) for text, span in spans.items()},
        {text: texts.accepted[slice(*span)] for text, span in spans.items()},
        lam=lam,
    )


def follow(
    texts: DenseTexts, plan: Plan, costs: CostModel, *, num_texts: int = 1
) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Tokens and seconds of each text when it is decoded by a plan, lags as they arise."""
    table = costs.table(texts.arms, num_texts=num_texts)
    drafters = _drafters(texts.arms)
    rows, ends = texts.starts[:-1].copy(), texts.starts[1:]
    seconds = np.zeros(len(rows))
    synced = np.zeros((len(rows), drafters.max() + 1), dtype=int)
    while (active := np.flatnonzero(rows < ends)).size:
        row = rows[active]
        arm, length, position = plan.arms[row], plan.num_draft[row], texts.positions[row]
        seconds[active] += table.fixed[arm, length] + table.per_context[arm, length] * position
        seconds[active] += table.per_lag[arm] * (position - synced[active, drafters[arm]])
        synced[active, drafters[arm]] = position
        accepted = np.minimum(texts.accepted[row, arm], length)
        rows[active] += np.minimum(accepted + 1, ends[active] - row)
    return np.diff(texts.starts), seconds


@dataclass(frozen=True, slots=True)
class _Paths:
    """Of every row and every set of drafters, the quickest path from there that uses just these.

    seconds: infinite where there is no such path. steps: its first step, as a flat index of
    `shape`: arm, draft length, set of the rest of the path.
    """

    seconds: Float[np.ndarray, "n S"]
    steps: Int[np.ndarray, "n S"]
    shape: tuple[int, int, int]

    def steps_of(
        self, rows: Int[np.ndarray, " N"], sets: Int[np.ndarray, " N"]
    ) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        """Arm, draft length, and set of the rest."""
        arms, num_draft, rest = np.unravel_index(self.steps[rows, sets], self.shape)
        return arms, num_draft, rest


def _shortest_paths(
    texts: DenseTexts, table: CostTable, tokens: Int[np.ndarray, "n P K1"]
) -> _Paths:
    """From the end of all texts backwards, row by row."""
    bits = _bits(texts.arms)
    num_sets = max(1, 2 * int(bits.max()))
    sets = np.arange(num_sets)
    unions = bits[:, None] | sets
    is_last_use = (bits[:, None] & sets) == 0
    num_rows, lengths = len(texts.positions), np.diff(texts.starts)
    seconds, steps = np.zeros((num_rows, num_sets)), np.zeros((num_rows, num_sets), dtype=int)
    prices = _seconds(texts, table, lag=0)
    at_end = np.where(sets == 0, 0.0, np.inf)
    for left in range(1, int(lengths.max(initial=0)) + 1):
        rows = texts.starts[1:][lengths >= left] - left
        after = tokens[rows]
        behind = seconds[np.minimum(rows[:, None, None] + after, num_rows - 1)]
        behind = np.where((after == left)[..., None], at_end, behind)
        lagging = table.per_lag[:, None] * is_last_use * texts.positions[rows, None, None]
        totals = prices[rows][..., None] + lagging[:, :, None] + behind
        for used in sets:
            allowed = np.where((unions == used)[:, None], totals, np.inf).reshape(len(rows), -1)
            steps[rows, used] = allowed.argmin(-1)
            seconds[rows, used] = allowed.min(-1)
    return _Paths(seconds, steps, (*tokens.shape[1:], num_sets))


def round_tokens(texts: DenseTexts, table: CostTable) -> Int[np.ndarray, "n P K1"]:
    """Tokens that a round commits, by row, arm and draft length."""
    lengths = np.arange(table.fixed.shape[1])
    left = np.repeat(texts.starts[1:], np.diff(texts.starts)) - np.arange(len(texts.positions))
    accepted = np.minimum(texts.accepted[:, :, None], lengths)
    return np.minimum(accepted + 1, left[:, None, None])


def _seconds(texts: DenseTexts, table: CostTable, *, lag: int) -> Float[np.ndarray, "n P K1"]:
    """Infinite where there is no such draft length, or the text may not become that long: a round
    at position n commits its drafts and one token more, to n + 1 tokens that are there."""
    lags = np.full((len(texts.positions), len(texts.arms)), lag)
    limits = np.repeat(texts.limits, np.diff(texts.starts))
    room = np.maximum(limits - texts.positions - 2, 0)
    fits = np.arange(table.fixed.shape[1]) <= room[:, None]
    return np.where(fits[:, None], table.seconds(texts.positions, lags), np.inf)


def _most_valuable(
    tokens: Int[np.ndarray, "n P K1"], seconds: Float[np.ndarray, "n P K1"], lam: float
) -> Plan:
    exists = np.isfinite(seconds)
    values = np.where(exists, tokens - lam * np.where(exists, seconds, 0.0), -np.inf)
    best = values.reshape(len(values), -1).argmax(-1)
    arms, num_draft = np.unravel_index(best, values.shape[1:])
    return Plan(arms, num_draft)


def _throughput(followed: tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]) -> float:
    tokens, seconds = followed
    return float(tokens.sum() / seconds.sum())


def _drafters(arms: Sequence[str]) -> Int[np.ndarray, " P"]:
    """A number of each arm's drafter; plain has one of its own, 0."""
    names = [PLAIN, *dict.fromkeys(DRAFTERS[arm] for arm in arms if arm != PLAIN)]
    return np.array([names.index(DRAFTERS.get(arm, PLAIN)) for arm in arms])


def _bits(arms: Sequence[str]) -> Int[np.ndarray, " P"]:
    """The set of each arm's drafter alone, as a bit; of plain the empty set."""
    return (1 << _drafters(arms)) >> 1
