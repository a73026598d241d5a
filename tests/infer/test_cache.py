from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from tests.fakes import random_ids, random_rows
from whiflash_infer.cache import KVStore
from whiflash_infer.target import Target


@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_a_store_holds_what_a_list_would_hold(capacity: int) -> None:
    store, rng = KVStore(capacity), random.Random(capacity)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for turn in range(40):
        if rng.random() < 0.6 or not keys:
            new = random_rows(2, 1, 3, rng.randint(1, 5), 4, seed=turn)
            returned = store.append(new[0], new[1])
            keys += list(new[0].unbind(2))
            values += list(new[1].unbind(2))
            assert torch.equal(returned[0], torch.stack(keys, dim=2))
        else:
            length = rng.randint(0, len(keys))
            store.truncate(length)
            del keys[length:], values[length:]
        assert store.length == len(keys)
        held_keys, held_values = store.view()
        assert held_keys.shape[2] == held_values.shape[2] == len(keys)
        if keys:
            assert torch.equal(held_keys, torch.stack(keys, dim=2))
            assert torch.equal(held_values, torch.stack(values, dim=2))


def test_rolling_forward_is_refused() -> None:
    store = KVStore(8)
    store.append(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))
    store.truncate(2)
    with pytest.raises(ValueError, match="cannot roll back to 3: only 2"):
        store.truncate(3)
    assert store.length == 2


def llama() -> LlamaConfig:
    return LlamaConfig(**SIZES)


def sliding() -> Gemma3TextConfig:
    """Layers that look back 4 positions beside one that sees all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=kinds)


SIZES = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module", params=[llama, sliding], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(request.param(), dtype=torch.float32)
    return Target(network, None, name="small", tap_layer_ids=[0, 1])


@torch.no_grad()
def uncached(model: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and taps by Hugging Face's own pass without a cache."""
    output = model.model(ids[None], use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[i + 1] for i in model.tap_layer_ids], dim=-1)
    return output.logits[0], taps[0]


@torch.no_grad()
def test_reading_in_parts_equals_reading_at_once(model: Target) -> None:
    ids, cache = random_ids(15, seed=0), model.new_cache(4)
    rows = [model.read(part, cache, last_only=False) for part in ids.split([6, 1, 5, 3])]
    logits, taps = uncached(model, ids)
    torch.testing.assert_close(torch.cat([r.logits for r in rows]), logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([r.taps for r in rows]), taps, rtol=1e-4, atol=1e-4)
    assert cache.length == 15


@torch.no_grad()
def test_after_a_roll_back_other_tokens_are_read_as_if_the_first_had_never_been(
    model: Target,
) -> None:
    ids, wrong, cache = random_ids(14, seed=1), random_ids(5, seed=2), model.new_cache(64)
    model.read(ids[:8], cache, last_only=True)
    model.read(wrong, cache, last_only=False)
    cache.truncate(9)
    cache.truncate(8)
    rows = model.read(ids[8:], cache, last_only=False)
    logits, taps = uncached(model, ids)
    torch.testing.assert_close(rows.logits, logits[8:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.taps, taps[8:], rtol=1e-4, atol=1e-4)
