"""backends/witness.py: what the outside witness says, and when it must say that it cannot tell.

The NVML asked here is the stand-in, except in the tests marked `gpu`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outboard.backends import witness
from outboard.backends.witness import Sighting
from standin_gpu import (
    M0,
    ONE_MODULE,
    TWO,
    U0,
    U1,
    WITH_MIG,
    add_context,
    bare_environment,
    each_python,
    run_child,
    standin_environment,
)

ASK = """
import json, os
from dataclasses import asdict
from outboard.backends import witness
{before}
print(json.dumps(asdict(witness.look({pid}, has_context={has_context}))))
"""
# As in a container: this process is not in the machine's first pid namespace.
IN_A_CONTAINER = "witness._FIRST_PID_NAMESPACE = 0"

# A worker with contexts on the ordinals of its command line; with "child" they are its child's.
WORKER = """
import os, subprocess, sys
from outboard.ipc import cuda_driver as d
if sys.argv[1:2] == ["child"]:
    sys.exit(subprocess.call([sys.executable, "-c", os.environ["WORKER"]] + sys.argv[2:]))
d.init()
for ordinal in sys.argv[1:]:
    d.set_current(d.retain_primary(int(ordinal)))
print("ready", flush=True)
sys.stdin.readline()
"""


@contextmanager
def worker(
    environment: dict[str, str], *arguments: str, python: str = sys.executable
) -> Generator[int, None, None]:
    """The pid of a worker that has its contexts by now."""
    with subprocess.Popen(
        [python, "-c", WORKER, *arguments],
        env={**environment, "WORKER": WORKER},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "ready"
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(10)


def ask(
    environment: dict[str, str], pid: int | str, has_context: bool = True, before: str = ""
) -> Sighting:
    """What a witness in a process of its own says of `pid` (an expression evaluated there)."""
    code = ASK.format(before=before, pid=pid, has_context=has_context)
    answer: dict[str, Any] = json.loads(run_child(ONE_MODULE + code, environment))
    return Sighting(answer["observed"], answer["why"], tuple(answer["gpus"]))


# -- what is seen --------------------------------------------------------------------------------


@each_python
def test_a_worker_is_seen_on_the_gpu_that_is_cuda_0_behind_its_mask(
    tmp_path: Path, python: str
) -> None:
    environment = standin_environment(TWO, tmp_path)
    with worker({**environment, "CUDA_VISIBLE_DEVICES": U1}, "0", python=python) as pid:
        assert ask(environment, pid) == Sighting(True, "", (U1,))


def test_a_context_on_a_second_gpu_is_seen(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    with worker(environment, "0", "1") as pid:
        assert ask(environment, pid).gpus == (U0, U1)


def test_a_context_of_the_workers_child_is_the_workers(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    with worker(environment, "child", "1") as pid:
        assert ask(environment, pid).gpus == (U1,)


def test_a_helper_whose_parent_died_is_still_in_the_workers_session(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    shell = "(sleep 30 & echo $!) ; read gone"
    leader = subprocess.Popen(
        ["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdin is not None and leader.stdout is not None
    orphan = int(leader.stdout.readline())
    try:
        add_context(tmp_path, orphan, U1)
        assert ask(environment, leader.pid).gpus == (U1,)
    finally:
        os.kill(orphan, 9)
        leader.stdin.close()
        leader.wait(10)
        leader.stdout.close()


@pytest.mark.parametrize("kind", ["graphics", "mps"])
def test_a_context_that_is_not_for_computing_is_seen_too(tmp_path: Path, kind: str) -> None:
    add_context(tmp_path, os.getpid(), U0, kind)
    assert ask(standin_environment(TWO, tmp_path), os.getpid()).gpus == (U0,)


def test_other_peoples_processes_are_not_the_workers(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    with worker(environment, "0") as pid:
        add_context(tmp_path, os.getpid(), U1)
        assert ask(environment, pid).gpus == (U0,)


def test_a_worker_on_a_mig_instance_is_seen_on_the_instance(tmp_path: Path) -> None:
    environment = standin_environment(WITH_MIG, tmp_path)
    with worker({**environment, "CUDA_VISIBLE_DEVICES": M0}, "0") as pid:
        assert ask(environment, pid).gpus == (M0,)


def test_a_worker_planned_on_the_cpu_is_observed_on_no_gpu(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    assert ask(environment, os.getpid(), has_context=False) == Sighting(True, "", ())


# -- when it cannot tell -------------------------------------------------------------------------


def test_without_nvml_the_worker_is_unobserved() -> None:
    if witness.inventory()[0]:
        pytest.skip("this machine has an NVML; the case needs one without")
    sighting = ask(bare_environment(), os.getpid())
    assert (sighting.observed, sighting.why[:20]) == (False, "NVML does not start:")


def test_without_a_loaded_driver_the_worker_is_unobserved(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path, OUTBOARD_STANDIN_NVML_INIT="9")
    assert ask(environment, os.getpid()).why == "NVML does not start: Driver Not Loaded"


def test_an_nvml_that_lists_nobody_although_the_worker_has_a_context_is_blind(
    tmp_path: Path,
) -> None:
    sighting = ask(standin_environment(TWO, tmp_path), os.getpid(), has_context=True)
    assert not sighting.observed
    assert "lists no process of the worker" in sighting.why


@pytest.mark.parametrize(("code", "words"), [("3", "Not Supported"), ("4", "Permissions")])
def test_lists_that_cannot_be_read_leave_the_worker_unobserved(
    tmp_path: Path, code: str, words: str
) -> None:
    environment = standin_environment(TWO, tmp_path, OUTBOARD_STANDIN_NVML_LISTS=code)
    sighting = ask(environment, os.getpid(), has_context=False)
    assert not sighting.observed
    assert U0 in sighting.why and words in sighting.why


def test_in_a_container_pids_of_the_host_are_not_taken_for_ours(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path, OUTBOARD_STANDIN_NVML_PIDS="8000000")
    with worker(environment, "1") as pid:
        sighting = ask(environment, pid, before=IN_A_CONTAINER)
    assert (sighting.observed, sighting.gpus) == (False, ())
    assert "which does not exist here" in sighting.why


def test_in_a_container_a_coinciding_pid_is_not_trusted_beside_a_stranger(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path, OUTBOARD_STANDIN_NVML_PIDS="8000000")
    add_context(tmp_path, 1, U0)
    coinciding = "8000001"
    assert ask(environment, coinciding, before=IN_A_CONTAINER).gpus == ()


def test_in_a_container_an_empty_list_is_no_proof_of_absence(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    sighting = ask(environment, os.getpid(), has_context=False, before=IN_A_CONTAINER)
    assert not sighting.observed
    assert "neither the worker nor this process" in sighting.why


def test_in_a_container_the_learners_own_entry_calibrates_the_lists(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    learner = f"""
{IN_A_CONTAINER}
from outboard.ipc import cuda_driver
cuda_driver.init(); cuda_driver.retain_primary(0)
"""
    with worker(environment) as pid:
        sighting = ask(environment, pid, has_context=False, before=learner)
    assert sighting == Sighting(True, "", ())


def test_in_a_container_that_shares_the_hosts_pids_the_worker_is_observed(tmp_path: Path) -> None:
    environment = standin_environment(TWO, tmp_path)
    with worker(environment, "1") as pid:
        sighting = ask(environment, pid, before=IN_A_CONTAINER)
    assert sighting == Sighting(True, "", (U1,))


def test_under_wsl_the_worker_is_unobserved(tmp_path: Path) -> None:
    add_context(tmp_path, os.getpid(), U0)
    sighting = ask(
        standin_environment(TWO, tmp_path), os.getpid(), before='witness._WSL_GPU = "/dev/null"'
    )
    assert sighting == Sighting(False, "WSL: NVML has no process lists there")


# -- the other questions -------------------------------------------------------------------------


def test_used_memory_rises_on_the_gpu_of_an_allocation_and_on_no_other(tmp_path: Path) -> None:
    code = """
