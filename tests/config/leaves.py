"""Every value of the configuration, with another one in its place."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from tests.stages import ROOT
from whiflash_train.preparation import build_section

CONF = ROOT / "conf"
ENTRIES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
# The groups of which one file is chosen. Files of sources go together; the other groups change
# values of these.
GROUPS = ("target", "engine", "logger", "costs")
TARGET = "_target_"
# Without which another value of the leaf is refused.
BESIDE = {
    "ar_drafter.fit.monitor": {"decode_prompts": 1},
    "diffusion_drafter.draw_slots": {"objective": "decay"},
}


@dataclass(frozen=True)
class Leaf:
    """section: the innermost part above the leaf that names its class; None where there is none."""

    key: str
    entry: str
    choice: str
    section: str | None
    target: str | None

    @property
    def field(self) -> str:
        """The argument of the class that the leaf belongs to."""
        assert self.section is not None
        return self.key.removeprefix(f"{self.section}.").split(".")[0]

    def __str__(self) -> str:
        return f"{self.key} ({self.target.rpartition('.')[2]})" if self.target else self.key

    @property
    def value(self) -> Any:
        return _plain(OmegaConf.select(composed(self.entry, self.choice), self.key))

    def built(self, *changed: Any) -> Any:
        """Its section. changed: another value in its place, if any."""
        assert self.section is not None
        part = OmegaConf.create({"part": _section(self.entry, self.choice, self.section)})
        OmegaConf.update(part, "part", BESIDE.get(self.key, {}))
        for value in changed:
            OmegaConf.update(part, f"part{self.key.removeprefix(self.section)}", value, merge=False)
        return build_section(part, "part")


@functools.cache
def composed(entry: str, choice: str) -> DictConfig:
    """Without a value missing. choice: of a group, or empty."""
    overrides = [choice] if choice else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(entry, overrides=overrides, return_hydra_config=True)
    OmegaConf.set_readonly(cfg, False)
    OmegaConf.set_struct(cfg, False)
    cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    cfg.paths.root = str(ROOT)
    for key, value in values_of(cfg):
        if value == "???":
            OmegaConf.update(cfg, key, [1, 3, 4] if key.endswith("layer_ids") else "given")
    return cfg


@functools.cache
def _section(entry: str, choice: str, name: str) -> Any:
    return _plain(OmegaConf.select(composed(entry, choice), name))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def values_of(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key, nothing resolved; what names a class left out."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                yield from walk(value, f"{prefix}.{key}" if prefix else str(key))
        elif not prefix.endswith(TARGET):
            yield prefix, node

    return walk(OmegaConf.to_container(cfg, resolve=False), "")


def all_leaves() -> list[Leaf]:
    """Of every entry point, and of every file of every group; each once."""
    choices = [(entry, "") for entry in ENTRIES]
    choices += [("train", f"{group}={name}") for group in GROUPS for name in files_of(group)]
    choices.append(("train", f"source=[{','.join(files_of('source'))}]"))
    found: dict[str, Leaf] = {}
    for entry, choice in choices:
        cfg = composed(entry, choice)
        for key, _ in values_of(cfg):
            section, target = _section_of(cfg, key)
            leaf = Leaf(key, entry, choice, section, target)
            found.setdefault(str(leaf), leaf)
    return list(found.values())


def files_of(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def _section_of(cfg: DictConfig, key: str) -> tuple[str | None, str | None]:
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        section = ".".join(parts[:length])
        node = OmegaConf.select(cfg, section)
        if isinstance(node, DictConfig) and TARGET in node:
            return section, node[TARGET]
    return None, None


# --- other values ------------------------------------------------------------------------------


def other_values(value: Any, hint: Any) -> Iterator[Any]:
    """Some of which a class may refuse. hint: the annotation of the argument."""
    choices = list(_choices(hint))
    tried = [*choices, *([choice] for choice in choices), *_unlike(value)]
    yield from (other for other in tried if other != value)


def _unlike(value: Any) -> list[Any]:
    others: dict[type, Any] = {
        bool: lambda: [not value],
        int: lambda: [value + 1, 2 * value, value - 1],
        float: lambda: [value * 0.75, value + 1.0],
        str: lambda: [f"{value}_other", 2.0],
        list: lambda: [value[:-1], [*value, "other"], [*value, 7], ["http://other"]],
        dict: lambda: [{**value, "other": "other"}],
        type(None): lambda: [2, 32, 0.5, True, "other", ["other"], [4]],
    }
    return others[type(value)]()


def _choices(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _choices(part)


def hint_of(leaf: Leaf) -> Any:
    assert leaf.target is not None
    made = get_object(leaf.target)
    return get_type_hints(made).get(leaf.field) if leaf.key.endswith(f".{leaf.field}") else None


def differing(one: Any, other: Any) -> set[str]:
    """Fields in which two objects of a class differ."""
    return {f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


# --- what the code reads ------------------------------------------------------------------------


@functools.cache
def used_by_itself(target: str) -> frozenset[str]:
    """Of a class the fields that its own methods use, but for checks when it is built; of a
    function the arguments that it uses."""
    made = get_object(target)
    tree = ast.parse(textwrap.dedent(inspect.getsource(made))).body[0]
    if isinstance(tree, ast.FunctionDef):
        names = (n for part in tree.body for n in ast.walk(part) if isinstance(n, ast.Name))
        return frozenset(name.id for name in names)
    assert isinstance(tree, ast.ClassDef)
    methods = [
        part
        for part in tree.body
        if isinstance(part, ast.FunctionDef) and part.name != "__post_init__"
    ]
    return frozenset(
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


@functools.cache
def named_in_code() -> frozenset[str]:
    """Every dotted key that stands in the code behind `cfg.`."""
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "data_prep").glob("*.py"), *ROOT.glob("*.py")]
    nodes = (node for path in places for node in ast.walk(ast.parse(path.read_text())))
    chains = (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
    return frozenset(c.removeprefix("cfg.") for c in chains if c.startswith("cfg."))
