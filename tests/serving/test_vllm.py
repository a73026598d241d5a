"""The proposer behind vLLM's hook, with an engine that keeps vLLM's contract in vLLM's place."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.fakes import random_ids
from tests.infer.test_pretrained import write_drafters, write_router
from tests.serving.fake_engine import FakeEngine, fake_vllm, fake_vllm_config
from whiflash_infer.drafters.base import Arm
from whiflash_infer.drafters.load import ArmSettings, load_arms
from whiflash_infer.errors import ArtifactError, UserError
from whiflash_infer.sequence import Texts
from whiflash_infer.serving import vllm
from whiflash_infer.serving.vllm import RoutedProposer
from whiflash_infer.target import Target

GIB = 0.001  # of features: some 1,300 tokens of the tiny target
MAX_LENGTH, BLOCK = 96, 4
SYSTEM = random_ids(21, seed=99).tolist()
CHAINS = ArmSettings(ar_tree=None, diffusion_tree=None)
FEW_BLOCKS = {"num_blocks": 16, "max_model_len": 60}  # enough for one text of that length
SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"token_budget": 9},
    "few blocks": FEW_BLOCKS,
    "no prefix caching": {"prefix_caching": False},
    "shuffled": {"shuffle": True},
    "padded": {"pad_to": 8},
    "all": {"token_budget": 11, "shuffle": True, "pad_to": 8} | FEW_BLOCKS,
}
POLICIES = ("plain", "static_ar", "static_diffusion", "random", "hazard", "entropy")


class Helped(RoutedProposer):
    """Keeps the texts that it drafted for and the drafts; now and then hands in what is right."""

    def __init__(self, config: Any, texts: list[list[int]] | None = None) -> None:
        super().__init__(config)
        self.texts = texts or []
        self.seen: list[tuple[list[int], str, list[int]]] = []

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        assert self._proposer is not None
        arms = {s.place: s.decision for s in self._proposer._served.values() if s.decision}
        for row, made in enumerate(drafts):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]].tolist()
            if made:
                self.seen.append((text, arms[row].arm, made))
            if (len(text) + row) % 3 == 0 and made:
                drafts[row] = self._right(text)[: len(made)] or made
        return drafts

    def _right(self, text: list[int]) -> list[int]:
        known = next((each for each in self.texts if each[: len(text)] == text), [])
        return known[len(text) :]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with fake_vllm():
        yield


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_drafters(folder, target)
    write_router(folder, target)
    return folder


@pytest.fixture(scope="module")
def arms(target: Target, folder: Path) -> dict[str, Arm]:
    """The same drafters, with caches of their own."""
    found, _ = load_arms(folder / "ar", folder / "diffusion", target, CHAINS)
    return found


def config_of(target: Target, folder: Path, **changes: Any) -> Any:
    """Those of vLLM's, and of ours by the names of `ServingOptions`."""
    names = vllm.ServingOptions.__dataclass_fields__
    own = {name: changes.pop(name) for name in list(changes) if name in names}
    options = {
        "ar": str(folder / "ar"),
        "diffusion": str(folder / "diffusion"),
        "router": str(folder / "router"),
        "feature_gib": GIB,
    } | own
    defaults: dict[str, Any] = {"block_size": BLOCK, "max_model_len": MAX_LENGTH}
    defaults |= {"num_speculative_tokens": 4}
    source = str(target.model.config._name_or_path)  # pyright: ignore
    wanted = {name: value for name, value in options.items() if value is not None}
    return fake_vllm_config(source, target.config, whiflash=wanted, **(defaults | changes))


def engine_of(target: Target, proposer: RoutedProposer | None, **options: Any) -> FakeEngine:
    defaults: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": 128,
        "max_num_seqs": 4,
        "token_budget": 64,
        "max_model_len": MAX_LENGTH,
        "num_speculative_tokens": 4,
    }
    return FakeEngine(target, proposer, **(defaults | options))


def prompts(number: int, *, shared: int = 17) -> list[list[int]]:
    return [SYSTEM[:shared] + random_ids(5 + 3 * i, seed=i).tolist() for i in range(number)]


