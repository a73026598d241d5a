"""The widths a drafter takes over from its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes of one drafter layer. `rope_parameters` is the target's, `rope_type` included."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    vocab_size: int
    max_position_embeddings: int
    target_hidden_size: int
    rope_parameters: dict[str, Any]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        missing = {"rope_type", "rope_theta"} - set(self.rope_parameters)
        if missing:
            raise ValueError(f"rope_parameters lack {sorted(missing)}: take them from the target")


def spread_tap_layer_ids(num_taps: int, num_target_layers: int) -> list[int]:
    """z-lab's choice: evenly from layer 1 to the third last, halves rounded to even; or the middle.

    (DFlash, arXiv 2602.06036; `build_target_layer_ids` there.)
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    start, end = 1, num_target_layers - 3
    return [round(start + i * (end - start) / (num_taps - 1)) for i in range(num_taps)]


def check_tap_layer_ids(tap_layer_ids: list[int], num_target_layers: int) -> tuple[int, ...]:
    """Layer ids in order, or an error with the legal range.

    The last layer is refused: Hugging Face hands out its output only after the final norm, so
    engines disagree on what a tap there would mean.
    """
    legal = range(num_target_layers - 1)
    wrong = [i for i in tap_layer_ids if i not in legal]
    if wrong or len(set(tap_layer_ids)) != len(tap_layer_ids) or not tap_layer_ids:
        raise ValueError(
            f"tap_layer_ids {tap_layer_ids}: each must lie in 0..{num_target_layers - 2} "
            "(0-based layer outputs, the last layer excluded) and appear once"
        )
    return tuple(sorted(tap_layer_ids))
