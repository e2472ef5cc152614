"""`outboard setup isaacgym`: makes an Isaac Gym installation, or completes the one that is there.

The layout is that of UniSim's script: `isaacgym/` and `miniconda3/envs/hsgym/` under one home. Every step
looks at what is there first, so a second run does nothing and an interrupted one goes on; whatever takes
long is made under a temporary name and renamed. Nothing of an existing installation is written to.
"""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich.text import Text

from ..ipc.errors import UsageError, WorkerLaunchError
from . import examination, interpreters, isaacgym_check, isaacgym_home, setup_worker, terminal
from .isaacgym_home import Installation

# NVIDIA's public page: answers with the tarball, no login.
PREVIEW_4_URL = "https://developer.nvidia.com/isaac-gym-preview-4"
TARBALL = "IsaacGym_Preview_4_Package.tar.gz"
MINICONDA_URL = "https://repo.anaconda.com/miniconda/Miniconda3-latest-Linux-x86_64.sh"
_CHANNELS = ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")

_GIB = 1 << 30
# The whole of it with torch is about 5 GB by UniSim's manual; without torch these are estimates, generous.
_PACKAGE_BYTES, _CONDA_BYTES, _TORCH_BYTES = 1 * _GIB, 2 * _GIB, 3 * _GIB
# Left free after unpacking, so that the disk is not full at once.
_MARGIN_BYTES = 64 << 20
_CHUNK = 1 << 20
_SOCKET_S = 60.0
# conda solves and downloads; torch is 800 MB.
_COMMAND_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command's options."""

    home: str = ""
    tarball: str = ""
    python: str = ""
    with_gymtorch: bool = False
    accept_conda_terms: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Place:
    """Where things are or will be."""

    home: Path
    python: Path
    package: Path  # the folder that goes into sys.path
    libraries: tuple[str, ...]
    why: tuple[str, ...]

    @property
    def environment(self) -> Path:
        return self.python.parent.parent

    @property
    def conda(self) -> Path:
        return self.home / "miniconda3" / "bin" / "conda"

    @property
    def has_package(self) -> bool:
        return (self.package / "isaacgym" / "__init__.py").is_file()

    @property
    def has_python(self) -> bool:
        return os.access(self.python, os.X_OK)

    def installation(self) -> Installation:
        """As the backend will find it once it is made."""
        package = str(self.package) if self.package.is_dir() else ""
        libraries = self.libraries or (str(self.environment / "lib"),)
        return Installation(str(self.python), package, libraries, self.why)


@dataclass(frozen=True)
class Step:
    """`there`: words when nothing is to be done, else "". `do`: does it, and says what was done."""

    name: str
    there: Callable[[], str]
    plan: str  # what would be done
    do: Callable[[], str]


def run(request: Request) -> int:
    """The command; 0 when `from isaacgym import gymapi` works at the end. WorkerLaunchError."""
    place = locate(request.home)
    if request.tarball and not Path(request.tarball).is_file():
        raise UsageError(f"--tarball {request.tarball} is not a file")
    for line in place.why or (f"home: {place.home}",):
        _say(line)
    for step in steps(place, request):
        there = step.there()
        if there:
            _say(f"skipped  {step.name}: {there}")
        elif request.dry_run:
            _say(f"would    {step.name}: {step.plan}")
        else:
            _say(f"done     {step.name}: {step.do()}")
    if not request.dry_run:
        _say_exports(place)
    return 0


def steps(place: Place, request: Request) -> tuple[Step, ...]:
    """What leads to an installation, in order. Each looks at the disk when its turn comes."""

    def package_there() -> str:
        return f"{place.package} is there" if place.has_package else ""

    def python_there() -> str:
        return f"{place.python} is there" if place.has_python else ""

    def space_there() -> str:
        return "nothing large is missing" if place.has_package and place.has_python else ""

    tarball = Path(request.tarball) if request.tarball else place.home / TARBALL

    def tarball_there() -> str:
        if place.has_package:
            return "not needed"
        return f"{tarball} is there" if tarball.is_file() else ""

    def never() -> str:
        return ""

    python = f"link {request.python}" if request.python else f"miniconda from {MINICONDA_URL}"
    rows = [
        Step("free space", space_there, f"check the disk of {place.home}",
             lambda: check_space(place, needed_bytes(place, request))),
        Step("tarball", tarball_there, f"download {PREVIEW_4_URL} to {tarball}",
             lambda: download(PREVIEW_4_URL, tarball)),
        Step("unpack", package_there, f"check {tarball}, then unpack it into {place.home}",
             lambda: unpack(tarball, place.home, ours=not request.tarball)),
        Step("Python 3.8", python_there, f"{python}, as {place.python}",
             lambda: make_python(place, request)),
        Step("worker site", lambda: site_there(place),
             f"install what a worker needs into {interpreters.site_folder(str(place.python))}",
             lambda: fill_site(place)),
    ]  # fmt: skip
    if request.with_gymtorch:
        rows.append(Step("gymtorch", lambda: torch_there(place), shlex.join(_torch_command(place)),
                         lambda: add_torch(place)))  # fmt: skip
    rows.append(Step("self-check", never, "from isaacgym import gymapi, in that interpreter",
                     lambda: self_check(place)))  # fmt: skip
    return tuple(rows)


