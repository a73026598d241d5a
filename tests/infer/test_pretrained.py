from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import TAPS, tiny_ar, tiny_diffusion
from whiflash_infer.artifacts import read_json, write_json
from whiflash_infer.chat import ChatOptions
from whiflash_infer.checkpoint import save_drafter
from whiflash_infer.drafters.load import ArmSettings, load_arms, shapes_of
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange.__main__ import main as exchange
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.options import GenerationOptions
from whiflash_infer.pretrained import load_parts
from whiflash_infer.routing.costs import CostModel, DeviceIdentity, PassCosts
from whiflash_infer.routing.features import NUM_SCALARS
from whiflash_infer.routing.policies import (
    BanditPolicy,
    CategoryPolicy,
    DeltaPolicy,
    EntropyPolicy,
    HazardPolicy,
    HazardSettings,
    RandomPolicy,
    RequestPolicy,
    StaticPolicy,
)
from whiflash_infer.routing.router import RouterSettings, save_router
from whiflash_infer.target import Target

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPT = [72, 101, 108, 108, 111]
EVERY_ARM = {"ar", "ar_tree", "diffusion", "diffusion_tree"}


def manifest_for(target: Target, **changes: Any) -> dict[str, Any]:
    known = {"target": target.identity().manifest(), "tap_layer_ids": list(target.tap_layer_ids)}
    return known | {"draft_length": 4} | changes


def write_drafters(folder: Path, target: Target) -> None:
    shape, manifest = target.drafter_shape, manifest_for(target)
    save_drafter(folder / "ar", tiny_ar(shape), manifest, token_ids=TOKEN_IDS)
    save_drafter(folder / "diffusion", tiny_diffusion(shape), manifest, token_ids=TOKEN_IDS)


def write_router(folder: Path, target: Target, *, device: DeviceIdentity | None = None) -> None:
    arms, lineage = load_arms(folder / "ar", folder / "diffusion", target)
    num_features = NUM_SCALARS + target.config.hidden_size
    max_draft = {arm: facts["max_draft"] for arm, facts in lineage.items()}
    prices = PassCosts(
        verify=[(0.001, 0.0)] * 8,
        draft={arm: [0.0] + [0.0001] * longest for arm, longest in max_draft.items()},
        catch_up=dict.fromkeys(max_draft, (0.0001, 0.0)),
        overhead=0.0001,
    )
    costs = CostModel(
        device=device or DeviceIdentity.here(target.device, target.dtype),
        target=target.name,
        nodes={arm: list(range(longest + 1)) for arm, longest in max_draft.items()},
        batches={1: prices},
    )
    save_router(
        folder / "router",
        RouterNet(RouterConfig(num_features=num_features, width=8, max_draft=max_draft)),
        RouterSettings(
            hazard=HazardSettings(lam=50.0, switch_margin=0.0),
            entropy_threshold=2.0,
            category_arms={"code": "diffusion"},
        ),
        costs,
        {
            "target": target.identity().manifest(),
            "drafters": lineage,
            "arms": {arm: shape for arm, shape in shapes_of(arms).items() if arm in max_draft},
        },
    )


@pytest.fixture(scope="module")
def source(target: Target) -> str:
    """The folder that the tiny target was loaded from."""
    return str(target.model.config._name_or_path)  # pyright: ignore


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifacts")
    write_drafters(folder, target)
    write_router(folder, target)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same folders, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "artifacts"))


def only(arm: str, path: Path) -> dict[str, Any]:
    return {arm: path}


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = read_json(path)
    edit(content)
    write_json(path, content)


def greedy(target: Target) -> list[int]:
    output = target.model.generate(  # pyright: ignore
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False
    )
    return output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("given", "policy", "kind", "arms"),
    [
        ("", None, "plain", set()),
        ("ar", None, "static_ar", {"ar", "ar_tree"}),
        ("diffusion", None, "static_diffusion", {"diffusion", "diffusion_tree"}),
        ("ar", "plain", "plain", {"ar", "ar_tree"}),
        ("ar diffusion", "static_diffusion", "static_diffusion", EVERY_ARM),
        ("ar diffusion", "static_ar_tree", "static_ar_tree", EVERY_ARM),
        ("ar diffusion", "random", "random", EVERY_ARM),
        ("ar diffusion router", None, "hazard", EVERY_ARM),
        *[
            ("ar diffusion router", name, name, EVERY_ARM)
            for name in ("entropy", "delta", "request", "category", "bandit")
        ],
        ("ar diffusion router", "static_ar", "static_ar", EVERY_ARM),
    ],
)
def test_every_combination_of_folders_answers_as_the_target_alone(
    given: str,
    policy: str | None,
    kind: str,
    arms: set[str],
    folder: Path,
    source: str,
    target: Target,
) -> None:
    folders: dict[str, Any] = {name: folder / name for name in given.split()}
    decoder = RoutedDecoder(*load_parts(source, policy=policy, dtype="float32", **folders))
    assert set(decoder.arms) == arms
    assert decoder.policy.name == kind
    answer = decoder.answer(PROMPT, GenerationOptions(max_new_tokens=24))
    assert answer.output_ids.tolist() == greedy(target)
    assert not answer.fallbacks


