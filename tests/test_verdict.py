"""The verdict as a pure function: one row for every line of the design's table, and its neighbours."""

from __future__ import annotations

import dataclasses

import pytest

from outboard.backends.device_plan import DevicePlan, cpu_plan
from outboard.backends.traits import Traits
from outboard.backends.verdict import Verdict, judge
from outboard.backends.witness import Sighting
from outboard.ipc.device import (
    DERIVED_COPY,
    ENGINE_BUFFER,
    DeviceId,
    DeviceReport,
    VisibleGpu,
    cpu_report,
)
from outboard.ipc.messages import Hello

U0 = "GPU-ce08eab0-0000-4000-8000-000000000006"
U1 = "GPU-d11fe77a-0000-4000-8000-000000000007"
M0, M1 = (f"MIG-5ca1ab1e-0000-4000-8000-00000000000{i}" for i in range(2))

PLAN = DevicePlan(DeviceId("gpu", U1), "cuda:1", 1, U1, "why")
MIG_PLAN = DevicePlan(DeviceId("mig", M0), "cuda:0", None, M0, "why")

RIGHT = DeviceReport(
    "gpu", U1, "cuda:0", "0000:00:07.0", "a GPU", ENGINE_BUFFER, "qpos", (U1,), (U1,), ""
)
ON_CPU = cpu_report("qpos", (U1,))
SECOND_RANK = "; the state buffer is a copy that the engine made, so the evidence is of second rank"

SEES_IT = Sighting(True, "", (U1,))
SEES_NOTHING = Sighting(True, "")
BLIND = Sighting(False, "no library")
HELPLESS = Traits(gpu=True, other_contexts="its renderer opens every GPU")


def hello(*uuids: str) -> Hello:
    gpus = tuple(VisibleGpu(i, "gpu", uuid, "", "") for i, uuid in enumerate(uuids))
    return Hello("3.8", "python", "1", "1", 7, "fake", "ipc", "", "PCI_BUS_ID", gpus, "")


def judged(
    report: DeviceReport,
    sighting: Sighting = SEES_IT,
    plan: DevicePlan = PLAN,
    traits: Traits | None = None,
    at_hello: tuple[str, ...] | None = None,
) -> Verdict:
    shown = report.visible if at_hello is None else at_hello
    return judge(plan, hello(*shown), report, sighting, traits or Traits(gpu=True))


def but(**changes: object) -> DeviceReport:
    return dataclasses.replace(RIGHT, **changes)  # pyright: ignore[reportArgumentType]


# -- nothing contradicts the plan, and what the witness adds ---------------------------------------


@pytest.mark.parametrize(
    ("report", "sighting", "witness"),
    [
        (RIGHT, SEES_IT, "NVML confirmed"),
        (but(evidence=DERIVED_COPY), SEES_IT, "NVML confirmed"),
        (RIGHT, BLIND, "witness unobserved (no library)"),
        (but(evidence=DERIVED_COPY), BLIND, f"witness unobserved (no library){SECOND_RANK}"),
        (RIGHT, Sighting(False, "no list of U0", (U1,)), "witness unobserved (no list of U0)"),
        (RIGHT, SEES_NOTHING, f"witness unobserved (NVML does not list the worker on {U1})"),
    ],
    ids=["right", "copy", "blind", "copy-blind", "half-blind", "listed-nowhere"],
)
def test_right(report: DeviceReport, sighting: Sighting, witness: str) -> None:
    assert judged(report, sighting) == Verdict("", witness)


@pytest.mark.parametrize("sighting", [BLIND, SEES_NOTHING, Sighting(False, "gap", (U1,))])
def test_a_witness_that_cannot_tell_is_never_called_confirmed(sighting: Sighting) -> None:
    assert "confirmed" not in judged(RIGHT, sighting).witness


def test_a_mig_instance_is_compared_as_an_instance() -> None:
    report = but(kind="mig", uuid=M0, visible=(M0,), contexts=(M0,))
    assert judged(report, Sighting(True, "", (M0,)), MIG_PLAN) == Verdict("", "NVML confirmed")


