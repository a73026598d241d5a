"""Which arm every request uses this round: the policy's answer, or a safe one where it fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.drafters.base import Arm
from whiflash_infer.requests import Request
from whiflash_infer.routing.features import router_features
from whiflash_infer.routing.protocol import Decisions, Outcomes, Policy, RoundStates
from whiflash_infer.safety import Safety
from whiflash_infer.sequence import Texts
from whiflash_infer.types import PLAIN, Decision, Round


class Steering:
    """Row b of all arguments belongs to `requests[b]`.

    A request is steered by the policy unless it names an arm itself or the policy failed in it.
    """

    def __init__(
        self, policy: Policy, arms: Mapping[str, Arm], texts: Texts, safety: Safety
    ) -> None:
        self.policy = policy
        self._arms = arms
        self._names = (PLAIN, *arms)
        self._texts = texts
        self._safety = safety

    def read(
        self,
        requests: Sequence[Request],
        logits: Float[Tensor, "B V"],
        hidden: Float[Tensor, "B D"],
        positions: Int[Tensor, " B"],
    ) -> Float[Tensor, "B X"]:
        """The policy's beliefs of the anchors that these rows of the target produced."""
        steered = [request for request in requests if _is_steered(request)]
        if self.policy.needs_features and steered:
            try:
                return self.policy.read(router_features(logits, hidden, positions))
            except Exception as error:
                for request in steered:
                    self._safety.router_failed(request, error)
        return hidden[:, :0]

    def states(self, requests: Sequence[Request]) -> RoundStates:
        """A round commits its drafts and one more token, so `room` drafts can still be of use."""
        room = np.array([[request.limit - request.length - 1] for request in requests])
        lags = [
            [0, *(arm.drafter.lag(self._texts, request.row) for arm in self._arms.values())]
            for request in requests
        ]
        last = [self._names.index(r.last_arm) if r.last_arm else -1 for r in requests]
        return RoundStates(
            arms=self._names,
            texts=np.array([request.index for request in requests]),
            positions=np.array([request.length - 1 for request in requests]),
            lags=np.array(lags),
            max_draft=np.minimum([0, *(a.max_draft for a in self._arms.values())], room),
            last_arms=np.array(last),
            categories=[request.options.category for request in requests],
            prices=np.array([request.options.price for request in requests]),
            num_together=len(requests),
        )

    def decide(self, requests: Sequence[Request], states: RoundStates) -> list[Decision]:
        found: dict[int, Decision] = {}
        steered = [row for row, request in enumerate(requests) if _is_steered(request)]
        try:
            found |= self._ask(requests, states, steered)
        except Exception:
            for row in steered:  # one by one, so that one failure is not everybody's
                try:
                    found |= self._ask(requests, states, [row])
                except Exception as error:
                    self._safety.router_failed(requests[row], error)
        return [
            self._safety.checked(request, found.get(row), states, row)
            for row, request in enumerate(requests)
        ]

    def observe(
        self,
        requests: Sequence[Request],
        states: RoundStates,
        rounds: Sequence[Round],
        *,
        seconds: float,
    ) -> None:
        """Tell the policy what came of the round. seconds: of it, all requests together."""
        if not self.policy.memory_size:
            return
        # A round that failed says nothing of the policy's choice.
        rows = [
            row
            for row, (request, done) in enumerate(zip(requests, rounds, strict=True))
            if _is_steered(request) and done.arm not in request.unsafe and done.committed
        ]
        if not rows:
            return
        share = seconds / len(rounds)
        try:
            self._observe(requests, states, rounds, rows, share)
        except Exception:
            for row in rows:
                try:
                    self._observe(requests, states, rounds, [row], share)
                except Exception as error:
                    self._safety.router_failed(requests[row], error)

    def _ask(
        self, requests: Sequence[Request], states: RoundStates, rows: Sequence[int]
    ) -> dict[int, Decision]:
        if not rows:
            return {}
        mine = [requests[row] for row in rows]
        part = states if len(rows) == len(requests) else states.of(rows)
        memory = self._memory(mine)
        decisions = self.policy.decide(_beliefs(mine), part, memory)
        found = {row: decisions.of(place, part) for place, row in enumerate(rows)}
        for request, remembered in zip(mine, memory, strict=True):
            request.memory = remembered
        return found

    def _observe(
        self,
        requests: Sequence[Request],
        states: RoundStates,
        rounds: Sequence[Round],
        rows: Sequence[int],
        seconds: float,
    ) -> None:
        mine, done = [requests[row] for row in rows], [rounds[row] for row in rows]
        decisions = Decisions(
            arms=np.array([states.arms.index(one.arm) for one in done]),
            num_draft=np.array([one.num_draft for one in done]),
            expected=np.array([one.expected for one in done]),
            price=np.array([one.price for one in done]),
            reasons=[one.reason for one in done],
        )
        outcomes = Outcomes(
            accepted=np.array([one.accepted for one in done]),
            committed=np.array([one.committed for one in done]),
            seconds=np.full(len(done), seconds),
            ended=np.array([request.ended for request in mine]),
        )
        memory = self._memory(mine)
        beliefs = np.array([request.decided_on for request in mine])
        part = states if len(rows) == len(requests) else states.of(rows)
        self.policy.observe(beliefs, part, decisions, outcomes, memory)
        for request, remembered in zip(mine, memory, strict=True):
            request.memory = remembered

    def _memory(self, requests: Sequence[Request]) -> Float[np.ndarray, "N M"]:
        size = self.policy.memory_size
        blank = np.zeros(size)
        return np.stack([r.memory if len(r.memory) == size else blank for r in requests])


def _beliefs(requests: Sequence[Request]) -> Float[np.ndarray, "N X"]:
    beliefs = np.array([request.belief for request in requests], dtype=float)
    return beliefs.reshape(len(requests), -1)


def _is_steered(request: Request) -> bool:
    return not request.router_failed and request.options.arm is None
