"""What the host's surroundings do to it: short of descriptors, of disk, of memory, of /dev/shm, of luck.

Its own ends (SIGKILL, SIGTERM, sys.exit, an exception, no close, a thread that ended) are in
test_lifelines.py, ^C in test_interrupts.py, forks in test_backend.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import custom_source
from hosts import alive, gone_after, host, worker_of
from outboard.backends import (
    CustomBackend,
    FakeBackend,
    FakeCfg,
    WorkerDied,
    WorkerFailed,
    WorkerTimeout,
    oom,
)

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)


def said_by(script: str, python: str = sys.executable, timeout_s: float = 50.0) -> list[str]:
    """The lines that a host prints; it must end well."""
    with host(script, python) as process:
        said, errors = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, errors
        return said.splitlines()


def script_file(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


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


# -- descriptors -----------------------------------------------------------------------------------------

LIST_OWN = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')), sep='\\n')"  # noqa: E501


def test_a_child_of_the_user_started_with_close_fds_off_gets_nothing_of_ours(fake: Fake) -> None:
    def inherited() -> set[str]:
        argv = [sys.executable, "-c", LIST_OWN]
        done = subprocess.run(argv, close_fds=False, capture_output=True, text=True, check=True)
        return {line for line in done.stdout.splitlines() if "pipe:" not in line}

    before = inherited()
    fake()
    assert inherited() <= before


def test_short_of_descriptors_opening_works_or_says_so_and_leaves_nothing() -> None:
    """With 1,024 allowed, all but n are taken; n counts up until opening works three times."""
    script = """
import gc, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
FakeBackend(device="cpu", num_envs=3).close()  # what is opened once for the process is open now
def count():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
worked, free = 0, 0
while worked < 3:
    base, taken = count(), []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for fd in taken[:free]:
        os.close(fd)
    del taken[:free]
    try:
        sim = FakeBackend(device="cpu", num_envs=3)
        sim.step()
        sim.where()
        sim.close()
        worked += 1
    except OutboardError as error:
        assert type(error) in (WorkerLaunchError, UsageError) and "open files" in error.message, error
        if error.report is not None and error.report.log_path:
            os.unlink(error.report.log_path)
        worked = 0
    del sim
    sim = None
    for fd in taken:
        os.close(fd)
    assert count() == base, (free, count(), base)
    free += 1
print(free)
"""
    [free] = said_by("sim = None\n" + script.replace("    del sim\n", ""))
    assert 5 < int(free) < 32


def test_a_worker_that_may_not_have_many_descriptors_works(fake: Fake, tmp_path: Path) -> None:
    python = script_file(
        tmp_path / "few", f'#!/bin/sh\nulimit -n 40\nexec {sys.executable} "$@"\n'
    )  # fmt: skip
    sim = fake(worker_python=python)
    sim.step(ONES)
    sim.where()


# -- disks -----------------------------------------------------------------------------------------------


def in_a_mount_namespace(folder: Path, commands: str) -> str:
    """An interpreter that sees the file systems after `commands`, as nobody else does."""
    probe = ["unshare", "-m", "sh", "-c", commands]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no mounts of one's own here: {done.stderr.strip()}")
    return script_file(
        folder / "mounted-python",
        f'#!/bin/sh\nexec unshare -m sh -c \'{commands} && exec {sys.executable} "$@"\' sh "$@"\n',
    )


LOG_IN_MEMORY = """
sim = FakeBackend(device="cpu", num_envs=3, cfg=FakeCfg(fault="raise:mine", fault_step=2))
sim.step()
print(repr(sim.report["log_path"]))
try:
    sim.step()
except WorkerFailed as error:
    print(error.report.log_path == "", any("mine" in line for line in error.report.log_tail))
"""


def test_with_a_read_only_temporary_directory_the_log_is_kept_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    python = in_a_mount_namespace(
        tmp_path, f"mount -t tmpfs -o ro none {folder} && export XDG_RUNTIME_DIR={folder}"
    )
    assert said_by(LOG_IN_MEMORY, python) == ["''", "True True"]


def test_where_no_folder_can_be_made_the_log_is_kept_in_memory() -> None:
    script = "os.environ['XDG_RUNTIME_DIR'] = '/proc/self'\n" + LOG_IN_MEMORY
    assert said_by(script) == ["''", "True True"]


PRINTS_A_LOT = """
def step(self, bank):
    for _ in range(100):
        print("x" * 10000)
        sys.stderr.write("y" * 10000)
    sys.stdout.flush()
    errors = 0
    try:
        os.write(1, b"z" * 100000)
    except OSError as error:
        errors = error.errno
    self.qpos[:] = errors
    return self.publish(bank)
