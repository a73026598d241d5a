"""One prompt: its answer goes to stdout as it comes."""

from __future__ import annotations

import sys
from contextlib import closing

from rich.console import Console

from whiflash_infer.command.summary import summary
from whiflash_infer.command.text import TextStream
from whiflash_infer.engine import RoutedDecoder
from whiflash_infer.options import GenerationOptions
from whiflash_infer.types import Generation


def answer_prompt(
    decoder: RoutedDecoder, prompt: list[int], options: GenerationOptions, console: Console
) -> int:
    """Stream one answer. Returns the exit status: 1 when the target's numbers failed."""
    generation = _stream(decoder, prompt, options)
    rate = "-"
    if generation.decoded_tokens:
        rate = f"{generation.decoded_tokens / generation.decode_seconds:,.1f} in rounds"
    steered = f"policy {decoder.policy.name}" if options.arm is None else f"arm {options.arm}"
    console.print(summary(steered, [generation], rate=rate))
    if generation.error:
        console.print(f"error: {generation.error}; the answer ends there", markup=False)
    return 1 if generation.error else 0


def _stream(decoder: RoutedDecoder, prompt: list[int], options: GenerationOptions) -> Generation:
    text = TextStream(decoder.target.tokenizer, options.stop_strings)
    with closing(_Line()) as line:
        for piece in decoder.stream(prompt, options):
            if piece.generation is None:
                line.write(text.push(piece.ids))
                continue
            reason = piece.generation.finish_reason
            line.write(text.finish(piece.ids, stopped=reason == "stop_string"))
            return piece.generation
    raise AssertionError("every stream ends with its generation")


class _Line:
    """Writes at once, and leaves the cursor at the start of a line, interrupted or not."""

    def __init__(self) -> None:
        self._last = "\n"

    def write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._last = text

    def close(self) -> None:
        if not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
