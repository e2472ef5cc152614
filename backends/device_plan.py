"""What `device=` may be, and the one device it means."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..ipc.device import CPU, DeviceId, PlannedDevice, VisibleGpu
from ..ipc.errors import DevicePlanError, UsageError
from .inventory import Inventory
from .launchers import launched_ranks
from .visibility import Env, Visibility, look, worker_variables

# `rank_plan` builds on this file; the two functions below that need it import it when called.

_CUDA = re.compile(r"cuda:(0|[1-9][0-9]*)\Z")

ACCEPTED = (
    'write device="cuda:1" (this process\'s numbering), torch.device("cuda", 1), a UUID or unique '
    'prefix "GPU-ce08", "MIG-<uuid>", RankPlan.from_env().device, or "cpu"'
)


@dataclass(frozen=True)
class DevicePlan:
    """The device one worker is promised, and why."""

    device: DeviceId
    host: str  # what this process calls it: "cuda:1", "cpu"; "" when this process does not see it
    host_index: int | None  # position in PCI order (nvidia-smi's), None for cpu or when unknown
    mask: str  # CUDA_VISIBLE_DEVICES for the worker: exactly one entry, "" for cpu
    why: str  # one sentence
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    source: str = ""  # the launcher whose RankPlan made this; "" when the caller named the device

    @property
    def planned(self) -> PlannedDevice:
        """What goes into INIT: in a worker narrowed to one GPU that GPU is always `cuda:0`."""
        local = CPU if self.device.kind == CPU else "cuda:0"
        return PlannedDevice(self.device.kind, self.device.uuid, local)

    def __str__(self) -> str:
        if self.device.kind == CPU:
            return CPU
        return f"{self.host or 'hidden here'} = {self.device.uuid}"

    def worker_variables(
        self, *, uuid_tokens: bool = True, graphics: bool = False
    ) -> dict[str, str]:
        """Mask and order for this worker's environment. DevicePlanError, see visibility.py."""
        return worker_variables(
            self.device, self.host_index, uuid_tokens=uuid_tokens, graphics=graphics
        )


def cpu_plan(why: str = "the caller asked for the CPU") -> DevicePlan:
    return DevicePlan(DeviceId(CPU), CPU, None, "", why)


def gpu_plan(gpu: VisibleGpu, seen: Visibility, why: str) -> DevicePlan:
    """The plan for one GPU that this process sees. DevicePlanError."""
    device, host_index = DeviceId(gpu.kind, gpu.uuid), seen.inventory.host_index(gpu.uuid)
    host = f"cuda:{gpu.ordinal}" if seen.ordered else ""
    return DevicePlan(device, host, host_index, gpu.uuid, why)


def resolve_device(
    device: object, env: Env | None = None, inventory: Inventory | None = None
) -> DevicePlan:
    """The plan for a backend's `device=` argument. UsageError, DevicePlanError.

    Without `inventory`, the driver of this machine is asked (once per process and mask).
    """
    if isinstance(device, DevicePlan):
        return device
    from .rank_plan import RankPlan

    if isinstance(device, RankPlan):
        return device.device
    text = _as_text(device)
    if text == CPU:
        return cpu_plan()
    ordinal = _CUDA.match(text)
    if ordinal:
        seen = look(env, inventory)
        gpu = seen.at(int(ordinal[1]))
        return gpu_plan(gpu, seen, f"the caller asked for {text}, of {seen}")
    if re.match(r"(GPU|MIG)-[0-9A-Fa-f]", text):
        seen = look(env, inventory)
        return gpu_plan(seen.find(text), seen, f"the caller asked for {text}")
    raise UsageError(f"device={text!r} names no device; {ACCEPTED}")


def check_against_launcher(
    plan: DevicePlan, env: Env | None = None, inventory: Inventory | None = None
) -> DevicePlan:
    """`plan` with this process's rank; or a refusal, of a device that a caller named under a launcher
    of several ranks, unless it is the GPU that the launcher means for this rank: eight ranks that all
    say "cuda:0" are the original defect.

    A plan made by a RankPlan passes: whoever wrote `RankPlan.explicit` said so on purpose.
    Raises DevicePlanError.
    """
    if plan.source:
        return plan
    from .rank_plan import RankPlan

    try:
        ranks = launched_ranks(env)
    except DevicePlanError:
        if plan.device.kind == CPU:  # the rank is for logs only: a CPU is no question of ranks
            return plan
        raise
    ranked = replace(
        plan,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
    )
    if plan.device.kind == CPU or ranks.world_size <= 1:
        return ranked
    where = f"this is rank {ranks.rank} of {ranks.world_size} ({ranks.source})"
    instead = (
        "Write device=RankPlan.from_env().device, or say that you mean it: device=RankPlan.explicit"
        f'(rank={ranks.rank}, world_size={ranks.world_size}, device="{plan.device.uuid}").device'
    )
    try:
        expected = RankPlan.from_env(env, inventory=inventory)
    except DevicePlanError as error:
        raise DevicePlanError(
            f"{where} and the device was given as {plan}, while the launcher's variables name no "
            f"GPU for certain: {error.message}. {instead}"
        ) from error
    if expected.device.device != plan.device:
        raise DevicePlanError(
            f"{where}, for which {expected.device} is planned ({expected.why}), but the device was "
            f"given as {plan}. {instead}"
        )
    return ranked


def _as_text(device: object) -> str:
    """`device` as text; torch.device is recognised by its attributes, without importing torch."""
    if isinstance(device, str):
        if device in ("", "cuda"):
            raise UsageError(
                f"device={device!r} does not say which GPU, and there is no default; {ACCEPTED}"
            )
        return device
    if device is None:
        raise UsageError(f"device=None is how every rank once ended up on GPU 0; {ACCEPTED}")
    if isinstance(device, (bool, int)):
        raise UsageError(
            f"device={device!r}: a bare number does not say who counts (nvidia-smi, "
            f"CUDA_VISIBLE_DEVICES or torch); {ACCEPTED}, or RankPlan.from_host_indices([1], rank=0)"
        )
    kind, index = getattr(device, "type", None), getattr(device, "index", None)
    if kind == CPU:
        return CPU
    if kind == "cuda" and isinstance(index, int):
        return f"cuda:{index}"
    if kind == "cuda":
        raise UsageError(
            f"device={device!r} has no index: it means whatever is current; {ACCEPTED}"
        )
    raise UsageError(f"device={device!r} names no device; {ACCEPTED}")
