"""Rounds, their books and their passes; streaming; rows that come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.infer.test_engine import (
    ARMS,
    NO_STOPS,
    ScriptedChain,
    ScriptedTree,
    greedy,
    huggingface_greedy,
    prompt_of,
    scripted,
    texts_of,
)
from tests.infer.test_engine_properties import THRESHOLDS, arms_of, target_of
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafting import default_widths
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.loop import fitting
from whiflash_infer.options import GenerationOptions
from whiflash_infer.requests import Request, make_request
from whiflash_infer.routing.policies import (
    BasePolicy,
    EntropyPolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from whiflash_infer.routing.policies.base import full_length
from whiflash_infer.routing.protocol import Decisions, RoundStates
from whiflash_infer.settings import EngineSettings
from whiflash_infer.sources import byte_tokenizer
from whiflash_infer.target import Target
from whiflash_infer.types import PHASES, Piece

PROMPT = [6, 20, 31]


@pytest.fixture(scope="module")
def small() -> Target:
    return target_of(64)


@pytest.fixture(scope="module")
def known(small: Target) -> list[int]:
    """A prompt of three tokens, and forty that follow."""
    text = huggingface_greedy(small, PROMPT, 40)
    assert len(text) == 40
    return PROMPT + text


def chain_decoder(target: Target, known: Sequence[int], max_draft: int) -> RoutedDecoder:
    arm = ScriptedChain([known], max_draft=max_draft, vocabulary=64)
    return RoutedDecoder(target, {"ar": arm}, StaticPolicy("ar"))


# --- Books -------------------------------------------------------------------------------------


def test_a_stop_inside_an_accepted_prefix_counts_what_was_kept(
    small: Target, known: list[int]
) -> None:
    # A round that went on to the block's end would count 8 tokens here, not 3.
    stop = known[6]
    assert stop not in known[3:6]
    decoder = chain_decoder(small, known, 7)
    result = decoder.answer(PROMPT, greedy(30, stop_ids=frozenset({stop})))
    assert result.output_ids.tolist() == known[3:7]
    assert [(r.num_draft, r.num_nodes, r.accepted, r.committed) for r in result.rounds] == [
        (7, 7, 3, 3)
    ]


def test_a_bonus_token_that_stops_counts_as_no_draft(small: Target, known: list[int]) -> None:
    stop = known[3 + 3]
    assert stop not in known[3:6]
    decoder = chain_decoder(small, known, 2)
    result = decoder.answer(PROMPT, greedy(30, stop_ids=frozenset({stop})))
    assert [(r.num_draft, r.accepted, r.committed) for r in result.rounds] == [(2, 2, 3)]


def test_the_last_block_is_cut_to_the_tokens_that_may_still_be_said(
    small: Target, known: list[int]
) -> None:
    result = chain_decoder(small, known, 7).answer(PROMPT, greedy(12, stop_ids=NO_STOPS))
    assert [(r.num_draft, r.accepted, r.committed) for r in result.rounds] == [(7, 7, 8), (2, 2, 3)]
    assert result.output_ids.tolist() == known[3:15]


def test_the_last_token_of_all_needs_no_draft(small: Target, known: list[int]) -> None:
    result = chain_decoder(small, known, 7).answer(PROMPT, greedy(10, stop_ids=NO_STOPS))
    assert [(r.arm, r.num_draft, r.num_nodes, r.accepted, r.committed) for r in result.rounds] == [
        ("ar", 7, 7, 7, 8),
        ("ar", 0, 0, 0, 1),
    ]


def test_a_tree_counts_the_nodes_of_all_paths_and_drafts_of_the_longest(
    small: Target, known: list[int]
) -> None:
    arm = ScriptedTree([known], max_draft=4, num_nodes=50, vocabulary=64, seed=3)
    decoder = RoutedDecoder(small, {"ar_tree": arm}, StaticPolicy("ar_tree"))
    result = decoder.answer(PROMPT, greedy(21, stop_ids=NO_STOPS))
    assert [(r.num_draft, r.accepted, r.committed) for r in result.rounds] == [(4, 4, 5)] * 4
    assert all(4 <= r.num_nodes <= 50 for r in result.rounds)
    assert max(r.num_nodes for r in result.rounds) > 4


class Alternating(BasePolicy):
    name = "alternating"
    arms = ("ar", "diffusion")

    def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
        ar, diffusion = self.columns(states)
        return full_length(np.where(states.last_arms == ar, diffusion, ar), states, "by turns")


def test_lag_counts_the_tokens_committed_since_the_drafter_was_last_used(
    small: Target, known: list[int]
) -> None:
    arms = scripted([known], error_rate=1.0, vocabulary=64)
    result = RoutedDecoder(small, arms, Alternating()).answer(PROMPT, greedy(5, stop_ids=NO_STOPS))
    # Nothing is accepted, so each round commits one token; the first use catches up the prompt.
    assert [(r.arm, r.position, r.lag, r.switched, r.reason) for r in result.rounds] == [
        ("ar", 3, 3, False, "by turns"),
        ("diffusion", 4, 4, True, "by turns"),
        ("ar", 5, 2, True, "by turns"),
        ("diffusion", 6, 2, True, "by turns"),
    ]


@pytest.mark.parametrize("sync", ["eager", "full_forward"])
def test_an_eager_drafter_lags_one_round_at_most(
    sync: Any, small: Target, known: list[int]
) -> None:
    arms = scripted([known], error_rate=1.0, vocabulary=64)
    decoder = RoutedDecoder(small, arms, Alternating(), EngineSettings(sync=sync))
    result = decoder.answer(PROMPT, greedy(5, stop_ids=NO_STOPS))
    assert [r.lag for r in result.rounds] == [3, 1, 1, 1]


def test_arms_of_one_drafter_share_its_lag(small: Target, known: list[int]) -> None:
    arms = scripted([known], error_rate=1.0, vocabulary=64)
    arms["diffusion"] = arms["ar_tree"]
    result = RoutedDecoder(small, arms, Alternating()).answer(PROMPT, greedy(4, stop_ids=NO_STOPS))
    assert [r.lag for r in result.rounds[:2]] == [3, result.rounds[0].committed]


def test_a_policy_knows_position_lag_room_and_the_last_arm(small: Target, known: list[int]) -> None:
    seen: list[RoundStates] = []

    class Watching(StaticPolicy):
        def decide(self, beliefs: np.ndarray, states: RoundStates, memory: np.ndarray) -> Decisions:
            seen.append(states)
            return super().decide(beliefs, states, memory)

    arms = {
        "ar": ScriptedChain([known], max_draft=2, vocabulary=64),
        "diffusion": ScriptedChain([known], max_draft=5, vocabulary=64),
    }
    RoutedDecoder(small, arms, Watching("ar")).answer(PROMPT, greedy(6, stop_ids=NO_STOPS))
    assert [states.arms for states in seen] == [("plain", "ar", "diffusion")] * 2
    assert [states.positions.tolist() for states in seen] == [[3], [6]]
    assert [states.lags.tolist() for states in seen] == [[[0, 3, 3]], [[0, 3, 6]]]
    assert [states.max_draft.tolist() for states in seen] == [[[0, 2, 4]], [[0, 1, 1]]]
    assert [states.last_arms.tolist() for states in seen] == [[-1], [1]]


# --- Time --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [1, 3])
def test_phases_are_timed_when_asked_and_make_up_no_more_than_the_whole(
    max_rows: int, small: Target
) -> None:
    prompts = [prompt_of(length, vocabulary=64) for length in (3, 9, 5)]
    settings = EngineSettings(timing=True)
    decoder = RoutedDecoder(small, arms_of(64), RandomPolicy(1), settings)
    results = decoder.generate(prompts, greedy(12), max_rows=max_rows)
    for result in results:
        assert all(tuple(r.seconds) == PHASES for r in result.rounds)
        assert all(s >= 0 for r in result.rounds for s in r.seconds.values())
        assert 0 < sum(r.total_seconds for r in result.rounds) <= result.decode_seconds
        assert result.prefill_seconds > 0


def test_without_timing_rounds_have_no_seconds(small: Target) -> None:
    result = RoutedDecoder(small, arms_of(64), RandomPolicy(1)).answer(PROMPT, greedy(6))
    assert [r.seconds for r in result.rounds] == [{}] * len(result.rounds)
    assert result.decode_seconds > 0


# --- Passes ------------------------------------------------------------------------------------


@contextmanager
def passes_of(target: Target) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of every pass of the target."""
    shapes: list[tuple[int, int]] = []

    def note(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        shapes.append(tuple(inputs[0].shape))  # pyright: ignore

    handle = target.model.get_input_embeddings().register_forward_hook(note)  # pyright: ignore
    try:
        yield shapes
    finally:
        handle.remove()


def test_a_waiting_prompt_takes_a_row_as_soon_as_it_is_free(small: Target) -> None:
    """Every round says four tokens. By hand, with two rows, the first two prompts read together:

    prompt 0: read . round . round
    prompt 1: read . round
    prompt 2:                read . round . round . round
    prompt 3:                             read . round
    prompt 4:                                          read
    """
    lengths, limits = [3, 6, 2, 5, 4], [9, 5, 13, 5, 1]
    prompts = [prompt_of(length, vocabulary=64) for length in lengths]
    expected = [huggingface_greedy(small, prompt, 13) for prompt in prompts]
    known = [p + e for p, e in zip(prompts, expected, strict=True)]
    arm = ScriptedChain(known, max_draft=3, vocabulary=64)
    decoder = RoutedDecoder(small, {"ar": arm}, StaticPolicy("ar"))
    options = [greedy(limit, stop_ids=NO_STOPS) for limit in limits]
    with passes_of(small) as shapes:
        results = decoder.generate(prompts, options, max_rows=2)
    assert texts_of(results) == [e[:limit] for e, limit in zip(expected, limits, strict=True)]
    rounds = [(2, 6), (2, 4), (1, 2), (2, 4), (1, 5), (2, 4), (1, 4), (1, 4)]
    assert shapes == rounds


@pytest.mark.parametrize(
    ("lengths", "most", "together"),
    [
        ([5], 8, 1),
        ([100] * 30, 8, 8),
        ([100] * 30, 30, 20),  # 20 * 100 <= 2048 < 21 * 100
        ([1500, 10], 8, 1),  # two rows as long as the longer one would be 3000
        ([10, 1500], 8, 1),
        ([3000, 1], 8, 1),
        ([600, 5, 600, 600], 8, 3),
    ],
)
def test_prompts_are_read_together_while_padding_stays_small(
    lengths: list[int], most: int, together: int
) -> None:
    queue = [request_of(length) for length in lengths]
    assert fitting(queue, most) == together


def request_of(length: int) -> Request:
    return make_request(
        0, [1] * length, GenerationOptions(), stop_ids=NO_STOPS, tokenizer=byte_tokenizer()
    )


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("policy", [*ARMS, "random"])
def test_rows_never_exceed_their_number_and_leave_from_anywhere(
    policy: str, max_rows: int, small: Target
) -> None:
    lengths, limits = [4, 37, 2, 9, 5], [9, 3, 14, 1, 6]
    prompts = [prompt_of(length, vocabulary=64) for length in lengths]
    expected = [huggingface_greedy(small, prompt, 14) for prompt in prompts]
    chosen: Policy = RandomPolicy(5) if policy == "random" else StaticPolicy(policy)
    decoder = RoutedDecoder(small, arms_of(64), chosen)
    with passes_of(small) as shapes:
        results = decoder.generate(prompts, [greedy(n) for n in limits], max_rows=max_rows)
    assert texts_of(results) == [e[:limit] for e, limit in zip(expected, limits, strict=True)]
    assert max(rows for rows, _ in shapes) <= max_rows
    assert [result.prompt_length for result in results] == lengths


def test_default_widths_are_powers_of_two_and_full_widths() -> None:
    assert default_widths([4, 10, 7]) == (1, 2, 4, 5, 8, 11)
    assert default_widths([]) == (1,)
    assert default_widths([15, 1]) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("widths", "expected"), [(None, [8, 4]), ((1,), [8, 3]), ((2, 6, 16), [16, 6])]
)
def test_passes_are_padded_to_the_next_width(
    widths: tuple[int, ...] | None, expected: list[int], small: Target, known: list[int]
) -> None:
    arm = ScriptedChain([known], max_draft=7, vocabulary=64)
    settings = EngineSettings(widths=widths)
    decoder = RoutedDecoder(small, {"ar": arm}, StaticPolicy("ar"), settings)
    with passes_of(small) as shapes:
        result = decoder.answer(PROMPT, greedy(12, stop_ids=NO_STOPS))
    assert result.output_ids.tolist() == known[3:15]
    assert [tokens for _, tokens in shapes[1:]] == expected
    assert [r.num_nodes for r in result.rounds] == [7, 2]


