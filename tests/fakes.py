"""Small stand-ins that many tests share, and the published layers written out as plain loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from whiflash_infer.cache import TargetCache, make_span
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.nets.ar import ARDrafter, ARDrafterConfig
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.nets.shape import DrafterShape
from whiflash_infer.sequence import Texts
from whiflash_infer.sources import RandomTiny, byte_tokenizer
from whiflash_infer.target import Target
from whiflash_train.block_losses import BlockObjective, ObjectiveName
from whiflash_train.distillation import SoftLoss

Net = TypeVar("Net", bound=nn.Module)
TAPS, TAP_SIZE = (1, 3, 4), 25.0  # of the tiny target
MASK_ID = 3
_OPTIONS = ("fc_norm", "norm_output", "qk_norm")
SOFT_CE = SoftLoss(name="soft_ce", kl_scale=1.0, kl_decay=3.0)
FLAVOURS = ("classic", *_OPTIONS, "all")  # of the AR drafter: no option, one of them, all
MARKOV_SIZE = 4.0
_DIFFUSION_KINDS: dict[str, dict[str, int]] = {
    "diffusion": {},
    "markov": {"markov_rank": 4},
    "windowed": {"markov_rank": 4, "sliding_window": 6},
}
DRAFTER_KINDS = (*(f"ar-{flavour}" for flavour in FLAVOURS), *_DIFFUSION_KINDS)
# Head width times heads differs from the hidden size, as in Qwen3-4B, and so does the target's.
ODD_SHAPE = DrafterShape(
    hidden_size=20,
    intermediate_size=28,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    vocab_size=40,
    max_position_embeddings=256,
    target_hidden_size=14,
    rope_parameters={"rope_type": "default", "rope_theta": 300.0},
)


def tiny_target(folder: str) -> Target:
    source = RandomTiny(cache_dir=folder, seed=0, hidden_size=64, num_layers=8)
    return Target.from_pretrained(
        source.resolve(), name="tiny", tap_layer_ids=TAPS, dtype="float32"
    )


def built_target(config: PreTrainedConfig, tap_layer_ids: tuple[int, ...]) -> Target:
    """A target of random weights, norms included, straight from its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    for index, parameter in enumerate(p for p in model.parameters() if p.ndim == 1):
        parameter.data += 0.4 * random_rows(len(parameter), seed=index)
    return Target(model, byte_tokenizer(), name="built", tap_layer_ids=tap_layer_ids)


def small_config(kind: Callable[..., PreTrainedConfig], num_layers: int) -> PreTrainedConfig:
    return kind(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.3,
        tie_word_embeddings=True,
    )


def ar_config(
    shape: DrafterShape,
    draft_vocab_size: int,
    *,
    flavour: str = "classic",
    tap_layer_ids: tuple[int, ...] = TAPS,
) -> ARDrafterConfig:
    options = {name: flavour in (name, "all") for name in _OPTIONS}
    return ARDrafterConfig(
        shape=shape,
        draft_vocab_size=draft_vocab_size,
        tap_layer_ids=tap_layer_ids,
        **options,
    )


def tiny_ar(
    shape: DrafterShape,
    *,
    seed: int = 0,
    used: Tensor | None = None,
    tap_size: float = 1.0,
    flavour: str = "classic",
) -> ARDrafter:
    """used: the draft vocabulary; every third token when None.

    tap_size: usual size of the features. Undivided, the tiny target's would drown the attention in
    the residual, and no wrong position or token would change a draft.
    """
    used = torch.arange(1, shape.vocab_size, 3) if used is None else used
    net = ARDrafter(ar_config(shape, len(used), flavour=flavour))
    net.set_vocabulary(used)
    randomise(net, seed).fc.weight.div_(1.0 if net.config.fc_norm else tap_size)
    return net


def tiny_diffusion(
    shape: DrafterShape,
    *,
    seed: int = 0,
    num_layers: int = 2,
    block_size: int = 5,
    markov_rank: int = 0,
    sliding_window: int | None = None,
) -> DiffusionDrafter:
    config = DiffusionDrafterConfig(
        shape=shape,
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=MASK_ID,
        num_target_layers=8,
        tap_layer_ids=TAPS,
        markov_rank=markov_rank,
        sliding_window=sliding_window,
    )
    net = randomise(DiffusionDrafter(config), seed)
    if net.markov_head is not None:
        # Of the size of the tiny target's logits, so that it has its say in most drafts.
        net.markov_head.markov_w2.weight.data.mul_(MARKOV_SIZE)
    return net


def block_objective(name: ObjectiveName) -> BlockObjective:
    return BlockObjective(
        name=name,
        smoothing=0.5,
        gamma=4.0,
        draw_slots=False,
        focal_weight=0.3,
        chain_weight=2.0,
    )


def plain_soft_loss(logits: Tensor, target_logits: Tensor, loss: SoftLoss) -> Tensor:
    """The papers' formulas as they stand, a value a row; slopes are left to autograd."""
    draft, target = logits.softmax(-1), target_logits.softmax(-1)
    divergence = (target * (target.log() - draft.log())).sum(-1)
    alpha = torch.minimum(draft, target).sum(-1)
    weight = loss.kl_scale * torch.exp(-loss.kl_decay * alpha.mean().detach())
    return {
        "soft_ce": -(target * draft.log()).sum(-1),
        "kl": divergence,
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": weight * divergence + (1 - weight) * (1 - alpha),
    }[loss.name]


