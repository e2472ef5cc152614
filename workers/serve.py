"""The worker's life, written once for every simulator: HELLO, INIT, ATTACH, READY, commands, BYE."""

import os
import socket
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, NoReturn, Optional

import msgpack
import numpy as np

from ..ipc import cuda_driver, doorbell, shm
from ..ipc.arena import NoArena, PageLock, WorkerArena
from ..ipc.channel import Channel
from ..ipc.deadline import Deadline
from ..ipc.device import CPU
from ..ipc.errors import (
    DeadlinePassed,
    DevicePlanError,
    OutboardError,
    PeerGone,
    ProtocolError,
    SceneError,
    UsageError,
    WorkerLaunchError,
)
from ..ipc.layout import Layout
from ..ipc.messages import (
    Attach,
    Bye,
    Close,
    Error,
    Hello,
    Init,
    InitReply,
    Message,
    Opcode,
    Progress,
    Ready,
    Render,
    RenderReply,
    SetProperty,
    SetPropertyReply,
    Status,
    Where,
    WhereReply,
)
from ..ipc.states import RING, Conversation, Phase, Role
from . import arena_commands, lifeline, stdio
from .simulator import Simulator, load

# The host decides how long things may take and kills; a worker only must not wait for ever on a host
# that lives and does not read.
_SEND_S = 60.0
_PROGRESS_EVERY_S = 0.25

_FAULTS = (
    (SceneError, "scene"),
    (UsageError, "usage"),
    (ProtocolError, "protocol"),
    (DevicePlanError, "device"),
    (WorkerLaunchError, "launch"),
    (ImportError, "launch"),
)


class _Closed(Exception):
    """The host asked us to leave."""


def hello(simulator: str) -> Hello:
    gpus, why_not = cuda_driver.survey()
    return Hello(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable or "",
        numpy=np.__version__,
        msgpack=".".join(map(str, msgpack.version)),
        pid=os.getpid(),
        simulator=simulator,
        source=os.path.dirname(os.path.abspath(shm.__file__)),
        # Echoed unread: the host compares them with what it sent.
        mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
        order=os.environ.get("CUDA_DEVICE_ORDER"),
        gpus=gpus,
        driver=why_not,
    )


