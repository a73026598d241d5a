from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fakes import FLAVOURS, SOFT_CE, TAP_SIZE, plain_soft_loss, tiny_ar
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.layers import rotate
from whiflash_infer.target import Target
from whiflash_train.batches import DrafterBatch
from whiflash_train.distillation import LossName
from whiflash_train.objectives import Outcome, ar_objective
from whiflash_train.objectives.ar import step_weights
from whiflash_train.preparation import build_section
from whiflash_train.tasks import ARDrafterTask
from whiflash_train.teacher import OnlineTeacher

BASE = Path(__file__).parents[2] / "conf" / "base.yaml"
USED = torch.arange(1, 261, 3)  # what `tiny_ar` drafts
STEPS, DECAY = 3, 0.8
TENSORS = ("ids", "lengths", "supervised", "anchors", "anchor_mask", "rows")
NAMES: tuple[LossName, ...] = ("soft_ce", "kl", "tv", "lk_alpha", "lk_lambda")


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return request.param


def drafter(target: Target, flavour: str = "classic") -> ARDrafter:
    net = tiny_ar(target.drafter_shape, seed=1, tap_size=TAP_SIZE, flavour=flavour)
    net.requires_grad_(True).lm_head.requires_grad_(False)
    return net


def learn(
    net: ARDrafter,
    batch: DrafterBatch,
    target: Target,
    name: LossName = "soft_ce",
    *,
    draw_steps: bool = False,
) -> Outcome:
    return ar_objective(
        net,
        batch,
        teacher=OnlineTeacher(target),
        draft_length=STEPS,
        step_decay=DECAY,
        draw_steps=draw_steps,
        loss=replace(SOFT_CE, name=name),
    )


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


def prompt_and_answer() -> DrafterBatch:
    """Rows of 13 and 17 tokens whose last 5 and 6 are the answer, an anchor at each of those."""
    lengths, answers = [13, 17], [5, 6]
    ids = USED[torch.randint(0, 80, (2, 17), generator=torch.Generator().manual_seed(3))]
    supervised = torch.zeros(2, 17, dtype=torch.bool)
    anchors, mask = torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.bool)
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        supervised[row, length - answer : length] = True
        anchors[row, : answer - 1] = torch.arange(length - answer, length - 1)
        mask[row, : answer - 1] = True
    return DrafterBatch(
        ids=ids,
        lengths=torch.tensor(lengths),
        supervised=supervised,
        anchors=anchors,
        anchor_mask=mask,
        rows=torch.tensor([0, 1]),
    )


