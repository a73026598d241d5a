"""Tiny drafters as others publish them: the same values, written by hand under each one's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.fakes import random_rows
from whiflash_infer.exchange import Given, TargetFacts
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.shape import DrafterShape

HIDDEN, WIDTH, VOCAB, TAPS = 24, 28, 40, (1, 3, 4)
USED = [2, 3, 7, 11, 30, 39]
OFFSETS = [2, 2, 5, 8, 26, 34]  # USED minus 0, 1, 2, 3, 4, 5
SHAPE = DrafterShape(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    vocab_size=VOCAB,
    max_position_embeddings=256,
    target_hidden_size=HIDDEN,
    rope_parameters={"rope_type": "default", "rope_theta": 300.0},
)
# The widths as every Llama or Qwen3 config names them, without head_dim, rope and what follows.
WIDTHS = {
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 40,
    "max_position_embeddings": 256,
}
EMBEDDING, HEAD = random_rows(40, 24, seed=90), random_rows(40, 24, seed=91)
TARGET = TargetFacts(
    name="owner/target",
    architectures=("LlamaForCausalLM",),
    num_layers=8,
    shape=SHAPE,
    embedding=EMBEDDING,
    head=HEAD,
)

AR_SIZES = {
    "fc": (24, 72),
    "input_layernorm": (24,),
    "hidden_norm": (24,),
    "post_attention_layernorm": (24,),
    "q_proj": (24, 48),
    "k_proj": (12, 48),
    "v_proj": (12, 48),
    "o_proj": (24, 24),
    "gate_proj": (28, 24),
    "up_proj": (28, 24),
    "down_proj": (24, 28),
    "norm": (24,),
    "lm_head": (6, 24),
}
DFLASH_LAYER_SIZES = {
    "q_proj": (24, 24),
    "k_proj": (12, 24),
    "v_proj": (12, 24),
    "o_proj": (24, 24),
    "q_norm": (6,),
    "k_norm": (6,),
    "gate_proj": (28, 24),
    "up_proj": (28, 24),
    "down_proj": (24, 28),
    "input_layernorm": (24,),
    "post_attention_layernorm": (24,),
}
DFLASH_SIZES = {"fc": (24, 72), "hidden_norm": (24,), "norm": (24,)}
_PLACES = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A folder as somebody publishes it, and what is needed to read it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    given: Given = field(default_factory=Given)
    target: TargetFacts | None = None
    pickled: bool = False
    flags: dict[str, bool] = field(default_factory=dict)  # of the AR network that it is

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return folder


def values(sizes: Mapping[str, tuple[int, ...]], *, seed: int) -> dict[str, Tensor]:
    """Of a size at which every tensor matters, norms around 1."""
    made = {}
    for number, (name, size) in enumerate(sizes.items()):
        noise = random_rows(*size, seed=seed + number)
        made[name] = 1.0 + 0.4 * noise if len(size) == 1 else noise / size[1] ** 0.5
    return made


def place(name: str) -> str:
    """Where a transformer layer keeps a tensor."""
    if name in _PLACES:
        return f"self_attn.{name}.weight"
    return f"mlp.{name}.weight" if name.endswith("_proj") else f"{name}.weight"


AR_VALUES = values(AR_SIZES, seed=10)
FULL_HEAD = random_rows(40, 24, seed=30) / 24**0.5
MAPS = {"d2t": torch.tensor(OFFSETS), "t2d": torch.zeros(40, dtype=torch.bool)}
MAPS["t2d"][USED] = True
QK_NORMS = values({"q_norm": (6,), "k_norm": (6,)}, seed=40)
FC_NORMS = [1.0 + 0.4 * random_rows(24, seed=50 + i) for i in range(3)]
DFLASH_VALUES = values(DFLASH_SIZES, seed=60)
DFLASH_LAYERS = [values(DFLASH_LAYER_SIZES, seed=70), values(DFLASH_LAYER_SIZES, seed=80)]


def eagle3_tensors(
    layer: str = "midlayer.", outer: str = "", /, **others: Tensor
) -> dict[str, Tensor]:
    """layer: what the decoder layer is called; outer: what fc and norm stand under."""
    inside = {f"{layer}{place(n)}": t for n, t in AR_VALUES.items() if n not in OUTSIDE}
    outside = {f"{outer}{name}.weight": AR_VALUES[name] for name in ("fc", "norm")}
    return {**inside, **outside, "lm_head.weight": AR_VALUES["lm_head"], **others}


OUTSIDE = {"fc", "norm", "lm_head"}


def direct_ar(*, full: bool = False, **flags: bool) -> ARDrafter:
    """The network that every AR dialect above describes, its parameters set one by one."""
    options = {"fc_norm": False, "norm_output": False, "qk_norm": False, **flags}
    config = ARDrafterConfig(
        shape=SHAPE, draft_vocab_size=40 if full else 6, tap_layer_ids=TAPS, **options
    )
    net = ARDrafter(config)
    layer, attention = net.midlayer, net.midlayer.self_attn
    homes = {"fc": net, "norm": net, "lm_head": net}
    homes |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), attention)
    homes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), layer.mlp)
    for name, value in AR_VALUES.items():
        wanted = FULL_HEAD if full and name == "lm_head" else value
        getattr(homes.get(name, layer), name).weight.data = wanted.clone()
    if options["qk_norm"]:
        for name, value in QK_NORMS.items():
            getattr(attention, name).weight.data = value.clone()
    if options["fc_norm"]:
        for norm, value in zip(net.fc_norm, FC_NORMS, strict=True):
            norm.weight.data = value.clone()
    if not full:
        net.set_vocabulary(torch.tensor(USED))
    return net.requires_grad_(False)


def zlab_tensors(prefix: str = "", /, **others: Tensor) -> dict[str, Tensor]:
    layers = {
        f"{prefix}layers.{i}.{place(name)}": value
        for i, layer in enumerate(DFLASH_LAYERS)
        for name, value in layer.items()
    }
    outside = {f"{prefix}{name}.weight": value for name, value in DFLASH_VALUES.items()}
    return {**layers, **outside, **others}


def direct_diffusion(*, sliding_window: int | None = None) -> DiffusionDrafter:
    config = DiffusionDrafterConfig(
        shape=SHAPE,
        num_layers=2,
        block_size=5,
        mask_token_id=39,
        num_target_layers=8,
        tap_layer_ids=TAPS,
        markov_rank=0,
        sliding_window=sliding_window,
    )
    net = DiffusionDrafter(config)
    for name, value in DFLASH_VALUES.items():
        getattr(net, name).weight.data = value.clone()
    for layer, stored in zip(net.decoder_layers, DFLASH_LAYERS, strict=True):
        for name, value in stored.items():
            attention = name in _PLACES
            home = layer.self_attn if attention else layer.mlp if "_proj" in name else layer
            getattr(home, name).weight.data = value.clone()
    return net.requires_grad_(False)


def outputs(net: ARDrafter | DiffusionDrafter) -> list[Tensor]:
    """Logits or final states at two anchors of a short text."""
    places = torch.tensor([[3, 6]])
    taps = random_rows(1, 9, 72, seed=2)
    if isinstance(net, ARDrafter):
        embeds = random_rows(1, 9, 24, seed=1)
        return [net.logits(state) for state in net.unroll(embeds, taps, places, num_steps=3)]
    return [net.blocks(random_rows(1, 2, 5, 24, seed=1), taps, places)]


def _safeai() -> Dialect:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B: no layer ids, no rope, no head_dim, a pickle."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "draft_vocab_size": 6,
        **WIDTHS,
        "max_position_embeddings": 64,
    }
    given = Given(tap_layer_ids=TAPS, rope_theta=300.0)
    return Dialect(
        config=config,
        tensors=eagle3_tensors(**MAPS),
        given=given,
        target=TARGET,
        pickled=True,
    )


def _specforge() -> Dialect:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **WIDTHS,
        "head_dim": 6,
        "rope_theta": 300.0,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "draft_vocab_size": 6,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
        },
    }
    tensors = eagle3_tensors(**MAPS, **{"embed_tokens.weight": EMBEDDING})
    return Dialect(config=config, tensors=tensors, target=TARGET)


def _vllm() -> Dialect:
    """Layer inputs at the top level, rope as transformers 5 writes it."""
    config = {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **WIDTHS,
        "head_dim": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
        "draft_vocab_size": 6,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }
    return Dialect(config=config, tensors=eagle3_tensors(**MAPS))


def _modelopt() -> Dialect:
    """`layers.0.`, one map, more about its layer."""
    config = _specforge().config
    config["num_aux_hidden_states"] = 3
    config["eagle_config"] |= {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    return Dialect(config=config, tensors=eagle3_tensors("layers.0.", d2t=MAPS["d2t"]))


def _automodel() -> Dialect:
    config = {**_specforge().config, "architectures": ["LlamaEagle3DraftModel"]}
    tensors = eagle3_tensors("model.layers.0.", "model.", **MAPS)
    return Dialect(config=config, tensors={**tensors, "model.embed_tokens.weight": EMBEDDING})


def _compiled() -> Dialect:
    tensors = {f"_orig_mod.{name}": t for name, t in eagle3_tensors(**MAPS).items()}
    return Dialect(config=_specforge().config, tensors=tensors)


def _eagle31() -> Dialect:
    config = {**_specforge().config, "fc_norm": True, "norm_output": True}
    norms = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(FC_NORMS)}
    flags = {"fc_norm": True, "norm_output": True}
    return Dialect(config=config, tensors=eagle3_tensors(**MAPS, **norms), flags=flags)


def _full_vocabulary() -> Dialect:
    config = {**_specforge().config, "draft_vocab_size": None}
    tensors = {**eagle3_tensors(), "lm_head.weight": FULL_HEAD}
    return Dialect(config=config, tensors=tensors, flags={"full": True})


def _targets_head() -> Dialect:
    """A drafter without a head: SGLang takes the target's."""
    config = {**_specforge().config, "draft_vocab_size": 40, "tie_word_embeddings": True}
    tensors = {name: t for name, t in eagle3_tensors().items() if name != "lm_head.weight"}
    target = TargetFacts(
        name="owner/target",
        architectures=("LlamaForCausalLM",),
        num_layers=8,
        shape=SHAPE,
        embedding=EMBEDDING,
        head=FULL_HEAD,
    )
    return Dialect(config=config, tensors=tensors, target=target, flags={"full": True})


