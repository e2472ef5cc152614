"""What cannot work is named, with what to do, and leaves nothing behind (the guards see to that)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hosts import host_environment
from outboard.backends import (
    CustomBackend,
    FakeBackend,
    FakeCfg,
    MuJoCoBackend,
    OutboardError,
    SceneError,
    UsageError,
    WorkerLaunchError,
    memory,
)
from outboard.backends.memory import Room

Fake = Callable[..., FakeBackend]
Custom = Callable[..., CustomBackend]
ONES = np.ones((3, 4), np.float32)


def launch_error(python: str | Path) -> str:
    with pytest.raises(WorkerLaunchError) as caught:
        FakeBackend(device="cpu", num_envs=1, worker_python=python)
    return caught.value.message


# -- the interpreter ------------------------------------------------------------------------------


def test_an_interpreter_that_does_not_exist_is_named() -> None:
    assert launch_error("/nowhere/python3.8") == (
        "/nowhere/python3.8 does not exist: worker_python= (or --worker-python) takes the path of a "
        "Python interpreter"
    )


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_interpreter_that_is_not_executable_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("") if kind == "file" else path.mkdir()
    assert launch_error(path).startswith(f"{path} is not executable: worker_python= (or")


@pytest.mark.parametrize("program", ["true", "false", "cat"])
def test_a_program_that_is_no_interpreter_is_named(program: str) -> None:
    found = shutil.which(program)
    assert found is not None
    assert launch_error(found).startswith(f"{found} is no Python interpreter: ")


def test_a_file_that_the_kernel_cannot_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_bytes(b"\0\1\2 no program")
    path.chmod(0o755)
    text = f"cannot start {path}: Exec format error. Is it the path of a Python interpreter?"
    assert launch_error(path) == text


def test_a_script_whose_interpreter_is_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("#!/nowhere/python3\n")
    path.chmod(0o755)
    assert launch_error(path).startswith(f"cannot start {path}: No such file or directory")


def test_a_crash_before_the_first_word_shows_the_log(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *__main__*) echo my library is missing >&2; exit 127;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    with pytest.raises(WorkerLaunchError) as caught:
        FakeBackend(device="cpu", num_envs=1, worker_python=path)
    assert caught.value.message == "the worker ended before it said a word: exit code 127"
    report = caught.value.report
    assert report is not None
    assert report.log_tail == ("my library is missing",)
    assert (report.phase, report.interpreter) == ("SPAWNED", str(path))
    assert "    | my library is missing" in str(caught.value)


def old_pythons() -> list[str]:
    """Pythons older than 3.8 on PATH that really run."""
    found: list[str] = []
    for name in ("python2.7", "python3.5", "python3.6", "python3.7"):
        path = shutil.which(name)
        if (
            path
            and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
        ):
            found.append(path)
    return found


def test_a_python_that_is_too_old_is_named_with_its_version() -> None:
    pythons = old_pythons()
    if not pythons:
        pytest.skip("no Python 2.7 or 3.5 to 3.7 on PATH")
    for python in pythons:
        version = os.path.basename(python).removeprefix("python")
        said = launch_error(python)
        assert said.startswith(f"{python} is Python {version}.")
        assert said.endswith("a worker needs 3.8 or newer")


def test_an_old_python_is_told_by_what_it_says_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *__main__*) exit 1;; esac\n'
        """echo '{"version": [3, 6, 9], "prefix": "", "found": {}, "missing": {}}'\n"""
    )
    path.chmod(0o755)
    assert launch_error(path) == f"{path} is Python 3.6.9; a worker needs 3.8 or newer"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment without any package, of this Python."""
    folder = tmp_path_factory.mktemp("bare")
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return str(folder / "bin" / "python")


def test_an_interpreter_without_packages_is_told_the_one_line_to_run(bare_python: str) -> None:
    assert launch_error(bare_python) == (
        f"{bare_python} lacks numpy, msgpack, posix_ipc. "
        f"Run: outboard setup worker --python {bare_python}\n"
        "(it fills a folder of Outboard's; that environment itself is not written to)"
    )


# -- scene, fields, arrays ------------------------------------------------------------------------


@pytest.mark.parametrize("scene", ["nowhere.xml", "/nowhere/scene.xml", "humanoid30"])
def test_a_scene_that_does_not_exist_is_named(scene: str) -> None:
    with pytest.raises(SceneError, match=f"scene '{scene}' is neither a file nor one of ours"):
        MuJoCoBackend(device="cpu", num_envs=1, scene=scene)


