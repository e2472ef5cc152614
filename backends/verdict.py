"""Where a worker landed, against where it was planned: a pure function of what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from ..ipc.device import CPU, DERIVED_COPY, DeviceReport, same_device
from ..ipc.messages import Hello
from .device_plan import DevicePlan
from .traits import Traits
from .witness import Sighting

CONFIRMED, UNOBSERVED = "confirmed", "unobserved"


@dataclass(frozen=True)
class Verdict:
    """wrong: what contradicts the plan, "" when nothing does. witness: what NVML adds, in words."""

    wrong: str
    witness: str


def judge(
    plan: DevicePlan, hello: Hello, report: DeviceReport, sighting: Sighting, traits: Traits
) -> Verdict:
    """The table of DESIGN 3. A witness that could not look is `unobserved`, never a confirmation."""
    if plan.device.kind == CPU:
        return _judge_cpu(plan, hello, report, sighting)
    wrong = same_device(plan.planned, report) or ""
    # What libcuda showed at HELLO may only add: it may not have been found that early.
    at_hello = {gpu.uuid for gpu in hello.gpus}
    visible = {*report.visible, *at_hello} if report.visible else set[str]()
    if not wrong and visible != {plan.device.uuid}:
        wrong = (
            "the worker must see the planned GPU and no other, but it sees "
            f"{', '.join(sorted(visible)) or 'none'}"
        )
    if not wrong and report.local != plan.planned.local:
        wrong = f"the worker calls its device {report.local} where {plan.planned.local} was planned"
    elsewhere = [uuid for uuid in sighting.gpus if uuid != plan.device.uuid]
    listed = plan.device.uuid in sighting.gpus
    if not wrong and elsewhere and sighting.observed and not listed:
        wrong = f"NVML sees the worker on {', '.join(elsewhere)} and not on {plan.device.uuid}"
    if not wrong and elsewhere and not traits.other_contexts:
        wrong = f"NVML sees the worker on {', '.join(elsewhere)} too"
    if sighting.observed and not listed:  # that nobody is listed confirms nothing
        sighting = Sighting(False, f"NVML does not list the worker on {plan.device.uuid}")
    return Verdict(wrong, _witness_words(report, sighting, elsewhere, traits))


def _judge_cpu(plan: DevicePlan, hello: Hello, report: DeviceReport, sighting: Sighting) -> Verdict:
    wrong = same_device(plan.planned, report) or ""
    seen = [*report.visible, *(gpu.uuid for gpu in hello.gpus)]
    if not wrong and seen:
        wrong = f"the CPU was planned, but the worker sees {', '.join(seen)}"
    if not wrong and sighting.gpus:
        wrong = f"the CPU was planned, but NVML sees the worker on {', '.join(sighting.gpus)}"
    witness = f"NVML {CONFIRMED}: on no GPU" if sighting.observed else _unobserved(sighting)
    return Verdict(wrong, witness)


def _unobserved(sighting: Sighting) -> str:
    return f"witness {UNOBSERVED} ({sighting.why})"


def _witness_words(
    report: DeviceReport, sighting: Sighting, elsewhere: list[str], traits: Traits
) -> str:
    if not sighting.observed:
        rank = (
            "; the state buffer is a copy that the engine made, so the evidence is of second rank"
            if report.evidence == DERIVED_COPY
            else ""
        )
        return _unobserved(sighting) + rank
    if elsewhere:
        return f"NVML sees it on {', '.join(elsewhere)} too ({traits.other_contexts})"
    return f"NVML {CONFIRMED}"
