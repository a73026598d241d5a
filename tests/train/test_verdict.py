"""What an evaluation says of drafters that are hardly ever accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from whiflash_infer.metrics import Answer, summarise
from whiflash_infer.types import PHASES, Generation, Round
from whiflash_train.evaluation.tables import show

CHECKLIST = ("chat template: abc", "tap layers: [1, 3]", "vocabulary", "rope", "dtype: float32")


def answer(policy: str, accepted: list[int], *, length: int = 3) -> Answer:
    """One round an entry, of four drafts; ten milliseconds in every phase."""
    rounds = [
        Round(
            position=3,
            arm=policy.removeprefix("static_"),
            num_draft=0 if policy == "plain" else 4,
            num_nodes=0 if policy == "plain" else 4,
            accepted=count,
            committed=count + 1,
            lag=0,
            switched=False,
            reason="",
            seconds=dict.fromkeys(PHASES, 0.01),
        )
        for count in accepted
    ]
    tokens = torch.arange(1 + sum(r.committed for r in rounds))
    seconds = 0.1 * len(rounds)
    return Answer(str(length), "chat", policy, Generation(length, tokens, rounds, 0.1, seconds))


def shown(answers: list[Answer], capsys: pytest.CaptureFixture[str]) -> str:
    header: dict[str, Any] = {
        "target": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "prompts": 1,
        "temperature": 0.0,
        "chat_template": "abc",
        "chat": {},
        "tap_layer_ids": [1, 3],
    }
    policies = summarise(answers, bootstrap=10, seed=0)
    show({"header": header, "policies": policies, "ablation": [], "claims": []})
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("accepted", "tau"), [([0] * 10, "1.00"), ([0] * 19 + [1], "1.05"), ([0] * 8 + [1] * 2, None)]
)
def test_a_drafter_that_looks_untrained_brings_a_list_of_what_to_check(
    accepted: list[int], tau: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    # A random head or wrong layers went unnoticed at 1.00 (U45, U53, U57).
    plain, good = answer("plain", [0] * 30), answer("static_ar", [3] * 10)
    told = shown([plain, good, answer("static_diffusion", accepted)], capsys)
    assert "static_ar: tau" not in told
    if tau is None:
        assert "untrained" not in told
    else:
        assert f"static_diffusion: tau {tau}. That is a nearly untrained drafter" in told
        assert all(item in told for item in CHECKLIST)


def test_tau_by_prompt_length_is_told_where_there_are_several_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = [answer("plain", [0] * 8), answer("static_ar", [3] * 2)]
    long = [answer("plain", [0] * 8, length=900), answer("static_ar", [1] * 4, length=900)]
    assert "tau by prompt length" not in shown(short, capsys)
    told = shown(short + long, capsys)
    assert "to 64 (1)" in told
    assert "to 1024 (1)" in told
    assert "static_ar │ 4.00 │ 2.00" in told
