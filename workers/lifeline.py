"""Ends this process when its host is gone, whatever it is doing.

Three lines, because each has a hole: the parent-death signal reaches also a native call that holds the
GIL, but only a direct child; a pidfd of the host works behind a wrapper script, but needs this
interpreter to run; the end of the control socket needs no pid at all, but a forked child of the host
may hold a copy of it.
"""

import ctypes
import errno
import os
import select
import signal
import socket
import struct
import threading

_PR_SET_PDEATHSIG = 1
_SYS_PIDFD_OPEN = 434  # the same number on every architecture; os.pidfd_open is Python 3.9
_POLLRDHUP = 0x2000  # select.POLLRDHUP is not in every build


def _host_pid(control: socket.socket) -> int:
    """Who made the control socket, as the kernel knows it; 0 when it is in another pid namespace."""
    raw = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def hold(control: socket.socket) -> None:
    """Arm all three lines. Exits at once when the host is already gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    host = _host_pid(control)
    if os.getppid() == host:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != host:  # it died between the two calls
            os._exit(0)
    pidfd = libc.syscall(_SYS_PIDFD_OPEN, host, 0) if host else -1
    if host and pidfd < 0 and ctypes.get_errno() == errno.ESRCH:
        os._exit(0)  # gone already, and a forked child of it may hold its end of the socket
    watch = select.poll()
    # Not POLLIN: messages are the main thread's.
    watch.register(control, _POLLRDHUP | select.POLLHUP)
    if pidfd >= 0:
        watch.register(pidfd, select.POLLIN)

    def wait_for_the_end() -> None:
        watch.poll()
        os._exit(0)

    threading.Thread(target=wait_for_the_end, name="outboard-lifeline", daemon=True).start()
