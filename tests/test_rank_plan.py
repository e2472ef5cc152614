"""Launcher environment -> rank and GPU: the resolver tables of the fact sheets, row by row."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.backends import visibility
from outboard.backends.device_plan import resolve_device
from outboard.backends.inventory import HostGpu, Inventory, MigInstance
from outboard.backends.launchers import Ranks, launched_ranks
from outboard.backends.rank_plan import RankPlan
from outboard.backends.visibility import look, worker_variables
from outboard.ipc.device import CPU, DeviceId, VisibleGpu
from outboard.ipc.errors import DevicePlanError, UsageError

TAIL = "-0000-4000-8000-000000000000"


def card(pci: int, uuid: str, name: str = "H200") -> HostGpu:
    return HostGpu(f"GPU-{uuid}{TAIL}", f"0000:00:{pci:02x}.0", name)


H0, H1, H2, H3 = (
    card(i, u) for i, u in enumerate(("aaaa0000", "bbbb1111", "cccc2222", "cccc3333"))
)
INV4 = Inventory((H0, H1, H2, H3))
INV1 = Inventory((H3,))
S, F = card(0, "55555555", "slow"), card(1, "ffffffff", "fast")
HET2 = Inventory((S, F))
M1, M2 = f"MIG-11111111{TAIL}", f"MIG-22222222{TAIL}"
E = HostGpu(
    f"GPU-eeeeeeee{TAIL}", "0000:00:00.0", "H200", (MigInstance(M1, 1, 0), MigInstance(M2, 2, 0))
)
MIG1 = Inventory((E,))
INV8 = Inventory(tuple(card(i, f"{i}{i}{i}{i}{i}{i}{i}e") for i in range(8)))
U = [gpu.uuid for gpu in INV8.gpus]


def torchrun(rank: int, of: int, **more: object) -> dict[str, str]:
    """What torchrun always sets; the tables name only what matters to a row."""
    values: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": of,
                                 "LOCAL_WORLD_SIZE": of, "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    return {name: str(value) for name, value in {**values, **more}.items()}


def srun(local: int, of: int = 4, **more: object) -> dict[str, str]:
    values: dict[str, object] = {"SLURM_LOCALID": local, "SLURM_PROCID": local,
                                 "SLURM_STEP_NUM_TASKS": of}  # fmt: skip
    return {name: str(value) for name, value in {**values, **more}.items()}


def mask(text: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": text}


@dataclass(frozen=True)
class Row:
    """One row: the UUID that is planned, or a phrase of the DevicePlanError."""

    id: str
    inventory: Inventory
    env: Mapping[str, str]
    asked: str  # "auto", "cuda:N", "host N", a UUID, "cpu"
    uuid: str = ""
    refused: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
RAY = {"RAY_RAYLET_PID": "7", "RAY_JOB_ID": "01000000"}
MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"}
PCI = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}

ROWS = (
    Row("1", INV4, {}, "auto", refused="no launcher says which GPU"),
    Row("2", INV1, {}, "auto", H3.uuid),
    Row("3", INV4, {}, "auto", H3.uuid, options={"learner": "cuda:3"}),
    Row("4", INV4, {}, "cuda:2", H2.uuid),
    Row("5", INV4, mask("3"), "cuda:0", H3.uuid),
    Row("6", INV4, mask("2,1"), "cuda:0", H2.uuid),
    Row("7", INV4, mask("2,1"), "host 1", H1.uuid),
    Row("8", INV4, mask("2,1"), "host 0", refused="not visible to this process"),
    Row("9", INV4, mask("2,1"), "cuda:2", refused="there is no cuda:2"),
    Row("10", INV4, mask(""), "auto", refused="set and empty"),
    Row("11", INV4, mask("-1"), "cuda:0", refused="=-1 hides every GPU"),
    Row("12", INV4, mask("NoDevFiles"), "auto", refused="the scheduler granted this job no GPU"),
    Row("13", INV4, mask("0,2,-1,1"), "cuda:1", refused="read it as 0,2 alone"),
    # 14 and 15 ask for a lenient mode, which there is not: both are refused like 13.
    Row("14", INV4, mask("0,2,-1,1"), "cuda:1", refused="read it as 0,2 alone"),
    Row("15", INV4, mask("0,2,-1,1"), "cuda:2", refused="read it as 0,2 alone"),
    Row("16", INV4, mask("0,0"), "cuda:0", refused="one GPU twice"),
    Row("17", INV4, mask("0-3"), "cuda:2", refused="read it as 0 alone"),
    Row("18", INV4, mask("all"), "cuda:0", refused="'all' is no entry"),
    Row("19", INV4, mask("0x1"), "cuda:0", refused="read it as 0 alone"),
    Row("20", INV4, mask("7"), "cuda:0", refused="show no GPU at all (cuInit 100)"),
    Row("21", INV4, mask("GPU-bbbb"), "cuda:0", H1.uuid),
    Row("22", INV4, mask("GPU-cccc"), "cuda:0", refused=f"not unique: {H2.uuid}, {H3.uuid}"),
    Row("23", INV4, mask("GPU-dddd"), "cuda:0", refused="names no GPU of this host"),
    Row("24", INV4, mask("GPU-bbbb,0"), "cuda:1", refused="mixes integers and UUIDs"),
    Row("25", INV4, mask(f"GPU-bbbb,{H1.uuid}"), "cuda:0", refused="one GPU twice"),
    Row("26", INV4, mask(" 2 , 1 "), "cuda:0", H2.uuid),
    Row("27", INV4, torchrun(2, 4), "auto", H2.uuid),
    Row("28", INV4, torchrun(1, 2) | mask("3,0"), "auto", H0.uuid),
    Row("29", INV4, torchrun(1, 4, RANK=9, GROUP_RANK=1, WORLD_SIZE=12), "auto", H1.uuid),
    Row("30", INV4, torchrun(3, 4) | mask("0,1"), "auto", refused="4 local ranks but only 2 visible"),
    Row("31", INV4, torchrun(3, 4) | mask("2"), "auto", refused="4 local ranks but only 1 visible"),
    Row("32", INV4, torchrun(3, 4) | mask("2"), "auto", H2.uuid, options={"share": True}),
    Row("33", INV4, torchrun(2, 4, LOCAL_RANK=0) | mask("2"), "auto", H2.uuid),
    Row("33-rank0", INV4, torchrun(0, 4) | mask("2"), "auto", H2.uuid),
    Row("34", INV1, srun(3, LOCAL_RANK=3) | mask("0"), "auto", H3.uuid),
    Row("35", INV4, srun(3, LOCAL_RANK=3) | mask("3"), "auto", H3.uuid),
    Row("36", INV4, srun(3) | mask("0,1,2,3"), "auto", H3.uuid),
    Row("37", INV4, srun(0, 1) | torchrun(2, 4), "auto", H2.uuid),
    Row("38", INV4, srun(1, LOCAL_RANK=2) | mask("0,1,2,3"), "auto", refused="two launchers disagree"),
    Row("39", INV4, RAY | mask("2"), "auto", H2.uuid),
    Row("40", INV4, NOSET, "auto", refused="Ray did not narrow this actor"),
    Row("41", INV4, NOSET, "auto", H2.uuid, options={"gpu_ids": ["2"]}),
    Row("42", INV4, LIGHTNING, "auto", H3.uuid, options={"learner": H3.uuid}),
    Row("43", INV4, {}, "cuda:1", refused="the learner is on", options={"learner": "cuda:3"}),
    Row("44", HET2, {}, "host 0", S.uuid),
    Row("45", Inventory(HET2.gpus, driver=(F.uuid, S.uuid)), {}, "cuda:0", F.uuid),
    Row("46", HET2, mask("0"), "cuda:0", refused="unlike GPUs"),
    Row("47", HET2, mask("0") | PCI, "cuda:0", S.uuid),
    Row("48", Inventory(HET2.gpus, driver=(F.uuid,)), mask("0"), "cuda:0", F.uuid),
    Row("49", HET2, {"CUDA_DEVICE_ORDER": "pci"}, "cuda:0", refused="'pci' is no order"),
    Row("50", MIG1, mask(M1), "auto", M1),
    Row("51", MIG1, mask("0"), "cuda:0", refused="GPU in MIG mode"),
    Row("52", MIG1, mask("GPU-eeee"), "cuda:0", refused="GPU in MIG mode"),
    Row("53", MIG1, mask(f"MIG-{E.uuid}/1/0"), "auto", M1),
    Row("54", MIG1, torchrun(1, 2) | mask(f"{M1},{M2}"), "auto", M2),
    Row("55", MIG1, mask(M1), "auto", refused="no graphics APIs", options={"graphics": True}),
    Row("56", INV4, MPS | mask("1"), "cuda:0", refused="the list of the MPS server"),
    Row("56-uuid", INV4, MPS | mask("GPU-bbbb"), "cuda:0", H1.uuid),
    Row("57", INV4, mask("2"), "cuda:0", H2.uuid, options={"uuid_tokens": False}),
    Row("58", INV4, {"HIP_VISIBLE_DEVICES": "0"}, "auto", refused="HIP_VISIBLE_DEVICES='0'"),
    Row("59", INV4, {}, "cpu"),
    Row("60", INV4, mask("1"), H0.uuid, refused="not visible to this process"),
    # 61 is in test_rank_check.py.
    Row("62", INV4, {"LOCAL_RANK": "-1"}, "auto", refused="LOCAL_RANK='-1' is not a rank"),
    Row("62-text", INV4, {"LOCAL_RANK": "x"}, "auto", refused="LOCAL_RANK='x' is not a rank"),
    Row("63", INV4, torchrun(4, 4, RANK=0), "auto", refused="local rank 4 is out of range"),
    # 64 is a UsageError: see test_device_plan.py.
)  # fmt: skip

# user-reports.md section 6. 7 and 8 take MIG1; 21, 24, 25 are the worker's side, tested elsewhere.
MATRIX = (
    Row("1", INV4, torchrun(2, 4), "auto", H2.uuid),
    Row("2", INV8, torchrun(1, 4) | mask("4,5,6,7"), "auto", U[5]),
    Row("3", INV8, torchrun(0, 2) | mask("7,4"), "auto", U[7]),
    Row("4", INV8, torchrun(1, 2) | mask(f"{U[4]},{U[5]}"), "auto", U[5]),
    Row("5", INV8, torchrun(0, 1) | mask(U[4][:8]), "auto", U[4]),
    Row("6", INV4, torchrun(0, 1) | mask("GPU-cccc"), "auto", refused=f"not unique: {H2.uuid}, {H3.uuid}"),
    Row("7", MIG1, torchrun(0, 1) | mask(M1), "auto", M1),
    Row("7-unlisted", INV4, torchrun(0, 1) | mask(M1), "auto", M1),
    Row("8", MIG1, torchrun(1, 2) | mask(f"{M1},{M2}"), "auto", M2),
    Row("9", INV4, srun(1) | mask("3"), "auto", H3.uuid),
    Row("10", INV8, RAY | {"LOCAL_RANK": "0"} | mask("0,1,2,3,4,5,6,7"), "auto", refused="more than one GPU"),
    Row("11", INV4, torchrun(2, 3, LOCAL_RANK=0) | mask("2"), "auto", H2.uuid),
    Row("12", INV4, torchrun(0, 1) | mask("NoDevFiles"), "auto", refused="granted this job no GPU"),
    Row("13", INV4, mask(""), "auto", refused="set and empty"),
    Row("13-cpu", INV4, mask(""), "cpu"),
    Row("15", INV4, torchrun(0, 1) | mask("0,0"), "auto", refused="one GPU twice"),
    Row("16", INV4, torchrun(1, 2) | mask(" 0, 1 "), "auto", H1.uuid),
    Row("17-0x1", INV4, mask("0x1"), "auto", refused="='0x1': '0x1' is no entry"),
    Row("17-1abc", INV4, mask("1abc"), "auto", refused="='1abc': '1abc' is no entry"),
    Row("17-cuda:1", INV4, mask("cuda:1"), "auto", refused="='cuda:1': 'cuda:1' is no entry"),
    Row("17-all", INV4, mask("all"), "auto", refused="='all': 'all' is no entry"),
    Row("20", INV4, mask("1"), "cuda:1", refused="there is no cuda:1 in this process: it has 1 visible GPU"),
)  # fmt: skip

# Launchers of section 3.2 which the tables do not reach.
UNILAB = {"UNILAB_DP_RANK": "1", "UNILAB_DP_WORLD_SIZE": "2"}
MORE = (
    Row("unilab", INV4, UNILAB | mask("3"), "auto", H3.uuid),
    Row("unilab-label", INV4, UNILAB | {"LOCAL_RANK": "1"} | mask("3"), "auto", H3.uuid),
    Row("unilab-wide", INV4, UNILAB, "auto", refused="gives each rank one entry"),
    Row("unilab-torchrun", INV4, UNILAB | torchrun(0, 2), "auto", refused="two launchers disagree"),
    Row("srun-two-per-task", INV4, srun(1, SLURM_GPUS_PER_TASK="h200:2") | mask("2,3"), "auto",
        refused="2 GPUs of its own"),
    Row("srun-oversubscribed", INV4, srun(0, SLURM_STEP_TASKS_PER_NODE="4") | mask("0,1"), "auto",
        refused="4 local ranks but only 2 visible"),
    Row("srun-one-task", INV4, srun(0, 1), "auto", refused="no launcher says which GPU"),
    Row("sbatch-script", INV4, {"SLURM_LOCALID": "0", "SLURM_PROCID": "0"}, "auto",
        refused="no launcher says which GPU"),
    Row("srun-torchrun-each", INV4, srun(1) | torchrun(0, 1) | mask("3"), "auto", H3.uuid),
    Row("srun-torchrun-unbound", INV4, srun(1) | torchrun(0, 1), "auto", refused="--gpus-per-task=1"),
    Row("ray-train", INV4, RAY | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | mask("1,3"),
        "auto", H3.uuid, options={"gpu_ids": [3]}),
    Row("ray-several", INV4, RAY, "auto", refused="Ray assigned 2 GPUs", options={"gpu_ids": [0, 1]}),
    Row("ray-contradicts", INV4, RAY | mask("1"), "auto", refused="not visible to this process",
        options={"gpu_ids": [2]}),
    Row("ray-no-gpu", INV4, RAY | mask(""), "auto", refused="num_gpus=0"),
    Row("ray-noset-zero", INV4, RAY | {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}, "auto",
        refused="Ray did not narrow"),
    Row("ray-under-slurm", INV4, srun(0) | RAY | mask("2"), "auto", H2.uuid),
    Row("lightning", INV4, LIGHTNING, "auto", refused="Lightning's root device"),
    Row("unnamed", INV4, {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "auto", H1.uuid),
    Row("unnamed-one-gpu", INV4, {"RANK": "5", "WORLD_SIZE": "8"} | mask("3"), "auto", H3.uuid),
    Row("unnamed-wide", INV4, {"RANK": "5", "WORLD_SIZE": "8"}, "auto", refused="does not say which of"),
    Row("stale-local-rank", INV4, {"LOCAL_RANK": "1"}, "auto", refused="without WORLD_SIZE"),
    Row("torchrun-incomplete", INV4, {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}, "auto",
        refused="torchrun always sets RANK"),
    Row("rocr-beside-cuda", INV4, {"ROCR_VISIBLE_DEVICES": "2"} | mask("2"), "auto", H2.uuid),
    Row("rocr", INV4, {"ROCR_VISIBLE_DEVICES": "2"}, "auto", refused="ROCR_VISIBLE_DEVICES='2'"),
)  # fmt: skip


def ask(row: Row) -> tuple[DeviceId, dict[str, str]]:
    """The planned device and the worker's variables."""
    options = dict(row.options)
    traits = {name: options.pop(name) for name in ("graphics", "uuid_tokens") if name in options}
    if row.asked == "auto":
        plan = RankPlan.from_env(row.env, inventory=row.inventory, **options).device
    elif row.asked.startswith("host "):
        index = int(row.asked.split()[1])
        plan = RankPlan.from_host_indices(
            [index], rank=0, numbering="host", env=row.env, inventory=row.inventory
        ).device
    else:
        plan = RankPlan.explicit(
            0, 1, row.asked, env=row.env, inventory=row.inventory, **options
        ).device
    return plan.device, worker_variables(plan.device, plan.host_index, **traits)


