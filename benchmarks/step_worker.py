"""The far side of the peers that can start a foreign interpreter: a stub worker without physics.

    python step_worker.py SCHEME JSON        (started by peers.py; Python 3.8 and newer)

JSON: num_envs, fd (of the shared block), the scheme's own handles, and the options of a step (step_work.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from step_work import NU, WIDTH, first_cells, make_prepare, make_step

_PAGE = 4096


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def block_bytes(num_envs: int) -> int:
    return _pages(num_envs * NU * 4) + _pages(num_envs * WIDTH * 4)


def map_block(fd: int, num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """(ctrl, state) in the block that host and worker share."""
    memory = mmap.mmap(fd, block_bytes(num_envs))
    ctrl = np.frombuffer(memory, np.float32, num_envs * NU, 0)
    state = np.frombuffer(memory, np.float32, num_envs * WIDTH, _pages(num_envs * NU * 4))
    return ctrl.reshape(num_envs, NU), state.reshape(num_envs, WIDTH)


def semaphores(options: dict[str, Any]) -> None:
    """Both sides sleep in sem_wait; nobody polls."""
    import posix_ipc

    acquire = posix_ipc.Semaphore(options["go"]).acquire
    release = posix_ipc.Semaphore(options["done"]).release
    step = make_step(*map_block(options["fd"], options["num_envs"]), options)
    release()  # ready
    while True:
        acquire()
        step()
        release()


def pipe_token(options: dict[str, Any]) -> None:
    """multiprocessing's Connection carries one byte; the arrays lie in the block."""
    from multiprocessing.connection import Connection

    connection = Connection(options["pipe"])
    step = make_step(*map_block(options["fd"], options["num_envs"]), options)
    connection.send_bytes(b"r")
    while True:
        connection.recv_bytes()
        step()
        connection.send_bytes(b"r")


def pipe_pickled(options: dict[str, Any]) -> None:
    """The arrays themselves go through the pipe, as the common vector environments do it."""
    from multiprocessing.connection import Connection

    connection = Connection(options["pipe"])
    source = np.ones((options["num_envs"], WIDTH), np.float32)
    prepare = make_prepare(source, options)
    connection.send(source)
    while True:
        prepare(float(connection.recv()[0, 0]))
        connection.send(source)


def unisim(options: dict[str, Any]) -> None:
    """The receive, dispatch, send loop of unisim-core's workers over its own protocol module."""
    from multiprocessing import resource_tracker, shared_memory

    spec = importlib.util.spec_from_file_location("unisim_protocol", options["protocol"])
    assert spec is not None and spec.loader is not None
    protocol: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocol)
    stdin, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    handles, slots = [], {}
    step: Any = None
    while True:
        try:
            message = protocol.recv_message(stdin)
        except EOFError:
            return
        command, payload = message["cmd"], message.get("payload")
        if command == protocol.CMD_STEP:
            step()
            timing = {"control_upload_ms": 0.0, "physics_ms": 0.0, "state_refresh_ms": 0.0}
            protocol.send_message(out, protocol.CMD_READY, {"timing": timing})
        elif command == protocol.CMD_ATTACH:
            for name, slot in payload["slots"].items():
                handle = shared_memory.SharedMemory(name=slot["shm"], create=False)
                # Otherwise this process's tracker unlinks the host's memory when it ends.
                resource_tracker.unregister(handle._name, "shared_memory")  # type: ignore[attr-defined]
                handles.append(handle)
                shape, dtype = tuple(slot["shape"]), np.dtype(slot["dtype"])
                slots[name] = np.ndarray(shape, dtype, buffer=handle.buf)
            step = _unisim_step(slots, options)
            protocol.send_message(out, protocol.CMD_READY, None)
        elif command == protocol.CMD_SHUTDOWN:
            protocol.send_message(out, protocol.CMD_READY)
            return


def _unisim_step(slots: dict[str, np.ndarray], options: dict[str, Any]) -> Callable[[], None]:
    """The state of ours, in the two arrays that this protocol has for it."""
    root, joints = slots["root_state"], slots["dof_state"]
    root_source, joints_source = np.ones(root.shape, np.float32), np.ones(joints.shape, np.float32)
    prepare, stamp_in = make_prepare(root_source, options), first_cells(slots["ctrl"])

    def step() -> None:
        prepare(stamp_in[0])
        root[...] = root_source
        joints[...] = joints_source

    return step


_SCHEMES = {
    "semaphores": semaphores,
    "pipe_token": pipe_token,
    "pipe_pickled": pipe_pickled,
    "unisim": unisim,
}

if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError):  # the host is gone
        _SCHEMES[sys.argv[1]](json.loads(sys.argv[2]))
