"""How the decode engine runs its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from whiflash_infer.errors import UserError
from whiflash_infer.types import PLAIN

Sync = Literal["eager", "lazy", "lazy_kv_only", "full_forward"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Nothing here changes what is answered.

    sync: who follows the text, and how. lazy_kv_only: the arm that was chosen, making keys and
        values only. lazy: the same arm, running its whole network over its backlog. eager: every
        drafter in every round, keys and values. full_forward: every drafter, its whole network.
    timing: measure the phases of rounds. A GPU then waits between them; off, it costs nothing.
    debug: compare a drafter's cache with one made anew before every use.
    widths: tokens that a verification may read; a round is padded to the next of them. None:
        powers of two, and the full width of each arm.
    safe_arm: what a request goes on with when the router or a drafter fails in it.
    compile: compile the target's passes. They then read a whole capacity of cache each, so that
        their shapes stay the same from round to round.
    """

    sync: Sync = "lazy_kv_only"
    timing: bool = False
    debug: bool = False
    widths: Sequence[int] | None = None
    safe_arm: str = PLAIN
    compile: bool = False

    def __post_init__(self) -> None:
        if self.sync not in get_args(Sync):
            raise UserError(f"sync is {self.sync!r}: choose from {', '.join(get_args(Sync))}")
        if self.widths is not None and (not self.widths or min(self.widths) < 1):
            raise UserError(f"widths is {self.widths!r}: it must name widths of 1 or more")
