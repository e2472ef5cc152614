"""Rank -> GPU: where the simulator of this rank will be, and why.

Who the ranks are and which GPU a launcher means for each is the table in `launchers.py`; what torch
already uses in this process is in `learner.py`; comparing all ranks is `rank_check.py`. An environment
that is contradictory or leaves a choice open raises DevicePlanError: nothing here falls back to GPU 0,
nor to the first visible one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..ipc.device import CPU, VisibleGpu
from ..ipc.errors import DevicePlanError, UsageError
from .device_plan import DevicePlan, gpu_plan, resolve_device
from .inventory import Inventory
from .launchers import Case, Choice, Launcher, Ranks, find_launcher
from .learner import gpu_in_use, import_torch, ray_gpu_ids, same_to_torch
from .visibility import Env, Visibility, look

if TYPE_CHECKING:
    from .rank_check import Member

CHECK_TIMEOUT_S = 120.0  # ranks arrive minutes apart when a file system is slow to give them torch


@dataclass(frozen=True)
class RankPlan:
    """One rank, its GPU, and the sentence that explains it. Can be pickled: a collector is another
    process than its learner."""

    rank: int  # global, 0..world_size-1
    local_rank: int  # as the launcher labels it: a label, never an index of a GPU by itself
    world_size: int
    local_world_size: int | None  # None: the launcher does not say
    source: str  # the launcher, or what the caller used instead
    why: str  # the sentence: source, rule, what is visible, UUID
    device: DevicePlan  # what `device=` of a backend takes

    @classmethod
    def from_env(
        cls,
        env: Env | None = None,
        *,
        learner: object = None,
        share: bool = False,
        gpu_ids: Sequence[int | str] | None = None,
        inventory: Inventory | None = None,
    ) -> RankPlan:
        """The plan of the launcher that started this process. DevicePlanError where its variables
        contradict each other or leave a choice open, UsageError for a `learner` that names no device.

        learner    the device this rank's learner is on, any accepted `device=`: it beats arithmetic
                   on ranks. The device that torch already uses in this process counts by itself
        share      several ranks may have one GPU (one visible GPU and more ranks is then no error)
        gpu_ids    what Ray assigned to this actor; asked of Ray where that is running
        inventory  of a machine that is not here; the driver is not asked then
        """
        real = env is None and inventory is None
        env = os.environ if env is None else env
        launcher, ranks = find_launcher(env)
        seen = look(env, inventory)
        if gpu_ids is None and real:
            gpu_ids = ray_gpu_ids()
        case = Case(ranks, seen, env, share, tuple(str(one) for one in gpu_ids or ()))
        given = None if learner is None else _visible(resolve_device(learner, env, inventory), seen)
        if learner is not None and given is None:
            raise UsageError(
                f"learner={learner!r} is no GPU of this process; for simulators on the CPU write "
                f'RankPlan.explicit({ranks.rank}, {ranks.world_size}, "cpu")'
            )
        in_use = gpu_in_use(seen) if real else None
        if given and in_use and given.uuid != in_use.uuid:
            raise DevicePlanError(
                f"learner={learner!r} is {given.uuid}, but torch already uses {in_use.uuid} "
                f"(cuda:{in_use.ordinal}) in this process. Make them one"
            )
        if given:
            why = f"the learner is on it ({learner!r}), which beats arithmetic on ranks"
            return cls._make(ranks, seen, given, why)
        return cls._make(ranks, seen, *_with_torch(launcher, case, in_use))

    @classmethod
    def from_host_indices(
        cls,
        indices: Sequence[int],
        *,
        rank: int,
        numbering: str | None = None,
        share: bool = False,
        env: Env | None = None,
        inventory: Inventory | None = None,
    ) -> RankPlan:
        """Rank r has GPU indices[r], in nvidia-smi's (PCI) numbering. UsageError, DevicePlanError.

        Refused where this process numbers these GPUs otherwise, unless `numbering` says which is
        meant: "host" (nvidia-smi) or "visible" (this process's cuda:N).
        """
        _check_indices(indices, rank, numbering)
        if len(set(indices)) != len(indices) and not share:
            raise DevicePlanError(
                f"host indices {list(indices)} give two ranks one GPU (share=True?)"
            )
        seen = look(env, inventory)
        gpu = _by_index(seen, indices, rank, numbering)
        who = "host index" if numbering != "visible" else "visible index"
        ranks = Ranks(f"{who}es {list(indices)}".replace("indexes", "indices"), rank, rank,
                      len(indices), len(indices))  # fmt: skip
        return cls._make(ranks, seen, gpu, f"rank {rank} takes {who} {indices[rank]}")

    @classmethod
    def explicit(
        cls,
        rank: int,
        world_size: int,
        device: object,
        *,
        local_rank: int | None = None,
        learner: object = None,
        env: Env | None = None,
        inventory: Inventory | None = None,
    ) -> RankPlan:
        """The caller knows. UsageError, DevicePlanError.

        `local_rank` is a label only and `rank` by default. A `learner` device that is given must be
        the same GPU.
        """
        if not 0 <= rank < world_size:
            raise UsageError(
                f"rank {rank} of world size {world_size}: rank must be 0..world size-1"
            )
        plan = resolve_device(device, env, inventory)
        if learner is not None:
            other = resolve_device(learner, env, inventory)
            if other.device != plan.device:
                raise DevicePlanError(
                    f"the device was given as {plan}, but the learner is on {other}. Make them one"
                )
        ranks = Ranks(
            "explicit", rank, rank if local_rank is None else local_rank, world_size, None
        )
        return cls._of(ranks, plan, plan.why)

    @classmethod
    def _make(cls, ranks: Ranks, seen: Visibility, gpu: VisibleGpu, why: str) -> RankPlan:
        text = f"{ranks.source}: {why}: {gpu.uuid}"
        return cls._of(ranks, gpu_plan(gpu, seen, text), text)

    @classmethod
    def _of(cls, ranks: Ranks, plan: DevicePlan, why: str) -> RankPlan:
        size = ranks.world_size
        plan = replace(plan, why=why, rank=ranks.rank, local_rank=ranks.local_rank,
                       world_size=size, source=ranks.source)  # fmt: skip
        local_size = ranks.local_world_size
        return cls(ranks.rank, ranks.local_rank, size, local_size, ranks.source, why, plan)

    @property
    def torch_device(self) -> Any:
        """`torch.device` of the planned GPU in the numbering of *this* process, which need not be
        the one that made the plan. UsageError without torch, DevicePlanError."""
        torch = import_torch()
        if self.device.device.kind == CPU:
            return torch.device(CPU)
        return torch.device("cuda", look().find(self.device.device.uuid).ordinal)

    def activate(self) -> None:
        """Make the planned GPU torch's current device in this process, and see that it is the one.
        UsageError without torch, DevicePlanError."""
        device = self.torch_device
        if device.type == CPU:
            return
        cuda = import_torch().cuda
        cuda.set_device(device)
        same_to_torch(cuda, self.device.device.uuid, device.index)

    def seed(self, base: int) -> int:
        """A seed of this rank's own, different in every rank: `base` + global rank."""
        return base + self.rank

    def check_unique(
        self, timeout_s: float = CHECK_TIMEOUT_S, *, share: bool = False, address: str = ""
    ) -> tuple[Member, ...]:
        """Compare this plan with those of all other ranks, which must call it too: see
        `rank_check.check_unique`. One Member per rank, in rank order. DevicePlanError, UsageError."""
        from .rank_check import check_unique  # which builds on this file

        return check_unique(self, timeout_s, share=share, address=address)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}: {self.device} ({self.why})"


