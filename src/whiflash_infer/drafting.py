"""The drafting half of a round: bring the chosen drafters up to date, and let them draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whiflash_infer.drafters.base import Arm, Drafts, DrawDrafts
from whiflash_infer.requests import DRAFT_STREAM, Request
from whiflash_infer.safety import Safety
from whiflash_infer.sampling import distribution, draw
from whiflash_infer.sequence import Texts
from whiflash_infer.settings import EngineSettings
from whiflash_infer.trees import DraftTree, join
from whiflash_infer.types import PLAIN, Decision

Groups = dict[tuple[str, bool], list[int]]  # places by arm, and whether their drafts are drawn


@dataclass(frozen=True, slots=True)
class Part:
    """An arm's drafts for the requests at some places, num_draft[b] on the longest path."""

    places: list[int]
    num_draft: list[int]
    drafts: Drafts

    def probs(self) -> Iterator[tuple[int, Float[Tensor, "K V"]]]:
        """Of each place, what its drafts were drawn from, if they were."""
        if self.drafts.probs is not None:
            for index, place in enumerate(self.places):
                yield place, self.drafts.probs[index, : self.num_draft[index]]


class Drafting:
    """Requests are grouped by arm, so that an arm drafts for all of its own at once.

    A place is an index into `requests` and `decisions`. Decisions are replaced where the drafter
    fails: those requests go on without drafts in this round.
    """

    def __init__(self, arms: Mapping[str, Arm], settings: EngineSettings, safety: Safety) -> None:
        self._arms = arms
        self._settings = settings
        self._safety = safety
        self.widths = tuple(
            sorted(settings.widths or default_widths([a.max_nodes for a in arms.values()]))
        )

    def group(self, requests: Sequence[Request], decisions: Sequence[Decision]) -> Groups:
        groups: Groups = {}
        for place, (request, decision) in enumerate(zip(requests, decisions, strict=True)):
            if decision.arm != PLAIN and decision.num_draft > 0:
                drawn = request.draws and self._arms[decision.arm].can_draw
                groups.setdefault((decision.arm, drawn), []).append(place)
        return groups

    def catch_up(
        self, texts: Texts, requests: Sequence[Request], groups: Groups, decisions: list[Decision]
    ) -> Groups:
        """Bring drafters up to date as `sync` says. Returns the groups without what failed."""
        for arm, places in self._followers(requests, groups).items():
            self._follow(texts, [requests[place] for place in places], arm)
        healthy: Groups = {}
        for (arm, drawn), places in groups.items():
            for place in places:
                if arm in requests[place].unsafe:
                    decisions[place] = Decision(PLAIN, 0, f"{arm} failed")
                else:
                    healthy.setdefault((arm, drawn), []).append(place)
        return healthy

    def draft(
        self, texts: Texts, requests: Sequence[Request], groups: Groups, decisions: list[Decision]
    ) -> list[Part]:
        parts = []
        for (arm, drawn), places in groups.items():
            mine = [requests[place] for place in places]
            num_draft = [decisions[place].num_draft for place in places]
            drawer = _drawer(mine) if drawn else None
            try:
                drafts = self._arms[arm].draft(texts, [r.row for r in mine], num_draft, drawer)
            except Exception as error:
                for place in places:
                    self._safety.drafter_failed(requests[place], arm, error)
                    decisions[place] = Decision(PLAIN, 0, f"{arm} failed")
            else:
                parts.append(Part(places, num_draft, drafts))
        return parts

    def join(self, parts: Sequence[Part], num_rows: int, device: torch.device) -> DraftTree:
        """One tree of all requests, as wide as the next of the widths."""
        nodes = max((part.drafts.tree.num_nodes for part in parts), default=0)
        width = next((w for w in self.widths if w > nodes), nodes + 1)
        if len(parts) == 1 and len(parts[0].places) == num_rows and nodes + 1 == width:
            return parts[0].drafts.tree
        placed = [(torch.tensor(part.places, device=device), part.drafts.tree) for part in parts]
        return join(placed, num_rows=num_rows, num_nodes=width - 1, device=device)

    def _followers(self, requests: Sequence[Request], groups: Groups) -> dict[str, list[int]]:
        """Places to bring up to date, by an arm of the drafter that follows."""
        followers: dict[str, list[int]] = {}
        if self._settings.sync in ("eager", "full_forward"):
            for arm in {id(a.drafter): name for name, a in self._arms.items()}.values():
                followers[arm] = [p for p, r in enumerate(requests) if arm not in r.unsafe]
            return followers
        for (arm, _), places in groups.items():
            followers.setdefault(arm, []).extend(places)
        return followers

    def _follow(self, texts: Texts, requests: Sequence[Request], arm: str) -> None:
        """Catch up, with the invariant checked: a cache never leads its text, and then fits it."""
        drafter, full = self._arms[arm].drafter, self._settings.sync in ("lazy", "full_forward")
        rows = [request.row for request in requests]
        broken: set[int] = {row for row in rows if drafter.lag(texts, row) < 0}
        why: Exception | str = "its cache does not fit the text"
        try:
            drafter.catch_up(texts, [row for row in rows if row not in broken], full=full)
            broken |= {row for row in rows if drafter.lag(texts, row) != 0}
            if self._settings.debug:
                broken |= {r for r in rows if r not in broken and drafter.differs(texts, r)}
        except Exception as error:
            broken, why = set(rows), error
        for request in requests:
            if request.row in broken:
                self._safety.drafter_failed(request, arm, why)


def finite_rows(parts: Sequence[Part], num_rows: int, device: torch.device) -> Bool[Tensor, " B"]:
    """Whether the numbers of the drafter that drafted for a request stayed finite."""
    finite = torch.ones(num_rows, dtype=torch.bool, device=device)
    for part in parts:
        finite[part.places] = part.drafts.finite
    return finite


def default_widths(max_nodes: Sequence[int]) -> tuple[int, ...]:
    """Powers of two, and the full width of each arm: few shapes, and no padding at full length."""
    full = {1 + nodes for nodes in max_nodes}
    powers = {1 << power for power in range(max(full, default=1).bit_length())}
    return tuple(sorted(full | powers))


def _drawer(requests: Sequence[Request]) -> DrawDrafts:
    def drawn(
        logits: Float[Tensor, "B V"], step: int
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"]]:
        laws = [distribution(logits[i, None], r.options) for i, r in enumerate(requests)]
        numbers = [r.uniforms(DRAFT_STREAM, step + 1)[-1:] for r in requests]
        law = torch.cat(laws)
        return draw(law, torch.cat(numbers)), law

    return drawn
