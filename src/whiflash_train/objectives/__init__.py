"""Objectives: (network, batch) -> loss and named means. All training mathematics lives here."""

from whiflash_train.objectives.ar import ar_objective
from whiflash_train.objectives.common import Mean, Outcome
from whiflash_train.objectives.diffusion import diffusion_objective
from whiflash_train.objectives.router import router_objective

__all__ = ["Mean", "Outcome", "ar_objective", "diffusion_objective", "router_objective"]