def teach(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hugging Face's taps and logits of one row."""
    output = target.model(ids[None], use_cache=False, output_hidden_states=True)
    taps = [output.hidden_states[i + 1] for i in target.tap_layer_ids]
    return torch.cat(taps, dim=-1)[0], output.logits[0]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_objective_equals_plain_loops(name: LossName, flavour: str, target: Target) -> None:
    batch, net = one_text(), drafter(target, flavour)
    loss, means = learn(net, batch, target, name)
    taps, logits = teach(target, batch.ids[0])
    embeds = target.tables.embed(batch.ids)
    unroll = net.unroll(embeds, taps[None], batch.anchors, num_steps=STEPS)
    total, mass, chains, lengths = 0.0, 0.0, [True] * 5, [1.0] * 5
    for step, state in enumerate(unroll):
        drafted, wanted = [], []
        for column, anchor in enumerate(batch.anchors[0].tolist()):
            fed, predicted = anchor + step, anchor + step + 1
            usable = predicted < 12 and bool(batch.supervised[0, fed])
            usable = usable and int(batch.ids[0, predicted]) in USED.tolist()
            own = net.logits(state[0, column])
            if usable:
                drafted.append(own)
                wanted.append(logits[fed, USED])
            hit = usable and int(USED[own.argmax()]) == int(batch.ids[0, predicted])
            chains[column] = chains[column] and hit
            lengths[column] += chains[column]
        losses = plain_soft_loss(
            torch.stack(drafted), torch.stack(wanted), replace(SOFT_CE, name=name)
        )
        total += DECAY**step * float(losses.sum())
        mass += DECAY**step * len(losses)
    assert float(loss) == pytest.approx(total / mass, rel=1e-4)
    assert means["loss"].count == pytest.approx(mass)
    assert float(means["tau"].value) == pytest.approx(sum(lengths) / 5, rel=1e-5)


def unrolled_everywhere(net: ARDrafter, embeds: Tensor, taps: Tensor) -> Iterator[Tensor]:
    """EAGLE-3 as published: every step at every position, a square of scores for each.

    The mask never shifts: the step-0 keys causally, and of each later step the own position's.
    """
    hidden = net.fuse(taps[:-1])
    rows, attention = torch.arange(len(hidden)), net.midlayer.self_attn
    causal = rows[None, :] <= rows[:, None]
    made: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        tokens = embeds[(rows + 1 + step).clamp(max=len(embeds) - 1)]
        joined = net.midlayer.join(tokens, hidden)
        angles = net.rotary(rows + step)
        queries = rotate(attention.queries(joined), angles)
        keys, values = (
            part.repeat_interleave(queries.shape[1] // part.shape[1], dim=1)
            for part in (rotate(attention.keys(joined), angles), attention.values(joined))
        )
        made.append((keys, values))
        (first_keys, first_values), later = made[0], made[1:]
        scores = torch.einsum("qhd,khd->hqk", queries, first_keys)
        scores = scores.masked_fill(~causal, float("-inf"))
        own = [torch.einsum("qhd,qhd->hq", queries, k)[..., None] for k, _ in later]
        weights = (torch.cat([scores, *own], dim=-1) / queries.shape[-1] ** 0.5).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights[..., : len(rows)], first_values)
        for index, (_, v) in enumerate(later):
            attended = attended + weights[..., len(rows) + index].T[..., None] * v
        hidden = net.hand_over(net.midlayer.finish(hidden, attended.flatten(1)))
        yield hidden


def test_the_reduction_to_anchors_equals_an_unroll_at_all_positions(
    flavour: str, target: Target
) -> None:
    batch, net = prompt_and_answer(), drafter(target, flavour)
    losses: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for row, length in enumerate(batch.lengths.tolist()):
        ids, supervised = batch.ids[row, :length], batch.supervised[row, :length]
        taps, logits = teach(target, ids)
        for step, state in enumerate(unrolled_everywhere(net, target.tables.embed(ids), taps)):
            # Anchor n = i + 1 must be an answer's, as must the token it is fed; x_{n+k+1} exists.
            kept = [
                i
                for i in range(length - 2 - step)
                if supervised[i + 1] and supervised[i + 2] and supervised[i + 1 + step]
            ]
            wanted = logits[[i + 1 + step for i in kept]][:, USED]
            losses[step] += plain_soft_loss(net.logits(state[kept]), wanted, SOFT_CE).unbind()
    weighed = [DECAY**k * torch.stack(part).sum() for k, part in enumerate(losses)]
    mass = sum(DECAY**k * len(part) for k, part in enumerate(losses))
    expected = torch.stack(weighed).sum() / mass
    wanted_grads = gradients(net, expected)
    loss, _ = learn(net, batch, target)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found = gradients(net, loss)
    assert found.keys() == wanted_grads.keys() >= {"fc.weight", "midlayer.self_attn.q_proj.weight"}
    for name, grad in wanted_grads.items():
        assert (found[name] - grad).norm() < 1e-5 * grad.norm(), name


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    learning = {name: p for name, p in net.named_parameters() if p.requires_grad}
    return dict(zip(learning, torch.autograd.grad(loss, list(learning.values())), strict=True))


def test_prompt_positions_get_keys_and_values_and_nothing_else(
    flavour: str, target: Target
) -> None:
    batch, net = prompt_and_answer(), drafter(target, flavour)
    rows: dict[str, int] = {}

    def counting(name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
            rows[name] = rows.get(name, 0) + inputs[0].shape[:-1].numel()

        return hook

    for name, module in net.named_modules():
        if not list(module.children()):
            module.register_forward_hook(counting(name))
    learn(net, batch, target)
    all_rows = 2 * 16  # positions of the padded batch but the last
    chain = [2 * 5, 2 * 4, 2 * 3]  # anchors of the padded batch that go on to each step
    counted = 4 + 3 + 2 + 5 + 4 + 3  # what is left of 4 and of 5 anchors at steps 0, 1 and 2
    for name in ("q_proj", "o_proj"):
        assert rows[f"midlayer.self_attn.{name}"] == sum(chain)
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        assert rows[f"midlayer.{name}"] == sum(chain)
    for name in ("self_attn.k_proj", "self_attn.v_proj", "input_layernorm", "hidden_norm"):
        assert rows[f"midlayer.{name}"] == all_rows + sum(chain[1:])
    assert rows["fc"] == all_rows
    # Before the head; or, for what is handed over normed, behind each step.
    assert rows["norm"] == (sum(chain) if net.config.norm_output else counted)
    assert "lm_head" not in rows  # its weight is read at counted rows, a chunk at a time


@pytest.mark.parametrize("train_head", [False, True])
@pytest.mark.parametrize("empty", ["no anchor", "nothing that can be drafted"])
def test_a_batch_with_nothing_to_learn_gives_zero_and_touches_every_parameter(
    empty: str, train_head: bool, flavour: str, target: Target
) -> None:
    batch, net = one_text(), drafter(target, flavour)
    net.lm_head.requires_grad_(train_head)
    if empty == "no anchor":
        batch = replace(batch, anchor_mask=torch.zeros_like(batch.anchor_mask))
    else:
        batch = replace(batch, ids=torch.full_like(batch.ids, 2))
    loss, means = learn(net, batch, target)
    loss.backward()
    assert float(loss.detach()) == 0.0
    touched = {n for n, p in net.named_parameters() if p.grad is not None and p.grad.eq(0).all()}
    assert touched == {n for n, p in net.named_parameters() if p.requires_grad}
    assert means["loss"].count == 0
    assert ("tau" in means) == (empty != "no anchor")


@pytest.mark.parametrize(
    ("flavour", "name"),
    [(flavour, "soft_ce") for flavour in FLAVOURS] + [("all", name) for name in NAMES[1:]],
)
def test_twenty_steps_stay_finite_and_lower_the_loss(
    flavour: str, name: LossName, target: Target
) -> None:
    batch, net = prompt_and_answer(), drafter(target, flavour)
    learning = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-3)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss, _ = learn(net, batch, target, name)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in learning)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(0 <= value < 1e4 for value in losses)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_the_loss_is_that_of_float32_to_two_percent(
    name: LossName, flavour: str, target: Target
) -> None:
    batch, net = prompt_and_answer(), drafter(target, flavour)
    exact, _ = learn(net, batch, target, name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = learn(net, batch, target, name)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02)
    for grad in gradients(net, loss).values():
        assert grad.isfinite().all()


