"""Replaying a policy over dense rounds: exact tokens, modelled seconds, no decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from whiflash_infer.costs import CostModel
from whiflash_infer.policies import EntropyPolicy, Policy
from whiflash_infer.rounds import ConversationRounds
from whiflash_infer.types import PLAIN, RoundState


@dataclass(slots=True)
class ReplayResult:
    tokens: int = 0
    rounds: int = 0
    switches: int = 0
    seconds: float = 0.0
    arms: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, other: ReplayResult) -> None:
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.switches += other.switches
        self.seconds += other.seconds
        self.arms.update(other.arms)


def replay(
    policy: Policy,
    conversations: Iterable[ConversationRounds],
    costs: CostModel,
    max_draft: dict[str, int],
) -> ReplayResult:
    """Run a policy over conversations. max_draft: longest draft of each drafting arm."""
    total = ReplayResult()
    for conversation in conversations:
        beliefs = read_all(policy, conversation)
        total.add(replay_one(policy, beliefs, conversation, costs, max_draft))
    return total


def read_all(policy: Policy, conversation: ConversationRounds) -> list[list[float]]:
    """The policy's belief at every position."""
    return policy.read(conversation.features).tolist()


def replay_one(
    policy: Policy,
    beliefs: Sequence[Sequence[float]],
    conversation: ConversationRounds,
    costs: CostModel,
    max_draft: dict[str, int],
) -> ReplayResult:
    """Visit the positions that the decoder would visit, with its lags and switches."""
    result = ReplayResult()
    synced = dict.fromkeys(max_draft, 0)
    last_arm = None
    index = 0
    while index < len(conversation):
        position = int(conversation.positions[index])
        lags = {arm: position - length for arm, length in synced.items()}
        state = RoundState(position, lags, {PLAIN: 0, **max_draft}, last_arm)
        decision = policy.choose(beliefs[index], state)
        arm, accepted, lag = decision.arm, 0, 0
        if arm != PLAIN:
            accepted = min(int(conversation.accepted[arm][index]), decision.num_draft)
            lag, synced[arm] = lags[arm], position
        committed = min(accepted + 1, len(conversation) - index)
        result.tokens += committed
        result.rounds += 1
        result.seconds += costs.seconds(arm, decision.num_draft, context=position, lag=lag)
        result.switches += last_arm is not None and arm != last_arm
        result.arms[arm] += 1
        last_arm = arm
        index += committed
    return result


def solve_price(
    run: Callable[[float], ReplayResult], *, tolerance: float = 1e-3, max_iterations: int = 12
) -> list[tuple[float, float]]:
    """Dinkelbach iteration: the price under which the policy achieves that very throughput.

    run(lam) replays the policy at price lam. Returns the trace of (lam, achieved tokens/s); its
    last entry is the answer.
    """
    lam, trace = 0.0, []
    for _ in range(max_iterations):
        achieved = run(lam).tokens_per_s
        trace.append((lam, achieved))
        if abs(achieved - lam) <= tolerance * max(achieved, 1e-9):
            break
        lam = achieved
    return trace


def calibrate_entropy(
    conversations: Sequence[ConversationRounds],
    costs: CostModel,
    max_draft: dict[str, int],
    *,
    num_thresholds: int = 24,
) -> tuple[float, float]:
    """The entropy threshold with the best replayed tokens/s, and that throughput.

    Candidates are quantiles of the entropies seen, and both ends (always one arm).
    """
    policy = EntropyPolicy(0.0)
    beliefs = [read_all(policy, c) for c in conversations]
    seen = sorted(value for belief in beliefs for (value,) in belief)
    step = max(1, len(seen) // num_thresholds)
    candidates = [0.0, *seen[::step], seen[-1] + 1.0]
    best = (0.0, -1.0)
    for threshold in candidates:
        policy.threshold = threshold
        total = ReplayResult()
        for belief, conversation in zip(beliefs, conversations, strict=True):
            total.add(replay_one(policy, belief, conversation, costs, max_draft))
        if total.tokens_per_s > best[1]:
            best = (threshold, total.tokens_per_s)
    return best
