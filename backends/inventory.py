"""The GPUs of this host, and what its driver was seen to answer: asked in children, never in this process.

A process keeps the mask with which it first called cuInit, and training code must be free to choose
its own. What a mask means is `visibility.py`'s to say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..ipc.deadline import Deadline
from ..ipc.device import GPU, MIG, VisibleGpu, normalise_uuid
from ..ipc.errors import DevicePlanError, UsageError

# cuInit of eight cold GPUs takes many seconds; a driver that hangs takes for ever.
PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class MigInstance:
    """A MIG instance by its own UUID and, where known, its GPU and compute instance numbers."""

    uuid: str
    gi: int = -1
    ci: int = -1


@dataclass(frozen=True)
class HostGpu:
    """One GPU of this host. In MIG mode `instances` is not empty and `uuid` may be unknown ("")."""

    uuid: str
    pci: str = ""
    name: str = ""
    instances: tuple[MigInstance, ...] = ()

    @property
    def usable(self) -> str:
        """The UUID that a process gets when it asks for this GPU: in MIG mode the first instance's."""
        return self.instances[0].uuid if self.instances else self.uuid


@dataclass(frozen=True)
class Inventory:
    """The GPUs that this host, container or cgroup has, and what its driver was seen to answer."""

    gpus: tuple[HostGpu, ...]  # PCI order, nvidia-smi's; the position is the host index
    cuda_order: tuple[str, ...] = ()  # UUIDs as CUDA lists them without a mask; () unknown
    driver: tuple[str, ...] | None = None  # UUIDs the driver lists under the mask; None: not asked
    why_none: str = ""  # the driver's words when it listed none

    @classmethod
    def of_uuids(cls, uuids: Iterable[str]) -> Inventory:
        """A machine that is not here, in PCI order. UsageError for what is not a whole UUID."""
        gpus: list[HostGpu] = []
        for text in uuids:
            kind = MIG if text.strip().upper().startswith("MIG-") else GPU
            try:
                uuid = normalise_uuid(text, kind)
            except ValueError as error:
                raise UsageError(f"an assumed GPU: {error}; write GPU-<8-4-4-4-12 hex>") from None
            gpus.append(HostGpu(uuid) if kind == GPU else HostGpu("", "", "", (MigInstance(uuid),)))
        names = [one.uuid for gpu in gpus for one in (gpu, *gpu.instances) if one.uuid]
        if not gpus or len(set(names)) != len(names):
            raise UsageError(f"assumed GPUs must be some, and different ones; got {names}")
        return cls(tuple(gpus))

    def host_index(self, uuid: str) -> int | None:
        """Position in PCI order; None for MIG instances, which no integer names."""
        return next((i for i, gpu in enumerate(self.gpus) if gpu.uuid == uuid), None)

    def matches(self, prefix: str) -> list[str]:
        """Every UUID, of a GPU or a MIG instance, that begins with `prefix`."""
        head = prefix[:4] + prefix[4:].lower()
        known = [one.uuid for gpu in self.gpus for one in (gpu, *gpu.instances)]
        return [uuid for uuid in known if uuid and uuid.startswith(head)]

    def complete(self, prefix: str, what: str) -> str:
        """The one UUID that begins with `prefix`. DevicePlanError, whose message begins with `what`."""
        matches = self.matches(prefix)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise DevicePlanError(
                f"{what} is not unique: {', '.join(matches)} begin like that, and CUDA would show "
                "none of them. Write more digits"
            )
        known = ", ".join(gpu.usable for gpu in self.gpus)
        raise DevicePlanError(f"{what} names no GPU of this host, which has {known}")

    def described(self, ordinal: int, uuid: str) -> VisibleGpu:
        """What is known of the device that some process calls `cuda:ordinal`."""
        kind = MIG if uuid.startswith("MIG-") else GPU
        for gpu in self.gpus:
            if uuid in (gpu.uuid, *(one.uuid for one in gpu.instances)):
                return VisibleGpu(ordinal, kind, uuid, gpu.pci, gpu.name)
        return VisibleGpu(ordinal, kind, uuid, "", "")


# -- asking the driver -----------------------------------------------------------------------------

# Like the first block of workers/__main__.py: nothing of the host's package runs in the child. Its
# Python starts isolated and without `site`, whose hooks may start CUDA or change the mask.
_CHILD = """
import json, sys, types
sys.modules["outboard"] = types.ModuleType("outboard")
sys.modules["outboard"].__path__ = [sys.argv[1]]
from outboard.ipc.cuda_driver import survey
gpus, why_not = survey()
print(json.dumps([[[g.ordinal, g.kind, g.uuid, g.pci, g.name] for g in gpus], why_not]))
"""

_Answer = tuple[tuple[VisibleGpu, ...], str]


def survey(
    inherited: dict[str, str],
    in_pci_order: dict[str, str],
    unmasked: dict[str, str],
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Inventory:
    """This machine's GPUs, and what its driver shows a process with `inherited`. DevicePlanError.

    Three whole environments, three children at most, at once: as inherited; without a mask, in PCI
    order; without a mask, in the inherited order.
    """
    shown, host, own_order = _ask([inherited, in_pci_order, unmasked], timeout_s)
    if not host[0]:
        raise DevicePlanError(
            f"this machine's CUDA driver shows no GPU: {host[1] or 'it has none'}"
        )
    gpus = tuple(
        HostGpu(gpu.uuid, gpu.pci, gpu.name)
        if gpu.kind == GPU
        else HostGpu("", gpu.pci, gpu.name, (MigInstance(gpu.uuid),))
        for gpu in host[0]
    )
    cuda_order = tuple(gpu.uuid for gpu in own_order[0])
    return Inventory(gpus, cuda_order, tuple(gpu.uuid for gpu in shown[0]), shown[1])


def _ask(envs: Sequence[dict[str, str]], timeout_s: float) -> list[_Answer]:
    """`survey()` in one fresh process per environment, equal ones asked once. DevicePlanError."""
    tree = str(Path(__file__).resolve().parent.parent)
    command = [sys.executable, "-I", "-S", "-c", _CHILD, tree]
    children: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}
    answers: dict[frozenset[tuple[str, str]], _Answer] = {}
    pipe, deadline = subprocess.PIPE, Deadline(timeout_s)
    try:
        for env in envs:
            key = frozenset(env.items())
            if key not in children:
                children[key] = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
                )
        for key, child in children.items():
            out, err = child.communicate(timeout=deadline.remaining_s())
            if child.returncode != 0:
                raise DevicePlanError(
                    f"the child that asks the CUDA driver ended with {child.returncode}: "
                    + (err.strip().splitlines() or ["it said nothing"])[-1]
                )
            rows, why_not = json.loads(out)
            answers[key] = tuple(VisibleGpu(*row) for row in rows), why_not
    except subprocess.TimeoutExpired:
        raise DevicePlanError(
            f"the CUDA driver did not answer within {timeout_s:g} s; nvidia-smi may hang as well"
        ) from None
    finally:
        for child in children.values():
            if child.returncode is None:
                child.kill()
                child.communicate()
    return [answers[frozenset(env.items())] for env in envs]
