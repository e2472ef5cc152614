"""What NVML, which no mask can steer, sees of a worker: on which GPUs it really has contexts.

The worker's own report comes from the driver behind the worker's mask, and is blind to every hidden
GPU. NVML lists the pids with a compute or graphics context on each GPU of the machine. That proves
something only where its pids are ours: in a container they are the host's, and the answer then is
`unobserved`, never a confirmation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from ..ipc.device import GPU, MIG, VisibleGpu, normalise_uuid

# Inode of the first pid namespace, fixed in the kernel (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_WSL_GPU = "/dev/dxg"  # WSL's only GPU device; its NVML has no process lists

# Under MPS a client may stand in the third list alone.
_LISTS = ("Compute", "Graphics", "MPSCompute")

_NO_PERMISSION = pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_NO_PERMISSION)
_NOT_FOUND = pynvml.nvmlExceptionClass(pynvml.NVML_ERROR_NOT_FOUND)


@dataclass(frozen=True)
class Sighting:
    """What the outside witness can say of one worker.

    observed  the GPUs below are all that the worker has contexts on
    why       "" or why the witness cannot tell
    gpus      UUIDs, in NVML's order. When not `observed`, those that were seen with certainty: one
              that is not the planned GPU is still proof, but nothing follows from what is absent
    """

    observed: bool
    why: str
    gpus: tuple[str, ...] = ()


class _Unavailable(Exception):
    """NVML cannot be asked at all."""


def look(pid: int, *, has_context: bool) -> Sighting:
    """The GPUs on which `pid` or a process below it has a context.

    `has_context`: the worker itself reports one. Then an NVML that lists none is blind, not a proof
    of absence.
    """
    try:
        with _nvml():
            return _judge(_family(pid), *_pids_by_gpu(), has_context)
    except _Unavailable as error:
        return Sighting(False, str(error))


def _judge(
    family: frozenset[int], pids: dict[str, frozenset[int]], gaps: list[str], has_context: bool
) -> Sighting:
    seen = tuple(uuid for uuid, users in pids.items() if users & family)
    foreign = _not_our_pids(frozenset[int]().union(*pids.values()), bool(seen))
    if foreign:
        return Sighting(False, foreign)
    if gaps:
        return Sighting(False, "; ".join(gaps), seen)
    if has_context and not seen:
        return Sighting(False, "NVML lists no process of the worker, which reports a GPU context")
    return Sighting(True, "", seen)


def _not_our_pids(listed: frozenset[int], worker_listed: bool) -> str:
    """ "" when NVML's pids count as ours do, else why that is not known.

    In the first pid namespace they do. In any other (a container) the driver may speak of the
    host's pids; it is trusted only if it lists somebody whom we know, the worker or this process,
    and nobody who does not exist here, since small pids coincide easily.
    """
    if os.path.exists(_WSL_GPU):
        return "WSL: NVML has no process lists there"
    try:
        if os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE:
            return ""
    except OSError as error:
        return f"this process's pid namespace cannot be told: {error}"
    strangers = sorted(pid for pid in listed if not os.path.exists(f"/proc/{pid}"))
    if strangers:
        return f"pid namespace: NVML lists pid {strangers[0]}, which does not exist here"
    if not worker_listed and os.getpid() not in listed:
        return "pid namespace: NVML lists neither the worker nor this process"
    return ""


def _family(pid: int) -> frozenset[int]:
    """`pid`, everything below it, and its session: a helper whose parent died is still the
    worker's. Processes that vanish while we look are nobody's."""
    parent: dict[int, int] = {}
    family = {pid}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                # The command stands in brackets and may hold anything, brackets too.
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        parent[int(name)] = int(fields[1])
        if int(fields[3]) == pid:
            family.add(int(name))
    grown = True
    while grown:
        children = {child for child, above in parent.items() if above in family} - family
        family |= children
        grown = bool(children)
    return frozenset(family)


# -- asking NVML ---------------------------------------------------------------------------------


def pids_by_gpu() -> dict[str, frozenset[int]]:
    """Every pid that NVML lists, by GPU UUID. {} when NVML cannot be asked."""
    try:
        with _nvml():
            return _pids_by_gpu()[0]
    except _Unavailable:
        return {}


def used_bytes_by_gpu() -> dict[str, int]:
    """Memory in use on each GPU, by whomever. Needs no pids, so it also tells in a container.
    {} when NVML cannot be asked."""
    try:
        with _nvml():
            return {
                _uuid(handle, GPU): int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
                for handle in _gpus()
            }
    except _Unavailable:
        return {}


def inventory() -> tuple[tuple[VisibleGpu, ...], str]:
    """The machine's GPUs in PCI order, whatever the mask says, and "" or why NVML is silent.
    `ordinal` is NVML's index."""
    try:
        with _nvml():
            return tuple(
                VisibleGpu(
                    int(pynvml.nvmlDeviceGetIndex(handle)),
                    GPU,
                    _uuid(handle, GPU),
                    _text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                    _text(pynvml.nvmlDeviceGetName(handle)),
                )
                for handle in _gpus()
            ), ""
    except _Unavailable as error:
        return (), str(error)


