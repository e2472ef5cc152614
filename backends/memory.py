"""Is there room for the block? Asked before reserving it: the kernel's own answer can be a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..ipc.errors import UsageError

# What must stay free beside the block, so that neither the host nor the worker dies of our success.
_HEADROOM_BYTES = 64 << 20


class Room(NamedTuple):
    """One limit that applies to this process."""

    where: str
    free_bytes: int


def _number(path: Path) -> int | None:
    """The integer in `path`; None when it is not there or says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_rooms() -> Iterator[Room]:
    """Every enclosing memory cgroup with a limit, version 2 and version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None and most < 1 << 60:
                yield Room(f"memory cgroup {folder}", max(0, most - now))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def rooms() -> list[Room]:
    """All limits: the machine's available memory and every enclosing cgroup."""
    found: list[Room] = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(Room("this machine", int(line.split()[1]) << 10))
    except OSError:
        pass
    found.extend(_cgroup_rooms())
    return found


def require(needed_bytes: int, readings: list[Room] | None = None) -> None:
    """UsageError when a block of `needed_bytes` does not fit; says how much is free and where."""
    for room in rooms() if readings is None else readings:
        if needed_bytes + _HEADROOM_BYTES > room.free_bytes:
            raise UsageError(
                f"the shared block needs {needed_bytes:,} bytes and {room.where} has "
                f"{room.free_bytes:,} free: use fewer environments, publish fewer fields, or give "
                "this process more memory"
            )
