"""A decoder's parts from folders: target, drafters and policy, each refused where it does not fit.

What the drafters were trained on - the target's name, its tapped layers, how conversations are
rendered - is read from their own files, so nobody has to say it again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from whiflash_infer.artifacts import MANIFEST, read_json, read_manifest, require_match
from whiflash_infer.chat import ChatOptions
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import (
    ArmSettings,
    DraftTarget,
    arm_settings,
    load_arms,
    shapes_of,
)
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.exchange import eagle3, zlab
from whiflash_infer.exchange.files import CONFIG
from whiflash_infer.routing.costs import Costs, DeviceIdentity
from whiflash_infer.routing.policies import Policy, RandomPolicy, StaticPolicy
from whiflash_infer.routing.router import ROUTED, Router, load_router
from whiflash_infer.target import Target, resolve_device
from whiflash_infer.types import AR, DIFFUSION, DRAFTERS, PLAIN

_LAYOUTS = {AR: ("eagle3", eagle3), DIFFUSION: ("zlab", zlab)}
_ROUTER_MADE_BY = "python train.py task=router"
_STATIC = "static_"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a drafter folder says of the target that it was trained for."""

    path: Path
    target: str
    tap_layer_ids: tuple[int, ...]
    chat: Mapping[str, Any] | None


def load_parts(
    target: Target | str | Path,
    *,
    ar: str | Path | None = None,
    diffusion: str | Path | None = None,
    router: str | Path | None = None,
    policy: Policy | str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    arms: ArmSettings | None = None,
    allow_foreign_costs: bool = False,
    chat_options: ChatOptions | None = None,
    trust_remote_code: bool = False,
) -> tuple[Target, dict[str, Arm], Policy]:
    """What a `RoutedDecoder` is made of.

    target: a Hugging Face id, a local folder, or one that is loaded already; then dtype, device and
        chat_options are its own.
    ar, diffusion, router: folders, as training and `whiflash_infer.exchange` write them.
    policy: by name (plain, static_<arm>, random; with a router also hazard, entropy, delta,
        request, category and bandit), or one of your own. None: the router's hazard policy; without
        a router the one drafter that is given drafts every round, and without drafters nothing is
        drafted.
    arms: None takes those that the router was made for, without one the defaults.
    allow_foreign_costs: use a router whose costs were measured on another device.
    chat_options: None takes those that the drafters were trained with.

    Raises: UserError or ArtifactError, which say what does not fit and what to do.
    """
    paths = {AR: _path(ar), DIFFUSION: _path(diffusion)}
    facts = _agreed_facts(paths, target)
    if isinstance(target, Target):
        _require_auto(dtype=dtype, device=device, chat_options=chat_options)
    else:
        target = _load_target(
            target,
            facts,
            dtype=dtype,
            device=device,
            chat_options=chat_options,
            trust_remote_code=trust_remote_code,
        )
    router = _path(router)
    arms = arms or (ArmSettings() if router is None else arms_of_router(router))
    loaded, lineage = load_arms(paths[AR], paths[DIFFUSION], target, arms)
    routing = None
    if router is not None:
        routing = load_fitting_router(router, target, loaded, lineage, allow_foreign_costs)
    return target, loaded, choose_policy(policy, loaded, routing)


def trained_for(
    target: Target | str | Path, *, ar: Path | None, diffusion: Path | None
) -> tuple[str, tuple[int, ...]]:
    """Name and tapped layers of the target that drafter folders are for.

    Raises: ArtifactError for a folder that is none of ours, or two that do not go together.
    """
    facts = _agreed_facts({AR: ar, DIFFUSION: diffusion}, target)
    if not facts:
        raise UserError("there is no drafter: give the folder of an ar or a diffusion drafter")
    return facts[0].target, facts[0].tap_layer_ids


