from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.utils import get_object

from tests.config.leaves import ROOT, all_leaves
from tests.config.recording import Reads, recorded
from tests.data.fake_server import FakeServer
from tests.stages import run

EXAMPLE = "smollm2_cpu"  # which has a feature cache too
SMALL = (
    "device=cpu source=file source.file.path=prompts.jsonl data.validation_fraction=0.25 "
    "data.router_fraction=0.25 generate.max_new_tokens=16"
)
STAGES = (
    "data_prep/prepare.py source.file.path=answered.jsonl paths.conversations=moved/prepared "
    "data.mask.max_length=96",
    "data_prep/generate.py engine=openai engine.urls=[{server}] paths.conversations=moved/asked",
    "data_prep/generate.py",
    "data_prep/cache_features.py features.margin_gb=1e9 features.force=true",
    "train.py task=ar_drafter ar_drafter.fit.max_steps=2 ar_drafter.fit.decode_prompts=1",
    "train.py task=diffusion_drafter diffusion_drafter.fit.max_steps=2",
    "data_prep/profile_costs.py costs.contexts=[16] costs.lags=[1] costs.batches=[1] "
    "costs.repeats=2",
    "data_prep/log_rounds.py rounds.margin_gb=1e9 rounds.force=true",
    "data_prep/log_rounds.py rounds.mode=decode rounds.decode_limit=1",
    "train.py task=router router.fit.max_steps=2 router.ceiling_folds=2",
    "evaluate.py evaluate.limit=1 evaluate.max_new_tokens=8 evaluate.policies=[plain,hazard]",
    "evaluate.py check=lossless dtype=float32 evaluate.lossless_prompts=1 "
    "evaluate.lossless_max_new_tokens=8",
    "evaluate.py check=replay dtype=float32 evaluate.replay_prompts=1 evaluate.max_new_tokens=8",
)
MOVED = (
    "conversations",
    "features",
    "ar_drafter",
    "diffusion_drafter",
    "costs",
    "rounds",
    "visited_rounds",
    "router",
    "evaluation",
)


@dataclass(frozen=True)
class Explored:
    """A folder in which every stage has run, and what was read of the configuration."""

    folder: Path
    reads: Reads


@pytest.fixture(scope="session")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    """Begun in an empty folder, outside the project, with every path moved."""
    folder = tmp_path_factory.mktemp("explored") / "work"
    folder.mkdir()
    write_rows(folder)
    moved = " ".join(f"paths.{name}=moved/{name}" for name in MOVED)
    options = f"experiment={EXAMPLE} {SMALL} costs.allow_foreign=true {moved}"
    made = {get_object(leaf.target) for leaf in all_leaves() if leaf.target}
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeServer() as server,
        recorded(one for one in made if isinstance(one, type)) as reads,
    ):
        patch.setenv("NO_PROXY", "127.0.0.1")
        for stage in STAGES:
            script, *own = stage.format(server=server.url).split()
            run(folder, " ".join([script, options, *own]))
    return Explored(folder, reads)


def write_rows(folder: Path) -> None:
    """Prompts to answer; and answered rows of which some are twice there, or among the evaluation
    prompts, or running text, or longer than a row may be."""
    prompts = [{"prompt": f"Question {i}?", "category": "ab"[i % 2]} for i in range(24)]
    answered = [{"prompt": f"Question {i}?", "answer": "An answer."} for i in range(8)]
    evaluation = (ROOT / "data_prep/prompts/evaluation.jsonl").read_text().splitlines()[0]
    asked = json.loads(evaluation)["messages"][0]["content"]
    answered += [answered[0], {"prompt": asked, "answer": "With silk."}]
    answered += [{"text": "Some words."}, {"prompt": "Why?", "answer": "Because. " * 40}]
    write_lines(folder / "prompts.jsonl", prompts)
    write_lines(folder / "answered.jsonl", answered)


def write_lines(path: Path, rows: Sequence[object]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))
