"""What `outboard doctor` finds out about this machine: facts first, then what is wrong with them.

Nothing here changes anything, starts CUDA in this process, or trusts one source alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from ..ipc import doorbell
from ..ipc.errors import DevicePlanError, WorkerLaunchError
from . import (
    interpreters,
    isaacgym_check,
    isaacgym_home,
    isaacsim_check,
    isaacsim_home,
    logs,
    memory,
    registry,
    visibility,
    witness,
)
from .inventory import HostGpu
from .isaacgym import IsaacGymBackend
from .isaacsim import IsaacSimBackend

# The import of torch from a cold disk.
_TORCH_S = 120.0
# Nobody builds an extension for this long without a compiler in its folder.
_LOCK_S = 180.0
# What one worker takes of this process's descriptors, with room: socket, pidfd twice, eventfd, log, block.
_FDS_PER_WORKER = 8
_WORKERS = 8  # ranks on one host that must be possible

_TORCH_PROBE = """
import json, torch
gpus = []
for i in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(i)
    gpus.append([str(getattr(facts, "uuid", "")), facts.name])
print("\\n" + json.dumps([torch.__version__, torch.version.cuda or "", gpus]))
"""


@dataclass(frozen=True)
class Problem:
    stops: bool  # a run would not start; else only worth knowing
    what: str
    remedy: str = ""


@dataclass(frozen=True)
class SimulatorFacts:
    name: str
    python: str
    python_version: str
    found: dict[str, str]
    missing: dict[str, str]
    problem: str
    install: str  # the line that helps, "" when nothing is missing
    why: tuple[str, ...] = ()  # which variable led to its parts
    too_new: tuple[str, ...] = ()  # GPUs on which it is reported to crash

    @property
    def ready(self) -> bool:
        return not (self.missing or self.problem)


@dataclass(frozen=True)
class GpuFacts:
    """The same GPUs by three witnesses. `uuid` without prefix never; "" in MIG mode."""

    driver: tuple[HostGpu, ...]  # of the whole machine, PCI order
    driver_silent: str  # why the driver shows none
    nvml: tuple[tuple[str, str], ...]  # uuid, name
    nvml_silent: str
    torch: str  # version, "" when it is not installed
    torch_cuda: str  # the CUDA it was built for, "" for a CPU build
    torch_gpus: tuple[tuple[str, str], ...]  # in the order of its cuda:N
    torch_silent: str
    visible: tuple[str, ...]  # UUIDs that the driver shows a process with the inherited mask
    mask: str  # its meaning in words
    mask_refused: str  # "" or why nobody can say what it means


@dataclass(frozen=True)
class Lock:
    path: str
    age_s: float


@dataclass(frozen=True)
class Examination:
    python: str
    executable: str
    kernel: str
    packages: dict[str, str]
    simulators: tuple[SimulatorFacts, ...]
    gpus: GpuFacts
    shm_bytes: int
    shm_free_bytes: int
    shm_refused: str  # "" when a semaphore could be made there
    nofile: int
    nofile_used: int
    cores: int
    memory: tuple[memory.Room, ...]
    stale_locks: tuple[Lock, ...]
    leftover_semaphores: int
    logs_folder: str
    logs: int
    logs_bytes: int
    problems: tuple[Problem, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not any(problem.stops for problem in self.problems)


def simulator_facts(name: str, worker_python: str | None) -> SimulatorFacts:
    backend = registry.find(name)
    if issubclass(backend, IsaacGymBackend):
        return isaacgym_facts(name, worker_python)
    if issubclass(backend, IsaacSimBackend):
        return isaacsim_facts(name, worker_python)
    traits = backend.traits
    python = interpreters.locate_for(traits, worker_python)
    seen = interpreters.inspect(python, interpreters.WORKER_PACKAGES + traits.packages)
    ours = [package for package in seen.missing if package in interpreters.WORKER_PACKAGES]
    problem = seen.problem
    if seen.version and seen.version < interpreters.OLDEST:
        problem = f"is older than Python {'.'.join(map(str, interpreters.OLDEST))}"
    install = ""
    if seen.missing and traits.environment and set(seen.missing) - set(ours):
        install = f"outboard setup {traits.environment.name}"
    elif ours:
        install = interpreters.setup_line(python)
    elif seen.missing and traits.setup != "worker":
        install = interpreters.setup_line(python, traits.setup)
    elif seen.missing:
        install = f"{python} -m pip install {' '.join(seen.missing)}"
    answered = ".".join(map(str, seen.version))
    return SimulatorFacts(name, python, answered, seen.found, seen.missing, problem, install)


def isaacgym_facts(name: str, worker_python: str | None) -> SimulatorFacts:
    """Where it is by the discovery table, and whether it imports there as a worker imports it."""
    setup = "outboard setup isaacgym"
    try:
        found = isaacgym_home.find(os.environ, worker_python)
    except WorkerLaunchError:
        return SimulatorFacts(name, "", "", {}, {}, "is not installed", setup)
    seen = isaacgym_check.check(found, os.environ)
    if seen.failed:
        problem = f"cannot import isaacgym: {isaacgym_check.with_help(seen.failed)}"
        return SimulatorFacts(name, found.python, seen.version, {}, {}, problem, setup, found.why)
    has = {"gymapi": "Preview 4", "numpy": seen.numpy, "GLIBCXX": seen.glibcxx}
    ours = interpreters.inspect(found.python).missing
    return SimulatorFacts(
        name, found.python, seen.version, has, ours,
        isaacgym_check.with_help(seen.warning) if seen.warning else "",
        interpreters.setup_line(found.python) if ours else "", found.why,
    )  # fmt: skip


def isaacsim_facts(name: str, worker_python: str | None) -> SimulatorFacts:
    """Where it is by the discovery table, its versions, and whether its licence is accepted; Kit is not
    started."""
    try:
        found = isaacsim_home.find(os.environ, worker_python)
    except WorkerLaunchError:
        return SimulatorFacts(name, "", "", {}, {}, "is not installed", "outboard setup isaacsim")
    seen = isaacsim_check.check(found, os.environ)
    ours = {} if seen.problems else interpreters.inspect(found.python).missing
    problem, install = "; it ".join(seen.problems), ""
    if ours:
        install = interpreters.setup_line(found.python, "isaacsim")
    elif not problem and not os.environ.get(isaacsim_check.LICENCE):
        problem = f"waits for you: {isaacsim_check.LICENCE} is not set"
        install = f"read NVIDIA's Omniverse licence, then export {isaacsim_check.LICENCE}=YES"
    return SimulatorFacts(
        name, found.python, seen.version, seen.found, ours, problem, install, found.why
    )


def gpu_facts() -> GpuFacts:
    """Asked in children, but for NVML, which starts no CUDA."""
    driver: tuple[HostGpu, ...] = ()
    visible: tuple[str, ...] = ()
    silent = refused = ""
    try:
        inventory = visibility.probe()
        driver, visible = inventory.gpus, inventory.driver or ()
    except DevicePlanError as error:
        silent = error.message
    if driver:
        try:
            visibility.look()
        except DevicePlanError as error:
            refused = error.message
    seen, nvml_silent = witness.inventory()
    nvml = tuple((gpu.uuid, gpu.name) for gpu in seen)
    mask = visibility.meaning(os.environ) if driver else ""
    torch = _torch_facts()
    return GpuFacts(driver, silent, nvml, nvml_silent, *torch, visible, mask, refused)


def _torch_facts() -> tuple[str, str, tuple[tuple[str, str], ...], str]:
    """(version, CUDA, GPUs, why silent), from a child: CUDA reads its mask once per process."""
    if importlib.util.find_spec("torch") is None:
        return "", "", (), ""
    installed = version("torch")
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _TORCH_PROBE], capture_output=True, text=True,
            timeout=_TORCH_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        installed, cuda, gpus = json.loads(done.stdout.rsplit("\n", 2)[-2])
    except subprocess.TimeoutExpired:
        return installed, "", (), f"import and query took more than {_TORCH_S:.0f} s"
    except (ValueError, IndexError):
        return installed, "", (), "cannot be imported here"
    named = tuple(
        (uuid if uuid[:4] in ("", "MIG-") else f"GPU-{uuid}", name) for uuid, name in gpus
    )
    return installed, cuda, named, ""


def version(package: str) -> str:
    """Of an installed distribution, "" when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def stale_locks(folder: Path | None = None) -> tuple[Lock, ...]:
    """Locks of torch's extension builds that nobody holds: a build that meets one waits for ever."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    folder = Path(root).expanduser() if folder is None else folder
    found: list[Lock] = []
    for lock in sorted(folder.rglob("lock")):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        if age_s > _LOCK_S and not any(_works_in(lock.parent)):
            found.append(Lock(str(lock), round(age_s)))
    return tuple(found)


def _works_in(folder: Path) -> Iterator[int]:
    """Processes whose current folder it is: ninja and the compilers it starts."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve(strict=True).is_relative_to(folder.resolve()):
                yield int(entry.name)
        except OSError:  # gone, or another user's
            continue


