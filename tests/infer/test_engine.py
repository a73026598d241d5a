"""Greedy answers against Hugging Face, and the scripted arms that tests of the engine share."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

from tests.fakes import TAP_SIZE, TAPS, built_target, small_config, tiny_ar, tiny_diffusion
from whiflash_infer.cache import KVCache, make_span
from whiflash_infer.drafters.ar import ARArm, CachedAR
from whiflash_infer.drafters.base import Arm, Drafter, Drafts, DrawDrafts, shortened
from whiflash_infer.drafters.diffusion import CachedDiffusion, DiffusionArm
from whiflash_infer.engine import RoutedDecoder, decode_rounds
from whiflash_infer.errors import UserError
from whiflash_infer.options import GenerationOptions
from whiflash_infer.routing.policies import EntropyPolicy, Policy, RandomPolicy, StaticPolicy
from whiflash_infer.sequence import Texts
from whiflash_infer.target import Target
from whiflash_infer.trees import DraftTree, chain
from whiflash_infer.types import Generation

NO_STOPS: frozenset[int] = frozenset()
ARMS = ("plain", "ar", "ar_tree", "diffusion", "diffusion_tree")


# --- Scripted arms -----------------------------------------------------------------------------


class TextDrafter(Drafter):
    """Its entries are the tokens behind, and so show whether they follow the right text."""

    def __init__(self) -> None:
        self.kv = KVCache(1)

    def _follow(
        self, texts: Texts, rows: Sequence[int], starts: Sequence[int], width: int, *, full: bool
    ) -> None:
        ids = texts.ids(rows, [start + 1 for start in starts], width)
        entries = ids.float()[:, None, :, None]
        self.kv.write(0, entries, entries, make_span(rows, starts, width, texts.device))


class ScriptedChain:
    """Drafts the text that it knows, with some tokens spoilt: every accepted length occurs.

    known: whole texts, prompt and answer. Behind a text that it does not know it guesses.
    """

    can_draw = False

    def __init__(
        self,
        known: Sequence[Sequence[int]] = (),
        *,
        max_draft: int = 4,
        error_rate: float = 0.0,
        seed: int = 0,
        vocabulary: int = 261,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafter = TextDrafter() if drafter is None else drafter
        self.max_draft = self.max_nodes = max_draft
        self.error_rate = error_rate
        self.vocabulary = vocabulary
        self._known = [list(text) for text in known]
        self._random = random.Random(seed)

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        assert draw is None
        paths = [
            [self._spoilt(token) for token in self._ahead(texts, row, max(num_draft))]
            for row in rows
        ]
        tree = shortened(chain(torch.tensor(paths)), num_draft)
        return Drafts(tree, torch.ones(len(rows), dtype=torch.bool))

    def _spoilt(self, token: int) -> int:
        is_spoilt = self._random.random() < self.error_rate
        return (token + 1) % self.vocabulary if is_spoilt else token

    def _ahead(self, texts: Texts, row: int, count: int) -> list[int]:
        """What follows in the text that this row has the beginning of."""
        assert self.drafter.lag(texts, row) == 0
        ids = texts.ids([row], [0], texts.lengths[row])[0].tolist()
        found = [text for text in self._known if text[: len(ids)] == ids]
        ahead = found[0][len(ids) : len(ids) + count] if found else []
        return ahead + [self._random.randrange(self.vocabulary) for _ in range(count - len(ahead))]


class ScriptedTree(ScriptedChain):
    """A random tree around the text that it knows: the right token has any rank among its siblings,
    wrong ones have descendants too, and at some depth, drawn by error_rate, the path breaks off."""

    def __init__(
        self,
        known: Sequence[Sequence[int]] = (),
        *,
        max_draft: int = 4,
        num_nodes: int = 12,
        error_rate: float = 0.0,
        seed: int = 0,
        vocabulary: int = 261,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(
            known,
            max_draft=max_draft,
            error_rate=error_rate,
            seed=seed,
            vocabulary=vocabulary,
            drafter=drafter,
        )
        self.max_nodes = num_nodes

    def draft(
        self,
        texts: Texts,
        rows: Sequence[int],
        num_draft: Sequence[int],
        draw: DrawDrafts | None = None,
    ) -> Drafts:
        assert draw is None
        grown = [
            self._grow(self._ahead(texts, row, count))[: self.max_nodes]
            for row, count in zip(rows, num_draft, strict=True)
        ]
        return Drafts(_joined(grown), torch.ones(len(rows), dtype=torch.bool))

    def _grow(self, path: Sequence[int]) -> list[tuple[int, int, int]]:
        """Nodes as parent, token and depth."""
        nodes: list[tuple[int, int, int]] = []
        level = [(-1, True)]  # nodes of the level above, and whether they lie on the path
        for depth, right in enumerate(path, start=1):
            below = []
            for parent, is_right in level:
                for token in self._children(right, is_right):
                    below.append((len(nodes), is_right and token == right))
                    nodes.append((parent, token, depth))
            level = below
        return nodes

    def _children(self, right: int, is_right: bool) -> list[int]:
        if not is_right:
            return self._random.sample(range(self.vocabulary), self._random.randint(0, 1))
        children = self._random.sample(range(self.vocabulary), self._random.randint(1, 3))
        if self._random.random() < self.error_rate:
            return [token for token in children if token != right] or [(right + 1) % 2]
        if right not in children:
            children[self._random.randrange(len(children))] = right
        return children


def _joined(rows: Sequence[Sequence[tuple[int, int, int]]]) -> DraftTree:
    width = max(len(nodes) for nodes in rows)
    padded = torch.tensor([[*nodes, *[(-1, 0, 1)] * (width - len(nodes))] for nodes in rows])
    parents, ids, depths = padded.unbind(-1)
    counts = torch.tensor([len(nodes) for nodes in rows])
    return DraftTree(ids, parents, depths, counts, is_chain=False)


def scripted(
    known: Sequence[Sequence[int]], *, seed: int = 0, error_rate: float = 0.0, vocabulary: int = 261
) -> dict[str, Arm]:
    """One arm of every kind; as with real drafters, chain and tree share one."""
    drafters = TextDrafter(), TextDrafter()
    arms: dict[str, Arm] = {}
    for index, (name, kind, max_draft) in enumerate(
        [
            ("ar", ScriptedChain, 4),
            ("ar_tree", ScriptedTree, 4),
            ("diffusion", ScriptedChain, 7),
            ("diffusion_tree", ScriptedTree, 6),
        ]
    ):
        arms[name] = kind(
            known,
            max_draft=max_draft,
            error_rate=error_rate,
            seed=seed + index,
            vocabulary=vocabulary,
            drafter=drafters[index // 2],
        )
    return arms


def real_arms(target: Target) -> dict[str, Arm]:
    """Arms of tiny drafters with random weights."""
    shape, size = target.drafter_shape, TAP_SIZE if target.name == "tiny" else 1.0
    ar = CachedAR(tiny_ar(shape, tap_size=size), target.tables)
    diffusion = CachedDiffusion(tiny_diffusion(shape), target.tables)
    return {
        "ar": ARArm(ar, draft_length=4),
        "ar_tree": ARArm(ar, draft_length=4, top_k=3, num_nodes=10),
        "diffusion": DiffusionArm(diffusion),
        "diffusion_tree": DiffusionArm(diffusion, num_nodes=9),
    }


# --- What is expected --------------------------------------------------------------------------


@functools.cache
def untouched(target: Target) -> nn.Module:
    """The same weights in a model as Hugging Face makes it, with its plain attention."""
    model = target.model
    copied = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="eager"
    )
    copied.load_state_dict(model.state_dict())
    copied.generation_config = copy.deepcopy(model.generation_config)
    return copied.eval().requires_grad_(False)


@functools.cache
def _generated(target: Target, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    output = untouched(target).generate(  # pyright: ignore
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False
    )
    return tuple(output[0, len(prompt) :].tolist())


def huggingface_greedy(target: Target, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return list(_generated(target, tuple(prompt), num_tokens))


def prompt_of(length: int, *, vocabulary: int = 261) -> list[int]:
    return [5 + (7 * i + 3 * length) % (vocabulary - 6) for i in range(length)]


def greedy(max_new_tokens: int, *, stop_ids: frozenset[int] | None = None) -> GenerationOptions:
    return GenerationOptions(max_new_tokens=max_new_tokens, stop_ids=stop_ids)


def texts_of(results: Sequence[Generation]) -> list[list[int]]:
    return [result.output_ids.tolist() for result in results]


POLICIES: list[Policy] = [
    *[StaticPolicy(arm) for arm in ARMS],
    EntropyPolicy(1.5),
    EntropyPolicy(1.5, below="diffusion_tree", above="ar_tree"),
    RandomPolicy(3),
]
POLICY_NAMES = [*ARMS, "entropy", "entropy between trees", "random"]


# --- The answer is the target's own ------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 17, 90])
@pytest.mark.parametrize("policy", POLICIES, ids=POLICY_NAMES)
def test_greedy_output_equals_huggingface_generate(
    policy: Policy, length: int, target: Target
) -> None:
    prompt = prompt_of(length)
    result = RoutedDecoder(target, real_arms(target), policy).answer(prompt, greedy(24))
    assert result.output_ids.tolist() == huggingface_greedy(target, prompt, 24)
    assert not result.fallbacks


@pytest.mark.parametrize("max_rows", [8, 3])
@pytest.mark.parametrize("policy", POLICIES, ids=POLICY_NAMES)
def test_a_batch_of_unlike_lengths_equals_huggingface_generate_of_each(
    policy: Policy, max_rows: int, target: Target
) -> None:
    prompts = [prompt_of(length) for length in (1, 90, 2, 17, 5, 40, 3, 33)]
    results = RoutedDecoder(target, real_arms(target), policy).generate(
        prompts, greedy(16), max_rows=max_rows
    )
    assert texts_of(results) == [huggingface_greedy(target, prompt, 16) for prompt in prompts]
    assert not any(result.fallbacks for result in results)


@pytest.mark.parametrize("error_rate", [0.0, 0.3])
@pytest.mark.parametrize("arm", ARMS)
def test_right_and_spoilt_drafts_give_the_same_output(
    arm: str, error_rate: float, target: Target
) -> None:
    prompts = [prompt_of(length) for length in (4, 19, 1)]
    expected = [huggingface_greedy(target, prompt, 40) for prompt in prompts]
    known = [p + e for p, e in zip(prompts, expected, strict=True)]
    arms = scripted(known, error_rate=error_rate)
    results = RoutedDecoder(target, arms, StaticPolicy(arm)).generate(prompts, greedy(40))
    assert texts_of(results) == expected
    if arm != "plain":
        assert sum(r.accepted for result in results for r in result.rounds) > 40


WINDOW = 12


@functools.cache
def sliding_target(family: str) -> Target:
    """A window that is smaller than the texts: every other layer's, or that of all layers."""
    kinds = {"gemma 3": Gemma3TextConfig, "mistral": MistralConfig}
    config = small_config(kinds[family], 6)
    config.sliding_window = WINDOW
    if family == "gemma 3":
        config.layer_types = ["sliding_attention", "full_attention"] * 3
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        config.rope_parameters = {"sliding_attention": rope, "full_attention": dict(rope)}
    return built_target(config, TAPS)


