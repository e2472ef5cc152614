"""Checks of the protocol, on a worker process that each check starts and talks to by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgpack
import numpy as np

from ..ipc import codec, doorbell, shm
from ..ipc.channel import Channel, frame
from ..ipc.deadline import Deadline
from ..ipc.errors import DeadlinePassed, PeerGone
from ..ipc.layout import PUBLISHABLE, Layout
from ..ipc.messages import (
    PROTOCOL_VERSION,
    Attach,
    Bye,
    Close,
    Error,
    Hello,
    InitReply,
    Message,
    Opcode,
    Progress,
    Status,
    Where,
    WhereReply,
)
from ..ipc.states import Phase
from . import handshake
from .conformance_kit import NUM_ENVS, PROTOCOL, Bench, Target, broken, check, launch_command
from .process import WorkerProcess

_M = TypeVar("_M", bound=Any)

_ANSWER_S = 10.0  # one command of four environments
_GONE_S = 1.0  # how long a worker may outlive its host
_QUIET_S = 0.15  # how long a check listens for what must not come


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
            self.process.dead(_GONE_S)
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

    def expect_refusal(self, after: str, fault: str = "protocol", within_s: float = 0.0) -> Error:
        """An ERROR that blames `fault`, perhaps after PROGRESS, and the end of the process."""
        message = self.receive(within_s or _ANSWER_S, after)
        while isinstance(message, Progress):
            message = self.receive(within_s or _ANSWER_S, after)
        if not isinstance(message, Error):
            broken(f"after {after} came {type(message).__name__}; ERROR belongs")
        if message.fault != fault:
            broken(f"after {after} the ERROR blames {message.fault!r}, not {fault!r}: {message.text}")
        self.expect_end(f"the ERROR about {after}")
        return message

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
            self.process.dead(_GONE_S)
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
            self.data.bell.wait(sequence, doorbell.History(), _ANSWER_S)
        except DeadlinePassed:
            broken(f"command {sequence} was not answered within {_ANSWER_S:g} s")

    def answered(self) -> int:
        assert self.data is not None
        return int(self.data.block.reply[shm.SEQUENCE])


# -- HELLO and INIT ---------------------------------------------------------------------------------


@check(PROTOCOL)
def hello_comes_first(bench: Bench) -> None:
    """The first bytes are the preamble with this protocol's version, the first message is HELLO, with an
    honest pid and the device mask that was sent."""
    with Raw(bench.target) as raw:
        hello = raw.hello()
        try:
            group = os.getpgid(hello.pid)  # not the pid itself: a wrapper script may not exec
        except ProcessLookupError:
            group = -1
        if group != raw.process.pid:
            broken(f"HELLO says pid {hello.pid}, which is no process of the worker's group")
        sent = raw.command.env["CUDA_VISIBLE_DEVICES"]
        if hello.mask != sent:
            broken(f"CUDA_VISIBLE_DEVICES was sent as {sent!r} and arrived as {hello.mask!r}")


@check(PROTOCOL)
def device_is_mandatory(bench: Bench) -> None:
    """An INIT without a device is refused: there is no default."""
    with Raw(bench.target) as raw:
        raw.hello()
        name, values = msgpack.unpackb(codec.encode(raw.init), raw=False)
        del values["device"]
        raw.send_body(msgpack.packb([name, values], use_bin_type=True))
        raw.expect_refusal("an INIT without device", within_s=raw.traits.init_s)


@check(PROTOCOL)
def garbage_is_refused(bench: Bench) -> None:
    """Bytes that are no message, and a frame with trailing bytes, are refused with ERROR."""
    for body in (b"\x00\x01\x02", codec.encode(Close()) + b"\x00"):
        with Raw(bench.target) as raw:
            raw.hello()
            raw.send_body(body)
            raw.expect_refusal("a frame that is no message")


@check(PROTOCOL)
def progress_while_building(bench: Bench) -> None:
    """Between INIT and INIT_REPLY only PROGRESS comes, with done between 0 and total; after it nothing
    comes unasked."""
    with Raw(bench.target) as raw:
        progress, _ = raw.built()
        for message in progress:
            if not 0 <= message.done <= message.total or not message.stage:
                broken(f"progress {message.stage!r} {message.done} of {message.total}")
        time.sleep(_QUIET_S)
        if raw.channel.pending():
            broken("something was sent after INIT_REPLY without being asked for")


@check(PROTOCOL)
def facts_fit_together(bench: Bench) -> None:
    """INIT_REPLY describes one consistent model with as many environments as asked for: counts, names,
    ranges, time step, and fields that exist, qpos and qvel among them."""
    with Raw(bench.target) as raw:
        _, reply = raw.built()
    model, sizes = reply.model, reply.model.sizes
    base_q, base_v = (7, 6) if model.floating_base else (0, 0)
    ranges = np.array(model.ctrl_range + model.joint_range + model.force_range).reshape(-1, 2)
    ctrl, limits = np.array(model.default_ctrl), np.array(model.ctrl_range).reshape(-1, 2)
    fields = [name for name in reply.capabilities if not name.startswith("set_property:")]
    numbers = (*model.default_qpos, *model.default_qvel, *model.default_ctrl)
    rules = (
        (sizes.num_envs == NUM_ENVS, f"{sizes.num_envs} environments, {NUM_ENVS} were asked for"),
        (sizes.nq >= base_q and sizes.nv >= base_v, "too few coordinates for a floating base"),
        (sizes.nq - base_q >= len(model.joint_names), "fewer coordinates than joints"),
        (sizes.nv - base_v >= len(model.joint_names), "fewer velocities than joints"),
        (len(model.default_qvel) == sizes.nv, f"default_qvel has not {sizes.nv} entries"),
        (model.timestep > 0, f"the time step is {model.timestep} s"),
        (bool((ranges[:, 0] <= ranges[:, 1]).all()), "a range has its low above its high"),
        (bool(np.isfinite(numbers).all()), "the keyframe is not finite"),
        (bool(((ctrl >= limits[:, 0]) & (ctrl <= limits[:, 1])).all()), "default_ctrl out of range"),
        (len({*model.body_names}) == sizes.nbody, "body names repeat"),
        (len({*model.joint_names}) == len(model.joint_names), "joint names repeat"),
        (len({*model.actuator_names}) == sizes.nu, "actuator names repeat"),
        ({"qpos", "qvel"} <= {*fields}, "qpos and qvel cannot be published"),
        ({*fields} <= {*PUBLISHABLE, "render"}, f"unknown capabilities among {fields}"),
        (bool(reply.engine and reply.engine_version), "engine or its version has no name"),
    )
    for holds, otherwise in rules:
        if not holds:
            broken(otherwise)


@check(PROTOCOL)
def second_init_is_refused(bench: Bench) -> None:
    """A second INIT is refused with ERROR."""
    with Raw(bench.target) as raw:
        raw.built()
        raw.send(raw.init)
        raw.expect_refusal("a second INIT", within_s=raw.traits.init_s)


# -- ATTACH -----------------------------------------------------------------------------------------


def _attach_with(bench: Bench, after: str, **changes: Any) -> None:
    """A worker that was built gets an ATTACH that is right but for `changes`, and must refuse it."""
    with Raw(bench.target) as raw, contextlib.ExitStack() as stack:
        _, reply = raw.built()
        layout = Layout(reply.model.sizes, raw.init.publish)
        block = shm.create(layout, raw.init.nonce)
        stack.callback(block.close_fd)
        go, done, go_name, done_name = stack.enter_context(doorbell.semaphore_pair())
        stack.callback(go.close), stack.callback(done.close)
        attach = Attach(
            nonce=raw.init.nonce,
            sizes=layout.sizes,
            publish=layout.publish,
            banks=layout.banks,
            total_bytes=layout.total_bytes,
            fingerprint=layout.fingerprint,
            go_name=go_name,
            done_name=done_name,
        )
        attach = dataclasses.replace(attach, **changes)
        raw.channel.send(attach, Deadline(handshake.SEND_S), [block.fd])
        raw.expect_refusal(after)


@check(PROTOCOL)
def other_fingerprint_is_refused(bench: Bench) -> None:
    """An ATTACH whose fingerprint is not that of the layout it describes is refused with ERROR."""
    _attach_with(bench, "an ATTACH with another fingerprint", fingerprint=bytes(32))


@check(PROTOCOL)
def other_nonce_is_refused(bench: Bench) -> None:
    """An ATTACH that carries another nonce than INIT is refused with ERROR."""
    _attach_with(bench, "an ATTACH with another nonce", nonce=bytes(16))


# -- the bell ---------------------------------------------------------------------------------------


@check(PROTOCOL)
def replies_match_requests(bench: Bench) -> None:
    """Every command is answered once, with its own sequence number and bank, status DONE, and the time it
    took in the simulator."""
    with Raw(bench.target) as raw:
        raw.ready()
        assert raw.data is not None
        block = raw.data.block
        fields = block.fields[0]
        for name in ("qpos", "qvel"):  # what SET_STATE will set: the state that is there
            fields["set_" + name][:] = fields[name]
        fields["env_ids"][:] = np.arange(NUM_ENVS)
        for opcode in (Opcode.STEP, Opcode.SET_STATE, Opcode.RESET, Opcode.STEP_RESET, Opcode.MAIL):
            if opcode is Opcode.MAIL:
                raw.send(Where())
            sequence = raw.ring(opcode, NUM_ENVS)
            raw.wait(sequence)
            reply = block.reply
            seen = (reply[shm.SEQUENCE], reply[shm.STATUS], reply[shm.REPLY_BANK])
            if seen != (sequence, int(Status.DONE), 0):
                broken(f"{opcode.name} {sequence} was answered by (sequence, status, bank) {seen}")
            if not reply[shm.SIM_NS] > 0:
                broken(f"{opcode.name} took no time")
        raw.expect(WhereReply, _ANSWER_S, "WHERE")


@check(PROTOCOL)
def stray_ring_is_no_command(bench: Bench) -> None:
    """A ring without a new sequence number is not a command: nothing moves, nothing is answered, and the
    next command is answered as ever."""
    with Raw(bench.target) as raw:
        raw.ready()
        assert raw.data is not None
        qpos = raw.data.block.fields[0]["qpos"]
        raw.wait(raw.ring(Opcode.STEP))
        before = qpos.copy()
        raw.data.bell.ring()
        time.sleep(_QUIET_S)
        if raw.answered() != 1 or not np.array_equal(before, qpos):
            broken(f"a stray ring was taken for a command; the last answer is {raw.answered()}")
        sequence = raw.ring(Opcode.STEP)
        raw.wait(sequence)
        time.sleep(_QUIET_S)
        if raw.answered() != sequence:
            broken(f"command {sequence} was answered by {raw.answered()}")


@check(PROTOCOL)
def unknown_opcode_is_refused(bench: Bench) -> None:
    """An opcode that does not exist is answered by FAILED and ERROR."""
    with Raw(bench.target) as raw:
        raw.ready()
        assert raw.data is not None
        sequence = raw.ring(99)
        raw.wait(sequence)
        if raw.data.block.reply[shm.STATUS] != int(Status.FAILED):
            broken(f"the status is {raw.data.block.reply[shm.STATUS]}; FAILED belongs")
        raw.expect_refusal("opcode 99")


@check(PROTOCOL)
def output_goes_to_the_log(bench: Bench) -> None:
    """Standard output and error of the worker are its log, and standard input is empty: a simulator that
    prints or asks disturbs no message."""
    with Raw(bench.target) as raw:
        pid = raw.hello().pid
        raw.send(raw.init)
        while not isinstance(raw.receive(raw.traits.init_s, "INIT"), InitReply):
            pass
        log = os.fstat(raw.process.log.fd)
        for number in (1, 2):
            there = os.stat(f"/proc/{pid}/fd/{number}")
            if (there.st_dev, there.st_ino) != (log.st_dev, log.st_ino):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                broken(f"descriptor {number} of the worker is {target}, not its log")
        if os.readlink(f"/proc/{pid}/fd/0") != os.devnull:
            broken(f"standard input is {os.readlink(f'/proc/{pid}/fd/0')}")


# -- the end ----------------------------------------------------------------------------------------


@check(PROTOCOL)
def close_after_hello(bench: Bench) -> None:
    """CLOSE right after HELLO is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(Close())
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def close_while_building(bench: Bench) -> None:
    """CLOSE while the worker builds is answered by BYE, at the latest when it has built, and a clean exit."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(raw.init, Close())
        raw.expect_bye(raw.traits.init_s + raw.traits.close_s)


@check(PROTOCOL)
def close_after_building(bench: Bench) -> None:
    """CLOSE instead of ATTACH is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.built()
        raw.send(Close())
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def close_when_ready(bench: Bench) -> None:
    """CLOSE, announced by MAIL, after a step is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.ready()
        raw.wait(raw.ring(Opcode.STEP))
        raw.send(Close())
        raw.ring(Opcode.MAIL)
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def end_of_channel_while_building(bench: Bench) -> None:
    """When the channel ends while the worker builds, the worker ends, within what a clean exit may take."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(raw.init)
        raw.receive(raw.traits.init_s, "INIT")  # it is at work
        raw.process.control.close()
        raw.expect_end("the end of the channel")


