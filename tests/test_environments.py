"""`outboard setup NAME` for a simulator with an environment of its own: made, found, completed.

The packages are of a few bytes, installed by pip from a folder beside the test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outboard.backends import MJWarpBackend, environments, examination, interpreters
from outboard.backends.traits import Recipe, Traits
from outboard.ipc.errors import WorkerLaunchError

HERE = sys.version_info[:2]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OUTBOARD_TOYSIM_PYTHON", raising=False)
    return tmp_path / "cache" / "outboard" / "environments"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of what a worker needs and of the simulator `toysim`, versions 1 and 2."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in (*((n, "1.0") for n in interpreters.WORKER_PACKAGES), ("toysim", "1.0"),
                          ("toysim", "2.0")):  # fmt: skip
        write_wheel(folder, name, version)
    return folder


def write_wheel(folder: Path, name: str, version: str) -> None:
    import zipfile

    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f'__version__ = "{version}"\n')
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def toy(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Traits:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return toy_traits()


def toy_traits(requirement: str = "toysim==1.0", **changes: object) -> Traits:
    parts: dict[str, object] = dict(
        name="toysim", requirements=(requirement,), oldest=HERE, newest=HERE, size_gb=0.01
    )
    parts.update(changes)
    return Traits(packages=("toysim",), environment=Recipe(**parts))  # type: ignore[arg-type]


def recipe_of(traits: Traits) -> Recipe:
    assert traits.environment is not None
    return traits.environment


def test_it_is_made_once_and_then_found(
    toy: Traits, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interpreters.locate_for(toy, None) == sys.executable
    assert environments.run(toy, None, dry_run=False) == 0
    python = interpreters.locate_for(toy, None)
    assert python == str(cache / "toysim" / "bin" / "python")
    assert interpreters.inspect(python, ("toysim", "msgpack")).good
    capsys.readouterr()
    assert environments.run(toy, None, dry_run=False) == 0
    assert "Nothing to do" in capsys.readouterr().out


def test_what_an_interrupted_run_left_is_not_used_and_made_again(toy: Traits, cache: Path) -> None:
    half = cache / "toysim" / "bin" / "python"
    half.parent.mkdir(parents=True)
    half.symlink_to(sys.executable)
    (cache / "toysim" / "leftover").touch()
    assert interpreters.locate_for(toy, None) == sys.executable
    environments.run(toy, None, dry_run=False)
    assert interpreters.locate_for(toy, None) == str(half)
    assert not (cache / "toysim" / "leftover").exists()


def test_a_newer_recipe_is_installed_over_the_older(toy: Traits, cache: Path) -> None:
    environments.run(toy, None, dry_run=False)
    newer = toy_traits("toysim==2.0")
    environments.run(newer, None, dry_run=False)
    python = interpreters.locate_for(newer, None)
    assert interpreters.inspect(python, ("toysim",)).found == {"toysim": "2.0"}


def test_a_failed_installation_says_pips_words_and_is_not_found(toy: Traits) -> None:
    with pytest.raises(WorkerLaunchError, match=r"pip failed:(.|\n)*toysim==9"):
        environments.run(toy_traits("toysim==9"), None, dry_run=False)
    assert interpreters.locate_for(toy, None) == sys.executable


def test_a_package_that_does_not_import_is_no_environment(toy: Traits) -> None:
    broken = Traits(packages=("toysim_core",), environment=toy.environment)
    with pytest.raises(WorkerLaunchError, match="toysim_core"):
        environments.run(broken, None, dry_run=False)
    assert interpreters.environment_python(recipe_of(toy)) is None


def test_a_dry_run_says_the_commands_and_makes_nothing(
    toy: Traits, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environments.run(toy, None, dry_run=True) == 0
    said = capsys.readouterr().out
    assert "-m venv" in said and "toysim==1.0" in said and not cache.exists()


def test_a_python_outside_the_recipe_is_refused_with_the_range(toy: Traits) -> None:
    old = toy_traits(oldest=(3, 98), newest=(3, 99))
    with pytest.raises(WorkerLaunchError, match=r"is Python .*; toysim needs Python 3.98 to 3.99"):
        environments.run(old, sys.executable, dry_run=False)
    with pytest.raises(WorkerLaunchError, match="none was found: pass --python"):
        environments.run(old, None, dry_run=False)


def test_a_full_disk_is_said_before_anything_is_made(toy: Traits, cache: Path) -> None:
    huge = toy_traits(size_gb=1e9)
    with pytest.raises(WorkerLaunchError, match="GB free and 1e"):
        environments.run(huge, None, dry_run=False)
    assert not (cache / "toysim").exists()


def test_a_python_that_has_the_simulator_gets_only_what_a_worker_needs(
    toy: Traits, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "theirs")],
                   check=True, timeout=60)  # fmt: skip
    python = tmp_path / "theirs" / "bin" / "python"
    packages = next((tmp_path / "theirs").glob("lib/python3*/site-packages"))
    (packages / "toysim.py").touch()
    assert environments.run(toy, str(python), dry_run=False) == 0
    assert "has toysim already" in capsys.readouterr().out
    assert interpreters.inspect(str(python)).good
    assert not (packages / "msgpack.py").exists() and not (cache / "toysim").exists()


def test_the_simulators_variable_comes_before_its_environment(
    toy: Traits, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cache / "toysim" / "bin" / "python"
    ours.parent.mkdir(parents=True)
    ours.symlink_to(sys.executable)
    interpreters.environment_stamp("toysim").touch()
    assert interpreters.locate_for(toy, None) == str(ours)
    monkeypatch.setenv("OUTBOARD_TOYSIM_PYTHON", sys.executable)
    assert interpreters.locate_for(toy, None) == sys.executable
    assert interpreters.locate_for(toy, "/bin/sh") == "/bin/sh"
    monkeypatch.setenv("OUTBOARD_TOYSIM_PYTHON", "/nowhere/python")
    with pytest.raises(WorkerLaunchError, match="OUTBOARD_TOYSIM_PYTHON: /nowhere/python does not"):
        interpreters.locate_for(toy, None)


def test_doctor_says_which_command_makes_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_MJWARP_PYTHON", sys.executable)
    facts = examination.simulator_facts("mjwarp", None)
    assert "mujoco_warp" in facts.missing and facts.install == "outboard setup mjwarp"


def test_the_command_line_has_a_setup_for_mjwarp(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outboard.backends.cli", "setup", "mjwarp", "--dry-run"],
        env={**os.environ, "PYTHONPATH": str(ROOT / ".src")},
        capture_output=True, text=True, timeout=55,
    )  # fmt: skip
    recipe = MJWarpBackend.traits.environment
    assert recipe is not None
    fits = recipe.oldest <= HERE <= recipe.newest
    assert done.returncode == 0 or not fits, done.stderr
    assert recipe.requirements[0] in done.stdout or not fits