@pytest.mark.parametrize("family", ["gemma 3", "mistral"])
@pytest.mark.parametrize("policy", POLICIES, ids=POLICY_NAMES)
def test_targets_with_sliding_windows_answer_like_huggingface(policy: Policy, family: str) -> None:
    target = sliding_target(family)
    # Some start beyond the window's edge, some cross it on the way.
    prompts = [prompt_of(length) for length in (1, WINDOW - 2, WINDOW, 3 * WINDOW, 7)]
    expected = [huggingface_greedy(target, prompt, 24) for prompt in prompts]
    decoder = RoutedDecoder(target, real_arms(target), policy)
    assert texts_of(decoder.generate(prompts, greedy(24), max_rows=5)) == expected
    assert decoder.answer(prompts[1], greedy(24)).output_ids.tolist() == expected[1]


@pytest.mark.parametrize("family", ["gemma 3", "mistral"])
@pytest.mark.parametrize("arm", ["diffusion", "diffusion_tree"])
def test_accepted_drafts_cross_the_edge_of_a_window(arm: str, family: str) -> None:
    target = sliding_target(family)
    prompts = [prompt_of(length) for length in (1, WINDOW - 3, 2 * WINDOW)]
    expected = [huggingface_greedy(target, prompt, 30) for prompt in prompts]
    known = [p + e for p, e in zip(prompts, expected, strict=True)]
    decoder = RoutedDecoder(target, scripted(known, error_rate=0.1), StaticPolicy(arm))
    results = decoder.generate(prompts, greedy(30))
    assert texts_of(results) == expected
    assert sum(r.accepted for result in results for r in result.rounds) > 20


