"""A process of its own, in which nothing checks shapes: `python -m tests.compile.decoding BACKEND`.

Decodes with and without compiled passes, and prints what came out as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from tests.fakes import ar_config, built_target, randomise, small_config
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import RandomPolicy
from whiflash_infer.settings import EngineSettings

PROMPTS = [[5 + (7 * i) % 250 for i in range(length)] for length in (1, 17, 60)]
OPTIONS = GenerationOptions(max_new_tokens=12, stop_ids=frozenset())


def main(backend: str) -> None:
    target = built_target(small_config(LlamaConfig, 2), (0,))
    net = ARDrafter(ar_config(target.drafter_shape, 80, tap_layer_ids=(0,)))
    net.set_vocabulary(torch.arange(1, 241, 3))
    drafter = CachedAR(randomise(net, 0), target.tables)
    arms = {
        "ar": ARArm(drafter, draft_length=3),
        "ar_tree": ARArm(drafter, draft_length=3, top_k=3, num_nodes=7),
    }
    told: dict[str, Any] = {"plain": [], "compiled": [], "graphs": []}
    target.compile(backend=backend)
    for compiled in (False, True):
        decoder = RoutedDecoder(target, arms, RandomPolicy(1), EngineSettings(compile=compiled))
        for max_rows in (3, 1, 3):
            decoder.policy = RandomPolicy(1)
            answers = decoder.generate(PROMPTS, OPTIONS, max_rows=max_rows)
            ids = [answer.output_ids.tolist() for answer in answers]
            told["compiled" if compiled else "plain"].append(ids)
            told["graphs"].append(counters["stats"]["unique_graphs"])
    told["breaks"] = dict(counters["graph_break"])
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
