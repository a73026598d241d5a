from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fakes import (
    FLAVOURS,
    ODD_SHAPE,
    plain_attention,
    plain_mlp,
    plain_norm,
    plain_rope,
    random_rows,
    tiny_ar,
)
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.sequence import Texts
from whiflash_infer.target import TargetTables

LENGTH, STEPS, ANCHOR = 14, 4, 6
TAP = ODD_SHAPE.target_hidden_size
WIDTH = 3 * TAP


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return request.param


def unrolled(
    net: ARDrafter, embeds: Tensor, taps: Tensor, anchors: list[int], steps: int = STEPS
) -> Tensor:
    """[step, anchor, channel] for one sequence."""
    outputs = net.unroll(embeds[None], taps[None], torch.tensor([anchors]), num_steps=steps)
    return torch.stack([hidden[0] for hidden in outputs])


def decoded(net: ARDrafter, embeds: Tensor, taps: Tensor, anchor: int, steps: int) -> Tensor:
    """Logits of the decoder's chain, which is made to go on with the text's own tokens."""
    table = F.pad(embeds, (0, 0, 0, ODD_SHAPE.vocab_size - LENGTH))  # token i stands at place i
    drafter, texts = (
        CachedAR(net, TargetTables(table, table, None)),
        Texts(embeds.device, keep_taps=True),
    )
    for storage in (drafter, texts):
        storage.reserve(1, LENGTH + STEPS)
    texts.begin(0, torch.arange(anchor), taps[:anchor], torch.tensor(anchor))
    drafter.catch_up(texts, [0])
    seen: list[Tensor] = []

    def forced(logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        seen.append(logits[0, net.vocabulary()])
        return torch.tensor([anchor + 1 + step]), logits.softmax(-1)

    ARArm(drafter, draft_length=steps).draft(texts, [0], [steps], forced)
    return torch.stack(seen)


def eagle3_in_plain_loops(
    net: ARDrafter, embeds: Tensor, taps: Tensor, anchor: int, steps: int
) -> Tensor:
    weights, options = dict(net.named_parameters()), net.config
    shape, attention = options.shape, "midlayer.self_attn"
    eps, theta = shape.rms_norm_eps, shape.rope_parameters["rope_theta"]

    def project(embed: Tensor, hidden: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        left = plain_norm(embed, weights["midlayer.input_layernorm.weight"], eps)
        right = plain_norm(hidden, weights["midlayer.hidden_norm.weight"], eps)
        joined = torch.cat([left, right])
        q, k, v = (
            (weights[f"{attention}.{name}.weight"] @ joined).reshape(-1, shape.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if options.qk_norm:
            q = plain_norm(q, weights[f"{attention}.q_norm.weight"], eps)
            k = plain_norm(k, weights[f"{attention}.k_norm.weight"], eps)
        return plain_rope(q, position, theta), plain_rope(k, position, theta), v

    def fuse(features: Tensor) -> Tensor:
        if options.fc_norm:
            parts = [features[start : start + TAP] for start in range(0, WIDTH, TAP)]
            normed = [
                plain_norm(part, weights[f"fc_norm.{i}.weight"], eps)
                for i, part in enumerate(parts)
            ]
            features = torch.cat(normed)
        return weights["fc.weight"] @ features

    first_row = anchor - 1
    fused = [fuse(taps[row]) for row in range(anchor)]
    rows = [project(embeds[row + 1], fused[row], row) for row in range(anchor)]
    hidden, outputs = fused[first_row], []
    for step in range(steps):
        if step > 0:
            rows.append(project(embeds[anchor + step], hidden, first_row + step))
        query = rows[-1][0]
        attended = plain_attention(query, [k for _, k, _ in rows], [v for _, _, v in rows])
        residual = hidden + weights[f"{attention}.o_proj.weight"] @ attended
        normed = plain_norm(residual, weights["midlayer.post_attention_layernorm.weight"], eps)
        hidden = residual + plain_mlp(normed, weights, "midlayer.mlp")
        if options.norm_output:
            hidden = plain_norm(hidden, weights["norm.weight"], eps)
        outputs.append(hidden)
    return torch.stack(outputs)


def plain_logits(net: ARDrafter, states: Tensor) -> Tensor:
    """The head reads what is normed once."""
    if not net.config.norm_output:
        states = plain_norm(states, net.norm.weight, ODD_SHAPE.rms_norm_eps)
    return states @ net.lm_head.weight.T


def inputs(seed: int, flavour: str) -> tuple[ARDrafter, Tensor, Tensor]:
    embeds = random_rows(LENGTH, ODD_SHAPE.hidden_size, seed=seed)
    net = tiny_ar(ODD_SHAPE, seed=seed, flavour=flavour)
    return net, embeds, random_rows(LENGTH, WIDTH, seed=seed + 100)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_training_unroll_equals_cached_decoding_of_the_same_tokens(
    seed: int, flavour: str
) -> None:
    net, embeds, taps = inputs(seed, flavour)
    last = LENGTH - STEPS
    anchors = [1, *torch.randperm(last, generator=torch.Generator().manual_seed(seed))[:4] + 1]
    outputs = unrolled(net, embeds, taps, [int(a) for a in anchors])
    for column, anchor in enumerate(anchors):
        expected = decoded(net, embeds, taps, int(anchor), STEPS)
        found = net.logits(outputs[:, column])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("anchor", [1, 2, 7, LENGTH - STEPS])
def test_the_unroll_equals_the_eagle3_layer_written_as_plain_loops(
    anchor: int, flavour: str
) -> None:
    net, embeds, taps = inputs(3, flavour)
    expected = eagle3_in_plain_loops(net, embeds, taps, anchor, STEPS)
    outputs = unrolled(net, embeds, taps, [3, anchor])[:, 1]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-4)
    logits = net.logits(outputs)
    torch.testing.assert_close(logits, plain_logits(net, expected), rtol=1e-4, atol=1e-4)


def test_a_step_ignores_tokens_after_the_one_it_is_fed(flavour: str) -> None:
    net, embeds, taps = inputs(5, flavour)
    before = unrolled(net, embeds, taps, [ANCHOR])
    for step in range(STEPS):
        later = embeds.clone()
        later[ANCHOR + step + 1 :] += 1.0
        after = unrolled(net, later, taps, [ANCHOR])
        assert torch.equal(after[: step + 1], before[: step + 1])


def test_the_token_fed_at_a_step_changes_that_step_and_all_after_it_only(
    flavour: str,
) -> None:
    net, embeds, taps = inputs(6, flavour)
    before = unrolled(net, embeds, taps, [ANCHOR])
    for step in range(STEPS):
        other = embeds.clone()
        other[ANCHOR + step] += 1.0
        changed = (unrolled(net, other, taps, [ANCHOR]) - before).abs().amax((1, 2)) > 1e-3
        assert changed.tolist() == [k >= step for k in range(STEPS)]


def test_features_from_the_anchor_on_change_nothing(flavour: str) -> None:
    net, embeds, taps = inputs(7, flavour)
    later = taps.clone()
    later[ANCHOR:] += 1.0
    assert torch.equal(
        unrolled(net, embeds, later, [ANCHOR]), unrolled(net, embeds, taps, [ANCHOR])
    )


@pytest.mark.parametrize("row", range(ANCHOR))
def test_every_earlier_feature_and_the_token_after_it_change_every_step(
    row: int, flavour: str
) -> None:
    net, embeds, taps = inputs(8, flavour)
    before = unrolled(net, embeds, taps, [ANCHOR])
    other_taps, other_embeds = taps.clone(), embeds.clone()
    other_taps[row] += 1.0
    other_embeds[row + 1] += 1.0
    for after in (
        unrolled(net, embeds, other_taps, [ANCHOR]),
        unrolled(net, other_embeds, taps, [ANCHOR]),
    ):
        assert ((after - before).abs().amax((1, 2)) > 1e-4).all()


def test_an_anchor_does_not_notice_other_anchors_or_other_rows_of_the_batch(
    flavour: str,
) -> None:
    net, embeds, taps = inputs(9, flavour)
    alone = unrolled(net, embeds, taps, [ANCHOR])[:, 0]
    both_embeds, both_taps = torch.stack([embeds + 1, embeds]), torch.stack([taps - 1, taps])
    anchors = torch.tensor([[9, 9, 1, 3], [1, 5, ANCHOR, 7]])
    together = net.unroll(both_embeds, both_taps, anchors, num_steps=STEPS)
    packed = torch.stack([hidden[1, 2] for hidden in together])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_gradients_of_three_steps_equal_those_of_the_plain_loops_in_float64(
    flavour: str,
) -> None:
    net, embeds, taps = inputs(10, flavour)
    net = net.double().requires_grad_(True)
    probe = random_rows(3, 2, net.config.draft_vocab_size, seed=11).double()
    anchors = [3, ANCHOR]

    def gradients(by_loops: bool) -> dict[str, Tensor]:
        net.zero_grad()
        e, t = embeds.double().requires_grad_(), taps.double().requires_grad_()
        if by_loops:
            chains = [eagle3_in_plain_loops(net, e, t, anchor, 3) for anchor in anchors]
            hidden = torch.stack(chains, dim=1)
        else:
            hidden = unrolled(net, e, t, anchors, steps=3)
        logits = plain_logits(net, hidden) if by_loops else net.logits(hidden)
        (logits * probe).sum().backward()
        found = {name: p.grad for name, p in net.named_parameters()} | {"e": e.grad, "t": t.grad}
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    found, expected = gradients(by_loops=False), gradients(by_loops=True)
    assert len(found) == len(expected) == len(list(net.parameters())) + 2
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_three_steps_pass_gradcheck_in_float64(flavour: str) -> None:
    net, embeds, taps = inputs(12, flavour)
    net = net.double().requires_grad_(True)
    weights = [net.midlayer.self_attn.k_proj.weight, net.norm.weight]

    def logits(e: Tensor, t: Tensor, *_: Tensor) -> Tensor:
        return net.logits(unrolled(net, e, t, [1, 3], steps=3))

    leaves = [part[:7].double().requires_grad_() for part in (embeds, taps)]
    assert torch.autograd.gradcheck(logits, (*leaves, *weights), fast_mode=True)


def test_d2t_is_the_offset_to_the_target_token_and_t2d_marks_the_drafted_ones() -> None:
    used = torch.tensor([2, 3, 7, 11, 30, 39])
    net = tiny_ar(ODD_SHAPE, used=torch.arange(6))
    net.set_vocabulary(used[torch.tensor([4, 0, 5, 2, 1, 3])])
    assert net.d2t.tolist() == [2, 2, 5, 8, 26, 34]
    assert [j + int(net.d2t[j]) for j in range(6)] == used.tolist()
    assert net.vocabulary().tolist() == used.tolist()
    assert int(net.t2d.sum()) == 6
    assert torch.arange(ODD_SHAPE.vocab_size)[net.t2d].tolist() == used.tolist()


def test_gathering_with_t2d_gives_the_logits_in_draft_order() -> None:
    used = torch.tensor([2, 3, 7, 11, 30, 39])
    net = tiny_ar(ODD_SHAPE, used=used)
    whole = random_rows(5, ODD_SHAPE.vocab_size, seed=1)
    assert torch.equal(whole[:, net.t2d], whole[:, net.vocabulary()])
    assert [int(whole[:, net.t2d][0, j]) for j in range(6)] == [int(whole[0, u]) for u in used]


def test_the_whole_vocabulary_is_drafted_by_its_own_ids() -> None:
    net = tiny_ar(ODD_SHAPE, used=torch.arange(ODD_SHAPE.vocab_size))
    assert net.d2t.eq(0).all()
    assert net.t2d.all()


@pytest.mark.parametrize("ids", [[1, 5, 5], [1, 5], [1, 5, 6, 7]])
def test_a_vocabulary_with_duplicates_or_of_another_size_is_refused(ids: list[int]) -> None:
    net = tiny_ar(ODD_SHAPE, used=torch.tensor([2, 3, 7]))
    with pytest.raises(ValueError, match="3 distinct ids"):
        net.set_vocabulary(torch.tensor(ids))
