"""Plain batched decoding, for letting the target answer many prompts."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from whiflash_infer.sampling import next_tokens
from whiflash_infer.target import Target

_SHRINK_BELOW = 0.75  # a batch is packed anew when this share of its rows is still unfinished


@torch.inference_mode()
def answer_batch(
    target: Target,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Answers in the order of the prompts, each with its stop token, if it came to one.

    Finished rows leave the batch, so short answers do not wait for long ones.
    """
    device = target.device
    generator = torch.Generator(device).manual_seed(seed)
    ids, mask = left_pad(prompts, target.chat.pad_id)
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    cache = target.new_cache(ids.shape[1] + max_new_tokens)
    stops = target.stop_ids
    answers: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))  # the prompt of each row
    finished = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits = target.read_batch(ids, mask, positions, cache)
        tokens = next_tokens(logits, temperature, generator)
        for prompt, token in zip(active, tokens.tolist(), strict=True):
            if not finished[prompt]:
                answers[prompt].append(token)
                finished[prompt] = token in stops
        open_rows = [row for row, prompt in enumerate(active) if not finished[prompt]]
        if not open_rows:
            break
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if len(open_rows) < _SHRINK_BELOW * len(active):
            keep = torch.tensor(open_rows, device=device)
            ids, positions, mask = ids[keep], positions[keep], mask[keep]
            cache.select(keep)
            active = [active[row] for row in open_rows]
    return answers


def left_pad(prompts: list[list[int]], pad: int) -> tuple[Int[Tensor, "B T"], Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    return ids, torch.arange(width) >= (width - lengths)[:, None]
