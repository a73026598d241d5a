from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fakes import TAP_SIZE, drafted, prefilled, random_ids, tiny_ar, tiny_diffusion
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.target import Target
from whiflash_infer.training_pass import rounds_of_training_pass
from whiflash_infer.types import Generation, Round

KEPT = [2, 0, 4, 1, 3]


def new_arm(kind: str, target: Target) -> Arm:
    shape, tables = target.drafter_shape, target.tables
    if kind == "ar":
        return ARArm(CachedAR(tiny_ar(shape, tap_size=TAP_SIZE), tables), draft_length=4)
    return DiffusionArm(CachedDiffusion(tiny_diffusion(shape), tables))


def a_round(position: int, num_draft: int) -> Round:
    return Round(
        position=position,
        arm="any",
        num_draft=num_draft,
        num_nodes=num_draft,
        accepted=0,
        committed=1,
        lag=0,
        switched=False,
        reason="",
        seconds={},
    )


def written_by(kind: str, target: Target, prompt: Tensor) -> Generation:
    """A text in which so many drafts of each round are right, and the next one is not.

    Its rounds tell that none was accepted, as those of a decoder would that reads drafts wrongly.
    """
    text, rounds = torch.cat([prompt, random_ids(1, seed=7)]), []
    for kept in KEPT:
        texts, _ = prefilled(target, text)
        drafts = torch.tensor(drafted(new_arm(kind, target), texts, 4))
        rounds.append(a_round(len(text) - 1, 4))
        other = (drafts[min(kept, 3)] + 1) % 261  # also behind a round in which all are right
        text = torch.cat([text, drafts[:kept], other[None]])
    return Generation(len(prompt), text[len(prompt) :], rounds)


@pytest.mark.parametrize("kind", ["ar", "diffusion"])
def test_the_training_pass_finds_the_drafts_that_stand_in_the_text(
    kind: str, target: Target
) -> None:
    prompt = random_ids(12, seed=1)
    answer = written_by(kind, target, prompt)
    found = rounds_of_training_pass(target, new_arm(kind, target), prompt.tolist(), answer)
    assert [r.accepted for r in found] == KEPT


def test_what_was_not_drafted_is_not_counted(target: Target) -> None:
    prompt = random_ids(12, seed=1)
    answer = written_by("ar", target, prompt)
    answer.rounds = [a_round(answer.rounds[2].position, 2), a_round(answer.rounds[3].position, 0)]
    found = rounds_of_training_pass(target, new_arm("ar", target), prompt.tolist(), answer)
    assert [r.accepted for r in found] == [2]