def test_padding_anchors_and_padding_tokens_leave_the_objective_as_it_is(
    flavour: str, target: Target
) -> None:
    plain, net = one_text(), drafter(target, flavour)
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
        loss, means = learn(net, batch, target)
        values = {key: mean.value for key, mean in means.items()}
        results.append((loss.detach(), values, gradients(net, loss)))
    assert float(results[0][0]) > 0.1
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NAMES[:-1])  # the blend of lk_lambda follows its own batch
def test_losses_of_parts_of_a_batch_add_up_to_that_of_the_whole(
    name: LossName, target: Target
) -> None:
    batch, net = prompt_and_answer(), drafter(target)
    whole, means = learn(net, batch, target, name)
    parts = [
        DrafterBatch(**{name: getattr(batch, name)[row : row + 1] for name in TENSORS})
        for row in (0, 1)
    ]
    outcomes = [learn(net, part, target, name) for part in parts]
    weights = [found["loss"].count for _, found in outcomes]
    assert sum(weights) == pytest.approx(means["loss"].count)
    joined = sum(w * float(loss.detach()) for w, (loss, _) in zip(weights, outcomes, strict=True))
    assert joined / sum(weights) == pytest.approx(float(whole.detach()), rel=1e-5)


def lucky(luck: list[list[float]]) -> DrafterBatch:
    return replace(prompt_and_answer(), luck=torch.tensor(luck))


