from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fakes import MASK_ID, TAP_SIZE, random_rows, tiny_ar, tiny_diffusion
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch
from whiflash_train.losses import chained_hits, decay_weights, dpace_weights, head_cross_entropy
from whiflash_train.objectives import Outcome, ar_objective, diffusion_objective
from whiflash_train.teacher import OnlineTeacher

T, X = True, False
USED = torch.arange(1, 261, 3)  # what `tiny_ar` drafts


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


def run_objective(name: str, target: Target, batch: DrafterBatch) -> tuple[nn.Module, Outcome]:
    teacher, shape = OnlineTeacher(target), target.drafter_shape
    if name == "ar":
        ar = tiny_ar(shape, seed=1, tap_size=TAP_SIZE).requires_grad_(True)
        return ar, ar_objective(ar, batch, teacher=teacher, draft_length=3, step_decay=0.8)
    net = tiny_diffusion(shape, seed=1).requires_grad_(True)
    options = {"weighting": name, "smoothing": 0.5, "gamma": 4.0}
    return net, diffusion_objective(net, batch, teacher=teacher, **options)


def one_text() -> DrafterBatch:
    """12 tokens, two of which (at 7 and 10) cannot be drafted; the token at 9 is no answer."""
    ids = USED[torch.randint(0, 80, (1, 12), generator=torch.Generator().manual_seed(7))]
    ids[0, [7, 10]] += 1
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


@torch.no_grad()
def test_the_ar_objective_equals_plain_loops(target: Target) -> None:
    batch = one_text()
    net, (loss, means) = run_objective("ar", target, batch)
    assert isinstance(net, ARDrafter)
    output = target.model(batch.ids, use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[i + 1] for i in target.tap_layer_ids], dim=-1)
    unroll = net.unroll(target.tables.embed(batch.ids), taps, batch.anchors, num_steps=3)
    total, chains = 0.0, [True] * 5
    lengths = [1.0] * 5
    for step, hidden in enumerate(unroll):
        counted = []
        for column, anchor in enumerate(batch.anchors[0].tolist()):
            fed, predicted = anchor + step, anchor + step + 1
            usable = predicted < 12 and bool(batch.supervised[0, fed])
            usable = usable and int(batch.ids[0, predicted]) in USED.tolist()
            logp = net.logits(hidden[0, column]).log_softmax(-1)
            if usable:
                wanted = output.logits[0, fed, USED].softmax(-1)
                counted.append(-float((wanted * logp).sum()))
            hit = usable and int(USED[logp.argmax()]) == int(batch.ids[0, predicted])
            chains[column] = chains[column] and hit
            lengths[column] += chains[column]
        total += 0.8**step * sum(counted) / len(counted)
    assert float(loss) == pytest.approx(total / (1 + 0.8 + 0.64), rel=1e-4)
    assert float(means["tau"].value) == pytest.approx(sum(lengths) / 5, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("weighting", ["dpace", "decay"])
def test_the_diffusion_objective_equals_plain_loops(weighting: str, target: Target) -> None:
    batch = one_text()
    net, (loss, _) = run_objective(weighting, target, batch)
    assert isinstance(net, DiffusionDrafter)
    output = target.model(batch.ids, use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[i + 1] for i in target.tap_layer_ids], dim=-1)
    total, weight_sum = 0.0, 0.0
    for anchor in batch.anchors[0].tolist():
        block = torch.tensor([[[int(batch.ids[0, anchor])] + [MASK_ID] * 4]])
        hidden = net.blocks(target.tables.embed(block), taps, torch.tensor([[anchor]]))[0, 0]
        logp = (hidden @ target.tables.head.T).log_softmax(-1)
        losses = {
            k: -float(logp[k, batch.ids[0, anchor + k]])
            for k in range(1, 5)
            if anchor + k < 12 and batch.supervised[0, anchor + k]
        }
        chain, chains = 1.0, {}
        for k, value in losses.items():
            chain *= 0.5 * math.exp(-value) + 0.5
            chains[k] = chain
        for k, value in losses.items():
            reached = sum(c for m, c in chains.items() if m >= k)
            weight = reached if weighting == "dpace" else math.exp(-(k - 1) / 4.0)
            total += weight * value
            weight_sum += weight
    normaliser = 5 * 4 / 2 if weighting == "dpace" else weight_sum
    assert float(loss) == pytest.approx(total / normaliser, rel=1e-4)


@pytest.mark.parametrize("name", ["ar", "dpace", "decay"])
def test_padding_anchors_and_padding_tokens_leave_an_objective_as_it_is(
    name: str, target: Target
) -> None:
    plain = one_text()
    padded = DrafterBatch(
        ids=F.pad(plain.ids, (0, 3), value=4),
        lengths=plain.lengths,
        supervised=F.pad(plain.supervised, (0, 3)),
        anchors=F.pad(plain.anchors, (0, 2), value=1),
        anchor_mask=F.pad(plain.anchor_mask, (0, 2)),
        rows=plain.rows,
    )
    results = []
    for batch in (plain, padded):
        net, (loss, means) = run_objective(name, target, batch)
        loss.backward()
        grads = [p.grad for p in net.parameters()]
        results.append((loss.detach(), {key: mean.value for key, mean in means.items()}, grads))
    assert float(results[0][0]) > 0.1
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)
