"""Our arms and router inside vLLM, behind its hook for proposers; all that touches vLLM is here.

    python -m whiflash_infer.serving.vllm serve <target> --artifacts <folder> [vLLM's own flags]

vLLM hands a proposer the committed tokens of its rows, and nothing of the target's pass. Hooks on
the target capture what else is needed: the tapped layers, what the head reads and says, and from
the attention's metadata which cache slots the pass wrote.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn

from whiflash_infer.artifacts import read_json, read_manifest
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import ArmSettings, load_arms
from whiflash_infer.errors import UserError
from whiflash_infer.exchange.files import CONFIG
from whiflash_infer.pretrained import choose_policy, load_fitting_router, trained_for
from whiflash_infer.routing.router import Router
from whiflash_infer.serving.costs import MeasuredCosts
from whiflash_infer.serving.counters import Counters
from whiflash_infer.serving.features import PagedFeatures, ServedTexts
from whiflash_infer.serving.fingerprint import weights_fingerprint_of_files
from whiflash_infer.serving.prometheus import PrometheusMetrics
from whiflash_infer.serving.proposer import Proposer, Step
from whiflash_infer.target import TargetTables

SUPPORTED = SpecifierSet(">=0.32,<0.33")
PROPOSER = "whiflash_infer.serving.vllm.RoutedProposer"
_KEY = "whiflash"  # of ours in vLLM's additional_config
_SERVER = "vllm.entrypoints.launchers.api_server.entry"
_GIB = 1 << 30
_USER_ERROR, _INTERRUPTED = 2, 130
_log = logging.getLogger("vllm.whiflash")  # a child of vLLM's own, which it shows
_made: list[weakref.ref[RoutedProposer]] = []


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What `--additional-config '{"whiflash": {...}}'` may say.

    ar, diffusion, router: folders. policy: as `load_parts` takes it, trees left out.
    draft_length: of the chain; as trained when None.
    feature_gib: memory for the target's features of cached tokens.
    max_requests: that draft at a time; as many as vLLM runs when None.
    idle_seconds: after which requests are forgotten when no step is made.
    allow_untested_vllm: go on with a version that was not tried.
    """

    ar: str | None = None
    diffusion: str | None = None
    router: str | None = None
    policy: str | None = None
    draft_length: int | None = None
    feature_gib: float = 1.0
    max_requests: int | None = None
    idle_seconds: float = 2.0
    allow_untested_vllm: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("feature_gib", self.feature_gib),
            ("idle_seconds", self.idle_seconds),
        ):
            if not value > 0:
                raise UserError(f"{_KEY}.{name} is {value}, it has to be more than 0")
        if self.max_requests is not None and self.max_requests < 1:
            raise UserError(f"{_KEY}.max_requests is {self.max_requests}, it has to be 1 or more")

    def folder(self, name: str) -> Path | None:
        found = getattr(self, name)
        return None if found is None else Path(found).expanduser()


def serving_options(found: Mapping[str, Any]) -> ServingOptions:
    """Raises: UserError for a key that nothing reads, naming the nearest that something does."""
    known = [option.name for option in fields(ServingOptions)]
    for key in found:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or [", ".join(known)]
            raise UserError(f"{_KEY}.{key} is no option of the proposer: did you mean {near[0]}?")
    numbers = {
        name: float(found[name]) for name in ("feature_gib", "idle_seconds") if name in found
    }
    return ServingOptions(**{**found, **numbers})


def check_version(*, allow_untested: bool) -> None:
    """Raises: UserError for a vLLM that is missing, or not one of those that were tried."""
    try:
        version = importlib.import_module("vllm").__version__
    except ImportError:
        raise UserError(
            f"vLLM is not installed here: docs/vllm.md says how; it has to be {SUPPORTED}"
        ) from None
    if Version(version) not in SUPPORTED:
        told = f"vLLM is {version}, and the proposer was tried with {SUPPORTED}"
        if not allow_untested:
            raise UserError(f"{told}: install one of those, or set allow_untested_vllm")
        _log.warning("%s", told)


def check_config(config: Any) -> None:
    """Raises: UserError for settings under which vLLM hides from hooks what a proposer needs."""
    problems = []
    parallel = config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(parallel, name)) != 1:
            problems.append(f"{name} is {size}: drafters read the whole embedding, so it must be 1")
    compilation = config.compilation_config
    modes = (_name(compilation.mode), _name(compilation.cudagraph_mode))
    if any(mode not in ("NONE", "0", "None") for mode in modes):
        problems.append("the target is compiled, which skips hooks: give --enforce-eager")
    if config.kv_transfer_config is not None:
        problems.append("kv_transfer_config brings keys and values without their features")
    if config.model_config.is_multimodal_model or config.model_config.enable_prompt_embeds:
        problems.append("the target reads more than tokens, which drafters do not")
    if problems:
        raise UserError(f"the routed proposer cannot serve like this: {'; '.join(problems)}")


