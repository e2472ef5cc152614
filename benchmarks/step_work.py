"""What a worker does in one step, the same in every scheme. Python 3.8 and newer; numpy only.

A step works (nothing, a time, or on two cores), copies a state array of its own into the shared one, and
sends the stamp that came in ctrl[0, 0] back in state[0, 0]: a stale answer is seen. state[0, 1] carries
the microseconds it really worked, so that what a scheme *adds* can be told from a step that varies.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

NU, WIDTH = 29, 71  # a humanoid with 29 joints: targets in; root, joints and their velocities out


def first_cells(array: np.ndarray, count: int = 1) -> Any:
    """The first floats of an array; cheaper to read and write than numpy's indexing."""
    head: Any = array.reshape(-1)[:count]
    return memoryview(head).cast("B").cast("f")


def make_prepare(source: np.ndarray, options: dict[str, Any]) -> Callable[[float], None]:
    """prepare(stamp): works, then puts the stamp and the time worked into `source`.

    options: work_us, vary (0.2: plus or minus 20 %), hash_bytes (two threads hash this much each, so
    that the step wants two cores; see `hash_bytes_for`).
    """
    cells = first_cells(source, 2)
    work_ns = float(options.get("work_us", 0.0)) * 1e3
    vary, draw = float(options.get("vary", 0.0)), random.Random(1).random
    clock = time.perf_counter_ns
    work = _two_threads(int(options["hash_bytes"])) if options.get("hash_bytes") else None

    def prepare(stamp: float) -> None:
        if work is not None:
            work()
        elif work_ns:
            started = clock()
            end = started + work_ns * (1.0 + vary * (2.0 * draw() - 1.0))
            while clock() < end:
                pass
            cells[1] = (clock() - started) * 1e-3
        cells[0] = stamp

    return prepare


def make_step(ctrl: np.ndarray, state: np.ndarray, options: dict[str, Any]) -> Callable[..., int]:
    """step(): one step from `ctrl` to `state`. Takes and returns what `Simulator.step` does."""
    source = np.ones(state.shape, np.float32)
    stamp_in, stamp_out = first_cells(ctrl), first_cells(source)

    def empty(bank: int = 0) -> int:
        stamp_out[0] = stamp_in[0]
        state[...] = source
        return 0

    if not (options.get("work_us") or options.get("hash_bytes")):
        return empty
    prepare = make_prepare(source, options)

    def working(bank: int = 0) -> int:
        prepare(stamp_in[0])
        state[...] = source
        return 0

    return working


def _two_threads(hash_bytes: int) -> Callable[[], None]:
    """Hashing lets go of the GIL: the two threads really run at the same time."""
    data = bytes(hash_bytes)
    go, done = threading.Lock(), threading.Lock()
    go.acquire()
    done.acquire()

    def second() -> None:
        while True:
            go.acquire()
            hashlib.sha256(data)
            done.release()

    threading.Thread(target=second, daemon=True).start()

    def work() -> None:
        go.release()
        hashlib.sha256(data)
        done.acquire()

    return work


def hash_bytes_for(work_us: float) -> int:
    """How many bytes one thread hashes in this time here; asked once, so that every scheme's worker
    does the same work."""
    data = bytes(1 << 18)
    best_ns = 1 << 62
    for _ in range(40):
        started = time.perf_counter_ns()
        hashlib.sha256(data)
        best_ns = min(best_ns, time.perf_counter_ns() - started)
    return int(len(data) * work_us * 1e3 / best_ns)
