from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fakes import SOFT_CE, block_objective, plain_soft_loss, random_rows
from whiflash_infer.target import TargetTables
from whiflash_train.block_losses import (
    Bias,
    BlockObjective,
    ObjectiveName,
    Score,
    chain_reward,
    decay_weights,
    dpace_loss,
    dpace_weights,
    e2e_tv_loss,
    first_error_loss,
    slot_scores,
    weighted_mean,
)
from whiflash_train.distillation import LossName

T, X = True, False
LN2 = math.log(2.0)
HALVING = 1.0 / LN2  # a gamma at which weights are 1, 1/2, 1/4
WHOLE, TAIL, HOLE, NONE = [T, T, T], [T, X, X], [T, X, T], [X, X, X]


def surprise(*chances: float) -> Tensor:
    """The losses of labels that were given these chances."""
    return -torch.tensor([chances]).log()


@pytest.mark.parametrize(
    ("valid", "gamma", "expected"),
    [
        (WHOLE, HALVING, (1 + 2 / 2 + 4 / 4) / 1.75),
        (WHOLE, math.inf, 7 / 3),
        (TAIL, HALVING, 1.0),
        (HOLE, HALVING, (1 + 4 / 4) / 1.25),
        ([X, T, X], HALVING, 2.0),
        (NONE, HALVING, 0.0),
    ],
)
def test_the_decayed_loss_of_three_slots(valid: list[bool], gamma: float, expected: float) -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]])
    found = weighted_mean(losses, decay_weights(torch.tensor([valid]), gamma=gamma))
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("valid", "expected"),
    [
        # C = 1/2, 1/8, 1/16; w = 11/16, 3/16, 1/16; losses 1, 2, 1 times ln 2; over 3 / 2
        (WHOLE, (11 + 6 + 1) / 16 * LN2 / 1.5),
        (TAIL, 1 / 2 * LN2 / 1.5),
        (HOLE, (3 / 4 + 1 / 4) * LN2 / 1.5),  # C = 1/2, -, 1/4
        (NONE, 0.0),
    ],
)
def test_the_dpace_loss_of_three_slots(valid: list[bool], expected: float) -> None:
    found = dpace_loss(surprise(0.5, 0.25, 0.5), torch.tensor([valid]), smoothing=0.0)
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hits", "valid", "expected"),
    [
        ([[T, X, X]], [WHOLE], 2.0),
        ([[X, T, T]], [WHOLE], 1.0),
        ([[T, T, T]], [WHOLE], 0.0),
        ([[T, X, X]], [HOLE], 4.0),  # what is not supervised is no error
        ([[T, X, X]], [TAIL], 0.0),  # nor is what the text does not have
        ([[X, X, X], [T, T, X]], [WHOLE, WHOLE], (1.0 + 4.0 / 4) / 1.25),
        ([[X, X, X], [T, T, T]], [WHOLE, WHOLE], 1.0),
        ([[X, X, X]], [NONE], 0.0),
    ],
)
def test_the_first_error_is_the_slot_that_ends_the_accepted_prefix(
    hits: list[list[bool]], valid: list[list[bool]], expected: float
) -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]]).expand(len(hits), 3)
    found = first_error_loss(losses, torch.tensor(hits), torch.tensor(valid), gamma=HALVING)
    assert float(found) == pytest.approx(expected)


CHAINS = [
    ([WHOLE], (1 / 2 + 1 / 4 + 1 / 16) / 3),
    ([TAIL], 1 / 2),
    ([HOLE], (1 / 2 + 1 / 8) / 2),
    ([WHOLE, TAIL], (1 / 2 + 1 / 4 + 1 / 16 + 1 / 2) / 4),
]


