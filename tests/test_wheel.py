"""What a user installs: the wheel, in an environment that has never seen this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hosts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DRIVE = """
import sys
import outboard.ipc
from outboard.backends import FakeBackend, MuJoCoBackend
assert not hasattr(sys.modules["outboard"], "__file__") or sys.modules["outboard"].__file__ is None
print(outboard.ipc.__path__[0])
with FakeBackend(device="cpu", num_envs=2, worker_python=sys.argv[1]) as sim:
    sim.step([[1.0] * 4] * 2)
    print(sim.report["python"])
with MuJoCoBackend(device="cpu", scene="humanoid29", num_envs=2, worker_python=sys.argv[1]) as sim:
    print(sim.step(sim.ctrl_view).qpos.shape[0], sim.report["engine"])
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build folder, and takes what lies in an old one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ipc", "workers", "backends"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("outboard-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a clean environment with the wheel; the libraries it needs are this one's own."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.check_output(where, text=True).strip())
    install = [
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, *install], check=True, capture_output=True, timeout=100)
    # Links to single packages, so that the editable outboard of this environment stays out of sight.
    ours = Path(subprocess.check_output([sys.executable, *where[1:]], text=True).strip())
    for entry in ours.iterdir():
        taken = "outboard" in entry.name or entry.suffix == ".pth" or (site / entry.name).exists()
        if not taken:
            (site / entry.name).symlink_to(entry)
    return python


def test_the_wheel_holds_what_both_interpreters_need_and_no_other_top_level_name(
    wheel: Path,
) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"outboard"}
    assert "outboard/__init__.py" not in names
    for name in (
        *("ipc/PROTOCOL.md", "ipc/py.typed", "backends/py.typed", "workers/py.typed"),
        *("workers/__main__.py", "workers/lifeline.py", "backends/keeper.py"),
        *(f"backends/scenes/{scene}.xml" for scene in ("humanoid29", "quadruped12", "arm7")),
    ):
        assert f"outboard/{name}" in names
    assert not [name for name in names if "test" in name or "benchmark" in name]


def test_every_module_of_the_tree_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = [
        path.relative_to(ROOT)
        for folder in ("ipc", "workers", "backends")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert not {f"outboard/{path}" for path in tracked} - names


def test_the_installed_wheel_drives_a_worker_on_python_38(
    installed: Path, python38: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [str(installed), "-I", "-c", DRIVE, python38],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={name: os.environ[name] for name in ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    where, python, mujoco = done.stdout.splitlines()
    assert str(installed.parent.parent) in where
    assert python.startswith("3.8.")
    assert mujoco.startswith("2 MuJoCo 3.")
