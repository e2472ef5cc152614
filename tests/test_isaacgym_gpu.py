"""The stand-in Isaac Gym in memory of real GPUs: the driver bridge, the context it finds, the verdict.

The physics is MuJoCo's and the tensors are cuMemAlloc's, so this shows that state goes to and from a GPU
through our bridge and is verified where it lies. What PhysX does there only a real Isaac Gym can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isaacgym_home import gym_home, write_scene
from outboard.backends import (
    DevicePlanError,
    IsaacGymBackend,
    OutboardError,
    conformance,
    witness,
)
from outboard.ipc.layout import PUBLISHABLE
from standin_gpu import bare_environment, real_gpus
from test_isaacgym_backend import beside_mujoco

__all__ = ["gym_home"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("logs_may_stay")]

# One rank of a launcher; prints what it measured.
_RANK = """
import json, sys
from outboard.backends import IsaacGymBackend, RankPlan
plan = RankPlan.from_env()
with IsaacGymBackend(device=plan.device, scene="quadruped12", num_envs=8, seed=plan.seed(1)) as sim:
    for _ in range(5):
        sim.step()
    sim.where()
    print("\\n" + json.dumps([sim.device, sim.report]))
"""


@pytest.fixture(scope="module", autouse=True)
def nvml_is_open() -> None:
    """The witness opens NVML in this process for good: before the first test looks at descriptors."""
    witness.inventory()


@pytest.fixture
def home(gym_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(gym_home))
    return gym_home


def launcher(rank: int, of: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": of,
              "LOCAL_WORLD_SIZE": of, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h",
              "MASTER_PORT": 1}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def test_two_ranks_are_each_verified_on_dof_state(home: Path, private_folders: Path) -> None:
    uuids = real_gpus(2)
    names = ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "OUTBOARD_ISAACGYM_HOME", "PYTHONPATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    kept.setdefault("PYTHONPATH", bare_environment()["PYTHONPATH"])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env={**bare_environment(), **kept, **launcher(rank, 2)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (out, err) in enumerate(said):
        assert ranks[rank].returncode == 0, err
        words, report = json.loads(out.splitlines()[-1])
        measured: dict[str, Any] = report["device_report"]
        print(words)
        assert report["python"].startswith("3.8.")
        assert (measured["uuid"], measured["local"]) == (uuids[rank], "cuda:0")
        assert measured["buffer"] == "dof_state" and measured["visible"] == [uuids[rank]]
        assert report["device_plan"]["mask"] == uuids[rank]
        assert "GPU pipeline, state through driver" in report["notes"]


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_it_moves_as_mujoco_does(device: str, home: Path, tmp_path: Path, python38: str) -> None:
    real_gpus(1 + int(device[-1]))
    path = write_scene(tmp_path, "floating")
    with IsaacGymBackend(device=device, scene=path, num_envs=3, publish=PUBLISHABLE) as sim:
        worst = beside_mujoco(sim, path, python38)
        print(sim.device, worst)
    assert max(worst.values()) <= 1e-4, worst


@pytest.mark.parametrize(
    ("settings", "error", "saying"),
    [
        ("create=none", DevicePlanError, "create_sim returned None on cuda:0"),
        ("create=segv", OutboardError, r"creating the simulation on cuda:0 0/1\): SIGSEGV"),
        ("create=bad_ordinal", DevicePlanError, "went on: .*invalid device ordinal"),
        ("create=cpu", DevicePlanError, "PhysX fell back to the CPU without failing"),
        ("create=zeros", DevicePlanError, "after one step on cuda:0"),
    ],
)
def test_a_wrong_device_is_refused_with_a_message_of_its_own(
    settings: str, error: type[OutboardError], saying: str, home: Path
) -> None:
    real_gpus(1)
    env = {"ISAACGYM_STANDIN": settings}
    with pytest.raises(error, match=saying):
        IsaacGymBackend(device="cuda:0", scene="arm7", num_envs=2, env=env)


@pytest.mark.timeout(240)
def test_it_conforms(home: Path) -> None:
    real_gpus(1)
    target = conformance.make_target(backend="isaacgym", device="cuda:0", scene="humanoid29")
    outcomes = conformance.run_kit(target)
    print(conformance.tally(outcomes))
    failed = [(each.name, each.why) for each in outcomes if each.verdict == conformance.FAILED]
    assert failed == []
