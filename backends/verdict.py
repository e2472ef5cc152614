"""Where a worker landed, against where it was planned: a pure function of what was measured."""

from __future__ import annotations

from ..ipc.device import CPU, DeviceReport, same_device
from ..ipc.messages import Hello
from .device_plan import DevicePlan


def difference(plan: DevicePlan, hello: Hello, report: DeviceReport) -> str:
    """What is wrong with the place, in words; "" when it is the planned one."""
    wrong = same_device(plan.planned, report)
    if wrong:
        return wrong
    if plan.device.kind == CPU and (report.visible or hello.gpus):
        seen = ", ".join(report.visible or [gpu.uuid for gpu in hello.gpus])
        return f"the CPU was planned, but the worker sees GPUs: {seen}"
    return ""
