"""What the verdict says of policies whose throughput is known, and of a router on known hazards."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jaxtyping import Float
from rich.console import Console
from scipy.stats import bootstrap
from torch import Tensor

from tests.routing.worlds import REGIME_COLUMNS, TWO, plain_costs, two_regimes
from whiflash_infer.routing.policies import BasePolicy, StaticPolicy
from whiflash_infer.routing.policies.base import full_length
from whiflash_infer.routing.protocol import Decisions, RoundStates
from whiflash_infer.routing.replay import Replayed, replay, stack_texts
from whiflash_train.verdict import (
    Gain,
    Verdict,
    after_training,
    arm_gap,
    before_training,
    by_category,
    one_choice,
    paired_gain,
    regret,
    show,
)

ARMS = ("plain", "ar", "diffusion")
CATEGORIES = ["chat"] * 20 + ["json"] * 20


def played(
    seconds: Sequence[float] | np.ndarray,
    *,
    tokens: Sequence[int] | np.ndarray | None = None,
    arms: Sequence[str] = ("ar",),
    num_draft: int = 4,
    num_rounds: int = 10,
) -> Replayed:
    """One text for each entry of `seconds`, of 40 tokens in 10 equal rounds unless told otherwise,
    which take `arms` in turn."""
    count, total = len(seconds), len(seconds) * num_rounds
    per_text = np.full(count, 40) if tokens is None else np.array(tokens)
    committed = np.repeat(per_text // num_rounds, num_rounds)
    chosen = np.array([ARMS.index(arm) for arm in arms])
    step = np.tile(np.arange(num_rounds), count)
    return Replayed(
        arms=ARMS,
        num_texts=count,
        text=np.repeat(np.arange(count), num_rounds),
        position=20 + step * committed,
        arm=chosen[step % len(chosen)],
        num_draft=np.full(total, num_draft),
        accepted=committed - 1,
        committed=committed,
        lag=np.zeros(total, dtype=int),
        switched=(step > 0) & (len(chosen) > 1),
        seconds=np.repeat(np.array(seconds) / num_rounds, num_rounds),
        expected=np.full(total, np.nan),
    )


def uneven(middle: float, seed: int, *, spread: float = 0.02) -> np.ndarray:
    """Seconds of 40 texts, by what each is multiplied from policy to policy."""
    return middle * (1 + spread * np.random.default_rng(seed).standard_normal(40))


LENGTHS = np.random.default_rng(0).uniform(0.5, 2.0, 40)  # texts differ far more than policies do
PLAIN = played(LENGTHS * uneven(1.2, 1), arms=["plain"], num_draft=0)
AR = played(LENGTHS * uneven(1.0, 2))
DIFFUSION = played(LENGTHS * uneven(1.1, 3), arms=["diffusion"], num_draft=7)
STATICS = {"plain": PLAIN, "static_ar": AR, "static_diffusion": DIFFUSION}
ORACLES = {
    "oracle_round": played(LENGTHS * 0.72, arms=["ar", "plain"]),
    "oracle_path": played(LENGTHS * 0.7, arms=["ar", "plain"]),
}
ENTROPY = played(LENGTHS * uneven(0.98, 4), arms=["ar", "plain"])
CEILING = played(LENGTHS * uneven(0.8, 5), arms=["ar", "plain"])
LOW_CEILING = played(LENGTHS * uneven(0.99, 5), arms=["ar", "plain"])


def told_after(
    hazard: Replayed,
    *,
    ceiling: Replayed | None = CEILING,
    others: Mapping[str, Replayed] | None = None,
    categories: Sequence[str] = CATEGORIES,
) -> Verdict:
    return after_training(hazard, STATICS, ORACLES, ceiling, ENTROPY, others or {}, categories)


def test_a_gain_is_the_ratio_of_pooled_tokens_a_second_with_the_paired_bootstrap_interval() -> None:
    rng = np.random.default_rng(7)
    theirs = rng.uniform(1, 5, 30)
    ours = theirs * rng.uniform(0.7, 1.1, 30)
    gain = paired_gain(played(ours), played(theirs))
    assert gain.ratio == pytest.approx(theirs.sum() / ours.sum())
    reference = bootstrap(
        (ours, theirs),
        lambda a, b, axis: b.sum(axis) / a.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=1,
    ).confidence_interval
    assert gain.low == pytest.approx(reference.low, abs=0.01)
    assert gain.high == pytest.approx(reference.high, abs=0.01)
    assert paired_gain(played(ours), played(theirs), seed=0) == gain
    assert paired_gain(played(ours), played(theirs), seed=1) != gain


def test_the_same_gain_in_every_text_has_no_interval_however_much_texts_differ() -> None:
    gain = paired_gain(played(LENGTHS), played(LENGTHS * 1.25))
    assert [gain.ratio, gain.low, gain.high] == pytest.approx([1.25] * 3)


def test_tokens_may_differ_between_policies() -> None:
    gain = paired_gain(played([1.0, 1.0], tokens=[30, 50]), played([1.0, 1.0], tokens=[20, 20]))
    assert gain.ratio == pytest.approx(2.0)


def test_texts_that_are_left_out_do_not_widen_the_interval() -> None:
    ours, theirs = played(LENGTHS * uneven(0.9, 6)), played(LENGTHS)
    some = list(range(10, 20))
    alone = [played(replayed.by_text()[some, 1]) for replayed in (ours, theirs)]
    found, expected = paired_gain(ours.of(some), theirs.of(some)), paired_gain(*alone)
    assert [found.ratio, found.low, found.high] == pytest.approx(
        [expected.ratio, expected.low, expected.high]
    )


def test_categories_part_the_rounds() -> None:
    parts = by_category(played([1.0, 2.0, 4.0]), ["json", "chat", "json"])
    assert list(parts) == ["chat", "json"]
    assert parts["json"].total_seconds == pytest.approx(5.0)
    assert parts["chat"].tokens == 40
    assert set(parts["json"].text.tolist()) == {0, 2}


def test_the_gap_is_between_the_best_static_arm_the_next_and_plain() -> None:
    gap = arm_gap(
        {
            "plain": played([4.0, 4.0]),
            "static_ar": played([1.0, 1.0]),
            "static_diffusion": played([1.5, 1.5]),
        }
    )
    assert (gap.best, gap.conversations) == ("static_ar", 2)
    assert gap.tokens_per_s == pytest.approx(
        {"plain": 10.0, "static_ar": 40.0, "static_diffusion": 80 / 3}
    )
    assert gap.over_second is not None
    assert gap.over_second.ratio == pytest.approx(1.5)
    assert gap.over_plain is not None
    assert gap.over_plain.ratio == pytest.approx(4.0)
    assert arm_gap({"static_ar": played([1.0])}).over_second is None


def test_regret_is_against_the_static_arm_that_is_fastest_in_each_text() -> None:
    # 80 tokens: the fastest arms take 1 + 2 = 3 seconds, the policy takes 4.
    statics = {"plain": played([1.0, 5.0]), "static_ar": played([3.0, 2.0])}
    assert regret(played([2.0, 2.0]), statics) == pytest.approx(1 - (80 / 4) / (80 / 3))
    assert regret(played([1.0, 1.0]), statics) == pytest.approx(-0.5)


def test_drafts_that_the_end_of_the_text_cut_short_are_not_another_choice() -> None:
    same = played([1.0], tokens=[100], num_rounds=20, num_draft=4)
    assert one_choice(same) == ("ar", 4, 1.0)
    # A text ends at 120: of 5 tokens a round, the last one begins at 115 and may have been cut.
    cut = same.num_draft.copy()
    cut[-1] = 3
    assert one_choice(_with(same, num_draft=cut)) == ("ar", 4, 1.0)
    cut[:5] = 3
    assert one_choice(_with(same, num_draft=cut)) == ("ar", 4, pytest.approx(14 / 19))


def _with(replayed: Replayed, **changed: Any) -> Replayed:
    names = ("arms", "num_texts", "text", "position", "arm", "num_draft", "accepted", "committed")
    names += ("lag", "switched", "seconds", "expected")
    return Replayed(**{name: getattr(replayed, name) for name in names} | changed)


def sentences_of(verdict: Verdict) -> str:
    return "\n".join(verdict.sentences)


def test_a_low_ceiling_is_not_worth_a_router() -> None:
    statics = {"plain": played([2.0] * 40), "static_diffusion": played([1.013] * 40)}
    oracles = {"oracle_path": played([0.9] * 40)}
    verdict = before_training(statics, oracles, played([1.0] * 40), CATEGORIES)
    assert verdict.sentences[0] == (
        "not worth routing here: best static arm diffusion, ceiling +1.3 % (1.3 to 1.3)"
    )
    assert verdict.numbers["gains"]["ceiling"]["ratio"] == pytest.approx(1.013)


def test_a_high_ceiling_is_told_beside_what_hindsight_would_gain() -> None:
    told = before_training(STATICS, ORACLES, played(LENGTHS * 0.8), CATEGORIES).sentences[0]
    assert told.startswith("routing can pay: ceiling +2")
    assert "over static_ar; with hindsight +4" in told
    assert "partly luck" in told


def test_without_a_ceiling_only_hindsight_limits_what_can_be_gained() -> None:
    told = before_training(STATICS, ORACLES, None, CATEGORIES).sentences[0]
    assert told.startswith("routing may pay: with hindsight +4")
    near = {"oracle_path": played(LENGTHS * uneven(0.98, 2))}
    told = before_training(STATICS, near, None, CATEGORIES).sentences[0]
    assert told.startswith("not worth routing here: best static arm ar, hindsight +2.0 %")


def test_routing_by_category_alone_is_the_best_static_arm_of_each() -> None:
    # chat: plain 2, ar 1; json: plain 1, ar 1.5. ar alone takes 2.5 seconds, the best arms take 2.
    halves = np.array([1.0] * 20 + [0.0] * 20)
    statics = {"plain": played(2 * halves + (1 - halves)), "static_ar": played(1.5 - halves / 2)}
    verdict = before_training(statics, {"oracle_path": played([0.5] * 40)}, None, CATEGORIES)
    assert "routing by category alone gives +25.0 %" in verdict.sentences
    assert verdict.numbers["arm_gap"]["by_category"]["chat"]["best"] == "static_ar"
    assert verdict.numbers["arm_gap"]["by_category"]["json"]["best"] == "plain"
    assert verdict.numbers["arm_gap"]["by_category"]["json"]["over_second"][
        "ratio"
    ] == pytest.approx(1.5)
    same = before_training(STATICS, ORACLES, None, CATEGORIES)
    assert "static_ar is the best static arm in every category" in same.sentences
    only = before_training(STATICS, ORACLES, None, ["chat"] * 40)
    assert "category" not in sentences_of(only)


def test_few_conversations_are_told() -> None:
    first = list(range(12))
    few = {name: static.of(first) for name, static in STATICS.items()}
    path = {"oracle_path": ORACLES["oracle_path"].of(first)}
    told = before_training(few, path, None, CATEGORIES).sentences
    assert "the validation conversations are few (12): intervals are wide" in told
    assert "few" not in sentences_of(before_training(STATICS, ORACLES, None, CATEGORIES))


def test_a_router_that_pays_is_told_with_its_share_of_the_ceilings_gain() -> None:
    # Exactly 10 % and 25 % more tokens a second than the AR arm: 40 % of the gain.
    seconds = AR.by_text()[:, 1]
    hazard = played(seconds / 1.1, arms=["ar", "plain"])
    ceiling = played(seconds / 1.25, arms=["ar", "plain"])
    verdict = told_after(hazard, ceiling=ceiling)
    assert verdict.sentences[0] == (
        "routing pays: hazard +10.0 % (10.0 to 10.0) over static_ar, "
        "40 % of the predictable ceiling's gain"
    )
    numbers = verdict.numbers
    assert numbers["collapsed"] is False
    assert numbers["share_of_ceiling"] == pytest.approx(1.1 / 1.25)
    assert numbers["share_of_ceiling_gain"] == pytest.approx(0.4)
    path = ORACLES["oracle_path"].total_seconds
    assert numbers["share_of_oracle"] == pytest.approx(path / (seconds.sum() / 1.1))


def test_a_router_that_always_does_the_same_has_collapsed() -> None:
    verdict = told_after(AR)
    assert verdict.sentences[0] == (
        "the router has collapsed: it uses ar in 100 % of rounds and does not beat static_ar"
    )
    assert verdict.numbers["collapsed"] is True
    assert verdict.numbers["commonest_choice"] == {"arm": "ar", "num_draft": 4, "share": 1.0}
    # One shorter length may be better than the full one, and is no routing all the same.
    shorter = told_after(played(LENGTHS * uneven(0.9, 8), num_draft=2))
    assert "routing pays: hazard +1" in shorter.sentences[0]
    assert shorter.sentences[1] == (
        "the router has collapsed: it uses ar with 2 drafts in 100 % of rounds, which alone is its "
        "gain over static_ar"
    )


def test_a_router_that_gains_nothing_of_a_high_ceiling_has_collapsed() -> None:
    idle = told_after(played(LENGTHS * uneven(1.0, 9), arms=["ar", "plain"]))
    assert idle.numbers["collapsed"] is True
    assert "is no gain, although the ceiling offers +2" in idle.sentences[0]
    # Where there is nothing to gain it has done nothing wrong.
    right = told_after(played(LENGTHS * uneven(1.0, 9), arms=["ar", "plain"]), ceiling=LOW_CEILING)
    assert right.numbers["collapsed"] is False
    assert right.sentences[0].startswith("not worth routing here: best static arm ar, ceiling +")


def test_a_router_that_loses_is_told_so() -> None:
    slow = told_after(played(LENGTHS * uneven(1.2, 9), arms=["ar", "plain"]), ceiling=None)
    assert slow.sentences[0].startswith("routing loses: hazard -1")
    assert slow.numbers["share_of_ceiling"] is None


def test_a_category_in_which_the_router_is_below_the_best_static_arm_is_named() -> None:
    seconds = AR.by_text()[:, 1]
    factors = np.array([0.8] * 20 + [1 / 0.96] * 20)
    verdict = told_after(played(seconds * factors, arms=["ar", "plain"]))
    assert "json: hazard is 4.0 % below static_ar (4.0 to 4.0)" in verdict.sentences
    assert "chat:" not in sentences_of(verdict)
    nearly = np.array([0.8] * 20 + [1 / 0.98] * 20)
    verdict = told_after(played(seconds * nearly, arms=["ar", "plain"]))
    assert "below" not in sentences_of(verdict)


def test_other_policies_that_are_better_are_named() -> None:
    seconds = ENTROPY.by_text()[:, 1]
    hazard = played(seconds / 1.05, arms=["ar", "plain"])
    delta, bandit = played(seconds / 1.155, arms=["ar", "diffusion"]), played(seconds)
    verdict = told_after(hazard, others={"delta": delta, "bandit": bandit})
    assert "hazard +5.0 % (5.0 to 5.0) over the entropy gate" in verdict.sentences
    assert "delta is better here: +10.0 % (10.0 to 10.0) over hazard" in verdict.sentences
    assert "bandit" not in sentences_of(verdict)


def test_numbers_hold_every_policy_as_json() -> None:
    verdict = told_after(ENTROPY, others={"delta": DIFFUSION})
    numbers = json.loads(json.dumps(verdict.numbers))
    expected = [*STATICS, "entropy", "delta", "hazard", "ceiling", *ORACLES]
    assert list(numbers["policies"]) == expected
    cell = numbers["policies"]["entropy"]
    seconds = ENTROPY.total_seconds
    assert cell["tokens_per_s"] == pytest.approx(1600 / seconds)
    assert cell["tau"] == 4.0
    assert cell["seconds_per_round"] == pytest.approx(seconds / 400)
    assert cell["rounds"] == 400
    assert cell["switches_per_100_rounds"] == 90.0  # all but the first round of each text
    assert cell["arms"] == {"plain": 0.5, "ar": 0.5}
    assert cell["share_of_oracle"] == pytest.approx(ORACLES["oracle_path"].total_seconds / seconds)
    assert list(cell["by_category"]) == ["chat", "json"]
    chat = cell["by_category"]["chat"]
    assert chat["conversations"] == 20
    assert chat["tokens_per_s"] == pytest.approx(800 / ENTROPY.by_text()[:20, 1].sum())
    assert numbers["best_static"] == "static_ar"


@pytest.mark.parametrize("width", [60, 200])
def test_the_tables_show_policies_categories_and_sentences(width: int) -> None:
    for verdict in (told_after(ENTROPY), before_training(STATICS, ORACLES, None, CATEGORIES)):
        console = Console(file=io.StringIO(), width=width)
        show(console, verdict)
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        for name in [*verdict.numbers["policies"], "chat", "json", "ar 50%"]:
            assert name in shown
        for sentence in verdict.sentences:
            assert sentence in shown
        speed = verdict.numbers["policies"]["static_ar"]["tokens_per_s"]
        assert f"{speed:.1f}" in shown


def test_a_gain_reads_as_percent() -> None:
    assert str(Gain(1.084, 1.051, 1.116)) == "+8.4 % (5.1 to 11.6)"
    assert str(Gain(0.96, 0.935, 0.988)) == "-4.0 % (-6.5 to -1.2)"
    assert Gain(1.01, 0.99, 1.03).is_noise
    assert not Gain(1.01, 1.001, 1.03).is_noise


class KnowsTheRegime(BasePolicy):
    """Without noise the features hold the regime: AR in the first one, the block drafter in the
    second."""

    name = "knows"
    arms = ("ar", "diffusion")
    needs_features = True

    def read(self, features: Float[Tensor, "N F"]) -> Float[Tensor, "N X"]:
        return features[:, REGIME_COLUMNS]

    def decide(
        self,
        beliefs: Float[np.ndarray, "N X"],
        states: RoundStates,
        memory: Float[np.ndarray, "N M"],
    ) -> Decisions:
        return full_length(1 + beliefs.argmax(1), states)


def test_on_known_hazards_knowing_the_regime_pays_and_one_arm_throughout_has_collapsed() -> None:
    world = two_regimes(40, 128, seed=3, shares=TWO)
    texts, costs = stack_texts(world.texts, ARMS), plain_costs()
    statics = {
        "plain": replay(StaticPolicy("plain"), texts, costs),
        "static_ar": replay(StaticPolicy("ar"), texts, costs),
        "static_diffusion": replay(StaticPolicy("diffusion"), texts, costs),
    }
    knowing = replay(KnowsTheRegime(), texts, costs)
    oracles = {"oracle_path": knowing}
    rest = statics, oracles, knowing, statics["plain"], {}, texts.categories
    good = after_training(knowing, *rest)
    assert good.sentences[0].startswith("routing pays: hazard +")
    assert good.numbers["collapsed"] is False
    for name in ("static_ar", "static_diffusion"):
        arm = name.removeprefix("static_")
        bad = after_training(statics[name], *rest)
        assert bad.numbers["collapsed"] is True
        assert f"the router has collapsed: it uses {arm} in 100 % of rounds" in sentences_of(bad)