def test_what_the_drafters_were_trained_on_is_read_from_their_files(
    folder: Path, source: str
) -> None:
    loaded, _, _ = load_parts(source, ar=str(folder / "ar"), dtype="float32")
    assert (loaded.name, loaded.tap_layer_ids) == ("tiny", TAPS)


def test_conversations_are_rendered_as_in_training_unless_the_caller_says_otherwise(
    copy: Path, source: str
) -> None:
    chat = {"enable_thinking": False, "template_kwargs": {"style": "short"}}
    change(copy / "ar/manifest.json", lambda m: m.update(chat=chat))
    trained = ChatOptions(enable_thinking=False, template_kwargs={"style": "short"})
    own = ChatOptions(enable_thinking=True)
    assert load_parts(source, ar=copy / "ar")[0].chat.options == trained
    assert load_parts(source, ar=copy / "ar", chat_options=own)[0].chat.options == own


def test_arm_settings_reach_the_arms(folder: Path, target: Target) -> None:
    arms = ArmSettings(draft_length=2, ar_tree=None)
    _, loaded, _ = load_parts(target, ar=folder / "ar", arms=arms)
    assert {name: arm.max_draft for name, arm in loaded.items()} == {"ar": 2}


def test_a_policy_of_the_callers_own_is_used_as_it_is(folder: Path, target: Target) -> None:
    own = EntropyPolicy(1.0)
    assert load_parts(target, ar=folder / "ar", policy=own)[2] is own


def test_policies_are_of_the_kind_that_their_names_say(folder: Path, target: Target) -> None:
    kinds = {
        "hazard": HazardPolicy,
        "entropy": EntropyPolicy,
        "delta": DeltaPolicy,
        "request": RequestPolicy,
        "category": CategoryPolicy,
        "bandit": BanditPolicy,
        "random": RandomPolicy,
    }
    folders: dict[str, Any] = {name: folder / name for name in ("ar", "diffusion", "router")}
    for name, kind in kinds.items():
        assert type(load_parts(target, policy=name, **folders)[2]) is kind
    tree = load_parts(target, policy="static_diffusion_tree", **folders)[2]
    assert isinstance(tree, StaticPolicy)
    assert tree.arm == "diffusion_tree"


@pytest.mark.parametrize(
    ("given", "policy", "message"),
    [
        ("ar diffusion", None, "no router to choose.*static_ar or static_diffusion"),
        *[
            ("ar diffusion", name, f"{name} takes its numbers from a router: give a router folder")
            for name in ("hazard", "entropy", "delta", "request", "category", "bandit")
        ],
        (
            "ar",
            "best",
            r"unknown policy 'best': choose from plain, static_ar, static_ar_tree, rand",
        ),
        ("ar", "static_diffusion", "unknown policy 'static_diffusion': choose from plain, stat"),
        ("ar router", None, r"arms that are not there: diffusion. Loaded are plain, ar, ar_tree;"),
        ("router", None, "arms that are not there: ar, diffusion"),
    ],
)
def test_a_policy_without_what_it_needs_says_what_is_missing(
    given: str, policy: str | None, message: str, folder: Path, target: Target
) -> None:
    folders: dict[str, Any] = {name: folder / name for name in given.split()}
    with pytest.raises(UserError, match=message):
        load_parts(target, policy=policy, **folders)


def test_drafters_for_different_layers_or_targets_are_refused_with_both_values(
    copy: Path, source: str
) -> None:
    folders: dict[str, Any] = {"ar": copy / "ar", "diffusion": copy / "diffusion"}
    change(copy / "ar/manifest.json", lambda m: m.update(tap_layer_ids=[0, 3, 4]))
    with pytest.raises(ArtifactError, match=r"ar on the layers \[0, 3, 4\], .*n on the layers \[1"):
        load_parts(source, **folders)
    change(copy / "ar/manifest.json", lambda m: m["target"].update(name="other"))
    with pytest.raises(ArtifactError, match=r"ar for the target 'other', .*for the target 'tiny'"):
        load_parts(source, **folders)


def test_a_drafter_of_another_target_is_refused(copy: Path, source: str) -> None:
    change(copy / "ar/manifest.json", lambda m: m["target"].update(weights="0123"))
    with pytest.raises(ArtifactError, match="weights: the artefact has '0123'"):
        load_parts(source, ar=copy / "ar")


