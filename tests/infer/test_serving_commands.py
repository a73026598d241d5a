from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes import tiny_ar, tiny_diffusion
from whiflash_infer.errors import UserError
from whiflash_infer.exchange import read_drafter, write_drafter
from whiflash_infer.exchange.__main__ import main as exchange
from whiflash_infer.nets.shape import DrafterShape
from whiflash_infer.serving import launch
from whiflash_infer.serving.__main__ import main
from whiflash_infer.sources import RandomTiny

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
AUX = "eagle_aux_hidden_state_layer_ids"
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
# Of the tiny target, and of the drafters below: 5 slots a block, every third token drafted.
VOCAB, WIDTH, HEADS, GROUPS, HEAD_DIM, DRAFTED = 261, 64, 4, 2, 16, 87
SHAPE = DrafterShape(
    hidden_size=WIDTH,
    intermediate_size=96,
    num_heads=HEADS,
    num_kv_heads=GROUPS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    vocab_size=VOCAB,
    max_position_embeddings=2048,
    target_hidden_size=WIDTH,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("targets")
    return RandomTiny(cache_dir=str(folder), seed=0, hidden_size=WIDTH, num_layers=8).resolve()


def written(folder: Path, kind: str, layout: str = "", **options: Any) -> Path:
    """A drafter of ours: `ar` or `diffusion`."""
    shape = options.pop("shape", SHAPE)
    net = tiny_ar(shape, **options) if kind == "ar" else tiny_diffusion(shape, **options)
    layout = layout or ("eagle3" if kind == "ar" else "zlab")
    manifest = {"license": None, "draft_length": 3}
    write_drafter(net, folder, layout=layout, manifest=manifest, token_ids=TOKEN_IDS)
    return folder


def edit(folder: Path, change: Change) -> Path:
    """Change config and tensors where they lie."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(engine: Any, target: str, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        launch(engine, target, str(folder))
    return str(caught.value)


def mended(message: str, folder: Path) -> str:
    """Run the conversion that a message ends with; the folder that it writes."""
    words = shlex.split(message[message.index("python -m whiflash_infer.exchange") :])
    out = str(folder / words[4])
    assert exchange([words[3], out, *words[5:]]) == 0
    return out


def test_vllm_gets_its_settings_as_json(served: str, tmp_path: Path) -> None:
    folder = str(written(tmp_path / "my drafter", "ar"))
    found = launch("vllm", served, folder, port=8001)
    words = shlex.split(found.shell())
    assert words[:4] == ["vllm", "serve", served, "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": folder,
        "num_speculative_tokens": 3,
    }
    assert words[5:] == ["--port", "8001"]


def test_a_block_drafter_goes_to_vllm_as_dflash_with_the_slots_behind_its_anchor(
    served: str, tmp_path: Path
) -> None:
    folder = str(written(tmp_path / "drafter", "diffusion"))
    settings = json.loads(launch("vllm", served, folder).command[4])
    assert settings == {"method": "dflash", "model": folder, "num_speculative_tokens": 4}


def test_sglang_counts_what_the_target_reads_so_one_more_than_the_drafts(
    served: str, tmp_path: Path
) -> None:
    chain = str(written(tmp_path / "chain", "ar"))
    start = f"python -m sglang.launch_server --model-path {served} --speculative-algorithm"
    assert launch("sglang", served, chain).shell() == (
        f"{start} EAGLE3 --speculative-draft-model-path {chain} --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    block = str(written(tmp_path / "block", "diffusion"))
    assert launch("sglang", served, block, port=30000).shell() == (
        f"{start} DFLASH --speculative-draft-model-path {block} "
        "--speculative-num-draft-tokens 5 --port 30000"
    )


@pytest.mark.parametrize(
    ("kind", "asked", "given"), [("ar", 7, 7), ("ar", 1, 1), ("diffusion", 2, 2)]
)
def test_the_number_of_drafts_can_be_chosen(
    kind: str, asked: int, given: int, served: str, tmp_path: Path
) -> None:
    folder = str(written(tmp_path / "drafter", kind))
    command = launch("vllm", served, folder, num_speculative_tokens=asked).command
    assert json.loads(command[4])["num_speculative_tokens"] == given


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("ar", 0, "must be 1 or more"),
        ("diffusion", 5, "and 4 at most"),
        ("diffusion", -1, "1 or more"),
    ],
)
def test_a_number_of_drafts_that_the_drafter_does_not_have_is_refused(
    kind: str, asked: int, message: str, served: str, tmp_path: Path
) -> None:
    folder = str(written(tmp_path / "drafter", kind))
    with pytest.raises(UserError, match=rf"--num-speculative-tokens is {asked}.*{message}"):
        launch("vllm", served, folder, num_speculative_tokens=asked)


def test_a_drafter_of_fewer_positions_limits_the_length_that_is_served(
    served: str, tmp_path: Path
) -> None:
    short = replace(SHAPE, max_position_embeddings=512)
    folder = str(written(tmp_path / "drafter", "diffusion", shape=short))
    assert launch("vllm", served, folder).command[-2:] == ("--max-model-len", "512")
    assert launch("sglang", served, folder).command[-2:] == ("--context-length", "512")


def layer(width: int, *, norms: bool) -> dict[str, tuple[int, ...]]:
    """Parameters of one decoder layer as both engines build it: projections are stacked."""
    found: dict[str, tuple[int, ...]] = {
        "self_attn.qkv_proj.weight": ((HEADS + 2 * GROUPS) * HEAD_DIM, width),
        "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_up_proj.weight": (2 * 96, WIDTH),
        "mlp.down_proj.weight": (WIDTH, 96),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    both = {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
    return found | (both if norms else {"hidden_norm.weight": (WIDTH,)})


# What the engines' own modules hold, besides the embedding and head that the target lends: printed
# by vLLM 0.32 (`named_parameters` of its drafter), read from the modules of SGLang 0.5.23.
EAGLE3_LAYER = {f"model.layers.0.{n}": s for n, s in layer(2 * WIDTH, norms=False).items()}
EAGLE3 = {
    **EAGLE3_LAYER,
    "model.fc.weight": (WIDTH, 3 * WIDTH),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (DRAFTED, WIDTH),
}
DFLASH = {
    **{f"layers.{i}.{n}": s for i in range(2) for n, s in layer(WIDTH, norms=True).items()},
    "fc.weight": (WIDTH, 3 * WIDTH),
    "hidden_norm.weight": (WIDTH,),
    "norm.weight": (WIDTH,),
}
PARAMETERS = {
    ("vllm", "ar"): {**EAGLE3, "draft_id_to_target_id": (DRAFTED,)},
    ("vllm", "diffusion"): {f"model.{name}": shape for name, shape in DFLASH.items()},
    ("sglang", "ar"): {**EAGLE3, "hot_token_id": (DRAFTED,)},
    ("sglang", "diffusion"): DFLASH,
}
STACKS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def loaded(engine: str, kind: str, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Where the loaders put a folder's tensors, and of what size what arrives there is."""
    homes: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        home = name.replace("midlayer.", "layers.0.")
        home = {"d2t": "draft_id_to_target_id" if engine == "vllm" else "hot_token_id"}.get(
            home, home
        )
        inside = "." in home and home != "lm_head.weight"
        if inside and (engine, kind) != ("sglang", "diffusion"):
            home = f"model.{home}"
        for part, stack in STACKS.items():
            home = home.replace(f".{part}.", f".{stack}.")
        rows, *rest = tensor.shape
        homes[home] = [homes.get(home, [0])[0] + rows, *rest]
    return {home: tuple(size) for home, size in homes.items()}


@pytest.mark.parametrize(("engine", "kind"), PARAMETERS)
def test_the_tensors_of_an_export_fill_an_engines_parameters_exactly(
    engine: str, kind: str, tmp_path: Path
) -> None:
    tensors = load_file(written(tmp_path / "drafter", kind) / "model.safetensors")
    assert loaded(engine, kind, tensors) == PARAMETERS[engine, kind]


def test_the_map_of_an_export_holds_offsets_to_the_tokens_that_are_marked(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path / "drafter", "ar") / "model.safetensors")
    tokens = torch.arange(DRAFTED) + tensors["d2t"]  # as both engines add them
    assert tokens.tolist() == list(range(1, VOCAB, 3))
    assert tensors["t2d"].nonzero().flatten().tolist() == tokens.tolist()


