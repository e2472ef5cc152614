"""The leak guards, seen failing: each kind of residue once, in one pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# What an inner test does, and the kinds of residue that its guard must report.
LEAKS = {
    "pipe": ("os.pipe()", {"descriptors"}),
    "thread": (
        "threading.Thread(target=time.sleep, args=(60,), name='outboard-x', daemon=True).start()",
        {"threads"},
    ),
    "name": ("open('/dev/shm/outboard-leak-test', 'x').close()", {"names"}),
    "semaphore": ("kept.append(doorbell.semaphore_pair()); kept[-1].__enter__()", {"names"}),
    "log": ("open(logs + '/rank0.log', 'x').close()", {"logs"}),
    "child": ("kept.append(subprocess.Popen(['sleep', '20']))", {"processes"}),
    # With a fork in between, the process is nobody's child when the test ends.
    "orphan": ("subprocess.run(['setsid', '--fork', 'sleep', '20'])", {"processes"}),
    "open_backend": (
        "kept.append(FakeBackend(device='cpu', num_envs=1))",
        {"descriptors", "threads", "logs", "processes"},
    ),
    "nothing": ("FakeBackend(device='cpu', num_envs=1).close()", set[str]()),
    "failed_backend": (
        "pytest.raises(OutboardError, FakeBackend, device='cpu', num_envs=1,"
        " cfg=FakeCfg(fault='exit:3', fault_at='build'))",
        set[str](),
    ),
}

HEAD = """
import os, subprocess, threading, time, pytest
from outboard.backends import FakeBackend, FakeCfg, OutboardError
from outboard.ipc import doorbell

kept = []
logs = os.environ.get('XDG_RUNTIME_DIR', '') + '/outboard'

@pytest.fixture(scope='session', autouse=True)
def folder(private_folders):
    global logs
    logs = os.environ['XDG_RUNTIME_DIR'] + '/outboard'
    os.makedirs(logs, 0o700)
"""
ONE = """
def test_{name}():
    {body}
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a pytest says of all the inner tests, guarded by nothing but the plugin under test."""
    folder = tmp_path_factory.mktemp("inner")
    text = HEAD + "".join(ONE.format(name=name, body=body) for name, (body, _) in LEAKS.items())
    (folder / "test_inner.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "leak_guards", "-p", "no:cacheprovider",
             "-p", "no:randomly", "-v", "--basetemp", str(folder / "base"), "test_inner.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{TESTS.parent / '.src'}:{TESTS}"},
            capture_output=True,
            text=True,
            timeout=50,
        ).stdout  # fmt: skip
    finally:
        Path("/dev/shm/outboard-leak-test").unlink(missing_ok=True)


def reported(said: str, name: str) -> set[str]:
    """The kinds of residue in the error of the inner test `name`."""
    section = re.search(
        rf"ERROR at teardown of test_{name} _.*?\n(.*?)(?=\n_____|\n=====)", said, re.S
    )
    return set(re.findall(r"^  (\w+): ", section[1], re.M)) if section else set()


@pytest.mark.parametrize("name", LEAKS)
def test_the_guard_reports_exactly_what_was_left_behind(name: str, said: str) -> None:
    assert f"test_{name} PASSED" in said  # the test itself is fine; its guard is what fails
    assert reported(said, name) == LEAKS[name][1]


def test_a_guard_that_found_something_makes_the_test_an_error(said: str) -> None:
    guilty = sum(bool(kinds) for _, kinds in LEAKS.values())
    assert f"{len(LEAKS)} passed, {guilty} errors" in said
