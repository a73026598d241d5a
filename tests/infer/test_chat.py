from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from tests.data.templates import CHATML, FAMILIES, GEMMA, LLAMA3, REASONING, Family
from whiflash_infer.chat import Chat, ChatOptions, TemplateRejects, find_stop_ids
from whiflash_infer.errors import UserError
from whiflash_infer.sources import byte_tokenizer

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("family", "marker"),
    [
        ("chatml", "<|im_start|>assistant\n"),
        ("llama3", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("gemma", "<start_of_turn>model\n"),
        ("mistral", "[/INST]"),
        ("harmony", "<|start|>assistant"),
        ("reasoning", "<|im_start|>assistant\n"),
    ],
)
def test_the_marker_of_an_answer_is_what_the_template_asks_for_one_with(
    family: str, marker: str
) -> None:
    assert FAMILIES[family].chat().answer_marker == marker


def test_the_marker_holds_what_the_prompt_writes_for_the_answer() -> None:
    chat = REASONING.chat(ChatOptions(enable_thinking=False))
    assert chat.answer_marker == "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_running_text_opens_with_the_bos_that_the_tokenizer_adds(family: str) -> None:
    opening = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>"}
    chat = FAMILIES[family].chat()
    assert chat.tokenizer.decode(chat.opening_ids) == opening.get(family, "")
    assert len(chat.opening_ids) == (family in opening)


def test_a_bos_that_only_the_template_prints_does_not_open_running_text() -> None:
    assert replace(LLAMA3, opens_with_bos=False).chat().opening_ids == []


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
        ("gemma", "<bos><start_of_turn>user\nHi<end_of_turn>\n"),
        ("mistral", "<s>[INST]Hi"),
    ],
)
def test_a_prompt_opens_with_one_bos_and_ends_with_the_marker(family: str, prompt: str) -> None:
    # FAULTS U24: the template prints one, and the tokenizer adds another.
    chat = FAMILIES[family].chat()
    assert chat.tokenizer.decode(chat.prompt_ids(HI)) == prompt + chat.answer_marker


def test_nothing_to_encode_is_no_call_of_the_tokenizer() -> None:
    assert CHATML.chat().encode([]) == []


# ---- special tokens


@pytest.mark.parametrize(
    ("family", "stop_ids", "pad"),
    [
        (GEMMA, {4}, 1),  # eos
        (replace(CHATML, eos=None), {2, 0}, 0),  # the lowest stop token
        (replace(CHATML, eos=None), set(), 0),
    ],
)
def test_a_tokenizer_without_pad_and_unk_pads_with_a_valid_id(
    family: Family, stop_ids: set[int], pad: int
) -> None:
    # FAULTS U25: padded with unk, which may be None too.
    tokenizer = family.tokenizer()
    assert tokenizer.pad_token_id is None
    assert tokenizer.unk_token_id is None
    assert Chat(tokenizer, frozenset(stop_ids)).pad_id == pad


def test_a_pad_token_is_used_where_there_is_one() -> None:
    tokenizer = GEMMA.tokenizer()
    tokenizer.pad_token = "<pad>"
    assert Chat(tokenizer, frozenset([1])).pad_id == 0


def test_special_tokens_are_the_added_ones_and_the_stops_but_no_added_words() -> None:
    tokenizer = CHATML.tokenizer()
    stop = tokenizer.get_vocab()["z"]
    special = Chat(tokenizer, frozenset([stop])).special_ids
    assert special == {0, 1, 2, stop}
    assert tokenizer.get_vocab()["<tool_call>"] not in special


def test_stop_tokens_are_one_or_several_and_all_that_name_them_count() -> None:
    holders: list[Any] = [
        SimpleNamespace(eos_token_id=[2, 7]),
        SimpleNamespace(eos_token_id=3),
        SimpleNamespace(eos_token_id=None),
        SimpleNamespace(),
        None,
    ]
    assert find_stop_ids(*holders) == {2, 3, 7}