@pytest.mark.parametrize(("arm", "layout"), [("ar", "eagle3"), ("diffusion", "zlab")])
def test_a_published_drafter_is_refused_with_the_command_that_converts_it(
    arm: str, layout: str, copy: Path, source: str, target: Target, tmp_path: Path
) -> None:
    (copy / arm / "manifest.json").unlink()
    with pytest.raises(
        ArtifactError, match=r"no manifest.json.*-m whiflash_infer.exchange"
    ) as told:
        load_parts(source, **only(arm, copy / arm))
    command = re.search(r"whiflash_infer.exchange (.*)", str(told.value))
    assert command is not None
    words = command[1].replace("NEW_FOLDER", str(tmp_path / "new")).split()
    assert ["--layout", layout] == words[2:4]
    assert exchange([*words, *(["--layer-ids", "1,3,4"] if arm == "ar" else [])]) == 0
    parts = load_parts(source, dtype="float32", **only(arm, tmp_path / "new"))
    answer = RoutedDecoder(*parts).answer(PROMPT, GenerationOptions(max_new_tokens=24))
    assert answer.output_ids.tolist() == greedy(target)


def test_a_converted_drafter_that_names_no_target_is_refused(copy: Path, source: str) -> None:
    change(copy / "ar/manifest.json", lambda m: m.pop("target"))
    with pytest.raises(ArtifactError, match=f"which target the drafter is for.*--target {source}"):
        load_parts(source, ar=copy / "ar")


def test_a_drafter_in_the_place_of_the_other_is_refused(folder: Path, source: str) -> None:
    with pytest.raises(ArtifactError, match=r"holds a DFlash.*the ar drafter has to be one of"):
        load_parts(source, ar=folder / "diffusion")


def test_a_folder_that_does_not_exist_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere does not exist.*task=ar_drafter"):
        load_parts(source, ar=tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"nowhere does not exist.*task=router"):
        load_parts(source, router=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"the target .*nowhere cannot be loaded"):
        load_parts(str(tmp_path / "nowhere"))


def test_a_router_of_other_drafters_is_refused(copy: Path, target: Target) -> None:
    folders: dict[str, Any] = {name: copy / name for name in ("ar", "diffusion", "router")}
    other = tiny_ar(target.drafter_shape, seed=7)
    save_drafter(copy / "ar", other, manifest_for(target), token_ids=TOKEN_IDS)
    with pytest.raises(ArtifactError, match=r"router was made for something else:\n.*ar drafter"):
        load_parts(target, **folders)


def test_a_router_routes_without_an_arm_of_another_shape_and_says_so(
    copy: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    folders: dict[str, Any] = {name: copy / name for name in ("ar", "diffusion", "router")}
    assert "diffusion" in load_parts(target, **folders)[2].arms
    change(copy / "router/manifest.json", lambda m: m["arms"]["diffusion"].update(max_nodes=9))
    policy = load_parts(target, **folders)[2]
    assert policy.name == "hazard"
    assert "ar" in policy.arms
    assert "diffusion" not in policy.arms
    assert "'max_nodes': 9" in caplog.text
    assert "it routes without it" in caplog.text


def test_a_router_of_another_target_is_refused(copy: Path, target: Target) -> None:
    change(copy / "router/manifest.json", lambda m: m["target"].update(weights="0123"))
    with pytest.raises(ArtifactError, match="weights: the artefact has '0123'"):
        load_parts(target, ar=copy / "ar", diffusion=copy / "diffusion", router=copy / "router")


def test_costs_of_another_device_are_refused_unless_they_are_allowed(
    copy: Path, target: Target
) -> None:
    other = DeviceIdentity(device="Abacus", threads=1, dtype="float32")
    write_router(copy, target, device=other)
    folders: dict[str, Any] = {name: copy / name for name in ("ar", "diffusion", "router")}
    with pytest.raises(ArtifactError, match="device was 'Abacus'"):
        load_parts(target, **folders)
    assert load_parts(target, allow_foreign_costs=True, **folders)[2].name == "hazard"


def test_a_loaded_target_keeps_its_own_dtype_and_device(target: Target) -> None:
    assert load_parts(target)[0] is target
    with pytest.raises(UserError, match="loaded already, so dtype, device cannot be chosen here"):
        load_parts(target, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"device": "abacus"}, "device is 'abacus': it must be auto, cpu, cuda"),
    ],
)
def test_an_unknown_dtype_or_device_is_refused(
    choice: dict[str, str], message: str, source: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_parts(source, **choice)  # pyright: ignore


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(source: str) -> None:
    with pytest.raises(UserError, match="this machine shows no CUDA GPU: use device cpu"):
        load_parts(source, device="cuda")


def test_the_package_offers_the_names_that_most_programs_need() -> None:
    import whiflash_infer

    for name in whiflash_infer.__all__:
        assert getattr(whiflash_infer, name).__name__ == name
    assert whiflash_infer.RoutedDecoder is RoutedDecoder
    with pytest.raises(AttributeError, match="no attribute 'Elephant'"):
        _ = whiflash_infer.Elephant  # pyright: ignore
