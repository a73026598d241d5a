from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from whiflash_infer.target import Target


@pytest.fixture(scope="session")
def greedy(target: Target) -> Callable[[list[int], int], list[int]]:
    """Hugging Face's own greedy continuation."""
    model: Any = target.model
    known: dict[tuple[int, ...], list[int]] = {}

    def generate(prompt: list[int], length: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, [])) < length:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
            with torch.no_grad():
                output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            known[key] = output[0, len(prompt) :].tolist()
        return known[key][:length]

    return generate
