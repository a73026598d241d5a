"""Whatever is drafted, switched, batched and asked: the answer is Hugging Face's, cut by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from tests.fakes import TAPS, built_target, random_rows, randomise, small_config
from tests.infer.test_engine import (
    ARMS,
    huggingface_greedy,
    prompt_of,
    real_arms,
    scripted,
    untouched,
)
from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.features import NUM_SCALARS
from whiflash_infer.routing.policies import (
    EntropyPolicy,
    HazardSettings,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from whiflash_infer.routing.router import ROUTED, Router, RouterSettings
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target

LONGEST = 14  # tokens of an answer
LENGTHS = (1, 2, 5, 14, 37, 90)
SYNCS = ("eager", "lazy", "lazy_kv_only", "full_forward")
WIDTHS = (None, (1,), (1, 4, 16), (5, 12), (40,))
THRESHOLDS = {261: 4.3, 64: 3.1, 40: 2.75}  # nats, about the usual entropy


@functools.cache
def target_of(vocabulary: int) -> Target:
    config = small_config(LlamaConfig, 6)
    config.vocab_size = vocabulary
    return built_target(config, TAPS)


@functools.cache
def arms_of(vocabulary: int) -> dict[str, Arm]:
    return real_arms(target_of(vocabulary))


@functools.cache
def random_router() -> Router:
    """Opinions without any ground, and prices that are made up."""
    max_draft = {"ar": 4, "ar_tree": 4, "diffusion": 7, "diffusion_tree": 6}
    size = NUM_SCALARS + target_of(64).config.hidden_size
    net = randomise(RouterNet(RouterConfig(num_features=size, width=8, max_draft=max_draft)), 0)
    net.paces.copy_(random_rows(*net.paces.shape, seed=1))
    prices = PassCosts(
        verify=[(0.02 + 0.001 * drafts, 1e-5) for drafts in range(13)],
        draft={
            arm: [0.0, *(0.004 * (1 + i * arm.startswith("ar")) for i in range(longest))]
            for arm, longest in max_draft.items()
        },
        catch_up={"ar": (0.001, 1e-4), "diffusion": (0.001, 2e-4)},
        overhead=0.001,
    )
    nodes = {
        arm: [length * (1 + arm.endswith("tree")) for length in range(longest + 1)]
        for arm, longest in max_draft.items()
    }
    device = DeviceIdentity(device="abacus", threads=1, dtype="float32")
    hazard = HazardSettings(
        lam=20.0, latch=9, frailty=2.0, online_price=0.2, drift=3.0, best_static="ar_tree"
    )
    settings = RouterSettings(
        hazard=hazard, entropy_threshold=3.1, category_arms={"code": "diffusion_tree"}
    )
    costs = CostModel(device=device, target="built", nodes=nodes, batches={1: prices})
    return Router(net=net, settings=settings, costs=costs, manifest={})


def expected_of(
    text: Sequence[int], options: GenerationOptions, stop_ids: frozenset[int], tokenizer: Any
) -> tuple[list[int], str]:
    """The first tokens of what plain decoding says without end, and what ends them."""
    for count, token in enumerate(text[: options.max_new_tokens], start=1):
        said = list(text[:count])
        if token in stop_ids:
            return said, "stop_id"
        if any(stop in tokenizer.decode(said) for stop in options.stop_strings):
            return said, "stop_string"
    assert len(text) >= options.max_new_tokens
    return list(text[: options.max_new_tokens]), "length"


def drawn_options(data: st.DataObject, text: list[int], target: Target) -> GenerationOptions:
    """Stops come from the text, so that most of them matter; the target's own are always there,
    since Hugging Face stops at them, too."""
    stop_ids = data.draw(st.none() | st.sets(st.sampled_from(text), max_size=2))
    pieces = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 3))
    strings = [
        target.tokenizer.decode(text[start : start + count])
        for start, count in data.draw(st.lists(pieces, max_size=2))
    ]
    return GenerationOptions(
        max_new_tokens=data.draw(st.integers(1, LONGEST)),
        stop_ids=None if stop_ids is None else target.stop_ids | stop_ids,
        stop_strings=tuple(strings),
        arm=data.draw(st.sampled_from([*[None] * 8, *ARMS])),
        price=data.draw(st.sampled_from([math.nan, 0.0, 30.0, 1e6])),
        category=data.draw(st.sampled_from(["", "code", "prose"])),
    )


def drawn_policy(data: st.DataObject, vocabulary: int) -> Policy:
    kind = data.draw(st.sampled_from(["static", "random", "random", "between", *ROUTED]))
    if kind in ROUTED:
        return random_router().policy(kind)
    if kind == "static":
        return StaticPolicy(data.draw(st.sampled_from(ARMS)))
    if kind == "random":
        return RandomPolicy(data.draw(st.integers(0, 999)))
    below, above = data.draw(st.permutations(ARMS[1:]))[:2]
    return EntropyPolicy(THRESHOLDS[vocabulary], below=below, above=above)


def drawn_settings(data: st.DataObject) -> EngineSettings:
    return EngineSettings(
        sync=data.draw(st.sampled_from(SYNCS)),
        timing=data.draw(st.booleans()),
        debug=data.draw(st.booleans()),
        widths=data.draw(st.sampled_from(WIDTHS)),
    )


@settings(
    max_examples=510,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_answers_are_huggingfaces_greedy_text_up_to_the_first_end(data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from(sorted(THRESHOLDS)))
    target = target_of(vocabulary)
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=3))
    prompts = [prompt_of(length, vocabulary=vocabulary) for length in lengths]
    texts = [huggingface_greedy(target, prompt, LONGEST) for prompt in prompts]
    options = [drawn_options(data, text, target) for text in texts]
    arms = arms_of(vocabulary)
    if data.draw(st.booleans()):
        known = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        error_rate = data.draw(st.sampled_from([0.0, 0.2, 0.6]))
        seed = data.draw(st.integers(0, 999))
        arms = scripted(known, seed=seed, error_rate=error_rate, vocabulary=vocabulary)
    policy = drawn_policy(data, vocabulary)
    decoder = RoutedDecoder(target, arms, policy, drawn_settings(data))
    results = decoder.generate(prompts, options, max_rows=data.draw(st.integers(1, 3)))
    for result, text, wanted in zip(results, texts, options, strict=True):
        stop_ids = target.stop_ids if wanted.stop_ids is None else wanted.stop_ids
        expected, reason = expected_of(text, wanted, stop_ids, target.tokenizer)
        assert result.output_ids.tolist() == expected
        assert result.finish_reason == reason
        assert not result.fallbacks
        assert sum(r.committed for r in result.rounds) == len(expected) - 1


@torch.no_grad()
def test_the_texts_say_enough_to_be_worth_comparing() -> None:
    """Mostly different tokens, and entropies on both sides of the thresholds."""
    for vocabulary, threshold in THRESHOLDS.items():
        target = target_of(vocabulary)
        prompts = [prompt_of(length, vocabulary=vocabulary) for length in LENGTHS]
        texts = [huggingface_greedy(target, prompt, LONGEST) for prompt in prompts]
        assert sum(len(set(text)) for text in texts) > 5 * len(texts)
        ids = torch.tensor([prompts[-1] + texts[-1]])
        law = untouched(target)(ids).logits[0].softmax(-1)
        entropy = -(law * law.log()).sum(-1)
        assert float(entropy.min()) < threshold < float(entropy.max())
