"""What an exchange works on: the caller's word, the target's facts, a drafter in our names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.nets.shape import DrafterShape
from whiflash_infer.target import Target

Drafter = ARDrafter | DiffusionDrafter
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller says where a config is silent, or in place of what it says.

    tap_layer_ids: 0-based layer outputs. ignored_fields: config fields that the caller knows to
    change nothing.
    """

    tap_layer_ids: tuple[int, ...] | None = None
    rope_theta: float | None = None
    num_target_layers: int | None = None
    ignored_fields: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What an exchange asks of the target. `name` is what other programs load it by."""

    name: str
    architectures: tuple[str, ...]
    num_layers: int
    shape: DrafterShape
    embedding: Float[Tensor, "V D"]
    head: Float[Tensor, "V D"]

    @classmethod
    def of(cls, target: Target, *, name: str) -> TargetFacts:
        tables = target.tables
        return cls(
            name=name,
            architectures=tuple(target.config.architectures or ()),
            num_layers=target.num_layers,
            shape=target.drafter_shape,
            embedding=tables.embedding.detach(),
            head=tables.head.detach(),
        )


@dataclass(frozen=True, kw_only=True)
class Published:
    """A drafter in the field and tensor names that we write; `names` are those of its file.

    notes: what was filled in, left out or could not be checked, for the user to read.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    names: dict[str, str]
    notes: tuple[str, ...]
