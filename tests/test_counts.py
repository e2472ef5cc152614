"""Counts, not clocks: what a step of the whole backend may do while both sides are awake."""

from __future__ import annotations

import gc
import os
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import syscalls
from outboard.backends import CustomBackend, CustomCfg

ROOT = Path(__file__).resolve().parent.parent
ECHO = f"{ROOT / 'benchmarks' / 'echo_simulator.py'}:EchoSimulator"
WARM = 300


@pytest.fixture
def echo(python38: str) -> Iterator[CustomBackend]:
    """The empty step, its worker on the oldest Python."""
    cfg = CustomCfg({"nu": 29, "width": 71})
    with CustomBackend(
        simulator=ECHO, device="cpu", num_envs=2, cfg=cfg, publish=("qpos",), worker_python=python38
    ) as backend:
        yield backend


def ctrl_of(backend: CustomBackend) -> np.ndarray:
    return np.zeros(backend.ctrl_view.shape, np.float32)


def sleeps(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("voluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_tight_exchange_sleeps_on_neither_side(echo: CustomBackend) -> None:
    ctrl, pids = ctrl_of(echo), (os.getpid(), int(echo.report["pid"]))
    rounds, seen = 100, list[list[int]]()
    until = time.monotonic() + 15
    # Beside other busy processes the bell sleeps on purpose; one that always sleeps does so in every try.
    while time.monotonic() < until:
        for _ in range(WARM):
            echo.step(ctrl)
        before = [sleeps(pid) for pid in pids]
        for _ in range(rounds):
            echo.step(ctrl)
        seen.append([sleeps(pid) - then for pid, then in zip(pids, before, strict=True)])
        if sum(seen[-1]) == 0:
            return
        time.sleep(0.05)
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        pytest.skip("others keep this machine too busy to see whether a step sleeps")
    raise AssertionError(f"sleeps of host and worker in each run of {rounds} steps: {seen[-20:]}")


STEPS = """
import sys
import numpy as np
import syscalls
from outboard.backends import CustomBackend, CustomCfg
with CustomBackend(simulator=sys.argv[1], device="cpu", num_envs=2, publish=("qpos",),
                   worker_python=sys.argv[2], cfg=CustomCfg({"nu": 29, "width": 71})) as sim:
    ctrl = np.zeros(sim.ctrl_view.shape, np.float32)
    syscalls.trace_me()
    for _ in range(60):
        for _ in range(30):
            sim.step(ctrl)
        syscalls.mark()
        for _ in range(100):
            sim.step(ctrl)
        syscalls.mark()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="reads the registers of x86-64")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_step_makes_no_system_call_while_both_are_awake(python38: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests")])}
    runs = syscalls.count([sys.executable, "-c", STEPS, ECHO, python38], env)
    assert len(runs) == 60
    # Where the answer comes late a bell yields, and beside other load it sleeps: one that always does so
    # does it in every run of a hundred steps.
    assert min(runs, key=lambda run: sum(run.values())) == {}, runs


def test_a_warm_step_keeps_no_memory(echo: CustomBackend) -> None:
    ctrl = ctrl_of(echo)
    for _ in range(WARM):
        echo.step(ctrl)
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(1000):
            echo.step(ctrl)
        grown = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert grown <= 8  # counters that became larger integers


def test_a_warm_step_allocates_no_array(echo: CustomBackend) -> None:
    """The peak of traced memory during a step stays far below one copy of the state."""
    num_bytes = echo.state.qpos.nbytes
    ctrl = ctrl_of(echo)
    for _ in range(WARM):
        echo.step(ctrl)
    tracemalloc.start()
    try:
        echo.step(ctrl)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(10):
            echo.step(ctrl)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 2000, f"the state has {num_bytes} bytes"


def test_one_copy_each_way(echo: CustomBackend) -> None:
    """ctrl is copied into the block, the state is not copied out of it; `ctrl_view` saves the first."""
    ctrl = ctrl_of(echo)
    ctrl[0, 0] = 7.0
    first = echo.step(ctrl).qpos
    assert first[0, 0] == 7.0  # the stamp that went there and back
    assert not np.shares_memory(ctrl, echo.ctrl_view)
    assert np.array_equal(ctrl, echo.ctrl_view)
    second = echo.step(ctrl).qpos
    assert np.shares_memory(first, second)  # a view of the block, each time the same
    echo.ctrl_view[0, 0] = 8.0
    assert echo.step(echo.ctrl_view).qpos[0, 0] == 8.0
