"""Router folders: network, price, thresholds and the cost profile they were made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from whiflash_infer.artifacts import new_artifact, read_json, read_manifest, write_json
from whiflash_infer.costs import CostModel, DeviceIdentity, load_costs, save_costs
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.nets.router import RouterConfig, RouterNet
from whiflash_infer.policies import EntropyPolicy, HazardPolicy, Policy, RandomPolicy, StaticPolicy
from whiflash_infer.types import AR, AR_TREE, DIFFUSION, DIFFUSION_TREE, PLAIN

STATIC = {f"static_{arm}": arm for arm in (AR, AR_TREE, DIFFUSION, DIFFUSION_TREE)}
POLICIES = (PLAIN, *STATIC, "entropy", "hazard", "random")
CONFIG, WEIGHTS, COSTS = "config.json", "model.safetensors", "costs.json"


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """lam in tokens a second; entropy_threshold in nats."""

    lam: float
    adaptive_length: bool
    switch_margin: float
    entropy_threshold: float


@dataclass(frozen=True, kw_only=True)
class Router:
    net: RouterNet
    settings: RouterSettings
    costs: CostModel
    manifest: Mapping[str, Any]

    def policy(self, name: str, *, seed: int = 0) -> Policy:
        """Raises: UserError for an unknown name, with the known ones."""
        makers = {
            PLAIN: lambda: StaticPolicy(PLAIN),
            "entropy": lambda: EntropyPolicy(self.settings.entropy_threshold),
            "hazard": self._hazard,
            "random": lambda: RandomPolicy(seed),
        }
        if name in STATIC:
            return StaticPolicy(STATIC[name])
        if name not in makers:
            raise UserError(f"unknown policy {name!r}: choose from {', '.join(POLICIES)}")
        return makers[name]()

    def _hazard(self) -> Policy:
        settings = self.settings
        return HazardPolicy(
            self.net,
            self.costs,
            lam=settings.lam,
            adaptive_length=settings.adaptive_length,
            switch_margin=settings.switch_margin,
        )


def save_router(
    path: Path,
    net: RouterNet,
    settings: RouterSettings,
    costs: CostModel,
    manifest: Mapping[str, Any],
) -> None:
    with new_artifact(path, manifest) as folder:
        write_json(folder / CONFIG, {"network": asdict(net.config), "policy": asdict(settings)})
        save_costs(folder / COSTS, costs, measurements={})
        state = {
            name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()
        }
        save_file(state, folder / WEIGHTS)


def load_router(path: Path, *, here: DeviceIdentity, target: str, allow_foreign: bool) -> Router:
    """Raises: ArtifactError when a part is missing or was made on another device."""
    made_by = "python train.py task=router"
    manifest = read_manifest(path, made_by=made_by)
    config = read_json(path / CONFIG)
    try:
        net = RouterNet(RouterConfig(**config["network"]))
        settings = RouterSettings(**config["policy"])
        net.load_state_dict(load_file(path / WEIGHTS))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"{path}: {error}. Make it again with: {made_by}") from None
    costs = load_costs(
        path / COSTS,
        here=here,
        target=target,
        allow_foreign=allow_foreign,
        made_by="python data_prep/profile_costs.py, then python train.py task=router",
    )
    net.eval().requires_grad_(False)
    return Router(net=net, settings=settings, costs=costs, manifest=manifest)
