from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import tiny_ar, tiny_diffusion
from tests.stages import attempt, run
from whiflash_infer.checkpoint import save_drafter
from whiflash_infer.errors import ArtifactError
from whiflash_infer.routing.costs import (
    CostModel,
    DeviceIdentity,
    PassCosts,
    fit_draft,
    fit_line,
    fit_verify,
    fit_verify_at,
    load_costs,
    save_costs,
)
from whiflash_infer.sources import RandomTiny
from whiflash_infer.target import Target

HERE = DeviceIdentity(device="abacus", threads=2, dtype="float32")
NODES = {"ar": [0, 1, 2], "ar_tree": [0, 4, 4], "diffusion": [0, 1, 2, 3]}
READING = {"target": "t", "allow_foreign": False, "made_by": "profile"}


def pass_costs(batch: int = 1) -> PassCosts:
    """Seconds in round numbers; a batch costs its size less a tenth of it of what one costs."""
    scale = 1.0 if batch == 1 else 0.9 * batch
    return PassCosts(
        verify=[(scale * (1.0 + w / 10), scale * 0.01 * w) for w in range(1, 6)],
        draft={
            "ar": [0.0, scale * 0.2, scale * 0.4],
            "ar_tree": [0.0, scale * 0.7, scale * 0.7],
            "diffusion": [0.0, *[scale * 0.3] * 3],
        },
        catch_up={
            "ar": (scale * 0.01, scale * 0.001),
            "diffusion": (scale * 0.02, scale * 0.003),
        },
        overhead=scale * 0.05,
    )


def cost_model() -> CostModel:
    batches = {1: pass_costs(), 4: pass_costs(4), 16: pass_costs(16)}
    return CostModel(device=HERE, target="t", nodes=NODES, batches=batches)


# --- fits ---------------------------------------------------------------------------------------


def test_verification_fits_are_monotone_and_follow_clean_measurements() -> None:
    clean = {c: {w: 0.01 + 0.001 * w + 1e-5 * c * w for w in (1, 2, 4)} for c in (100, 200, 400)}
    lines = fit_verify(clean)
    assert len(lines) == 4
    for width, (base, slope) in enumerate(lines, start=1):
        assert base == pytest.approx(0.01 + 0.001 * width)
        assert slope == pytest.approx(1e-5 * width)


