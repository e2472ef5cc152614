"""Checks of the protocol, on a worker process that each check starts and talks to by itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any

import msgpack
import numpy as np

from ..ipc import codec, doorbell, shm
from ..ipc.deadline import Deadline
from ..ipc.layout import PUBLISHABLE, Layout
from ..ipc.messages import (
    Attach,
    Close,
    InitReply,
    Opcode,
    Status,
    Where,
    WhereReply,
)
from . import handshake
from .conformance_kit import NUM_ENVS, PROTOCOL, Bench, broken, check
from .conformance_raw import ANSWER_S, Raw
from .visibility import MASK

QUIET_S = 0.15  # how long a check listens for what must not come


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
        sent = raw.command.env[MASK]
        if hello.mask != sent:
            broken(f"{MASK} was sent as {sent!r} and arrived as {hello.mask!r}")


@check(PROTOCOL)
def device_is_mandatory(bench: Bench) -> None:
    """An INIT without a device is refused: there is no default."""
    with Raw(bench.target) as raw:
        raw.hello()
        name, values = msgpack.unpackb(codec.encode(raw.init), raw=False)
        del values["device"]
        raw.send_body(bytes(msgpack.packb([name, values], use_bin_type=True) or b""))
        raw.expect_refusal("an INIT without device")


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
        time.sleep(QUIET_S)
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
        (
            bool(((ctrl >= limits[:, 0]) & (ctrl <= limits[:, 1])).all()),
            "default_ctrl out of range",
        ),
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
        raw.expect_refusal("a second INIT")


# -- ATTACH -----------------------------------------------------------------------------------------


def _attach_with(bench: Bench, after: str, **changes: Any) -> None:
    """A worker that was built gets an ATTACH that is right but for `changes`, and must refuse it."""
    with Raw(bench.target) as raw, contextlib.ExitStack() as stack:
        _, reply = raw.built()
        layout = Layout(reply.model.sizes, raw.init.publish)
        block = shm.create(layout, raw.init.nonce)
        stack.callback(block.close_fd)
        go, done, go_name, done_name = stack.enter_context(doorbell.semaphore_pair())
        attach = Attach(
            nonce=raw.init.nonce,
            sizes=layout.sizes,
            publish=layout.publish,
            banks=layout.banks,
            total_bytes=layout.total_bytes,
            fingerprint=layout.fingerprint,
            go_name=go_name,
            done_name=done_name,
            arena=None,
        )
        attach = dataclasses.replace(attach, **changes)
        raw.channel.send(attach, Deadline(handshake.SEND_S), [block.fd])
        raw.expect_refusal(after)
        go.close()  # on the way of an exception `semaphore_pair` does it
        done.close()


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
    """Every command is answered once, with its own sequence number, status DONE, and the time that it
    took added to the time in the simulator."""
    with Raw(bench.target) as raw:
        raw.ready()
        assert raw.data is not None
        block = raw.data.block
        fields, spent_ns = block.fields[0], 0
        for name in ("qpos", "qvel"):  # what SET_STATE will set: the state that is there
            fields["set_" + name][:] = fields[name]
        fields["env_ids"][:] = np.arange(NUM_ENVS)
        for opcode in (Opcode.STEP, Opcode.SET_STATE, Opcode.RESET, Opcode.STEP_RESET, Opcode.MAIL):
            if opcode is Opcode.MAIL:
                raw.send(Where())
            sequence = raw.ring(opcode, NUM_ENVS)
            raw.wait(sequence)
            reply = block.reply
            seen = (reply[shm.SEQUENCE], reply[shm.STATUS])
            if seen != (sequence, int(Status.DONE)):
                broken(f"{opcode.name} {sequence} was answered by (sequence, status) {seen}")
            if not reply[shm.SIM_NS] > spent_ns:
                broken(f"{opcode.name} added nothing to the time in the simulator")
            spent_ns = int(reply[shm.SIM_NS])
        raw.expect(WhereReply, ANSWER_S, "WHERE")


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
        time.sleep(QUIET_S)
        if raw.answered() != 1 or not np.array_equal(before, qpos):
            broken(f"a stray ring was taken for a command; the last answer is {raw.answered()}")
        sequence = raw.ring(Opcode.STEP)
        raw.wait(sequence)
        time.sleep(QUIET_S)
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
        raw.hello()
        raw.send(raw.init)
        while not isinstance(raw.receive(raw.traits.init_s, "INIT"), InitReply):
            pass
        log, pid = os.fstat(raw.process.log.fd), raw.process.pid
        for number in (1, 2):
            there = os.stat(f"/proc/{pid}/fd/{number}")
            if (there.st_dev, there.st_ino) != (log.st_dev, log.st_ino):
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                broken(f"descriptor {number} of the worker is {target}, not its log")
        if os.readlink(f"/proc/{pid}/fd/0") != os.devnull:
            broken(f"standard input is {os.readlink(f'/proc/{pid}/fd/0')}")