def choose_policy(
    wanted: Policy | str | None,
    arms: Mapping[str, Arm],
    router: Router | None,
    costs: Costs | None = None,
) -> Policy:
    """costs: None takes those of the router.

    Raises: UserError for a policy that is unknown, or whose arms or router are missing.
    """
    if not isinstance(wanted, str | None):
        return wanted
    name = wanted or _default_policy(arms, router)
    policy = _policy(name, arms, router, costs)
    needed = {*policy.arms}
    if router is not None and name in ROUTED:
        needed |= {DRAFTERS[arm] for arm in router.net.config.max_draft}
    missing = sorted(needed - {PLAIN, *arms})
    if missing:
        raise UserError(
            f"the policy {name} chooses among arms that are not there: {', '.join(missing)}. "
            f"Loaded are {_listed(arms)}; give the drafter that is missing, or another policy"
        )
    return policy


def _default_policy(arms: Mapping[str, Arm], router: Router | None) -> str:
    if router is not None:
        return "hazard"
    drafters = [arm for arm in (AR, DIFFUSION) if arm in arms]
    if len(drafters) > 1:
        raise UserError(
            "there are two drafters, but no router to choose between them: give a router folder, "
            f"or name a policy, such as {' or '.join(_STATIC + arm for arm in drafters)}"
        )
    return _STATIC + drafters[0] if drafters else PLAIN


def _policy(
    name: str, arms: Mapping[str, Arm], router: Router | None, costs: Costs | None
) -> Policy:
    statics = {PLAIN: PLAIN, **{_STATIC + arm: arm for arm in arms}}
    if name in statics:
        return StaticPolicy(statics[name])
    if name == "random":
        return RandomPolicy(0)
    if name in ROUTED and router is not None:
        return router.policy(name, costs=costs)
    if name in ROUTED:
        raise UserError(f"the policy {name} takes its numbers from a router: give a router folder")
    known = [*statics, "random", *(ROUTED if router is not None else ())]
    raise UserError(f"unknown policy {name!r}: choose from {', '.join(known)}")


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None else Path(folder).expanduser()


def _facts(arm: str, path: Path, target: Target | str | Path) -> _Facts:
    layout, module = _LAYOUTS[arm]
    name = target.name if isinstance(target, Target) else target
    convert = (
        f"python -m whiflash_infer.exchange {path} NEW_FOLDER --layout {layout} --target {name}"
    )
    if not (path / MANIFEST).is_file():
        state = f"has no {MANIFEST}" if path.exists() else "does not exist"
        raise ArtifactError(
            f"{path} {state}: the {arm} drafter has to be a folder that this program wrote. Train "
            f"one with: python train.py task={arm}_drafter, or convert one of others with: "
            f"{convert}"
        )
    manifest = read_manifest(path, made_by=f"python train.py task={arm}_drafter")
    found = (read_json(path / CONFIG).get("architectures") or [None])[0]
    if found not in module.ARCHITECTURES:
        raise ArtifactError(
            f"{path} holds a {found}, but the {arm} drafter has to be one of "
            f"{', '.join(sorted(module.ARCHITECTURES))}"
        )
    if "name" not in (manifest.get("target") or {}) or not manifest.get("tap_layer_ids"):
        raise ArtifactError(
            f"{path / MANIFEST} does not say which target the drafter is for. Convert it again and "
            f"name the target: {convert}"
        )
    taps = tuple(manifest["tap_layer_ids"])
    return _Facts(path, manifest["target"]["name"], taps, manifest.get("chat"))


def _agreed_facts(paths: Mapping[str, Path | None], target: Target | str | Path) -> list[_Facts]:
    """Of the folders that are given, which have to go together."""
    facts = [_facts(arm, path, target) for arm, path in paths.items() if path is not None]
    for field, what in (("target", "for the target"), ("tap_layer_ids", "on the layers")):
        told = [f"{f.path} {what} {_shown(getattr(f, field))}" for f in facts]
        if len({getattr(f, field) for f in facts}) > 1:
            raise ArtifactError(
                f"the drafters were not trained together: {', '.join(told)}. Train one of them "
                f"again so that both have the same {field}"
            )
    return facts


