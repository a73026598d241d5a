"""Measure what a round costs on this device: `python data_prep/profile_costs.py`.

Times the parts that the decoder really runs, for different numbers of texts: verification by width
and context length, drafting by arm and length, catch-up by drafter and lag; and from decoded
rounds, what lies around them. Everything takes turns, in an order that changes from turn to turn,
so that a slow moment of the machine hits all alike. In the end, other decoded rounds of each arm
are compared with what the profile says of them.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Table

from whiflash_infer.drafters.base import Arm, Drafter
from whiflash_infer.drafting import default_widths
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.requests import make_request
from whiflash_infer.routing.costs import (
    CostModel,
    DeviceIdentity,
    PassCosts,
    fit_draft,
    fit_line,
    fit_verify,
    fit_verify_at,
    save_costs,
)
from whiflash_infer.routing.features import router_features
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.rows import Rows
from whiflash_infer.settings import EngineSettings
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree, chain, join
from whiflash_infer.types import CHAINS, DRAFTERS, PLAIN, Round
from whiflash_infer.verification import judge, keep_path, read_drafts
from whiflash_train.entry import entry_point
from whiflash_train.runner import engine_settings, load_drafters, load_target

ROOT = Path(__file__).resolve().parents[1]
# What the numbers of a measurement mean, by its part; batch is the number of texts.
FIELDS = {
    "verify": ("batch", "context", "width"),
    "tree": ("batch", "arm"),  # verification of the arm's whole tree at the middle context
    "draft": ("batch", "arm", "length"),
    "catch_up": ("batch", "drafter", "lag"),
    "features": ("batch",),  # what a router reads
}
PROMPTS = ("Write a short story.", "What is 12 times 7?", "Return a JSON list of three colours.")
TOKENS, TOKENS_TOGETHER = 12, 4  # decoded in a turn with one text, and with several
TOLERANCE = 0.1  # of what is predicted against what is measured
NOISY = 0.3  # quartiles further apart than this part of the median

Key = tuple[str | int, ...]
console = Console()


@entry_point("profile_costs", root=ROOT)
def main(cfg: DictConfig) -> None:
    started = time.perf_counter()
    target = load_target(cfg)
    arms, _ = load_drafters(cfg, target)
    engine, sizes = engine_settings(cfg, arms), Sizes.of(cfg.costs)
    costs, timings, check = profile(target, arms, engine, sizes)
    path = Path(cfg.paths.costs)
    measurements = {"repeats": sizes.repeats, "timings": list(map(told, timings, timings.values()))}
    save_costs(path, costs, measurements=measurements, check=check)
    show(costs, timings)
    show_check(check)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"[bold]costs[/bold] written to {path}, {minutes:.1f} minutes", soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The section `costs`, checked. middle: context of all that is not measured at several."""

    contexts: list[int]
    lags: list[int]
    batches: list[int]
    repeats: int

    @property
    def middle(self) -> int:
        return self.contexts[len(self.contexts) // 2]

    @classmethod
    def of(cls, settings: DictConfig) -> Sizes:
        """Raises: UserError naming the setting."""
        lists = {
            name: sorted(set(settings[name] or [])) for name in ("contexts", "lags", "batches")
        }
        for name, values in lists.items():
            if not values or not all(isinstance(v, int) and v >= 1 for v in values):
                raise UserError(f"costs.{name} is {values}: it must name whole numbers from 1 on")
        sizes = cls(**lists, repeats=settings.repeats)
        if sizes.batches[0] != 1:
            raise UserError(f"costs.batches is {sizes.batches}: 1 must be among them")
        if sizes.lags[-1] > sizes.middle:
            raise UserError(
                f"costs.lags: {sizes.lags[-1]} is longer than the context of {sizes.middle} tokens "
                "at which drafters are timed"
            )
        if not isinstance(sizes.repeats, int) or sizes.repeats < 2:
            raise UserError(f"costs.repeats is {sizes.repeats}: it must be 2 or more")
        return sizes


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        low, median, high = np.quantile(seconds, [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median


@dataclass(frozen=True, slots=True)
class Cell:
    """What is timed. stand: brings the texts there; that is not timed."""

    stand: Callable[[], None]
    run: Callable[[], object]


class Bench:
    """Texts that stand at any length, so that every part of a round can be run at will."""

    def __init__(
        self, target: Target, arms: dict[str, Arm], engine: EngineSettings, sizes: Sizes
    ) -> None:
        self.target, self.arms, self.engine, self.sizes = target, arms, engine, sizes
        self.widths = read_widths(arms, engine)
        self.drafters: dict[str, Drafter] = {DRAFTERS[a]: arm.drafter for a, arm in arms.items()}
        self.rows = Rows(target, arms)
        self._fill(max(sizes.batches), max(sizes.contexts))
        self._requests = [
            make_request(
                row,
                [0],
                GenerationOptions(),
                stop_ids=frozenset(),
                tokenizer=target.tokenizer,
            )
            for row in range(max(sizes.batches))
        ]
        if engine.compile:
            target.compile()

    def cells(self) -> dict[Key, Cell]:
        """Contexts are told apart for one text alone; the others' follow from them."""
        found: dict[Key, Cell] = {}
        for batch in self.sizes.batches:
            for context in self.sizes.contexts if batch == 1 else [self.sizes.middle]:
                found |= self._verification(batch, context)
            for name in self.arms:
                found |= self._drafting(batch, name)
            for name in self.drafters:
                found |= self._catching_up(batch, name)
            found["features", batch] = self._features(batch)
        return found

    def stand(self, num_rows: int, context: int, lag: int = 0) -> None:
        """Texts of about `context` tokens before the anchor, no two of the same length, and
        drafters who are `lag` behind."""
        for row in range(num_rows):
            anchor = max(1, context + row - num_rows // 2)
            self.rows.texts.lengths[row] = anchor + 1
            self.rows.cache.kv.lengths[row] = anchor
            for drafter in self.rows.drafters:
                drafter.kv.lengths[row] = max(0, anchor - lag)

    def verify(self, tree: DraftTree, longest: int) -> None:
        """What the engine does between drafting and commit; it moves no length."""
        texts, cache = self.rows.texts, self.rows.cache
        read = read_drafts(self.target, texts, cache, tree, static=self.engine.compile)
        outcome = judge(self._requests[: tree.num_rows], read, tree, {}, longest=longest)
        keep_path(texts, cache, tree, read, outcome)
        outcome.tokens.tolist()

    def _fill(self, num_rows: int, longest: int) -> None:
        """All texts are the same arbitrary tokens, which the target and the drafters have read."""
        room = num_rows + max(self.widths.values())
        if longest + room > self.target.max_length:
            raise UserError(
                f"costs.contexts: {longest} tokens and {room} behind them exceed the target's "
                f"context of {self.target.max_length}"
            )
        ids = torch.randint(
            0,
            self.target.config.vocab_size,
            (longest + num_rows,),
            generator=torch.Generator().manual_seed(0),
        ).to(self.target.device)
        self.rows.reserve(num_rows, longest + num_rows + room)
        read = self.target.prefill([ids.tolist()], self.rows.cache, 0)
        self.rows.begin(0, ids, read.taps[0], read.logits[0, -1].argmax())
        for drafter in self.rows.drafters:
            drafter.catch_up(self.rows.texts, [0])
        for row in range(1, num_rows):
            self.rows.move(0, row)

    def _verification(self, batch: int, context: int) -> dict[Key, Cell]:
        stand, device = partial(self.stand, batch, context), self.target.device
        found: dict[Key, Cell] = {}
        for width in sorted(set(self.widths.values())):
            drafts = chain(torch.zeros(batch, width - 1, dtype=torch.long, device=device))
            run = partial(self.verify, drafts, width - 1)
            found["verify", batch, context, width] = Cell(stand, run)
        return found

    def _drafting(self, batch: int, name: str) -> dict[Key, Cell]:
        """A tree is grown whole whatever its length, and read with a mask of its own."""
        arm, stand = self.arms[name], partial(self.stand, batch, self.sizes.middle)
        is_chain = name in CHAINS
        found: dict[Key, Cell] = {}
        for length in range(1 if is_chain else arm.max_draft, arm.max_draft + 1):
            run = partial(arm.draft, self.rows.texts, range(batch), [length] * batch)
            found["draft", batch, name, length] = Cell(stand, run)
        if not is_chain:
            stand()
            run = partial(self.verify, self._tree(batch, arm), arm.max_draft)
            found["tree", batch, name] = Cell(stand, run)
        return found

    def _tree(self, batch: int, arm: Arm) -> DraftTree:
        """As wide as the engine reads it."""
        tree = arm.draft(self.rows.texts, range(batch), [arm.max_draft] * batch).tree
        num_nodes = self.widths[1 + arm.max_nodes] - 1
        if tree.num_nodes == num_nodes:
            return tree
        rows, device = torch.arange(batch, device=self.target.device), self.target.device
        return join([(rows, tree)], num_rows=batch, num_nodes=num_nodes, device=device)

    def _catching_up(self, batch: int, name: str) -> dict[Key, Cell]:
        full = self.engine.sync in ("lazy", "full_forward")
        follow = partial(
            self.drafters[name].catch_up, self.rows.texts, list(range(batch)), full=full
        )
        return {
            ("catch_up", batch, name, lag): Cell(
                partial(self.stand, batch, self.sizes.middle, lag), follow
            )
            for lag in self.sizes.lags
        }

    def _features(self, batch: int) -> Cell:
        stand, device = partial(self.stand, batch, self.sizes.middle), self.target.device
        stand()
        nothing = chain(torch.zeros(batch, 0, dtype=torch.long, device=device))
        texts, static = self.rows.texts, self.engine.compile
        read = read_drafts(self.target, texts, self.rows.cache, nothing, static=static)
        positions = torch.arange(batch, device=device)
        logits, hidden = read.logits[:, 0].clone(), read.hidden[:, 0].clone()
        return Cell(stand, partial(router_features, logits, hidden, positions))


def read_widths(arms: Mapping[str, Arm], engine: EngineSettings) -> dict[int, int]:
    """For the anchor with 0, 1, 2 ... drafts: the width that the engine reads."""
    most = [arm.max_nodes for arm in arms.values()]
    legal = engine.widths or default_widths(most)
    return {
        width: next((w for w in sorted(legal) if w >= width), width)
        for width in range(1, 2 + max(most, default=0))
    }


class Reading(StaticPolicy):
    """Has the features made every round, as a router does."""

    needs_features = True


class Decoding:
    """Really decoded rounds by (number of texts, arm): those in which features were made, and, of
    one text, as many others to compare with. The first turn is for warming up."""

    def __init__(self, target: Target, arms: dict[str, Arm], engine: EngineSettings) -> None:
        self.reading: dict[tuple[int, str], list[Round]] = defaultdict(list)
        self.others: dict[tuple[int, str], list[Round]] = defaultdict(list)
        settings = replace(engine, timing=True)
        self._decoder = RoutedDecoder(target, arms, StaticPolicy(PLAIN), settings)
        self._turns: dict[tuple[int, str], int] = defaultdict(int)
        self._prompts = [
            target.chat.prompt_ids([{"role": "user", "content": text}]) for text in PROMPTS
        ]

    def cells(self, batches: Sequence[int]) -> dict[Key, Cell]:
        """Several texts without drafts, so that they stay in step."""
        asked = [(1, name) for name in (PLAIN, *self._decoder.arms)]
        asked += [(batch, PLAIN) for batch in batches if batch > 1]
        return {("decode", *key): Cell(lambda: None, partial(self._answer, *key)) for key in asked}

    def _answer(self, batch: int, name: str) -> None:
        turn = self._turns[batch, name]
        self._turns[batch, name] += 1
        is_reading = batch > 1 or turn % 2 == 0
        self._decoder.policy = Reading(name) if is_reading else StaticPolicy(name)
        options = GenerationOptions(
            max_new_tokens=TOKENS if batch == 1 else TOKENS_TOGETHER, stop_ids=frozenset()
        )
        prompt = self._prompts[turn % len(self._prompts)]
        prompts = [prompt[: len(prompt) - row % 8] for row in range(batch)]
        for answer in self._decoder.generate(prompts, options, max_rows=batch):
            if turn > 0:
                found = self.reading if is_reading else self.others
                found[batch, name] += [r for r in answer.rounds if is_priced(r, name)]


def is_priced(done: Round, arm: str) -> bool:
    """Not where there was no room to draft, or the drafter failed."""
    return done.arm == arm and (done.num_draft > 0 or arm == PLAIN)


@torch.inference_mode()
def profile(
    target: Target, arms: dict[str, Arm], engine: EngineSettings, sizes: Sizes
) -> tuple[CostModel, dict[Key, Timing], dict[str, dict[str, float]]]:
    bench, decoding = Bench(target, arms, engine, sizes), Decoding(target, arms, engine)
    cells = bench.cells() | decoding.cells(sizes.batches)
    timings = measure(cells, sizes.repeats, target.device)
    timings = {key: timing for key, timing in timings.items() if key[0] in FIELDS}
    parts = {batch: fit(timings, bench, batch) for batch in sizes.batches}
    costs = CostModel(
        device=DeviceIdentity.here(target.device, target.dtype),
        target=target.name,
        nodes={name: nodes_of(name, arm) for name, arm in arms.items()},
        batches=parts,
    )
    for batch, part in parts.items():
        rounds = [found for (size, _), found in decoding.reading.items() if size == batch and found]
        overhead = around(costs, rounds, batch, timings["features", batch].median)
        parts[batch] = replace(part, overhead=overhead)
    costs = replace(costs, batches=parts)
    rounds = [decoding.others[1, name] for name in (PLAIN, *arms)]
    return costs, timings, compare(costs, [found for found in rounds if found])


def nodes_of(name: str, arm: Arm) -> list[int]:
    if name in CHAINS:
        return list(range(arm.max_draft + 1))
    return [0, *[arm.max_nodes] * arm.max_draft]


def measure(cells: Mapping[Key, Cell], repeats: int, device: torch.device) -> dict[Key, Timing]:
    """The first turns are for warming up."""
    warm_up = 1 if device.type == "cpu" else 3
    order = [
        (turn, key)
        for turn in range(repeats + warm_up)
        for key in random.Random(turn).sample(list(cells), len(cells))
    ]
    seconds: dict[Key, list[float]] = {key: [] for key in cells}
    for turn, key in track(order, description="measuring", console=console):
        cells[key].stand()
        synchronise(device)
        started = time.perf_counter()
        cells[key].run()
        synchronise(device)
        if turn >= warm_up:
            seconds[key].append(time.perf_counter() - started)
    return {key: Timing.of(found) for key, found in seconds.items()}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fit(timings: Mapping[Key, Timing], bench: Bench, batch: int) -> PassCosts:
    """All but the overhead."""
    sizes = bench.sizes
    lines = fit_verify({c: medians(timings, "verify", 1, c) for c in sizes.contexts})
    if batch > 1:  # of every text the keys and values are read
        slopes = [batch * slope for _, slope in lines]
        widths = medians(timings, "verify", batch, sizes.middle)
        lines = fit_verify_at(widths, context=sizes.middle, slopes=slopes)
    verify = [lines[bench.widths[width] - 1] for width in sorted(bench.widths)]
    draft = {}
    for name, arm in bench.arms.items():
        seconds = [s for _, s in sorted(medians(timings, "draft", batch, name).items())]
        if name not in CHAINS:
            base, slope = verify[arm.max_nodes]
            beyond = timings["tree", batch, name].median - (base + slope * sizes.middle)
            seconds = [seconds[0] + max(0.0, beyond)] * arm.max_draft
        draft[name] = fit_draft(seconds)
    catch_up = {d: fit_line(medians(timings, "catch_up", batch, d)) for d in bench.drafters}
    return PassCosts(verify=verify, draft=draft, catch_up=catch_up, overhead=0.0)


def medians(timings: Mapping[Key, Timing], *prefix: str | int) -> dict[int, float]:
    """Of the measurements that begin so, by the number that comes last."""
    return {
        int(key[-1]): timing.median
        for key, timing in timings.items()
        if key[: len(prefix)] == prefix
    }


# --- decoded rounds ---------------------------------------------------------------------------


def predicted(costs: CostModel, rounds: Sequence[Round], batch: int) -> np.ndarray:
    """Seconds of each of these rounds, all of one arm: each text's share."""
    table = costs.table([rounds[0].arm], num_texts=batch)
    positions = np.array([r.position for r in rounds])
    lags = np.array([[r.lag] for r in rounds])
    lengths = [r.num_draft for r in rounds]
    return table.seconds(positions, lags)[np.arange(len(rounds)), 0, lengths]


def around(
    costs: CostModel, rounds: Sequence[Sequence[Round]], batch: int, features: float
) -> float:
    """Seconds of a round of the whole batch that are not in its modelled parts: at least what was
    measured of making features, choosing and committing. rounds: of each arm."""
    told = [r.seconds["route"] + r.seconds["commit"] for found in rounds for r in found]
    beyond = [
        np.array([r.total_seconds for r in found]) - predicted(costs, found, batch)
        for found in rounds
    ]
    least = batch * float(np.median(told)) + features
    return max(least, batch * float(np.median(np.concatenate(beyond))))


def compare(costs: CostModel, rounds: Sequence[Sequence[Round]]) -> dict[str, dict[str, float]]:
    """By arm, median seconds of a round as predicted and as measured."""
    check: dict[str, dict[str, float]] = {}
    for found in rounds:
        expected = float(np.median(predicted(costs, found, 1)))
        measured = float(np.median([r.total_seconds for r in found]))
        check[found[0].arm] = {
            "predicted": expected,
            "measured": measured,
            "ratio": expected / measured,
            "rounds": len(found),
        }
    return check


# --- telling ------------------------------------------------------------------------------------


def told(key: Key, timing: Timing) -> dict[str, Any]:
    part, *numbers = key
    fields = dict(zip(FIELDS[str(part)], numbers, strict=True))
    return {"part": part, **fields, "median": timing.median, "low": timing.low, "high": timing.high}


def show(costs: CostModel, timings: Mapping[Key, Timing]) -> None:
    for batch, parts in sorted(costs.batches.items()):
        texts = "1 text" if batch == 1 else f"{batch} texts together"
        device = costs.device
        table = Table(title=f"{costs.target} on {device.device}, {device.dtype}, {texts}")
        table.add_column("part")
        table.add_column("milliseconds", overflow="fold")
        for context in sorted({int(k[2]) for k in timings if k[:2] == ("verify", batch)}):
            found = medians(timings, "verify", batch, context)
            table.add_row(f"verify, context {context}, by width", by_number(found))
        for arm in costs.nodes:
            found = dict(enumerate(parts.draft[arm][1:], start=1))
            if arm not in CHAINS:
                found = {len(found): found[len(found)]}
            table.add_row(f"draft {arm}, by length", by_number(found))
        for drafter in parts.catch_up:
            found = medians(timings, "catch_up", batch, drafter)
            table.add_row(f"catch up {drafter}, by lag", by_number(found))
        table.add_row("around them", f"{1e3 * parts.overhead:.2f}")
        console.print(table)
    key, worst = max(timings.items(), key=lambda item: item[1].spread)
    if worst.spread > NOISY:
        where = " ".join(map(str, key))
        console.print(
            f"noisy machine: quartiles up to {worst.spread:.0%} apart ({where}); repeat when it "
            "is idle",
            soft_wrap=True,
        )


def by_number(seconds: Mapping[int, float]) -> str:
    return "  ".join(f"{number}: {1e3 * s:.2f}" for number, s in sorted(seconds.items()))


def show_check(check: Mapping[str, Mapping[str, float]]) -> None:
    table = Table(title="decoded rounds of one text, median milliseconds")
    for column in ("arm", "rounds", "predicted", "measured", "ratio"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, found in check.items():
        milliseconds = (f"{1e3 * found[part]:.1f}" for part in ("predicted", "measured"))
        table.add_row(arm, str(found["rounds"]), *milliseconds, f"{found['ratio']:.2f}")
    console.print(table)
    for arm, found in check.items():
        if abs(found["ratio"] - 1) > TOLERANCE:
            console.print(
                f"rounds of {arm} cost {1e3 * found['measured']:.1f} ms and the profile says "
                f"{1e3 * found['predicted']:.1f}: measure again when the machine is idle",
                soft_wrap=True,
            )


if __name__ == "__main__":
    main()
