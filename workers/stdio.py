"""Takes the descriptors 0, 1 and 2 away before any foreign code runs.

Simulators print from native code, so redirecting `sys.stdout` is not enough, and Isaac Sim asks its
licence question on standard input. Afterwards: 0 is the null device, 1 goes where 2 goes (the worker's
log), and the control socket sits on a high, close-on-exec number that nobody closes by habit.
"""

import fcntl
import io
import os
import sys
from typing import Any

_HIGH_FD = 200  # above what a simulator opens in its first seconds, below the 1,024 of select()


class _Lossy(io.RawIOBase):
    """A descriptor to print to. What cannot be written (a full disk, a log whose reader is gone) is lost,
    and never an exception in the middle of a simulator's step."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size, at = len(view), 0
        try:
            while at < size:
                at += os.write(self._fd, view[at:])
        except OSError:
            pass
        return size


def take_away(control_fd: int) -> int:
    """Move everything; returns the control socket's new descriptor."""
    moved = _out_of_the_way(control_fd)
    os.close(control_fd)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    try:
        os.fstat(2)
    except OSError:  # started without a standard error
        os.dup2(null, 2)
    os.dup2(2, 1)
    if null > 2:
        os.close(null)
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    return moved


def _out_of_the_way(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    except OSError:  # this process may not have that many
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _text(fd: int) -> io.TextIOWrapper:
    """As the interpreter itself makes them under `-u`, but for what they do with errors."""
    raw: Any = _Lossy(fd)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