@pytest.mark.parametrize(("valid", "expected"), [*CHAINS, ([NONE], 0.0)])
def test_the_chain_reward_is_the_mean_chance_of_an_unbroken_prefix(
    valid: list[list[bool]], expected: float
) -> None:
    losses = surprise(0.5, 0.5, 0.25).expand(len(valid), 3)
    assert float(chain_reward(losses, torch.tensor(valid))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("valid", "expected"), [*((valid, 1 - mean) for valid, mean in CHAINS), ([NONE], 0.0)]
)
def test_the_end_to_end_loss_is_the_mean_chance_of_a_broken_prefix(
    valid: list[list[bool]], expected: float
) -> None:
    distances = torch.tensor([[0.5, 0.5, 0.75]]).expand(len(valid), 3)
    assert float(e2e_tv_loss(distances, torch.tensor(valid))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decay", 2.0),
        ("kd", 2.0),
        ("focal", 2.0 + 0.3 * 3.0),
        ("chain", 2.0 - 2.0 * (math.exp(-1) + math.exp(-4)) / 2),
        ("e2e_tv", (0.0 + (1.0 - 0.0)) / 2),
    ],
)
def test_an_objective_is_its_losses_with_their_weights(
    name: ObjectiveName, expected: float
) -> None:
    objective = BlockObjective(
        name=name,
        smoothing=0.5,
        gamma=math.inf,
        draw_slots=False,
        focal_weight=0.3,
        chain_weight=2.0,
    )
    scores = torch.tensor([[0.0, 1.0, 99.0]] if name == "e2e_tv" else [[1.0, 3.0, 99.0]])
    hits, valid = torch.tensor([[T, X, X]]), torch.tensor([[T, T, X]])
    assert float(objective.loss(scores, hits, valid, torch.ones(3))) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["dpace", "decay", "focal", "chain", "e2e_tv", "kd"])
def test_a_slot_that_is_not_valid_has_no_part_in_value_or_gradient(name: ObjectiveName) -> None:
    objective = block_objective(name)
    scores, valid = random_rows(5, 4, seed=1).abs() / 4, random_rows(5, 4, seed=2) > -0.5
    hits = random_rows(5, 4, seed=3) > 0
    results = []
    for filler in (0.3, 1e30):
        filled = torch.where(valid, scores, filler).requires_grad_()
        loss = objective.loss(filled, hits | ~valid, valid, torch.ones(4))
        loss.backward()
        assert filled.grad is not None
        assert (filled.grad[~valid] == 0).all()
        results.append((loss.detach(), filled.grad))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", ["dpace", "decay", "e2e_tv", "kd"])
def test_the_losses_of_parts_add_up_by_their_weights(name: ObjectiveName) -> None:
    objective, hits = block_objective(name), torch.zeros(8, 4, dtype=torch.bool)
    scores, valid = random_rows(8, 4, seed=1).abs() / 4, random_rows(8, 4, seed=2) > -0.5
    taken = torch.ones(4)
    whole = objective.loss(scores, hits, valid, taken) * objective.weight(valid, taken)
    parts = [slice(0, 3), slice(3, 8)]
    total = sum(
        objective.loss(scores[p], hits[p], valid[p], taken) * objective.weight(valid[p], taken)
        for p in parts
    )
    torch.testing.assert_close(total, whole)


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
    losses = surprise(*chances).requires_grad_()
    found = dpace_weights(losses, torch.tensor([valid]), smoothing=smoothing)
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("smoothing", 1.5),
        ("gamma", 0.0),
        ("focal_weight", -1.0),
        ("chain_weight", -0.1),
        ("draw_slots", True),  # of dpace
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    fields: dict[str, Any] = {
        "smoothing": 0.5,
        "gamma": 4.0,
        "draw_slots": False,
        "focal_weight": 0.3,
        "chain_weight": 40.0,
    }
    with pytest.raises(ValueError, match=field):
        BlockObjective(name="dpace", **{**fields, field: value})


ROWS, WIDTH, VOCAB, RANK = 9, 6, 30, 4
SCORES: list[Score] = ["cross_entropy", "divergence", "distance"]


def double(*shape: int, seed: int) -> Tensor:
    return random_rows(*shape, seed=seed).double()


def inputs(score: Score, rows: int, rank: int) -> tuple[list[Tensor], Tensor]:
    """Hidden states, codes and readout, all of them to learn; and what is wanted."""
    learning = [
        double(rows, WIDTH, seed=1),
        double(rows, rank, seed=2),
        double(VOCAB, rank, seed=3),
    ]
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(0, VOCAB, (rows,), generator=generator)
    wanted = labels if score == "cross_entropy" else double(rows, WIDTH, seed=5)
    return [t.requires_grad_() for t in learning], wanted


def plain_scores(
    score: Score, logits: Tensor, wanted: Tensor, head: Tensor, softcap: float | None
) -> Tensor:
    if score == "cross_entropy":
        return F.cross_entropy(logits, wanted, reduction="none")
    target_logits = wanted @ head.T
    if softcap is not None:
        target_logits = (target_logits / softcap).tanh() * softcap
    target = target_logits.softmax(-1)
    if score == "divergence":
        return (target * (target.log() - logits.log_softmax(-1))).sum(-1)
    return 1.0 - torch.minimum(logits.softmax(-1), target).sum(-1)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rank", [0, RANK])
