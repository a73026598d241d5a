"""The router network: from the state to per-arm hazards, and the heads of the simpler policies.

h[a, k] = P(draft k is rejected | drafts 1..k-1 of arm a were accepted). The expected tokens of a
round that drafts k are 1 + sum_{j<=k} prod_{i<=j} (1 - h[a, i]), so one set of hazards prices every
draft length. Dimensions besides the legend: D drafting arms, those after plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from whiflash_infer.types import AR, DIFFUSION, PLAIN

MAX_PARAMETERS = 3_000_000


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """max_draft: for each drafting arm, the longest draft it can make.

    Raises: ValueError for a network of more than `MAX_PARAMETERS`.
    """

    num_features: int
    width: int
    max_draft: dict[str, int]
    dropout: float = 0.1

    def __post_init__(self) -> None:
        outputs = len(self.max_draft) * max(self.max_draft.values(), default=0) + 1
        first = 2 * self.num_features * self.width + self.num_features * (1 + len(self.max_draft))
        size = first + 2 * self.width**2 + outputs * self.width
        if size > MAX_PARAMETERS:
            raise ValueError(
                f"a router of width {self.width} over {self.num_features} features has about "
                f"{size:,} parameters, and at most {MAX_PARAMETERS:,} are allowed: lower the width"
            )

    @property
    def arms(self) -> tuple[str, ...]:
        return PLAIN, *self.max_draft

    @property
    def longest(self) -> int:
        return max(self.max_draft.values())

    @property
    def delta_arms(self) -> tuple[str, str]:
        """The two that the paper's policies choose between: the AR drafter, the block drafter."""
        return (AR, DIFFUSION)


class RouterNet(nn.Module):
    """Three networks side by side that share the normalised features, and nothing else.

    hazards: of our policy. difference: the paper's regression of what the block drafter gains over
    the AR drafter. paces: of the policy that chooses once a text, linear, solved and not trained.
    """

    mean: Tensor
    scale: Tensor
    temperatures: Tensor
    paces: Tensor

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        num_arms, num_features = len(config.max_draft), config.num_features
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("scale", torch.ones(num_features))
        self.register_buffer("temperatures", torch.ones(num_arms))
        self.register_buffer("paces", torch.zeros(num_arms + 1, num_features + 1))
        self.hazards = _MLP(config, num_arms * config.longest)
        self.difference = _MLP(config, 1)

    def set_normaliser(self, features: Float[Tensor, "N F"], unused: Sequence[int] = ()) -> None:
        """unused: columns that are to say nothing; divided by infinity they are always 0."""
        self.mean.copy_(features.mean(0))
        self.scale.copy_(features.std(0).clamp(min=1e-4))
        self.scale[torch.tensor(unused, dtype=torch.long)] = torch.inf

    def normed(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N F"]:
        return ((features - self.mean) / self.scale).clamp(-8.0, 8.0)

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N D K"]:
        """Logits of the hazards, padded to the longest draft K; calibrated by temperatures."""
        shape = len(self.config.max_draft), self.config.longest
        logits = self.hazards(self.normed(features)).unflatten(-1, shape)
        return logits / self.temperatures[:, None]

    def delta(self, features: Float[Tensor, "N F"]) -> Float[Tensor, " N"]:
        """Tokens that the second of `delta_arms` is predicted to gain over the first."""
        return self.difference(self.normed(features)).squeeze(-1)

    def pace(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N P"]:
        """Predicted log seconds a token of whole answers by arm, plain first."""
        return self.normed(features) @ self.paces[:, :-1].T + self.paces[:, -1]


class _MLP(nn.Module):
    """Called every round: no module between its layers, each of which would take its time."""

    def __init__(self, config: RouterConfig, num_outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(config.num_features, config.width)
        self.second = nn.Linear(config.width, config.width)
        self.last = nn.Linear(config.width, num_outputs)
        self._dropout = config.dropout

    def forward(self, x: Float[Tensor, "N F"]) -> Float[Tensor, "N O"]:
        for layer in (self.first, self.second):
            x = F.silu(F.linear(x, layer.weight, layer.bias))
            if self.training:
                x = F.dropout(x, self._dropout)
        return F.linear(x, self.last.weight, self.last.bias)


def cumulative_hazards(hazard_logits: Float[Tensor, "N D K"]) -> Float[Tensor, "N D K"]:
    """-log P(drafts 1..k are all accepted)."""
    return F.softplus(hazard_logits.float()).cumsum(-1)


def expected_tokens(hazard_logits: Float[Tensor, "N D K"]) -> Float[Tensor, "N D K1"]:
    """Expected tokens a round, bonus included, for draft lengths 0..K (K1 = K + 1)."""
    survival = (-cumulative_hazards(hazard_logits)).exp()
    return 1.0 + F.pad(survival.cumsum(-1), (1, 0))


def hazard_loss(
    hazard_logits: Float[Tensor, "N D K"],
    accepted: Int[Tensor, "N D"],
    censored: Bool[Tensor, "N D"],
    max_draft: Int[Tensor, " D"],
) -> Float[Tensor, ""]:
    """Negative log likelihood of accepted lengths, a mean over observed trials.

    Drafts 1..m survived; draft m + 1 failed, unless m is the longest draft of the arm or the text
    ended there (censored): then nothing is known of it.
    """
    step = torch.arange(hazard_logits.shape[-1], device=accepted.device)
    survived = step < accepted[..., None]
    failed = (step == accepted[..., None]) & ~censored[..., None]
    observed = (survived | failed) & (step < max_draft[:, None])
    losses = F.binary_cross_entropy_with_logits(
        hazard_logits.float(), failed.float(), reduction="none"
    )
    return (losses * observed).sum() / observed.sum().clamp(min=1)


def brier_loss(
    hazard_logits: Float[Tensor, "N D K"],
    accepted: Int[Tensor, "N D"],
    censored: Bool[Tensor, "N D"],
    max_draft: Int[Tensor, " D"],
) -> Float[Tensor, ""]:
    """Squared error of the chance that a draft is reached and kept, which is what expected tokens
    are summed of; a mean over drafts of known fate."""
    step = torch.arange(hazard_logits.shape[-1], device=accepted.device)
    kept = step < accepted[..., None]
    known = (kept | ~censored[..., None]) & (step < max_draft[:, None])
    errors = ((-cumulative_hazards(hazard_logits)).exp() - kept.float()) ** 2
    return (errors * known).sum() / known.sum().clamp(min=1)


def delta_loss(
    predicted: Float[Tensor, " N"],
    first: Int[Tensor, " N"],
    second: Int[Tensor, " N"],
    censored: Bool[Tensor, " N"],
) -> Float[Tensor, ""]:
    """Squared error of the difference of two arms' accepted lengths, where both are known."""
    errors = (predicted.float() - (second - first).float()) ** 2
    return (errors * ~censored).sum() / (~censored).sum().clamp(min=1)
