from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests.fakes import ODD_SHAPE, tiny_ar, tiny_diffusion
from tests.tiny_training import NextToken, Training, config
from whiflash_infer.errors import UserError
from whiflash_infer.nets.ar import ARDrafter
from whiflash_infer.nets.diffusion import DiffusionDrafter
from whiflash_train import runner


@pytest.mark.parametrize("make", [tiny_ar, tiny_diffusion])
@pytest.mark.parametrize(
    ("requested", "backend", "told"),
    [("auto", "eager", "eager, on a CPU"), ("sdpa", "sdpa", "sdpa, as asked")],
)
def test_a_drafter_trains_with_the_backend_that_one_line_tells(
    requested: str,
    backend: str,
    told: str,
    make: Callable[..., ARDrafter | DiffusionDrafter],
    tmp_path: Path,
) -> None:
    net = make(ODD_SHAPE)
    trainee = Training(folder=tmp_path, net=net).trainee()
    runner._choose_attention(config(f"trainer.attention={requested}"), trainee)
    assert net.attention == backend
    assert trainee.facts["attention"] == told


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("flash", "trainer.attention: 'flash' is none of auto, eager, sdpa, flex"),
        ("flex", "trainer.attention: flex trains on GPUs alone: take auto, eager or sdpa"),
    ],
)
def test_a_backend_that_cannot_train_here_is_told_with_those_that_can(
    requested: str, message: str, tmp_path: Path
) -> None:
    trainee = Training(folder=tmp_path, net=tiny_ar(ODD_SHAPE)).trainee()
    with pytest.raises(UserError, match=message):
        runner._choose_attention(config(f"trainer.attention={requested}"), trainee)


def test_what_has_no_such_attention_is_left_alone(tmp_path: Path) -> None:
    net: nn.Module = NextToken()
    trainee = Training(folder=tmp_path, net=net).trainee()
    runner._choose_attention(config("trainer.attention=sdpa"), trainee)
    assert not hasattr(net, "attention")
    assert trainee.facts == {}