def _shown(value: str | tuple[int, ...]) -> str:
    return repr(value if isinstance(value, str) else list(value))


def _require_auto(*, dtype: str, device: str, chat_options: ChatOptions | None) -> None:
    given = {"dtype": dtype != "auto", "device": device != "auto", "chat_options": chat_options}
    named = [name for name, is_given in given.items() if is_given]
    if named:
        raise UserError(
            f"the target is loaded already, so {', '.join(named)} cannot be chosen here: "
            "give it to Target.from_pretrained"
        )


def _load_target(
    source: str | Path,
    facts: Sequence[_Facts],
    *,
    dtype: str,
    device: str,
    chat_options: ChatOptions | None,
    trust_remote_code: bool,
) -> Target:
    folder = Path(source).expanduser()
    try:
        return Target.from_pretrained(
            str(folder if folder.is_dir() else source),
            name=facts[0].target if facts else str(source),
            tap_layer_ids=facts[0].tap_layer_ids if facts else (0,),  # which nobody reads
            dtype=dtype,
            device=_checked_device(device),
            trust_remote_code=trust_remote_code,
            chat_options=chat_options or _trained_rendering(facts),
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the target {source} cannot be loaded: {reason}") from None


def _checked_device(device: str) -> str:
    device = resolve_device(device)
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"device is {device!r}: it must be auto, cpu, cuda or cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {device!r}, but this machine shows no CUDA GPU: use device cpu")
    return device


def _trained_rendering(facts: Sequence[_Facts]) -> ChatOptions | None:
    """How the drafters' conversations were rendered, where they all say the same.

    A jinja file is not among it: it has to be given, and a missing one is found by its hash.
    """
    told = [f.chat for f in facts]
    if not told or told[0] is None or any(chat != told[0] for chat in told):
        return None
    return ChatOptions(**told[0])


def arms_of_router(path: Path) -> ArmSettings:
    """The arms that a router was made for; the defaults, where it does not say.

    Raises: ArtifactError for a folder that holds no router.
    """
    manifest = read_manifest(path, made_by=_ROUTER_MADE_BY)
    found = manifest.get("arm_settings")
    return ArmSettings() if found is None else arm_settings(found)


def load_fitting_router(
    path: Path,
    target: DraftTarget,
    arms: Mapping[str, Arm],
    lineage: Mapping[str, Any],
    allow_foreign: bool,
) -> Router:
    """A router on the target's device. arms, lineage: as from `load_arms`.

    Raises: ArtifactError for one that was made for another target, other drafters, another device.
    It routes without trees that are not there, and without arms of another shape.
    """
    here = DeviceIdentity.here(target.device, target.dtype)
    router = load_router(path, here=here, target=target.name, allow_foreign=allow_foreign)
    made_for = router.manifest.get("target", {})
    require_match(path, made_for, target.required, made_by=_ROUTER_MADE_BY)
    trained = router.manifest.get("drafters", {})
    found = {f"{arm} drafter": facts for arm, facts in trained.items()}
    wanted = {f"{arm} drafter": facts for arm, facts in lineage.items() if arm in trained}
    made_by = f"python data_prep/log_rounds.py, then {_ROUTER_MADE_BY}"
    require_match(path, found, wanted, made_by=made_by)
    router.net.to(target.device)
    return replace(router, usable=_usable(path, router, arms))


def _usable(path: Path, router: Router, arms: Mapping[str, Arm]) -> tuple[str, ...]:
    """The router's arms that are loaded in the shape that it knows; others are told."""
    known, here = router.manifest.get("arms", {}), shapes_of(arms)
    usable = [PLAIN]
    for arm in router.arms[1:]:
        if arm in here and known.get(arm, here[arm]) == here[arm]:
            usable.append(arm)
        elif arm in here:
            _log.warning(
                "%s knows the arm %s as %s, but here it is %s: it routes without it",
                *(path, arm, known[arm], here[arm]),
            )
    return tuple(usable)


def _listed(arms: Mapping[str, Arm]) -> str:
    return ", ".join([PLAIN, *arms])
