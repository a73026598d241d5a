from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.fakes import tiny_ar, tiny_diffusion
from tests.infer.dialects import DIALECTS, TAPS, direct_ar, direct_diffusion, outputs
from whiflash_infer.artifacts import read_json
from whiflash_infer.checkpoint import load_drafter
from whiflash_infer.drafters.load import load_arms
from whiflash_infer.errors import ArtifactError
from whiflash_infer.exchange import Given, read_drafter, write_drafter
from whiflash_infer.exchange.__main__ import main
from whiflash_infer.target import Target

GIVEN = Given(tap_layer_ids=TAPS, rope_theta=300.0)
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def load(path: Path) -> Any:
    return load_drafter(path, made_by="-", dtype=torch.float32, device="cpu")


def test_a_pickle_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    path = DIALECTS["safeai"]().write(tmp_path / "theirs")
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin alone.*allow_pickle=true"):
        read_drafter(path, given=GIVEN)
    net = read_drafter(path, given=GIVEN, allow_pickle=True).net
    for found, expected in zip(outputs(net), outputs(direct_ar()), strict=True):
        assert torch.equal(found, expected)


class Trap:
    """Touches a file when it is unpickled by a loader that runs what it reads."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (self.path,))


def test_code_in_a_pickle_is_not_run_even_if_pickles_are_allowed(tmp_path: Path) -> None:
    path = DIALECTS["safeai"]().write(tmp_path / "theirs")
    sprung = tmp_path / "sprung"
    torch.save({"fc.weight": Trap(str(sprung))}, path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="not a plain set of tensors"):
        read_drafter(path, given=GIVEN, allow_pickle=True)
    assert not sprung.exists()


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    path = DIALECTS["safeai"]().write(tmp_path / "theirs")
    torch.save({"model": {"fc.weight": torch.ones(2)}}, path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="not a plain set of tensors"):
        read_drafter(path, given=GIVEN, allow_pickle=True)


def test_safetensors_are_read_where_a_pickle_lies_beside_them(tmp_path: Path) -> None:
    path = DIALECTS["vllm"]().write(tmp_path / "theirs")
    (path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    read_drafter(path, allow_pickle=True)


def test_code_in_a_drafters_folder_is_never_imported(tmp_path: Path) -> None:
    path = DIALECTS["zlab"]().write(tmp_path / "theirs")
    sprung = tmp_path / "sprung"
    (path / "dflash.py").write_text(f"import os\nos.mkdir({str(sprung)!r})\nDFlashDraftModel = 1\n")
    read_drafter(path)
    assert not sprung.exists()


def test_a_mask_embedding_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    path = DIALECTS["zlab"]().write(tmp_path / "theirs")
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"mask_embedding\.pt"):
        read_drafter(path)


def in_two_shards(folder: Path) -> dict[str, str]:
    """Split the tensors of a folder over two files; where each one went."""
    tensors = DIALECTS["vllm"]().tensors
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({n: tensors[n] for n, at in places.items() if at == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_weights_in_shards_are_read_whole(tmp_path: Path) -> None:
    path = DIALECTS["vllm"]().write(tmp_path / "theirs")
    in_two_shards(path)
    for found, expected in zip(outputs(read_drafter(path).net), outputs(direct_ar()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": "model-3.safetensors"}, "model-3.safetensors is missing"),
        ({"norm.weight": "../model-1.safetensors"}, "is no file of this folder"),
        ({"lost.weight": "model-1.safetensors"}, r"no shard holds: \['lost.weight'\]"),
    ],
)
def test_an_index_that_names_what_is_not_there_is_refused(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = DIALECTS["vllm"]().write(tmp_path / "theirs")
    places = in_two_shards(path) | change
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ArtifactError, match=message):
        read_drafter(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "neither a folder nor a hub id"),
        ("a/b/c", "neither a folder nor a hub id"),
        ("empty", "config.json is missing"),
        ("bare", "holds no model.safetensors, model.safetensors.index.json or pytorch_model.bin"),
        ("broken", "model.safetensors cannot be read"),
    ],
)
def test_a_source_that_is_no_drafter_is_named(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "bare", "broken"):
        (tmp_path / name).mkdir()
    for name in ("bare", "broken"):
        (tmp_path / name / "config.json").write_text(json.dumps(DIALECTS["vllm"]().config))
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ArtifactError, match=message):
        read_drafter(source)


def test_a_hub_id_without_a_hub_ends_the_command_with_its_reason_and_status_2(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "whiflash_infer.exchange", "owner/no-such-drafter"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), "--layout", "zlab"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "owner/no-such-drafter is no folder here, and the hub does not give it" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("readme", "config", "expected"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- x\n---\n# Head", {}, "apache-2.0"),
        ("---\ntags:\n- x\nlicense: 'llama3.1'\n---\n", {}, "llama3.1"),
        ("# Head\nlicense: none of this\n", {}, None),
        ("---\nlicense: mit\n---\n", {"license": "cc-by-4.0"}, "cc-by-4.0"),
        (None, {"license": "cc-by-4.0"}, "cc-by-4.0"),
        (None, {}, None),
    ],
)
def test_the_license_is_kept_from_the_config_or_the_readme(
    readme: str | None, config: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    path = DIALECTS["vllm"]().write(tmp_path / "theirs")
    (path / "config.json").write_text(json.dumps({**DIALECTS["vllm"]().config, **config}))
    if readme is not None:
        (path / "README.md").write_text(readme)
    assert read_drafter(path).license == expected


def test_the_command_converts_and_tells_the_license_and_what_it_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DIALECTS["safeai"]().write(tmp_path / "theirs")
    (source / "README.md").write_text("---\nlicense: llama3.1\n---\n")
    options = ["--allow-pickle", "--layer-ids", "1,3,4", "--rope-theta", "300"]
    ours = tmp_path / "ours"
    status = main([str(source), str(ours), "--layout", "eagle3", *options, "--draft-length", "4"])
    assert status == 0
    told = capsys.readouterr().out
    assert "license: llama3.1" in told
    assert "note: head_dim is missing" in told
    net, manifest = load(ours)
    for found, expected in zip(outputs(net), outputs(direct_ar()), strict=True):
        assert torch.equal(found, expected)
    assert (manifest["license"], manifest["draft_length"]) == ("llama3.1", 4)
    assert read_json(ours / "config.json")["license"] == "llama3.1"


def test_the_command_goes_through_every_layout_and_back(tmp_path: Path) -> None:
    source: Path = tmp_path / "0"
    net = direct_diffusion()
    write_drafter(net, source, layout="zlab", manifest={"license": "mit"}, token_ids=TOKEN_IDS)
    for step, layout in enumerate(["speculators", "speculators", "zlab"], start=1):
        assert main([str(source), str(tmp_path / str(step)), "--layout", layout]) == 0
        source = tmp_path / str(step)
    loaded, manifest = load(source)
    assert loaded.config == net.config
    assert manifest["license"] == "mit"
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert read_json(source / "config.json") == read_json(tmp_path / "0" / "config.json")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["{theirs}", "{new}", "--layout", "zlab"], 2, "goes into eagle3 or speculators"),
        (["{theirs}", "{theirs}", "--layout", "eagle3"], 2, "exists; choose another folder or add"),
        (["{theirs}", "{new}", "--layout", "eagle3", "--target", "{new}"], 2, "cannot be loaded"),
        (["{new}", "{new}", "--layout", "eagle3"], 2, "neither a folder nor a hub id"),
    ],
)
def test_the_command_ends_with_one_line_and_status_2_where_something_is_to_mend(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = DIALECTS["vllm"]().write(tmp_path / "theirs")
    places = {"theirs": theirs, "new": tmp_path / "new"}
    assert main([part.format(**places) for part in arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_wrong_layout_is_told_which_ones_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), str(tmp_path / "new"), "--layout", "gguf"])
    assert stop.value.code == 2
    assert "eagle3" in capsys.readouterr().err


def test_public_drafters_converted_with_their_target_are_ready_to_run(
    target: Target, tmp_path: Path
) -> None:
    where = target.model.config._name_or_path  # pyright: ignore
    nets = {"ar": tiny_ar(target.drafter_shape), "diffusion": tiny_diffusion(target.drafter_shape)}
    layouts = {"ar": "eagle3", "diffusion": "zlab"}
    named = ["--target", where, "--target-name", target.name, "--draft-length", "4"]
    for kind, net in nets.items():
        theirs = tmp_path / f"{kind}_theirs"
        write_drafter(net, theirs, layout="speculators", manifest={}, token_ids=TOKEN_IDS)
        options = ["--layout", layouts[kind], "--num-target-layers", "8"]
        assert main([str(theirs), str(tmp_path / kind), *options, *named]) == 0
        assert main([str(theirs), str(tmp_path / f"{kind}_alone"), *options]) == 0
    arms, _ = load_arms(tmp_path / "ar", tmp_path / "diffusion", target)
    assert (arms["ar"].max_draft, arms["diffusion"].max_draft) == (4, 4)
    with pytest.raises(ArtifactError, match="config_hash: the artefact has None"):
        load_arms(tmp_path / "ar_alone", tmp_path / "diffusion", target)


def test_a_drafter_of_another_target_is_not_converted_for_this_one(
    target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = DIALECTS["vllm"]().write(tmp_path / "theirs")
    where = target.model.config._name_or_path  # pyright: ignore
    options = ["--layout", "eagle3", "--target", where]
    assert main([str(theirs), str(tmp_path / "ours"), *options]) == 2
    assert f"vocab_size is 40, that of the target {where} is" in capsys.readouterr().err
