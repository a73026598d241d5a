"""Seconds of a round on one device, from measured medians (DESIGN: cost profile)."""

from __future__ import annotations

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite, log
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import isotonic_regression

from whiflash_infer.artifacts import FORMAT_VERSION, package_versions, read_json, write_json
from whiflash_infer.errors import ArtifactError
from whiflash_infer.types import DRAFTERS, PLAIN


@runtime_checkable
class Costs(Protocol):
    """Where policies get the prices of rounds. They may change from round to round, so policies ask
    every time and keep nothing."""

    @property
    def dearest_catch_up(self) -> tuple[float, float]:
        """The most seconds that a pass and that a lagging token cost any drafter, for one text."""
        ...

    def table(self, arms: Sequence[str], *, num_texts: int = 1) -> CostTable:
        """Prices of a text's share of a round in which so many texts are decoded together. The
        arrays are shared and cannot be written to.

        Raises: KeyError for an arm that is not priced.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """What a cost profile is valid for."""

    device: str
    threads: int
    dtype: str

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype) -> DeviceIdentity:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        return cls(
            device=name, threads=torch.get_num_threads(), dtype=str(dtype).removeprefix("torch.")
        )


@dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Fitted seconds of the parts of a round in which a number of texts are decoded together.

    verify: one (seconds at no context, seconds a context token) pair for widths 1, 2, 3...
    draft: for each drafting arm, seconds to draft 0, 1, 2... tokens on the longest path.
    catch_up: for each drafter (`DRAFTERS`), (seconds a pass, seconds a lagging token).
    overhead: seconds a round outside these: routing, acceptance, commit, host.
    Monotone in width, context and lag by construction of the fit.
    """

    verify: list[tuple[float, float]]
    draft: dict[str, list[float]]
    catch_up: dict[str, tuple[float, float]]
    overhead: float


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What rounds cost on one device.

    nodes: for each drafting arm, the drafts that the target reads at lengths 0, 1, 2...; of a chain
    the length itself.
    batches: by the number of texts that are decoded together; 1 is always among them.
    """

    device: DeviceIdentity
    target: str
    nodes: dict[str, list[int]]
    batches: dict[int, PassCosts]

    @property
    def max_draft(self) -> dict[str, int]:
        """Of each drafting arm, the longest draft that is priced."""
        return {arm: len(nodes) - 1 for arm, nodes in self.nodes.items()}

    @property
    def dearest_catch_up(self) -> tuple[float, float]:
        return self._dearest

    def table(self, arms: Sequence[str], *, num_texts: int = 1) -> CostTable:
        """Prices of a text's share of a round, of the profiled batch size nearest to `num_texts`.

        Raises: KeyError for an arm that is not priced.
        """
        key = (tuple(arms), num_texts)
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = self._made_table(arms, num_texts)
        return found

    @cached_property
    def _dearest(self) -> tuple[float, float]:
        return dearest(self.batches[1].catch_up.values())

    @cached_property
    def _tables(self) -> dict[tuple[tuple[str, ...], int], CostTable]:
        """Made already. A profile never changes."""
        return {}

    def _made_table(self, arms: Sequence[str], num_texts: int) -> CostTable:
        batch = min(self.batches, key=lambda size: (abs(log(size / num_texts)), size))
        costs = self.batches[batch]
        longest = max([0, *(self.max_draft[arm] for arm in arms if arm != PLAIN)])
        fixed = np.full((len(arms), longest + 1), np.inf)
        per_context = np.zeros_like(fixed)
        per_lag = np.zeros(len(arms))
        for row, arm in enumerate(arms):
            lengths = [0] if arm == PLAIN else range(1, self.max_draft[arm] + 1)
            per_pass, per_lag[row] = (0.0, 0.0) if arm == PLAIN else costs.catch_up[DRAFTERS[arm]]
            for length in lengths:
                nodes = 0 if arm == PLAIN else self.nodes[arm][length]
                drafting = 0.0 if arm == PLAIN else costs.draft[arm][length]
                base, per_context[row, length] = costs.verify[nodes]
                fixed[row, length] = base + drafting + per_pass + costs.overhead
        return CostTable(fixed / batch, per_context / batch, per_lag / batch).frozen()


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of a text's round by arm and draft length; infinite where there is no such length:
    plain drafts nothing, and a drafting arm at least one token."""

    fixed: Float[np.ndarray, "P K1"]
    per_context: Float[np.ndarray, "P K1"]
    per_lag: Float[np.ndarray, " P"]

    def seconds(
        self, positions: Int[np.ndarray, " N"], lags: Int[np.ndarray, "N P"]
    ) -> Float[np.ndarray, "N P K1"]:
        by_context = self.fixed + self.per_context * positions[:, None, None]
        return by_context + (self.per_lag * lags)[:, :, None]

    def frozen(self) -> CostTable:
        """The same, for many readers: its arrays cannot be written to any more."""
        for array in (self.fixed, self.per_context, self.per_lag):
            array.setflags(write=False)
        return self