# --- One answer and its rounds -----------------------------------------------------------------


@pytest.fixture
def known(target: Target) -> list[int]:
    """A prompt of three tokens, and what follows."""
    return [10, 20, 30, *huggingface_greedy(target, [10, 20, 30], 40)]


def test_perfect_drafts_commit_one_token_more_than_were_drafted(
    target: Target, known: list[int]
) -> None:
    decoder = RoutedDecoder(target, scripted([known]), StaticPolicy("ar"))
    result = decoder.answer(known[:3], greedy(21, stop_ids=NO_STOPS))
    assert [(r.num_draft, r.accepted, r.committed) for r in result.rounds] == [(4, 4, 5)] * 4


def test_rounds_and_their_tokens_make_up_the_output(target: Target, known: list[int]) -> None:
    arms = scripted([known], seed=5, error_rate=0.4)
    result = RoutedDecoder(target, arms, RandomPolicy(1)).answer(known[:3], greedy(20))
    pieces = [ids.tolist() for _, ids in decode_rounds(result)]
    assert [known[3], *(i for piece in pieces for i in piece)] == result.output_ids.tolist()
    positions = [r.position for r in result.rounds]
    ends = [r.position + r.committed for r in result.rounds]
    assert positions[0] == 3
    assert positions[1:] == ends[:-1]


