from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.fakes import plain_soft_loss, random_rows
from whiflash_train import distillation
from whiflash_train.distillation import LossName, SoftLoss, soft_losses

NAMES: tuple[LossName, ...] = ("soft_ce", "kl", "tv", "lk_alpha", "lk_lambda")
WORDS, WIDTH = 30, 8


def named(name: LossName, *, kl_scale: float = 1.0, kl_decay: float = 3.0) -> SoftLoss:
    return SoftLoss(name=name, kl_scale=kl_scale, kl_decay=kl_decay)


def case(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head, and the target's logits."""
    hidden, head = random_rows(rows, WIDTH, seed=1), random_rows(WORDS, WIDTH, seed=2)
    return hidden.to(dtype), head.to(dtype), 2 * random_rows(rows, WORDS, seed=3).to(dtype)


@pytest.fixture
def chunks_of_128(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "_CPU_SCORES", 0)  # so the least: 128


def taught(hidden: Tensor, head: Tensor, target: Tensor, loss: SoftLoss) -> tuple[Tensor, Tensor]:
    """Every row by the target's row of the same number, all in one group."""
    rows = torch.arange(len(hidden))
    return soft_losses(hidden, head, lambda some: target[some], rows, 0 * rows, loss)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # target .42 .5 .08, draft .4 .35 .25: alpha = .4 + .35 + .08 = .83
        ("soft_ce", 1.020657),  # .42 * .916291 + .5 * 1.049822 + .08 * 1.386294
        ("kl", 0.107675),  # less the entropy .912982
        ("tv", 0.17),
        ("lk_alpha", 0.186330),
        ("lk_lambda", 0.164833),  # w = exp(-2.49) = .082910
    ],
)
def test_each_loss_is_what_a_hand_calculates(name: LossName, expected: float) -> None:
    draft, target = torch.tensor([[0.4, 0.35, 0.25]]), torch.tensor([[0.42, 0.5, 0.08]])
    losses, best = taught(draft.log(), torch.eye(3), target.log(), named(name))
    assert losses.tolist() == [pytest.approx(expected, abs=2e-6)]
    assert best.tolist() == [0]


def test_the_blend_follows_the_mean_acceptance_of_the_call() -> None:
    draft = torch.tensor([[0.4, 0.35, 0.25], [0.5, 0.25, 0.25]])
    target = torch.tensor([[0.42, 0.5, 0.08], [0.5, 0.3, 0.2]])  # alpha .83 and .95
    loss = named("lk_lambda", kl_scale=0.5, kl_decay=2.0)
    found, _ = taught(draft.log(), torch.eye(3), target.log(), loss)
    weight = 0.5 * math.exp(-2.0 * 0.89)
    divergence = 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.25)
    expected = weight * divergence + (1 - weight) * 0.05
    assert float(found[1]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 128, 333])
@pytest.mark.parametrize("frozen", [True, False])
def test_values_and_gradients_equal_those_of_autograd(
    name: LossName, rows: int, frozen: bool, chunks_of_128: None
) -> None:
    hidden, head, target = case(rows, torch.float64)
    loss, pull = named(name), random_rows(rows, seed=4).double()
    leaves = [hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)]
    plain = [hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)]
    found, best = taught(leaves[0], leaves[1], target, loss)
    expected = plain_soft_loss(plain[0] @ plain[1].T, target, loss)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(best, (hidden @ head.T).argmax(-1))
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    for leaf, wanted in zip(leaves, plain, strict=True):
        if wanted.requires_grad:
            torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-8, atol=1e-10)
    assert (leaves[1].grad is None) == frozen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", [True, False])
def test_slopes_pass_gradcheck_in_float64(name: LossName, frozen: bool) -> None:
    hidden, head, target = case(5, torch.float64)
    # The weight of the blend is detached, so it must not depend on what is checked.
    loss = named(name, kl_scale=0.3, kl_decay=0.0)
    leaves = (hidden.requires_grad_(), head.requires_grad_(not frozen))
    assert torch.autograd.gradcheck(lambda h, w: taught(h, w, target, loss)[0], leaves)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [500, 5000])
