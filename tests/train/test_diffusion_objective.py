from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fakes import (
    MASK_ID,
    ODD_SHAPE,
    TAPS,
    block_objective,
    drafted,
    prefilled,
    tiny_diffusion,
)
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.nets.diffusion import DiffusionDrafter, DiffusionDrafterConfig
from whiflash_infer.target import Target, TargetTables
from whiflash_infer.types import TeacherRows
from whiflash_train.batches import DrafterBatch
from whiflash_train.block_losses import BlockObjective, ObjectiveName
from whiflash_train.objectives import Outcome, diffusion_objective
from whiflash_train.teacher import OnlineTeacher

NAMES: list[ObjectiveName] = ["dpace", "decay", "focal", "chain", "e2e_tv", "kd"]
NUM_DRAFTS = 4


def one_text() -> DrafterBatch:
    """12 tokens; the one at 9 belongs to no answer, and the last two blocks run past the end."""
    ids = torch.randint(5, 261, (1, 12), generator=torch.Generator().manual_seed(7))
    supervised = torch.ones(1, 12, dtype=torch.bool)
    supervised[0, [0, 9]] = False
    return DrafterBatch(
        ids=ids,
        lengths=torch.tensor([12]),
        supervised=supervised,
        anchors=torch.tensor([[1, 4, 5, 8, 10]]),
        anchor_mask=torch.ones(1, 5, dtype=torch.bool),
        rows=torch.tensor([0]),
    )


def run(name: ObjectiveName, net: DiffusionDrafter, target: Target, batch: DrafterBatch) -> Outcome:
    objective = block_objective(name)
    return diffusion_objective(net, batch, teacher=OnlineTeacher(target), objective=objective)


@dataclass(frozen=True)
class Slot:
    """A supervised slot k of a block."""

    k: int
    cross_entropy: float
    divergence: float
    overlap: float
    hit: bool


def decayed(blocks: list[list[Slot]], values: list[list[float]]) -> float:
    pairs = [
        (math.exp(-(slot.k - 1) / 4.0), value)
        for block, row in zip(blocks, values, strict=True)
        for slot, value in zip(block, row, strict=True)
    ]
    return sum(w * v for w, v in pairs) / sum(w for w, _ in pairs)


def chained(blocks: list[list[float]]) -> float:
    """The mean over slots of the product up to them."""
    products = [math.prod(block[: i + 1]) for block in blocks for i in range(len(block))]
    return sum(products) / len(products)


def dpace(blocks: list[list[Slot]]) -> float:
    total = 0.0
    for block in blocks:
        chances = [0.5 * math.exp(-slot.cross_entropy) + 0.5 for slot in block]
        chains = [math.prod(chances[: i + 1]) for i in range(len(block))]
        total += sum(sum(chains[i:]) * slot.cross_entropy for i, slot in enumerate(block))
    return total / (len(blocks) * NUM_DRAFTS / 2)


def in_plain_loops(name: str, blocks: list[list[Slot]]) -> float:
    cross_entropy = decayed(blocks, [[slot.cross_entropy for slot in block] for block in blocks])
    if name == "dpace":
        return dpace(blocks)
    if name == "focal":
        first = [[slot for slot in block if not slot.hit][:1] for block in blocks]
        errors = decayed(first, [[slot.cross_entropy for slot in block] for block in first])
        return cross_entropy + 0.3 * errors
    if name == "chain":
        chances = [[math.exp(-slot.cross_entropy) for slot in block] for block in blocks]
        return cross_entropy - 2.0 * chained(chances)
    if name == "e2e_tv":
        return 1.0 - chained([[slot.overlap for slot in block] for block in blocks])
    if name == "kd":
        return decayed(blocks, [[slot.divergence for slot in block] for block in blocks])
    return cross_entropy


