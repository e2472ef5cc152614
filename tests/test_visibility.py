"""CUDA_VISIBLE_DEVICES as data: the measured table, the parser against the (stand-in) driver."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.backends import inventory, visibility
from outboard.backends.inventory import HostGpu, Inventory
from outboard.backends.visibility import (
    look,
    meaning,
    probe,
    resolve,
    under_mask,
    worker_variables,
)
from outboard.ipc.device import CPU, GPU, MIG, DeviceId
from outboard.ipc.errors import DevicePlanError, UsageError
from standin_gpu import M0, TWO, U0, U1, WITH_MIG, bare_environment, standin_environment

INV2 = Inventory((HostGpu(U0, "0000:00:06.0", "H200"), HostGpu(U1, "0000:00:07.0", "H200")))
BARE = U1.removeprefix("GPU-")

# Section 11 of the device fact sheet, in its order: the value, what we read, or how we refuse it.
READ = {
    "1,0": [U1, U0],
    "0": [U0],
    " 1": [U1],
    "1 ,0": [U1, U0],
    U1: [U1],
    U1[:12]: [U1],
    "GPU-c": [U0],
    "GPU-" + BARE.upper(): [U1],
    f"{U1},{U0}": [U1, U0],
}
REFUSED = {
    "": "set and empty",
    "-1": "=-1 hides every GPU",
    "NoDevFiles": "the scheduler granted this job no GPU",
    "7": "so there is no 7. CUDA would end the list there and show no GPU at all (cuInit 100)",
    "cuda:1": "CUDA would show no GPU at all (cuInit 100)",
    "none": "CUDA would show no GPU at all (cuInit 100)",
    ",1": "an empty entry is no entry. CUDA would show no GPU at all (cuInit 100)",
    "GPU-": "'GPU-' is no entry. CUDA would stop there",
    BARE: "CUDA would show no GPU at all (cuInit 100)",
    "gpu-" + BARE: "CUDA would show no GPU at all (cuInit 100)",
    f"MIG-{U1}/0/0": f"is no instance of {U1}",
    "0,0": "CUDA would show none at all (cuInit 101)",
    "0,1,0": "CUDA would show none at all (cuInit 101)",
    f"{U1},{U1}": "CUDA would show none at all (cuInit 101)",
    f"{U1},{U1[:12]}": "CUDA would then show none at all (cuInit 101)",
    "0,7,1": "so there is no 7. CUDA would end the list there and show 0 alone",
    "0x1": "CUDA would read it as 0 alone",
    "1.0": "CUDA would read it as 1 alone",
    "01": "CUDA would read it as 1 alone",
    "+1": "CUDA would read it as 1 alone",
    "1;0": "CUDA would read it as 1 alone",
    "0,": "CUDA would read it as 0 alone",
    "0,,1": "CUDA would read it as 0 alone",
    f"{U1},0": "mixes integers and UUIDs",
    f"0,{U1}": "mixes integers and UUIDs",
}


def uuids(mask: str, inventory: Inventory = INV2) -> list[str]:
    return [gpu.uuid for gpu in resolve({"CUDA_VISIBLE_DEVICES": mask}, inventory).gpus]


@pytest.mark.parametrize(("mask", "expected"), READ.items())
def test_measured_and_read(mask: str, expected: list[str]) -> None:
    assert uuids(mask) == expected


@pytest.mark.parametrize(("mask", "phrase"), REFUSED.items())
def test_measured_and_refused(mask: str, phrase: str) -> None:
    with pytest.raises(DevicePlanError) as caught:
        uuids(mask)
    assert phrase in caught.value.message
    assert mask in caught.value.message  # the text is shown


def test_unset_shows_all_in_order() -> None:
    seen = resolve({}, INV2)
    assert [(gpu.ordinal, gpu.uuid, gpu.pci) for gpu in seen.gpus] == [
        (0, U0, "0000:00:06.0"),
        (1, U1, "0000:00:07.0"),
    ]
    assert str(seen) == "2 visible GPUs, CUDA_VISIBLE_DEVICES unset"


@pytest.mark.parametrize("order", ["bogus", "pci_bus_id", ""])
def test_order_is_one_of_two_words(order: str) -> None:
    with pytest.raises(DevicePlanError, match=r"is no order.*cuInit 101"):
        resolve({"CUDA_DEVICE_ORDER": order}, INV2)


def test_cuda_order_numbers_integers() -> None:
    turned = Inventory(INV2.gpus, cuda_order=(U1, U0))
    assert uuids("0", turned) == [U1]
    env = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.uuid for gpu in resolve(env, turned).gpus] == [U0]
    assert turned.host_index(U1) == 1  # PCI order, whatever CUDA counts


def test_driver_and_parser_must_agree() -> None:
    with pytest.raises(DevicePlanError) as caught:
        uuids("1", Inventory(INV2.gpus, driver=(U0,)))
    assert f"reads as {U1}, but the driver shows this process {U0}" in caught.value.message
    none = Inventory(INV2.gpus, driver=(), why_none="cuInit: 999")
    with pytest.raises(DevicePlanError, match="none: cuInit: 999"):
        uuids("1", none)


def test_under_mask_replaces_and_does_not_nest() -> None:
    inventory = Inventory(INV2.gpus, driver=(U1,))
    assert under_mask("0", {"CUDA_VISIBLE_DEVICES": "1"}, inventory).gpus[0].uuid == U0


def test_meaning_in_words() -> None:
    assert meaning({"CUDA_VISIBLE_DEVICES": "1"}, INV2) == (
        f"1 visible GPU, CUDA_VISIBLE_DEVICES=1: cuda:0 = {U1}"
    )
    assert "read it as 0 alone" in meaning({"CUDA_VISIBLE_DEVICES": "0x1"}, INV2)


class TestWorkerVariables:
    def test_uuid(self) -> None:
        assert worker_variables(DeviceId(GPU, U1), 1) == {
            "CUDA_VISIBLE_DEVICES": U1,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def test_integer_for_runtimes_that_cannot_read_uuids(self) -> None:
        variables = worker_variables(DeviceId(GPU, U1), 1, uuid_tokens=False)
        assert variables == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def test_cpu_sees_nothing(self) -> None:
        for tokens in (True, False):
            assert worker_variables(DeviceId(CPU), None, uuid_tokens=tokens) == {
                "CUDA_VISIBLE_DEVICES": "",
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }

    def test_no_integer_for_a_mig_instance(self) -> None:
        with pytest.raises(DevicePlanError, match="no integer names"):
            worker_variables(DeviceId(MIG, M0), None, uuid_tokens=False)


class TestAssumed:
    def test_in_pci_order(self) -> None:
        inventory = Inventory.of_uuids([U1.upper().replace("GPU-", "GPU-"), M0])
        assert inventory.host_index(U1) == 0
        assert inventory.gpus[1].instances[0].uuid == M0

    @pytest.mark.parametrize("names", [["GPU-c"], [U0, U0], [], [""]])
    def test_refused(self, names: list[str]) -> None:
        with pytest.raises(UsageError, match="assumed GPU"):
            Inventory.of_uuids(names)


entry = st.one_of(
    st.sampled_from([*READ, *REFUSED, "GPU-ce08", "2", "MIG-1"]),
    st.text("0123456789-+x,;. GPUgpuMIGabcdef", max_size=12),
)


@settings(deadline=None)  # a busy machine is no error
@given(st.lists(entry, max_size=3).map(",".join))
def test_any_text_is_read_or_refused_by_name(mask: str) -> None:
    try:
        found = uuids(mask)
    except DevicePlanError as error:
        assert "CUDA_VISIBLE_DEVICES" in error.message
    else:
        assert found
        assert len(set(found)) == len(found)
        assert all(uuid in (U0, U1) or uuid.startswith("MIG-") for uuid in found)


# -- the driver, asked in a child ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No answer of the driver outlives a test."""
    asked = visibility._asked  # pyright: ignore[reportPrivateUsage]
    asked.clear()
    yield
    asked.clear()


