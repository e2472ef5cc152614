"""Opening and closing again and again costs nothing that stays."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from outboard.backends import FakeBackend, FakeCfg, OutboardError

# Of 200 cycles, each of which maps 1 MB: what the allocator keeps back, and no block among it.
NOISE_BYTES = 6 << 20

CYCLES = [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


def open_and_close() -> None:
    with FakeBackend(device="cpu", num_envs=16_384) as sim:
        sim.step(np.ones((16_384, 4), np.float32))


def open_and_drop() -> None:
    FakeBackend(device="cpu", num_envs=16_384).step()


def open_and_fail() -> None:
    with pytest.raises(OutboardError):
        FakeBackend(device="cpu", num_envs=16_384, cfg=FakeCfg(fault="raise", fault_at="build"))


def open_and_lose() -> None:
    sim = FakeBackend(device="cpu", num_envs=16_384, cfg=FakeCfg(fault="exit:3"))
    with pytest.raises(OutboardError):
        sim.step()


def resources() -> tuple[int, int, int, int]:
    """Descriptors, threads, child processes and mapped blocks of this process."""
    process = psutil.Process()
    blocks = Path("/proc/self/maps").read_text().count("memfd:outboard")
    return process.num_fds(), process.num_threads(), len(process.children()), blocks


@pytest.mark.parametrize("cycle", [open_and_close, open_and_drop, open_and_fail, open_and_lose])
@pytest.mark.parametrize("cycles", CYCLES)
def test_cycles_leave_no_descriptor_thread_process_mapping_or_memory(
    cycle: Callable[[], None], cycles: int
) -> None:
    if cycles == 20 and cycle is not open_and_close:
        cycles = 5
    for _ in range(2):  # what is imported and cached once
        cycle()
    gc.collect()
    before, memory = resources(), psutil.Process().memory_info().rss
    for _ in range(cycles):
        cycle()
    assert resources() == before  # without a collection: nothing waits for one
    gc.collect()
    assert psutil.Process().memory_info().rss - memory < NOISE_BYTES


def test_restarts_leave_no_descriptor_thread_process_or_mapping() -> None:
    with FakeBackend(device="cpu", num_envs=3) as sim:
        sim.restart()
        before = resources()
        for _ in range(5):
            sim.restart()
        assert resources() == before


def test_the_names_in_dev_shm_are_gone_once_a_backend_is_open() -> None:
    before = set(os.listdir("/dev/shm"))
    with FakeBackend(device="cpu", num_envs=3) as sim:
        maps = Path(f"/proc/{sim.report['pid']}/maps").read_text()
        names = {
            line.split("/dev/shm/")[1].split()[0]
            for line in maps.splitlines()
            if "/dev/shm/" in line
        }
        assert len(names) == 2  # it holds both semaphores
        assert not names & (set(os.listdir("/dev/shm")) - before)
