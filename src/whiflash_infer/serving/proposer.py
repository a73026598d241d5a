"""Drafts for the requests of somebody else's engine, step by step.

The engine reads prompts, verifies drafts and samples; after each of its steps it says what it read
and sampled, and gets the drafts that it is to verify next. It names no requests: a row of a step is
recognised by where it lies in the engine's cache, and by its tokens.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from whiflash_infer.drafters.base import SHORT_LAG, Arm, Drafter
from whiflash_infer.drafting import Drafting, Groups, Part
from whiflash_infer.options import GenerationOptions
from whiflash_infer.requests import Request, Stops
from whiflash_infer.routing.policies import Policy
from whiflash_infer.routing.protocol import RoundStates
from whiflash_infer.safety import Safety
from whiflash_infer.serving.costs import MeasuredCosts
from whiflash_infer.serving.counters import Counters
from whiflash_infer.serving.features import ServedTexts
from whiflash_infer.settings import EngineSettings
from whiflash_infer.steering import Steering
from whiflash_infer.types import DRAFTERS, PLAIN, Decision, Generation, Round

_FORGET_AFTER = 8  # steps without a request; a running one is in nearly every step
_NO_STOPS = Stops(frozenset(), (), None)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine, after it has sampled. Row b of all arguments is one request.

    sampled: tokens that the step committed; none while a prompt is still being read.
    num_tokens: committed tokens, those included. token_ids: them; behind, they mean nothing.
    starts, ends: the step read positions starts[b] to ends[b] - 1, drafts among them.
    block_table: the blocks that hold the keys and values of each row's positions, in order.
    logits, hidden: of what was sampled from: in each row its drafts and the token before them; of a
    row without drafts its last token. hidden is the input of the head.
    started: when the target's pass began, by `time.perf_counter`.
    """

    sampled: list[list[int]]
    num_tokens: Int[np.ndarray, " B"]
    token_ids: Int[np.ndarray, "B C"]
    starts: Int[np.ndarray, " B"]
    ends: Int[np.ndarray, " B"]
    block_table: Int[np.ndarray, "B M"]
    block_size: int
    logits: Float[Tensor, "N V"]
    hidden: Float[Tensor, "N D"]
    started: float

    @property
    def num_known(self) -> Int[np.ndarray, " B"]:
        """Committed tokens before the step."""
        return self.num_tokens - np.array([len(tokens) for tokens in self.sampled], dtype=int)

    @property
    def num_drafts(self) -> Int[np.ndarray, " B"]:
        """Drafts that were read: what lies behind the committed tokens."""
        return np.maximum(0, self.ends - self.num_known)

    @property
    def only_decodes(self) -> bool:
        """No row reads a prompt."""
        return bool((self.starts == self.num_known - 1).all())

    def sources(self, rows: Sequence[int]) -> list[int]:
        """The rows of `logits` that each row's last token was sampled from."""
        firsts = np.cumsum(self.num_drafts + 1) - self.num_drafts - 1
        return [int(firsts[row]) + len(self.sampled[row]) - 1 for row in rows]

    def slots(self, row: int, start: int, end: int) -> Int[np.ndarray, " N"]:
        """Where the engine keeps the keys and values of these positions."""
        positions = np.arange(start, end)
        blocks = self.block_table[row, positions // self.block_size]
        return blocks.astype(np.int64) * self.block_size + positions % self.block_size


@dataclass(slots=True)
class Served(Request):
    """A request of the engine. `row` is its row of our storage, `place` its row in the last step.

    slot: of its last position that is read. states, place_in_states: what `decision` was made on.
    """

    num_tokens: int = 0
    max_tokens: int = 0
    place: int = -1
    slot: int = -1
    last_step: int = 0
    seen: float = 0.0
    decision: Decision | None = None
    states: RoundStates | None = None
    place_in_states: int = -1

    @property
    def limit(self) -> int:
        return self.max_tokens

    @property
    def length(self) -> int:
        return self.num_tokens


class Proposer:
    """max_rows: requests that draft at a time; others go without. max_length: of a text, in tokens.
    max_draft: drafts that the engine takes of a row. costs: those that `policy` reckons with, to be
    kept up to date.
    """

    def __init__(
        self,
        arms: Mapping[str, Arm],
        policy: Policy,
        texts: ServedTexts,
        *,
        max_rows: int,
        max_length: int,
        max_draft: int,
        costs: MeasuredCosts | None = None,
        settings: EngineSettings | None = None,
    ) -> None:
        settings = settings or EngineSettings()
        self.arms = dict(arms)
        self.counters = Counters()
        self._texts, self._costs = texts, costs
        self._max_rows, self._max_length, self._max_draft = max_rows, max_length, max_draft
        self._drafters = _drafters(arms)
        self._safety = Safety(self.arms, settings.safe_arm)
        self._steering = Steering(policy, self.arms, texts, self._safety)
        self._drafting = Drafting(self.arms, settings, self._safety)
        self._spare = max([SHORT_LAG, *(arm.max_nodes + 1 for arm in arms.values())])
        self._served: dict[int, Served] = {}  # by slot
        self._free: list[int] = []
        self._num_rows, self._num_texts, self._step = 0, 0, 0
        self._own_seconds, self._ended = 0.0, 0.0  # of the step before, and when it ended

    @torch.inference_mode()
    def propose(self, step: Step) -> list[list[int]]:
        """Drafts for each row of the step, none where there is nothing to draft from."""
        began = time.perf_counter()
        self._step += 1
        live = self._recognise(step, began)
        self._learn(step, live, began)
        requests = [served for _, served in live]
        drafts: list[list[int]] = [[] for _ in step.sampled]
        if requests:
            self._read(step, live)
            decisions = self._decide(requests)
            for (row, _), made in zip(live, self._draft(requests, decisions), strict=True):
                drafts[row] = made
        self._forget_old()
        self._report(requests, began)
        return drafts

    @torch.inference_mode()
    def forget_idle(self, before: float) -> None:
        """Free the requests that no step has held since then, by `time.perf_counter`."""
        for served in list(self._served.values()):
            if served.seen < before:
                self._forget(served)
        self._count_storage()

    # --- who is who -------------------------------------------------------------------------------

    def _recognise(self, step: Step, now: float) -> list[tuple[int, Served]]:
        """The rows that have sampled, each with its request, which is brought up to this step."""
        rows = [row for row, tokens in enumerate(step.sampled) if tokens]
        owners = self._owners(step, rows)
        self._reserve(max((int(step.num_tokens[row]) for row in rows), default=0))
        live = []
        for row in rows:
            served = owners.get(row) or self._begin(step, row, owners)
            if served is None:
                self.counters.fallbacks["no row is free"] += 1
                continue
            self._follow(step, row, served)
            served.place, served.last_step, served.seen = row, self._step, now
            live.append((row, served))
        for _, served in live:
            self._enter(served)
        return live

    def _owners(self, step: Step, rows: Sequence[int]) -> dict[int, Served]:
        """Rows that go on with a request that is known. Texts that share a whole block may both fit
        it; then the one goes on that stands where it stood. The other is served anew, as right."""
        owners: dict[int, Served] = {}
        waiting = dict(self._served)
        for stays in (True, False):
            for row in rows:
                found = None if row in owners else self._owner(step, row, waiting)
                if found is not None and (found.place == row or not stays):
                    owners[row] = waiting.pop(found.slot)
        return owners

    def _owner(self, step: Step, row: int, waiting: Mapping[int, Served]) -> Served | None:
        last = int(step.starts[row]) - 1
        if last < 0:
            return None
        likely = waiting.get(int(step.slots(row, last, last + 1)[0]))
        if likely is not None and self._continues(step, row, likely):
            return likely
        # A step may have passed without a word, where drafts did not fit.
        others = (served for served in waiting.values() if self._continues(step, row, served))
        return next(others, None)

    def _continues(self, step: Step, row: int, served: Served) -> bool:
        """Whether the row holds the request's tokens, in the request's own place."""
        length, last = served.length, served.length - 2
        if not 0 <= last < int(step.starts[row]) or length > step.num_known[row]:
            return False
        if step.slots(row, last, last + 1)[0] != served.slot:
            return False
        same_ids = step.token_ids[row, :length] == self._texts.text(served.row)
        same_slots = step.slots(row, 0, last + 1) == self._texts.slots(served.row)
        return bool(same_ids.all() and same_slots.all())

    def _begin(self, step: Step, row: int, owners: Mapping[int, Served]) -> Served | None:
        storage = self._free_row(owners)
        if storage is None:
            return None
        length = int(step.num_tokens[row])
        self._texts.put(storage, step.token_ids[row, :length], step.slots(row, 0, length - 1))
        self._num_texts += 1
        return Served(
            index=self._num_texts,
            prompt_ids=[],
            options=GenerationOptions(),
            stops=_NO_STOPS,
            processors=[],
            result=Generation(0, torch.empty(0, dtype=torch.long)),
            row=storage,
            num_tokens=length,
            max_tokens=self._max_length,
        )

    def _follow(self, step: Step, row: int, served: Served) -> None:
        """Take over what was committed since the request was seen."""
        old, new = served.length, int(step.num_tokens[row])
        if new > old:
            slots = step.slots(row, old - 1, new - 1)
            self._texts.append(served.row, step.token_ids[row, old:new], slots)
            served.num_tokens = new
            self._served.pop(served.slot, None)
        served.slot = int(step.slots(row, new - 2, new - 1)[0]) if new > 1 else -1

    def _enter(self, served: Served) -> None:
        stale = self._served.get(served.slot)
        if stale is not None and stale is not served:
            self._forget(stale)  # its blocks are another's now
        self._served[served.slot] = served

    # --- storage ----------------------------------------------------------------------------------

    def _free_row(self, owners: Mapping[int, Served]) -> int | None:
        """The lowest row that is free, so that neighbours stay neighbours; else that of the request
        that was not in a step for the longest time."""
        if not self._free and self._num_rows < self._max_rows:
            rows = min(self._max_rows, max(1, 2 * self._num_rows))
            for row in range(self._num_rows, rows):
                heapq.heappush(self._free, row)
            self._num_rows = rows
            self._reserve(0)
        if not self._free:
            going_on = {id(served) for served in owners.values()}
            idle = [
                served
                for served in self._served.values()
                if id(served) not in going_on and served.last_step < self._step
            ]
            if not idle:
                return None
            self._forget(min(idle, key=lambda served: served.last_step))
        return heapq.heappop(self._free)

    def _reserve(self, length: int) -> None:
        for part in (self._texts, *self._drafters.values()):
            part.reserve(self._num_rows, length + self._spare)

    def _forget(self, served: Served) -> None:
        for slot in [slot for slot, found in self._served.items() if found is served]:
            del self._served[slot]
        for part in (self._texts, *self._drafters.values()):
            part.clear(served.row)
        heapq.heappush(self._free, served.row)

    def _forget_old(self) -> None:
        for served in list(self._served.values()):
            if served.last_step + _FORGET_AFTER < self._step:
                self._forget(served)

    # --- routing ----------------------------------------------------------------------------------

    def _learn(self, step: Step, live: Sequence[tuple[int, Served]], now: float) -> None:
        """What came of the drafts of the step before, and what it cost."""
        seconds = now - step.started
        self.counters.spend("target", seconds)
        by_states: dict[int, list[tuple[Served, Round]]] = {}
        for row, served in live:
            done = _round(step, row, served)
            served.decided_on = served.belief
            if done is None:
                continue
            served.last_arm = done.arm
            accepted, committed = done.accepted, done.committed
            self.counters.end_round(done.arm, accepted=accepted, committed=committed)
            by_states.setdefault(id(served.states), []).append((served, done))
        cycle = seconds + self._own_seconds
        for members in by_states.values():
            requests = [served for served, _ in members]
            states = requests[0].states
            assert states is not None
            part = states.of([served.place_in_states for served in requests])
            share = cycle * len(members) / len(live)
            self._steering.observe(requests, part, [done for _, done in members], seconds=share)
        if self._costs is not None and live and step.only_decodes:
            num_read = int((step.ends - step.starts).sum())
            self._costs.step(seconds, num_tokens=num_read, num_texts=len(step.sampled))
            self._costs.gap(step.started - self._ended)
            cycle += self._costs.usual_gap
            self._costs.outcome(tokens=sum(map(len, step.sampled)), seconds=cycle)

    def _read(self, step: Step, live: Sequence[tuple[int, Served]]) -> None:
        """The policy's beliefs of the anchors, from the rows that they were sampled from."""
        requests = [served for _, served in live]
        source = torch.tensor(step.sources([row for row, _ in live]), device=step.logits.device)
        positions = torch.tensor([served.length - 1 for served in requests])
        beliefs = self._steering.read(
            requests, step.logits[source], step.hidden[source], positions.to(source.device)
        )
        for served, belief in zip(requests, beliefs.tolist(), strict=True):
            served.belief = belief

    def _decide(self, requests: Sequence[Served]) -> list[Decision]:
        began = time.perf_counter()
        states = self._steering.states(requests)
        prices = states.prices
        if self._costs is not None:
            prices = np.full(len(requests), self._costs.price)
        longest = np.minimum(states.max_draft, self._usable(requests))
        states = replace(states, max_draft=longest, prices=prices)
        decisions = self._steering.decide(requests, states)
        for place, served in enumerate(requests):
            served.states, served.place_in_states = states, place
        self._spend("route", time.perf_counter() - began)
        return decisions

    def _usable(self, requests: Sequence[Served]) -> Int[np.ndarray, "B P"]:
        """Drafts that each arm can make: none where features are missing that it needs first."""
        limits = np.full((len(requests), 1 + len(self.arms)), self._max_draft)
        for place, served in enumerate(requests):
            ready = {
                name: self._texts.holds(served.row, drafter.kv.lengths[served.row])
                for name, drafter in self._drafters.items()
            }
            limits[place, 1:] *= np.array([ready[DRAFTERS[arm]] for arm in self.arms], dtype=int)
            if not all(ready.values()):
                self.counters.fallbacks["features are missing"] += 1
        return limits

    # --- drafting ---------------------------------------------------------------------------------

    def _draft(self, requests: Sequence[Served], decisions: list[Decision]) -> list[list[int]]:
        groups = self._drafting.group(requests, decisions)
        groups = self._catch_up(requests, groups, decisions)
        drafts: list[list[int]] = [[] for _ in requests]
        for key, places in groups.items():
            began = time.perf_counter()
            parts = self._drafting.draft(self._texts, requests, {key: places}, decisions)
            for part in parts:
                for place, made in self._made(part, requests, decisions):
                    drafts[place] = made
            seconds = time.perf_counter() - began
            self._spend("draft", seconds)
            if self._costs is not None and parts:
                longest = max(parts[0].num_draft)
                self._costs.draft(key[0], seconds, num_draft=longest, num_texts=len(places))
        for served, decision, made in zip(requests, decisions, drafts, strict=True):
            self.counters.rounds[decision.arm] += 1
            self.counters.drafted[decision.arm] += len(made)
            self.counters.switches += served.last_arm not in (None, decision.arm)
            served.decision = decision
        return drafts

    def _catch_up(
        self, requests: Sequence[Served], groups: Groups, decisions: list[Decision]
    ) -> Groups:
        """By drafter, so that each is timed by itself."""
        healthy: Groups = {}
        for (arm, drawn), places in groups.items():
            drafter = self.arms[arm].drafter
            lags = [drafter.lag(self._texts, requests[place].row) for place in places]
            self.counters.lags.add(lags)
            began = time.perf_counter()
            alone = {(arm, drawn): places}
            healthy |= self._drafting.catch_up(self._texts, requests, alone, decisions)
            seconds = time.perf_counter() - began
            self._spend("catch_up", seconds)
            if self._costs is not None and any(lags):
                behind = sum(lag > 0 for lag in lags)
                self._costs.catch_up(
                    DRAFTERS[arm], seconds, num_tokens=sum(lags), num_passes=behind
                )
        return healthy

    def _made(
        self, part: Part, requests: Sequence[Served], decisions: list[Decision]
    ) -> Iterator[tuple[int, list[int]]]:
        """The drafts of a part on the host, which waits for the device."""
        finite = part.drafts.finite.tolist()
        for index, ids in enumerate(part.drafts.tree.ids.tolist()):
            place = part.places[index]
            if finite[index]:
                yield place, ids[: part.num_draft[index]]
            else:
                arm = decisions[place].arm
                self._safety.drafter_failed(requests[place], arm, "its numbers are not finite")

    # --- accounts ---------------------------------------------------------------------------------

    def _spend(self, phase: str, seconds: float) -> None:
        self.counters.spend(phase, seconds)
        if phase == "route" and self._costs is not None:
            self._costs.route(seconds)

    def _report(self, requests: Sequence[Served], began: float) -> None:
        counters = self.counters
        counters.steps += 1
        for served in requests:
            counters.fallbacks += served.result.fallbacks
            served.result.fallbacks.clear()
        if self._costs is not None:
            counters.price = self._costs.price
        self._count_storage()
        self._ended = time.perf_counter()
        self._own_seconds = self._ended - began

    def _count_storage(self) -> None:
        features = self._texts.features
        self.counters.requests = len(self._served)
        self.counters.feature_tokens = features.num_pages_used * features.block_size
        self.counters.feature_evictions = features.evictions
        self.counters.memory = {
            "features": features.num_bytes,
            "texts": self._texts.num_bytes,
            **{name: drafter.kv.num_bytes for name, drafter in self._drafters.items()},
        }


def _drafters(arms: Mapping[str, Arm]) -> dict[str, Drafter]:
    """By name; arms of one drafter share it."""
    return {DRAFTERS[name]: arm.drafter for name, arm in arms.items()}


def _round(step: Step, row: int, served: Served) -> Round | None:
    """What came of a request's last decision; None where this step does not tell."""
    decision, states = served.decision, served.states
    if decision is None or states is None or served.place_in_states < 0:
        return None
    position = int(states.positions[served.place_in_states])
    if step.starts[row] != position:
        return None  # a step between was missed
    num_drafts, committed = int(step.num_drafts[row]), len(step.sampled[row])
    arm = decision.arm if num_drafts else PLAIN
    return Round(
        position=position,
        arm=arm,
        num_draft=num_drafts,
        num_nodes=num_drafts,
        accepted=min(committed - 1, num_drafts),
        committed=committed,
        lag=int(states.lags[served.place_in_states, states.arms.index(arm)]),
        switched=served.last_arm not in (None, arm),
        reason=decision.reason,
        seconds={},
        expected=decision.expected,
        price=decision.price,
    )
