from __future__ import annotations

from typing import Any

import pytest

from whiflash_infer.claims import claims, routed_policy


def cell(**changes: Any) -> dict[str, Any]:
    return {
        "overall": {
            "prompts": 50,
            "switching_share": 0.031,
            "time_split": {"route": 0.01, "catch_up": 0.021, "verify": 0.6, "host": 0.1},
            "identical": 1.0,
            **changes,
        }
    }


def over(overall: list[float], **by_category: list[float]) -> dict[str, Any]:
    return {"overall": overall, "by_category": by_category}


GAINS = {
    "hazard": {
        "static_ar": over([1.1, 1.05, 1.15], chat=[1.02, 0.98, 1.06], code=[1.25, 1.2, 1.31]),
        "static_diffusion": over([1.01, 0.97, 1.05], chat=[1.04, 0.99, 1.1], code=[0.9, 0.8, 0.95]),
    }
}
POLICIES = {"plain": cell(), "static_ar": cell(), "static_diffusion": cell(), "hazard": cell()}


def judged(
    policies: dict[str, Any] = POLICIES, gains: dict[str, Any] = GAINS, **options: Any
) -> list[tuple[str, bool | None]]:
    return [(row["here"], row["holds"]) for row in claims(policies, gains, **options)]


def test_each_claim_stands_beside_what_was_measured() -> None:
    rows = claims(POLICIES, GAINS)
    assert [set(row) for row in rows] == [{"claim", "paper", "here", "holds"}] * 6
    assert [(row["paper"], row["here"], row["holds"]) for row in rows] == [
        ("up to 69.6 %", "code: +25.0 % (+20.0 to +31.0), best of 2", True),
        ("up to 37.3 %", "chat: +4.0 % (-1.0 to +10.0), best of 2", None),
        ("-", "+10.0 % (+5.0 to +15.0)", True),
        ("-", "+1.0 % (-3.0 to +5.0)", None),
        ("under 7 %", "3.1 %", True),
        ("output unchanged", "100.0 % of 50", True),
    ]
    assert rows[0]["claim"] == "hazard over EAGLE-3 (static_ar), best category"


def test_claims_that_fail_are_told() -> None:
    gains = {
        "hazard": {
            "static_ar": over([0.9, 0.85, 0.95], code=[0.9, 0.85, 0.95]),
            "static_diffusion": over([1.2, 1.1, 1.3], code=[1.2, 1.1, 1.3]),
        }
    }
    policies = {**POLICIES, "hazard": cell(switching_share=0.07, identical=0.98)}
    assert [holds for _, holds in judged(policies, gains)] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_an_arm_or_category_that_was_not_measured_is_told_and_not_judged() -> None:
    missing = [("not measured", None)] * 4
    assert judged(gains={})[:4] == missing
    assert judged(gains={"hazard": {}})[:4] == missing
    nothing = {"hazard": {"static_ar": over([0.0, 0.0, 0.0], code=[0.0, 0.0, 0.0])}}
    assert judged(gains=nothing)[:4] == missing


def test_a_single_conversation_settles_no_claim() -> None:
    gains = {"hazard": {"static_ar": over([1.5, 1.5, 1.5], code=[1.5, 1.5, 1.5])}}
    here, holds = judged(gains=gains)[0]
    assert here == "code: +50.0 % (no interval), best of 1"
    assert holds is None


def test_a_category_with_an_interval_goes_before_a_better_one_without() -> None:
    arm = over([1.2, 1.1, 1.3], code=[1.5, 1.5, 1.5], chat=[1.1, 1.05, 1.15])
    assert judged(gains={"hazard": {"static_ar": arm}})[0] == (
        "chat: +10.0 % (+5.0 to +15.0), best of 1",
        True,
    )


def test_switching_of_rounds_without_times_is_not_judged() -> None:
    untimed = {"route": 0.0, "catch_up": 0.0, "verify": 0.0, "host": 1.0}
    policies = {**POLICIES, "hazard": cell(switching_share=0.0, time_split=untimed)}
    assert judged(policies)[4] == ("not measured", None)
    older = cell()
    del older["overall"]["switching_share"]
    assert judged({**POLICIES, "hazard": older})[4] == ("not measured", None)


def test_sampled_answers_are_not_judged_by_being_identical() -> None:
    policies = {**POLICIES, "hazard": cell(identical=0.1)}
    assert judged(policies, temperature=0.7)[5] == ("10.0 % of 50, sampled", None)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["plain", "static_ar", "entropy", "hazard"], "hazard"),
        (["plain", "static_ar", "oracle_round", "entropy", "delta"], "entropy"),
        (["plain", "plain#2", "hedge", "oracle_path", "hazard#2"], None),
        (["plain", "static_ar", "static_ar_tree"], None),
    ],
)
def test_the_routed_policy_is_hazard_or_the_first_that_knows_nothing_beforehand(
    names: list[str], expected: str | None
) -> None:
    assert routed_policy(names) == expected


def test_there_are_no_claims_without_a_policy_that_routes() -> None:
    assert claims({"plain": cell(), "static_ar": cell()}, {}) == []


def test_near_ties_of_half_precision_are_told_and_not_judged() -> None:
    policies = {**POLICIES, "hazard": cell(identical=0.98)}
    told = ("98.0 % of 50, near ties in bfloat16", None)
    assert judged(policies, dtype="bfloat16")[-1] == told
    assert judged(policies, dtype="float32")[-1] == ("98.0 % of 50", False)
    assert judged(POLICIES, dtype="bfloat16")[-1] == ("100.0 % of 50", True)
