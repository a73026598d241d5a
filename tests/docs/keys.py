"""Which configuration keys there are, and which of them the prose names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tests.docs.pages import spans
from tests.stages import ROOT

CONF = ROOT / "conf"
# What a dotted span ends with when it names a file, and no key.
_FILES = "py json jsonl yaml toml md txt html png csv parquet arrow safetensors ckpt pt bin ipynb"
# Names of other programs, in spans like `name=value`.
_ELSEWHERE = {"logits_to_keep"}
_KEY = re.compile(r"(\+?)([a-z_]+(?:\.(?:[a-z_0-9]+|\*|<\w+>))+)(?:=.*)?$")
_CHOICE = re.compile(r"[+~]?([a-z_/]+)=([a-z_0-9]+)$")


def choices(group: str) -> set[str]:
    return {path.stem for path in (CONF / group).glob("[!_]*.yaml")}


def groups() -> set[str]:
    return {path.name for path in CONF.iterdir() if path.is_dir()}


@functools.cache
def known_keys() -> frozenset[str]:
    """Of every entry point, with every source and every choice that brings keys of its own."""
    sources = f"[{','.join(sorted(choices('source')))}]"
    groups_with_keys = ["target=hf", "engine=openai", "logger=wandb", f"source={sources}"]
    training = _composed("train", ["task=router", *groups_with_keys])
    evaluation = _composed("evaluate", [f"source@evaluate.source={sources}"])
    return frozenset(_keys(training) | _keys(evaluation))


def _composed(name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=overrides, return_hydra_config=True)


def _keys(cfg: DictConfig, prefix: str = "") -> set[str]:
    """Leaves and branches."""
    found: set[str] = set()
    for key in cfg:
        name = f"{prefix}{key}"
        found.add(name)
        missing = OmegaConf.is_missing(cfg, key) or OmegaConf.is_interpolation(cfg, str(key))
        if not missing and isinstance(cfg[key], DictConfig):
            found |= _keys(cfg[key], f"{name}.")
    return found


def named_keys(page: Path) -> set[str]:
    """The dotted keys in the code spans of a page, with or without a value; of one that is new
    (`+a.b=c`), where it is added."""
    words = {word for span in spans(page) for word in span.split()}
    matches = [match for word in words if (match := _KEY.match(word))]
    found = {match[2].rsplit(".", 1)[0] if match[1] else match[2] for match in matches}
    sections = {key.split(".")[0] for key in known_keys()} | {"fit"}
    return {
        key
        for key in found
        if key.split(".")[0] in sections and key.rsplit(".", 1)[-1] not in _FILES.split()
    }


def exists(key: str) -> bool:
    """`*` and `<name>` stand for any part; `fit.x` for that of any task."""
    parts = [
        r"[^.]+" if part == "*" or part[0] == "<" else re.escape(part) for part in key.split(".")
    ]
    start = r"(\w+\.)?" if parts[0] == "fit" else ""
    pattern = re.compile(start + r"\.".join(parts))
    return any(pattern.fullmatch(known) for known in known_keys())


def named_choices(page: Path) -> set[tuple[str, str]]:
    """(group or key, value) of spans such as `engine=openai`."""
    words = {word for span in spans(page) for word in span.split()}
    found = {(match[1], match[2]) for word in words if (match := _CHOICE.match(word))}
    return {(name, value) for name, value in found if name not in _ELSEWHERE}


def can_be_chosen(name: str, value: str) -> bool:
    """A choice of a group that there is; or a key, of any section."""
    if name in groups():
        return value in choices(name)
    if name.startswith("hydra/"):
        return True
    return any(known == name or known.endswith(f".{name}") for known in known_keys())
