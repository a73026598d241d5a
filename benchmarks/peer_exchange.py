"""Do the `dflash` and `speculators` packages read our exports, and draft what we draft?

`python benchmarks/peer_exchange.py` makes a throw-away environment for the two (--venv says where,
and it is kept there for the next time), exports drafters of random weights, loads them with the
packages' own classes, compares logits and drafts in float32, and reads back what the packages save.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import arguments, console, save
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from whiflash_infer.exchange import Given, TargetFacts, read_drafter, write_drafter
from whiflash_infer.exchange.facts import Drafter
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.shape import DrafterShape

# Both packages at once; torch, numpy and what else they need come from the environment that runs
# this. `dflash` pins transformers 5.15.0, which brings its own hub, tokenizers and datasets;
# `speculators` asks for torchvision and torchaudio, which loading a drafter does not need.
PINS = (
    "dflash==0.1.0",
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "transformers==5.15.0",
    "huggingface-hub==1.27.0",
    "tokenizers==0.22.2",
    "datasets==5.0.1",
    "loguru==0.7.3",
    "pydantic-settings==2.16.3",
)
TOLERANCE = 1e-4
TOKENS, ANCHOR, BLOCK, STEPS = 24, 14, 8, 3
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24,  # heads times head_dim is not the hidden size
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "theta": 5000.0,
        "num_layers": 12,
        "drafted": 120,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "theta": 100000.0,
        "num_layers": 30,
        "drafted": 8192,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    layout: str
    net: Drafter
    target: TargetFacts

    @property
    def kind(self) -> str:
        return "ar" if isinstance(self.net, ARDrafter) else "diffusion"


def main() -> None:
    default = Path(tempfile.gettempdir()) / "whiflash_peers"
    options = arguments(__doc__, venv=str(default), seed=0)
    python = prepare(Path(options.venv))
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        cases = list(make_cases(Path(folder), options.seed))
        inputs = {case.name: export(case, Path(folder), options.seed) for case in cases}
        report = run_peers(python, Path(folder))
        results = {
            case.name: compare(case, Path(folder), inputs[case.name], report["loads"][case.name])
            for case in cases
        }
    show(results)
    settings = {"pins": PINS, "tolerance": TOLERANCE, "seed": options.seed, "sizes": SIZES}
    save("peer_exchange", settings, {"peers": report["versions"], "cases": results})
    if not all(result["agrees"] for result in results.values()):
        sys.exit(1)


def prepare(folder: Path) -> Path:
    """The python of an environment with the peers; made anew where the pins have changed."""
    ready, python = folder / "pins.json", folder / "bin" / "python"
    if ready.is_file() and json.loads(ready.read_text()) == list(PINS):
        return python
    console.print(f"installing the peers into {folder}")
    venv.create(folder, with_pip=True, clear=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "surrounding_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", *PINS]
    subprocess.run(command, check=True)
    ready.write_text(json.dumps(PINS))
    return python


def run_peers(python: Path, folder: Path) -> dict[str, Any]:
    """What the child reports; its own words only where it fails."""
    child = [python, Path(__file__).with_name("peer_child.py"), folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(child, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the peers failed:\n{done.stderr}")
    return json.loads((folder / "report.json").read_text())


def make_cases(folder: Path, seed: int) -> Iterator[Case]:
    torch.manual_seed(seed)
    for size in SIZES:
        target = make_target(size, folder / f"{size}_target")
        flavours = {"classic": {}, "eagle31": {"fc_norm": True, "norm_output": True}}
        flavours["qk_norm"] = {"qk_norm": True}
        for flavour, flags in flavours.items():
            net = make_ar(target, SIZES[size]["drafted"], flags)
            yield Case(name=f"{size}_ar_{flavour}", layout="speculators", net=net, target=target)
        if size == "tiny":
            net = make_ar(target, target.shape.vocab_size, {})
            yield Case(name="tiny_ar_full", layout="speculators", net=net, target=target)
            net = make_diffusion(target, window=10)
            yield Case(name="tiny_diffusion_window", layout="zlab", net=net, target=target)
        net = make_diffusion(target, window=None)
        for layout in ("zlab", "speculators"):
            yield Case(name=f"{size}_diffusion_{layout}", layout=layout, net=net, target=target)


def make_target(size: str, folder: Path) -> TargetFacts:
    """The files of a target that the peers read: its config, tied tables and final norm."""
    facts = SIZES[size]
    kept = {name: facts[name] for name in DrafterShape.__dataclass_fields__ if name in facts}
    rope = {"rope_type": "default", "rope_theta": facts["theta"]}
    hidden = facts["hidden_size"]
    shape = DrafterShape(**kept, hidden_act="silu", target_hidden_size=hidden, rope_parameters=rope)
    table = torch.randn(facts["vocab_size"], hidden) / hidden**0.5
    config = LlamaConfig(
        hidden_size=hidden,
        vocab_size=facts["vocab_size"],
        num_hidden_layers=facts["num_layers"],
        num_attention_heads=facts["num_heads"],
        num_key_value_heads=facts["num_kv_heads"],
        head_dim=facts["head_dim"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    save_file(
        {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(hidden)},
        folder / "model.safetensors",
    )
    return TargetFacts(
        name=str(folder),
        architectures=("LlamaForCausalLM",),
        num_layers=facts["num_layers"],
        shape=shape,
        embedding=table,
        head=table,
    )


def make_ar(target: TargetFacts, drafted: int, flags: dict[str, bool]) -> ARDrafter:
    layers = target.num_layers
    config = ARDrafterConfig(
        shape=target.shape,
        draft_vocab_size=drafted,
        tap_layer_ids=(1, layers // 2 - 1, layers - 4),
        **{"fc_norm": False, "norm_output": False, "qk_norm": False, **flags},
    )
    net = ARDrafter(config)
    randomise(net)
    net.set_vocabulary(torch.randperm(target.shape.vocab_size)[:drafted])
    return net.eval()


def make_diffusion(target: TargetFacts, *, window: int | None) -> DiffusionDrafter:
    config = DiffusionDrafterConfig(
        shape=target.shape,
        num_layers=2,
        block_size=BLOCK,
        mask_token_id=target.shape.vocab_size - 1,
        num_target_layers=target.num_layers,
        tap_layer_ids=(1, 3, 5, 7, target.num_layers - 4),
        markov_rank=0,
        sliding_window=window,
    )
    net = DiffusionDrafter(config)
    randomise(net)
    return net.eval()


def randomise(net: Drafter) -> None:
    """Norms away from 1, so that each of them has its say."""
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape)
        scaled = 1.0 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5
        parameter.copy_(scaled)


def export(case: Case, folder: Path, seed: int) -> dict[str, Tensor]:
    """Write the drafter and its inputs, and the case for the child to find."""
    write_drafter(
        case.net,
        folder / case.name,
        layout=case.layout,
        manifest={"license": "apache-2.0"},
        token_ids=TOKEN_IDS,
        target=case.target,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    shape = case.target.shape
    width = len(case.net.config.tap_layer_ids) * shape.hidden_size
    inputs = {
        "ids": torch.randint(shape.vocab_size, (1, TOKENS), generator=generator),
        "taps": torch.randn(1, TOKENS, width, generator=generator),
        "embedding": case.target.embedding,
        "head": case.target.head.clone(),
    }
    save_file(inputs, folder / f"{case.name}.in.safetensors")
    listing = folder / "cases.json"
    known = json.loads(listing.read_text()) if listing.is_file() else []
    told = {"name": case.name, "layout": case.layout, "kind": case.kind, "anchor": ANCHOR}
    told |= {"folder": str(folder / case.name), "num_steps": STEPS}
    told |= {"num_target_layers": case.target.num_layers}
    listing.write_text(json.dumps([*known, told]))
    return inputs


def ours(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and drafted tokens of the same inputs."""
    if isinstance(case.net, ARDrafter):
        return ours_ar(case.net, inputs)
    block = torch.full((1, 1, BLOCK), case.net.config.mask_token_id)
    block[0, 0, 0] = inputs["ids"][0, ANCHOR]
    embeds = torch.nn.functional.embedding(block, inputs["embedding"])
    hidden = case.net.blocks(embeds, inputs["taps"], torch.tensor([[ANCHOR]]))
    logits = hidden[:, 0, 1:] @ inputs["head"].T
    return logits, logits.argmax(-1)