def _name(mode: object) -> str:
    return str(getattr(mode, "name", mode))


# --- what the target's pass shows -----------------------------------------------------------------


@dataclass(slots=True)
class _Pass:
    """One pass of the target over N tokens of B rows."""

    started: float
    input_ids: Tensor
    positions: Tensor
    query_starts: Tensor
    ends: Tensor
    block_table: Tensor
    slots: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor | None = None
    logits: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.query_starts) - 1


class PassCapture:
    """Hooks on vLLM's model, and the features that they see, kept by slot.

    A pass is stored when the next one begins, at the latest: vLLM does not ask for drafts after
    every pass. When a hook fails, what was kept is forgotten: it may not be what the slots hold.
    """

    def __init__(
        self,
        model: nn.Module,
        features: PagedFeatures,
        *,
        layers: Sequence[int],
        num_layers: int,
        attention: str,
    ) -> None:
        """layers: those that are tapped. attention: a part of the name of a layer that attends to
        everything before it, whose metadata says where tokens are kept."""
        context = importlib.import_module("vllm.forward_context")
        self._context, self._has_context = (
            context.get_forward_context,
            context.is_forward_context_available,
        )
        self._attention = attention
        self._layers = tuple(layers)
        self._features = features
        self._pass: _Pass | None = None
        self._has_failed = False
        found, head = _decoder_layers(model, num_layers), _only(model, "logits_processor")
        model.register_forward_pre_hook(self._guarded(self._begin), with_kwargs=True)
        for layer in layers:
            found[layer].register_forward_hook(self._guarded(self._tap(layer)))
        head.register_forward_hook(self._guarded(self._sampled))

    def take(self) -> _Pass | None:
        """The last pass, its features stored; None when there was none since."""
        found, self._pass = self._pass, None
        if found is None or found.logits is None:
            return None
        self._store(found)
        return found

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*arguments: Any) -> None:
            try:
                hook(*arguments)
            except Exception as error:
                self._pass = None
                self._features.forget()
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning("a pass of the target was not captured: %r", error, exc_info=error)

        return guarded

    def _begin(self, _model: nn.Module, _inputs: Any, named: dict[str, Any]) -> None:
        self.take()
        metadata = self._metadata()
        if metadata is None:
            return
        num_tokens = int(metadata.num_actual_tokens)
        self._pass = _Pass(
            started=time.perf_counter(),
            input_ids=named["input_ids"][:num_tokens].clone(),
            positions=named["positions"][..., :num_tokens].clone(),
            query_starts=metadata.query_start_loc.clone(),
            ends=metadata.seq_lens.clone(),
            block_table=metadata.block_table.clone(),
            slots=metadata.slot_mapping[:num_tokens].clone(),
        )

    def _metadata(self) -> Any:
        """Of the pass that begins; None for one that only warms up."""
        found = self._context().attn_metadata if self._has_context() else None
        if isinstance(found, list):
            raise TypeError("the pass is split into microbatches")
        if not found:
            return None
        named = [value for name, value in found.items() if self._attention in f".{name}."]
        return (named or list(found.values()))[0]

    def _tap(self, layer: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            """The sum is made at once: the next layer's norm works in place."""
            if self._pass is None:
                return
            if isinstance(output, tuple):
                whole = output[0] if output[1] is None else output[0] + output[1]
            else:
                whole = output.clone()
            self._pass.taps[layer] = whole

        return hook

    def _sampled(self, _module: nn.Module, inputs: Any, logits: Tensor) -> None:
        """The first call behind a pass is the one that is sampled from; others score prompts.

        Without drafts vLLM's sampler changes the logits in place, with them it takes copies.
        """
        current = self._pass
        if current is not None and current.logits is None and logits is not None:
            current.hidden = inputs[1]
            changed = len(logits) == current.num_rows
            current.logits = logits.clone() if changed else logits

    def _store(self, found: _Pass) -> None:
        slots = found.slots.cpu().numpy()
        taps = torch.cat([found.taps[layer][: len(slots)] for layer in self._layers], dim=-1)
        ids, positions = found.input_ids.cpu().numpy(), found.positions.cpu().numpy()
        self._features.write(slots, ids, positions, taps)


def _decoder_layers(model: nn.Module, number: int) -> nn.ModuleList:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == number]
    if len(lists) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(lists)} lists of {number} layers, one was expected: "
            "this target cannot be tapped in vLLM"
        )
    return lists[0]


