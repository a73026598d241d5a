"""Answers of the target itself: the same whatever is decoded beside them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from tests.fakes import built_target, small_config
from whiflash_infer.target import Target
from whiflash_train.data.engines import Answer, Job, Sampling
from whiflash_train.data.local_engine import ConnectedLocalEngine
from whiflash_train.data.processes import Processes

NEW = 24
GREEDY = Sampling(max_new_tokens=NEW, temperature=0.0, seed=0)
SAMPLED = replace(GREEDY, temperature=1.0)
NONE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return [
        Job(f"q{row}", [], None, [5 + (7 * i + 31 * row) % 250 for i in range(length)])
        for row, length in enumerate([3, 11, 1, 7, 20, 6, 7])
    ]


def answered(
    target: Target,
    jobs: list[Job],
    sampling: Sampling,
    *,
    batch_size: int = 4,
    done: Container[str] = NONE,
) -> list[Answer]:
    found = ConnectedLocalEngine(target, batch_size).answers(jobs, done, sampling)
    return [answer for part in found for answer in part]


def ids_of(answers: list[Answer]) -> dict[str, list[int] | None]:
    assert len({answer.id for answer in answers}) == len(answers)
    return {answer.id: answer.ids for answer in answers}


def huggingface(target: Target, prompt: list[int], stop: int) -> list[int]:
    output = target.model.generate(  # pyright: ignore
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False
    )
    answer = output[0, len(prompt) :].tolist()
    return answer[: answer.index(stop) + 1] if stop in answer else answer


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_every_prompt_gets_the_answer_that_huggingface_gives_it_alone(
    batch_size: int, target: Target, jobs: list[Job]
) -> None:
    stop = next(iter(target.stop_ids))
    found = ids_of(answered(target, jobs, GREEDY, batch_size=batch_size))
    assert found == {job.id: huggingface(target, job.prompt_ids, stop) for job in jobs}


def test_answers_come_as_they_end_and_say_how(
    target: Target, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token that most answers meet at different places becomes the stop token.
    full = {job.id: huggingface(target, job.prompt_ids, -1) for job in jobs}
    counts = torch.bincount(torch.tensor([i for ids in full.values() for i in set(ids)]))
    stop = int(counts.argmax())
    monkeypatch.setattr(Target, "stop_ids", property(lambda _self: frozenset({stop})))
    expected = {
        id_: ids[: ids.index(stop) + 1] if stop in ids else ids for id_, ids in full.items()
    }
    found = answered(target, jobs, GREEDY, batch_size=len(jobs))
    assert ids_of(found) == expected
    assert {a.finish for a in found} >= {"stop"}
    lengths = [len(a.ids or []) for a in found]
    assert len(set(lengths)) > 1
    assert lengths == sorted(lengths)
    for answer in found:
        assert answer.finish == ("stop" if stop in expected[answer.id] else "length")


def test_only_what_is_not_answered_yet_is_answered(target: Target, jobs: list[Job]) -> None:
    found = ids_of(answered(target, jobs, GREEDY, done={"q1", "q4"}))
    everything = ids_of(answered(target, jobs, GREEDY))
    assert found == {id_: ids for id_, ids in everything.items() if id_ not in ("q1", "q4")}


def test_sampled_answers_are_the_same_in_any_batch_and_after_an_interruption(
    target: Target, jobs: list[Job]
) -> None:
    expected = ids_of(answered(target, jobs, SAMPLED, batch_size=1))
    assert ids_of(answered(target, jobs, SAMPLED, batch_size=3)) == expected
    assert ids_of(answered(target, jobs[::-1], SAMPLED, batch_size=32)) == expected
    half = {"q0", "q3", "q5"}
    resumed = ids_of(answered(target, jobs, SAMPLED, done=half))
    assert resumed == {id_: ids for id_, ids in expected.items() if id_ not in half}


def test_the_seed_of_the_run_and_the_job_shape_a_sampled_answer(
    target: Target, jobs: list[Job]
) -> None:
    same_prompt = [replace(jobs[0], id="a"), replace(jobs[0], id="b")]
    first = ids_of(answered(target, same_prompt, SAMPLED))
    assert first["a"] != first["b"]
    second = ids_of(answered(target, same_prompt, replace(SAMPLED, seed=1)))
    assert all(first[id_] != second[id_] for id_ in first)


def test_processes_share_the_jobs_and_answer_as_one_does(
    target: Target, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    for index in range(3):
        monkeypatch.setattr(Processes, "here", lambda index=index: Processes(index, 3))
        shares.append(answered(target, jobs, SAMPLED))
    monkeypatch.undo()
    assert [len(share) for share in shares] == [3, 2, 2]
    together = ids_of([answer for share in shares for answer in share])
    assert together == ids_of(answered(target, jobs, SAMPLED))


def test_an_answer_that_the_target_cannot_give_has_failed_and_says_why(jobs: list[Job]) -> None:
    broken = built_target(small_config(LlamaConfig, 2), (0,))
    broken.model.get_output_embeddings().weight.data[:] = torch.nan  # pyright: ignore
    found = answered(broken, jobs, GREEDY)
    assert {answer.finish for answer in found} == {"failed"}
    assert all("not numbers" in (answer.error or "") for answer in found)
