from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routing.worlds import THREE, plain_costs, two_regimes
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.oracles import (
    Plan,
    best_oracle_round,
    follow,
    oracle_path,
    oracle_round,
)
from whiflash_infer.routing.replay import DenseTexts
from whiflash_infer.types import AR, AR_TREE, CHAINS, DIFFUSION, DIFFUSION_TREE, DRAFTERS, PLAIN

LONGEST = {AR: 2, AR_TREE: 2, DIFFUSION: 3, DIFFUSION_TREE: 3}
NO_LIMIT = 10**9
Choose = Callable[[int], tuple[str, int]]  # from the row of a text to arm and draft length


def dense(
    arms: tuple[str, ...],
    accepted: list[np.ndarray],
    *,
    starts: list[int] | None = None,
    limits: list[int] | None = None,
) -> DenseTexts:
    """accepted: for each text, by row and drafting arm. starts: each text's first position."""
    lengths = [len(text) for text in accepted]
    firsts = starts or [10] * len(accepted)
    positions = [np.arange(first, first + n) for first, n in zip(firsts, lengths, strict=True)]
    labels = np.concatenate(accepted).reshape(sum(lengths), len(arms))
    return DenseTexts(
        arms=(PLAIN, *arms),
        names=[f"text {number}" for number in range(len(accepted))],
        categories=["chat"] * len(accepted),
        starts=np.cumsum([0, *lengths]),
        positions=np.concatenate(positions),
        accepted=np.concatenate([np.zeros((len(labels), 1), dtype=int), labels], axis=1),
        censored=np.zeros((len(labels), 1 + len(arms)), dtype=bool),
        limits=np.array(limits or [NO_LIMIT] * len(accepted)),
        features=torch.zeros(len(labels), 4),
    )


def world(num_texts: int, length: int, *, arms: tuple[str, ...] = CHAINS) -> DenseTexts:
    texts = two_regimes(num_texts, length, 3, arms=arms, shares=THREE).texts
    labels = [np.stack([text.accepted[arm] for arm in arms], axis=1) for text in texts]
    return dense(arms, labels, limits=[10 + length + 1] * num_texts)


def one(texts: DenseTexts, text: int, *, skip: int = 0) -> DenseTexts:
    """One text alone, without its first `skip` rows."""
    rows = slice(texts.starts[text] + skip, texts.starts[text + 1])
    return dense(
        texts.arms[1:],
        [texts.accepted[rows, 1:]],
        starts=[int(texts.positions[rows.start])],
        limits=[int(texts.limits[text])],
    )


def round_seconds(costs: CostModel, arm: str, length: int, position: int, lag: int) -> float:
    """As the cost profile is described, by hand."""
    parts = costs.batches[1]
    base, per_context = parts.verify[0 if arm == PLAIN else costs.nodes[arm][length]]
    seconds = base + per_context * position + parts.overhead
    if arm == PLAIN:
        return seconds
    per_pass, per_token = parts.catch_up[DRAFTERS[arm]]
    return seconds + parts.draft[arm][length] + per_pass + per_token * lag


def walked(texts: DenseTexts, text: int, costs: CostModel, choose: Choose) -> float:
    """Seconds of one text, round by round, with the position that each drafter last drafted at."""
    row, end, seconds = int(texts.starts[text]), int(texts.starts[text + 1]), 0.0
    synced = {AR: 0, DIFFUSION: 0}
    while row < end:
        arm, length = choose(row)
        position, lag = int(texts.positions[row]), 0
        if arm != PLAIN:
            lag, synced[DRAFTERS[arm]] = position - synced[DRAFTERS[arm]], position
        seconds += round_seconds(costs, arm, length, position, lag)
        row += min(int(texts.accepted[row, texts.arms.index(arm)]), length) + 1
    return seconds


def walked_plan(texts: DenseTexts, costs: CostModel, plan: Plan) -> list[float]:
    def choose(row: int) -> tuple[str, int]:
        return texts.arms[plan.arms[row]], int(plan.num_draft[row])

    return [walked(texts, text, costs, choose) for text in range(len(texts.names))]


def possible(texts: DenseTexts, row: int, costs: CostModel) -> Iterator[tuple[str, int]]:
    """Every arm and draft length that may be used at a row. After a round with all its drafts
    accepted there are position + 1 tokens, the drafts, and one more."""
    text = int(np.searchsorted(texts.starts, row, side="right")) - 1
    yield PLAIN, 0
    for arm in texts.arms[1:]:
        for length in range(1, len(costs.nodes[arm])):
            if texts.positions[row] + 1 + length + 1 <= texts.limits[text]:
                yield arm, length


