"""What a request asks for is what plain decoding would give, for every arm and in every batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from tests.infer.test_engine import (
    ARMS,
    NO_STOPS,
    ScriptedTree,
    huggingface_greedy,
    prompt_of,
    scripted,
    texts_of,
    untouched,
)
from tests.infer.test_engine_properties import arms_of, target_of
from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import Policy, RandomPolicy, StaticPolicy
from whiflash_infer.types import Generation

PROMPTS = [prompt_of(length, vocabulary=64) for length in (3, 37, 1, 12)]
LENGTH = 14
Change = Callable[[list[int], Tensor], Tensor]

every_arm = pytest.mark.parametrize("arm", [*ARMS, "random"])
every_draft = pytest.mark.parametrize("drafts", ["real", "known"])


@functools.cache
def huggingface(
    *, repetition_penalty: float = 1.0, stop_string: str = "no such text"
) -> list[list[int]]:
    """Its own answers to the prompts."""
    answers = []
    for prompt in PROMPTS:
        output = untouched(target_of(64)).generate(  # pyright: ignore
            torch.tensor([prompt]),
            max_new_tokens=LENGTH,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            stop_strings=[stop_string, "nor this one"],
            tokenizer=target_of(64).tokenizer,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def plain_loop(prompt: Sequence[int], change: Change, *, length: int = LENGTH) -> list[int]:
    """Greedy decoding that reads the whole text for every token."""
    ids, model = list(prompt), untouched(target_of(64))
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(change(ids[len(prompt) :], logits).argmax()))
    return ids[len(prompt) :]


def answered(
    arm: str, drafts: str, expected: Sequence[list[int]], options: Any
) -> list[Generation]:
    """known: drafts that are mostly right, so that options have their say inside long blocks."""
    policy: Policy = RandomPolicy(7) if arm == "random" else StaticPolicy(arm)
    arms: dict[str, Arm] = arms_of(64)
    if drafts == "known":
        texts = [p + answer for p, answer in zip(PROMPTS, expected, strict=True)]
        arms = scripted(texts, error_rate=0.1, vocabulary=64)
    results = RoutedDecoder(target_of(64), arms, policy).generate(PROMPTS, options, max_rows=3)
    assert not any(result.fallbacks for result in results)
    return results


# --- Penalties ---------------------------------------------------------------------------------


@every_draft
@every_arm
def test_the_repetition_penalty_is_huggingfaces(arm: str, drafts: str) -> None:
    expected = huggingface(repetition_penalty=1.3)
    assert expected != [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    options = GenerationOptions(max_new_tokens=LENGTH, repetition_penalty=1.3)
    assert texts_of(answered(arm, drafts, expected, options)) == expected


@every_draft
@every_arm
def test_presence_and_frequency_penalties_count_the_output_only(arm: str, drafts: str) -> None:
    presence, frequency = 0.6, 0.9

    def penalised(output_ids: list[int], logits: Tensor) -> Tensor:
        logits = logits.clone()
        for token in set(output_ids):
            logits[token] -= presence + frequency * output_ids.count(token)
        return logits

    expected = [plain_loop(prompt, penalised) for prompt in PROMPTS]
    options = GenerationOptions(
        max_new_tokens=LENGTH,
        presence_penalty=presence,
        frequency_penalty=frequency,
        stop_ids=NO_STOPS,
    )
    assert texts_of(answered(arm, drafts, expected, options)) == expected


# --- Processors --------------------------------------------------------------------------------


class Diary(LogitsProcessor):
    """Writes down every prefix that it sees, and rules out another token each time."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        changed = scores.clone()
        changed[0, len(self.seen) % 3 :: 3] = -torch.inf
        return changed


def ruled_out(output_ids: list[int], logits: Tensor) -> Tensor:
    changed = logits.clone()
    changed[(len(output_ids) + 1) % 3 :: 3] = -torch.inf
    return changed


@every_draft
@every_arm
def test_a_processor_sees_the_prefixes_of_plain_decoding_in_order_and_once(
    arm: str, drafts: str
) -> None:
    expected = [plain_loop(prompt, ruled_out) for prompt in PROMPTS]
    stops = frozenset({expected[0][9], expected[3][5]})
    cut = [
        text[: next((i for i, token in enumerate(text, 1) if token in stops), LENGTH)]
        for text in expected
    ]
    assert sum(len(text) for text in cut) < 4 * LENGTH
    diaries = [Diary() for _ in PROMPTS]
    options = [
        GenerationOptions(max_new_tokens=LENGTH, stop_ids=stops, processors=(diary,))
        for diary in diaries
    ]
    assert texts_of(answered(arm, drafts, expected, options)) == cut
    for diary, prompt, text in zip(diaries, PROMPTS, cut, strict=True):
        assert diary.seen == [prompt + text[:count] for count in range(len(text))]