def test_layers_are_named_in_each_engines_own_count(tmp_path: Path) -> None:
    """Outputs of layers 1, 3 and 4: inputs of 2, 4 and 5, which is how vLLM counts."""
    chain = json.loads((written(tmp_path / "ar", "ar") / "config.json").read_text())
    assert chain[AUX] == [2, 4, 5]
    assert chain["eagle_config"][AUX] == [1, 3, 4]
    block = json.loads((written(tmp_path / "block", "diffusion") / "config.json").read_text())
    assert block["dflash_config"]["target_layer_ids"] == [1, 3, 4]  # both engines add 1
    assert AUX not in block  # vLLM would take it first


def without(name: str) -> Change:
    return lambda config, _: config.pop(name)


def renamed(old: str, new: str) -> Change:
    def change(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new) if old else new + name] = tensors.pop(name)

    return change


def set_inner(section: str, **values: Any) -> Change:
    return lambda config, _: config[section].update(values)


MENDED = [
    ("vllm", "ar", without(AUX), rf"{AUX} is missing.* taps layers of its own choice"),
    ("vllm", "ar", renamed("", "model."), "tensor model.fc.weight is unknown to it"),
    ("vllm", "diffusion", renamed("", "model."), "tensor fc.weight is missing"),
    ("vllm", "ar", lambda _, tensors: tensors.pop("d2t"), "tensor d2t is missing"),
    ("sglang", "ar", lambda _, tensors: tensors.pop("d2t"), "tensor d2t is missing"),
    ("sglang", "ar", without("eagle_config"), rf"eagle_config.{AUX} is missing"),
    ("sglang", "ar", without("draft_vocab_size"), "draft_vocab_size is missing"),
    (
        "sglang",
        "ar",
        lambda config, _: config.update(architectures=["LlamaEagle3DraftModel"]),
        r"architectures is \['LlamaEagle3DraftModel'\], and the engine reads",
    ),
    (
        "sglang",
        "ar",
        lambda config, _: config.update(tie_word_embeddings=True),
        "tie_word_embeddings is True, and the engine reads the drafter right only with False",
    ),
]


