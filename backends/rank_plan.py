"""Rank -> GPU: what a launcher's environment says, and what all ranks say together.

The only file that reads launcher variables. An environment that is contradictory or leaves a choice
open raises DevicePlanError: nothing here falls back to GPU 0, nor to the first visible one.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..ipc.deadline import Deadline
from ..ipc.device import CPU, GPU, VisibleGpu, normalise_uuid
from ..ipc.errors import DevicePlanError, OutboardError, UsageError
from .device_plan import DevicePlan, gpu_plan, resolve_device
from .visibility import Env, Inventory, Visibility, look, under_mask

_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_UNIQUE = "only comparing all ranks can tell whether another rank has it too: plan.check_unique()"

CHECK_TIMEOUT_S = 120.0  # ranks arrive minutes apart when a file system is slow to give them torch


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is, and who said so."""

    source: str
    rank: int
    local_rank: int  # as the launcher labels it; 0 on every rank of some launchers
    world_size: int
    local_world_size: int | None  # None: the launcher does not say


@dataclass(frozen=True)
class RankPlan:
    """One rank, its GPU, and the sentence that explains it. Can be pickled."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    source: str
    why: str
    device: DevicePlan

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
        """The plan of the launcher that started this process. DevicePlanError.

        learner    the device this rank's learner is on, any accepted `device=`: it beats arithmetic
                   on ranks. The device that torch already uses in this process counts by itself
        share      several ranks may have one GPU (one visible GPU and more ranks is then no error)
        gpu_ids    what Ray assigned to this actor; asked of Ray where that is running
        inventory  of a machine that is not here; the driver is not asked then
        """
        real = env is None and inventory is None
        env = os.environ if env is None else env
        launcher, ranks = _launcher(env)
        seen = look(env, inventory)
        if gpu_ids is None and real:
            gpu_ids = _ray_gpu_ids()
        case = _Case(ranks, seen, env, share, tuple(str(one) for one in gpu_ids or ()))
        given = None if learner is None else _visible(resolve_device(learner, env, inventory), seen)
        in_use = _torch_gpu(seen) if real else None
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
        torch = _torch()
        if self.device.device.kind == CPU:
            return torch.device(CPU)
        return torch.device("cuda", look().find(self.device.device.uuid).ordinal)

    def activate(self) -> None:
        """Make the planned GPU torch's current device in this process, and see that it is the one.
        UsageError without torch, DevicePlanError."""
        device = self.torch_device
        if device.type == CPU:
            return
        cuda = _torch().cuda
        cuda.set_device(device)
        _same_to_torch(cuda, self.device.device.uuid, device.index)

    def seed(self, base: int) -> int:
        """A seed of this rank's own: `base` + global rank."""
        return base + self.rank

    def check_unique(
        self, timeout_s: float = CHECK_TIMEOUT_S, *, share: bool = False, address: str = ""
    ) -> tuple[Member, ...]:
        """`check_unique` for this plan."""
        return check_unique(self, timeout_s, share=share, address=address)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}: {self.device} ({self.why})"


def launched_ranks(env: Env | None = None) -> Ranks:
    """Which rank the launcher says this process is. DevicePlanError."""
    return _launcher(os.environ if env is None else env)[1]


# -- launchers: who sets what ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """Everything that a launcher's rule may look at."""

    ranks: Ranks
    seen: Visibility
    env: Env
    share: bool
    gpu_ids: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.seen.gpus)


_Choice = tuple[VisibleGpu, str]


@dataclass(frozen=True)
class _Launcher:
    present: Callable[[Env], bool]
    read: Callable[[Env], Ranks]
    choose: Callable[[_Case], _Choice]


def _launcher(env: Env) -> tuple[_Launcher, Ranks]:
    """The innermost launcher: outer ones leave their variables in the environment."""
    for launcher in _LAUNCHERS:
        if launcher.present(env):
            ranks = launcher.read(env)
            _in_range(ranks)
            return launcher, ranks
    raise AssertionError("the plain process is always present")


