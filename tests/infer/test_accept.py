from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from whiflash_infer.accept import accept_probs, residual, verify
from whiflash_infer.types import Verdict


def dirichlet(seed: int, *, zeros: int = 0) -> Tensor:
    weights = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights[:zeros] = 0.0
    return weights / weights.sum()


def one_hot(token: int) -> Tensor:
    return torch.eye(8, dtype=torch.float64)[token]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *[(dirichlet(seed), dirichlet(seed + 10)) for seed in range(4)],
        (dirichlet(4), one_hot(5)),
        (dirichlet(5, zeros=3), one_hot(1)),  # a draft that the target never says
        (dirichlet(5, zeros=3), dirichlet(6)),
        (dirichlet(6), dirichlet(7, zeros=5)),
        (one_hot(2), dirichlet(8)),
        (one_hot(2), one_hot(2)),
        (one_hot(2), one_hot(3)),
        (dirichlet(9), dirichlet(9)),
    ],
)
def test_the_emitted_token_is_distributed_as_the_target_whatever_the_draft(
    target: Tensor, draft: Tensor
) -> None:
    drawn = draft.nonzero().flatten()
    rows = (len(drawn), -1)
    keep = accept_probs(target.expand(*rows), draft.expand(*rows), drawn)
    kept = torch.zeros(8, dtype=torch.float64)
    kept[drawn] = draft[drawn] * keep
    rejected = (draft[drawn] * (1.0 - keep)).sum()
    replaced = residual(target, draft)
    assert float(replaced.sum()) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(kept + rejected * replaced, target, rtol=0.0, atol=1e-12)


def test_a_draft_is_kept_with_the_ratio_of_target_to_draft_up_to_one() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    draft = torch.tensor([[0.2, 0.6, 0.2]] * 3)
    keep = accept_probs(target, draft, torch.tensor([0, 1, 2]))
    assert keep.tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert residual(target[0], draft[0]).tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("said", "drafts", "expected"),
    [
        ([4, 1, 6, 2], [5, 1, 6], Verdict(0, 4)),  # a later match counts for nothing
        ([4, 1, 6, 2], [4, 1, 6], Verdict(3, 2)),
        ([4, 1, 6, 2], [4, 3, 6], Verdict(1, 1)),
        ([4, 1, 6, 2], [4, 1, 7], Verdict(2, 6)),
        ([4], [], Verdict(0, 4)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_count_up_to_the_first_that_the_target_would_not_say(
    said: list[int], drafts: list[int], expected: Verdict, temperature: float
) -> None:
    # The target is so sure that sampling at temperature 1 must agree with the greedy choice.
    logits = 1000.0 * torch.eye(8)[said]
    found = verify(
        logits,
        torch.tensor(drafts, dtype=torch.long),
        temperature=temperature,
        generator=torch.Generator().manual_seed(0),
    )
    assert found == expected


@pytest.mark.parametrize(("draft", "count"), [(0, 20_000), (3, 2_000)])
def test_emitted_tokens_follow_the_target_at_its_temperature(draft: int, count: int) -> None:
    # Every row is the same distribution, so all tokens of all rounds are draws from it.
    logits = torch.tensor([3.0, 0.3, -0.5, 0.0, 0.9, -1.0, 0.4, -0.2])
    drafts, temperature = torch.full((12,), draft), 0.8
    generator = torch.Generator().manual_seed(0)
    emitted: list[int] = []
    while len(emitted) < count:
        found = verify(logits.expand(13, 8), drafts, temperature=temperature, generator=generator)
        emitted += [draft] * found.accepted + [found.bonus]
    seen = [emitted[:count].count(token) for token in range(8)]
    powers = [math.exp(float(x) / temperature) for x in logits]
    expected = [count * power / sum(powers) for power in powers]
    assert chisquare(seen, expected).pvalue > 0.001