@torch.inference_mode()
def drafts_made_anew(target: Target, arm: Arm, text: list[int], number: int) -> list[int]:
    """What the arm drafts behind a text that is read from its start."""
    ids = torch.tensor(text)
    taps = target.teach(ids[None, :-1], torch.ones(1, len(text) - 1, dtype=torch.bool)).taps[0]
    texts = Texts(ids.device, keep_taps=True)
    for part in (texts, arm.drafter):
        part.reserve(1, MAX_LENGTH + 40)
    texts.begin(0, ids[:-1], taps, ids[-1])
    arm.drafter.clear(0)
    arm.drafter.catch_up(texts, [0])
    return arm.draft(texts, [0], [number]).tree.ids[0, :number].tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_outputs_are_greedy_and_drafts_are_those_of_the_text_read_anew(
    target: Target,
    folder: Path,
    arms: dict[str, Arm],
    greedy: Callable[[list[int], int], list[int]],
    situation: str,
    policy: str,
) -> None:
    texts = prompts(6)
    expected = {str(i): greedy(text, 14) for i, text in enumerate(texts)}
    longest = SITUATIONS[situation].get("max_model_len", MAX_LENGTH)
    proposer = Helped(
        config_of(target, folder, policy=policy, max_model_len=longest),
        [text + expected[str(i)] for i, text in enumerate(texts)],
    )
    engine = engine_of(target, proposer, **SITUATIONS[situation])
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=14)
    assert engine.run() == expected
    assert not proposer.counters.fallbacks
    used = {arm for _, arm, _ in proposer.seen}
    assert used == {
        "plain": set(),
        "static_ar": {"ar"},
        "static_diffusion": {"diffusion"},
    }.get(policy, used)
    assert policy == "plain" or (used and engine.accepted > 0)
    for text, arm, made in proposer.seen:
        assert made == drafts_made_anew(target, arms[arm], text, len(made))
    if situation in ("few blocks", "all"):
        assert engine.preemptions > 0
    assert (engine.prefix_hits > 0) == (situation != "no prefix caching")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_order_of_requests_batches_and_aborts_leaves_outputs_alone(
    target: Target, folder: Path, greedy: Callable[[list[int], int], list[int]], data: st.DataObject
) -> None:
    texts = prompts(8)
    proposer = Helped(
        config_of(target, folder, policy=data.draw(st.sampled_from(POLICIES))),
        [text + greedy(text, 20) for text in texts],
    )
    engine = engine_of(
        target,
        proposer,
        token_budget=data.draw(st.integers(5, 40)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        num_blocks=data.draw(st.sampled_from([25, 40, 128])),
        shuffle=data.draw(st.booleans()),
        prefix_caching=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    wanted: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 8))):
        text, length = data.draw(st.sampled_from(texts)), data.draw(st.integers(1, 20))
        engine.add(str(number), text, max_tokens=length, prompt_logprobs=data.draw(st.booleans()))
        wanted[str(number)] = greedy(text, length)
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
        if data.draw(st.integers(0, 4)) == 0 and str(number) not in engine.outputs:
            engine.abort(str(number))
            del wanted[str(number)]
    assert engine.run() == wanted
    assert not proposer.counters.fallbacks


def test_sampled_outputs_do_not_depend_on_drafts(target: Target, folder: Path) -> None:
    outputs = []
    for proposer in (None, RoutedProposer(config_of(target, folder, policy="random"))):
        engine = engine_of(target, proposer, shuffle=True, token_budget=13)
        for index, text in enumerate(prompts(5)):
            engine.add(str(index), text, max_tokens=15, temperature=1.0)
        outputs.append(engine.run())
    assert outputs[0] == outputs[1]


def test_a_request_near_its_limit_takes_drafts_from_all_for_some_steps_and_no_more(
    target: Target, folder: Path, arms: dict[str, Arm], greedy: Callable[..., list[int]]
) -> None:
    """vLLM asks nobody for drafts then; what those passes read is not lost."""
    short, long = random_ids(6, seed=1).tolist(), random_ids(80, seed=2).tolist()
    proposer = Helped(config_of(target, folder, policy="static_diffusion"))
    engine = engine_of(target, proposer, token_budget=96)
    engine.add("short", short, max_tokens=40)
    engine.add("long", long, max_tokens=40)
    assert engine.run() == {"short": greedy(short, 40), "long": greedy(long, 16)}
    assert engine.proposals < engine.steps - 2
    assert not proposer.counters.fallbacks
    drafted = sorted(len(text) for text, _, _ in proposer.seen if text[:6] == short)
    assert max(np.diff(drafted)) > 1
    assert drafted[-1] >= 6 + 40 - 2
    for text, arm, made in proposer.seen:
        assert made == drafts_made_anew(target, arms[arm], text, len(made))


