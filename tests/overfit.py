"""One conversation learnt by heart and decoded again, through the stages that a user types.

Every split must hold a row, and a question falls into one split alone. So the same question stands
in the file that is trained on and in the one that is validated on, and the router, which decides
nothing here, learns from another question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.stages import run

GATE = 0.95  # of the best tau that there can be
ARMS = ("ar", "diffusion")
NOTHING_LEARNT: dict[str, str] = {arm: "fit.max_steps=1 fit.learning_rate=0.0" for arm in ARMS}
_LEARNT, _OTHER = "How do bees find their way back to the hive?", "Why does bread rise?"
_ROWS = {"train": [_LEARNT, _OTHER], "validation": [_LEARNT], "evaluation": [_LEARNT]}
_DATA = (
    "source=file source.file.path='prompts/{split}.jsonl' source.file.validation_split=validation "
    "data.limit=null data.duplicates=keep data.in_evaluation=keep data.router_fraction=0.5"
)
_QUESTION = (
    "source@evaluate.source=file evaluate.source.file.path=prompts/evaluation.jsonl "
    "evaluate.policies=[plain,static_ar,static_diffusion] evaluate.warmup_prompts=0"
)


def best_tau(num_tokens: int, num_drafts: int) -> float:
    """tau of a drafter that is right everywhere, on an answer of `num_tokens`.

    The first token comes from the prompt pass, which is no round. A round in which all drafts are
    right commits them and the target's own token after them, num_drafts + 1 in all; the last one
    commits what is left, since no more is drafted than max_new_tokens has room for, and what
    follows a stop token is cut off. tau is tokens by rounds over the number of rounds.
    """
    by_rounds = num_tokens - 1
    return by_rounds / ceil(by_rounds / (num_drafts + 1))


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A folder, and what is typed at every stage in it."""

    folder: Path
    target: str
    options: str

    def answer(self, max_new_tokens: int) -> list[int]:
        """Let the target answer; the tokens of its answer to the question to learn."""
        prompts = self.folder / "prompts"
        prompts.mkdir(parents=True)
        for split, questions in _ROWS.items():
            rows = [{"id": f"{split}-{i}", "prompt": text} for i, text in enumerate(questions)]
            (prompts / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        self._run(f"data_prep/generate.py {_DATA} generate.max_new_tokens={max_new_tokens}")
        with pa.OSFile(str(self._artefact("conversations/train.arrow"))) as file:
            (row,) = pa.ipc.open_stream(file).read_all().to_pylist()
        return [i for i, learnt in zip(row["input_ids"], row["loss_mask"], strict=True) if learnt]

    def train(self, lessons: Mapping[str, str]) -> None:
        """Both drafters on that answer alone; lessons: settings of each arm's task."""
        for arm, lesson in lessons.items():
            task = f"{arm}_drafter"
            settings = " ".join(f"{task}.{setting}" for setting in lesson.split())
            self._run(f"train.py task={task} {task}.features=memory {settings}")

    def decode(self, max_new_tokens: int) -> dict[str, Any]:
        """What evaluate.py measures, with a router made for these drafters, as it wants one."""
        self._run("data_prep/profile_costs.py")
        self._run("data_prep/log_rounds.py")
        self._run("train.py task=router router.fit.max_steps=1")
        self._run(f"evaluate.py {_QUESTION} evaluate.max_new_tokens={max_new_tokens}")
        metrics = json.loads(self._artefact("evaluation/metrics.json").read_text())
        policies, slots = metrics["policies"], metrics["side_by_side"]
        return {arm: policies[f"static_{arm}"]["overall"] | slots[arm] for arm in ARMS}

    def _artefact(self, name: str) -> Path:
        return self.folder / "artifacts" / self.target / name

    def _run(self, command: str) -> None:
        exact = "dtype=float32 trainer.precision=32-true logger=none"
        run(self.folder, f"{command} {exact} {self.options}", target=self.target)