def brute_force(texts: DenseTexts, text: int, costs: CostModel) -> float:
    """Least seconds of all sequences of arms and lengths, by what each drafter has read so far."""
    end = int(texts.starts[text + 1])

    @functools.cache
    def rest(row: int, synced_ar: int, synced_diffusion: int) -> float:
        if row >= end:
            return 0.0
        position, found = int(texts.positions[row]), []
        for arm, length in possible(texts, row, costs):
            synced = {AR: synced_ar, DIFFUSION: synced_diffusion}
            lag = 0
            if arm != PLAIN:
                lag, synced[DRAFTERS[arm]] = position - synced[DRAFTERS[arm]], position
            seconds = round_seconds(costs, arm, length, position, lag)
            accepted = min(int(texts.accepted[row, texts.arms.index(arm)]), length)
            found.append(seconds + rest(row + accepted + 1, synced[AR], synced[DIFFUSION]))
        return min(found)

    return rest(int(texts.starts[text]), 0, 0)


eighths = st.integers(0, 24).map(lambda number: number / 8)  # sums of them are exact


def drawn_costs(data: st.DataObject, arms: tuple[str, ...]) -> CostModel:
    nodes = {arm: list(range(LONGEST[arm] + 1)) for arm in CHAINS}
    nodes |= {AR_TREE: [0, 5, 5], DIFFUSION_TREE: [0, 4, 4, 4]}
    per_context, per_lag = st.sampled_from([0.0, 0.125]), st.sampled_from([0.0, 0.125, 0.25, 1.0])
    drafting = st.fixed_dictionaries(
        {arm: st.lists(eighths, min_size=n, max_size=n) for arm, n in sizes(arms).items()}
    )
    drafters = sorted({DRAFTERS[arm] for arm in arms})
    catch_up = st.fixed_dictionaries({name: st.tuples(eighths, per_lag) for name in drafters})
    verify = st.lists(st.tuples(eighths, per_context), min_size=6, max_size=6)
    parts = PassCosts(
        verify=data.draw(verify),
        draft=data.draw(drafting),
        catch_up=data.draw(catch_up),
        overhead=data.draw(eighths) + 0.125,
    )
    return CostModel(
        device=DeviceIdentity(device="abacus", threads=1, dtype="float32"),
        target="t",
        nodes={arm: nodes[arm] for arm in arms},
        batches={1: parts},
    )


def sizes(arms: tuple[str, ...]) -> dict[str, int]:
    """Draft lengths of each arm, 0 included."""
    return {arm: LONGEST[arm] + 1 for arm in arms}


def drawn_texts(data: st.DataObject, arms: tuple[str, ...]) -> DenseTexts:
    rows = st.tuples(*(st.integers(0, LONGEST[arm]) for arm in arms))
    texts = data.draw(st.lists(st.lists(rows, min_size=1, max_size=7), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, 5)) for _ in texts]
    ends = [start + len(text) + 1 for start, text in zip(starts, texts, strict=True)]
    limits = [data.draw(st.sampled_from([NO_LIMIT, end])) for end in ends]
    return dense(arms, [np.array(text) for text in texts], starts=starts, limits=limits)


def drawn_case(data: st.DataObject) -> tuple[DenseTexts, CostModel]:
    arms = tuple(sorted(data.draw(st.sets(st.sampled_from(sorted(DRAFTERS)), min_size=1))))
    return drawn_texts(data, arms), drawn_costs(data, arms)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_best_path_takes_the_least_time_of_all_sequences_of_arms_and_lengths(
    data: st.DataObject,
) -> None:
    texts, costs = drawn_case(data)
    plan, seconds = oracle_path(texts, costs)
    least = [brute_force(texts, text, costs) for text in range(len(texts.names))]
    assert seconds == sum(least)
    assert walked_plan(texts, costs, plan) == least


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
def test_the_best_round_has_the_greatest_value_of_all_arms_and_lengths_at_every_row(
    data: st.DataObject, lam: float
) -> None:
    texts, costs = drawn_case(data)
    plan = oracle_round(texts, costs, lam=lam)
    for row, position in enumerate(texts.positions.tolist()):
        left = int(texts.starts[texts.starts > row].min()) - row

        def value(arm: str, length: int, row: int = row, left: int = left) -> float:
            accepted = min(int(texts.accepted[row, texts.arms.index(arm)]), length)
            seconds = round_seconds(costs, arm, length, int(texts.positions[row]), lag=1)
            return min(accepted + 1, left) - lam * seconds

        values = {step: value(*step) for step in possible(texts, row, costs)}
        chosen = texts.arms[plan.arms[row]], int(plan.num_draft[row])
        assert values[chosen] == max(values.values()), position


