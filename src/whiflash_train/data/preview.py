"""Rows as a reader sees them, with the trained tokens marked."""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from whiflash_infer.chat import Chat

_LONGEST = 600  # characters of one stretch; its middle is left out beyond


def marked_text(chat: Chat, ids: list[int], mask: list[bool]) -> Text:
    """The decoded row. Trained tokens stand in ⟦ ⟧, and in colour where there is any."""
    text = Text()
    for trained, stretch in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        decoded = _shortened(chat.tokenizer.decode([i for i, _ in stretch]))
        text.append(
            f"⟦{decoded}⟧" if trained else decoded, style="bold green" if trained else "dim"
        )
    return text


def show_masks(console: Console, chat: Chat, rows: list[tuple[str, list[int], list[bool]]]) -> None:
    """rows: (id, token ids, loss mask)."""
    for id_, ids, mask in rows:
        title = f"{id_}: {sum(mask)} of {len(ids)} tokens trained, in ⟦ ⟧"
        console.print(Panel(marked_text(chat, ids, mask), title=Text(title), title_align="left"))


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
