"""What can happen around a host: ends without a last word, process numbers, subreapers,
and workers that do not leave.

Its other ends (SIGKILL, SIGTERM, sys.exit, an exception, no close, a thread that ended) are in
test_lifelines.py, ^C in test_interrupts.py, forks in test_backend.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import custom_source
from hosts import alive, gone_after, host, said_by, worker_of
from outboard.backends import (
    CustomBackend,
    FakeBackend,
    WorkerDied,
    WorkerTimeout,
)

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)


# -- ends that no handler sees ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending",
    ["os._exit(3)", "os.abort()", "os.execv('/bin/sleep', ['sleep', '20'])"],
    ids=["os._exit", "abort", "exec of another program"],
)
def test_an_end_without_a_last_word_takes_the_worker_along(
    ending: str, logs_may_stay: object
) -> None:
    with host(f"sim = FakeBackend(device='cpu', num_envs=3)\nsay(sim)\n{ending}") as process:
        assert gone_after(worker_of(process)) < 2.0  # of which the program takes its part to end


# -- processes -------------------------------------------------------------------------------------------

LEAVES_A_GRANDCHILD = """
def step(self, bank):
    import subprocess
    subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"])
    return super().step(bank)
"""


def test_a_host_that_is_a_subreaper_is_left_no_zombies(tmp_path: Path) -> None:
    simulator = tmp_path / "parent.py"
    simulator.write_text(custom_source(LEAVES_A_GRANDCHILD))
    script = (
        "import psutil\n"
        "assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0\n"  # PR_SET_CHILD_SUBREAPER
        f"sim = CustomBackend(simulator='{simulator}:Custom', device='cpu', num_envs=3)\n"
        "sim.step()\n"
        "time.sleep(0.3)\n"
        "print(len(psutil.Process().children(recursive=True)))\n"
        "sim.close()\n"
        "print(len(psutil.Process().children(recursive=True)))\n"
    )
    before, after = said_by(script)
    assert int(before) >= 3  # the worker, its child, and theirs
    assert after == "0"


def test_a_subreaper_keeps_the_children_it_had(tmp_path: Path) -> None:
    script = (
        "import subprocess\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
        "mine = subprocess.Popen(['sh', '-c', 'exit 5'])\n"
        "FakeBackend(device='cpu', num_envs=3).close()\n"
        "print(mine.wait())\n"
    )
    assert said_by(script) == ["5"]


def take_number(pid: int) -> subprocess.Popen[bytes]:
    """A stranger with the process number `pid`, which is free."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(100):
        try:
            last.write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"process numbers cannot be chosen here: {last}: {error.strerror}")
        stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if stranger.pid == pid:
            return stranger
        stranger.kill()
        stranger.wait()
    pytest.skip(f"number {pid} was always taken by somebody else")


@pytest.mark.parametrize("ending", ["close", "restart"])
def test_a_stranger_with_the_number_of_a_reaped_worker_is_not_touched(
    fake: Fake, ending: str
) -> None:
    sim = fake()
    pid, log = sim.report["pid"], sim.report["log_path"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # as a handler of the user's may do
    stranger = take_number(pid)
    try:
        getattr(sim, ending)()
        time.sleep(0.05)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    Path(log).unlink(missing_ok=True)


def test_what_a_reaped_worker_started_is_still_ended(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    import subprocess
    self.qpos[:] = subprocess.Popen(["sleep", "60"]).pid
    return self.publish(bank)
""")
    child = int(sim.step(ONES).qpos[0, 0])
    os.kill(sim.report["pid"], signal.SIGKILL)
    os.waitpid(sim.report["pid"], 0)
    with pytest.raises(WorkerDied, match="taken by somebody else in this process"):
        sim.step(ONES)
    gone_after(child, 2.0)


# -- close() is bounded ----------------------------------------------------------------------------------

UNWILLING = {
    "ignores CLOSE": "def step(self, bank):\n    time.sleep(3600)",
    "hangs in close": "def close(self):\n    time.sleep(3600)",
    "hangs in close in native code": "def close(self):\n    ctypes.PyDLL(None).sleep(3600)",
    "cannot be asked to end": (
        "def close(self):\n"
        "    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "        signal.signal(number, signal.SIG_IGN)\n    time.sleep(3600)"
    ),
}


@pytest.mark.parametrize("worker", UNWILLING)
def test_close_is_bounded_though_the_worker(custom: Custom, worker: str) -> None:
    sim = custom(UNWILLING[worker])
    pid, log = sim.report["pid"], sim.report["log_path"]
    if worker == "ignores CLOSE":
        sim.step_async(ONES)
    started = time.monotonic()
    sim.close(0.5)
    assert 0.5 <= time.monotonic() - started < 1.0
    assert not alive(pid)
    os.unlink(log)


@pytest.mark.parametrize(
    "phase", ["READY", pytest.param("BUSY", marks=pytest.mark.slow)]
)  # fmt: skip
def test_close_of_a_stopped_worker_takes_five_seconds_at_most(fake: Fake, phase: str) -> None:
    sim = fake()
    pid, log = sim.report["pid"], sim.report["log_path"]
    os.kill(pid, signal.SIGSTOP)
    if phase == "BUSY":
        sim.step_async(ONES)
    started = time.monotonic()
    sim.close()
    assert 5.0 <= time.monotonic() - started < 5.5
    assert not alive(pid)
    os.unlink(log)


def test_a_message_larger_than_the_socket_to_a_stopped_worker_ends_at_the_deadline(
    fake: Fake,
) -> None:
    sim = fake(step_timeout_s=0.5, num_envs=20_000)
    os.kill(sim.report["pid"], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"did not answer within 0\.5 s"):
        sim.set_property("rate", range(20_000), np.ones((20_000, 4)))
    assert time.monotonic() - started < 3.0
