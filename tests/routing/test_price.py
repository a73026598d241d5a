"""The price of a second, on worlds whose hazards are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from tests.routing.worlds import MAX_DRAFT, THREE, World, drawn_labels, plain_costs, two_regimes
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.oracles import follow, oracle_path
from whiflash_infer.routing.policies import HazardPolicy, HazardSettings
from whiflash_infer.routing.price import solve_price
from whiflash_infer.routing.replay import Replayed, replay, stack_texts

COSTS = plain_costs(per_lag=0.002)


class Knowing(HazardPolicy):
    """Believes the hazards that labels were drawn from; its replays read all rows in order."""

    def __init__(self, world: World, lam: float) -> None:
        max_draft = {arm: MAX_DRAFT[arm] for arm in world.arms}
        net = RouterNet(RouterConfig(num_features=12, width=2, max_draft=max_draft))
        super().__init__(net, COSTS, HazardSettings(lam=lam))
        hazards = np.concatenate(world.hazards).clip(max=1 - 1e-12)
        self._known = torch.from_numpy(-np.log1p(-hazards).cumsum(-1)).flatten(1)

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return self._known


def runs(world: World) -> dict[float, Replayed]:
    texts = stack_texts(world.texts, ("plain", *world.arms))

    class Runs(dict[float, Replayed]):
        def __missing__(self, lam: float) -> Replayed:
            self[lam] = replay(Knowing(world, lam), texts, COSTS)
            return self[lam]

    return Runs()


def varied(seed: int) -> World:
    """Every row and arm with a hazard of its own, so that every price draws another line."""
    rng = np.random.default_rng(seed)
    world = two_regimes(60, 200, seed)
    for text, hazards in zip(world.texts, world.hazards, strict=True):
        hazards[:] = rng.beta(0.7, 0.9, (len(text), 2, 1)) * (hazards < 1) + (hazards == 1)
        longest = [MAX_DRAFT[arm] for arm in world.arms]
        accepted, censored = drawn_labels(rng, hazards, longest)
        for column, arm in enumerate(world.arms):
            text.accepted[arm][:], text.censored[arm][:] = accepted[:, column], censored[:, column]
    return world


@pytest.mark.parametrize("seed", [0, 1])
def test_the_price_is_the_throughput_it_achieves_and_no_other_price_does_better(seed: int) -> None:
    run = runs(varied(seed))
    trace = solve_price(lambda lam: run[lam].tokens_per_s)
    lam, achieved = trace[-1]
    assert achieved == pytest.approx(lam, rel=0.1)  # labels are drawn, and few
    grid = np.linspace(0.0, 3 * lam, 31)
    speeds = [run[price].tokens_per_s for price in grid.tolist()]
    assert achieved >= 0.99 * max(speeds)
    # The curve peaks there: it falls to both sides.
    assert abs(grid[int(np.argmax(speeds))] - lam) < 0.25 * lam
    for far in (0.0, 3 * lam):
        assert run[far].tokens_per_s < 0.97 * achieved


def test_a_higher_price_takes_less_time_a_round_and_commits_fewer_tokens() -> None:
    run = runs(two_regimes(12, 100, 4, shares=THREE))
    points = [run[lam] for lam in (0.0, 0.5, 1.0, 1.5, 2.0, 4.0)]
    seconds = [p.total_seconds / p.rounds for p in points]
    assert seconds == sorted(seconds, reverse=True)
    taus = [p.tau for p in points]
    assert taus == sorted(taus, reverse=True)


def test_hindsight_is_faster_than_the_policy_that_knows_the_hazards() -> None:
    world = two_regimes(20, 100, 7)
    texts = stack_texts(world.texts, ("plain", *world.arms))
    plan, seconds = oracle_path(texts, COSTS)
    assert follow(texts, plan, COSTS)[1].sum() == pytest.approx(seconds)
    run = runs(world)
    assert all(run[lam].total_seconds >= seconds for lam in (0.0, 0.8, 1.3, 2.0))


def test_the_answer_is_the_best_price_seen_when_a_step_falls_back() -> None:
    speeds = {0.0: 2.0, 2.0: 5.0, 5.0: 4.0, 4.0: 4.5, 4.5: 4.2, 4.2: 4.4}
    trace = solve_price(lambda lam: speeds[lam], max_iterations=6)
    assert trace == [*speeds.items(), (2.0, 5.0)]
