from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import (
    MASK_ID,
    ODD_SHAPE,
    plain_attention,
    plain_mlp,
    plain_norm,
    plain_rope,
    random_rows,
    tiny_diffusion,
)
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.nets.shape import check_tap_layer_ids, spread_tap_layer_ids
from whiflash_infer.routing.labels import block_ids, previous_ids
from whiflash_infer.sequence import Texts
from whiflash_infer.target import TargetTables

LENGTH, ANCHOR, BLOCK = 24, 6, 5
WIDTH = 3 * ODD_SHAPE.target_hidden_size
TABLE = random_rows(ODD_SHAPE.vocab_size, ODD_SHAPE.hidden_size, seed=50)
HEAD = random_rows(ODD_SHAPE.vocab_size, ODD_SHAPE.hidden_size, seed=51)
WINDOW = 6
BEYOND = WINDOW + 3 * BLOCK  # an anchor three blocks behind the end of its first window


def inputs(seed: int, **sizes: int | None) -> tuple[DiffusionDrafter, Tensor, Tensor]:
    """A drafter, a text without mask tokens, and its features."""
    ids = torch.randint(4, 40, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    net = tiny_diffusion(ODD_SHAPE, seed=seed, block_size=BLOCK, **sizes)  # pyright: ignore
    return net, ids, random_rows(LENGTH, WIDTH, seed=seed + 100)


def packed(net: DiffusionDrafter, ids: Tensor, taps: Tensor, anchors: list[int]) -> Tensor:
    """[anchor, slot, channel] for one sequence."""
    places = torch.tensor([anchors])
    return net.blocks(TABLE[block_ids(ids[None], places, net)], taps[None], places)[0]


def block_of(ids: Tensor, anchor: int) -> Tensor:
    return TABLE[torch.tensor([int(ids[anchor])] + [MASK_ID] * (BLOCK - 1))]


class Decoding:
    """The decoder's way: context entries part by part, and the block behind the cache."""

    def __init__(self, net: DiffusionDrafter, ids: Tensor, taps: Tensor) -> None:
        self.drafter = CachedDiffusion(net, TargetTables(TABLE, HEAD, None))
        self.ids, self.taps, self.texts = ids, taps, Texts(ids.device, keep_taps=True)
        for storage in (self.drafter, self.texts):
            storage.reserve(1, LENGTH + BLOCK)

    def reach(self, anchor: int) -> None:
        """Bring text and cache up to an anchor."""
        self.texts.begin(0, self.ids[:anchor], self.taps[:anchor], self.ids[anchor])
        self.drafter.catch_up(self.texts, [0])

    def block(self, anchor: int) -> Tensor:
        self.reach(anchor)
        output = self.drafter.denoise(self.texts, [0])[0]
        assert self.drafter.kv.lengths == [anchor]
        return output

    def drafts(self, anchor: int, num_draft: int) -> list[int]:
        self.reach(anchor)
        return DiffusionArm(self.drafter).draft(self.texts, [0], [num_draft]).tree.ids[0].tolist()


def cached(net: DiffusionDrafter, ids: Tensor, taps: Tensor, anchor: int) -> Tensor:
    decoding = Decoding(net, ids, taps)
    decoding.reach(anchor // 2)
    return decoding.block(anchor)


def drawn_window(anchor: int, slot: int) -> int:
    """The first position that a slot sees through a window of 6, at anchor 6:

    position   0 1 2 3 4 5 | 6 7 8 9 10     (6 is the anchor, slot 0)
    slot 0     . # # # # # | # # # # #      (positions 1..6 are six)
    slot 1     . . # # # # | # # # # #
    slot 4     . . . . . # | # # # # #
    """
    return max(0, {0: -5, 1: -4, 2: -3, 3: -2, 4: -1}[slot] + anchor)


def dflash_in_plain_loops(net: DiffusionDrafter, ids: Tensor, taps: Tensor, anchor: int) -> Tensor:
    weights = dict(net.named_parameters())
    shape = net.config.shape
    eps, theta = shape.rms_norm_eps, shape.rope_parameters["rope_theta"]

    def project(x: Tensor, layer: int, kind: str, position: int) -> Tensor:
        prefix = f"layers.{layer}.self_attn"
        heads = (weights[f"{prefix}.{kind}_proj.weight"] @ x).reshape(-1, shape.head_dim)
        if kind == "v":
            return heads
        normed = plain_norm(heads, weights[f"{prefix}.{kind}_norm.weight"], eps)
        return plain_rope(normed, position, theta)

    context = [
        plain_norm(weights["fc.weight"] @ taps[row], weights["hidden_norm.weight"], eps)
        for row in range(anchor)
    ]
    slots = list(block_of(ids, anchor))
    for layer in range(net.config.num_layers):
        name = f"layers.{layer}"
        fed = [plain_norm(x, weights[f"{name}.input_layernorm.weight"], eps) for x in slots]
        read = list(enumerate([*context, *fed]))  # slot k stands at position anchor + k
        keys = [project(x, layer, "k", position) for position, x in read]
        values = [project(x, layer, "v", position) for position, x in read]
        for k, x in enumerate(fed):
            query = project(x, layer, "q", anchor + k)
            first = 0 if net.config.sliding_window is None else drawn_window(anchor, k)
            attended = plain_attention(query, keys[first:], values[first:])
            middle = slots[k] + weights[f"{name}.self_attn.o_proj.weight"] @ attended
            normed = plain_norm(middle, weights[f"{name}.post_attention_layernorm.weight"], eps)
            slots[k] = middle + plain_mlp(normed, weights, f"{name}.mlp")
    return torch.stack([plain_norm(x, weights["norm.weight"], eps) for x in slots])


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(("num_layers", "anchor"), [(1, 1), (1, 6), (2, 6), (3, 15), (5, BEYOND)])
def test_blocks_equal_the_dflash_layers_written_as_plain_loops(
    num_layers: int, anchor: int, window: int | None
) -> None:
    net, ids, taps = inputs(0, num_layers=num_layers, sliding_window=window)
    output = packed(net, ids, taps, [3, anchor])[1]
    expected = dflash_in_plain_loops(net, ids, taps, anchor)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("anchor", [2, 7, LENGTH - 1])
def test_the_training_pass_equals_cached_decoding(anchor: int, window: int | None) -> None:
    net, ids, taps = inputs(1, sliding_window=window)
    output = packed(net, ids, taps, [anchor])[0]
    expected = cached(net, ids, taps, anchor)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_through_a_window_every_round_sees_the_keys_that_a_mask_drawn_by_hand_keeps() -> None:
    # Elsewhere a cache as long as the window gave away keys that the drafter still needed.
    net, ids, taps = inputs(8, sliding_window=WINDOW)
    decoding = Decoding(net, ids, taps)
    for anchor in (1, 5, 7, 8, 13, BEYOND):  # between them a block was drafted and given up
        expected = dflash_in_plain_loops(net, ids, taps, anchor)
        torch.testing.assert_close(decoding.block(anchor), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", range(BEYOND))
def test_in_one_layer_a_slot_sees_a_feature_if_and_only_if_its_window_reaches_it(row: int) -> None:
    net, ids, taps = inputs(9, num_layers=1, sliding_window=WINDOW)
    other = taps.clone()
    other[row] += 1.0
    change = packed(net, ids, other, [BEYOND]) - packed(net, ids, taps, [BEYOND])
    seen = [row >= drawn_window(BEYOND, slot) for slot in range(BLOCK)]
    assert (change[0].abs().amax(-1) > 1e-5).tolist() == seen


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_block_sees_no_token_but_its_anchor_and_no_feature_from_the_anchor_on(
    window: int | None,
) -> None:
    net, ids, taps = inputs(2, sliding_window=window)
    other_ids, other_taps = (ids - 4 + 7) % 36 + 4, taps.clone()
    other_ids[ANCHOR] = ids[ANCHOR]
    other_taps[ANCHOR:] += 1.0
    before = packed(net, ids, taps, [ANCHOR])
    assert torch.equal(packed(net, other_ids, other_taps, [ANCHOR]), before)


@pytest.mark.parametrize("row", range(ANCHOR))
def test_every_feature_before_the_anchor_changes_every_slot(row: int) -> None:
    net, ids, taps = inputs(3)
    other = taps.clone()
    other[row] += 1.0
    change = packed(net, ids, other, [ANCHOR]) - packed(net, ids, taps, [ANCHOR])
    assert (change.abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("slot", range(BLOCK))
def test_every_slot_sees_every_other_slot_of_its_block(slot: int) -> None:
    net, ids, taps = inputs(4)
    embeds = block_of(ids, ANCHOR)
    other = embeds.clone()
    other[slot] += 1.0
    places = torch.tensor([[ANCHOR]])
    before, after = (net.blocks(x[None, None], taps[None], places) for x in (embeds, other))
    assert ((after - before)[0, 0].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_block_does_not_notice_other_blocks_or_other_rows_of_the_batch(
    window: int | None,
) -> None:
    net, ids, taps = inputs(5, sliding_window=window)
    alone = packed(net, ids, taps, [ANCHOR])[0]
    both_ids, both_taps = torch.stack([ids.flip(0), ids]), torch.stack([taps - 1, taps])
    anchors = torch.tensor([[2, 2, 9, 1], [5, ANCHOR, 7, 15]])
    together = net.blocks(TABLE[block_ids(both_ids, anchors, net)], both_taps, anchors)
    torch.testing.assert_close(together[1, 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_padding_anchor_is_finite_and_adds_nothing_to_the_gradients(
    padding: int, window: int | None
) -> None:
    net, ids, taps = inputs(6, sliding_window=window)
    net.requires_grad_(True)

    def gradients(anchors: list[int]) -> list[Tensor]:
        net.zero_grad()
        hidden = packed(net, ids, taps, anchors)
        assert hidden.isfinite().all()
        keep = torch.tensor(anchors) == ANCHOR
        hidden[keep].pow(3).sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    padded, alone = gradients([ANCHOR, padding, padding]), gradients([ANCHOR])
    assert len(alone) == len(list(net.parameters()))
    for found, expected in zip(padded, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_is_its_anchor_and_then_masks() -> None:
    net, ids, _ = inputs(7)
    m = MASK_ID
    found = block_ids(ids[None], torch.tensor([[2, 15]]), net).tolist()
    assert found == [[[int(ids[2]), m, m, m, m], [int(ids[15]), m, m, m, m]]]


def test_training_logits_of_forced_tokens_are_those_of_decoding_the_same_tokens() -> None:
    net, ids, taps = inputs(10, markov_rank=3, sliding_window=WINDOW)
    weights = dict(net.named_parameters())
    codes, readout = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    hidden = cached(net, ids, taps, ANCHOR)[1:]
    drafts = Decoding(net, ids, taps).drafts(ANCHOR, BLOCK - 1)
    decoded, previous = [], int(ids[ANCHOR])
    for slot in hidden:
        decoded.append(HEAD @ slot + readout @ codes[previous])
        previous = int(decoded[-1].argmax())
    assert drafts == [int(logits.argmax()) for logits in decoded]
    assert drafts != (hidden @ HEAD.T).argmax(-1).tolist()

    forced, places = ids[None].clone(), torch.tensor([[ANCHOR]])
    forced[0, ANCHOR + 1 : ANCHOR + BLOCK] = torch.tensor(drafts)
    before = previous_ids(forced, torch.tensor([LENGTH]), places, BLOCK - 1)
    trained = packed(net, forced[0], taps, [ANCHOR])[:, 1:]
    found = net.draft_logits(trained, before[0], HEAD)
    torch.testing.assert_close(found[0], torch.stack(decoded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_draft", range(1, BLOCK))
def test_fewer_drafts_are_the_first_of_all_of_them(num_draft: int) -> None:
    net, ids, taps = inputs(11, markov_rank=3)
    decoding = Decoding(net, ids, taps)
    drafts = decoding.drafts(ANCHOR, BLOCK - 1)
    assert decoding.drafts(ANCHOR, num_draft) == drafts[:num_draft]


def test_a_new_markov_head_changes_no_draft() -> None:
    config = tiny_diffusion(ODD_SHAPE, markov_rank=3).config
    head = DiffusionDrafter(config).markov_head
    assert head is not None
    assert not head(torch.arange(ODD_SHAPE.vocab_size)).any()
    assert DiffusionDrafter(replace(config, markov_rank=0)).markov_head is None


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_a_block_of_any_legal_size_is_drafted(block_size: int) -> None:
    net = tiny_diffusion(ODD_SHAPE, block_size=block_size, num_layers=1)
    ids, taps = torch.arange(4, 10)[None], random_rows(1, 6, WIDTH, seed=1)
    places = torch.tensor([[4]])
    hidden = net.blocks(TABLE[block_ids(ids, places, net)], taps, places)
    assert hidden.shape == (1, 1, block_size, ODD_SHAPE.hidden_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 3}, "block_size 3 must lie in 4..32"),
        ({"block_size": 33}, "block_size 33 must lie in 4..32"),
        ({"num_layers": 0}, "num_layers 0 must be 1 or more"),
        ({"markov_rank": -1}, "markov_rank -1 must be 0"),
        ({"sliding_window": 4}, "sliding_window 4 must be at least block_size 5"),
        ({"mask_token_id": 40}, "mask_token_id 40 is outside the vocabulary of 40"),
    ],
)
def test_a_size_out_of_range_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = tiny_diffusion(ODD_SHAPE, block_size=BLOCK).config
    with pytest.raises(ValueError, match=message):
        replace(config, **change)


@pytest.mark.parametrize(
    ("num_target_layers", "num_taps", "expected"),
    [
        (16, 5, [1, 4, 7, 10, 13]),
        (24, 5, [1, 6, 11, 16, 21]),
        (28, 5, [1, 7, 13, 19, 25]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (28, 1, [14]),
        (36, 2, [1, 33]),
        (30, 3, [1, 14, 27]),
        (32, 3, [1, 15, 29]),
        (29, 3, [1, 14, 26]),  # 13.5 to the even 14
        (31, 3, [1, 14, 28]),  # 14.5 to the even 14
    ],
)
def test_taps_are_spread_as_in_the_published_drafters(
    num_target_layers: int, num_taps: int, expected: list[int]
) -> None:
    assert spread_tap_layer_ids(num_taps, num_target_layers) == expected


@pytest.mark.parametrize("num_taps", [0, 6])
def test_a_number_of_taps_that_the_target_has_no_layers_for_is_refused(num_taps: int) -> None:
    with pytest.raises(ValueError, match=r"each must lie in 0\.\.6"):
        check_tap_layer_ids(spread_tap_layer_ids(num_taps, 8), 8)
