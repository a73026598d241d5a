"""Replaying a policy over dense rounds: exact tokens, modelled seconds, no decoding.

All texts advance together, one round at a time, so that a policy decides for all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.protocol import Outcomes, Policy, RoundStates
from whiflash_infer.routing.rounds import ConversationRounds
from whiflash_infer.types import DRAFTERS, PLAIN

NO_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class DenseTexts:
    """T conversations, stacked: text t owns the rows starts[t] to starts[t + 1] of n.

    Labels are by arm, plain first, which accepts nothing. limits: see `ConversationRounds`.
    """

    arms: tuple[str, ...]
    names: list[str]
    categories: list[str]
    starts: Int[np.ndarray, " T1"]
    positions: Int[np.ndarray, " n"]
    accepted: Int[np.ndarray, "n P"]
    censored: Bool[np.ndarray, "n P"]
    limits: Int[np.ndarray, " T"]
    features: Float[Tensor, "n F"]

    def __len__(self) -> int:
        return len(self.names)


def stack_texts(conversations: Sequence[ConversationRounds], arms: Sequence[str]) -> DenseTexts:
    """arms: plain first."""
    lengths = [len(c) for c in conversations]
    return DenseTexts(
        arms=tuple(arms),
        names=[str(c.conversation) for c in conversations],
        categories=[str(c.category) for c in conversations],
        starts=np.cumsum([0, *lengths]),
        positions=np.concatenate([c.positions for c in conversations]).astype(int),
        accepted=np.concatenate([_labels(c.accepted, c, arms) for c in conversations]).astype(int),
        censored=np.concatenate([_labels(c.censored, c, arms) for c in conversations]).astype(bool),
        limits=np.array([NO_LIMIT if c.limit is None else c.limit for c in conversations]),
        features=torch.cat([c.features for c in conversations]),
    )


@dataclass(frozen=True, slots=True)
class Replayed:
    """R rounds of all texts, in order of text and position. arm: numbers of `arms`."""

    arms: tuple[str, ...]
    num_texts: int
    text: Int[np.ndarray, " R"]
    position: Int[np.ndarray, " R"]
    arm: Int[np.ndarray, " R"]
    num_draft: Int[np.ndarray, " R"]
    accepted: Int[np.ndarray, " R"]
    committed: Int[np.ndarray, " R"]
    lag: Int[np.ndarray, " R"]
    switched: Bool[np.ndarray, " R"]
    seconds: Float[np.ndarray, " R"]
    expected: Float[np.ndarray, " R"]

    @property
    def rounds(self) -> int:
        return len(self.text)

    @property
    def tokens(self) -> int:
        return int(self.committed.sum())

    @property
    def total_seconds(self) -> float:
        return float(self.seconds.sum())

    @property
    def switches(self) -> int:
        return int(self.switched.sum())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def arm_shares(self) -> dict[str, float]:
        """Of the rounds, for arms that were used."""
        counts = np.bincount(self.arm, minlength=len(self.arms))
        pairs = zip(self.arms, counts.tolist(), strict=True)
        return {arm: count / self.rounds for arm, count in pairs if count}

    def by_text(self) -> Float[np.ndarray, "T 2"]:
        """Tokens and seconds."""
        columns = [
            np.bincount(self.text, w, self.num_texts) for w in (self.committed, self.seconds)
        ]
        return np.stack(columns, axis=1).astype(float)

    def of(self, texts: Sequence[int]) -> Replayed:
        """Only the rounds of these texts, which keep their numbers."""
        keep = np.isin(self.text, texts)
        names = [n for n in self.__slots__ if n not in ("arms", "num_texts")]
        return Replayed(self.arms, self.num_texts, *(getattr(self, name)[keep] for name in names))


def replay(
    policy: Policy,
    texts: DenseTexts,
    costs: CostModel,
    *,
    beliefs: Float[np.ndarray, "n X"] | None = None,
    num_texts: int = 1,
) -> Replayed:
    """Visit the positions that the decoder would visit, with its lags, switches and limits.

    beliefs: of every position, where they are known already. num_texts: how many are decoded
    together, for the price of a round.
    """
    known = read_all(policy, texts) if beliefs is None else beliefs
    return _Walk(policy, texts, costs, num_texts).run(known)


def read_all(policy: Policy, texts: DenseTexts) -> Float[np.ndarray, "n X"]:
    """The policy's belief of every position."""
    if not policy.needs_features:
        return np.zeros((len(texts.positions), 0))
    return policy.read(texts.features).double().cpu().numpy()


