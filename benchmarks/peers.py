"""The host's side of every scheme. `link.step(i)` is one empty step stamped i: put the actions where the
worker finds them, ring, wait, check that the state which came back carries i."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from step_work import NU, WIDTH, first_cells
from step_worker import block_bytes, map_block

_HERE = os.path.dirname(os.path.abspath(__file__))


class Stale(Exception):
    """A state that does not carry the stamp of its own step."""


class Link:
    """One scheme with its worker. `step` is set by `open`, which subclasses have."""

    step: Callable[[int], None]

    def __init__(self, num_envs: int, worker_python: str, options: dict[str, Any]) -> None:
        self.num_envs, self.worker_python, self.options = num_envs, worker_python, options
        self.ctrl = np.ones((num_envs, NU), np.float32)
        self.stamp = first_cells(self.ctrl)
        self.pid = 0
        self.state: Any = (
            None  # where the worker's first two floats are: stamp, microseconds worked
        )
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Ends the worker."""

    def worked_us(self) -> float:
        """What the worker spent in its own step, the last time."""
        return float(self.state[1])


class Ours(Link):
    """Outboard as a user drives it. options: check_finite; ctrl_view: no copy on the way in."""

    def open(self) -> None:
        sys.path[:0] = [os.path.join(_HERE, os.pardir, ".src")]  # this checkout, installed or not
        from outboard.backends import CustomBackend, CustomCfg
        from outboard.backends.traits import Traits

        work = {k: self.options[k] for k in ("work_us", "vary", "hash_bytes") if k in self.options}
        self.backend = backend = CustomBackend(
            simulator=os.path.join(_HERE, "echo_simulator.py") + ":EchoSimulator",
            device="cpu",
            traits=Traits(cpu=True),
            num_envs=self.num_envs,
            publish=("qpos",),
            cfg=CustomCfg({"nu": NU, "width": WIDTH, **work}),
            worker_python=self.worker_python,
            check_finite=bool(self.options.get("check_finite", True)),
        )
        self.pid = int(backend.report["pid"])
        in_view = bool(self.options.get("ctrl_view"))
        ctrl = backend.ctrl_view if in_view else self.ctrl
        stamp, take = first_cells(ctrl), backend.step
        self.state = state = first_cells(backend.state.qpos, 2)
        if in_view:
            ctrl[...] = 1.0

        def step(i: int) -> None:
            stamp[0] = i
            take(ctrl)
            if state[0] != i:
                raise Stale(i)

        self.step = step

    def close(self) -> None:
        self.backend.close()


class InProcess(Link):
    """The same two copies and the same check, with nobody to talk to."""

    def open(self) -> None:
        fd = os.memfd_create("outboard-bench", 0)
        os.ftruncate(fd, block_bytes(self.num_envs))
        block, state = map_block(fd, self.num_envs)
        source, ctrl, stamp = np.ones_like(state), self.ctrl, self.stamp
        arrived, leaving = first_cells(block), first_cells(source)
        self.state = back = first_cells(state, 2)

        def step(i: int) -> None:
            stamp[0] = i
            block[...] = ctrl
            leaving[0] = arrived[0]
            state[...] = source
            if back[0] != i:
                raise Stale(i)

        self.step = step


class _Stub(Link):
    """A scheme with a stub worker (step_worker.py) in another interpreter, and a block in a memfd."""

    def launch(self, scheme: str, fds: tuple[int, ...] = (), **handles: Any) -> None:
        fd = os.memfd_create("outboard-bench", 0)
        os.ftruncate(fd, block_bytes(self.num_envs))
        self.block, state = map_block(fd, self.num_envs)
        self.state = first_cells(state, 2)
        options = {**self.options, "num_envs": self.num_envs, "fd": fd, **handles}
        self.process = _start(self.worker_python, scheme, options, (fd, *fds))
        self.pid = self.process.pid
        for used in (fd, *fds):
            os.close(used)

    def exchange(self, ring: Callable[[], Any], wait: Callable[[], Any]) -> Callable[[int], None]:
        block, ctrl, stamp, state = self.block, self.ctrl, self.stamp, self.state

        def step(i: int) -> None:
            stamp[0] = i
            block[...] = ctrl
            ring()
            wait()
            if state[0] != i:
                raise Stale(i)

        return step

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Semaphores(_Stub):
    def open(self) -> None:
        import posix_ipc

        stem = "/outboard-bench-" + secrets.token_hex(8)
        go, done = (posix_ipc.Semaphore(stem + end, posix_ipc.O_CREX) for end in "gd")
        try:
            self.launch("semaphores", go=go.name, done=done.name)
            done.acquire(20)
        finally:
            go.unlink()
            done.unlink()
        self.step = self.exchange(go.release, done.acquire)