@pytest.mark.parametrize(("engine", "kind", "change", "message"), MENDED)
def test_a_folder_in_another_dialect_is_refused_by_field_and_the_command_in_the_message_mends_it(
    engine: str, kind: str, change: Change, message: str, served: str, tmp_path: Path
) -> None:
    folder = edit(written(tmp_path / "drafter", kind), change)
    told = refusal(engine, served, folder)
    assert re.search(message, told)
    assert str(folder / "config.json") in told
    new = mended(told, tmp_path)
    assert launch(engine, served, new).command  # pyright: ignore
    before, after = (read_drafter(path).net.state_dict() for path in (folder, new))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("engine", "kind", "change"),
    [
        ("sglang", "ar", renamed("", "model.")),
        ("sglang", "ar", renamed("midlayer.", "layers.0.")),
        ("sglang", "ar", without(AUX)),
        ("sglang", "diffusion", renamed("", "model.")),
        ("vllm", "ar", renamed("midlayer.", "layers.0.")),
        ("vllm", "ar", without("eagle_config")),  # three layers are what it expects
        (
            "sglang",
            "diffusion",
            lambda config, _: config["dflash_config"].update(block_size=config.pop("block_size")),
        ),
    ],
)
def test_a_dialect_that_an_engine_reads_is_served_as_it_is(
    engine: Any, kind: str, change: Change, served: str, tmp_path: Path
) -> None:
    folder = edit(written(tmp_path / "drafter", kind), change)
    assert str(folder) in launch(engine, served, str(folder)).shell()


def test_vllm_needs_the_layers_counted_where_they_are_not_three(
    served: str, tmp_path: Path
) -> None:
    def fewer(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del config["eagle_config"]
        config[AUX] = [2, 5]
        tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * WIDTH].clone()

    told = refusal("vllm", served, edit(written(tmp_path / "drafter", "ar"), fewer))
    assert "2 layers are tapped, and the engine counts 3" in told
    assert launch("vllm", served, mended(told, tmp_path)).command


def test_vllm_has_no_map_for_a_whole_vocabulary_and_sglang_does(
    served: str, tmp_path: Path
) -> None:
    def map_all(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.long)

    folder = written(tmp_path / "drafter", "ar", used=torch.arange(VOCAB))
    edit(folder, map_all)
    assert launch("sglang", served, str(folder)).command
    told = refusal("vllm", served, folder)
    assert "tensor d2t is there, and the engine has none for a whole vocabulary" in told
    assert launch("vllm", served, mended(told, tmp_path)).command


@pytest.mark.parametrize(("kind", "method"), [("ar", "eagle3"), ("diffusion", "dflash")])
def test_the_speculators_layout_is_served_by_vllm_and_refused_for_sglang(
    kind: str, method: str, served: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "drafter", kind, "speculators")
    if kind == "diffusion":
        edit(folder, lambda config, _: config.update(sliding_window_non_causal=True))
    assert json.loads(launch("vllm", served, str(folder)).command[4])["method"] == method
    told = refusal("sglang", served, folder)
    assert "SGLang does not read the speculators layout" in told
    assert launch("sglang", served, mended(told, tmp_path)).command


def test_a_block_that_vllm_would_take_for_causal_is_refused(served: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "diffusion", "speculators")
    edit(folder, lambda config, _: config.update(sliding_window_non_causal=False))
    told = refusal("vllm", served, folder)
    assert "sliding_window_non_causal is False" in told
    assert launch("vllm", served, mended(told, tmp_path)).command


