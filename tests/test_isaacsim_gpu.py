"""The stand-in Isaac Sim with its tensors on real GPUs: the verdict, the block's path and the arena's.

Needs torch with CUDA in this environment, for the stand-in's Python has this environment's packages. The
physics is MuJoCo's and the tensors are torch's, so this shows that state leaves a torch worker as it should
and is verified where it lies. What PhysX does there only a real Isaac Sim can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isaacgym_home import write_scene
from isaacsim_home import home, sim_home
from outboard.backends import IsaacSimBackend, OutboardError, conformance, witness
from outboard.ipc.layout import PUBLISHABLE
from standin_gpu import bare_environment, real_gpus, run_child
from test_isaacgym_backend import beside_mujoco

__all__ = ["home", "sim_home"]

pytestmark = [
    pytest.mark.gpu, pytest.mark.timeout(240), pytest.mark.usefixtures("logs_may_stay"),
]  # fmt: skip
_KEPT = ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "OUTBOARD_ISAACSIM_HOME", "OMNI_KIT_ACCEPT_EULA",
         "PYTHONPATH")  # fmt: skip
BUFFER = "root transforms of the physics view"

# One rank of a launcher; prints what it measured.
_RANK = """
import json
from outboard.backends import IsaacSimBackend, RankPlan
plan = RankPlan.from_env()
with IsaacSimBackend(device=plan.device, scene="quadruped12", num_envs=8, seed=plan.seed(1)) as sim:
    for _ in range(5):
        sim.step()
    sim.where()
    print("\\n" + json.dumps([sim.device, sim.report]))
"""

# Two simulations that are told the same: one through the arena, one through the block.
_ARENA = """
import json, sys
import numpy as np
import torch
from outboard.backends import IsaacSimBackend
from outboard.ipc.layout import PUBLISHABLE

given = dict(device="cuda:0", scene=sys.argv[1], num_envs=6, decimation=2, publish=PUBLISHABLE)
worst = {}
with IsaacSimBackend(transport="cuda", **given) as sim, IsaacSimBackend(
    transport="block", share=True, **given
) as other:
    gpu, rng = sim.torch.device, np.random.default_rng(4)
    mask = np.array([1, 0, 0, 1, 0, 0], bool)

    def compare(state, wanted):
        for name in PUBLISHABLE:
            ours, theirs = getattr(state, name), getattr(wanted, name)
            assert ours.device == gpu, name
            off = float(np.abs(ours.cpu().numpy() - theirs).max())
            worst[name] = max(worst.get(name, 0.0), off / max(1.0, float(np.abs(theirs).max())))

    compare(sim.torch.reset(), other.reset())
    address = sim.torch.qpos.data_ptr()
    for t in range(30):
        swing = 0.3 * rng.normal(size=(6, sim.model.nu))
        ctrl = (sim.model.default_ctrl + swing).astype(np.float32)
        again = mask if t % 10 == 5 else None
        on_gpu = None if again is None else torch.as_tensor(again, device=gpu)
        state = sim.torch.step(torch.as_tensor(ctrl, device=gpu), reset=on_gpu)
        compare(state, other.step(ctrl, reset=again))
    qpos, qvel = sim.model.default_qpos.astype(np.float32), np.linspace(-1, 1, sim.model.nv)
    rows = [np.tile(row, (2, 1)).astype(np.float32) for row in (qpos, qvel)]
    state = sim.torch.set_state([1, 4], *(torch.as_tensor(row, device=gpu) for row in rows))
    compare(state, other.set_state([1, 4], *rows))
    said = [sim.report["transport"], sim.torch.qpos.data_ptr() == address, worst, sim.device]
print("\\n" + json.dumps(said))
"""


def need(count: int) -> tuple[str, ...]:
    """UUIDs of the GPUs; skips unless torch here has CUDA too. Asked in a child: a test process starts
    none."""
    uuids = real_gpus(count)
    code = "import torch; print(int(torch.cuda.is_available()))"
    if run_child(code, bare_environment()) != "1":
        pytest.skip("the torch of this environment is built without CUDA")
    return uuids


def environment(**more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept.setdefault("PYTHONPATH", bare_environment()["PYTHONPATH"])
    return {**bare_environment(), **kept, **more}


@pytest.fixture(scope="module", autouse=True)
def nvml_is_open() -> None:
    """The witness opens NVML in this process for good: before the first test looks at descriptors."""
    witness.inventory()


def launcher(rank: int, of: int) -> dict[str, str]:
    values = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": of,
              "LOCAL_WORLD_SIZE": of, "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "h",
              "MASTER_PORT": 1}  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def test_two_ranks_are_each_verified_on_the_views_tensor(home: Path, private_folders: Path) -> None:
    uuids = need(2)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK], env=environment(**launcher(rank, 2)),
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
        assert (measured["uuid"], measured["local"]) == (uuids[rank], "cuda:0")
        assert measured["buffer"] == BUFFER and measured["visible"] == [uuids[rank]]
        assert measured["evidence"] == "derived_copy"


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_it_moves_as_mujoco_does(device: str, home: Path, tmp_path: Path) -> None:
    need(1 + int(device[-1]))
    path = write_scene(tmp_path, "floating")
    with IsaacSimBackend(device=device, scene=path, num_envs=3, publish=PUBLISHABLE) as sim:
        worst = beside_mujoco(sim, path, str(home / "venv" / "bin" / "python"))
        print(sim.device, worst)
    assert max(worst.values()) <= 1e-4, worst


def test_the_arena_is_the_block_without_the_cpu(home: Path, tmp_path: Path) -> None:
    need(1)
    path = write_scene(tmp_path, "floating")
    done = subprocess.run(
        [sys.executable, "-c", _ARENA, str(path)], env=environment(), capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    transport, same_address, worst, words = json.loads(done.stdout.splitlines()[-1])
    print(words, worst)
    assert transport == "cuda" and same_address
    assert set(worst) == set(PUBLISHABLE) and max(worst.values()) <= 1e-5, worst


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ("physics=cpu", "PhysX fell back to the CPU without failing"),
        ("physics=software", "GPU solver pipeline failed"),
        ("physics=zeros", "after one step on cuda:0"),
    ],
)
def test_a_simulation_that_is_not_on_its_gpu_is_refused(
    settings: str, saying: str, home: Path
) -> None:
    need(1)
    with pytest.raises(OutboardError, match=saying):
        IsaacSimBackend(
            device="cuda:0", scene="arm7", num_envs=2, env={"ISAACSIM_STANDIN": settings}
        )


def test_it_conforms_on_a_gpu(home: Path) -> None:
    need(1)
    target = conformance.make_target(backend="isaacsim", device="cuda:0", scene="quadruped12")
    outcomes = conformance.run_kit(target)
    failed = [(each.name, each.why) for each in outcomes if each.verdict == conformance.FAILED]
    print(conformance.tally(outcomes))
    assert failed == []