@pytest.mark.parametrize("arm", ARMS)
def test_the_answer_of_one_prompt_does_not_depend_on_the_one_before(
    arm: str, target: Target
) -> None:
    decoder = RoutedDecoder(target, real_arms(target), StaticPolicy(arm))
    alone = decoder.answer([9, 8, 7], greedy(12))
    decoder.generate([[50, 60, 70, 80], [5]], greedy(30))
    again = decoder.answer([9, 8, 7], greedy(12))
    assert [r.accepted for r in again.rounds] == [r.accepted for r in alone.rounds]
    assert again.output_ids.tolist() == alone.output_ids.tolist()


def test_storage_that_has_to_grow_keeps_answers_as_they_are(target: Target) -> None:
    decoder = RoutedDecoder(target, real_arms(target), RandomPolicy(0))
    for length, max_rows in ((3, 1), (90, 2), (5, 4), (200, 3)):
        prompts = [prompt_of(length + extra) for extra in range(4)]
        results = decoder.generate(prompts, greedy(10), max_rows=max_rows)
        assert texts_of(results) == [huggingface_greedy(target, p, 10) for p in prompts]


# --- Impossible requests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5] * 2000, r"2000 tokens \+ max_new_tokens 100 = 2100 exceeds the target's .* of 2048"),
    ],
)
def test_impossible_prompts_are_refused_before_decoding(
    prompt: list[int], message: str, target: Target
) -> None:
    with pytest.raises(UserError, match=message):
        RoutedDecoder(target, {}, StaticPolicy("plain")).answer(prompt, greedy(100))


def test_a_batch_names_the_prompt_that_is_impossible_and_decodes_none(target: Target) -> None:
    decoder = RoutedDecoder(target, {}, StaticPolicy("plain"))
    with pytest.raises(UserError, match=r"prompt 1: .* exceeds the target's context"):
        decoder.stream_all([[5], [5] * 2048, [6]], greedy(1))


def test_a_prompt_and_answer_may_fill_the_context_to_the_last_token() -> None:
    target = built_target(small_config(LlamaConfig, 6), TAPS)  # a context of 256
    prompt = prompt_of(236)
    for arm in ("ar_tree", "diffusion"):
        decoder = RoutedDecoder(target, real_arms(target), StaticPolicy(arm))
        result = decoder.answer(prompt, greedy(20))
        assert result.output_ids.tolist() == huggingface_greedy(target, prompt, 20)
        with pytest.raises(UserError, match="257 exceeds the target's context of 256"):
            decoder.answer(prompt, greedy(21))


def test_options_have_to_match_prompts_and_rows_have_to_exist(target: Target) -> None:
    decoder = RoutedDecoder(target, {}, StaticPolicy("plain"))
    with pytest.raises(UserError, match="2 prompts, but options for 1"):
        decoder.generate([[5], [6]], [greedy(3)])
    with pytest.raises(UserError, match="max_rows is 0"):
        decoder.generate([[5]], greedy(3), max_rows=0)
    assert decoder.generate([], greedy(3)) == []


def test_the_first_token_comes_from_the_prompt_and_needs_no_round(target: Target) -> None:
    prompt: list[int] = [10, 20, 30]
    result = RoutedDecoder(target, {}, StaticPolicy("plain")).answer(prompt, greedy(1))
    logits: Tensor = untouched(target)(torch.tensor([prompt])).logits
    assert result.output_ids.tolist() == [int(logits[0, -1].argmax())]
    assert result.rounds == []
    assert result.finish_reason == "length"