SPECULATORS_CONFIG = {
    "default_proposal_method": "greedy",
    "proposal_methods": [
        {
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
    ],
    "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
}


def _speculators_eagle3() -> Dialect:
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": 6,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformers_version": "5.17.0",
        "dtype": "float32",
        # hidden_act equals Llama's default and is therefore not written.
        "transformer_layer_config": {
            **{name: size for name, size in WIDTHS.items() if name != "hidden_act"},
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
        "speculators_config": {"algorithm": "eagle3", **SPECULATORS_CONFIG},
    }
    tensors = eagle3_tensors("layers.0.", **MAPS, **{"embed_tokens.weight": EMBEDDING})
    return Dialect(config=config, tensors=tensors, target=TARGET)


def _speculators_qwen3() -> Dialect:
    """Qwen3's norms of queries and keys; EAGLE-3.1; the older rope fields."""
    made = _speculators_eagle3()
    layers = {**made.config["transformer_layer_config"], "model_type": "qwen3"}
    del layers["rope_parameters"]
    layers |= {"rope_theta": 300.0, "rope_scaling": None, "layer_types": ["full_attention"]}
    config = {**made.config, "fc_norm": True, "norm_output": True}
    config["transformer_layer_config"] = layers
    norms = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(FC_NORMS)}
    norms |= {f"layers.0.self_attn.{n}.weight": norm for n, norm in QK_NORMS.items()}
    flags = {"fc_norm": True, "norm_output": True, "qk_norm": True}
    return Dialect(config=config, tensors={**made.tensors, **norms}, flags=flags)


