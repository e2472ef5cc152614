"""All ranks compare their GPUs before any simulator starts: either every rank goes on, or none does."""

from __future__ import annotations

import importlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..ipc.deadline import Deadline
from ..ipc.device import CPU
from ..ipc.errors import DevicePlanError, OutboardError
from .launchers import launched_ranks, meeting_point
from .learner import import_torch
from .rank_plan import CHECK_TIMEOUT_S, RankPlan


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

    Every rank must call it. DevicePlanError, UsageError: see `check_unique`.
    """
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
    one, else DevicePlanError: a collision, another rank's error, or ranks missing after `timeout_s`;
    UsageError without torch or a place to meet. Returns one Member per rank, in rank order.
    """
    if isinstance(outcome, RankPlan):
        rank, size = outcome.rank, outcome.world_size
    else:
        try:
            ranks = launched_ranks()
        except OutboardError:  # then nobody can tell which rank this is, nor how many there are
            raise outcome from None
        rank, size = ranks.rank, ranks.world_size
    members = (_member(rank, outcome),)
    if size > 1:
        members = _exchange(members[0], size, Deadline(timeout_s), address)
    if isinstance(outcome, OutboardError):
        raise outcome
    judge_members(members, share)
    return members


def _member(rank: int, outcome: RankPlan | OutboardError) -> Member:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if isinstance(outcome, OutboardError):
        error = f"{type(outcome).__name__}: {outcome.message}"[:_ERROR_CHARS]
        return Member(rank, socket.gethostname(), boot_id, "", "", error)
    device = outcome.device.device
    return Member(rank, socket.gethostname(), boot_id, device.kind, device.uuid, "")


def judge_members(members: Sequence[Member], share: bool) -> None:
    """DevicePlanError when a rank failed, or when two ranks of one host have one GPU, unless `share`."""
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
    torch, dist = import_torch(), importlib.import_module("torch.distributed")
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
    at = meeting_point(address)
    left = timedelta(seconds=deadline.remaining_s())
    listens = own.rank == 0 and not at.agent
    store = dist.TCPStore(
        at.host, at.port, size, listens, timeout=left, wait_for_workers=False, multi_tenant=True
    )
    _stores.append(store)
    ours = dist.PrefixStore(f"outboard/unique/{at.attempt}/{len(_stores)}", store)
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
