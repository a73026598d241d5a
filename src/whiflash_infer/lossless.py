"""Where two answers of the same target differ, and whether rounding alone explains it.

In float32 a speculative answer is that of plain decoding. In bfloat16 a pass over several tokens
rounds otherwise than a pass over one, so where the two likeliest tokens are nearly equal either
may come out. Then the gap between them is of the size of a rounding step, and plain decoding
itself flips as often when it reads its own text in wider passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whiflash_infer.cache import make_span
from whiflash_infer.target import Target


@dataclass(frozen=True, slots=True)
class Difference:
    """The first one. gap: of the logits of the two tokens; step: bfloat16's at their size."""

    place: int
    gap: float
    step: float

    @property
    def is_near_tie(self) -> bool:
        """Both logits are off by a few steps at most, after all layers."""
        return self.gap <= 8 * self.step


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


@torch.inference_mode()
def difference(
    target: Target, prompt_ids: list[int], expected: list[int], found: list[int]
) -> Difference | None:
    """None where both are the same. An answer that only ends earlier differs by an endless gap."""
    place = first_difference(expected, found)
    if place is None:
        return None
    if place >= min(len(expected), len(found)):
        return Difference(place, gap=torch.inf, step=0.0)
    logits = _behind(target, prompt_ids + expected[:place])
    first, second = (float(logits[ids[place]]) for ids in (expected, found))
    size = max(abs(first), abs(second))
    return Difference(place, gap=abs(first - second), step=size * torch.finfo(torch.bfloat16).eps)


@torch.inference_mode()
def flips(target: Target, prompt_ids: list[int], answer: list[int], *, width: int) -> int:
    """Tokens of a plain answer that the target would not have said, reading `width` at a time."""
    cache = target.new_cache()
    cache.kv.reserve(1, len(prompt_ids) + len(answer) + width)
    target.prefill([prompt_ids], cache, 0)
    wrong = 0
    for start in range(0, len(answer) - 1, width):
        block = torch.tensor([answer[start : start + width]], device=target.device)
        num_read = block.shape[1]
        span = make_span([0], [cache.kv.lengths[0]], num_read, target.device)
        depths = torch.arange(num_read, device=target.device)[None]
        rows = target.read(block, depths, None, cache, span)
        cache.kv.lengths[0] += num_read
        said = rows.logits[0].argmax(-1).tolist()
        wrong += sum(a != b for a, b in zip(said, answer[start + 1 :], strict=False))
    return wrong


def _behind(target: Target, ids: list[int]) -> torch.Tensor:
    cache = target.new_cache()
    cache.kv.reserve(1, len(ids))
    return target.prefill([ids], cache, 0).logits[0, -1].float()
