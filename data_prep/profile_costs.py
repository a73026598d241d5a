"""Measure what a round costs on this device: `python data_prep/profile_costs.py`.

Times the parts that the decoder really runs: verification by width and context length, drafting by
arm and length, catch-up by lag, and what is left of a round. Medians, synchronised.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from whiflash_infer.costs import CostModel, DeviceIdentity, fit_line, fit_verify, save_costs
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.policies import EntropyPolicy
from whiflash_infer.sequence import Sequence
from whiflash_infer.target import Target
from whiflash_train.entry import entry_point
from whiflash_train.runner import load_drafters, load_target

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("profile_costs", root=ROOT)
def main(cfg: DictConfig) -> None:
    target = load_target(cfg)
    runners, _ = load_drafters(cfg, target)
    costs, measurements = profile(target, runners, cfg.costs)
    path = Path(cfg.paths.costs)
    save_costs(path, costs, measurements=measurements)
    show(costs, measurements)
    console.print(f"[bold]costs[/bold] written to {path}", soft_wrap=True)


@torch.inference_mode()
def profile(
    target: Target, runners: dict[str, DraftRunner], settings: DictConfig
) -> tuple[CostModel, dict[str, Any]]:
    contexts, lags, repeats = list(settings.contexts), list(settings.lags), settings.repeats
    widest = 1 + max(r.max_draft for r in runners.values())
    verify: dict[int, dict[int, float]] = {}
    draft: dict[str, list[float]] = {}
    catch_up: dict[str, dict[int, float]] = {}
    spread: dict[str, float] = {}
    for context in track(contexts, description="verification", console=console):
        sequence = filled_sequence(target, context, widest)
        verify[context] = {}
        for width in range(1, widest + 1):
            median, relative = timed(partial(read_again, target, sequence, width), repeats)
            verify[context][width] = median
            spread[f"verify context {context} width {width}"] = relative
    context = contexts[len(contexts) // 2]
    sequence = filled_sequence(target, context, widest)
    for arm, runner in track(runners.items(), description="drafting", console=console):
        runner.start(context + widest + 1)
        runner.catch_up(sequence)
        draft[arm] = [0.0]
        for length in range(1, runner.max_draft + 1):
            median, relative = timed(partial(runner.draft, sequence, length), repeats)
            draft[arm].append(max(median, draft[arm][-1]))
            spread[f"draft {arm} {length}"] = relative
        catch_up[arm] = {lag: time_catch_up(runner, sequence, lag, repeats) for lag in lags}
    costs = CostModel(
        device=DeviceIdentity.here(target.device, target.dtype),
        target=target.name,
        verify=fit_verify(verify),
        draft=draft,
        catch_up={arm: fit_line(samples) for arm, samples in catch_up.items()},
        overhead=time_overhead(target, runners),
    )
    return costs, {"verify": verify, "draft": draft, "catch_up": catch_up, "spread": spread}


def filled_sequence(target: Target, context: int, room: int) -> Sequence:
    """A sequence of `context` arbitrary tokens that the target has read."""
    capacity = context + room + 2
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, target.config.vocab_size, (context,), generator=generator)
    ids = ids.to(target.device)
    sequence = Sequence(ids, target.new_cache(capacity), capacity=capacity)
    rows = target.read(ids, sequence.cache, last_only=True)
    sequence.commit(rows.logits.argmax(-1), rows, num_read=context)
    return sequence


def read_again(target: Target, sequence: Sequence, width: int) -> None:
    length = sequence.cache.length
    target.read(sequence.ids[:width], sequence.cache, last_only=False)
    sequence.cache.truncate(length)


def time_catch_up(runner: DraftRunner, sequence: Sequence, lag: int, repeats: int) -> float:
    """Catch-up cannot run twice from the same state, so each time starts a fresh cache."""
    short = sequence.prefix(min(lag, sequence.anchor) + 1)

    def once() -> None:
        runner.start(lag + 16)
        runner.catch_up(short)

    return timed(once, repeats)[0]


def time_overhead(target: Target, runners: dict[str, DraftRunner]) -> float:
    """Routing, acceptance and commit of really decoded rounds."""
    decoder = RoutedDecoder(target, runners, EntropyPolicy(1.0))
    prompt = target.chat.prompt_ids([{"role": "user", "content": "Write a short story."}])
    result = decoder.generate(prompt, max_new_tokens=48, stop_ids=frozenset())
    return statistics.median(r.seconds["route"] + r.seconds["commit"] for r in result.rounds)


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds, and the inter-quartile range relative to it. Two warm-up calls."""
    seconds = []
    for index in range(repeats + 2):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if index >= 2:
            seconds.append(time.perf_counter() - started)
    quartiles = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return median, (quartiles[2] - quartiles[0]) / median


def show(costs: CostModel, measurements: dict[str, Any]) -> None:
    table = Table(title=f"{costs.target} on {costs.device.device}, {costs.device.dtype}")
    table.add_column("part")
    table.add_column("milliseconds")
    contexts = sorted(measurements["verify"])
    for context in contexts:
        cells = [f"{1e3 * s:.1f}" for s in measurements["verify"][context].values()]
        table.add_row(f"verify 1..{len(cells)} tokens, context {context}", " ".join(cells))
    for arm, seconds in costs.draft.items():
        cells = [f"{1e3 * s:.1f}" for s in seconds[1:]]
        table.add_row(f"draft {arm} 1..{len(cells)} tokens", " ".join(cells))
        cells = [f"{lag}: {1e3 * s:.2f}" for lag, s in measurements["catch_up"][arm].items()]
        table.add_row(f"catch up {arm}, by lag", "  ".join(cells))
    table.add_row("route and commit", f"{1e3 * costs.overhead:.2f}")
    console.print(table)
    worst = max(measurements["spread"].values())
    if worst > 0.3:
        console.print(f"noisy machine: quartiles up to {worst:.0%} apart; repeat when it is idle")


if __name__ == "__main__":
    main()
