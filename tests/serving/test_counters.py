from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, multiprocess
from prometheus_client import Histogram as ReferenceHistogram

from whiflash_infer.errors import UserError
from whiflash_infer.serving.counters import LAG_EDGES, Counters, Histogram
from whiflash_infer.serving.prometheus import PrometheusMetrics


def some_counters() -> Counters:
    """Eight rounds, of which one of `ar` was cut off."""
    counters = Counters(steps=4, switches=2, requests=3, price=250.0, feature_tokens=640)
    counters.rounds = Counter(plain=2, ar=4, diffusion=2)
    counters.drafted = Counter(ar=20, diffusion=14)
    for arm, accepted in (("plain", 0), ("plain", 0), ("ar", 5), ("ar", 1), ("ar", 0)):
        counters.end_round(arm, accepted=accepted, committed=accepted + 1)
    for accepted in (7, 2):
        counters.end_round("diffusion", accepted=accepted, committed=accepted + 1)
    counters.fallbacks["no features"] += 2
    counters.spend("target", 0.5)
    counters.spend("draft", 0.25)
    counters.spend("draft", 0.125)
    counters.spend("route", 0.025)
    counters.lags.add([0, 0, 1, 3, 700, 5000])
    counters.memory = {"features": 4096, "caches": 1024}
    counters.feature_evictions = 9
    return counters


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"whiflash_{name}", labels)


# --- the numbers --------------------------------------------------------------------------------


def test_a_bin_ends_with_its_edge_and_the_last_one_has_no_end() -> None:
    lags = Histogram((0, 1, 2, 4))
    lags.add([0, 1, 2, 3, 4, 5, 1000])
    assert lags.named_counts() == {"0": 1, "1": 1, "2": 1, "4": 2, "more": 2}
    assert (lags.count, lags.sum) == (7, 1015)


def test_lags_are_told_apart_up_to_4096() -> None:
    assert LAG_EDGES == (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def test_rounds_that_were_cut_off_count_for_the_ratio_of_arms_but_not_for_lengths() -> None:
    counters = some_counters()
    assert counters.arm_ratio() == {"plain": 0.25, "ar": 0.5, "diffusion": 0.25}
    # plain 1 + 1, ar 6 + 2 + 1, diffusion 8 + 3, in seven rounds
    assert counters.acceptance_length() == pytest.approx(22 / 7)
    assert counters.acceptance_lengths() == {"plain": 1.0, "ar": 3.0, "diffusion": 5.5}


def test_a_summary_is_json_with_the_numbers_by_arm() -> None:
    summary = json.loads(json.dumps(some_counters().summary(), allow_nan=False))
    assert summary["arms"]["ar"] == {
        "share": 0.5,
        "rounds": 4,
        "drafted": 20,
        "accepted": 6,
        "committed": 9,
        "acceptance_length": 3.0,
    }
    assert summary["lags"]["mean"] == pytest.approx(5704 / 6)
    assert summary["proposer_seconds_per_step"] == pytest.approx(0.1)  # without the target's
    assert summary["fallbacks"] == {"no features": 2}


def test_a_summary_before_the_first_step_is_json_too() -> None:
    summary = json.loads(json.dumps(Counters().summary(), allow_nan=False))
    assert summary["arms"] == {}
    assert summary["acceptance_length"] is None
    assert summary["price"] is None


# --- shown as metrics ---------------------------------------------------------------------------


def test_every_number_is_shown_under_its_name() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry).publish(some_counters())
    expected = {
        ("steps_total", ""): 4,
        ("switches_total", ""): 2,
        ("rounds_total", "arm=ar"): 4,
        ("rounds_ended_total", "arm=ar"): 3,
        ("draft_tokens_total", "arm=diffusion"): 14,
        ("accepted_tokens_total", "arm=diffusion"): 9,
        ("committed_tokens_total", "arm=diffusion"): 11,
        ("fallbacks_total", "reason=no features"): 2,
        ("seconds_total", "phase=draft"): 0.375,
        ("feature_evictions_total", ""): 9,
        ("requests", ""): 3,
        ("memory_bytes", "part=features"): 4096,
        ("feature_tokens", ""): 640,
        ("price_tokens_per_second", ""): 250,
        ("lag_tokens_count", ""): 6,
        ("lag_tokens_sum", ""): 5704,
        ("lag_tokens_bucket", "le=4.0"): 4,
    }
    for (name, label), number in expected.items():
        labels = dict([label.split("=")]) if label else {}
        assert value(registry, name, **labels) == pytest.approx(number), name


