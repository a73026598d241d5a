"""Decoded rounds as the training pass sees them: where the two differ, one of them is wrong."""

from __future__ import annotations

from dataclasses import replace

import torch

from whiflash_infer.drafters.ar import ARArm
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import DiffusionArm
from whiflash_infer.routing.labels import label_ar, label_diffusion
from whiflash_infer.target import Target
from whiflash_infer.types import Generation, Round


@torch.inference_mode()
def rounds_of_training_pass(
    target: Target, arm: Arm, prompt_ids: list[int], generation: Generation
) -> list[Round]:
    """The rounds of an answer that this chain drafted, with `accepted` as the training pass has it.

    One pass over the finished text, from the anchors where the decoder really started, cut to what
    it drafted there. The likeliest drafts are no matter of luck, so one was accepted exactly where
    it is the text, at every temperature; rounding alone may turn a near-tie. Validation is another
    thing: it takes every anchor of other text, and so counts an easy stretch once a token, where
    decoding counts it once a round. Its shares lie above those of decoding without any fault.
    """
    rounds = [r for r in generation.rounds if r.num_draft]
    if not rounds:
        return []
    prompt = generation.output_ids.new_tensor(prompt_ids)
    ids = torch.cat([prompt, generation.output_ids])[None]
    anchors = ids.new_tensor([[r.position for r in rounds]])
    rows = target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
    sequences = ids, ids.new_tensor([ids.shape[1]]), rows, anchors
    if isinstance(arm, ARArm):
        found = label_ar(arm.net, arm.drafter.tables, *sequences, draft_length=arm.max_draft)
    else:
        assert isinstance(arm, DiffusionArm)
        found = label_diffusion(arm.net, arm.drafter.tables, *sequences)
    accepted = found.accepted[0].tolist()
    return [
        replace(r, accepted=min(count, r.num_draft))
        for r, count in zip(rounds, accepted, strict=True)
    ]