@given(
    st.lists(
        st.lists(st.floats(1e-3, 1.0), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_measured_a_wider_pass_and_a_longer_text_never_cost_less(
    rows: list[list[float]],
) -> None:
    widths: list[int] = [1, 2, 5, 8]
    noisy = {64 * (i + 1): dict(zip(widths, row, strict=True)) for i, row in enumerate(rows)}
    bases, slopes = zip(*fit_verify(noisy), strict=True)
    assert len(bases) == 8
    assert list(bases) == sorted(bases)
    assert list(slopes) == sorted(slopes)
    assert min(bases) >= 0
    assert min(slopes) >= 0


def test_one_context_says_nothing_of_longer_ones() -> None:
    assert fit_verify({64: {1: 0.1, 3: 0.3}}) == [
        (pytest.approx(0.1), 0.0),
        (pytest.approx(0.2), 0.0),
        (pytest.approx(0.3), 0.0),
    ]


def test_with_known_slopes_one_context_is_enough() -> None:
    lines = fit_verify_at({1: 0.5, 3: 0.9}, context=100, slopes=[0.001, 0.001, 0.002])
    assert lines == [
        (pytest.approx(0.4), 0.001),
        (pytest.approx(0.6), 0.001),
        (pytest.approx(0.7), 0.002),
    ]


def test_a_slope_that_would_explain_more_than_was_measured_leaves_a_base_of_zero() -> None:
    assert fit_verify_at({1: 0.5}, context=100, slopes=[0.01]) == [(0.0, 0.01)]


def test_lines_recover_intercept_and_slope_and_never_fall() -> None:
    assert fit_line({1: 0.3, 3: 0.5, 5: 0.7}) == pytest.approx((0.2, 0.1))
    assert fit_line({4: 0.7}) == (0.7, 0.0)
    assert fit_line({1: 0.6, 3: 0.4}) == (0.5, 0.0)
    assert fit_line({1: 0.1, 3: 0.9}) == pytest.approx((0.0, 0.4))


def test_drafting_costs_nothing_without_drafts_and_never_less_for_more() -> None:
    assert fit_draft([0.1, 0.2, 0.4]) == [0.0, 0.1, 0.2, 0.4]
    assert fit_draft([0.1, 0.5, 0.3]) == pytest.approx([0.0, 0.1, 0.4, 0.4])


# --- prices -------------------------------------------------------------------------------------


def test_a_round_costs_the_sum_of_its_parts() -> None:
    table = cost_model().table(("plain", "ar", "ar_tree", "diffusion"))
    positions, lags = np.array([0, 10]), np.array([[9, 1, 2, 3], [0, 5, 5, 20]])
    found = table.seconds(positions, lags)
    assert found.shape == (2, 4, 4)
    # verification of 1 + nodes tokens, then drafts, catch-up with its lag, overhead
    assert found[0, 0, 0] == pytest.approx(1.1 + 0.05)
    assert found[1, 0, 0] == pytest.approx(1.1 + 10 * 0.01 + 0.05)
    assert found[0, 1, 2] == pytest.approx(1.3 + 0.4 + 0.01 + 1 * 0.001 + 0.05)
    assert found[1, 1, 1] == pytest.approx(1.2 + 10 * 0.02 + 0.2 + 0.01 + 5 * 0.001 + 0.05)
    assert found[1, 3, 3] == pytest.approx(1.4 + 10 * 0.04 + 0.3 + 0.02 + 20 * 0.003 + 0.05)


def test_a_tree_costs_the_same_at_every_length_and_follows_as_its_chain_does() -> None:
    found = cost_model().table(("plain", "ar_tree")).seconds(np.array([10]), np.array([[0, 5]]))
    whole = 1.5 + 10 * 0.05 + 0.7 + 0.01 + 5 * 0.001 + 0.05
    assert found[0, 1].tolist() == pytest.approx([np.inf, whole, whole])


def test_lengths_that_an_arm_does_not_have_cost_infinitely_much() -> None:
    table = cost_model().table(("plain", "ar", "diffusion"))
    finite = np.isfinite(table.seconds(np.array([3]), np.array([[1, 1, 1]]))[0])
    assert finite.tolist() == [
        [True, False, False, False],
        [False, True, True, False],
        [False, True, True, True],
    ]


def test_the_columns_follow_the_arms_that_are_asked_for() -> None:
    model, position = cost_model(), np.array([7])
    both = model.table(("plain", "ar", "diffusion")).seconds(position, np.array([[1, 2, 3]]))
    one = model.table(("diffusion",)).seconds(position, np.array([[3]]))
    assert np.array_equal(one[0, 0], both[0, 2])
    assert model.table(("plain",)).fixed.shape == (1, 1)
    with pytest.raises(KeyError, match="diffusion_tree"):
        model.table(("plain", "diffusion_tree"))


@pytest.mark.parametrize(
    ("texts", "batch"), [(1, 1), (2, 1), (3, 4), (6, 4), (9, 16), (16, 16), (99, 16)]
)
def test_a_text_pays_its_share_of_the_nearest_batch(texts: int, batch: int) -> None:
    model, state = cost_model(), (np.array([10]), np.array([[0, 5]]))
    alone = model.table(("plain", "ar")).seconds(*state)
    share = model.table(("plain", "ar"), num_texts=texts).seconds(*state)
    assert share == pytest.approx(alone if batch == 1 else 0.9 * alone)


def test_the_longest_drafts_that_are_priced_are_told() -> None:
    assert cost_model().max_draft == {"ar": 2, "ar_tree": 2, "diffusion": 3}


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    save_costs(path, cost_model(), measurements={"timings": []}, check={"ar": {"ratio": 1.02}})
    return path


def test_a_cost_profile_survives_the_disk(path: Path) -> None:
    assert load_costs(path, here=HERE, **READING) == cost_model()
    written = json.loads(path.read_text())
    assert written["check"] == {"ar": {"ratio": 1.02}}
    assert written["measurements"] == {"timings": []}
    assert "torch" in written["packages"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "slide rule"}, "device was 'abacus' and is 'slide rule'"),
        ({"threads": 8}, "threads was 2 and is 8"),
        ({"dtype": "bfloat16"}, "dtype was 'float32' and is 'bfloat16'"),
    ],
)
def test_a_profile_of_another_device_is_refused_unless_it_is_allowed(
    path: Path, change: dict[str, Any], told: str
) -> None:
    elsewhere = replace(HERE, **change)
    with pytest.raises(ArtifactError) as caught:
        load_costs(path, here=elsewhere, **READING)
    for part in (str(path), told, "profile", "costs=allow_foreign", "--allow-foreign-costs"):
        assert part in str(caught.value)
    allowed = {**READING, "allow_foreign": True}
    assert load_costs(path, here=elsewhere, **allowed) == cost_model()


