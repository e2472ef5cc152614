"""From `device=` to the verdict, through a real worker: what is right, and every lie.

On stand-in GPUs, which prove nothing about a GPU; what needs nothing of the stand-in runs on two real
ones as well, where there are two (marker `gpu`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from standin_gpu import add_context, real_gpus
from standin_host import Host

pytestmark = pytest.mark.usefixtures("logs_may_stay")  # the log of a failed worker stays


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, private_folders: Path) -> Iterator[Host]:
    with Host(tmp_path_factory.mktemp("state")).started() as started:
        yield started


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def gpus(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host on two GPUs of either kind."""
    if request.param == "stand-in":
        yield request.getfixturevalue("host")
        return
    u0, u1 = real_gpus(2)[:2]
    with Host(Path(), u0, u1, real=True).started() as started:
        yield started


def simulator(folder: Path, methods: str) -> str:
    """A file with `fake`, some methods of it replaced."""
    body = "\n".join("    " + line for line in methods.strip("\n").splitlines())
    (folder / "sim.py").write_text(
        "import dataclasses, json, os\n"
        "from outboard.workers.fake_worker import FakeSimulator\n\n"
        f"class Sim(FakeSimulator):\n{body}\n"
    )
    return str(folder / "sim.py")


def wrapper(folder: Path, command: str, python: str) -> str:
    """A script in the interpreter's place, as sites have them around a simulator's Python."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n{command}\nexec {python} "$@"\n')
    path.chmod(0o755)
    return str(path)


def torchrun(rank: int, of: int = 2) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": of,
              "LOCAL_WORLD_SIZE": of, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h",
              "MASTER_PORT": 1}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def gone(pid: int | None) -> bool:
    return pid is not None and not os.path.exists(f"/proc/{pid}")


# -- right -----------------------------------------------------------------------------------------

OPEN = """
with fake(worker_python=python) as sim:
    sim.step(sim.ctrl_view)
    answer = [sim.device, sim.where(), sim.report]
"""


def test_right_is_said_with_uuid_both_names_evidence_and_witness(
    gpus: Host, worker_python: str
) -> None:
    device, again, report = gpus.run(OPEN, python=worker_python).answer
    assert (
        device
        == again
        == (f"cuda:1 = {gpus.u1} (worker cuda:0); qpos is there (engine_buffer); NVML confirmed")
    )
    assert report["witness"] == "NVML confirmed"
    plan, measured = report["device_plan"], report["device_report"]
    assert (plan["kind"], plan["uuid"], plan["host"], plan["host_index"], plan["mask"]) == (
        "gpu", gpus.u1, "cuda:1", 1, gpus.u1,
    )  # fmt: skip
    assert (measured["kind"], measured["uuid"], measured["local"]) == ("gpu", gpus.u1, "cuda:0")
    assert measured["visible"] == measured["contexts"] == [gpus.u1]
    assert gpus.real or measured["pci"] == "0000:00:07.0"


def test_the_inherited_mask_decides_what_cuda_1_is(gpus: Host) -> None:
    _, _, report = gpus.run(OPEN, {"CUDA_VISIBLE_DEVICES": "1,0"}, python=None).answer
    assert report["device_report"]["uuid"] == report["device_plan"]["mask"] == gpus.u0


def test_a_plan_says_rank_launcher_and_reason(gpus: Host) -> None:
    code = "with fake(RankPlan.from_env().device) as sim: answer = sim.report"
    report = gpus.run(code, torchrun(1)).answer
    assert [report[name] for name in ("rank", "local_rank", "world_size")] == [1, 1, 2]
    assert report["device_plan"]["source"] == "torchrun"
    assert report["device_plan"]["why"].startswith("torchrun: LOCAL_RANK=1 of 2 takes entry 1 of 2")


def test_an_integer_is_sent_where_the_runtime_cannot_read_uuids(gpus: Host, tmp_path: Path) -> None:
    code = """
with custom(file, traits=Traits(gpu=True, uuid_tokens=False)) as sim:
    answer = [sim.report["device_plan"]["mask"], sim.report["device_report"]["uuid"]]
"""
    assert gpus.run(code, file=simulator(tmp_path, "pass")).answer == ["1", gpus.u1]


# -- lies of the report ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("uuid:{u0}", "planned {u1} but the state lies on {u0}"),
        ("local:cuda:1", "the worker calls its device cuda:1 where cuda:0 was planned"),
        ("cpu", "planned {u1} but the state lies on cpu"),
        ("none", "must see the planned GPU and no other, but it sees none"),
        ("more:{u0}", "must see the planned GPU and no other, but it sees {both}"),
    ],
    ids=["uuid", "ordinal", "cpu", "nothing", "second"],
)
def test_a_lie_is_a_mismatch_with_plan_report_and_masks_and_the_worker_is_killed(
    gpus: Host, lie: str, words: str, worker_python: str
) -> None:
    names = {"u0": gpus.u0, "u1": gpus.u1, "both": ", ".join(sorted((gpus.u0, gpus.u1)))}
    code = "fake(lie=lie, worker_python=python)"
    outcome = gpus.run(code, lie=lie.format(**names), python=worker_python)
    assert outcome.error == "DeviceMismatchError"
    first, plan, report, masks = outcome.message.splitlines()
    assert words.format(**names) in first
    assert plan.startswith(f"  plan: cuda:1 = {gpus.u1} (")
    assert report.startswith("  report: ")
    assert masks == f"  mask sent: '{gpus.u1}', seen: '{gpus.u1}'"
    assert gone(outcome.pid)


def test_a_report_without_a_uuid_is_a_protocol_error(gpus: Host, tmp_path: Path) -> None:
    file = simulator(tmp_path, """
