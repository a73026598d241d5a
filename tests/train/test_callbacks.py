from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.fakes import TAPS, committed, tiny_ar, tiny_diffusion
from tests.tiny_training import FIT, Recorder, Stop, Training, changed, conversations
from whiflash_infer.artifacts import read_json
from whiflash_infer.cache import KVCache
from whiflash_infer.drafters.base import Arm, Drafter, Drafts, DrawDrafts
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target
from whiflash_infer.trees import chain
from whiflash_train.callbacks import RealTau, prompts_of
from whiflash_train.start_up import (
    PassSize,
    drafter_memory,
    drafter_sources,
    parts,
    show_start,
    training_memory,
)
from whiflash_train.tasks import DrafterFitSettings


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize(("every", "val_every"), [(10, 10), (7, 10), (100, 100), (10, 4)])
def test_the_last_steps_are_kept_and_judged_wherever_the_run_ends(
    every: int, val_every: int, tmp_path: Path
) -> None:
    # A run of 13 steps that keeps every 10th left nothing of the last three (U97).
    fit = changed(max_steps=13, checkpoint_every=every, val_every=val_every)
    recorder, metrics = Training(folder=tmp_path, fit=fit).run()
    assert step_of(tmp_path / "checkpoints/last.ckpt") == 13
    validated = [step for step, _ in recorder.validations]
    assert validated == sorted({*range(val_every, 13, val_every), 13})
    assert metrics["step"] == step_of(tmp_path / "checkpoints/best.ckpt")


def test_the_best_checkpoint_holds_the_weights_of_the_best_validation(tmp_path: Path) -> None:
    judged: list[tuple[float, Tensor]] = []

    class Judge(Recorder):
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            score = [1.0, 5.0, 3.0, 5.0, 2.0][len(judged)]
            pl_module.log("val/tau", score)
            judged.append((score, pl_module.net.table.weight.clone()))

    def silent(net: Any, batch: Any) -> Any:
        loss, means = Training(folder=tmp_path).objective(net, batch)
        return loss, {"loss": means["loss"]}

    fit = changed(val_every=4)
    training = Training(folder=tmp_path, fit=fit, objective=silent, callbacks=(Judge(),))
    _, metrics = training.run()
    assert (metrics["step"], metrics["val/tau"]) == (8, 5.0)
    assert torch.equal(training.net.state_dict()["table.weight"], judged[1][1])


def test_a_run_folder_that_was_moved_resumes_and_keeps_its_best(tmp_path: Path) -> None:
    # Paths inside a checkpoint pointed at the old place (U99).
    straight, expected = Training(folder=tmp_path / "straight").run()
    first = Training(folder=tmp_path / "first", callbacks=(Stop(15),))
    with pytest.raises(InterruptedError):
        first.run()
    shutil.move(tmp_path / "first", tmp_path / "moved")
    for path in (tmp_path / "moved").rglob("*"):
        path.touch()
    best = read_json(tmp_path / "moved/checkpoints/best.json")
    assert best["step"] == 10
    found, metrics = Training(folder=tmp_path / "moved").run(resume=True)
    assert found.steps == straight.steps[10:]
    assert {**metrics, "minutes": 0} == {**expected, "minutes": 0}
    assert not (tmp_path / "first").exists()


def test_the_prompt_of_a_conversation_ends_where_its_first_answer_begins() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
        {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]},
        {"input_ids": [1, 8, 9], "loss_mask": [0, 1, 1]},
    ]
    assert prompts_of(rows, 2) == [[5, 6], [7]]
    assert prompts_of(rows, 9) == [[5, 6], [7], [1]]


def test_real_tau_is_tokens_a_round_of_what_the_engine_decodes(
    target: Target, tmp_path: Path
) -> None:
    class Nothing(Drafter):
        """Remembers no text."""

        kv = KVCache(0)

        def _follow(
            self,
            texts: Texts,
            rows: Sequence[int],
            starts: Sequence[int],
            width: int,
            *,
            full: bool,
        ) -> None: ...

    class Right:
        """Drafts what the target says, two tokens at a time."""

        drafter: Drafter = Nothing()
        max_draft = max_nodes = 2
        can_draw = False

        def draft(
            self,
            texts: Texts,
            rows: Sequence[int],
            num_draft: Sequence[int],
            draw: DrawDrafts | None = None,
        ) -> Drafts:
            longest = max(num_draft)
            texts_ids = [committed(texts, row).tolist() for row in rows]
            ids = torch.tensor([greedy(target, [text], longest) for text in texts_ids])
            finite = torch.ones(len(rows), dtype=torch.bool)
            return Drafts(chain(ids, torch.tensor(list(num_draft))), finite)

    prompts = [[50, 60, 70], [80, 90]]
    # 7 tokens: the prompt pass gives 1, rounds of 3 and 3 the rest; unless the answer stops before.
    decode = RealTau(target, Right, prompts, max_new_tokens=7)
    assert not any(token in target.stop_ids for token in greedy(target, prompts, 7))
    recorder, metrics = Training(folder=tmp_path, callbacks=(decode,)).run()
    assert metrics["val/real_tau"] == 3.0
    assert len(recorder.validations) == 2


