"""What the target says to a round's drafts: its token after the anchor and after every node.

With those choices every rule becomes one: keep the nodes that equal the choice before them
(`accept.walk`). Greedy texts choose the most likely token; sampled ones draw it at the random
number of its position, so that the same seed gives the same text whatever is drafted. Two kinds of
texts are judged one by one: those with logits processors, which must see every prefix in order, and
those whose drafts were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from whiflash_infer.accept import Acceptance, accept_sampled, walk
from whiflash_infer.cache import TargetCache, make_span
from whiflash_infer.requests import ACCEPT_STREAM, TARGET_STREAM, Request, prefix_ids
from whiflash_infer.sampling import choose, distribution, draw
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree, ancestors, top
from whiflash_infer.types import TargetRows

_NONE = -1  # a choice that no draft equals


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round commits in each row, all still on the device.

    accepted: drafts kept. path: their nodes, and tokens: they and the bonus; of both only the
    first ones mean anything. sources: rows of the pass that read anchor and path. finite: whether
    the target's logits of those rows are numbers.
    """

    accepted: Int[Tensor, " B"]
    path: Int[Tensor, "B D"]
    tokens: Int[Tensor, "B D1"]
    sources: Int[Tensor, "B D1"]
    finite: Bool[Tensor, " B"]


def read_drafts(
    target: Target, texts: Texts, cache: TargetCache, tree: DraftTree, *, static: bool
) -> TargetRows:
    """One target pass over the anchor and the tree of every row, rows 0 to B - 1."""
    rows = range(tree.num_rows)
    anchors = texts.anchors(rows)
    ids = torch.cat([texts.ids(rows, anchors, 1), tree.ids], dim=1)
    width, device = ids.shape[1], ids.device
    if tree.is_chain:  # padding comes last, so nothing that counts sees it
        depths = torch.arange(width, device=device).expand(len(ids), -1)
        block = None
    else:
        depths = F.pad(tree.depths, (1, 0))
        block = F.pad(F.pad(ancestors(tree), (0, 0, 1, 0)), (1, 0), value=True)
    span = make_span(
        rows,
        anchors,
        width,
        device,
        end=cache.kv.capacity if static else None,
        static=static,
    )
    return target.read(ids, depths, block, cache, span)


def keep_path(
    texts: Texts, cache: TargetCache, tree: DraftTree, rows: TargetRows, outcome: Outcome
) -> None:
    """Put what the pass made of each accepted path where its text goes on: tokens, features, keys
    and values. Of a chain the last three lie there already."""
    width = outcome.tokens.shape[1]
    taps = rows.taps[:, :width]
    if not tree.is_chain:
        taps = rows.taps.gather(1, outcome.sources[..., None].expand(-1, -1, rows.taps.shape[2]))
        if outcome.path.shape[1]:
            cache.kv.keep_path(cache.current, outcome.path)
    texts.extend(range(tree.num_rows), outcome.tokens, taps)


def judge(
    requests: Sequence[Request],
    rows: TargetRows,
    tree: DraftTree,
    draft_probs: dict[int, Float[Tensor, "K V"]],
    *,
    longest: int,
) -> Outcome:
    """draft_probs: of rows whose drafts were drawn. longest: D, drafts on a path at most."""
    greatest, choices = (found.squeeze(-1) for found in top(rows.logits.float(), 1))
    for row, request in enumerate(requests):
        if request.processors:
            choices[row] = _processed_choices(request, rows.logits[row], tree, row)
        elif row in draft_probs:
            choices[row] = _drawn_choices(request, rows.logits[row], tree, row, draft_probs[row])
        elif not request.options.is_greedy:
            choices[row] = _sampled_choices(request, rows.logits[row], tree, row)
    return _outcome(walk(choices, tree), tree, greatest, longest)


