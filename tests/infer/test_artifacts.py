from __future__ import annotations

from pathlib import Path

import pytest

from whiflash_infer.artifacts import new_artifact, read_manifest, require_match, write_json
from whiflash_infer.errors import ArtifactError
from whiflash_infer.routing.costs import (
    CostModel,
    DeviceIdentity,
    PassCosts,
    load_costs,
    save_costs,
)


def make(path: Path, content: str) -> None:
    with new_artifact(path, {"seed": 1}) as folder:
        (folder / "data").write_text(content)


def test_an_artefact_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    make(path, "old")
    make(path, "new")
    assert (path / "data").read_text() == "new"
    assert read_manifest(path, made_by="make it")["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_a_run_that_dies_half_way_leaves_the_old_artefact(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    make(path, "old")

    def die() -> None:
        with new_artifact(path, {}) as folder:
            (folder / "data").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    assert (path / "data").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_a_run_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    # The next run used to remove the old artefact, which stood aside, before its own was complete.
    path = tmp_path / "thing"
    make(path, "old")
    path.rename(tmp_path / ".thing.old")

    def die() -> None:
        with new_artifact(path, {}):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    assert (path / "data").read_text() == "old"
    make(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_a_missing_artefact_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"does not exist. Make it with: python make_it.py"):
        read_manifest(tmp_path / "absent", made_by="python make_it.py")
    (tmp_path / "half").mkdir()
    with pytest.raises(ArtifactError, match="is incomplete"):
        read_manifest(tmp_path / "half", made_by="python make_it.py")


def test_a_folder_of_another_format_version_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "manifest.json", {"format_version": 99})
    with pytest.raises(ArtifactError, match="format_version is 99"):
        read_manifest(tmp_path, made_by="x")


def test_a_misfit_names_every_field_with_both_values(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        require_match(
            tmp_path, {"taps": [1, 2], "block": 8}, {"taps": [1, 3], "block": 16}, made_by="x"
        )
    assert "taps: the artefact has [1, 2], this run has [1, 3]" in str(caught.value)
    assert "block: the artefact has 8, this run has 16" in str(caught.value)


def test_a_cost_profile_survives_the_disk_and_is_refused_on_another_device(tmp_path: Path) -> None:
    here = DeviceIdentity(device="abacus", threads=2, dtype="float32")
    prices = PassCosts(
        verify=[(0.1, 0.0), (0.2, 1e-5)],
        draft={"ar": [0.0, 0.01]},
        catch_up={"ar": (0.001, 1e-4)},
        overhead=0.002,
    )
    costs = CostModel(device=here, target="t", nodes={"ar": [0, 1]}, batches={1: prices})
    path = tmp_path / "costs.json"
    save_costs(path, costs, measurements={})
    options = {"target": "t", "made_by": "profile", "allow_foreign": False}
    assert load_costs(path, here=here, **options) == costs
    elsewhere = DeviceIdentity(device="abacus", threads=8, dtype="float32")
    with pytest.raises(ArtifactError, match="threads was 2 and is 8"):
        load_costs(path, here=elsewhere, **options)
    assert load_costs(path, here=elsewhere, **{**options, "allow_foreign": True}) == costs