def report_device(self):
    report = super().report_device()
    object.__setattr__(report, "uuid", "")  # past the check that its constructor makes
    return report
""")  # fmt: skip
    outcome = gpus.run("custom(file)", file=file)
    assert outcome.error == "ProtocolError"
    assert "a gpu device without UUID is no identity" in outcome.message


def test_state_in_host_memory_is_measured_as_cpu(gpus: Host, tmp_path: Path) -> None:
    """No lie: a simulator that fell back to the CPU, asked where its buffer lies."""
    file = simulator(tmp_path, """
def report_device(self):
    from outboard.workers import device_probe
    return device_probe.of_pointer(self.qpos.ctypes.data, "qpos", "engine_buffer")
""")  # fmt: skip
    outcome = gpus.run("custom(file)", file=file)
    assert outcome.error == "DeviceMismatchError"
    assert f"planned {gpus.u1} but the state lies on cpu" in outcome.message


# -- right at the start, wrong after warm-up -------------------------------------------------------


def test_a_device_that_moves_after_warm_up_is_found_by_where(gpus: Host) -> None:
    code = """
with fake(lie="late:uuid:" + u0) as sim:
    before = sim.where()
    sim.step(sim.ctrl_view)
    sim.where()
"""
    outcome = gpus.run(code, u0=gpus.u0)
    assert outcome.error == "DeviceMismatchError"
    assert f"planned {gpus.u1} but the state lies on {gpus.u0}" in outcome.message
    assert gone(outcome.pid)


def test_restart_after_a_mismatch_is_a_new_worker_that_is_verified_anew(gpus: Host) -> None:
    code = """
with fake(lie="late:cpu") as sim:
    first = sim.report["pid"]
    sim.step(sim.ctrl_view)
    try:
        sim.where()
    except DeviceMismatchError:
        sim.restart()
    answer = [sim.report["pid"] != first, sim.where()]
"""
    other, device = gpus.run(code).answer
    assert other and device.startswith(f"cuda:1 = {gpus.u1} (worker cuda:0)")


def test_restart_does_not_trust_what_was_right_before(host: Host, tmp_path: Path) -> None:
    """A simulator that is right the first time it is started, and nowhere else afterwards."""
    file = simulator(tmp_path, f"""
def report_device(self):
    started = os.path.exists({str(tmp_path / "started")!r})
    self.lie = "uuid:{host.u0}" if started else ""
    return super().report_device()

def step(self, bank):
    open({str(tmp_path / "started")!r}, "w").close()
    return super().step(bank)
""")  # fmt: skip
    code = """
with custom(file) as sim:
    sim.step(sim.ctrl_view)
    sim.restart()
"""
    outcome = host.run(code, file=file)
    assert outcome.error == "DeviceMismatchError"
    assert f"planned {host.u1} but the state lies on {host.u0}" in outcome.message


# -- the outside witness ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compute", "graphics"])
def test_a_context_on_another_gpu_is_a_mismatch_although_the_report_is_right(
    host: Host, tmp_path: Path, kind: str
) -> None:
    file = simulator(tmp_path, f"""
def build(self, init, progress):
    path = "{host.state}/%d@{host.u0}@{kind}" % os.getpid()
    open(path, "w").write("4096")
    return super().build(init, progress)
""")  # fmt: skip
    outcome = host.run("custom(file)", file=file)
    assert outcome.error == "DeviceMismatchError"
    assert outcome.message.startswith(f"NVML sees the worker on {host.u0} too")


def test_a_simulator_that_cannot_help_it_says_so(host: Host, tmp_path: Path) -> None:
    file = simulator(tmp_path, f"""
def build(self, init, progress):
    open("{host.state}/%d@{host.u0}@graphics" % os.getpid(), "w").write("4096")
    return super().build(init, progress)
""")  # fmt: skip
    code = """
traits = Traits(gpu=True, other_contexts="its renderer opens every GPU")
with custom(file, traits=traits) as sim: answer = sim.device
"""
    words = f"NVML sees it on {host.u0} too (its renderer opens every GPU)"
    assert host.run(code, file=file).answer.endswith(words)


def test_a_context_that_appears_later_is_found_by_where(host: Host, tmp_path: Path) -> None:
    code = """
