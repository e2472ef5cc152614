"""One process per GPU: a lock that the kernel frees when its owner dies.

The lock is the *name* of an abstract Unix socket. It needs no file, no folder with the right
permissions and no cleaning up; processes of other users compete for it too, and it ends with its
process, however that ends. Limits: it holds within one network namespace (two containers with a
network of their own each do not see one another), and anybody may take the name, so it guards
against mistakes, not against malice. A GPU in MIG mode is locked by instance.

Beside the lock every owner binds a second name that carries its rank and pid. Nobody has to answer
questions that way: who is refused reads the names in /proc/net/unix.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from ..ipc.device import normalise_uuid
from ..ipc.errors import DevicePlanError

_PREFIX = "outboard-gpu-"
_HOLDER = re.compile(r"@outboard-gpu-(?P<uuid>\S+)-holder-rank(?P<rank>\d+)-pid(?P<pid>\d+)$")
# Between taking the lock and naming itself an owner needs microseconds. When it was stopped right
# there, the refusal goes out without its name.
_NAME_WAIT_S = 0.5


@dataclass(frozen=True)
class Holder:
    """A process that has a GPU open. `pid` as that process counts itself."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


@dataclass
class _Held:
    """What this process holds of one GPU."""

    name: socket.socket
    lock: socket.socket | None  # None for a process that shares a GPU locked by another
    alone: bool  # it was found alone once; who shares later joins with open eyes
    users: int = 1

    def close(self) -> None:
        self.name.close()
        if self.lock is not None:
            self.lock.close()


@dataclass
class _Process:
    """The locks belong to the process: two backends in it may open the same GPU."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    held: dict[str, _Held] = field(default_factory=dict[str, _Held])


_process = _Process()


def _forget_in_child() -> None:
    """A forked child has copies of the sockets, and would keep the GPU locked after its parent's
    death. What it inherits is closed, not released: the parent's own copies hold on. An exec drops
    them too, since Python opens sockets close-on-exec; only a fork inside native code that never
    execs keeps the lock, for as long as that child lives."""
    global _process
    inherited, _process = _process, _Process()
    for held in inherited.held.values():
        held.close()


os.register_at_fork(after_in_child=_forget_in_child)


def holders(uuid: str) -> tuple[Holder, ...]:
    """Every process (this one too) that has `uuid` open, in this network namespace."""
    uuid = _canonical(uuid)
    found: set[Holder] = set()
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="replace") as table:
            for line in table:
                match = _HOLDER.search(line.rstrip("\n"))
                if match and match["uuid"] == uuid:
                    found.add(Holder(int(match["rank"]), int(match["pid"])))
    except OSError:  # a kernel that does not show it: the lock holds, only the names are unknown
        return ()
    return tuple(sorted(found, key=lambda holder: (holder.rank, holder.pid)))


class GpuLock:
    """One backend's share in its process's lock on one GPU. `acquire`, then `release` or `with`."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self._pid = os.getpid()
        self._released = False

    @classmethod
    def acquire(cls, uuid: str, rank: int, *, share: bool = False) -> GpuLock:
        """DevicePlanError when another process has the GPU open, unless `share`.

        A process that shares is entered as a holder like any other, so that a later one that does
        not share is refused.
        """
        uuid = _canonical(uuid)
        with _process.guard:
            held = _process.held.get(uuid)
            if held is None:
                _process.held[uuid] = _take(uuid, rank, share)
            else:
                if not share and not held.alone:
                    held.lock, held.alone = _exclusive(uuid, rank, held.lock), True
                held.users += 1
        return cls(uuid)

    def release(self) -> None:
        """Harmless when repeated, and in a forked child, which never had the lock."""
        if self._released or self._pid != os.getpid():
            return
        self._released = True
        with _process.guard:
            held = _process.held[self.uuid]
            held.users -= 1
            if not held.users:
                del _process.held[self.uuid]
                held.close()

    def __enter__(self) -> GpuLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def _canonical(uuid: str) -> str:
    return normalise_uuid(uuid, "mig" if uuid[:4].upper() == "MIG-" else "gpu")


def _take(uuid: str, rank: int, share: bool) -> _Held:
    """Who shares names itself first and then looks; who does not locks first and then looks. So of
    two that come at once at least one sees the other."""
    own = f"{uuid}-holder-rank{rank}-pid{os.getpid()}"
    if share:
        return _Held(_bound(own), _try_bind(uuid), alone=False)
    lock = _exclusive(uuid, rank)
    try:
        return _Held(_bound(own), lock, alone=True)
    except OSError:
        lock.close()
        raise


def _exclusive(uuid: str, rank: int, ours: socket.socket | None = None) -> socket.socket:
    """The bound lock, when no other process has the GPU open, not even a sharing one. `ours` is the
    lock where this process has it already."""
    lock = ours or _try_bind(uuid)
    others = _others(uuid, wait_s=_NAME_WAIT_S if lock is None else 0.0)
    if lock is not None and not others:
        return lock
    if lock is not None and lock is not ours:
        lock.close()
    theirs = " and ".join(str(holder) for holder in others) or "a process that did not say its name"
    raise DevicePlanError(
        f"{uuid} is already open in {theirs}; {Holder(rank, os.getpid())} on {uuid} is refused. "
        f"Give every process its own GPU (device=RankPlan.from_env().device), or write share=True "
        f"if they are meant to share this one."
    )


def _others(uuid: str, wait_s: float) -> tuple[Holder, ...]:
    give_up = time.monotonic() + wait_s
    while True:
        found = tuple(holder for holder in holders(uuid) if holder.pid != os.getpid())
        if found or time.monotonic() >= give_up:
            return found
        time.sleep(0.002)


def _try_bind(uuid: str) -> socket.socket | None:
    try:
        return _bound(uuid)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _bound(name: str) -> socket.socket:
    """Bound, never listening: a name and nothing else. A connection to it is refused."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.bind(f"\0{_PREFIX}{name}")
    except OSError:
        end.close()
        raise
    return end
