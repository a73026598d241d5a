from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.fakes import (
    FLAVOURS,
    TAP_SIZE,
    play_round,
    prefilled,
    random_ids,
    tiny_ar,
    tiny_diffusion,
)
from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import Target

Runner = ARRunner | DiffusionRunner
CAPACITY = 96


@pytest.fixture(params=[*(f"ar-{flavour}" for flavour in FLAVOURS), "diffusion", "windowed"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def new_runner(kind: str, target: Target) -> Runner:
    """The same weights every time, and an empty cache."""
    shape, tables = target.drafter_shape, target.tables
    if kind.startswith("ar-"):
        net = tiny_ar(shape, seed=1, tap_size=TAP_SIZE, flavour=kind.removeprefix("ar-"))
        runner: Runner = ARRunner(net, tables, draft_length=4)
    else:
        extras = {"markov_rank": 4, "sliding_window": 6} if kind == "windowed" else {}
        runner = DiffusionRunner(tiny_diffusion(shape, seed=1, **extras), tables)
    runner.start(CAPACITY)
    return runner


def held(runner: Runner) -> list[Tensor]:
    """Keys and values of every layer of the runner's cache."""
    stores = [runner._store] if isinstance(runner, ARRunner) else runner._stores
    return [part for store in stores for part in store.view()]


def fresh(kind: str, target: Target, sequence: Sequence) -> tuple[Runner, Sequence]:
    """A runner prefilled from scratch on the committed text, which the target reads anew."""
    again = prefilled(target, sequence.ids[: sequence.length].clone())
    runner = new_runner(kind, target)
    runner.catch_up(again)
    return runner, again


def commit_at_random(target: Target, sequence: Sequence, rng: random.Random) -> None:
    """A round of 0..4 drafts by some other arm, with 0 or more of them accepted."""
    drafts = random_ids(rng.randint(0, 4), seed=rng.randint(0, 999))
    accepted = rng.randint(0, len(drafts))
    play_round(target, sequence, drafts, accepted=accepted, bonus=rng.randint(5, 260))


@torch.no_grad()
@pytest.mark.parametrize("seed", [0, 1])
def test_a_cache_that_followed_lazily_equals_one_prefilled_from_scratch(
    kind: str, seed: int, target: Target
) -> None:
    rng = random.Random(seed)
    sequence, runner = prefilled(target, random_ids(7, seed=seed)), new_runner(kind, target)
    for _ in range(8):
        start = sequence.length
        commit_at_random(target, sequence, rng)
        assert runner.lag(sequence) >= sequence.length - start
        if rng.random() < 0.6:
            runner.catch_up(sequence)
            drafts = runner.draft(sequence, 3)
            play_round(target, sequence, drafts, accepted=rng.randint(0, 3), bonus=9)
    runner.catch_up(sequence)
    assert runner.lag(sequence) == 0
    expected, _ = fresh(kind, target, sequence)
    for found, wanted in zip(held(runner), held(expected), strict=True):
        assert found.shape[2] == sequence.length - 1
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_drafting_leaves_the_cache_as_it_was(kind: str, target: Target) -> None:
    sequence, runner = prefilled(target, random_ids(9, seed=3)), new_runner(kind, target)
    assert runner.lag(sequence) == 8
    runner.catch_up(sequence)
    before = [part.clone() for part in held(runner)]
    first, second = runner.draft(sequence, 4), runner.draft(sequence, 4)
    assert first.tolist() == second.tolist()
    assert runner.lag(sequence) == 0
    for found, wanted in zip(held(runner), before, strict=True):
        assert torch.equal(found, wanted)


@torch.no_grad()
def test_after_a_long_rest_a_runner_drafts_as_a_fresh_one(kind: str, target: Target) -> None:
    rng = random.Random(5)
    sequence, runner = prefilled(target, random_ids(6, seed=5)), new_runner(kind, target)
    runner.catch_up(sequence)
    runner.draft(sequence, 4)
    for _ in range(10):
        commit_at_random(target, sequence, rng)
    assert runner.lag(sequence) == sequence.length - 6
    runner.catch_up(sequence)
    other, again = fresh(kind, target, sequence)
    assert runner.draft(sequence, 4).tolist() == other.draft(again, 4).tolist()


@torch.no_grad()
def test_a_second_request_is_not_affected_by_the_first(kind: str, target: Target) -> None:
    runner = new_runner(kind, target)
    first = prefilled(target, random_ids(12, seed=6))
    runner.catch_up(first)
    runner.draft(first, 4)
    second = prefilled(target, random_ids(8, seed=7))
    runner.start(CAPACITY)
    runner.catch_up(second)
    other, _ = fresh(kind, target, second)
    assert runner.draft(second, 4).tolist() == other.draft(second, 4).tolist()


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 3, 11, 20])
def test_the_first_draft_is_that_of_a_full_pass_over_the_text(
    kind: str, length: int, target: Target
) -> None:
    sequence, runner = prefilled(target, random_ids(length, seed=length)), new_runner(kind, target)
    runner.catch_up(sequence)
    ids, anchor = sequence.ids[None, :length], sequence.anchor
    states = target.model(ids, use_cache=False, output_hidden_states=True).hidden_states
    taps = torch.cat([states[i + 1] for i in target.tap_layer_ids], dim=-1)
    anchors = torch.tensor([[anchor]])
    if isinstance(runner, ARRunner):
        [hidden] = runner.net.unroll(target.tables.embed(ids), taps, anchors, num_steps=1)
        used = torch.arange(1, 261, 3)
        expected = used[runner.net.logits(hidden[0, 0]).argmax()]
    else:
        block = torch.tensor([[[int(ids[0, anchor])] + [3] * 4]])
        hidden = runner.net.blocks(target.tables.embed(block), taps, anchors)
        logits = target.tables.logits(hidden[0, 0, 1])
        if kind == "windowed":
            weights = dict(runner.net.named_parameters())
            code = weights["markov_head.markov_w1.weight"][ids[0, anchor]]
            logits = logits + weights["markov_head.markov_w2.weight"] @ code
        expected = logits.argmax()
    assert runner.draft(sequence, 1).tolist() == [int(expected)]
