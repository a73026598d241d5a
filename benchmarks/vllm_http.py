"""Short requests to vLLM's server with our drafters: errors, memory, what is left afterwards."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table
from vllm_case import (
    NEEDED,
    Case,
    check_folders,
    console,
    conversations,
    draft_tokens,
    environment,
    require_vllm,
    save,
    speculative,
    target_folder,
)
from vllm_child import PROPOSER

from whiflash_infer.errors import UserError

_READY_WITHIN, _FORGOTTEN_WITHIN = 300.0, 10.0  # seconds
_MIB = 1 << 20


def add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--method", choices=("none", "eagle3", "dflash", "routed"), default="routed")
    add("--requests", type=int, default=200)
    add("--clients", type=int, default=8)
    add("--port", type=int, default=8123)
    add("--max-model-len", type=int, default=1024)
    add("--draft-tokens", type=int, default=0, help="a round (default: as trained)")
    add("--feature-gib", type=float, default=0.25, help="memory for features, if routed")
    add("--log", type=Path, default=Path(os.devnull), help="file for what the server says")


def measure(options: argparse.Namespace) -> None:
    require_vllm()
    check_folders(Path(options.artifacts), NEEDED[options.method])
    target = target_folder(options)
    # By its name alone: metrics carry it, and a folder means nothing elsewhere.
    name = ["--served-model-name", Path(target).name]
    words = [*command(options, target), *name, *flags(options)]
    variables = {**environment(options), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    texts = list(conversations(options).values())
    with server(words, variables, options.log) as process:
        found = asyncio.run(ask_all(options, Path(target).name, texts, process.pid))
    show(found)
    save(options, found)


def command(options: argparse.Namespace, target: str) -> list[str]:
    """Of the server: ours where it routes, vLLM's own else."""
    if options.method == "routed":
        artifacts = ["--artifacts", str(Path(options.artifacts).resolve())]
        own = ["--feature-gib", str(options.feature_gib)]
        return [sys.executable, "-m", PROPOSER, "serve", target, *artifacts, *own]
    case = Case(
        method=options.method,
        concurrency=options.clients,
        prefix_caching=True,
        dtype=options.dtype,
        max_tokens=options.max_tokens,
        draft_tokens=draft_tokens(options.method, options),
    )
    config, _ = speculative(case, Path(options.artifacts))
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    return [*words, "--speculative-config", json.dumps(config)] if config else words


def flags(options: argparse.Namespace) -> list[str]:
    values = {
        "--port": options.port,
        "--dtype": options.dtype,
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.clients,
    }
    return ["--enforce-eager", *(str(word) for pair in values.items() for word in pair)]


@contextmanager
def server(
    words: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """In a process group of its own, which is ended with it."""
    with (
        log.open("wb") as file,
        subprocess.Popen(
            words, stdout=file, stderr=file, env=dict(environment), start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def ask_all(
    options: argparse.Namespace, model: str, texts: Sequence[Any], pid: int
) -> dict[str, Any]:
    aiohttp = import_module("aiohttp")
    async with aiohttp.ClientSession(f"http://127.0.0.1:{options.port}") as session:
        await until_ready(session, pid)
        errors: list[str] = []
        memory = [{"requests": 0, **resident(pid)}]
        queue = iter(range(options.requests))
        done = 0

        async def client() -> None:
            nonlocal done
            for number in queue:
                asked = {
                    "model": model,
                    "messages": texts[number % len(texts)],
                    "max_tokens": options.max_tokens,
                    "temperature": 0,
                }
                if error := await one(session, asked):
                    errors.append(error)
                done += 1
                if done % 50 == 0:
                    memory.append({"requests": done, **resident(pid)})

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(options.clients)))
        seconds = time.perf_counter() - started
        metrics = await forgotten(session)
    return {"seconds": seconds, "errors": errors, "memory": memory, "metrics": metrics}


async def until_ready(session: Any, pid: int) -> None:
    deadline = time.monotonic() + _READY_WITHIN
    while time.monotonic() < deadline:
        if not alive(pid):
            raise UserError("the server ended before it was ready: --log FILE says why")
        try:
            async with session.get("/health") as reply:
                if reply.status == 200:
                    return
        except OSError:
            pass
        await asyncio.sleep(1)
    raise UserError(f"the server was not ready within {_READY_WITHIN:.0f} seconds")


async def one(session: Any, asked: Mapping[str, Any]) -> str:
    """What went wrong, or nothing."""
    try:
        async with session.post("/v1/chat/completions", json=asked) as reply:
            told = await reply.json()
    except (import_module("aiohttp").ClientError, OSError, ValueError) as error:
        return repr(error)
    if reply.status == 200 and told["choices"][0]["message"]["content"] is not None:
        return ""
    return f"{reply.status}: {json.dumps(told)[:200]}"


async def forgotten(session: Any) -> dict[str, float]:
    """Our metrics, and those of drafts, once no request is kept, or after some seconds."""
    deadline = time.monotonic() + _FORGOTTEN_WITHIN
    while True:
        async with session.get("/metrics") as reply:
            found = values(await reply.text())
        kept = sum(v for name, v in found.items() if name.startswith("whiflash_requests"))
        if not kept or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines()]
    kept = ("whiflash_", "vllm:spec_decode_num_", "vllm:num_preemptions_total")
    return {
        name: float(value)
        for name, _, value in lines
        if name.startswith(kept) and "_created" not in name
    }


def alive(pid: int) -> bool:
    psutil = import_module("psutil")
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def resident(pid: int) -> dict[str, float]:
    """MiB of the server's processes: the sum, and that of the largest, which runs the model."""
    psutil = import_module("psutil")
    parent = psutil.Process(pid)
    sizes = [p.memory_info().rss / _MIB for p in [parent, *parent.children(recursive=True)]]
    return {"mib": sum(sizes), "largest_mib": max(sizes)}


def show(found: Mapping[str, Any]) -> None:
    table = Table(title=f"{len(found['errors'])} errors, {found['seconds']:.0f} s")
    for column in ("requests", "MiB", "largest process"):
        table.add_column(column, justify="right")
    for at in found["memory"]:
        table.add_row(str(at["requests"]), f"{at['mib']:.0f}", f"{at['largest_mib']:.0f}")
    console.print(table)
    for name, value in found["metrics"].items():
        if "_bucket" not in name:
            console.print(f"{name} {value:g}", highlight=False, markup=False, soft_wrap=True)
    for error in found["errors"][:5]:
        console.print(error, style="red", markup=False)
