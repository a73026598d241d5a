"""The decode loop: rounds over the texts that are being answered, and new ones as rows get free."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from whiflash_infer.drafters.base import SHORT_LAG, Arm
from whiflash_infer.drafting import Drafting, Part, finite_rows
from whiflash_infer.errors import UserError
from whiflash_infer.requests import Request
from whiflash_infer.routing.protocol import Policy, RoundStates
from whiflash_infer.rows import Rows
from whiflash_infer.safety import Safety
from whiflash_infer.settings import EngineSettings
from whiflash_infer.steering import Steering
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree
from whiflash_infer.types import PLAIN, Decision, Generation, Piece, Round, TargetRows
from whiflash_infer.verification import Outcome, first_choice, judge, keep_path, read_drafts

_PREFILL_TOKENS = 2048  # of one pass over several prompts, padding counted
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """What came back from the device for one row. is_sound: the drafter's numbers were finite."""

    is_finite: bool
    is_sound: bool
    accepted: int
    num_nodes: int
    tokens: list[int]
    belief: list[float]


class DecodeLoop:
    """Row r of all storage belongs to `requests[r]`; rows in use have no gaps."""

    def __init__(
        self, target: Target, arms: Mapping[str, Arm], policy: Policy, settings: EngineSettings
    ) -> None:
        self.target = target
        self.arms = dict(arms)
        self.settings = settings
        if settings.safe_arm not in (PLAIN, *arms):
            known = ", ".join((PLAIN, *arms))
            raise UserError(f"safe_arm is {settings.safe_arm!r}: choose from {known}")
        self.rows = Rows(target, arms)
        self.requests: list[Request] = []
        self._safety = Safety(self.arms, settings.safe_arm)
        self._drafting = Drafting(self.arms, settings, self._safety)
        self.steering = Steering(policy, self.arms, self.rows.texts, self._safety)
        if settings.compile:
            target.compile()

    @property
    def spare(self) -> int:
        """Slots that a pass may write behind a text's limit."""
        return max(SHORT_LAG, *self._drafting.widths)

    def run(self, queue: deque[Request], *, num_rows: int) -> Iterator[Piece]:
        """Answer requests, `num_rows` at a time, the next ones as soon as rows are free.

        Takes them from the queue, so that what is answered is not kept here.
        """
        self.requests.clear()
        capacity = max((request.limit for request in queue), default=0)
        self.rows.reserve(num_rows, capacity + self.spare)
        while queue or self.requests:
            while queue and len(self.requests) < num_rows:
                free = num_rows - len(self.requests)
                yield from self._admit([queue.popleft() for _ in range(fitting(queue, free))])
            if self.requests:
                yield from self._round()

    # --- coming and going -----------------------------------------------------------------------

    def _admit(self, requests: list[Request]) -> list[Piece]:
        """Read prompts, each of which produces its answer's first token."""
        started = time.perf_counter()
        first_row, device = len(self.requests), self.target.device
        self.requests += requests
        read = self.target.prefill([r.prompt_ids for r in requests], self.rows.cache, first_row)
        logits, hidden = read.logits[:, 0], read.hidden[:, 0]
        firsts = []
        for place, request in enumerate(requests):
            request.begin(device, self.spare)
            request.row = first_row + place
            prompt = torch.tensor(request.prompt_ids, device=device)
            firsts.append(first_choice(request, logits[place, None]))
            taps = read.taps[place, : len(prompt)]
            self.rows.begin(first_row + place, prompt, taps, firsts[-1][0])
        lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=device)
        beliefs = self.steering.read(requests, logits, hidden, lengths)
        finite = logits.amax(1, keepdim=True).isfinite()
        told = _to_host(finite, torch.stack(firsts), beliefs)
        now = time.perf_counter()
        for request in requests:
            request.started, request.result.prefill_seconds = now, (now - started) / len(requests)
        return [self._begin(request, row) for request, row in zip(requests, told, strict=True)]

    def _begin(self, request: Request, told: list[float]) -> Piece:
        is_finite, first, *request.belief = told
        if not is_finite:
            self.rows.clear(self.requests.index(request))
            return self._fail(request)
        kept, reason = self._extend(request, [int(first)])
        return Piece(request.index, kept, None, self._finish(request, reason))

    def _extend(self, request: Request, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Append what the target has said, up to where it ends; what ended it, if anything."""
        kept, reason = request.stops.cut(request.output_ids, tokens)
        request.output_ids += kept
        return kept, reason or ("length" if request.length >= request.limit else "")

    def _finish(self, request: Request, reason: str) -> Generation | None:
        """Close the answer, if anything ended it; the last text takes the row that gets free."""
        if not reason:
            return None
        result = request.result
        result.finish_reason = reason
        result.output_ids = torch.tensor(request.output_ids, dtype=torch.long)
        result.decode_seconds = time.perf_counter() - request.started
        row, last = self.requests.index(request), len(self.requests) - 1
        if row != last:
            self.rows.move(last, row)
            self.requests[row] = self.requests[last]
            self.requests[row].row = row
        self.requests.pop()
        return result

    def _fail(self, request: Request) -> Piece:
        position = request.length - 1
        request.result.error = f"the target's logits behind position {position} are not numbers"
        _log.warning("prompt %d: %s; its answer ends there", request.index, request.result.error)
        return Piece(request.index, [], None, self._finish(request, "error"))

    # --- one round --------------------------------------------------------------------------------

    def _round(self) -> list[Piece]:
        started = time.perf_counter()
        clock = _Clock(self.target.device, on=self.settings.timing)
        requests, texts, drafting = list(self.requests), self.rows.texts, self._drafting
        states = self.steering.states(requests)
        decisions = self.steering.decide(requests, states)
        clock.lap("route")
        groups = drafting.group(requests, decisions)
        groups = drafting.catch_up(texts, requests, groups, decisions)
        clock.lap("catch_up")
        parts = drafting.draft(texts, requests, groups, decisions)
        clock.lap("draft")
        tree = drafting.join(parts, len(requests), self.target.device)
        told = self._verify(requests, tree, parts, decisions)
        clock.lap("verify")
        ends = [self._commit(row, told[row], decisions[row]) for row in range(len(requests))]
        clock.lap("commit")
        seconds = clock.shares(len(requests))
        rounds = [
            _round_of(states, row, decisions[row], told[row], ends[row], seconds)
            for row in range(len(requests))
        ]
        pieces = [
            self._close(request, done, reason)
            for request, done, (_, reason) in zip(requests, rounds, ends, strict=True)
        ]
        self.steering.observe(requests, states, rounds, seconds=time.perf_counter() - started)
        return pieces

    def _verify(
        self,
        requests: Sequence[Request],
        tree: DraftTree,
        parts: Sequence[Part],
        decisions: Sequence[Decision],
    ) -> list[_Told]:
        """Read the drafts, judge them, keep what stays; then wait for the device, once."""
        texts, cache = self.rows.texts, self.rows.cache
        read = read_drafts(self.target, texts, cache, tree, static=self.settings.compile)
        longest = min(tree.num_nodes, max((d.num_draft for d in decisions), default=0))
        probs = {row: law for part in parts for row, law in part.probs()}
        outcome = judge(requests, read, tree, probs, longest=longest)
        keep_path(texts, cache, tree, read, outcome)
        sound = finite_rows(parts, len(requests), self.target.device)
        beliefs = self._beliefs_behind(requests, read, outcome)
        heads = torch.stack([outcome.finite, sound, outcome.accepted, tree.counts], dim=1)
        return [_told(row, longest) for row in _to_host(heads, outcome.tokens, beliefs)]

    def _beliefs_behind(
        self, requests: Sequence[Request], read: TargetRows, outcome: Outcome
    ) -> Float[Tensor, "B X"]:
        """The policy's beliefs of the new anchors, from the rows that produced them."""
        if not self.steering.policy.needs_features:
            return read.hidden[:, 0, :0]
        row = torch.arange(len(requests), device=outcome.accepted.device)
        last = outcome.sources[row, outcome.accepted]
        anchors = outcome.accepted.new_tensor(self.rows.texts.anchors(range(len(requests))))
        positions = anchors + outcome.accepted + 1
        logits, hidden = read.logits[row, last], read.hidden[row, last]
        return self.steering.read(requests, logits, hidden, positions)

    def _commit(self, row: int, told: _Told, decision: Decision) -> tuple[list[int], str]:
        request = self.requests[row]
        if not told.is_sound:
            why = "its numbers are not finite"
            self._safety.drafter_failed(request, decision.arm, why)
        if not told.is_finite:
            return self._overflowed(row, told)
        kept, reason = self._extend(request, told.tokens[: told.accepted + 1])
        self.rows.commit(row, len(kept))
        request.decided_on, request.belief = request.belief, told.belief
        request.last_arm = decision.arm
        return kept, reason

    def _overflowed(self, row: int, told: _Told) -> tuple[list[int], str]:
        """Where drafts were read, one of them may be to blame, which plain decoding never reads:
        nothing of the round is kept, and the request goes on without drafts."""
        if told.num_nodes:
            self.rows.wipe(row)
            self._safety.drafts_overflowed(self.requests[row])
            return [], ""
        self.rows.clear(row)
        return [], "error"

    def _close(self, request: Request, done: Round, reason: str) -> Piece:
        if reason == "error":
            return self._fail(request)
        request.result.rounds.append(done)
        said = request.output_ids[len(request.output_ids) - done.committed :]
        return Piece(request.index, said, done, self._finish(request, reason))


def fitting(queue: Sequence[Request], most: int) -> int:
    """How many of the next prompts to read in one pass: one, or more while padding stays small."""
    longest, count = len(queue[0].prompt_ids), 1
    for request in islice(queue, 1, most):
        longest = max(longest, len(request.prompt_ids))
        if longest * (count + 1) > _PREFILL_TOKENS:
            break
        count += 1
    return count


def _round_of(
    states: RoundStates,
    row: int,
    decision: Decision,
    told: _Told,
    end: tuple[list[int], str],
    seconds: dict[str, float],
) -> Round:
    committed, arm, last = len(end[0]), states.arms.index(decision.arm), states.last_arms[row]
    return Round(
        position=int(states.positions[row]),
        arm=decision.arm,
        num_draft=decision.num_draft,
        num_nodes=told.num_nodes,
        accepted=min(told.accepted, committed),
        committed=committed,
        lag=int(states.lags[row, arm]),
        switched=bool(last >= 0 and last != arm),
        reason=decision.reason,
        seconds=seconds,
        expected=decision.expected,
        price=decision.price,
    )


def _told(row: list[float], longest: int) -> _Told:
    finite, sound, accepted, num_nodes = (int(number) for number in row[:4])
    tokens = [int(number) for number in row[4 : 5 + longest]]
    return _Told(bool(finite), bool(sound), accepted, num_nodes, tokens, row[5 + longest :])


def _to_host(*parts: Tensor) -> list[list[float]]:
    """Rows of several tensors beside each other, in one transfer; float64 holds any token id."""
    return torch.cat([part.to(torch.float64) for part in parts], dim=1).tolist()


class _Clock:
    """Seconds between laps. On a GPU it waits, so that a phase pays for its own work."""

    def __init__(self, device: torch.device, *, on: bool) -> None:
        self._seconds: dict[str, float] = {}
        self._device, self._on = device, on
        self._last = time.perf_counter() if on else 0.0

    def lap(self, phase: str) -> None:
        if not self._on:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._seconds[phase] = now - self._last
        self._last = now

    def shares(self, num_rows: int) -> dict[str, float]:
        return {phase: seconds / num_rows for phase, seconds in self._seconds.items()}