def _outcome(
    acceptance: Acceptance, tree: DraftTree, greatest: Float[Tensor, "B Q"], longest: int
) -> Outcome:
    path = acceptance.path[:, :longest]
    steps = torch.arange(longest + 1, device=path.device)
    accepted = acceptance.accepted[:, None]
    kept = torch.cat([tree.ids.gather(1, path), torch.zeros_like(accepted)], dim=1)
    tokens = torch.where(steps < accepted, kept, acceptance.bonus[:, None])
    sources = torch.cat([torch.zeros_like(accepted), path + 1], dim=1)
    finite = greatest.gather(1, sources).isfinite() | (steps > accepted)
    return Outcome(acceptance.accepted, path, tokens, sources, finite.all(1))


def first_choice(request: Request, logits: Float[Tensor, "1 V"]) -> Int[Tensor, " 1"]:
    """The token that the prompt pass produces."""
    return _choose(
        request, logits, [], request.uniforms(TARGET_STREAM, 1) if request.streams else None
    )


def _choose(
    request: Request,
    logits: Float[Tensor, "1 V"],
    extra: Sequence[int],
    uniform: Float[Tensor, " 1"] | None,
) -> Int[Tensor, " 1"]:
    """After the answer so far and the `extra` drafts behind it."""
    if request.processors:
        scores, ids = logits.float(), prefix_ids(request, extra, logits.device)
        for processor in request.processors:
            scores = processor(ids, scores)  # pyright: ignore - tensors of their own types
        logits = scores
    if uniform is None:
        return top(logits, 1)[1].squeeze(-1)
    return choose(logits, request.options, uniform)


def _sampled_choices(
    request: Request, logits: Float[Tensor, "Q V"], tree: DraftTree, row: int
) -> Int[Tensor, " Q"]:
    """Nodes at one depth stand for the same output position, so they share its random number."""
    numbers = request.uniforms(TARGET_STREAM, logits.shape[0])
    at = torch.cat([tree.depths.new_zeros(1), tree.depths[row]])
    return choose(logits, request.options, numbers[at])


def _processed_choices(
    request: Request, logits: Float[Tensor, "Q V"], tree: DraftTree, row: int
) -> Int[Tensor, " Q"]:
    """Walks down the tree, so that processors see exactly the prefixes of plain decoding.

    Nodes that the walk does not come to get no choice. It stops where the answer does.
    """
    choices = torch.full((len(logits),), _NONE, device=logits.device)
    ids, parents, count = tree.ids[row].tolist(), tree.parents[row].tolist(), int(tree.counts[row])
    children = {(parents[node], ids[node]): node for node in reversed(range(count))}
    node, said = -1, []
    while True:
        uniform = request.uniforms(TARGET_STREAM, len(said) + 1)[-1:] if request.streams else None
        token = int(_choose(request, logits[node + 1, None], said, uniform))
        choices[node + 1] = token
        said.append(token)
        if (node, token) not in children or request.stops.cut(request.output_ids, said)[1]:
            return choices
        node = children[node, token]


def _drawn_choices(
    request: Request,
    logits: Float[Tensor, "Q V"],
    tree: DraftTree,
    row: int,
    draft_probs: Float[Tensor, "K V"],
) -> Int[Tensor, " Q"]:
    """Of a chain whose drafts were drawn: the drafts kept, then the token that follows them."""
    num_drafts = len(draft_probs)
    numbers = request.uniforms(ACCEPT_STREAM, num_drafts)
    law = distribution(logits[: num_drafts + 1], request.options)
    ids = tree.ids[row, :num_drafts]
    final_number = request.uniforms(TARGET_STREAM, 1)[0]  # no round starts here but this one
    accepted, final = accept_sampled(law, draft_probs, ids, numbers, final_number, draw)
    choices = torch.full((len(logits),), _NONE, device=logits.device)
    steps = torch.arange(num_drafts, device=logits.device)
    choices[:num_drafts] = torch.where(steps < accepted, ids, _NONE)
    return choices.scatter(0, accepted[None], final[None])