"""


def test_a_full_disk_loses_what_a_simulator_prints_and_not_its_step(tmp_path: Path) -> None:
    simulator, folder = tmp_path / "prints.py", tmp_path / "small"
    simulator.write_text(custom_source(PRINTS_A_LOT))
    folder.mkdir()
    python = in_a_mount_namespace(
        tmp_path,
        f"mount -t tmpfs -o size=64k,mode=700 none {folder} && export XDG_RUNTIME_DIR={folder}",
    )
    script = (
        f"with CustomBackend(simulator='{simulator}:Custom', device='cpu', num_envs=3) as sim:\n"
        "    print(int(sim.step().qpos[0, 0]), os.path.getsize(sim.report['log_path']) < 70000)\n"
    )
    assert said_by(script, python) == ["28 True"]  # ENOSPC, which its own prints did not raise


def test_a_simulator_may_still_use_what_a_stream_has(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
    assert not sys.stdout.isatty() and sys.stdout.writable()
    sys.stdout.buffer.write(b"bytes\\n")
    print("\\udc80 and \\u20ac", file=sys.stderr, flush=True)
    os.dup2(1, 2)
    raise RuntimeError("seen")
""")
    with pytest.raises(WorkerFailed, match="seen") as caught:
        sim.step(ONES)
    assert caught.value.report is not None
    log = caught.value.report.log_tail
    assert "bytes" in log
    assert "\\udc80 and \u20ac" in log


# -- memory ----------------------------------------------------------------------------------------------


def test_a_dev_shm_of_a_megabyte_is_enough(tmp_path: Path) -> None:
    python = in_a_mount_namespace(tmp_path, "mount -t tmpfs -o size=1m none /dev/shm")
    script = (
        "print(os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize)\n"
        "with FakeBackend(device='cpu', num_envs=200_000, cfg=FakeCfg(nu=16)) as sim:\n"
        "    print(sim.step().qpos.nbytes)\n"
    )
    assert said_by(script, python) == [str(1 << 20), str(200_000 * 16 * 4)]


def test_a_full_dev_shm_is_said_and_nothing_stays(tmp_path: Path) -> None:
    python = in_a_mount_namespace(tmp_path, "mount -t tmpfs -o size=16k none /dev/shm")
    script = (
        "open('/dev/shm/full', 'wb').write(b'x' * 12288)\n"
        "try:\n    FakeBackend(device='cpu', num_envs=3)\n"
        "except WorkerLaunchError as error:\n"
        "    print('No space left on device' in error.message, os.listdir('/dev/shm'))\n"
        "    os.unlink(error.report.log_path)\n"
    )
    assert said_by(script, python) == ["True ['full']"]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 96 MiB, of version 1 or 2, directly under the root."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    folder = (root if v2 else root / "memory") / f"outboard-test-{os.getpid()}"
    limits = {"memory.max": 96 << 20} if v2 else {"memory.limit_in_bytes": 96 << 20}
    try:
        folder.mkdir()
        for name, value in limits.items():
            (folder / name).write_text(str(value))
        with contextlib.suppress(OSError):
            (folder / ("memory.swap.max" if v2 else "memory.swappiness")).write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {folder}: {error.strerror}")
    yield folder
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:  # who was in it is on the way out
            time.sleep(0.05)


def test_a_worker_killed_by_its_memory_cgroup_is_said_to_be(
    fake: Fake, small_cgroup: Path, tmp_path: Path
) -> None:
    python = script_file(
        tmp_path / "confined",
        f'#!/bin/sh\necho $$ > {small_cgroup}/cgroup.procs && exec {sys.executable} "$@"\n',
    )
    sim = fake(worker_python=python, cfg=FakeCfg(fault="take:200"))
    with pytest.raises(
        WorkerDied, match=r"SIGKILL .*killed by the kernel, memory ran out"
    ) as caught:
        sim.step(ONES)
    assert small_cgroup.name in str(caught.value)
    assert caught.value.report is not None
    assert "memory ran out" in caught.value.report.exit


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's count of kills, to be raised by the test."""
    kills = [7]
    monkeypatch.setattr(oom, "_kills", lambda folder: kills[0])  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(oom, "_folders", lambda pid: [Path("/cgroup/job")])  # pyright: ignore[reportUnknownLambdaType]
    return kills


@pytest.mark.parametrize(
    ("killed", "fault", "words"),
    [
        (
            1,
            "SIGKILL",
            r"SIGKILL \(signal 9: killed by the kernel, memory ran out: cgroup /cgroup/job",
        ),
        (0, "SIGKILL", r"SIGKILL \(signal 9, by somebody or by the kernel when memory ran out\)"),
        (1, "SIGSEGV", r"SIGSEGV \(signal 11\)"),
        (1, "exit:137", "exit code 137: killed by the kernel, memory ran out"),
        (1, "exit:3", "exit code 3$"),
    ],
)
def test_memory_is_named_when_the_kernel_counted_a_kill_and_the_worker_was_killed(
    fake: Fake, counted: list[int], killed: int, fault: str, words: str
) -> None:
    sim = fake(cfg=FakeCfg(fault=fault))
    counted[0] += killed
    with pytest.raises(WorkerDied) as caught:
        sim.step(ONES)
    assert caught.value.report is not None
    assert re.search(words, caught.value.report.exit)


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