def _with_torch(launcher: Launcher, case: Case, in_use: VisibleGpu | None) -> Choice:
    """The launcher's choice, checked against the GPU that torch already uses."""
    try:
        gpu, why = launcher.choose(case)
    except DevicePlanError:
        if in_use is None:
            raise
        return in_use, f"torch already uses cuda:{in_use.ordinal} in this process"
    if in_use is not None and in_use.uuid != gpu.uuid:
        raise DevicePlanError(
            f"{case.ranks.source}: {why}: {gpu.uuid}, but torch already uses {in_use.uuid} "
            f"(cuda:{in_use.ordinal}) in this process. Call plan.activate() before any other use of "
            "CUDA, or say that the learner is right: RankPlan.from_env(learner="
            f'"cuda:{in_use.ordinal}")'
        )
    return gpu, why


def _visible(plan: DevicePlan, seen: Visibility) -> VisibleGpu | None:
    return None if plan.device.kind == CPU else seen.find(plan.device.uuid)


def _check_indices(indices: Sequence[int], rank: int, numbering: str | None) -> None:
    if numbering not in (None, "host", "visible"):
        raise UsageError(
            f'numbering={numbering!r}: write "host" (nvidia-smi) or "visible" (cuda:N)'
        )
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"host indices are whole numbers from 0, not {index!r}")
    if not 0 <= rank < len(indices):
        raise UsageError(f"rank {rank} has no entry in host indices {list(indices)}")


def _by_index(
    seen: Visibility, indices: Sequence[int], rank: int, numbering: str | None
) -> VisibleGpu:
    if numbering == "visible":
        return seen.at(indices[rank])
    host = seen.inventory.gpus
    for index in indices:
        if index >= len(host) or not host[index].uuid or host[index].instances:
            raise DevicePlanError(
                f"host index {index} names no whole GPU of this host: it has {len(host)}"
            )
        if numbering is None:
            here = seen.at(index) if index < len(seen.gpus) or not seen.ordered else None
            if here is None or here.uuid != host[index].uuid:
                raise DevicePlanError(
                    f"index {index} is {host[index].uuid} to nvidia-smi and "
                    f"{here.uuid if here else 'nothing'} to this process ({seen}). Say which is "
                    'meant: numbering="host" or numbering="visible"'
                )
    return seen.find(host[indices[rank]].uuid)