def _shm() -> tuple[int, int, str]:
    """(size, free, "" or why no semaphore can be made) of /dev/shm."""
    try:
        status = os.statvfs("/dev/shm")
        with doorbell.semaphore_pair():
            pass
    except OSError as error:
        return 0, 0, f"no semaphore can be made in /dev/shm: {error.strerror or error}"
    except Exception as error:  # noqa: BLE001 - posix_ipc has errors of its own
        return 0, 0, f"no semaphore can be made in /dev/shm: {error}"
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail, ""


def _logs() -> tuple[str, int, int]:
    try:
        folder = logs.folder()
        sizes = [entry.stat().st_size for entry in folder.glob("*.log")]
    except OSError:
        return "", 0, 0
    return str(folder), len(sizes), sum(sizes)


def _with_gpus(one: SimulatorFacts, gpus: GpuFacts) -> SimulatorFacts:
    """Those GPUs beside the installation that it is too old for."""
    if not (one.python and issubclass(registry.find(one.name), IsaacGymBackend)):
        return one
    names = [gpu.name for gpu in gpus.driver] + [name for _, name in gpus.nvml]
    return replace(one, too_new=isaacgym_check.too_new(names))


def examine(worker_python: str | None = None) -> Examination:
    """Everything at once: the slow ones are children, so threads are enough."""
    semaphores = len(list(Path("/dev/shm").glob("sem.outboard-*")))
    with ThreadPoolExecutor(max_workers=8) as pool:
        gpus = pool.submit(gpu_facts)
        asked = [pool.submit(simulator_facts, name, worker_python) for name in registry.BACKENDS]
        shm_bytes, shm_free, shm_refused = _shm()
        folder, count, size = _logs()
        facts = Examination(
            python=platform.python_version(),
            executable=sys.executable,
            kernel=platform.release(),
            packages={
                name: version(name)
                for name in ("outboard", "numpy", "msgpack", "posix_ipc", "nvidia-ml-py")
            },
            simulators=tuple(_with_gpus(one.result(), gpus.result()) for one in asked),
            gpus=gpus.result(),
            shm_bytes=shm_bytes,
            shm_free_bytes=shm_free,
            shm_refused=shm_refused,
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            nofile_used=len(os.listdir("/proc/self/fd")),
            cores=len(os.sched_getaffinity(0)),
            memory=tuple(memory.rooms()),
            stale_locks=stale_locks(),
            leftover_semaphores=semaphores,
            logs_folder=folder,
            logs=count,
            logs_bytes=size,
        )
    return facts