def test_sglang_has_no_layer_that_norms_queries_and_vllm_does(served: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "ar", flavour="qk_norm")
    assert launch("vllm", served, str(folder)).command
    told = refusal("sglang", served, folder)
    assert "Eagle3Qwen3ForCausalLM" in told
    assert told.endswith("train it with ar_drafter.qk_norm=false, or serve it with vLLM")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_markov_head_is_refused_with_the_setting_that_leaves_it_out(
    engine: str, served: str, tmp_path: Path
) -> None:
    told = refusal(engine, served, written(tmp_path / "drafter", "diffusion", markov_rank=4))
    assert "DFlashMarkovDraftModel" in told
    assert told.endswith("train it with diffusion_drafter.markov_rank=0")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("ar", lambda _, tensors: tensors.pop("norm.weight"), "missing tensor norm.weight"),
        (
            "ar",
            lambda _, tensors: tensors["d2t"].add_(1),
            "t2d marks other tokens than d2t leads to",
        ),
        (
            "ar",
            lambda _, tensors: tensors.update({"more.weight": torch.ones(2)}),
            "unknown tensor more.weight",
        ),
        ("diffusion", set_inner("dflash_config", mask_token_id=VOCAB), "mask_token_id 261"),
        ("diffusion", set_inner("dflash_config", target_layer_ids=[1, 3, 7]), r"\[1, 3, 7\]"),
        ("diffusion", set_inner("dflash_config", target_layer_ids=[1, 3]), "fc.weight"),
        ("diffusion", lambda config, _: config["dflash_config"].pop("mask_token_id"), "mask_token"),
    ],
)
def test_a_folder_that_means_nothing_is_refused_for_every_engine(
    kind: str, change: Change, message: str, served: str, tmp_path: Path
) -> None:
    folder = edit(written(tmp_path / "drafter", kind), change)
    for engine in ("vllm", "sglang"):
        assert re.search(message, refusal(engine, served, folder))


@pytest.mark.parametrize(("field", "kind"), [("hidden_size", "ar"), ("vocab_size", "diffusion")])
def test_a_drafter_of_another_target_is_refused_with_both_sizes(
    field: str, kind: str, served: str, tmp_path: Path
) -> None:
    size = {"hidden_size": 32, "vocab_size": 300}[field]
    both = {field: size} | ({"target_hidden_size": 32} if field == "hidden_size" else {})
    folder = written(tmp_path / "drafter", kind, shape=replace(SHAPE, **both))
    told = refusal("vllm", served, folder)
    assert f"{field} is {size}, that of the target {served} is" in told


def test_a_drafter_wider_than_its_target_is_refused(served: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "drafter", "ar", shape=replace(SHAPE, hidden_size=96))
    assert "hidden_size is 96" in refusal("sglang", served, folder)


def test_the_command_alone_goes_to_standard_output(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(edit(written(tmp_path / "drafter", "ar"), without("head_dim")))
    assert main(["vllm", served, folder, "--num-speculative-tokens", "2", "--port", "9"]) == 0
    shown = capsys.readouterr()
    expected = launch("vllm", served, folder, num_speculative_tokens=2, port=9).shell()
    assert shown.out == f"{expected}\n"
    assert "note: head_dim is missing" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vllm", "{target}", "nowhere"], "neither a folder nor a hub id"),
        (["vllm", "{empty}", "{drafter}"], "the config of the target"),
    ],
)
def test_what_is_not_there_ends_the_command_with_one_line_and_status_2(
    arguments: list[str],
    message: str,
    served: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"target": served, "empty": str(tmp_path), "drafter": ""}
    places["drafter"] = str(written(tmp_path / "drafter", "ar"))
    assert main([word.format(**places) for word in arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def documented() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    lines = re.sub(r" *\\\n *", " ", "\n".join(blocks)).splitlines()
    return [line for line in lines if line.startswith("python -m whiflash_infer.")]


@pytest.mark.parametrize("command", documented())
def test_a_documented_command_runs(command: str, served: str, tmp_path: Path) -> None:
    """In a folder that has what `make demo` leaves behind, and a tiny target by its name."""
    home = tmp_path / "artifacts" / "smollm2_135m"
    for kind in ("ar", "diffusion"):
        written(home / f"{kind}_drafter", kind)
    shutil.copytree(served, tmp_path / "target")
    words = shlex.split(re.sub(r"\s+#.*", "", command))
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_page_holds_a_command_for_either_engine_and_drafter() -> None:
    found = " ".join(documented())
    for engine in ("vllm", "sglang"):
        for kind in ("ar", "diffusion"):
            assert f"serving {engine} target artifacts/smollm2_135m/{kind}_drafter" in found
