"""How long drafts are accepted when the engine decodes, not when a batch is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.target import Target

_ARM = "trained"


class RealTau(Callback):
    """Logs `val/real_tau`: tokens a round (bonus counted), pooled over greedily decoded prompts.

    new_arm: makes the arm when it is needed. By then the network is on its device, and what is
    stored for decoding is not kept while training goes on.
    """

    def __init__(
        self,
        target: Target,
        new_arm: Callable[[], Arm],
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
    ) -> None:
        self._target = target
        self._new_arm = new_arm
        self._options = GenerationOptions(max_new_tokens=max_new_tokens)
        room = target.max_length - max_new_tokens
        self._prompts = [prompt for prompt in prompts if len(prompt) <= room]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = self._prompts[trainer.global_rank :: trainer.world_size]
        decoder = RoutedDecoder(self._target, {_ARM: self._new_arm()}, StaticPolicy(_ARM))
        rounds = [r for answer in decoder.generate(mine, self._options) for r in answer.rounds]
        totals = torch.tensor([float(sum(r.committed for r in rounds)), float(len(rounds))])
        totals = trainer.strategy.reduce(totals.to(pl_module.device), reduce_op="sum")
        committed, count = totals.tolist()
        pl_module.log("val/real_tau", committed / max(1.0, count), prog_bar=True, sync_dist=True)


def prompts_of(rows: Iterable[dict[str, Any]], count: int) -> list[list[int]]:
    """Of the first `count` conversations, what stands before the first supervised token."""
    prompts = []
    for row in rows:
        if len(prompts) == count:
            break
        prompt = row["input_ids"][: _first_true(row["loss_mask"])]
        if prompt:
            prompts.append(prompt)
    return prompts


def _first_true(mask: Sequence[bool | int]) -> int:
    return next((i for i, supervised in enumerate(mask) if supervised), 0)
