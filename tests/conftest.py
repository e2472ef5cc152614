"""Fixtures of the whole suite: the leak guards around every test, and the oldest worker Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leak_guards import logs_may_stay, nothing_left_behind, private_folders
from outboard.backends import CustomBackend, FakeBackend, FakeCfg

__all__ = ["logs_may_stay", "nothing_left_behind", "private_folders"]

ROOT = Path(__file__).resolve().parent.parent


def missing(what: str) -> None:
    """Skip, or fail where everything must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"with CI=true this may not be missing: {what}", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def python38() -> str:
    """The interpreter of a Python 3.8 that has what a worker needs, and nothing of the host's."""
    default = ROOT / ".venv-worker38" / "bin" / "python"
    path = os.environ.get("OUTBOARD_PYTHON38") or str(default)
    if not os.access(path, os.X_OK):
        missing(f"no Python 3.8 worker environment at {path}; `make test` makes one, or set "
                "OUTBOARD_PYTHON38")  # fmt: skip
    return path


@pytest.fixture(scope="session")
def mjwarp_python(private_folders: Path) -> Iterator[str]:
    """The interpreter of MuJoCo-Warp's own environment; its compiled kernels stay from run to run."""
    default = ROOT / ".venv-mjwarp" / "bin" / "python"
    path = os.environ.get("OUTBOARD_MJWARP_PYTHON") or str(default)
    if not os.access(path, os.X_OK):
        missing(f"no MuJoCo-Warp environment at {path}; `make test` makes one, or set "
                "OUTBOARD_MJWARP_PYTHON")  # fmt: skip
    kernels = os.environ.get("WARP_CACHE_PATH") or str(ROOT / ".cache" / "warp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WARP_CACHE_PATH", kernels)
        yield path


@pytest.fixture(params=["this Python", "Python 3.8"])
def worker_python(request: pytest.FixtureRequest) -> str:
    """The worker's interpreter: the host's own, and the oldest."""
    if request.param == "this Python":
        return sys.executable
    return request.getfixturevalue("python38")


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeBackend]]:
    """Opens `fake` backends, and closes at the end what the test did not."""
    opened: list[FakeBackend] = []

    def open_one(num_envs: int = 3, cfg: FakeCfg | None = None, **arguments: Any) -> FakeBackend:
        backend = FakeBackend(device="cpu", num_envs=num_envs, cfg=cfg, **arguments)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def custom(tmp_path: Path) -> Iterator[Callable[..., CustomBackend]]:
    """Opens a simulator whose methods are given as text, on top of `fake`'s; closes it at the end."""
    opened: list[CustomBackend] = []

    def open_one(methods: str, num_envs: int = 3, **arguments: Any) -> CustomBackend:
        path = tmp_path / "custom_simulator.py"
        path.write_text(custom_source(methods))
        backend = CustomBackend(
            simulator=f"{path}:Custom", device="cpu", num_envs=num_envs, **arguments
        )
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


def custom_source(methods: str) -> str:
    """A simulator file: `fake` with some methods replaced."""
    body = "\n".join("    " + line for line in methods.strip("\n").splitlines())
    return (
        "import ctypes, os, signal, sys, time\n"
        "import numpy as np\n"
        "from outboard.ipc.device import DeviceReport, cpu_report\n"
        "from outboard.workers.fake_worker import FakeSimulator\n\n"
        f"class Custom(FakeSimulator):\n{body}\n"
    )