class Worker:
    """One conversation with one host."""

    def __init__(self, channel: Channel, simulator: str) -> None:
        self.channel = channel
        self.name = simulator
        self.talk = Conversation(Role.WORKER)
        self.simulator: Optional[Simulator] = None
        self.bell: Optional[doorbell.Doorbell] = None
        self.arena: Optional[WorkerArena] = None
        self.answered = 0  # sequence number of the last answer
        self._last_progress = ("", 0.0)

    # -- messages --------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        self.talk.sent(type(message).__name__)
        self.channel.send(message, Deadline(_SEND_S))

    def receive(self) -> Message:
        """The next message; waits as long as the host lives. _Closed when it is CLOSE."""
        message = self.channel.receive(Deadline(float("inf")))
        self.talk.received(type(message).__name__)
        if isinstance(message, Close):
            raise _Closed
        return message

    def expect(self, kind: type) -> Any:
        message = self.receive()
        if not isinstance(message, kind):
            raise ProtocolError(f"{type(message).__name__} where {kind.__name__} belongs")
        return message

    def progress(self, stage: str, done: int, total: int) -> None:
        """Throttled: a loop over thousands of environments may call it every turn."""
        now = time.monotonic()
        last_stage, last_s = self._last_progress
        if stage == last_stage and now - last_s < _PROGRESS_EVERY_S and done != total:
            return
        self._last_progress = (stage, now)
        self.send(Progress(stage, done, total))

    # -- life ------------------------------------------------------------------------------------

    def run(self) -> int:
        """The whole life; returns the exit code."""
        try:
            self.channel.send_preamble(Deadline(_SEND_S))
            self.send(hello(self.name))
            block = self.attach(self.build(self.expect(Init)))
            self.serve_commands(block)
        except _Closed:
            return self.leave()
        except (PeerGone, DeadlinePassed):
            return 0  # the host is gone: nobody is left to tell
        # Whatever it is, the host must hear of it; a simulator may call sys.exit().
        except (Exception, SystemExit) as error:  # noqa: BLE001
            traceback.print_exc()
            self.report(error)
            return 1
        raise AssertionError("serve_commands returns only by an exception")

    def leave(self) -> int:
        """BYE first: what a simulator does in its close() is nobody's concern any more."""
        try:
            self.send(Bye())
            if self.arena is not None:
                self.arena.close()  # the host frees the memory when this process is gone
            if self.simulator is not None:
                self.simulator.close()
        except PeerGone:
            pass
        except (Exception, SystemExit):  # noqa: BLE001 - only the log is left to tell
            traceback.print_exc()
            return 1
        return 0

    def report(self, error: BaseException) -> None:
        """Tell the host, then answer a command that may be in flight with FAILED."""
        fault = next((name for cls, name in _FAULTS if isinstance(error, cls)), "worker")
        text = error.message if isinstance(error, OutboardError) else str(error)
        tail = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if self.talk.phase is Phase.READY:
            self.talk.received(RING)  # the hot path does not keep the phase: it was in a command
        phase = self.talk.phase.value
        # A file name in a message may be bytes that are no text.
        text, tail = (part.encode("utf-8", "replace").decode("utf-8") for part in (text, tail))
        try:
            self.send(Error(phase, fault, type(error).__name__, text[:8000], tail[-16000:]))
            if self.bell is not None:
                self.answer_failed()
        except (PeerGone, DeadlinePassed, UsageError):
            pass

    def build(self, init: Init) -> Init:
        self.simulator = load(self.name)()
        facts = self.simulator.build(init, self.progress)
        reply = InitReply(
            device=self.simulator.report_device(),
            model=facts,
            capabilities=tuple(self.simulator.capabilities),
            engine=self.simulator.engine,
            engine_version=self.simulator.engine_version,
            notes=tuple(self.simulator.notes),
            transports=tuple(self.simulator.transports),
        )
        missing = [name for name in init.publish if name not in reply.capabilities]
        if missing:
            raise UsageError(
                "{} cannot publish {}; it publishes {}".format(
                    reply.engine, ", ".join(missing), ", ".join(reply.capabilities)
                )
            )
        self.send(reply)
        return init

    def attach(self, init: Init) -> shm.Block:
        assert self.simulator is not None
        attach: Attach = self.expect(Attach)
        (fd,) = self.channel.take_fds(1)
        try:
            if attach.nonce != init.nonce:
                raise ProtocolError("ATTACH carries another nonce than INIT")
            try:
                layout = Layout(attach.sizes, attach.publish, attach.banks)
            except UsageError as error:  # nobody here called anything: it came over the wire
                raise ProtocolError(f"ATTACH asks for no layout: {error.message}") from None
            if layout.fingerprint != attach.fingerprint:
                raise ProtocolError("the layout's fingerprint is not the host's")
            block = shm.attach(fd, layout, attach.nonce)
        finally:
            os.close(fd)
        go, done = doorbell.open_semaphores(attach.go_name, attach.done_name)
        self.block = block
        self.bell = doorbell.Doorbell(done, go, block.request[shm.SEQUENCE : shm.SEQUENCE + 1])
        if init.device.kind != CPU:
            self.page_lock = _lock_pages(block)
        self.simulator.bind(block.fields)
        self.simulator.publish(0)
        why_no_arena = self.attach_arena(attach, layout)
        self.send(Ready(attach.nonce, layout.fingerprint, why_no_arena))
        return block

    def attach_arena(self, attach: Attach, layout: Layout) -> str:
        """Map the arena, when one is offered. "" or why not: the host decides what that means."""
        assert self.simulator is not None
        if attach.arena is None:
            return ""
        try:
            arena = WorkerArena(attach.arena, layout, attach.nonce)
        except (NoArena, cuda_driver.CudaError) as error:
            return str(error) or type(error).__name__
        self.simulator.bind_arena(arena.slots)
        self.arena = arena
        return ""

    # -- commands --------------------------------------------------------------------------------

    def serve_commands(self, block: shm.Block) -> NoReturn:
        """The hot path. One bell, one command, one answer; leaves only by an exception."""
        assert self.simulator is not None and self.bell is not None
        bell, request, reply = self.bell, block.request, block.reply
        step, wait, ring = self.simulator.step, bell.wait, bell.ring
        clock, never = time.perf_counter_ns, float("inf")
        history, others = doorbell.History(), self.other_commands(block)
        opcode_at, sequence_at, status_at, sim_ns_at = (
            shm.OPCODE,
            shm.SEQUENCE,
            shm.STATUS,
            shm.SIM_NS,
        )
        done, flagged_status = int(Status.DONE), int(Status.FLAGGED)
        enqueued = int(Status.ENQUEUED)
        last_bank = block.layout.banks - 1
        doorbell.sharpen_timer()
        sequence = sim_ns = 0
        while True:
            sequence += 1
            wait(sequence, history, never)
            opcode = request[opcode_at]
            started = clock()
            if opcode == 1:  # Opcode.STEP, without the enum's cost
                flagged = step(sequence & last_bank)
            else:
                flagged = others[opcode if opcode < len(others) else 0](sequence & last_bank)
            sim_ns += clock() - started
            reply[sim_ns_at] = sim_ns
            if not flagged:
                reply[status_at] = done
            else:
                reply[status_at] = flagged_status if flagged > 0 else enqueued
            reply[sequence_at] = self.answered = sequence
            ring()

    def other_commands(self, block: shm.Block) -> List[Callable[[int], int]]:
        """Index = opcode."""
        assert self.simulator is not None
        simulator, request, fields = self.simulator, block.request, block.fields[0]
        ids, new_qpos, new_qvel = fields["env_ids"], fields["set_qpos"], fields["set_qvel"]

        def step_reset(bank: int) -> int:
            simulator.reset(ids[: request[shm.COUNT]])
            return simulator.step(bank)

        def set_state(bank: int) -> int:
            n = request[shm.COUNT]
            simulator.set_state(ids[:n], new_qpos[:n], new_qvel[:n])
            return simulator.publish(bank)

        def reset(bank: int) -> int:
            simulator.reset(ids[: request[shm.COUNT]])
            return simulator.publish(bank)

        def unknown(bank: int) -> int:
            raise ProtocolError(f"opcode {request[shm.OPCODE]} is not known")

        table: Dict[Opcode, Callable[[int], int]] = {
            Opcode.STEP_RESET: step_reset,
            Opcode.SET_STATE: set_state,
            Opcode.RESET: reset,
            Opcode.MAIL: lambda bank: self.answer_mail(),
        }
        if self.arena is not None:
            table.update(arena_commands.commands(simulator, self.arena, request))
        return [unknown] + [table.get(code, unknown) for code in Opcode]

    def answer_mail(self) -> int:
        """One message, one reply. CLOSE leaves by _Closed."""
        assert self.simulator is not None
        message = self.receive()
        if isinstance(message, Where):
            self.send(WhereReply(self.simulator.report_device()))
        elif isinstance(message, SetProperty):
            env_ids = np.array(message.env_ids, np.int32)
            if len(env_ids):  # a mask may select nobody; then no width can be told
                values = np.frombuffer(message.values, "<f4").reshape(len(env_ids), -1)
                self.simulator.set_property(message.name, env_ids, values)
            self.send(SetPropertyReply(message.name))
        elif isinstance(message, Render):
            picture = np.ascontiguousarray(self.simulator.render(message), np.uint8)
            if picture.shape != (message.height, message.width, 3):
                raise ValueError(f"render() gave an array of shape {picture.shape}")
            self.send(RenderReply(message.width, message.height, picture.tobytes()))
        else:
            raise ProtocolError(f"{type(message).__name__} is no mail")
        return 0

    def answer_failed(self) -> None:
        """After an Error message: ring, so that a host that waits at the bell looks at the channel."""
        assert self.bell is not None
        reply = self.block.reply
        reply[shm.STATUS] = int(Status.FAILED)
        reply[shm.SEQUENCE] = self.answered + 1
        self.bell.ring()


def _lock_pages(block: shm.Block) -> Optional[PageLock]:
    """Page-lock the block, for a simulator that copies into it from its GPU. Slower without."""
    try:
        return PageLock(block, 0)
    except cuda_driver.CudaError as error:
        print(f"the shared block stays pageable, copies to it are slower: {error}", flush=True)
        return None


def main(argv: List[str]) -> NoReturn:
    """Entry of `workers/__main__.py`; ends the process without interpreter teardown, in which some
    simulators crash after all work is done (EGL, PhysX)."""
    # Not argparse, and not platform above: the two import for 10 ms, in every start of every worker.
    options = dict(zip(argv[::2], argv[1::2]))  # --fd N --simulator NAME [--site PATH, read before]
    control = socket.socket(fileno=stdio.take_away(int(options["--fd"])))
    lifeline.hold(control)
    code = Worker(Channel(control), options["--simulator"]).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
