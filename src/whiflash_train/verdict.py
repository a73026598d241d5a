"""Whether routing pays on the validation conversations, in numbers and in plain sentences.

All policies were replayed over the same conversations. Intervals are of 95 %, from drawing
conversations in pairs; names of policies are those of `whiflash_infer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from whiflash_infer.routing.replay import Replayed
from whiflash_infer.statistics import bootstrap_ratio
from whiflash_infer.types import PLAIN

_WORTH = 1.03  # a ceiling below this gain over the best static arm is not worth a router
_LOSES = 0.97  # a category in which the router reaches less of the best static arm is told
_ONE_CHOICE = 0.98  # share of rounds with one arm and length from which a router has collapsed
_FEW = 30  # conversations
ORACLE_PATH, CEILING, ENTROPY, HAZARD = "oracle_path", "ceiling", "entropy", "hazard"


@dataclass(frozen=True, slots=True)
class Gain:
    """Ratio of pooled tokens/s, with its interval."""

    ratio: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        return self.low <= 1.0 <= self.high

    def __str__(self) -> str:
        return f"{_percent(self.ratio)} ({_points(self.low)} to {_points(self.high)})"


@dataclass(frozen=True, slots=True)
class ArmGap:
    """How far the static arms lie apart. tokens_per_s: by policy; over_second: the best of them
    over the one behind it, None where it is alone; over_plain: None where plain is missing."""

    conversations: int
    tokens_per_s: dict[str, float]
    best: str
    over_second: Gain | None
    over_plain: Gain | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """numbers: for a manifest, JSON throughout."""

    numbers: dict[str, Any]
    sentences: tuple[str, ...]


def paired_gain(ours: Replayed, theirs: Replayed, *, resamples: int = 2000, seed: int = 0) -> Gain:
    """Texts of which neither has a round are as if they did not exist."""
    return _gain_of_tables(ours.by_text(), theirs.by_text(), resamples=resamples, seed=seed)


def by_category(replayed: Replayed, categories: Sequence[str]) -> dict[str, Replayed]:
    """categories: of each text."""
    return {
        name: replayed.of([text for text, own in enumerate(categories) if own == name])
        for name in sorted(set(categories))
    }


def arm_gap(statics: Mapping[str, Replayed]) -> ArmGap:
    speeds = {name: replayed.tokens_per_s for name, replayed in statics.items()}
    best, *others = sorted(speeds, key=lambda name: -speeds[name])
    over_second = paired_gain(statics[best], statics[others[0]]) if others else None
    over_plain = paired_gain(statics[best], statics[PLAIN]) if PLAIN in statics else None
    return ArmGap(_num_texts(statics[best]), speeds, best, over_second, over_plain)


def regret(replayed: Replayed, statics: Mapping[str, Replayed]) -> float:
    """Share of throughput that is lost against the static arm that is fastest in each text; below
    zero where changing arms within texts gains more than that."""
    tables = np.stack([static.by_text() for static in statics.values()])
    seconds = tables[:, :, 1].min(0).sum()
    return 1.0 - replayed.tokens_per_s / float(tables[0, :, 0].sum() / seconds)


def one_choice(replayed: Replayed) -> tuple[str, int, float]:
    """The commonest arm and draft length, and its share of rounds; rounds whose length the end of
    the text may have cut do not count."""
    pairs = np.stack([replayed.arm, replayed.num_draft], axis=1)
    kinds, counts = np.unique(pairs, axis=0, return_counts=True)
    arm, num_draft = kinds[counts.argmax()].tolist()
    ends = np.zeros(replayed.num_texts, dtype=int)
    np.maximum.at(ends, replayed.text, replayed.position + replayed.committed)
    is_free = ends[replayed.text] - replayed.position > num_draft + 1
    counted = pairs[is_free] if is_free.any() else pairs
    share = float((counted == [arm, num_draft]).all(1).mean())
    return replayed.arms[arm], num_draft, share


def before_training(
    statics: Mapping[str, Replayed],
    oracles: Mapping[str, Replayed],
    ceiling: Replayed | None,
    categories: Sequence[str],
) -> Verdict:
    """statics, oracles: by policy, `oracle_path` among the oracles. ceiling: the predictable one;
    without it, only hindsight says what could be gained."""
    known = {} if ceiling is None else {CEILING: ceiling}
    numbers = _numbers({**statics, **known, **oracles}, statics, categories)
    best = statics[numbers["best_static"]]
    gains = {
        "ceiling": None if ceiling is None else paired_gain(ceiling, best),
        "hindsight": paired_gain(oracles[ORACLE_PATH], best),
        "category_alone": _category_alone(statics, categories),
    }
    sentences = [_prospect(numbers["best_static"], gains["ceiling"], gains["hindsight"])]
    sentences += _category_sentences(gains["category_alone"], numbers["arm_gap"]["by_category"])
    sentences += _few_sentences(best)
    return Verdict({"stage": "before", **numbers, "gains": _plain(gains)}, tuple(sentences))


def after_training(
    hazard: Replayed,
    statics: Mapping[str, Replayed],
    oracles: Mapping[str, Replayed],
    ceiling: Replayed | None,
    entropy: Replayed | None,
    others: Mapping[str, Replayed],
    categories: Sequence[str],
) -> Verdict:
    """others: further policies that the router has to stand beside; entropy: None where one of its
    two arms is missing. See `before_training`."""
    known = {} if ceiling is None else {CEILING: ceiling}
    rivals = {**({} if entropy is None else {ENTROPY: entropy}), **others}
    policies = {**statics, **rivals, HAZARD: hazard, **known, **oracles}
    numbers = _numbers(policies, statics, categories)
    best = numbers["best_static"]
    gains = {
        "hazard": paired_gain(hazard, statics[best]),
        "ceiling": None if ceiling is None else paired_gain(ceiling, statics[best]),
        "hindsight": paired_gain(oracles[ORACLE_PATH], statics[best]),
        "category_alone": _category_alone(statics, categories),
    }
    over_rivals = {name: paired_gain(hazard, rival) for name, rival in rivals.items()}
    gaps = numbers["arm_gap"]["by_category"]
    in_categories = _gains_by_category(hazard, statics, categories, gaps)
    collapsed = _collapsed(hazard, best, gains["hazard"], gains["ceiling"])
    sentences = [
        *_outcome(best, gains["hazard"], gains["ceiling"], has_collapsed=bool(collapsed)),
        *collapsed,
        *_losing_categories(in_categories, gaps),
        *_rival_sentences(over_rivals),
        *_category_sentences(gains["category_alone"], gaps),
        *_few_sentences(hazard),
    ]
    arm, num_draft, share = one_choice(hazard)
    numbers |= {
        "stage": "after",
        "gains": _plain(gains),
        "over_rivals": _plain(over_rivals),
        "over_best_static_by_category": _plain(in_categories),
        "commonest_choice": {"arm": arm, "num_draft": num_draft, "share": share},
        "collapsed": bool(collapsed),
        "regret": regret(hazard, statics),
        "share_of_oracle": _share(hazard, oracles[ORACLE_PATH]),
        "share_of_ceiling": None if ceiling is None else _share(hazard, ceiling),
        "share_of_ceiling_gain": _share_of_gain(gains["hazard"], gains["ceiling"]),
    }
    return Verdict(numbers, tuple(sentences))


def _numbers(
    policies: Mapping[str, Replayed], statics: Mapping[str, Replayed], categories: Sequence[str]
) -> dict[str, Any]:
    parts = {name: by_category(static, categories) for name, static in statics.items()}
    gaps = {
        category: arm_gap({name: parts[name][category] for name in statics})
        for category in sorted(set(categories))
    }
    overall = arm_gap(statics)
    fastest = policies[ORACLE_PATH]
    return {
        "conversations": overall.conversations,
        "best_static": overall.best,
        "policies": {
            name: _cell(replayed, fastest, categories) for name, replayed in policies.items()
        },
        "arm_gap": {
            "overall": asdict(overall),
            "by_category": {name: asdict(gap) for name, gap in gaps.items()},
        },
    }


def _cell(replayed: Replayed, fastest: Replayed, categories: Sequence[str]) -> dict[str, Any]:
    rounds = max(1, replayed.rounds)
    return {
        "tokens_per_s": replayed.tokens_per_s,
        "tau": replayed.tau,
        "seconds_per_round": replayed.total_seconds / rounds,
        "rounds": replayed.rounds,
        "switches_per_100_rounds": 100 * replayed.switches / rounds,
        "arms": replayed.arm_shares,
        "share_of_oracle": _share(replayed, fastest),
        "by_category": {
            category: {
                "tokens_per_s": part.tokens_per_s,
                "tau": part.tau,
                "conversations": _num_texts(part),
            }
            for category, part in by_category(replayed, categories).items()
        },
    }


def _gains_by_category(
    hazard: Replayed,
    statics: Mapping[str, Replayed],
    categories: Sequence[str],
    gaps: Mapping[str, Any],
) -> dict[str, Gain]:
    """Over the static arm that is best in that category."""
    return {
        category: paired_gain(
            part, by_category(statics[gaps[category]["best"]], categories)[category]
        )
        for category, part in by_category(hazard, categories).items()
    }


def _category_alone(statics: Mapping[str, Replayed], categories: Sequence[str]) -> Gain:
    """Of the static arm that is best in each category over the best of all."""
    tables = {name: static.by_text() for name, static in statics.items()}
    best = max(statics, key=lambda name: statics[name].tokens_per_s)
    chosen = np.zeros_like(tables[best])
    labels = np.array(categories)
    for category in sorted(set(categories)):
        rows = labels == category
        chosen[rows] = max((table[rows] for table in tables.values()), key=_speed)
    return _gain_of_tables(chosen, tables[best])


def _speed(table: Float[np.ndarray, "T 2"]) -> float:
    tokens, seconds = table.sum(0).tolist()
    return tokens / seconds if seconds else 0.0


def _gain_of_tables(
    ours: Float[np.ndarray, "T 2"],
    theirs: Float[np.ndarray, "T 2"],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Gain:
    held = (ours != 0).any(1) | (theirs != 0).any(1)
    ours, theirs = ours[held], theirs[held]
    slower = _speed(theirs)
    if not slower:
        return Gain(0.0, 0.0, 0.0)
    low, high = bootstrap_ratio(ours, theirs, resamples=resamples, seed=seed)
    return Gain(_speed(ours) / slower, low, high)


def _collapsed(hazard: Replayed, best: str, gain: Gain, ceiling: Gain | None) -> list[str]:
    """One sentence where the router makes one choice, or nothing of what could be had."""
    arm, num_draft, share = one_choice(hazard)
    percent = f"{100 * share:.0f} % of rounds"
    if share >= _ONE_CHOICE and gain.low > 1.0:
        used = f"it uses {arm} with {num_draft} drafts in {percent}"
        return [f"the router has collapsed: {used}, which alone is its gain over {best}"]
    if share >= _ONE_CHOICE:
        return [f"the router has collapsed: it uses {arm} in {percent} and does not beat {best}"]
    if gain.is_noise and ceiling is not None and ceiling.ratio >= _WORTH:
        return [
            f"the router has collapsed: hazard {gain} over {best} is no gain, although the ceiling "
            f"offers {_percent(ceiling.ratio)}"
        ]
    return []


def _prospect(best: str, ceiling: Gain | None, hindsight: Gain) -> str:
    arm = best.removeprefix("static_")
    if ceiling is None:
        limit, name = hindsight, "hindsight"
    else:
        limit, name = ceiling, "ceiling"
    if limit.ratio < _WORTH:
        return f"not worth routing here: best static arm {arm}, {name} {limit}"
    luck = f"with hindsight {_percent(hindsight.ratio)}, which is partly luck"
    if ceiling is None:
        return f"routing may pay: {luck}, over {best}"
    verb = "may" if ceiling.low <= 1.0 else "can"
    return f"routing {verb} pay: ceiling {ceiling} over {best}; {luck}"


def _outcome(best: str, gain: Gain, ceiling: Gain | None, *, has_collapsed: bool) -> list[str]:
    told = f"hazard {gain} over {best}"
    if gain.low > 1.0:
        share = _share_of_gain(gain, ceiling)
        part = "" if share is None else f", {100 * share:.0f} % of the predictable ceiling's gain"
        return [f"routing pays: {told}{part}"]
    if ceiling is not None and ceiling.ratio < _WORTH:
        arm = best.removeprefix("static_")
        return [f"not worth routing here: best static arm {arm}, ceiling {ceiling}; {told}"]
    if gain.high < 1.0:
        return [f"routing loses: {told}"]
    return [] if has_collapsed else [f"routing does not pay so far: {told}"]


def _losing_categories(gains: Mapping[str, Gain], gaps: Mapping[str, Any]) -> list[str]:
    return [
        f"{category}: hazard is {100 * (1 - gain.ratio):.1f} % below {gaps[category]['best']} "
        f"({100 * (1 - gain.high):.1f} to {100 * (1 - gain.low):.1f})"
        for category, gain in gains.items()
        if gain.ratio < _LOSES
    ]


def _rival_sentences(gains: Mapping[str, Gain]) -> list[str]:
    """Of the entropy gate always, of others only where they are better."""
    known = [gains[ENTROPY]] if ENTROPY in gains else []
    sentences = [f"hazard {gain} over the entropy gate" for gain in known]
    for name, gain in gains.items():
        if gain.high < 1.0:
            better = Gain(1 / gain.ratio, 1 / gain.high, 1 / gain.low)
            sentences.append(f"{name} is better here: {better} over hazard")
    return sentences


def _category_sentences(alone: Gain, gaps: Mapping[str, Any]) -> list[str]:
    bests = {gap["best"] for gap in gaps.values()}
    if len(gaps) < 2:
        return []
    if len(bests) == 1:
        return [f"{bests.pop()} is the best static arm in every category"]
    return [f"routing by category alone gives {_percent(alone.ratio)}"]


def _few_sentences(replayed: Replayed) -> list[str]:
    count = _num_texts(replayed)
    few = f"the validation conversations are few ({count}): intervals are wide"
    return [few] if count < _FEW else []


def _num_texts(replayed: Replayed) -> int:
    return len(np.unique(replayed.text))


def _share(ours: Replayed, theirs: Replayed) -> float:
    return ours.tokens_per_s / theirs.tokens_per_s if theirs.tokens_per_s else 0.0


def _share_of_gain(gain: Gain, ceiling: Gain | None) -> float | None:
    if ceiling is None or ceiling.ratio <= 1.0:
        return None
    return (gain.ratio - 1) / (ceiling.ratio - 1)


def _plain(gains: Mapping[str, Gain | None]) -> dict[str, Any]:
    return {name: None if gain is None else asdict(gain) for name, gain in gains.items()}


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _points(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f}"


def show(console: Console, verdict: Verdict) -> None:
    """Policies, then arms by category, then the sentences."""
    wide = Console(file=console.file, width=max(console.width, 132))
    wide.print(_policy_table(verdict.numbers))
    wide.print(_speed_table(verdict.numbers))
    wide.print(_gap_table(verdict.numbers))
    for sentence in verdict.sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def _policy_table(numbers: Mapping[str, Any]) -> Table:
    table = Table(title=f"replayed over {numbers['conversations']} conversations")
    table.add_column("policy", no_wrap=True)
    for name in ("tokens/s", "tau", "ms a round", "switches", "of oracle", "arms"):
        table.add_column(name, justify="right", no_wrap=name != "arms")
    for name, cell in numbers["policies"].items():
        table.add_row(
            name,
            f"{cell['tokens_per_s']:.1f}",
            f"{cell['tau']:.2f}",
            f"{1e3 * cell['seconds_per_round']:.1f}",
            f"{cell['switches_per_100_rounds']:.0f}/100",
            f"{cell['share_of_oracle']:.1%}",
            " ".join(f"{arm} {share:.0%}" for arm, share in cell["arms"].items()),
        )
    return table


def _gap_rows(numbers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Gaps by what the first column says."""
    gaps = numbers["arm_gap"]
    return {"[bold]overall[/bold]": gaps["overall"], **gaps["by_category"]}