# -- the verdict -----------------------------------------------------------------------------------


def problems(facts: Examination) -> tuple[Problem, ...]:
    """What is wrong, the worst first."""
    found = [*_host_problems(facts), *_simulator_problems(facts), *gpu_problems(facts.gpus)]
    found += [
        Problem(
            False,
            f"{lock.path} is {lock.age_s / 60:.0f} minutes old and nobody builds there: torch would "
            "wait for it for ever",
            f"rm {lock.path}",
        )
        for lock in facts.stale_locks
    ]
    return tuple(sorted(found, key=lambda problem: not problem.stops))


def _host_problems(facts: Examination) -> Iterator[Problem]:
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        yield Problem(
            True, f"this Python or Linux {facts.kernel} has no pidfd or memfd", "Linux 5.4"
        )
    if facts.shm_refused:
        yield Problem(True, facts.shm_refused, "mount a tmpfs there; 1 MB is enough")
    needed = facts.nofile_used + _WORKERS * _FDS_PER_WORKER
    if 0 <= facts.nofile < needed:
        yield Problem(
            True,
            f"only {facts.nofile} file descriptors are allowed; {_WORKERS} workers need {needed}",
            "ulimit -n 1024",
        )
    for room in facts.memory:
        try:
            memory.require(1 << 20, [room])
        except ValueError:
            free = f"{room.free_bytes >> 20} MiB"
            yield Problem(True, f"{room.where} has only {free} of memory left")
    for name in ("numpy", "msgpack", "posix_ipc"):
        if not facts.packages[name]:
            yield Problem(True, f"this Python has no {name}", f"pip install {name}")