from outboard.backends import witness
from outboard.ipc import cuda_driver as d, cuda_memory as m
before = witness.used_bytes_by_gpu()
d.init(); d.set_current(d.retain_primary(1)); m.allocate(1 << 20)
after = witness.used_bytes_by_gpu()
print({uuid: after[uuid] - before[uuid] for uuid in after})
"""
    shown = run_child(ONE_MODULE + code, standin_environment(TWO, tmp_path))
    assert shown == str({U0: 0, U1: 1 << 20})


def test_the_inventory_is_the_whole_machine_whatever_the_mask(tmp_path: Path) -> None:
    code = """
from outboard.backends import witness
for gpu in witness.inventory()[0]: print(gpu.ordinal, gpu.uuid, gpu.pci)
"""
    shown = run_child(
        ONE_MODULE + code, standin_environment(TWO, tmp_path, CUDA_VISIBLE_DEVICES="")
    )
    assert shown.splitlines() == [f"0 {U0} 00000000:00:06.0", f"1 {U1} 00000000:00:07.0"]


def test_the_pids_of_every_gpu_are_listed(tmp_path: Path) -> None:
    add_context(tmp_path, os.getpid(), U1, "graphics")
    code = "from outboard.backends import witness; print(witness.pids_by_gpu())"
    shown = run_child(ONE_MODULE + code, standin_environment(TWO, tmp_path))
    assert shown == str({U0: frozenset(), U1: frozenset({os.getpid()})})


# -- real GPUs -----------------------------------------------------------------------------------


@pytest.mark.gpu
@each_python
def test_a_real_worker_is_seen_on_its_gpu_and_on_no_other(python: str) -> None:
    gpus, why = witness.inventory()
    if not gpus:
        pytest.skip(f"needs a real GPU: {why}")
    uuid = gpus[-1].uuid
    with worker(bare_environment(CUDA_VISIBLE_DEVICES=uuid), "0", python=python) as pid:
        sighting = witness.look(pid, has_context=True)
    if not sighting.observed:
        pytest.skip(f"needs an NVML whose pids are ours: {sighting.why}")
    assert sighting.gpus == (uuid,)
