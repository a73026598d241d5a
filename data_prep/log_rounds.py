"""Label every position for every arm: `python data_prep/log_rounds.py`.

Writes `rounds/`: for each position of each conversation the router's features, and how many drafts
of each arm would have been accepted there, at the cost of a training pass. An interrupted run goes
on where it was. With `rounds.mode=decode`, `visited_rounds/`: rounds that are really decoded, with
the seconds of their phases.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from whiflash_infer.drafters.base import Arm
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.errors import ArtifactError
from whiflash_infer.pretrained import choose_policy, load_fitting_router
from whiflash_infer.routing.costs import CostModel
from whiflash_infer.routing.router import Router
from whiflash_infer.target import Target
from whiflash_infer.types import PLAIN
from whiflash_train.data.conversations import SPLITS, load_conversations
from whiflash_train.data.processes import Processes
from whiflash_train.entry import entry_point
from whiflash_train.preparation import build_section
from whiflash_train.progress import rate_bar
from whiflash_train.round_logging import RoundSettings, show_rounds, write_rounds
from whiflash_train.runner import configured_costs, engine_settings, load_drafters, load_target
from whiflash_train.visited_rounds import decode_prompts, prompts_of, save_visited, show_visited

ROOT = Path(__file__).resolve().parents[1]
console = Console()


@entry_point("log_rounds", root=ROOT)
def main(cfg: DictConfig) -> None:
    processes = Processes.here()
    console.quiet = not processes.is_main
    settings: RoundSettings = build_section(cfg, "rounds")
    target = load_target(cfg)
    arms, drafters = load_drafters(cfg, target)
    rows, conversations = load_rows(cfg, settings, target)
    lineage = {
        "drafters": drafters,
        "arm_settings": asdict(build_section(cfg, "arms")),
        "conversations": conversations,
        "seed": cfg.seed,
    }
    if settings.mode == "decode":
        if processes.is_main:  # timing wants the machine for itself
            log_visited(cfg, settings, target, arms, rows, lineage)
        return
    path = Path(cfg.paths.rounds)
    spent = write_rounds(
        path,
        rows,
        target,
        arms,
        settings,
        lineage=lineage,
        console=console,
        processes=processes,
    )
    if processes.is_main:
        show_rounds(path, spent, console)
        console.print(f"[bold]rounds[/bold] written to {path}", soft_wrap=True)


def load_rows(
    cfg: DictConfig, settings: RoundSettings, target: Target
) -> tuple[dict[str, Dataset], str]:
    """The conversations of every split up to its limit, and the fingerprint of all."""
    rows: dict[str, Dataset] = {}
    manifest: dict[str, Any] = {}
    for split in SPLITS:
        found = load_conversations(Path(cfg.paths.conversations), split, target.identity())
        rows[split], manifest = settings.limited(split, found[0]), found[1]
    return rows, manifest["fingerprint"]


def log_visited(
    cfg: DictConfig,
    settings: RoundSettings,
    target: Target,
    arms: dict[str, Arm],
    rows: dict[str, Dataset],
    lineage: dict[str, Any],
) -> None:
    router = load_router(cfg, settings.policy, target, arms, lineage["drafters"])
    policy = choose_policy(settings.policy, arms, router)
    decoder = RoutedDecoder(target, arms, policy, replace(engine_settings(cfg, arms), timing=True))
    prompts = prompts_of(rows, settings.decode_limit)
    manifest = {
        "target": target.identity().manifest(),
        **lineage,
        "policy": settings.policy,
        "decode": OmegaConf.to_container(cfg.decode, resolve=True),
        "counts": {"conversations": len(prompts)},
    }
    path = Path(cfg.paths.visited_rounds)
    with rate_bar(console, "decoding", total=len(prompts), unit="rounds") as advance:
        table = save_visited(path, decode_prompts(decoder, prompts, advance), manifest)
    show_visited(table, fitting_costs(cfg, target), console)
    console.print(f"[bold]visited rounds[/bold] written to {path}", soft_wrap=True)


def load_router(
    cfg: DictConfig, policy: str, target: Target, arms: dict[str, Arm], drafters: dict[str, Any]
) -> Router | None:
    """The configured router, for the policies that need one."""
    if policy in (PLAIN, "random") or policy.startswith("static_"):
        return None
    foreign = cfg.costs.allow_foreign
    return load_fitting_router(Path(cfg.paths.router), target, arms, drafters, foreign)


def fitting_costs(cfg: DictConfig, target: Target) -> CostModel | None:
    """The cost profile, where there is one for this device."""
    if not Path(cfg.paths.costs).is_file():
        return None
    try:
        return configured_costs(cfg, target)
    except ArtifactError as error:
        console.print(f"rounds are not compared with the cost profile: {error}", soft_wrap=True)
        return None


if __name__ == "__main__":
    main()
