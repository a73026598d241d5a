"""Dense rounds and prices whose truth is known, for tests of policies, replay and verdicts.

A hidden regime goes along with every text. In regime 0 the AR chain drafts well and the block
drafter badly, in regime 1 the other way round, and in regime 2 both fail. Labels are drawn from the
hazards of the regime, afresh at every position, so the hazards are all that can be known of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.features import NUM_SCALARS
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.types import AR, AR_TREE, CHAINS, DIFFUSION, DIFFUSION_TREE, DRAFTERS

MAX_DRAFT = {AR: 4, AR_TREE: 4, DIFFUSION: 7, DIFFUSION_TREE: 7}
HAZARDS = {  # of every draft of the arm, in regimes 0, 1 and 2
    AR: (0.1, 0.8, 0.95),
    AR_TREE: (0.05, 0.6, 0.9),
    DIFFUSION: (0.8, 0.1, 0.95),
    DIFFUSION_TREE: (0.6, 0.05, 0.9),
}
NUM_REGIMES = 3
NUM_NOISE = 5  # columns of the features that say nothing
REGIME_COLUMNS = slice(NUM_SCALARS, NUM_SCALARS + NUM_REGIMES)
NUM_FEATURES = NUM_SCALARS + NUM_REGIMES + NUM_NOISE

TWO = {"chat": (0.5, 0.5, 0.0)}
THREE = {"chat": (0.4, 0.3, 0.3)}


@dataclass(frozen=True, slots=True)
class World:
    """Texts, and what is true of each of their rows.

    arms: the drafting arms. regimes: number of the regime, of each text's rows. hazards: of draft
    1, 2... of each arm, of each text's rows; 1 beyond the arm's longest draft.
    """

    arms: tuple[str, ...]
    texts: list[ConversationRounds]
    regimes: list[Int[np.ndarray, " N"]]
    hazards: list[Float[np.ndarray, "N P K"]]


def two_regimes(
    num_texts: int,
    length: int,
    seed: int,
    *,
    arms: Sequence[str] = CHAINS,
    noise: float = 0.0,
    stay: float = 0.9,
    shares: Mapping[str, Sequence[float]] = TWO,
    limited: bool = False,
    start: int = 20,
) -> World:
    """`num_texts` texts of `length` rows each.

    noise: standard deviation of what is added to the regime's columns of the features; with 0 they
    are the regime, one hot. stay: chance that a row has the regime of the row before; else it is
    drawn from `shares`, by category; texts take the categories in turn. limited: it was the token
    limit that ended the texts. start: first position.
    """
    rng = np.random.default_rng(seed)
    table = hazard_table(arms)
    categories = list(shares)
    world = World(tuple(arms), [], [], [])
    for number in range(num_texts):
        category = categories[number % len(categories)]
        regimes = sticky(rng, length, shares[category], stay)
        hazards = table[regimes]
        accepted, censored = drawn_labels(rng, hazards, [MAX_DRAFT[arm] for arm in arms])
        text = ConversationRounds(
            conversation=f"{category}-{number}",
            category=category,
            split="validation",
            positions=np.arange(start, start + length),
            features=torch.from_numpy(features_of(rng, regimes, noise, start)),
            accepted={arm: accepted[:, column] for column, arm in enumerate(arms)},
            censored={arm: censored[:, column] for column, arm in enumerate(arms)},
            near_tie=np.zeros(length, dtype=bool),
            greedy=np.ones(length, dtype=bool),
            limit=start + length + 1 if limited else None,
        )
        world.texts.append(text)
        world.regimes.append(regimes)
        world.hazards.append(hazards)
    return world


def hazard_table(arms: Sequence[str]) -> Float[np.ndarray, "R P K"]:
    """Hazards by regime, arm and draft; 1 beyond the arm's longest draft."""
    table = np.ones((NUM_REGIMES, len(arms), max(MAX_DRAFT[arm] for arm in arms)))
    for column, arm in enumerate(arms):
        table[:, column, : MAX_DRAFT[arm]] = np.array(HAZARDS[arm])[:, None]
    return table


