"""Print the command that serves a drafter in vLLM or SGLang, after checking that it fits.

Exit status: 0 done, 1 a fault of ours, 2 something to mend (one line says what), 130 interrupted.
The command goes to standard output, what there is to say about it to standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from whiflash_infer.errors import UserError
from whiflash_infer.serving.commands import launch
from whiflash_infer.serving.contracts import ENGINES

_USER_ERROR, _INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    told = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        found = launch(
            options.engine,
            options.target,
            options.drafter,
            num_speculative_tokens=options.num_speculative_tokens,
            port=options.port,
        )
    except UserError as error:
        told.print(f"error: {error}", markup=False)
        return _USER_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    for note in found.notes:
        told.print(f"note: {note}", markup=False)
    Console(soft_wrap=True, highlight=False).print(found.shell(), markup=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_infer.serving",
        description="Check a drafter against an engine's loader, and print the serving command.",
    )
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("target", help="folder or hub id of the target; its config alone is read")
    parser.add_argument("drafter", help="folder or hub id of the drafter")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        help="drafts a round (default: as many as the drafter was trained for)",
    )
    parser.add_argument("--port", type=int, help="of the server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
