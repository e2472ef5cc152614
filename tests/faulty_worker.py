"""A real worker with one fault in one moment of its life:

    python faulty_worker.py FAULT MOMENT STAMP -- (what a worker's interpreter is started with)

It runs `workers/` as it is, on any Python of a worker, and strikes once, between two messages or in a step.
The monotonic time before the strike goes to the file STAMP. `faults.py` says what the host makes of it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import runpy
import signal
import struct
import sys
import time
from typing import Any, Callable, Dict  # noqa: UP035 - this file runs on Python 3.8

FAULT, MOMENT, STAMP = sys.argv[1:4]
ARGV = sys.argv[sys.argv.index("--") + 1 :]
ENTRY = next(i for i, word in enumerate(ARGV) if word.endswith("__main__.py"))
sys.argv = ARGV[ENTRY:]
del sys.path[0]  # the folder of the tests is not on a worker's path
runpy.run_path(sys.argv[0], run_name="entry")

from outboard.ipc.channel import frame  # noqa: E402
from outboard.ipc.device import DeviceReport  # noqa: E402
from outboard.ipc.messages import Bye, Progress  # noqa: E402
from outboard.workers import serve  # noqa: E402

BEFORE = {
    "Hello": "SPAWNED",
    "InitReply": "INIT",
    "Ready": "ATTACHED",
    "WhereReply": "BUSY, message",
    "Bye": "CLOSING",
}
AFTER = {
    "Hello": "HELLO",
    "InitReply": "VERIFIED",
    "Ready": "READY",
    "Bye": "CLOSED",
    "Error": "FAILED",
}
GPU = "GPU-ce08eab0-0000-4000-8000-000000000006"
MIB = b"x" * (1 << 20)


class Faulty(serve.Worker):
    last = b""  # the last frame that was not a Progress
    struck = False

    def strike(self, moment: str | None) -> None:
        if moment == MOMENT and FAULT in STRIKES and not self.struck:
            self.struck = True
            stamp()
            STRIKES[FAULT](self)

    def send(self, message: Any) -> None:
        name = type(message).__name__
        self.strike(BEFORE.get(name))
        if BEFORE.get(name) == MOMENT and FAULT in LIES:
            stamp()
            message = dataclasses.replace(message, **LIES[FAULT])
        super().send(message)
        if not isinstance(message, Progress):
            self.last = frame(message)
        self.strike(AFTER.get(name))

    def attach(self, init: Any) -> Any:
        block = super().attach(init)
        simulator: Any = self.simulator
        honest = simulator.step

        def step(bank: int) -> int:
            self.strike("BUSY, step")
            if MOMENT == "FAILED":
                raise RuntimeError("scripted")
            return int(honest(bank))

        simulator.step = step
        return block

    def put(self, data: bytes) -> None:
        os.write(self.channel.fileno(), data)


def stamp() -> None:
    with open(STAMP, "w") as file:
        file.write(str(time.monotonic_ns()))


def end_by(number: int) -> Callable[[Faulty], None]:
    def strike(worker: Faulty) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.1)  # a signal comes when the kernel likes

    return strike


def scream(worker: Faulty) -> None:
    raise RuntimeError("scripted")


def half_a_frame(worker: Faulty) -> None:
    worker.put(frame(Progress("x" * 100, 1, 2))[:40])
    os._exit(0)


def end_of_file(worker: Faulty) -> None:
    import socket

    with socket.socket(fileno=os.dup(worker.channel.fileno())) as copy:
        copy.shutdown(socket.SHUT_WR)


def flood(worker: Faulty) -> None:
    for _ in range(10):
        os.write(1, MIB)
    sys.stdout.write("flooded")


def flood_nobody(worker: Faulty) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(reader)
    for _ in range(10):
        sys.stderr.write(MIB.decode())
        print("not even this fails")


def hold_with_a_grandchild(worker: Faulty) -> None:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


STRIKES: Dict[str, Callable[[Faulty], Any]] = {  # noqa: UP006
    "SIGKILL": end_by(signal.SIGKILL),
    "SIGSEGV": end_by(signal.SIGSEGV),
    "SIGSTOP": end_by(signal.SIGSTOP),
    "exit 0": lambda worker: os._exit(0),
    "exit 3": lambda worker: os._exit(3),
    "exit in a native call": lambda worker: ctypes.CDLL(None)._exit(7),
    "hang": lambda worker: time.sleep(3600),
    "slow": lambda worker: time.sleep(0.3),
    "raise": scream,
    "garbage": lambda worker: worker.put(struct.pack("<I", 8) + b"\xc1" * 8),
    "truncated frame": half_a_frame,
    "oversized length": lambda worker: worker.put(struct.pack("<I", 1 << 31)),
    "replayed frame": lambda worker: worker.put(worker.last),
    "BYE too early": lambda worker: worker.put(frame(Bye())),
    "end of file": end_of_file,
    "stdout flood": flood,
    "stderr flood without reader": flood_nobody,
    "inherited descriptors closed": lambda worker: os.closerange(3, 4096),
    "grandchild holds descriptors": hold_with_a_grandchild,
}
LIES: Dict[str, Dict[str, Any]] = {  # noqa: UP006
    "wrong nonce": {"nonce": b"n" * 16},
    "wrong fingerprint": {"fingerprint": b"f" * 32},
    "lying device": {
        "device": DeviceReport("gpu", GPU, "cuda:0", "0000:00:06.0", "liar", "engine_buffer", "qpos",
                               (GPU,), (), "")
    },
}  # fmt: skip

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve.Worker = Faulty  # type: ignore[misc]
    serve.main(sys.argv[1:])
