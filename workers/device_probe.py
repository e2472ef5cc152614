"""The device as the driver shows it, before a simulator is imported and after it was built: written once,
torch-free."""

from typing import Tuple

from ..ipc import cuda_driver
from ..ipc.device import CPU, DeviceReport, cpu_report
from ..ipc.errors import DevicePlanError
from ..ipc.messages import Init


def _visible() -> Tuple[Tuple[str, ...], str]:
    gpus, why_not = cuda_driver.survey()
    return tuple(gpu.uuid for gpu in gpus), why_not


def in_host_memory(buffer: str) -> DeviceReport:
    """The report of a simulator whose state lies in host memory; GPUs it could see are named."""
    visible, why_not = _visible()
    return cpu_report(buffer, visible, why_not)


def of_pointer(pointer: int, buffer: str, evidence: str) -> DeviceReport:
    """Where the state buffer at `pointer` lies. Host memory is reported as such, whatever was asked.

    evidence: ENGINE_BUFFER or DERIVED_COPY, see ipc/device.py; each simulator's file says which.
    """
    place = cuda_driver.where_is(pointer)
    if place.memory != cuda_driver.DEVICE_MEMORY:
        # Managed memory migrates and registered memory is the host's: neither proves a placement.
        return in_host_memory(f"{buffer} ({place.memory} memory)")
    gpus, why_not = cuda_driver.survey()
    gpu = next(gpu for gpu in gpus if gpu.ordinal == place.ordinal)
    return DeviceReport(
        kind=gpu.kind,
        uuid=gpu.uuid,
        local=f"cuda:{gpu.ordinal}",
        pci=gpu.pci,
        name=gpu.name,
        evidence=evidence,
        buffer=buffer,
        visible=tuple(each.uuid for each in gpus),
        contexts=cuda_driver.primary_contexts(),
        driver=why_not,
    )


def check_device(init: Init) -> None:
    """Before a simulator is imported that would die of a bad mask without a word. DevicePlanError."""
    if init.device.kind == CPU:
        return
    gpus, why_not = cuda_driver.survey()
    if why_not:
        raise DevicePlanError(f"{init.device.uuid} is planned, but the CUDA driver says: {why_not}")
    here = {f"cuda:{gpu.ordinal}": gpu.uuid for gpu in gpus}
    if here.get(init.device.local) != init.device.uuid:
        seen = ", ".join(f"{local} = {uuid}" for local, uuid in here.items())
        raise DevicePlanError(
            f"{init.device.local} must be {init.device.uuid}, but this process sees {seen or 'no GPU'}"
        )
