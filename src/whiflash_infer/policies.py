"""Routing policies. All see only what is fixed before a draft of the round exists.

A policy works in two steps: `read` turns the state features of many texts into numbers on the
device, which come to the host with the outcome of the round before; `choose` turns one text's row
of them and the round's bookkeeping into a decision.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from whiflash_infer.costs import CostModel
from whiflash_infer.features import feature_entropy
from whiflash_infer.nets.router import RouterNet, expected_tokens
from whiflash_infer.types import AR, DIFFUSION, PLAIN, Decision, RoundState


@runtime_checkable
class Policy(Protocol):
    name: str
    needs_features: bool

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        """A belief, X numbers of the policy's own, for each row of `router_features`."""
        ...

    def choose(self, belief: Sequence[float], state: RoundState) -> Decision: ...


class StaticPolicy:
    """One arm for every round, at its full draft length."""

    needs_features = False

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self.name = PLAIN if arm == PLAIN else f"static_{arm}"

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return features[:, :0]

    def choose(self, belief: Sequence[float], state: RoundState) -> Decision:
        return Decision(self.arm, state.max_draft[self.arm])


class EntropyPolicy:
    """The paper's rule: the block drafter where the target is sure, the AR drafter elsewhere.

    threshold: entropy in nats of the distribution that produced the anchor.
    """

    name = "entropy"
    needs_features = True

    def __init__(self, threshold: float, *, below: str = DIFFUSION, above: str = AR) -> None:
        self.threshold = threshold
        self.below, self.above = below, above

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return feature_entropy(features)[:, None]

    def choose(self, belief: Sequence[float], state: RoundState) -> Decision:
        (entropy,) = belief
        arm = self.below if entropy < self.threshold else self.above
        sign = "<" if entropy < self.threshold else ">="
        reason = f"entropy {entropy:.2f} {sign} {self.threshold:.2f}"
        return Decision(arm, state.max_draft[arm], reason)


class HazardPolicy:
    """argmax over arms and draft lengths of E[tokens] - lam * seconds.

    lam: tokens a second is worth. switch_margin: tokens by which another arm must be better than
    the last one before the policy leaves it.
    """

    name = "hazard"
    needs_features = True

    def __init__(
        self,
        net: RouterNet,
        costs: CostModel,
        *,
        lam: float,
        adaptive_length: bool = True,
        switch_margin: float = 0.0,
    ) -> None:
        self.net = net.eval()
        self.costs = costs
        self.lam = lam
        self.adaptive_length = adaptive_length
        self.switch_margin = switch_margin

    @torch.inference_mode()
    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        """Expected tokens by arm and draft length, laid out flat."""
        return expected_tokens(self.net(features)).flatten(1)

    def choose(self, belief: Sequence[float], state: RoundState) -> Decision:
        arms = self.net.config.arms
        belief_by_arm = np.asarray(belief).reshape(len(arms), -1)
        value = 1.0 - self.lam * self.costs.seconds(PLAIN, 0, context=state.position, lag=0)
        scored = [(self._biased(PLAIN, value, state), PLAIN, 0, 1.0)]
        for arm, gains in zip(arms, belief_by_arm, strict=True):
            longest = state.max_draft[arm]
            if longest == 0:
                continue
            seconds = self.costs.seconds_by_length(
                arm, longest, context=state.position, lag=state.lags[arm]
            )
            values = gains[: longest + 1] - self.lam * seconds
            length = 1 + int(np.argmax(values[1:])) if self.adaptive_length else longest
            value = self._biased(arm, float(values[length]), state)
            scored.append((value, arm, length, float(gains[length])))
        value, arm, length, gain = max(scored)
        return Decision(arm, length, f"expects {gain:.2f} tokens, value {value:+.2f}")

    def _biased(self, arm: str, value: float, state: RoundState) -> float:
        return value + self.switch_margin if arm == state.last_arm else value


class RandomPolicy:
    """A random arm and draft length each round, for the lossless checks."""

    name = "random"
    needs_features = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return features[:, :0]

    def choose(self, belief: Sequence[float], state: RoundState) -> Decision:
        arm = self._random.choice(sorted(state.max_draft))
        longest = state.max_draft[arm]
        return Decision(arm, self._random.randint(1, longest) if longest else 0)