def test_publishing_again_adds_only_what_is_new() -> None:
    registry, counters = CollectorRegistry(), some_counters()
    metrics = PrometheusMetrics(registry)
    metrics.publish(counters)
    metrics.publish(counters)
    counters.rounds["ar"] += 1
    counters.spend("verify", 1.5)
    counters.lags.add([3])
    counters.requests = 1
    metrics.publish(counters)
    assert value(registry, "rounds_total", arm="ar") == 5
    assert value(registry, "rounds_total", arm="plain") == 2
    assert value(registry, "seconds_total", phase="verify") == pytest.approx(1.5)
    assert value(registry, "lag_tokens_sum") == pytest.approx(5707)
    assert value(registry, "requests") == 1


def test_lags_are_shown_as_if_each_had_been_observed() -> None:
    rng = random.Random(0)
    shown, reference = CollectorRegistry(), CollectorRegistry()
    each = ReferenceHistogram(
        "whiflash_lag_tokens", "each lag by itself", buckets=LAG_EDGES, registry=reference
    )
    metrics, counters = PrometheusMetrics(shown), Counters()
    for _ in range(50):
        lags = [int(2 ** rng.uniform(0, 14)) - 1 for _ in range(rng.randrange(40))]
        counters.lags.add(lags)
        for lag in lags:
            each.observe(lag)
        metrics.publish(counters)
    for edge in (*map(float, LAG_EDGES), "+Inf"):
        name, labels = "whiflash_lag_tokens_bucket", {"le": str(edge)}
        assert shown.get_sample_value(name, labels) == reference.get_sample_value(name, labels)
    assert value(shown, "lag_tokens_sum") == pytest.approx(value(reference, "lag_tokens_sum"))


def test_what_has_not_happened_is_shown_as_zero_and_an_unknown_price_not_at_all() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry, labels={"model_name": "tiny"}).publish(Counters())
    assert value(registry, "switches_total", model_name="tiny") == 0
    assert value(registry, "price_tokens_per_second", model_name="tiny") is None


def test_labels_stand_on_every_metric() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry, labels={"model_name": "tiny"}).publish(some_counters())
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.labels.get("model_name") for sample in samples} == {"tiny"}
    assert value(registry, "rounds_total", model_name="tiny", arm="ar") == 4


def test_two_proposers_of_one_process_add_to_the_same_metrics() -> None:
    registry = CollectorRegistry()
    first, second = PrometheusMetrics(registry), PrometheusMetrics(registry)
    first.publish(some_counters())
    second.publish(some_counters())
    assert value(registry, "rounds_total", arm="ar") == 8


def test_a_registry_whose_metrics_have_other_labels_is_refused_by_name() -> None:
    registry = CollectorRegistry()
    PrometheusMetrics(registry, labels={"model_name": "tiny"})
    with pytest.raises(UserError, match=r"\['engine'\].*\['model_name'\]"):
        PrometheusMetrics(registry, labels={"engine": "0"})


def test_a_missing_client_is_told_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"whiflash\[vllm\]"):
        PrometheusMetrics()


# --- over processes -----------------------------------------------------------------------------

_WORKER = """
from tests.serving.test_counters import some_counters
from whiflash_infer.serving.prometheus import PrometheusMetrics

counters = some_counters()
for metrics in (PrometheusMetrics(), PrometheusMetrics()):
    metrics.publish(counters)
print("published", flush=True)
input()
"""


@contextmanager
def worker(folder: Path) -> Iterator[int]:
    """A process that has published twice `some_counters`, and is killed in the end."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    command = [sys.executable, "-c", _WORKER]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, env=environment, cwd=root, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"published\n"
        yield process.pid
        process.kill()


def collected(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(folder))
    return registry


def counts(folder: Path) -> dict[str, float | None]:
    registry = collected(folder)
    return {
        "rounds": value(registry, "rounds_total", arm="ar"),
        "seconds": value(registry, "seconds_total", phase="draft"),
        "lags": value(registry, "lag_tokens_count"),
        "sum": value(registry, "lag_tokens_sum"),
        "low": value(registry, "lag_tokens_bucket", le="4.0"),
    }


def test_counts_of_a_worker_are_read_by_another_process_and_outlive_it(tmp_path: Path) -> None:
    twice = {"rounds": 8.0, "seconds": 0.75, "lags": 12.0, "sum": 11408.0, "low": 8.0}
    with worker(tmp_path) as pid:
        assert counts(tmp_path) == pytest.approx(twice)
        gauges = collected(tmp_path)
        assert value(gauges, "requests") == 3
        assert value(gauges, "memory_bytes", part="features") == 4096
        assert value(gauges, "price_tokens_per_second") == 250
    assert counts(tmp_path) == pytest.approx(twice)
    multiprocess.mark_process_dead(pid, path=str(tmp_path))
    assert counts(tmp_path) == pytest.approx(twice)
    assert value(collected(tmp_path), "requests") is None
