"""All ranks compare their GPUs: what collides, who is named, and that all end together (over gloo)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outboard.backends import rank_check
from outboard.backends.inventory import Inventory
from outboard.backends.launchers import Ranks, meeting_point
from outboard.backends.rank_check import Member, check_unique, judge_members
from outboard.backends.rank_plan import RankPlan
from outboard.ipc.errors import DevicePlanError, UsageError

TREE = Path(__file__).resolve().parent.parent
U = [f"GPU-{digit * 8}-0000-4000-8000-000000000000" for digit in "abcd"]


def member(rank: int, uuid: str, error: str = "", boot: str = "b", kind: str = "gpu") -> Member:
    return Member(rank, f"host{boot}", boot, kind, uuid, error)


class TestJudge:
    def test_names_everybody_who_collides(self) -> None:  # row 61
        members = [member(0, U[0]), member(1, U[0]), member(2, U[1])]
        with pytest.raises(DevicePlanError) as caught:
            judge_members(members, share=False)
        assert f"rank 0 on hostb: {U[0]}" in caught.value.message
        assert f"rank 1 on hostb: {U[0]}" in caught.value.message
        assert "rank 2" not in caught.value.message

    @pytest.mark.parametrize(
        ("members", "share"),
        [
            ([member(0, U[0]), member(1, U[0])], True),
            ([member(0, U[0]), member(1, U[0], boot="other")], False),
            ([member(0, "", kind="cpu"), member(1, "", kind="cpu")], False),
        ],
        ids=["shared", "two hosts", "cpu"],
    )
    def test_no_collision(self, members: list[Member], share: bool) -> None:
        judge_members(members, share)

    def test_anothers_error(self) -> None:
        with pytest.raises(DevicePlanError, match=r"rank 1 on hostb: DevicePlanError: four ranks"):
            judge_members(
                [member(0, U[0]), member(1, "", "DevicePlanError: four ranks")], share=True
            )


def test_one_rank_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    plan = RankPlan.from_env({}, inventory=Inventory.of_uuids([U[3]]))
    assert [one.uuid for one in plan.check_unique()] == [U[3]]
    with pytest.raises(UsageError, match="needs torch"):
        _ = plan.torch_device


def test_no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="export MASTER_ADDR and MASTER_PORT"):
        meeting_point()
    with pytest.raises(UsageError, match="host:port"):
        meeting_point("localhost")


# One rank: mode, its UUID or "fail" or "absent"; prints one JSON line. `init` starts torch.distributed
# before the comparison (default group gloo as well: there is no GPU), `twice` after it, on the same port.
RANK = """
import json, os, sys, time, types
sys.modules["outboard"] = types.ModuleType("outboard")
sys.modules["outboard"].__path__ = [sys.argv[1]]
from outboard.backends.inventory import Inventory
from outboard.backends.rank_check import check_unique
from outboard.backends.rank_plan import RankPlan
from outboard.ipc.errors import DevicePlanError, OutboardError
mode, uuid, timeout_s = sys.argv[2], sys.argv[3], float(sys.argv[4])
import torch, torch.distributed as dist
if mode == "init":
    dist.init_process_group("gloo")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if uuid == "absent":
    time.sleep(timeout_s + 3)
    sys.exit()
start, answer = time.monotonic(), {}
try:
    if uuid == "fail":
        plan = DevicePlanError("the plan of this rank failed")
    else:
        plan = RankPlan.explicit(rank, size, uuid, env={}, inventory=Inventory.of_uuids([uuid]))
    answer["uuids"] = [member.uuid for member in check_unique(plan, timeout_s, share=mode == "share")]
    if mode == "twice":
        check_unique(plan, timeout_s)
        dist.init_process_group("gloo")
        dist.barrier()
except OutboardError as error:
    answer["error"] = type(error).__name__ + ": " + error.message
answer["took_s"] = time.monotonic() - start
print(json.dumps(answer), flush=True)
"""


def run_ranks(mode: str, uuids: list[str], timeout_s: float = 30.0) -> list[dict[str, Any]]:
    pytest.importorskip(
        "torch", reason="comparing ranks needs torch (gloo), which is not installed"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    base = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SLURM_", "RAY_"))
    }
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
             "WORLD_SIZE": str(len(uuids)), "LOCAL_WORLD_SIZE": str(len(uuids))}  # fmt: skip
    command = [sys.executable, "-c", RANK, str(TREE), mode]
    ranks = [
        subprocess.Popen(
            [*command, uuid, str(timeout_s)],
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, uuid in enumerate(uuids)
    ]
    try:
        ends = [rank.communicate(timeout=timeout_s + 60) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    for (out, err), uuid in zip(ends, uuids, strict=True):
        assert out or uuid == "absent", err
    return [json.loads(out) if out else {} for out, _ in ends]


@pytest.mark.slow
@pytest.mark.timeout(150)
class TestGloo:
    @pytest.mark.parametrize("mode", ["store", "init", "twice"])
    def test_different_gpus(self, mode: str) -> None:
        answers = run_ranks(mode, [U[0], U[1], U[2]])
        assert [answer.get("uuids") for answer in answers] == [[U[0], U[1], U[2]]] * 3
        assert not any("error" in answer for answer in answers)

    @pytest.mark.parametrize("mode", ["store", "init"])
    def test_all_fail_together_on_a_collision(self, mode: str) -> None:
        for answer in run_ranks(mode, [U[0], U[1], U[0]]):
            assert f"rank 0 on {socket.gethostname()}: {U[0]}" in answer["error"]
            assert f"rank 2 on {socket.gethostname()}: {U[0]}" in answer["error"]
            assert "rank 1" not in answer["error"]
            assert answer["took_s"] < 30

    def test_sharing_was_asked_for(self) -> None:
        assert all("uuids" in answer for answer in run_ranks("share", [U[0], U[0]]))

    @pytest.mark.parametrize("mode", ["store", "init"])
    def test_a_failed_rank_takes_part(self, mode: str) -> None:
        first, second = run_ranks(mode, [U[0], "fail"])
        assert second["error"] == "DevicePlanError: the plan of this rank failed"
        assert "rank 1 on" in first["error"]
        assert "the plan of this rank failed" in first["error"]

    @pytest.mark.parametrize("mode", ["store", "init"])
    def test_a_missing_rank_ends_in_time(self, mode: str) -> None:
        answers = run_ranks(mode, [U[0], U[1], "absent"], timeout_s=4)
        for answer in answers[:2]:
            assert "did not all meet within 4 s" in answer["error"]
            assert mode != "store" or "rank(s) 2 did not come" in answer["error"]
            assert answer["took_s"] < 4 + 3


def test_check_unique_of_an_error_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_check, "launched_ranks", lambda: Ranks("x", 0, 0, 1, 1))
    error = DevicePlanError("mine")
    with pytest.raises(DevicePlanError) as caught:
        check_unique(error)
    assert caught.value is error