def test_drawn_steps_end_where_luck_exceeds_their_chance(target: Target) -> None:
    # chances 1, DECAY, DECAY**2, ...: each anchor's number of steps is drawn here
    steps = [[1, 3, 0, 2, 0], [STEPS, 1, 2, 1, 3]]  # 0: a padding anchor, or the row has no more
    luck = [[1.0 if n == 0 else DECAY ** (n - 0.5) for n in row] for row in steps]
    batch, net = lucky(luck), drafter(target)
    loss, means = learn(net, batch, target, draw_steps=True)
    losses = []
    for row in (0, 1):
        for anchor, number in enumerate(steps[row]):
            if number == 0 or not batch.anchor_mask[row, anchor]:
                continue
            n, length = int(batch.anchors[row, anchor]), int(batch.lengths[row])
            ids = batch.ids[row, :length]
            taps, logits = teach(target, ids)
            states = net.unroll(
                target.tables.embed(ids)[None], taps[None], torch.tensor([[n]]), num_steps=number
            )
            for step, state in enumerate(states):
                if n + step + 1 < length:
                    wanted = logits[n + step : n + step + 1, USED]
                    losses.append(plain_soft_loss(net.logits(state[0]), wanted, SOFT_CE)[0])
    assert means["loss"].count == len(losses) > 9
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


def test_drawn_steps_teach_what_weighed_steps_teach_on_average(target: Target) -> None:
    batch, net = prompt_and_answer(), drafter(target)
    loss, weighed = learn(net, batch, target)
    expected = gradients(net, loss * weighed["loss"].count)
    found = {name: torch.zeros_like(grad) for name, grad in expected.items()}
    taus, draws = [], 25
    for draw in range(draws):  # evenly through [0, 1); chances are 1, 20 / 25, 16 / 25
        loss, means = learn(net, lucky([[(draw + 0.5) / draws] * 5] * 2), target, draw_steps=True)
        for name, grad in gradients(net, loss * means["loss"].count).items():
            found[name] += grad / draws
        taus.append(float(means["tau"].value))
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < 1e-4 * grad.norm(), name
    assert sum(taus) / draws == pytest.approx(float(weighed["tau"].value), abs=1e-4)


def test_steps_weigh_less_and_less_and_one_in_all() -> None:
    assert step_weights(3, 0.5) == [pytest.approx(w) for w in (4 / 7, 2 / 7, 1 / 7)]
    assert step_weights(4, 1.0) == [0.25] * 4
    assert step_weights(1, 0.8) == [1.0]


def configured(**changes: Any) -> ARDrafterTask:
    """The section of the base configuration, with changes."""
    config = OmegaConf.create({"ar_drafter": {**OmegaConf.load(BASE).ar_drafter, **changes}})
    return build_section(config, "ar_drafter")


@pytest.mark.parametrize("length", [1, 5, 8])
def test_chains_of_one_to_eight_drafts_can_be_configured(length: int) -> None:
    assert configured(draft_length=length).draft_length == length


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("draft_length", 0, r"draft_length is 0: it must lie in 1\.\.8"),
        ("draft_length", 9, r"draft_length is 9: it must lie in 1\.\.8"),
        ("step_decay", 0.0, r"step_decay is 0\.0"),
        ("step_decay", 1.1, r"step_decay is 1\.1"),
        ("kl_scale", 2.0, r"kl_scale is 2\.0"),
        # In tests another checker is first, which names the parameter on a later line.
        ("loss", "mse", "Type-check error"),
        ("fc_norm", "yes", "Type-check error"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"section ar_drafter: .*{message}"):
        configured(**{field: value})
