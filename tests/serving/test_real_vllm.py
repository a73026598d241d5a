"""The proposer in vLLM itself, where it is installed (docs/vllm.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import TAPS, random_ids
from tests.infer.test_pretrained import write_drafters, write_router
from whiflash_infer.sources import RandomTiny
from whiflash_infer.target import Target

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
MOST_DRAFTS = 4
SITUATIONS: dict[str, dict[str, Any]] = {
    "one after the other": {"max_num_seqs": 1},
    "together": {"max_num_seqs": 8},
    "no prefix caching": {"max_num_seqs": 4, "enable_prefix_caching": False},
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 48},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose heads are wide enough for vLLM's kernels, and drafters and a router for it."""
    folder = tmp_path_factory.mktemp("served")
    source = RandomTiny(cache_dir=str(folder), seed=0, hidden_size=128, num_layers=8).resolve()
    target = Target.from_pretrained(source, name="tiny", tap_layer_ids=TAPS, dtype="float32")
    write_drafters(folder, target)
    write_router(folder, target)
    (folder / "target").symlink_to(source)
    return folder


def prompts() -> list[tuple[str, list[int], int]]:
    shared = random_ids(150, seed=99).tolist()
    return [(str(i), shared + random_ids(5 + 9 * i, seed=i).tolist(), 24) for i in range(8)]


def run(folder: Path, situation: str, policy: str | None) -> dict[str, Any]:
    engine = {
        "model": str(folder / "target"),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "seed": 0,
        **SITUATIONS[situation],
    }
    if policy is not None:
        engine |= {
            "speculative_config": {
                "method": "custom_class",
                "model": "whiflash_infer.serving.vllm.RoutedProposer",
                "num_speculative_tokens": MOST_DRAFTS,
            },
            "additional_config": {
                "whiflash": {
                    **{name: str(folder / name) for name in ("ar", "diffusion", "router")},
                    "policy": policy,
                    "feature_gib": 0.01,
                }
            },
        }
    spec = {"engine": engine, "prompts": prompts(), "aborted": "3" if "chunks" in situation else ""}
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps(spec))
    command = [sys.executable, str(ROOT / "tests/serving/real_vllm.py"), str(asked), str(answered)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(answered.read_text())


@pytest.mark.parametrize("situation", SITUATIONS)
def test_outputs_are_those_of_vllm_without_drafts(folder: Path, situation: str) -> None:
    plain, routed = run(folder, situation, None), run(folder, situation, "random")
    finished = {name for name, _, _ in prompts()} - ({"3"} if situation == "chunks" else set())
    assert set(plain["outputs"]) == finished
    assert routed["outputs"] == plain["outputs"]
    counters = routed["counters"]
    assert counters["fallbacks"] == {}
    assert set(counters["arms"]) == {"plain", "ar", "diffusion"}
    assert all(counters["arms"][arm]["drafted"] > 0 for arm in ("ar", "diffusion"))
