from __future__ import annotations

import pytest
import torch

from whiflash_infer.batch import answer_batch
from whiflash_infer.target import Target


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [
        [5 + (7 * i + 31 * row) % 250 for i in range(length)]
        for row, length in enumerate([3, 11, 1, 7, 20, 6])
    ]


def greedy(target: Target, prompt: list[int], stop: int) -> list[int]:
    output = target.model.generate(  # pyright: ignore
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False
    )
    answer = output[0, len(prompt) :].tolist()
    return answer[: answer.index(stop) + 1] if stop in answer else answer


def test_every_row_of_a_batch_gets_the_answer_it_gets_alone(
    target: Target, prompts: list[list[int]]
) -> None:
    stop = next(iter(target.stop_ids))
    found = answer_batch(target, prompts, max_new_tokens=24)
    assert found == [greedy(target, prompt, stop) for prompt in prompts]


def test_rows_that_stop_early_leave_the_batch_and_the_others_are_unmoved(
    target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token that most answers meet at different places becomes the stop token.
    answers = [greedy(target, prompt, -1) for prompt in prompts]
    counts = torch.bincount(torch.tensor([i for a in answers for i in set(a)]))
    stop = int(counts.argmax())
    monkeypatch.setattr(Target, "stop_ids", property(lambda _self: frozenset({stop})))
    expected = [a[: a.index(stop) + 1] if stop in a else a for a in answers]
    assert len({len(a) for a in expected}) > 1
    assert answer_batch(target, prompts, max_new_tokens=24) == expected


def test_sampling_is_a_function_of_the_seed(target: Target, prompts: list[list[int]]) -> None:
    options = {"max_new_tokens": 12, "temperature": 1.0}
    first = answer_batch(target, prompts, seed=1, **options)
    assert answer_batch(target, prompts, seed=1, **options) == first
    assert answer_batch(target, prompts, seed=2, **options) != first
