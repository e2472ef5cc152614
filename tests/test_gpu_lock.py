"""backends/gpu_lock.py: a second process on a GPU is refused, and nothing outlives its owner."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid as uuids
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outboard.backends import gpu_lock
from outboard.backends.gpu_lock import GpuLock, Holder, holders
from outboard.ipc.errors import DevicePlanError
from standin_gpu import ONE_MODULE, bare_environment, run_child

HOLD = """
import os, sys
from outboard.backends.gpu_lock import GpuLock
lock = GpuLock.acquire(sys.argv[1], int(sys.argv[2]), share=sys.argv[3] == "True")
print("held", flush=True)
sys.stdin.readline()
"""
# A process that forks a child, says the child's pid, and waits to be killed; the child sleeps.
HOLD_AND_FORK = """
import os, sys, time
from outboard.backends.gpu_lock import GpuLock
lock = GpuLock.acquire(sys.argv[1], int(sys.argv[2]))
child = os.fork()
if child == 0:
    {in_child}
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def gpu() -> str:
    """A GPU that no other test, nor a run beside this one, can mean."""
    return f"GPU-{uuids.uuid4()}"


@contextmanager
def other_process(
    gpu: str, rank: int = 7, share: bool = False, code: str = HOLD
) -> Generator[tuple[subprocess.Popen[str], str], None, None]:
    """A process that holds the GPU, and the line it said; killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", ONE_MODULE + code, gpu, str(rank), str(share)],
        env=bare_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait(10)


def is_free(gpu: str) -> bool:
    """As a third process would find it."""
    code = f"""
from outboard.backends.gpu_lock import GpuLock
from outboard.ipc.errors import DevicePlanError
try: GpuLock.acquire("{gpu}", 9)
except DevicePlanError: print("taken")
else: print("free")
"""
    return run_child(ONE_MODULE + code, bare_environment()) == "free"


# -- refusal -------------------------------------------------------------------------------------


def test_a_second_process_is_refused_with_rank_pid_and_uuid_of_both(gpu: str) -> None:
    with other_process(gpu, rank=7) as (holder, _), pytest.raises(DevicePlanError) as refused:
        GpuLock.acquire(gpu, 3)
    assert refused.value.message.startswith(
        f"{gpu} is already open in rank 7 (pid {holder.pid}); "
        f"rank 3 (pid {os.getpid()}) on {gpu} is refused."
    )


def test_another_gpu_is_not_refused(gpu: str) -> None:
    with other_process(f"GPU-{uuids.uuid4()}"), GpuLock.acquire(gpu, 0):
        assert holders(gpu) == (Holder(0, os.getpid()),)


def test_the_spelling_of_the_uuid_does_not_matter(gpu: str) -> None:
    with other_process(gpu), pytest.raises(DevicePlanError):
        GpuLock.acquire("GPU-" + gpu[4:].upper(), 0)


def test_a_mig_instance_is_not_the_gpu_with_the_same_digits(gpu: str) -> None:
    with other_process(gpu), GpuLock.acquire("MIG-" + gpu[4:], 0) as lock:
        assert lock.uuid == "MIG-" + gpu[4:]


def test_a_holder_stopped_before_it_could_name_itself_still_holds(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_lock, "_NAME_WAIT_S", 0.01)
    nameless = """