# -- what contradicts the plan ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "wrong"),
    [
        (but(uuid=U0), f"planned {U1} but the state lies on {U0}"),
        (but(kind="mig", uuid=M0), f"planned {U1} but the state lies on {M0}"),
        (ON_CPU, f"planned {U1} but the state lies on cpu"),
        (but(local="cuda:1"), "the worker calls its device cuda:1 where cuda:0 was planned"),
        (but(visible=(U1, U0)), f"no other, but it sees {U0}, {U1}"),
        (but(visible=(U0,)), f"no other, but it sees {U0}"),
        (but(visible=()), "no other, but it sees none"),
    ],
    ids=["uuid", "kind", "cpu", "ordinal", "second", "only-another", "none"],
)
def test_a_report_that_contradicts(report: DeviceReport, wrong: str) -> None:
    assert judged(report).wrong.endswith(wrong)


def test_a_second_gpu_that_was_only_visible_at_hello_counts() -> None:
    assert judged(RIGHT, at_hello=(U1, U0)).wrong.endswith(f"but it sees {U0}, {U1}")


def test_a_report_that_sees_none_is_not_completed_by_what_hello_saw() -> None:
    assert judged(but(visible=()), at_hello=(U1,)).wrong.endswith("but it sees none")


def test_a_driver_that_was_not_found_at_hello_is_no_contradiction() -> None:
    assert judged(RIGHT, at_hello=()) == Verdict("", "NVML confirmed")


def test_another_instance_of_the_same_gpu_is_another_device() -> None:
    report = but(kind="mig", uuid=M1, visible=(M1,))
    assert judged(report, plan=MIG_PLAN).wrong == f"planned {M0} but the state lies on {M1}"


@pytest.mark.parametrize(
    ("sighting", "wrong"),
    [
        (Sighting(True, "", (U0, U1)), f"NVML sees the worker on {U0} too"),
        (Sighting(True, "", (U0,)), f"NVML sees the worker on {U0} and not on {U1}"),
        (Sighting(False, "a gap", (U0,)), f"NVML sees the worker on {U0} too"),
    ],
    ids=["also", "only", "seen-for-certain-although-not-all-was"],
)
def test_a_witness_that_contradicts(sighting: Sighting, wrong: str) -> None:
    assert judged(RIGHT, sighting).wrong == wrong


def test_contexts_that_cannot_be_helped_are_named_and_pass() -> None:
    verdict = judged(RIGHT, Sighting(True, "", (U0, U1)), traits=HELPLESS)
    assert verdict == Verdict("", f"NVML sees it on {U0} too (its renderer opens every GPU)")


def test_no_trait_excuses_a_worker_that_is_only_elsewhere() -> None:
    assert "and not on" in judged(RIGHT, Sighting(True, "", (U0,)), traits=HELPLESS).wrong


# -- the CPU was planned ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sighting", "witness"),
    [
        (SEES_NOTHING, "NVML confirmed: on no GPU"),
        (BLIND, "witness unobserved (no library)"),
    ],
)
def test_cpu_right(sighting: Sighting, witness: str) -> None:
    assert judged(cpu_report("qpos"), sighting, cpu_plan()) == Verdict("", witness)


@pytest.mark.parametrize(
    ("report", "sighting", "at_hello", "wrong"),
    [
        (RIGHT, SEES_NOTHING, (), f"planned cpu but the state lies on {U1}"),
        (ON_CPU, SEES_NOTHING, (), f"the CPU was planned, but the worker sees {U1}"),
        (cpu_report("qpos"), SEES_NOTHING, (U0,), f"the CPU was planned, but the worker sees {U0}"),
        (cpu_report("qpos"), SEES_IT, (), f"the CPU was planned, but NVML sees the worker on {U1}"),
    ],
    ids=["on-gpu", "sees-one", "saw-one-at-hello", "witness"],
)
def test_cpu_contradicted(
    report: DeviceReport, sighting: Sighting, at_hello: tuple[str, ...], wrong: str
) -> None:
    assert judged(report, sighting, cpu_plan(), at_hello=at_hello).wrong == wrong