def test_a_profile_of_another_target_is_refused(path: Path) -> None:
    with pytest.raises(ArtifactError, match="target was 't' and is 'u'"):
        load_costs(path, here=HERE, **{**READING, "target": "u"})


def test_an_absent_profile_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent.json does not exist. Make it with: profile"):
        load_costs(tmp_path / "absent.json", here=HERE, **READING)


def test_a_profile_of_an_older_format_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    old = {"format_version": 1, "device": asdict(HERE), "target": "t", "verify": [[0.1, 0.0]]}
    path.write_text(json.dumps(old))
    with pytest.raises(ArtifactError, match=r"older format.*Make it again with: profile"):
        load_costs(path, here=HERE, **READING)


def _leave_out(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        for key in keys[:-1]:
            found = found[key]
        del found[keys[-1]]

    return change


def _put(value: Any, *keys: str | int) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_leave_out("device"), "missing field 'device'"),
        (_leave_out("device", "threads"), "missing field 'device.threads'"),
        (_leave_out("target"), "missing field 'target'"),
        (_leave_out("nodes"), "missing field 'nodes'"),
        (_leave_out("batches", "1"), "missing field 'batches.1'"),
        (_leave_out("batches", "4", "verify"), "missing field 'batches.4.verify'"),
        (_leave_out("batches", "4", "draft"), "missing field 'batches.4.draft'"),
        (_leave_out("batches", "4", "draft", "ar"), "missing field 'batches.4.draft.ar'"),
        (_leave_out("batches", "1", "catch_up", "ar"), "missing field 'batches.1.catch_up.ar'"),
        (_leave_out("batches", "1", "overhead"), "missing field 'batches.1.overhead'"),
        (_put(2, "format_version"), "format_version is 2"),
        (_put("here", "device"), "device is 'here', but has to be a mapping"),
        (_put(True, "device", "threads"), "device.threads is True"),
        (_put(7, "target"), "target is 7"),
        (_put([0, 1], "nodes", "abacist"), "nodes: 'abacist' is no arm"),
        (_put([1, 2, 3], "nodes", "ar"), "nodes.ar is [1, 2, 3]"),
        (_put([0, 2, 1], "nodes", "ar"), "nodes.ar is [0, 2, 1]"),
        (_put(1.5, "nodes", "ar", 1), "nodes.ar[1] is 1.5"),
        (_put([], "nodes", "ar"), "nodes.ar is []"),
        (_put({}, "batches", "many"), "batches is 'many'"),
        (_put([[0.1, 0.0]], "batches", "1", "verify"), "prices 1 widths, but arms read 5"),
        (_put([0.1], "batches", "1", "verify", 2), "batches.1.verify[2] is [0.1]"),
        (_put(float("nan"), "batches", "1", "verify", 0, 1), "batches.1.verify[0] is nan"),
        (_put([0.0, 0.1], "batches", "1", "draft", "ar"), "draft.ar has 2 entries, but nodes has"),
        (_put("0.1", "batches", "1", "draft", "ar", 1), "batches.1.draft.ar[1] is '0.1'"),
        (_put(0.1, "batches", "1", "catch_up", "ar"), "batches.1.catch_up.ar is 0.1"),
        (_put(-0.1, "batches", "1", "overhead"), "batches.1.overhead is -0.1"),
        (_put([], "batches"), "batches is []"),
    ],
)
def test_a_broken_field_is_named_with_the_file_and_the_remedy(
    path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ArtifactError) as caught:
        load_costs(path, here=HERE, **READING)
    for part in (str(path), told, "Make it again with: profile"):
        assert part in str(caught.value)


# --- the profile itself -------------------------------------------------------------------------