def blocks_of(net: DiffusionDrafter, target: Target, batch: DrafterBatch) -> list[list[Slot]]:
    """The supervised slots of every block, each block alone and the head written out."""
    output = target.model(batch.ids, use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[i + 1] for i in target.tap_layer_ids], dim=-1)
    weights, ids = dict(net.named_parameters()), batch.ids[0]
    blocks = []
    for anchor in batch.anchors[0].tolist():
        block = torch.tensor([[[int(ids[anchor])] + [MASK_ID] * NUM_DRAFTS]])
        hidden = net.blocks(target.tables.embed(block), taps, torch.tensor([[anchor]]))[0, 0]
        slots = []
        for k in range(1, NUM_DRAFTS + 1):
            if anchor + k >= 12 or not batch.supervised[0, anchor + k]:
                continue
            logits = target.tables.head @ hidden[k]
            if net.markov_head is not None:
                code = weights["markov_head.markov_w1.weight"][ids[anchor + k - 1]]
                logits = logits + weights["markov_head.markov_w2.weight"] @ code
            label, logp = int(ids[anchor + k]), logits.log_softmax(-1)
            wanted = output.logits[0, anchor + k - 1].log_softmax(-1)
            slots.append(
                Slot(
                    k=k,
                    cross_entropy=-float(logp[label]),
                    divergence=float((wanted.exp() * (wanted - logp)).sum()),
                    overlap=float(torch.minimum(wanted.exp(), logp.exp()).sum()),
                    hit=int(logits.argmax()) == label,
                )
            )
        blocks.append(slots)
    return blocks


def partly_drafted(net: DiffusionDrafter, target: Target, batch: DrafterBatch) -> DrafterBatch:
    """The text with some tokens that the drafter drafts there: behind 1 two, behind 5 one."""
    ids = batch.ids.clone()
    for anchor, count in ((1, 2), (5, 1)):
        arm = DiffusionArm(CachedDiffusion(net, target.tables))
        texts, _ = prefilled(target, ids[0, : anchor + 1])
        ids[0, anchor + 1 : anchor + 1 + count] = torch.tensor(drafted(arm, texts, count))
    return replace(batch, ids=ids)


def leading_hits(block: list[Slot]) -> int:
    """Slots 1, 2 ... that are all supervised and right."""
    count = 0
    while count < len(block) and block[count].k == count + 1 and block[count].hit:
        count += 1
    return count


@torch.no_grad()
@pytest.mark.parametrize("markov_rank", [0, 5])
@pytest.mark.parametrize("name", NAMES)
def test_the_objective_equals_plain_loops(
    name: ObjectiveName, markov_rank: int, target: Target
) -> None:
    net = tiny_diffusion(target.drafter_shape, seed=1, markov_rank=markov_rank)
    batch = partly_drafted(net, target, one_text())
    blocks = blocks_of(net, target, batch)
    loss, means = run(name, net, target, batch)
    assert float(loss) == pytest.approx(in_plain_loops(name, blocks), rel=1e-4)
    tau = sum(1 + leading_hits(block) for block in blocks) / len(blocks)
    assert tau >= 1 + 3 / 5
    assert float(means["tau"].value) == pytest.approx(tau)


