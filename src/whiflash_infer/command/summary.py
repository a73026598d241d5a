"""What answering took, as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from whiflash_infer.types import Generation


def rounds_by_arm(generations: Sequence[Generation]) -> Counter[str]:
    return Counter(done.arm for generation in generations for done in generation.rounds)


def summary(title: str, generations: Sequence[Generation], *, rate: str) -> Table:
    """rate: tokens a second, and of what."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(generations, rate).items():
        table.add_row(name, value)
    return table


def _facts(generations: Sequence[Generation], rate: str) -> dict[str, str]:
    rounds = [done for generation in generations for done in generation.rounds]
    arms = rounds_by_arm(generations)
    decoded = sum(generation.decoded_tokens for generation in generations)
    shares = [f"{arm} {count:,} ({count / len(rounds):.0%})" for arm, count in arms.most_common()]
    first = [generation.prefill_seconds for generation in generations]
    facts = {
        "tokens": f"{sum(len(g.output_ids) for g in generations):,}",
        "tokens/s": rate,
        "time to first token" if len(first) == 1 else "prompt pass": _median(first),
        "tau": f"{decoded / len(rounds):.2f} tokens a round" if rounds else "-",
        "rounds": ", ".join(shares) or "-",
        "switches": f"{sum(done.switched for done in rounds):,}",
        "ended by": _counted(Counter(g.finish_reason for g in generations)),
    }
    fallbacks = sum((g.fallbacks for g in generations), Counter())
    return facts | ({"fallbacks": _counted(fallbacks)} if fallbacks else {})


def _median(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.3f} s" + (" (median)" if len(seconds) > 1 else "")


def _counted(counts: Counter[str]) -> str:
    if counts.total() == 1:
        return next(iter(counts))
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "-"
