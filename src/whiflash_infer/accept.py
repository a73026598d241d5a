"""Acceptance: arithmetic on two distributions (Leviathan et al. 2023, Chen et al. 2023).

A draft y with draft probability d(y) and target probability p(y) is kept with probability
min(1, p(y) / d(y)); the token after the first rejection is drawn from max(p - d, 0), normalised.
For a deterministic draft d is one-hot, so y is kept with probability p(y). Whatever d is, the
emitted token is distributed as p.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.sampling import probabilities, sample
from whiflash_infer.types import Verdict


def accept_probs(
    target_probs: Float[Tensor, "K V"],
    draft_probs: Float[Tensor, "K V"],
    draft_ids: Int[Tensor, " K"],
) -> Float[Tensor, " K"]:
    """Probability of keeping each draft, given that it was drawn from `draft_probs`."""
    index = draft_ids[:, None]
    ratio = target_probs.gather(-1, index) / draft_probs.gather(-1, index)
    return ratio.squeeze(-1).clamp(max=1.0)


def residual(
    target_probs: Float[Tensor, "*N V"], draft_probs: Float[Tensor, "*N V"]
) -> Float[Tensor, "*N V"]:
    """The distribution of the token that replaces a rejected draft."""
    left_over = (target_probs - draft_probs).clamp(min=0.0)
    mass = left_over.sum(-1, keepdim=True)
    # No mass is left only where both are equal, and there a rejection has probability 0.
    return torch.where(mass > 0, left_over / mass.clamp(min=1e-38), target_probs)


def accept_prefix(kept: Bool[Tensor, " K"]) -> Int[Tensor, ""]:
    """Length of the leading run of kept drafts."""
    return kept.long().cumprod(0).sum()


def verify(
    logits: Float[Tensor, "Q V"],
    draft_ids: Int[Tensor, " K"],
    *,
    temperature: float,
    generator: torch.Generator | None,
) -> Verdict:
    """Judge K deterministic drafts by the Q = K + 1 target rows of the anchor and the drafts."""
    if temperature == 0.0:
        return verify_greedy(logits.argmax(-1), draft_ids)
    target_probs = probabilities(logits, temperature)
    draft_probs = F.one_hot(draft_ids, logits.shape[-1]).float()
    chance = accept_probs(target_probs[:-1], draft_probs, draft_ids)
    uniform = torch.rand(chance.shape, generator=generator, device=chance.device)
    accepted = int(accept_prefix(uniform < chance))
    final = target_probs[accepted]
    if accepted < len(draft_ids):
        final = residual(final, draft_probs[accepted])
    return Verdict(accepted, int(sample(final[None], generator)))


def verify_greedy(target_ids: Int[Tensor, " Q"], draft_ids: Int[Tensor, " K"]) -> Verdict:
    """The one-hot case of the same rule, without building the distributions."""
    accepted = accept_prefix(target_ids[:-1] == draft_ids)
    count, bonus = torch.stack([accepted, target_ids[accepted]]).tolist()
    return Verdict(count, bonus)
