"""How two processes pass one GPU back and forth: `python benchmarks/handover.py [--json PATH]`

Needs one CUDA GPU. A host and a worker, without Outboard's protocol: the host enqueues a small copy (the
targets), the worker a large one (the state of 4,096 environments, 7.5 MB), and the host's stream goes on
after it. Compared are the ways to keep that order, and whether a host whose worker was killed in between
ever gets its stream back. Medians in microseconds from the first call to the end of the host's stream.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".src"))

from outboard.ipc import cuda_driver  # noqa: E402
from outboard.ipc import cuda_memory as cm  # noqa: E402
from outboard.ipc.cuda_driver import Entry  # noqa: E402

STATE_BYTES, CTRL_BYTES = 7_553_024, 475_136
FLAG_AT, ARENA_BYTES = 9 << 20, 10 << 20
SLOW_BYTES, SLOW_COPIES = 1 << 30, 800  # most of a second of work for one queue
ROUNDS = 300
_u32, _u64, _ptr = ctypes.c_uint, ctypes.c_uint64, ctypes.c_void_p
_DISABLE_TIMING_INTERPROCESS = 0x2 | 0x4
_NOT_READY = 600


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


_create = Entry("cuEventCreate", ctypes.POINTER(_ptr), _u32)
_export = Entry("cuIpcGetEventHandle", ctypes.POINTER(_Handle), _ptr)
_import = Entry("cuIpcOpenEventHandle", ctypes.POINTER(_ptr), _Handle)
_record = Entry("cuEventRecord", _ptr, _ptr)
_query = Entry("cuEventQuery", _ptr)
_wait_event = Entry("cuStreamWaitEvent", _ptr, _ptr, _u32)


def event_create() -> int:
    event = _ptr()
    _create(ctypes.byref(event), _DISABLE_TIMING_INTERPROCESS)
    return event.value or 0


def event_export(event: int) -> str:
    handle = _Handle()
    _export(ctypes.byref(handle), event)
    return bytes(handle.bytes).hex()


def event_open(handle: str) -> int:
    event = _ptr()
    _import(ctypes.byref(event), _Handle.from_buffer_copy(bytes.fromhex(handle)))
    return event.value or 0


def record(event: int, stream: int = 0) -> None:
    _record(event, stream)


def event_query(event: int) -> bool:
    code = _query.code(event)
    if code not in (0, _NOT_READY):
        _query(event)  # raises with the driver's words
    return code == 0


WAYS = ("events", "values", "worker waits", "worker waits for state", "host polls", "both poll")


class Line:
    """Two numbers that both processes see: which round the host asked for, which the worker answered."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.cells = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")

    def ask(self, what: int) -> None:
        self.cells[0] = what

    def wait_asked(self, before: int) -> int:
        host = os.getppid()
        while self.cells[0] == before:
            if os.getppid() != host:
                raise SystemExit("the host is gone")
        return self.cells[0]

    def wait_answered(self, what: int) -> None:
        until = time.monotonic() + 20
        while self.cells[8] != what:
            if time.monotonic() > until:
                raise SystemExit("the worker does not answer")


def until(event: int) -> None:
    while not event_query(event):
        pass


def worker(path: str) -> None:
    line = Line(path)
    job = json.loads(sys.stdin.readline())
    cuda_driver.init()
    cuda_driver.set_current(cuda_driver.retain_primary(0))
    arena = cm.ipc_open(bytes.fromhex(job["memory"]))
    ctrl, state = (event_open(job[name]) for name in ("ctrl", "state"))
    stream, mine, own = cm.stream_create(), cm.allocate(16 << 20), event_create()
    slow = cm.allocate(2 * SLOW_BYTES)
    line.cells[8] = last = 1
    while True:
        last = line.wait_asked(last)
        way, number = divmod(last, 1 << 32)
        if way == 100:
            return
        name = WAYS[way % 10]
        if name == "values":
            cm.stream_wait(stream, arena + FLAG_AT, number)
        elif name in ("worker waits", "both poll"):
            until(ctrl)
        else:
            _wait_event(stream, ctrl, 0)
        for _ in range(SLOW_COPIES if way >= 10 else 0):
            cm.copy_dtod_async(slow, slow + SLOW_BYTES, SLOW_BYTES, stream)
        cm.copy_dtod_async(mine + STATE_BYTES, arena, CTRL_BYTES, stream)
        cm.copy_dtod_async(arena + CTRL_BYTES, mine, STATE_BYTES, stream)
        if name == "values":
            cm.stream_write(stream, arena + FLAG_AT + 64, number)
        else:
            record(state, stream)
        if name.startswith("worker waits") or name == "both poll":
            record(own, stream)
            until(own)
        line.cells[8] = last


