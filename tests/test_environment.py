"""What of the host's environment reaches a worker, and what a worker's surroundings can do to it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outboard.backends import CustomBackend, DeviceMismatchError, FakeBackend, process
from outboard.backends.visibility import MASK, ORDER

Custom = Callable[..., CustomBackend]

# A simulator that writes down the environment, the path and the descriptors it really has.
CONFESSION = """
def build(self, init, progress):
    import json
    with open(init.options["out"], "w") as out:
        json.dump({"env": dict(os.environ), "path": sys.path, "cwd": os.getcwd(),
                   "fds": sorted(map(int, os.listdir("/proc/self/fd")))}, out)
    return super().build(init, progress)
"""

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "GITHUB_TOKEN": "hunter2",
    "WANDB_API_KEY": "hunter2",
    "SSH_AUTH_SOCK": "/run/agent",
}
LAUNCHER = {
    name: "3"
    for name in (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
        *("MASTER_PORT", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK"),
        *("TORCHELASTIC_RUN_ID", "RAY_JOB_ID", "PMI_RANK", "NCCL_DEBUG"),
    )
}
PYTHON = {
    "PYTHONPATH": "/nowhere",
    "PYTHONHOME": "/nowhere",
    "PYTHONSTARTUP": "/nowhere",
    "PYTHONDONTWRITEBYTECODE": "1",
    "VIRTUAL_ENV": "/nowhere",
    "CONDA_PREFIX": "/nowhere",
}
LOADER = {"LD_PRELOAD": "", "LD_LIBRARY_PATH": "/nowhere", "LD_AUDIT": ""}


@pytest.fixture
def confess(custom: Custom, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def open_and_read(**arguments: Any) -> dict[str, Any]:
        from outboard.backends import CustomCfg

        out = tmp_path / "confession.json"
        custom(CONFESSION, cfg=CustomCfg({"out": str(out)}), **arguments)
        return json.loads(out.read_text())

    return open_and_read


@pytest.mark.parametrize(
    "variables",
    [SECRETS, LAUNCHER, PYTHON, LOADER],
    ids=["secrets", "launcher", "python", "loader"],
)
def test_what_is_not_on_the_list_does_not_arrive(
    confess: Callable[..., dict[str, Any]],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    worker_python: str,
) -> None:
    if variables is LAUNCHER:  # the host itself reads these, and refuses what contradicts itself
        variables = {name: "1" for name in variables} | {"RANK": "0", "LOCAL_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    seen = confess(worker_python=worker_python)["env"]
    assert not set(variables) & set(seen)


def test_exactly_the_list_arrives(
    confess: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("TZ", "UTC")
    seen = confess()["env"]
    allowed = {n for n in os.environ if n in process.ALLOWED or n.startswith("LC_")}
    assert set(seen) - {"LC_CTYPE"} == (allowed | {MASK, ORDER}) - {"LC_CTYPE"}
    assert all(seen[name] == os.environ[name] for name in allowed)
    assert seen[MASK] == ""


def test_env_adds_variables_and_may_override_the_list(
    confess: Callable[..., dict[str, Any]],
) -> None:
    seen = confess(env={"MY_SETTING": "a=b c", "TZ": "Asia/Tokyo"})["env"]
    assert (seen["MY_SETTING"], seen["TZ"]) == ("a=b c", "Asia/Tokyo")


def test_no_descriptor_of_the_host_arrives(confess: Callable[..., dict[str, Any]]) -> None:
    """0, 1, 2, the control socket, and what the worker itself opened since; nothing inheritable."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        fds = confess()["fds"]
    finally:
        os.close(read)
        os.close(write)
    assert write not in fds or write < 10  # a number that the worker gave out again itself
    assert len(fds) <= 8


def test_nothing_of_the_host_is_on_the_workers_path(
    confess: Callable[..., dict[str, Any]], python38: str
) -> None:
    path = confess(worker_python=python38)["path"]
    here = os.path.dirname(os.path.dirname(os.path.abspath(process.__file__)))
    host_site = os.path.join(sys.prefix, "lib")
    assert not [entry for entry in path if entry.startswith((here + "/workers", host_site))]


def test_the_hosts_environment_is_unchanged_by_a_backend() -> None:
    before = dict(os.environ)
    with FakeBackend(device="cpu", num_envs=1, env={"ADDED": "1"}) as sim:
        sim.step([[0.0] * 4])
        assert dict(os.environ) == before
    assert dict(os.environ) == before


def test_a_broken_module_on_the_hosts_pythonpath_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_python: str
) -> None:
    for name in ("platform", "numpy", "msgpack", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not yours')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with FakeBackend(device="cpu", num_envs=1, worker_python=worker_python) as sim:
        sim.step([[0.0] * 4])


def test_a_broken_module_in_the_working_directory_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "platform.py").write_text("raise RuntimeError('not yours')\n")
    monkeypatch.chdir(tmp_path)
    with FakeBackend(device="cpu", num_envs=1) as sim:
        sim.step([[0.0] * 4])


@pytest.mark.parametrize(("command", "seen"), [("export CUDA_VISIBLE_DEVICES=0,1", "'0,1'"),
                                               ("unset CUDA_VISIBLE_DEVICES", "None")])  # fmt: skip
def test_a_mask_that_a_wrapper_changed_is_caught_with_both_values(
    command: str, seen: str, tmp_path: Path
) -> None:
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\n{command}\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    with pytest.raises(DeviceMismatchError) as caught:
        FakeBackend(device="cpu", num_envs=1, worker_python=path)
    text = f"CUDA_VISIBLE_DEVICES was sent as '' and arrived as {seen}: something between"
    assert caught.value.message.startswith(text)
    assert caught.value.report is not None
    assert caught.value.report.phase == "HELLO"


def test_a_simulator_file_does_not_shadow_what_it_imports(tmp_path: Path) -> None:
    """Its folder comes last: a neighbour called like a library is not taken for it."""
    (tmp_path / "msgpack.py").write_text("raise RuntimeError('not yours')\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not yours')\n")
    (tmp_path / "my_helper.py").write_text("NU = 2\n")
    (tmp_path / "sim.py").write_text(
        "import json, msgpack, my_helper\n"
        "from outboard.workers.fake_worker import FakeSimulator\n"
        "class Sim(FakeSimulator):\n"
        "    engine_version = str(my_helper.NU)\n"
    )
    with CustomBackend(simulator=f"{tmp_path / 'sim.py'}:Sim", device="cpu", num_envs=1) as sim:
        assert sim.report["engine"] == "fake 2"
        assert np.isfinite(sim.step([[0.0] * 4]).qpos).all()


@pytest.mark.parametrize("runtime", ["missing", "foreign"])
def test_a_log_folder_that_cannot_be_private_is_not_used(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runtime"
    if runtime == "foreign":
        (folder / "outboard").mkdir(parents=True, mode=0o777)
        (folder / "outboard").chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with FakeBackend(device="cpu", num_envs=1) as sim:
        assert sim.report["log_path"] == ""


def test_a_log_is_private() -> None:
    with FakeBackend(device="cpu", num_envs=1) as sim:
        path = Path(sim.report["log_path"])
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
