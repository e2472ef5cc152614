"""Parts of the Isaac Gym worker by themselves: contract, kinematics, frames, log, bridges, cost of a step."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mujoco  # type: ignore[import-untyped]
import numpy as np
import pytest

from direct import make_init
from isaacgym_home import SCENES, gym_home, write_scene
from outboard.backends import IsaacGymBackend, IsaacGymCfg, SceneError, UsageError, mjcf
from outboard.backends.mjcf_contract import CONTRACT_VERSION, write_contract
from outboard.ipc.device import GPU, PlannedDevice
from outboard.ipc.errors import DevicePlanError
from outboard.workers import contract as contracts
from outboard.workers import isaacgym_frames as frames
from outboard.workers.contract import Contract, read_contract
from outboard.workers.device_probe import check_device
from outboard.workers.isaacgym_worker import IsaacGymSimulator
from outboard.workers.kinematics import Tree, normalised, parts
from standin_gpu import U0, standin_environment

__all__ = ["gym_home"]

mj: Any = mujoco  # its stubs do not list its names
ROOT = Path(__file__).resolve().parent.parent
OURS = ("humanoid29", "quadruped12", "arm7")


def contract_of(scene: Path, folder: Path) -> tuple[Contract, Path]:
    model = mjcf.inspect(scene)
    path = write_contract(model, mjcf.export_flat(model, folder), folder)
    return read_contract(make_init(str(scene), options={"contract": str(path)})), path


def scene_path(name: str, folder: Path) -> Path:
    return (
        write_scene(folder, name)
        if name in SCENES
        else ROOT / "backends" / "scenes" / f"{name}.xml"
    )


# -- the contract file -----------------------------------------------------------------------------


def test_both_sides_know_the_same_version() -> None:
    assert contracts.CONTRACT_VERSION == CONTRACT_VERSION


def test_the_contract_comes_back_as_it_was_inspected(tmp_path: Path) -> None:
    scene = write_scene(tmp_path, "floating")
    model = mjcf.inspect(scene)
    found, path = contract_of(scene, tmp_path)
    assert (found.body_names, found.joint_names) == (model.body_names, model.joint_names)
    assert found.actuator_names == model.actuator_names
    assert (found.timestep, found.gravity, found.floating) == (0.004, (0.3, 0.0, -9.81), True)
    assert found.joint_range.tolist() == [list(joint.range) for joint in model.joints]
    assert found.force_range.tolist() == [[-9, 9], [-np.inf, np.inf], [-np.inf, np.inf]]
    assert found.default_qpos.tolist() == list(model.default_qpos)
    assert (found.floor_height, found.floor_friction) == (0.0, 0.7)
    assert found.shape_friction.tolist() == [0.4] * 5
    assert write_contract(model, mjcf.export_flat(model, tmp_path), tmp_path) == path


def test_inertia_is_turned_into_the_bodys_own_axes(tmp_path: Path) -> None:
    found, _ = contract_of(write_scene(tmp_path, "floating"), tmp_path)
    matrices = found.inertia_matrices()
    assert np.allclose(matrices, matrices.transpose(0, 2, 1))
    assert np.allclose(np.sort(np.linalg.eigvalsh(matrices)), np.sort(found.inertia))
    assert abs(matrices[0, 0, 1]) > 1e-4  # the hub's axes are not its frame's


def test_a_damaged_contract_is_refused(tmp_path: Path) -> None:
    scene = write_scene(tmp_path, "fixed")
    _, path = contract_of(scene, tmp_path)
    path.write_text(path.read_text().replace("60.0", "61.0"))
    with pytest.raises(SceneError, match="is damaged"):
        read_contract(make_init(str(scene), options={"contract": str(path)}))
    with pytest.raises(SceneError, match="No such file"):
        read_contract(make_init(str(scene), options={"contract": str(tmp_path / "no.json")}))
    with pytest.raises(UsageError, match="carry no 'contract'"):
        read_contract(make_init(str(scene)))
    with pytest.raises(UsageError, match="has version 99"):
        Contract({"version": 99})


# -- kinematics and frames -------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OURS, *SCENES])
def test_forward_kinematics_is_mujocos(name: str, tmp_path: Path) -> None:
    scene = scene_path(name, tmp_path)
    found, _ = contract_of(scene, tmp_path)
    model = mj.MjModel.from_xml_path(str(scene))
    data = mj.MjData(model)
    rng = np.random.default_rng(3)
    qpos = found.default_qpos + 0.7 * rng.normal(size=(4, model.nq))
    qvel = 2 * rng.normal(size=(4, model.nv))
    seen = Tree(found).forward(qpos, qvel)
    for i in range(4):
        data.qpos[:], data.qvel[:] = qpos[i], qvel[i]
        mj.mj_forward(model, data)
        robot = slice(model.nbody - len(found.body_names), None)
        spins = np.zeros((model.nbody, 6))
        for body in range(model.nbody):
            mj.mj_objectVelocity(model, data, int(mj.mjtObj.mjOBJ_XBODY), body, spins[body], 0)
        assert np.allclose(seen["body_pos"][i], data.xpos[robot], rtol=0, atol=1e-12)
        off = np.abs((seen["body_quat"][i] * data.xquat[robot]).sum(axis=1)) - 1
        assert np.abs(off).max() < 1e-12
        assert np.allclose(seen["body_linvel"][i], spins[robot, 3:], rtol=0, atol=1e-11)
        assert np.allclose(seen["body_angvel"][i], spins[robot, :3], rtol=0, atol=1e-11)


def test_a_quaternion_without_direction_is_the_identity() -> None:
    quats = np.array([[0.0, 0, 0, 0], [0, 0, 3, 0]])
    assert np.stack(normalised(parts(quats)), axis=-1).tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("count", [1, 5000])
def test_what_is_written_is_what_is_read(count: int) -> None:
    """Native rows of a state, converted back; more rows than one pass takes, too."""
    rng = np.random.default_rng(8)
    qpos, qvel = rng.normal(size=(count, 9)), 3 * rng.normal(size=(count, 8))
    qpos[:, 3:7] /= np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    com = np.array([0.3, -0.2, 0.5])
    rows = frames.native_root(qpos, qvel, com).astype(np.float32)
    back = {name: np.zeros((count, size), np.float32) for name, size in (("q", 9), ("v", 8))}
    frames.copy_positions(rows, back["q"][:, :3])
    frames.copy_quats(rows, back["q"][:, 3:7])
    frames.copy_linvels(rows[:, None], com[None], back["v"][:, None, :3])
    frames.copy_root_spin(rows, back["v"][:, 3:6])
    assert np.allclose(back["q"][:, :7], qpos[:, :7], rtol=0, atol=1e-5)
    assert np.allclose(back["v"][:, :6], qvel[:, :6], rtol=0, atol=1e-5)
    assert not np.allclose(rows[:, 7:10], qvel[:, :3], rtol=0, atol=0.1)  # the point differs
    assert not np.allclose(rows[:, 10:], qvel[:, 3:6], rtol=0, atol=0.1)  # so do the axes


# -- before the import -----------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused_before_isaacgym_is_imported(tmp_path: Path) -> None:
    uuid = "GPU-ce08eab0-0000-4000-8000-000000000006"
    init = dataclasses.replace(
        make_init(str(tmp_path)), device=PlannedDevice(GPU, uuid, "cuda:0"), render=False
    )
    with pytest.raises(DevicePlanError, match=f"{uuid} is planned, but|must be {uuid}, but"):
        check_device(init)
    assert "isaacgym" not in sys.modules
    with pytest.raises(UsageError, match="renders no pictures"):
        IsaacGymSimulator().build(dataclasses.replace(init, render=True), print)


# -- the log ---------------------------------------------------------------------------------------

_LOG = """
import ctypes, os, re, sys
from outboard.workers.engine_log import EngineLog, flush
libc = ctypes.CDLL(None)
os.write(2, b"[Error] of before\\n")
log = EngineLog()
said = [log.readable, log.new_lines()]
libc.printf(b"[Error] one\\nhalf")
said.append(log.new_lines())   # line by line, without a flush
flush()
said.append(log.new_lines())
os.ftruncate(2, 0)             # the host starts a log anew that has grown too large
os.write(2, b"[Error] two\\n")
said.append(log.find(re.compile("Error")))
said.append(log.find(re.compile("Error")))
os.write(int(sys.argv[1]), repr(said).encode())
"""


@pytest.mark.parametrize("way", ["file", "append only", "pipe"])
def test_the_engines_lines_are_seen(way: str, tmp_path: Path, worker_python: str) -> None:
    flags = {"file": os.O_RDWR, "append only": os.O_WRONLY}.get(way, 0)
    flags |= os.O_CREAT | os.O_APPEND
    log = (
        os.open(tmp_path / "log", flags, 0o600) if way != "pipe" else os.open(os.devnull, os.O_RDWR)
    )
    answer, theirs = os.pipe()
    try:
        subprocess.run(
            [worker_python, "-c", _LOG, str(theirs)], stdout=log, stderr=log, pass_fds=[theirs],
            env={"PYTHONPATH": str(ROOT / ".src"), "PATH": os.environ["PATH"]}, timeout=30,
        )  # fmt: skip
        os.close(theirs)
        said = os.read(answer, 1 << 16).decode()
    finally:
        os.close(log)
        os.close(answer)
    if way == "pipe":
        assert said == "" or said.startswith("[False, []")
    else:
        assert said == ("[True, [], ['[Error] one'], ['half'], '[Error] two', None]"), (
            tmp_path / "log"
        ).read_text()


# -- the way back: torch and gymtorch --------------------------------------------------------------


def test_the_gymtorch_bridge_publishes_the_same_bits(
    gym_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch in the environment, as small as the bridge needs it."""
    monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(gym_home))
    results: list[list[np.ndarray]] = []
    for bridge in ("driver", "gymtorch"):
        cfg = IsaacGymCfg(tensor_bridge=bridge)
        if bridge == "gymtorch":
            home = tmp_path / "home"
            (home / "isaacgym").mkdir(parents=True)
            (home / "miniconda3").symlink_to(gym_home / "miniconda3")
            package = home / "isaacgym" / "python"
            package.mkdir()
            (package / "isaacgym").symlink_to(ROOT / "tests" / "standins" / "isaacgym")
            (package / "torch.py").symlink_to(ROOT / "tests" / "standins" / "torch38" / "torch.py")
            monkeypatch.setenv("OUTBOARD_ISAACGYM_HOME", str(home))
        scene = write_scene(tmp_path, "floating")
        with IsaacGymBackend(device="cpu", scene=scene, num_envs=3, cfg=cfg) as sim:
            used = "gymtorch" if bridge == "gymtorch" else "host memory"
            assert f"CPU pipeline, state through {used}" in sim.report["notes"]
            frames_: list[np.ndarray] = []
            for t in range(20):
                state = sim.step(reset=[1] if t == 10 else None)
                frames_ += [state.qpos.copy(), state.qvel.copy()]
        results.append(frames_)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


