"""Stopped and continued, on either side, and a wall clock that jumps: no false time-out where the peer is
alive and answers, and a late answer is never taken for the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import posix_ipc
import pytest

from conftest import custom_source
from hosts import host
from outboard.backends import CustomBackend, FakeBackend, FakeCfg, WorkerTimeout
from outboard.backends.worker import Watcher
from outboard.ipc import doorbell
from outboard.ipc.deadline import Deadline, counted_s
from outboard.ipc.doorbell import Doorbell, History
from outboard.ipc.errors import DeadlinePassed

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)
DEADLINE_S = 1.0
STOPPED_S = 2.0  # beyond the deadline

# In each the worker says that it has begun, works half a deadline, and answers.
BEGIN = "open({begun!r}, 'w').write(str(os.getpid())); time.sleep(0.5)"
WAITS = {
    "step, at the bell": (
        "def step(self, bank):\n    {begin}\n    return super().step(bank)",
        "sim.step()",
    ),
    "INIT, at the channel": (
        "def build(self, init, progress):\n    {begin}\n    return super().build(init, progress)",
        "pass",
    ),
    "message, at the channel": (
        "def report_device(self):\n"
        "    if hasattr(self, 'banks'):\n        {begin}\n"
        "    return super().report_device()",
        "sim.where()",
    ),
}
# The rule under test, taken away.
NO_RULE = (
    "from outboard.ipc import deadline, doorbell\n"
    "deadline.counted_s = doorbell.counted_s = lambda asked_s, took_s: took_s\n"
)


@pytest.fixture
def waiting_host(tmp_path: Path) -> Callable[..., Any]:
    """A host that waits for a worker with a deadline of a second; it and the worker's pid."""

    @contextlib.contextmanager
    def start(
        wait: str, before: str = ""
    ) -> Generator[tuple[subprocess.Popen[str], int], None, None]:
        methods, call = WAITS[wait]
        begun, simulator = tmp_path / "begun", tmp_path / "slow_simulator.py"
        simulator.write_text(custom_source(methods.format(begin=BEGIN.format(begun=str(begun)))))
        script = (
            f"{before}"
            "from outboard.backends.traits import Traits\n"
            f"traits = Traits(init_s={DEADLINE_S}, init_hard_s={DEADLINE_S})\n"
            f"with CustomBackend(simulator='{simulator}:Custom', device='cpu', num_envs=3,\n"
            f"                   traits=traits, step_timeout_s={DEADLINE_S}) as sim:\n"
            f"    {call}\n"
            "print('answered', flush=True)\n"
        )
        with host(script) as process:
            while not (begun.exists() and begun.read_text()):
                assert process.poll() is None, process.communicate()
                time.sleep(0.005)
            time.sleep(0.1)  # the host waits by now
            yield process, int(begun.read_text())

    return start


def suspend(process: subprocess.Popen[str], *others: int) -> None:
    """Stop all for longer than the deadline; the host goes on first."""
    for pid in (*others, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.2)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("wait", WAITS)
def test_host_and_worker_stopped_together_beyond_the_deadline_go_on(
    wait: str, waiting_host: Callable[..., Any]
) -> None:
    with waiting_host(wait) as (process, worker):
        suspend(process, worker)
        said, errors = process.communicate(timeout=20)
        assert said == "answered\n", errors


@pytest.mark.parametrize("wait", WAITS)
def test_a_host_stopped_alone_beyond_the_deadline_takes_the_answer(
    wait: str, waiting_host: Callable[..., Any]
) -> None:
    with waiting_host(wait) as (process, _):
        suspend(process)
        said, errors = process.communicate(timeout=20)
        assert said == "answered\n", errors


@pytest.mark.parametrize("wait", WAITS)
def test_without_the_rule_such_a_stop_is_taken_for_silence(
    wait: str, waiting_host: Callable[..., Any], logs_may_stay: object
) -> None:
    with waiting_host(wait, NO_RULE) as (process, worker):
        suspend(process, worker)
        said, errors = process.communicate(timeout=20)
        assert said == ""
        assert "WorkerTimeout" in errors


# -- the worker alone ----------------------------------------------------------------------------------


def test_a_worker_stopped_for_less_than_the_deadline_is_waited_for(fake: Fake) -> None:
    sim = fake(cfg=FakeCfg(fault="slow:0.2"), step_timeout_s=20.0)
    pid = sim.report["pid"]
    sim.step_async(ONES)
    os.kill(pid, signal.SIGSTOP)
    resume = threading.Timer(0.6, os.kill, (pid, signal.SIGCONT))
    resume.start()
    sim.step_wait()
    resume.join()
    assert sim.timings.commands == 1


@pytest.mark.parametrize("command", ["step", "where"])
def test_a_worker_stopped_for_longer_is_silent_and_restart_hears_nothing_of_it(
    fake: Fake, command: str
) -> None:
    sim = fake(step_timeout_s=0.5)
    os.kill(sim.report["pid"], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerTimeout, match=r"did not answer within 0\.5 s"):
        getattr(sim, command)()
    assert 0.5 <= time.monotonic() - started < 1.5
    sim.restart()
    assert sim.timings.commands == 0
    once = sim.step(ONES).qpos.copy()
    with FakeBackend(device="cpu", num_envs=3) as another:
        np.testing.assert_array_equal(once, another.step(ONES).qpos)


