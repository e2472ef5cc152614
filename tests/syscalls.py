"""Counts the system calls of a child's main thread, by ptrace, between two of its `count_from_here()`.

For x86-64 Linux. The child imports this file, asks to be traced, and marks where counting begins and ends
with a call that does nothing (getppid).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

SCHED_YIELD, GETPPID = 24, 110
_TRACEME, _SYSCALL, _GETREGS, _SETOPTIONS = 0, 24, 12, 0x4200
_TRACESYSGOOD, _EXITKILL = 0x1, 0x100000
_ORIG_RAX = 15  # its place in user_regs_struct
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def trace_me() -> None:
    """In the child: from here on its parent sees the system calls of this thread."""
    if _libc.ptrace(_TRACEME, 0, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    os.kill(os.getpid(), signal.SIGSTOP)


def mark() -> None:
    """In the child: counting begins, or ends."""
    os.getppid()


def _request(number: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(number, pid, None, data) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {number}")


def _number(pid: int) -> int:
    registers = (ctypes.c_ulonglong * 27)()
    _request(_GETREGS, pid, ctypes.addressof(registers))
    return registers[_ORIG_RAX]


def count(command: Sequence[str], env: dict[str, str]) -> list[dict[int, int]]:
    """Run it to its end. Per pair of marks: how often each system call, by number."""
    child = subprocess.Popen(command, env=env)
    pid, found, entering, counting = child.pid, list[dict[int, int]](), True, False
    try:
        os.waitpid(pid, 0)  # the SIGSTOP of trace_me
        _request(_SETOPTIONS, pid, _TRACESYSGOOD | _EXITKILL)
        passed = 0
        while True:
            _request(_SYSCALL, pid, passed)
            _, status = os.waitpid(pid, 0)
            if not os.WIFSTOPPED(status):
                child.returncode = os.waitstatus_to_exitcode(status)
                assert child.returncode == 0, f"the child ended with {child.returncode}"
                return found
            passed = 0
            if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
                passed = os.WSTOPSIG(status)  # a signal of its own
                continue
            if entering:
                number = _number(pid)
                if number == GETPPID:
                    counting = not counting
                    if counting:
                        found.append({})
                elif counting:
                    found[-1][number] = found[-1].get(number, 0) + 1
            entering = not entering
    finally:
        if child.returncode is None:
            child.kill()
            with contextlib.suppress(ChildProcessError):
                child.wait()
