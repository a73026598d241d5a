from __future__ import annotations

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
from whiflash_infer.cache import KVStore
from whiflash_infer.labels import block_ids
from whiflash_infer.nets.diffusion import DiffusionDrafter

LENGTH, ANCHOR, BLOCK = 16, 6, 5
WIDTH = 3 * ODD_SHAPE.target_hidden_size
TABLE = random_rows(ODD_SHAPE.vocab_size, ODD_SHAPE.hidden_size, seed=50)


def inputs(seed: int, **sizes: int) -> tuple[DiffusionDrafter, Tensor, Tensor]:
    """A drafter, a text without mask tokens, and its features."""
    ids = torch.randint(4, 40, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    net = tiny_diffusion(ODD_SHAPE, seed=seed, block_size=BLOCK, **sizes)
    return net, ids, random_rows(LENGTH, WIDTH, seed=seed + 100)


def packed(net: DiffusionDrafter, ids: Tensor, taps: Tensor, anchors: list[int]) -> Tensor:
    """[anchor, slot, channel] for one sequence."""
    places = torch.tensor([anchors])
    return net.blocks(TABLE[block_ids(ids[None], places, net)], taps[None], places)[0]


def block_of(ids: Tensor, anchor: int) -> Tensor:
    return TABLE[torch.tensor([int(ids[anchor])] + [MASK_ID] * (BLOCK - 1))]


def cached(net: DiffusionDrafter, ids: Tensor, taps: Tensor, anchor: int) -> Tensor:
    """The decoder's way: context entries in two parts, then the block behind the caches."""
    stores = [KVStore(2) for _ in net.layers]
    for part in (range(anchor // 2), range(anchor // 2, anchor)):
        positions = torch.tensor(list(part), dtype=torch.long)
        entries = net.context_entries(taps[positions], positions)
        for store, (keys, values) in zip(stores, entries, strict=True):
            store.append(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    output = net.block_cached(block_of(ids, anchor), anchor + torch.arange(BLOCK), stores)
    assert [store.length for store in stores] == [anchor] * len(stores)
    return output


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
            attended = plain_attention(query, keys, values)
            middle = slots[k] + weights[f"{name}.self_attn.o_proj.weight"] @ attended
            normed = plain_norm(middle, weights[f"{name}.post_attention_layernorm.weight"], eps)
            slots[k] = middle + plain_mlp(normed, weights, f"{name}.mlp")
    return torch.stack([plain_norm(x, weights["norm.weight"], eps) for x in slots])


@pytest.mark.parametrize(("num_layers", "anchor"), [(1, 1), (1, 6), (2, 6), (3, 15)])
def test_blocks_equal_the_dflash_layers_written_as_plain_loops(
    num_layers: int, anchor: int
) -> None:
    net, ids, taps = inputs(0, num_layers=num_layers)
    output = packed(net, ids, taps, [3, anchor])[1]
    expected = dflash_in_plain_loops(net, ids, taps, anchor)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("anchor", [2, 7, LENGTH - 1])
def test_the_training_pass_equals_cached_decoding(anchor: int) -> None:
    net, ids, taps = inputs(1)
    output = packed(net, ids, taps, [anchor])[0]
    expected = cached(net, ids, taps, anchor)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def test_a_block_sees_no_token_but_its_anchor_and_no_feature_from_the_anchor_on() -> None:
    net, ids, taps = inputs(2)
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


def test_a_block_does_not_notice_other_blocks_or_other_rows_of_the_batch() -> None:
    net, ids, taps = inputs(5)
    alone = packed(net, ids, taps, [ANCHOR])[0]
    both_ids, both_taps = torch.stack([ids.flip(0), ids]), torch.stack([taps - 1, taps])
    anchors = torch.tensor([[2, 2, 9, 1], [5, ANCHOR, 7, 15]])
    together = net.blocks(TABLE[block_ids(both_ids, anchors, net)], both_taps, anchors)
    torch.testing.assert_close(together[1, 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 1])
def test_a_padding_anchor_is_finite_and_adds_nothing_to_the_gradients(padding: int) -> None:
    net, ids, taps = inputs(6)
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