def greedy(target: Target, prompts: list[list[int]], count: int) -> list[int]:
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        found += ids[len(prompt) :]
    return found


def test_prompts_without_room_for_an_answer_are_not_decoded(target: Target) -> None:
    def unused() -> Arm:
        raise AssertionError("nothing is decoded here")

    long = [[5] * (target.max_length - 3)]
    callback = RealTau(target, unused, [*long, [5, 6]], max_new_tokens=4)
    assert callback._prompts == [[5, 6]]


def drafter_fit(**values: Any) -> DrafterFitSettings:
    settings = {name: getattr(FIT, name) for name in FIT.__dataclass_fields__}
    settings |= {"tokens_per_batch": None, "decode_prompts": 0, "decode_tokens": 8}
    return DrafterFitSettings(**{**settings, "monitor": "val/tau", **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"monitor": "val/real_tau"}, "then decode_prompts must be above 0"),
        ({"decode_prompts": -1}, "decode_prompts is -1"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"ema": 1.0}, "ema is 1.0: it must be null or lie between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    drafter_fit()
    with pytest.raises(ValueError, match=message):
        drafter_fit(**values)


def test_the_start_names_every_part_with_its_source_and_whether_it_is_trained(
    target: Target,
) -> None:
    # Users were surprised that a head was new but embeddings copied and frozen (U55).
    net = tiny_ar(target.drafter_shape).requires_grad_(True)
    net.lm_head.requires_grad_(False)
    found = {p.name: p for p in parts(net, drafter_sources(net, "target", target.num_layers))}
    assert found["midlayer"].source == f"target layer {target.num_layers - 1}"
    assert "target's rows" in found["lm_head"].source
    assert (found["midlayer"].trained, found["lm_head"].trained) == (True, False)
    assert sum(p.parameters for p in found.values()) == sum(p.numel() for p in net.parameters())
    fresh = {p.name: p for p in parts(net, drafter_sources(net, "random", target.num_layers))}
    assert {p.source for name, p in fresh.items() if name != "lm_head"} == {"random"}

    block = tiny_diffusion(target.drafter_shape, num_layers=2)
    found = {p.name: p for p in parts(block, drafter_sources(block, "target", 8))}
    assert [found[f"layers.{i}"].source for i in (0, 1)] == ["target layer 6", "target layer 7"]

    console = Console(record=True, width=120, file=io.StringIO())
    show_start(console, "ar_drafter", {}, list(fresh.values()), {"parameters": 3 * 2**30})
    text = console.export_text()
    assert "3,072.0" in text
    assert "midlayer" in text
    assert "frozen" in text


def test_memory_is_counted_as_by_hand(target: Target) -> None:
    net = torch.nn.Linear(10, 4)  # 44 numbers
    assert training_memory(net, averaged=True) == {
        "parameters": 176,
        "gradients": 176,
        "optimiser states": 352,
        "averaged weights": 176,
    }
    net.bias.requires_grad_(False)
    assert training_memory(net, averaged=False)["optimiser states"] == 320
    size = PassSize(tokens=100, anchors=10, slots=4)
    memory = drafter_memory(target, size, num_layers=1, vocabulary=300, kept_tokens=1000)
    row = (len(TAPS) + 1) * 64 * 4
    assert memory["target's rows of a pass"] == 100 * row
    assert memory["feature cache"] == 1000 * row
    assert memory["logits of a pass, roughly"] == 3 * 40 * 300 * 4
    assert memory["target's weights"] == sum(p.numel() * 4 for p in target.model.parameters())


def test_best_json_holds_all_validation_metrics(tmp_path: Path) -> None:
    _, metrics = Training(folder=tmp_path, held_out=conversations(5)).run()
    found = json.loads((tmp_path / "checkpoints/best.json").read_text())
    assert set(found) == {"step", "val/loss", "val/tau"}
    assert {k: v for k, v in metrics.items() if k != "minutes"} == found
