from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whiflash_infer.masks import PassMask, causal

CPU = torch.device("cpu")
F32 = torch.float32


def drawn(mask: Tensor) -> list[list[str]]:
    """Of every row of the batch a picture: # is seen, . is not."""
    assert mask.ndim == 4
    assert mask.shape[1] == 1
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return [
        ["".join("#" if x == 0 else "." for x in q) for q in row] for row in mask[:, 0].tolist()
    ]


def block_of(*pictures: str) -> Tensor:
    """One block a picture, its lines split at spaces."""
    return torch.tensor([[[c == "#" for c in line] for line in p.split()] for p in pictures])


TREE = block_of("#... ##.. #.#. #.##")  # the anchor, two children of it, and one of the second


@pytest.mark.parametrize(
    ("width", "picture"),
    [(1, ["#"]), (3, ["#..", "##.", "###"])],
)
def test_of_a_chain_each_token_sees_those_before_it(width: int, picture: list[str]) -> None:
    for row in causal(2, width, CPU).tolist():
        assert ["".join("#" if seen else "." for seen in line) for line in row] == picture


def test_queries_see_all_of_their_context_and_their_own_part_of_the_block() -> None:
    mask = PassMask(1).build([3], TREE, 7, F32)
    assert drawn(mask) == [["####...", "#####..", "####.#.", "####.##"]]


def test_rows_of_different_lengths_see_no_further_than_their_own_blocks() -> None:
    block = causal(3, 2, CPU)
    assert drawn(PassMask(1).build([1, 4, 0], block, 6, F32)) == [
        ["##....", "###..."],
        ["#####.", "######"],
        ["#.....", "##...."],
    ]


def test_slots_behind_the_block_are_not_seen_when_more_is_read() -> None:
    assert drawn(PassMask(1).build([2], causal(1, 2, CPU), 8, F32)) == [["###.....", "####...."]]


def test_heads_that_share_a_key_stand_beside_each_other() -> None:
    mask = PassMask(3).build([2], block_of("#. ##"), 4, F32)
    assert drawn(mask) == [["###."] * 3 + ["####"] * 3]


def test_drafted_entries_of_several_levels_are_seen_as_they_hang_together() -> None:
    # Two queries of an AR level; before them four entries were drafted, and their own two follow.
    block = block_of("#...#. .#..#.", "..#.#. #....#")
    assert drawn(PassMask(1).build([2, 1], block, 8, F32)) == [
        ["###...#.", "##.#..#."],
        ["#..#.#..", "##....#."],
    ]


@pytest.mark.parametrize(
    ("start", "pictures"),
    [
        # A window of 4 at depth d, position start + d, begins at start + d - 3.
        (2, ["###..", "####.", ".####"]),
        (3, ["####..", ".####.", "..####"]),
        (6, ["...####..", "....####.", ".....####"]),
        (0, ["#..", "##.", "###"]),
    ],
)
def test_a_window_slides_by_one_slot_with_every_token_of_a_chain(
    start: int, pictures: list[str]
) -> None:
    mask = PassMask(1).build(
        [start],
        causal(1, 3, CPU),
        start + 3,
        F32,
        window=4,
        depths=torch.arange(3)[None],
    )
    assert drawn(mask) == [pictures]


def test_in_a_tree_a_window_slides_with_depth_and_not_with_the_place_in_the_pass() -> None:
    # Depths 0 1 1 2, window 4, anchor at 5: nodes of one depth see the same context.
    depths = torch.tensor([[0, 1, 1, 2]])
    mask = PassMask(1).build([5], TREE, 9, F32, window=4, depths=depths)
    assert drawn(mask) == [["..####...", "...####..", "...###.#.", "....##.##"]]


def test_windows_of_rows_slide_each_from_its_own_edge_also_when_heads_are_folded() -> None:
    depths = torch.arange(2).expand(2, -1)
    mask = PassMask(2).build([1, 5], causal(2, 2, CPU), 7, F32, window=3, depths=depths)
    assert drawn(mask) == [
        ["##.....", "##.....", "###....", "###...."],
        ["...###.", "...###.", "....###", "....###"],
    ]


def test_a_denoised_block_is_seen_whole_through_any_window() -> None:
    # Slot s of a block at anchor 6, window 4: features of 3 + s .. 5, and all five slots.
    block = torch.ones(1, 5, 5, dtype=torch.bool)
    mask = PassMask(1).build([6], block, 11, F32, window=4, depths=torch.arange(5)[None])
    assert drawn(mask) == [
        ["...########", "....#######", ".....######", "......#####", "......#####"]
    ]


def test_a_mask_does_not_remember_the_ones_before_it() -> None:
    masks = PassMask(2)
    masks.build([9, 3], causal(2, 4, CPU), 13, F32)
    small = masks.build([1], causal(1, 2, CPU), 4, F32)
    assert drawn(small) == [["##..", "##..", "###.", "###."]]
    large = masks.build([0, 70], causal(2, 1, CPU), 71, F32)
    assert drawn(large) == [["#" + "." * 70] * 2, ["#" * 71] * 2]


def test_masks_of_one_size_are_built_in_the_same_storage() -> None:
    masks = PassMask(1)
    first = masks.build([5], causal(1, 2, CPU), 7, F32).data_ptr()
    assert masks.build([60], causal(1, 2, CPU), 62, F32).data_ptr() == first


def test_a_mask_has_the_dtype_that_is_asked_for() -> None:
    masks = PassMask(1)
    for dtype in (F32, torch.bfloat16, F32):
        mask = masks.build([1], causal(1, 1, CPU), 3, dtype)
        assert mask.dtype == dtype
        assert drawn(mask.float()) == [["##."]]