def test_loss_and_gradient_of_bfloat16_states_near_their_target_are_right_to_half_a_percent(
    name: LossName, words: int
) -> None:
    # Differences of distributions shrink as training converges; draft logits rounded to bfloat16
    # would then give gradients that are mostly rounding.
    width, rows = 64, 600
    head = random_rows(words, width, seed=1).bfloat16()
    target = 0.3 * random_rows(rows, width, seed=2)
    hidden = (target + 0.015 * random_rows(rows, width, seed=3)).bfloat16()
    target = target.bfloat16() @ head.T
    loss, leaf = named(name), hidden.clone().requires_grad_()
    found, _ = taught(leaf, head, target, loss)
    found.mean().backward()
    assert leaf.grad is not None

    exact, wide = hidden.double().requires_grad_(), head.double()
    expected = plain_soft_loss(exact @ wide.T, target.double(), loss)
    expected.mean().backward()
    assert exact.grad is not None
    alpha = 1 - plain_soft_loss(exact @ wide.T, target.double(), named("tv")).mean()
    assert 0.93 < float(alpha.detach()) < 0.97
    assert float(found.detach().mean()) == pytest.approx(float(expected.detach().mean()), rel=0.005)
    error = (leaf.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.005


@pytest.mark.parametrize("name", NAMES)
def test_with_a_frozen_head_nothing_as_wide_as_the_vocabulary_is_kept(name: LossName) -> None:
    hidden, head, target = case(40, torch.float32)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        taught(hidden.requires_grad_(), head, target, named(name))
    assert kept
    assert max(tensor.numel() for tensor in kept) <= 2 * 40 * WIDTH < 40 * WORDS


def test_each_row_of_the_target_is_asked_for_once_a_chunk(chunks_of_128: None) -> None:
    hidden, head, target = case(300, torch.float32)
    rows, asked = torch.arange(300) // 3, []  # three rows learn from each of the target's

    def logits(some: Tensor) -> Tensor:
        asked.append(some.tolist())
        return target[some]

    found, _ = soft_losses(hidden, head, logits, rows, 0 * rows, named("kl"))
    # 128 rows end within the target's row 42, 256 with its row 85
    assert asked == [list(range(43)), list(range(42, 86)), list(range(85, 100))]
    expected = plain_soft_loss(hidden @ head.T, target[rows], named("kl"))
    torch.testing.assert_close(found, expected)


def test_the_blend_of_each_group_follows_its_own_acceptance() -> None:
    draft = torch.tensor([[0.4, 0.35, 0.25], [0.5, 0.25, 0.25], [0.4, 0.35, 0.25]])
    target = torch.tensor([[0.42, 0.5, 0.08], [0.5, 0.3, 0.2], [0.42, 0.5, 0.08]])
    groups, rows = torch.tensor([2, 0, 2]), torch.arange(3)
    loss = named("lk_lambda")
    found, _ = soft_losses(
        draft.log(), torch.eye(3), lambda some: target[some].log(), rows, groups, loss
    )
    alone = [
        taught(draft[i : i + 1].log(), torch.eye(3), target[i : i + 1].log(), loss)[0]
        for i in range(3)
    ]
    assert found.tolist() == pytest.approx(torch.cat(alone).tolist(), rel=1e-5)


def test_distributions_that_share_next_to_nothing_still_teach() -> None:
    # draft (1, e^-200), target (e^-200, 1): alpha = 2 e^-200, nothing in float32
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 200.0]])
    losses, _ = taught(logits, torch.eye(2), target, named("lk_alpha"))
    losses.sum().backward()
    assert losses.tolist() == [pytest.approx(200 - math.log(2))]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[pytest.approx(0.5, rel=1e-5), pytest.approx(-0.5, rel=1e-5)]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_drafter_equal_to_its_target_has_nothing_to_learn(name: LossName, frozen: bool) -> None:
    hidden, head, _ = case(7, torch.float32)
    leaf = hidden.clone().requires_grad_()
    target = hidden @ head.T
    losses, _ = taught(leaf, head.requires_grad_(not frozen), target, named(name))
    losses.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-5
    if name != "soft_ce":
        assert losses.abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("frozen", [True, False])
def test_no_rows_give_no_losses_and_a_gradient_of_zero(name: LossName, frozen: bool) -> None:
    hidden, head = torch.zeros(0, WIDTH, requires_grad=True), random_rows(WORDS, WIDTH, seed=2)
    head.requires_grad_(not frozen)
    losses, best = taught(hidden, head, torch.zeros(0, WORDS), named(name))
    losses.sum().backward()
    assert losses.shape == best.shape == (0,)
    assert hidden.grad is not None
    assert frozen or (head.grad is not None and head.grad.eq(0).all())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kl_scale", 1.5, r"kl_scale is 1.5: it must lie in 0..1"),
        ("kl_scale", -0.1, r"kl_scale is -0.1"),
        ("kl_decay", -1.0, r"kl_decay is -1.0: it must be 0 or more"),
    ],
)
def test_parameters_out_of_range_are_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftLoss(**{"name": "lk_lambda", "kl_scale": 1.0, "kl_decay": 3.0, field: value})
