"""Two ranks on one machine: the original defect must not run, what is planned right must.

On stand-in GPUs, but for the test marked `gpu`. The ranks are started with torchrun's variables set by
hand, which takes seconds less, and in the slow tests by the real torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from standin_gpu import ROOT, bare_environment, real_gpus
from standin_host import Host

pytestmark = pytest.mark.usefixtures("logs_may_stay")

# One rank: its `device=`, or "plan" or "together". Says what became of it in FOLDER/RANK.json, and
# stays until all ranks have, so that all hold at once what they hold.
RANK = """
import json, os, sys, time
from pathlib import Path
from outboard.backends import FakeBackend, OutboardError, RankPlan, plan_together

folder, size, device, share, python = json.loads(sys.argv[1])
rank = int(os.environ.get("RANK") or os.environ["RANK_OF_THE_TEST"])
standin = {k: v for k, v in os.environ.items() if k.startswith("OUTBOARD_STANDIN_")}

def say(answer):
    part = Path(folder, f"{rank}.part")
    part.write_text(json.dumps(answer))
    part.rename(Path(folder, f"{rank}.json"))
    end = time.monotonic() + 40
    while len(list(Path(folder).glob("*.json"))) < size and time.monotonic() < end:
        time.sleep(0.02)

try:
    if device == "plan":
        device = RankPlan.from_env()
    elif device == "together":
        device = plan_together(timeout_s=40)
    with FakeBackend(device=device, num_envs=2, share=share, worker_python=python, env=standin) as sim:
        sim.step(sim.ctrl_view)
        say({"uuid": sim.report["device_report"]["uuid"], "witness": sim.report["witness"]})
except OutboardError as error:
    started = error.report is not None  # of a worker
    say({"error": type(error).__name__, "message": error.message, "started": started})
"""


def run_ranks(
    machine: Host,
    launcher: str,
    device: str | Sequence[str],
    python: str = sys.executable,
    share: bool = False,
    **env: str,
) -> list[dict[str, Any]]:
    """What became of two ranks. launcher: "by hand", "torchrun", or "none" (two unrelated processes).
    `device`: what their code says, one for both or one each."""
    folder = machine.state.parent / "answers"
    folder.mkdir()
    script = folder / "rank.py"
    script.write_text(RANK)
    each = [device, device] if isinstance(device, str) else device
    arguments = [json.dumps([str(folder), 2, one, share, python]) for one in each]
    environment = machine.environment(**env)
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(script), arguments[0]]
        processes = [subprocess.Popen(command, env=environment)]
    else:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), arguments[rank]],
                env=environment | by_hand(launcher, rank),
            )
            for rank in range(2)
        ]
    try:
        codes = [process.wait(100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(codes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def by_hand(launcher: str, rank: int) -> dict[str, str]:
    if launcher == "none":
        return {"RANK_OF_THE_TEST": str(rank)}
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": 2,
              "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def needs_torch() -> None:
    """Looked for without importing it, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torchrun and the comparison of ranks need torch, which is not installed")


@pytest.fixture
def machine(tmp_path: Path, private_folders: Path) -> Host:
    (tmp_path / "state").mkdir()
    return Host(tmp_path / "state")


@pytest.fixture(
    params=["by hand", pytest.param("torchrun", marks=[pytest.mark.slow, pytest.mark.timeout(150)])]
)
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "torchrun":
        needs_torch()
    return request.param


# -- the original defect ---------------------------------------------------------------------------


def test_two_ranks_that_both_say_cuda_0_do_not_both_run(
    machine: Host, launcher: str, python38: str
) -> None:
    """Nobody called check_unique: the second rank is refused before its worker is started."""
    first, second = run_ranks(machine, launcher, "cuda:0", python38)
    assert first["uuid"] == machine.u0
    assert (second["error"], second["started"]) == ("DevicePlanError", False)
    assert "this is rank 1 of 2 (torchrun)" in second["message"]
    assert machine.u0 in second["message"] and machine.u1 in second["message"]


def test_two_ranks_that_take_their_plan_both_run_on_their_own_gpu(
    machine: Host, launcher: str, python38: str
) -> None:
    answers = run_ranks(machine, launcher, "plan", python38)
    assert [answer.get("uuid") for answer in answers] == [machine.u0, machine.u1]
    assert all(answer["witness"] == "NVML confirmed" for answer in answers)


def test_the_inherited_order_of_the_mask_is_kept(machine: Host, launcher: str) -> None:
    answers = run_ranks(machine, launcher, "plan", CUDA_VISIBLE_DEVICES="1,0")
    assert [answer.get("uuid") for answer in answers] == [machine.u1, machine.u0]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_ranks_that_compare_both_run(machine: Host) -> None:
    needs_torch()
    answers = run_ranks(machine, "torchrun", "together")
    assert [answer.get("uuid") for answer in answers] == [machine.u0, machine.u1]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_ranks_with_one_gpu_that_compare_are_both_refused(machine: Host) -> None:
    needs_torch()
    for answer in run_ranks(machine, "torchrun", "together", CUDA_VISIBLE_DEVICES="1"):
        assert (answer["error"], answer["started"]) == ("DevicePlanError", False)
        assert "2 local ranks but only 1 visible GPU" in answer["message"]


# -- the lock: two processes without a launcher ----------------------------------------------------


def test_of_two_processes_on_one_gpu_one_is_refused_naming_both(machine: Host) -> None:
    answers = run_ranks(machine, "none", ["cuda:1", machine.u1])
    (ran,) = [answer for answer in answers if "uuid" in answer]
    (refused,) = [answer for answer in answers if "error" in answer]
    assert ran["uuid"] == machine.u1
    assert (refused["error"], refused["started"]) == ("DevicePlanError", False)
    assert f"{machine.u1} is already open in rank 0 (pid " in refused["message"]
    assert refused["message"].count("pid ") == 2


def test_two_processes_that_mean_to_share_both_run(machine: Host) -> None:
    answers = run_ranks(machine, "none", "cuda:1", share=True)
    assert [answer.get("uuid") for answer in answers] == [machine.u1, machine.u1]


# -- the whole proof -------------------------------------------------------------------------------


def placement(environment: dict[str, str], folder: Path, python: str) -> list[dict[str, Any]]:
    out = folder / "placement.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "placement.py"), "--json", str(out)]
    command += ["--worker-python", python]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["results"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_placement_proof_on_the_standin(machine: Host, tmp_path: Path, python38: str) -> None:
    needs_torch()
    results = placement(machine.environment(), tmp_path, python38)
    assert len(results) == 7 and all(result["as_it_should_be"] for result in results)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_placement_proof_on_real_gpus(tmp_path: Path, python38: str) -> None:
    real_gpus(2)
    needs_torch()
    folders = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    results = placement(bare_environment(**folders), tmp_path, python38)
    assert all(result["as_it_should_be"] for result in results)
    workers = [rank for result in results for rank in result["ranks"] if not rank["error"]]
    assert workers and all(rank["python"].startswith("3.8.") for rank in workers)
