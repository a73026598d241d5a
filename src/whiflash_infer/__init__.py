"""WhiFlash, to deploy: the routed decoder and all that it is made of.

The names below are what most programs need. They are looked up when they are used, so that a part
of the package does not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whiflash_infer.drafters.load import ArmSettings
    from whiflash_infer.engine import RoutedDecoder
    from whiflash_infer.errors import ArtifactError, UserError
    from whiflash_infer.options import GenerationOptions
    from whiflash_infer.settings import EngineSettings
    from whiflash_infer.target import Target
    from whiflash_infer.types import Generation, Piece

__all__ = [
    "ArmSettings",
    "ArtifactError",
    "EngineSettings",
    "Generation",
    "GenerationOptions",
    "Piece",
    "RoutedDecoder",
    "Target",
    "UserError",
]
_HOMES = {
    "ArmSettings": "drafters.load",
    "ArtifactError": "errors",
    "EngineSettings": "settings",
    "Generation": "types",
    "GenerationOptions": "options",
    "Piece": "types",
    "RoutedDecoder": "engine",
    "Target": "target",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
