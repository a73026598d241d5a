"""Stages in forked processes, which can be killed without paying for the imports again."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
# A child that waits for another one which failed (torch waits half an hour) ends with the test.
_LONGEST_S = 300


def in_child(work: Callable[[], int], log: Path) -> int:
    """Start `work` in a child whose output goes to `log`; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    # Torch does not stand new threads in a forked process ("Invalid thread pool").
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.alarm(_LONGEST_S)
        status = work()
    finally:
        os._exit(status)


def exit_status(pid: int) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def free_port() -> int:
    """A port of this machine that no outgoing connection is given meanwhile: those start higher."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def kill_after(pid: int, seconds: float) -> int:
    """SIGKILL a child at a moment, unless it is done by then; its exit status."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return exit_status(pid)


def kill_at_random(start: Callable[[], int], *, times: int, within: float, seed: int) -> int:
    """Start and kill a child again and again, `within` so many seconds; how many were killed."""
    rng = random.Random(seed)
    ends = [kill_after(start(), rng.uniform(0.0, within)) for _ in range(times)]
    assert set(ends) <= {0, -signal.SIGKILL}, ends
    return ends.count(-signal.SIGKILL)


def mount_small(folder: Path, *, megabytes: int) -> bool:
    """Give this process a view in which `folder` is a file system of that size; False where the
    machine does not allow it. Only for a child: there is no way back."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0 and libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        return False
    libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None)  # private, recursive
    options = f"size={megabytes}m".encode()
    return libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options) == 0
