"""`outboard setup isaacsim` and the doctor's rows: versions are compared, the installation is not written
to, and the licence is nobody's to accept but the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isaacsim_home import LICENCE, home, sim_home
from outboard.backends import cli, examination, interpreters, isaacsim_check, setup_isaacsim
from outboard.backends import isaacsim_home as table
from outboard.ipc.errors import WorkerLaunchError
from test_setup_worker import lend_pip, make_environment, pretend, site_packages, snapshot

__all__ = ["home", "sim_home"]

WORDS = {"isaacsim": "5.1.0", "isaaclab": "2.3.2", "torch": "2.7.0", "numpy": "1.26.4"}


def said(version: str = "3.11", glibc: str = "2.39", **found: str) -> dict[str, Any]:
    packages = {name: number for name, number in {**WORDS, **found}.items() if number}
    return {"version": version, "glibc": glibc, "found": packages}


def claim(python: Path, **versions: str) -> None:
    """Make an environment say that it has these distributions."""
    for name, number in versions.items():
        folder = site_packages(python) / f"{name}-{number}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (folder / "METADATA").write_text(text)


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.11"])
def test_what_goes_together_is_no_problem(version: str) -> None:
    assert isaacsim_check.problems(said(version)) == []
    assert isaacsim_check.problems(said("3.10", isaacsim="4.5.0")) == []
    assert isaacsim_check.problems(said("3.12", isaacsim="6.0.1")) == []
    assert isaacsim_check.problems(said("3.10", "2.31", isaacsim="4.5.0")) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(isaacsim=""), "has no isaacsim: pip install"),
        (said(isaaclab=""), "has no isaaclab: pip install"),
        (said("3.10"), "is Python 3.10, and Isaac Sim 5.1.0 is built for 3.11"),
        (said(glibc="2.31"), "runs on glibc 2.31, and Isaac Sim 5 needs 2.35"),
    ],
)
def test_what_does_not_is_said(answer: dict[str, Any], words: str) -> None:
    (problem,) = isaacsim_check.problems(answer)
    assert words in problem


def test_nothing_of_the_installation_is_imported(tmp_path: Path) -> None:
    """The first import of isaacsim asks for the licence, and starts Kit's libraries."""
    python = make_environment(tmp_path / "bare")
    for name in ("isaacsim", "isaaclab"):
        (site_packages(python) / f"{name}.py").write_text("raise AssertionError('imported')\n")
    seen = isaacsim_check.check(table.find({}, str(python)), os.environ)
    assert seen.found == {"isaacsim": "there", "isaaclab": "there"} and seen.problems == ()


def test_what_is_no_python_is_an_answer_too(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    found = table.find({}, str(script))
    assert isaacsim_check.check(found, {}).problems == ("is no Python interpreter",)
    script.unlink()
    (problem,) = isaacsim_check.check(found, {}).problems
    assert problem.startswith("cannot be run")


# -- the command -----------------------------------------------------------------------------------


def test_it_fills_a_folder_of_ours_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(LICENCE, raising=False)
    python = make_environment(tmp_path / "bare")
    lend_pip(python)
    pretend(python, "numpy", "posix_ipc")
    version = "{}.{}".format(*sys.version_info[:2])
    number = next(k for k, v in isaacsim_check._PYTHON_OF.items() if v in (version, "3.11"))  # pyright: ignore[reportPrivateUsage]
    if isaacsim_check._PYTHON_OF[number] != version:  # pyright: ignore[reportPrivateUsage]
        pytest.skip(f"no Isaac Sim is built for Python {version}")
    claim(python, isaacsim=f"{number}.1.0", isaaclab="2.3.2")
    before = snapshot(tmp_path / "bare")
    assert cli.main(["setup", "isaacsim", "--python", str(python)]) == 0
    words = capsys.readouterr().out
    assert f"isaacsim {number}.1.0, isaaclab 2.3.2" in words and "lacks msgpack" in words
    assert f"not set: {LICENCE}" in words
    assert f"export OUTBOARD_ISAACSIM_PYTHON={python}" in words
    assert interpreters.inspect(str(python)).good and LICENCE not in os.environ
    assert snapshot(tmp_path / "bare") == before


def test_a_dry_run_pins_numpy_to_what_isaac_lab_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = make_environment(tmp_path / "bare")
    lend_pip(python)
    claim(python, isaaclab="2.3.2")
    (site_packages(python) / "isaacsim.py").write_text("")
    assert setup_isaacsim.run(str(python), dry_run=True) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("would run: "))
    assert line.endswith(" 'numpy<2' msgpack posix_ipc")
    assert not (tmp_path / "cache").exists()


def test_what_is_not_installed_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = make_environment(tmp_path / "bare")
    with pytest.raises(WorkerLaunchError, match=r"has no isaacsim: pip.*; it has no isaaclab"):
        setup_isaacsim.run(str(python), dry_run=False)
    with pytest.raises(WorkerLaunchError, match="no Isaac Sim interpreter at /none"):
        setup_isaacsim.run("/none", dry_run=False)


# -- the doctor ------------------------------------------------------------------------------------


def test_the_doctor_names_versions_and_where_they_were_found(home: Path) -> None:
    row = examination.simulator_facts("isaacsim", None)
    assert row.ready and row.python == str(home / "venv" / "bin" / "python")
    assert (row.found["isaacsim"], row.found["isaaclab"]) == ("5.1.0", "2.3.2")
    assert "OUTBOARD_ISAACSIM_HOME" in row.why[0]


def test_the_doctor_says_what_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LICENCE)
    row = examination.simulator_facts("isaacsim", None)
    assert f"{LICENCE} is not set" in row.problem and f"export {LICENCE}=YES" in row.install
    monkeypatch.setenv("OUTBOARD_ISAACSIM_HOME", "/none")
    row = examination.simulator_facts("isaacsim", None)
    assert row.problem == "is not installed" and row.install == "outboard setup isaacsim"


def test_the_doctors_command_has_the_row(home: Path) -> None:
    command = [sys.executable, "-m", "outboard.backends.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    rows = {row["name"]: row for row in json.loads(done.stdout)["simulators"]}
    assert rows["isaacsim"]["ready"] is True
