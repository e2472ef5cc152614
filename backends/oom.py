"""Did the kernel kill the worker because a memory cgroup was full? Asked before and after.

The exit status of such a worker says SIGKILL and nothing more. The cgroup counts its kills, so a counter
that rose between the start and the death is the difference.
"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def _folders(pid: int) -> list[Path]:
    """The memory cgroup of a process and those around it; version 2 and version 1. [] when unknown."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            root = _ROOT if controllers == "" else _ROOT / "memory"
            folder = root / path.lstrip("/")
            return [folder, *(p for p in folder.parents if root in p.parents or p == root)]
    return []


def _kills(folder: Path) -> int | None:
    """How many processes the kernel has killed in this cgroup itself; None when it does not count."""
    for name in ("memory.events.local", "memory.events", "memory.oom_control"):
        try:
            for line in (folder / name).read_text().splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return int(value)
        except OSError:
            continue
    return None


class OomWatch:
    """The kill counters of a worker's cgroups, read when it was alive and well."""

    def __init__(self, pid: int) -> None:
        self._before = {folder: _kills(folder) for folder in _folders(pid)}

    def words(self) -> str:
        """ "" or that the kernel killed for memory meanwhile, and where that is counted."""
        for folder, before in self._before.items():
            now = _kills(folder)
            if before is not None and now is not None and now > before:
                return f"killed by the kernel, memory ran out: cgroup {folder} counts it"
        return ""
