"""Shared records, and the one legend of dimensions and index conventions.

Dimensions in signatures
    B batch · T tokens of a sequence · Q rows of one target pass · K drafted tokens
    A anchors · S slots in a block (slot 0 is the anchor) · N rows of any kind · C cache capacity
    L tapped layers · E tapped features, L * D · D hidden · H heads · V target vocabulary
    W draft vocabulary · F router features

Indices
    A sequence is x_0 ... x_n. The *anchor* is x_n, the last committed token: the target has
    produced it, but has not read it, so its key/value entries and features do not exist yet.
    The committed length is t = n + 1. Row i of the target (features, hidden, logits) is what the
    target holds after reading x_i; it predicts x_{i+1}.
    Layer ids count decoder layers from 0 and mean the output of that layer, before the final norm.

Masks are boolean, and True means keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Float, Int
from torch import Tensor

PLAIN, AR, DIFFUSION = "plain", "ar", "diffusion"
PHASES = ("route", "catch_up", "draft", "verify", "commit")


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy answers: which arm drafts this round, how many tokens, and why."""

    arm: str
    num_draft: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RoundState:
    """What a policy may know, all of it fixed before any draft of this round exists.

    lags: tokens each drafter must catch up on before it can draft.
    max_draft: drafts each arm can make here, already cut to the tokens that may still be emitted.
    """

    position: int
    lags: dict[str, int]
    max_draft: dict[str, int]
    last_arm: str | None


@dataclass(frozen=True, slots=True)
class TargetRows:
    """One target pass over Q tokens.

    logits and hidden cover the last `R` of them (all of them in verification, one in a prompt);
    hidden is the input of the output head, after the final norm.
    """

    logits: Float[Tensor, "R V"]
    hidden: Float[Tensor, "R D"]
    taps: Float[Tensor, "Q E"]


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The frozen target's view of whole sequences, for training and labelling."""

    taps: Float[Tensor, "B T E"]
    hidden: Float[Tensor, "B T D"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """accepted drafts, and the target's own token after them (the bonus)."""

    accepted: int
    bonus: int


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round. `accepted` counts drafts kept after the cut by a stop token."""

    position: int
    arm: str
    num_draft: int
    accepted: int
    committed: int
    lag: int
    switched: bool
    reason: str
    seconds: dict[str, float]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(slots=True)
class Generation:
    """One answered prompt. `output_ids` includes the stop token when one was produced.

    decode_seconds is the wall time of all rounds, with what lies between their phases.
    """

    prompt_length: int
    output_ids: Int[Tensor, " T"]
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stopped: bool = False

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed by rounds; the first output token comes from the prompt pass."""
        return sum(r.committed for r in self.rounds)
