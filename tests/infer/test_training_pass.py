from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.fakes import TAP_SIZE, prefilled, random_ids, tiny_ar, tiny_diffusion
from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.target import Target
from whiflash_infer.training_pass import rounds_of_training_pass
from whiflash_infer.types import Generation, Round

KEPT = [2, 0, 4, 1, 3]


def runner_of(arm: str, target: Target) -> DraftRunner:
    shape, tables = target.drafter_shape, target.tables
    if arm == "ar":
        return ARRunner(tiny_ar(shape, tap_size=TAP_SIZE), tables, draft_length=4)
    return DiffusionRunner(tiny_diffusion(shape), tables)


def drafted(target: Target, runner: DraftRunner, ids: Tensor, num_draft: int) -> Tensor:
    sequence = prefilled(target, ids)
    runner.start(96)
    runner.catch_up(sequence)
    return runner.draft(sequence, num_draft)


def a_round(position: int, num_draft: int) -> Round:
    return Round(
        position=position,
        arm="any",
        num_draft=num_draft,
        accepted=0,
        committed=1,
        lag=0,
        switched=False,
        reason="",
        seconds={},
    )


def written_by(runner: DraftRunner, target: Target, prompt: Tensor) -> Generation:
    """A text in which so many drafts of each round are right, and the next one is not.

    Its rounds tell that none was accepted, as those of a decoder would that reads drafts wrongly.
    """
    text, rounds = torch.cat([prompt, random_ids(1, seed=7)]), []
    for kept in KEPT:
        drafts = drafted(target, runner, text, 4)
        rounds.append(a_round(len(text) - 1, 4))
        other = (drafts[min(kept, 3)] + 1) % 261  # also behind a round in which all are right
        text = torch.cat([text, drafts[:kept], other[None]])
    return Generation(len(prompt), text[len(prompt) :], rounds)


@pytest.mark.parametrize("arm", ["ar", "diffusion"])
def test_the_training_pass_finds_the_drafts_that_stand_in_the_text(
    arm: str, target: Target
) -> None:
    runner, prompt = runner_of(arm, target), random_ids(12, seed=1)
    answer = written_by(runner, target, prompt)
    found = rounds_of_training_pass(target, runner, prompt.tolist(), answer)
    assert [r.accepted for r in found] == KEPT


def test_what_was_not_drafted_is_not_counted(target: Target) -> None:
    runner, prompt = runner_of("ar", target), random_ids(12, seed=1)
    answer = written_by(runner, target, prompt)
    answer.rounds = [a_round(answer.rounds[2].position, 2), a_round(answer.rounds[3].position, 0)]
    found = rounds_of_training_pass(target, runner, prompt.tolist(), answer)
    assert [r.accepted for r in found] == [2]