def test_what_a_worker_says_unasked_is_no_answer_to_the_next_message(custom: Custom) -> None:
    sim = custom("""
def render(self, request):
    if request.env_id == 1:
        from outboard.workers import serve
        worker = [w for w in __import__("gc").get_objects() if type(w) is serve.Worker][0]
        from outboard.ipc.channel import Deadline
        from outboard.ipc.messages import RenderReply
        worker.channel.send(RenderReply(1, 1, b"old"), Deadline(5))
    return super().render(request)
""")
    assert sim.render(0, 1, 1).shape == (1, 1, 3)
    assert bytes(sim.render(1, 1, 1)) == b"old"
    with pytest.raises(Exception, match="the worker sent RenderReply in phase READY"):
        sim.render(2, 1, 1)


# -- the rule ------------------------------------------------------------------------------------------


class Clock:
    """A monotonic clock that only naps move."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**9
        patch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def nap(self, late_s: float) -> Callable[[int], None]:
        def poll(milliseconds: int) -> None:
            self.now_ns += milliseconds * 10**6 + int(late_s * 1e9)

        return poll


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_stop_during_a_nap_moves_the_deadline_by_the_stop(clock: Clock) -> None:
    deadline = Deadline(10.0)
    deadline.nap(clock.nap(3600.0))
    assert deadline.remaining_s() == pytest.approx(9.5)


def test_a_stop_moves_the_deadline_around_it_too(clock: Clock) -> None:
    hard = Deadline(20.0)
    Deadline(10.0, within=hard).nap(clock.nap(3600.0))
    assert hard.remaining_s() == pytest.approx(19.5)


def test_a_deadline_within_another_ends_with_it(clock: Clock) -> None:
    assert Deadline(10.0, within=Deadline(2.0)).seconds == 2.0


def test_a_late_scheduler_does_not_move_the_deadline(clock: Clock) -> None:
    deadline = Deadline(10.0)
    for _ in range(5):
        deadline.nap(clock.nap(0.09))
    assert deadline.remaining_s() == pytest.approx(10.0 - 5 * 0.59)


@pytest.mark.parametrize(
    ("asked_s", "took_s", "counts_s"),
    [(0.05, 0.01, 0.01), (0.05, 0.05, 0.05), (0.05, 0.14, 0.14), (0.05, 9.0, 0.05)],
)
def test_a_nap_counts_as_it_lasted_unless_we_were_stopped(
    asked_s: float, took_s: float, counts_s: float
) -> None:
    assert counted_s(asked_s, took_s) == counts_s


# -- the wall clock, on which semaphores time out --------------------------------------------------------


class Jumping:
    """A semaphore whose first timed sleeps are struck by a wall clock that jumps meanwhile."""

    def __init__(self, semaphore: Any, forward: int = 0, back: int = 0) -> None:
        self._semaphore = semaphore
        self._forward, self._back = forward, back

    @property
    def value(self) -> int:
        return int(self._semaphore.value)

    def acquire(self, timeout_s: float | None = None) -> None:
        if timeout_s is not None and self._forward:
            self._forward -= 1
            raise posix_ipc.BusyError("the time has come, says the wall clock")
        if timeout_s is not None and self._back:
            self._back -= 1
            timeout_s += 3600.0
        self._semaphore.acquire(timeout_s)

    def release(self) -> None:
        self._semaphore.release()

    def close(self) -> None:
        self._semaphore.close()


@contextlib.contextmanager
def bell_on_a_jumping_clock(
    watched: bool, **jumps: int
) -> Generator[tuple[Doorbell, Any], None, None]:
    """The host's side of a bell, with the watcher that a backend has or without."""
    with doorbell.semaphore_pair() as (go, done, _, _):
        cell = memoryview(bytearray(8)).cast("Q")
        bell = Doorbell(go, Jumping(done, **jumps), cell)
    pidfd = os.pidfd_open(os.getpid())  # of somebody who lives
    log = SimpleNamespace(keep_small=lambda: None)
    process: Any = SimpleNamespace(pidfd=pidfd, pid=os.getpid(), log=log)
    watcher = Watcher(process, bell, os.getpid()) if watched else None
    try:
        yield bell, cell
    finally:
        if watcher is not None:
            watcher.stop()
        os.close(pidfd)
        bell.close()


def silence_s(bell: Doorbell, timeout_s: float) -> float:
    started = time.monotonic()
    with pytest.raises(DeadlinePassed):
        bell.wait(1, History(), timeout_s)
    return time.monotonic() - started


def test_a_clock_set_forward_does_not_end_a_wait_early() -> None:
    with bell_on_a_jumping_clock(watched=False, forward=8) as (bell, _):
        assert silence_s(bell, 0.5) > 0.45


def test_a_clock_set_back_does_not_hide_the_deadline_from_a_watched_host() -> None:
    with bell_on_a_jumping_clock(watched=True, back=1) as (bell, _):
        assert 0.5 < silence_s(bell, 0.6) < 2.0


def test_without_the_watcher_a_clock_set_back_would_hide_it() -> None:
    with bell_on_a_jumping_clock(watched=False, back=1) as (bell, _):
        rescue = threading.Timer(3.0, bell.wake)
        rescue.start()
        assert silence_s(bell, 0.6) > 2.9
        rescue.join()


def test_a_clock_set_back_does_not_hide_an_answer() -> None:
    with bell_on_a_jumping_clock(watched=False, back=1) as (bell, cell):

        def answer() -> None:
            cell[0] = 1
            bell.wake()  # a post, as the worker's ring is

        threading.Timer(0.2, answer).start()
        started = time.monotonic()
        bell.wait(1, History(), 20.0)
        assert time.monotonic() - started < 1.5
