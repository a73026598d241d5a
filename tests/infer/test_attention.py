from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex

from tests.fakes import ODD_SHAPE, TAPS, plain_attention, random_rows, tiny_ar, tiny_diffusion
from whiflash_infer.nets import attention
from whiflash_infer.nets.attention import BACKENDS, Backend, SharedAndOwn, choose_backend

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")
B, A, S, T, H, G, D = 2, 3, 2, 7, 4, 2, 8
MASKS = ("by anchor", "by query")


@pytest.fixture(autouse=True)
def flex_gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch refuses them there, since its compiled kernel has none; the plain operator has."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    yield
    torch._dynamo.reset()


def tensors(num_own: int, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, shared keys and values, own keys and values."""
    shapes = [(B, A, S, H, D), *[(B, T, G, D)] * 2, *[(B, A, num_own, G, D)] * 2]
    made = [random_rows(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    return [tensor.requires_grad_() for tensor in made]


def some_visible(kind: str) -> Tensor:
    """Row 0's anchors see 1, 4 and all of the shared keys; row 1's first sees holes."""
    visible = torch.arange(T) < torch.tensor([[1, 4, T], [5, 2, 6]])[..., None]
    visible[1, 0, [0, 2]] = False
    if kind == "by anchor":
        return visible
    by_query = visible[:, :, None].repeat(1, 1, S, 1)
    by_query[:, :, 1, 1] = False
    return by_query


def in_plain_loops(visible: Tensor, inputs: list[Tensor]) -> Tensor:
    """Every query alone, over a list of the keys that it sees."""
    queries, keys, values, own_keys, own_values = inputs
    rows = []
    for b, a, s in torch.cartesian_prod(torch.arange(B), torch.arange(A), torch.arange(S)):
        seen = visible[b, a] if visible.ndim == 3 else visible[b, a, s]
        picked = [[*x[b, seen], *own[b, a]] for x, own in ((keys, own_keys), (values, own_values))]
        none = torch.zeros(H * D, dtype=queries.dtype)
        rows.append(plain_attention(queries[b, a, s], *picked) if picked[0] else none)
    return torch.stack(rows).view(B, A, S, H * D)


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    pull = random_rows(*output.shape, seed=9).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, pull, materialize_grads=True)]


def assert_alike(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("num_own", [0, 1, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_and_gradients_equal_those_of_every_query_alone(
    backend: Backend, num_own: int, kind: str
) -> None:
    inputs, visible = tensors(num_own), some_visible(kind)
    found = with_gradients(SharedAndOwn(visible, backend)(*inputs), inputs)
    assert_alike(found, with_gradients(in_plain_loops(visible, inputs), inputs))


@pytest.mark.parametrize("num_own", [0, 3])
def test_the_eager_backend_equals_the_plain_loops_to_1e_12_in_float64(num_own: int) -> None:
    inputs, visible = tensors(num_own, dtype=torch.float64), some_visible("by query")
    found = with_gradients(SharedAndOwn(visible, "eager")(*inputs), inputs)
    assert_alike(found, with_gradients(in_plain_loops(visible, inputs), inputs), 1e-12)


def test_taken_apart_into_the_smallest_parts_the_eager_backend_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs, visible = tensors(3), some_visible("by query")
    whole = with_gradients(SharedAndOwn(visible, "eager")(*inputs), inputs)
    monkeypatch.setattr(attention, "_CPU_SCORES", 1)
    assert_alike(with_gradients(SharedAndOwn(visible, "eager")(*inputs), inputs), whole)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("num_own", [0, 3])
def test_the_whole_products_of_compiled_graphs_equal_the_loop_over_parts(
    num_own: int, kind: str
) -> None:
    # The function itself: under the checks of shapes that tests run with, no graph is whole.
    inputs, visible = tensors(num_own), some_visible(kind)
    hidden = ~(visible if visible.ndim == 4 else visible[:, :, None])
    queries, keys, values, own_keys, own_values = inputs
    whole = attention._whole(queries, keys, values, own_keys, own_values, hidden)
    found = with_gradients(whole.flatten(3), inputs)
    assert_alike(found, with_gradients(SharedAndOwn(visible, "eager")(*inputs), inputs))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("num_own", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_that_sees_no_shared_key_is_left_with_its_own_and_without_any_with_zero(
    backend: Backend, num_own: int, kind: str
) -> None:
    inputs, visible = tensors(num_own), some_visible(kind)
    visible[0, 1] = visible[1, 2] = False
    found = with_gradients(SharedAndOwn(visible, backend)(*inputs), inputs)
    assert_alike(found, with_gradients(in_plain_loops(visible, inputs), inputs))
    if num_own == 0:
        assert not found[0][0, 1].any()
        assert not found[1][0, 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mask_serves_every_number_of_own_keys(backend: Backend) -> None:
    visible = some_visible("by anchor")
    attend = SharedAndOwn(visible, backend)
    for num_own in (0, 1, 2, 1):
        inputs = tensors(num_own)
        assert_alike([attend(*inputs)], [in_plain_loops(visible, inputs)])


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_under_autocast_products_are_rounded_and_gradients_stay_near(backend: Backend) -> None:
    inputs, visible = tensors(3), some_visible("by anchor")
    exact = with_gradients(in_plain_loops(visible, inputs), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = SharedAndOwn(visible, backend)(*inputs)
    assert output.dtype == torch.bfloat16
    found = with_gradients(output.float(), inputs)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_a_batch_with_padding_anchors_are_the_same_through_every_backend(
    window: int | None,
) -> None:
    """The second row is shorter: its features end at 6, and its last two anchors are padding."""
    anchors = torch.tensor([[2, 5, 9], [4, 1, 1]])
    taps = random_rows(2, 12, len(TAPS) * ODD_SHAPE.target_hidden_size, seed=1)
    taps[1, 6:] = 0.0
    embeds = random_rows(2, 3, 5, ODD_SHAPE.hidden_size, seed=2)
    found = {}
    for backend in BACKENDS:
        net = tiny_diffusion(ODD_SHAPE, sliding_window=window).requires_grad_()
        net.attention = backend
        hidden = net.blocks(embeds, taps, anchors)
        loss = hidden[0].pow(2).sum() + hidden[1, :1].pow(2).sum()
        found[backend] = [hidden, *torch.autograd.grad(loss, list(net.parameters()))]
        assert all(tensor.isfinite().all() for tensor in found[backend])
        alone = net.blocks(embeds[1:, :1], taps[1:, :6], anchors[1:, :1])
        assert_alike([hidden[1, :1]], [alone[0]])
    assert_alike(found["sdpa"], found["eager"], 1e-4)
    assert_alike(found["flex"], found["eager"], 1e-4)


def test_chains_of_a_batch_with_padding_anchors_are_the_same_through_every_backend() -> None:
    anchors = torch.tensor([[2, 5, 9], [4, 1, 1]])
    taps = random_rows(2, 12, len(TAPS) * ODD_SHAPE.target_hidden_size, seed=1)
    embeds = random_rows(2, 12, ODD_SHAPE.hidden_size, seed=2)
    found = {}
    for backend in BACKENDS:
        net = tiny_ar(ODD_SHAPE).requires_grad_()
        net.attention = backend
        states = torch.stack(list(net.unroll(embeds, taps, anchors, num_steps=3)))
        loss = states[:, 0].pow(2).sum() + states[:, 1, :1].pow(2).sum()
        used = [p for name, p in net.named_parameters() if not name.startswith(("norm", "lm_head"))]
        found[backend] = [states, *torch.autograd.grad(loss, used)]
        assert all(tensor.isfinite().all() for tensor in found[backend])
        alone = list(net.unroll(embeds[1:], taps[1:], anchors[1:, :1], num_steps=3))
        assert_alike([states[:, 1, :1]], [torch.stack(alone)[:, 0]])
    assert_alike(found["sdpa"], found["eager"], 1e-4)
    assert_alike(found["flex"], found["eager"], 1e-4)


@torch.no_grad()
def test_thirty_lengths_compile_the_flex_kernel_at_most_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = CompileCounter()
    kernel = torch.compile(torch_flex.flex_attention, backend=counter, dynamic=True)
    monkeypatch.setattr(attention, "flex_attention", kernel)
    generator = torch.Generator().manual_seed(0)
    for seed in range(30):
        anchors, rows, own = torch.randint(2, 40, (3,), generator=generator).tolist()
        shapes = [(B, anchors, S, H, D), *[(B, rows, G, D)] * 2, *[(B, anchors, own, G, D)] * 2]
        inputs = [random_rows(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
        visible = random_rows(B, anchors, rows, seed=seed) > 0
        expected = SharedAndOwn(visible, "eager")(*inputs)
        assert_alike([SharedAndOwn(visible, "flex")(*inputs)], [expected])
    assert 1 <= counter.frame_count <= 3


def test_a_cpu_trains_with_the_eager_backend_and_as_asked_with_sdpa() -> None:
    assert choose_backend(CPU, "auto", head_dim=64).backend == "eager"
    assert choose_backend(CPU, "eager", head_dim=64).backend == "eager"
    assert choose_backend(CPU, "sdpa", head_dim=64).backend == "sdpa"


@pytest.mark.parametrize(
    ("requested", "message"),
    [("flex", "flex trains on GPUs alone"), ("flash", "'flash' is none of auto, eager, sdpa")],
)
def test_a_backend_that_cannot_train_here_is_refused(requested: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_backend(CPU, requested, head_dim=64)


def test_where_flex_fails_sdpa_takes_over_and_the_line_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_flex_problem", lambda *_: "out of resource: shared memory")
    gpu = torch.device("cuda")
    choice = choose_backend(gpu, "auto", head_dim=128)
    assert choice.backend == "sdpa"
    assert choice.reason == "flex does not work here: out of resource: shared memory"
    with pytest.raises(ValueError, match="out of resource"):
        choose_backend(gpu, "flex", head_dim=128)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu_every_backend_equals_the_plain_loops(backend: Backend, kind: str) -> None:
    inputs, visible = tensors(3), some_visible(kind)
    expected = with_gradients(in_plain_loops(visible, inputs), inputs)
    there = [tensor.detach().cuda().requires_grad_() for tensor in inputs]
    output = SharedAndOwn(visible.cuda(), backend)(*there)
    pull = random_rows(*output.shape, seed=9).cuda()
    found = [output, *torch.autograd.grad(output, there, pull)]
    assert_alike([tensor.cpu() for tensor in found], expected, 1e-3)


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_through_no_backend_does_a_block_see_features_from_its_anchor_on(
    backend: Backend, window: int | None
) -> None:
    # A drafter that looked ahead had a low loss from the start, and was accepted nowhere (U28).
    net = tiny_diffusion(ODD_SHAPE, sliding_window=window)
    net.attention = backend
    anchors = torch.tensor([[3, 6]])
    embeds = random_rows(1, 2, 5, ODD_SHAPE.hidden_size, seed=2)
    taps = random_rows(1, 12, len(TAPS) * ODD_SHAPE.target_hidden_size, seed=1)
    before = net.blocks(embeds, taps, anchors)[0, 1]
    for row in range(12):
        other = taps.clone()
        other[:, row] += 1.0
        after = net.blocks(embeds, other, anchors)[0, 1]
        unseen = row >= 6 or (window == 5 and row < 2)  # the anchor itself is the fifth of 2..6
        assert torch.equal(after, before) == unseen
