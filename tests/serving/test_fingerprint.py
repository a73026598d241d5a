from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.fakes import small_config
from whiflash_infer.errors import ArtifactError
from whiflash_infer.serving.fingerprint import weights_fingerprint_of_files
from whiflash_infer.target import Target, weights_fingerprint

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def saved(
    folder: Path, *, tied: bool = True, shard_size: str = "1GB", dtype: str = "float32"
) -> str:
    """Save a model of random weights; its fingerprint as the loaded model has it."""
    config = small_config(LlamaConfig, num_layers=2)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert "lm_head.weight" in loaded.state_dict()
    return weights_fingerprint(sorted(loaded.state_dict().items()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_files_have_the_fingerprint_of_the_loaded_model(
    tmp_path: Path, tied: bool, shard_size: str, dtype: str
) -> None:
    expected = saved(tmp_path, tied=tied, shard_size=shard_size, dtype=dtype)
    assert (tmp_path / INDEX).is_file() == (shard_size == "20KB")
    assert weights_fingerprint_of_files(tmp_path, tied=tied) == expected


def test_files_of_a_target_have_the_fingerprint_of_its_identity(target: Target) -> None:
    folder = Path(target.model.config._name_or_path)  # pyright: ignore
    tied = target.config.tie_word_embeddings
    assert weights_fingerprint_of_files(folder, tied=tied) == target.identity().weights


def test_a_head_that_lies_beside_the_embedding_is_read_as_it_is(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / WEIGHTS, {"format": "pt"})
    assert weights_fingerprint_of_files(tmp_path, tied=True) == expected


def test_tensors_that_no_model_reads_do_not_matter(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    tensors = load_file(tmp_path / WEIGHTS) | spare
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    assert weights_fingerprint_of_files(tmp_path, tied=True) == expected


def test_another_value_of_one_weight_makes_another_fingerprint(tmp_path: Path) -> None:
    before = saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.layers.1.input_layernorm.weight"][5] += 0.5
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    assert weights_fingerprint_of_files(tmp_path, tied=True) != before


def test_a_folder_without_safetensors_has_none(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    assert weights_fingerprint_of_files(tmp_path, tied=True) is None


def test_a_folder_without_a_config_has_none(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config.json").unlink()
    assert weights_fingerprint_of_files(tmp_path, tied=True) is None


def test_experts_that_loading_joins_have_none(tmp_path: Path) -> None:
    config = small_config(Qwen3MoeConfig, num_layers=1)
    config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size = 4, 2, 16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert any("experts.3" in name for name in load_file(tmp_path / WEIGHTS))
    assert weights_fingerprint_of_files(tmp_path, tied=True) is None


def test_names_that_loading_changes_have_none(tmp_path: Path) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / WEIGHTS, {"format": "pt"})
    assert weights_fingerprint_of_files(tmp_path, tied=True) is None


def test_packed_weights_have_none(tmp_path: Path) -> None:
    saved(tmp_path)
    config = LlamaConfig.from_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(tmp_path)
    assert weights_fingerprint_of_files(tmp_path, tied=True) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ArtifactError, match=WEIGHTS):
        weights_fingerprint_of_files(tmp_path, tied=True)
