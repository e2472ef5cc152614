"""Takes the descriptors 0, 1 and 2 away before any foreign code runs.

Simulators print from native code, so redirecting `sys.stdout` is not enough, and Isaac Sim asks its
licence question on standard input. Afterwards: 0 is the null device, 1 goes where 2 goes (the worker's
log), and the control socket sits on a high, close-on-exec number that nobody closes by habit.
"""

import fcntl
import os

_HIGH_FD = 200  # above what a simulator opens in its first seconds, below the 1,024 of select()


def take_away(control_fd: int) -> int:
    """Move everything; returns the control socket's new descriptor."""
    moved = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
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
    return moved