def test_a_round_is_worth_its_tokens_less_the_price_of_its_seconds() -> None:
    # Seconds: plain 1.1; AR 1.3, 1.45, 1.6, 1.75; block 1.5, 1.55 to 1.8. Rows have 4, 3, 2, 1
    # tokens to come. At 2 tokens a second:
    #   row 0: plain 1 - 2.2; AR with 2 of 2 accepted 3 - 2.9; block with 3 of 3 4 - 3.2: block, 3
    #   row 1: AR with 1 of 1 2 - 2.6; block with none 1 - 3; plain 1 - 2.2: AR, 1
    #   row 2: nothing accepted: plain
    #   row 3: both would go on, but one token is left: plain
    texts = dense(CHAINS, [np.array([[2, 3], [1, 0], [0, 0], [4, 7]])])
    plan = oracle_round(texts, plain_costs(), lam=2.0)
    assert plan.arms.tolist() == [2, 1, 0, 0]
    assert plan.num_draft.tolist() == [3, 1, 0, 0]
    # Where time is free, the most tokens by the shortest draft; where it is dear, plain.
    assert oracle_round(texts, plain_costs(), lam=0.0).num_draft.tolist() == [3, 1, 0, 0]
    assert oracle_round(texts, plain_costs(), lam=50.0).arms.tolist() == [0, 0, 0, 0]


def test_a_drafter_that_must_catch_up_is_left_out_where_it_gains_less_than_that() -> None:
    # Two rows at positions 10 and 11. AR drafts the second token: one round of 1.3 s against two
    # plain ones of 1.1 s; but it must read 10 tokens first.
    texts = dense((AR,), [np.array([[1], [0]])])
    cheap, dear = plain_costs(per_lag=0.0625), plain_costs(per_lag=0.125)
    plan, seconds = oracle_path(texts, cheap)
    assert (plan.arms[0], plan.num_draft[0]) == (1, 1)
    assert seconds == pytest.approx(1.3 + 0.625)
    plan, seconds = oracle_path(texts, dear)
    assert (plan.arms.tolist(), seconds) == ([0, 0], pytest.approx(2.2))


def test_a_chain_and_a_tree_of_one_drafter_share_what_it_has_read() -> None:
    # The tree drafts 3 tokens at position 10 (2.25 s), the chain one at 14 (1.3 s). The tree's
    # drafter reads 10 tokens, and for the chain only 4 more.
    texts = dense((AR, AR_TREE), [np.array([[0, 3], [0, 0], [0, 0], [0, 0], [1, 0], [0, 0]])])
    plan, seconds = oracle_path(texts, plain_costs(arms=(AR, AR_TREE), per_lag=0.0078125))
    assert (plan.arms[0], plan.num_draft[0]) == (2, 3)
    assert (plan.arms[4], plan.num_draft[4]) == (1, 1)
    assert seconds == pytest.approx(2.25 + 1.3 + 14 * 0.0078125)


def test_without_lags_the_best_path_is_the_well_known_recursion() -> None:
    texts, costs = world(1, 60, arms=(DIFFUSION,)), plain_costs(arms=(DIFFUSION,))
    length = len(texts.positions)
    value = [0.0] * (length + 1)
    for row in reversed(range(length)):
        steps = [1.1 + value[row + 1]]
        for drafts in range(1, min(7, length - row - 1) + 1):
            gained = min(int(texts.accepted[row, 1]), drafts) + 1
            steps.append(1 + (1 + drafts) / 20 + 0.3 + 0.05 + 0.05 + value[row + gained])
        value[row] = min(steps)
    assert oracle_path(texts, costs)[1] == pytest.approx(value[0])


@pytest.mark.parametrize("arms", [CHAINS, tuple(DRAFTERS)])
def test_nothing_is_faster_than_the_best_path(arms: tuple[str, ...]) -> None:
    texts = world(12, 90, arms=arms)
    costs = plain_costs(arms=arms, per_context=0.001, per_lag=0.004)
    plan, seconds = oracle_path(texts, costs)
    least = np.array(walked_plan(texts, costs, plan))
    assert least.sum() == pytest.approx(seconds)
    rng = np.random.default_rng(0)
    rivals = [oracle_round(texts, costs, lam=lam) for lam in np.linspace(0, 4, 17)]
    options = [list(possible(texts, row, costs)) for row in range(len(texts.positions))]
    for _ in range(20):
        drawn = [steps[rng.integers(len(steps))] for steps in options]
        rivals.append(as_plan(texts, drawn))
    for arm in texts.arms:  # the longest that the arm may draft
        drawn = [[step for step in steps if step[0] in (arm, PLAIN)][-1] for steps in options]
        rivals.append(as_plan(texts, drawn))
    for rival in rivals:
        assert (np.array(walked_plan(texts, costs, rival)) >= least - 1e-9).all()


