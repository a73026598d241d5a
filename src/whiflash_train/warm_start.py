"""Starting a drafter from its target: last layers, final norm, output rows, highest tap."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.target import Target

_NOISE = 0.01  # factor on random starts, so that what is not copied is small but not dead

_SMALL = 0.1
_PROBES = 64  # tokens by which the usual size of the taps is measured


@torch.no_grad()
def start_ar(net: ARDrafter, target: Target) -> None:
    """Copy the target's last layer; its attention reads the hidden half, the other starts small.

    The head always starts from the target's rows; `start_head` does that alone.
    """
    source = target.layer(target.num_layers - 1)
    layer, hidden = net.midlayer, net.config.shape.hidden_size
    input_norm = _weight(source, "input_layernorm")
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight[:, :hidden] *= _SMALL
        weight[:, hidden:] = _weight(source, f"self_attn.{name}")
    for name in ("q", "k"):
        _start_head_sizes(layer.self_attn, source, name, input_norm)
    _copy(layer.self_attn.o_proj, source, "self_attn.o_proj")
    _copy_mlp(layer.mlp, source)
    layer.hidden_norm.weight.copy_(input_norm)
    layer.post_attention_layernorm.weight.copy_(_post_attention_norm(source))
    net.norm.weight.copy_(_norm_weight(target.final_norm))
    _start_fc(net.fc, hidden)
    if net.config.fc_norm:
        for norm, size in zip(net.fc_norm, _tap_sizes(target), strict=True):
            nn.init.constant_(norm.weight, size)  # pyright: ignore


def _tap_sizes(target: Target) -> list[float]:
    """Usual root mean square of each tap, so that norming gives the layer what it knows.

    A median, over tokens from all of the vocabulary: the first token's features can be huge.
    """
    last = target.config.vocab_size - 1
    ids = torch.linspace(0, last, _PROBES, device=target.device).long()[None]
    taps = target.teach(ids, torch.ones_like(ids, dtype=torch.bool)).taps[0].float()
    parts = taps.unflatten(-1, (len(target.tap_layer_ids), -1))
    return parts.pow(2).mean(-1).sqrt().median(0).values.tolist()


def _start_head_sizes(
    attention: nn.Module, source: nn.Module, name: str, input_norm: Tensor
) -> None:
    """Queries or keys of the size that the target's have, whichever of the two norms its heads."""
    norm = attention.get_submodule(f"{name}_norm")
    if not isinstance(norm, nn.Identity):
        _start_head_norm(norm, source, name, input_norm)
    elif hasattr(source.get_submodule("self_attn"), f"{name}_norm"):
        wanted = _weight(source, f"self_attn.{name}_norm")
        factors = wanted / _typical_size(_weight(source, f"self_attn.{name}_proj"), input_norm)
        weight = _weight(attention, f"{name}_proj")
        weight *= factors.repeat(len(weight) // len(factors))[:, None]


@torch.no_grad()
def start_head(net: ARDrafter, target: Target, *, trainable: bool) -> None:
    net.lm_head.weight.copy_(target.tables.head[net.vocabulary()])
    net.lm_head.requires_grad_(trainable)


@torch.no_grad()
def start_diffusion(net: DiffusionDrafter, target: Target) -> None:
    """Copy the target's last layers, one each, so that attention starts as the target's own.

    The context stream is normed like the input of the first copied layer. Per-head norms that the
    target does not have start at the size of its queries and keys.
    """
    first = target.num_layers - len(net.layers)
    if first < 0:
        raise UserError(
            f"num_layers {len(net.layers)} exceeds the target's {target.num_layers}: init=target "
            "copies one target layer for each; use fewer, or init=random"
        )
    for index, layer in enumerate(net.decoder_layers):
        source = target.layer(first + index)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            _copy(getattr(layer.self_attn, name), source, f"self_attn.{name}")
        _copy_mlp(layer.mlp, source)
        input_norm = _weight(source, "input_layernorm")
        layer.input_layernorm.weight.copy_(input_norm)
        layer.post_attention_layernorm.weight.copy_(_post_attention_norm(source))
        for name in ("q", "k"):
            _start_head_norm(getattr(layer.self_attn, f"{name}_norm"), source, name, input_norm)
        if index == 0:
            net.hidden_norm.weight.copy_(input_norm)
    net.norm.weight.copy_(_norm_weight(target.final_norm))
    _start_fc(net.fc, net.config.shape.hidden_size)


def _start_head_norm(norm: nn.Module, source: nn.Module, name: str, input_norm: Tensor) -> None:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if hasattr(source.get_submodule("self_attn"), f"{name}_norm"):
        weight.copy_(_weight(source, f"self_attn.{name}_norm"))
    else:
        weight.fill_(_typical_size(_weight(source, f"self_attn.{name}_proj"), input_norm))


def _typical_size(projection: Tensor, input_norm: Tensor) -> float:
    """Root mean square of a projection's outputs for normed inputs of independent channels."""
    return float((projection.float() * input_norm).pow(2).sum(1).mean().sqrt())


def _start_fc(fc: nn.Linear, hidden: int) -> None:
    fc.weight.mul_(_NOISE)
    fc.weight[:, -hidden:] += torch.eye(hidden)


def _copy(linear: nn.Module, source: nn.Module, name: str) -> None:
    linear.weight.copy_(_weight(source, name))  # pyright: ignore


def _copy_mlp(mlp: nn.Module, source: nn.Module) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(mlp, name), source, f"mlp.{name}")


def _weight(module: nn.Module, name: str) -> Tensor:
    found = module.get_submodule(name)
    return _norm_weight(found) if name.endswith("norm") else found.weight  # pyright: ignore


def _norm_weight(norm: nn.Module) -> Tensor:
    """The factor a norm multiplies with; Gemma stores it less one."""
    offset = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    return norm.weight.float() + offset  # pyright: ignore


def _post_attention_norm(source: nn.Module) -> Tensor:
    """The norm before the MLP, which Gemma calls otherwise."""
    children = dict(source.named_children())
    gemma = "pre_feedforward_layernorm"
    return _weight(source, gemma if gemma in children else "post_attention_layernorm")
