"""Host processes for tests in which the host itself dies, is interrupted, or runs in another place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Every script starts with this; `say(sim)` tells the test the worker's pid.
HEAD = """
import ctypes, os, signal, sys, threading, time
import numpy as np
from outboard.backends import *

def say(sim):
    print(sim.report["pid"], flush=True)
"""


def host_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / ".src")}


@contextmanager
def host(script: str, python: str = sys.executable) -> Generator[subprocess.Popen[str], None, None]:
    """A running host; its whole session is killed at the end, and a forked child of it too."""
    process = subprocess.Popen(
        [python, "-c", HEAD + script],
        env=host_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for end in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):
            with suppress(ProcessLookupError):
                end()
        process.communicate()


def worker_of(process: subprocess.Popen[str]) -> int:
    """The worker's pid, as the host says it once the worker is READY."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdigit():
        process.kill()
        raise AssertionError(f"the host said {line!r}: {process.communicate()[1]}")
    return int(line)


def alive(pid: int) -> bool:
    """Whether the process runs: a zombie that nobody reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def gone_after(pid: int, limit_s: float = 5.0) -> float:
    """Seconds until the process is gone; fails after `limit_s`, having killed it."""
    started = time.monotonic()
    while alive(pid):
        if time.monotonic() - started > limit_s:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"process {pid} was still there after {limit_s} s")
        time.sleep(0.002)
    return time.monotonic() - started


def said_by(script: str, python: str = sys.executable, timeout_s: float = 50.0) -> list[str]:
    """The lines that a host prints; it must end well."""
    with host(script, python) as process:
        said, errors = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, errors
        return said.splitlines()