@pytest.mark.parametrize(("rows", "softcap"), [(1, None), (ROWS, 3.0), (1030, None)])
def test_scores_and_gradients_equal_those_of_autograd(
    score: Score, rank: int, rows: int, softcap: float | None
) -> None:
    head, pull = double(VOCAB, WIDTH, seed=6), double(rows, seed=7)
    learning, wanted = inputs(score, rows, rank)
    bias = Bias(learning[1], learning[2]) if rank else None
    found, best = slot_scores(score, learning[0], wanted, TargetTables(head, head, softcap), bias)
    plain, _ = inputs(score, rows, rank)
    logits = plain[0] @ head.T + plain[1] @ plain[2].T
    expected = plain_scores(score, logits, wanted, head, softcap)
    assert torch.equal(best, logits.argmax(-1))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    for mine, theirs in zip(learning[: 3 if rank else 1], plain, strict=False):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("score", SCORES)
def test_no_logits_are_kept_for_the_backward_pass(score: Score) -> None:
    head = double(VOCAB, WIDTH, seed=6)
    learning, wanted = inputs(score, ROWS, RANK)
    kept: list[tuple[int, ...]] = []

    def remember(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        bias = Bias(learning[1], learning[2])
        slot_scores(score, learning[0], wanted, TargetTables(head, head, None), bias)
    assert (VOCAB, RANK) in kept
    assert (ROWS, VOCAB) not in kept


@pytest.mark.parametrize("score", SCORES)
def test_scores_without_gradients_are_the_same(score: Score) -> None:
    head = double(VOCAB, WIDTH, seed=6)
    learning, wanted = inputs(score, ROWS, RANK)
    tables, bias = TargetTables(head, head, None), Bias(learning[1], learning[2])
    expected, _ = slot_scores(score, learning[0], wanted, tables, bias)
    with torch.no_grad():
        found, _ = slot_scores(score, learning[0].detach(), wanted, tables, bias)
    assert torch.equal(found, expected)
    assert not found.requires_grad


def test_no_slots_give_no_scores_and_gradients_of_zero() -> None:
    head = double(VOCAB, WIDTH, seed=6)
    learning, wanted = inputs("cross_entropy", 0, RANK)
    bias = Bias(learning[1], learning[2])
    found, best = slot_scores(
        "cross_entropy", learning[0], wanted, TargetTables(head, head, None), bias
    )
    found.sum().backward()
    assert found.shape == best.shape == (0,)
    assert all(t.grad is not None and not t.grad.any() for t in learning)


@pytest.mark.parametrize("score", SCORES)
def test_a_head_of_low_precision_gives_scores_and_gradients_of_about_the_same(score: Score) -> None:
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        head = random_rows(VOCAB, WIDTH, seed=6).to(dtype)
        learning, wanted = inputs(score, ROWS, RANK)
        cast = [t.detach().float().requires_grad_() for t in learning]
        if wanted.is_floating_point():
            wanted = wanted.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            tables, bias = TargetTables(head, head, None), Bias(cast[1], cast[2])
            found, _ = slot_scores(score, cast[0], wanted, tables, bias)
        found.sum().backward()
        assert found.dtype == torch.float32
        results.append((found.detach(), [t.grad for t in cast]))
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("score", "name"), [("divergence", "kl"), ("distance", "tv")])
def test_scores_of_bfloat16_states_near_their_target_are_right_to_half_a_percent(
    score: Score, name: LossName
) -> None:
    # As training converges distributions differ less than bfloat16 logits are rounded (U82).
    words, width, rows = 500, 64, 600
    head = random_rows(words, width, seed=1).bfloat16()
    wanted = 0.3 * random_rows(rows, width, seed=2)
    hidden = (wanted + 0.015 * random_rows(rows, width, seed=3)).bfloat16()
    wanted, leaf = wanted.bfloat16(), hidden.clone().requires_grad_()
    found, _ = slot_scores(score, leaf, wanted, TargetTables(head, head, None), None)
    found.mean().backward()
    assert leaf.grad is not None

    exact, wide = hidden.double().requires_grad_(), head.double()
    logits, target = exact @ wide.T, wanted.double() @ wide.T
    expected = plain_soft_loss(logits, target, replace(SOFT_CE, name=name)).mean()
    expected.backward()
    assert exact.grad is not None
    alpha = 1 - plain_soft_loss(logits, target, replace(SOFT_CE, name="tv")).mean()
    assert 0.93 < float(alpha.detach()) < 0.97
    assert float(found.detach().mean()) == pytest.approx(float(expected.detach()), rel=0.005)
    assert (leaf.grad.double() - exact.grad).norm() < 0.005 * exact.grad.norm()
