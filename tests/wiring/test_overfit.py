"""The overfit gate: what is trained is what decodes. A drafter that knows one conversation by heart
has nearly every draft accepted when evaluate.py decodes it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.overfit import ARMS, GATE, NOTHING_LEARNT, Workplace, best_tau

NEW = 49
DRAFTS = {"ar": 4, "diffusion": 7}
SIZES = (
    f"ar_drafter.draft_length={DRAFTS['ar']} ar_drafter.draft_vocab_size=64 "
    f"diffusion_drafter.block_size={DRAFTS['diffusion'] + 1}"
)
BY_HEART = {
    "ar": "fit.max_steps=200 fit.val_every=40 fit.learning_rate=1e-2 num_anchors=null",
    "diffusion": "fit.max_steps=60 fit.val_every=20 fit.learning_rate=3e-3 num_anchors=null "
    "num_layers=2 objective=dpace draw_slots=false",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("overfit") / "work"
    return Workplace(folder=folder, target="tiny", options=SIZES)


@pytest.fixture(scope="module")
def answer(place: Workplace) -> list[int]:
    return place.answer(NEW)


@pytest.fixture(scope="module")
def untaught(place: Workplace, answer: list[int]) -> dict[str, Any]:
    place.train(NOTHING_LEARNT)
    return place.decode(NEW)


@pytest.fixture(scope="module")
def taught(place: Workplace, untaught: dict[str, Any]) -> dict[str, Any]:
    place.train(BY_HEART)
    return place.decode(NEW)


@pytest.mark.parametrize(
    ("num_tokens", "num_drafts", "expected"),
    [
        (49, 4, 4.8),  # 1 by the prompt pass, 9 rounds of 5, one of 3
        (49, 7, 8.0),  # 1 by the prompt pass, 6 rounds of 8
        (2, 7, 1.0),
    ],
)
def test_the_best_tau_is_that_of_full_rounds(
    num_tokens: int, num_drafts: int, expected: float
) -> None:
    assert best_tau(num_tokens, num_drafts) == pytest.approx(expected)


def test_the_answer_to_learn_does_not_repeat_itself(answer: list[int]) -> None:
    assert len(answer) == NEW
    assert len(set(answer)) > NEW // 2


@pytest.mark.parametrize("arm", ARMS)
def test_a_conversation_known_by_heart_is_drafted_right_when_decoded(
    arm: str, answer: list[int], taught: dict[str, Any]
) -> None:
    best = best_tau(len(answer), DRAFTS[arm])
    assert taught[arm]["tokens"] == len(answer) - 1
    assert GATE * best <= taught[arm]["tau"] <= best
    assert taught[arm]["identical"] == 1.0


@pytest.mark.parametrize("arm", ARMS)
def test_a_drafter_that_has_learnt_nothing_does_not_pass(
    arm: str, answer: list[int], untaught: dict[str, Any]
) -> None:
    assert untaught[arm]["tau"] < 0.5 * best_tau(len(answer), DRAFTS[arm])
    assert untaught[arm]["identical"] == 1.0


@pytest.mark.parametrize("arm", ARMS)
def test_training_and_decoding_accept_the_same_drafts(
    arm: str, untaught: dict[str, Any], taught: dict[str, Any]
) -> None:
    for found in (untaught[arm], taught[arm]):
        assert found["decoded"] == found["training_pass"]
        assert found["decoded"] == found["acceptance_by_slot"][arm]
