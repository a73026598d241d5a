"""Sampled answers: the same for every way to draft, and distributed as the target says."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from transformers import LlamaConfig

from tests.fakes import MASK_ID, TAPS, built_target, small_config, tiny_ar, tiny_diffusion
from tests.infer.test_engine import (
    ARMS,
    NO_STOPS,
    ScriptedChain,
    ScriptedTree,
    TextDrafter,
    prompt_of,
    scripted,
    texts_of,
    untouched,
)
from tests.infer.test_engine_properties import SYNCS, arms_of, target_of
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import EntropyPolicy, RandomPolicy, StaticPolicy
from whiflash_infer.sequence import Texts
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target

ASKED: dict[str, dict[str, Any]] = {
    "as it is": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 7},
    "min-p": {"temperature": 1.0, "min_p": 0.08},
    "all": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    "with a penalty": {"temperature": 1.0, "repetition_penalty": 1.2},
}
PROMPTS = [prompt_of(length, vocabulary=64) for length in (3, 37, 1, 12)]


def asked(name: str, *, seeds: Sequence[int] = (0, 1, 2, 3)) -> list[GenerationOptions]:
    return [
        GenerationOptions(max_new_tokens=14, seed=seed, stop_ids=NO_STOPS, **ASKED[name])
        for seed in seeds
    ]


@functools.cache
def plain_answers(name: str) -> list[list[int]]:
    """One by one, without drafts."""
    decoder = RoutedDecoder(target_of(64), {}, StaticPolicy("plain"))
    pairs = zip(PROMPTS, asked(name), strict=True)
    return texts_of([decoder.answer(prompt, options) for prompt, options in pairs])


# --- The same seed says the same ---------------------------------------------------------------


@pytest.mark.parametrize("arm", [*ARMS, "random"])
@pytest.mark.parametrize("name", ASKED)
def test_a_seed_gives_the_same_answer_whoever_drafts_and_in_any_batch(name: str, arm: str) -> None:
    policy = RandomPolicy(7) if arm == "random" else StaticPolicy(arm)
    decoder = RoutedDecoder(target_of(64), arms_of(64), policy)
    results = decoder.generate(PROMPTS, asked(name), max_rows=3)
    assert texts_of(results) == plain_answers(name)
    assert not any(result.fallbacks for result in results)


@pytest.mark.parametrize("arm", ARMS[1:])
@pytest.mark.parametrize("name", ASKED)
def test_drafts_that_foresee_the_draws_are_accepted(name: str, arm: str) -> None:
    texts = [p + answer for p, answer in zip(PROMPTS, plain_answers(name), strict=True)]
    arms = scripted(texts, error_rate=0.1, vocabulary=64)
    results = RoutedDecoder(target_of(64), arms, StaticPolicy(arm)).generate(PROMPTS, asked(name))
    assert texts_of(results) == plain_answers(name)
    assert sum(r.accepted for result in results for r in result.rounds) > 20


def test_other_seeds_and_warmer_answers_differ() -> None:
    decoder = RoutedDecoder(target_of(64), {}, StaticPolicy("plain"))
    one = decoder.generate([PROMPTS[0]] * 6, asked("as it is", seeds=[1, 2, 3, 4, 5, 1]))
    assert len({tuple(text) for text in texts_of(one)}) == 5
    assert texts_of(one)[0] == texts_of(one)[5]


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    route=st.integers(0, 99),
    sync=st.sampled_from(SYNCS),
    max_rows=st.integers(1, 3),
)
def test_sampled_answers_are_those_of_plain_decoding_whatever_is_asked(
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    route: int,
    sync: Any,
    max_rows: int,
) -> None:
    options = GenerationOptions(
        max_new_tokens=8,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    prompts = PROMPTS[:2]
    plain = RoutedDecoder(target_of(64), {}, StaticPolicy("plain"))
    routed = RoutedDecoder(
        target_of(64), arms_of(64), RandomPolicy(route), EngineSettings(sync=sync)
    )
    expected = [plain.answer(prompt, options) for prompt in prompts]
    found = routed.generate(prompts, options, max_rows=max_rows)
    assert texts_of(found) == texts_of(expected)
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected]


# --- The law -----------------------------------------------------------------------------------

ENTROPY = 1.75  # nats, between those of the dice
LAWS = {"temperature 1": (1.0, 1.0), "temperature 0.7, top-p 0.9": (0.7, 0.9)}


@functools.cache
def dice() -> Target:
    """Eight tokens, so that texts of three can be counted."""
    config = small_config(LlamaConfig, 6)
    config.vocab_size = 8
    target = built_target(config, TAPS)
    target.model.lm_head.weight.data.mul_(0.5)  # pyright: ignore - no token is near certain
    return target


@functools.cache
def forgetful_dice() -> Target:
    """Its attention says nothing, so each token depends on the one before, and no other: every
    three tokens of one long text then are a sample."""
    target = Target(copy.deepcopy(dice().model), dice().tokenizer, name="dice", tap_layer_ids=TAPS)
    for layer in target.model.model.layers:  # pyright: ignore
        layer.self_attn.o_proj.weight.data.zero_()
    return target


def law_of(logits: Tensor, temperature: float, top_p: float) -> list[float]:
    """Likeliest tokens first, until they come to top_p."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    kept, mass = [0.0] * len(probs), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if mass >= top_p:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return [p / mass for p in kept]


