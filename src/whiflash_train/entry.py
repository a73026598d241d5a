"""Entry points: Hydra, with unknown keys caught by name and user errors told in one line."""

from __future__ import annotations

import difflib
import errno
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import datasets
import hydra
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging as transformers_logging

from whiflash_infer.errors import UserError
from whiflash_train.redaction import without_secrets
from whiflash_train.sweep_results import RUN_ERROR

_EXIT_USER_ERROR, _EXIT_INTERRUPTED = 2, 130
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
_INFORMATION = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--version"}


def entry_point(
    config_name: str, *, root: Path, sweep_goes_on: bool = False
) -> Callable[[Callable[[DictConfig], Any]], Callable[[], None]]:
    """Make a script's main function: compose `<root>/conf/<config_name>.yaml`, call it with that.

    Exit status: 0 done, 1 a fault of ours (with traceback), 2 something to mend, 130 interrupted.
    sweep_goes_on: a run that ends with something to mend does not end the others of its sweep; the
    message lies in its folder, and a callback at the end of the sweep has to say so and exit.
    """

    def decorate(function: Callable[[DictConfig], Any]) -> Callable[[], None]:
        @functools.wraps(function)
        def guarded(cfg: DictConfig) -> Any:
            hide_secrets(cfg)
            OmegaConf.update(cfg, "paths.root", str(root.resolve()))
            with _told_in_one_line():
                if sweep_goes_on and HydraConfig.get().mode == RunMode.MULTIRUN:
                    return _one_of_a_sweep(function, cfg)
                return function(cfg)

        folder = root.resolve() / "conf"
        run = hydra.main(version_base="1.3", config_path=str(folder), config_name=config_name)

        def main() -> None:
            quiet_libraries()
            with _told_in_one_line():
                sys.argv = _flags_as_overrides(config_name, sys.argv)
                arguments = [a for a in sys.argv[1:] if "=" in a and not a.startswith("-")]
                if not _INFORMATION & set(sys.argv):
                    check_plugins(folder, config_name, arguments)
                    check_keys(folder, config_name, arguments)
            run(guarded)()

        return main

    return decorate


def _one_of_a_sweep(function: Callable[[DictConfig], Any], cfg: DictConfig) -> Any:
    """What the function returns; None where it ended with something to mend, which then lies in
    the run's folder."""
    told = Path(HydraConfig.get().runtime.output_dir) / RUN_ERROR
    told.unlink(missing_ok=True)
    try:
        return function(cfg)
    except UserError as error:
        told.write_text(f"{error}\n", encoding="utf-8")
        print(f"error: {told.parent}: {error}", file=sys.stderr)  # noqa: T201
        return None


def _flags_as_overrides(config_name: str, arguments: list[str]) -> list[str]:
    """`--strict`, and `--limit N` of an evaluation, under their own keys.

    Raises: UserError for a limit without its number.
    """
    rest, found = iter(arguments), []
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument == "--strict":
            found.append("strict=true")
        elif name == "--limit" and config_name == "evaluate":
            number = value or next(rest, "")
            if not number.isdecimal():
                raise UserError("--limit needs a number: the prompts to ask, such as --limit 100")
            found.append(f"evaluate.limit={number}")
        else:
            found.append(argument)
    return found


@contextmanager
def _told_in_one_line() -> Iterator[None]:
    """Ends the process with a message and an exit status for what a user can mend."""
    try:
        yield
    except UserError as error:
        _stop(str(error), _EXIT_USER_ERROR)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _stop(_cannot_write(error), _EXIT_USER_ERROR)
    except KeyboardInterrupt:
        _stop("interrupted; what is complete stays, run again to go on", _EXIT_INTERRUPTED)


def hide_secrets(cfg: DictConfig) -> None:
    """In the files in which Hydra keeps a run's configuration, before the run begins.

    The processes of a launcher keep theirs in one folder at the same time, so what another one may
    be writing is not read: a file is made anew from the composed configuration.
    """
    settings = HydraConfig.get()
    folder = Path(settings.runtime.output_dir, settings.output_subdir or ".")
    kept: dict[Path, Any] = {
        folder / "config.yaml": cfg,
        folder / "hydra.yaml": HydraConfig.instance().cfg,
        folder / "overrides.yaml": settings.overrides.task,
    }
    sweep = Path(settings.sweep.dir, "multirun.yaml")
    if settings.mode == RunMode.MULTIRUN and sweep.exists():
        kept[sweep] = OmegaConf.load(sweep)  # written before its runs begin
    for path, config in kept.items():
        plain = OmegaConf.to_container(config, resolve=False)
        shown = without_secrets(plain)
        if shown != plain and path.exists():
            _replace(path, OmegaConf.to_yaml(OmegaConf.create(shown)))


def _replace(path: Path, text: str) -> None:
    """As one step, whatever other processes do with that file."""
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def check_keys(folder: Path, config_name: str, arguments: list[str]) -> None:
    """Refuse overrides and experiment keys that nothing reads.

    Raises: UserError naming the nearest valid key.
    """
    overrides = [o for o in _parsed(arguments) if not _is_plugin(o)]
    groups = [o for o in overrides if (folder / o.key_or_group).is_dir()]
    values = [o for o in overrides if o not in groups]
    for group in groups:
        _check_choice(folder, group)
    known, missing = _known_keys(folder, config_name, groups)
    _refuse_unknown(
        {o.key_or_group for o in values if not o.is_add() and not o.is_delete()},
        known | _branch_keys(known) | {"hydra"},
        "command line",
    )
    if wanted := missing - {o.key_or_group for o in values}:
        told = " ".join(f"{key}=..." for key in sorted(wanted))
        raise UserError(f"the command line must also give: {told}")


