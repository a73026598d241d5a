from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiflash_infer.requests import Stops
from whiflash_infer.sources import byte_tokenizer

TOKENIZER = byte_tokenizer()
NONE: frozenset[int] = frozenset()
IM_END = TOKENIZER.eos_token_id


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def cut(
    answer: list[int], sizes: list[int], ids: frozenset[int], strings: tuple[str, ...]
) -> tuple[list[int], str]:
    """Round by round: what stays of an answer, and what ends it."""
    stops, said = Stops(ids, strings, TOKENIZER), list[int]()
    start = 0
    for size in [*sizes, len(answer)]:
        kept, reason = stops.cut(said, answer[start : start + size])
        said += kept
        if reason:
            return said, reason
        start += size
    return said, ""


def plain_cut(
    answer: list[int], ids: frozenset[int], strings: tuple[str, ...]
) -> tuple[list[int], str]:
    """Token by token, over the whole text."""
    for count, token in enumerate(answer, start=1):
        if token in ids:
            return answer[:count], "stop_id"
        said = TOKENIZER.decode(answer[:count], clean_up_tokenization_spaces=False)
        if any(stop in said for stop in strings):
            return answer[:count], "stop_string"
    return answer, ""


# An alphabet so small that stops are found, overlap themselves and begin in vain.
LETTERS = st.sampled_from(["a", "b", " ", "é", "日", "<|im_end|>", "."])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    letters=st.lists(LETTERS, max_size=30),
    sizes=st.lists(st.integers(1, 7), max_size=12),
    strings=st.lists(st.text(st.sampled_from("ab é日."), min_size=1, max_size=4), max_size=3),
    stop_id=st.sampled_from([None, IM_END, ids_of("a")[0], ids_of(".")[0]]),
)
def test_rounds_of_any_size_end_an_answer_where_single_tokens_do(
    letters: list[str], sizes: list[int], strings: list[str], stop_id: int | None
) -> None:
    answer = ids_of("".join(letters))
    ids = NONE if stop_id is None else frozenset({stop_id})
    assert cut(answer, sizes, ids, tuple(strings)) == plain_cut(answer, ids, tuple(strings))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([1], "one two"), ([4], "one two"), ([5], "one two"), ([6, 1], "one two"), ([30], "one two")],
)
def test_a_stop_string_may_lie_across_rounds(sizes: list[int], expected: str) -> None:
    answer = ids_of("one two three")
    assert cut(answer, sizes, NONE, ("two",)) == (ids_of(expected), "stop_string")


def test_the_token_that_completes_a_stop_string_is_kept() -> None:
    assert Stops(NONE, ("b",), TOKENIZER).cut([], ids_of("abc")) == (ids_of("ab"), "stop_string")


def test_what_comes_first_ends_the_answer() -> None:
    stops = Stops(frozenset(ids_of("x")), ("cd", "bc"), TOKENIZER)
    assert stops.cut([], ids_of("abcdx")) == (ids_of("abc"), "stop_string")
    assert stops.cut([], ids_of("abxcd")) == (ids_of("abx"), "stop_id")


def test_a_token_that_is_a_stop_and_completes_one_counts_as_a_stop_token() -> None:
    stops = Stops(frozenset(ids_of("c")), ("bc",), TOKENIZER)
    assert stops.cut([], ids_of("abcd")) == (ids_of("abc"), "stop_id")


def test_a_character_of_several_tokens_is_complete_with_its_last() -> None:
    answer = ids_of("x日y")
    assert len(answer) == 5
    for sizes in ([1], [2], [3], [5]):
        assert cut(answer, sizes, NONE, ("日",)) == (answer[:4], "stop_string")


def test_the_name_of_a_special_token_is_text_too() -> None:
    answer = [*ids_of("ab"), IM_END, *ids_of("cd")]
    stops = Stops(NONE, ("<|im_end|>",), TOKENIZER)
    assert stops.cut([], answer) == (answer[:3], "stop_string")


def test_a_stop_string_that_is_longer_than_everything_said_ends_nothing() -> None:
    stops = Stops(NONE, ("abcdefghij",), TOKENIZER)
    assert stops.cut(ids_of("abc"), ids_of("def")) == (ids_of("def"), "")


def test_without_stops_everything_stays() -> None:
    assert Stops(NONE, (), TOKENIZER).cut([1, 2], [3, 4, 5]) == ([3, 4, 5], "")


def test_nothing_said_ends_nothing() -> None:
    assert Stops(frozenset({1}), ("a",), TOKENIZER).cut(ids_of("b"), []) == ([], "")
