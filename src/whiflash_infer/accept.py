"""Acceptance: which drafts stay, so that the emitted tokens are distributed as the target's.

Two rules. `walk` is for drafts that were chosen, not drawn: the most likely ones, chains and trees.
`accept_sampled` is for chains drawn from a known distribution (Leviathan et al. 2023, Chen et al.
2023): a draft y of draft probability d(y) and target probability p(y) is kept with probability
min(1, p(y) / d(y)); the token after the first rejection is drawn from max(p - d, 0), normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.trees import DraftTree, ancestors


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What stays of each row's tree.

    path: nodes kept, in order of depth; only the first `accepted` entries mean anything, the others
    are valid indices. bonus: the target's own token after the last of them.
    """

    accepted: Int[Tensor, " B"]
    path: Int[Tensor, "B N"]
    bonus: Int[Tensor, " B"]


def walk(choices: Int[Tensor, "B Q"], tree: DraftTree) -> Acceptance:
    """Follow the target's choices down each tree, as far as there are nodes that equal them.

    choices: the target's token after the anchor, then after each of the Q - 1 nodes: its most
    likely one, or one drawn from its distribution there, independently of all other choices.

    This emits what plain decoding would: every emitted token is a choice made after exactly the
    tokens before it, and the tree, fixed before the choices were made, only decides where the
    emission ends. Trying the children x_1, x_2, ... of a node one by one, each a draft of
    probability one that is kept with the probability it has in what is left of the target after
    the refused ones, is the same law: x_k is then kept with probability
    (1 - p(x_1) - ... - p(x_{k-1})) * p(x_k) / (1 - p(x_1) - ... - p(x_{k-1})) = p(x_k), as if the
    token had been drawn from p first and compared with the children afterwards, and the residual
    after refusing them all is p without them, the law of a draw that equals none.
    """
    num_nodes = tree.num_nodes
    matched = (choices.gather(1, tree.parents + 1) == tree.ids) & tree.exists
    nodes = torch.arange(num_nodes, device=choices.device).expand_as(tree.ids)
    if tree.is_chain:
        accepted = matched.long().cumprod(1).sum(1)
        return Acceptance(accepted, nodes, choices.gather(1, accepted[:, None]).squeeze(1))
    kept = (matched[:, None, :] | ~ancestors(tree)).all(2)
    accepted = kept.sum(1)
    # Rows of the pass by depth, the anchor's first. Kept nodes differ in depth; the column of
    # depth N + 1 takes the others and is dropped.
    at = torch.where(kept, tree.depths, num_nodes + 1)
    rows = choices.new_zeros(len(choices), num_nodes + 2).scatter(1, at, nodes + 1)
    last_row = rows.gather(1, accepted[:, None])
    path = (rows[:, 1 : num_nodes + 1] - 1).clamp(min=0)
    return Acceptance(accepted, path, choices.gather(1, last_row).squeeze(1))


def accept_sampled(
    target_probs: Float[Tensor, "Q V"],
    draft_probs: Float[Tensor, "K V"],
    draft_ids: Int[Tensor, " K"],
    accept_uniforms: Float[Tensor, " K"],
    final_uniform: Float[Tensor, ""],
    draw: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """How many of one row's K = Q - 1 drafts stay, and the token after them.

    Drafts were drawn from `draft_probs`, over the target's vocabulary. draw: one token per row of
    `probs [N V]` at `uniforms [N]`.
    """
    chance = accept_probs(target_probs[:-1], draft_probs, draft_ids)
    accepted = accept_prefix(accept_uniforms < chance)
    # After the last draft there is nothing to take off: the draft row there is zero.
    rows = accepted[None]
    draft_row = F.pad(draft_probs, (0, 0, 0, 1)).index_select(0, rows)
    final = residual(target_probs.index_select(0, rows), draft_row)
    return accepted, draw(final, final_uniform[None]).squeeze(0)


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
