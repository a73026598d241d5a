"""What the stages that make conversations share: building from the configuration, and telling."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from whiflash_infer.chat import Chat, ChatOptions
from whiflash_infer.errors import UserError
from whiflash_train.data.selection import DataSettings, read_evaluation_turns
from whiflash_train.data.sources import DataSource
from whiflash_train.data.tally import Tally
from whiflash_train.redaction import without_secrets

console = Console()


def build_section(cfg: DictConfig, name: str) -> Any:
    """The object a section describes.

    Raises: UserError naming the section when a value has the wrong type or is out of range.
    """
    try:
        return instantiate(OmegaConf.select(cfg, name), _convert_="all")
    except InstantiationException as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"section {name}: {cause}") from None


def build_sources(cfg: DictConfig, name: str) -> dict[str, DataSource]:
    """The data sources of a section, by name.

    Raises: UserError when a value is missing or wrong.
    """
    section = OmegaConf.select(cfg, name) or {}
    group = "source" if name == "source" else f"source@{name}"
    for source, fields in section.items():
        if "_target_" not in fields:
            keys = ", ".join(map(str, fields))
            raise UserError(
                f"{name}.{source} is set in part only ({keys}): name {source} in {group}=[...], or "
                "leave its keys out"
            )
    missing = [
        f"{name}.{source}.{key}"
        for source, fields in section.items()
        for key in fields
        if OmegaConf.is_missing(fields, key)
    ]
    if missing:
        raise UserError(f"the command line must also give: {' '.join(f'{m}=...' for m in missing)}")
    if not section:
        raise UserError(f"{name} names no data: choose from conf/source, such as source=builtin")
    return {str(source): build_section(cfg, f"{name}.{source}") for source in section}


def chat_options(cfg: DictConfig) -> ChatOptions:
    return build_section(cfg, "chat")


def load_chat(cfg: DictConfig) -> Chat:
    """The text side of the configured target; its weights are not read."""
    source = instantiate(cfg.target.source, _convert_="all")
    return Chat.from_pretrained(
        source.resolve(), chat_options(cfg), trust_remote_code=cfg.target.trust_remote_code
    )


def data_settings(cfg: DictConfig) -> tuple[DataSettings, dict[str, DataSource], set[str]]:
    """The settings, the sources, and the user turns of the evaluation prompts."""
    settings: DataSettings = build_section(cfg, "data")
    sources = build_sources(cfg, "source")
    try:
        evaluation = read_evaluation_turns(build_sources(cfg, "evaluate.source"), settings.roles)
    except UserError as error:
        console.print(f"overlap with the evaluation prompts is not checked: {error}")
        evaluation = set()
    return settings, sources, evaluation


def conversations_manifest(cfg: DictConfig, target: dict[str, Any]) -> dict[str, Any]:
    """The manifest of conversations, but for what their writer tells.

    target: what the rows depend on; without weights when the target did not write the answers.
    """
    sections = ("source", "data", "chat", "generate", "engine")
    config = without_secrets({name: _plain(cfg[name]) for name in sections if name in cfg})
    return {
        "target": {"name": cfg.target.name, **target},
        "chat": chat_options(cfg).manifest(),
        "seed": cfg.seed,
        "config": config,
    }


def show_counts(tally: Tally, counts: dict[str, Any]) -> None:
    """One line that adds up, the reasons with their first places, and the splits."""
    console.print(str(tally), soft_wrap=True, highlight=False)
    for line in tally.details():
        console.print(Text(f"  {line}"), soft_wrap=True)
    columns = ("conversations", "rows", "tokens", "supervised", "truncated")
    table = Table(title="conversations")
    table.add_column("split")
    for name in columns:
        table.add_column(name, justify="right")
    for split, found in counts["splits"].items():
        table.add_row(split, *(f"{found.get(name, 0):,}" for name in columns))
    console.print(table)


def _plain(section: Any) -> Any:
    return (
        OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    )
