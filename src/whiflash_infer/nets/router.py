"""The router network: a small MLP from the state to per-arm hazards.

h[a, k] = P(draft k is rejected | drafts 1..k-1 of arm a were accepted). The expected tokens of a
round that drafts k are 1 + sum_{j<=k} prod_{i<=j} (1 - h[a, i]), so one set of hazards prices every
draft length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """max_draft: for each drafting arm, the longest draft it can make."""

    num_features: int
    width: int
    max_draft: dict[str, int]

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.max_draft)

    @property
    def longest(self) -> int:
        return max(self.max_draft.values())


class RouterNet(nn.Module):
    mean: Tensor
    scale: Tensor

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.num_features))
        self.register_buffer("scale", torch.ones(config.num_features))
        self.layers = nn.Sequential(
            nn.Linear(config.num_features, config.width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(config.width, config.width),
            nn.SiLU(),
            nn.Dropout(0.1),
            nn.Linear(config.width, len(config.arms) * config.longest),
        )

    def set_normaliser(self, features: Float[Tensor, "N F"]) -> None:
        self.mean.copy_(features.mean(0))
        self.scale.copy_(features.std(0).clamp(min=1e-4))

    def forward(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N P K"]:
        """Logits of the hazards of the P drafting arms, padded to the longest draft K."""
        normed = ((features - self.mean) / self.scale).clamp(-8.0, 8.0)
        return self.layers(normed).unflatten(-1, (len(self.config.arms), self.config.longest))


def expected_tokens(hazard_logits: Float[Tensor, "N P K"]) -> Float[Tensor, "N P K1"]:
    """Expected tokens a round, bonus included, for draft lengths 0..K (K1 = K + 1)."""
    survival = F.logsigmoid(-hazard_logits.float()).cumsum(-1).exp()
    return 1.0 + F.pad(survival.cumsum(-1), (1, 0))


def hazard_loss(
    hazard_logits: Float[Tensor, "N P K"],
    accepted: Int[Tensor, "N P"],
    censored: Bool[Tensor, "N P"],
    max_draft: Int[Tensor, " P"],
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
