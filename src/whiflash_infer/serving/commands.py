"""The command that serves a drafter in another engine, once its folder is known to fit."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig

from whiflash_infer.artifacts import MANIFEST, read_json
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange import Given, Imported, detect, read_drafter
from whiflash_infer.exchange.facts import Drafter
from whiflash_infer.exchange.files import CONFIG, DrafterFiles, read_files
from whiflash_infer.exchange.formats import native_layout
from whiflash_infer.exchange.speculators import MARK
from whiflash_infer.exchange.zlab import MARKOV
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.serving.contracts import CONTRACTS, NAMES, Contract, Engine, breaches

_TRAIN = {
    "Eagle3Qwen3ForCausalLM": "train it with ar_drafter.qk_norm=false, or serve it with vLLM",
    MARKOV: "no engine reads its Markov head from this layout; train it with "
    "diffusion_drafter.markov_rank=0",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """command: ready for a shell by `shell`. notes: what the user should know."""

    command: tuple[str, ...]
    notes: tuple[str, ...]

    def shell(self) -> str:
        return shlex.join(self.command)


@dataclass(frozen=True, kw_only=True)
class _Target:
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int


def launch(
    engine: Engine,
    target: str,
    drafter: str,
    *,
    num_speculative_tokens: int | None = None,
    port: int | None = None,
) -> Launch:
    """num_speculative_tokens: drafts a round; None: as many as the drafter was trained for.

    Only the target's config is read, not its weights.
    Raises: UserError naming every field and tensor that the engine would not read as it was meant.
    """
    served = _target(target)
    files = read_files(drafter, allow_pickle=False)
    imported = _read(files, served, drafter)
    contract = _contract(engine, files, imported.net, served, drafter)
    _check(engine, contract, files, imported.net, served, drafter)
    number = _num_drafts(imported, files.path, num_speculative_tokens)
    words = _vllm if engine == "vllm" else _sglang
    limit = min(imported.net.config.shape.max_position_embeddings, served.max_length)
    command = words(contract.method, target, drafter, number)
    if limit < served.max_length:
        flag = "--max-model-len" if engine == "vllm" else "--context-length"
        command += (flag, str(limit))
    if port is not None:
        command += ("--port", str(port))
    return Launch(command=command, notes=imported.notes)


def _read(files: DrafterFiles, target: _Target, drafter: str) -> Imported:
    """What to give in place of a field that is silent, only a conversion can be told."""
    try:
        return read_drafter(files.path, given=Given(num_target_layers=target.num_layers))
    except ArtifactError as error:
        if "(--" not in str(error):
            raise
        command = _conversion("eagle3|zlab", target, drafter)
        raise ArtifactError(f"{error}; options are those of: {command}") from None


def _target(name: str) -> _Target:
    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the config of the target {name} cannot be read: {reason}") from None
    return _Target(
        name=name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
    )


def _contract(
    engine: Engine, files: DrafterFiles, net: Drafter, target: _Target, drafter: str
) -> Contract:
    layout = detect(files.config)
    key = f"{layout} {files.config[MARK]}" if layout == "speculators" else layout
    if (engine, key) in CONTRACTS:
        return CONTRACTS[engine, key]
    raise UserError(
        f"{files.path}: {NAMES[engine]} does not read the {layout} layout; write another with: "
        f"{_conversion(native_layout(net), target, drafter)}"
    )


def _conversion(layout: str, target: _Target, drafter: str) -> str:
    """layout: one, or the ones to choose from."""
    new = f"{Path(drafter).name}_{layout.partition('|')[0]}"
    words = ["python", "-m", "whiflash_infer.exchange", drafter, new]
    return f"{shlex.join(words)} --layout {layout} --target {shlex.quote(target.name)}"


def _check(
    engine: Engine,
    contract: Contract,
    files: DrafterFiles,
    net: Drafter,
    target: _Target,
    drafter: str,
) -> None:
    where = files.path / CONFIG
    _check_sizes(where, net, target)
    problems = breaches(contract, files.config, files.tensors, net)
    if not problems:
        return
    named = (files.config.get("architectures") or [""])[0]
    layout = "speculators" if _only_spare_maps(problems) else native_layout(net)
    remedy = _TRAIN.get(named) if problems[0].startswith("architectures") else None
    remedy = remedy or f"write a folder that it reads with: {_conversion(layout, target, drafter)}"
    raise ArtifactError(
        f"{where}: {NAMES[engine]} would not read this drafter as it was trained: "
        f"{'; '.join(problems)}. To mend it: {remedy}"
    )


def _only_spare_maps(problems: list[str]) -> bool:
    return all(problem.startswith("tensor d2t is there") for problem in problems)


def _check_sizes(where: Path, net: Drafter, target: _Target) -> None:
    """Engines read the target's embedding for the drafter's own."""
    shape = net.config.shape
    for name, found, wanted in (
        ("vocab_size", shape.vocab_size, target.vocab_size),
        ("hidden_size", shape.hidden_size, target.hidden_size),
        ("target_hidden_size", shape.target_hidden_size, target.hidden_size),
    ):
        if found != wanted:
            raise ArtifactError(
                f"{where}: {name} is {found}, that of the target {target.name} is {wanted}, and "
                "engines give a drafter the target's embedding; choose the target it was trained "
                "for, or train one as wide as the target"
            )


def _num_drafts(imported: Imported, path: Path, asked: int | None) -> int:
    """Raises: UserError for fewer than one draft, or more than a block has."""
    net, manifest = imported.net, path / MANIFEST
    most = net.config.block_size - 1 if isinstance(net, DiffusionDrafter) else None
    trained = most
    if most is None and manifest.is_file():
        trained = read_json(manifest).get("draft_length")
    number = asked if asked is not None else trained or imported.draft_length
    if number < 1 or (most is not None and number > most):
        block = "" if most is None else f" and {most} at most (a block is one longer)"
        raise UserError(f"--num-speculative-tokens is {number}: it must be 1 or more{block}")
    return number


def _vllm(method: str, target: str, drafter: str, number: int) -> tuple[str, ...]:
    speculative = {"method": method, "model": drafter, "num_speculative_tokens": number}
    return ("vllm", "serve", target, "--speculative-config", json.dumps(speculative))


def _sglang(method: str, target: str, drafter: str, number: int) -> tuple[str, ...]:
    """Its `draft-tokens` are what the target reads, so one more than drafts."""
    chain = ("--speculative-num-steps", str(number), "--speculative-eagle-topk", "1")
    return (
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        target,
        "--speculative-algorithm",
        method,
        "--speculative-draft-model-path",
        drafter,
        *(chain if method == "EAGLE3" else ()),
        "--speculative-num-draft-tokens",
        str(number + 1),
    )
