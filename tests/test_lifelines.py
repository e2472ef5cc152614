"""Who dies with whom: a dead worker is named at once, and a dead host takes its workers along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import custom_source
from hosts import ROOT, alive, gone_after, host, host_environment, worker_of
from outboard.backends import CustomBackend, FakeBackend, FakeCfg, WorkerDied

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)
# A native call that never gives the GIL away: no Python thread of the worker runs meanwhile.
HOLDS_THE_GIL = "def step(self, bank):\n    ctypes.PyDLL(None).sleep(30)"


# -- the worker dies ------------------------------------------------------------------------------


def kill_soon(pid: int, after_s: float = 0.2) -> Callable[[], float]:
    """SIGKILL from another thread; call the result for the moment of the kill."""
    killed: list[float] = []

    def kill() -> None:
        time.sleep(after_s)
        killed.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()

    def moment() -> float:
        thread.join()
        return killed[0]

    return moment


def test_a_worker_killed_while_the_host_waits_is_named_with_signal_and_phase(
    fake: Fake, worker_python: str
) -> None:
    sim = fake(cfg=FakeCfg(fault="hang"), worker_python=worker_python)
    moment = kill_soon(sim.report["pid"])
    with pytest.raises(WorkerDied, match=r"SIGKILL \(signal 9") as caught:
        sim.step(ONES)
    assert time.monotonic() - moment() < 1.0
    report = caught.value.report
    assert report is not None
    assert report.phase == "BUSY"
    assert report.exit.startswith("SIGKILL")
    assert report.pid == sim.report["pid"]
    assert report.log_path


@pytest.mark.parametrize("command", ["where", "render"])
def test_a_worker_killed_while_the_host_waits_for_mail_is_named(
    custom: Custom, command: str
) -> None:
    method = {"where": "report_device(self)", "render": "render(self, request)"}[command]
    sim = custom(f"""
calls = 0
def {method}:
    self.calls += 1
    if self.calls > {int(command == "where")}:
        time.sleep(60)
    return cpu_report("qpos")
""")
    moment = kill_soon(sim.report["pid"])
    with pytest.raises(WorkerDied, match="SIGKILL"):
        getattr(sim, command)()
    assert time.monotonic() - moment() < 1.0


@pytest.mark.parametrize(
    ("fault", "text"),
    [("exit:0", "exit code 0"), ("exit:3", "exit code 3"), ("SIGSEGV", "SIGSEGV"),
     ("SIGBUS", "SIGBUS .*the memory was not there"), ("SIGABRT", "SIGABRT")],
)  # fmt: skip
@pytest.mark.parametrize("at", ["build", "step"])
def test_how_a_worker_ended_is_said_in_words(at: str, fault: str, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=text) as caught, FakeBackend(
        device="cpu", num_envs=1, cfg=FakeCfg(fault=fault, fault_at=at)
    ) as sim:  # fmt: skip
        sim.step()
    assert caught.value.report is not None
    assert caught.value.report.phase == {"build": "INIT", "step": "BUSY"}[at]
    assert time.monotonic() - started < 10.0


def test_a_worker_that_died_between_two_steps_is_named_at_the_next(fake: Fake) -> None:
    sim = fake()
    os.kill(sim.report["pid"], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        sim.step(ONES)
    assert time.monotonic() - started < 1.0


def test_close_after_an_unseen_death_is_quick_and_quiet(fake: Fake) -> None:
    sim = fake()
    os.kill(sim.report["pid"], signal.SIGKILL)
    log = sim.report["log_path"]
    started = time.monotonic()
    sim.close()
    assert time.monotonic() - started < 1.0
    Path(log).unlink()  # it stays: the worker did not leave well


def test_what_a_worker_started_goes_with_it(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    self.qpos[:] = child.pid
    return self.publish(bank)
""")
    child = int(sim.step(ONES).qpos[0, 0])
    assert alive(child)
    sim.close()
    gone_after(child, 1.0)