@every_arm
def test_sampled_answers_with_a_processor_are_those_of_plain_decoding(arm: str) -> None:
    def options() -> list[GenerationOptions]:
        return [
            GenerationOptions(
                max_new_tokens=LENGTH,
                temperature=0.9,
                seed=seed,
                stop_ids=NO_STOPS,
                processors=(Diary(),),
            )
            for seed in range(len(PROMPTS))
        ]

    plain = RoutedDecoder(target_of(64), {}, StaticPolicy("plain")).generate(PROMPTS, options())
    assert texts_of(answered(arm, "known", texts_of(plain), options())) == texts_of(plain)


def test_processors_of_one_request_leave_the_others_alone() -> None:
    options = [GenerationOptions(max_new_tokens=LENGTH) for _ in PROMPTS]
    options[1] = GenerationOptions(max_new_tokens=LENGTH, processors=(Diary(),), stop_ids=NO_STOPS)
    expected = [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    expected[1] = plain_loop(PROMPTS[1], ruled_out)
    assert texts_of(answered("random", "known", expected, options)) == expected


# --- Allowed tokens ----------------------------------------------------------------------------

OPEN, COLON, COMMA, CLOSE, END = 10, 11, 12, 13, 2
KEYS, VALUES = list(range(20, 30)), list(range(30, 60))


def may_follow(output_ids: list[int]) -> list[int]:
    """A small object notation: { key : value , key : value } and then the end."""
    if not output_ids:
        return [OPEN]
    last = output_ids[-1]
    after = {OPEN: KEYS, COMMA: KEYS, COLON: VALUES, CLOSE: [END]}
    if last in after:
        return after[last]
    return [COLON] if last in KEYS else [COMMA, CLOSE]


def even(output_ids: list[int]) -> list[int]:
    return list(range(0, 64, 2))


def behind(
    prompt: list[int], allowed: Callable[[list[int]], list[int]]
) -> Callable[[list[int]], list[int]]:
    return lambda ids: allowed(ids[len(prompt) :])


def only(allowed: Callable[[list[int]], list[int]]) -> Change:
    def change(output_ids: list[int], logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -torch.inf)
        masked[allowed(output_ids)] = logits[allowed(output_ids)]
        return masked

    return change


@every_draft
@every_arm
@pytest.mark.parametrize("allowed", [even, may_follow], ids=["even", "grammar"])
def test_only_allowed_tokens_are_said(
    allowed: Callable[[list[int]], list[int]], arm: str, drafts: str
) -> None:
    texts = [plain_loop(prompt, only(allowed)) for prompt in PROMPTS]
    expected = [text[: text.index(END) + 1] if END in text else text for text in texts]
    options = [
        GenerationOptions(
            max_new_tokens=LENGTH,
            stop_ids=frozenset({END}),
            allowed_tokens=behind(prompt, allowed),
        )
        for prompt in PROMPTS
    ]
    results = answered(arm, drafts, expected, options)
    assert texts_of(results) == expected
    for text in texts_of(results):
        assert all(token in allowed(text[:i]) for i, token in enumerate(text))


def test_a_callback_that_allows_nothing_ends_the_call_and_says_where() -> None:
    decoder = RoutedDecoder(target_of(64), arms_of(64), StaticPolicy("ar"))
    options = GenerationOptions(
        max_new_tokens=8,
        stop_ids=NO_STOPS,
        allowed_tokens=lambda ids: [7] if len(ids) < 5 else [],
    )
    with pytest.raises(UserError, match="allows nothing after 5 tokens"):
        decoder.answer(PROMPTS[0], options)
    expected = huggingface_greedy(target_of(64), PROMPTS[0], 8)
    after = decoder.answer(PROMPTS[0], GenerationOptions(max_new_tokens=8))
    assert after.output_ids.tolist() == expected


# --- Where answers end -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """What the target says to each prompt, with no stop token of its own in it."""
    found = [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    return [text for text in found if len(text) == LENGTH]


@every_draft
@every_arm
def test_the_first_of_several_stop_ids_ends_each_answer(arm: str, drafts: str) -> None:
    expected = [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    stops = {expected[0][6], expected[0][9], expected[1][0], expected[2][4], expected[3][11]}
    stops |= target_of(64).stop_ids
    cut = [
        text[: next((i for i, token in enumerate(text, 1) if token in stops), LENGTH)]
        for text in expected
    ]
    options = GenerationOptions(max_new_tokens=LENGTH, stop_ids=frozenset(stops))
    results = answered(arm, drafts, expected, options)
    assert texts_of(results) == cut
    assert len(cut[1]) == 1  # by the prompt pass, without a round
    assert results[1].rounds == []
    assert {result.finish_reason for result in results} == {"stop_id"}
    assert all(result.stopped for result in results)


def always(token: int) -> Callable[[list[int]], list[int]]:
    return lambda _: [token]


def test_the_targets_own_stops_are_used_where_none_are_named() -> None:
    """LlamaConfig's end is token 2, the tokenizer's another one: each of them ends an answer."""
    target = target_of(64)
    assert target.stop_ids == {2, target.tokenizer.eos_token_id}
    ends = []
    for stop in sorted(target.stop_ids):
        options = GenerationOptions(max_new_tokens=5, allowed_tokens=always(stop))
        ends.append(RoutedDecoder(target, {}, StaticPolicy("plain")).answer([7], options))
    assert [(e.output_ids.tolist(), e.finish_reason) for e in ends] == [
        ([stop], "stop_id") for stop in sorted(target.stop_ids)
    ]


@every_draft
@every_arm
@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 2), (5, 3), (12, 2)])
def test_stop_strings_end_answers_where_huggingface_ends_them(
    start: int, count: int, arm: str, drafts: str
) -> None:
    target = target_of(64)
    expected = [huggingface_greedy(target, prompt, LENGTH) for prompt in PROMPTS]
    stop = target.tokenizer.decode(expected[0][start : start + count])
    cut = huggingface(stop_string=stop)
    assert len(cut[0]) <= start + count
    options = GenerationOptions(max_new_tokens=LENGTH, stop_strings=(stop, "no such text"))
    results = answered(arm, drafts, expected, options)
    assert texts_of(results) == cut
    assert results[0].finish_reason == "stop_string"


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 9, 10])
@pytest.mark.parametrize("arm", ARMS)
def test_a_limit_inside_a_block_ends_the_answer_there(arm: str, limit: int) -> None:
    expected = [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    results = answered(arm, "known", expected, GenerationOptions(max_new_tokens=limit))
    assert texts_of(results) == [text[:limit] for text in expected]
    for result in results:
        assert sum(r.committed for r in result.rounds) == len(result.output_ids) - 1
        assert result.finish_reason == ("length" if len(result.output_ids) == limit else "stop_id")


def test_every_request_of_a_batch_may_ask_for_something_else() -> None:
    expected = [huggingface_greedy(target_of(64), prompt, LENGTH) for prompt in PROMPTS]
    stop = expected[1][4]
    options = [
        GenerationOptions(max_new_tokens=4),
        GenerationOptions(max_new_tokens=LENGTH, stop_ids=frozenset({stop})),
        GenerationOptions(max_new_tokens=LENGTH, temperature=1.0, seed=5, stop_ids=NO_STOPS),
        GenerationOptions(max_new_tokens=LENGTH, processors=(Diary(),), stop_ids=NO_STOPS),
    ]
    alone = RoutedDecoder(target_of(64), {}, StaticPolicy("plain")).answer(PROMPTS[2], options[2])
    wanted = [
        expected[0][:4],
        expected[1][: expected[1].index(stop) + 1],
        alone.output_ids.tolist(),
        plain_loop(PROMPTS[3], ruled_out),
    ]
    options[3] = GenerationOptions(max_new_tokens=LENGTH, processors=(Diary(),), stop_ids=NO_STOPS)
    assert texts_of(answered("random", "known", wanted, options)) == wanted


def test_a_trees_path_may_end_at_a_stop_in_its_middle() -> None:
    """Perfect paths of six nodes; the stop is the third of the first round's."""
    target = target_of(64)
    expected = huggingface_greedy(target, PROMPTS[0], LENGTH)
    stop = expected[3]
    assert stop not in expected[:3]
    arm = ScriptedTree([PROMPTS[0] + expected], max_draft=6, num_nodes=40, vocabulary=64)
    decoder = RoutedDecoder(target, {"ar_tree": arm}, StaticPolicy("ar_tree"))
    options = GenerationOptions(max_new_tokens=LENGTH, stop_ids=frozenset({stop}))
    result = decoder.answer(PROMPTS[0], options)
    assert result.output_ids.tolist() == expected[:4]
    assert [(r.accepted, r.committed) for r in result.rounds] == [(3, 3)]
