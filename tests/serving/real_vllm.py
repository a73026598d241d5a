"""Answers prompts with vLLM in a process of its own, which is the only way to get its memory back.

python tests/serving/real_vllm.py spec.json answers.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the proposer in this process, where it can be asked
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def answers(spec: dict[str, Any]) -> dict[str, Any]:
    """spec: `engine` is given to vLLM; `prompts` [name, ids, tokens]; `aborted`: name of the one
    that is given up after a few steps."""
    from vllm import SamplingParams  # pyright: ignore
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore

    engine = LLMEngine.from_engine_args(EngineArgs(**spec["engine"]))
    for name, ids, length in spec["prompts"]:
        options = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": ids}, options)
    found, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 4 and spec["aborted"]:
            engine.abort_request([spec["aborted"]])
    return {"outputs": found, "steps": steps, "counters": _counters(spec["engine"])}


def _counters(engine: dict[str, Any]) -> dict[str, Any] | None:
    if "speculative_config" not in engine:
        return None
    from whiflash_infer.serving.vllm import current_counters

    return current_counters().summary()


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    made = answers(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(made))
