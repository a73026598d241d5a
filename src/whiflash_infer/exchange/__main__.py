"""Convert a drafter between layouts: `python -m whiflash_infer.exchange SOURCE DESTINATION ...`.

Exit status: 0 done, 1 a fault of ours, 2 something to mend (one line says what), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from whiflash_infer.errors import UserError
from whiflash_infer.exchange.facts import Given, TargetFacts
from whiflash_infer.exchange.formats import LAYOUTS, Imported, read_drafter, write_drafter
from whiflash_infer.target import Target

_USER_ERROR, _INTERRUPTED = 2, 130
console = Console(soft_wrap=True, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        _convert(options)
    except UserError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_infer.exchange",
        description="Convert a drafter from one published layout to another.",
    )
    parser.add_argument("source", help="folder or hub id of the drafter")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--layout", choices=LAYOUTS, required=True, help="layout to write")
    parser.add_argument("--target", help="folder or hub id of the target: compare with it, name it")
    parser.add_argument(
        "--target-name", help="what evaluation calls the target (default: --target)"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="for the target alone")
    parser.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin")
    parser.add_argument("--layer-ids", type=_ids, help="tapped layer outputs, 0-based: 1,15,28")
    parser.add_argument("--rope-theta", type=float, help="base of the rotary positions")
    parser.add_argument("--num-target-layers", type=int, help="layers of the target")
    parser.add_argument("--draft-length", type=int, help="tokens an EAGLE-3 drafter drafts a round")
    parser.add_argument("--license", help="where the source names none")
    parser.add_argument(
        "--ignore-field", action="append", default=[], help="a config field that changes no output"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the destination")
    return parser


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _convert(options: argparse.Namespace) -> None:
    if options.destination.exists() and not options.overwrite:
        raise UserError(f"{options.destination} exists; choose another folder or add --overwrite")
    target, facts = None, None
    if options.target is not None:
        target = _load_target(options)
        facts = TargetFacts.of(target, name=options.target)
    given = Given(
        tap_layer_ids=options.layer_ids,
        rope_theta=options.rope_theta,
        num_target_layers=options.num_target_layers,
        ignored_fields=frozenset(options.ignore_field),
    )
    read = read_drafter(
        options.source, target=facts, given=given, allow_pickle=options.allow_pickle
    )
    manifest = _manifest(options, read, target)
    notes = write_drafter(
        read.net,
        options.destination,
        layout=options.layout,
        manifest=manifest,
        token_ids=read.token_ids,
        target=facts,
    )
    _tell(options, read, manifest, notes)


def _load_target(options: argparse.Namespace) -> Target:
    """The tap is of no account here: facts and identity do not depend on it."""
    try:
        return Target.from_pretrained(
            options.target,
            name=options.target_name or options.target,
            tap_layer_ids=[0],
            dtype="float32",
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the target {options.target} cannot be loaded: {reason}") from None


def _manifest(options: argparse.Namespace, read: Imported, target: Target | None) -> dict[str, Any]:
    manifest = read.manifest(options.source)
    manifest["license"] = options.license or read.license
    if "draft_length" in manifest and options.draft_length:
        manifest["draft_length"] = options.draft_length
    if target is not None:
        manifest["target"] = target.identity().manifest()
    return manifest


def _tell(
    options: argparse.Namespace, read: Imported, manifest: dict[str, Any], notes: Sequence[str]
) -> None:
    net = read.net
    size = sum(p.numel() for p in net.parameters())
    kind = str(net.fc.weight.dtype).removeprefix("torch.")
    rows = [
        f"{options.source} ({read.layout}) -> {options.destination} ({options.layout})",
        f"  {type(net).__name__}, {size:,} parameters, {kind}, layers {manifest['tap_layer_ids']}",
        f"  license: {manifest['license'] or 'not named; --license says it'}",
        *(f"  note: {note}" for note in (*read.notes, *notes)),
    ]
    console.print("\n".join(rows), markup=False)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    sys.exit(main())
