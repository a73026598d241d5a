"""What a routing policy is told, and what it answers: for N texts at once, the same in the decode
engine and in replay.

A round of a policy has three steps. `read` turns the features of anchors into numbers, on the
device; they come to the host with the outcome of the round before. `decide` chooses arms from them
and from what is known of each text. `observe` is told what came of it. What a policy remembers of
a text between rounds is a row of `memory`, which the caller keeps and gives back; it starts as
zeros. No policy sees a draft before its round is over, so that sampling stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.types import Decision


@dataclass(frozen=True, slots=True)
class RoundStates:
    """N texts before a round, all of it fixed before any draft of the round exists.

    arms: names of the P arms, plain first; columns and arm numbers follow their order.
    texts: a number of each text that stays the same in all its rounds.
    lags: tokens that the arm's drafter must catch up on before it can draft.
    max_draft: drafts that each arm can make here, already cut to what may still be emitted.
    last_arms: the arm of the round before, -1 in a text's first round.
    categories: what kind of prompt each is, empty where nobody said.
    prices: tokens a second that the request itself names, NaN where it names none; None: nobody.
    num_together: how many texts a round decodes, which makes its price; those here may be some of
    them, and in replay, where texts advance side by side, many more.
    """

    arms: tuple[str, ...]
    texts: Int[np.ndarray, " N"]
    positions: Int[np.ndarray, " N"]
    lags: Int[np.ndarray, "N P"]
    max_draft: Int[np.ndarray, "N P"]
    last_arms: Int[np.ndarray, " N"]
    categories: Sequence[str]
    prices: Float[np.ndarray, " N"] | None = None
    num_together: int = 1

    def __len__(self) -> int:
        return len(self.texts)

    def of(self, rows: Sequence[int]) -> RoundStates:
        """Some of the texts."""
        index = list(rows)
        return RoundStates(
            self.arms,
            self.texts[index],
            self.positions[index],
            self.lags[index],
            self.max_draft[index],
            self.last_arms[index],
            [self.categories[row] for row in index],
            None if self.prices is None else self.prices[index],
            self.num_together,
        )


@dataclass(frozen=True, slots=True)
class Decisions:
    """For each text an arm, by number, and a draft length.

    expected: tokens that the policy expects; price: tokens a second that it reckoned with. Both NaN
    where it has no opinion. reasons: in a few words, of each text.
    """

    arms: Int[np.ndarray, " N"]
    num_draft: Int[np.ndarray, " N"]
    expected: Float[np.ndarray, " N"]
    price: Float[np.ndarray, " N"]
    reasons: Sequence[str]

    def of(self, row: int, states: RoundStates) -> Decision:
        """Raises: IndexError for an arm that there is not."""
        arm = int(self.arms[row])
        if arm < 0:
            raise IndexError(f"there is no arm {arm}")
        return Decision(
            arm=states.arms[arm],
            num_draft=int(self.num_draft[row]),
            reason=self.reasons[row],
            expected=float(self.expected[row]),
            price=float(self.price[row]),
        )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of a round. ended: the text is over; then an accepted length may have been cut.

    seconds: of the round, each text's share of it.
    """

    accepted: Int[np.ndarray, " N"]
    committed: Int[np.ndarray, " N"]
    seconds: Float[np.ndarray, " N"]
    ended: Sequence[bool] | np.ndarray


@runtime_checkable
class Policy(Protocol):
    """arms: those it may choose. needs_features: whether `read` looks at them. memory_size: M,
    numbers that it remembers of each text."""

    name: str

    @property
    def arms(self) -> tuple[str, ...]: ...

    @property
    def needs_features(self) -> bool: ...

    @property
    def memory_size(self) -> int: ...

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        """X numbers of the policy's own for each row of `router_features`; on the device."""
        ...

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        """beliefs: what `read` said of each anchor. May write to `memory`."""
        ...

    def observe(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        decisions: Decisions,
        outcomes: Outcomes,
        memory: Float[np.ndarray, "N M"],
    ) -> None:
        """After the round; learns by writing to `memory`."""
        ...
