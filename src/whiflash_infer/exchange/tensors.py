"""Tensors of a file: under our names, without the target's, into a network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from whiflash_infer.errors import ArtifactError


def canonical_names(tensors: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Our name of every tensor of a file -> its name there.

    Raises: ValueError where two tensors have the same name of ours.
    """
    names: dict[str, str] = {}
    for found in sorted(tensors):
        name = rename(_unwrapped(found))
        if name in names:
            raise ValueError(f"tensors {names[name]} and {found} are the same one, {name}")
        names[name] = found
    return names


def _unwrapped(name: str) -> str:
    """Without the prefixes of wrappers (FSDP, torch.compile), and of a model around the drafter."""
    for wrapper in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(wrapper, "")
    for wrapper in ("module.", "model."):
        name = name.removeprefix(wrapper)
    return name


def without_copies(
    tensors: Mapping[str, Tensor],
    copies: Mapping[str, Tensor | None],
    names: Mapping[str, str],
    size: tuple[int, int],
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors without copies of the target's, which must equal the target's where it is known.

    copies: name -> the target's tensor, None where no target is given. size: of each of them.
    Raises: ValueError naming a copy that is none.
    """
    notes = []
    for name in sorted(copies.keys() & tensors.keys()):
        _check_copy(names[name], tensors[name], copies[name], size)
        known = "it equals the target's"
        if copies[name] is None:
            known = "the target's is read; give the target to have them compared"
        notes.append(f"{names[name]} is left out: {known}")
    computed = {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    notes += [f"{names[name]} is left out: the config says the same" for name in sorted(computed)]
    left_out = copies.keys() | computed
    return {name: t for name, t in tensors.items() if name not in left_out}, notes


def _check_copy(name: str, found: Tensor, original: Tensor | None, size: tuple[int, int]) -> None:
    if found.shape != size:
        raise ValueError(
            f"tensor {name} has shape {tuple(found.shape)}, the target's, of which it is to be a "
            f"copy, has {size}"
        )
    if original is None:
        return
    # Either may be a rounded copy of the other.
    narrow = min(found.dtype, original.dtype, key=lambda dtype: dtype.itemsize)
    differing = (found.to(narrow) != original.to("cpu", narrow)).any(-1).sum().item()
    if differing:
        raise ValueError(
            f"tensor {name} differs from the target's in {differing} of {len(found)} rows: it is "
            "the drafter's own, which this version does not read"
        )


def check_fusion(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], ids: Iterable[int], width: int
) -> None:
    """Raises: ValueError with both numbers where `fc` reads other features than the ids give."""
    ids = list(ids)
    fusion = tensors.get("fc.weight")
    if fusion is not None and fusion.shape[-1] != len(ids) * width:
        raise ValueError(
            f"tensor {names['fc.weight']} reads {fusion.shape[-1]} features, but {len(ids)} layers "
            f"{ids} of width {width} give {len(ids) * width}"
        )


def stored_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The narrowest type that holds every float tensor exactly."""
    dtypes = [t.dtype for t in tensors.values() if t.is_floating_point()]
    widest = dtypes[0] if dtypes else torch.float32
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def load_state(
    net: nn.Module, tensors: Mapping[str, Tensor], *, path: Path, names: Mapping[str, str]
) -> None:
    """names: for tensors that are called otherwise in their file, that name.

    Raises: ArtifactError naming every missing, unknown or misshapen tensor.
    """
    wanted = net.state_dict()
    problems = [
        f"missing tensor {name} of shape {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() - tensors.keys())
    ]
    problems += [
        f"unknown tensor {names.get(name, name)} of shape {tuple(tensors[name].shape)}"
        for name in sorted(tensors.keys() - wanted.keys())
    ]
    problems += [
        f"tensor {names.get(name, name)} has shape {tuple(tensors[name].shape)}, config.json asks "
        f"for {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise ArtifactError(f"{path}: " + "; ".join(problems))
    net.load_state_dict(dict(tensors))