def test_texts_that_were_equal_so_far_are_told_apart(
    target: Target, folder: Path, arms: dict[str, Arm], greedy: Callable[..., list[int]]
) -> None:
    """Two requests with one prompt share blocks, one of them begins where the other one stands."""
    [prompt] = prompts(1, shared=19)
    answer = greedy(prompt, 30)
    proposer = Helped(config_of(target, folder, policy="static_ar"))
    engine = engine_of(target, proposer)
    engine.add("a", prompt, max_tokens=30)
    for _ in range(9):
        engine.step()
    engine.add("b", prompt + answer[:8], max_tokens=22)
    engine.add("c", prompt, max_tokens=30)
    assert engine.run() == {"a": answer, "b": greedy(prompt + answer[:8], 22), "c": answer}
    for text, arm, made in proposer.seen:
        assert made == drafts_made_anew(target, arms[arm], text, len(made))


def test_requests_that_ended_or_were_aborted_are_forgotten(
    target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = RoutedProposer(config_of(target, folder, policy="random", idle_seconds=900.0))
    engine = engine_of(target, proposer)
    memory = []
    for round_ in range(6):
        for index, text in enumerate(prompts(5)):
            engine.add(f"{round_} {index}", text, max_tokens=6)
        for _ in range(4):
            engine.step()
        if f"{round_} 0" not in engine.outputs:
            engine.abort(f"{round_} 0")
        engine.run()
        assert 0 < proposer.counters.requests <= 4  # rows that are kept at a time
        memory.append(proposer.counters.memory)
    assert memory[1:] == [memory[1]] * 5
    assert proposer._proposer is not None
    proposer._proposer.forget_idle(float("inf"))
    assert proposer.counters.requests == 0
    engine.add("again", prompts(1)[0], max_tokens=4)
    engine.run()
    assert proposer.counters.requests == 1


def test_an_idle_engine_lets_go_of_requests_by_itself(target: Target, folder: Path) -> None:
    proposer = RoutedProposer(config_of(target, folder, policy="static_ar", idle_seconds=0.05))
    engine = engine_of(target, proposer)
    engine.add("a", prompts(1)[0], max_tokens=4)
    engine.run()
    patience = time.monotonic() + 30
    while proposer.counters.requests and time.monotonic() < patience:
        time.sleep(0.05)
    assert proposer.counters.requests == 0


def test_rows_are_given_to_those_who_run_and_the_rest_goes_without(
    target: Target, folder: Path, greedy: Callable[..., list[int]]
) -> None:
    proposer = RoutedProposer(config_of(target, folder, policy="static_ar", max_requests=2))
    engine = engine_of(target, proposer)
    texts = prompts(4)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=12)
    assert engine.run() == {str(i): greedy(text, 12) for i, text in enumerate(texts)}
    assert proposer.counters.requests <= 2
    assert set(proposer.counters.fallbacks) == {"no row is free"}


def test_features_that_were_given_up_are_missed_and_never_made_up(
    target: Target, folder: Path, arms: dict[str, Arm], greedy: Callable[..., list[int]]
) -> None:
    """A store for one text and a bit; the prefixes of later requests hit what is not there."""
    texts = prompts(6, shared=21) * 2
    gib = 25 * BLOCK * (3 * 64 * 4 + 16) / (1 << 30)
    proposer = Helped(config_of(target, folder, policy="random", feature_gib=gib))
    engine = engine_of(target, proposer, max_num_seqs=3)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=14)
    assert engine.run() == {str(i): greedy(text, 14) for i, text in enumerate(texts)}
    assert proposer.counters.feature_evictions > 0
    assert set(proposer.counters.fallbacks) == {"features are missing"}
    assert proposer.seen
    for text, arm, made in proposer.seen:
        assert made == drafts_made_anew(target, arms[arm], text, len(made))


def broken(*_: Any) -> Any:
    raise RuntimeError("the drafter broke")


def test_a_broken_drafter_costs_its_drafts_and_is_counted(
    target: Target, folder: Path, greedy: Callable[..., list[int]]
) -> None:
    proposer = RoutedProposer(config_of(target, folder, policy="random"))
    engine = engine_of(target, proposer)
    assert proposer._proposer is not None
    proposer._proposer.arms["ar"].drafter.net.fuse = broken  # pyright: ignore
    texts = prompts(3)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=20)
    assert engine.run() == {str(i): greedy(text, 20) for i, text in enumerate(texts)}
    assert proposer.counters.fallbacks["ar drafter"] == 3  # once a request
    assert proposer.counters.drafted["diffusion"] > 0