class Host:
    def __init__(self) -> None:
        cuda_driver.init()
        cuda_driver.set_current(cuda_driver.retain_primary(0))
        self.arena, self.stream = cm.allocate(ARENA_BYTES), cm.stream_create()
        self.mine, self.rescue = cm.allocate(ARENA_BYTES), cm.stream_create()
        cm.memset(self.arena, 0, ARENA_BYTES)
        self.ctrl, self.state, self.done = (event_create() for _ in range(3))
        for event in (self.ctrl, self.state, self.done):
            record(event)
        cuda_driver.synchronize()
        self.path = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as we live
        self.path.truncate(4096)
        self.line = Line(self.path.name)
        self.number = 0
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", self.path.name], stdin=subprocess.PIPE
        )
        job = {
            "memory": cm.ipc_export(self.arena).hex(),
            "ctrl": event_export(self.ctrl),
            "state": event_export(self.state),
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        self.line.wait_answered(1)

    def round(self, way: int) -> None:
        """Enqueue the targets, have the worker enqueue the state, let our stream go on after it."""
        self.number += 1
        name = WAYS[way % 10]
        cm.copy_dtod_async(self.arena, self.mine, CTRL_BYTES, self.stream)
        if name == "values":
            cm.stream_write(self.stream, self.arena + FLAG_AT, self.number)
        else:
            record(self.ctrl, self.stream)
        what = way << 32 | self.number
        self.line.ask(what)
        self.line.wait_answered(what)
        if name == "values":
            cm.stream_wait(self.stream, self.arena + FLAG_AT + 64, self.number)
        elif name in ("host polls", "both poll"):
            until(self.state)
        elif name == "events":
            _wait_event(self.stream, self.state, 0)

    def timed(self, way: int) -> float:
        started = time.perf_counter()
        self.round(way)
        record(self.done, self.stream)
        until(self.done)
        return (time.perf_counter() - started) * 1e6

    def bare(self) -> float:
        started = time.perf_counter()
        cm.copy_dtod_async(self.arena, self.mine, CTRL_BYTES, self.stream)
        cm.copy_dtod_async(self.arena + CTRL_BYTES, self.mine, STATE_BYTES, self.stream)
        record(self.done, self.stream)
        until(self.done)
        return (time.perf_counter() - started) * 1e6

    def free_within(self, seconds: float) -> bool:
        """Whether our stream has come to its end."""
        end = time.monotonic() + seconds
        while not event_query(self.done):
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True

    def killed(self, way: int) -> dict[str, object]:
        """The worker dies with its work enqueued. Is our stream free: after its death, after the rescue?"""
        self.round(way)
        record(self.done, self.stream)
        early = self.free_within(0.02)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        alone = self.free_within(2.0)
        if WAYS[way % 10] == "values":
            cm.stream_write(self.rescue, self.arena + FLAG_AT + 64, self.number)
        else:
            record(self.state, self.rescue)
        return {"early": early, "after the death": alone, "after the rescue": self.free_within(2.0)}

    def end(self) -> None:
        self.line.ask(100 << 32)
        self.process.wait(20)


def case(name: str) -> object:
    """In a process of its own: a stream that is stuck takes its process with it."""
    host = Host()
    if name.startswith("killed: "):
        return host.killed(10 + WAYS.index(name.partition(": ")[2]))
    actions: dict[str, Callable[[], float]] = {"bare": host.bare}
    for way, words in enumerate(WAYS):
        actions[words] = lambda way=way: host.timed(way)
    times: dict[str, list[float]] = {words: [] for words in actions}
    for _ in range(6):
        for words, act in actions.items():
            for _ in range(ROUNDS // 6):
                times[words].append(act())
    host.end()
    return {words: round(statistics.median(found), 1) for words, found in times.items()}


def in_a_process(name: str) -> object:
    command = [sys.executable, __file__, "--case", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        said, _ = process.communicate(timeout=40)
        return json.loads(said)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        with_group = os.getpgid(process.pid) if process.poll() is None else 0
        if with_group:
            os.killpg(with_group, signal.SIGKILL)
        return f"did not end well: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    if arguments.case:
        print(json.dumps(case(arguments.case)), flush=True)
        os._exit(0)  # a stuck stream would keep the driver's own end waiting
    result = {name: in_a_process(name) for name in ("times", "killed: events", "killed: values")}
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
