"""Chat template families in small: their structure in our own words, each with a byte tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from whiflash_infer.chat import Chat, ChatOptions
from whiflash_train.data.masks import MaskedRow

_CHATML = r"""
{%- if tools %}
    {{- '<|im_start|>tools\n' + tools | map(attribute='function.name') | join + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# The same text; answers stand in tags, by which transformers makes a mask of its own.
_CHATML_TAGGED = r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# The first line counts the messages, so it is another one as soon as the answer is there.
_UNSTABLE = "{{ '<|im_start|>' + messages | length | string + '\\n' }}" + _CHATML

# The whole text ends with another special token, behind the end of the turn.
_PHI = r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}
"""

_PLAIN_WORDS = r"""
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\n' }}
{%- endfor %}
{{- 'assistant: ' if add_generation_prompt }}
"""

_LLAMA3 = r"""
{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
    {{- 'Call ' + tools | map(attribute='function.name') | join + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if message.reasoning_content %}
        {{- '<thinking>' + message.reasoning_content + '</thinking>\n' }}
    {%- endif %}
    {{- message.content | trim }}
    {%- for call in message.tool_calls %}
        {{- call.function | tojson }}
    {%- endfor %}
    {{- '<|eom_id|>' if message.tool_calls else '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# No system role and no tools: a system message opens the first user turn.
_GEMMA = r"""
{{- bos_token }}
{%- set opened = messages[0].role == 'system' %}
{%- set turns = messages[1:] if opened else messages %}
{%- if tools %}
    {{- raise_exception('This model calls no tools') }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('User and assistant take turns') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('user' if message.role == 'user' else 'model') + '\n' }}
    {{- messages[0].content + '\n\n' if opened and loop.first }}
    {{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""

# What the system says and the tools stand in the last user turn: history is rewritten.
_MISTRAL = r"""
{{- bos_token }}
{%- set turns = messages | rejectattr('role', 'eq', 'system') | list %}
{%- set asked = namespace(last=0) %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- set asked.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- set is_last = loop.index0 == asked.last %}
        {%- if tools and is_last %}
            {{- '[TOOLS]' + tools | map(attribute='function.name') | join + '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}
        {{- messages[0].content + '\n\n' if is_last and messages[0].role == 'system' }}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS]' + message.tool_calls | map(attribute='function') | list | tojson }}
        {{- eos_token }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Spaces around the markers, as for tokenizers whose words begin with a space.
_MISTRAL_SPACED = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# Answers in channels. The last one ends with another token than earlier ones, and the analysis
# before the last question is dropped.
_HARMONY = r"""
{{- '<|start|>system<|message|>Test.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- tools | map(attribute='function.name') | join + '<|end|>' }}
{%- endif %}
{%- set now = namespace(called='', asked=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set now.asked = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.reasoning_content and loop.index0 > now.asked %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
        {{- message.reasoning_content + '<|end|>' }}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|start|>functions.' + now.called + ' to=assistant<|message|>' }}
        {{- message.content + '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- set now.called = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + ('developer' if message.role == 'system' else message.role) }}
        {{- '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""

# Thinking stays in the turns after the last question, and the last answer always shows a place
# for it; the generation prompt fills that place when thinking is off.
_REASONING = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + tools | map(attribute='function.name') | join + '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set asked.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > asked.last
           and (loop.last or message.reasoning_content) %}
        {{- '<think>\n' + message.reasoning_content | default('') + '\n</think>\n\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and its tokenizer: one token a byte, `special` from id 0, then `words`.

    stops: what ends an answer when it is generated. merges: pairs of bytes that are one token.
    opens_with_bos: whether the tokenizer adds a BOS of its own.
    """

    template: str | None
    special: tuple[str, ...]
    stops: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    words: tuple[str, ...] = ()
    merges: tuple[tuple[str, str], ...] = ()
    opens_with_bos: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        names = [*self.special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        names += [left + right for left, right in self.merges]
        backend = Tokenizer(models.BPE(vocab=_numbered(names), merges=list(self.merges)))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, special=True) for t in self.special])
        backend.add_tokens([AddedToken(t, special=False) for t in self.words])
        if self.opens_with_bos and self.bos is not None:
            id_ = self.special.index(self.bos)
            backend.post_processor = processors.TemplateProcessing(
                single=f"{self.bos} $A", special_tokens=[(self.bos, id_)]
            )
        return _wrapped(backend, self.template, self.bos, self.eos)

    def chat(self, options: ChatOptions | None = None) -> Chat:
        return Chat(self.tokenizer(), frozenset(map(self.special.index, self.stops)), options)


CHATML = Family(
    template=_CHATML,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    stops=("<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    words=("<tool_call>", "</tool_call>"),
)
CHATML_TAGGED = replace(CHATML, template=_CHATML_TAGGED)
UNSTABLE = replace(CHATML, template=_UNSTABLE)
PLAIN_WORDS = replace(CHATML, template=_PLAIN_WORDS)
# Two newlines are one token, and so are a full stop and a newline. Ċ is the newline's byte.
CHATML_MERGING = replace(CHATML, merges=(("Ċ", "Ċ"), (".", "Ċ")))
PHI = Family(
    template=_PHI,
    special=("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
    stops=("<|endoftext|>", "<|end|>"),
    eos="<|endoftext|>",
)
LLAMA3 = Family(
    template=_LLAMA3,
    special=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    bos="<|begin_of_text|>",
    eos="<|eot_id|>",
    opens_with_bos=True,
)
# The end of a turn is not the eos token, and nothing but the template tells of it.
GEMMA = Family(
    template=_GEMMA,
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    stops=("<eos>",),
    bos="<bos>",
    eos="<eos>",
    opens_with_bos=True,
)
MISTRAL = Family(
    template=_MISTRAL,
    special=(
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOLS]",
        "[/TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    stops=("</s>",),
    bos="<s>",
    eos="</s>",
    opens_with_bos=True,
)
HARMONY = Family(
    template=_HARMONY,
    special=(
        "<|endoftext|>",
        "<|return|>",
        "<|call|>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
    ),
    stops=("<|endoftext|>", "<|return|>", "<|call|>"),
    eos="<|return|>",
)
REASONING = Family(
    template=_REASONING,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    stops=("<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    words=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
FAMILIES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "reasoning": REASONING,
}


def metaspace_chat(template: str = _MISTRAL_SPACED) -> Chat:
    """Mistral's older tokenizers: the space before a word is part of it, written ▁, and running
    text gets one in front. Brackets of [INST] are letters like any."""
    words = ["▁", "▁H", "▁Hi", "▁B", "▁By", "▁Bye"]
    merges = [("▁", "H"), ("▁H", "i"), ("▁", "B"), ("▁B", "y"), ("▁By", "e")]
    letters = [chr(code) for code in range(33, 127)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = _numbered(names)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return Chat(_wrapped(backend, template, "<s>", "</s>"), frozenset([vocab["</s>"]]))


def drawn(chat: Chat, row: MaskedRow) -> str:
    """The row's text, its supervised stretches in ⟦ and ⟧."""
    stretches = groupby(zip(row.ids, row.mask, strict=True), key=lambda pair: pair[1])
    texts = [(kept, chat.tokenizer.decode([i for i, _ in part])) for kept, part in stretches]
    return "".join(f"⟦{text}⟧" if kept else text for kept, text in texts)


def drawn_tokens(chat: Chat, row: MaskedRow) -> str:
    """The row's tokens between bars, those that are supervised marked with #."""
    names = chat.tokenizer.convert_ids_to_tokens(row.ids)
    pairs = zip(names, row.mask, strict=True)
    return "|".join(f"#{name}" if kept else name for name, kept in pairs)


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(names)}


def _wrapped(
    backend: Tokenizer, template: str | None, bos: str | None, eos: str | None
) -> PreTrainedTokenizerFast:
    named: dict[str, Any] = {"bos_token": bos, "eos_token": eos}
    given = {name: token for name, token in named.items() if token is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **given)
    tokenizer.chat_template = template
    return tokenizer