def test_a_fault_of_ours_never_reaches_the_engine(
    target: Target,
    folder: Path,
    greedy: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(target, folder, policy="random")
    config.cache_config.block_size = 8  # not the one that the engine has
    proposer = RoutedProposer(config)
    engine = engine_of(target, proposer)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    texts = prompts(3)
    for index, text in enumerate(texts):
        engine.add(str(index), text, max_tokens=10)
    with caplog.at_level("WARNING"):
        assert engine.run() == {str(i): greedy(text, 10) for i, text in enumerate(texts)}
    assert proposer.counters.fallbacks["the proposer"] == engine.proposals
    assert caplog.text.count("blocks of 8") >= 1
    assert engine.drafted == 0


def test_a_pass_that_cannot_be_captured_is_forgotten_with_what_was_kept(
    target: Target,
    folder: Path,
    arms: dict[str, Arm],
    greedy: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposer = Helped(config_of(target, folder, policy="static_ar"))
    engine = engine_of(target, proposer)
    texts = prompts(3)
    engine.add("0", texts[0], max_tokens=12)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(proposer._capture, "_metadata", SimpleNamespace)
        engine.step()
    for index, text in enumerate(texts[1:], start=1):
        engine.add(str(index), text, max_tokens=12)
    assert engine.run() == {str(i): greedy(text, 12) for i, text in enumerate(texts)}
    assert proposer.counters.fallbacks["a step was not seen"] == 1
    for text, arm, made in proposer.seen:
        assert made == drafts_made_anew(target, arms[arm], text, len(made))


def test_what_is_counted_agrees_with_the_engine(target: Target, folder: Path) -> None:
    proposer = RoutedProposer(config_of(target, folder, policy="static_diffusion"))
    engine = engine_of(target, proposer, prefix_caching=False)
    for index, text in enumerate(prompts(5)):
        engine.add(str(index), text, max_tokens=12)
    engine.run()
    counters = proposer.counters
    assert counters.accepted["diffusion"] == engine.accepted
    # What was drafted in the last step of a request was not read.
    assert counters.drafted["diffusion"] - engine.drafted == 5 * 4
    assert counters.ended.total() == counters.rounds.total() - 5
    assert counters.steps == engine.proposals


def test_current_counters_are_those_of_the_last_proposer(target: Target, folder: Path) -> None:
    first = RoutedProposer(config_of(target, folder))
    second = RoutedProposer(config_of(target, folder, policy="static_ar"))
    engine = engine_of(target, second)
    engine.add("a", prompts(1)[0], max_tokens=5)
    engine.run()
    assert vllm.current_counters() is second.counters
    assert first.counters.steps == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0"])
def test_other_versions_are_refused_by_their_number(
    target: Target, folder: Path, version: str
) -> None:
    with fake_vllm(version), pytest.raises(UserError, match=rf"{version}.*0\.32"):
        RoutedProposer(config_of(target, folder))
    with fake_vllm(version):
        RoutedProposer(config_of(target, folder, allow_untested_vllm=True))


def spoil(config: Any, path: str, value: object) -> Any:
    *parents, name = path.split(".")
    part = config
    for parent in parents:
        part = getattr(part, parent)
    setattr(part, name, value)
    return config


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("parallel_config.tensor_parallel_size", 2, "tensor_parallel_size is 2"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline_parallel_size is 2"),
        ("compilation_config.mode", SimpleNamespace(name="VLLM_COMPILE"), "--enforce-eager"),
        ("compilation_config.cudagraph_mode", SimpleNamespace(name="FULL"), "--enforce-eager"),
        ("kv_transfer_config", SimpleNamespace(), "kv_transfer_config"),
        ("model_config.is_multimodal_model", True, "more than tokens"),
        ("model_config.enable_prompt_embeds", True, "more than tokens"),
        ("additional_config", {"whiflash": {"polcy": "hazard"}}, "whiflash.polcy.*policy"),
        ("additional_config", {"whiflash": {"feature_gib": 0}}, "whiflash.feature_gib is 0"),
        ("additional_config", {"whiflash": {"idle_seconds": -1}}, "whiflash.idle_seconds is -1"),
        ("additional_config", {"whiflash": {"max_requests": 0}}, "max_requests is 0"),
    ],
)
def test_settings_under_which_nothing_could_be_drafted_are_refused(
    target: Target, folder: Path, path: str, value: object, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        RoutedProposer(spoil(config_of(target, folder), path, value))


def test_drafters_of_another_target_are_refused(
    target: Target, folder: Path, tmp_path: Path
) -> None:
    other: Any = target.model
    weight = other.get_decoder().layers[0].mlp.up_proj.weight
    kept = weight[0, 0].item()
    try:
        weight[0, 0] = kept + 1.0
        other.save_pretrained(tmp_path)
    finally:
        weight[0, 0] = kept
    config = spoil(config_of(target, folder), "model_config.model", str(tmp_path))
    with pytest.raises(ArtifactError, match="weights: the artefact has"):
        engine_of(target, RoutedProposer(config))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ar": None, "diffusion": None, "router": None}, "there is no drafter"),
        ({"policy": "hazrd"}, "unknown policy 'hazrd'"),
        ({"policy": "static_ar_tree"}, "unknown policy"),
        ({"router": None}, "no router to choose between them"),
        ({"feature_gib": 1e-6}, "feature_gib is 1e-06"),
        ({"ar": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_what_cannot_be_loaded_is_told(
    target: Target, folder: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        engine_of(target, RoutedProposer(config_of(target, folder, **changes)))


def test_a_target_without_layers_to_tap_is_refused(target: Target, folder: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(target.vocab_size, 64)
            self.lm_head = nn.Linear(64, target.vocab_size, bias=False)

    with pytest.raises(UserError, match="Other has 0 lists of 8 layers"):
        RoutedProposer(config_of(target, folder)).load_model(Other())


# --- the command ----------------------------------------------------------------------------------


def words_of(arguments: list[str]) -> dict[str, Any]:
    options, rest = vllm._parser().parse_known_args(["serve", "target", *arguments])
    words = vllm.server_arguments(options, rest)
    pairs = {name: words[i + 1] for i, name in enumerate(words[:-1]) if name.startswith("--")}
    found: dict[str, Any] = {
        name: json.loads(value) if value.startswith("{") else value for name, value in pairs.items()
    }
    return found | {"words": words}


def named_as_artifacts(folder: Path, to: Path) -> Path:
    for name, place in (("ar", "ar_drafter"), ("diffusion", "diffusion_drafter")):
        (to / place).symlink_to(folder / name)
    (to / "router").symlink_to(folder / "router")
    return to


def test_serve_names_the_proposer_and_passes_other_flags_on(folder: Path, tmp_path: Path) -> None:
    artifacts = named_as_artifacts(folder, tmp_path)
    given = '{"other": 1}'
    found = words_of(
        ["--artifacts", str(artifacts), "--port", "8123", "--additional-config", given]
    )
    assert found["--model"] == "target"
    assert found["--speculative-config"] == {
        "method": "custom_class",
        "model": "whiflash_infer.serving.vllm.RoutedProposer",
        "num_speculative_tokens": 4,
    }
    assert found["--additional-config"]["other"] == 1
    chosen = found["--additional-config"]["whiflash"]
    assert set(chosen) == {"ar", "diffusion", "router"}
    assert Path(chosen["ar"]).samefile(folder / "ar")
    assert found["--port"] == "8123"
    assert found["words"].count("--enforce-eager") == 1


def test_serve_takes_folders_policy_and_lengths(folder: Path) -> None:
    found = words_of(
        [
            *("--ar", str(folder / "ar"), "--policy", "static_ar", "--draft-length", "7"),
            *("--feature-gib", "0.5", "--enforce-eager"),
        ]
    )
    assert found["--additional-config"]["whiflash"] == {
        "ar": str(folder / "ar"),
        "policy": "static_ar",
        "draft_length": 7,
        "feature_gib": 0.5,
    }
    assert found["--speculative-config"]["num_speculative_tokens"] == 7
    assert found["words"].count("--enforce-eager") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is no drafter"),
        (["--ar", "nowhere"], "nowhere"),
        (["--speculative-config", "{}"], "not by vLLM's flags"),
        (["--model=other"], "not by vLLM's flags"),
    ],
)
def test_serve_ends_with_2_and_says_what_to_mend(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm.main(["serve", "target", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_serve_without_vllm_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert vllm.main(["serve", "target"]) == 2
    assert "docs/vllm.md" in capsys.readouterr().err
