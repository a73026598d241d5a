"""What happens beside the steps of a training: keeping checkpoints, guarding, measuring."""

from whiflash_train.callbacks.checkpoints import Checkpoints
from whiflash_train.callbacks.finite import SkipNonFinite
from whiflash_train.callbacks.real_tau import RealTau, prompts_of

__all__ = ["Checkpoints", "RealTau", "SkipNonFinite", "prompts_of"]