# -- where -----------------------------------------------------------------------------------------


def locate(home: str) -> Place:
    """The installation that discovery finds; where there is none yet, the home it is to be made in."""
    env = {isaacgym_home.TABLE[0].variable: os.path.abspath(home)} if home else dict(os.environ)
    rows = [row for row in isaacgym_home.TABLE if row.names == isaacgym_home.HOME]
    named = next((env[row.variable] for row in rows if env.get(row.variable)), "")
    folder = Path(os.path.expanduser(named or isaacgym_home.DEFAULT_HOME)).absolute()
    package = folder / isaacgym_home.PACKAGE
    try:
        found = isaacgym_home.find(env)
    except WorkerLaunchError:
        return Place(folder, folder / isaacgym_home.INTERPRETER, package, (), ())
    if not found.package_root:
        own = _own_package(found.python)
        package = own or package
    return Place(folder, Path(found.python), package, found.libraries, found.why)


def _own_package(python: str) -> Path | None:
    """The folder from which the interpreter itself would import isaacgym. Nothing is imported."""
    ask = (
        "from importlib.util import find_spec; found = find_spec('isaacgym'); "
        "print(); print(found.origin or '' if found else '')"
    )
    try:
        done = subprocess.run([python, "-E", "-s", "-c", ask], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=30, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    origin = (done.stdout.splitlines() or [""])[-1]
    return Path(origin).parent.parent if done.returncode == 0 and origin else None


# -- space, tarball --------------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    """On the disk that `folder` will be on."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def needed_bytes(place: Place, request: Request) -> int:
    needed = 0 if place.has_package else _PACKAGE_BYTES
    if not place.has_python and not request.python:
        needed += _CONDA_BYTES
    return needed + (_TORCH_BYTES if request.with_gymtorch else 0)


def check_space(place: Place, needed: int) -> str:
    free = free_bytes(place.home)
    if free < needed:
        raise WorkerLaunchError(
            f"{place.home} has {free / _GIB:.1f} GiB free and {needed / _GIB:.1f} GiB are needed; free "
            "some, or pass --home a folder on another disk"
        )
    return f"{free / _GIB:.1f} GiB free, {needed / _GIB:.1f} GiB needed"


def download(url: str, target: Path) -> str:
    """Under a temporary name, then renamed: what bears the name is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        with urllib.request.urlopen(url, timeout=_SOCKET_S) as answer, part.open("wb") as file:
            expected = int(answer.headers.get("Content-Length") or 0)
            shutil.copyfileobj(answer, file, _CHUNK)
        size = part.stat().st_size
        if expected and size != expected:
            raise OSError(f"it ended after {size} of {expected} bytes")
    except (OSError, ValueError) as error:
        part.unlink(missing_ok=True)
        flag = "--tarball" if target.name == TARBALL else "--python"
        raise WorkerLaunchError(
            f"{url} could not be downloaded ({error}); fetch it another way and pass {flag}"
        ) from error
    part.rename(target)
    return f"{size:,} bytes in {target}"


def read_through(tarball: Path) -> int:
    """Decompress the whole of it, which checks the CRC at its end; the bytes within. WorkerLaunchError."""
    size = 0
    try:
        with gzip.open(tarball) as stream:
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
        with tarfile.open(tarball) as archive:
            names = archive.getnames()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise WorkerLaunchError(f"{tarball}: {isaacgym_check.with_help(str(error))}") from error
    if "isaacgym/python/isaacgym/__init__.py" not in {name.removeprefix("./") for name in names}:
        raise WorkerLaunchError(f"{tarball} is no Isaac Gym: it has no isaacgym/python/isaacgym")
    return size


def unpack(tarball: Path, home: Path, *, ours: bool) -> str:
    """Check, then unpack beside the final name, then rename: what bears the name is whole.

    A damaged tarball that was downloaded here is removed, so that the next run fetches it again.
    """
    try:
        size = read_through(tarball)
    except WorkerLaunchError:
        if ours:
            tarball.unlink(missing_ok=True)
        raise
    home.mkdir(parents=True, exist_ok=True)
    if free_bytes(home) < size + _MARGIN_BYTES:
        raise WorkerLaunchError(f"{home} has no room for the {size:,} bytes in {tarball}")
    for left in home.glob(".unpacking-*"):
        shutil.rmtree(left)
    final = home / "isaacgym"
    if final.exists():
        raise WorkerLaunchError(
            f"{final} exists and holds no python/isaacgym: another unpacking was cut off there. It is "
            "not ours to delete; move it away and run this again"
        )
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=home) as folder:
        try:
            extract(tarball, Path(folder))
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise WorkerLaunchError(f"{tarball} cannot be unpacked: {error}") from error
        (Path(folder) / "isaacgym").rename(final)
    return f"{size:,} bytes into {final}"


def extract(tarball: Path, folder: Path) -> None:
    """Only what stays inside `folder`; older Pythons have no filter of their own for that."""
    with tarfile.open(tarball) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            return
        for member in archive:
            inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
            if not inside or not (member.isfile() or member.isdir()):
                raise tarfile.TarError(f"{member.name} does not belong in the package")
            archive.extract(member, folder)


# -- Python 3.8 ------------------------------------------------------------------------------------


def make_python(place: Place, request: Request) -> str:
    if request.python:
        return link_python(request.python, place)
    return make_conda(place, accepted=request.accept_conda_terms)


_FACTS = """
import sys, sysconfig
print("\\n%d.%d|%s|%s" % (sys.version_info[0], sys.version_info[1], sys.base_prefix,
                        sysconfig.get_config_var("LIBDIR") or ""))
"""


def link_python(python: str, place: Place) -> str:
    """An environment of its own around a Python 3.8 that is there (uv's, pyenv's), laid out as conda's.

    `venv` would write its final path into scripts; this holds links only, so that it can be renamed.
    """
    python = interpreters.locate(python)
    version, base, libdir = _facts(python)
    if version != "3.8":
        raise WorkerLaunchError(f"{python} is Python {version}; Isaac Gym needs 3.8 here")
    name = isaacgym_check.LIBPYTHON
    shared = next((p for p in (Path(base, "lib", name), Path(libdir, name)) if p.is_file()), None)
    if shared is None:
        words = isaacgym_check.with_help(f"{name}: cannot open shared object file")
        raise WorkerLaunchError(f"{python} was built without a shared library. {words}")
    place.environment.parent.mkdir(parents=True, exist_ok=True)
    if place.environment.exists():
        raise WorkerLaunchError(
            f"{place.environment} exists and has no bin/python3.8; move it away"
        )
    with tempfile.TemporaryDirectory(prefix=".making-", dir=place.environment.parent) as folder:
        fresh = Path(folder) / "new"
        (fresh / "bin").mkdir(parents=True)
        (fresh / "lib" / "python3.8" / "site-packages").mkdir(parents=True)
        real = Path(base) / "bin" / "python3.8"
        (fresh / "bin" / "python3.8").symlink_to(real)
        (fresh / "bin" / "python").symlink_to("python3.8")
        (fresh / "lib" / name).symlink_to(shared)
        (fresh / "pyvenv.cfg").write_text(
            f"home = {base}/bin\ninclude-system-site-packages = false\n"
        )
        if interpreters.inspect(str(fresh / "bin" / "python3.8"), ()).version[:2] != (3, 8):
            raise WorkerLaunchError(f"{real} does not run as {place.python}")
        fresh.rename(place.environment)
    return f"{place.python} -> {real}"


def _facts(python: str) -> tuple[str, str, str]:
    done = subprocess.run([python, "-E", "-s", "-c", _FACTS], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=30, check=False)  # fmt: skip
    parts = (done.stdout.splitlines() or [""])[-1].split("|")
    if done.returncode != 0 or len(parts) != 3:
        raise WorkerLaunchError(f"{python} is no Python interpreter")
    return parts[0], parts[1], parts[2]


def make_conda(place: Place, *, accepted: bool) -> str:
    """Miniconda and its environment `hsgym`, by the commands of UniSim's manual."""
    if place.python != place.home / isaacgym_home.INTERPRETER:
        raise WorkerLaunchError(f"{place.python} is not there, and conda would not make it there")
    require_terms(accepted)
    if not os.access(place.conda, os.X_OK):
        place.home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".miniconda-", dir=place.home) as folder:
            script = Path(folder) / "miniconda.sh"
            download(MINICONDA_URL, script)
            command("bash", str(script), "-b", "-u", "-p", str(place.home / "miniconda3"))
    for channel in _CHANNELS:
        command(str(place.conda), "tos", "accept", "--override-channels", "--channel", channel)
    # One solve, from conda-forge alone; libstdcxx-ng is what Ubuntu 24.04 lacks.
    command(str(place.conda), "create", "-y", "-n", "hsgym", "-c", "conda-forge",
            "--override-channels", "python=3.8", "libstdcxx-ng")  # fmt: skip
    return f"{place.python} by conda"