@contextmanager
def _nvml() -> Generator[None, None, None]:
    """NVML counts its users: another part of this process may have it open as well. Whatever it
    refuses inside the block, the witness is unavailable and training is not stopped by it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _Unavailable(f"NVML does not start: {error}") from None
    try:
        yield
    except pynvml.NVMLError as error:
        raise _Unavailable(f"NVML does not answer: {error}") from None
    finally:
        with suppress(pynvml.NVMLError):  # somebody else shut it down once too often
            pynvml.nvmlShutdown()


def _gpus() -> Iterable[Any]:
    """Handles of every GPU of the machine that may be opened. NVML also counts those that a cgroup
    keeps from us; it keeps them from our workers as well."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            yield pynvml.nvmlDeviceGetHandleByIndex(index)
        except _NO_PERMISSION:
            continue


def _instances(gpu: Any) -> Iterable[Any]:
    """Handles of a GPU's MIG instances; none where it is not in MIG mode."""
    try:
        enabled = pynvml.nvmlDeviceGetMigMode(gpu)[0]
        slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu) if enabled else 0
    except pynvml.NVMLError:  # GPUs without MIG say "not supported"
        return
    for index in range(slots):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except _NOT_FOUND:  # the slots may have holes
            continue


def _pids_by_gpu() -> tuple[dict[str, frozenset[int]], list[str]]:
    """UUID -> pids, and one sentence for each GPU whose lists could not be read.

    A GPU in MIG mode is replaced by its instances: its own lists are a sum of theirs, and the
    planned device is an instance.
    """
    pids: dict[str, frozenset[int]] = {}
    gaps: list[str] = []
    for gpu in _gpus():
        instances = list(_instances(gpu))
        for handle in instances or [gpu]:
            uuid = _uuid(handle, MIG if instances else GPU)
            pids[uuid], gap = _users(handle)
            if gap:
                gaps.append(f"NVML's process lists of {uuid}: {gap}")
    return pids, gaps


def _users(handle: Any) -> tuple[frozenset[int], str]:
    found: set[int] = set()
    gap = ""
    for which in _LISTS:
        ask: Callable[[Any], list[Any]] = getattr(
            pynvml, f"nvmlDeviceGet{which}RunningProcesses", lambda _handle: []
        )
        try:
            found.update(int(process.pid) for process in ask(handle))
        except pynvml.NVMLError as error:
            if which != "MPSCompute":  # without MPS there is no such list, and nothing is missed
                gap = str(error)
    return frozenset(found), gap


def _uuid(handle: Any, kind: str) -> str:
    return normalise_uuid(_text(pynvml.nvmlDeviceGetUUID(handle)), kind)


def _text(value: str | bytes) -> str:
    """Older nvidia-ml-py returns bytes where newer returns str."""
    return value.decode() if isinstance(value, bytes) else value