def _simulator_problems(facts: Examination) -> Iterator[Problem]:
    for one in facts.simulators:
        if not one.ready:
            why = one.problem or f"lacks {', '.join(one.missing)}"
            where = f"{one.name}: {one.python}" if one.python else one.name
            yield Problem(one.name == registry.EMBEDDED, f"{where} {why}", one.install)
        if one.too_new:
            names = ", ".join(one.too_new)
            yield Problem(
                False,
                f"{one.name} is reported to crash in create_sim on GPUs newer than it, and here is {names}",
                'an older GPU, or device="cpu"',
            )


def gpu_problems(gpus: GpuFacts) -> Iterator[Problem]:
    """Where the witnesses disagree. No GPU at all is no problem: there are simulators for the CPU."""
    driver = {gpu.uuid for gpu in gpus.driver if gpu.uuid}
    nvml = {uuid for uuid, _ in gpus.nvml}
    if nvml and not gpus.driver:
        yield Problem(
            True, f"NVML sees {len(nvml)} GPUs and CUDA cannot use any: {gpus.driver_silent}"
        )
    elif gpus.driver and gpus.nvml_silent:
        yield Problem(False, f"no outside witness: {gpus.nvml_silent}")
    elif driver and nvml and driver != nvml:
        only = ", ".join(sorted(driver ^ nvml))
        yield Problem(False, f"the driver and NVML disagree about {only}")
    if gpus.mask_refused:
        yield Problem(True, gpus.mask_refused)
    if gpus.torch and gpus.torch_silent:
        yield Problem(False, f"torch {gpus.torch} {gpus.torch_silent}")
    elif gpus.torch and gpus.driver and not gpus.torch_cuda:
        yield Problem(False, f"torch {gpus.torch} is a build without CUDA: no tensors on the GPU")
    elif gpus.torch_cuda and gpus.driver:
        seen = tuple(uuid for uuid, _ in gpus.torch_gpus)
        if len(seen) != len(gpus.visible) or (all(seen) and seen != gpus.visible):
            yield Problem(
                False,
                f"torch sees {len(seen)} GPUs ({', '.join(seen) or 'none'}) where the driver shows "
                f"{len(gpus.visible)} ({', '.join(gpus.visible) or 'none'})",
            )