def test_a_worker_whose_child_holds_its_socket_is_still_seen_to_die(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
""")
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        sim.step(ONES)
    assert time.monotonic() - started < 1.0


def wrapper(tmp_path: Path) -> str:
    """An interpreter that is a shell script and does not exec."""
    path = tmp_path / "wrapped-python"
    path.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    path.chmod(0o755)
    return str(path)


def test_a_death_behind_a_wrapper_is_named_as_the_wrapper_passes_it_on(
    fake: Fake, tmp_path: Path
) -> None:
    sim = fake(worker_python=wrapper(tmp_path), cfg=FakeCfg(fault="hang"))
    moment = kill_soon(sim.report["pid"])
    with pytest.raises(WorkerDied, match="exit code 137"):
        sim.step(ONES)
    assert time.monotonic() - moment() < 1.0


def test_a_worker_behind_a_wrapper_works_and_closes_well(fake: Fake, tmp_path: Path) -> None:
    sim = fake(worker_python=wrapper(tmp_path))
    log = sim.report["log_path"]
    sim.step(ONES)
    sim.close()
    assert not os.path.exists(log)


# -- the host dies --------------------------------------------------------------------------------

OPEN = {
    "idle": "sim = FakeBackend(device='cpu', num_envs=3)\nsay(sim)\ntime.sleep(60)",
    "in a long step": (
        "sim = FakeBackend(device='cpu', num_envs=3, cfg=FakeCfg(fault='hang'))\n"
        "say(sim)\nsim.step_async()\ntime.sleep(60)"
    ),
    "in a native call that holds the GIL": (
        "sim = CustomBackend(simulator={simulator!r}, device='cpu', num_envs=3)\n"
        "say(sim)\nsim.step_async()\ntime.sleep(60)"
    ),
    "opened by a thread that has ended": (
        "kept = []\n"
        "def job():\n"
        "    kept.append(CustomBackend(simulator={simulator!r}, device='cpu', num_envs=3))\n"
        "thread = threading.Thread(target=job)\nthread.start()\nthread.join()\n"
        "say(kept[0])\nkept[0].step_async()\ntime.sleep(60)"
    ),
    "while a forked child of the host lives on": (
        "sim = CustomBackend(simulator={simulator!r}, device='cpu', num_envs=3)\n"
        "if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "say(sim)\nsim.step_async()\ntime.sleep(60)"
    ),
    "forked child, no step": (
        "sim = FakeBackend(device='cpu', num_envs=3)\n"
        "if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "say(sim)\ntime.sleep(60)"
    ),
    "behind a wrapper script": (
        "sim = FakeBackend(device='cpu', num_envs=3, worker_python={wrapper!r})\n"
        "say(sim)\nsim.step()\ntime.sleep(60)"
    ),
    "behind a wrapper script, forked child": (
        "sim = FakeBackend(device='cpu', num_envs=3, worker_python={wrapper!r})\n"
        "if os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
        "say(sim)\nsim.step()\ntime.sleep(60)"
    ),
}


@pytest.mark.parametrize("situation", OPEN)
def test_a_worker_is_gone_within_a_second_of_its_hosts_sigkill(
    situation: str, tmp_path: Path, logs_may_stay: object
) -> None:
    simulator = tmp_path / "holds.py"
    simulator.write_text(custom_source(HOLDS_THE_GIL))
    script = OPEN[situation].format(simulator=f"{simulator}:Custom", wrapper=wrapper(tmp_path))
    with host(script) as process:
        worker = worker_of(process)
        time.sleep(0.1)  # so that the step has begun
        assert alive(worker)
        process.kill()
        assert gone_after(worker) < 1.0


def test_a_worker_that_is_still_starting_goes_with_its_host(
    tmp_path: Path, logs_may_stay: object
) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 0.3\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    script = (
        "if os.fork() == 0:\n    time.sleep(60)\n"
        f"FakeBackend(device='cpu', num_envs=3, worker_python={str(slow)!r})"
    )
    with host(script) as process:
        pid_file = tmp_path / "pid"
        while not (pid_file.exists() and pid_file.read_text().strip()):
            time.sleep(0.005)
        process.kill()
        gone_after(int(pid_file.read_text()), 5.0)  # it starts, looks for its host, and leaves


def test_the_end_of_the_thread_that_opened_it_does_not_end_a_worker() -> None:
    opened: list[FakeBackend] = []
    thread = threading.Thread(
        target=lambda: opened.append(FakeBackend(device="cpu", num_envs=3))
    )  # fmt: skip
    thread.start()
    thread.join()
    time.sleep(0.2)
    with opened[0] as sim:
        sim.step(ONES)


ENDINGS = {
    "falls off the end": ("", 0),
    "sys.exit": ("sys.exit(4)", 4),
    "exception": ("raise RuntimeError('mine')", 1),
    "exception in a with block": (
        "with FakeBackend(device='cpu', num_envs=1) as two:\n    raise RuntimeError('mine')", 1,
    ),
    "a step is in flight": ("sim.step_async()", 0),
    "in a reference cycle": ("sim.me = sim; del sim", 0),
    "two backends": ("two = FakeBackend(device='cpu', num_envs=1)", 0),
    "SIGTERM, turned into an exit": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getpid(), signal.SIGTERM)", 5,
    ),
    "interrupt": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_interpreter_that_ends_without_close_leaves_nothing(ending: str) -> None:
    """Not even a log: the guard sees to that."""
    code, expected = ENDINGS[ending]
    script = f"sim = FakeBackend(device='cpu', num_envs=3)\nsay(sim)\n{code}"
    with host(script) as process:
        worker = worker_of(process)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == expected, errors
        assert "outboard" not in errors.replace(str(ROOT), "") or "Traceback" in errors
        gone_after(worker, 1.0)


def test_exit_waits_for_a_hanging_worker_no_longer_than_its_bound(logs_may_stay: object) -> None:
    script = "sim = FakeBackend(device='cpu', num_envs=3, cfg=FakeCfg(fault='hang'))\n"
    with host(script + "say(sim)\nsim.step_async()") as process:
        worker = worker_of(process)
        started = time.monotonic()
        process.communicate(timeout=20)
        assert time.monotonic() - started < 5.0 + 1.5  # Traits.close_s
        assert not alive(worker)


def test_sigterm_without_a_handler_ends_host_and_worker(logs_may_stay: object) -> None:
    with host(OPEN["idle"]) as process:
        worker = worker_of(process)
        process.send_signal(signal.SIGTERM)
        assert gone_after(worker) < 1.0


def test_ctrl_c_in_a_terminal_reaches_the_host_and_not_the_worker(fake: Fake) -> None:
    sim = fake()
    assert os.getpgid(sim.report["pid"]) != os.getpgid(0)
    assert os.getsid(sim.report["pid"]) != os.getsid(0)


def test_the_host_may_be_started_with_all_descriptors_closed(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        "from outboard.backends import FakeBackend\n"
        "with FakeBackend(device='cpu', num_envs=1) as sim: sim.step()\n"
        f"open({str(tmp_path / 'well')!r}, 'x').close()\n"
    )
    subprocess.run(
        ["sh", "-c", f"exec {sys.executable} {script} <&- >&- 2>&-"],
        env=host_environment(),
        timeout=30,
        check=False,
    )
    assert (tmp_path / "well").exists()


def test_a_sigchld_handler_of_the_host_takes_nothing_from_us(fake: Fake) -> None:
    reaped: list[Any] = []

    def handler(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            reaped.append(os.waitpid(-1, os.WNOHANG))

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        sim = fake(cfg=FakeCfg(fault="exit:3"))
        with pytest.raises(WorkerDied):
            sim.step(ONES)
        sim.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_death_is_seen_although_the_wrapper_around_the_worker_lives_on(
    fake: Fake, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nsleep 60\n')
    script.chmod(0o755)
    sim = fake(worker_python=str(script), cfg=FakeCfg(fault="SIGKILL"), step_timeout_s=30.0)
    started_s = time.monotonic()
    with pytest.raises(WorkerDied):
        sim.step()
    assert time.monotonic() - started_s < 2.0