def as_plan(texts: DenseTexts, steps: list[tuple[str, int]]) -> Plan:
    arms = np.array([texts.arms.index(arm) for arm, _ in steps])
    return Plan(arms, np.array([length for _, length in steps]))


def test_a_plan_beside_the_best_path_is_that_of_a_text_that_begins_there() -> None:
    texts = world(1, 40, arms=tuple(DRAFTERS))
    costs = plain_costs(arms=tuple(DRAFTERS), per_lag=0.01)
    plan, _ = oracle_path(texts, costs)
    visited = set()

    def choose(row: int) -> tuple[str, int]:
        visited.add(row)
        return texts.arms[plan.arms[row]], int(plan.num_draft[row])

    walked(texts, 0, costs, choose)
    beside = [row for row in range(40) if row not in visited]
    assert len(beside) > 10
    for row in beside:
        alone, _ = oracle_path(one(texts, 0, skip=row), costs)
        assert (plan.arms[row], plan.num_draft[row]) == (alone.arms[0], alone.num_draft[0])


def test_no_oracle_drafts_more_than_may_still_be_emitted() -> None:
    texts, costs = world(4, 30), plain_costs()
    room = np.tile(np.arange(29, -1, -1), 4)  # the last row commits the last token
    plans = [oracle_path(texts, costs)[0], oracle_round(texts, costs, lam=0.0)]
    for plan in plans:
        assert (plan.num_draft <= room).all()
        assert (plan.num_draft > 0).any()


def test_following_a_plan_takes_what_a_walk_by_hand_takes() -> None:
    texts = world(5, 33, arms=tuple(DRAFTERS))
    costs = plain_costs(arms=tuple(DRAFTERS), per_context=0.001, per_lag=0.004)
    plan = oracle_round(texts, costs, lam=1.5)
    assert len(set(plan.arms.tolist())) > 2
    tokens, seconds = follow(texts, plan, costs)
    assert tokens.tolist() == [33] * 5
    assert seconds.tolist() == pytest.approx(walked_plan(texts, costs, plan))


def test_the_best_price_of_single_rounds_is_the_throughput_that_they_reach_at_it() -> None:
    texts, costs = world(20, 100), plain_costs(per_lag=0.0005)
    # Reading is so dear that not every draft that will be accepted is worth it.
    reading = [(0.6 + 0.3 * width, 0.001) for width in range(1, 17)]
    costs = replace(costs, batches={1: replace(costs.batches[1], verify=reading)})

    def throughput(plan: Plan) -> float:
        return len(texts.positions) / sum(walked_plan(texts, costs, plan))

    plan, price = best_oracle_round(texts, costs)
    achieved = throughput(plan)
    assert plan.arms.tolist() == oracle_round(texts, costs, lam=price).arms.tolist()
    assert achieved == pytest.approx(price, rel=1e-3)
    rivals = [throughput(oracle_round(texts, costs, lam=lam)) for lam in np.linspace(0, 4, 41)]
    assert min(rivals) < 0.8 * achieved
    assert achieved >= 0.99 * max(rivals)
    assert achieved <= len(texts.positions) / oracle_path(texts, costs)[1]


def test_texts_that_are_decoded_together_cost_their_share_of_the_batch() -> None:
    texts = world(3, 20)
    costs = plain_costs(per_context=0.001, per_lag=0.004, batches=(1, 4))
    plan, alone = oracle_path(texts, costs)
    together_plan, together = oracle_path(texts, costs, num_texts=4)
    assert together == pytest.approx(alone * (7 / 4) / 4)
    assert together_plan.arms.tolist() == plan.arms.tolist()
    _, seconds = follow(texts, plan, costs, num_texts=4)
    assert seconds.sum() == pytest.approx(together)


def test_an_empty_text_takes_no_time() -> None:
    labels = [np.zeros((0, 1), dtype=int), np.array([[1], [0]]), np.zeros((0, 1), dtype=int)]
    plan, seconds = oracle_path(dense((AR,), labels), plain_costs(arms=(AR,)))
    assert (plan.arms[0], seconds) == (1, pytest.approx(1.3))
