"""The fingerprint of a target's weights, from its files alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from whiflash_infer.exchange.files import read_tensors
from whiflash_infer.target import weights_fingerprint

_FILES = ("model.safetensors", "model.safetensors.index.json")
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_Shapes = dict[str, tuple[int, ...]]


def weights_fingerprint_of_files(folder: Path, *, tied: bool) -> str | None:
    """What `Target.identity` says of the model in that folder, without loading it.

    None where the files cannot tell: there are no safetensors, or Hugging Face would rename, join
    or unpack what is in them. tied: whether the head is the embedding.
    Raises: ArtifactError for damaged files.
    """
    shapes = _shapes_when_loaded(folder)
    if shapes is None or not any((folder / name).is_file() for name in _FILES):
        return None
    tensors = read_tensors(folder, allow_pickle=False)  # mapped, so that few pages are read
    if tied:
        tensors = _with_head(tensors)
    if any(name not in tensors or tensors[name].shape != shapes[name] for name in shapes):
        return None
    return weights_fingerprint((name, tensors[name]) for name in sorted(shapes))


def _shapes_when_loaded(folder: Path) -> _Shapes | None:
    """Of the tensors that the loaded model has, by the names that they have there."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            return None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError):  # no config, or code of its own
        return None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head that lies beside the embedding stays as it is."""
    embeddings = [tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDING)]
    return {_HEAD: embeddings[0], **tensors} if len(embeddings) == 1 else tensors