def _only(model: nn.Module, name: str) -> nn.Module:
    found = [m for path, m in model.named_modules() if path.rpartition(".")[2] == name]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} has {len(found)} modules called {name}, one was expected: "
            "this target cannot be tapped in vLLM"
        )
    return found[0]


# --- the target, as drafters ask of it ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VllmTarget:
    """A `DraftTarget`. required: the weights as far as files tell; a wrong target costs acceptance,
    never correctness."""

    name: str
    device: torch.device
    dtype: torch.dtype
    tables: TargetTables
    tap_layer_ids: tuple[int, ...]
    vocab_size: int
    required: dict[str, str]


def _target(model: nn.Module, config: Any, name: str, taps: tuple[int, ...]) -> VllmTarget:
    text = config.model_config.hf_text_config
    tables = _tables(model, text)
    return VllmTarget(
        name=name,
        device=tables.head.device,
        dtype=tables.head.dtype,
        tables=tables,
        tap_layer_ids=taps,
        vocab_size=text.vocab_size,
        required=_required(name, config.model_config.model, text),
    )


def _tables(model: nn.Module, text: Any) -> TargetTables:
    """vLLM pads its tables to round numbers of words."""
    embedding = _table(_only(model, "embed_tokens"), "embedding", text)
    head = getattr(model, "lm_head", None)
    head = embedding if head is None else _table(head, "head", text)
    return TargetTables(embedding, head, getattr(text, "final_logit_softcapping", None))


