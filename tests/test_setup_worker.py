"""`outboard setup worker`: a foreign Python gets what it lacks, and is not written to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outboard.backends import interpreters, setup_worker
from outboard.ipc.errors import WorkerLaunchError

ROOT = Path(__file__).resolve().parent.parent


def make_environment(folder: Path, python: str = sys.executable, pip: bool = False) -> Path:
    """A bare environment; its interpreter."""
    flags = [] if pip else ["--without-pip"]
    subprocess.run([python, "-m", "venv", *flags, str(folder)], check=True, timeout=60)
    return folder / "bin" / "python"


def lend_pip(python: Path) -> None:
    """What ensurepip does, without its seconds: this environment's own pip, linked."""
    pip = importlib.util.find_spec("pip")
    if pip is None or pip.origin is None:
        pytest.skip("this Python has no pip to lend")
    (site_packages(python) / "pip").symlink_to(Path(pip.origin).parent)


def site_packages(python: Path) -> Path:
    return next(python.parent.parent.glob("lib/python3*/site-packages"))


def pretend(python: Path, *packages: str) -> None:
    """Give an environment packages of a few bytes, so that pip need not fetch the real ones."""
    for name in packages:
        (site_packages(python) / f"{name}.py").write_text('__version__ = "1.0"\n')


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    logs = tmp_path / "run"
    logs.mkdir(mode=0o700)
    ours = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_RUNTIME_DIR": str(logs)}
    return {**os.environ, "PYTHONPATH": str(ROOT / ".src"), **ours}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def outboard(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outboard.backends.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=55)


def test_installs_only_what_is_missing_and_leaves_the_environment_alone(
    env: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare")
    lend_pip(python)
    pretend(python, "numpy", "posix_ipc")
    before = snapshot(tmp_path / "bare")
    done = outboard(env, "setup", "worker", "--python", str(python))
    assert done.returncode == 0, done.stderr
    assert "lacks msgpack;" in done.stdout and "--worker-python" in done.stdout
    site = interpreters.site_folder(str(python))
    assert {path.name for path in site.iterdir() if path.is_dir()} >= {"msgpack"}
    assert not list(site.glob("numpy*")) and site.is_relative_to(cache)
    assert snapshot(tmp_path / "bare") == before
    assert [path.name for path in site.parent.iterdir() if path.name != ".lock"] == [site.name]

    again = outboard(env, "setup", "worker", "--python", str(python))
    assert again.returncode == 0 and "Nothing to do" in again.stdout


def test_without_its_own_pip_ours_installs_for_that_python(
    env: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare")
    pretend(python, "numpy", "posix_ipc")
    done = outboard(env, "setup", "worker", "--python", str(python))
    assert done.returncode == 0, done.stderr
    assert interpreters.inspect(str(python)).good


def test_what_the_site_already_holds_stays_for_the_workers_that_use_it(
    env: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare")
    site = interpreters.site_folder(str(python))
    site.mkdir(parents=True)
    for name in ("numpy", "posix_ipc"):
        (site / f"{name}.py").write_text('__version__ = "1.0"\n')
    inode = (site / "numpy.py").stat().st_ino
    done = outboard(env, "setup", "worker", "--python", str(python))
    assert done.returncode == 0, done.stderr
    assert (site / "numpy.py").stat().st_ino == inode and (site / "msgpack").is_dir()


def test_a_dry_run_shows_the_command_and_makes_nothing(
    env: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare")
    lend_pip(python)
    pretend(python, "numpy", "posix_ipc")
    done = outboard(env, "setup", "worker", "--python", str(python), "--dry-run")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("would run: "))
    assert "pip install" in line and "--target" in line and line.endswith(" msgpack")
    assert not cache.exists()


def test_what_pip_says_reaches_the_user_and_nothing_is_left(
    env: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    python = make_environment(tmp_path / "bare")
    pretend(python, "numpy", "posix_ipc")
    empty = tmp_path / "empty"
    empty.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty), "PIP_CONFIG_FILE": os.devnull}
    done = outboard(env | offline, "setup", "worker", "--python", str(python))
    assert done.returncode == 1
    assert "error: pip failed" in done.stderr and "msgpack" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (cache / "outboard" / "site").iterdir()] == [".lock"]


def test_an_installation_that_does_not_work_is_not_put_in_place(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_environment(tmp_path / "bare")
    pretend(python, "numpy", "posix_ipc")

    def broken(command: list[str]) -> None:
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        (target / "msgpack.py").write_text("raise ImportError('not for this processor')\n")

    monkeypatch.setattr(setup_worker, "install", broken)
    seen = interpreters.inspect(str(python))
    site = interpreters.site_folder(str(python))
    with pytest.raises(WorkerLaunchError, match="not for this processor"):
        setup_worker.fill(seen, ["msgpack"], site)
    assert not site.exists()


def test_neither_python_has_pip(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_environment(tmp_path / "bare")

    def no_pip(python: str, *flags: str) -> bool:
        return False

    monkeypatch.setattr(setup_worker, "_has_pip", no_pip)
    with pytest.raises(WorkerLaunchError, match=r"neither .* has pip\. .*ensurepip"):
        setup_worker.run(str(python), dry_run=True)


@pytest.mark.parametrize(
    ("python", "words"),
    [("/no/such/python", "does not exist"), ("/bin/true", "is no Python interpreter")],
)
def test_what_is_no_python_is_refused(env: dict[str, str], python: str, words: str) -> None:
    done = outboard(env, "setup", "worker", "--python", python)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_a_python_that_is_too_old_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    old = tmp_path / "python3.6"
    answer = {"version": [3, 6, 15], "prefix": "/", "found": {}, "missing": {"msgpack": "no"}}
    old.write_text(f"#!/bin/sh\necho\necho '{json.dumps(answer)}'\n")
    old.chmod(0o755)
    done = outboard(env, "setup", "worker", "--python", str(old))
    assert done.returncode == 1
    assert "is Python 3.6.15; a worker needs 3.8 or newer" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("pip", [True, False], ids=["its own pip", "our pip"])
def test_a_bare_python_38_runs_workers_afterwards(
    env: dict[str, str], tmp_path: Path, python38: str, pip: bool
) -> None:
    python = make_environment(tmp_path / "bare", python38, pip)
    run = ["run", "--backend", "fake", "--devices", "cpu", "--steps", "5"]
    run += ["--worker-python", str(python), "--json", "-"]
    before = outboard(env, *run)
    assert before.returncode == 1
    assert f"outboard setup worker --python {python}" in before.stderr
    done = outboard(env, "setup", "worker", "--python", str(python))
    assert done.returncode == 0, done.stderr
    after = outboard(env, *run)
    assert after.returncode == 0, after.stderr
    assert json.loads(after.stdout)["ranks"][0]["python"].startswith("3.8.")