def sticky(
    rng: np.random.Generator, length: int, shares: Sequence[float], stay: float
) -> Int[np.ndarray, " N"]:
    """A regime for each row; in the long run each has its share."""
    drawn = rng.choice(len(shares), size=length, p=shares)
    is_new = rng.random(length) >= stay
    is_new[0] = True
    return drawn[np.maximum.accumulate(np.where(is_new, np.arange(length), 0))]


def drawn_labels(
    rng: np.random.Generator, hazards: Float[np.ndarray, "N P K"], longest: Sequence[int]
) -> tuple[Int[np.ndarray, "N P"], Bool[np.ndarray, "N P"]]:
    """Accepted lengths, and where the text ended before a draft failed."""
    survives = rng.random(hazards.shape) >= hazards
    accepted = survives.cumprod(-1).sum(-1)
    left = len(hazards) - np.arange(len(hazards))[:, None]
    censored = (accepted >= left) & (left < np.array(longest))
    return np.minimum(accepted, left), censored


def features_of(
    rng: np.random.Generator, regimes: Int[np.ndarray, " N"], noise: float, start: int
) -> Float[np.ndarray, "N F"]:
    """Entropy, top-1 and margin know little of the regime; its own columns know it but for noise;
    the last columns know nothing."""
    num_rows = len(regimes)
    entropy = np.abs(rng.normal(1.0 + 0.3 * (regimes == 0) + 0.6 * (regimes == 2), 1.0))
    top1 = np.exp(-entropy)
    margin = top1 * rng.random(num_rows)
    log_position = np.log1p(np.arange(start, start + num_rows))
    one_hot = np.eye(NUM_REGIMES)[regimes]
    noisy = one_hot + noise * rng.normal(size=one_hot.shape)
    scalars = np.stack([entropy, top1, margin, log_position], axis=-1)
    silent = rng.normal(size=(num_rows, NUM_NOISE))
    return np.concatenate([scalars, noisy, silent], axis=-1).astype(np.float32)


def plain_costs(
    *,
    arms: Sequence[str] = CHAINS,
    per_context: float = 0.0,
    per_lag: float = 0.0,
    overhead: float = 0.05,
    batches: Sequence[int] = (1,),
) -> CostModel:
    """Round numbers. The target reads w tokens in 1 + w / 20 seconds; a chain of k AR drafts takes
    k / 10, the block 0.3 at any length, the trees 0.6 (AR) and 0.4, and a pass of catch-up 0.05.

    So, with the overhead of 0.05: plain 1.1, AR at its full length 1.75, the block drafter 1.8, the
    AR tree of 10 drafts 2.25, the block drafter's tree of 15 drafts 2.3. B texts together take
    (3 + B) / 4 times as long as one.
    """
    drafting = {
        AR: [length / 10 for length in range(MAX_DRAFT[AR] + 1)],
        AR_TREE: [0.0] + [0.6] * MAX_DRAFT[AR_TREE],
        DIFFUSION: [0.0] + [0.3] * MAX_DRAFT[DIFFUSION],
        DIFFUSION_TREE: [0.0] + [0.4] * MAX_DRAFT[DIFFUSION_TREE],
    }
    nodes = {arm: list(range(MAX_DRAFT[arm] + 1)) for arm in CHAINS}
    nodes |= {AR_TREE: [0] + [10] * MAX_DRAFT[AR_TREE]}
    nodes |= {DIFFUSION_TREE: [0] + [15] * MAX_DRAFT[DIFFUSION_TREE]}

    def together(batch: int) -> PassCosts:
        factor = (3 + batch) / 4
        return PassCosts(
            verify=[(factor * (1 + w / 20), factor * per_context) for w in range(1, 17)],
            draft={arm: [factor * seconds for seconds in drafting[arm]] for arm in arms},
            catch_up={DRAFTERS[arm]: (factor * 0.05, factor * per_lag) for arm in arms},
            overhead=factor * overhead,
        )

    return CostModel(
        device=DeviceIdentity(device="abacus", threads=1, dtype="float32"),
        target="t",
        nodes={arm: nodes[arm] for arm in arms},
        batches={batch: together(batch) for batch in batches},
    )
