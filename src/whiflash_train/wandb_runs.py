"""W&B: runs that go offline where there is no way out, that resume, and artefacts with lineage."""

from __future__ import annotations

import json
import netrc
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from whiflash_infer.artifacts import MANIFEST, file_hash, read_json
from whiflash_infer.errors import UserError
from whiflash_train.redaction import without_secrets

if TYPE_CHECKING:  # the package may be missing
    import wandb

MEMORY = "wandb_run.json"  # in a training's folder: the run's id, and the last step it was told
_STEP = "trainer/global_step"
_OFFLINE = {"offline", "dryrun"}
_MODES = {"online", "run", "shared", "disabled"} | _OFFLINE
# Seconds: to reach W&B at the start, and to send what is left at the end. What W&B's own
# variables (WANDB_INIT_TIMEOUT and so on) say comes first.
_LIMITS: dict[str, Any] = {"init_timeout": 15.0, "finish_timeout": 900.0}
_NO_CONSOLE = {"console": "off"}  # it would hold whatever any library prints
_UNTOLD = {"config", "packages"}  # of a manifest: the run has them too


class TrainingRun(WandbLogger):
    """Metrics against the training step, which never goes back, also when a training is resumed."""

    def __init__(self, folder: Path, *, last_step: int, **options: Any) -> None:
        super().__init__(save_dir=str(folder), **options)
        self._memory = folder / MEMORY
        self._last_step = last_step
        self._begun = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.experiment.disabled or (step is not None and step < self._last_step):
            return  # it was told before the training broke off
        if step is not None:
            self._remember(step)
        super().log_metrics(metrics, step)

    def _remember(self, step: int) -> None:
        if not self._begun:
            self.experiment.define_metric(_STEP)
            self.experiment.define_metric("*", step_metric=_STEP, step_sync=True)
        if step > self._last_step or not self._begun:
            told = {"id": self.experiment.id, "step": step}
            self._memory.write_text(json.dumps(told), encoding="utf-8")
        self._begun, self._last_step = True, step


def training_run(folder: Path, *, resume: bool, **options: Any) -> TrainingRun:
    """The logger of a training; a resumed one goes on in its W&B run."""
    memory = folder / MEMORY
    known = read_json(memory) if resume and memory.is_file() else {"id": None, "step": -1}
    if getattr(rank_zero_only, "rank", 0) != 0:  # other processes have no run
        return TrainingRun(folder, last_step=-1, **options)
    run = begin(folder, job_type="train", run_id=known["id"], **options)
    return TrainingRun(folder, last_step=known["step"], experiment=run, **options)


def begin(folder: Path, *, job_type: str, run_id: str | None = None, **options: Any) -> wandb.Run:
    """A W&B run with its files in the folder; offline without a key, or when W&B does not answer.

    options: project, entity, name and tags.
    Raises: UserError where W&B refuses them, or WANDB_MODE is none of its modes.
    """
    import wandb  # noqa: PLC0415 - only where it is asked for

    if (asked := os.environ.get("WANDB_MODE", "online")) not in _MODES:
        raise UserError(f"WANDB_MODE is {asked!r}: choose online, offline or disabled")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"dir": str(folder.resolve()), "job_type": job_type, "id": run_id, "resume": "allow"}
    chosen |= {"reinit": "finish_previous", "settings": wandb.Settings(**_settings()), **options}
    mode, reason = _mode(wandb.setup().settings)
    with _arguments_without_secrets():
        try:
            run = wandb.init(mode=mode, **chosen)
        except wandb.Error as error:
            if mode in _OFFLINE:
                raise UserError(f"logger=wandb: {error}") from None
            reason = f"W&B cannot be used ({str(error).splitlines()[0]})"
            run = wandb.init(mode="offline", **chosen)
    if run.offline and not run.disabled:
        _tell_offline(Path(run.dir).parent, reason)
    return run


def log_folder(
    run: wandb.Run,
    folder: Path,
    *,
    kind: str,
    name: str,
    metadata: Mapping[str, Any],
    files: list[str] | None = None,
) -> None:
    """A folder as the next version of an artefact. files: only these, where they exist."""
    with _told_when_it_fails(name):
        artifact = _artifact(run, folder, kind, name, metadata, files)
        run.log_artifact(artifact, aliases=["best", "latest"] if kind != "evaluation" else None)


