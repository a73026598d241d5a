from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from whiflash_infer.env import Gpu, Installation, findings, installation, main

FINE = Installation(
    python="3.12.1",
    system="Linux",
    versions={"torch": "2.13.0", "transformers": "5.24.0", "sqlalchemy": "2.0.3"},
    requirements={},
    builds={"torch": "2.13.0+cu130"},
    kernels=["sm_80", "sm_90", "compute_90"],
    cpu="a processor",
    cores=8,
    threads=8,
    memory_gib=64.0,
    cpu_bfloat16=False,
    driver="580.10",
    cuda="13.0",
    gpus=[Gpu(name="a GPU", memory_gib=80.0, capability="9.0", bfloat16=True)],
)


def with_gpu(capability: str) -> list[Gpu]:
    return [replace(FINE.gpus[0], capability=capability)]


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own; what `path` holds counts as installed, before anything else."""
    extra = {} if path is None else {"PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-m", "whiflash_infer.env", *arguments],
        env={**os.environ, **extra, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def install(folder: Path, name: str, version: str, *asks: str) -> None:
    """A distribution's metadata, as an installer writes it."""
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {ask}" for ask in asks]
    (place / "METADATA").write_text("\n".join(lines) + "\n")


def test_an_installation_without_known_trouble_has_no_findings() -> None:
    assert findings(FINE) == []


@pytest.mark.parametrize(
    ("change", "found", "remedy"),
    [
        (
            {"versions": {**FINE.versions, "optuna": "2.10.1"}},
            "optuna 2.10.1 with sqlalchemy 2.0.3",
            "sqlalchemy<2",
        ),
        (
            {"builds": {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cu130"}, "driver": None},
            "torchvision 0.28.0+cu130 with torch 2.13.0+cpu",
            "pip uninstall torchvision",
        ),
        (
            {"builds": {"torch": "2.13.0+cu130", "torchaudio": "2.11.1+cpu"}},
            "torchaudio 2.11.1+cpu with torch 2.13.0+cu130",
            "pip uninstall torchaudio",
        ),
        (
            {"builds": {"torch": "2.13.0+cpu"}, "gpus": [], "kernels": []},
            "torch 2.13.0+cpu with the NVIDIA driver 580.10",
            "CUDA build",
        ),
        ({"gpus": with_gpu("7.5")}, "capability 7.5", "names the GPU's architecture"),
        (
            {"gpus": with_gpu("12.0"), "kernels": ["sm_80", "sm_90a"]},
            "capability 12.0",
            "names the GPU's architecture",
        ),
        (
            {"broken": "cannot import name 'Cache'"},
            "whiflash_infer with what is installed",
            "new environment",
        ),
    ],
)
def test_a_pair_known_to_go_wrong_is_found_with_what_to_do(
    change: dict[str, Any], found: str, remedy: str
) -> None:
    [one] = findings(replace(FINE, **change))
    assert found in one.found
    assert remedy in one.remedy
    assert one.happens


@pytest.mark.parametrize(
    "change",
    [
        {"versions": {"optuna": "2.10.1", "sqlalchemy": "1.4.54"}},
        {"versions": {"optuna": "4.2.0", "sqlalchemy": "2.0.3"}},
        {"builds": {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, "driver": None},
        {"builds": {"torch": "2.13.0", "torchvision": "0.28.0"}},  # macOS
        {"gpus": with_gpu("8.9")},  # runs what was compiled for 8.0
        {"gpus": with_gpu("12.0")},  # translates compute_90
    ],
)
def test_a_pair_that_only_resembles_one_is_not_found(change: dict[str, Any]) -> None:
    assert findings(replace(FINE, **change)) == []


@pytest.mark.parametrize(
    ("asked", "bad"),
    [
        ("transformers<5.20,>=5.16", True),
        ("transformers>=5.16", False),
        ("transformers<5.20; extra == 'old'", False),
        ("tokenizers<0.1", False),  # not installed
        ("torch==2.13.0", False),  # a build of it is it
        ("torch==2.13.0+cpu", True),
    ],
)
def test_a_package_that_asks_for_another_version_of_a_shared_one_is_found(
    asked: str, bad: bool
) -> None:
    installed = replace(
        FINE,
        versions={**FINE.versions, "vllm": "0.32.0"},
        requirements={"vllm": [asked]},
    )
    assert [one.found.split(" with ")[0] for one in findings(installed)] == ["vllm 0.32.0"] * bad


def test_what_training_asks_for_counts_where_training_is_installed() -> None:
    asks = {"whiflash": ["lightning>=2.5; extra == 'train'"]}
    versions = {"whiflash": "0.1.0", "lightning": "2.1.0"}
    alone = replace(FINE, versions=versions, requirements=asks)
    assert findings(alone) == []
    training = replace(alone, versions={**versions, "hydra-core": "1.3.2"})
    assert [one.found for one in findings(training)] == ["whiflash 0.1.0 with lightning 2.1.0"]


def test_what_is_installed_here_is_told_as_the_packages_tell_it() -> None:
    here = installation()
    assert here.versions["transformers"] == transformers.__version__
    assert here.builds["torch"] == torch.__version__
    assert here.threads == torch.get_num_threads()
    assert here.broken == ""
    assert len(here.gpus) == torch.cuda.device_count()
    assert 1 <= here.cores <= (os.cpu_count() or 1)


def test_this_environment_is_fine_and_the_tables_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "Nothing is installed that is known to go wrong together." in shown
    assert re.search(rf"transformers\W+{re.escape(transformers.__version__)}", shown)
    assert "dtypes on the processor" in shown


def test_the_command_ends_with_1_and_says_what_to_do_where_an_engine_clashes(
    tmp_path: Path,
) -> None:
    install(tmp_path, "vllm", "0.32.0", "transformers<5.1,>=5.0", "numpy>=1")
    done = run(path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert f"vllm 0.32.0 with transformers {transformers.__version__}" in done.stdout
    assert "vllm asks for transformers<5.1,>=5.0" in done.stdout
    assert "in an environment of its own" in done.stdout


def test_the_json_holds_every_version_and_finding(tmp_path: Path) -> None:
    install(tmp_path, "sqlalchemy", "2.0.30")
    install(tmp_path, "optuna", "2.10.1")
    done = run("--json", path=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["versions"]["sqlalchemy"] == "2.0.30"
    assert told["versions"]["sglang"] is None
    assert told["builds"]["torch"] == torch.__version__
    [one] = told["known_bad"]
    assert one["found"] == "optuna 2.10.1 with sqlalchemy 2.0.30"
    assert one["remedy"] == "pip install 'sqlalchemy<2'"


def test_a_companion_of_torch_is_told_by_its_build_though_it_cannot_be_imported(
    tmp_path: Path,
) -> None:
    home = tmp_path / "torchvision"
    home.mkdir()
    (home / "__init__.py").write_text("raise RuntimeError('torchvision::nms does not exist')\n")
    (home / "version.py").write_text("__version__ = '0.28.0+other'\ngit_version = 'abc'\n")
    done = run("--json", path=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert told["builds"]["torchvision"] == "0.28.0+other"
    [one] = told["known_bad"]
    assert "the decoder cannot be imported" in one["happens"]


def test_a_decoder_that_cannot_be_imported_is_told_instead_of_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('half an installation')\n")
    done = run(path=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the decoder cannot be imported: half an installation" in done.stdout
    assert "Traceback" not in done.stderr


def test_neither_lightning_nor_hydra_is_needed(tmp_path: Path) -> None:
    for name in ("lightning", "hydra", "omegaconf", "wandb", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
    done = run("--json", path=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