def randomise(net: Net, seed: int) -> Net:
    """Weights of a size at which every part matters, norms included."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scaled = 1.0 + 0.4 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5
        parameter.data.copy_(scaled)
    return net.requires_grad_(False)


def random_rows(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_ids(length: int, *, seed: int) -> Tensor:
    """A text of the tiny target's byte tokens."""
    return torch.randint(5, 261, (length,), generator=torch.Generator().manual_seed(seed))


def tiny_drafter(kind: str, target: Target, *, seed: int = 1) -> CachedAR | CachedDiffusion:
    """One of `DRAFTER_KINDS`: the same weights every time, and an empty cache."""
    shape, tables = target.drafter_shape, target.tables
    if kind.startswith("ar-"):
        flavour = kind.removeprefix("ar-")
        net = tiny_ar(shape, seed=seed, tap_size=TAP_SIZE, flavour=flavour)
        return CachedAR(net, tables)
    return CachedDiffusion(tiny_diffusion(shape, seed=seed, **_DIFFUSION_KINDS[kind]), tables)


def chain_arm(drafter: CachedAR | CachedDiffusion) -> ARArm | DiffusionArm:
    """Drafts up to 4 tokens."""
    if isinstance(drafter, CachedAR):
        return ARArm(drafter, draft_length=4)
    return DiffusionArm(drafter)


def tree_arm(drafter: CachedAR | CachedDiffusion, *, num_nodes: int = 10) -> ARArm | DiffusionArm:
    """Drafts up to 4 tokens on a path, 3 nodes a level where the drafter goes by levels."""
    if isinstance(drafter, CachedAR):
        return ARArm(drafter, draft_length=4, top_k=3, num_nodes=num_nodes)
    return DiffusionArm(drafter, num_nodes=num_nodes)


@torch.no_grad()
def prefilled(target: Target, *texts_ids: Tensor, capacity: int = 96) -> tuple[Texts, TargetCache]:
    """A row for each text: all of it committed, all but its last token read."""
    texts, cache = Texts(target.device, keep_taps=True), target.new_cache()
    for storage in (texts, cache.kv):
        storage.reserve(len(texts_ids), capacity)
    for row, ids in enumerate(texts_ids):
        begin_text(target, texts, cache, ids, row=row)
    return texts, cache


@torch.no_grad()
def begin_text(target: Target, texts: Texts, cache: TargetCache, ids: Tensor, *, row: int) -> None:
    rows = target.prefill([ids[:-1].tolist()], cache, row)
    texts.begin(row, ids[:-1], rows.taps[0], ids[-1])


@torch.no_grad()
def play_round(
    target: Target,
    texts: Texts,
    cache: TargetCache,
    drafts: Tensor,
    *,
    accepted: int,
    bonus: int,
    row: int = 0,
) -> None:
    """A verification of `drafts`, of which the first `accepted` and then `bonus` are committed.

    As in the decode loop, what was refused stays behind the texts and entries as litter.
    """
    [anchor] = texts.anchors([row])
    ids = torch.cat([texts.ids([row], [anchor], 1)[0], drafts])[None]
    depths = torch.arange(ids.shape[1])[None]
    span = make_span([row], [anchor], ids.shape[1], target.device)
    rows = target.read(ids, depths, None, cache, span)
    litter = [bonus] * (len(drafts) + 1 - accepted)
    texts.extend([row], torch.cat([drafts[:accepted], torch.tensor(litter)])[None], rows.taps)
    texts.commit(row, accepted + 1)
    cache.kv.lengths[row] = texts.lengths[row] - 1


def committed(texts: Texts, row: int = 0) -> Tensor:
    """A row's text."""
    return texts.ids([row], [0], texts.lengths[row])[0].clone()


@torch.no_grad()
def drafted(
    arm: Arm, texts: Texts, num_draft: int, *, row: int = 0, capacity: int = 192
) -> list[int]:
    """The chain that an arm drafts behind one row, caught up if it lags."""
    arm.drafter.reserve(len(texts.lengths), capacity)
    arm.drafter.catch_up(texts, [row])
    return arm.draft(texts, [row], [num_draft]).tree.ids[0].tolist()


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rope(heads: Tensor, position: int, theta: float) -> Tensor:
    """Channel c turns with channel c + d/2 by the angle position * theta ** (-2c / d)."""
    width = heads.shape[-1]
    channels = torch.arange(width // 2, dtype=heads.dtype)
    angle = position * theta ** (-2.0 * channels / width)
    left, right = heads[:, : width // 2], heads[:, width // 2 :]
    turned = [left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()]
    return torch.cat(turned, dim=-1)


def plain_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One query row [H, d] against lists of rows [G, d]; H / G query heads share a key head."""
    shared = query.shape[0] // keys[0].shape[0]
    outputs = []
    for head, q in enumerate(query):
        scores = torch.stack([q @ key[head // shared] for key in keys]) / q.shape[0] ** 0.5
        weights = scores.softmax(0)
        outputs.append(sum(w * v[head // shared] for w, v in zip(weights, values, strict=True)))
    return torch.cat(outputs)  # pyright: ignore


def plain_mlp(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate = weights[f"{prefix}.gate_proj.weight"] @ x
    up = weights[f"{prefix}.up_proj.weight"] @ x
    return weights[f"{prefix}.down_proj.weight"] @ (gate / (1.0 + (-gate).exp()) * up)
