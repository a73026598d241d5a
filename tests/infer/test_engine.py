from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Int
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.fakes import tiny_ar, tiny_diffusion
from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.engine import RoutedDecoder, decode_rounds
from whiflash_infer.errors import UserError
from whiflash_infer.policies import EntropyPolicy, RandomPolicy, StaticPolicy
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import Target

NONE: frozenset[int] = frozenset()


class ScriptedRunner:
    """Drafts the given text, with some tokens spoilt: every accepted length occurs."""

    def __init__(self, text: list[int], *, max_draft: int, error_rate: float, seed: int) -> None:
        self.max_draft = max_draft
        self._text = text
        self._error_rate = error_rate
        self._random = random.Random(seed)
        self._synced = 0

    def start(self, capacity: int) -> None:
        self._synced = 0

    def lag(self, sequence: Sequence) -> int:
        return sequence.anchor - self._synced

    def catch_up(self, sequence: Sequence) -> None:
        self._synced = sequence.anchor

    def draft(self, sequence: Sequence, num_draft: int) -> Int[Tensor, " K"]:
        assert self._synced == sequence.anchor
        start = sequence.length
        padded = self._text[start : start + num_draft]
        padded = padded + [0] * (num_draft - len(padded))
        spoilt = [
            (token + 1) % 261 if self._random.random() < self._error_rate else token
            for token in padded
        ]
        return torch.tensor(spoilt)


@pytest.fixture(scope="module")
def real_runners(target: Target) -> dict[str, ARRunner | DiffusionRunner]:
    shape = target.drafter_shape
    return {
        "ar": ARRunner(tiny_ar(shape), target.tables, draft_length=4),
        "diffusion": DiffusionRunner(tiny_diffusion(shape), target.tables),
    }


