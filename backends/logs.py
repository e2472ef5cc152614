"""The worker's log: one private file per worker, written by the worker's own descriptors.

No thread of ours pumps it, so a worker that prints cannot be blocked by a host that computes. A worker that
ends well leaves nothing; after a failure the file stays and every error names it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

TAIL_LINES = 50
_TAIL_BYTES = 1 << 16
# A worker that floods its log must not fill the disk: above this the file starts anew, and the
# tail, which is all that errors show, stays.
CAP_BYTES = 64 << 20
_KEEP_S = 7 * 24 * 3600.0  # logs of failed runs


def folder() -> Path:
    """`$XDG_RUNTIME_DIR/outboard`, else a folder of mode 0700 under the temporary directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime else Path(tempfile.gettempdir())
    path = base / ("outboard" if runtime else f"outboard-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a private folder of this user")
    return path


def _remove_old(path: Path) -> None:
    for entry in path.glob("*.log"):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > _KEEP_S:
                entry.unlink()


class WorkerLog:
    """An open log. `path` is "" when no folder could be written and the log lives in memory."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def tail(self, lines: int = TAIL_LINES) -> tuple[str, ...]:
        if self.fd < 0:
            return ()
        size = os.fstat(self.fd).st_size
        data = os.pread(self.fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        text = data.decode("utf-8", "replace")
        return tuple(line[:500] for line in text.splitlines()[-lines:])

    def keep_small(self) -> None:
        """Start anew when over the cap. The worker appends, so its next write goes to the new end."""
        if self.fd >= 0 and os.fstat(self.fd).st_size > CAP_BYTES:
            kept = "\n".join(self.tail(1000)).encode()
            os.ftruncate(self.fd, 0)
            os.write(self.fd, b"[outboard: the log was over its cap and starts anew]\n" + kept)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def remove(self) -> None:
        self.close()
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def create(rank: int) -> WorkerLog:
    """A new log for the worker of `rank`. A folder that cannot be written is no reason to fail."""
    try:
        path = folder()
        _remove_old(path)
        name = path / f"rank{rank}-{os.getpid()}-{time.time_ns():x}.log"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        return WorkerLog(os.open(name, flags, 0o600), str(name))
    except OSError:
        fd = os.memfd_create("outboard-log", os.MFD_CLOEXEC)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        return WorkerLog(fd, "")