@pytest.mark.parametrize("widths", [(), (0, 4)])
def test_widths_that_mean_nothing_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="widths is"):
        EngineSettings(widths=widths)


# --- Streaming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
def test_pieces_of_a_stream_make_up_the_answer_one_a_round(
    arm: str, small: Target, known: list[int]
) -> None:
    decoder = RoutedDecoder(small, scripted([known], vocabulary=64), StaticPolicy(arm))
    pieces = list(decoder.stream(PROMPT, greedy(23, stop_ids=NO_STOPS)))
    result = pieces[-1].generation
    assert result is not None
    assert [piece.generation for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert [token for piece in pieces for token in piece.ids] == known[3:26]
    assert result.output_ids.tolist() == known[3:26]
    assert pieces[0].ids == known[3:4]
    assert [piece.round for piece in pieces] == [None, *result.rounds]
    assert [len(piece.ids) for piece in pieces[1:]] == [r.committed for r in result.rounds]


def test_a_stream_can_be_left_and_the_decoder_used_again(small: Target, known: list[int]) -> None:
    decoder = RoutedDecoder(small, arms_of(64), RandomPolicy(4))
    left = decoder.stream_all([PROMPT, [5, 6]], greedy(30))
    for _ in range(5):
        next(left)
    assert isinstance(left, Iterator)
    left.close()  # pyright: ignore
    assert decoder.answer(PROMPT, greedy(20)).output_ids.tolist() == known[3:23]
    abandoned = decoder.stream(PROMPT, greedy(30))
    next(abandoned)
    assert decoder.answer(PROMPT, greedy(20)).output_ids.tolist() == known[3:23]


def test_pieces_of_several_answers_say_whose_they_are(small: Target) -> None:
    prompts = [prompt_of(length, vocabulary=64) for length in (3, 12, 5)]
    decoder = RoutedDecoder(small, {}, StaticPolicy("plain"))
    options = [greedy(limit, stop_ids=NO_STOPS) for limit in (3, 2, 2)]
    pieces: list[Piece] = list(decoder.stream_all(prompts, options, max_rows=2))
    # Two prompts are read, both say a second token, which ends 1; then 2 is read.
    assert [piece.index for piece in pieces] == [0, 1, 0, 1, 2, 0, 2]
    ended = [piece.generation is not None for piece in pieces]
    assert ended == [False, False, False, True, False, True, True]
    for index, (prompt, limit) in enumerate(zip(prompts, (3, 2, 2), strict=True)):
        said = [token for piece in pieces if piece.index == index for token in piece.ids]
        assert said == huggingface_greedy(small, prompt, 3)[:limit]


def test_the_caller_of_a_stream_is_not_in_inference_mode(small: Target) -> None:
    decoder = RoutedDecoder(small, {}, StaticPolicy("plain"))
    for _ in decoder.stream(PROMPT, greedy(4)):
        assert not torch.is_inference_mode_enabled()


# --- Waiting for the device --------------------------------------------------------------------

_BRINGS = {"tolist", "numpy", "cpu"}  # of a tensor's methods, none of which is an operator
_WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _BRINGS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    """As in rows[mask], whose result has as many rows as the mask has Trues."""
    indices = [i for arg in args if isinstance(arg, list | tuple) for i in arg]
    return any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in indices)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in _WAITS or (name.startswith("index") and _has_mask(args)):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sync", ["lazy_kv_only", "eager"])
