"""The tables of an evaluation on screen, and what looks wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from whiflash_infer.metrics import Answer

console = Console()
_UNTRAINED = 1.1  # tau of a drafter that has hardly learnt


def show(metrics: dict[str, Any]) -> None:
    """The table on screen: overall, then by category; and what looks wrong."""
    facts = metrics["header"]
    title = (
        f"{facts['target']}, {facts['dtype']}, {facts['device']}, {facts['threads']} threads, "
        f"{facts['prompts']} prompts, temperature {facts['temperature']:g}"
    )
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("tokens/s", "speed-up", "95 % interval", "tau", "arms", "switches", "identical"):
        table.add_column(name, justify="right", no_wrap=name != "arms")
    policies = metrics["policies"]
    for policy, report in policies.items():
        table.add_row(policy, *_cells(report["overall"]))
    for category in next(iter(policies.values()))["by_category"]:
        table.add_section()
        table.add_row(f"[bold]{category}[/bold]")
        for policy, report in policies.items():
            table.add_row(f"  {policy}", *_cells(report["by_category"][category]))
    wide = _wide()
    wide.print(table)
    _show_parts(policies, "by_prompt_length", "tau by prompt length", _length_label, wide)
    _show_parts(policies, "by_kind", "tau by kind of text", str, wide)
    _show_time_split(policies, wide)
    _show_ablation(metrics["ablation"], wide)
    _show_claims(metrics["claims"], wide)
    _show_verdict(policies, metrics["header"])
    _show_fallbacks(policies)


def _wide() -> Console:
    return Console(width=max(console.width, 132))


def _cells(one: dict[str, Any]) -> list[str]:
    arms = " ".join(f"{arm} {share:.0%}" for arm, share in one["arm_ratio"].items())
    return [
        f"{one['tokens_per_s']:.1f}",
        f"{one['speedup']:.2f}x",
        _interval(one),
        f"{one['tau']:.2f}",
        arms,
        f"{one['switches_per_100_rounds']:.0f}/100",
        f"{one['identical']:.0%}",
    ]


def _interval(one: Mapping[str, Any]) -> str:
    """One prompt alone has none."""
    low, high = one["speedup_ci"]
    return f"{low:.2f} - {high:.2f}" if low < high else "-"


def _show_parts(
    policies: Mapping[str, Any],
    parts: str,
    title: str,
    label: Callable[[str], str],
    wide: Console,
) -> None:
    """tau where there are several parts: a drafter may know some of them only."""
    first = next(iter(policies.values()))[parts]
    if len(first) < 2:
        return
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for part, one in first.items():
        table.add_column(f"{label(part)} ({one['prompts']})", justify="right")
    for policy, report in policies.items():
        cells = [report[parts].get(part) for part in first]
        table.add_row(policy, *("" if one is None else f"{one['tau']:.2f}" for one in cells))
    wide.print(table)


def _length_label(bucket: str) -> str:
    return f"to {int(bucket)}"


def _show_time_split(policies: dict[str, Any], wide: Console) -> None:
    table = Table(title="share of decode time")
    table.add_column("policy")
    phases = list(next(iter(policies.values()))["overall"]["time_split"])
    for phase in phases:
        table.add_column(phase.replace("_", "-"), justify="right")
    table.add_column("round p50 ms", justify="right")
    table.add_column("p95 ms", justify="right")
    for policy, report in policies.items():
        split, latency = report["overall"]["time_split"], report["overall"]["round_ms"]
        shares = [f"{split[phase]:.1%}" for phase in phases]
        table.add_row(policy, *shares, f"{latency['p50']:.1f}", f"{latency['p95']:.1f}")
    wide.print(table)


def _show_ablation(rows: Sequence[Mapping[str, Any]], wide: Console) -> None:
    if not rows:
        return
    table = Table(title="varied one at a time")
    for name in ("policy", "varied", "value"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "speed-up", "95 % interval", "tau", "switching"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in rows:
        table.add_row(
            one["policy"],
            one["varied"],
            str(one["value"]),
            f"{one['tokens_per_s']:.1f}",
            f"{one['speedup']:.2f}x",
            _interval(one),
            f"{one['tau']:.2f}",
            f"{one['switching_share']:.1%}",
        )
    wide.print(table)


def _show_claims(claims: Sequence[Mapping[str, Any]], wide: Console) -> None:
    if not claims:
        return
    table = Table(title="the paper's claims, and this evaluation")
    for name in ("claim", "paper", "here", "holds"):
        table.add_column(name)
    words = {True: "yes", False: "no", None: "cannot be told"}
    for one in claims:
        table.add_row(one["claim"], one["paper"], one["here"], words[one["holds"]])
    wide.print(table)


def _show_verdict(policies: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    overall = {name: report["overall"] for name, report in policies.items()}
    drafting = {n: c for n, c in overall.items() if n.startswith("static_")}
    if drafting:
        best = max(drafting, key=lambda n: drafting[n]["tokens_per_s"])
        speedup = drafting[best]["speedup"]
        verb = "beats" if speedup > 1 else "does not beat"
        console.print(f"{best} {verb} plain decoding: {speedup:.2f}x")
    hardly = [f"{n}: tau {c['tau']:.2f}" for n, c in drafting.items() if c["tau"] < _UNTRAINED]
    if hardly:
        warn(f"{'; '.join(hardly)}. That is a nearly untrained drafter, or a wrong one. Check")
        for line in check_list(header):
            console.print(f"  - {line}", soft_wrap=True, highlight=False)


def check_list(header: Mapping[str, Any]) -> list[str]:
    """What to look at when hardly a draft is accepted, with the values of this run."""
    return [
        f"chat template: {header['chat_template']}, options {header['chat']}. Was the drafter "
        "trained on conversations rendered so? (show_mask=3 shows rows with the trained tokens)",
        f"tap layers: {header['tap_layer_ids']}, outputs of decoder layers counted from 0. A "
        "drafter made elsewhere may count them otherwise: convert it with whiflash_infer.exchange",
        "vocabulary: the drafter's d2t must map into this target's tokens, the commonest ones",
        "rope: theta, scaling and position offset in the drafter's config.json as in training",
        f"dtype: {header['dtype']}. Evaluate once with dtype=float32; tau should hardly move",
        "training: val/tau in the drafter's manifest.json. If it is near 1 too, train longer",
    ]


def _show_fallbacks(policies: dict[str, Any]) -> None:
    for name, report in policies.items():
        if counts := report["overall"]["fallbacks"]:
            told = ", ".join(f"{what} {count}" for what, count in counts.items())
            warn(f"{name}: something failed and a safe arm answered in its place: {told}")


def show_errors(answers: Sequence[Answer]) -> None:
    """Answers that ended before their end, which every number above counts as they are."""
    for answer in answers:
        if error := answer.generation.error:
            warn(f"{answer.policy}, prompt {answer.prompt_id}: {error}; its answer ends there")


def warn(sentence: str) -> None:
    console.print(f"[bold yellow]warning[/bold yellow]: {sentence}", soft_wrap=True)
