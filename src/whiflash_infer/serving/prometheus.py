"""Counters as Prometheus metrics, in one process or in the multiprocess mode of its client.

In that mode (PROMETHEUS_MULTIPROC_DIR is set before the client is imported) every process writes
its numbers to files, and whoever answers at /metrics adds them up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from whiflash_infer.errors import UserError
from whiflash_infer.serving.counters import LAG_EDGES, Counters, Histogram

# Names end with _total where they are shown. Of each: its label, and what it counts.
_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "steps": ((), "Steps of the engine in which drafts were asked for"),
    "rounds": (("arm",), "Rounds that an arm was chosen for"),
    "rounds_ended": (("arm",), "Rounds whose outcome is known"),
    "draft_tokens": (("arm",), "Tokens drafted"),
    "accepted_tokens": (("arm",), "Drafted tokens that were accepted"),
    "committed_tokens": (("arm",), "Tokens of the rounds that ended, bonus tokens included"),
    "switches": ((), "Rounds with another arm than the round before"),
    "fallbacks": (("reason",), "Rows that got no drafts although some were asked for"),
    "seconds": (("phase",), "Seconds spent; target is the engine's own part"),
    "feature_evictions": ((), "Pages of features given up for room"),
}
# Live: of processes that have not ended. Sizes add up over processes, a price does not.
_GAUGES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "requests": ((), "livesum", "Requests with a state"),
    "memory_bytes": (("part",), "livesum", "Memory held"),
    "feature_tokens": ((), "livesum", "Tokens whose features are kept"),
    "price_tokens_per_second": ((), "livemostrecent", "Price that the policy reckons with"),
}
_LAGS = "lag_tokens"


_Shown = Mapping[str, int | float]  # by label; "" where a metric has none
_families: WeakKeyDictionary[Any, tuple[tuple[str, ...], dict[str, Any]]] = WeakKeyDictionary()


class PrometheusMetrics:
    """Shows one `Counters`. A registry has one set of metrics, to which all who use it add."""

    def __init__(self, registry: Any = None, *, labels: Mapping[str, str] | None = None) -> None:
        """registry: the client's own where it is None. labels: of every metric.

        Raises: UserError where the client is missing, or the registry's metrics have other labels.
        """
        labels = labels or {}
        self._labels = tuple(labels.values())
        self._metrics = _metrics(registry, tuple(labels))
        self._known: dict[tuple[str, str], Any] = {}
        self._shown: dict[tuple[str, str], int | float] = {}
        self._lags = Histogram(LAG_EDGES)

    def publish(self, counters: Counters) -> None:
        """Add what is new since the last time, and set the gauges."""
        for name, values in _counted(counters).items():
            for label, value in values.items():
                self._raise(name, label, value)
        for name, values in _gauged(counters).items():
            for label, value in values.items():
                self._of(name, label).set(value)
        self._observe(counters.lags)

    def _raise(self, name: str, label: str, value: int | float) -> None:
        """A value of 0 is shown too."""
        shown = self._shown.get((name, label))
        if value != shown:
            self._of(name, label).inc(value - (shown or 0))
            self._shown[name, label] = value

    def _observe(self, lags: Histogram) -> None:
        """A histogram takes single values only: of each bin the mean of its new ones, as often as
        there are new ones, which makes counts and sum what they should be."""
        metric = self._of(_LAGS, "")
        for count, total in lags.since(self._lags):
            for _ in range(count):
                metric.observe(total / count)
        self._lags = lags.copy()

    def _of(self, name: str, label: str) -> Any:
        if (name, label) not in self._known:
            values = (*self._labels, label) if label else self._labels
            metric = self._metrics[name]
            self._known[name, label] = metric.labels(*values) if values else metric
        return self._known[name, label]


def _counted(counters: Counters) -> dict[str, _Shown]:
    return {
        "steps": {"": counters.steps},
        "rounds": counters.rounds,
        "rounds_ended": counters.ended,
        "draft_tokens": counters.drafted,
        "accepted_tokens": counters.accepted,
        "committed_tokens": counters.committed,
        "switches": {"": counters.switches},
        "fallbacks": counters.fallbacks,
        "seconds": counters.seconds,
        "feature_evictions": {"": counters.feature_evictions},
    }


def _gauged(counters: Counters) -> dict[str, _Shown]:
    return {
        "requests": {"": counters.requests},
        "memory_bytes": counters.memory,
        "feature_tokens": {"": counters.feature_tokens},
        "price_tokens_per_second": {} if math.isnan(counters.price) else {"": counters.price},
    }


def _metrics(registry: Any, labels: tuple[str, ...]) -> dict[str, Any]:
    client = _client()
    registry = registry or client.REGISTRY
    if registry not in _families:
        _families[registry] = labels, _make(client, registry, labels)
    known, metrics = _families[registry]
    if known != labels:
        raise UserError(
            f"labels of metrics are {list(labels)}, and this registry's have {list(known)}: give "
            "all the same, or a registry of their own"
        )
    return metrics


def _make(client: Any, registry: Any, labels: tuple[str, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {"namespace": "whiflash", "registry": registry}
    metrics: dict[str, Any] = {}
    for name, (own, told) in _COUNTERS.items():
        metrics[name] = client.Counter(name, told, (*labels, *own), **options)
    for name, (own, mode, told) in _GAUGES.items():
        metrics[name] = client.Gauge(name, told, (*labels, *own), multiprocess_mode=mode, **options)
    told = "Tokens that a chosen drafter had to catch up on"
    metrics[_LAGS] = client.Histogram(_LAGS, told, labels, buckets=LAG_EDGES, **options)
    return metrics


def _client() -> Any:
    try:
        import prometheus_client  # noqa: PLC0415 - reads PROMETHEUS_MULTIPROC_DIR as it is imported
    except ImportError:
        raise UserError(
            "prometheus_client is missing, which metrics need: pip install 'whiflash[vllm]'"
        ) from None
    return prometheus_client
