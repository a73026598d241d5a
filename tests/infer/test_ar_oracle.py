"""The AR chain with the target's own logits in place of the drafter's: nothing may be lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fakes import FLAVOURS, ar_config, random_ids, randomise
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.target import Target

PROMPT, ROUNDS = 9, 4


class Oracle(ARDrafter):
    """Row i of a drafter predicts x_{i+2}; so does the target's row i + 1 of a known text.

    It is so sure that nothing in a tree is likelier than the text itself, all the way down.
    """

    def __init__(self, config: ARDrafterConfig, target_logits: Tensor) -> None:
        super().__init__(config)
        self.set_vocabulary(torch.arange(config.draft_vocab_size))
        randomise(self, 0)
        self._target_logits = target_logits
        self._rows = torch.empty(0)

    def step_cached(
        self,
        joined: Tensor,
        hidden: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        self._rows = positions + 1
        return super().step_cached(joined, hidden, positions, keys, values, mask)

    def logits(self, state: Tensor) -> Tensor:
        return 100.0 * self._target_logits[self._rows]


@torch.no_grad()
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(
    ("draft_length", "tree"),
    [(1, {}), (5, {}), (8, {}), (5, {"top_k": 3, "num_nodes": 12})],
)
def test_an_oracle_head_commits_every_draft_and_the_bonus_token(
    draft_length: int, tree: dict[str, int], flavour: str, target: Target
) -> None:
    prompt = random_ids(PROMPT, seed=4).tolist()
    num_new = 1 + ROUNDS * (draft_length + 1)
    options = GenerationOptions(max_new_tokens=num_new, stop_ids=frozenset())
    answer = RoutedDecoder(target, {}, StaticPolicy("plain")).answer(prompt, options).output_ids
    text = torch.cat([torch.tensor(prompt), answer])
    shape = target.drafter_shape
    oracle = Oracle(
        ar_config(shape, shape.vocab_size, flavour=flavour), target.model(text[None]).logits[0]
    )
    arm = ARArm(CachedAR(oracle, target.tables), draft_length=draft_length, **tree)
    result = RoutedDecoder(target, {"ar": arm}, StaticPolicy("ar")).answer(prompt, options)
    assert result.output_ids.tolist() == answer.tolist()
    assert [r.committed for r in result.rounds] == [draft_length + 1] * ROUNDS
