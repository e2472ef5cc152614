"""The two ends of the protocol, joined in memory: one socket pair, one sealed block, two semaphores, and
no process. Each test pushes an event through one end and looks at both.

    with joined() as pair:
        pair.to_worker(Where())                  # sent by the host, received by the worker
        pair.ring(pair.host, pair.worker)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from outboard.ipc import doorbell, shm
from outboard.ipc.channel import Channel
from outboard.ipc.deadline import Deadline
from outboard.ipc.doorbell import Doorbell, History
from outboard.ipc.layout import Layout, Sizes
from outboard.ipc.messages import NONCE_BYTES, Message
from outboard.ipc.shm import Block
from outboard.ipc.states import Conversation, Role

# Long enough for a loaded machine, short enough to be seen by a person who waits.
SOON_S = 10.0
NONCE = bytes(range(NONCE_BYTES))
SIZES = Sizes(num_envs=3, nq=5, nv=4, nu=2, nbody=2)


def soon() -> Deadline:
    return Deadline(SOON_S)


@dataclass
class Channels:
    host: Channel
    worker: Channel
    host_socket: socket.socket
    worker_socket: socket.socket


@contextlib.contextmanager
def channels(watch_fd: int | None = None) -> Generator[Channels, None, None]:
    """Two channels over one socket pair; `watch_fd` is the host's pidfd of the worker."""
    left, right = socket.socketpair()
    pair = Channels(Channel(left, watch_fd), Channel(right), left, right)
    try:
        yield pair
    finally:
        pair.host.close()
        pair.worker.close()


class Conversations:
    """Both views of one conversation: what one side sends, the other receives."""

    def __init__(self) -> None:
        self.host = Conversation(Role.HOST)
        self.worker = Conversation(Role.WORKER)

    def end(self, role: Role) -> Conversation:
        return self.host if role is Role.HOST else self.worker

    def push(self, by: Role, event: str) -> None:
        self.end(by).sent(event)
        self.end(by.peer).received(event)

    @property
    def phases(self) -> tuple[str, str]:
        return self.host.phase.value, self.worker.phase.value


@contextlib.contextmanager
def blocks(layout: Layout) -> Generator[tuple[Block, Block], None, None]:
    """The host's and the worker's mapping of one memfd."""
    host = shm.create(layout, NONCE)
    try:
        yield host, shm.attach(host.fd, layout, NONCE)
    finally:
        host.close_fd()


@contextlib.contextmanager
def bells(host: Block, worker: Block) -> Generator[tuple[Doorbell, Doorbell], None, None]:
    """The host's and the worker's side of one bell, each with semaphore objects of its own."""
    with doorbell.semaphore_pair() as (go, done, go_name, done_name):
        worker_go, worker_done = doorbell.open_semaphores(go_name, done_name)
    one = slice(shm.SEQUENCE, shm.SEQUENCE + 1)
    host_bell = Doorbell(go, done, host.reply[one])
    worker_bell = Doorbell(worker_done, worker_go, worker.request[one])
    try:
        yield host_bell, worker_bell
    finally:
        host_bell.close()
        worker_bell.close()


@dataclass
class End:
    role: Role
    channel: Channel
    talk: Conversation
    block: Block
    bell: Doorbell
    history: History

    @property
    def line(self) -> Any:
        """The line of the header that this end writes."""
        return self.block.request if self.role is Role.HOST else self.block.reply

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        self.talk.sent(type(message).__name__)
        self.channel.send(message, soon(), fds)

    def receive(self) -> Message:
        message = self.channel.receive(soon())
        self.talk.received(type(message).__name__)
        return message

    def ring(self) -> int:
        """Store the next sequence number and ring; returns the number."""
        self.line[shm.SEQUENCE] += 1
        self.bell.ring()
        return int(self.line[shm.SEQUENCE])

    def wait(self, sequence: int, timeout_s: float = SOON_S) -> None:
        self.bell.wait(sequence, self.history, timeout_s)


@dataclass
class Pair:
    host: End
    worker: End

    def to_worker(self, message: Message, fds: Sequence[int] = ()) -> Message:
        self.host.send(message, fds)
        return self.worker.receive()

    def to_host(self, message: Message, fds: Sequence[int] = ()) -> Message:
        self.worker.send(message, fds)
        return self.host.receive()

    def exchange(self) -> int:
        """One command and its answer, when neither has to wait."""
        sequence = self.host.ring()
        self.worker.wait(sequence)
        self.worker.ring()
        self.host.wait(sequence)
        return sequence


@contextlib.contextmanager
def joined(layout: Layout | None = None) -> Generator[Pair, None, None]:
    """Both ends with everything, in phase SPAWNED."""
    talk = Conversations()
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(channels())
        host_block, worker_block = stack.enter_context(
            blocks(layout or Layout(SIZES, ("qpos", "qvel")))
        )
        host_bell, worker_bell = stack.enter_context(bells(host_block, worker_block))
        yield Pair(
            End(Role.HOST, lines.host, talk.host, host_block, host_bell, History()),
            End(Role.WORKER, lines.worker, talk.worker, worker_block, worker_bell, History()),
        )


@contextlib.contextmanager
def forked(life: Any) -> Generator[int, None, None]:
    """A forked child that runs `life()` and ends; its pid. Killed and reaped at the end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            life()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError):
            # Raises when the child was reaped: its number may be somebody else's by now.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """How the child ended: its exit code, or minus the signal. Reaps it. AssertionError when it lives on."""
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], SOON_S)[0], "the forked child did not end"
    finally:
        os.close(pidfd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
