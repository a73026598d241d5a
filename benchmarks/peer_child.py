"""Runs in the peers' environment: `dflash` and `speculators` load our exports and draft.

`python peer_child.py FOLDER` reads cases.json there, and writes for each case
`<name>.out.safetensors` and, as the package saves it, `<name>.saved/`. It imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from dflash import DFlashDraftModel, extract_context_feature  # pyright: ignore
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig  # pyright: ignore
from torch import Tensor, nn


def main(folder: Path) -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    loads = {}
    for case in json.loads((folder / "cases.json").read_text()):
        run = {
            ("zlab", "diffusion"): zlab,
            ("speculators", "ar"): speculators_ar,
            ("speculators", "diffusion"): speculators_diffusion,
        }[case["layout"], case["kind"]]
        inputs = load_file(folder / f"{case['name']}.in.safetensors")
        model, told, outputs = run(case, inputs)
        told["hidden_states"] = tapped(case, model)
        kept = {name: tensor.contiguous() for name, tensor in outputs.items()}
        save_file(kept, folder / f"{case['name']}.out.safetensors")
        model.save_pretrained(folder / f"{case['name']}.saved")
        loads[case["name"]] = told
    packages = ("dflash", "speculators", "transformers", "torch")
    versions = {name: metadata.version(name) for name in packages}
    (folder / "report.json").write_text(json.dumps({"versions": versions, "loads": loads}))


def tapped(case: dict[str, Any], model: Any) -> list[int]:
    """Which entries of the target's `hidden_states` (0: the embeddings) the package fuses."""
    if case["layout"] == "speculators":
        return list(model.target_layer_ids)
    entries = [torch.full((1, 1, 1), float(i)) for i in range(case["num_target_layers"] + 1)]
    return extract_context_feature(entries, model.target_layer_ids).flatten().int().tolist()


def told_of(info: dict[str, Any]) -> dict[str, list[str]]:
    """What transformers says it did not find, or did not use."""
    return {key: sorted(map(str, info.get(key, ()))) for key in ("missing_keys", "unexpected_keys")}


def zlab(case: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[Any, Any, dict[str, Tensor]]:
    model, info = DFlashDraftModel.from_pretrained(
        case["folder"], dtype=torch.float32, output_loading_info=True
    )
    anchor, size = case["anchor"], model.block_size
    block = torch.full((1, size), model.mask_token_id)
    block[0, 0] = inputs["ids"][0, anchor]
    hidden = model.eval()(
        position_ids=torch.arange(anchor + size)[None],
        noise_embedding=nn.functional.embedding(block, inputs["embedding"]),
        target_hidden=inputs["taps"][:, :anchor],
    )
    head = nn.Linear(*reversed(inputs["head"].shape), bias=False)
    head.weight.copy_(inputs["head"])
    logits = model.compute_logits(hidden[:, 1:], head)
    return model, told_of(info), {"logits": logits, "drafts": logits.argmax(-1)}


def load_speculator(folder: str) -> tuple[Any, Any]:
    config = SpeculatorModelConfig.from_pretrained(folder)
    # Its default, flex attention, is for GPUs.
    config.transformer_layer_config._attn_implementation = "eager"
    wanted = SpeculatorModel.registered_model_class_from_config(config)
    model = wanted.from_pretrained(folder, config=config, dtype=torch.float32)
    stored = load_file(Path(folder) / "model.safetensors")
    own = {name for name in model.state_dict() if not name.startswith("verifier_")}
    told = {
        "missing_keys": sorted(own - stored.keys()),
        "unexpected_keys": sorted(stored.keys() - model.state_dict().keys()),
    }
    return model.eval(), told


def speculators_ar(
    case: dict[str, Any], inputs: dict[str, Tensor]
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Its training pass: every row drafts, from the feature before its token."""
    model, told = load_speculator(case["folder"])
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _m, _i, output: seen.append(output.clone()))
    ids = inputs["ids"][:, 1:]
    model(
        hidden_states=inputs["taps"][:, :-1],
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        ttt_steps=case["num_steps"],
    )
    logits = torch.stack(seen, dim=1)
    drafts = logits.argmax(-1)
    if model.d2t is not None:
        drafts = drafts + model.d2t[drafts]
    return model, told, {"logits": logits, "drafts": drafts}


def speculators_diffusion(
    case: dict[str, Any], inputs: dict[str, Tensor]
) -> tuple[Any, Any, dict[str, Tensor]]:
    """Its training pass with the one anchor that the loss mask leaves."""
    model, told = load_speculator(case["folder"])
    ids = inputs["ids"]
    only = torch.zeros_like(ids)
    only[0, case["anchor"]] = 1
    last_hidden = torch.zeros(*ids.shape, inputs["embedding"].shape[1])
    _, logits, *_ = model._backbone_forward(
        inputs["taps"], ids, only, last_hidden, torch.zeros_like(ids), max_anchors=1
    )
    logits = logits[:, 1:]
    return model, told, {"logits": logits, "drafts": logits.argmax(-1)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
