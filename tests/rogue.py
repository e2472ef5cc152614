"""A worker that breaks the protocol on purpose: `python rogue.py BEHAVIOUR -- (a worker's argv)`.

A wrapper script runs it in place of a worker's interpreter, with the arguments that the host gave.
It speaks the protocol by the pieces of `ipc` where it is honest, and by raw bytes where it is not.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outboard.ipc import codec, shm
from outboard.ipc.channel import Channel, frame, preamble
from outboard.ipc.deadline import Deadline
from outboard.ipc.device import DeviceReport, cpu_report
from outboard.ipc.layout import Layout, Sizes
from outboard.ipc.messages import Bye, Error, Hello, InitReply, ModelFacts, Progress, Ready

GPU = "GPU-ce08eab0-0000-4000-8000-000000000006"
PATIENCE = Deadline(20.0)


class Rogue:
    """Honest building blocks; each behaviour below uses them up to its first lie."""

    def __init__(self, control: socket.socket) -> None:
        self.raw = control
        self.channel = Channel(control)

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.channel.send(message, PATIENCE)

    def send_bytes(self, data: bytes) -> None:
        self.raw.setblocking(True)
        self.raw.sendall(data)
        self.raw.setblocking(False)

    def hello(self, **changes: Any) -> Hello:
        honest = Hello(
            python="3.8.0",
            executable=sys.executable,
            numpy="1.24.4",
            msgpack="1.0.0",
            pid=os.getpid(),
            simulator="fake",
            source=os.path.dirname(os.path.abspath(shm.__file__)),
            mask=os.environ.get("CUDA_VISIBLE_DEVICES"),
            order=os.environ.get("CUDA_DEVICE_ORDER"),
            gpus=(),
            driver="",
        )
        return replace(honest, **changes)

    def to_init(self) -> Any:
        """Preamble and HELLO; returns INIT."""
        self.channel.send_preamble(PATIENCE)
        self.send(self.hello())
        return self.channel.receive(PATIENCE)

    def reply(self, num_envs: int, **changes: Any) -> InitReply:
        model = ModelFacts(
            sizes=Sizes(num_envs, 1, 1, 1, 1),
            timestep=0.01,
            floating_base=False,
            body_names=("link",),
            joint_names=("joint",),
            actuator_names=("joint",),
            default_qpos=(0.0,),
            default_qvel=(0.0,),
            default_ctrl=(0.0,),
            joint_range=(-1.0, 1.0),
            ctrl_range=(-1.0, 1.0),
            kp=(1.0,),
            kv=(0.0,),
            force_range=(-1.0, 1.0),
            env_origins=b"",
            not_reproduced=(),
        )
        honest = InitReply(cpu_report("qpos"), model, ("qpos", "qvel"), "rogue", "1", (), ())
        return replace(honest, **changes)

    def to_attach(self) -> Any:
        """As far as ATTACH, with the block mapped."""
        init = self.to_init()
        self.send(self.reply(init.num_envs))
        attach: Any = self.channel.receive(PATIENCE)
        (fd,) = self.channel.take_fds(1)
        layout = Layout(attach.sizes, attach.publish, attach.banks)
        self.block = shm.attach(fd, layout, attach.nonce)
        os.close(fd)
        import posix_ipc

        self.go = posix_ipc.Semaphore(attach.go_name)
        self.done = posix_ipc.Semaphore(attach.done_name)
        return attach

    def to_ready(self) -> None:
        attach = self.to_attach()
        self.send(Ready(attach.nonce, attach.fingerprint, ""))

    def to_command(self) -> int:
        """READY, and one command has come; returns its sequence number."""
        self.to_ready()
        self.go.acquire()
        return int(self.block.request[shm.SEQUENCE])

    def answer(self, sequence: int, status: int = 1) -> None:
        self.block.reply[shm.STATUS] = status
        self.block.reply[shm.SEQUENCE] = sequence
        self.done.release()


def gpu_report(visible: Any = (GPU,)) -> DeviceReport:
    return DeviceReport("gpu", GPU, "cuda:0", "0000:00:06.0", "liar", "engine_buffer", "qpos",
                        visible, (), "")  # fmt: skip


def hello_then(data: bytes) -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        rogue.channel.send_preamble(PATIENCE)
        rogue.send_bytes(data)

    return behave


def init_then(*messages: Any) -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        rogue.to_init()
        rogue.send(*messages)

    return behave


def with_reply(**changes: Any) -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        rogue.send(rogue.reply(rogue.to_init().num_envs, **changes))

    return behave


def with_hello(**changes: Any) -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        rogue.channel.send_preamble(PATIENCE)
        rogue.send(rogue.hello(**changes))

    return behave


def ready_with(nonce: bytes = b"", fingerprint: bytes = b"") -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        attach = rogue.to_attach()
        rogue.send(Ready(nonce or attach.nonce, fingerprint or attach.fingerprint, ""))

    return behave


def replayed_hello(rogue: Rogue) -> None:
    rogue.to_init()
    rogue.send(rogue.hello())


def replayed_reply(rogue: Rogue) -> None:
    reply = rogue.reply(rogue.to_init().num_envs)
    rogue.send(reply, reply)


def raw_fields(name: str, fields: dict[str, Any]) -> bytes:
    import msgpack

    body = msgpack.packb([name, fields])
    assert body is not None
    return struct.pack("<I", len(body)) + body


def in_step(act: Callable[[Rogue, int], None]) -> Callable[[Rogue], None]:
    def behave(rogue: Rogue) -> None:
        act(rogue, rogue.to_command())

    return behave


def ring_without_answer(rogue: Rogue, sequence: int) -> None:
    for _ in range(1000):
        rogue.done.release()
    time.sleep(0.3)
    rogue.answer(sequence)


def answer_another_number(rogue: Rogue, sequence: int) -> None:
    rogue.answer(sequence + 7)


def scribble(rogue: Rogue, sequence: int) -> None:
    """Random bytes over everything a worker can write in the header, then an honest answer."""
    request = [int(word) for word in rogue.block.request]
    for line in (rogue.block.reply, rogue.block.request):
        for word in range(len(line)):
            line[word] = (1 << 64) - 1 - word
    for word, value in enumerate(request):
        rogue.block.request[word] = value
    rogue.answer(sequence)


HALF = frame(Progress("x" * 100, 1, 2))
BEHAVIOURS: dict[str, Callable[[Rogue], None]] = {
    "says nothing and leaves": lambda rogue: None,
    "speaks something else": lambda rogue: rogue.send_bytes(b"HTTP/1.1 200 OK\r\n"),
    "stops inside the preamble": lambda rogue: rogue.send_bytes(preamble()[:5]),
    "another version": lambda rogue: rogue.send_bytes(preamble(99)),
    "truncated frame": hello_then(HALF[:40]),
    "oversized length": hello_then(struct.pack("<I", 1 << 31)),
    "length zero": hello_then(struct.pack("<I", 0)),
    "not msgpack": hello_then(struct.pack("<I", 3) + b"\xc1\xc1\xc1"),
    "unknown message": hello_then(raw_fields("Gossip", {})),
    "unknown field": hello_then(
        raw_fields("Progress", {"stage": "", "done": 1, "total": 1, "x": 1})
    ),
    "missing field": hello_then(raw_fields("Progress", {"stage": ""})),
    "wrong type": hello_then(raw_fields("Progress", {"stage": 1, "done": 1, "total": 1})),
    "trailing bytes": hello_then(struct.pack("<I", len(HALF) - 4 + 1) + HALF[4:] + b"\x00"),
    "INIT_REPLY before INIT": lambda rogue: (
        rogue.channel.send_preamble(PATIENCE),
        rogue.send(rogue.reply(1)),
    )[0],
    "BYE in SPAWNED": hello_then(frame(Bye())),
    "BYE in INIT": init_then(Bye()),
    "another source": with_hello(source="/somewhere/else/ipc"),
    "another mask": with_hello(mask="3"),
    "READY in INIT": init_then(Ready(bytes(16), bytes(32), "")),
    "replayed HELLO": replayed_hello,
    "replayed INIT_REPLY": replayed_reply,
    "lies about its device": with_reply(device=gpu_report()),
    "sees a GPU though on the CPU": with_reply(device=cpu_report("qpos", (GPU,))),
    "another number of environments": lambda rogue: rogue.send(
        rogue.reply(rogue.to_init().num_envs + 1)
    ),
    "publishes less than asked": with_reply(capabilities=("qpos",)),
    "READY with another nonce": ready_with(nonce=b"n" * 16),
    "READY with another fingerprint": ready_with(fingerprint=b"f" * 32),
    "ERROR of the scene in INIT": init_then(Error("INIT", "scene", "X", "no such body", "")),
    "leaves in ATTACHED": lambda rogue: rogue.to_attach(),
    "rings without an answer first": in_step(ring_without_answer),
    "answers with another number": in_step(answer_another_number),
    "fails without an ERROR": in_step(lambda rogue, sequence: rogue.answer(sequence, 2)),
    "status out of range": in_step(lambda rogue, sequence: rogue.answer(sequence, 77)),
    "scribbles over the header": in_step(scribble),
    "garbage while in a step": in_step(lambda rogue, sequence: rogue.send_bytes(b"\xff" * 8)),
    "BYE in a step": in_step(lambda rogue, sequence: rogue.send(Bye())),
    "reply to mail of another kind": in_step(
        lambda rogue, sequence: (
            rogue.send(Ready(bytes(16), bytes(32), "")),
            rogue.answer(sequence),
        )[1]
    ),
}
STAYS = (
    *("replayed INIT_REPLY", "replayed HELLO", "rings without an answer first", "another version"),
    *("scribbles over the header", "answers with another number", "oversized length"),
    *("READY with another nonce", "reply to mail of another kind", "lies about its device"),
)


def main(argv: list[str]) -> None:
    behaviour, fd = argv[0], int(argv[argv.index("--fd") + 1])
    assert codec.MAX_BODY < 1 << 31
    BEHAVIOURS[behaviour](Rogue(socket.socket(fileno=fd)))
    if behaviour in STAYS:
        time.sleep(60)  # until it is killed: that is the host's to do


if __name__ == "__main__":
    main(sys.argv[1:])
