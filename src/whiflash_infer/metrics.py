"""From answered prompts to the numbers of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isfinite
from typing import Any

import numpy as np

from whiflash_infer.statistics import bootstrap_ratio, gains
from whiflash_infer.types import PHASES, PLAIN, Generation, Round

FORMAT = 2  # of metrics.json, when its fields change
_LAG_EDGES = (0, *(1 << power for power in range(13)))
_STRETCH_EDGES = tuple(1 << power for power in range(8))
_ALONG = 8  # output tokens of a bin of `arms_along`


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a round when the answer is: kind of the text that it wrote, and what the
    best arm would have been worth more, in tokens; NaN and "" where that is not known."""

    kind: str
    regret: float
    best_arm: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered under one policy. notes: one of each round, or none at all."""

    prompt_id: str
    category: str
    policy: str
    generation: Generation
    turn: int = 1
    notes: list[Note] = field(default_factory=list)

    @property
    def rounds(self) -> list[Round]:
        return self.generation.rounds

    @property
    def conversation(self) -> str:
        """Turns of one conversation are alike, so intervals draw them together."""
        return self.prompt_id.removesuffix(f"#{self.turn}")


Pairs = Sequence[tuple[Answer, Answer]]  # of one question, under a policy and under its baseline


def by_policy(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers of each policy, all in the same order of prompts."""
    grouped: dict[str, list[Answer]] = {}
    for answer in sorted(answers, key=lambda a: (a.category, a.conversation, a.turn, a.prompt_id)):
        grouped.setdefault(answer.policy, []).append(answer)
    return grouped


