"""Launchers: what each of them sets, which rank that makes this process, and which GPU it means.

The only file that reads launcher variables; the table of launchers stands at its end. A rule that
cannot tell raises DevicePlanError: none falls back to GPU 0, nor to the first visible one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..ipc.device import VisibleGpu
from ..ipc.errors import DevicePlanError, UsageError
from .visibility import Env, Visibility, under_mask

_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
_UNIQUE = "only comparing all ranks can tell whether another rank has it too: plan.check_unique()"


@dataclass(frozen=True)
class Ranks:
    """Which rank this process is, and who said so."""

    source: str
    rank: int
    local_rank: int  # as the launcher labels it; 0 on every rank of some launchers
    world_size: int
    local_world_size: int | None  # None: the launcher does not say


@dataclass(frozen=True)
class Case:
    """Everything that a launcher's rule may look at."""

    ranks: Ranks
    seen: Visibility
    env: Env
    share: bool
    gpu_ids: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.seen.gpus)


Choice = tuple[VisibleGpu, str]


@dataclass(frozen=True)
class Launcher:
    present: Callable[[Env], bool]
    read: Callable[[Env], Ranks]
    choose: Callable[[Case], Choice]


def find_launcher(env: Env) -> tuple[Launcher, Ranks]:
    """The innermost launcher: outer ones leave their variables in the environment."""
    for launcher in _LAUNCHERS:
        if launcher.present(env):
            ranks = launcher.read(env)
            _in_range(ranks)
            return launcher, ranks
    raise AssertionError("the plain process is always present")


def launched_ranks(env: Env | None = None) -> Ranks:
    """Which rank the launcher says this process is. DevicePlanError."""
    return find_launcher(os.environ if env is None else env)[1]


@dataclass(frozen=True)
class MeetingPoint:
    """Where all ranks of this start find one another."""

    host: str
    port: int
    agent: bool  # torchrun's agent listens there already
    attempt: str  # torchrun starts the ranks again after a failure, and keeps the port


def meeting_point(address: str = "", env: Env | None = None) -> MeetingPoint:
    """`address` ("host:port"), else what the launcher says. UsageError."""
    env = os.environ if env is None else env
    agent = not address and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not address:
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise UsageError(
                "the ranks need a place to meet: export MASTER_ADDR and MASTER_PORT, start "
                'torch.distributed first, or write check_unique(address="host:port")'
            )
        address = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f'address {address!r} is not "host:port"')
    return MeetingPoint(host, int(port), agent, env.get("TORCHELASTIC_RESTART_COUNT", "0"))


# -- the rank of a process -------------------------------------------------------------------------


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


# -- the GPU of a rank -----------------------------------------------------------------------------


def _choose_torchrun(case: Case) -> Choice:
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


def _by_local_rank(case: Case, name: str) -> Choice:
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


def _choose_srun(case: Case) -> Choice:
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


def _choose_ray(case: Case) -> Choice:
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


def _choose_unilab(case: Case) -> Choice:
    if case.count != 1:
        raise _unspecified(case, "UniLab's supervisor gives each rank one entry")
    return case.seen.at(0), "the one GPU that the supervisor gave this rank"


def _choose_unnamed(case: Case) -> Choice:
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


def _choose_plain(case: Case) -> Choice:
    if case.count == 1:
        return case.seen.at(0), "this process sees one GPU"
    raise _unspecified(case, "no launcher says which GPU is meant")


def _unspecified(case: Case, what: str) -> DevicePlanError:
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
    Launcher(lambda env: "UNILAB_DP_RANK" in env, _read_unilab, _choose_unilab),
    Launcher(lambda env: "TORCHELASTIC_RUN_ID" in env, _read_torchrun, _choose_torchrun),
    Launcher(_ray, _read_ray, _choose_ray),
    Launcher(_srun, _read_srun, _choose_srun),
    Launcher(_unnamed, _read_unnamed, _choose_unnamed),
    Launcher(lambda _: True, lambda _: Ranks("plain process", 0, 0, 1, 1), _choose_plain),
)
