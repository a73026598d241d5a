"""The draft vocabulary of an EAGLE-3 drafter, which others write as two maps, one, or none.

d2t: int64 [W], the offset of a draft id to its token. t2d: bool [V], which tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def with_vocabulary(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Both maps, from one of them or from a full vocabulary; they must agree where both are there.

    Raises: ValueError where they do not, or where a reduced vocabulary has none.
    """
    size, drafted = config["vocab_size"], config["draft_vocab_size"]
    given = [name for name in ("d2t", "t2d") if name in tensors]
    if not given and drafted != size:
        raise ValueError(
            f"missing tensors d2t and t2d: draft_vocab_size is {drafted} of {size}, so it has to "
            "say which tokens it drafts"
        )
    _check_maps(tensors, names, size, drafted)
    used = _used_tokens(tensors, drafted)
    mask = torch.zeros(size, dtype=torch.bool)
    if len(used) != drafted or used.min() < 0 or used.max() >= size:
        raise ValueError(
            f"d2t and t2d name {len(used)} tokens, {drafted} of 0..{size - 1} expected"
        )
    mask[used] = True
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), mask):
        raise ValueError("t2d marks other tokens than d2t leads to")
    maps = {"d2t": used - torch.arange(drafted), "t2d": mask}
    notes = [f"{name} is made from the other" for name in maps if given and name not in given]
    if not given:
        notes = ["d2t and t2d are made: the draft vocabulary is the whole"]
    return {**tensors, **maps}, notes


def _check_maps(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], size: int, drafted: int
) -> None:
    for name, length in (("d2t", drafted), ("t2d", size)):
        found = tensors.get(name)
        if found is not None and (found.shape != (length,) or found.is_floating_point()):
            raise ValueError(
                f"tensor {names[name]} has shape {tuple(found.shape)} and type {found.dtype}, "
                f"config.json asks for {(length,)}, whole numbers"
            )


def _used_tokens(tensors: Mapping[str, Tensor], drafted: int) -> Tensor:
    """The token of every draft id."""
    if "d2t" in tensors:
        used = tensors["d2t"].long() + torch.arange(drafted)
        if used.unique().numel() != drafted:
            raise ValueError(
                f"d2t leads to {used.unique().numel()} tokens from {drafted} draft ids"
            )
        return used
    if "t2d" in tensors:
        return tensors["t2d"].nonzero().flatten()
    return torch.arange(drafted)
