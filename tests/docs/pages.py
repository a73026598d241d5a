"""The pages of the documentation, and the blocks, spans, links and commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.stages import ROOT

README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SHELL = ("", "bash", "sh")  # every line of such a block is a command


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(page: Path) -> list[Block]:
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(page.name, language, text) for language, text in found]


def prose(page: Path) -> str:
    """The page without its blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """Code spans of the prose; one that is broken over two lines is one."""
    return [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    """Where the page's links lead, but for those into the net."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not link.startswith(("http://", "https://"))]


def anchors(page: Path) -> set[str]:
    """What `page#...` may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands() -> list[Command]:
    """Every command of every page, of the Makefile, and of the headers of configuration files, once
    each."""
    found = [Command(b.page, line) for page in PAGES for b in blocks(page) for line in _lines(b)]
    found += [
        Command(page.name, span) for page in PAGES for span in spans(page) if _is_command(span)
    ]
    found += [*_of_makefile(), *_of_configuration()]
    return list({command.text: command for command in reversed(found)}.values())[::-1]


def programs(page: Path) -> list[str]:
    """What the prose names without arguments: `-m module` or the path of a script."""
    return [
        match[1]
        for span in spans(page)
        if (match := re.match(r"python (-m [\w.]+|[\w/]+\.py)$", span))
    ]


def _lines(block: Block) -> list[str]:
    if block.language not in _SHELL:
        return []
    whole = re.sub(r"\s*\\\n\s*", " ", block.text)
    lines = re.sub(r"(^|\s+)#\s.*$", "", whole, flags=re.MULTILINE).splitlines()
    return [line.strip() for line in lines if line.strip()]


def _is_command(text: str) -> bool:
    """Whether it is a whole one; `<...>` leaves something out."""
    whole = r"(python3? (-m \S+|[^\s-]\S*) |(make|pip) |(accelerate|torchrun) .*\.py)[^<]*$"
    return bool(re.match(whole, text))


def disguised(block: Block) -> list[str]:
    """Lines of a block that is marked as no commands, which look like commands all the same."""
    if block.language in _SHELL:
        return []
    return [line for line in block.text.splitlines() if _is_command(f"{line} ")]


def _of_makefile() -> Iterator[Command]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in re.findall(r"^\t(.*)$", text, re.MULTILINE):
        yield Command("Makefile", line.removeprefix("@").replace("$(PY)", "python"))


def _of_configuration() -> Iterator[Command]:
    """Indented lines of their comments."""
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        text = "\n".join(re.findall(r"^# {3,}(.*)$", path.read_text(encoding="utf-8"), re.M))
        for line in _lines(Block(path.name, "", text)):
            if _is_command(line):
                yield Command(path.name, line)


def described_files() -> dict[str, str]:
    """Configuration files that the pages tell to write: blocks that begin with their path."""
    texts = [b.text for page in PAGES for b in blocks(page) if b.language == "yaml"]
    found = [(re.match(r"# (conf/\S+\.yaml)\n", text), text) for text in texts]
    return {match[1]: text for match, text in found if match}


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
