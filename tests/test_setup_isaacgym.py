"""`outboard setup isaacgym`, on tarballs of the stand-in: nothing is downloaded, nothing is NVIDIA's."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import io
import json
import shutil
import subprocess
import sys
import tarfile
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from isaacgym_home import SOURCES, gym_home
from outboard.backends import (
    cli,
    examination,
    interpreters,
    isaacgym_check,
    isaacgym_home,
    isaacgym_probes,
    setup_isaacgym,
    setup_worker,
)
from outboard.backends.setup_isaacgym import Request
from outboard.ipc.errors import UsageError, WorkerLaunchError

__all__ = ["gym_home"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for row in isaacgym_home.TABLE:
        monkeypatch.delenv(row.variable, raising=False)


@pytest.fixture(scope="session")
def tarball(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("download") / setup_isaacgym.TARBALL
    with tarfile.open(path, "w:gz") as archive:
        for file in sorted(SOURCES.glob("*.py")):
            archive.add(file, f"isaacgym/python/isaacgym/{file.name}")
    return path


@pytest.fixture
def filled_site(python38: str) -> None:
    """What pip would put into the worker site: the packages of the tests' own Python 3.8."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python38, "-c", ask], capture_output=True, text=True, check=True)
    site = interpreters.site_folder(python38)
    site.parent.mkdir(parents=True)
    site.symlink_to(packages.stdout.strip())


def fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file: when it was changed, and what is in it."""
    return {
        str(path): (
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def words_of(lines: list[str], step: str) -> str:
    return next(line for line in lines if f" {step}: " in line)


# -- the whole way ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("filled_site")
def test_from_a_tarball_to_an_installation_and_a_second_run_does_nothing(
    tmp_path: Path, tarball: Path, python38: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "gym home"
    request = Request(home=str(home), tarball=str(tarball), python=python38)
    assert setup_isaacgym.run(request) == 0
    lines = told(capsys)
    for step in ("free space", "unpack", "Python 3.8", "self-check"):
        assert words_of(lines, step).startswith("done"), step
    assert "GLIBCXX 3.4." in words_of(lines, "self-check")
    assert f"export OUTBOARD_ISAACGYM_HOME='{home}'" in lines
    assert any(line.startswith("export UNILAB_BENCHMARK_HSGYM_LIB=") for line in lines)
    # Found by the backend's own discovery, where UniSim's would find it too.
    found = isaacgym_home.find({"UNISIM_ISAACGYM_HOME": str(home)})
    assert found.python == f"{home}/miniconda3/envs/hsgym/bin/python3.8"
    assert not isaacgym_check.check(found, {}).failed
    assert not [path for path in home.rglob(".*") if path.name != "__pycache__"]

    before = fingerprint(home)
    assert setup_isaacgym.run(dataclasses.replace(request, tarball="", python="")) == 0
    lines = told(capsys)
    for step in ("free space", "tarball", "unpack", "Python 3.8", "worker site"):
        assert words_of(lines, step).startswith("skipped"), step
    assert fingerprint(home) == before


def test_an_installation_of_others_gets_a_worker_site_and_is_not_touched(
    gym_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNISIM_ISAACGYM_HOME", str(gym_home))
    before = fingerprint(gym_home)
    python = str(gym_home / isaacgym_home.INTERPRETER)
    full, filled = interpreters.inspect(python), list[tuple[str, ...]]()
    assert full.good

    def inspect(asked: str, *rest: Any) -> interpreters.Inspection:
        return full if filled else dataclasses.replace(full, missing={"msgpack": "no"})

    def fill(seen: interpreters.Inspection, missing: tuple[str, ...], site: Path) -> None:
        assert not site.is_relative_to(gym_home)
        filled.append(missing)

    monkeypatch.setattr(interpreters, "inspect", inspect)
    monkeypatch.setattr(setup_worker, "fill", fill)
    assert setup_isaacgym.run(Request()) == 0
    lines = told(capsys)
    assert filled == [("msgpack",)]
    assert [line.split()[0] for line in lines if ": " in line and line.startswith("done")] == [
        "done"
    ] * 2
    assert any("(UNISIM_ISAACGYM_HOME)" in line for line in lines)
    assert fingerprint(gym_home) == before


def test_a_dry_run_names_every_step_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["setup", "isaacgym", "--home", str(tmp_path / "home"), "--dry-run"]) == 0
    lines = told(capsys)
    assert [line.split()[0] for line in lines[1:]] == ["would"] * 6
    assert setup_isaacgym.PREVIEW_4_URL in words_of(lines, "tarball")
    assert setup_isaacgym.MINICONDA_URL in words_of(lines, "Python 3.8")
    assert not list(tmp_path.iterdir())


# -- what goes wrong -------------------------------------------------------------------------------


def damaged(tarball: Path, target: Path, how: str) -> Path:
    data = bytearray(tarball.read_bytes())
    if how == "cut off":
        data = data[: len(data) // 2]
    elif how == "CRC":
        data[-8] ^= 0xFF  # the checksum: the archive itself unpacks without a word
    elif how == "a page":
        data = bytearray(b"<html>log in</html>")
    else:
        data[len(data) // 2] ^= 0xFF
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("how", ["cut off", "CRC", "a page", "one bit"])
def test_a_damaged_tarball_is_known_before_anything_is_unpacked(
    how: str, tmp_path: Path, tarball: Path
) -> None:
    home = tmp_path / "home"
    bad = damaged(tarball, tmp_path / "given.tar.gz", how)
    with pytest.raises(WorkerLaunchError, match="damaged or incomplete: delete it"):
        setup_isaacgym.run(Request(home=str(home), tarball=str(bad), python=sys.executable))
    assert bad.exists() and not home.exists()  # the user's file is not ours to delete
    ours = damaged(tarball, home / setup_isaacgym.TARBALL, how)
    with pytest.raises(WorkerLaunchError, match="damaged or incomplete"):
        setup_isaacgym.run(Request(home=str(home), python=sys.executable))
    assert not ours.exists()  # the next run fetches it again


def test_a_tarball_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.tar.gz"
    with tarfile.open(other, "w:gz") as archive:
        archive.add(Path(__file__), "readme.txt")
    with pytest.raises(WorkerLaunchError, match="is no Isaac Gym"):
        setup_isaacgym.read_through(other)
    with pytest.raises(UsageError, match="is not a file"):
        setup_isaacgym.run(Request(tarball=str(tmp_path / "none")))


@pytest.mark.parametrize("filtered", [True, False], ids=["with tarfile's filter", "without"])
def test_nothing_is_unpacked_outside(
    filtered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not filtered:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    evil = tmp_path / "evil.tar.gz"
    with tarfile.open(evil, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("isaacgym/python/isaacgym/__init__.py"))
        archive.addfile(tarfile.TarInfo("../../escaped"))
    home = tmp_path / "a" / "home"
    with pytest.raises(WorkerLaunchError, match="cannot be unpacked"):
        setup_isaacgym.unpack(evil, home, ours=False)
    assert not list(home.iterdir()) and not list(tmp_path.rglob("escaped"))


def test_an_unpacking_that_was_killed_half_way_is_done_again(tmp_path: Path, tarball: Path) -> None:
    home = tmp_path / "home"
    # SIGKILL runs no clean-up: die inside the extraction, after the first file.
    program = f"""
