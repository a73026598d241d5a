"""From answered prompts to the numbers of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from whiflash_infer.types import PHASES, PLAIN, Generation, Round


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered under one policy."""

    prompt_id: str
    category: str
    policy: str
    generation: Generation

    @property
    def rounds(self) -> list[Round]:
        return self.generation.rounds


def by_policy(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers of each policy, all in the same order of prompts."""
    grouped: dict[str, list[Answer]] = {}
    for answer in sorted(answers, key=lambda a: (a.category, a.prompt_id)):
        grouped.setdefault(answer.policy, []).append(answer)
    return grouped


def summarise(answers: Sequence[Answer], *, bootstrap: int, seed: int) -> dict[str, Any]:
    """Of each policy, against the plain arm: the cell of all prompts under `overall`, and those of
    parts of them, under `by_category` and `by_prompt_length`."""
    grouped = by_policy(answers)
    return {
        policy: {
            "overall": cell(mine, grouped[PLAIN], bootstrap=bootstrap, seed=seed),
            **{
                name: _cells_of(part_of, mine, grouped[PLAIN], bootstrap=bootstrap, seed=seed)
                for name, part_of in _PARTS.items()
            },
        }
        for policy, mine in grouped.items()
    }


def length_bucket(prompt_length: int) -> str:
    """Lengths up to 64, up to 128 and so on; zeros in front keep them in order."""
    return f"{max(64, 1 << (prompt_length - 1).bit_length()):06d}"


_PARTS: dict[str, Callable[[Answer], str]] = {
    "by_category": lambda answer: answer.category,
    "by_prompt_length": lambda answer: length_bucket(answer.generation.prompt_length),
}


def _cells_of(
    part_of: Callable[[Answer], str],
    mine: Sequence[Answer],
    plain: Sequence[Answer],
    *,
    bootstrap: int,
    seed: int,
) -> dict[str, Any]:
    cells = {}
    for part in sorted({part_of(a) for a in plain}):
        pair = [[a for a in answers if part_of(a) == part] for answers in (mine, plain)]
        cells[part] = cell(*pair, bootstrap=bootstrap, seed=seed)
    return cells


def cell(
    answers: Sequence[Answer], baseline: Sequence[Answer], *, bootstrap: int, seed: int
) -> dict[str, Any]:
    """The numbers of one policy over some prompts; `baseline` is plain decoding of the same ones.

    tokens and seconds are those of rounds: the prompt pass and its token are reported apart. tau
    counts the bonus token, pooled over rounds; tau_prompt_mean is the mean of the prompts' means.
    fallbacks: how often something failed and a safe arm answered, by what it was.
    """
    rounds = [r for a in answers for r in a.rounds]
    tokens = sum(a.generation.decoded_tokens for a in answers)
    seconds = sum(a.generation.decode_seconds for a in answers)
    own, plain = _throughput_table(answers), _throughput_table(baseline)
    per_prompt = [a.generation.decoded_tokens / len(a.rounds) for a in answers if a.rounds]
    milliseconds = [1e3 * r.total_seconds for r in rounds]
    return {
        "prompts": len(answers),
        "tokens": tokens,
        "rounds": len(rounds),
        "seconds": seconds,
        "prefill_seconds": sum(a.generation.prefill_seconds for a in answers),
        "tokens_per_s": _ratio(tokens, seconds),
        "speedup": _ratio(_pooled(own), _pooled(plain)),
        "speedup_ci": bootstrap_ratio(own, plain, resamples=bootstrap, seed=seed),
        "tau": _ratio(tokens, len(rounds)),
        "tau_prompt_mean": float(np.mean(per_prompt)) if per_prompt else 0.0,
        "arm_ratio": _shares(Counter(r.arm for r in rounds)),
        "switches_per_100_rounds": 100 * _ratio(sum(r.switched for r in rounds), len(rounds)),
        "time_split": time_split(rounds, seconds),
        "round_ms": _percentiles(milliseconds),
        "acceptance_by_slot": acceptance_by_slot(rounds),
        "identical": _identical(answers, baseline),
        "fallbacks": dict(sum((a.generation.fallbacks for a in answers), Counter[str]())),
    }


def bootstrap_ratio(
    own: np.ndarray, plain: np.ndarray, *, resamples: int, seed: int
) -> list[float]:
    """95 % interval of pooled throughput over plain throughput, prompts drawn in pairs."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(own), (resamples, len(own)))
    ours, theirs = own[drawn].sum(1), plain[drawn].sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (ours[:, 0] / ours[:, 1]) / (theirs[:, 0] / theirs[:, 1])
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return [0.0, 0.0]
    return [float(q) for q in np.quantile(ratios, [0.025, 0.975])]


def acceptance_by_slot(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """For each drafting arm, the share of drafts of slot k that were accepted, of those made."""
    slots: dict[str, list[float]] = {}
    for arm in sorted({r.arm for r in rounds if r.num_draft}):
        mine = [r for r in rounds if r.arm == arm]
        longest = max(r.num_draft for r in mine)
        slots[arm] = [
            _ratio(sum(r.accepted >= k for r in mine), sum(r.num_draft >= k for r in mine))
            for k in range(1, longest + 1)
        ]
    return slots


def time_split(rounds: Sequence[Round], seconds: float) -> dict[str, float]:
    """Share of decode time in each phase; `host` is what lies between them."""
    split = {p: _ratio(sum(r.seconds.get(p, 0.0) for r in rounds), seconds) for p in PHASES}
    return {**split, "host": max(0.0, 1.0 - sum(split.values())) if seconds else 0.0}


def _throughput_table(answers: Sequence[Answer]) -> np.ndarray:
    """[prompts, 2]: tokens and seconds."""
    return np.array(
        [(a.generation.decoded_tokens, a.generation.decode_seconds) for a in answers], dtype=float
    ).reshape(-1, 2)


def _pooled(table: np.ndarray) -> float:
    return _ratio(*table.sum(0).tolist())


def _identical(answers: Sequence[Answer], baseline: Sequence[Answer]) -> float:
    same = [
        a.generation.output_ids.tolist() == b.generation.output_ids.tolist()
        for a, b in zip(answers, baseline, strict=True)
    ]
    return _ratio(sum(same), len(same))


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: _ratio(count, counts.total()) for name, count in sorted(counts.items())}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p95": 0.0}
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}


def _ratio(numerator: float | int, denominator: float | int) -> float:
    return numerator / denominator if denominator else 0.0
