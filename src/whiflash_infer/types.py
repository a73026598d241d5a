"""Shared records, and the one legend of dimensions and index conventions.

Dimensions in signatures
    B batch · T tokens of a sequence · Q rows of one target pass · K drafted tokens
    A anchors · S slots in a block (slot 0 is the anchor) · N rows of any kind · C cache capacity
    L tapped layers · E tapped features, L * D · D hidden · H heads · V target vocabulary
    W draft vocabulary · F router features · P arms, plain first · K1 draft lengths 0 to K

Indices
    A sequence is x_0 ... x_n. The *anchor* is x_n, the last committed token: the target has
    produced it, but has not read it, so its key/value entries and features do not exist yet.
    The committed length is t = n + 1. Row i of the target (features, hidden, logits) is what the
    target holds after reading x_i; it predicts x_{i+1}.
    Layer ids count decoder layers from 0 and mean the output of that layer, before the final norm.

Masks are boolean, and True means keep.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import nan

from jaxtyping import Float, Int
from torch import Tensor

PLAIN, AR, DIFFUSION = "plain", "ar", "diffusion"
AR_TREE, DIFFUSION_TREE = "ar_tree", "diffusion_tree"
CHAINS = (AR, DIFFUSION)  # arms that draft one path; the trees of both networks come beside them
DRAFTERS = {AR: AR, AR_TREE: AR, DIFFUSION: DIFFUSION, DIFFUSION_TREE: DIFFUSION}  # by arm
PHASES = ("route", "catch_up", "draft", "verify", "commit")


@dataclass(frozen=True, slots=True)
class Decision:
    """Which arm drafts for a text this round, how many tokens on its longest path, and why.

    expected: tokens that the policy expects of the round, and price: tokens that a second is worth
    to it; NaN where it has no opinion.
    """

    arm: str
    num_draft: int
    reason: str = ""
    expected: float = nan
    price: float = nan


@dataclass(frozen=True, slots=True)
class TargetRows:
    """One target pass over Q tokens of B rows.

    logits and hidden cover the last `R` of them (all of them in verification, one in a prompt);
    hidden is the input of the output head, after the final norm.
    """

    logits: Float[Tensor, "B R V"]
    hidden: Float[Tensor, "B R D"]
    taps: Float[Tensor, "B Q E"]


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The frozen target's view of whole sequences, for training and labelling."""

    taps: Float[Tensor, "B T E"]
    hidden: Float[Tensor, "B T D"]


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round of one text. `accepted` counts drafts kept after the cut by a stop.

    num_draft: drafts on the longest path; num_nodes: drafts that the target read, all paths.
    seconds: by phase, this text's equal share where several were decoded together; empty when the
    decoder was not asked for timing. expected and price: see `Decision`.
    """

    position: int
    arm: str
    num_draft: int
    num_nodes: int
    accepted: int
    committed: int
    lag: int
    switched: bool
    reason: str
    seconds: dict[str, float]
    expected: float = nan
    price: float = nan

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values(), 0.0)


@dataclass(slots=True)
class Generation:
    """One answered prompt. `output_ids` includes the stop token when one was produced.

    finish_reason: stop_id | stop_string | length | error, and then `error` says what happened.
    fallbacks: what went wrong on the way and was answered with a safe arm, with counts; it cost
    time, but never changed the output. decode_seconds is the wall time of all rounds, with what
    lies between their phases; texts that are decoded together share it.
    """

    prompt_length: int
    output_ids: Int[Tensor, " T"]
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reason: str = ""
    error: str = ""
    fallbacks: Counter[str] = field(default_factory=Counter)

    @property
    def stopped(self) -> bool:
        """By a stop token or string, before the limit."""
        return self.finish_reason in ("stop_id", "stop_string")

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed by rounds; the first output token comes from the prompt pass."""
        return sum(r.committed for r in self.rounds)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that were just committed to the answer of prompt number `index`.

    round: that committed them; None for the first token, which the prompt pass produces.
    generation: the whole answer, with its last piece.
    """

    index: int
    ids: list[int]
    round: Round | None
    generation: Generation | None = None
