"""The text side of a target: tokenizer, chat template, stop tokens. Needs no weights."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from whiflash_infer.artifacts import json_hash
from whiflash_infer.errors import UserError

Message = dict[str, Any]


class TemplateRejects(Exception):
    """The chat template refused a conversation; the message is the template's own."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are rendered. Part of what training and serving must share.

    template_file: a jinja file that replaces the tokenizer's own template.
    enable_thinking: given to the template where it is not None.
    template_kwargs: anything else the template reads.
    """

    template_file: str | None = None
    enable_thinking: bool | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def variables(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.template_kwargs, **thinking}

    def manifest(self) -> dict[str, Any]:
        """What a change of would make other text of the same conversation."""
        return {k: v for k, v in asdict(self).items() if k != "template_file"}


class Chat:
    """Renders and encodes conversations exactly as the target is served them."""

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], options: ChatOptions | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options or ChatOptions()
        self.stop_ids = stop_ids
        if self.options.template_file is not None:
            path = Path(self.options.template_file).expanduser()
            if not path.is_file():
                raise UserError(f"chat.template_file: {path} does not exist")
            tokenizer.chat_template = path.read_text(encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls, source: str, options: ChatOptions | None = None, *, trust_remote_code: bool = False
    ) -> Chat:
        """Tokenizer and stop tokens of a Hugging Face id or local folder, without its weights."""
        remote = {"trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(source, **remote)
        config = AutoConfig.from_pretrained(source, **remote).get_text_config()
        try:
            generation = GenerationConfig.from_pretrained(source)
        except OSError:  # the file is optional
            generation = None
        return cls(tokenizer, find_stop_ids(generation, config, tokenizer), options)

    @property
    def pad_id(self) -> int:
        """A valid id for padding; what it is does not matter, since lengths are always kept."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((i for i in ids if isinstance(i, int)), min(self.stop_ids, default=0))

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens with a meaning of their own: named ones, added special ones, stop tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special}
        return frozenset(special | set(self.tokenizer.all_special_ids) | self.stop_ids)

    @functools.cached_property
    def answer_marker(self) -> str:
        """What stands before an answer in rendered text, by which answers can be found there."""
        probe = "probe-of-a-question"
        question: list[Message] = [{"role": "user", "content": probe}]
        asked = self.render(question, add_generation_prompt=True).rpartition(probe)[2]
        return asked.removeprefix(self.render(question).rpartition(probe)[2]) or asked

    @functools.cached_property
    def opening_ids(self) -> list[int]:
        """The BOS that the tokenizer opens running text with: one token, or none."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else []

    def identity(self) -> dict[str, str]:
        """Hashes of tokenizer and template; a changed character changes them."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer = backend.to_str() if backend is not None else self.tokenizer.get_vocab()
        template = getattr(self.tokenizer, "chat_template", None)
        return {"tokenizer": json_hash(tokenizer), "chat_template": json_hash(template)}

    def require_template(self) -> None:
        """Raises: UserError when there is no template to render with."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(
                "the target has no chat template, so conversations cannot be rendered: use an "
                "instruct model, or give a jinja file with chat.template_file=..."
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation.

        Raises: TemplateRejects when the template refuses it, or says nothing of a tool call: where
            the call should be there would be an empty answer.
        """
        self.require_template()
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options.variables(),
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateRejects(
                str(error).splitlines()[0] if str(error) else repr(error)
            ) from None
        for name in _called(messages):
            if name not in text:
                raise TemplateRejects(f"the template does not render the call of {name!r}")
        return text

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered texts. Nothing is added: the template prints its own BOS."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt_ids(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins."""
        return self.encode([self.render(messages, tools, add_generation_prompt=True)])[0]


def _called(messages: Sequence[Message]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    return [call["function"]["name"] for call in calls]


def find_stop_ids(*holders: Any) -> frozenset[int]:
    """Union of the `eos_token_id` (one or several) of generation config, config and tokenizer."""
    named = [getattr(holder, "eos_token_id", None) for holder in holders]
    flat = [v if isinstance(v, list | tuple) else [v] for v in named]
    return frozenset(i for ids in flat for i in ids if isinstance(i, int))