def huggingface_greedy(target: Target, prompt: list[int], num_tokens: int) -> list[int]:
    output = target.model.generate(  # pyright: ignore
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def scripted(text: list[int], *, seed: int, error_rate: float) -> dict[str, ScriptedRunner]:
    return {
        "ar": ScriptedRunner(text, max_draft=4, error_rate=error_rate, seed=seed),
        "diffusion": ScriptedRunner(text, max_draft=7, error_rate=error_rate, seed=seed + 1),
    }


@pytest.mark.parametrize("length", [1, 2, 17, 90])
@pytest.mark.parametrize(
    "policy",
    [
        StaticPolicy("plain"),
        StaticPolicy("ar"),
        StaticPolicy("diffusion"),
        EntropyPolicy(1.5),
        RandomPolicy(3),
    ],
    ids=lambda p: p.name,
)
def test_greedy_output_equals_huggingface_generate(
    policy: StaticPolicy, length: int, target: Target, real_runners: dict[str, ARRunner]
) -> None:
    prompt = [5 + (7 * i) % 250 for i in range(length)]
    result = RoutedDecoder(target, real_runners, policy).generate(prompt, max_new_tokens=40)
    assert result.output_ids.tolist() == huggingface_greedy(target, prompt, 40)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_greedy_output_is_plain_greedy_whatever_is_drafted_and_switched(
    data: st.DataObject, target: Target
) -> None:
    prompt = data.draw(st.lists(st.integers(5, 260), min_size=1, max_size=12))
    limit = data.draw(st.integers(1, 24))
    seed = data.draw(st.integers(0, 1000))
    error_rate = data.draw(st.sampled_from([0.0, 0.2, 0.6]))
    greedy = huggingface_greedy(target, prompt, limit + 8)
    expected = greedy[:limit]
    stop = data.draw(st.sampled_from([*expected, 3]))
    if stop in expected:
        expected = expected[: expected.index(stop) + 1]
    runners = scripted(prompt + greedy, seed=seed, error_rate=error_rate)
    stops = target.stop_ids | {stop}  # Hugging Face stops at the target's own, too
    result = RoutedDecoder(target, runners, RandomPolicy(seed)).generate(
        prompt, max_new_tokens=limit, stop_ids=stops
    )
    assert result.output_ids.tolist() == expected
    assert result.stopped == (stop in expected)
    assert sum(r.committed for r in result.rounds) == len(expected) - 1


def test_perfect_drafts_commit_one_token_more_than_were_drafted(target: Target) -> None:
    prompt = [10, 20, 30]
    text = prompt + huggingface_greedy(target, prompt, 40)
    runners = scripted(text, seed=0, error_rate=0.0)
    result = RoutedDecoder(target, runners, StaticPolicy("ar")).generate(
        prompt, max_new_tokens=21, stop_ids=NONE
    )
    assert [(r.num_draft, r.accepted, r.committed) for r in result.rounds] == [(4, 4, 5)] * 4


def test_a_stop_token_inside_an_accepted_prefix_ends_the_answer_there(target: Target) -> None:
    # An answer that went on to the block's end would count 8 tokens here, not 3.
    prompt = [10, 20, 30]
    text = prompt + huggingface_greedy(target, prompt, 40)
    stop = text[len(prompt) + 3]
    assert stop not in text[len(prompt) : len(prompt) + 3]
    runners = scripted(text, seed=0, error_rate=0.0)
    result = RoutedDecoder(target, runners, StaticPolicy("diffusion")).generate(
        prompt, max_new_tokens=30, stop_ids=frozenset({stop})
    )
    assert result.output_ids.tolist() == text[len(prompt) : len(prompt) + 4]
    assert [(r.accepted, r.committed) for r in result.rounds] == [(3, 3)]


def test_drafts_are_cut_to_the_tokens_that_may_still_be_emitted(target: Target) -> None:
    prompt = [10, 20, 30]
    text = prompt + huggingface_greedy(target, prompt, 40)
    runners = scripted(text, seed=0, error_rate=0.0)
    result = RoutedDecoder(target, runners, StaticPolicy("diffusion")).generate(
        prompt, max_new_tokens=12, stop_ids=NONE
    )
    assert [(r.num_draft, r.committed) for r in result.rounds] == [(7, 8), (2, 3)]
    assert len(result.output_ids) == 12


def test_lag_counts_the_tokens_committed_since_the_arm_was_last_used(target: Target) -> None:
    prompt = [10, 20, 30]
    runners = scripted(prompt, seed=0, error_rate=1.0)

    class Alternating(StaticPolicy):
        needs_features = False

        def choose(self, belief, state):
            self.arm = "diffusion" if state.last_arm == "ar" else "ar"
            return super().choose(belief, state)

    result = RoutedDecoder(target, runners, Alternating("ar")).generate(
        prompt, max_new_tokens=5, stop_ids=NONE
    )
    # Nothing is accepted, so each round commits one token; the first use catches up the prompt.
    assert [(r.arm, r.position, r.lag, r.switched) for r in result.rounds] == [
        ("ar", 3, 3, False),
        ("diffusion", 4, 4, True),
        ("ar", 5, 2, True),
        ("diffusion", 6, 2, True),
    ]


def test_rounds_and_their_tokens_make_up_the_output(target: Target) -> None:
    prompt = [10, 20, 30]
    text = prompt + huggingface_greedy(target, prompt, 40)
    runners = scripted(text, seed=5, error_rate=0.4)
    result = RoutedDecoder(target, runners, RandomPolicy(1)).generate(prompt, max_new_tokens=20)
    pieces = [ids.tolist() for _, ids in decode_rounds(result)]
    assert [
        text[len(prompt)],
        *(i for piece in pieces for i in piece),
    ] == result.output_ids.tolist()
    positions = [r.position for r in result.rounds]
    ends = [r.position + r.committed for r in result.rounds]
    assert positions[1:] == ends[:-1]


def test_the_answer_of_one_prompt_does_not_depend_on_the_one_before(
    target: Target, real_runners: dict[str, ARRunner]
) -> None:
    decoder = RoutedDecoder(target, real_runners, StaticPolicy("diffusion"))
    alone = decoder.generate([9, 8, 7], max_new_tokens=12)
    decoder.generate([50, 60, 70, 80], max_new_tokens=30)
    again = decoder.generate([9, 8, 7], max_new_tokens=12)
    assert [r.accepted for r in again.rounds] == [r.accepted for r in alone.rounds]
    assert again.output_ids.tolist() == alone.output_ids.tolist()


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [
        ([], 5, "the prompt is empty"),
        ([5], 0, "max_new_tokens is 0"),
        ([5] * 2000, 100, "exceeds the target's context of 2048"),
    ],
)
def test_impossible_requests_are_refused_before_decoding(
    prompt: list[int], max_new_tokens: int, message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        RoutedDecoder(target, {}, StaticPolicy("plain")).generate(
            prompt, max_new_tokens=max_new_tokens
        )


@pytest.fixture(scope="module")
def dice(target: Target) -> Target:
    """A target with eight tokens, so that every text of three can be counted."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Target(LlamaForCausalLM(config), target.tokenizer, name="dice", tap_layer_ids=[0])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_with_routing_on_follows_the_targets_distribution(
    temperature: float, dice: Target
) -> None:
    num_samples, prompt = 1500, [1, 5, 2]
    with torch.no_grad():
        prefixes = [[a, b] for a in range(8) for b in range(8)]
        logits = dice.model(torch.tensor([prompt + p for p in prefixes])).logits / temperature
    logp = logits.log_softmax(-1)
    expected = torch.stack(
        [
            (logp[i, 2, a] + logp[i, 3, b]).exp() * logp[i, 4].exp()
            for i, (a, b) in enumerate(prefixes)
        ]
    ).flatten()
    rng = random.Random(0)

    class Guesses(ScriptedRunner):
        def draft(self, sequence: Sequence, num_draft: int) -> Int[Tensor, " K"]:
            return torch.tensor([rng.randrange(8) for _ in range(num_draft)])

    runners = {
        "ar": Guesses([], max_draft=2, error_rate=0.0, seed=0),
        "diffusion": Guesses([], max_draft=3, error_rate=0.0, seed=0),
    }
    decoder = RoutedDecoder(dice, runners, RandomPolicy(0))
    counts = torch.zeros(8, 8, 8)
    for seed in range(num_samples):
        result = decoder.generate(
            prompt, max_new_tokens=3, temperature=temperature, seed=seed, stop_ids=NONE
        )
        counts[tuple(result.output_ids.tolist())] += 1
    # Rare texts are pooled, as the chi-square test needs five of each.
    common = expected * num_samples >= 5
    found = torch.cat([counts.flatten()[common], counts.flatten()[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]) * num_samples
    wanted = wanted * (found.sum() / wanted.sum())
    assert chisquare(found.numpy(), wanted.double().numpy(), sum_check=False).pvalue > 0.001
