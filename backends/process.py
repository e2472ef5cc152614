"""The worker's process: argv, environment, log, death. Knows nothing of messages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import ipc
from ..ipc.errors import WorkerLaunchError
from . import keeper, logs
from .oom import OomWatch

# The environment of a worker is built, not inherited: a variable that is not named here, by the simulator's
# Traits or by the user does not arrive. Launcher variables (RANK, LOCAL_RANK, MASTER_*, SLURM_*)
# and PYTHON* are absent on purpose, and so are secrets.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
    # MPS clients must find their server, driver caches their folder.
    *("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE"),
    # Set where an older OpenBLAS misdetects the processor; a worker with an old numpy needs it most.
    *("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
)
ALLOWED_PREFIX = ("LC_",)
DISPLAY = ("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY")


def environment(
    host: Mapping[str, str],
    *,
    device: Mapping[str, str],
    libraries: tuple[str, ...] = (),
    passed: tuple[str, ...] = (),
    fixed: Mapping[str, str] | None = None,
    render: bool = False,
    user: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The worker's whole environment.

    device     mask and order from `visibility.worker_variables`: one entry, or none for the CPU
    libraries  folders for LD_LIBRARY_PATH, first wins; the host's own does not pass
    passed     further variables of the host (Traits.pass_env)
    fixed      set whatever the host has (Traits.set_env, the interpreter's needs)
    user       what the caller added; may override all but the device
    """
    names = ALLOWED + passed + (DISPLAY if render else ())
    env = {
        name: value
        for name, value in host.items()
        if name in names or name.startswith(ALLOWED_PREFIX)
    }
    env.update(fixed or {})
    env.update(user or {})
    folders = [folder for folder in (*libraries, env.get("LD_LIBRARY_PATH", "")) if folder]
    if folders:
        env["LD_LIBRARY_PATH"] = ":".join(folders)
    # Last, so that nothing can move the worker: the mask replaces the parent's, it does not nest.
    env.update(device)
    return env


def driver_folders(host: Mapping[str, str]) -> tuple[str, ...]:
    """The folder of LD_LIBRARY_PATH in which this host finds libcuda, if it is there that it does:
    the rest of the host's LD_LIBRARY_PATH does not pass."""
    for folder in host.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and os.path.exists(os.path.join(folder, "libcuda.so.1")):
            return (folder,)
    return ()


def entry_file() -> Path:
    """`workers/__main__.py` of this very installation: both ends run the same source."""
    # The package has no __init__.py of its own, so the way goes over a sibling.
    return Path(ipc.__path__[0]).resolve().parent / "workers" / "__main__.py"


@dataclass(frozen=True)
class Command:
    """What to run: interpreter, simulator and environment, decided before anything starts."""

    python: str
    flags: tuple[str, ...]
    simulator: str
    site: str  # folder of packages the interpreter lacks, "" for none
    env: Mapping[str, str]
    rank: int

    def argv(self, fd: int) -> list[str]:
        argv = [self.python, *self.flags, str(entry_file()), "--fd", str(fd)]
        argv += ["--simulator", self.simulator]
        return [*argv, "--site", self.site] if self.site else argv


_started: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
_started_lock = threading.Lock()


def _forget_lock() -> None:
    """In a forked child: another thread of the host may have held it for ever."""
    global _started_lock
    _started_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def kill_all(spare: Container[int] = ()) -> None:
    """End every worker of this process now but those with a pid in `spare`: also those that other
    threads are still opening. Each thread then finds its worker dead and takes it apart itself."""
    with _started_lock:
        workers = list(_started)
    for worker in workers:
        if worker.pid not in spare:
            worker.unwanted = True
            worker.signal_group(signal.SIGKILL)


