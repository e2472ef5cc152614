"""What a test may not leave behind, as a pytest plugin; `conftest.py` puts it around every test.

Compared before and after: descriptors, our threads, our names in /dev/shm, worker logs, child
processes, and every process on this machine that was started under this session's private runtime folder,
which finds a worker also when its host is dead and it belongs to nobody.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import pytest

from outboard.backends import launch, witness
from outboard.ipc import doorbell

# What another session of this suite makes and unlinks at the same time is gone by then, and so is a
# process that is being reaped.
_GRACE_S = 1.0
# Lives as long as the process, on purpose (backends/keeper.py).
_KEPT_THREADS = {"outboard-keeper"}
# Semaphores have these names for milliseconds while a backend opens. Another session of this suite on
# this machine makes them too, so of these only those count that this process made.
_SEMAPHORES = "sem.outboard-"
_made: set[str] = set()
# The standard library's own helper, which lives as long as the process.
_KEPT_CHILD = "multiprocessing.resource_tracker"


@dataclass(frozen=True)
class Residue:
    """Everything that could be left behind, each thing as the line that an error shows."""

    descriptors: frozenset[str]
    threads: frozenset[str]
    names: frozenset[str]
    logs: frozenset[str]
    processes: frozenset[str]

    def beyond(self, before: Residue) -> Residue:
        return Residue(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def common(self, other: Residue) -> Residue:
        return Residue(*(getattr(self, f.name) & getattr(other, f.name) for f in fields(self)))

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def words(self) -> list[str]:
        found = [(f.name, thing) for f in fields(self) for thing in sorted(getattr(self, f.name))]
        return [
            f"{kind}: {_command(thing) if kind == 'processes' else thing}" for kind, thing in found
        ]


def _descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of listdir itself
            continue
        yield f"{fd} -> {target}"


def _command(pid: str) -> str:
    """Asked last: a process that was just forked still has its parent's command line."""
    try:
        command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return pid
    return f"{pid} {command.decode(errors='replace')[:200] or '(zombie)'}"


def _processes(runtime: str) -> Iterator[str]:
    me = os.getpid()
    marker = f"XDG_RUNTIME_DIR={runtime}".encode()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            if int(entry) not in children and marker not in variables:
                continue
        except OSError:
            continue
        if _KEPT_CHILD not in _command(entry):
            yield entry


def look(runtime: str) -> Residue:
    """What there is now. `runtime` is this session's own XDG_RUNTIME_DIR."""
    return Residue(
        descriptors=frozenset(_descriptors()),
        threads=frozenset(
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("outboard-") and thread.name not in _KEPT_THREADS
        ),
        names=frozenset(
            name
            for name in os.listdir("/dev/shm")
            if "outboard" in name and (name in _made or not name.startswith(_SEMAPHORES))
        ),
        logs=frozenset(map(str, Path(runtime, "outboard").glob("*"))),
        processes=frozenset(_processes(runtime)),
    )


def left_behind(before: Residue, runtime: str, excused: set[str]) -> list[str]:
    """What is there now and was not before, in words; waits a moment for what is just going."""
    extra = look(runtime).beyond(before)
    deadline = time.monotonic() + _GRACE_S
    while _without(extra, excused) and time.monotonic() < deadline:
        gc.collect()  # an object in a dead cycle may be about to close something
        time.sleep(0.02)
        extra = extra.common(look(runtime))
    return _without(extra, excused).words()


def _without(residue: Residue, excused: set[str]) -> Residue:
    kept = residue.logs if "*" in excused else frozenset(excused)
    return Residue(
        residue.descriptors, residue.threads, residue.names, residue.logs - kept, residue.processes
    )


@pytest.fixture(scope="session", autouse=True)
def private_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runtime and cache folders of this session's own. Worker environments carry the first one."""
    base = tmp_path_factory.mktemp("xdg")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
            (base / name).mkdir(mode=0o700)
            patch.setenv(name, str(base / name))
        yield base


@pytest.fixture
def logs_may_stay() -> set[str]:
    """For tests in which a host of another process fails: its log stays, as it should.

    A failure in this process needs no excuse: its log may stay because its error named it."""
    return {"*"}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, private_folders: Path) -> Iterator[None]:
    """Fails the test that leaves something behind."""
    runtime = str(private_folders / "XDG_RUNTIME_DIR")
    named: set[str] = set()
    error_report, semaphore_pair = launch.error_report, doorbell.semaphore_pair

    def noting_report(*args: object) -> object:
        report = error_report(*args)  # type: ignore[arg-type]
        named.add(report.log_path)
        return report

    @contextlib.contextmanager
    def noting_pair() -> Generator[Any, None, None]:
        with semaphore_pair() as pair:
            _made.update("sem." + name.lstrip("/") for name in pair[2:])
            yield pair

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "error_report", noting_report)
        patch.setattr(doorbell, "semaphore_pair", noting_pair)
        if request.node.get_closest_marker("gpu"):
            # NVML keeps six descriptors from its first start to the end of the process, and no more
            # with later ones (measured over twelve): they are there before the test as well.
            witness.inventory()
        before = look(runtime)
        yield
        if "logs_may_stay" in request.fixturenames:
            named.add("*")
        found = left_behind(before, runtime, named)
    for log in look(runtime).beyond(before).logs:
        os.unlink(log)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
