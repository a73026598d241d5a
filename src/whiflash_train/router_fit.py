"""What a router holds besides its trained networks: thresholds, paces, frailty, and its ceiling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int

from whiflash_infer.nets.router import RouterConfig, RouterNet, cumulative_hazards, hazard_loss
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.policies import (
    DeltaPolicy,
    EntropyPolicy,
    HazardPolicy,
    HazardSettings,
    StaticPolicy,
)
from whiflash_infer.routing.policies.hazard import exposures
from whiflash_infer.routing.price import solve_price
from whiflash_infer.routing.replay import DenseTexts, Replayed, read_all, replay
from whiflash_infer.types import DRAFTERS

CALIBRATION_TEXTS = 64  # that thresholds are chosen on, as the paper has it
_RIDGES = np.logspace(0, 6, 13)
_FRAILTY = (0.5, 512.0)


@dataclass(frozen=True, kw_only=True)
class FitRecipe:
    """How a hazard network is fitted outside Lightning: for frailty, and for the ceiling.

    unused: columns of the features that it does not see.
    """

    num_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    seed: int
    unused: tuple[int, ...] = ()


def part_of(texts: DenseTexts, chosen: Sequence[int]) -> DenseTexts:
    """Some of the texts, in the order given."""
    spans = [np.arange(texts.starts[t], texts.starts[t + 1]) for t in chosen]
    rows = np.concatenate(spans) if spans else np.zeros(0, dtype=int)
    return replace(
        texts,
        names=[texts.names[t] for t in chosen],
        categories=[texts.categories[t] for t in chosen],
        starts=np.cumsum([0, *map(len, spans)]),
        positions=texts.positions[rows],
        accepted=texts.accepted[rows],
        censored=texts.censored[rows],
        limits=texts.limits[list(chosen)],
        features=texts.features[torch.from_numpy(rows)],
    )


def static_replays(texts: DenseTexts, costs: CostModel) -> dict[str, Replayed]:
    policies = [StaticPolicy(arm) for arm in texts.arms]
    return {policy.name: replay(policy, texts, costs) for policy in policies}


def solved(
    run: Callable[[float], Replayed], lam: float | None
) -> tuple[list[tuple[float, float]], Replayed]:
    """The trace of the price, and the replay at its end. lam: a fixed price; None solves for it."""
    replays: dict[float, Replayed] = {}

    def speed(price: float) -> float:
        replays[price] = run(price)
        return replays[price].tokens_per_s

    trace = solve_price(speed) if lam is None else [(lam, speed(lam))]
    return trace, replays[trace[-1][0]]


def best_threshold(
    policy: EntropyPolicy | DeltaPolicy, texts: DenseTexts, costs: CostModel, *, num: int = 24
) -> float:
    """The threshold with the most replayed tokens a second; the policy is left with it.

    Candidates are quantiles of what the policy reads, and both ends (always one arm).
    """
    seen = policy.read(texts.features).double().numpy()[:, 0]
    candidates = [seen.min() - 1.0, *np.quantile(seen, np.linspace(0, 1, num)), seen.max() + 1.0]

    def speed(threshold: float) -> float:
        policy.threshold = threshold
        return replay(policy, texts, costs).tokens_per_s

    policy.threshold = max(map(float, candidates), key=speed)
    return policy.threshold


def solve_paces(net: RouterNet, texts: DenseTexts, statics: Sequence[Replayed]) -> None:
    """Ridge regression, by arm, of the log of a text's seconds a token on its first state.

    statics: replays of every arm of the network. The strength of the ridge is the one that
    predicts left-out texts best, in closed form.
    """
    tables = [static.by_text() for static in statics]
    paces = np.log(np.stack([table[:, 1] / table[:, 0] for table in tables], axis=1))
    first = net.normed(texts.features[torch.from_numpy(texts.starts[:-1])]).double().numpy()
    weights, bias = _ridge(first, paces)
    net.paces.copy_(torch.from_numpy(np.concatenate([weights, bias[:, None]], axis=1)))


def _ridge(
    inputs: Float[np.ndarray, "T F"], outputs: Float[np.ndarray, "T P"]
) -> tuple[Float[np.ndarray, "P F"], Float[np.ndarray, " P"]]:
    mean, bias = inputs.mean(0), outputs.mean(0)
    left, sizes, right = np.linalg.svd(inputs - mean, full_matrices=False)
    rotated = left.T @ (outputs - bias)

    def left_out_error(ridge: float) -> float:
        shrunk = sizes**2 / (sizes**2 + ridge)
        residuals = (outputs - bias) - left @ (shrunk[:, None] * rotated)
        leverage = 1 / len(inputs) + (left**2 * shrunk).sum(1)
        return float(((residuals / np.maximum(1 - leverage, 1e-6)[:, None]) ** 2).sum())

    ridge = min(_RIDGES, key=left_out_error)
    weights = (right.T @ ((sizes / (sizes**2 + ridge))[:, None] * rotated)).T
    return weights, bias - weights @ mean


def best_arm_by_category(statics: dict[str, Replayed], texts: DenseTexts) -> dict[str, str]:
    """statics: by policy name, in the order of the texts' arms."""
    found = {}
    for category in sorted(set(texts.categories)):
        mine = [t for t, own in enumerate(texts.categories) if own == category]
        speeds = [static.of(mine).tokens_per_s for static in statics.values()]
        found[category] = texts.arms[int(np.argmax(speeds))]
    return found