@pytest.mark.parametrize(("mask", "expected"), READ.items())
def test_standin_driver_agrees(mask: str, expected: list[str]) -> None:
    seen = look(standin_environment(TWO, CUDA_VISIBLE_DEVICES=mask))
    assert [gpu.uuid for gpu in seen.gpus] == expected
    assert seen.inventory.host_index(U1) == 1


@pytest.mark.parametrize(
    ("mask", "phrase"), [(m, p) for m, p in REFUSED.items() if m != "NoDevFiles"]
)
def test_standin_driver_is_not_trusted_with_what_it_cuts_short(mask: str, phrase: str) -> None:
    with pytest.raises(DevicePlanError) as caught:
        look(standin_environment(TWO, CUDA_VISIBLE_DEVICES=mask))
    assert phrase in caught.value.message


def test_standin_mig_instance_passes() -> None:
    seen = look(standin_environment(WITH_MIG, CUDA_VISIBLE_DEVICES=M0))
    assert [(gpu.kind, gpu.uuid) for gpu in seen.gpus] == [(MIG, M0)]


def test_probe_is_kept_per_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    env = standin_environment(TWO)
    first = probe(env)
    assert first.driver == (U0, U1)

    def ask(*_: object) -> None:
        raise AssertionError("asked again")

    monkeypatch.setattr(inventory, "_ask", ask)
    assert probe(env) is first
    with pytest.raises(AssertionError, match="asked again"):
        probe({**env, "CUDA_VISIBLE_DEVICES": "1"})


def test_probe_leaves_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in standin_environment(TWO, CUDA_VISIBLE_DEVICES="1").items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert [gpu.uuid for gpu in look().gpus] == [U1]
    assert dict(os.environ) == before


def test_no_driver_says_so(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    env = bare_environment() | {"LD_LIBRARY_PATH": str(tmp_path)}
    with pytest.raises(DevicePlanError, match="this machine's CUDA driver shows no GPU: "):
        look(env)


def test_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CHILD", "import time; time.sleep(60)")
    with pytest.raises(DevicePlanError, match=r"did not answer within 0\.5 s"):
        probe(bare_environment(), timeout_s=0.5)


def test_child_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "_CHILD", "import sys; sys.exit('no such thing')")
    with pytest.raises(DevicePlanError, match="ended with 1: no such thing"):
        probe(bare_environment())


def test_site_hooks_do_not_run_in_the_child(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)")
    env = standin_environment(TWO) | {"PYTHONPATH": str(tmp_path)}
    assert probe(env).driver == (U0, U1)
    assert sys.executable