import os, pathlib, tarfile
from outboard.backends import setup_isaacgym
def half(tarball, folder):
    with tarfile.open(tarball) as archive:
        member = archive.next()
        archive.extract(member, folder, **({{"filter": "data"}} if hasattr(tarfile, "data_filter") else {{}}))
    os.kill(os.getpid(), 9)
setup_isaacgym.extract = half
setup_isaacgym.unpack(pathlib.Path({str(tarball)!r}), pathlib.Path({str(home)!r}), ours=False)
"""
    source = Path(__file__).resolve().parent.parent / ".src"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(source)}, timeout=30
    )
    assert done.returncode == -9
    (left,) = home.iterdir()
    assert left.name.startswith(".unpacking-") and list(left.rglob("*.py"))
    setup_isaacgym.unpack(tarball, home, ours=False)
    assert [path.name for path in home.iterdir()] == ["isaacgym"]
    files = {path.name for path in (home / "isaacgym/python/isaacgym").iterdir()}
    assert files == {path.name for path in SOURCES.glob("*.py")}


def test_no_space_stops_it_before_anything_is_made(
    tmp_path: Path, tarball: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(folder: Path) -> int:
        return 100 << 20

    monkeypatch.setattr(setup_isaacgym, "free_bytes", little)
    home = tmp_path / "home"
    with pytest.raises(WorkerLaunchError, match=r"0\.1 GiB free and 3\.0 GiB are needed"):
        setup_isaacgym.run(Request(home=str(home), tarball=str(tarball)))
    assert not home.exists()
    monkeypatch.setattr(setup_isaacgym, "_MARGIN_BYTES", 1 << 30)
    with pytest.raises(WorkerLaunchError, match="has no room"):
        setup_isaacgym.unpack(tarball, home, ours=False)


@pytest.mark.parametrize("answer", ["refused", "short", "good"])
def test_a_download_is_whole_or_not_there(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reply(io.BytesIO):
        headers = http.client.HTTPMessage()

    def urlopen(url: str, timeout: float) -> Reply:
        if answer == "refused":
            raise urllib.error.URLError("no route to host")
        reply = Reply(b"x" * 10)
        reply.headers = http.client.HTTPMessage()
        reply.headers["Content-Length"] = "10" if answer == "good" else "20"
        return reply

    monkeypatch.setattr(setup_isaacgym.urllib.request, "urlopen", urlopen)
    target = tmp_path / "home" / setup_isaacgym.TARBALL
    if answer == "good":
        setup_isaacgym.download(setup_isaacgym.PREVIEW_4_URL, target)
        assert target.read_bytes() == b"x" * 10
    else:
        with pytest.raises(WorkerLaunchError, match=r"could not be downloaded .* pass --tarball"):
            setup_isaacgym.download(setup_isaacgym.PREVIEW_4_URL, target)
    assert [p.name for p in target.parent.iterdir()] == [target.name] * (answer == "good")


# -- conda -----------------------------------------------------------------------------------------


def test_without_a_terminal_nobody_accepts_condas_terms(
    tmp_path: Path, tarball: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*words: str) -> None:
        raise AssertionError(words)

    monkeypatch.setattr(setup_isaacgym, "command", never)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(WorkerLaunchError, match="no terminal to ask at: pass --accept-conda-terms"):
        setup_isaacgym.run(Request(home=str(tmp_path / "home"), tarball=str(tarball)))
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["isaacgym"]


@pytest.mark.parametrize("yes", [True, False])
def test_at_a_terminal_it_asks(yes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def confirm(words: str, default: bool) -> bool:
        assert "terms of service" in words and default is False
        return yes

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(setup_isaacgym.click, "confirm", confirm)
    if yes:
        setup_isaacgym.require_terms(False)
    else:
        with pytest.raises(WorkerLaunchError, match="not accepted; nothing was installed"):
            setup_isaacgym.require_terms(False)


def test_with_the_terms_accepted_conda_makes_hsgym_by_the_manuals_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []

    def download(url: str, target: Path) -> str:
        target.write_text(url)
        return ""

    monkeypatch.setattr(setup_isaacgym, "command", lambda *words: ran.append(words))  # type: ignore[misc]
    monkeypatch.setattr(setup_isaacgym, "download", download)
    setup_isaacgym.make_conda(setup_isaacgym.locate(str(tmp_path)), accepted=True)
    assert [words[0].rpartition("/")[2] for words in ran] == ["bash", "conda", "conda", "conda"]
    assert ran[0][2:] == ("-b", "-u", "-p", f"{tmp_path}/miniconda3")
    assert [words[1:3] for words in ran[1:3]] == [("tos", "accept")] * 2
    assert {"hsgym", "python=3.8", "libstdcxx-ng", "conda-forge"} <= set(ran[3])
    # A second run after an interruption goes on behind the installer.
    (tmp_path / "miniconda3" / "bin").mkdir(parents=True)
    shutil.copy("/bin/true", tmp_path / "miniconda3" / "bin" / "conda")
    ran.clear()
    setup_isaacgym.make_conda(setup_isaacgym.locate(str(tmp_path)), accepted=True)
    assert [words[0].rpartition("/")[2] for words in ran] == ["conda"] * 3


def test_a_python_that_is_not_38_or_has_no_shared_library_is_refused(
    tmp_path: Path, python38: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = setup_isaacgym.locate(str(tmp_path))
    if sys.version_info[:2] != (3, 8):
        with pytest.raises(WorkerLaunchError, match=r"is Python 3\.\d+; Isaac Gym needs 3\.8"):
            setup_isaacgym.link_python(sys.executable, place)
    monkeypatch.setattr(isaacgym_check, "LIBPYTHON", "libpython3.8.so.none")
    with pytest.raises(WorkerLaunchError, match="without a shared library"):
        setup_isaacgym.link_python(python38, place)
    assert not place.environment.exists()


# -- symptoms --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ("CRC check failed 0x1 != 0x2", "damaged"),
        ("Compressed file ended before the end-of-stream marker was reached", "damaged"),
        ("ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x)", "too old"),
        ("OSError: libpython3.8.so.1.0: cannot open shared object file", "libpython3.8"),
        ("RuntimeError: No gym module found for the active version of Python (3.11)", "not Python 3.6"),
        ("RuntimeError: Ninja is required to load C++ extensions", "needs ninja"),
        ("/x/torch_extensions/py38_cu121/gymtorch/lock", "left its lock"),
        ("*** Warning: failed to preload CUDA lib", "libcuda.so is not found"),
        ("OSError: libcuda.so: cannot open shared object file: No such file", "libcuda.so is not found"),
        ("ModuleNotFoundError: No module named 'isaacgym'", "OUTBOARD_ISAACGYM_HOME"),
    ],
)  # fmt: skip
def test_each_known_failure_has_one_text(shown: str, words: str) -> None:
    assert words in isaacgym_check.explain(shown)
    matches = [one for one in isaacgym_check.SYMPTOMS if one.words == isaacgym_check.explain(shown)]
    assert len(matches) == 1


def test_an_unknown_failure_is_passed_on_as_it_is() -> None:
    assert isaacgym_check.with_help("ValueError: moon") == "ValueError: moon"


@pytest.mark.usefixtures("filled_site")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("import_error=version `GLIBCXX_3.4.32' not found", "libstdcxx-ng"),
        ("import_error=libpython3.8.so.1.0: cannot open shared object file", "LD_LIBRARY_PATH"),
        ("import_error=moon", "ImportError: moon"),
    ],
)
def test_setup_and_doctor_say_the_same_of_an_import_that_fails(
    settings: str, words: str, gym_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(gym_home))
    monkeypatch.setenv("ISAACGYM_STANDIN", settings)
    with pytest.raises(WorkerLaunchError, match="cannot import isaacgym") as caught:
        setup_isaacgym.run(Request())
    facts = examination.simulator_facts("isaacgym", None)
    assert words in caught.value.message and words in facts.problem and not facts.ready


def test_a_stale_lock_stops_gymtorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = examination.Lock("/x/torch_extensions/py38_cu121/gymtorch/lock", 9000)
    monkeypatch.setattr(examination, "stale_locks", lambda: (lock,))
    with pytest.raises(WorkerLaunchError, match="left its lock"):
        setup_isaacgym.add_torch(setup_isaacgym.locate(str(tmp_path)))


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_knows_where_it_is_and_that_it_imports(
    gym_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = examination.simulator_facts("isaacgym", None)
    assert (missing.problem, missing.install) == ("is not installed", "outboard setup isaacgym")
    monkeypatch.setenv("UNISIM_ISAACGYM_HOME", str(gym_home))
    facts = examination.simulator_facts("isaacgym", None)
    assert facts.ready, facts
    assert facts.python_version.startswith("3.8.") and "UNISIM_ISAACGYM_HOME" in facts.why[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [("NVIDIA H100 80GB HBM3", True), ("NVIDIA H200", True), ("NVIDIA GH200 480GB", True),
     ("NVIDIA A100-SXM4-80GB", False), ("NVIDIA GeForce RTX 4090", False)],
)  # fmt: skip
def test_gpus_on_which_it_is_reported_to_crash(name: str, told: bool) -> None:
    assert bool(isaacgym_check.too_new([name])) is told


def test_the_probes_are_listed_where_nothing_is_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--probe", "isaacgym"]) == 1
    said = capsys.readouterr().out
    assert "Nothing was asked" in said and "attach that file" in said
    assert [one.number for one in isaacgym_probes.PROBES] == list(range(1, 12))
    assert all(one.question in said for one in isaacgym_probes.PROBES)


def test_the_cheap_probes_are_answered_by_the_installation(
    gym_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(gym_home))
    no_gpu = examination.GpuFacts((), "none", (), "none", "", "", (), "", (), "", "")
    monkeypatch.setattr(examination, "gpu_facts", lambda: no_gpu)
    assert cli.main(["doctor", "--probe", "isaacgym", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [number for number, said in answers.items() if said] == ["2", "3", "7", "11"]
    assert answers["11"] == ["cpu: it starts"]
