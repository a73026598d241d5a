"""Evaluations made up by hand: metrics as metrics.json has them, and the rounds of answers."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

POLICIES = ("plain", "static_ar", "static_diffusion", "entropy", "hazard", "a_new_policy")
CATEGORIES = ("chat", "code", "creative writing")
HOSTILE = (
    "</script><script>alert(1)</script><!--<script>]]>\"'`&amp;<img src=x onerror=alert(2)>"
    "\u2028\u2029\x00\x1b[31m\x7f\x85\u202e\ud800 {{ 7 * 7 }} {% raw %}"
)


class Page(HTMLParser):
    """Tags with their attributes, the text outside scripts, and the scripts by type."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs).get("type") or "text/javascript"
            assert self._script not in self.scripts, "one script of each type"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            self.scripts[self._script] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts["application/json"])


def make_cell(policy: str, *, speedup: float = 1.4) -> dict[str, Any]:
    ratio = {"plain": {"plain": 1.0}, "static_ar": {"ar": 1.0}}.get(
        policy, {"ar": 0.5, "diffusion": 0.3, "plain": 0.2}
    )
    return {
        "prompts": 3,
        "tokens": 1200,
        "rounds": 500,
        "seconds": 30.0,
        "prefill_seconds": 1.5,
        "tokens_per_s": 40.0,
        "speedup": speedup,
        "speedup_ci": [speedup - 0.1, speedup + 0.2],
        "tau": 2.4,
        "tau_prompt_mean": 2.3,
        "arm_ratio": ratio,
        "switches_per_100_rounds": 12.5,
        "switches_p95": 31.25,
        "switching_share": 0.034,
        "time_split": {
            "route": 0.02,
            "catch_up": 0.08,
            "draft": 0.2,
            "verify": 0.6,
            "commit": 0.05,
            "host": 0.05,
        },
        "round_ms": {"p50": 61.0, "p95": 83.5},
        "seconds_per_round": 0.06,
        "identical": 1.0,
        "fallbacks": {},
        "acceptance_by_slot": {arm: [0.8, 0.6, 0.4] for arm in ratio if arm != "plain"},
        "lags": {"edges": [0, 1, 2, 4, 8], "counts": [10, 20, 30, 25, 15]},
        "stretches": {"edges": [1, 2, 4, 8], "counts": [40, 30, 20, 10]},
        "arms_along": {
            "edges": [0, 8, 16],
            "shares": {arm: [share] * 3 for arm, share in ratio.items()},
        },
        "regret": 0.27 if len(ratio) > 1 else None,
    }


def make_metrics(
    policies: tuple[str, ...] = POLICIES, categories: tuple[str, ...] = CATEGORIES
) -> dict[str, Any]:
    header = {
        "target": "SmolLM2-135M",
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "suite": {"built_in": "eval_small.jsonl"},
        "prompts": 1,
        "prompt_set": "9f31c0d2a7b64e15",
        "seed": 7,
        "bonus_token": "counted",
        "memory": {"peak_process_mb": 1834.2, "peak_gpu_mb": None},
        "created": "2025-11-29T15:40:00Z",
        "versions": {"torch": "2.8.0", "jinja2": "3.1.6"},
        "git_commit": "ba6eaba",
    }
    cells = {
        policy: {
            "overall": make_cell(policy),
            "by_category": {category: make_cell(policy) for category in categories},
            "by_kind": {kind: make_cell(policy) for kind in ("prose", "tool call")},
            "by_prompt_length": {"000064": make_cell(policy)},
        }
        for policy in policies
    }
    return {"format": 2, "header": header, "policies": cells}


def make_optional_parts() -> dict[str, Any]:
    """What an evaluation has when all was asked for."""
    ratio = [1.08, 1.02, 1.15]
    row = {"tokens_per_s": 31.7, "speedup": 1.27, "speedup_ci": [1.2, 1.35], "tau": 2.13}
    return {
        "gains": {
            "hazard": {"static_ar": {"overall": ratio, "by_category": {"chat": [0.97, 0.9, 1.03]}}}
        },
        "claims": [
            {"claim": "Switching is cheap", "paper": "< 7 %", "here": "3.4 %", "holds": True},
            {"claim": "Beats each arm", "paper": "+5 %", "here": "-2 %", "holds": False},
            {"claim": "In all categories", "paper": "8 of 8", "here": "not asked", "holds": None},
        ],
        "ablation": [
            {"policy": "hazard", "varied": "draft_length", "value": 4, "switching_share": 0.021}
            | row
        ],
        "side_by_side": {
            "ar": {
                "drafts": [2255, 2195],
                "decoded": [0.29, 0.12],
                "training_pass": [0.3, 0.13],
                "validation": [0.62],
            }
        },
    }


def make_round(text: str, arm: str = "ar", **fields: Any) -> dict[str, Any]:
    entry = {"text": text, "arm": arm, "drafted": 5, "accepted": 2, "committed": 3, "lag": 1}
    entry |= {"reason": "", "ms": 61.25, "context": 40, "expected": None, "price": None}
    return entry | {"regret": None, "best_arm": None, "kind": "prose"} | fields


def make_answer(**fields: Any) -> dict[str, Any]:
    answer = {"prompt_id": "chat-00", "category": "chat", "prompt": "Say hello."}
    rounds = [make_round("Hello", "prompt"), make_round(" there", "diffusion")]
    return answer | {"policies": {policy: rounds for policy in POLICIES}} | fields
