"""Caches against lists of tensors, and the target's passes over them against passes without any."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.utils.logging import warning_once

from tests.fakes import committed, prefilled, random_ids, random_rows
from whiflash_infer.cache import KVCache, TargetCache, make_span
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree, ancestors, chain
from whiflash_infer.types import TargetRows
from whiflash_infer.verification import read_drafts

CPU = torch.device("cpu")
LAYERS, GROUPS, CHANNELS = 2, 3, 4


def written(
    cache: KVCache, rows: Sequence[int], starts: Sequence[int], width: int, seed: int, **how: Any
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Random entries [L, 2, B, G, N, d] put into a cache, and what each layer's write returned."""
    entries = random_rows(LAYERS, 2, len(rows), GROUPS, width, CHANNELS, seed=seed)
    span = make_span(rows, starts, width, CPU, **how)
    return entries, [cache.write(i, entries[i, 0], entries[i, 1], span) for i in range(LAYERS)]


def filled(*lengths: int) -> KVCache:
    """A row of each length."""
    cache = KVCache(LAYERS)
    cache.reserve(len(lengths), 40)
    for row, length in enumerate(lengths):
        written(cache, [row], [0], length, seed=row)
        cache.lengths[row] = length
    return cache


class Lists:
    """A cache, and beside it a list of entries [L, 2, G, d] for every row."""

    def __init__(self, num_rows: int, seed: int, *, static: bool) -> None:
        self.cache, self.rng, self.static = KVCache(LAYERS), random.Random(seed), static
        self.held: list[list[Tensor]] = [[] for _ in range(num_rows)]
        self.cache.reserve(num_rows, 8)

    def append(self, turn: int) -> None:
        """Entries for some of the rows, of which some are left behind as litter."""
        rows = self.rng.sample(range(len(self.held)), self.rng.randint(1, len(self.held)))
        rows = sorted(rows) if self.rng.random() < 0.5 else rows
        starts, width = [len(self.held[row]) for row in rows], self.rng.randint(1, 5)
        self.cache.reserve(len(self.held), max(starts) + width)
        entries, returned = written(self.cache, rows, starts, width, turn, static=self.static)
        for place, (row, start) in enumerate(zip(rows, starts, strict=True)):
            for layer, kind in ((layer, kind) for layer in range(LAYERS) for kind in (0, 1)):
                seen = returned[layer][kind][place, :, start : start + width]
                assert torch.equal(seen, entries[layer, kind, place])
            kept = self.rng.randint(0, width)
            self.held[row] += entries[:, :, place, :, :kept].unbind(3)
            self.cache.lengths[row] += kept

    def change(self, turn: int) -> None:
        row, other = self.rng.sample(range(len(self.held)), 2)
        match self.rng.choice(["append"] * 4 + ["truncate", "move", "clear"]):
            case "append":
                self.append(turn)
            case "truncate":
                del self.held[row][self.rng.randint(0, len(self.held[row])) :]
                self.cache.truncate(row, len(self.held[row]))
            case "move":
                self.cache.move(row, other)
                self.held[other] = list(self.held[row])
            case _:
                self.cache.clear(row)
                self.held[row] = []


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_cache_holds_of_every_row_what_a_list_would_hold(seed: int, static: bool) -> None:
    lists = Lists(4, seed, static=static)
    for turn in range(60):
        lists.change(turn)
        assert lists.cache.lengths == [len(part) for part in lists.held]
        for row, part in enumerate(lists.held):
            if part:
                assert torch.equal(lists.cache.entries(row), torch.stack(part, dim=3))


@pytest.mark.parametrize("length", [3, -1])
def test_rolling_forward_or_behind_the_start_is_refused(length: int) -> None:
    cache = filled(2)
    with pytest.raises(ValueError, match=f"cannot roll back to {length}: only 2"):
        cache.truncate(0, length)
    assert cache.lengths == [2]


def test_room_comes_in_steps_of_64_and_at_least_doubles() -> None:
    cache, found = KVCache(1), []
    for wanted in (1, 64, 65, 100, 129, 130, 1000, 200, 1025):
        cache.reserve(1, wanted)
        found.append(cache.capacity)
    assert found == [64, 64, 128, 128, 256, 256, 1024, 1024, 2048]