AR_DIALECTS: dict[str, Callable[[], Dialect]] = {
    "safeai": _safeai,
    "specforge": _specforge,
    "vllm": _vllm,
    "modelopt": _modelopt,
    "automodel": _automodel,
    "compiled": _compiled,
    "eagle31": _eagle31,
    "full_vocabulary": _full_vocabulary,
    "targets_head": _targets_head,
    "speculators": _speculators_eagle3,
    "speculators_qwen3": _speculators_qwen3,
}


def _zlab() -> Dialect:
    """z-lab/Qwen3-8B-DFlash-b16, smaller."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 5,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 3, 4]},
        "dtype": "float32",
        "eos_token_id": 2,
        **WIDTHS,
        "head_dim": 6,
        "initializer_range": 0.02,
        "layer_types": ["full_attention", "full_attention"],
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 8,
        "rope_scaling": None,
        "rope_theta": 300,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
    }
    return Dialect(config=config, tensors=zlab_tensors())


def _zlab_nested() -> Dialect:
    """As newer ones: block_size inside, rope under its new name, windows set but not used."""
    config = _zlab().config
    for name in ("block_size", "rope_theta", "rope_scaling", "auto_map"):
        del config[name]
    config |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": 300},
        "sliding_window": 4096,
        "max_window_layers": 28,
        "dflash_config": {**config["dflash_config"], "block_size": 5, "use_swa": False},
    }
    return Dialect(config=config, tensors=zlab_tensors())


def _zlab_flat() -> Dialect:
    """Ids at the top level; `num_target_layers` means the three tapped ones; copies included."""
    config = _zlab().config
    config |= {"num_target_layers": 3, **config.pop("dflash_config")}
    copies = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    return Dialect(config=config, tensors={**zlab_tensors("model."), **copies}, target=TARGET)


def _zlab_sliding() -> Dialect:
    config = _zlab().config
    config |= {
        "layer_types": ["sliding_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 5,
        "is_causal": False,
    }
    return Dialect(config=config, tensors=zlab_tensors())


def _speculators_dflash() -> Dialect:
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "draft_vocab_size": 40,
        "block_size": 5,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": 39,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformer_layer_config": {
            **{name: size for name, size in WIDTHS.items() if name != "hidden_act"},
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "head_dim": 6,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
            "layer_types": ["full_attention", "full_attention"],
        },
        "speculators_config": {"algorithm": "dflash", **SPECULATORS_CONFIG},
    }
    tensors = zlab_tensors(**{"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD})
    return Dialect(config=config, tensors=tensors, target=TARGET)


DIFFUSION_DIALECTS: dict[str, Callable[[], Dialect]] = {
    "zlab": _zlab,
    "zlab_nested": _zlab_nested,
    "zlab_flat": _zlab_flat,
    "zlab_sliding": _zlab_sliding,
    "speculators_dflash": _speculators_dflash,
}
DIALECTS = AR_DIALECTS | DIFFUSION_DIALECTS
