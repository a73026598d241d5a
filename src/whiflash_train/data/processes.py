"""The processes of `accelerate launch`: which one this is, and waiting for the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from accelerate import PartialState

_PATIENCE = timedelta(days=2)  # the others may still be answering


@dataclass(frozen=True, slots=True)
class Processes:
    index: int
    count: int

    @classmethod
    def here(cls) -> Processes:
        """One process, unless a launcher started several."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1)
        # Without a GPU the group is formed only when it is asked for on the CPU.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=_PATIENCE)
        return cls(state.process_index, state.num_processes)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            PartialState().wait_for_everyone()
