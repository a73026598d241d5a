"""Measure what a round costs on this device: `python data_prep/profile_costs.py`.

Times the parts that the decoder really runs: verification by width and context length, drafting by
arm and length, catch-up by lag, and what is left of a round. Medians, synchronised. Chains only:
what a tree costs is not asked yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from whiflash_infer.costs import CostModel, DeviceIdentity, fit_line, fit_verify, save_costs
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import chains
from whiflash_infer.drafting import default_widths
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.policies import EntropyPolicy
from whiflash_infer.requests import Request, make_request
from whiflash_infer.rows import Rows
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree, chain
from whiflash_infer.verification import judge, keep_path, read_drafts
from whiflash_train.entry import entry_point
from whiflash_train.runner import engine_settings, load_drafters, load_target

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("profile_costs", root=ROOT)
def main(cfg: DictConfig) -> None:
    target = load_target(cfg)
    arms, _ = load_drafters(cfg, target)
    costs, measurements = profile(target, arms, engine_settings(cfg, arms), cfg.costs)
    path = Path(cfg.paths.costs)
    save_costs(path, costs, measurements=measurements)
    show(costs, measurements)
    console.print(f"[bold]costs[/bold] written to {path}", soft_wrap=True)


@torch.inference_mode()
def profile(
    target: Target, arms: dict[str, Arm], engine: EngineSettings, settings: DictConfig
) -> tuple[CostModel, dict[str, Any]]:
    """arms: all of them, since a round is padded to widths that trees bring about, too."""
    contexts, lags, repeats = list(settings.contexts), list(settings.lags), settings.repeats
    verify: dict[int, dict[int, float]] = {}
    draft: dict[str, list[float]] = {}
    catch_up: dict[str, dict[int, float]] = {}
    spread: dict[str, float] = {}
    widths = read_widths(arms, engine)
    rows = Rows(target, arms)
    if engine.compile:
        target.compile()
    for context in track(contexts, description="verification", console=console):
        fill(rows, target, context, room=max(widths.values()))
        verify[context], told = time_verification(rows, target, widths, engine, repeats)
        spread |= {f"verify context {context} width {w}": part for w, part in told.items()}
    fill(rows, target, contexts[len(contexts) // 2], room=max(widths.values()))
    for name, arm in track(chains(arms).items(), description="drafting", console=console):
        arm.drafter.catch_up(rows.texts, [0])
        draft[name] = [0.0]
        for length in range(1, arm.max_draft + 1):
            median, relative = timed(partial(arm.draft, rows.texts, [0], [length]), repeats)
            draft[name].append(max(median, draft[name][-1]))
            spread[f"draft {name} {length}"] = relative
        catch_up[name] = {lag: time_catch_up(rows, arm, lag, engine, repeats) for lag in lags}
    costs = CostModel(
        device=DeviceIdentity.here(target.device, target.dtype),
        target=target.name,
        verify=fit_verify(verify),
        draft=draft,
        catch_up={arm: fit_line(samples) for arm, samples in catch_up.items()},
        overhead=time_overhead(target, arms, engine),
    )
    return costs, {"verify": verify, "draft": draft, "catch_up": catch_up, "spread": spread}


def read_widths(arms: dict[str, Arm], engine: EngineSettings) -> dict[int, int]:
    """For the anchor with 0, 1, 2 ... drafts of a chain: the width that the engine reads."""
    legal = engine.widths or default_widths([arm.max_nodes for arm in arms.values()])
    widest = 1 + max(arm.max_draft for arm in chains(arms).values())
    return {
        width: next((w for w in sorted(legal) if w >= width), width)
        for width in range(1, widest + 1)
    }


def fill(rows: Rows, target: Target, context: int, *, room: int) -> None:
    """Row 0 becomes a text of `context` arbitrary tokens that the target has read."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, target.config.vocab_size, (context,), generator=generator)
    ids = ids.to(target.device)
    rows.reserve(1, context + room + 1)
    read = target.prefill([ids.tolist()], rows.cache, 0)
    rows.begin(0, ids, read.taps[0], read.logits[0, -1].argmax())


def time_verification(
    rows: Rows, target: Target, widths: dict[int, int], engine: EngineSettings, repeats: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Median seconds of every number of tokens, and their spread; equal widths are read once."""
    length = rows.texts.lengths[0]
    any_id = rows.texts.ids([0], [0], 1)
    request = make_request(
        0,
        rows.texts.ids([0], [0], length)[0].tolist(),
        GenerationOptions(),
        stop_ids=frozenset(),
        tokenizer=target.tokenizer,
    )
    measured: dict[int, tuple[float, float]] = {}
    for width in sorted(set(widths.values())):
        tree = chain(any_id.expand(1, width - 1))
        once = partial(verify, rows, target, request, tree, static=engine.compile)
        measured[width] = timed(once, repeats)
    found = {tokens: measured[width] for tokens, width in widths.items()}
    return {t: median for t, (median, _) in found.items()}, {t: s for t, (_, s) in found.items()}


def verify(rows: Rows, target: Target, request: Request, tree: DraftTree, *, static: bool) -> None:
    """What the engine does between drafting and commit; it moves no length, so it can be again."""
    read = read_drafts(target, rows.texts, rows.cache, tree, static=static)
    outcome = judge([request], read, tree, {}, longest=tree.num_nodes)
    keep_path(rows.texts, rows.cache, tree, read, outcome)
    outcome.tokens.tolist()


def time_catch_up(rows: Rows, arm: Arm, lag: int, engine: EngineSettings, repeats: int) -> float:
    """Each time the drafter is set back by the lag."""
    drafter, texts = arm.drafter, rows.texts
    full = engine.sync in ("lazy", "full_forward")
    anchor = texts.lengths[0] - 1

    def once() -> None:
        drafter.kv.truncate(0, max(0, anchor - lag))
        drafter.catch_up(texts, [0], full=full)

    return timed(once, repeats)[0]


def time_overhead(target: Target, arms: dict[str, Arm], engine: EngineSettings) -> float:
    """Routing and commit of really decoded rounds."""
    decoder = RoutedDecoder(target, arms, EntropyPolicy(1.0), replace(engine, timing=True))
    prompt = target.chat.prompt_ids([{"role": "user", "content": "Write a short story."}])
    options = GenerationOptions(max_new_tokens=48, stop_ids=frozenset())
    rounds = decoder.answer(prompt, options).rounds
    return statistics.median(r.seconds["route"] + r.seconds["commit"] for r in rounds)


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