PROFILE = "data_prep/profile_costs.py costs.repeats=2 costs.batches=[1,3]"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random drafters for the tiny target: a chain of 4, and a block of 6."""
    folder = tmp_path_factory.mktemp("whiflash") / "work"
    source = RandomTiny(
        cache_dir=str(folder.parent / "cache/targets"), seed=0, hidden_size=64, num_layers=8
    )
    target = Target.from_pretrained(
        source.resolve(), name="tiny", tap_layer_ids=[1, 3, 4], dtype="float32", device="cpu"
    )
    manifest = {
        "target": target.identity().manifest(),
        "tap_layer_ids": list(target.tap_layer_ids),
        "draft_length": 4,
    }
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    nets = {
        "ar_drafter": tiny_ar(target.drafter_shape),
        "diffusion_drafter": tiny_diffusion(target.drafter_shape, block_size=6),
    }
    for name, net in nets.items():
        save_drafter(folder / "artifacts/tiny" / name, net, manifest, token_ids=tokens)
    return folder


def test_a_profile_has_all_parts_of_rounds_of_every_arm(workplace: Path) -> None:
    out = run(workplace, f"{PROFILE} dtype=float32")
    path = workplace / "artifacts/tiny/costs.json"
    here = DeviceIdentity.here(torch.device("cpu"), torch.float32)
    reading = {"target": "tiny", "allow_foreign": False, "made_by": "profile"}
    costs = load_costs(path, here=here, **reading)
    assert costs.nodes == {
        "ar": [0, 1, 2, 3, 4],
        "ar_tree": [0, *[27] * 5],
        "diffusion": [0, 1, 2, 3, 4, 5],
        "diffusion_tree": [0, *[24] * 5],
    }
    assert set(costs.batches) == {1, 3}
    for parts in costs.batches.values():
        assert len(parts.verify) == 28
        assert len(set(parts.verify[8:16])) == 1  # 9 to 16 tokens are all read as 16
        assert parts.verify == sorted(parts.verify)
        tree = parts.draft["ar_tree"][1:]
        assert tree == pytest.approx([tree[0]] * 5, rel=1e-12)  # grown whole at every length
        assert all(s > 0 for arm in costs.nodes for s in parts.draft[arm][1:])
        assert set(parts.catch_up) == {"ar", "diffusion"}
        assert parts.overhead > 0
    check = json.loads(path.read_text())["check"]
    assert list(check) == ["plain", *costs.nodes]
    for found in check.values():
        assert found["ratio"] == pytest.approx(found["predicted"] / found["measured"])
    assert all(arm in out for arm in check)


def test_contexts_are_told_apart_for_one_text_and_each_measurement_is_kept(workplace: Path) -> None:
    run(workplace, f"{PROFILE} paths.costs=kept.json arms.ar_tree=null arms.diffusion_tree=null")
    timings = json.loads((workplace / "kept.json").read_text())["measurements"]["timings"]
    widths, found = {1, 2, 4, 5, 6}, {}
    for row in timings:
        assert 0 < row["low"] <= row["median"] <= row["high"]
        found.setdefault((row["part"], row["batch"]), []).append(row)
    for batch, contexts in ((1, {16, 64}), (3, {64})):
        cells = {(row["context"], row["width"]) for row in found["verify", batch]}
        assert cells == {(context, width) for context in contexts for width in widths}
        drafted = [(row["arm"], row["length"]) for row in found["draft", batch]]
        lengths = {"ar": 4, "diffusion": 5}
        assert drafted == [(arm, k) for arm, most in lengths.items() for k in range(1, most + 1)]
        lags = [(row["drafter"], row["lag"]) for row in found["catch_up", batch]]
        assert lags == [("ar", 1), ("ar", 8), ("diffusion", 1), ("diffusion", 8)]
        assert len(found["features", batch]) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("costs.batches=[2,4]", "costs.batches is [2, 4]: 1 must be among them"),
        ("costs.contexts=[]", "costs.contexts is []"),
        ("costs.contexts=[8] costs.lags=[9]", "costs.lags: 9 is longer than the context of 8"),
        ("costs.contexts=[100000]", "costs.contexts: 100000 tokens and"),
        ("costs.repeats=1", "costs.repeats is 1: it must be 2 or more"),
    ],
)
def test_a_size_that_cannot_be_measured_is_told(workplace: Path, change: str, told: str) -> None:
    refused = attempt(workplace, f"{PROFILE} paths.costs=refused.json {change}")
    assert refused.status == 2
    assert told in refused.err
    assert not (workplace / "refused.json").exists()