# A host of its own, which the kit can kill: it starts a worker, has it built, and leaves a forked child behind
# that holds the channel open, as a data-loader worker does.
_HOST = """
import json, os, socket, struct, subprocess, sys, time
job = json.loads(sys.argv[1])
ours, theirs = socket.socketpair()
argv = [str(theirs.fileno()) if part == "-1" else part for part in job["argv"]]
null = subprocess.DEVNULL
worker = subprocess.Popen(argv, env=job["env"], pass_fds=[theirs.fileno()], stdin=null, stdout=null,
                          stderr=null, start_new_session=True)
theirs.close()
if os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
def read(count):
    data = b""
    while len(data) < count:
        more = ours.recv(count - len(data))
        if not more:
            sys.exit("the worker was gone")
        data += more
    return data
read(8)
ours.sendall(bytes.fromhex(job["init"]))
while b"InitReply" not in read(struct.unpack("<I", read(4))[0])[:16]:
    pass
print(worker.pid, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _host(target: Target) -> Iterator[subprocess.Popen[bytes]]:
    command, init = launch_command(target)
    job = {"argv": command.argv(-1), "env": dict(command.env), "init": frame(init).hex()}
    host = subprocess.Popen(
        [sys.executable, "-E", "-s", "-c", _HOST, json.dumps(job)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        if host.stdout is not None:
            host.stdout.close()


@check(PROTOCOL)
def host_gone_worker_gone(bench: Bench) -> None:
    """A worker whose host was killed is gone within a second, also when a forked child of the host still
    holds the channel open."""
    with _host(bench.target) as host:
        assert host.stdout is not None
        within_s = handshake.HELLO_S + bench.target.kind.traits.init_s
        ready, _, _ = select.select([host.stdout], [], [], within_s)
        said = host.stdout.readline().strip() if ready else b""
        if not said:
            broken("the worker was not built")
        pidfd = os.pidfd_open(int(said))
        try:
            host.kill()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(_GONE_S * 1e3):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                broken(f"the worker lived on {_GONE_S:g} s after the host was killed")
        finally:
            os.close(pidfd)
