"""What every arm would have done in answers that are known: for oracles, and for regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import numpy as np
import torch

from whiflash_infer.drafters.base import Arm
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.labels import label_arms
from whiflash_infer.routing.oracles import round_tokens
from whiflash_infer.routing.replay import stack_texts
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.target import Target
from whiflash_infer.types import DRAFTERS, PLAIN, Generation, Round

HINDSIGHT = ("hedge", "oracle_round", "oracle_path")  # policies that know the answer


def priced_arms(arms: Mapping[str, Arm], costs: CostModel) -> tuple[str, ...]:
    """Plain, and the arms that the profile has a price for."""
    return (PLAIN, *(arm for arm in arms if arm in costs.max_draft))


@torch.inference_mode()
def label_answer(
    target: Target,
    arms: Mapping[str, Arm],
    prompt_ids: Sequence[int],
    answer: Generation,
    max_new_tokens: int,
) -> ConversationRounds:
    """Labels of a greedy answer, without features. Anchors begin with its first token."""
    ids = torch.tensor([[*prompt_ids, *answer.output_ids.tolist()]], device=target.device)
    length = ids.shape[1]
    rows = target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
    anchors = torch.arange(len(prompt_ids), length - 1, device=target.device)[None]
    lengths = torch.tensor([length], device=target.device)
    labels = label_arms(arms, ids, lengths, rows, anchors)
    count = anchors.shape[1]
    return ConversationRounds(
        conversation="",
        category="",
        split="validation",
        positions=anchors[0].cpu().numpy(),
        features=torch.zeros(count, 0),
        accepted={arm: part.accepted[0].cpu().numpy() for arm, part in labels.items()},
        censored={arm: part.censored[0].cpu().numpy() for arm, part in labels.items()},
        near_tie=np.zeros(count, dtype=bool),
        greedy=np.ones(count, dtype=bool),
        limit=len(prompt_ids) + max_new_tokens,
    )


def regrets(
    labels: ConversationRounds,
    arms: Sequence[str],
    rounds: Sequence[Round],
    costs: CostModel,
    *,
    lam: float,
    num_texts: int = 1,
) -> list[tuple[float, str]]:
    """Of each round, tokens that the best arm was worth more than the one that was taken, and that
    arm: tokens - lam * modelled seconds, at the lags that the rounds before left. A lag that was
    caught up counts against the arm that was asked to, as it does for a policy.

    arms: those that might have been taken, plain first. NaN and "" for a round of another arm.
    """
    if not rounds:
        return []
    texts = stack_texts([labels], arms)
    table = costs.table(arms, num_texts=num_texts)
    rows = np.array([r.position for r in rounds]) - texts.positions[0]
    seconds = table.seconds(texts.positions[rows], _lags(arms, rounds))
    exists = np.isfinite(seconds)
    worth = round_tokens(texts, table)[rows] - lam * np.where(exists, seconds, 0.0)
    worth = np.where(exists, worth, -np.inf)
    best = worth.reshape(len(rounds), -1).argmax(1)
    found = []
    for row, done in enumerate(rounds):
        arm = done.arm if done.num_draft else PLAIN
        if arm not in arms:
            found.append((nan, ""))
            continue
        taken = worth[row, arms.index(arm), done.num_draft]
        found.append((float(worth[row].max() - taken), arms[best[row] // worth.shape[2]]))
    return found


def _lags(arms: Sequence[str], rounds: Sequence[Round]) -> np.ndarray:
    """[rounds, arms]: tokens that each arm's drafter lay behind at the start of each round, where a
    drafter follows when it drafts."""
    synced = dict.fromkeys(DRAFTERS.values(), 0)
    lags = []
    for done in rounds:
        lags.append([0 if arm == PLAIN else done.position - synced[DRAFTERS[arm]] for arm in arms])
        if done.num_draft:
            synced[DRAFTERS[done.arm]] = done.position
    return np.array(lags)