def check_plugins(folder: Path, config_name: str, arguments: list[str]) -> None:
    """Launchers and sweepers come with packages of their own.

    Raises: UserError naming the extra that brings the one that is missing.
    """
    groups = [o for o in _parsed(arguments) if _is_plugin(o) or (folder / o.key_or_group).is_dir()]
    if not any(_is_plugin(o) or o.is_add() for o in groups):
        return
    try:
        _compose(folder, config_name, [_as_argument(o) for o in groups])
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file)
        if missing.startswith("hydra/"):
            extra = "ray" if "ray" in missing else "sweeps"
            raise UserError(
                f"there is no {missing}. Launchers and sweepers come with packages of their own: "
                f"pip install 'whiflash[{extra}]'"
            ) from None
    except HydraException:
        return  # check_keys says what is wrong


def _is_plugin(override: Override) -> bool:
    return override.key_or_group.startswith("hydra/")


def _parsed(arguments: list[str]) -> list[Override]:
    """Raises: UserError for what Hydra cannot read."""
    try:
        return OverridesParser.create().parse_overrides(arguments)
    except HydraException as error:
        raise UserError(f"cannot read the command line: {error}") from None


def _known_keys(
    folder: Path, config_name: str, groups: list[Override]
) -> tuple[set[str], set[str]]:
    """Every key that there is for these groups, and those without a value.

    An experiment file may choose groups and set values, and adds no key but those of sources,
    which their constructor checks.

    Raises: UserError naming the key that it adds.
    """
    typed = [_as_argument(g) for g in groups if g.key_or_group != "experiment"]
    whole = _compose(folder, config_name, [_as_argument(g) for g in groups])
    found = _leaves(whole)
    own = {g.key_or_group for g in groups if g.is_add()} | {"experiment"}
    chosen = [f"{g}={name}" for g, name in _choices(whole).items() if g not in own]
    known = set(_leaves(_compose(folder, config_name, [*chosen, *typed])))
    known |= {key for key in found if key.startswith(("source.", "evaluate.source."))}
    _refuse_unknown(set(found), known, "experiment file")
    return known, {key for key, value in found.items() if value == "???"}


def _choices(cfg: DictConfig) -> dict[str, str]:
    """The files that were chosen, by group; lists of files are not among them."""
    choices = cfg.hydra.runtime.choices
    return {g: name for g, name in choices.items() if name and not g.startswith("hydra/")}


def _check_choice(folder: Path, override: Override) -> None:
    choices = sorted(p.stem for p in (folder / override.key_or_group).glob("[!_]*.yaml"))
    for value in _chosen(override):
        if value not in (None, "null") and value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UserError(
                f"{override.key_or_group}={value}: there is no such choice.{hint} "
                f"Known: {', '.join(choices)}"
            )


def _chosen(override: Override) -> list[Any]:
    """Every choice that a group override names: of a sweep, of a list, or the one."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return value if isinstance(value, list) else [value]


def _as_argument(override: Override) -> str:
    """The override as it is typed; of a sweep its first run."""
    chosen = [str(c) for c in _chosen(override)]
    one = chosen[0] if override.is_sweep_override() else None
    listed = isinstance(override.value(), list) and one is None
    value = f"[{','.join(chosen)}]" if listed else (one or chosen[0])
    return f"{override.get_key_element()}={'null' if value == 'None' else value}"


def _compose(folder: Path, config_name: str, arguments: list[str]) -> DictConfig:
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(config_name, overrides=arguments, return_hydra_config=True)


def _leaves(cfg: DictConfig) -> dict[str, Any]:
    """Every value of our tree by its dotted key, nothing resolved."""
    leaves: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            leaves[prefix] = node

    tree = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(tree, dict)
    walk({key: value for key, value in tree.items() if key != "hydra"}, "")
    return leaves


def _branch_keys(leaves: set[str]) -> set[str]:
    return {".".join(key.split(".")[:i]) for key in leaves for i in range(1, key.count(".") + 1)}


def _refuse_unknown(keys: set[str], known: set[str], where: str) -> None:
    for key in sorted(keys - known):
        if key.split(".")[0] in {"hydra"}:
            continue
        near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"unknown configuration key {key} ({where}).{hint}")


def _cannot_write(error: OSError) -> str:
    where = f" {error.filename}" if error.filename else ""
    return (
        f"cannot write{where}: {error.strerror or error}. Nothing half-written is left under its "
        "own name; make room or choose another place with paths.artifacts=..., then run again"
    )


def quiet_libraries() -> None:
    """Silence what a user cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*has `__len__` defined.*")
    warnings.filterwarnings("ignore", message=".*ended before the epoch ended.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*treespec.*")
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _stop(message: str, status: int) -> None:
    print(f"error: {message}" if status == _EXIT_USER_ERROR else message, file=sys.stderr)  # noqa: T201
    sys.exit(status)
