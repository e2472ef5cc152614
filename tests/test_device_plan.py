"""What `device=` may be; and a literal device under a launcher of several ranks."""

from __future__ import annotations

import types
from typing import Any

import pytest

from outboard.backends.device_plan import DevicePlan, check_against_launcher, resolve_device
from outboard.backends.inventory import HostGpu, Inventory
from outboard.backends.rank_plan import RankPlan
from outboard.ipc.device import CPU, DeviceId, PlannedDevice
from outboard.ipc.errors import DevicePlanError, UsageError

U0 = "GPU-ce08eab0-0000-4000-8000-000000000006"
U1 = "GPU-d11fe77a-0000-4000-8000-000000000007"
M0 = "MIG-5ca1ab1e-0000-4000-8000-000000000000"
INV2 = Inventory((HostGpu(U0), HostGpu(U1)))
TURNED = {"CUDA_VISIBLE_DEVICES": "1,0"}


def torch_device(kind: str, index: int | None = None) -> Any:
    """torch.device has these two attributes; torch is not needed to read them."""
    return types.SimpleNamespace(type=kind, index=index)


def torchrun(rank: int, of: int = 2) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(of), "LOCAL_WORLD_SIZE": str(of), "GROUP_RANK": "0"}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "uuid", "host", "host_index"),
    [
        ("cuda:0", U1, "cuda:0", 1),
        ("cuda:1", U0, "cuda:1", 0),
        (torch_device("cuda", 1), U0, "cuda:1", 0),
        (U1, U1, "cuda:0", 1),
        ("GPU-ce08", U0, "cuda:1", 0),
        ("GPU-CE08", U0, "cuda:1", 0),
    ],
)
def test_accepted(device: object, uuid: str, host: str, host_index: int) -> None:
    plan = resolve_device(device, TURNED, INV2)
    assert plan.device == DeviceId("gpu", uuid)
    assert (plan.host, plan.host_index, plan.mask) == (host, host_index, uuid)
    assert plan.planned == PlannedDevice("gpu", uuid, "cuda:0")
    assert str(plan) == f"{host} = {uuid}"


@pytest.mark.parametrize("device", ["cpu", torch_device("cpu")])
def test_cpu_needs_no_driver(device: object) -> None:
    plan = resolve_device(device, {"CUDA_VISIBLE_DEVICES": "nonsense"})
    assert plan.device == DeviceId(CPU)
    assert (plan.mask, plan.host_index, str(plan)) == ("", None, "cpu")


def test_mig_instance() -> None:
    plan = resolve_device(M0, {"CUDA_VISIBLE_DEVICES": M0}, Inventory.of_uuids([M0]))
    assert (plan.device, plan.mask, plan.host_index) == (DeviceId("mig", M0), M0, None)


def test_plans_pass_as_they_are() -> None:
    plan = RankPlan.from_env(torchrun(1), inventory=INV2)
    assert resolve_device(plan) is plan.device
    assert resolve_device(plan.device) is plan.device


@pytest.mark.parametrize(
    ("device", "phrase"),
    [
        (None, "device=None is how every rank once ended up on GPU 0"),
        (True, "a bare number does not say who counts"),
        (1, "a bare number does not say who counts"),
        ("cuda", "does not say which GPU, and there is no default"),
        ("", "does not say which GPU, and there is no default"),
        ("cuda:x", "names no device"),
        ("cuda:-1", "names no device"),
        ("cuda:01", "names no device"),
        ("gpu", "names no device"),
        ("GPU-", "names no device"),
        ("gpu-ce08", "names no device"),
        (torch_device("cuda"), "has no index"),
        (torch_device("mps", 0), "names no device"),
        (object(), "names no device"),
        (["cuda:0"], "names no device"),
    ],
    ids=str,
)
def test_refused_with_what_to_write(device: object, phrase: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_device(device, {}, INV2)
    assert phrase in caught.value.message
    assert 'write device="cuda:1"' in caught.value.message


def test_real_torch_device() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert resolve_device(torch.device("cuda", 1), {}, INV2).device.uuid == U1
    with pytest.raises(UsageError, match="has no index"):
        resolve_device(torch.device("cuda"), {}, INV2)


class TestAgainstLauncher:
    def check(self, device: object, env: dict[str, str]) -> None:
        check_against_launcher(resolve_device(device, env, INV2), env, INV2)

    def test_the_original_defect(self) -> None:
        """Both ranks say "cuda:0": the second one is refused by its own launcher's word."""
        self.check("cuda:0", torchrun(0))
        with pytest.raises(DevicePlanError) as caught:
            self.check("cuda:0", torchrun(1))
        message = caught.value.message
        assert "rank 1 of 2 (torchrun)" in message
        assert U0 in message and U1 in message
        assert "RankPlan.from_env().device" in message

    def test_the_same_gpu_by_another_name(self) -> None:
        self.check(U1, torchrun(1))
        self.check("cuda:1", torchrun(1))

    def test_the_plan_itself(self) -> None:
        env = torchrun(1)
        check_against_launcher(RankPlan.from_env(env, inventory=INV2).device, env, INV2)

    def test_explicit_was_said_on_purpose(self) -> None:
        env = torchrun(1)
        plan = RankPlan.explicit(1, 2, "cuda:0", env=env, inventory=INV2)
        check_against_launcher(plan.device, env, INV2)

    def test_where_the_launcher_cannot_tell(self) -> None:
        with pytest.raises(DevicePlanError, match="name no GPU for certain"):
            self.check("cuda:0", torchrun(2, 4))

    @pytest.mark.parametrize("env", [{}, torchrun(0, 1)])
    def test_one_rank_may_name_any(self, env: dict[str, str]) -> None:
        self.check("cuda:1", env)

    def test_cpu(self) -> None:
        self.check("cpu", torchrun(1))


def test_field_order_is_kept() -> None:
    """Others build DevicePlans by position."""
    plan = DevicePlan(DeviceId(CPU), CPU, None, "", "why", 1, 2, 3)
    assert (plan.rank, plan.local_rank, plan.world_size, plan.source) == (1, 2, 3, "")


def test_a_device_named_under_a_launcher_carries_this_ranks_number() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    plan = check_against_launcher(resolve_device("cpu"), env)
    assert (plan.rank, plan.local_rank, plan.world_size) == (3, 3, 4)
