"""A worker process that a check starts and talks to by itself, past `Backend` and its table of states."""

from __future__ import annotations

import struct
from typing import Any, TypeVar

from ..ipc import doorbell, shm
from ..ipc.channel import Channel
from ..ipc.deadline import Deadline
from ..ipc.errors import DeadlinePassed, PeerGone
from ..ipc.layout import Layout
from ..ipc.messages import (
    PROTOCOL_VERSION,
    Bye,
    Error,
    Hello,
    InitReply,
    Message,
    Progress,
)
from ..ipc.states import Phase
from . import handshake
from .conformance_kit import Target, broken, launch_command
from .process import WorkerProcess

_M = TypeVar("_M", bound=Any)

ANSWER_S = 10.0  # one command of four environments
GONE_S = 1.0  # how long a worker may outlive its host


class Raw:
    """A worker process of the target and the bare channel to it; killed at the end of `with`."""

    def __init__(self, target: Target) -> None:
        self.command, self.init = launch_command(target)
        self.traits = target.kind.traits
        self.process = WorkerProcess(self.command)
        self.channel = Channel(self.process.control, self.process.pidfd)
        self.data: handshake.Data | None = None

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end()
        if self.data is not None:
            self.data.bell.close()
            self.data.block.close_fd()
        self.channel.close()
        self.process.log.remove()

    # -- messages --------------------------------------------------------------------------------

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(message, Deadline(handshake.SEND_S))

    def send_body(self, body: bytes) -> None:
        self.process.control.sendall(struct.pack("<I", len(body)) + body)

    def receive(self, within_s: float, after: str) -> Message:
        try:
            return self.channel.receive(Deadline(within_s))
        except PeerGone:
            self.process.dead(GONE_S)
            how = self.process.exit_now() or "it closed the channel"
            broken(f"after {after} the worker was gone without a word: {how}")
        except DeadlinePassed:
            broken(f"after {after} nothing came for {within_s:g} s")

    def expect(self, kind: type[_M], within_s: float, after: str) -> _M:
        message = self.receive(within_s, after)
        if not isinstance(message, kind):
            said = f": {message.text}" if isinstance(message, Error) else ""
            broken(f"after {after} came {type(message).__name__}{said}; {kind.__name__} belongs")
        return message

    def expect_refusal(self, after: str) -> None:
        """An ERROR that blames the protocol, at once, and the end of the process."""
        message = self.receive(ANSWER_S, after)
        if not isinstance(message, Error):
            broken(f"after {after} came {type(message).__name__}; ERROR belongs")
        if message.fault != "protocol":
            broken(
                f"after {after} the ERROR blames {message.fault!r}, not the host: {message.text}"
            )
        self.expect_end(f"the ERROR about {after}")

    def expect_end(self, after: str) -> None:
        if not self.process.dead(self.traits.close_s):
            broken(f"the worker lives on {self.traits.close_s:g} s after {after}")

    def expect_bye(self, within_s: float) -> None:
        """BYE, perhaps after what was under way, then a clean exit."""
        while not isinstance(message := self.receive(within_s, "CLOSE"), Bye):
            if isinstance(message, Error):
                broken(f"CLOSE was answered by ERROR: {message.text}")
        self.expect_end("BYE")
        how = self.process.exit_now()
        if how != "exit code 0":
            broken(f"after BYE the worker ended with {how}")

    # -- phases ----------------------------------------------------------------------------------

    def hello(self) -> Hello:
        try:
            version = self.channel.receive_preamble(Deadline(handshake.HELLO_S))
        except PeerGone:
            self.process.dead(GONE_S)
            tail = self.process.log.tail(1)
            broken(f"it ended before it said a word: {self.process.exit_now()} {' '.join(tail)}")
        except DeadlinePassed:
            broken(f"no preamble came within {handshake.HELLO_S:g} s")
        if version != PROTOCOL_VERSION:
            broken(f"the preamble says version {version}, this host speaks {PROTOCOL_VERSION}")
        return self.expect(Hello, handshake.HELLO_S, "the preamble")

    def built(self) -> tuple[list[Progress], InitReply]:
        self.hello()
        self.send(self.init)
        progress: list[Progress] = []
        while True:
            message = self.receive(self.traits.init_s, "INIT")
            if isinstance(message, InitReply):
                return progress, message
            if not isinstance(message, Progress):
                said = f": {message.text}" if isinstance(message, Error) else ""
                broken(f"{type(message).__name__} came while building{said}")
            progress.append(message)

    def ready(self) -> InitReply:
        _, reply = self.built()
        talk = handshake.Talk(self.channel)
        talk.state.phase = Phase.VERIFIED
        layout = Layout(reply.model.sizes, self.init.publish)
        self.data = handshake.attach(talk, self.init, layout, None)
        self.data.block.fields[0]["ctrl"][:] = reply.model.default_ctrl
        return reply

    # -- bell ------------------------------------------------------------------------------------

    def ring(self, opcode: int, count: int = 0) -> int:
        """A command; its sequence number."""
        assert self.data is not None
        request = self.data.block.request
        request[shm.OPCODE], request[shm.COUNT] = opcode, count
        request[shm.SEQUENCE] += 1
        self.data.bell.ring()
        return int(request[shm.SEQUENCE])

    def wait(self, sequence: int) -> None:
        assert self.data is not None
        try:
            self.data.bell.wait(sequence, doorbell.History(), ANSWER_S)
        except DeadlinePassed:
            broken(f"command {sequence} was not answered within {ANSWER_S:g} s")

    def answered(self) -> int:
        assert self.data is not None
        return int(self.data.block.reply[shm.SEQUENCE])