def dearest(prices: Collection[tuple[float, float]]) -> tuple[float, float]:
    """The greatest of the first parts, and the greatest of the second."""
    first, second = (max([0.0, *(price[part] for price in prices)]) for part in (0, 1))
    return first, second


def fit_verify(samples: Mapping[int, Mapping[int, float]]) -> list[tuple[float, float]]:
    """From {context: {width: median seconds}}, one monotone line in context for each width.

    Widths between the measured ones are interpolated. Medians are first made monotone in width
    (isotonic regression); a slope below zero is noise and becomes zero.
    """
    contexts = np.array(sorted(samples))
    columns = np.array([_by_width(samples[int(context)]) for context in contexts])
    slopes = np.zeros(columns.shape[1])
    if len(contexts) > 1:
        slopes = isotonic_regression(np.polyfit(contexts, columns, 1)[0].clip(min=0.0)).x
    return _through(columns.mean(0), slopes, float(contexts.mean()))


def fit_verify_at(
    samples: Mapping[int, float], *, context: int, slopes: Sequence[float]
) -> list[tuple[float, float]]:
    """From {width: median seconds} at one context, with slopes that are known already."""
    return _through(_by_width(samples), np.array(slopes), float(context))


def fit_draft(seconds: Sequence[float]) -> list[float]:
    """From median seconds of drafting 1, 2... tokens, those of 0, 1, 2...: never falling."""
    return [0.0, *(float(s) for s in isotonic_regression(seconds).x)]


def fit_line(samples: Mapping[int, float]) -> tuple[float, float]:
    """(intercept, slope) through {size: median seconds}, neither below zero."""
    sizes, seconds = np.array(sorted(samples)), np.array([samples[k] for k in sorted(samples)])
    if len(sizes) < 2:
        return float(seconds.mean()), 0.0
    slope = max(0.0, float(np.polyfit(sizes, seconds, 1)[0]))
    return max(0.0, float(seconds.mean() - slope * sizes.mean())), slope


def _by_width(samples: Mapping[int, float]) -> Float[np.ndarray, " W"]:
    """Monotone seconds of widths 1, 2, 3... up to the widest that was measured."""
    widths = sorted(samples)
    monotone = isotonic_regression([samples[width] for width in widths]).x
    return np.interp(np.arange(1, widths[-1] + 1), widths, monotone)


def _through(
    seconds: Float[np.ndarray, " W"], slopes: Float[np.ndarray, " W"], context: float
) -> list[tuple[float, float]]:
    """Lines of these slopes with these seconds at a context, and bases that never fall."""
    bases = isotonic_regression((seconds - slopes * context).clip(min=0.0)).x
    return [(float(base), float(slope)) for base, slope in zip(bases, slopes, strict=True)]


def save_costs(
    path: Path,
    costs: CostModel,
    *,
    measurements: Mapping[str, Any],
    check: Mapping[str, Any] | None = None,
) -> None:
    """check: how well it predicts rounds, for readers."""
    write_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            **asdict(costs),
            "check": dict(check or {}),
            "measurements": dict(measurements),
            "packages": package_versions(),
        },
    )


def load_costs(
    path: Path, *, here: DeviceIdentity, target: str, allow_foreign: bool, made_by: str
) -> CostModel:
    """Raises: ArtifactError for a field that is missing or malformed, and when the profile was
    measured elsewhere, naming field and values."""
    if not path.is_file():
        raise ArtifactError(f"{path} does not exist. Make it with: {made_by}")
    try:
        costs = _cost_model(read_json(path))
    except _MalformedError as error:
        raise ArtifactError(f"{path}: {error}. Make it again with: {made_by}") from None
    misfits = [
        f"{key} was {old!r} and is {new!r}"
        for (key, old), new in zip(asdict(costs.device).items(), asdict(here).values(), strict=True)
        if old != new
    ]
    if costs.target != target:
        misfits.append(f"target was {costs.target!r} and is {target!r}")
    if misfits and not allow_foreign:
        raise ArtifactError(
            f"{path} was measured elsewhere: {'; '.join(misfits)}. Measure again with: {made_by}, "
            "or use it all the same with costs=allow_foreign (python -m whiflash_infer: "
            "--allow-foreign-costs)"
        )
    return costs