def _number(env: Env, name: str, source: str) -> int:
    text = env.get(name)
    if text is None:
        raise DevicePlanError(f"{source} always sets {name}, and it is missing: {_set(env)}")
    if not re.match(r"[0-9]+\Z", text.strip()):
        raise DevicePlanError(f"{name}={text!r} is not a rank or size: {_set(env)}. Who set it?")
    return int(text)


def _number_or(env: Env, name: str, default: int | None) -> int | None:
    return _number(env, name, "the launcher") if name in env else default


def _set(env: Env) -> str:
    """The launcher variables at hand, for messages."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID",
             "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "UNILAB_DP_RANK", "UNILAB_DP_WORLD_SIZE")  # fmt: skip
    return ", ".join(f"{name}={env[name]}" for name in names if name in env) or "none is set"


def _in_range(ranks: Ranks) -> None:
    local_size = ranks.local_world_size
    if ranks.rank >= ranks.world_size:
        raise DevicePlanError(
            f"{ranks.source}: rank {ranks.rank} is out of range for world size {ranks.world_size}"
        )
    if local_size is not None and ranks.local_rank >= local_size:
        raise DevicePlanError(
            f"{ranks.source}: local rank {ranks.local_rank} is out of range for local world size "
            f"{local_size}"
        )


def _conflict(env: Env, one: str, other: str, advice: str) -> None:
    if one in env and other in env and env[one] != env[other]:
        raise DevicePlanError(
            f"two launchers disagree: {one}={env[one]} but {other}={env[other]}. {advice}"
        )


def _read_torchrun(env: Env) -> Ranks:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, local, size, local_size = (_number(env, name, "torchrun") for name in names)
    return Ranks("torchrun", rank, local, size, local_size)


def _read_unilab(env: Env) -> Ranks:
    source = "UniLab's supervisor"
    rank = _number(env, "UNILAB_DP_RANK", source)
    size = _number(env, "UNILAB_DP_WORLD_SIZE", source)
    if "TORCHELASTIC_RUN_ID" in env:
        for ours, theirs in (("UNILAB_DP_RANK", "RANK"), ("UNILAB_DP_WORLD_SIZE", "WORLD_SIZE")):
            _conflict(env, ours, theirs, "Use one of torchrun and UniLab's supervisor")
    return Ranks(source, rank, rank, size, size)  # it starts all its ranks on one host


def _read_ray(env: Env) -> Ranks:
    # Ray itself numbers nobody; Ray Train sets torchrun's names. Its SLURM_* are the cluster's.
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return Ranks("Ray", 0, 0, 1, None)
    local_size = _number_or(env, "LOCAL_WORLD_SIZE", None)
    local = _number_or(env, "LOCAL_RANK", 0) or 0
    return Ranks("Ray", _number(env, "RANK", ""), local, _number(env, "WORLD_SIZE", ""), local_size)


def _read_srun(env: Env) -> Ranks:
    advice = "If srun did not start this process, unset the SLURM_* variables of its parent"
    _conflict(env, "SLURM_LOCALID", "LOCAL_RANK", advice)
    _conflict(env, "SLURM_PROCID", "RANK", advice)
    _conflict(env, "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", advice)
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
    rank, local, size = (_number(env, name, "srun") for name in names)
    return Ranks("srun", rank, local, size, _tasks_on_node(env))


def _tasks_on_node(env: Env) -> int | None:
    """SLURM_STEP_TASKS_PER_NODE is "4(x2),3": two nodes with four tasks, then one with three."""
    per_node: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.match(r"([0-9]+)(?:\(x([0-9]+)\))?\Z", part)
        per_node += [int(match[1])] * int(match[2] or 1) if match else []
    node = _number_or(env, "SLURM_NODEID", 0) or 0
    return per_node[node] if node < len(per_node) else None


def _read_unnamed(env: Env) -> Ranks:
    source = "a launcher that does not say its name"
    local, local_size = _number_or(env, "LOCAL_RANK", 0), _number_or(env, "LOCAL_WORLD_SIZE", None)
    size = _number_or(env, "WORLD_SIZE", local_size)
    rank = _number_or(env, "RANK", None)
    if rank is None and _number_or(env, "NODE_RANK", 0) == 0:
        rank = local  # Lightning's children; on the first node the two are equal
    if rank is None or size is None:
        missing = "RANK" if rank is None else "WORLD_SIZE"
        raise DevicePlanError(
            f"{_set(env)}, without {missing}: nobody can tell the rank. Set {missing}, unset the "
            "others if they are left-overs, or write RankPlan.explicit(rank, world_size, device)"
        )
    return Ranks(source, rank, local or 0, size, local_size)


# -- launchers: the GPU of a rank ------------------------------------------------------------------


def _choose_torchrun(case: _Case) -> _Choice:
    local, of = case.ranks.local_rank, case.ranks.local_world_size or 1
    if case.count == 1 and (local == 0 or case.share):
        if of == 1:
            return case.seen.at(0), f"LOCAL_RANK={local} of 1 takes the one visible GPU"
        return case.seen.at(0), (
            f"LOCAL_RANK={local} of {of} sees one GPU (--virtual-local-rank, or sharing); {_UNIQUE}"
        )
    if of == 1 and case.env.get("SLURM_LOCALID", "0") != "0":
        raise DevicePlanError(
            f"srun started one torchrun per task (SLURM_LOCALID={case.env['SLURM_LOCALID']}) and "
            f"each sees {case.seen}: all would take the first. Add --gpus-per-task=1 to srun"
        )
    return _by_local_rank(case, "LOCAL_RANK")


def _by_local_rank(case: _Case, name: str) -> _Choice:
    local, of, count = case.ranks.local_rank, case.ranks.local_world_size, case.count
    if local >= count or (of is not None and of > count and not case.share):
        ranks = f"{of} local ranks" if of is not None else f"{name}={local}"
        raise DevicePlanError(
            f"{case.ranks.source}: {ranks} but only {case.seen}: {case.seen.listing()} "
            f"(this is {name}={local}). Start fewer ranks per node or show this one more GPUs; two "
            "ranks on one GPU need share=True"
        )
    size = "" if of is None else f" of {of}"
    return case.seen.at(local), f"{name}={local}{size} takes entry {local} of {case.seen}"


def _choose_srun(case: _Case) -> _Choice:
    if case.count == 1:
        return case.seen.at(0), (
            f"the one GPU that this task sees, whatever the local rank ({case.ranks.local_rank}); "
            + _UNIQUE
        )
    if case.ranks.world_size == 1:
        return _choose_plain(case)
    own = case.env.get("SLURM_GPUS_PER_TASK", "").rsplit(":", 1)[-1]
    if own == str(case.count):
        raise _unspecified(case, f"this task has {own} GPUs of its own (SLURM_GPUS_PER_TASK)")
    return _by_local_rank(case, "SLURM_LOCALID")


def _choose_ray(case: _Case) -> _Choice:
    if case.gpu_ids:
        # Ray's ids are what it would write into the mask, so they are read as one.
        ids = ",".join(case.gpu_ids)
        meant = under_mask(ids, case.env, case.seen.inventory)
        first, *more = meant.gpus
        if more:
            raise _unspecified(case, f"Ray assigned {len(meant.gpus)} GPUs: {meant.listing()}")
        return case.seen.find(first.uuid), f"Ray assigned id {ids} to this actor"
    if case.count == 1:
        return case.seen.at(0), f"the one GPU that this actor sees; {_UNIQUE}"
    if case.env.get(_NOSET):
        raise DevicePlanError(
            f"{_NOSET} is set, so Ray did not narrow this actor: {case.seen} says nothing about "
            "what was assigned. Write RankPlan.from_env(gpu_ids=ray.get_gpu_ids())"
        )
    raise _unspecified(case, "Ray narrowed this actor to more than one GPU")


def _choose_unilab(case: _Case) -> _Choice:
    if case.count != 1:
        raise _unspecified(case, "UniLab's supervisor gives each rank one entry")
    return case.seen.at(0), "the one GPU that the supervisor gave this rank"


def _choose_unnamed(case: _Case) -> _Choice:
    local = case.env.get("LOCAL_RANK")
    if case.count == 1:
        return case.seen.at(0), (
            f"the one GPU that this process sees, whatever LOCAL_RANK says ({local}); {_UNIQUE}"
        )
    if local is None or "RANK" not in case.env:
        raise DevicePlanError(
            f"{_set(case.env)} does not say which of {case.seen} is meant: Lightning's root device, "
            "for one, need not be cuda:LOCAL_RANK. Write "
            "RankPlan.from_env(learner=trainer.strategy.root_device)"
        )
    return _by_local_rank(case, "LOCAL_RANK")


def _choose_plain(case: _Case) -> _Choice:
    if case.count == 1:
        return case.seen.at(0), "this process sees one GPU"
    raise _unspecified(case, "no launcher says which GPU is meant")


def _unspecified(case: _Case, what: str) -> DevicePlanError:
    gpu, ranks = case.seen.gpus[-1], case.ranks
    here = f"cuda:{gpu.ordinal}" if case.seen.ordered else gpu.uuid
    return DevicePlanError(
        f"{what}, and there is no default: {case.seen}: {case.seen.listing()}. Write one of\n"
        f'    device="{here}"\n'
        f"    device=RankPlan.explicit(rank={ranks.rank}, world_size={ranks.world_size}, "
        f'device="{gpu.uuid}").device'
    )


def _unnamed(env: Env) -> bool:
    return bool({"RANK", "LOCAL_RANK"} & set(env)) or env.get("WORLD_SIZE", "1") != "1"


def _srun(env: Env) -> bool:
    # A batch script has SLURM_LOCALID=0 too, but is no task of a step.
    return "SLURM_STEP_NUM_TASKS" in env or env.get("SLURM_LOCALID", "0") != "0"


def _ray(env: Env) -> bool:
    return "RAY_RAYLET_PID" in env or "RAY_JOB_ID" in env or bool(env.get(_NOSET))


# The innermost first: UniLab's supervisor and torchrun may run under Ray or SLURM, Ray under SLURM.
_LAUNCHERS = (
    _Launcher(lambda env: "UNILAB_DP_RANK" in env, _read_unilab, _choose_unilab),
    _Launcher(lambda env: "TORCHELASTIC_RUN_ID" in env, _read_torchrun, _choose_torchrun),
    _Launcher(_ray, _read_ray, _choose_ray),
    _Launcher(_srun, _read_srun, _choose_srun),
    _Launcher(_unnamed, _read_unnamed, _choose_unnamed),
    _Launcher(lambda _: True, lambda _: Ranks("plain process", 0, 0, 1, 1), _choose_plain),
)


# -- what is already there: the learner, Ray, index lists ------------------------------------------


def _with_torch(launcher: _Launcher, case: _Case, in_use: VisibleGpu | None) -> _Choice:
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


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(f"this needs torch in the training interpreter: {error}") from error


def _torch_gpu(seen: Visibility) -> VisibleGpu | None:
    """The GPU that torch uses in this process, None while that is open. DevicePlanError.

    Never imports or initialises torch. Current device 0 is where torch starts, so it counts only
    once something was allocated there.
    """
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    ordinal = int(cuda.current_device())
    if ordinal == 0 and not cuda.memory_reserved(0):
        return None
    gpu = seen.at(ordinal)
    if gpu.kind == GPU:  # what torch prints for a MIG instance is not documented
        _same_to_torch(cuda, gpu.uuid, ordinal)
    return gpu


def _same_to_torch(cuda: Any, uuid: str, ordinal: int) -> None:
    """torch keeps the mask with which it first asked the driver. torch < 2.5 cannot be asked."""
    told = getattr(cuda.get_device_properties(ordinal), "uuid", None)
    if told is None or uuid.startswith("MIG-"):
        return
    if normalise_uuid(str(told)) != uuid:
        raise DevicePlanError(
            f"cuda:{ordinal} should be {uuid}, but to torch it is GPU-{told}: the mask or the order "
            "was changed after torch had asked the driver. Set them before Python starts"
        )


def _ray_gpu_ids() -> tuple[str, ...]:
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ()
    return tuple(str(one) for one in ray.get_gpu_ids())


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


# -- all ranks together ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """What one rank tells the others."""

    rank: int
    host: str
    boot_id: str  # tells two hosts of one name apart
    kind: str
    uuid: str
    error: str  # why its plan failed, "" when it did not


_RECORD_BYTES = 8192  # of one Member; every rank sends the same size
_ERROR_CHARS = 1500  # at most four bytes each
_SLICE_S = 0.5  # how often a waiting rank looks whether another one has given up
# The store of rank 0 serves the others while they leave, and a later init_process_group on the same
# port shares it; so it lives as long as the process.
_stores: list[Any] = []


def plan_together(
    timeout_s: float = CHECK_TIMEOUT_S, *, share: bool = False, address: str = "", **from_env: Any
) -> RankPlan:
    """`RankPlan.from_env(**from_env)` on all ranks, compared: every rank has its plan, or all fail.
    DevicePlanError."""
    try:
        outcome: RankPlan | OutboardError = RankPlan.from_env(share=share, **from_env)
    except OutboardError as error:
        outcome = error
    check_unique(outcome, timeout_s, share=share, address=address)
    assert isinstance(outcome, RankPlan)  # an error was raised by check_unique
    return outcome


def check_unique(
    outcome: RankPlan | OutboardError,
    timeout_s: float = CHECK_TIMEOUT_S,
    *,
    share: bool = False,
    address: str = "",
) -> tuple[Member, ...]:
    """Compare the GPUs of all ranks before any simulator starts; every rank must call it.

    A rank whose plan failed passes the error, so that all fail together instead of waiting for it.
    The ranks meet over gloo: in a new group where torch.distributed runs, else at MASTER_ADDR and
    MASTER_PORT, or at `address` ("host:port", rank 0 listens). Raises the own error if there was
    one, else DevicePlanError: a collision, another rank's error, or ranks missing after `timeout_s`.
    """
    if isinstance(outcome, RankPlan):
        rank, size = outcome.rank, outcome.world_size
    else:
        ranks = launched_ranks()
        rank, size = ranks.rank, ranks.world_size
    members = (_member(rank, outcome),)
    if size > 1:
        members = _exchange(members[0], size, Deadline(timeout_s), address)
    if isinstance(outcome, OutboardError):
        raise outcome
    _judge(members, share)
    return members


def _member(rank: int, outcome: RankPlan | OutboardError) -> Member:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if isinstance(outcome, OutboardError):
        error = f"{type(outcome).__name__}: {outcome.message}"[:_ERROR_CHARS]
        return Member(rank, socket.gethostname(), boot_id, "", "", error)
    device = outcome.device.device
    return Member(rank, socket.gethostname(), boot_id, device.kind, device.uuid, "")


def _judge(members: Sequence[Member], share: bool) -> None:
    failed = [member for member in members if member.error]
    if failed:
        lines = "".join(f"\n  rank {m.rank} on {m.host}: {m.error}" for m in failed)
        raise DevicePlanError(f"no rank starts, because the plan of another failed:{lines}")
    groups: dict[tuple[str, str], list[Member]] = {}
    for member in members:
        if member.kind != CPU:
            groups.setdefault((member.boot_id, member.uuid), []).append(member)
    collided = [member for group in groups.values() if len(group) > 1 for member in group]
    if collided and not share:
        lines = "".join(f"\n  rank {m.rank} on {m.host}: {m.uuid}" for m in collided)
        raise DevicePlanError(
            f"several ranks are planned on one GPU; share=True allows that:{lines}\n  No rank "
            "starts. Give every rank its own GPU (see `outboard plan` in each)"
        )


def _exchange(own: Member, size: int, deadline: Deadline, address: str) -> tuple[Member, ...]:
    torch, dist = _torch(), importlib.import_module("torch.distributed")
    try:
        if dist.is_available() and dist.is_initialized():
            group = _group_of_distributed(dist, own, size, deadline)
        else:
            group = _group_of_store(dist, own, size, deadline, address)
        raw = json.dumps(asdict(own), ensure_ascii=False).encode().ljust(_RECORD_BYTES)
        record = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        records = [torch.empty_like(record) for _ in range(size)]
        group.allgather([records], [record]).wait()
    except RuntimeError as error:
        raise DevicePlanError(
            f"rank {own.rank}: the {size} ranks did not all meet within {deadline.seconds:g} s, so "
            f"their GPUs were not compared and no rank starts: {error}"
        ) from error
    return tuple(Member(**json.loads(bytes(record.tolist()))) for record in records)


def _group_of_distributed(dist: Any, own: Member, size: int, deadline: Deadline) -> Any:
    there = (dist.get_rank(), dist.get_world_size())
    if there != (own.rank, size):
        raise DevicePlanError(
            f"the plan is of rank {own.rank} of {size}, but torch.distributed runs as rank "
            f"{there[0]} of {there[1]}"
        )
    # Not the default group, which may be NCCL: that touches the current GPU.
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline.remaining_s()))


def _group_of_store(dist: Any, own: Member, size: int, deadline: Deadline, address: str) -> Any:
    host, port, agent = _meeting_point(address)
    left = timedelta(seconds=deadline.remaining_s())
    listens = own.rank == 0 and not agent
    store = dist.TCPStore(
        host, port, size, listens, timeout=left, wait_for_workers=False, multi_tenant=True
    )
    _stores.append(store)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ours = dist.PrefixStore(f"outboard/unique/{attempt}/{len(_stores)}", store)
    ours.set(f"here/{own.rank}", "1")
    _wait_for_all(ours, size, deadline, listens)
    left = timedelta(seconds=max(1.0, deadline.remaining_s()))
    return dist.ProcessGroupGloo(ours, own.rank, size, timeout=left)


def _wait_for_all(store: Any, size: int, deadline: Deadline, listens: bool) -> None:
    """Every rank is here, or RuntimeError naming those that are not: in all ranks at about the same
    time, because the first to run out of time leaves its finding for the others."""
    names, finding = [f"here/{rank}" for rank in range(size)], "missing"
    while True:
        left_s = min(_SLICE_S, max(deadline.remaining_s(), 0.001))
        try:
            store.wait(names, timedelta(seconds=left_s))
            return
        except RuntimeError:
            if store.check([finding]):
                missing = store.get(finding).decode()
            elif not deadline.expired():
                continue
            else:
                missing = ", ".join(n[5:] for n in names if not store.check([n]))
                store.set(finding, missing)
            if listens:  # the store ends with this process: the others read the finding first
                time.sleep(2 * _SLICE_S)
            raise RuntimeError(f"rank(s) {missing} did not come") from None


def _meeting_point(address: str) -> tuple[str, int, bool]:
    """Host, port, and whether torchrun's agent listens there already. UsageError."""
    if not address:
        env = os.environ
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise UsageError(
                "the ranks need a place to meet: export MASTER_ADDR and MASTER_PORT, start "
                'torch.distributed first, or write check_unique(address="host:port")'
            )
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    else:
        agent = False
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f'address {address!r} is not "host:port"')
    return host, int(port), agent
