"""^C at any moment: the step is done, or the backend says what it is; nothing is lost or left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from outboard.backends import CustomBackend, FakeBackend, FakeCfg, UsageError

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)


@pytest.fixture(autouse=True)
def ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Shots:
    """A thread that sends SIGINT to this process after a given time, once per `aim`."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._armed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._armed.wait()
            if self._ended:
                return
            self._armed.clear()
            end = time.perf_counter() + self._delay_s
            while time.perf_counter() < end:
                pass
            if not self._ended:
                os.kill(os.getpid(), signal.SIGINT)

    def aim(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._armed.set()

    def close(self) -> None:
        """A shot of a test that failed before it was hit must not hit the next one."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._ended = True
        self._armed.set()
        self._thread.join()


@pytest.fixture
def shots() -> Iterator[Shots]:
    gun = Shots()
    yield gun
    gun.close()


def until_interrupted(job: Callable[[], object]) -> int:
    """Repeats `job` until the interrupt comes; how often it returned. The interrupt may also hit
    between two of them."""
    done = 0
    try:
        while True:
            job()
            done += 1
    except KeyboardInterrupt:
        return done


def recover(sim: FakeBackend) -> str:
    """What a caller does after ^C, by nothing but what the backend says."""
    phase = sim.report["phase"]
    if phase == "READY":
        return "ready"
    assert phase == "BUSY"
    try:
        sim.step_wait()
        return "collected"
    except UsageError as error:
        assert "was never sent" in error.message
        return "never sent"


@pytest.mark.parametrize("work_us", [0, 300])
@pytest.mark.parametrize(
    "shots_fired", [20, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_an_interrupt_at_a_random_moment_of_step_loses_no_step_and_takes_none_twice(
    fake: Fake, shots: Shots, work_us: int, shots_fired: int
) -> None:
    sim = fake(cfg=FakeCfg(work_us=work_us))
    chance = random.Random(work_us + shots_fired)
    outcomes: dict[str, int] = {}
    for _ in range(shots_fired):
        state = sim.reset()
        before = sim.timings.commands
        shots.aim(chance.uniform(0.0002, 0.003))
        until_interrupted(lambda: sim.step(ONES))
        outcome = recover(sim)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        # The deterministic fake counts for us: exactly the acknowledged steps were made.
        sim.step_async(ONES)
        sim.step_wait()
        expected = state_after(sim.timings.commands - before)
        np.testing.assert_array_equal(state.qpos, np.tile(expected, (3, 1)))
    assert set(outcomes) & {"ready", "collected"}


def state_after(steps: int) -> np.ndarray:
    """`fake`'s arithmetic, in the same order and precision."""
    qpos = np.linspace(-0.2, 0.2, 4, dtype=np.float32)
    for _ in range(steps):
        qvel = np.float32(2.0) * (np.float32(1.0) - qpos)
        qpos = qpos + np.float32(0.01) * qvel
    return qpos


def test_an_interrupt_inside_a_long_step_leaves_it_in_flight(fake: Fake, shots: Shots) -> None:
    sim = fake(cfg=FakeCfg(fault="slow:0.5"))
    shots.aim(0.1)
    with pytest.raises(KeyboardInterrupt):
        sim.step(ONES)
    assert sim.report["phase"] == "BUSY"
    with pytest.raises(
        UsageError, match=r"step_wait\(\) collects its answer, close\(\) and restart"
    ):
        sim.step(ONES)
    np.testing.assert_array_equal(sim.step_wait().qpos[0], state_after(1))
    np.testing.assert_array_equal(sim.step(ONES).qpos[0], state_after(2))


@pytest.mark.parametrize("way_out", ["close", "restart"])
def test_after_an_interrupt_close_and_restart_are_allowed(
    fake: Fake, shots: Shots, way_out: str
) -> None:
    sim = fake(cfg=FakeCfg(fault="slow:0.5"))
    shots.aim(0.1)
    with pytest.raises(KeyboardInterrupt):
        sim.step(ONES)
    started = time.monotonic()
    getattr(sim, way_out)()
    assert time.monotonic() - started < 3.0


def test_an_interrupted_message_ends_the_worker_and_says_so(custom: Custom, shots: Shots) -> None:
    sim = custom("def render(self, request):\n    time.sleep(60)")
    log = sim.report["log_path"]
    shots.aim(0.2)
    with pytest.raises(KeyboardInterrupt):
        sim.render()
    with pytest.raises(
        UsageError, match=r"Render was interrupted half-way .* restart\(\) or close"
    ):
        sim.step(ONES)
    assert os.path.exists(log)
    sim.restart()
    np.testing.assert_array_equal(sim.step(ONES).qpos[0], state_after(1))


def test_a_second_interrupt_during_close_still_ends_the_worker(fake: Fake, shots: Shots) -> None:
    sim = fake(cfg=FakeCfg(fault="hang"))
    log, pid = sim.report["log_path"], sim.report["pid"]
    sim.step_async(ONES)
    shots.aim(0.2)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sim.close()
    assert time.monotonic() - started < 2.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert sim.report["phase"] == "CLOSED"
    os.unlink(log)


@pytest.mark.parametrize(
    "shots_fired", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_an_interrupt_while_opening_leaves_nothing(shots: Shots, shots_fired: int) -> None:
    """The guard finds a worker, descriptor or log that belongs to nobody."""
    chance = random.Random(shots_fired)
    for shot in range(shots_fired):
        shots.aim(0.4 * (shot + chance.random()) / shots_fired)
        try:
            sim = FakeBackend(device="cpu", num_envs=3)
            try:
                time.sleep(1)
            finally:
                sim.close()
        except KeyboardInterrupt:
            continue
        pytest.fail("the shot was not heard")


@pytest.mark.parametrize("call", ["memfd_create", "open", "eventfd", "pidfd_open", "dup"])
def test_an_interrupt_between_a_system_call_and_its_result_loses_no_descriptor(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard finds the descriptor that nobody was told of."""
    real = getattr(os, call)
    hit: list[int] = []

    def interrupted(*args: object, **named: object) -> int:
        fd: int = real(*args, **named)
        if not hit:
            hit.append(fd)
            signal.raise_signal(signal.SIGINT)
        return fd

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        FakeBackend(device="cpu", num_envs=3).close()
    assert hit


@pytest.mark.parametrize(
    "shots_fired", [6, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_an_interrupt_while_restarting_leaves_a_backend_that_restarts(
    fake: Fake, shots: Shots, shots_fired: int
) -> None:
    sim = fake()
    chance = random.Random(shots_fired)
    for shot in range(shots_fired):
        shots.aim(0.3 * (shot + chance.random()) / shots_fired)
        try:
            sim.restart()
            time.sleep(1)
        except KeyboardInterrupt:
            pass
        if sim.report["phase"] == "FAILED":
            with pytest.raises(
                UsageError, match=r"restart\(\) was interrupted: call it again, or cl"
            ):
                sim.step(ONES)
            sim.restart()
        np.testing.assert_array_equal(sim.step(ONES).qpos[0], state_after(1))
