"""Device identity as data: parse, normalise, compare. Nothing here calls CUDA.

A GPU is a UUID. An ordinal has a meaning only together with the process that counts, so the
ordinals below always say whose they are.
"""

import re
from dataclasses import dataclass
from typing import Optional, Tuple

CPU, GPU, MIG = "cpu", "gpu", "mig"
KINDS = (CPU, GPU, MIG)
PREFIX = {GPU: "GPU-", MIG: "MIG-"}

# Where a reported buffer comes from: the engine's own array, a copy the engine made for us (second
# rank: torch may sit on another GPU than the physics), or plain host memory.
ENGINE_BUFFER, DERIVED_COPY, HOST_MEMORY = "engine_buffer", "derived_copy", "host_memory"
EVIDENCE = (ENGINE_BUFFER, DERIVED_COPY, HOST_MEMORY)

_HEX = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z")


def normalise_uuid(text: str, kind: str = GPU) -> str:
    """`text` as `GPU-` (or `MIG-`) plus 8-4-4-4-12 lower-case hex digits.

    Sources disagree: torch prints no prefix, NVML and nvidia-smi print one, hex case varies.
    Raises ValueError for anything that is not one whole UUID, for one with the prefix of another kind,
    and for the all-zero UUID, which drivers return when they do not know.
    """
    bare = text.strip()
    if bare[:4].upper() in PREFIX.values():
        if bare[:4].upper() != PREFIX[kind]:
            raise ValueError(f"{text!r} is not the UUID of a {kind} device")
        bare = bare[4:]
    bare = bare.lower()
    if re.match(r"[0-9a-f]{32}\Z", bare):
        bare = "-".join((bare[:8], bare[8:12], bare[12:16], bare[16:20], bare[20:]))
    if not _HEX.match(bare):
        raise ValueError(f"{text!r} is not a whole device UUID")
    if not bare.strip("0-"):
        raise ValueError(f"{text!r} is the zero UUID: the driver did not know")
    return PREFIX[kind] + bare


def uuid_from_bytes(raw: bytes, kind: str = GPU) -> str:
    """The 16 bytes of `cuDeviceGetUuid_v2`, in order, as text."""
    if len(raw) != 16:
        raise ValueError(f"a device UUID has 16 bytes, not {len(raw)}")
    return normalise_uuid(raw.hex(), kind)


def pci_triple(text: str) -> Tuple[int, int, int]:
    """(domain, bus, device) of a PCI bus id. CUDA prints a 4-digit domain, NVML one of 8 digits,
    Warp leaves the function away; as integers they compare equal."""
    match = re.match(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)(?:\.[0-7])?\Z", text)
    if not match:
        raise ValueError(f"{text!r} is not a PCI bus id")
    domain, bus, device = (int(part, 16) for part in match.groups())
    return domain, bus, device


def _check_identity(kind: str, uuid: str) -> None:
    if kind not in KINDS:
        raise ValueError("device kind {!r} is not one of {}".format(kind, ", ".join(KINDS)))
    if kind == CPU:
        if uuid:
            raise ValueError(f"a CPU has no device UUID, got {uuid!r}")
    elif not uuid:
        raise ValueError(f"a {kind} device without UUID is no identity")
    elif uuid != normalise_uuid(uuid, kind):
        raise ValueError(f"device UUID {uuid!r} is not in canonical form")


@dataclass(frozen=True)
class DeviceId:
    """One device: `cpu`, or a GPU or MIG instance by its canonical UUID."""

    kind: str
    uuid: str = ""

    def __post_init__(self) -> None:
        _check_identity(self.kind, self.uuid)

    def __str__(self) -> str:
        return self.uuid or CPU


@dataclass(frozen=True)
class PlannedDevice:
    """What INIT carries: the device the worker must be on, and the ordinal it will call it by."""

    kind: str
    uuid: str  # canonical; "" for cpu
    local: str  # "cuda:0" in a worker narrowed to one GPU, or "cpu"

    def __post_init__(self) -> None:
        _check_identity(self.kind, self.uuid)
        if (self.local == CPU) != (self.kind == CPU):
            raise ValueError(f"local device {self.local!r} does not fit kind {self.kind}")


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU as the driver of one process lists it. `ordinal` is that process's own numbering."""

    ordinal: int
    kind: str
    uuid: str
    pci: str
    name: str


@dataclass(frozen=True)
class DeviceReport:
    """What a worker *measured* after building its scene and simulating one step; never an echo.

    kind      where the state buffer lies: cpu, gpu or mig
    uuid      of that device, from the driver; "" for cpu
    local     the worker's own name for it, "cuda:0" or "cpu"
    pci, name from the driver; "" for cpu
    evidence  one of EVIDENCE
    buffer    which buffer was asked about, for instance "qpos"
    visible   UUIDs of all GPUs this process sees
    contexts  UUIDs of the visible GPUs with an active primary context
    driver    "" when the CUDA driver answered, else why not
    """

    kind: str
    uuid: str
    local: str
    pci: str
    name: str
    evidence: str
    buffer: str
    visible: Tuple[str, ...]
    contexts: Tuple[str, ...]
    driver: str

    def __post_init__(self) -> None:
        _check_identity(self.kind, self.uuid)
        if self.evidence not in EVIDENCE:
            raise ValueError(
                "evidence {!r} is not one of {}".format(self.evidence, ", ".join(EVIDENCE))
            )
        if (self.kind == CPU) != (self.evidence == HOST_MEMORY):
            raise ValueError(f"evidence {self.evidence} does not fit device kind {self.kind}")

    @property
    def device(self) -> DeviceId:
        return DeviceId(self.kind, self.uuid)


def cpu_report(buffer: str, visible: Tuple[str, ...] = (), driver: str = "") -> DeviceReport:
    """The report of a simulator whose state lies in host memory."""
    return DeviceReport(CPU, "", CPU, "", "", HOST_MEMORY, buffer, visible, (), driver)


def same_device(plan: PlannedDevice, report: DeviceReport) -> Optional[str]:
    """None when the report names the planned device, else the difference in words."""
    if plan.kind != report.kind:
        return f"planned {plan.uuid or CPU} but the state lies on {report.device}"
    if plan.uuid != report.uuid:
        return f"planned {plan.uuid} but the state lies on {report.uuid}"
    return None
