"""Drives one worker from SPAWNED to READY, and judges where it landed before the first step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..ipc import doorbell, shm
from ..ipc.arena import HostArena
from ..ipc.channel import Channel
from ..ipc.deadline import Deadline
from ..ipc.device import DeviceReport
from ..ipc.errors import (
    DeadlinePassed,
    DeviceMismatchError,
    DevicePlanError,
    OutboardError,
    ProtocolError,
    SceneError,
    UsageError,
    WorkerFailed,
    WorkerLaunchError,
    WorkerTimeout,
)
from ..ipc.layout import Layout
from ..ipc.messages import (
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Error,
    Hello,
    Init,
    InitReply,
    Message,
    Progress,
    Ready,
)
from ..ipc.states import Conversation, Role
from . import keeper, memory
from .device_plan import DevicePlan
from .traits import Traits
from .visibility import PCI_BUS_ID

# From exec to HELLO: an interpreter that imports numpy from a cold network disk.
HELLO_S = 60.0
# ATTACH maps memory and publishes once; a minute means that the worker hangs.
ATTACH_S = 60.0
SEND_S = 30.0

_M = TypeVar("_M", bound=Any)

_BY_FAULT: dict[str, type[OutboardError]] = {
    "scene": SceneError,
    "usage": UsageError,
    "protocol": ProtocolError,
    "launch": WorkerLaunchError,
    "device": DevicePlanError,
    "worker": WorkerFailed,
}


def raised(error: Error) -> OutboardError:
    """The worker's ERROR as the exception the caller gets."""
    exception = _BY_FAULT[error.fault](
        f"the worker reported {error.type} in phase {error.phase}: {error.text}"
        if error.fault in ("worker", "protocol", "launch")
        else error.text
    )
    if isinstance(exception, WorkerFailed):
        exception.remote_type, exception.remote_traceback = error.type, error.traceback
    return exception