def test_more_rows_and_more_room_leave_what_is_there() -> None:
    cache = filled(3, 5)
    before = [cache.entries(row).clone() for row in range(2)]
    bytes_before = cache.num_bytes
    cache.reserve(4, 65)
    assert cache.lengths == [3, 5, 0, 0]
    assert cache.num_bytes == 4 * bytes_before  # twice the rows, twice the slots
    for row, entries in enumerate(before):
        assert torch.equal(cache.entries(row), entries)
    written(cache, [3], [100], 28, seed=9)  # the last slots of the last row
    cache.reserve(1, 1)  # never smaller
    assert (len(cache.lengths), cache.capacity) == (4, 128)


def test_an_empty_cache_takes_no_memory_and_is_as_wide_as_what_is_written_first() -> None:
    cache = KVCache(LAYERS)
    cache.reserve(3, 64)
    cache.reserve(3, 128)
    cache.clear(1)
    cache.move(0, 1)
    assert cache.num_bytes == 0
    written(cache, [1], [0], 2, seed=0)
    assert cache.num_bytes == 4 * LAYERS * 2 * 3 * GROUPS * 128 * CHANNELS


@pytest.mark.parametrize("static", [False, True])
def test_rows_that_are_neighbours_are_read_without_a_copy(static: bool) -> None:
    cache = filled(3, 3, 3, 3)
    held = cache.entries(0).untyped_storage().data_ptr()
    stride = cache.entries(1).data_ptr() - cache.entries(0).data_ptr()
    for rows in ([0, 1, 2, 3], [1, 2], [2]):
        _, returned = written(cache, rows, [3] * len(rows), 2, seed=5, static=static)
        for layer, parts in enumerate(returned):
            again = cache.read(layer, make_span(rows, [3] * len(rows), 2, CPU))
            for kind, part in enumerate(parts):
                assert part.untyped_storage().data_ptr() == held
                first = cache.entries(0)[layer, kind].data_ptr() + rows[0] * stride
                assert part.data_ptr() == again[kind].data_ptr() == first
                assert part.shape == (len(rows), GROUPS, 5, CHANNELS)


def test_a_pass_reads_up_to_the_end_that_it_asks_for() -> None:
    cache = filled(3, 7)
    whole = torch.stack([cache.entries(1)[0, 0], cache.entries(1)[0, 0]])
    keys, values = cache.read(0, make_span([0, 1], [3, 7], 2, CPU))
    assert keys.shape == values.shape == (2, GROUPS, 9, CHANNELS)
    assert torch.equal(keys[1, :, :7], whole[0])
    _, returned = written(cache, [0, 1], [3, 7], 2, seed=3, end=32)
    assert returned[0][0].shape == (2, GROUPS, 32, CHANNELS)


def test_entries_of_a_path_are_moved_behind_the_anchors_entry_in_order() -> None:
    # Anchors stand at 3 and 6; their trees have six nodes, of which row 0 keeps 1, 3, 4 and row 1
    # keeps 0, 2, 5: slots 5, 7, 8 and 7, 9, 12.
    cache = filled(3, 6)
    written(cache, [0, 1], [3, 6], 7, seed=7, static=True)
    span = make_span([0, 1], [3, 6], 7, CPU, static=True)
    cache.lengths[:] = [10, 13]
    before = [cache.entries(row).clone() for row in range(2)]
    cache.keep_path(span, torch.tensor([[1, 3, 4], [0, 2, 5]]))
    kept = [[0, 1, 2, 3, 5, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 9, 12]]
    for row, slots in enumerate(kept):
        cache.truncate(row, len(slots))
        assert torch.equal(cache.entries(row), before[row][:, :, :, slots])