def check(row: Row) -> None:
    if row.refused:
        with pytest.raises(DevicePlanError) as caught:
            ask(row)
        assert row.refused in caught.value.message
        return
    device, variables = ask(row)
    assert device.uuid == row.uuid
    token = row.uuid if row.options.get("uuid_tokens", True) else "2"
    assert variables == {"CUDA_VISIBLE_DEVICES": token, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"table8-{row.id}")
def test_resolver_table(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: f"matrix6-{row.id}")
def test_users_matrix(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", MORE, ids=lambda row: row.id)
def test_launchers(row: Row) -> None:
    check(row)


def test_mig_identity_is_the_instance() -> None:
    device, _ = ask(Row("50", MIG1, mask(M1), "auto"))
    assert device == DeviceId("mig", M1)


def test_plan_keeps_ranks_reason_and_seed() -> None:
    env = torchrun(1, 4, RANK=5, GROUP_RANK=1, WORLD_SIZE=8) | mask("3,2,1,0")
    plan = RankPlan.from_env(env, inventory=INV4)
    assert (plan.rank, plan.local_rank, plan.world_size, plan.local_world_size) == (5, 1, 8, 4)
    assert plan.source == plan.device.source == "torchrun"
    assert (plan.device.host, plan.device.host_index, plan.device.rank) == ("cuda:1", 2, 5)
    assert plan.why == (
        "torchrun: LOCAL_RANK=1 of 4 takes entry 1 of 4 visible GPUs, "
        f"CUDA_VISIBLE_DEVICES=3,2,1,0: {H2.uuid}"
    )
    assert plan.seed(100) == 105
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_virtual_local_rank_says_that_only_a_comparison_can_tell() -> None:
    plan = RankPlan.from_env(torchrun(0, 4) | mask("2"), inventory=INV4)
    assert "check_unique" in plan.why


def test_unspecified_prints_two_lines_to_write() -> None:
    with pytest.raises(DevicePlanError) as caught:
        RankPlan.from_env({}, inventory=INV4)
    lines = caught.value.message.splitlines()[1:]
    assert lines == [
        '    device="cuda:3"',
        f'    device=RankPlan.explicit(rank=0, world_size=1, device="{H3.uuid}").device',
    ]
    for line in lines:  # and both mean what they say
        expression = line.strip().removeprefix("device=").removesuffix(".device")
        expression = expression.replace(").device", ")").replace('")', '", env={}, inventory=INV4)')
        device = eval(expression, {"RankPlan": RankPlan, "INV4": INV4})
        assert resolve_device(device, {}, INV4).device.uuid == H3.uuid


def test_slurm_tasks_per_node() -> None:
    env = srun(1, 11, SLURM_STEP_TASKS_PER_NODE="4(x2),3", SLURM_NODEID=2, SLURM_PROCID=9)
    assert launched_ranks(env) == Ranks("srun", 9, 1, 11, 3)


class TestHostIndices:
    def test_without_mask_they_are_the_same(self) -> None:
        plan = RankPlan.from_host_indices([3, 1], rank=1, env={}, inventory=INV4)
        assert plan.device.device.uuid == H1.uuid
        assert (plan.rank, plan.world_size) == (1, 2)

    def test_refused_where_a_mask_makes_them_differ(self) -> None:
        with pytest.raises(DevicePlanError, match=r'numbering="host" or numbering="visible"'):
            RankPlan.from_host_indices([0, 1], rank=0, env=mask("1,0"), inventory=INV4)

    @pytest.mark.parametrize(("numbering", "uuid"), [("host", H0.uuid), ("visible", H1.uuid)])
    def test_unless_the_numbering_is_named(self, numbering: str, uuid: str) -> None:
        plan = RankPlan.from_host_indices(
            [0, 1], rank=0, numbering=numbering, env=mask("1,0"), inventory=INV4
        )
        assert plan.device.device.uuid == uuid

    def test_one_gpu_for_two_ranks(self) -> None:
        with pytest.raises(DevicePlanError, match="two ranks one GPU"):
            RankPlan.from_host_indices([1, 1], rank=0, env={}, inventory=INV4)
        plan = RankPlan.from_host_indices([1, 1], rank=0, share=True, env={}, inventory=INV4)
        assert plan.device.device.uuid == H1.uuid

    @pytest.mark.parametrize("indices", [[True], ["0"], [-1], [0.0]])
    def test_only_whole_numbers(self, indices: list[Any]) -> None:
        with pytest.raises(UsageError, match="whole numbers"):
            RankPlan.from_host_indices(indices, rank=0, env={}, inventory=INV4)

    def test_out_of_range(self) -> None:
        with pytest.raises(DevicePlanError, match="host index 4 names no whole GPU"):
            RankPlan.from_host_indices([4], rank=0, env={}, inventory=INV4)
        with pytest.raises(UsageError, match="rank 2 has no entry"):
            RankPlan.from_host_indices([0, 1], rank=2, env={}, inventory=INV4)


class TestExplicit:
    def test_takes_any_device(self) -> None:
        plan = RankPlan.explicit(3, 4, "GPU-bbbb", env={}, inventory=INV4)
        assert (plan.rank, plan.world_size, plan.device.rank) == (3, 4, 3)
        assert plan.device.device.uuid == H1.uuid

    def test_cpu(self) -> None:
        assert RankPlan.explicit(0, 2, "cpu").device.device.kind == CPU

    def test_rank_out_of_range(self) -> None:
        with pytest.raises(UsageError, match="rank 4 of world size 4"):
            RankPlan.explicit(4, 4, "cpu")


tokens = st.lists(st.sampled_from(range(4)), min_size=1, max_size=4, unique=True)


@settings(deadline=None)  # a busy machine is no error
@given(order=tokens, as_uuid=st.booleans(), rank=st.integers(0, 5), of=st.integers(1, 6))
def test_worker_is_always_on_a_gpu_the_host_process_sees(
    order: list[int], as_uuid: bool, rank: int, of: int
) -> None:
    names = [INV4.gpus[i].uuid if as_uuid else str(i) for i in order]
    for launcher in (torchrun, srun):
        env = launcher(rank, of) | mask(",".join(names))
        try:
            plan = RankPlan.from_env(env, inventory=INV4)
        except DevicePlanError:
            continue
        assert plan.device.device.uuid in {INV4.gpus[i].uuid for i in order}
        assert plan.device.mask == plan.device.device.uuid


# -- the learner's torch ---------------------------------------------------------------------------


def fake_torch(ordinal: int, reserved: int, uuid: str = "", started: bool = True) -> Any:
    def properties(_: int) -> object:
        return types.SimpleNamespace(uuid=uuid.removeprefix("GPU-") or None)

    def memory(_: int) -> int:
        return reserved

    cuda = types.SimpleNamespace(
        is_initialized=lambda: started,
        current_device=lambda: ordinal,
        memory_reserved=memory,
        get_device_properties=properties,
    )
    return types.SimpleNamespace(cuda=cuda)


class TestTorchInUse:
    """A machine with INV4, as this process sees it, and a stand-in for an imported torch."""

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def probe(env: Mapping[str, str], timeout_s: float = 1.0) -> Inventory:
            return INV4

        monkeypatch.setattr(visibility, "probe", probe)
        for name in os.environ:
            if name.startswith(("CUDA_", "SLURM_", "TORCHELASTIC_", "RAY_", "UNILAB_")):
                monkeypatch.delenv(name)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HIP_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    def use(self, monkeypatch: pytest.MonkeyPatch, torch: Any, env: Mapping[str, str]) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)
        for name, value in env.items():
            monkeypatch.setenv(name, value)

    def test_answers_where_the_launcher_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(3, 0, H3.uuid), LIGHTNING)
        assert RankPlan.from_env().device.device.uuid == H3.uuid

    def test_current_device_0_is_only_where_torch_starts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.use(monkeypatch, fake_torch(0, 0, H0.uuid), {})
        with pytest.raises(DevicePlanError, match="no launcher says"):
            RankPlan.from_env()

    def test_device_0_with_memory_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(0, 2**20, H0.uuid), {})
        assert RankPlan.from_env().device.device.uuid == H0.uuid

    def test_torch_that_has_not_started_is_not_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(0, 2**20, H0.uuid, started=False), torchrun(1, 4))
        assert RankPlan.from_env().device.device.uuid == H1.uuid

    def test_differs_from_the_launcher(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(0, 2**20, H0.uuid), torchrun(1, 4))
        with pytest.raises(DevicePlanError) as caught:
            RankPlan.from_env()
        assert H0.uuid in caught.value.message and H1.uuid in caught.value.message

    def test_differs_from_the_given_learner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(3, 0, H3.uuid), {})
        with pytest.raises(DevicePlanError, match="but torch already uses"):
            RankPlan.from_env(learner="cuda:2")

    def test_mask_changed_after_torch_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, fake_torch(3, 0, H2.uuid), {})
        with pytest.raises(DevicePlanError, match="changed after torch"):
            RankPlan.from_env()

    def test_activate_sets_and_verifies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_to: list[Any] = []
        torch = fake_torch(0, 0, H1.uuid)

        def device(kind: str, index: int | None = None) -> Any:
            return types.SimpleNamespace(type=kind, index=index)

        torch.device = device
        torch.cuda.set_device = set_to.append
        self.use(monkeypatch, torch, torchrun(1, 4))
        plan = RankPlan.from_env()
        plan.activate()
        assert [device.index for device in set_to] == [1]
        # In a process with another mask the same plan has another ordinal.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,1")
        assert plan.torch_device.index == 2


def test_inherited_environment_is_not_changed() -> None:
    env = torchrun(1, 4) | mask("3,0,1,2")
    before = dict(env)
    RankPlan.from_env(env, inventory=INV4)
    assert env == before
    assert look(env, INV4).gpus[1] == VisibleGpu(1, "gpu", H0.uuid, H0.pci, H0.name)