import sys
from outboard.backends import gpu_lock
keep = gpu_lock._bound(sys.argv[1])
print("held", flush=True)
sys.stdin.readline()
"""
    with (
        other_process(gpu, code=nameless),
        pytest.raises(DevicePlanError, match="a process that did not say its name"),
    ):
        GpuLock.acquire(gpu, 0)


# -- sharing -------------------------------------------------------------------------------------


def test_a_process_that_shares_is_let_in(gpu: str) -> None:
    with other_process(gpu) as (holder, _), GpuLock.acquire(gpu, 3, share=True):
        assert holders(gpu) == (Holder(3, os.getpid()), Holder(7, holder.pid))


def test_a_process_that_does_not_share_is_refused_by_one_that_does(gpu: str) -> None:
    with other_process(gpu, share=True), pytest.raises(DevicePlanError, match="rank 7"):
        GpuLock.acquire(gpu, 3)


def test_the_last_of_two_sharing_processes_still_keeps_others_out(gpu: str) -> None:
    with other_process(gpu, share=True) as (first, _), GpuLock.acquire(gpu, 3, share=True):
        first.kill()
        first.wait(10)
        assert not is_free(gpu)


def test_a_process_that_shares_keeps_others_out_even_where_names_cannot_be_read(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(uuid: str) -> tuple[Holder, ...]:
        return ()

    monkeypatch.setattr(gpu_lock, "holders", nobody)
    monkeypatch.setattr(gpu_lock, "_NAME_WAIT_S", 0.01)
    with other_process(gpu, share=True), pytest.raises(DevicePlanError):
        GpuLock.acquire(gpu, 3)


# -- the lock is the process's -------------------------------------------------------------------


def test_two_backends_in_one_process_may_open_the_same_gpu(gpu: str) -> None:
    with GpuLock.acquire(gpu, 0), GpuLock.acquire(gpu, 0):
        assert not is_free(gpu)


def test_the_gpu_is_locked_until_the_last_backend_of_the_process_lets_go(gpu: str) -> None:
    first, second = GpuLock.acquire(gpu, 0), GpuLock.acquire(gpu, 0)
    first.release()
    taken = not is_free(gpu)
    second.release()
    assert (taken, is_free(gpu)) == (True, True)


def test_releasing_twice_is_releasing_once(gpu: str) -> None:
    first, second = GpuLock.acquire(gpu, 0), GpuLock.acquire(gpu, 0)
    first.release()
    first.release()
    with second:
        assert not is_free(gpu)


def test_a_backend_that_does_not_share_is_refused_beside_one_of_its_process_that_does(
    gpu: str,
) -> None:
    with (
        other_process(gpu),
        GpuLock.acquire(gpu, 3, share=True),
        pytest.raises(DevicePlanError, match="rank 7"),
    ):
        GpuLock.acquire(gpu, 3)


def test_the_first_of_two_sharing_processes_cannot_have_the_gpu_for_itself_later(
    gpu: str,
) -> None:
    with (
        GpuLock.acquire(gpu, 3, share=True),
        other_process(gpu, share=True),
        pytest.raises(DevicePlanError, match="rank 7"),
    ):
        GpuLock.acquire(gpu, 3)


def test_who_joined_by_sharing_does_not_stop_the_owners_next_backend(gpu: str) -> None:
    with GpuLock.acquire(gpu, 3), other_process(gpu, share=True), GpuLock.acquire(gpu, 3) as lock:
        assert lock.uuid == gpu


def test_a_process_alone_with_its_sharing_backend_may_stop_sharing(gpu: str) -> None:
    with GpuLock.acquire(gpu, 3, share=True), GpuLock.acquire(gpu, 3):
        assert not is_free(gpu)


def test_a_refused_process_leaves_no_name_behind(gpu: str) -> None:
    with other_process(gpu) as (holder, _):
        with pytest.raises(DevicePlanError):
            GpuLock.acquire(gpu, 3)
        assert holders(gpu) == (Holder(7, holder.pid),)


def test_a_refused_process_keeps_no_lock(gpu: str) -> None:
    with (
        other_process(gpu, share=True) as (first, _),
        other_process(gpu, share=True) as (second, _),
    ):
        first.kill()
        first.wait(10)  # now nobody has the lock itself, and the second still has the GPU open
        with pytest.raises(DevicePlanError) as refused:
            GpuLock.acquire(gpu, 3)
        second.kill()
        second.wait(10)
        assert is_free(gpu), refused


# -- and dies with it ----------------------------------------------------------------------------


def test_a_killed_owner_frees_the_gpu(gpu: str) -> None:
    with other_process(gpu) as (holder, _):
        holder.kill()
        holder.wait(10)
        assert is_free(gpu)


def test_a_forked_child_does_not_keep_the_gpu_of_its_dead_parent(gpu: str) -> None:
    with other_process(gpu, code=HOLD_AND_FORK.format(in_child="pass")) as (holder, child):
        holder.kill()
        holder.wait(10)
        try:
            assert is_free(gpu)
        finally:
            os.kill(int(child), 9)


def test_a_forked_child_that_releases_its_parents_lock_does_not_unlock(gpu: str) -> None:
    # The child ends at once, so that its parent can wait for the release before it speaks.
    code = HOLD_AND_FORK.format(in_child="lock.release(); os._exit(0)")
    code = code.replace("print(child", "print(os.wait()[1]")
    with other_process(gpu, code=code) as (_, status):
        assert (status, is_free(gpu)) == ("0", False)


def test_a_forked_child_is_a_process_of_its_own_and_refused(gpu: str) -> None:
    code = f"""
import os
from outboard.backends.gpu_lock import GpuLock
from outboard.ipc.errors import DevicePlanError
lock = GpuLock.acquire("{gpu}", 0)
if os.fork() == 0:
    try: GpuLock.acquire("{gpu}", 1)
    except DevicePlanError as error: print(error, flush=True)
    os._exit(0)
os.wait()
"""
    refused = run_child(ONE_MODULE + code, bare_environment())
    assert re.search(r"open in rank 0 \(pid \d+\); rank 1 \(pid \d+\)", refused)


def test_a_program_started_by_the_owner_does_not_inherit_the_lock(gpu: str) -> None:
    sleeper = """
import subprocess
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(child.pid, flush=True)
sys.stdin.readline()
"""
    code = HOLD.replace('print("held", flush=True)\nsys.stdin.readline()\n', sleeper)
    with other_process(gpu, code=code) as (holder, child):
        holder.kill()
        holder.wait(10)
        try:
            assert is_free(gpu)
        finally:
            os.kill(int(child), 9)


@pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc/net/unix")
def test_who_has_a_gpu_open_is_told_to_anybody(gpu: str) -> None:
    with other_process(gpu, rank=2) as (holder, _):
        assert holders(gpu) == (Holder(2, holder.pid),)