def test_a_path_of_neighbours_in_place_or_one_with_repeated_leftovers_changes_no_earlier_node() -> (
    None
):
    # What stands behind an accepted prefix means nothing, but is a legal node, often the first.
    cache = filled(2, 2)
    written(cache, [0, 1], [2, 2], 5, seed=8, static=True)
    cache.lengths[:] = [7, 7]
    before = [cache.entries(row).clone() for row in range(2)]
    span = make_span([0, 1], [2, 2], 5, CPU, static=True)
    cache.keep_path(span, torch.tensor([[0, 1, 2], [3, 0, 0]]))
    assert torch.equal(cache.entries(0), before[0])
    assert torch.equal(cache.entries(1)[:, :, :, :4], before[1][:, :, :, [0, 1, 2, 6]])


def test_a_moved_row_is_a_copy_of_its_own() -> None:
    cache = filled(3, 7, 4)
    source, third = cache.entries(0).clone(), cache.entries(2).clone()
    cache.move(0, 1)
    assert cache.lengths == [3, 3, 4]
    written(cache, [0], [0], 3, seed=11)
    assert torch.equal(cache.entries(1), source)
    assert torch.equal(cache.entries(2), third)


def test_a_cleared_row_holds_nothing_of_what_overflowed_in_it() -> None:
    cache = filled(3, 3)
    other = cache.entries(1).clone()
    bad = torch.full((1, GROUPS, 4, CHANNELS), torch.nan)
    cache.write(0, bad, bad, make_span([0], [3], 4, CPU))
    cache.clear(0)
    assert cache.lengths == [0, 3]
    keys, values = cache.read(0, make_span([0], [0], 10, CPU))
    assert not keys.any()
    assert not values.any()
    assert torch.equal(cache.entries(1), other)


# ---- the target's passes


SIZES: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 8
KINDS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def llama() -> PreTrainedConfig:
    return LlamaConfig(**SIZES)


def one_head_a_group() -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, "num_key_value_heads": 4})


def qwen3_with_windows() -> PreTrainedConfig:
    return Qwen3Config(**SIZES, sliding_window=WINDOW, use_sliding_window=True, layer_types=KINDS)


def mistral() -> PreTrainedConfig:
    """All layers slide, and the config names no types of layers."""
    return MistralConfig(**SIZES, sliding_window=WINDOW)


def gemma2() -> PreTrainedConfig:
    """Soft caps on attention and on the head; every other layer slides."""
    return Gemma2Config(
        **SIZES,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
    )


def gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=KINDS)


CONFIGS = [llama, one_head_a_group, qwen3_with_windows, mistral, gemma2, gemma3]