class PipeToken(_Stub):
    def open(self) -> None:
        from multiprocessing import Pipe

        here, there = Pipe()
        fd = os.dup(there.fileno())
        there.close()
        self.launch("pipe_token", (fd,), pipe=fd)
        here.recv_bytes()
        send, receive = here.send_bytes, here.recv_bytes
        self.step = self.exchange(lambda: send(b"s"), receive)


class PipePickled(_Stub):
    def open(self) -> None:
        from multiprocessing import Pipe

        here, there = Pipe()
        fd = os.dup(there.fileno())
        there.close()
        self.launch("pipe_pickled", (fd,), pipe=fd)
        here.recv()
        send, receive, ctrl, stamp = here.send, here.recv, self.ctrl, self.stamp

        def step(i: int) -> None:
            stamp[0] = i
            send(ctrl)
            state = receive()
            if state[0, 0] != i:
                raise Stale(i)
            self.state = state[0]

        self.step = step


class Unisim(_Stub):
    """unisim-core 2.x: its own backend and protocol code on this side (`_host_step`, which also checks
    the actions for NaN), its own protocol module in the worker, a stub instead of the simulator."""

    def open(self) -> None:
        import unisim.backend.subprocess_ipc.backend as unisim  # pyright: ignore
        from unisim.backend.subprocess_ipc import protocol  # pyright: ignore

        backend: Any = object.__new__(unisim.MjcfSubprocessBackend)
        backend._closed = False
        backend._entity_scene = backend._worker_dead_error = backend._scene = None
        backend._num_envs, backend._worker_timeout_s = self.num_envs, 60.0
        backend._stale_body_ids, backend._slots, backend._shm_handles = set(), {}, {}
        backend._stderr_file = None
        joints = tuple(f"joint{i}" for i in range(NU))
        backend._model_info = unisim.SubprocessModelInfo(
            NU, 1, joints, ("base",), (0.0, 0.0, -9.81), False
        )
        options = {**self.options, "protocol": protocol.__file__}
        backend._proc = self.process = _start(
            self.worker_python, "unisim", options, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid, self.unisim = self.process.pid, backend
        backend._allocate_slots()
        slots = {"slots": backend._slot_specs()}
        backend._request(protocol.CMD_ATTACH, slots, expect=protocol.CMD_READY)
        self.state = state = first_cells(backend._slots["root_state"], 2)
        ctrl, stamp, take = self.ctrl, self.stamp, backend._host_step

        def step(i: int) -> None:
            stamp[0] = i
            take(ctrl, 1)
            if state[0] != i:
                raise Stale(i)

        self.step = step

    def close(self) -> None:
        super().close()
        self.state = None
        del self.step
        with contextlib.suppress(BufferError):
            self.unisim.close()


def _start(
    python: str, scheme: str, options: dict[str, Any], fds: tuple[int, ...] = (), **streams: Any
) -> subprocess.Popen[bytes]:
    argv = [python, os.path.join(_HERE, "step_worker.py"), scheme, json.dumps(options)]
    out: Any = subprocess.Popen(argv, pass_fds=fds, bufsize=0, **streams)
    return out


LINKS: dict[str, type[Link]] = {
    "ours": Ours,
    "in process": InProcess,
    "semaphores": Semaphores,
    "pipe token": PipeToken,
    "pipe pickled": PipePickled,
    "unisim-core": Unisim,
}
