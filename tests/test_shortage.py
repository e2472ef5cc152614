"""What a host can be short of: descriptors, disks, memory. It works, or it says so and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import custom_source
from hosts import said_by
from outboard.backends import (
    CustomBackend,
    FakeBackend,
    FakeCfg,
    WorkerDied,
    WorkerFailed,
    oom,
)

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]

ONES = np.ones((3, 4), np.float32)


def script_file(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


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