def require_terms(accepted: bool) -> None:
    """Nobody's terms are accepted unasked. WorkerLaunchError when nobody can be asked, or says no."""
    words = f"Miniconda is used under Anaconda's terms of service ({', '.join(_CHANNELS)})"
    if accepted:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise WorkerLaunchError(
            f"{words}, and there is no terminal to ask at: pass --accept-conda-terms if you accept "
            "them, or --python with a Python 3.8 that has libpython3.8.so.1.0 (uv python install 3.8)"
        )
    if not click.confirm(f"{words}. Accept them?", default=False):
        raise WorkerLaunchError("not accepted; nothing was installed. --python needs no conda")


def command(*words: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CONDA"))}
    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, errors="replace",
            stdin=subprocess.DEVNULL, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WorkerLaunchError(f"did not end: {shlex.join(words)}") from None
    except OSError as error:
        raise WorkerLaunchError(f"{shlex.join(words)}: {error.strerror}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise WorkerLaunchError(f"failed: {shlex.join(words)}\n{isaacgym_check.with_help(tail)}")


# -- packages --------------------------------------------------------------------------------------


def site_there(place: Place) -> str:
    if not place.has_python:
        return ""
    seen = interpreters.inspect(str(place.python))
    if not seen.good:
        return ""
    return ", ".join(f"{name} {version}" for name, version in seen.found.items())


def fill_site(place: Place) -> str:
    """The folder of ours that `outboard setup worker` fills too; the environment is not written to."""
    python = str(place.python)
    seen = interpreters.inspect(python)
    if seen.problem:
        raise WorkerLaunchError(f"{python} {isaacgym_check.with_help(seen.problem)}")
    site = interpreters.site_folder(python)
    setup_worker.fill(seen, tuple(seen.missing), site)
    after = interpreters.inspect(python)
    if not after.good:
        raise WorkerLaunchError(
            f"{python} still lacks {', '.join(after.missing)} after filling {site}"
        )
    return f"{', '.join(seen.missing)} into {site}"


def torch_there(place: Place) -> str:
    if not (place.has_package and place.has_python):
        return ""
    seen = isaacgym_check.check(place.installation(), os.environ)
    return "torch and ninja are there" if seen.torch and seen.ninja else ""


def _torch_command(place: Place) -> list[str]:
    pip = [str(place.python), "-E", "-s", "-m", "pip", "install", "--no-input"]
    return [*pip, "-e", str(place.package), "ninja"]


def add_torch(place: Place) -> str:
    """Isaac Gym with all it declares, torch among it, by that environment's own pip."""
    for lock in examination.stale_locks():
        if Path(lock.path).parent.name == "gymtorch":
            raise WorkerLaunchError(isaacgym_check.with_help(lock.path))
    if interpreters.inspect(str(place.python), ("pip",)).missing:
        command(str(place.python), "-E", "-s", "-m", "ensurepip")
    command(*_torch_command(place))
    return "torch and ninja; gymtorch itself is built at its first import, which takes minutes"


# -- the end ---------------------------------------------------------------------------------------


def self_check(place: Place) -> str:
    seen = isaacgym_check.check(place.installation(), os.environ)
    if seen.failed:
        raise WorkerLaunchError(
            f"{place.python} cannot import isaacgym: {isaacgym_check.with_help(seen.failed)}"
        )
    words = f"Python {seen.version}, {isaacgym_check.LIBPYTHON}, GLIBCXX {seen.glibcxx}, gymapi"
    return f"{words}; but {isaacgym_check.with_help(seen.warning)}" if seen.warning else words


def _say_exports(place: Place) -> None:
    home = isaacgym_home.TABLE[0].variable
    default = Path(os.path.expanduser(isaacgym_home.DEFAULT_HOME)).absolute()
    if place.why and not str(place.python).startswith(f"{place.home}/"):
        _say("ready: the variables that are set now lead there; keep them")
        return
    if place.home == default:
        _say("ready: it is found there without any variable. Other programs may want:")
    else:
        _say("ready: put this into your shell's start-up file:")
        _say(f"export {home}={shlex.quote(str(place.home))}")
        _say("and, for UniSim and UniLab:")
    _say(f"export UNISIM_ISAACGYM_HOME={shlex.quote(str(place.home))}")
    _say(f"export UNILAB_BENCHMARK_HOLOSOMA_DEPS={shlex.quote(str(place.home))}")
    _say(f"export UNILAB_BENCHMARK_HSGYM_PYTHON={shlex.quote(str(place.python))}")
    _say(f"export UNILAB_BENCHMARK_HSGYM_LIB={shlex.quote(str(place.environment / 'lib'))}")


def _say(words: str) -> None:
    terminal.console().print(Text(words), soft_wrap=True)
