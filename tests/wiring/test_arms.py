"""The arms that settings make of two drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from tests.fakes import TAPS, tiny_ar, tiny_diffusion
from tests.stages import ROOT
from whiflash_infer.checkpoint import save_drafter
from whiflash_infer.drafters.load import ArmSettings, ARTree, chains, load_arms
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_train.preparation import build_section


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A chain of 4, with 6 words to choose from, and a block of 5 slots."""
    folder, shape = tmp_path_factory.mktemp("drafters"), target.drafter_shape
    used = torch.tensor([5, 9, 30, 77, 100, 200])
    nets: dict[str, ARDrafter | DiffusionDrafter] = {
        "ar": tiny_ar(shape, used=used),
        "diffusion": tiny_diffusion(shape),
    }
    manifest = {
        "target": target.identity().manifest(),
        "tap_layer_ids": list(TAPS),
        "draft_length": 4,
    }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    for name, net in nets.items():
        save_drafter(folder / name, net, manifest, token_ids=ids)
    return folder / "ar", folder / "diffusion"


def sizes(settings: ArmSettings, folders: tuple[Path | None, Path | None], target: Target) -> Any:
    arms, _ = load_arms(*folders, target, settings)
    return {name: (arm.max_draft, arm.max_nodes) for name, arm in arms.items()}


def test_arms_are_as_long_and_as_wide_as_settings_say(
    folders: tuple[Path, Path], target: Target
) -> None:
    tree = ARTree(depth=3, top_k=2, num_nodes=6)
    settings = ArmSettings(draft_length=6, ar_tree=tree, diffusion_tree=9)
    assert sizes(settings, folders, target) == {
        "ar": (6, 6),
        "ar_tree": (3, 6),
        "diffusion": (4, 4),
        "diffusion_tree": (4, 9),
    }
    bare = ArmSettings(ar_tree=None, diffusion_tree=None)
    assert sizes(bare, folders, target) == {"ar": (4, 4), "diffusion": (4, 4)}


def test_arms_of_one_network_follow_the_text_once(
    folders: tuple[Path, Path], target: Target
) -> None:
    arms, lineage = load_arms(*folders, target)
    assert arms["ar"].drafter is arms["ar_tree"].drafter
    assert arms["diffusion"].drafter is arms["diffusion_tree"].drafter
    assert list(chains(arms)) == list(lineage) == ["ar", "diffusion"]
    assert {name: facts["max_draft"] for name, facts in lineage.items()} == {
        "ar": 4,
        "diffusion": 4,
    }


def test_a_drafter_that_is_not_named_leaves_its_arms_out(
    folders: tuple[Path, Path], target: Target
) -> None:
    ar, diffusion = folders
    assert list(sizes(ArmSettings(), (ar, None), target)) == ["ar", "ar_tree"]
    assert list(sizes(ArmSettings(), (None, diffusion), target)) == ["diffusion", "diffusion_tree"]
    assert sizes(ArmSettings(), (None, None), target) == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: ArmSettings(draft_length=0), "arms.draft_length is 0"),
        (lambda: ArmSettings(diffusion_tree=1), "arms.diffusion_tree is 1"),
        (lambda: ARTree(depth=0), "arms.ar_tree.depth is 0, but has to be a whole number from 1"),
        (lambda: ARTree(depth=9, num_nodes=8), "arms.ar_tree.num_nodes is 8"),
        # Two levels of three: 3 and 3 x 3 are grown.
        (lambda: ARTree(depth=2, top_k=3, num_nodes=13), "a whole number from 2 to 12"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wrong()


def test_a_tree_wider_than_the_vocabulary_is_refused(
    folders: tuple[Path, Path], target: Target
) -> None:
    with pytest.raises(UserError, match=r"arms.ar_tree.top_k is 7, .* from 2 to 6"):
        load_arms(*folders, target, ArmSettings(ar_tree=ARTree(top_k=7)))
    with pytest.raises(UserError, match=r"arms.diffusion_tree is 262, .* from 2 to 261"):
        load_arms(*folders, target, ArmSettings(diffusion_tree=262))


def test_a_drafter_in_the_place_of_the_other_is_refused_by_name(
    folders: tuple[Path, Path], target: Target
) -> None:
    ar, diffusion = folders
    with pytest.raises(ArtifactError, match=r"diffusion holds a DiffusionDrafter.*no ar drafter"):
        load_arms(diffusion, None, target)
    with pytest.raises(ArtifactError, match=r"ar holds a ARDrafter.*no diffusion drafter"):
        load_arms(None, ar, target)


def test_the_configuration_has_the_defaults_of_the_library() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("evaluate")
    assert build_section(cfg, "arms") == ArmSettings()
    assert build_section(cfg, "decode") == EngineSettings(timing=True)
