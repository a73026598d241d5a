"""Every example configuration runs on the tiny target, from an empty folder outside the project,
where the machine has no GPU (U119)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.conftest import EXAMPLE, SMALL, Explored, write_rows
from tests.config.leaves import CONF
from tests.stages import ROOT, manifest_of, run
from tests.wiring.test_recipes import COSTS, MACHINES, RECIPES, ROUTER

ELSEWHERE = {*RECIPES, EXAMPLE, "tiny"}  # tests/wiring runs these, but the one of `explored`
HERE = ("demo", "gpu")
FOLDERS = {
    "ar_drafter": "train.py task=ar_drafter ar_drafter.fit.max_steps=2",
    "diffusion_drafter": "train.py task=diffusion_drafter diffusion_drafter.fit.max_steps=2",
    "rounds": "data_prep/log_rounds.py",
    "router": f"train.py task=router {ROUTER}",
}
LIGHT = "ar_drafter.fit.decode_tokens=4 diffusion_drafter.fit.decode_tokens=4"


@pytest.mark.parametrize("name", HERE)
def test_an_example_trains_all_three_tasks(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    write_rows(folder)
    assert not folder.is_relative_to(ROOT)
    options = f"experiment={name} {SMALL} {LIGHT} costs.allow_foreign=true"
    run(folder, f"data_prep/generate.py {options}")
    for made, stage in FOLDERS.items():
        if made == "rounds":
            run(folder, f"data_prep/profile_costs.py {options} {COSTS}")
        script, *own = stage.split()
        run(folder, " ".join([script, options, *own]))
        assert manifest_of(folder, made)["target"]["name"] == "tiny"


def test_the_example_for_two_cores_ran_every_stage(explored: Explored) -> None:
    for made in ("ar_drafter", "diffusion_drafter", "router"):
        assert (explored.folder / "moved" / made / "manifest.json").is_file()


def test_every_example_is_run_here_or_with_the_recipes() -> None:
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} == {*ELSEWHERE, *HERE}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_trains_in_one_process_as_well(machine: str, explored: Explored) -> None:
    single = "trainer.devices=1 trainer.num_nodes=1 trainer.strategy=auto"
    places = f"paths.conversations=moved/conversations paths.diffusion_drafter={machine}"
    run(
        explored.folder,
        f"train.py task=diffusion_drafter experiment=gpu machine={machine} {single} {SMALL} "
        f"{places} {LIGHT} diffusion_drafter.fit.max_steps=2 hydra.run.dir=runs/{machine}",
    )
    assert (explored.folder / machine / "manifest.json").is_file()


def test_every_machine_is_run() -> None:
    assert {path.stem for path in (CONF / "machine").glob("*.yaml")} == {*MACHINES}
