"""What the WhiFlash paper claims (arXiv 2606.07710) beside what was measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whiflash_infer.hindsight import HINDSIGHT
from whiflash_infer.statistics import is_static
from whiflash_infer.types import AR, DIFFUSION

_NAMES = {AR: "EAGLE-3", DIFFUSION: "DFlash"}
_UP_TO = {AR: "up to 69.6 %", DIFFUSION: "up to 37.3 %"}  # in the best category
_MAX_SWITCHING = 0.07
_NOT_MEASURED = "not measured"


def claims(
    policies: Mapping[str, Any],
    gains: Mapping[str, Any],
    *,
    temperature: float = 0.0,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """A row a claim, for `hazard`, or else for the first policy that may change arms; no rows
    without one. policies, gains: as in metrics.json.

    holds: None where the numbers do not settle it.
    """
    name = routed_policy(list(policies))
    if name is None:
        return []
    over, overall = gains.get(name, {}), policies[name]["overall"]
    return [
        *(_best_category(name, arm, over.get(f"static_{arm}")) for arm in _NAMES),
        *(_whole(name, arm, over.get(f"static_{arm}")) for arm in _NAMES),
        _switching(overall),
        _unchanged(overall, temperature, dtype),
    ]


def routed_policy(names: Sequence[str]) -> str | None:
    """A repetition (`#2`) is there for its noise."""
    routed = [n for n in names if not is_static(n) and n not in HINDSIGHT and "#" not in n]
    return "hazard" if "hazard" in routed else next(iter(routed), None)


def _best_category(name: str, arm: str, gain: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of the categories that have an interval, if any has. It is that of the category alone: the
    best of many is partly luck."""
    claim = f"{name} over {_NAMES[arm]} (static_{arm}), best category"
    known = {c: g for c, g in (gain or {}).get("by_category", {}).items() if _is_known(g)}
    if not known:
        return _claim(claim, _UP_TO[arm], _NOT_MEASURED, None)
    among = {c: g for c, g in known.items() if g[1] < g[2]} or known
    best = max(among, key=lambda category: among[category][0])
    here = f"{best}: {_told(among[best])}, best of {len(among)}"
    return _claim(claim, _UP_TO[arm], here, _is_gain(among[best]))


def _whole(name: str, arm: str, gain: Mapping[str, Any] | None) -> dict[str, Any]:
    claim, overall = f"{name} over {_NAMES[arm]} (static_{arm}), all prompts", None
    if gain is not None and _is_known(gain["overall"]):
        overall = gain["overall"]
    here = _NOT_MEASURED if overall is None else _told(overall)
    return _claim(claim, "-", here, None if overall is None else _is_gain(overall))


def _switching(cell: Mapping[str, Any]) -> dict[str, Any]:
    claim, paper = "switching (route and catch-up), share of decode time", "under 7 %"
    share = cell.get("switching_share")
    was_timed = any(part for phase, part in cell["time_split"].items() if phase != "host")
    if share is None or not was_timed:
        return _claim(claim, paper, _NOT_MEASURED, None)
    return _claim(claim, paper, f"{100 * share:.1f} %", share < _MAX_SWITCHING)


def _unchanged(cell: Mapping[str, Any], temperature: float, dtype: str) -> dict[str, Any]:
    """Sampled answers differ by chance, so only their distribution could be compared. In half
    precision a wider pass may flip a near tie, which `check=lossless` looks into."""
    claim, share = "answers identical to plain decoding", float(cell["identical"])
    here = f"{100 * share:.1f} % of {cell['prompts']}"
    if temperature > 0:
        return _claim(claim, "output unchanged", f"{here}, sampled", None)
    if share < 1.0 and dtype != "float32":
        return _claim(claim, "output unchanged", f"{here}, near ties in {dtype}", None)
    return _claim(claim, "output unchanged", here, share == 1.0)


def _is_known(gain: Sequence[float]) -> bool:
    return gain[0] > 0


def _is_gain(gain: Sequence[float]) -> bool | None:
    """A point comes of one conversation, and settles nothing."""
    _, low, high = gain
    if low == high or low <= 1.0 <= high:
        return None
    return low > 1.0


def _told(gain: Sequence[float]) -> str:
    ratio, low, high = (100 * (value - 1) for value in gain)
    interval = f"{low:+.1f} to {high:+.1f}" if low < high else "no interval"
    return f"{ratio:+.1f} % ({interval})"


def _claim(claim: str, paper: str, here: str, holds: bool | None) -> dict[str, Any]:
    return {"claim": claim, "paper": paper, "here": here, "holds": holds}