def fit_frailty(hazards: Float[np.ndarray, "n D K"], texts: DenseTexts, costs: CostModel) -> float:
    """Shape of the gamma prior of what texts multiply their hazards by, by the method of moments.

    hazards: cumulative ones of each draft by itself. Of d rejections of a drafter in a text, with
    an exposure of x, d - x is the score of the factor at 1. Its variance is that of the trials, v,
    and where factors differ from text to text v ** 2 / shape more. Walks of every drafter's first
    arm give both.
    """
    squares, excess = 0.0, 0.0
    firsts = {DRAFTERS[arm]: column for column, arm in reversed(list(enumerate(texts.arms))[1:])}
    for column in firsts.values():
        walk = replay(StaticPolicy(texts.arms[column]), texts, costs)
        rows = texts.starts[walk.text] + walk.position - texts.positions[texts.starts[walk.text]]
        failed = (walk.accepted < walk.num_draft) & ~texts.censored[rows, column]
        mine, at = hazards[rows, column - 1], np.arange(hazards.shape[2])
        survived = at < walk.accepted[:, None]
        rejected = (at == walk.accepted[:, None]) & failed[:, None]
        exposed = exposures(mine, survived, rejected, 1.0)
        struck = 1.0 - exposures(mine, np.zeros_like(survived), np.ones_like(rejected), 1.0)
        chance = -np.expm1(-mine)
        variance = ((1 - chance) * mine**2 + chance * struck**2) * (survived | rejected)
        parts = failed - exposed.sum(1), variance.sum(1)
        score, v = (np.bincount(walk.text, part, len(texts)) for part in parts)
        squares += float((v**2).sum())
        excess += float((score**2 - v).sum())
    return float(np.clip(squares / max(excess, 1e-9), *_FRAILTY))


def hazards_of_strangers(
    config: RouterConfig, train: DenseTexts, texts: DenseTexts, recipe: FitRecipe
) -> Float[np.ndarray, "n D K"]:
    """Cumulative hazards of each draft by itself, predicted for every category of the texts by a
    network that has learned from the others: what a router is asked for when a new kind of prompt
    comes. With one category alone it has learned from that one."""
    kinds = np.array(train.categories)
    found = np.zeros((len(texts.positions), len(config.max_draft), config.longest))
    for category in sorted(set(texts.categories)):
        others = np.flatnonzero(kinds != category)
        known = others if len(others) else np.arange(len(train))
        net = fit_hazards(config, [part_of(train, known.tolist())], recipe)
        mine = [t for t, own in enumerate(texts.categories) if own == category]
        rows = np.concatenate([np.arange(texts.starts[t], texts.starts[t + 1]) for t in mine])
        with torch.inference_mode():
            cumulative = cumulative_hazards(net(texts.features[torch.from_numpy(rows)]))
        found[rows] = np.diff(cumulative.double().numpy(), axis=2, prepend=0.0)
    return found


