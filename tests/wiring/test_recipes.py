"""The recipes of GPU targets: they compose for every machine, and train all three tasks.

No GPU is needed: target, data, steps and devices are made small, and all else stays as it is.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tests.stages import ROOT, manifest_of, run
from whiflash_infer.drafters.load import load_arms
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.sources import RandomTiny
from whiflash_infer.target import Target
from whiflash_train.entry import check_keys
from whiflash_train.preparation import build_section, build_sources, chat_options

RECIPES = ("qwen3_4b", "qwen3_8b", "llama31_8b")
MACHINES = {"one_gpu": 1, "eight_gpus": 8, "two_nodes": 16}
DRAFTERS = ("ar_drafter", "diffusion_drafter")
SMALL = (
    "device=cpu source=file source.file.path=prompts.jsonl data.validation_fraction=0.25 "
    "data.router_fraction=0.25"
)
COSTS = "costs.contexts=[16] costs.lags=[1] costs.batches=[1] costs.repeats=2"
ROUTER = "router.fit.max_steps=2 router.ceiling_folds=2"


@functools.cache
def composed(*choices: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=["task=ar_drafter", *choices])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_for_every_machine_to_the_same_batches(
    recipe: str, machine: str
) -> None:
    choices = (f"experiment={recipe}", f"machine={machine}")
    cfg, alone = composed(*choices), composed(f"experiment={recipe}")
    assert cfg.target.name == recipe
    assert cfg.trainer.devices * cfg.trainer.num_nodes == MACHINES[machine]
    for name in DRAFTERS:
        task, like = build_section(cfg, name), build_section(alone, name)
        assert task.fit.tokens_per_batch == like.fit.tokens_per_batch
        assert task.fit.accumulate * MACHINES[machine] == like.fit.accumulate
    for section in ("data", "router", "features"):
        build_section(cfg, section)
    assert set(build_sources(cfg, "source")) == {"open_perfectblend"}
    assert chat_options(cfg).enable_thinking is (None if recipe == "llama31_8b" else False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_the_published_sizes(recipe: str) -> None:
    cfg = composed(f"experiment={recipe}")
    block, ar = build_section(cfg, "diffusion_drafter"), build_section(cfg, "ar_drafter")
    assert (block.num_layers, block.block_size) == (5, 16)
    assert (ar.draft_length, ar.draft_vocab_size) == (7, 32000)
    assert ar.fit.monitor == block.fit.monitor == "val/real_tau"
    longest = cfg.generate.max_prompt_tokens + cfg.generate.max_new_tokens
    assert longest <= cfg.data.mask.max_length <= ar.fit.tokens_per_batch


def test_what_is_typed_goes_before_what_an_experiment_chose() -> None:
    arguments = ["task=ar_drafter", "experiment=qwen3_8b"]
    cfg = composed("experiment=qwen3_8b", "target=llama31_8b", "source=[gsm8k,sharegpt]")
    assert cfg.target.name == "llama31_8b"
    assert list(cfg.source) == ["gsm8k", "sharegpt"]
    check_keys(ROOT / "conf", "train", [*arguments, "source.open_perfectblend.limit=9"])
    check_keys(ROOT / "conf", "train", [*arguments, "target.source.path=folder"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_drafters_that_decode_and_a_router(recipe: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    rows = [{"prompt": f"Question {i}?"} for i in range(24)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    small = f"experiment={recipe} {SMALL}"
    run(folder, f"data_prep/generate.py {small} generate.max_new_tokens=24")
    for task in DRAFTERS:
        fit = f"{task}.fit"
        output = run(
            folder,
            f"train.py task={task} {small} {fit}.max_steps=2 {fit}.val_every=2 "
            f"{fit}.decode_prompts=2 {fit}.decode_tokens=6",
        )
        assert f"written to artifacts/tiny/{task}" in output
        assert manifest_of(folder, task)["metrics"]["val/real_tau"] >= 1.0
    run(folder, f"data_prep/profile_costs.py {small} {COSTS}")
    run(folder, f"data_prep/log_rounds.py {small}")
    run(folder, f"train.py task=router {small} {ROUTER}")
    assert manifest_of(folder, "router")["replay"]["verdict"]
    source = RandomTiny(cache_dir=f"{tmp_path}/cache/targets", seed=0, hidden_size=64, num_layers=8)
    target = Target.from_pretrained(
        source.resolve(), name="tiny", tap_layer_ids=[1, 3, 4], dtype="bfloat16", device="cpu"
    )
    artifacts = folder / "artifacts/tiny"
    arms, _ = load_arms(artifacts / "ar_drafter", artifacts / "diffusion_drafter", target)
    assert {name: (arm.max_draft, arm.max_nodes) for name, arm in arms.items()} == {
        "ar": (7, 7),
        "ar_tree": (5, 27),
        "diffusion": (15, 15),
        "diffusion_tree": (15, 24),
    }
    prompt = target.chat.prompt_ids([{"role": "user", "content": "What is a prime number?"}])
    for arm in arms:
        decoder = RoutedDecoder(target, {arm: arms[arm]}, StaticPolicy(arm))
        answer = decoder.answer(prompt, GenerationOptions(max_new_tokens=8))
        assert not answer.fallbacks
        assert 0 < len(answer.output_ids) <= 8
        assert all(r.committed >= 1 for r in answer.rounds)
