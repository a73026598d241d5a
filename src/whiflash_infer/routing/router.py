"""Router folders: networks, price, thresholds and the cost profile they were made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from whiflash_infer.artifacts import new_artifact, read_json, read_manifest, write_json
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.routing.costs import CostModel, Costs, DeviceIdentity, load_costs, save_costs
from whiflash_infer.routing.features import SCALARS
from whiflash_infer.routing.policies import (
    BanditPolicy,
    CategoryPolicy,
    DeltaPolicy,
    EntropyPolicy,
    HazardPolicy,
    HazardSettings,
    Policy,
    RandomPolicy,
    RequestPolicy,
    StaticPolicy,
)
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, PLAIN

STATIC = {f"static_{arm}": arm for arm in (AR, AR_TREE, DIFFUSION, DIFFUSION_TREE)}
ROUTED = ("hazard", "entropy", "delta", "request", "category", "bandit")  # made of a router
POLICIES = (PLAIN, *STATIC, *ROUTED, "random")
CONFIG, WEIGHTS, COSTS = "config.json", "model.safetensors", "costs.json"
_FEATURES = {"scalars": list(SCALARS), "hidden": "of the target, after its final norm"}
_MADE_BY = "python train.py task=router"


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What the policies need besides their networks.

    entropy_threshold: nats. delta_threshold: tokens. category_arms: the best arm of each category
    in training. explore: of the bandit, see there.
    """

    hazard: HazardSettings
    entropy_threshold: float = 0.0
    delta_threshold: float = 0.0
    category_arms: Mapping[str, str] = field(default_factory=dict)
    explore: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Router:
    """usable: arms of the network that can be used here; None: all."""

    net: RouterNet
    settings: RouterSettings
    costs: CostModel
    manifest: Mapping[str, Any]
    usable: tuple[str, ...] | None = None

    @property
    def arms(self) -> tuple[str, ...]:
        """That its policies choose among, plain first."""
        return self.net.config.arms if self.usable is None else self.usable

    def policy(self, name: str, *, seed: int = 0, costs: Costs | None = None) -> Policy:
        """A new one, which remembers nothing yet.

        costs: prices of rounds; those of the profile that it was trained with when None.

        Raises: UserError for an unknown name, with the known ones.
        """
        settings, costs = self.settings, self.costs if costs is None else costs
        lam, otherwise = settings.hazard.lam, self._or_plain(settings.hazard.best_static)
        by_category = {k: self._or_plain(arm) for k, arm in settings.category_arms.items()}
        hazard = replace(settings.hazard, best_static=otherwise)
        makers = {
            PLAIN: lambda: StaticPolicy(PLAIN),
            "entropy": lambda: EntropyPolicy(settings.entropy_threshold),
            "delta": lambda: DeltaPolicy(self.net, settings.delta_threshold),
            "request": lambda: RequestPolicy(self.net, self.arms),
            "category": lambda: CategoryPolicy(by_category, otherwise),
            "bandit": lambda: BanditPolicy(self.arms, costs, lam=lam, explore=settings.explore),
            "hazard": lambda: HazardPolicy(self.net, costs, hazard, self.arms),
            "random": lambda: RandomPolicy(seed),
        }
        if name in STATIC:
            return StaticPolicy(STATIC[name])
        if name not in makers:
            raise UserError(f"unknown policy {name!r}: choose from {', '.join(POLICIES)}")
        return makers[name]()

    def _or_plain(self, arm: str) -> str:
        return arm if arm in self.arms else PLAIN

    def has_arms_of(self, name: str) -> bool:
        """The paper's policies choose between two arms, which a router need not know."""
        wanted = {"entropy": (AR, DIFFUSION), "delta": (AR, DIFFUSION)}.get(name, ())
        return set(wanted) <= set(self.arms)


def save_router(
    path: Path,
    net: RouterNet,
    settings: RouterSettings,
    costs: CostModel,
    manifest: Mapping[str, Any],
) -> None:
    """config.json, model.safetensors and costs.json, which are all that inference reads."""
    with new_artifact(path, manifest) as folder:
        config = {
            "features": _FEATURES,
            "network": asdict(net.config),
            "policy": asdict(settings),
        }
        write_json(folder / CONFIG, config)
        save_costs(folder / COSTS, costs, measurements={})
        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()
        }
        save_file(state, folder / WEIGHTS)


def load_router(path: Path, *, here: DeviceIdentity, target: str, allow_foreign: bool) -> Router:
    """Raises: ArtifactError when a part is missing, does not fit or was made on another device."""
    manifest = read_manifest(path, made_by=_MADE_BY)
    config = read_json(path / CONFIG)
    try:
        if config["features"] != _FEATURES:
            raise TypeError(f"it reads other features: {config['features']}")
        net = RouterNet(RouterConfig(**config["network"]))
        settings = _settings(config["policy"])
        net.load_state_dict(load_file(path / WEIGHTS))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path}: {error}. Make it again with: {_MADE_BY}") from None
    costs = load_costs(
        path / COSTS,
        here=here,
        target=target,
        allow_foreign=allow_foreign,
        made_by=f"python data_prep/profile_costs.py, then {_MADE_BY}",
    )
    _require_priced(path, net.config, costs)
    net.eval().requires_grad_(False)
    return Router(net=net, settings=settings, costs=costs, manifest=manifest)


def _settings(found: Mapping[str, Any]) -> RouterSettings:
    others = {name: value for name, value in found.items() if name != "hazard"}
    return RouterSettings(hazard=HazardSettings(**found["hazard"]), **others)


def _require_priced(path: Path, config: RouterConfig, costs: CostModel) -> None:
    missing = {a: k for a, k in config.max_draft.items() if costs.max_draft.get(a) != k}
    if missing:
        raise ArtifactError(
            f"{path}: {COSTS} has no prices for {_listed(missing)}. Make it again with: {_MADE_BY}"
        )


def _listed(arms: Mapping[str, int]) -> str:
    return ", ".join(f"{arm} of {length} drafts" for arm, length in arms.items())


def statics(arms: Sequence[str]) -> list[str]:
    """Names of the policies that use one of these arms always."""
    return [arm if arm == PLAIN else f"static_{arm}" for arm in arms]
