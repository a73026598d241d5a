"""All the Lightning glue there is: step, log, optimise.

An objective gives the mean loss of what it was given and, as `means["loss"].count`, the weight of
that mean. Gradients are sums of weight times loss until a step is complete, and are divided by the
weights of all passes and processes then. So a batch teaches the same however it was divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from whiflash_infer.errors import UserError
from whiflash_train.objectives import Mean, Outcome

Objective = Callable[[Any, Any], Outcome]

# Of networks and their layers: all but attention, whose kernels are compiled or fused already.
_TRAINING_METHODS = ("context_entries", "entry", "query", "finish")


class TraineeModule(L.LightningModule):
    """Shared by the three trainees. The objective holds the mathematics."""

    def __init__(
        self,
        *,
        net: nn.Module,
        objective: Objective,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self._objective = _NeverCopied(objective)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._step_sums, self._validation_sums = Sums(), Sums()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, means = self._objective(self.net, batch)
        self._step_sums.add({name: means[name] for name in ("loss", "tau") if name in means})
        return loss * (means["loss"].count if "loss" in means else 0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        sums, self._step_sums = self._step_sums.gathered(), Sums()
        weight = sums.count("loss")
        parts = self.trainer.accumulate_grad_batches * self.trainer.world_size
        for parameter in self.net.parameters():
            if parameter.grad is not None and weight > 0:
                parameter.grad.mul_(parts / weight)
        for name, mean in sums.means().items():
            self.log(f"train/{name}", mean, prog_bar=True, batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._validation_sums.add(self._objective(self.net, batch)[1])

    def on_validation_epoch_end(self) -> None:
        sums, self._validation_sums = self._validation_sums.gathered(), Sums()
        for name, mean in sums.means().items():
            # Every process has the same number by now; sync_dist keeps Lightning from warning.
            self.log(f"val/{name}", mean, prog_bar=name in {"loss", "tau"}, sync_dist=True)

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Those of a whole network, after training."""
        self.net.load_state_dict(state)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._optimizer(p for p in self.net.parameters() if p.requires_grad)
        scheduler = self._scheduler(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class ShardedModule(TraineeModule):
    """The same with weights, gradients and optimiser states divided among processes (FSDP2)."""

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self, FSDPModule):
            return
        fully_shard(self, mesh=self.device_mesh["data_parallel"])
        for name in ("training_step", "validation_step"):
            register_fsdp_forward_method(self, name)

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the divided tensors, into which whole ones do not fit."""
        for name, tensor in state.items():
            path, _, leaf = name.rpartition(".")
            owner = self.net.get_submodule(path)
            old = getattr(owner, leaf)
            is_parameter = isinstance(old, nn.Parameter)
            setattr(
                owner, leaf, nn.Parameter(tensor, old.requires_grad) if is_parameter else tensor
            )


class Sums:
    """Means on their way: sums and counts by name, which add up over batches and processes."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, means: Mapping[str, Mean]) -> None:
        for name, mean in means.items():
            self._add(name, float(mean.value) * mean.count, float(mean.count))

    def count(self, name: str) -> float:
        return self._sums.get(name, (0.0, 0.0))[1]

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items() if count}

    def gathered(self) -> Sums:
        """The sums over all processes, of which some may lack a name."""
        if not distributed.is_initialized():
            return self
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, self._sums)
        joined = Sums()
        for sums in everyone:
            for name, (total, count) in sums.items():
                joined._add(name, total, count)
        return joined

    def _add(self, name: str, total: float, count: float) -> None:
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + total, old_count + count)


class _NeverCopied:
    """An objective holds the target, which a copy of the module (of averaged weights) shares."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective

    def __call__(self, net: Any, batch: Any) -> Outcome:
        return self._objective(net, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NeverCopied:
        return self


def compile_training(net: nn.Module, *, backend: str = "inductor") -> int:
    """Compile what the training forward of a network and its layers spends its time in.

    Returns how many methods were compiled.
    Raises: UserError when this machine cannot compile.
    """
    try:
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(2))
    except Exception as error:
        raise UserError(f"torch.compile does not work here: {first_line(error)}") from None
    compiled = 0
    for module in net.modules():
        for name in _TRAINING_METHODS:
            method = getattr(type(module), name, None)
            if callable(method):
                bound = getattr(module, name)
                setattr(module, name, torch.compile(bound, dynamic=True, backend=backend))
                compiled += 1
    return compiled


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cosine_with_warmup(
    optimizer: Optimizer, *, num_steps: int, warmup_fraction: float, final_fraction: float
) -> LRScheduler:
    """Linear warm-up over a fraction of the steps, then a half cosine down to a fraction."""
    warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
