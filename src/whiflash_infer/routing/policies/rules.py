"""Policies that decide by one number or once a text: the paper's two, and the coarser ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from whiflash_infer.nets.router import RouterNet
from whiflash_infer.routing.features import feature_entropy
from whiflash_infer.routing.policies.base import BasePolicy, full_length
from whiflash_infer.routing.protocol import Decisions, RoundStates
from whiflash_infer.types import AR, DIFFUSION


class EntropyPolicy(BasePolicy):
    """The paper's rule: the block drafter where the target is sure, the AR drafter elsewhere.

    threshold: entropy in nats of the distribution that produced the anchor.
    """

    name = "entropy"
    needs_features = True

    def __init__(self, threshold: float, *, below: str = DIFFUSION, above: str = AR) -> None:
        self.threshold = threshold
        self.arms = below, above

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return feature_entropy(features)[:, None]

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        below, above = self.columns(states)
        entropies = beliefs[:, 0]
        reasons = [f"entropy {entropy:.2f}" for entropy in entropies.tolist()]
        return full_length(np.where(entropies < self.threshold, below, above), states, reasons)


class DeltaPolicy(BasePolicy):
    """The paper's learned rule: the block drafter where the tokens that it is predicted to gain
    over the AR drafter exceed a threshold, which stands for what it costs more."""

    name = "delta"
    needs_features = True

    def __init__(self, net: RouterNet, threshold: float) -> None:
        self.net = net.eval()
        self.threshold = threshold
        self.arms = net.config.delta_arms

    @torch.inference_mode()
    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return self.net.delta(features)[:, None]

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        first, second = self.columns(states)
        gains = beliefs[:, 0]
        reasons = [f"predicts {gain:+.2f} tokens" for gain in gains.tolist()]
        return full_length(np.where(gains > self.threshold, second, first), states, reasons)


class RequestPolicy(BasePolicy):
    """One arm a text: that which its prompt predicts to be the fastest over the whole answer."""

    name = "request"
    needs_features = True
    memory_size = 1  # 1 + the place of the arm among `arms`

    def __init__(self, net: RouterNet, arms: tuple[str, ...] | None = None) -> None:
        """arms: of the network's, those to choose among; all when None."""
        self.net = net.eval()
        self.arms = net.config.arms if arms is None else arms
        self._columns = [net.config.arms.index(arm) for arm in self.arms]

    @torch.inference_mode()
    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        """Predicted log seconds a token by arm, relative to their mean."""
        return self.net.pace(features)[:, self._columns]

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        new = memory[:, 0] == 0
        memory[new, 0] = 1 + beliefs[new].argmin(1)
        chosen = self.columns(states)[memory[:, 0].astype(int) - 1]
        return full_length(chosen, states, "by the prompt")


class CategoryPolicy(BasePolicy):
    """One arm a kind of prompt, the best one for it in training. otherwise: for kinds that were
    not seen there, and where nobody said the kind."""

    name = "category"

    def __init__(self, by_category: Mapping[str, str], otherwise: str) -> None:
        self.by_category = dict(by_category)
        self.otherwise = otherwise
        self.arms = tuple(dict.fromkeys([*self.by_category.values(), otherwise]))

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        names = [self.by_category.get(kind, self.otherwise) for kind in states.categories]
        columns = np.array([states.arms.index(name) for name in names], dtype=int)
        return full_length(columns, states, _shown(states.categories))


def _shown(categories: Sequence[str]) -> list[str]:
    return [category or "no category" for category in categories]
