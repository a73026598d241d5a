"""Seconds of a round on one device, from measured medians (DESIGN: cost profile)."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from whiflash_infer.artifacts import FORMAT_VERSION, package_versions, read_json, write_json
from whiflash_infer.errors import ArtifactError
from whiflash_infer.types import PLAIN


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
class CostModel:
    """Fitted seconds. Monotone in width, context and lag by construction of the fit.

    verify: one (seconds at no context, seconds a context token) pair for widths 1, 2, 3...
    draft: for each arm, seconds to draft 0, 1, 2... tokens.
    catch_up: for each arm, (seconds a pass, seconds a lagging token).
    overhead: seconds a round outside these: routing, acceptance, commit, host.
    """

    device: DeviceIdentity
    target: str
    verify: list[tuple[float, float]]
    draft: dict[str, list[float]]
    catch_up: dict[str, tuple[float, float]]
    overhead: float

    def seconds(self, arm: str, num_draft: int, *, context: int, lag: int) -> float:
        return float(self.seconds_by_length(arm, num_draft, context=context, lag=lag)[num_draft])

    def seconds_by_length(
        self, arm: str, max_draft: int, *, context: int, lag: int
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds of a round of `arm` for every draft length 0..max_draft."""
        table = np.asarray(self.verify[: max_draft + 1])
        total = table[:, 0] + table[:, 1] * context + self.overhead
        if arm == PLAIN:
            return total
        per_pass, per_token = self.catch_up[arm]
        drafting = np.asarray(self.draft[arm][: max_draft + 1])
        return total + drafting + per_pass + per_token * lag


def fit_verify(
    samples: Mapping[int, Mapping[int, float]],
) -> list[tuple[float, float]]:
    """From {context: {width: median seconds}}, one monotone line in context for each width.

    Widths between the measured ones are interpolated. Medians are first made monotone in width
    (isotonic regression); a slope below zero is noise and becomes zero.
    """
    contexts = np.array(sorted(samples))
    widths = np.array(sorted(samples[int(contexts[0])]))
    grid = np.array([[samples[int(c)][int(w)] for w in widths] for c in contexts])
    grid = np.array([isotonic_regression(row).x for row in grid])
    dense = np.arange(1, widths.max() + 1)
    lines = []
    for column in np.array([np.interp(dense, widths, row) for row in grid]).T:
        slope = max(0.0, float(np.polyfit(contexts, column, 1)[0])) if len(contexts) > 1 else 0.0
        lines.append((max(0.0, float(column.mean() - slope * contexts.mean())), slope))
    bases = isotonic_regression([base for base, _ in lines]).x
    slopes = isotonic_regression([slope for _, slope in lines]).x
    return [(float(b), float(s)) for b, s in zip(bases, slopes, strict=True)]


def fit_line(samples: Mapping[int, float]) -> tuple[float, float]:
    """(intercept, slope) through {size: median seconds}, neither below zero."""
    sizes, seconds = np.array(sorted(samples)), np.array([samples[k] for k in sorted(samples)])
    if len(sizes) < 2:
        return float(seconds.mean()), 0.0
    slope = max(0.0, float(np.polyfit(sizes, seconds, 1)[0]))
    return max(0.0, float(seconds.mean() - slope * sizes.mean())), slope


def save_costs(path: Path, costs: CostModel, *, measurements: Mapping[str, Any]) -> None:
    write_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            **asdict(costs),
            "measurements": dict(measurements),
            "packages": package_versions(),
        },
    )


def load_costs(
    path: Path, *, here: DeviceIdentity, target: str, allow_foreign: bool, made_by: str
) -> CostModel:
    """Raises: ArtifactError when the profile was measured elsewhere, naming field and values."""
    if not path.is_file():
        raise ArtifactError(f"{path} does not exist. Make it with: {made_by}")
    found = read_json(path)
    try:
        costs = CostModel(
            device=DeviceIdentity(**found["device"]),
            target=found["target"],
            verify=[tuple(pair) for pair in found["verify"]],
            draft=found["draft"],
            catch_up={arm: tuple(pair) for arm, pair in found["catch_up"].items()},
            overhead=found["overhead"],
        )
    except KeyError as error:
        raise ArtifactError(f"{path}: missing field {error.args[0]!r}") from None
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
            "or use it all the same with costs.allow_foreign=true"
        )
    return costs


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
