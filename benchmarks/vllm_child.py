"""One case of `vllm_serving.py` in a process of its own: an engine of vLLM and some prompts.

`python vllm_child.py CASE.json OUT.json` runs in the environment of vLLM. The engine is stepped
here, so that every step is timed, rounds are counted by request, and one can be aborted midway.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

# Read when vLLM is imported. The proposer is in this process, so its counters can be read.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PROPOSER = "whiflash_infer.serving.vllm"
_COUNTED = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "prefix_hits": "vllm:prefix_cache_hits",
    "preemptions": "vllm:num_preemptions",
}
_FORGOTTEN_AFTER = 10.0  # seconds: a state is let go of some seconds after its last step


@dataclass
class Answers:
    """By request. steps: that gave it tokens, the one of its first token left out.

    decoding: seconds and tokens of the steps that gave no request its first token.
    """

    ids: dict[str, list[int]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    aborted: str = ""

    def add(self, found: Mapping[str, list[int]], seconds: float) -> None:
        began = {name for name in found if not self.ids[name]}
        new = sum(len(ids) - len(self.ids[name]) for name, ids in found.items())
        self.seconds += seconds
        if not began:
            self.decode_seconds += seconds
            self.decode_tokens += new
        for name, ids in found.items():
            self.steps[name] += name not in began and len(ids) > len(self.ids[name])
            self.ids[name] = ids


def main(case: dict[str, Any], output: Path) -> None:
    llm = import_module("vllm").LLM(**engine_options(case))
    answers = decode(llm.llm_engine, case)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    found = {
        "ids": {name: written(ids) for name, ids in answers.ids.items()},
        "tokens": sum(map(len, answers.ids.values())),
        "seconds": answers.seconds,
        "decode_tokens": answers.decode_tokens,
        "decode_seconds": answers.decode_seconds,
        "rounds": sum(answers.steps.values()),
        "aborted": answers.aborted,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **{name: int(counted.get(metric, 0)) for name, metric in _COUNTED.items()},
    }
    if case["speculative"].get("method") == "custom_class":
        found["whiflash"] = own_counters()
    output.write_text(json.dumps(found))


def engine_options(case: Mapping[str, Any]) -> dict[str, Any]:
    options = {
        "model": case["target"],
        "dtype": case["dtype"],
        "max_model_len": case["max_model_len"],
        "max_num_seqs": case["concurrency"],
        "enable_prefix_caching": case["prefix_caching"],
        "speculative_config": case["speculative"] or None,
        "additional_config": case["additional"],
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if case["block_size"]:
        options["block_size"] = case["block_size"]
    if case["chunked_tokens"]:
        options["max_num_batched_tokens"] = case["chunked_tokens"]
        options["enable_chunked_prefill"] = True
    return options


def decode(engine: Any, case: Mapping[str, Any]) -> Answers:
    """All prompts at once; with `abort` the middle one is given up when half of it is there."""
    sampling = import_module("vllm").SamplingParams(temperature=0.0, max_tokens=case["max_tokens"])
    answers = Answers()
    for name, ids in case["prompts"].items():
        answers.ids[name], answers.steps[name] = [], 0
        engine.add_request(name, {"prompt_token_ids": ids}, sampling)
    victim = list(case["prompts"])[len(case["prompts"]) // 2] if case["abort"] else ""
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = engine.step()
        spent = time.perf_counter() - started
        answers.add({o.request_id: list(o.outputs[0].token_ids) for o in outputs}, spent)
        if victim and len(answers.ids[victim]) >= case["max_tokens"] // 2:
            engine.abort_request([victim])
            answers.aborted, victim = victim, ""
    return answers


def own_counters() -> dict[str, Any]:
    """With how many states are alive once the proposer had time to forget those that ended."""
    counters = import_module(PROPOSER).current_counters()
    found = counters.summary()
    deadline = time.monotonic() + _FORGOTTEN_AFTER
    while counters.requests and time.monotonic() < deadline:
        time.sleep(0.2)
    return {**found, "states_at_end": counters.requests}


def written(ids: list[int]) -> str:
    return " ".join(map(str, ids))


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