@pytest.mark.parametrize("kind", ["chains", "trees", "plain"])
def test_a_round_waits_for_the_device_once(kind: str, sync: Any, small: Target) -> None:
    """What a CUDA device would have to be waited for: a number or a list of them as Python has
    them (`item`, `int`, `bool` and `if` all read `_local_scalar_dense`; `tolist` is counted as
    such), and operators whose result has a size that depends on data."""
    arms: dict[str, Arm] = arms_of(64)
    policies: dict[str, Policy] = {
        "chains": EntropyPolicy(THRESHOLDS[64]),
        "trees": EntropyPolicy(THRESHOLDS[64], below="diffusion_tree", above="ar_tree"),
        "plain": StaticPolicy("plain"),
    }
    decoder = RoutedDecoder(small, arms, policies[kind], EngineSettings(sync=sync))
    stream = decoder.stream(PROMPT, greedy(12, stop_ids=NO_STOPS))
    next(stream)
    used = set()
    while True:
        counts: Counter[str] = Counter()
        with _Methods(counts), _Operators(counts):
            piece = next(stream, None)
        if piece is None:
            break
        assert counts == {"tolist": 1}
        assert piece.round is not None
        used.add(piece.round.arm)
    assert len(used) == (1 if kind == "plain" else 2)


def test_the_count_of_waits_sees_them() -> None:
    counts: Counter[str] = Counter()
    numbers = torch.arange(3)
    with _Methods(counts), _Operators(counts):
        numbers.tolist()
        int(numbers[0])
        if numbers[1] > 0:
            numbers.nonzero()
        numbers[numbers > 1]
    assert counts == {"tolist": 1, "_local_scalar_dense": 2, "nonzero": 1, "index": 1}