def _table(module: nn.Module, what: str, text: Any) -> Tensor:
    weight = getattr(module, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.shape[1] != text.hidden_size:
        raise UserError(f"the target's {what} is quantised, and drafters read it as it is")
    return weight.detach()[: text.vocab_size]


def _required(name: str, source: str, text: Any) -> dict[str, str]:
    """source: a folder, or a hub id, which vLLM has just read into the hub's cache."""
    found = source if Path(source).is_dir() else try_to_load_from_cache(source, "config.json")
    weights = None
    if isinstance(found, str):
        folder = Path(found) if Path(found).is_dir() else Path(found).parent
        weights = weights_fingerprint_of_files(folder, tied=bool(text.tie_word_embeddings))
    if weights is None:
        _log.warning("%s: its files do not tell whether the drafters were trained for it", source)
        return {"name": name}
    return {"name": name, "weights": weights}


# --- the proposer ---------------------------------------------------------------------------------


class RoutedProposer:
    """vLLM's `custom_class` proposer: it constructs this, calls `load_model`, and after its steps
    `propose`. A failure of ours costs drafts, and never reaches vLLM."""

    def __init__(self, vllm_config: Any) -> None:
        found = vllm_config.additional_config or {}
        self._options = serving_options(found.get(_KEY) or {})
        check_version(allow_untested=self._options.allow_untested_vllm)
        check_config(vllm_config)
        self._config = vllm_config
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._proposer: Proposer | None = None
        _made.append(weakref.ref(self))

    @property
    def counters(self) -> Counters:
        return Counters() if self._proposer is None else self._proposer.counters

    def load_model(self, model: nn.Module) -> None:
        """Load drafters and router, and hook the target.

        Raises: UserError or ArtifactError, which say what does not fit.
        """
        options, config = self._options, self._config
        text = config.model_config.hf_text_config
        folders = {name: options.folder(name) for name in ("ar", "diffusion")}
        name, taps = trained_for(config.model_config.model, **folders)
        target = _target(model, config, name, taps)
        settings = ArmSettings(draft_length=options.draft_length, ar_tree=None, diffusion_tree=None)
        arms, lineage = load_arms(folders["ar"], folders["diffusion"], target, settings)
        router = None
        if (folder := options.folder("router")) is not None:
            router = load_fitting_router(folder, target, arms, lineage, allow_foreign=True)
        features = _features(config, options, target, len(taps))
        self._capture = PassCapture(
            model,
            features,
            layers=taps,
            num_layers=text.num_hidden_layers,
            attention=_full_layer(text),
        )
        self._proposer = _proposer(config, options, arms, router, features, target.device)
        self._metrics = PrometheusMetrics()
        threading.Thread(target=_sweep, args=(weakref.ref(self),), daemon=True).start()
        _log.info(
            "arms: plain, %s; features of %d tokens in %.2f GiB",
            *(", ".join(arms), features.capacity, features.num_bytes / _GIB),
        )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts of every row; none where nothing can be drafted from."""
        with self._lock:
            try:
                drafts = self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception as error:
                drafts = [[] for _ in sampled_token_ids]
                self._failed(error)
            self._metrics.publish(self.counters)
        return drafts

    def forget_idle(self) -> None:
        """Free what no step has held for a while."""
        with self._lock:
            if self._proposer is not None:
                self._proposer.forget_idle(time.perf_counter() - self._options.idle_seconds)
                self._metrics.publish(self.counters)

    def _propose(
        self, sampled: list[list[int]], num_tokens: np.ndarray, token_ids: np.ndarray
    ) -> list[list[int]]:
        assert self._proposer is not None
        began = time.perf_counter()
        found = self._capture.take()
        self.counters.spend("capture", time.perf_counter() - began)
        if found is None:
            self.counters.fallbacks["a step was not seen"] += 1
            return [[] for _ in sampled]
        block_size = self._config.cache_config.block_size
        return self._proposer.propose(_step(found, sampled, num_tokens, token_ids, block_size))

    def _failed(self, error: Exception) -> None:
        """What is kept of requests may be half of a step: all of it is made anew."""
        self.counters.fallbacks["the proposer"] += 1
        if self._proposer is not None:
            self._proposer.forget_idle(float("inf"))
        if repr(error) not in self._told:
            self._told.add(repr(error))
            _log.warning(
                "no drafts in this step: %r. Told once, counted always", error, exc_info=error
            )


def current_counters() -> Counters:
    """Of the proposer that was made last in this process.

    Raises: LookupError when there is none.
    """
    alive = [proposer for reference in _made if (proposer := reference()) is not None]
    if not alive:
        raise LookupError("no proposer was made in this process")
    return alive[-1].counters


def _step(
    found: _Pass,
    sampled: list[list[int]],
    num_tokens: np.ndarray,
    token_ids: np.ndarray,
    block_size: int,
) -> Step:
    """Raises: ValueError where the pass and the rows do not fit together."""
    num_rows = len(sampled)
    read = np.diff(found.query_starts.cpu().numpy())[:num_rows]
    ends = found.ends.cpu().numpy()[:num_rows].astype(int)
    assert found.logits is not None
    assert found.hidden is not None
    step = Step(
        sampled=sampled,
        num_tokens=num_tokens[:num_rows].astype(int),
        token_ids=token_ids[:num_rows],
        starts=ends - read,
        ends=ends,
        block_table=found.block_table.cpu().numpy()[:num_rows],
        block_size=block_size,
        logits=found.logits,
        hidden=found.hidden,
        started=found.started,
    )
    _check_step(step, found)
    return step


def _check_step(step: Step, found: _Pass) -> None:
    num_rows, num_sampled = len(step.sampled), int((step.num_drafts + 1).sum())
    if found.num_rows < num_rows or len(step.logits) != num_sampled:
        raise ValueError(
            f"the pass read {found.num_rows} rows and sampled from {len(step.logits)} places, "
            f"where {num_rows} rows and {num_sampled} places were expected"
        )
    firsts = found.slots[found.query_starts[:num_rows].long()].tolist()
    starts = step.starts.tolist()
    if firsts != [int(step.slots(row, s, s + 1)[0]) for row, s in enumerate(starts)]:
        raise ValueError(f"tokens do not lie in blocks of {step.block_size}")


def _features(
    config: Any, options: ServingOptions, target: VllmTarget, num_taps: int
) -> PagedFeatures:
    width = num_taps * target.tables.embedding.shape[1]
    host = 16  # bytes a token, of its id and position
    num_tokens = int(options.feature_gib * _GIB / (width * target.dtype.itemsize + host))
    longest, block_size = config.model_config.max_model_len, config.cache_config.block_size
    if num_tokens // block_size * block_size < longest:
        raise UserError(
            f"{_KEY}.feature_gib is {options.feature_gib}, which holds the features of "
            f"{num_tokens} tokens, fewer than one text of max_model_len {longest}: give more, or "
            "lower --max-model-len"
        )
    return PagedFeatures(
        block_size=block_size,
        width=width,
        num_tokens=num_tokens,
        dtype=target.dtype,
        device=target.device,
    )


def _proposer(
    config: Any,
    options: ServingOptions,
    arms: Mapping[str, Arm],
    router: Router | None,
    features: PagedFeatures,
    device: torch.device,
) -> Proposer:
    costs = None
    if router is not None:
        costs = MeasuredCosts(router.costs, price=float(router.settings.hazard.lam))
    return Proposer(
        arms,
        choose_policy(options.policy, arms, router, costs),
        ServedTexts(device, features),
        max_rows=options.max_requests or config.scheduler_config.max_num_seqs,
        max_length=config.model_config.max_model_len,
        max_draft=config.speculative_config.num_speculative_tokens,
        costs=costs,
    )


def _full_layer(text: Any) -> str:
    """A layer without a window: where windows slide, vLLM keeps those layers in other blocks."""
    kinds = list(getattr(text, "layer_types", None) or [])
    index = kinds.index("full_attention") if "full_attention" in kinds else 0
    return f".layers.{index}."


def _sweep(reference: weakref.ref[RoutedProposer]) -> None:
    """As long as the proposer lives."""
    while (proposer := reference()) is not None:
        pause = proposer._options.idle_seconds / 2
        proposer.forget_idle()
        del proposer
        time.sleep(pause)


# --- the command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 2 for something to mend, 130 when interrupted, else vLLM's own."""
    options, rest = _parser().parse_known_args(arguments)
    try:
        check_version(allow_untested=options.allow_untested_vllm)
        words = server_arguments(options, rest)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return _USER_ERROR
    with tempfile.TemporaryDirectory(prefix="whiflash-metrics-") as folder:
        # The worker is a process of its own: its metrics reach the server's page by files.
        os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", folder)
        sys.argv = ["vllm", *words]
        try:
            importlib.import_module(_SERVER).main()
        except KeyboardInterrupt:
            return _INTERRUPTED
    return 0


def server_arguments(options: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Of vLLM's OpenAI-compatible server.

    Raises: UserError for a drafter that is missing, or a flag that says what we have to say.
    """
    if any(word.partition("=")[0] in ("--speculative-config", "--model") for word in rest):
        raise UserError(
            "the target and the proposer are named by this command, not by vLLM's flags"
        )
    ours = _chosen(options)
    drafts = options.num_speculative_tokens or _most_drafts(serving_options(ours))
    speculative = {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": drafts,
    }
    given, rest = _additional(rest)
    return [
        *("--model", options.target),
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({**given, _KEY: ours})),
        *([] if "--enforce-eager" in rest else ["--enforce-eager"]),
        *rest,
    ]


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the proposer: folders that are named, and those that lie among the artefacts."""
    chosen: dict[str, Any] = {}
    for option in fields(ServingOptions):
        if (value := getattr(options, option.name)) not in (None, False):
            chosen[option.name] = value
    if options.artifacts is not None:
        places = {"ar": "ar_drafter", "diffusion": "diffusion_drafter", "router": "router"}
        for name, folder in places.items():
            if (path := Path(options.artifacts).expanduser() / folder).is_dir():
                chosen.setdefault(name, str(path.resolve()))
    return chosen


def _most_drafts(options: ServingOptions) -> int:
    found = []
    if (folder := options.folder("ar")) is not None:
        trained = read_manifest(folder, made_by="python train.py task=ar_drafter")["draft_length"]
        found.append(options.draft_length or trained)
    if (folder := options.folder("diffusion")) is not None:
        found.append(read_json(folder / CONFIG)["block_size"] - 1)
    if not found:
        raise UserError("there is no drafter: give --artifacts, --ar or --diffusion")
    return max(found)


def _additional(rest: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What `--additional-config` says besides, and the words without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--additional-config", type=json.loads, default={})
    known, others = parser.parse_known_args(rest)
    return known.additional_config, others


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_infer.serving.vllm",
        description="vLLM's OpenAI-compatible server, with drafters that a router chooses between.",
        epilog="All other flags are vLLM's own and are passed on.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("target", help="folder or hub id of the target")
    parser.add_argument("--artifacts", help="folder with ar_drafter, diffusion_drafter and router")
    for name in ("ar", "diffusion", "router"):
        parser.add_argument(f"--{name}", help="folder, in place of the one in --artifacts")
    parser.add_argument("--policy", help="hazard, static_ar, ... (default: the router's)")
    parser.add_argument("--draft-length", type=int, help="of the chain (default: as trained)")
    parser.add_argument("--num-speculative-tokens", type=int, help="drafts of a row, at most")
    parser.add_argument("--feature-gib", type=float, help="memory for features (default: 1)")
    parser.add_argument("--max-requests", type=int, help="that draft at a time (default: all)")
    parser.add_argument("--idle-seconds", type=float, help="until a request is forgotten")
    parser.add_argument("--allow-untested-vllm", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