def ours_ar(net: ARDrafter, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    embeds = torch.nn.functional.embedding(inputs["ids"], inputs["embedding"])
    anchors = torch.arange(1, TOKENS)[None]
    states = net.unroll(embeds, inputs["taps"], anchors, num_steps=STEPS)
    logits = torch.stack([net.logits(state) for state in states], dim=1)
    return logits, net.vocabulary()[logits.argmax(-1)]


def compare(
    case: Case, folder: Path, inputs: dict[str, Tensor], load: dict[str, Any]
) -> dict[str, Any]:
    theirs = load_file(folder / f"{case.name}.out.safetensors")
    logits, drafts = ours(case, inputs)
    keep = torch.ones_like(drafts, dtype=torch.bool)
    if case.kind == "ar":
        # Behind the last token we feed it again and they feed token 0; nobody learns from that.
        rows, steps = torch.arange(TOKENS - 1), torch.arange(STEPS)[:, None]
        keep = (rows + 1 + steps <= TOKENS - 1)[None]
    difference = (logits - theirs["logits"]).abs()[keep].max().item()
    same = bool((drafts == theirs["drafts"])[keep].all())
    returned = reread(case, folder)
    same_layers = load["hidden_states"] == [i + 1 for i in case.net.config.tap_layer_ids]
    whole = not load["missing_keys"] and not load["unexpected_keys"]
    return {
        "largest_difference": difference,
        "largest_logit": logits.abs().max().item(),
        "drafts_compared": int(keep.sum()),
        "same_drafts": same,
        "same_layers": same_layers,
        "their_file_read_back": returned,
        "load": load,
        "agrees": difference <= TOLERANCE
        and all([same, same_layers, whole, returned == "bit by bit"]),
    }


def reread(case: Case, folder: Path) -> str:
    """Read what the package saved of our drafter with our importer."""
    given = Given(num_target_layers=case.target.num_layers)
    saved = read_drafter(folder / f"{case.name}.saved", target=case.target, given=given).net
    if saved.config != case.net.config:
        return f"another config: {saved.config}"
    state = saved.state_dict()
    differing = [n for n, t in case.net.state_dict().items() if not torch.equal(t, state[n])]
    return f"other tensors: {differing}" if differing else "bit by bit"


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="our exports in the peers' own classes, float32")
    for column in ("case", "difference", "drafts", "layers", "read back"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        said = {True: "same", False: "DIFFER"}
        exact = result["their_file_read_back"] == "bit by bit"
        table.add_row(
            name,
            f"{result['largest_difference']:.1e}",
            f"{result['drafts_compared']} {said[result['same_drafts']]}",
            said[result["same_layers"]],
            said[exact],
        )
    console.print(table)


if __name__ == "__main__":
    main()
