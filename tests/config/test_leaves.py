"""Every value of the configuration changes something (U113): what is built from it and what that
is used for, or what a stage reads by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hydra.utils import get_object

from tests.config.conftest import MOVED, Explored
from tests.config.leaves import (
    ROOT,
    Leaf,
    all_leaves,
    composed,
    differing,
    hint_of,
    named_in_code,
    other_values,
    used_by_itself,
    values_of,
)
from whiflash_infer.errors import UserError
from whiflash_train.entry import check_keys


@pytest.fixture(scope="module")
def leaves() -> list[Leaf]:
    return all_leaves()


def test_all_sections_are_looked_at(leaves: list[Leaf]) -> None:
    sections = {leaf.key.split(".")[0] for leaf in leaves}
    assert {"ar_drafter", "decode", "engine", "evaluate", "source", "target", "trainer"} <= sections
    assert len(leaves) > 200


def test_another_value_makes_an_object_that_differs_in_its_field_alone(leaves: list[Leaf]) -> None:
    told = {str(leaf): _wrong(leaf) for leaf in once_a_class(leaves)}
    assert {leaf: wrong for leaf, wrong in told.items() if wrong} == {}


def once_a_class(leaves: list[Leaf]) -> list[Leaf]:
    """Of sections of the same class one."""
    found: dict[tuple[str, str], Leaf] = {}
    for leaf in leaves:
        if leaf.target and isinstance(get_object(leaf.target), type):
            found.setdefault((leaf.target, leaf.key.removeprefix(str(leaf.section))), leaf)
    return list(found.values())


def _wrong(leaf: Leaf) -> str:
    """What is wrong with the objects that other values give; empty where all is well."""
    before = leaf.built()
    refusals: list[str] = []
    for value in other_values(leaf.value, hint_of(leaf)):
        try:
            found = differing(before, leaf.built(value))
        except UserError as error:
            refusals.append(f"{value!r}: {error}")
        else:
            return "" if found == {leaf.field} else f"{value!r} changes {sorted(found)}"
    return f"no other value is taken: {refusals}"


def test_every_argument_is_used_for_more_than_a_check(
    leaves: list[Leaf], explored: Explored
) -> None:
    built = {leaf: get_object(leaf.target) for leaf in leaves if leaf.target}
    unused = [
        str(leaf)
        for leaf, made in built.items()
        if leaf.field not in used_by_itself(str(leaf.target))
        and (made.__name__, leaf.field) not in explored.reads.fields
    ]
    assert unused == []


def test_every_value_of_a_section_without_a_class_is_read_by_name(
    leaves: list[Leaf], explored: Explored
) -> None:
    never = replace(next(leaf for leaf in leaves if not leaf.target), key="evaluate.read_by_nobody")
    assert _unread([*leaves, never], explored) == ["evaluate.read_by_nobody"]


def _unread(leaves: list[Leaf], explored: Explored) -> list[str]:
    known = explored.reads.keys | named_in_code() | {f"paths.{name}" for name in MOVED}
    return [
        leaf.key
        for leaf in leaves
        if not leaf.target and leaf.key not in known and not _gives_others_their_value(leaf)
    ]


def _gives_others_their_value(leaf: Leaf) -> bool:
    others = values_of(composed(leaf.entry, leaf.choice))
    return any(f"${{{leaf.key}}}" in str(value) for _, value in others)


@pytest.mark.parametrize("name", MOVED)
def test_every_artefact_lies_where_its_path_says(name: str, explored: Explored) -> None:
    assert (explored.folder / "moved" / name).exists()
    leftover = {path.name for path in (explored.folder / "artifacts/tiny").glob("*")}
    assert leftover <= {"runs"}


# --- keys that there are not ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "typed", "near"),
    [
        ("train", "ar_drafter.fit.learing_rate=1e-3", "ar_drafter.fit.learning_rate"),
        ("train", "router.dwel=3", "router.dwell"),
        ("evaluate", "evaluate.policy=[plain]", "evaluate.policies"),
        ("generate", "generate.max_tokens=3", "generate.max_new_tokens"),
        ("profile_costs", "costs.repeat=3", "costs.repeats"),
    ],
)
def test_a_key_that_there_is_not_is_refused_with_the_nearest_one(
    entry: str, typed: str, near: str
) -> None:
    task = ["task=ar_drafter"] if entry == "train" else []
    with pytest.raises(UserError, match=f"unknown configuration key .*Did you mean {near}?"):
        check_keys(ROOT / "conf", entry, [*task, typed])
