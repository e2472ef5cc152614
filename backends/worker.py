"""One worker from the host's side: process, conversation, data plane, watcher; and its end."""

from __future__ import annotations

import contextlib
import os
import select
import threading

from ..ipc import shm
from ..ipc.channel import Channel
from ..ipc.deadline import Deadline
from ..ipc.doorbell import Doorbell
from ..ipc.errors import DeadlinePassed, OutboardError, PeerGone, ProtocolError
from ..ipc.messages import Bye, Close, Error, Opcode
from ..ipc.states import Phase
from . import keeper
from .handshake import Data, Talk, raised
from .process import Command, WorkerProcess

# The watcher's own clock: bounds how late a deadline is seen when the wall clock was set back while a
# nap was under way (semaphores time out on the wall clock), and how far a log may grow.
_TICK_S = 0.5
# After the death of the process, what it sent before is read; the kernel has it already.
_LAST_WORDS_S = 0.5
# From SIGKILL to the end of the process: a driver call can outlive it for a while.
_KILL_S = 30.0


class Watcher:
    """A thread on the worker's pidfd: marks the bell and rings it when the worker is dead.

    pid: the worker's own. Behind a wrapper script that does not exec it is not the process we started,
    and the wrapper may live on.
    """

    def __init__(self, process: WorkerProcess, bell: Doorbell, pid: int) -> None:
        self._fds = [os.eventfd(0)]  # the first one stops the thread
        try:
            self._fds.append(os.dup(process.pidfd))
            if pid != process.pid:
                with contextlib.suppress(OSError):  # of another pid namespace, or gone by now
                    self._fds.append(os.pidfd_open(pid))
            self._thread = threading.Thread(
                target=_watch,
                args=(tuple(self._fds), bell, process),
                name=f"outboard-watch-{process.pid}",
                daemon=True,
            )
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """Ends the thread and closes its descriptors."""
        os.eventfd_write(self._fds[0], 1)
        try:
            # A backend that is collected may be so on any thread, also on this one.
            if threading.current_thread() is not self._thread:
                self._thread.join(5.0)
        finally:
            self._close()

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _watch(fds: tuple[int, ...], bell: Doorbell, process: WorkerProcess) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll(int(_TICK_S * 1e3))}
        if fds[0] in ready:
            return
        if ready:
            bell.wake(gone=True)
            return
        if bell.sleeping:
            bell.wake()
        with contextlib.suppress(OSError):
            process.log.keep_small()


class Worker:
    """Owns everything that one worker is made of, and takes it apart in the right order."""

    def __init__(self, command: Command) -> None:
        self.process = WorkerProcess(command)
        self.talk = Talk(Channel(self.process.control, self.process.pidfd))
        self.data: Data | None = None
        self._watcher: Watcher | None = None
        self._ended = False
        self.left_well = False  # it said BYE, and ended in its time

    @property
    def phase(self) -> Phase:
        return self.talk.state.phase

    def attached(self, data: Data, pid: int) -> None:
        self.data = data
        self.process.watch_memory()

        def watch() -> None:
            self._watcher = Watcher(self.process, data.bell, pid)

        keeper.uninterrupted(watch)

    def last_words(self, within_s: float = _LAST_WORDS_S) -> OutboardError | None:
        """What the worker said before it fell silent: its own account is the first cause."""
        deadline = Deadline(within_s)
        try:
            while True:
                message = self.talk.channel.receive(deadline)
                if isinstance(message, Error):
                    return raised(message)
                # Later on, the bell does not tell the table what is under way.
                if self.data is None:
                    self.talk.state.received(type(message).__name__)
        except ProtocolError as error:
            return error
        except (PeerGone, DeadlinePassed):
            return None

    def leave(self, within_s: float) -> bool:
        """CLOSE to BYE, then the end of the process. False when it did not end well in time."""
        deadline = Deadline(within_s)
        try:
            if self.data is not None and not self._idle(deadline):
                return False
            self.talk.send(Close(), deadline=deadline)
            if self.data is not None:
                request = self.data.block.request
                request[shm.OPCODE] = int(Opcode.MAIL)
                request[shm.SEQUENCE] += 1
                self.data.bell.ring()
            while not isinstance(self.talk.receive(deadline), Bye):
                pass
        # ValueError: it wrote over the sequence number, which cannot be counted on from there.
        except (OutboardError, PeerGone, DeadlinePassed, OSError, ValueError):
            return False
        return self.process.dead(deadline.remaining_s())

    def _idle(self, deadline: Deadline) -> bool:
        """Wait for a command in flight: its opcode must stay until it is answered."""
        assert self.data is not None
        request, reply = self.data.block.request, self.data.block.reply
        while request[shm.SEQUENCE] != reply[shm.SEQUENCE]:
            if self.process.dead(0.001) or deadline.expired():
                return False
        return True

    def end(self, grace_s: float, keep_log: bool) -> str:
        """Take everything apart: ask, wait `grace_s`, kill, reap, release. How the process ended.

        The log goes, unless `keep_log`, or the worker was asked to leave and had to be killed.
        Idempotent; in a forked child of the host it releases and signals nobody. An interrupt ends the
        waits and not the taking apart.
        """
        if self._ended:
            return self.process.exit_now()
        self._ended = True
        mine = os.getpid() == self.process.owner
        asked = mine and grace_s > 0
        try:
            self.left_well = asked and self.leave(grace_s)
            if mine:
                self.process.kill(_KILL_S)
        finally:
            keep_log = keep_log or not mine or (asked and not self.left_well)
            if mine:
                keeper.uninterrupted(lambda: self._take_apart(keep_log))
            else:
                self._take_apart(keep_log)
        return self.process.exit_now()

    def _take_apart(self, keep_log: bool) -> None:
        self.process.end()
        if self._watcher is not None and os.getpid() == self.process.owner:
            self._watcher.stop()
        if self.data is not None:
            self.data.bell.close()
        self.talk.channel.close()
        if keep_log:
            self.process.log.close()
        else:
            self.process.log.remove()
