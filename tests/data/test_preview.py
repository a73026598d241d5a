from __future__ import annotations

from rich.console import Console

from whiflash_infer.chat import Chat
from whiflash_infer.sources import byte_tokenizer
from whiflash_train.data.preview import marked_text, show_masks

CHAT = Chat(byte_tokenizer(), frozenset({2}))


def drawn(text: str, mask: str) -> tuple[list[int], list[bool]]:
    return CHAT.encode([text])[0], [c == "#" for c in mask]


def test_trained_stretches_stand_in_brackets_of_their_own() -> None:
    assert marked_text(CHAT, *drawn("abcdefg", ".##..##")).plain == "a⟦bc⟧de⟦fg⟧"


def test_a_letter_of_several_tokens_is_whole() -> None:
    assert marked_text(CHAT, *drawn("a你b", ".###.")).plain == "a⟦你⟧b"


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    console = Console(width=80)
    text = "[bold]x[/bold] [link=file:///]"
    with console.capture() as captured:
        show_masks(console, CHAT, [("[red]id[/red]", *drawn(text, "#" * len(text)))])
    assert f"⟦{text}⟧" in captured.get()
    assert f"[red]id[/red]: {len(text)} of {len(text)} tokens trained" in captured.get()


def test_the_middle_of_a_long_stretch_is_left_out() -> None:
    shown = marked_text(CHAT, *drawn("a" * 5000, "." * 5000)).plain
    assert len(shown) < 700
    assert "[... 4400 characters ...]" in shown
