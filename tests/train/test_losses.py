from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fakes import random_rows, tiny_ar, tiny_diffusion
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import chained_hits, decay_weights, dpace_weights, head_cross_entropy
from whiflash_train.objectives import Outcome, ar_objective, diffusion_objective
from whiflash_train.teacher import Teacher

T, X = True, False


def targets(kind: str, rows: int) -> Tensor:
    if kind == "ids":
        return torch.randint(0, 30, (rows,), generator=torch.Generator().manual_seed(3))
    return random_rows(rows, 30, seed=3).softmax(-1)


@pytest.mark.parametrize("kind", ["ids", "distributions"])
@pytest.mark.parametrize("rows", [1, 512, 1300])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_equal_those_of_autograd(kind: str, rows: int, frozen: bool) -> None:
    hidden, head = random_rows(rows, 8, seed=1), random_rows(30, 8, seed=2)
    wanted, pull = targets(kind, rows), random_rows(rows, seed=4)
    found_hidden, plain_hidden = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found_head = head.clone().requires_grad_(not frozen)
    plain_head = head.clone().requires_grad_(not frozen)

    losses, best = head_cross_entropy(found_hidden, found_head, wanted)
    logits = plain_hidden @ plain_head.T
    expected = F.cross_entropy(logits, wanted, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(best, logits.argmax(-1))

    (losses * pull).sum().backward()
    (expected * pull).sum().backward()
    torch.testing.assert_close(found_hidden.grad, plain_hidden.grad, rtol=1e-4, atol=1e-5)
    if not frozen:
        torch.testing.assert_close(found_head.grad, plain_head.grad, rtol=1e-4, atol=1e-4)


def test_no_rows_give_no_losses_and_a_gradient_of_zero() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    losses, best = head_cross_entropy(hidden, random_rows(30, 8, seed=2), targets("ids", 0))
    losses.sum().backward()
    assert losses.shape == best.shape == (0,)
    assert hidden.grad is not None


@pytest.mark.parametrize(
    ("chances", "valid", "smoothing", "expected"),
    [
        # C = .5, .125: w1 = .5 + .125, w2 = .125
        ([0.5, 0.25], [T, T], 0.0, [0.625, 0.125]),
        # q = .75, .625; C = .75, .46875
        ([0.5, 0.25], [T, T], 0.5, [1.21875, 0.46875]),
        ([0.5, 0.9, 0.25], [T, X, T], 0.5, [1.21875, 0.0, 0.46875]),
        ([0.5, 0.25, 0.9], [T, T, X], 0.5, [1.21875, 0.46875, 0.0]),
        ([0.5, 0.25], [X, X], 0.5, [0.0, 0.0]),
        ([1.0, 1.0, 1.0], [T, T, T], 0.0, [3.0, 2.0, 1.0]),
    ],
)
def test_dpace_weights_are_the_chances_of_being_reached_summed_from_the_end(
    chances: list[float], valid: list[bool], smoothing: float, expected: list[float]
) -> None:
    losses = -torch.tensor([chances]).log()
    found = dpace_weights(losses.requires_grad_(), torch.tensor([valid]), smoothing=smoothing)
    torch.testing.assert_close(found, torch.tensor([expected]))
    assert not found.requires_grad


def test_dpace_weights_equal_plain_loops() -> None:
    losses = random_rows(6, 7, seed=5).abs()
    valid = random_rows(6, 7, seed=6) > -0.7
    found = dpace_weights(losses, valid, smoothing=0.3)
    for row in range(6):
        chains, chain = [0.0] * 7, 1.0
        for slot in range(7):
            if valid[row, slot]:
                chain *= 0.7 * math.exp(-float(losses[row, slot])) + 0.3
                chains[slot] = chain
        wanted = [sum(chains[j:]) if valid[row, j] else 0.0 for j in range(7)]
        assert found[row].tolist() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("gamma", [4.0, 7.0])
def test_decay_weights_fall_by_the_same_factor_each_slot(gamma: float) -> None:
    found = decay_weights(torch.tensor([[T, T, X, T], [X, T, T, T]]), gamma=gamma)
    w = [math.exp(-k / gamma) for k in range(4)]
    assert found[0].tolist() == pytest.approx([1.0, w[1], 0.0, w[3]])
    assert found[1].tolist() == pytest.approx([0.0, w[1], w[2], w[3]])


def test_a_hit_counts_only_behind_hits() -> None:
    hits = torch.tensor([[T, T, X, T], [X, T, T, T], [T, T, T, T]])
    assert chained_hits(hits).tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("name", ["ar", "dpace", "decay"])
def test_padding_anchors_and_padding_tokens_leave_an_objective_as_it_is(
    name: str, target: Target
) -> None:
    net = (tiny_ar if name == "ar" else tiny_diffusion)(target.drafter_shape, seed=1)
    net.requires_grad_(True)

    def outcome(batch: DrafterBatch) -> Outcome:
        teacher = Teacher(target, keep=False)
        if name == "ar":
            return ar_objective(net, batch, teacher=teacher, draft_length=3, step_decay=0.8)  # pyright: ignore
        return diffusion_objective(
            net,  # pyright: ignore
            batch,
            teacher=teacher,
            weighting=name,
            smoothing=0.5,
            gamma=4.0,
        )

    used = torch.arange(1, 261, 3)
    ids = used[torch.randint(0, 80, (1, 12), generator=torch.Generator().manual_seed(7))]
    mask = torch.arange(12)[None] >= 4
    plain = DrafterBatch(
        ids=ids,
        lengths=torch.tensor([12]),
        supervised=mask,
        anchors=torch.tensor([[4, 8, 10]]),
        anchor_mask=torch.ones(1, 3, dtype=torch.bool),
        rows=torch.tensor([0]),
    )
    padded = DrafterBatch(
        ids=F.pad(ids, (0, 3), value=4),
        lengths=plain.lengths,
        supervised=F.pad(mask, (0, 3)),
        anchors=F.pad(plain.anchors, (0, 2), value=1),
        anchor_mask=F.pad(plain.anchor_mask, (0, 2)),
        rows=plain.rows,
    )
    results = []
    for batch in (plain, padded):
        net.zero_grad()
        loss, means = outcome(batch)
        loss.backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        results.append((loss, {key: mean.value for key, mean in means.items()}, grads))
    (loss, means, grads), (other_loss, other_means, other_grads) = results
    assert float(loss.detach()) > 0.1
    torch.testing.assert_close(other_loss, loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other_means, means, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other_grads, grads, rtol=1e-3, atol=1e-5)
