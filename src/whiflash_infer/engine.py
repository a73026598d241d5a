"""The routed decoder: choose an arm, catch it up, draft, verify, commit; until the answer ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.accept import verify
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.errors import UserError
from whiflash_infer.features import router_features
from whiflash_infer.policies import Policy
from whiflash_infer.sampling import probabilities, sample
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN, Decision, Generation, Round, RoundState


class RoutedDecoder:
    """Decodes one prompt at a time; the output is the target's own, whatever the policy does.

    runners: the drafting arms by name; the arm `plain`, which drafts nothing, is always there.
    """

    def __init__(self, target: Target, runners: Mapping[str, DraftRunner], policy: Policy) -> None:
        self.target = target
        self.runners = dict(runners)
        self.policy = policy

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        stop_ids: frozenset[int] | None = None,
    ) -> Generation:
        """Answer one prompt. stop_ids: the target's own when None.

        Raises: UserError for an empty prompt, or one that leaves no room in the target's context.
        """
        longest = max((r.max_draft for r in self.runners.values()), default=0)
        capacity = len(prompt_ids) + max_new_tokens + longest + 1
        self._check_room(prompt_ids, max_new_tokens)
        prompt = torch.tensor(prompt_ids, device=self.target.device)
        sequence = Sequence(prompt, self.target.new_cache(capacity), capacity=capacity)
        for runner in self.runners.values():
            runner.start(capacity)
        generator = torch.Generator(self.target.device).manual_seed(seed)
        stops = self.target.stop_ids if stop_ids is None else stop_ids
        result = Generation(len(prompt_ids), prompt[:0])

        started = time.perf_counter()
        rows = self.target.read(prompt, sequence.cache, last_only=True)
        first = sample(probabilities(rows.logits, temperature), generator)
        sequence.commit(first, rows, num_read=len(prompt_ids))
        result.stopped = int(first) in stops
        result.prefill_seconds = time.perf_counter() - started

        started = time.perf_counter()
        limit = len(prompt_ids) + max_new_tokens
        last_arm = None
        while not result.stopped and sequence.length < limit:
            done, result.stopped = self._round(
                sequence, limit, stops, temperature, generator, last_arm
            )
            result.rounds.append(done)
            last_arm = done.arm
        result.decode_seconds = time.perf_counter() - started
        result.output_ids = sequence.ids[len(prompt_ids) : sequence.length].clone()
        return result

    def _round(
        self,
        sequence: Sequence,
        limit: int,
        stops: frozenset[int],
        temperature: float,
        generator: torch.Generator,
        last_arm: str | None,
    ) -> tuple[Round, bool]:
        clock = _Clock(self.target.device)
        state = self._state(sequence, limit, last_arm)
        decision = self._decide(sequence, state)
        runner = self.runners.get(decision.arm)
        clock.lap("route")

        position, num_draft = sequence.anchor, decision.num_draft
        if runner is not None and num_draft > 0:
            runner.catch_up(sequence)
        clock.lap("catch_up")

        drafts = sequence.ids[:0]
        if runner is not None and num_draft > 0:
            drafts = runner.draft(sequence, num_draft)
        clock.lap("draft")

        block = torch.cat([sequence.ids[position : position + 1], drafts])
        rows = self.target.read(block, sequence.cache, last_only=False)
        verdict = verify(rows.logits, drafts, temperature=temperature, generator=generator)
        clock.lap("verify")

        tokens = [*drafts[: verdict.accepted].tolist(), verdict.bonus]
        tokens, stopped = _cut_at_stop(tokens, stops)
        committed = torch.tensor(tokens, device=sequence.ids.device)
        sequence.commit(committed, rows, num_read=len(tokens))
        clock.lap("commit")
        done = Round(
            position=position,
            arm=decision.arm,
            num_draft=num_draft,
            accepted=min(verdict.accepted, len(tokens)),
            committed=len(tokens),
            lag=state.lags.get(decision.arm, 0),
            switched=last_arm is not None and last_arm != decision.arm,
            reason=decision.reason,
            seconds=clock.seconds,
        )
        return done, stopped

    def _state(self, sequence: Sequence, limit: int, last_arm: str | None) -> RoundState:
        """A round commits its drafts and one more token, so `room` drafts can still be of use."""
        room = limit - sequence.length - 1
        return RoundState(
            position=sequence.anchor,
            lags={arm: runner.lag(sequence) for arm, runner in self.runners.items()},
            max_draft={PLAIN: 0}
            | {arm: min(runner.max_draft, room) for arm, runner in self.runners.items()},
            last_arm=last_arm,
        )

    def _decide(self, sequence: Sequence, state: RoundState) -> Decision:
        belief = None
        if self.policy.needs_features:
            assert sequence.anchor_logits is not None
            assert sequence.anchor_hidden is not None
            features = router_features(
                sequence.anchor_logits[None],
                sequence.anchor_hidden[None],
                torch.tensor([state.position], device=sequence.ids.device),
            )
            belief = self.policy.read(features)[0]
        decision = self.policy.choose(belief, state)
        if decision.arm not in state.max_draft:
            raise ValueError(f"policy {self.policy.name} chose an unknown arm {decision.arm!r}")
        return decision

    def _check_room(self, prompt_ids: list[int], max_new_tokens: int) -> None:
        if not prompt_ids:
            raise UserError("the prompt is empty: the target needs at least one token to start")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}: it must be 1 or more")
        wanted = len(prompt_ids) + max_new_tokens
        if wanted > self.target.max_length:
            raise UserError(
                f"prompt of {len(prompt_ids)} tokens + max_new_tokens {max_new_tokens} = {wanted} "
                f"exceeds the target's context of {self.target.max_length}"
            )


class _Clock:
    """Seconds between laps; waits for the GPU so that a phase pays for its own work."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


def _cut_at_stop(tokens: list[int], stops: frozenset[int]) -> tuple[list[int], bool]:
    """Nothing after the first stop token is emitted, counted or cached."""
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], True
    return tokens, False


def decode_rounds(result: Generation) -> Iterator[tuple[Round, Int[Tensor, " N"]]]:
    """Each round with the output tokens it committed."""
    start = len(result.output_ids) - result.decoded_tokens
    for done in result.rounds:
        yield done, result.output_ids[start : start + done.committed]
        start += done.committed