class _MalformedError(Exception):
    """Says which field, and what is wrong with it."""


def _cost_model(found: Any) -> CostModel:
    found = _mapping(found, "the whole")
    if "batches" not in found:
        raise _MalformedError("it is of an older format, without the field 'batches'")
    if found.get("format_version") != FORMAT_VERSION:
        version = found.get("format_version")
        raise _MalformedError(f"format_version is {version!r}, this version reads {FORMAT_VERSION}")
    device = _field(found, "device")
    nodes = _mapping(_field(found, "nodes"), "nodes")
    nodes = {arm: _nodes(counts, f"nodes.{arm}") for arm, counts in nodes.items()}
    if unknown := sorted(nodes.keys() - DRAFTERS.keys()):
        raise _MalformedError(f"nodes: {unknown[0]!r} is no arm of {', '.join(DRAFTERS)}")
    batches = {
        _batch_size(size): _pass_costs(part, f"batches.{size}", nodes)
        for size, part in _mapping(found["batches"], "batches").items()
    }
    if 1 not in batches:
        raise _MalformedError("missing field 'batches.1'")
    return CostModel(
        device=DeviceIdentity(
            device=_text(_field(device, "device", "device"), "device.device"),
            threads=_whole(_field(device, "threads", "device"), "device.threads"),
            dtype=_text(_field(device, "dtype", "device"), "device.dtype"),
        ),
        target=_text(_field(found, "target"), "target"),
        nodes=nodes,
        batches=batches,
    )


def _pass_costs(found: Any, where: str, nodes: Mapping[str, list[int]]) -> PassCosts:
    verify = _list(_field(found, "verify", where), f"{where}.verify")
    widest = 1 + max((max(counts) for counts in nodes.values()), default=0)
    if len(verify) < widest:
        raise _MalformedError(
            f"{where}.verify prices {len(verify)} widths, but arms read {widest} tokens"
        )
    draft, catch_up = _field(found, "draft", where), _field(found, "catch_up", where)
    return PassCosts(
        verify=[_pair(pair, f"{where}.verify[{i}]") for i, pair in enumerate(verify)],
        draft={
            arm: _numbers(_field(draft, arm, f"{where}.draft"), len(counts), f"{where}.draft.{arm}")
            for arm, counts in nodes.items()
        },
        catch_up={
            drafter: _pair(
                _field(catch_up, drafter, f"{where}.catch_up"), f"{where}.catch_up.{drafter}"
            )
            for drafter in dict.fromkeys(DRAFTERS[arm] for arm in nodes)
        },
        overhead=_number(_field(found, "overhead", where), f"{where}.overhead"),
    )


def _field(found: Any, key: str, where: str = "") -> Any:
    if key not in _mapping(found, where):
        raise _MalformedError(f"missing field {f'{where}.{key}' if where else key!r}")
    return found[key]


def _refuse(value: object, where: str, legal: str) -> NoReturn:
    raise _MalformedError(f"{where} is {value!r}, but has to be {legal}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    return value if isinstance(value, dict) else _refuse(value, where, "a mapping")


def _list(value: Any, where: str) -> list[Any]:
    return value if isinstance(value, list) and value else _refuse(value, where, "a list")


def _text(value: Any, where: str) -> str:
    return value if isinstance(value, str) else _refuse(value, where, "a text")


def _whole(value: Any, where: str) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if is_whole else _refuse(value, where, "a whole number, 0 or more")


def _number(value: Any, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value < 0:
        _refuse(value, where, "a number of seconds, 0 or more")
    return float(value)


def _numbers(value: Any, count: int, where: str) -> list[float]:
    if len(_list(value, where)) != count:
        raise _MalformedError(f"{where} has {len(value)} entries, but nodes has {count}")
    return [_number(part, f"{where}[{index}]") for index, part in enumerate(value)]


def _pair(value: Any, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        _refuse(value, where, "a pair of numbers")
    return _number(value[0], where), _number(value[1], where)


def _nodes(value: Any, where: str) -> list[int]:
    counts = [_whole(count, f"{where}[{i}]") for i, count in enumerate(_list(value, where))]
    if counts[0] != 0 or counts != sorted(counts):
        _refuse(value, where, "0, and then counts that do not fall")
    return counts


def _batch_size(size: str) -> int:
    return int(size) if size.isdecimal() and int(size) else _refuse(size, "batches", "1 or more")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