def log_made(run: wandb.Run, folder: Path, *, task: str, facts: Mapping[str, Any]) -> None:
    """What a training has made: a drafter or a router. facts: beside those of its manifest."""
    manifest = read_json(folder / MANIFEST)
    metadata = {**_told_of(manifest), **facts}
    log_folder(run, folder, kind=_kind(task), name=_name(manifest, task), metadata=metadata)


def log_used(run: wandb.Run, inputs: Mapping[str, Path]) -> None:
    """Lineage: what a run was made from. W&B knows a version by its files, so one that it has is
    not sent again. inputs: folders, by the task that makes them."""
    told: dict[str, Any] = {}
    for task, folder in inputs.items():
        if run.disabled or not (folder / MANIFEST).is_file():
            continue
        manifest = read_json(folder / MANIFEST)
        name = _name(manifest, task)
        with _told_when_it_fails(name):
            artifact = _artifact(run, folder, _kind(task), name, _told_of(manifest), None)
            # run.use_artifact refuses offline runs, and waits for W&B in others.
            run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
            told[task] = {"artifact": name, "digest": artifact.digest}
    run.config.update({"inputs": told}, allow_val_change=True)


def identity_of(path: Path) -> str | None:
    """What tells one version of a file, or of an artefact's manifest, from another."""
    path = path / MANIFEST if path.is_dir() else path
    return file_hash(path) if path.is_file() else None


def _artifact(
    run: wandb.Run,
    folder: Path,
    kind: str,
    name: str,
    metadata: Mapping[str, Any],
    files: list[str] | None,
) -> wandb.Artifact:
    """The files are linked into the run's folder: a later training replaces them, but not there."""
    import wandb  # noqa: PLC0415

    kept = Path(run.dir).parent / "artifacts" / name
    artifact = wandb.Artifact(name, type=kind, metadata=without_secrets(dict(metadata)))
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        inside = path.relative_to(folder)
        if files is None or str(inside) in files:
            link = _linked(path.resolve(), kept / inside)
            artifact.add_file(str(link), name=str(inside), policy="immutable", skip_cache=True)
    return artifact


def _linked(path: Path, link: Path) -> Path:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # another disk, or a file system without links
        shutil.copy2(path, link)
    return link


def _kind(task: str) -> str:
    return "router" if task == "router" else "drafter"


def _name(manifest: Mapping[str, Any], task: str) -> str:
    return artifact_name(manifest.get("target", {}).get("name", "foreign"), task)


def artifact_name(target: str, what: str) -> str:
    return re.sub(r"[^\w.-]+", "-", f"{target}-{what}")


def _told_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key not in _UNTOLD}


def _settings() -> dict[str, Any]:
    return {
        name: value
        for name, value in (_LIMITS | _NO_CONSOLE).items()
        if f"WANDB_{name.upper()}" not in os.environ
    }


def _mode(settings: wandb.Settings) -> tuple[Any, str]:
    """What to ask W&B for, and why where that is offline."""
    mode = os.environ.get("WANDB_MODE") or settings.mode
    if mode in _OFFLINE:
        return mode, "no API key, or WANDB_MODE=offline"
    if mode in ("online", "run") and "WANDB_MODE" not in os.environ and not _has_key(settings):
        return "offline", "no API key, or WANDB_MODE=offline"
    return mode, ""


def _has_key(settings: wandb.Settings) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = {"api.wandb.ai", urlsplit(os.environ.get("WANDB_BASE_URL", settings.base_url)).hostname}
    named = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in (Path(name).expanduser() for name in named):
        try:
            known = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        if any(known.authenticators(host) for host in hosts if host):
            return True
    return False


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """W&B stores the command line with every run."""
    arguments = sys.argv
    sys.argv = without_secrets(arguments)
    try:
        yield
    finally:
        sys.argv = arguments


@contextmanager
def _told_when_it_fails(name: str) -> Iterator[None]:
    """The work is done and lies on the disk, whatever becomes of the copy."""
    import wandb  # noqa: PLC0415

    try:
        yield
    except (wandb.Error, OSError, ValueError, TypeError, AttributeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"W&B: artefact {name} is not logged: {told}")  # noqa: T201


def _tell_offline(folder: Path, reason: str) -> None:
    print(  # noqa: T201 - the user must learn where the run went
        f"W&B runs offline: {reason}. Files: {folder}\nSend them later with: wandb sync {folder}"
    )