# -- what a step costs -----------------------------------------------------------------------------


def cost(home: Path, folder: Path, num_envs: int) -> dict[str, float]:
    model = mjcf.inspect(ROOT / "backends" / "scenes" / "quadruped12.xml")
    flat = mjcf.export_flat(model, folder)
    options = IsaacGymCfg().options()
    options["contract"] = str(write_contract(model, flat, folder))
    options["package_root"] = str(home / "isaacgym" / "python")
    (folder / "options.json").write_text(json.dumps(options))
    python = home / "miniconda3" / "envs" / "hsgym" / "bin" / "python3.8"
    script = ROOT / "tests" / "isaacgym_cost.py"
    done = subprocess.run(
        [str(python), str(script), str(flat.path), str(folder / "options.json"), str(num_envs)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT / '.src'}:{script.parent}",
             "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_loop_over_environments(gym_home: Path, tmp_path: Path) -> None:
    """A step calls as many functions of ours for 256 environments as for 4."""
    few, many = cost(gym_home, tmp_path, 4), cost(gym_home, tmp_path, 256)
    assert few["calls"] == many["calls"] < 150


_COPIES = """
import json, os, sys
os.environ["ISAACGYM_STANDIN"] = "physics=frozen;gpu=cuda"
sys.path[:0] = [{tests!r}]
from direct import Direct
from outboard.ipc import cuda_driver, cuda_memory
from outboard.ipc.device import PlannedDevice
(gpu,) = cuda_driver.devices()
with open({options!r}) as file:
    options = json.load(file)
counts = {{}}
def counted(name):
    real = getattr(cuda_memory, name)
    def call(*arguments):
        counts[name] = counts.get(name, 0) + 1
        return real(*arguments)
    setattr(cuda_memory, name, call)
for name in ("copy_dtoh_async", "copy_htod_async", "allocate", "host_register"):
    counted(name)
device = PlannedDevice("gpu", gpu.uuid, "cuda:0")
publish = ("qpos", "qvel", "body_pos", "contact_force")
with Direct("isaacgym", {scene!r}, 8, options=options, device=device, publish=publish) as sim:
    sim.step()  # the keyframe goes in
    counts.clear(); sim.step(); step = dict(counts)
    counts.clear(); sim.simulator.reset([0, 3]); sim.publish(); reset = dict(counts)
    counts.clear(); sim.step(); after = dict(counts)
    print("\\n" + json.dumps([step, reset, after]))
"""


def test_one_copy_for_each_tensor(gym_home: Path, tmp_path: Path) -> None:
    """Root, joints, bodies and contacts out; targets in, and after a reset its rows and ids: nothing more,
    and a reset itself touches no GPU."""
    cost(gym_home, tmp_path, 1)  # writes the options
    scene = str(
        mjcf.export_flat(mjcf.inspect(ROOT / "backends/scenes/quadruped12.xml"), tmp_path).path
    )
    code = _COPIES.format(
        tests=str(ROOT / "tests"), options=str(tmp_path / "options.json"), scene=scene
    )
    python = gym_home / "miniconda3" / "envs" / "hsgym" / "bin" / "python3.8"
    env = standin_environment(CUDA_VISIBLE_DEVICES=U0)
    done = subprocess.run(
        [str(python), "-c", code], env=env, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    step, reset, after = json.loads(done.stdout.splitlines()[-1])
    assert step == {"copy_dtoh_async": 4, "copy_htod_async": 1}
    assert reset == {}
    assert after == {"copy_dtoh_async": 4, "copy_htod_async": 5}