class _Walk:
    def __init__(self, policy: Policy, texts: DenseTexts, costs: CostModel, num_texts: int) -> None:
        self._policy, self._texts, self._num_texts = policy, texts, num_texts
        self._table = costs.table(texts.arms, num_texts=num_texts)
        self._max_draft = np.array([0, *(costs.max_draft[arm] for arm in texts.arms[1:])])
        drafters = [DRAFTERS.get(arm, PLAIN) for arm in texts.arms]
        names = list(dict.fromkeys(drafters))
        self._drafter_of = np.array([names.index(name) for name in drafters])
        self._synced = np.zeros((len(texts), len(names)), dtype=int)
        self._last = np.full(len(texts), -1)
        self._memory = np.zeros((len(texts), policy.memory_size))
        self._row = texts.starts[:-1].copy()
        self._rounds: list[tuple[np.ndarray, ...]] = []

    def run(self, beliefs: Float[np.ndarray, "n X"]) -> Replayed:
        while True:
            active = np.flatnonzero(self._row < self._texts.starts[1:])
            if not len(active):
                return self._replayed()
            self._round(active, beliefs[self._row[active]])

    def _round(self, active: Int[np.ndarray, " N"], beliefs: Float[np.ndarray, "N X"]) -> None:
        states, memory = self._states(active), self._memory[active]
        decisions = self._policy.decide(beliefs, states, memory)
        rows, each = self._row[active], np.arange(len(active))
        # An arm without drafts decodes as plain does.
        arm = np.where(decisions.num_draft > 0, decisions.arms, 0)
        lag = np.where(arm > 0, states.lags[each, arm], 0)
        seconds = self._table.seconds(states.positions, states.lags)[each, arm, decisions.num_draft]
        accepted = np.minimum(self._texts.accepted[rows, arm], decisions.num_draft)
        left = self._texts.starts[active + 1] - rows
        committed = np.minimum(accepted + 1, left)
        switched = (states.last_arms >= 0) & (states.last_arms != decisions.arms)
        outcomes = Outcomes(accepted, committed, seconds, committed == left)
        self._policy.observe(beliefs, states, decisions, outcomes, memory)
        self._memory[active] = memory
        drafted = arm > 0
        self._synced[active[drafted], self._drafter_of[arm[drafted]]] = states.positions[drafted]
        self._last[active] = decisions.arms
        self._row[active] += committed
        facts = (active, states.positions, decisions.arms, decisions.num_draft, accepted, committed)
        self._rounds.append((*facts, lag, switched, seconds, decisions.expected))

    def _states(self, active: Int[np.ndarray, " N"]) -> RoundStates:
        """As the decoder's: a round commits its drafts and one more token, so `room` drafts can
        still be of use."""
        positions = self._texts.positions[self._row[active]]
        lags = positions[:, None] - self._synced[active][:, self._drafter_of]
        lags[:, 0] = 0
        room = np.maximum(self._texts.limits[active] - positions - 2, 0)
        return RoundStates(
            arms=self._texts.arms,
            texts=active,
            positions=positions,
            lags=lags,
            max_draft=np.minimum(self._max_draft, room[:, None]),
            last_arms=self._last[active],
            categories=[self._texts.categories[text] for text in active.tolist()],
            num_together=self._num_texts,
        )

    def _replayed(self) -> Replayed:
        columns = [np.concatenate(parts) for parts in zip(*self._rounds, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        ordered = [column[order] for column in columns]
        return Replayed(self._texts.arms, len(self._texts), *ordered)


def _labels(
    by_arm: dict[str, np.ndarray], conversation: ConversationRounds, arms: Sequence[str]
) -> np.ndarray:
    none = np.zeros(len(conversation))
    return np.stack([none if arm == PLAIN else by_arm[arm] for arm in arms], axis=1)
