"""Identity of a device: one spelling of a UUID, no identity without one, no ordinal that passes for one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.ipc.device import (
    CPU,
    GPU,
    MIG,
    DeviceId,
    DeviceReport,
    PlannedDevice,
    cpu_report,
    normalise_uuid,
    pci_triple,
    same_device,
    uuid_from_bytes,
)

BARE = "ce08eab0-1122-3344-5566-778899aabbcc"
UUID = "GPU-" + BARE
OTHER = "GPU-ce08eab0-1122-3344-5566-778899aabbcd"


@pytest.mark.parametrize(
    "text",
    [UUID, BARE, BARE.upper(), "gpu-" + BARE.upper(), BARE.replace("-", ""), f" {UUID}\n"],
)
def test_every_spelling_of_a_uuid_is_one(text: str) -> None:
    assert normalise_uuid(text) == UUID


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "GPU-", "GPU-ce08", BARE[:-1], BARE + "0", "GPU-GPU-" + BARE, "g" + BARE[1:]),
        *("cuda:0", "00000000-0000-0000-0000-000000000000", "0" * 32, BARE.replace("-", "", 1)),
    ],
)
def test_what_is_no_whole_uuid_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        normalise_uuid(text)


@pytest.mark.parametrize(
    ("text", "kind"), [(UUID, MIG), ("MIG-" + BARE, GPU), ("mig-" + BARE, GPU)]
)
def test_the_uuid_of_a_mig_instance_is_never_turned_into_that_of_a_gpu(
    text: str, kind: str
) -> None:
    with pytest.raises(ValueError, match=kind):
        normalise_uuid(text, kind)


@settings(deadline=None)
@given(st.binary(min_size=16, max_size=16).filter(any), st.sampled_from([GPU, MIG]))
def test_the_drivers_bytes_are_the_digits_in_order(raw: bytes, kind: str) -> None:
    uuid = uuid_from_bytes(raw, kind)
    assert bytes.fromhex(uuid[4:].replace("-", "")) == raw
    assert normalise_uuid(uuid, kind) == uuid


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_uuid_has_sixteen_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        uuid_from_bytes(bytes(size))


@pytest.mark.parametrize("text", ["0000:17:00.0", "00000000:17:00.0", "0:17:0", "0000:17:00"])
def test_every_spelling_of_a_pci_id_is_equal(text: str) -> None:
    assert pci_triple(text) == (0, 0x17, 0)


@pytest.mark.parametrize("text", ["", "17:00.0", "0000:17:00.8", "0000:17:00.0 ", "x:17:00.0"])
def test_what_is_no_pci_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PCI"):
        pci_triple(text)


@pytest.mark.parametrize(
    ("kind", "uuid"),
    [
        *(("cuda", UUID), ("", ""), (CPU, UUID), (GPU, ""), (MIG, ""), (GPU, BARE), (GPU, "0")),
        *((GPU, UUID.upper()), (GPU, "MIG-" + BARE), (MIG, UUID)),
    ],
)
def test_what_is_no_identity_cannot_be_written_down(kind: str, uuid: str) -> None:
    with pytest.raises(ValueError):
        DeviceId(kind, uuid)


@pytest.mark.parametrize(("kind", "uuid", "local"), [(CPU, "", "cuda:0"), (GPU, UUID, "cpu")])
def test_a_plan_names_a_local_device_of_its_own_kind(kind: str, uuid: str, local: str) -> None:
    with pytest.raises(ValueError, match="local device"):
        PlannedDevice(kind, uuid, local)


def report(**changes: Any) -> DeviceReport:
    parts: dict[str, Any] = dict(
        kind=GPU,
        uuid=UUID,
        local="cuda:0",
        pci="0000:17:00.0",
        name="",
        evidence="engine_buffer",
        buffer="qpos",
        visible=(UUID,),
        contexts=(UUID,),
        driver="",
    )
    return DeviceReport(**{**parts, **changes})


@pytest.mark.parametrize(
    "wrong",
    [
        {"uuid": ""},
        {"evidence": "hearsay"},
        {"evidence": "host_memory"},
        {"kind": CPU, "uuid": ""},
    ],
    ids=str,
)
def test_a_report_that_contradicts_itself_cannot_exist(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        report(**wrong)


def test_a_report_of_the_planned_gpu_agrees_whatever_the_ordinals_say() -> None:
    assert same_device(PlannedDevice(GPU, UUID, "cuda:3"), report()) is None


def test_a_report_of_the_cpu_agrees_with_a_plan_for_the_cpu() -> None:
    assert same_device(PlannedDevice(CPU, "", "cpu"), cpu_report("qpos")) is None


@pytest.mark.parametrize(
    ("plan", "measured"),
    [
        (PlannedDevice(GPU, UUID, "cuda:0"), report(uuid=OTHER)),
        (PlannedDevice(GPU, UUID, "cuda:0"), cpu_report("qpos")),
        (PlannedDevice(CPU, "", "cpu"), report()),
        (PlannedDevice(MIG, "MIG-" + BARE, "cuda:0"), report()),
    ],
    ids=["another GPU", "the CPU", "a GPU", "the whole GPU"],
)
def test_a_report_of_another_device_is_a_difference_in_words(
    plan: PlannedDevice, measured: DeviceReport
) -> None:
    said = same_device(plan, measured)
    assert said is not None
    assert str(measured.device) in said and (plan.uuid or CPU) in said
