"""What happens when the router or a drafter fails: the request goes on with a safe arm.

The target judges every draft, so a failure costs time and never changes an answer. It is counted in
the answer, and told once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from whiflash_infer.drafters.base import Arm
from whiflash_infer.requests import Request
from whiflash_infer.routing.protocol import RoundStates
from whiflash_infer.types import PLAIN, Decision

_log = logging.getLogger(__name__)


class Safety:
    def __init__(self, arms: Mapping[str, Arm], safe_arm: str) -> None:
        self._arms = arms
        self._safe_arm = safe_arm
        self._told: set[str] = set()

    def checked(
        self, request: Request, decision: Decision | None, states: RoundStates, row: int
    ) -> Decision:
        """The policy's decision; a safe one where it made none, or chose what failed before.

        A request may name its arm itself.
        """
        longest = dict(zip(states.arms, states.max_draft[row].tolist(), strict=True))
        if request.options.arm is not None:
            decision = Decision(request.options.arm, longest[request.options.arm], "asked for")
        if decision is not None and not 0 <= decision.num_draft <= longest[decision.arm]:
            wrong = f"it asks {decision.arm} for {decision.num_draft} drafts"
            self.router_failed(request, ValueError(wrong))
            decision = None
        if decision is None:
            return self._safe(request, longest, "the router failed")
        if decision.arm in request.unsafe:
            return self._safe(request, longest, f"{decision.arm} failed")
        return decision

    def router_failed(self, request: Request, error: Exception) -> None:
        request.router_failed = True
        self._note(request, "router", error)

    def drafter_failed(self, request: Request, arm: str, why: Exception | str) -> None:
        """No arm of its drafter is used again in this request."""
        drafter = self._arms[arm].drafter
        request.unsafe |= {name for name, a in self._arms.items() if a.drafter is drafter}
        self._note(request, f"{arm} drafter", why)

    def drafts_overflowed(self, request: Request) -> None:
        """The target's numbers did, in a round that read drafts."""
        request.unsafe |= set(self._arms)
        self._note(request, "drafts", "the target's logits are not numbers in a round with drafts")

    def _safe(self, request: Request, longest: Mapping[str, int], reason: str) -> Decision:
        arm = PLAIN if self._safe_arm in request.unsafe else self._safe_arm
        return Decision(arm, longest[arm], reason)

    def _note(self, request: Request, what: str, why: Exception | str) -> None:
        request.result.fallbacks[what] += 1
        if what in self._told:
            return
        self._told.add(what)
        _log.warning(
            "the %s failed: %s. The request goes on with %s. Told once, counted always",
            what,
            why if isinstance(why, str) else repr(why),
            self._safe_arm,
            exc_info=why if isinstance(why, Exception) else None,
        )
