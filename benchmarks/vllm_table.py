"""What the cases of `vllm_serving.py` say beside each other: identity, acceptance, the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Case = Mapping[str, Any]  # as `vllm_serving.py` writes it
SAME_TASK = ("prompts", "dtype", "max_tokens")
PAIRS = {"eagle3": "static_ar", "dflash": "static_diffusion"}  # vLLM's method, and our arm alone


def judged(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The cases with their rates, acceptance lengths, and identity with no drafts in vLLM."""
    return [
        {
            **case,
            "tokens_per_s": ratio(case["tokens"], case.get("seconds", 0)),
            "decode_tokens_per_s": ratio(
                case.get("decode_tokens", 0), case.get("decode_seconds", 0)
            ),
            "acceptance_length": length(case, "accepted"),
            **identity(case, cases),
        }
        for case in cases
    ]


def identity(case: Case, cases: Sequence[Case]) -> dict[str, Any]:
    """Request by request. first_differences: position in the answer, of those that differ."""
    plain = plain_of(case, cases)
    if plain is None or plain is case:
        return {}
    aborted = {case.get("aborted"), plain.get("aborted")}
    differences = {
        name: difference(text.split(), plain["ids"][name].split(), cut=name in aborted)
        for name, text in case["ids"].items()
    }
    found = {name: place for name, place in differences.items() if place is not None}
    return {
        "compared_with": f"none, {plain['concurrency']} at a time",
        "compared": len(differences),
        "same": len(differences) - len(found),
        "first_differences": found,
    }


def plain_of(case: Case, cases: Sequence[Case]) -> Case | None:
    """Without drafts, for the same prompts; run like this case, where there is such a one."""
    plain = [
        other
        for other in cases
        if other["method"] == "none" and all(other[key] == case[key] for key in SAME_TASK)
    ]
    alike = ("concurrency", "prefix_caching", "chunked_tokens")
    return max(plain, key=lambda o: [o[key] == case[key] for key in alike], default=None)


def difference(ids: Sequence[str], others: Sequence[str], *, cut: bool) -> int | None:
    """Place of the first token that differs. cut: one of them was aborted, so it is a beginning of
    the other."""
    shorter = min(len(ids), len(others))
    unlike = (i for i in range(shorter) if ids[i] != others[i])
    return next(unlike, None if cut or len(ids) == len(others) else shorter)


def acceptance(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Of our engine's arms and the cases in vLLM that drafted the same."""
    return [
        {
            "method": case["method"],
            "draft_tokens": case["draft_tokens"],
            "concurrency": case["concurrency"],
            "prefix_caching": case["prefix_caching"],
            "vllm": length(case, "accepted"),
            "ours": length(own, "accepted"),
            "ours_cut": length(own, "accepted_cut"),
            "ratio": ratio(length(case, "accepted"), length(own, "accepted")),
        }
        for own in cases
        if own["engine"] == "whiflash"
        for case in cases
        if case["engine"] == "vllm" and drafts_alike(case, own)
    ]


def drafts_alike(case: Case, own: Case) -> bool:
    arm = PAIRS.get(case["method"], case["method"])
    keys = (*SAME_TASK, "draft_tokens")
    return arm == own["method"] and all(case[key] == own[key] for key in keys)


def length(case: Case, accepted: str) -> float:
    """1 + accepted / drafts; 1 where nothing was drafted."""
    return 1 + ratio(case[accepted], case["drafts"])


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def show(console: Console, cases: Sequence[Case]) -> None:
    """cases: as `judged` makes them."""
    titles = ("tokens/s", "decoding", "length", "as none")
    draw(console, "greedy; length as vLLM counts", titles, [(case, row(case)) for case in cases])
    routed = [(case, proposer_row(case)) for case in cases if "whiflash" in case]
    if routed:
        draw(console, "our proposer, by step", ("ms", "states left", "arms"), routed)
    for pair in acceptance(cases):
        console.print(
            f"{pair['method']}, {pair['draft_tokens']} drafts, {pair['concurrency']} at a time: "
            f"{pair['vllm']:.3f} in vLLM, {pair['ours']:.3f} in our engine "
            f"({pair['ratio'] - 1:+.1%}); {pair['ours_cut']:.3f} cut at the end of answers",
            highlight=False,
        )


def draw(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[tuple[Case, list[str]]]
) -> None:
    table = Table(title=title)
    for column in ("method", "texts", "cache", *columns):
        table.add_column(column, justify="left" if column in ("method", "arms") else "right")
    for case, cells in rows:
        name = case["method"] if case["engine"] == "vllm" else f"{case['method']} (ours)"
        caching = "on" if case["prefix_caching"] else "off"
        table.add_row(name, str(case["concurrency"]), caching, *cells)
    console.print(table)


def row(case: Case) -> list[str]:
    return [
        rate(case["tokens_per_s"]),
        rate(case["decode_tokens_per_s"]),
        f"{case['acceptance_length']:.3f}" if case["drafts"] else "",
        sameness(case),
    ]


def proposer_row(case: Case) -> list[str]:
    own = case["whiflash"]
    shares = {arm: found["share"] for arm, found in own["arms"].items()}
    spent = own["proposer_seconds_per_step"]
    return [
        "" if spent is None else f"{1e3 * spent:.1f}",
        str(own["states_at_end"]),
        ", ".join(f"{arm} {share:.0%}" for arm, share in shares.items()),
    ]


def rate(value: float) -> str:
    return f"{value:.1f}" if value else ""


def sameness(case: Case) -> str:
    if "same" not in case:
        return ""
    told = f"{case['same']} of {case['compared']}"
    places = sorted(case["first_differences"].values())
    return f"{told}, from token {places[0]}" if places else told