class WorkerProcess:
    """A started worker. Owns its process group, its log and the host's end of the control socket."""

    unwanted = False  # ended on purpose while it was opened: there is nothing to explain or to keep

    def __init__(self, command: Command) -> None:
        self.command = command
        self.owner = os.getpid()
        self._popen: subprocess.Popen[bytes] | None = None
        self._exit: str | None = None
        self.pid = self.pidfd = -1
        self._memory: OomWatch | None = None
        try:
            self.log = logs.create(command.rank)
        except OSError as error:
            raise WorkerLaunchError(f"no log can be made: {error.strerror or error}") from None
        try:
            self._open()
        except BaseException as error:
            self.log.remove()
            if isinstance(error, OSError):
                raise WorkerLaunchError(_why_not(command.python, error)) from None
            raise
        self.started_s = time.monotonic()
        with _started_lock:
            _started.add(self)

    def _open(self) -> None:
        self.control, worker_end = socket.socketpair()
        try:
            keeper.uninterrupted(lambda: self._start(worker_end))
        except BaseException:  # which may have come after the start
            self.signal_group(signal.SIGKILL)
            self._reap()
            self.control.close()
            self._close_pidfd()
            raise
        finally:
            worker_end.close()

    def _start(self, worker_end: socket.socket) -> None:
        # A host that was started without standard streams gives out their numbers, and in the worker they
        # are taken.
        fd = fcntl.fcntl(worker_end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            self._popen = subprocess.Popen(
                self.command.argv(fd),
                stdin=subprocess.DEVNULL,
                stdout=self.log.fd,
                stderr=self.log.fd,
                env=dict(self.command.env),
                pass_fds=[fd],
                start_new_session=True,  # its own group: ^C in a terminal is the host's to handle
            )
        finally:
            os.close(fd)
        self.pid = self._popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.watch_memory()

    def watch_memory(self) -> None:
        """Note the memory cgroup that the worker is in now: a launcher may move it after its start."""
        self._memory = OomWatch(self.pid)

    # -- life and death --------------------------------------------------------------------------

    def dead(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended, waiting up to `within_s`. Does not reap it."""
        if self._exit is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, within_s) * 1e3))

    def signal_group(self, number: int) -> None:
        """Signal the worker and what it started. Only before it is reaped: until then the number of
        its process group cannot belong to anybody else."""
        if self._popen is not None and self._exit is None and os.getpid() == self.owner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._number_is_ours():
                    os.killpg(self._popen.pid, number)

    def _number_is_ours(self) -> bool:
        """The number of a reaped worker is taken as long as anything of its group lives, so a process
        that has it now is a stranger."""
        return not (self._reaped_by_others() and os.path.exists(f"/proc/{self.pid}"))

    def _reaped_by_others(self) -> bool:
        """Somebody else in this process may have reaped the worker: `os.wait()` in a handler."""
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return True
        except OSError:  # not allowed here: then as it was before there were pidfds
            pass
        return False

    def kill(self, within_s: float) -> bool:
        """Kill the group and wait for the end of the process. Does not reap it."""
        self.signal_group(signal.SIGKILL)
        return self.dead(within_s)

    def end(self, grace_s: float = 0.0) -> str:
        """Wait `grace_s` for the process to end by itself, kill its group, reap it, close everything.

        Returns how it ended, in words. Idempotent. In a forked child of the host: only closes.
        """
        if self._exit is None and os.getpid() != self.owner:
            self._exit = "belongs to another process"
        try:
            if self._exit is None:
                try:
                    self.dead(grace_s)
                finally:  # an interrupt ends the wait, and not the rest
                    self.signal_group(signal.SIGKILL)
                    self._exit = self._reap()
        finally:
            self._exit = self._exit or "killed, and not waited for"
            self.control.close()
            self._close_pidfd()
        return self._exit

    def _close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _reap(self) -> str:
        if self._popen is None:
            return "never started"
        if self._reaped_by_others():
            self._popen.returncode = 0  # or it would wait for whoever has the number now
            return _TAKEN
        # Uninterruptible kernel states (a driver call) can outlive SIGKILL for a while.
        try:
            code = self._popen.wait(30.0)
        except subprocess.TimeoutExpired:
            return "still in the kernel 30 s after SIGKILL"
        self._reap_orphans()
        return self._words(code)

    def _reap_orphans(self) -> None:
        """What the worker started is ours to reap where this process is a subreaper, or the first one
        of a container. Elsewhere there is nothing."""
        deadline_s = time.monotonic() + _ORPHANS_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline_s:
                if os.waitpid(-self.pid, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)

    def _words(self, code: int) -> str:
        memory = self._memory.words() if self._memory and code in _KILLED else ""
        return exit_words(code, f": {memory}" if memory else "")

    def exit_now(self) -> str:
        """How it ended, without ending it: "" while it lives."""
        if self._exit is not None:
            return self._exit
        if not self.dead():
            return ""
        with contextlib.suppress(ChildProcessError, AttributeError):
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                code = info.si_status
                return self._words(code if info.si_code == os.CLD_EXITED else -code)
        return _TAKEN


def _why_not(python: str, error: OSError) -> str:
    """What kept the worker from being started, in words."""
    text = f"cannot start {python}: {error.strerror or error}"
    if error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
        return f"{text}. Is it the path of a Python interpreter?"
    return text


_HINTS = {
    signal.SIGBUS: ", which for shared memory means that the memory was not there",
    signal.SIGKILL: ", by somebody or by the kernel when memory ran out",
}


_TAKEN = "its exit status was taken by somebody else in this process"
# Directly, and as a wrapper script passes it on.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
# What was killed with its group ends in milliseconds.
_ORPHANS_S = 1.0


def exit_words(code: int, why: str = "") -> str:
    """ "SIGKILL (signal 9)", "exit code 3"; `why`, else what a few of them usually mean."""
    if code >= 0:
        return f"exit code {code}{why}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"signal {-code}"
    return f"{number.name} (signal {-code}{why or _HINTS.get(number, '')})"
