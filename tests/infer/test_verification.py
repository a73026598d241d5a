"""Verification by hand: what the target says to drafts, and what a round leaves behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from tests.fakes import committed, prefilled
from tests.infer.test_engine import prompt_of, untouched
from tests.infer.test_engine_properties import target_of
from tests.infer.test_trees import tree_of
from whiflash_infer.options import GenerationOptions
from whiflash_infer.requests import Request, make_request
from whiflash_infer.sampling import uniforms
from whiflash_infer.sources import byte_tokenizer
from whiflash_infer.trees import chain
from whiflash_infer.types import TargetRows
from whiflash_infer.verification import Outcome, judge, keep_path, read_drafts

V = 8


def request_of(options: GenerationOptions | None = None) -> Request:
    made = make_request(
        0,
        [1, 2],
        options or GenerationOptions(max_new_tokens=20),
        stop_ids=frozenset(),
        tokenizer=byte_tokenizer(),
    )
    made.begin(torch.device("cpu"), spare=16)
    return made


def rows_of(*rows: Sequence[int | float]) -> TargetRows:
    """Logits whose greatest stands at these tokens; a number that is none spoils a place."""
    logits = torch.zeros(len(rows), len(rows[0]), V)
    for b, row in enumerate(rows):
        for q, token in enumerate(row):
            if math.isfinite(token):
                logits[b, q, int(token)] = 5.0
            else:
                logits[b, q] = token
    nothing = torch.zeros(*logits.shape[:2], 1)
    return TargetRows(logits, nothing, nothing)


def said(outcome: Outcome, row: int = 0) -> list[int]:
    return outcome.tokens[row, : int(outcome.accepted[row]) + 1].tolist()


# --- Chains and trees --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([7, 0, 0, 0], [7]),
        ([3, 7, 0, 0], [3, 7]),
        ([3, 4, 5, 6], [3, 4, 5, 6]),
        ([3, 4, 4, 6], [3, 4, 4]),
    ],
)
def test_a_chain_stays_as_far_as_the_target_agrees_and_one_token_follows(
    choices: list[int], expected: list[int]
) -> None:
    tree = chain(torch.tensor([[3, 4, 5]]))
    outcome = judge([request_of()], rows_of(choices), tree, {}, longest=3)
    assert said(outcome) == expected
    assert outcome.sources[0, : len(expected)].tolist() == list(range(len(expected)))


def test_the_path_through_a_tree_is_the_one_that_the_target_says() -> None:
    # anchor -+- 0: 3 -+- 2: 5 --- 4: 6
    #         |        +- 3: 4 --- 5: 1
    #         +- 1: 2
    tree = tree_of([(-1, 3), (-1, 2), (0, 5), (0, 4), (2, 6), (3, 1)])
    # After the anchor it says 3, after 3 it says 4, after 4 it says 1, and after that 7.
    outcome = judge([request_of()], rows_of([3, 4, 0, 6, 1, 0, 7]), tree, {}, longest=3)
    assert said(outcome) == [3, 4, 1, 7]
    assert outcome.sources[0].tolist() == [0, 1, 4, 6]
    assert outcome.path[0].tolist() == [0, 3, 5]


def test_padding_is_never_accepted() -> None:
    """A padded node looks like token 0 behind the anchor, which the target says here."""
    tree = tree_of([(-1, 3), (-1, 2)], [], width=2)
    outcome = judge(
        [request_of(), request_of()], rows_of([2, 0, 6], [0, 0, 0]), tree, {}, longest=1
    )
    assert [said(outcome, 0), said(outcome, 1)] == [[2, 6], [0]]
    padded = chain(torch.tensor([[3, 0, 0]]), torch.tensor([1]))
    outcome = judge([request_of()], rows_of([3, 0, 0, 0]), padded, {}, longest=3)
    assert said(outcome) == [3, 0]


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_only_rows_that_speak_have_to_be_numbers(spoilt: float) -> None:
    tree = tree_of([(-1, 3), (-1, 2), (0, 5), (0, 4)])
    beside = judge([request_of()], rows_of([3, 4, spoilt, spoilt, 6]), tree, {}, longest=2)
    assert said(beside) == [3, 4, 6]
    assert beside.finite.tolist() == [True]
    for rows in ([spoilt, 4, 0, 0, 6], [3, spoilt, 0, 0, 6], [3, 4, 0, 0, spoilt]):
        on_the_path = judge([request_of()], rows_of(rows), tree, {}, longest=2)
        assert on_the_path.finite.tolist() == [False]


# --- Sampling ----------------------------------------------------------------------------------


def first_beyond(law: Sequence[float], number: float) -> int:
    """Where the running sum passes a number."""
    total = 0.0
    for token, weight in enumerate(law):
        total += weight
        if total > number:
            return token
    raise AssertionError


def test_nodes_of_one_depth_share_the_random_number_of_their_position() -> None:
    tree = tree_of([(-1, 3), (-1, 2), (0, 5), (1, 4), (2, 6)])
    logits = torch.randn(1, 6, V, generator=torch.Generator().manual_seed(4))
    options = GenerationOptions(max_new_tokens=20, temperature=1.0, seed=11)
    request = request_of(options)
    request.output_ids = [1, 1]
    nothing = torch.zeros(1, 6, 1)
    numbers = uniforms(11, 20).tolist()[2:]
    depths = [0, 1, 1, 2, 2, 3]
    laws = logits[0].double().softmax(-1).tolist()
    choices = [first_beyond(law, numbers[d]) for law, d in zip(laws, depths, strict=True)]
    nodes = {(0, 3): 1, (0, 2): 2, (1, 5): 3, (2, 4): 4, (3, 6): 5}
    at, expected = 0, [choices[0]]
    while (at, expected[-1]) in nodes:
        at = nodes[at, expected[-1]]
        expected.append(choices[at])
    outcome = judge([request], TargetRows(logits, nothing, nothing), tree, {}, longest=3)
    assert said(outcome) == expected


def test_drawn_drafts_are_kept_by_the_ratio_of_the_two_laws() -> None:
    """Draft 3 has probability 0.5 here and 0.25 with the target, so half of the seeds keep it; the
    others say what the target has more of than the drafter."""
    target_law = torch.tensor([0.25, 0.0, 0.0, 0.25, 0.0, 0.5, 0.0, 0.0])
    draft_law = torch.tensor([0.5, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    logits = target_law.log().clamp(min=-1e4).expand(1, 2, V)
    nothing = torch.zeros(1, 2, 1)
    tree = chain(torch.tensor([[3]]))
    kept, replaced = 0, set[int]()
    for seed in range(400):
        options = GenerationOptions(
            max_new_tokens=20, temperature=1.0, seed=seed, sample_drafts=True
        )
        rows = TargetRows(logits, nothing, nothing)
        outcome = judge([request_of(options)], rows, tree, {0: draft_law[None]}, longest=1)
        if int(outcome.accepted[0]):
            kept += 1
            assert said(outcome)[0] == 3
        else:
            replaced |= set(said(outcome))
    assert abs(kept - 200) < 4 * 10  # four standard deviations
    assert replaced == {5}


# --- What a round leaves behind ----------------------------------------------------------------


@torch.no_grad()
def test_every_node_is_read_as_if_its_path_alone_were_the_text() -> None:
    target = target_of(64)
    prompts = [torch.tensor(prompt_of(length, vocabulary=64)) for length in (9, 4)]
    texts, cache = prefilled(target, *prompts)
    tree = tree_of([(-1, 3), (-1, 20), (0, 50), (0, 4), (2, 6)], [(-1, 33), (0, 3)], width=6)
    rows = read_drafts(target, texts, cache, tree, static=False)
    paths = [
        [[], [3], [20], [3, 50], [3, 4], [3, 50, 6]],
        [[], [33], [33, 3]],
    ]
    for row, prompt in enumerate(prompts):
        for node, path in enumerate(paths[row]):
            ids = torch.cat([prompt, torch.tensor(path, dtype=torch.long)])
            expected = untouched(target)(ids[None]).logits[0, -1]
            torch.testing.assert_close(rows.logits[row, node], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_kept_path_is_what_the_text_would_have_been_read_as() -> None:
    """Tokens, features, keys and values of both rows equal those of their texts read anew."""
    target = target_of(64)
    prompts = [torch.tensor(prompt_of(length, vocabulary=64)) for length in (9, 4)]
    texts, cache = prefilled(target, *prompts)
    # Kept: nodes 1, 2, 4 of the first row, and node 1 of the second; 7 and 8 follow.
    tree = tree_of(
        [(-1, 3), (-1, 20), (1, 50), (0, 4), (2, 6)], [(-1, 33), (-1, 5), (0, 3)], width=6
    )
    rows = read_drafts(target, texts, cache, tree, static=False)
    outcome = Outcome(
        accepted=torch.tensor([3, 1]),
        path=torch.tensor([[1, 2, 4], [1, 0, 0]]),
        tokens=torch.tensor([[20, 50, 6, 7], [5, 8, 0, 0]]),
        sources=torch.tensor([[0, 2, 3, 5], [0, 2, 1, 1]]),
        finite=torch.ones(2, dtype=torch.bool),
    )
    keep_path(texts, cache, tree, rows, outcome)
    for row, new in enumerate([[20, 50, 6, 7], [5, 8]]):
        texts.commit(row, len(new))
        cache.kv.lengths[row] = texts.lengths[row] - 1
        whole = torch.cat([prompts[row], torch.tensor(new)])
        assert committed(texts, row).tolist() == whole.tolist()
        anew_texts, anew_cache = prefilled(target, whole)
        length = len(whole) - 1
        torch.testing.assert_close(
            texts.taps([row], [0], length), anew_texts.taps([0], [0], length), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(
            cache.kv.entries(row), anew_cache.kv.entries(0), rtol=1e-4, atol=1e-4
        )