def _speed_table(numbers: Mapping[str, Any]) -> Table:
    table = Table(title="static arms by category, tokens/s")
    table.add_column("category", no_wrap=True)
    statics = list(numbers["arm_gap"]["overall"]["tokens_per_s"])
    for name in ["conversations", *statics]:
        table.add_column(name, justify="right", no_wrap=True)
    for category, gap in _gap_rows(numbers).items():
        speeds = [
            f"[bold]{speed:.1f}[/bold]" if name == gap["best"] else f"{speed:.1f}"
            for name, speed in gap["tokens_per_s"].items()
        ]
        table.add_row(category, str(gap["conversations"]), *speeds)
    return table


def _gap_table(numbers: Mapping[str, Any]) -> Table:
    """How far static arms lie apart; and where the router is trained, what it adds to the best."""
    trained = numbers.get("over_best_static_by_category")
    table = Table(title="best static arm by category, with 95 % intervals")
    columns = ["category", "best", "over second", "over plain"]
    for name in columns if trained is None else [*columns, "hazard over best"]:
        table.add_column(name, justify="right", no_wrap=True)
    own = [] if trained is None else [numbers["gains"]["hazard"], *trained.values()]
    for row, (category, gap) in enumerate(_gap_rows(numbers).items()):
        gains = [gap["over_second"], gap["over_plain"], *own[row : row + 1]]
        told = ["" if gain is None else str(Gain(**gain)) for gain in gains]
        table.add_row(category, gap["best"], *told)
    return table


def show_calibration(console: Console, calibration: Mapping[str, Mapping[str, Any]]) -> None:
    """Expected tokens at full length against those that came, by arm and category."""
    table = Table(title="calibration: tokens expected too many, by category")
    for name in ("arm", "mean error", "all"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for category in next(iter(calibration.values()))["by_category"]:
        table.add_column(category, justify="right")
    for arm, found in calibration.items():
        biases = [found["bias"], *(part["bias"] for part in found["by_category"].values())]
        table.add_row(arm, f"{found['error']:.3f}", *(f"{bias:+.3f}" for bias in biases))
    console.print(table)