def summarise(
    answers: Sequence[Answer],
    *,
    bootstrap: int,
    seed: int,
    baselines: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Of each policy, against its baseline: the cell of all prompts under `overall`, and those of
    parts of them under `by_category`, `by_kind` of the text written and `by_prompt_length`.

    baselines: by policy; the plain arm where none is named.
    """
    grouped, baselines = by_policy(answers), baselines or {}
    report = {}
    for policy, mine in grouped.items():
        pairs = list(zip(mine, grouped[baselines.get(policy, PLAIN)], strict=True))
        report[policy] = {
            "overall": cell(pairs, bootstrap=bootstrap, seed=seed),
            **{
                name: {
                    part: cell(some, bootstrap=bootstrap, seed=seed)
                    for part, some in split(pairs).items()
                }
                for name, split in _PARTS.items()
            },
        }
    return report


def gains_over_static(
    answers: Sequence[Answer], *, bootstrap: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Throughput of every routed policy over that of every single arm, with intervals."""
    grouped = by_policy(answers)
    some = next(iter(grouped.values()))
    return gains(
        {policy: throughput_table(mine) for policy, mine in grouped.items()},
        [answer.category for answer in some],
        [answer.conversation for answer in some],
        resamples=bootstrap,
        seed=seed,
    )


def length_bucket(prompt_length: int) -> str:
    """Lengths up to 64, up to 128 and so on; zeros in front keep them in order."""
    return f"{max(64, 1 << (prompt_length - 1).bit_length()):06d}"


def _split_by(part_of: Callable[[Answer], str]) -> Callable[[Pairs], dict[str, Pairs]]:
    def split(pairs: Pairs) -> dict[str, Pairs]:
        parts = sorted({part_of(own) for own, _ in pairs})
        return {part: [p for p in pairs if part_of(p[0]) == part] for part in parts}

    return split


def _by_kind(pairs: Pairs) -> dict[str, Pairs]:
    """Rounds by the kind of text that they wrote; answers that both hold some of it."""
    kinds = sorted({note.kind for pair in pairs for answer in pair for note in answer.notes})
    found = {kind: [(_of_kind(a, kind), _of_kind(b, kind)) for a, b in pairs] for kind in kinds}
    both = {kind: [p for p in some if p[0].rounds and p[1].rounds] for kind, some in found.items()}
    return {kind: some for kind, some in both.items() if some}


def _of_kind(answer: Answer, kind: str) -> Answer:
    """As though only these rounds had been, with their share of the time between phases."""
    kept = [i for i, note in enumerate(answer.notes) if note.kind == kind]
    rounds = [answer.rounds[i] for i in kept]
    share = _ratio(
        sum(r.total_seconds for r in rounds), sum(r.total_seconds for r in answer.rounds)
    )
    generation = replace(
        answer.generation,
        rounds=rounds,
        decode_seconds=answer.generation.decode_seconds * share,
        prefill_seconds=answer.generation.prefill_seconds * share,
    )
    return replace(answer, generation=generation, notes=[answer.notes[i] for i in kept])


_PARTS: dict[str, Callable[[Pairs], dict[str, Pairs]]] = {
    "by_category": _split_by(lambda answer: answer.category),
    "by_kind": _by_kind,
    "by_prompt_length": _split_by(lambda a: length_bucket(a.generation.prompt_length)),
}


def cell(pairs: Pairs, *, bootstrap: int, seed: int) -> dict[str, Any]:
    """The numbers of one policy over some prompts, each beside its baseline's answer.

    tokens and seconds are those of rounds: the prompt pass and its token are reported apart. tau
    counts the bonus token, pooled over rounds; tau_prompt_mean is the mean of the prompts' means.
    switching_share: routing and catching up, of decode time. switches_p95: of answers.
    fallbacks: how often something failed and a safe arm answered, by what it was.
    """
    answers = [own for own, _ in pairs]
    rounds = [r for a in answers for r in a.rounds]
    tokens = sum(a.generation.decoded_tokens for a in answers)
    seconds = sum(a.generation.decode_seconds for a in answers)
    own, base = throughput_table(answers), throughput_table([other for _, other in pairs])
    clusters = [a.conversation for a in answers]
    per_prompt = [a.generation.decoded_tokens / len(a.rounds) for a in answers if a.rounds]
    split = time_split(rounds, seconds)
    regrets = [n.regret for a in answers for n in a.notes if isfinite(n.regret)]
    return {
        "prompts": len(answers),
        "tokens": tokens,
        "rounds": len(rounds),
        "seconds": seconds,
        "prefill_seconds": sum(a.generation.prefill_seconds for a in answers),
        "tokens_per_s": _ratio(tokens, seconds),
        "speedup": _ratio(_pooled(own), _pooled(base)),
        "speedup_ci": bootstrap_ratio(own, base, resamples=bootstrap, seed=seed, clusters=clusters),
        "tau": _ratio(tokens, len(rounds)),
        "tau_prompt_mean": float(np.mean(per_prompt)) if per_prompt else 0.0,
        "seconds_per_round": _ratio(seconds, len(rounds)),
        "arm_ratio": _shares(Counter(r.arm for r in rounds)),
        "switches_per_100_rounds": 100 * _ratio(sum(r.switched for r in rounds), len(rounds)),
        "switches_p95": _percentiles([_switches(a) for a in answers if a.rounds])["p95"],
        "time_split": split,
        "switching_share": split["route"] + split["catch_up"],
        "round_ms": _percentiles([1e3 * r.total_seconds for r in rounds]),
        "acceptance_by_slot": acceptance_by_slot(rounds),
        "lags": _histogram([r.lag for r in rounds if r.num_draft], _LAG_EDGES),
        "stretches": _histogram(_stretches(answers), _STRETCH_EDGES),
        "arms_along": arms_along(answers),
        "regret": float(np.mean(regrets)) if regrets else None,
        "identical": _identical(pairs),
        "fallbacks": dict(sum((a.generation.fallbacks for a in answers), Counter[str]())),
    }


def arms_along(answers: Sequence[Answer]) -> dict[str, Any]:
    """Share of rounds by arm, by how many tokens of the answer were there when they began.

    edges: where the bins begin.
    """
    started = [
        ((r.position + 1 - a.generation.prompt_length) // _ALONG, r.arm)
        for a in answers
        for r in a.rounds
    ]
    num_bins = 1 + max((place for place, _ in started), default=-1)
    totals, counts = Counter(place for place, _ in started), Counter(started)
    return {
        "edges": [place * _ALONG for place in range(num_bins)],
        "shares": {
            arm: [_ratio(counts[place, arm], totals[place]) for place in range(num_bins)]
            for arm in sorted({arm for _, arm in started})
        },
    }


def _stretches(answers: Sequence[Answer]) -> list[int]:
    """Rounds that one arm was kept in a row."""
    return [len(list(run)) for a in answers for _, run in groupby(a.rounds, lambda r: r.arm)]


def _switches(answer: Answer) -> float:
    """Of 100 rounds."""
    return 100 * sum(r.switched for r in answer.rounds) / len(answer.rounds)


def _histogram(values: Sequence[int], edges: Sequence[int]) -> dict[str, list[int]]:
    """Bin i counts values from edges[i] on to below the next edge; the last one has no end."""
    counts = np.bincount(np.searchsorted(edges, values, side="right") - 1, minlength=len(edges))
    used = int(np.flatnonzero(counts).max(initial=0)) + 1
    return {"edges": list(edges[:used]), "counts": counts[:used].tolist()}


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


def throughput_table(answers: Sequence[Answer]) -> np.ndarray:
    """[prompts, 2]: tokens and seconds."""
    return np.array(
        [(a.generation.decoded_tokens, a.generation.decode_seconds) for a in answers], dtype=float
    ).reshape(-1, 2)


def _pooled(table: np.ndarray) -> float:
    return _ratio(*table.sum(0).tolist())


def _identical(pairs: Pairs) -> float:
    same = [is_identical(own, other) for own, other in pairs]
    return _ratio(sum(same), len(same))


def is_identical(own: Answer, other: Answer) -> bool:
    return own.generation.output_ids.tolist() == other.generation.output_ids.tolist()


def _shares(counts: Counter[str]) -> dict[str, float]:
    return {name: _ratio(count, counts.total()) for name, count in sorted(counts.items())}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p95": 0.0}
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}


def _ratio(numerator: float | int, denominator: float | int) -> float:
    return numerator / denominator if denominator else 0.0
