"""Runs in the peers' environment: the `dflash` package answers prompts with its own loop.

`python peer_dflash_child.py JSON`, started by `peer_dflash.py`. It reads one question a line from
stdin, answers each with a line on stdout, and ends with the input. It imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import metadata
from typing import Any, TextIO

import torch
from dflash import DFlashDraftModel  # pyright: ignore
from dflash.model import dflash_generate  # pyright: ignore
from transformers import AutoModelForCausalLM


def main(asked: dict[str, Any]) -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    torch.set_num_threads(asked["threads"])
    dtype = getattr(torch, asked["dtype"])
    target = AutoModelForCausalLM.from_pretrained(asked["target"], dtype=dtype).eval()
    drafter = DFlashDraftModel.from_pretrained(asked["drafter"], dtype=dtype).eval()
    passes = [0]
    target.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    packages = ("dflash", "transformers", "torch")
    tell(told, {name: metadata.version(name) for name in packages})
    for line in sys.stdin:
        question = json.loads(line)
        passes[0] = 0
        ids = torch.tensor([question["prompt"]])
        started = time.perf_counter()
        output = dflash_generate(
            drafter,
            target,
            ids,
            question["new_tokens"],
            asked["stop_ids"],
            block_size=question["block_size"],
        )
        new_ids = output[0, ids.shape[1] :].tolist()
        seconds = time.perf_counter() - started
        # One pass reads the prompt, each of the others ends a round.
        tell(told, {"ids": new_ids, "seconds": seconds, "rounds": passes[0] - 1})


def tell(pipe: TextIO, found: dict[str, Any]) -> None:
    pipe.write(json.dumps(found) + "\n")
    pipe.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
