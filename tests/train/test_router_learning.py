"""Training and judging routers on worlds whose regimes are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.routing.worlds import MAX_DRAFT, THREE, TWO, World, plain_costs, two_regimes
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.policies import (
    DeltaPolicy,
    EntropyPolicy,
    HazardPolicy,
    HazardSettings,
    Policy,
    RequestPolicy,
)
from whiflash_infer.routing.price import solve_price
from whiflash_infer.routing.replay import DenseTexts, Replayed, replay, stack_texts
from whiflash_infer.routing.router import Router
from whiflash_train.objectives import router_objective
from whiflash_train.replay_validation import ReplayValidation
from whiflash_train.router_data import router_batch
from whiflash_train.router_fit import (
    FitRecipe,
    best_arm_by_category,
    best_threshold,
    fit_frailty,
    fit_hazards,
    part_of,
    predictable_ceiling,
    solve_paces,
    static_replays,
)

ARMS = ("plain", "ar", "diffusion")
COSTS = plain_costs(per_lag=0.002)
RECIPE = FitRecipe(num_steps=250, batch_size=256, learning_rate=3e-3, weight_decay=0.01, seed=0)
FEW = FitRecipe(num_steps=60, batch_size=128, learning_rate=5e-3, weight_decay=0.01, seed=0)


def stacked(world: World) -> DenseTexts:
    return stack_texts(world.texts, ("plain", *world.arms))


def config(texts: DenseTexts, width: int = 32) -> RouterConfig:
    return RouterConfig(
        num_features=texts.features.shape[1],
        width=width,
        max_draft={arm: MAX_DRAFT[arm] for arm in texts.arms[1:]},
        dropout=0.0,
    )


def trained(texts: DenseTexts, *, steps: int = 250) -> RouterNet:
    """Both networks, by the objective of the Lightning task."""
    torch.manual_seed(0)
    net = RouterNet(config(texts))
    net.set_normaliser(texts.features)
    batch = router_batch(texts)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(0, len(batch), (256,)).numpy()
        loss, _ = router_objective(net, batch.take(rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval().requires_grad_(False)


def hazard_at_its_price(net: RouterNet, texts: DenseTexts) -> Replayed:
    def run(lam: float) -> Replayed:
        return replay(HazardPolicy(net, COSTS, HazardSettings(lam=lam)), texts, COSTS)

    return run(solve_price(lambda lam: run(lam).tokens_per_s)[-1][0])


class KnowsTheRegime(HazardPolicy):
    """Its beliefs are the hazards that the labels of these texts were drawn from."""

    def __init__(self, world: World, lam: float) -> None:
        super().__init__(RouterNet(config(stacked(world))), COSTS, HazardSettings(lam=lam))
        hazards = np.concatenate(world.hazards).clip(max=1 - 1e-12)
        self._known = torch.from_numpy(-np.log1p(-hazards).cumsum(-1)).flatten(1)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        return self._known


def knowing_at_its_price(world: World) -> Replayed:
    texts = stacked(world)

    def run(lam: float) -> Replayed:
        return replay(KnowsTheRegime(world, lam), texts, COSTS)

    return run(solve_price(lambda lam: run(lam).tokens_per_s)[-1][0])


def speed(policy: Policy, texts: DenseTexts) -> float:
    return replay(policy, texts, COSTS).tokens_per_s


@pytest.mark.parametrize("shares", [TWO, THREE], ids=["two regimes", "a third in which both fail"])
def test_the_router_finds_hidden_regimes_and_beats_all_simpler_rules(
    shares: dict[str, Sequence[float]],
) -> None:
    train = stacked(two_regimes(60, 120, 1, shares=shares, noise=0.2))
    world = two_regimes(40, 120, 2, shares=shares, noise=0.2)
    texts = stacked(world)
    net = trained(train)
    hazard = hazard_at_its_price(net, texts)
    assert hazard.tokens_per_s >= 0.97 * knowing_at_its_price(world).tokens_per_s
    statics = static_replays(texts, COSTS)
    assert hazard.tokens_per_s > 1.1 * max(s.tokens_per_s for s in statics.values())
    entropy, delta = EntropyPolicy(0.0), DeltaPolicy(net, 0.0)
    for rule in (entropy, delta):
        best_threshold(rule, texts, COSTS)  # on the very texts: the best that it can be
    assert speed(entropy, texts) < 0.9 * hazard.tokens_per_s
    # The difference of two arms tells two regimes apart, but knows no third in which both fail.
    margin = 1.0 if shares is TWO else 0.95
    assert speed(delta, texts) <= margin * hazard.tokens_per_s


def judged(net: RouterNet, texts: DenseTexts, train: DenseTexts, folds: int = 2) -> Sequence[str]:
    """The sentences of the verdict over a network."""
    settings = HazardSettings(lam=0.0, drift=6.0)
    ceiling = predictable_ceiling(
        config(texts), train, texts, COSTS, settings, RECIPE, num_folds=folds
    )
    judge = ReplayValidation(
        texts=texts,
        costs=COSTS,
        settings=settings,
        lam=None,
        category_arms=best_arm_by_category(static_replays(train, COSTS), train),
        ceiling=ceiling,
    )
    chosen, outcome = judge.finish(net)
    router = Router(net=net, settings=chosen, costs=COSTS, manifest={})
    verdict, numbers = judge.judge(router, outcome)
    assert numbers["policies"]["hazard"]["tokens_per_s"] == outcome.hazard.tokens_per_s
    assert {"delta", "request", "category", "bandit", "hedge"} <= numbers["policies"].keys()
    return verdict.sentences


def test_the_verdict_tells_a_router_that_pays_from_one_that_has_collapsed() -> None:
    train = stacked(two_regimes(40, 120, 3))
    texts = stacked(two_regimes(40, 120, 4))
    assert any(s.startswith("routing pays: hazard +") for s in judged(trained(train), texts, train))
    blind = trained(train)
    blind.hazards.first.weight.zero_()  # it sees nothing of the state any more
    sentences = judged(blind, texts, train)
    assert any(s.startswith("the router has collapsed") for s in sentences)
    assert not any(s.startswith("routing pays") for s in sentences)


def test_without_the_block_drafter_nothing_goes_by_the_name_of_the_entropy_gate() -> None:
    world = two_regimes(8, 40, 1, arms=["ar"])
    texts = stacked(world)
    judge = ReplayValidation(
        texts=texts, costs=COSTS, settings=HazardSettings(lam=0.0), lam=None, category_arms={}
    )
    net = fit_hazards(config(texts), [texts], FEW)
    settings, outcome = judge.finish(net)
    router = Router(net=net, settings=settings, costs=COSTS, manifest={})
    verdict, numbers = judge.judge(router, outcome)
    assert {"entropy", "delta"}.isdisjoint(numbers["policies"])
    assert not any("entropy" in sentence for sentence in verdict.sentences)


def test_the_ceiling_is_what_a_fresh_network_reaches_on_texts_it_has_not_seen() -> None:
    train, world = stacked(two_regimes(40, 120, 5)), two_regimes(40, 120, 6)
    settings = HazardSettings(lam=0.0)
    found = predictable_ceiling(
        config(train), train, stacked(world), COSTS, settings, RECIPE, num_folds=4
    )
    knowing = knowing_at_its_price(world)
    assert 0.96 * knowing.tokens_per_s < found.tokens_per_s < 1.03 * knowing.tokens_per_s


def test_a_ceiling_learns_nothing_of_the_labels_of_its_own_fold() -> None:
    """Where states say nothing, only labels could tell; then no rule beats the best static arm."""
    world = two_regimes(30, 80, 8, noise=50.0)
    train = stacked(two_regimes(4, 80, 9, noise=50.0))
    found = predictable_ceiling(
        config(train, width=64),
        train,
        stacked(world),
        COSTS,
        HazardSettings(lam=0.0),
        RECIPE,
        num_folds=3,
    )
    statics = static_replays(stacked(world), COSTS)
    assert found.tokens_per_s < 1.1 * max(s.tokens_per_s for s in statics.values())


def test_frailty_of_texts_is_recovered_by_moments() -> None:
    rng = np.random.default_rng(0)
    shape, factors = 4.0, rng.gamma(4.0, 1 / 4.0, 300)
    world = two_regimes(300, 100, 10, shares={"chat": (0.5, 0.5, 0.0)})
    told = []
    for text, hazards, factor in zip(world.texts, world.hazards, factors, strict=True):
        hazards[:] = np.where(hazards < 1, 0.3, 1.0)
        told.append(-np.log1p(-hazards.clip(max=0.999)))
        true = np.where(hazards < 1, 1 - (1 - hazards) ** factor, 1.0)
        kept = (rng.random(true.shape) >= true).cumprod(-1).sum(-1)
        for column, arm in enumerate(world.arms):
            text.accepted[arm][:] = np.minimum(kept[:, column], len(text) - np.arange(len(text)))
    found = fit_frailty(np.concatenate(told), stacked(world), COSTS)
    assert found == pytest.approx(shape, rel=0.35)
    for text, hazards in zip(world.texts, told, strict=True):
        kept = (rng.random(hazards.shape) < np.exp(-hazards)).cumprod(-1).sum(-1)
        for column, arm in enumerate(world.arms):
            text.accepted[arm][:] = np.minimum(kept[:, column], len(text) - np.arange(len(text)))
    assert fit_frailty(np.concatenate(told), stacked(world), COSTS) > 5 * shape


def test_one_arm_a_text_is_chosen_by_its_first_state() -> None:
    shares = {"a": (1.0, 0.0, 0.0), "b": (0.0, 1.0, 0.0)}
    train, texts = (stacked(two_regimes(40, 80, seed, shares=shares)) for seed in (11, 12))
    net = RouterNet(config(train)).eval()
    net.set_normaliser(train.features)
    statics = static_replays(train, COSTS)
    solve_paces(net, train, list(statics.values()))
    found = replay(RequestPolicy(net), texts, COSTS)
    for text, category in enumerate(texts.categories):
        assert set(found.of([text]).arm_shares) == {"ar" if category == "a" else "diffusion"}
    assert best_arm_by_category(statics, train) == {"a": "ar", "b": "diffusion"}


def test_parts_of_texts_hold_their_rows() -> None:
    texts = stacked(two_regimes(4, 10, 0))
    part = part_of(texts, [2, 0])
    assert part.names == [texts.names[2], texts.names[0]]
    assert part.starts.tolist() == [0, 10, 20]
    assert np.array_equal(part.accepted, texts.accepted[[*range(20, 30), *range(10)]])
    assert torch.equal(part.features[:10], texts.features[20:30])
    assert len(part_of(texts, [])) == 0


# --- shift --------------------------------------------------------------------------------------

SHIFTED = {"code": (0.9, 0.1, 0.0), "prose": (0.1, 0.1, 0.8)}


def test_the_drift_alarm_fires_on_a_category_that_was_never_trained_on_and_not_on_its_own() -> None:
    """States of the new category look as those of the old one, but drafts fail there."""
    train = stacked(two_regimes(40, 100, 13, shares={"code": SHIFTED["code"]}))
    net = fit_hazards(config(train), [train], RECIPE)
    own = two_regimes(20, 100, 14, shares={"code": SHIFTED["code"]})
    other = two_regimes(20, 100, 15, shares={"prose": SHIFTED["prose"]})
    for new, old in zip(other.texts, own.texts, strict=True):
        new.features[:] = old.features
    settings = HazardSettings(lam=1.5, drift=6.0, best_static="plain")
    on_own, on_other = (HazardPolicy(net, COSTS, settings) for _ in range(2))
    replay(on_own, stacked(own), COSTS)
    assert on_own.alarm.times == 0
    guarded = replay(on_other, stacked(other), COSTS)
    assert on_other.alarm.times >= 1
    assert on_other.alarm.deviations > 3.0
    unguarded = HazardPolicy(net, COSTS, replace(settings, drift=None))
    assert guarded.tokens_per_s > replay(unguarded, stacked(other), COSTS).tokens_per_s


def test_learning_within_a_text_helps_where_texts_differ_beyond_their_states() -> None:
    shares = {"easy": (0.95, 0.0, 0.05), "hard": (0.05, 0.0, 0.95)}
    worlds = [two_regimes(30, 150, seed, shares=shares, arms=["ar"]) for seed in (16, 17)]
    for text in [text for world in worlds for text in world.texts]:
        text.features[:] = torch.randn(text.features.shape)  # states say nothing of the text's kind
    train, texts = map(stacked, worlds)
    net = fit_hazards(config(train), [train], FEW)
    found = {
        frailty: replay(
            HazardPolicy(net, COSTS, HazardSettings(lam=1.3, frailty=frailty)), texts, COSTS
        ).tokens_per_s
        for frailty in (None, 1.0)
    }
    assert found[1.0] > 1.1 * found[None]