@pytest.mark.parametrize("name", NAMES)
def test_padding_anchors_and_padding_tokens_leave_loss_and_gradients_as_they_are(
    name: ObjectiveName, target: Target
) -> None:
    plain = one_text()
    padded = replace(
        plain,
        ids=F.pad(plain.ids, (0, 3), value=4),
        supervised=F.pad(plain.supervised, (0, 3)),
        anchors=F.pad(plain.anchors, (0, 2), value=1),
        anchor_mask=F.pad(plain.anchor_mask, (0, 2)),
    )
    results = []
    for batch in (plain, padded):
        net = tiny_diffusion(target.drafter_shape, seed=1, markov_rank=5, sliding_window=7)
        net.requires_grad_(True)
        loss, means = run(name, net, target, batch)
        loss.backward()
        values = {key: mean.value for key, mean in means.items()}
        results.append((loss.detach(), values, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["decay", "kd"])
def test_drawn_slots_teach_what_weighed_slots_teach_on_average(
    name: ObjectiveName, target: Target
) -> None:
    # Slots weigh 1, .8, .64 and .512: of 125 even draws 125, 100, 80 and 64 take them.
    weighed = replace(block_objective(name), gamma=-1 / math.log(0.8))
    drawn = replace(weighed, draw_slots=True)
    batch, net = one_text(), tiny_diffusion(target.drafter_shape, num_layers=1)
    net.requires_grad_(True)
    teacher = OnlineTeacher(target)

    def learn(batch: DrafterBatch, objective: BlockObjective) -> tuple[list[Tensor], float]:
        """The gradient of the sum that the loss is a mean of, and tau."""
        loss, means = diffusion_objective(net, batch, teacher=teacher, objective=objective)
        grads = torch.autograd.grad(loss * means["loss"].count, list(net.parameters()))
        return list(grads), float(means["tau"].value)

    expected, tau = learn(batch, weighed)
    found, taus = [torch.zeros_like(grad) for grad in expected], []
    for draw in range(125):
        luck = torch.full((1, 5), (draw + 0.5) / 125)
        grads, drawn_tau = learn(replace(batch, luck=luck), drawn)
        found = [total + grad / 125 for total, grad in zip(found, grads, strict=True)]
        taus.append(drawn_tau)
    for total, grad in zip(found, expected, strict=True):
        assert (total - grad).norm() < 1e-4 * grad.norm()
    assert sum(taus) / 125 == pytest.approx(tau, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_nothing_to_learn_gives_zero_and_a_gradient_of_every_parameter(
    name: ObjectiveName, target: Target
) -> None:
    batch = one_text()
    batch = replace(batch, anchor_mask=torch.zeros_like(batch.anchor_mask))
    net = tiny_diffusion(target.drafter_shape, markov_rank=5).requires_grad_(True)
    loss, means = run(name, net, target, batch)
    loss.backward()
    assert (float(loss.detach()), means) == (0.0, {})
    for parameter in net.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


# One offset for label, weight, metric, teacher and previous token.

VOCAB, SURE = 40, 50.0
WIDE = replace(ODD_SHAPE, hidden_size=VOCAB, target_hidden_size=VOCAB)


class Told(DiffusionDrafter):
    """Says what it is told: hidden states of all blocks, which the head below takes for logits."""

    told: Tensor

    def blocks(self, block_embeds: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
        return self.told


class SureTeacher:
    """Row i of the target is certain of x_{i+1}."""

    def __init__(self) -> None:
        self.tables = TargetTables(torch.zeros(VOCAB, VOCAB), torch.eye(VOCAB), None)

    def __call__(self, batch: DrafterBatch) -> TeacherRows:
        hidden = SURE * F.one_hot(batch.ids.roll(-1, 1), VOCAB).float()
        return TeacherRows(torch.zeros(*batch.ids.shape, 3 * VOCAB), hidden)


def counting_text() -> DrafterBatch:
    """x_i = i + 3, so each token tells its place. Token 0, which unknowing slots say, is absent."""
    anchors = torch.tensor([[2, 5]])
    return DrafterBatch(
        ids=torch.arange(3, 15)[None],
        lengths=torch.tensor([12]),
        supervised=torch.ones(1, 12, dtype=torch.bool),
        anchors=anchors,
        anchor_mask=torch.ones_like(anchors, dtype=torch.bool),
        rows=torch.tensor([0]),
    )


def told_net(told: Tensor, markov_rank: int = 0) -> Told:
    config: dict[str, Any] = {
        "shape": WIDE,
        "num_layers": 1,
        "block_size": NUM_DRAFTS + 1,
        "mask_token_id": MASK_ID,
        "num_target_layers": 8,
        "tap_layer_ids": TAPS,
        "markov_rank": markov_rank,
        "sliding_window": None,
    }
    net = Told(DiffusionDrafterConfig(**config))
    net.told = told
    return net


def telling(batch: DrafterBatch, num_told: int, *, shift: int) -> Tensor:
    """Slots k = 1 .. num_told are sure of the token k + shift behind their anchor."""
    told = torch.zeros(1, 2, NUM_DRAFTS + 1, VOCAB)
    for column, anchor in enumerate(batch.anchors[0].tolist()):
        for k in range(1, num_told + 1):
            told[0, column, k, batch.ids[0, anchor + k + shift]] = SURE
    return told


@torch.no_grad()
@pytest.mark.parametrize("num_told", range(NUM_DRAFTS + 1))
@pytest.mark.parametrize("name", ["decay", "kd", "e2e_tv"])
def test_slot_k_is_the_token_k_behind_the_anchor_for_label_weight_teacher_and_metric(
    name: ObjectiveName, num_told: int
) -> None:
    # Of other projects, one gave slot 1 no weight, one fed the token before the previous one, and
    # one left slot 1 out of its metric.
    batch = counting_text()
    net = told_net(telling(batch, num_told, shift=0))
    objective = block_objective(name)
    loss, means = diffusion_objective(net, batch, teacher=SureTeacher(), objective=objective)
    untold = range(num_told + 1, NUM_DRAFTS + 1)
    if name == "e2e_tv":
        expected = sum(1.0 - VOCAB ** -(k - num_told) for k in untold) / NUM_DRAFTS
    else:
        weights = [math.exp(-(k - 1) / 4.0) for k in range(1, NUM_DRAFTS + 1)]
        expected = sum(weights[num_told:]) * math.log(VOCAB) / sum(weights)
    assert float(loss) == pytest.approx(expected, abs=1e-5)
    assert float(means["tau"].value) == 1 + num_told
    accepted = [float(means[f"accepted_{k}"].value) for k in range(1, NUM_DRAFTS + 1)]
    assert accepted == [1.0] * num_told + [0.0] * (NUM_DRAFTS - num_told)


@torch.no_grad()
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_drafter_of_another_convention_gets_no_credit(shift: int) -> None:
    batch = counting_text()
    net = told_net(telling(batch, NUM_DRAFTS, shift=shift))
    objective = block_objective("decay")
    loss, means = diffusion_objective(net, batch, teacher=SureTeacher(), objective=objective)
    assert float(loss) == pytest.approx(SURE)
    assert float(means["tau"].value) == 1.0


@torch.no_grad()
@pytest.mark.parametrize(("step", "tau"), [(1, 1 + NUM_DRAFTS), (2, 1), (0, 1)])
def test_the_markov_head_reads_the_token_right_before_each_slot(step: int, tau: int) -> None:
    # Slots that know nothing, and a bias for the token `step` further on than the previous one.
    batch = counting_text()
    net = told_net(torch.zeros(1, 2, NUM_DRAFTS + 1, VOCAB), markov_rank=VOCAB)
    assert net.markov_head is not None
    net.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
    net.markov_head.markov_w2.weight.copy_(SURE * torch.eye(VOCAB).roll(step, 0))
    objective = block_objective("decay")
    _, means = diffusion_objective(net, batch, teacher=SureTeacher(), objective=objective)
    assert float(means["tau"].value) == tau


def losses_of_training(
    name: ObjectiveName, target: Target, *, num_steps: int, **sizes: int
) -> list[float]:
    torch.manual_seed(0)
    config = tiny_diffusion(target.drafter_shape, **sizes).config
    net = DiffusionDrafter(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss, _ = run(name, net, target, one_text())
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_any_number_of_layers_trains_to_finite_losses(num_layers: int, target: Target) -> None:
    losses = losses_of_training("dpace", target, num_steps=20, num_layers=num_layers)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_objective_falls_in_training_with_a_markov_head_and_a_window(
    name: ObjectiveName, target: Target
) -> None:
    sizes = {"num_layers": 1, "markov_rank": 4, "sliding_window": 6}
    losses = losses_of_training(name, target, num_steps=20, **sizes)
    assert losses[-1] < losses[0]