# --- the predictable ceiling ---------------------------------------------------------------------


def predictable_ceiling(
    config: RouterConfig,
    train: DenseTexts,
    validation: DenseTexts,
    costs: CostModel,
    settings: HazardSettings,
    recipe: FitRecipe,
    *,
    num_folds: int,
    advance: Callable[[], None] = lambda: None,
) -> Replayed:
    """What the price rule reaches with cross-fitted expectations: for each part of the validation
    texts a network that has learned from all training texts and all other validation texts.

    Hindsight oracles are partly luck; this is what states tell. It is an estimate: of the same kind
    of network, which has seen more texts, and more like these, than the router that is judged.
    """
    folds = np.array_split(
        np.random.default_rng(recipe.seed).permutation(len(validation)), num_folds
    )
    beliefs: list[tuple[np.ndarray, np.ndarray]] = []
    for fold in folds:
        others = part_of(validation, np.setdiff1d(np.arange(len(validation)), fold).tolist())
        policy = HazardPolicy(fit_hazards(config, [train, others], recipe), costs, settings)
        beliefs.append((fold, read_all(policy, part_of(validation, fold.tolist()))))
        advance()
    run = hazard_runs(
        RouterNet(config), validation, costs, settings, _in_order(validation, beliefs)
    )
    return solved(run, None)[1]


def hazard_runs(
    net: RouterNet,
    texts: DenseTexts,
    costs: CostModel,
    settings: HazardSettings,
    beliefs: Float[np.ndarray, "n X"] | None = None,
) -> Callable[[float], Replayed]:
    """The hazard policy's replay as a function of the price; the network is asked once."""
    if beliefs is None:
        beliefs = read_all(HazardPolicy(net, costs, settings), texts)

    def run(lam: float) -> Replayed:
        policy = HazardPolicy(net, costs, replace(settings, lam=lam))
        return replay(policy, texts, costs, beliefs=beliefs)

    return run


def fit_hazards(config: RouterConfig, parts: Sequence[DenseTexts], recipe: FitRecipe) -> RouterNet:
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        net = RouterNet(config)
        features = torch.cat([part.features for part in parts])
        accepted = torch.from_numpy(np.concatenate([part.accepted[:, 1:] for part in parts]))
        censored = torch.from_numpy(np.concatenate([part.censored[:, 1:] for part in parts]))
        longest = torch.tensor(list(config.max_draft.values()))
        net.set_normaliser(features, recipe.unused)
        optimizer = torch.optim.AdamW(
            net.hazards.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.num_steps)
        for _ in range(recipe.num_steps):
            rows = torch.randint(0, len(features), (recipe.batch_size,))
            loss = hazard_loss(net(features[rows]), accepted[rows], censored[rows], longest)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net.eval().requires_grad_(False)


def _in_order(
    texts: DenseTexts, parts: Sequence[tuple[Int[np.ndarray, " _"], Float[np.ndarray, "_ X"]]]
) -> Float[np.ndarray, "n X"]:
    """Rows of several parts of the texts, as the texts have them."""
    ordered = np.zeros((len(texts.positions), parts[0][1].shape[1]))
    for chosen, rows in parts:
        lengths = [int(texts.starts[t + 1] - texts.starts[t]) for t in chosen]
        bounds = np.cumsum([0, *lengths])
        for text, (start, end) in zip(chosen.tolist(), pairwise(bounds.tolist()), strict=True):
            ordered[texts.starts[text] : texts.starts[text + 1]] = rows[start:end]
    return ordered
