from __future__ import annotations

import pytest
import torch

from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.requests import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    TARGET_STREAM,
    Request,
    check_request,
    make_request,
    prefix_ids,
)
from whiflash_infer.sampling import uniforms
from whiflash_infer.sources import byte_tokenizer

CPU = torch.device("cpu")


def request_of(options: GenerationOptions, prompt: list[int] | None = None) -> Request:
    made = make_request(
        3,
        [7, 8, 9] if prompt is None else prompt,
        options,
        stop_ids=frozenset({1, 2}),
        tokenizer=byte_tokenizer(),
    )
    made.begin(torch.device("cpu"), spare=4)
    return made


def test_a_greedy_request_needs_no_random_numbers() -> None:
    assert request_of(GenerationOptions(max_new_tokens=10)).streams == {}
    greedy = GenerationOptions(max_new_tokens=10, sample_drafts=True)
    assert request_of(greedy).streams == {}
    assert not request_of(greedy).draws


def test_streams_are_those_of_the_seed_and_only_those_that_are_used() -> None:
    options = GenerationOptions(max_new_tokens=10, temperature=1.0, seed=5)
    assert set(request_of(options).streams) == {TARGET_STREAM}
    drawing = request_of(
        GenerationOptions(max_new_tokens=10, temperature=1.0, seed=5, sample_drafts=True)
    )
    assert set(drawing.streams) == {TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM}
    assert drawing.draws
    for stream, numbers in drawing.streams.items():
        assert numbers.tolist()[:10] == uniforms(5, 10, stream=stream).tolist()


def test_random_numbers_belong_to_output_positions() -> None:
    request = request_of(GenerationOptions(max_new_tokens=10, temperature=1.0, seed=5))
    everything = uniforms(5, 15).tolist()
    for said in (0, 1, 6, 9):
        request.output_ids = [4] * said
        assert request.uniforms(TARGET_STREAM, 3).tolist() == everything[said : said + 3]


def test_a_round_at_the_limit_finds_numbers_for_all_its_rows() -> None:
    """Its drafts may lie behind the limit, where padding does."""
    request = request_of(GenerationOptions(max_new_tokens=10, temperature=1.0))
    request.output_ids = [4] * 9
    assert len(request.uniforms(TARGET_STREAM, 1 + 4)) == 5


def test_lengths_count_prompt_and_answer() -> None:
    request = request_of(GenerationOptions(max_new_tokens=10))
    request.output_ids = [4, 5]
    assert (request.limit, request.length) == (13, 5)
    assert request.result.prompt_length == 3


def test_stop_ids_of_the_request_replace_the_targets() -> None:
    assert request_of(GenerationOptions()).stops.ids == {1, 2}
    assert request_of(GenerationOptions(stop_ids=frozenset({9}))).stops.ids == {9}
    assert request_of(GenerationOptions(stop_ids=frozenset())).stops.ids == frozenset()


def test_prefixes_are_prompt_answer_and_drafts() -> None:
    request = request_of(GenerationOptions())
    request.output_ids = [4, 5]
    assert prefix_ids(request, [6], CPU).tolist() == [[7, 8, 9, 4, 5, 6]]


def test_a_prompt_and_its_answer_may_fill_the_context_and_no_more() -> None:
    check_request([5] * 6, GenerationOptions(max_new_tokens=4), 10)
    with pytest.raises(UserError, match=r"6 tokens \+ max_new_tokens 5 = 11 .* context of 10"):
        check_request([5] * 6, GenerationOptions(max_new_tokens=5), 10)
    with pytest.raises(UserError, match="the prompt is empty"):
        check_request([], GenerationOptions(max_new_tokens=5), 10)