class Talk:
    """The host's end of one conversation: every message passes the table of states."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.state = Conversation(Role.HOST)
        self.reached = self.state.phase  # before the message received last, which may be an ERROR
        self.progress = (
            ""  # the last PROGRESS in words: where a worker was that died while it built
        )

    def send(
        self, message: Message, fds: Sequence[int] = (), deadline: Deadline | None = None
    ) -> None:
        self.state.sent(type(message).__name__)
        self.channel.send(message, deadline or Deadline(SEND_S), fds)

    def receive(self, deadline: Deadline) -> Message:
        """The next message; an ERROR is raised as what it means."""
        message = self.channel.receive(deadline)
        self.reached = self.state.phase
        self.state.received(type(message).__name__)
        if isinstance(message, Error):
            raise raised(message)
        return message

    def expect(self, kind: type[_M], deadline: Deadline) -> _M:
        message = self.receive(deadline)
        if not isinstance(message, kind):
            raise ProtocolError(f"{type(message).__name__} where {kind.__name__} belongs")
        return message


def hear_hello(talk: Talk, mask: str, source: str, order: str = PCI_BUS_ID) -> Hello:
    """Preamble and HELLO: version, source and mask must be what this host sent."""
    deadline = Deadline(HELLO_S)
    try:
        version = talk.channel.receive_preamble(deadline)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker speaks protocol version {version}, this host version "
                f"{PROTOCOL_VERSION} ({source}). Both ends come from the same files: an old worker "
                "is still running, or the worker's entry file is another installation's"
            )
        hello = talk.expect(Hello, deadline)
    except DeadlinePassed:
        raise WorkerTimeout(
            f"the worker's interpreter said nothing for {HELLO_S:.0f} s after it was started"
        ) from None
    # No path holds a zero byte, and asking for one is a ValueError.
    if "\0" in hello.source or os.path.realpath(hello.source) != os.path.realpath(source):
        raise ProtocolError(f"the worker runs {hello.source}, this host {source}")
    if hello.mask != mask:
        raise DeviceMismatchError(
            f"CUDA_VISIBLE_DEVICES was sent as {mask!r} and arrived as {hello.mask!r}: "
            "something between this process and the worker sets it (a wrapper script around the "
            "interpreter, a sitecustomize). Remove that"
        )
    if hello.order != order:
        raise DeviceMismatchError(
            f"CUDA_DEVICE_ORDER was sent as {order!r} and arrived as {hello.order!r}: something "
            "between this process and the worker sets it. Remove that"
        )
    return hello


def initialise(
    talk: Talk, init: Init, traits: Traits, on_progress: Callable[[Progress], None]
) -> InitReply:
    """INIT to INIT_REPLY. Progress extends the deadline, never past the hard limit."""
    talk.send(init)
    hard = Deadline(traits.init_hard_s)
    deadline = Deadline(traits.init_s, within=hard)
    last = "nothing"
    while True:
        try:
            message = talk.receive(deadline)
        except DeadlinePassed:
            raise WorkerTimeout(
                f"the simulator was not built within {deadline.seconds:.0f} s; its last progress "
                f"was {last}"
            ) from None
        if isinstance(message, Progress):
            talk.progress = last = f"{message.stage} {message.done}/{message.total}"
            deadline = Deadline(traits.init_s, within=hard)
            on_progress(message)
        elif isinstance(message, InitReply):
            talk.progress = ""
            return message


def check_facts(init: Init, reply: InitReply) -> None:
    """The reply must answer the question that was asked."""
    sizes = reply.model.sizes
    if sizes.num_envs != init.num_envs:
        raise ProtocolError(f"{init.num_envs} environments were asked for, {sizes.num_envs} built")
    missing = [name for name in init.publish if name not in reply.capabilities]
    if missing:
        raise UsageError(f"{reply.engine} cannot publish {', '.join(missing)}")


def require(plan: DevicePlan, mask: str, hello: Hello, report: DeviceReport, wrong: str) -> None:
    """DeviceMismatchError with plan, report, and the mask sent and seen, when something is wrong."""
    if wrong:
        raise DeviceMismatchError(
            f"{wrong}.\n  plan: {plan} ({plan.why})\n  report: {report.kind} {report.local} "
            f"{report.uuid} by {report.evidence} {report.buffer!r}; driver: {report.driver or 'ok'}"
            f"\n  mask sent: {mask!r}, seen: {hello.mask!r}"
        )


@dataclass
class Data:
    """The data plane of an attached worker."""

    block: shm.Block
    bell: doorbell.Doorbell
    arena: HostArena | None = None
    no_arena: str = ""  # why the worker did not take the one it was offered


def _new_block(layout: Layout, nonce: bytes) -> shm.Block:
    """Made by the keeper: ^C between the system call and the object that owns its descriptor would
    lose the descriptor."""
    made: list[shm.Block] = []
    try:
        keeper.uninterrupted(lambda: made.append(shm.create(layout, nonce)))
    except OSError as error:
        raise UsageError(
            f"cannot reserve {layout.total_bytes:,} bytes for the shared block: {error.strerror}"
        ) from None
    return made[0]


def attach(
    talk: Talk,
    init: Init,
    layout: Layout,
    old: shm.Block | None,
    arena: HostArena | None = None,
) -> Data:
    """ATTACH to READY: make (or, after a restart, reuse) the block, hand it over, drop the names.

    arena: what is offered beside the block; the worker may be unable to take it.
    """
    if old is None:
        memory.require(layout.total_bytes)
        block = _new_block(layout, init.nonce)
    else:
        block = old
        block.restamp(init.nonce)
    try:
        with doorbell.semaphore_pair() as (go, done, go_name, done_name):
            talk.send(
                Attach(
                    nonce=init.nonce,
                    sizes=layout.sizes,
                    publish=layout.publish,
                    banks=layout.banks,
                    total_bytes=layout.total_bytes,
                    fingerprint=layout.fingerprint,
                    go_name=go_name,
                    done_name=done_name,
                    arena=None if arena is None else arena.offered,
                ),
                [block.fd],
            )
            try:
                ready = talk.expect(Ready, Deadline(ATTACH_S))
            except DeadlinePassed:
                raise WorkerTimeout(
                    f"the worker did not map the block within {ATTACH_S:.0f} s"
                ) from None
            if ready.nonce != init.nonce or ready.fingerprint != layout.fingerprint:
                raise ProtocolError("READY carries another nonce or fingerprint than ATTACH")
    except BaseException:
        if old is None:
            block.close_fd()
        raise
    cell = block.reply[shm.SEQUENCE : shm.SEQUENCE + 1]
    data = Data(block, doorbell.Doorbell(go, done, cell))
    if arena is not None:
        data.no_arena = ready.arena
        if not ready.arena and not arena.answered(init.nonce):
            data.no_arena = "what the worker wrote into the arena did not arrive here"
        if not data.no_arena:
            data.arena = arena
    return data


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)
