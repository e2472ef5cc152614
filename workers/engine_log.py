"""What the engine wrote to this process's log: some engines report an error there and nowhere else.

Descriptors 1 and 2 append to a log that the host made, a file or a memfd, open for reading too.
"""

import ctypes
import os
import stat
import sys
from typing import Any, List, Optional, Pattern

_LINE_BUFFERED = 1  # _IOLBF of stdio.h
_MOST_BYTES = 1 << 20  # of new text per look: an engine that floods its log is read in part


class EngineLog:
    """The log from here on. `readable` is False where descriptor 2 is no file (a terminal, a pipe)."""

    def __init__(self) -> None:
        status = os.fstat(2)
        self.readable = stat.S_ISREG(status.st_mode)
        self._at = status.st_size
        self._fd = 2
        try:
            os.pread(2, 1, 0)
        except OSError:  # open for writing only: a second description of the same file can read
            self._fd = self._reopened()
            self.readable = self._fd >= 0 and self.readable
        _line_buffered()

    @staticmethod
    def _reopened() -> int:
        try:
            return os.open("/proc/self/fd/2", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1

    def new_lines(self) -> List[str]:
        """What came since the last call; [] where the log cannot be read. Costs one system call when
        nothing came."""
        if not self.readable:
            return []
        size = os.fstat(self._fd).st_size
        if size == self._at:
            return []
        # The host starts a log anew that has grown too large.
        start = 0 if size < self._at else self._at
        self._at = size
        data = os.pread(self._fd, min(size - start, _MOST_BYTES), start)
        return data.decode("utf-8", "replace").splitlines()

    def find(self, pattern: Pattern[str]) -> Optional[str]:
        """The first new line that matches. Everything new counts as read."""
        return next((line.strip() for line in self.new_lines() if pattern.search(line)), None)


def flush() -> None:
    """Python's buffers and the C library's: what native code printed may still lie there."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


def _line_buffered() -> None:
    """Make the C library pass on its stdout line by line. Into a file it would keep 4 KiB, which are lost
    when the engine dies: just the lines that say why."""
    libc: Any = ctypes.CDLL(None)
    try:
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
    except ValueError:
        return
    libc.setvbuf(stdout, None, _LINE_BUFFERED, 0)