@torch.no_grad()
def laws_after(target: Target, texts: Sequence[Sequence[int]], law: str) -> Tensor:
    """[text, token]"""
    logits = untouched(target)(torch.tensor(texts)).logits[:, -1]
    return torch.tensor([law_of(row, *LAWS[law]) for row in logits])


def chi_square(found: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom. Rare outcomes are pooled: the test needs five of each."""
    assert all(count == 0 for count, wanted in zip(found, expected, strict=True) if wanted == 0)
    cells, rare = [], [0.0, 0.0]
    for count, wanted in zip(found, expected, strict=True):
        if wanted >= 5:
            cells.append((count, wanted))
        else:
            rare = [rare[0] + count, rare[1] + wanted]
    if rare[1] >= 5:
        cells.append((rare[0], rare[1]))
    elif cells:
        cells[0] = (cells[0][0] + rare[0], cells[0][1] + rare[1])
    return sum((f - e) ** 2 / e for f, e in cells), max(len(cells) - 1, 0)


class _Guessing:
    """Guesses the next tokens by what often follows the last one."""

    def _ahead(self: Any, texts: Texts, row: int, count: int) -> list[int]:
        ids = texts.ids([row], [texts.lengths[row] - 1], 1)[0].tolist()
        habits = _habits()
        for _ in range(count):
            ids += self._random.choices(range(8), weights=habits[ids[-1]])
        return ids[1:]


class GuessedChain(_Guessing, ScriptedChain):
    pass


class GuessedTree(_Guessing, ScriptedTree):
    pass


@functools.cache
def _habits() -> list[list[float]]:
    return laws_after(forgetful_dice(), [[token] for token in range(8)], "temperature 1").tolist()


def guessed_chains(target: Target) -> dict[str, Arm]:
    return {
        "ar": GuessedChain(max_draft=2, vocabulary=8, seed=1),
        "diffusion": GuessedChain(max_draft=4, vocabulary=8, seed=2),
    }


def guessed_trees(target: Target) -> dict[str, Arm]:
    drafter = TextDrafter()
    return {
        "ar_tree": GuessedTree(
            max_draft=3, num_nodes=9, vocabulary=8, error_rate=0.2, seed=1, drafter=drafter
        ),
        "diffusion_tree": GuessedTree(max_draft=4, num_nodes=14, vocabulary=8, seed=2),
        "ar": GuessedChain(max_draft=3, vocabulary=8, seed=3, drafter=drafter),
    }


def drafting_arms(target: Target) -> dict[str, Arm]:
    """Of real drafters; the AR one knows five of the eight tokens."""
    shape = target.drafter_shape
    assert shape.vocab_size > MASK_ID
    ar = CachedAR(tiny_ar(shape, used=torch.tensor([0, 2, 3, 5, 7])), target.tables)
    diffusion = CachedDiffusion(tiny_diffusion(shape), target.tables)
    return {"ar": ARArm(ar, draft_length=3), "diffusion": DiffusionArm(diffusion)}


def drafting_trees(target: Target) -> dict[str, Arm]:
    arms = drafting_arms(target)
    ar, diffusion = arms["ar"].drafter, arms["diffusion"].drafter
    assert isinstance(ar, CachedAR)
    assert isinstance(diffusion, CachedDiffusion)
    tree = ARArm(ar, draft_length=3, top_k=3, num_nodes=8)
    return arms | {"ar_tree": tree, "diffusion_tree": DiffusionArm(diffusion, num_nodes=9)}


WAYS = {
    "guessed chains": (guessed_chains, False),
    "guessed trees": (guessed_trees, False),
    "trees of drafters": (drafting_trees, False),
    "drawn drafts": (drafting_arms, True),
}


def sampled(
    target: Target, way: str, law: str, *, num_texts: int, length: int, prompt: list[int]
) -> list[list[int]]:
    make_arms, sample_drafts = WAYS[way]
    temperature, top_p = LAWS[law]
    options = [
        GenerationOptions(
            max_new_tokens=length,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_ids=NO_STOPS,
            sample_drafts=sample_drafts,
        )
        for seed in range(num_texts)
    ]
    arms = make_arms(target)
    below, above = [arm for arm in arms if "tree" in arm] or list(arms)
    decoder = RoutedDecoder(target, arms, EntropyPolicy(ENTROPY, below=below, above=above))
    results = decoder.generate([prompt] * num_texts, options, max_rows=96)
    assert not any(result.fallbacks for result in results)
    rounds = [r for result in results for r in result.rounds]
    assert {r.arm for r in rounds} == {below, above}
    assert sum(r.accepted for r in rounds) > 0.1 * sum(r.num_draft > 0 for r in rounds)
    return texts_of(results)


@pytest.mark.parametrize(
    ("way", "law"),
    [
        ("guessed chains", "temperature 1"),
        ("guessed trees", "temperature 0.7, top-p 0.9"),
        *[
            pytest.param(way, law, marks=pytest.mark.slow)
            for way, law in [
                ("drawn drafts", "temperature 1"),
                ("guessed chains", "temperature 0.7, top-p 0.9"),
                ("guessed trees", "temperature 1"),
                ("trees of drafters", "temperature 1"),
                ("trees of drafters", "temperature 0.7, top-p 0.9"),
                ("drawn drafts", "temperature 0.7, top-p 0.9"),
            ]
        ],
    ],
)
def test_three_tokens_in_a_row_have_the_targets_distribution(way: str, law: str) -> None:
    """20,000 times: of tokens a, b, c in a row, c given a and b against the target's law after b.
    Were drafts to leave a trace, c would depend on a, too."""
    target = forgetful_dice()
    texts = sampled(target, way, law, num_texts=96, length=212, prompt=[1, 5, 2])
    counts = torch.zeros(8, 8, 8)
    for text in texts:
        for triple in itertools.pairwise(itertools.pairwise(text)):
            counts[(*triple[0], triple[1][1])] += 1
    assert counts.sum() > 20_000
    laws = laws_after(target, [[token] for token in range(8)], law)
    statistic, freedom = 0.0, 0
    for a, b in itertools.product(range(8), range(8)):
        found = counts[a, b]
        added, more = chi_square(found.tolist(), (found.sum() * laws[b]).tolist())
        statistic, freedom = statistic + added, freedom + more
    assert freedom > 50
    assert chi2.sf(statistic, freedom) > 0.001


@pytest.mark.parametrize(
    ("way", "law", "num_samples"),
    [
        ("guessed trees", "temperature 1", 600),
        ("drawn drafts", "temperature 0.7, top-p 0.9", 600),
        *[pytest.param(way, law, 20_000, marks=pytest.mark.slow) for way in WAYS for law in LAWS],
    ],
)
def test_answers_of_three_tokens_have_the_targets_distribution(
    way: str, law: str, num_samples: int
) -> None:
    """With attention, and every answer a request of its own."""
    target, prompt = dice(), [1, 5, 2]
    texts = sampled(target, way, law, num_texts=num_samples, length=3, prompt=prompt)
    counts, expected = torch.zeros(8, 8, 8), torch.zeros(8, 8, 8)
    for text in texts:
        counts[tuple(text)] += 1
    first = laws_after(target, [prompt], law)[0]
    for a in range(8):
        second = laws_after(target, [[*prompt, a]], law)[0]
        third = laws_after(target, [[*prompt, a, b] for b in range(8)], law)
        expected[a] = num_samples * first[a] * second[:, None] * third
    statistic, freedom = chi_square(counts.flatten().tolist(), expected.flatten().tolist())
    assert freedom > 10
    assert chi2.sf(statistic, freedom) > 0.001