def test_a_scene_that_does_not_compile_is_the_models_fault(tmp_path: Path) -> None:
    path = tmp_path / "broken.xml"
    path.write_text("<mujoco><worldbody><body><geom size='-1'/></body></worldbody></mujoco>")
    with pytest.raises(SceneError) as caught:
        MuJoCoBackend(device="cpu", num_envs=1, scene=path)
    assert "broken.xml" in str(caught.value)


@pytest.fixture(scope="module")
def shared(private_folders: object) -> Iterator[FakeBackend]:
    with FakeBackend(device="cpu", num_envs=3) as backend:
        yield backend


def with_value(value: float, *environments: int) -> Any:
    ctrl = ONES.copy()
    ctrl[list(environments), 1] = value
    return ctrl


@pytest.mark.parametrize(
    ("ctrl", "text"),
    [
        (np.ones((3, 5), np.float32), r"ctrl has shape \(3, 5\); .*\(num_envs, nu\) = \(3, 4\)"),
        (np.ones(4, np.float32), r"ctrl has shape \(4,\)"),
        (1.0, r"ctrl has shape \(\)"),
        ([[1, 2], [3]], "ctrl is no array of numbers"),
        (np.ones((3, 4), np.complex64), "ctrl has dtype complex64; float32 belongs"),
        (np.ones((3, 4), bool), "ctrl has dtype bool; float32 belongs"),
        ([["a"] * 4] * 3, "ctrl has dtype <U1; float32 belongs"),
        ([[None] * 4] * 3, "ctrl has dtype object; float32 belongs"),
        (with_value(np.nan, 1), "ctrl is NaN or infinite in environments 1; nothing was sent"),
        (
            with_value(np.inf, 0, 2),
            "ctrl is NaN or infinite in environments 0, 2; nothing was sent",
        ),
        (with_value(-np.inf, 2), "ctrl is NaN or infinite in environments 2; nothing was sent"),
        (with_value(np.nan, 1).astype(np.float64), "infinite in environments 1; nothing was sent"),
        ([[1, 1, 1, float("nan")]] * 3, "infinite in environments 0, 1, 2; nothing was sent"),
    ],
)
def test_a_bad_ctrl_is_refused_before_anything_is_sent(
    shared: FakeBackend, ctrl: Any, text: str
) -> None:
    commands = shared.timings.commands
    with pytest.raises(UsageError, match=text):
        shared.step(ctrl)
    assert shared.timings.commands == commands
    shared.step(ONES)  # and the backend goes on


def test_infinities_of_both_signs_are_refused(shared: FakeBackend) -> None:
    ctrl = with_value(np.inf, 0)
    ctrl[1, 0] = -np.inf
    with pytest.raises(UsageError, match="environments 0, 1; nothing was sent"):
        shared.step(ctrl)


def test_large_finite_ctrl_passes(shared: FakeBackend) -> None:
    shared.step(np.full((3, 4), np.finfo(np.float32).max, np.float32))
    shared.reset()


def test_a_bad_value_written_in_place_is_refused_too(fake: Fake) -> None:
    sim = fake()
    sim.ctrl_view[2, 3] = np.nan
    with pytest.raises(UsageError, match="infinite in environments 2; nothing was sent"):
        sim.step()


@pytest.mark.parametrize("num_envs", [4096])
def test_one_bad_value_among_many_is_found(fake: Fake, num_envs: int) -> None:
    sim = fake(num_envs=num_envs)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        ctrl = np.ones((num_envs, 4), np.float32)
        ctrl[1234, 2] = value
        with pytest.raises(UsageError, match="infinite in environments 1234; nothing was sent"):
            sim.step(ctrl)


BAD_ENVS = [
    ([3], "environment 3 is outside 0 to 2"),
    ([-1], "environment -1 is outside 0 to 2"),
    ([0, 1, 0], "an environment is named twice"),
    ([0.0], "ids .* or a bool mask, not float64"),
    (["0"], "ids .* or a bool mask, not <U1"),
    ([[0], [1]], r"ids .* or a bool mask, not int64 \(2, 1\)"),
    (np.ones(4, bool), r"a mask has shape \(3,\), this one \(4,\)"),
    (np.ones((3, 1), bool), r"a mask has shape \(3,\), this one \(3, 1\)"),
    (True, r"a mask has shape \(3,\), this one \(\)"),
    ([0, None], "ids .* or a bool mask, not object"),
    ([[0, 1], [2]], "envs is no array of numbers"),
    (np.array([2**40]), f"environment {2**40} is outside 0 to 2"),
    (np.array([2**63], np.uint64), "is outside 0 to 2"),
]


