"""Decoded rounds as the training pass sees them: where the two differ, one of them is wrong."""

from __future__ import annotations

from dataclasses import replace

import torch

from whiflash_infer.drafters.ar import ARRunner
from whiflash_infer.drafters.base import DraftRunner
from whiflash_infer.drafters.diffusion import DiffusionRunner
from whiflash_infer.labels import label_ar, label_diffusion
from whiflash_infer.target import Target
from whiflash_infer.types import Generation, Round


@torch.inference_mode()
def rounds_of_training_pass(
    target: Target, runner: DraftRunner, prompt_ids: list[int], generation: Generation
) -> list[Round]:
    """The rounds of an answer that this arm drafted, with `accepted` as the training pass has it.

    One pass over the finished text, from the anchors where the decoder really started, cut to what
    it drafted there. Drafts are deterministic, so a draft was accepted exactly where it is the
    text, at every temperature; rounding alone may turn a near-tie. Validation is another thing: it
    takes every anchor of other text, and so counts an easy stretch once a token, where decoding
    counts it once a round. Its shares lie above those of decoding without any fault.
    """
    rounds = [r for r in generation.rounds if r.num_draft]
    if not rounds:
        return []
    prompt = generation.output_ids.new_tensor(prompt_ids)
    ids = torch.cat([prompt, generation.output_ids])[None]
    anchors = ids.new_tensor([[r.position for r in rounds]])
    rows = target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
    sequences = ids, ids.new_tensor([ids.shape[1]]), rows, anchors
    if isinstance(runner, ARRunner):
        found = label_ar(runner.net, runner.tables, *sequences, draft_length=runner.max_draft)
    else:
        assert isinstance(runner, DiffusionRunner)
        found = label_diffusion(runner.net, runner.tables, *sequences)
    accepted = found.accepted[0].tolist()
    return [
        replace(r, accepted=min(count, r.num_draft))
        for r, count in zip(rounds, accepted, strict=True)
    ]
