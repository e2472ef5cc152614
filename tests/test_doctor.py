"""`outboard doctor`: what it finds, what it calls a reason to stop, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outboard.backends import examination
from outboard.backends.examination import GpuFacts, gpu_problems
from outboard.backends.inventory import HostGpu
from standin_gpu import TWO, U0, U1, standin_environment

ROOT = Path(__file__).resolve().parent.parent


def doctor(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outboard.backends.cli", "doctor", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    logs = tmp_path / "run"
    logs.mkdir(mode=0o700)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(ROOT / ".src"),
        "XDG_RUNTIME_DIR": str(logs),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }


def test_one_screen_that_says_what_is_here(env: dict[str, str]) -> None:
    done = doctor(env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    for word in (
        "Python",
        "/dev/shm",
        "NVML",
        "torch",
        "mujoco",
        "fake",
        "nothing here would stop",
    ):
        assert word in done.stdout


def test_json_holds_the_same_facts(env: dict[str, str]) -> None:
    done = doctor(env, "--json")
    answer = json.loads(done.stdout)
    assert answer["ok"] is True and done.returncode == 0
    simulators = {one["name"]: one for one in answer["simulators"]}
    assert simulators["mujoco"]["ready"] and simulators["mujoco"]["found"]["mujoco"]
    assert answer["shm_bytes"] > 0 and answer["nofile"] > answer["nofile_used"] > 0
    assert all(room["free_bytes"] > 0 for room in answer["memory"])


def test_an_interpreter_that_lacks_packages_is_named_with_the_line_that_helps(
    env: dict[str, str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = str(bare / "bin" / "python")
    done = doctor(env, "--worker-python", python)
    assert done.returncode == 1
    assert "not ready" in done.stdout and "stops a run" in done.stdout
    assert f"-> outboard setup worker --python {python}" in done.stdout


def test_few_descriptors_stop_a_run(env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "outboard.backends.cli", "doctor"]
    limited = ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *command]
    done = subprocess.run(limited, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "only 40 file descriptors" in done.stdout and "ulimit -n 1024" in done.stdout


# -- locks of torch's extension builds -------------------------------------------------------------


def lock_in(folder: Path, age_s: float) -> Path:
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.touch()
    then_s = time.time() - age_s
    os.utime(lock, (then_s, then_s))
    return lock


def test_a_stale_lock_is_worth_knowing_and_named_with_its_age(
    env: dict[str, str], tmp_path: Path
) -> None:
    lock = lock_in(tmp_path / "extensions" / "py38_cu121" / "gymtorch", 7200)
    done = doctor(env)
    assert done.returncode == 0
    assert f"{lock} is 120 minutes old" in done.stdout and f"-> rm {lock}" in done.stdout


def test_a_fresh_lock_or_one_with_a_builder_is_not_stale(tmp_path: Path) -> None:
    lock_in(tmp_path / "fresh", 5)
    held = lock_in(tmp_path / "held", 7200)
    builder = subprocess.Popen(["sleep", "30"], cwd=held.parent)
    try:
        assert examination.stale_locks(tmp_path) == ()
    finally:
        builder.kill()
        builder.wait()
    assert [lock.path for lock in examination.stale_locks(tmp_path)] == [str(held)]


# -- GPUs, by three witnesses (stand-ins: no GPU is needed or proven here) -------------------------

BOTH = GpuFacts(
    driver=(HostGpu(U0), HostGpu(U1)), driver_silent="",
    nvml=((U0, "a"), (U1, "b")), nvml_silent="",
    torch="2.13.0", torch_cuda="13.0", torch_gpus=((U0, "a"), (U1, "b")), torch_silent="",
    visible=(U0, U1), mask="", mask_refused="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "stops", "words"),
    [
        ({"torch_gpus": ((U1, "b"), (U0, "a"))}, False, "torch sees 2 GPUs"),
        ({"torch_gpus": ()}, False, r"torch sees 0 GPUs \(none\) where the driver shows 2"),
        ({"torch_cuda": ""}, False, "a build without CUDA"),
        ({"torch_silent": "cannot be imported here"}, False, "cannot be imported"),
        ({"nvml": ((U0, "a"),)}, False, f"disagree about {U1}"),
        ({"nvml": (), "nvml_silent": "no library"}, False, "no outside witness: no library"),
        ({"driver": (), "driver_silent": "803"}, True, "CUDA cannot use any: 803"),
        ({"mask_refused": "0,,1 is unclear"}, True, "0,,1 is unclear"),
    ],
)
def test_witnesses_that_disagree_are_reported(
    change: dict[str, Any], stops: bool, words: str
) -> None:
    (problem,) = gpu_problems(dataclasses.replace(BOTH, **change))
    assert problem.stops is stops
    assert re.search(words, problem.what)


def test_witnesses_that_agree_are_no_problem() -> None:
    assert not list(gpu_problems(BOTH))
    no_gpu = dataclasses.replace(
        BOTH, driver=(), driver_silent="no libcuda", nvml=(), nvml_silent="no NVML",
        torch_gpus=(), visible=(),
    )  # fmt: skip
    assert not list(gpu_problems(no_gpu))


def test_the_screen_lists_every_gpu_and_what_it_is_called_here(
    env: dict[str, str], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    mask = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    done = doctor(standin_environment(TWO, state, **env, **mask))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        line.split()
        for line in done.stdout.splitlines()
        if "GPU-ce08" in line or "GPU-d11f" in line
    ]
    rows = [row for row in rows if len(row) > 2]
    (first,) = [row for row in rows if row[1] == U0[:12]]
    (second,) = [row for row in rows if row[1] == U1[:12]]
    assert first[0] == "0" and "cuda:0" not in first
    assert second[0] == "1" and "cuda:0" in second


def test_a_mask_that_nobody_can_read_stops_a_run(env: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    done = doctor(standin_environment(TWO, state, **env, CUDA_VISIBLE_DEVICES="0,,1"))
    assert done.returncode == 1
    assert "stops a run" in done.stdout and "0,,1" in done.stdout