with fake() as sim:
    open(path % sim.report["pid"], "w").write("4096")
    sim.where()
"""
    outcome = host.run(code, path=f"{host.state}/%d@{host.u0}@compute")
    assert outcome.error == "DeviceMismatchError"
    assert outcome.message.startswith(f"NVML sees the worker on {host.u0} too")


def test_the_context_of_a_stranger_on_another_gpu_is_none_of_ours(host: Host) -> None:
    add_context(host.state, os.getpid(), host.u0)
    device, _, _ = host.run(OPEN, python=None).answer
    assert device.endswith("NVML confirmed")


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("OUTBOARD_STANDIN_NVML_INIT", "9", "NVML does not start: Driver Not Loaded"),
        ("OUTBOARD_STANDIN_NVML_INIT", "12", "NVML does not start: "),
        ("OUTBOARD_STANDIN_NVML_LISTS", "3", "NVML's process lists of {u0}: Not Supported"),
    ],
    ids=["no-driver", "no-library", "no-lists"],
)
def test_a_witness_that_cannot_look_is_unobserved_with_the_reason_and_never_ok(
    host: Host, variable: str, value: str, why: str
) -> None:
    device, again, report = host.run(OPEN, {variable: value}, python=None).answer
    words = f"witness unobserved ({why.format(u0=host.u0)}"
    assert report["witness"].startswith(words)
    for text in (device, again):
        assert words in text
        assert "confirmed" not in text and "ok" not in text.split()


def test_without_a_witness_a_copy_is_evidence_of_second_rank(host: Host, tmp_path: Path) -> None:
    file = simulator(tmp_path, """
def report_device(self):
    return dataclasses.replace(super().report_device(), evidence="derived_copy")
""")  # fmt: skip
    code = "with custom(file) as sim: answer = sim.device"
    device = host.run(code, {"OUTBOARD_STANDIN_NVML_INIT": "9"}, file=file).answer
    assert "(derived_copy); witness unobserved" in device
    assert device.endswith("so the evidence is of second rank")


# -- isolation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "seen"),
    [("export CUDA_VISIBLE_DEVICES=0,1", "'0,1'"), ("unset CUDA_VISIBLE_DEVICES", "None")],
    ids=["reset", "unset"],
)
def test_a_wrapper_that_resets_the_mask_is_caught_with_both_values(
    gpus: Host, tmp_path: Path, worker_python: str, command: str, seen: str
) -> None:
    python = wrapper(tmp_path, command, worker_python)
    outcome = gpus.run("fake(worker_python=python)", python=python)
    assert outcome.error == "DeviceMismatchError"
    words = f"CUDA_VISIBLE_DEVICES was sent as '{gpus.u1}' and arrived as {seen}"
    assert outcome.message.startswith(words)


CONFESS = """
def build(self, init, progress):
    with open(init.options["out"], "w") as out:
        json.dump(dict(os.environ), out)
    return super().build(init, progress)
"""


def confession(host: Host, folder: Path, device: str, env: dict[str, str]) -> dict[str, str]:
    """The environment that a worker really has."""
    code = """
cfg = CustomCfg({"out": out})
device = RankPlan.from_env().device if device == "plan" else device
with custom(file, device, cfg=cfg) as sim:
    answer = json.load(open(out))
"""
    file = simulator(folder, CONFESS)
    return host.run(code, env, file=file, device=device, out=str(folder / "out.json")).answer


def test_a_worker_gets_one_token_and_the_order_and_no_launcher_variable(
    gpus: Host, tmp_path: Path
) -> None:
    launcher = torchrun(1) | {"SLURM_LOCALID": "0", "RAY_JOB_ID": "1", "PYTHONHASHSEED": "7"}
    seen = confession(gpus, tmp_path, "plan", launcher | {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["CUDA_DEVICE_ORDER"]) == (gpus.u0, "PCI_BUS_ID")
    assert not set(seen) & set(launcher)


def test_a_worker_planned_on_the_cpu_sees_no_gpu_at_all(host: Host, tmp_path: Path) -> None:
    seen = confession(host, tmp_path, "cpu", {})
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    code = 'with fake("cpu") as sim: answer = sim.report'
    report: dict[str, Any] = host.run(code).answer
    assert report["device_report"]["visible"] == []
    # In a container nobody listed is nobody known, and then NVML's pids may be the host's.
    confirmed, container = "NVML confirmed: on no GPU", "witness unobserved (pid namespace: "
    assert report["witness"].startswith((confirmed, container))


def test_the_hosts_own_environment_is_never_changed(gpus: Host) -> None:
    code = """
before = dict(os.environ)
with fake() as sim:
    while_open = dict(os.environ)
    sim.restart()
answer = [while_open == before, dict(os.environ) == before, "CUDA_VISIBLE_DEVICES" in before]
"""
    assert gpus.run(code).answer == [True, True, False]