@pytest.mark.parametrize(("envs", "text"), BAD_ENVS)
@pytest.mark.parametrize("call", ["reset", "step", "set_state"])
def test_bad_environments_are_refused(shared: FakeBackend, call: str, envs: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        if call == "reset":
            shared.reset(envs)
        elif call == "step":
            shared.step(ONES, reset=envs)
        else:
            shared.set_state(envs, ONES[0], ONES[0])
    shared.step(ONES)


@pytest.mark.parametrize(
    ("qpos", "qvel", "text"),
    [
        (ONES, ONES[:2], r"qpos has shape \(3, 4\); \(2, 4\) belongs"),
        (ONES[:2], ONES[:2, :3], r"qvel has shape \(2, 3\); \(2, 4\) belongs"),
        (ONES[:2] * np.nan, ONES[:2], "qpos holds NaN or infinity"),
        (ONES[:2], ONES[:2] > 0, "qvel has dtype bool; float32 belongs"),
        ([[1], [1, 2]], ONES[:2], "qpos is no array of numbers"),
    ],
)
def test_a_bad_state_is_refused(shared: FakeBackend, qpos: Any, qvel: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shared.set_state([0, 1], qpos, qvel)
    shared.step(ONES)


# -- memory ---------------------------------------------------------------------------------------

MB = 1 << 20


def test_a_block_that_fits_passes() -> None:
    memory.require(100 * MB, [Room("this machine", 1000 * MB), Room("memory cgroup /a", 200 * MB)])


@pytest.mark.parametrize("where", ["this machine", "memory cgroup /sys/fs/cgroup/job"])
def test_too_little_memory_is_said_in_bytes_needed_and_free(where: str) -> None:
    rooms = [Room("elsewhere", 10_000 * MB), Room(where, 100 * MB)]
    with pytest.raises(UsageError) as caught:
        memory.require(90 * MB, rooms)
    assert caught.value.message.startswith(
        f"the shared block needs 94,371,840 bytes and {where} has 104,857,600 free: use fewer"
    )


def test_too_little_memory_is_seen_before_it_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "rooms", lambda: [Room("this machine", 65 * MB)])
    with pytest.raises(
        UsageError, match=r"needs [0-9,]+ bytes and this machine has 68,157,440 free"
    ):
        FakeBackend(device="cpu", num_envs=100_000)


def test_this_machine_has_a_reading() -> None:
    assert any(room.where == "this machine" and room.free_bytes > 0 for room in memory.rooms())


def test_with_a_shm_of_one_megabyte_everything_still_works() -> None:
    """A container's /dev/shm; the block of 16,384 environments alone has 2 MB."""
    script = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "
        f"{sys.executable} -c '"
        "import numpy as np\n"
        "from outboard.backends import FakeBackend\n"
        'sims = [FakeBackend(device="cpu", num_envs=16384, banks=2) for _ in range(3)]\n'
        "[sim.step(np.ones((16384, 4), np.float32)) for sim in sims]\n"
        "sims[0].restart()\n"
        "[sim.close() for sim in sims]\n"
        'print("well")\''
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env=host_environment(), capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    if "Operation not permitted" in done.stderr or "must be superuser" in done.stderr:
        pytest.skip(f"a /dev/shm of 1 MB needs the right to mount: {done.stderr.strip()}")
    assert done.stdout == "well\n", done.stderr


# -- a worker that floods, an environment that would move it ---------------------------------------


@pytest.mark.parametrize("at", ["build", "step"])
def test_a_worker_that_prints_ten_megabytes_without_a_newline_goes_on(
    fake: Fake, at: str, worker_python: str
) -> None:
    sim = fake(cfg=FakeCfg(fault="flood", fault_at=at), worker_python=worker_python)
    started = time.monotonic()
    sim.step(ONES)
    sim.step(ONES)
    assert time.monotonic() - started < 5.0
    assert os.path.getsize(sim.report["log_path"]) >= 10 << 20


def test_the_log_of_a_flooding_worker_is_cut_in_the_error(custom: Custom) -> None:
    sim = custom("""
def step(self, bank):
    os.write(1, b"x" * (10 << 20))
    raise RuntimeError("drowned")
""")
    with pytest.raises(OutboardError, match="drowned") as caught:
        sim.step(ONES)
    assert caught.value.report is not None
    assert all(len(line) <= 500 for line in caught.value.report.log_tail)
    assert len(str(caught.value)) < 50_000


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_the_device_cannot_be_moved_by_env(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} is decided by device=, not by env="):
        FakeBackend(device="cpu", num_envs=1, env={name: "0"})