@pytest.mark.parametrize(("generation", "stops"), [([3, 4], {3, 4, 1, 2}), (None, {1, 2})])
def test_a_chat_is_loaded_without_any_weights(
    tmp_path: Path, generation: list[int] | None, stops: set[int]
) -> None:
    CHATML.tokenizer().save_pretrained(tmp_path)  # eos 2
    LlamaConfig(eos_token_id=1).save_pretrained(tmp_path)
    if generation is not None:
        GenerationConfig(eos_token_id=generation).save_pretrained(tmp_path)  # pyright: ignore
    chat = Chat.from_pretrained(str(tmp_path))
    assert chat.stop_ids == stops
    assert chat.render(HI) == "<|im_start|>user\nHi<|im_end|>\n"
    assert chat.identity() == CHATML.chat().identity()


# ---- templates and options


def test_a_target_without_a_template_is_told_how_to_give_one() -> None:
    # FAULTS U08: the example in the docs crashed with a base model.
    chat = replace(CHATML, template=None).chat()
    for asks in (chat.require_template, lambda: chat.render(HI), lambda: chat.prompt_ids(HI)):
        with pytest.raises(UserError, match=r"no chat template.*chat\.template_file="):
            asks()


def test_a_template_file_replaces_the_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.content }} ü>{% endfor %}", encoding="utf-8")
    chat = CHATML.chat(ChatOptions(template_file=str(file)))
    assert chat.render(HI) == "<Hi ü>"


def test_a_template_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat\.template_file: .*none\.jinja does not exist"):
        CHATML.chat(ChatOptions(template_file=str(tmp_path / "none.jinja")))


def test_a_changed_character_of_the_template_changes_its_identity_and_not_the_tokenizers(
    tmp_path: Path,
) -> None:
    # FAULTS U15: the template's name was the key of a cache, its text was not.
    file = tmp_path / "mine.jinja"
    options = ChatOptions(template_file=str(file))
    file.write_text("{{ messages[0].content }}.")
    before = CHATML.chat(options).identity()
    assert CHATML.chat(options).identity() == before
    file.write_text("{{ messages[0].content }}!")
    after = CHATML.chat(options).identity()
    assert after["chat_template"] != before["chat_template"]
    assert after["tokenizer"] == before["tokenizer"]


def test_another_token_changes_the_identity_of_the_tokenizer_and_not_the_templates() -> None:
    before = CHATML.chat().identity()
    after = replace(CHATML, words=("<tool_call>",)).chat().identity()
    assert after["tokenizer"] != before["tokenizer"]
    assert after["chat_template"] == before["chat_template"]


@pytest.mark.parametrize(
    ("options", "rendered"),
    [
        (ChatOptions(), "Hi||"),
        (ChatOptions(enable_thinking=True), "Hi|True|"),
        (ChatOptions(enable_thinking=False), "Hi|False|"),
        (ChatOptions(template_kwargs={"mood": "calm"}), "Hi||calm"),
        # What has a field of its own is decided there.
        (ChatOptions(enable_thinking=False, template_kwargs={"enable_thinking": 1}), "Hi|False|"),
    ],
)
def test_options_reach_the_template(options: ChatOptions, rendered: str) -> None:
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ mood }}"
    assert replace(CHATML, template=template).chat(options).render(HI) == rendered


def test_what_changes_the_text_is_told_of_the_options_and_a_files_place_is_not() -> None:
    # FAULTS U03: the mode of thinking was not recorded. The template itself is in the identity.
    options = ChatOptions(template_file="a", enable_thinking=True, template_kwargs={"mood": 1})
    assert options.manifest() == {"enable_thinking": True, "template_kwargs": {"mood": 1}}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('No such role.\nBye.') }}", "No such role."),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{% for", "unexpected 'end of template'"),
    ],
)
def test_whatever_a_template_fails_with_is_a_refusal_in_one_line(
    template: str, message: str
) -> None:
    chat = replace(CHATML, template=template).chat()
    with pytest.raises(TemplateRejects, match=message) as caught:
        chat.render(HI)
    assert "\n" not in str(caught.value)


def test_a_template_that_says_nothing_of_a_tool_call_refuses_it() -> None:
    # It would render an empty answer, and drafters would learn to end at once.
    chat = Chat(byte_tokenizer(), frozenset({2}))
    call = {"type": "function", "function": {"name": "book_flight", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with pytest.raises(TemplateRejects, match="does not render the call of 'book_flight'"):
        chat.render(messages)
