from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tests.fakes import random_ids
from tests.serving.fake_engine import (
    FakeEngine,
    FakeModel,
    fake_vllm,
    fake_vllm_config,
    get_forward_context,
    is_forward_context_available,
)
from whiflash_infer.target import Target

NUM_DRAFTS = 3
SYSTEM = random_ids(21, seed=99).tolist()  # what several prompts begin with


class Empty:
    """Drafts nothing, and keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], list[list[int]]]] = []
        self.drafted: list[list[list[int]]] = []

    def load_model(self, model: nn.Module) -> None:
        self.model = model

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: dict[str, Tensor] | None = None,
    ) -> list[list[int]]:
        lengths = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        texts = [token_ids_cpu[row, :length].tolist() for row, length in enumerate(lengths)]
        self.calls.append((sampled_token_ids, texts))
        self.drafted.append([self.draft(text) for text in texts])
        return self.drafted[-1]

    def draft(self, text: list[int]) -> list[int]:
        return []


class Random(Empty):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def draft(self, text: list[int]) -> list[int]:
        return self.rng.integers(0, 200, int(self.rng.integers(NUM_DRAFTS + 1))).tolist()


class Oracle(Empty):
    """Knows how texts go on; of its drafts, those of a place in `wrong` are not so."""

    def __init__(self, texts: Sequence[list[int]], wrong: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.texts, self.wrong = texts, wrong

    def draft(self, text: list[int]) -> list[int]:
        known = next((each for each in self.texts if each[: len(text)] == text), [])
        drafts = known[len(text) : len(text) + NUM_DRAFTS]
        return [(t + 1) % 200 if i in self.wrong else t for i, t in enumerate(drafts)]


class Mixed(Oracle):
    """Right, wrong and half right by turns, and of all lengths."""

    def draft(self, text: list[int]) -> list[int]:
        self.wrong = frozenset({len(text) % 4})
        return super().draft(text)[: 1 + len(text) % NUM_DRAFTS]


def engine_of(target: Target, proposer: Any, **options: Any) -> FakeEngine:
    defaults: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 4,
        "token_budget": 64,
        "max_model_len": 96,
        "num_speculative_tokens": NUM_DRAFTS,
    }
    return FakeEngine(target, proposer, **(defaults | options))


def prompts(number: int, *, shared: int = 0) -> list[list[int]]:
    return [SYSTEM[:shared] + random_ids(5 + 3 * i, seed=i).tolist() for i in range(number)]


PROPOSERS: dict[str, Callable[[Sequence[list[int]]], Empty | None]] = {
    "none": lambda _: None,
    "empty": lambda _: Empty(),
    "random": lambda _: Random(),
    "oracle": Oracle,
    "mixed": Mixed,
}
FEW_BLOCKS = {"num_blocks": 16, "max_model_len": 60}  # enough for one text of that length
SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"token_budget": 9},
    "few blocks": FEW_BLOCKS,
    "few blocks, no prefix caching": {"prefix_caching": False} | FEW_BLOCKS,
    "shuffled": {"shuffle": True},
    "padded": {"pad_to": 8},
    "all": {"token_budget": 11, "shuffle": True, "pad_to": 8} | FEW_BLOCKS,
}


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_outputs_are_hugging_faces_greedy_ones_whoever_drafts(
    target: Target,
    greedy: Callable[[list[int], int], list[int]],
    situation: str,
    proposer: str,
) -> None:
    texts = prompts(6, shared=17)
    expected = {str(i): greedy(text, 16) for i, text in enumerate(texts)}
    whole = [text + expected[str(i)] for i, text in enumerate(texts)]
    engine = engine_of(target, PROPOSERS[proposer](whole), **SITUATIONS[situation])
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=16)

    assert engine.run() == expected
    assert engine.num_running == engine.num_blocks_held == 0
    if situation.startswith("few blocks"):
        assert engine.preemptions > 0
    if SITUATIONS[situation].get("prefix_caching", True):
        assert engine.prefix_hits > 0
    else:
        assert engine.prefix_hits == 0


def test_an_oracle_of_k_drafts_is_accepted_whole_in_rounds_of_k_plus_1(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    [prompt] = prompts(1)
    engine = engine_of(target, Oracle([prompt + greedy(prompt, 30)]))
    engine.add("a", prompt, max_tokens=21)
    assert engine.run()["a"] == greedy(prompt, 21)
    # The prompt's pass gives 1 token, the 5 rounds behind it 4 each.
    assert (engine.steps, engine.drafted, engine.accepted) == (6, 15, 15)


def test_drafts_behind_a_wrong_one_are_refused(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    [prompt] = prompts(1)
    whole = prompt + greedy(prompt, 30)
    engine = engine_of(target, Oracle([whole], wrong=frozenset({1})))
    engine.add("a", prompt, max_tokens=21)
    assert engine.run()["a"] == greedy(prompt, 21)
    # 10 rounds of 1 accepted draft and the target's own token.
    assert (engine.steps, engine.drafted, engine.accepted) == (11, 30, 10)


def test_a_text_ends_at_a_stop_token_inside_a_round(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    [prompt] = prompts(1)
    expected = greedy(prompt, 30)
    stop = next(i for i in range(6, 20) if expected[i] not in expected[:i])
    engine = engine_of(target, Oracle([prompt + expected]))
    engine.add("a", prompt, max_tokens=30, stop_ids=frozenset({expected[stop]}))
    assert engine.run()["a"] == expected[: stop + 1]


def test_near_the_longest_text_nobody_is_asked_and_drafts_are_zeros(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    [prompt] = prompts(1)
    assert len(prompt) == 5
    expected = greedy(prompt, 30)
    assert 0 not in expected[:15]
    proposer = Empty()
    engine = engine_of(target, proposer, max_model_len=20)
    engine.add("a", prompt, max_tokens=30)
    assert engine.run()["a"] == expected[:15]
    # Passes that read 5, 6, .. 17 tokens leave room for 3 drafts. After the one of 18, a pass reads
    # token 18 alone, as no draft would leave a place for the token behind it.
    assert len(proposer.calls) == 13
    assert engine.drafted == 0
    assert engine.steps == 15


def test_zeros_take_the_place_of_drafts_of_every_row(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    short, long = random_ids(3, seed=1).tolist(), random_ids(15, seed=2).tolist()
    assert 0 not in greedy(short, 6)
    engine = engine_of(target, Empty(), max_model_len=20)
    engine.add("short", short, max_tokens=6)
    engine.add("long", long, max_tokens=4)
    assert engine.run() == {"short": greedy(short, 6), "long": greedy(long, 4)}
    # The long text ends in the 4th pass, of 18 tokens. The 5th is the short one's with 3 zeros.
    assert (engine.steps, engine.drafted, engine.accepted) == (6, 3, 0)


def test_an_aborted_request_leaves_and_disturbs_nobody(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    texts = prompts(5, shared=17)
    engine = engine_of(target, Random(), max_num_seqs=3, token_budget=24, shuffle=True)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=12)
    for _ in range(4):
        engine.step()
    engine.abort("1")  # runs
    engine.abort("4")  # waits
    engine.step()
    engine.add("1", texts[4], max_tokens=5)
    expected = {str(i): greedy(texts[i], 12) for i in (0, 2, 3)} | {"1": greedy(texts[4], 5)}
    assert engine.run() == expected
    assert engine.num_blocks_held == 0


def test_a_request_aborted_and_added_again_between_two_steps_is_a_new_one(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    first, second = prompts(2)
    engine = engine_of(target, Random())
    engine.add("a", first, max_tokens=9)
    engine.step()
    engine.abort("a")
    engine.add("a", second, max_tokens=9)
    assert engine.run() == {"a": greedy(second, 9)}


def test_a_drawn_text_does_not_depend_on_drafts(target: Target) -> None:
    outputs = []
    for proposer in (None, Random()):
        engine = engine_of(target, proposer, seed=5)
        engine.add("a", prompts(1)[0], max_tokens=20, temperature=1.0)
        engine.add("b", prompts(1)[0], max_tokens=20, temperature=1.0)
        outputs.append(engine.run())
    assert outputs[0] == outputs[1]
    assert outputs[0]["a"] != outputs[0]["b"]


def test_equal_prompts_share_blocks_in_their_first_pass(target: Target) -> None:
    prompt = random_ids(13, seed=0).tolist()
    engine = engine_of(target, None)
    engine.add("a", prompt, max_tokens=2)
    engine.add("b", prompt, max_tokens=2)
    engine.step()
    # 13 tokens fill 3 blocks and start a 4th: the second text shares 3 and has its own 4th.
    assert engine.num_blocks_held == 5
    assert (engine.prefix_hits, engine.hit_tokens) == (1, 12)
    table = engine.metadata.block_table
    assert torch.equal(table[0, :3], table[1, :3])
    assert table[0, 3] != table[1, 3]
    assert engine.metadata.query_start_loc.tolist() == [0, 13, 14]


def test_a_hit_leaves_the_last_token_to_read(target: Target) -> None:
    prompt = random_ids(12, seed=0).tolist()
    engine = engine_of(target, None)
    for name in "ab":
        engine.add(name, prompt, max_tokens=1)
        engine.run()
    assert engine.hit_tokens == 8
    assert engine.metadata.seq_lens.tolist() == [12]
    assert engine.metadata.num_actual_tokens == 4


def test_blocks_are_forgotten_when_they_are_taken_again(target: Target) -> None:
    engine = engine_of(target, None, num_blocks=25)
    first, *others = [random_ids(60, seed=seed).tolist() for seed in range(3)]
    for name, prompt in enumerate([first, *others, first]):
        engine.add(str(name), prompt, max_tokens=1)
        engine.run()
    # Of 24 blocks each text takes 15: the third takes the last of the first text's.
    assert engine.prefix_hits == 0


def test_placeholders_are_drafts_of_a_new_request_with_one_token_to_read(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    prompt = random_ids(13, seed=0).tolist()
    engine = engine_of(target, Empty())
    for name in "ab":
        engine.add(name, prompt, max_tokens=3)
        engine.run()
    assert engine.outputs == {"a": greedy(prompt, 3), "b": greedy(prompt, 3)}
    assert (engine.placeholders, engine.drafted) == (NUM_DRAFTS, 0)


def test_texts_given_to_a_proposer_are_the_committed_ones(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> None:
    texts = prompts(6, shared=17)
    whole = [text + greedy(text, 24) for text in texts]
    proposer = Mixed([text + greedy(text, 40) for text in texts])
    engine = engine_of(target, proposer, token_budget=11, num_blocks=25, shuffle=True)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=20)
    engine.run()
    partial = 0
    for sampled, rows in proposer.calls:
        for ids, row in zip(sampled, rows, strict=True):
            assert any(each[: len(row)] == row for each in whole)
            assert row[len(row) - len(ids) :] == ids
            partial += not ids
    assert partial > 0
    assert len({len(sampled) for sampled, _ in proposer.calls}) > 2


class Watcher(Empty):
    """Hooks as a proposer sets them; keeps copies, and the tensors themselves."""

    def load_model(self, model: nn.Module) -> None:
        assert isinstance(model, FakeModel)
        self.contexts: list[Any] = []
        self.passes: list[dict[str, Any]] = []
        self.kept: list[Tensor] = []
        self.rows: list[int] = []
        self.is_set_at_logits = False
        self.problems: list[str] = []
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_hook(self.hook(index))
        model.logits_processor.register_forward_hook(self.logits)

    def hook(self, index: int) -> Callable[..., None]:
        def keep(_module: nn.Module, inputs: Any, output: Any) -> None:
            metadata = get_forward_context().attn_metadata
            if index == 0:
                self.contexts.append(metadata)
                self.rows.clear()
                if metadata is not None:
                    self.passes.append({"positions": inputs[0].clone(), "outputs": []})
            if metadata is not None:
                self.passes[-1]["outputs"].append(output[0] + output[1])
                self.kept += output
            if index == 0 and metadata is not None:
                each = next(iter(metadata.values()))
                copies = {k: v.clone() for k, v in vars(each).items() if isinstance(v, Tensor)}
                self.passes[-1] |= copies | {"num": each.num_actual_tokens}

        return keep

    def logits(self, _module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.is_set_at_logits |= is_forward_context_available()
        self.rows.append(len(output))

    def propose(self, *arguments: Any, **options: Any) -> list[list[int]]:
        self.passes[-1] |= {"rows": list(self.rows), "slots": options["slot_mappings"]}
        self.passes[-1]["sampled"] = arguments[0]
        return super().propose(*arguments, **options)


class WatchingOracle(Watcher, Mixed):
    pass


@pytest.fixture
def watched(
    target: Target, greedy: Callable[[list[int], int], list[int]]
) -> tuple[WatchingOracle, dict[str, list[int]]]:
    texts = prompts(6, shared=17)
    proposer = WatchingOracle([text + greedy(text, 24) for text in texts])
    options = {"token_budget": 19, "num_blocks": 25, "shuffle": True, "pad_to": 4}
    engine = engine_of(target, proposer, **options)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=14, prompt_logprobs=index == 2)
    return proposer, engine.run()


def test_a_dummy_pass_without_metadata_comes_first(
    watched: tuple[WatchingOracle, dict[str, list[int]]],
) -> None:
    proposer, _ = watched
    assert proposer.contexts[0] is None
    assert None not in proposer.contexts[1:]
    assert not proposer.is_set_at_logits
    assert not is_forward_context_available()


def test_metadata_of_a_pass_fit_each_other(
    watched: tuple[WatchingOracle, dict[str, list[int]]],
) -> None:
    proposer, _ = watched
    for each in proposer.passes:
        starts = each["query_start_loc"].tolist()
        assert starts[-1] == each["num"] <= 19
        assert len(each["positions"]) == len(each["slot_mapping"]) == -(-each["num"] // 4) * 4
        assert (each["slot_mapping"][each["num"] :] == -1).all()
        for row, (start, end) in enumerate(pairwise(starts)):
            positions = each["positions"][start:end].tolist()
            length = int(each["seq_lens"][row])
            assert positions == list(range(length - (end - start), length))
            blocks = each["block_table"][row].tolist()
            assert len(blocks) == 32  # 96 tokens fill 24; tables are wide enough for 128 tokens
            slots = [4 * blocks[position // 4] + position % 4 for position in positions]
            assert slots == each["slot_mapping"][start:end].tolist()
            assert 0 not in blocks[: (length + 3) // 4]


def test_logits_are_made_of_drafts_and_one_more_row_first_and_of_prompts_second(
    watched: tuple[WatchingOracle, dict[str, list[int]]],
) -> None:
    proposer, _ = watched
    seconds = 0
    for index, each in enumerate(proposer.passes):
        num_rows = len(each["sampled"])
        most = num_rows * (1 + NUM_DRAFTS)
        assert num_rows <= each["rows"][0] <= most
        assert sum(map(len, each["sampled"])) <= each["rows"][0]
        seconds += len(each["rows"]) - 1
        if index == 0:
            assert each["rows"][0] == num_rows
    # The third prompt has 17 + 11 tokens, more than a step may read.
    assert seconds > 1


def test_the_sum_of_hidden_states_and_residual_is_the_layers_output(
    target: Target, watched: tuple[WatchingOracle, dict[str, list[int]]]
) -> None:
    proposer, outputs = watched
    texts = [text + outputs[str(i)] for i, text in enumerate(prompts(6, shared=17))]
    model: Any = target.model
    with torch.no_grad():
        true = [model(torch.tensor([t]), output_hidden_states=True).hidden_states for t in texts]
    first = proposer.passes[0]
    for row, text in enumerate(proposer.calls[0][1]):
        [index] = [i for i, each in enumerate(texts) if each[: len(text)] == text]
        start, end = first["query_start_loc"][row : row + 2].tolist()
        for layer in range(7):  # the output of the last layer is not told apart from its norm
            seen = first["outputs"][layer][start:end]
            expected = true[index][layer + 1][0, first["positions"][start:end]]
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-3)
    assert len(first["outputs"]) == 8


def test_who_keeps_a_layers_tensors_finds_them_written_over(
    watched: tuple[WatchingOracle, dict[str, list[int]]],
) -> None:
    proposer, _ = watched
    assert proposer.kept
    assert all(tensor.isnan().all() for tensor in proposer.kept)
    assert all((slots == -7).all() for slots in proposer.passes[-1]["slots"].values())


def test_a_proposer_that_writes_into_the_batch_is_caught(target: Target) -> None:
    class Writer(Empty):
        def propose(self, *arguments: Any, **options: Any) -> list[list[int]]:
            arguments[2][0, 0] += 1
            return [[] for _ in arguments[0]]

    engine = engine_of(target, Writer())
    engine.add("a", prompts(1)[0], max_tokens=3)
    with pytest.raises(AssertionError, match="may not write"):
        engine.run()


def test_a_slot_that_was_written_for_another_text_is_noticed(target: Target) -> None:
    engine = engine_of(target, None)
    engine.add("a", prompts(1)[0], max_tokens=9)
    engine.step()
    [block] = engine.metadata.block_table[0, :1].tolist()
    engine._written[4 * block] += 1
    with pytest.raises(AssertionError, match="sees another text"):
        engine.step()


def test_the_modules_of_the_fake_come_and_go(target: Target) -> None:
    with fake_vllm():
        assert importlib.import_module("vllm").__version__ == "0.32.0"
        context = importlib.import_module("vllm.forward_context")
        assert not context.is_forward_context_available()
        with pytest.raises(AssertionError, match="no forward context"):
            context.get_forward_context()
    with pytest.raises(ImportError):
        importlib.import_module("vllm.forward_context")


def test_the_config_is_what_a_proposer_reads(target: Target) -> None:
    config: PreTrainedConfig = target.config
    made = fake_vllm_config("folder", config, whiflash={"policy": "hazard"}, block_size=16)
    assert made.cache_config.block_size == 16
    assert made.model_config.get_vocab_size() == config.vocab_size
    assert made.compilation_config.mode.name == "NONE"
    assert int(made.compilation_config.mode) == 0
    assert made.additional_config == {"whiflash": {"policy": "hazard"}}


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 3, 4]),
    max_num_seqs=st.integers(1, 4),
    token_budget=st.integers(NUM_DRAFTS + 1, 30),
    spare_blocks=st.integers(1, 12),
    prefix_caching=st.booleans(),
    shuffle=st.booleans(),
)
def test_any_order_of_requests_and_aborts_gives_greedy_texts_and_gives_all_blocks_back(
    target: Target,
    greedy: Callable[[list[int], int], list[int]],
    seed: int,
    block_size: int,
    max_num_seqs: int,
    token_budget: int,
    spare_blocks: int,
    prefix_caching: bool,
    shuffle: bool,
) -> None:
    rng = np.random.default_rng(seed)
    texts = prompts(4, shared=12)
    proposer = Mixed([text + greedy(text, 12) for text in texts])
    engine = engine_of(
        target,
        proposer,
        block_size=block_size,
        num_blocks=-(-40 // block_size) + spare_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        prefix_caching=prefix_caching,
        shuffle=shuffle,
        max_model_len=40,
        seed=seed,
    )
    expected, alive = {}, set()
    for number in range(8):
        index, length = int(rng.integers(4)), int(rng.integers(1, 12))
        engine.add(str(number), texts[index], max_tokens=length)
        alive.add(str(number))
        expected[str(number)] = greedy(texts[index], length)
        for _ in range(int(rng.integers(4))):
            alive -= engine.step().keys()
        if alive and rng.random() < 0.2:
            name = min(alive)
            engine.abort(name)
            alive.remove(name)
            del expected[name]
    assert engine.run() == expected
    assert engine.num_blocks_held == engine.num_running == 0