@dataclass
class Model:
    """A target, and the same model left as Hugging Face makes it, with plain attention."""

    target: Target
    original: nn.Module

    @torch.no_grad()
    def uncached(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and taps of a text, by a pass without a cache."""
        output = self.original(ids[None], use_cache=False, output_hidden_states=True)
        taps = [output.hidden_states[i + 1] for i in self.target.tap_layer_ids]
        return output.logits[0], torch.cat(taps, dim=-1)[0]


def build(make: Callable[[], PreTrainedConfig], *, dtype: torch.dtype = torch.float32) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(make(), dtype=torch.float32).eval().to(dtype)
    original = copy.deepcopy(network)
    original.set_attn_implementation("eager")
    return Model(Target(network, None, name="small", tap_layer_ids=[0, 1]), original)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Model:
    return build(request.param)


def assert_near(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=max(tolerance, 1e-5))


def new_cache(target: Target, num_rows: int, capacity: int = 64) -> TargetCache:
    cache = target.new_cache()
    cache.kv.reserve(num_rows, capacity)
    return cache


@torch.no_grad()
def read(
    target: Target, cache: TargetCache, rows: Sequence[int], ids: Tensor, *, static: bool = False
) -> TargetRows:
    """Read [B, Q] tokens behind what the cache holds of each row; all of them stay.

    static: the whole storage is read, as compiled passes do.
    """
    starts = [cache.kv.lengths[row] for row in rows]
    depths = torch.arange(ids.shape[1]).expand(ids.shape)
    end = cache.kv.capacity if static else None
    span = make_span(rows, starts, ids.shape[1], CPU, end=end, static=static)
    found = target.read(ids, depths, None, cache, span)
    for row in rows:
        cache.kv.lengths[row] += ids.shape[1]
    return found


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, WINDOW, WINDOW + 1, 25])
def test_a_prompt_is_read_as_without_a_cache(model: Model, length: int) -> None:
    ids, cache = random_ids(length, seed=length), new_cache(model.target, 2)
    rows = model.target.prefill([ids.tolist()], cache, 1)
    logits, taps = model.uncached(ids)
    assert rows.logits.shape[1] == rows.hidden.shape[1] == 1
    assert_near(rows.logits[0], logits[-1:])
    assert_near(rows.taps[0], taps)
    assert cache.kv.lengths == [0, length]


@torch.no_grad()
def test_prompts_of_different_lengths_are_read_together_as_alone(model: Model) -> None:
    prompts = [random_ids(length, seed=length) for length in (5, 1, 19, WINDOW)]
    cache = new_cache(model.target, 6)
    rows = model.target.prefill([ids.tolist() for ids in prompts], cache, 1)
    assert rows.logits.shape[1] == rows.hidden.shape[1] == 1
    for place, ids in enumerate(prompts):
        logits, taps = model.uncached(ids)
        assert_near(rows.logits[place], logits[-1:])
        assert_near(rows.taps[place, : len(ids)], taps)
    assert cache.kv.lengths == [0, 5, 1, 19, WINDOW, 0]


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("prompt", [2, WINDOW, 13])
def test_reading_in_parts_equals_reading_at_once(model: Model, prompt: int, static: bool) -> None:
    ids, cache = random_ids(prompt + 15, seed=prompt), new_cache(model.target, 1)
    logits, taps = model.uncached(ids)
    found = [model.target.prefill([ids[:prompt].tolist()], cache, 0)]
    for part in ids[prompt:].split([6, 1, 1, 5, 2]):
        found.append(read(model.target, cache, [0], part[None], static=static))
    assert_near(torch.cat([rows.logits[0] for rows in found]), logits[prompt - 1 :])
    assert_near(torch.cat([rows.taps[0] for rows in found]), taps)
    assert cache.kv.lengths == [len(ids)]


@torch.no_grad()
@pytest.mark.parametrize(("kept", "rest"), [(14, 7), (9, 7), (5, 5), (1, 2)])
def test_after_a_roll_back_other_tokens_are_read_as_if_the_first_had_never_been(
    model: Model, kept: int, rest: int
) -> None:
    # Also back over the edge of a window, whose keys must still be there.
    ids, wrong = random_ids(kept + rest, seed=1), random_ids(9, seed=2)
    cache = new_cache(model.target, 1)
    model.target.prefill([ids[:kept].tolist()], cache, 0)
    read(model.target, cache, [0], wrong[None])
    cache.kv.truncate(0, kept + 1)
    cache.kv.truncate(0, kept)
    rows = read(model.target, cache, [0], ids[None, kept:])
    logits, taps = model.uncached(ids)
    assert_near(rows.logits[0], logits[kept:])
    assert_near(rows.taps[0], taps[kept:])


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1, 2], [1]])
@pytest.mark.parametrize("width", [1, 6])
def test_rows_of_different_lengths_are_read_together_as_alone(
    model: Model, rows: list[int], width: int, static: bool
) -> None:
    texts = [random_ids(length, seed=length) for length in (3 + width, 16 + width, 1 + width)]
    cache = new_cache(model.target, 3)
    for row, ids in enumerate(texts):
        model.target.prefill([ids[:-width].tolist()], cache, row)
    together = torch.stack([texts[row][-width:] for row in rows])
    found = read(model.target, cache, rows, together, static=static)
    for place, row in enumerate(rows):
        logits, taps = model.uncached(texts[row])
        assert_near(found.logits[place], logits[-width:])
        assert_near(found.taps[place], taps[-width:])


@torch.no_grad()
def test_a_row_that_is_used_again_shows_nothing_of_the_text_before(model: Model) -> None:
    cache = new_cache(model.target, 2)
    for turn, length in enumerate((19, 3, 12)):
        cache.kv.lengths[1] = 0
        ids = random_ids(length + 5, seed=turn)
        model.target.prefill([ids[:length].tolist()], cache, 1)
        rows = read(model.target, cache, [1], ids[None, length:])
        assert_near(rows.logits[0], model.uncached(ids)[0][length:])


@torch.no_grad()
def test_a_moved_row_is_read_on_in_its_new_place_also_when_storage_has_grown(
    model: Model,
) -> None:
    ids, cache = random_ids(22, seed=3), new_cache(model.target, 2, 32)
    model.target.prefill([random_ids(18, seed=4).tolist()], cache, 0)
    model.target.prefill([ids[:16].tolist()], cache, 1)
    cache.kv.move(1, 0)
    cache.kv.reserve(3, 100)
    rows = read(model.target, cache, [0], ids[None, 16:])
    assert_near(rows.logits[0], model.uncached(ids)[0][16:])


# ---- trees


def random_tree(num_rows: int, num_nodes: int, *, seed: int, deep: float) -> DraftTree:
    """deep: how often a node stands below the one before it."""
    rng = random.Random(seed)
    ids, parents, depths = [], [], []
    for _ in range(num_rows):
        above = [-1]
        for node in range(1, num_nodes):
            above.append(node - 1 if rng.random() < deep else rng.randint(-1, node - 1))
        levels = []
        for parent in above:
            levels.append(1 if parent < 0 else 1 + levels[parent])
        ids.append(rng.sample(range(5, 261), num_nodes))
        parents.append(above)
        depths.append(levels)
    counts = torch.full((num_rows,), num_nodes)
    nodes = torch.tensor(ids), torch.tensor(parents), torch.tensor(depths)
    return DraftTree(*nodes, counts, is_chain=False)


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """Nodes from the anchor down, by following parents."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parents[row, node])
    return path


def texts_of(model: Model, *lengths: int) -> tuple[Texts, TargetCache]:
    return prefilled(model.target, *(random_ids(n, seed=n) for n in lengths), capacity=96)


@torch.no_grad()
def verified(
    model: Model, texts: Texts, cache: TargetCache, tree: DraftTree, *, static: bool = False
) -> TargetRows:
    return read_drafts(model.target, texts, cache, tree, static=static)


def assert_read_as_texts_of_their_own(
    model: Model, texts: Texts, tree: DraftTree, rows: TargetRows
) -> None:
    """Of every node: what the target says after it and the features it makes of it."""
    for row in range(tree.num_rows):
        text = committed(texts, row)
        for node in range(-1, int(tree.counts[row])):
            path = path_to(tree, row, node)
            logits, taps = model.uncached(torch.cat([text, tree.ids[row, path]]))
            assert_near(rows.logits[row, node + 1], logits[-1])
            assert_near(rows.taps[row, node + 1], taps[-1])


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("deep", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("lengths", [(2,), (17,), (3, 20, 7)])
def test_each_path_of_a_tree_is_read_as_a_text_of_its_own(
    model: Model, lengths: tuple[int, ...], deep: float, static: bool
) -> None:
    texts, cache = texts_of(model, *lengths)
    tree = random_tree(len(lengths), WINDOW - 1, seed=len(lengths), deep=deep)
    rows = verified(model, texts, cache, tree, static=static)
    assert_read_as_texts_of_their_own(model, texts, tree, rows)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("counts", [[6, 6, 6], [0, 6, 3]])
def test_chains_of_different_numbers_of_drafts_are_read_as_texts_of_their_own(
    model: Model, counts: list[int], static: bool
) -> None:
    texts, cache = texts_of(model, 2, 15, 15)
    tree = chain(random_ids(18, seed=6).view(3, 6), torch.tensor(counts))
    rows = verified(model, texts, cache, tree, static=static)
    assert_read_as_texts_of_their_own(model, texts, tree, rows)


@torch.no_grad()
def test_behind_the_path_that_was_kept_the_text_goes_on(model: Model) -> None:
    texts, cache = texts_of(model, 3, 17)
    tree = random_tree(2, 7, seed=8, deep=0.6)
    verified(model, texts, cache, tree)
    paths = [max((path_to(tree, r, node) for node in range(7)), key=len) for r in range(2)]
    longest = max(map(len, paths))
    padded = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
    cache.kv.keep_path(cache.current, padded)
    on = random_ids(10, seed=9).view(2, 5)
    ends = []
    for row, path in enumerate(paths):
        ends.append(torch.cat([committed(texts, row), tree.ids[row, path], on[row]]))
        cache.kv.lengths[row] = len(ends[row]) - 5
    rows = read(model.target, cache, [0, 1], on)
    for row, ids in enumerate(ends):
        assert_near(rows.logits[row], model.uncached(ids)[0][-5:])


@torch.no_grad()
def test_padding_of_a_tree_is_seen_by_no_node(model: Model) -> None:
    # Padding has the id 0 and the depth 1; only how much of it there is may differ.
    tree = random_tree(2, 7, seed=3, deep=0.5)
    nodes = [part.clone() for part in (tree.ids, tree.parents, tree.depths)]
    for part, filler in zip(nodes, (0, -1, 1), strict=True):
        part[1, 3:] = filler
    padded = DraftTree(nodes[0], nodes[1], nodes[2], torch.tensor([7, 3]), is_chain=False)
    texts, cache = texts_of(model, 4, 18)
    rows = verified(model, texts, cache, padded)
    assert_read_as_texts_of_their_own(model, texts, padded, rows)
    assert rows.logits.isfinite().all()


@torch.no_grad()
def test_drafts_that_reach_farther_than_the_window_lose_sight_of_the_first_of_themselves(
    model: Model,
) -> None:
    texts, cache = texts_of(model, 3, 20)
    longer = chain(random_ids(2 * (WINDOW + 4), seed=7).view(2, -1))
    deeper = random_tree(2, WINDOW + 6, seed=5, deep=0.95)
    for tree in (longer, deeper):
        rows = verified(model, texts, cache, tree)
        assert_read_as_texts_of_their_own(model, texts, tree, rows)


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gemma3], ids=lambda make: make.__name__)
def test_in_bfloat16_paths_are_read_as_closely_as_without_a_cache(
    make: Callable[[], PreTrainedConfig],
) -> None:
    exact, rounded = build(make), build(make, dtype=torch.bfloat16)
    texts, cache = texts_of(rounded, 3, 17)
    tree = random_tree(2, 6, seed=1, deep=0.6)
    rows = verified(rounded, texts, cache, tree)
    assert rows.logits.dtype == torch.bfloat16
    for row, node in ((0, 5), (1, 5), (1, 0)):
        ids = torch.cat([committed(texts, row), tree.ids[row, path_to(tree, row, node)]])
        found, uncached = rows.logits[row, node + 1].float(), rounded.uncached(ids)[0][-1].float()
        true = exact.uncached(ids)[0][-1]
        assert (found - true).norm() < 1.5 * (uncached - true).norm() + 0.01 * true.norm()


# ---- complaints of the libraries below


class Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@torch.no_grad()
@pytest.mark.parametrize("make", CONFIGS, ids=lambda make: make.__name__)
def test_no_pass_uses_what_is_going_to_be_taken_away(
    make: Callable[[], PreTrainedConfig],
) -> None:
    complaints, logger = Complaints(), logging.getLogger("transformers")
    warning_once.cache_clear()  # pyright: ignore - what was said once is not said again
    logger.addHandler(complaints)
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("error", kind)
            model = build(make)
            texts, cache = texts_of(model, 3, 12)
            tree = random_tree(2, 5, seed=0, deep=0.5)
            for drafts in (tree, chain(tree.ids), chain(tree.ids[:, :0])):
                verified(model, texts, cache, drafts)
            ids = random_ids(8, seed=0).view(2, 4)
            model.target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
    finally:
        logger.removeHandler(complaints)
    assert complaints.messages == []


def test_ancestors_of_the_drawn_trees_are_those_of_their_paths() -> None:
    tree = random_tree(2, 9, seed=4, deep=0.5)
    for row in range(2):
        for node, seen in enumerate(ancestors(tree)[row].tolist()):
            assert [i for i, is_seen in enumerate(seen) if is_seen] == path_to(tree, row, node)
