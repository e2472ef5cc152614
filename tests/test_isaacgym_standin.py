"""Each habit and trap of Isaac Gym, and the mistake of a worker that it catches.

The stand-in is worth something only if it catches mistakes. So each row of MISTAKES puts one into the worker
(an edit of its source, in a fork of Python 3.8) and says how it must show: as an error, as a death, or as
published numbers that are not those of MuJoCo's own worker. Unedited, the worker agrees in every field.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isaacgym_home import SCENES, gym_home, write_scene
from mutants import ABORT, DIFFERS, OK, RAISED, SEGV, Job, check, edit
from outboard.backends import mjcf
from outboard.backends.isaacgym import IsaacGymCfg
from outboard.backends.mjcf_contract import write_contract
from workshop import Workshop

__all__ = ["gym_home"]

TESTS = Path(__file__).resolve().parent
FRAMES, TENSORS, PROPS, BUILD, STATE, WORKER, LOG = (
    "isaacgym_frames", "isaacgym_tensors", "isaacgym_properties", "isaacgym_build", "isaacgym_state",
    "isaacgym_worker", "engine_log",
)  # fmt: skip


RIGHT = [
    Job(f"unedited, {pipeline}, {scene}", end=OK, pipeline=pipeline, scene=scene)
    for pipeline in ("cpu", "gpu")
    for scene in SCENES
]

_SIMULATE = "            gym.simulate(sim)\n"

MISTAKES = [
    # -- parameters whose defaults are not ours
    edit("Flex", BUILD, "gymapi.SIM_PHYSX", "gymapi.SIM_FLEX", end=RAISED, said="acquire of"),
    edit("Y is up", BUILD, "        params.up_axis = gymapi.UP_AXIS_Z\n", said="origins"),
    edit("two substeps", BUILD, "        params.substeps = cfg.substeps\n"),
    edit("gravity left alone", BUILD, "        params.gravity = gymapi.Vec3(*gravity)\n"),
    edit("time step left alone", BUILD,
         "        params.dt = self.init.dt or self.contract.timestep\n"),
    edit("ground upright", BUILD, "        plane.normal = self.gymapi.Vec3(0.0, 0.0, 1.0)\n"),
    edit("no ground", BUILD, "        self.gym.add_ground(self.sim, plane)\n"),
    edit("ground's friction", BUILD, "        plane.static_friction = contract.floor_friction\n"),
    edit("links are damped", BUILD, "        options.angular_damping = 0.0\n"),
    edit("base not fixed", BUILD, "        options.fix_base_link = not contract.floating\n",
         scene="fixed"),
    edit("drive mode as an enum", BUILD, "int(self.gymapi.DOF_MODE_POS)",
         "self.gymapi.DOF_MODE_POS", end=RAISED, said="TypeError"),
    edit("misspelt option", BUILD, "options.linear_damping", "options.linear_dampin", end=RAISED,
         said="AttributeError"),
    edit("CPU pipeline on a GPU", BUILD, "params.use_gpu_pipeline = self.gpu",
         "params.use_gpu_pipeline = False", end=RAISED, said="fell back to the CPU"),
    # -- calls
    edit("keywords", STATE, "gym.simulate(sim)", "gym.simulate(sim=sim)", end=RAISED,
         said="TypeError"),
    edit("handle that is no int", BUILD, "get_actor_index(env, self._actor,",
         "get_actor_index(env, float(self._actor),", end=RAISED, said="TypeError"),
    edit("no prepare_sim", BUILD, 'self.check(self.gym.prepare_sim(self.sim), "prepare_sim")',
         "pass", end=ABORT, said="before prepare_sim"),
    edit("self-collision left on", BUILD, "else 1\n", "else 0\n"),
    edit("one collision group", BUILD, '"robot", i, mask', '"robot", 0, mask', end=ABORT,
         said="collision group"),
    edit("quaternion's order in a pose", BUILD, "gymapi.Quat(x, y, z, w)",
         "gymapi.Quat(w, x, y, z)", scene="fixed"),
    # -- what the importer loses
    *(
        edit(f"{name} not written", PROPS, line, scene=scene)
        for name, line, scene in (
            ("kp", '        props["stiffness"][driven] = contract.kp\n', "floating"),
            ("kv", '        props["damping"][driven] = contract.kv\n', "floating"),
            ("armature", '        props["armature"] = contract.armature\n', "floating"),
            ("frictionloss", '        props["friction"] = contract.frictionloss\n', "floating"),
            ("force limit",
             '        props["effort"][driven] = np.minimum(contract.force_range[:, 1], NO_LIMIT)\n',
             "floating"),
        )
    ),
    edit("joint limits not written", PROPS, "limited = np.isfinite(high) & ",
         "limited = np.isnan(high) & ", scene="fixed"),
    edit("effort without a limit", PROPS, "NO_LIMIT = 1e9", 'NO_LIMIT = float("inf")', end=RAISED,
         said="answered False.*effort limit is not finite"),
    edit("axes of inertia", PROPS, "        if self._bodies:\n", "        if False:\n", end=RAISED,
         said="did not keep the mass, centre of mass or inertia of: hub"),
    edit("axes of inertia, unread", PROPS, "        if not self._wrong_bodies(bodies):\n",
         "        self._wrong_bodies = lambda bodies: []\n        if True:\n"),
    edit("friction per shape", PROPS, "        if self._shapes:\n            answer",
         "        if self._shapes and False:\n            answer"),
    # -- tensors
    edit("no refresh", STATE, "            check(refresh(sim), name)\n", "            pass\n",
         end=RAISED, said="is not finite"),
    edit("bodies not refreshed", STATE, "check(refresh(sim), name)",
         'name == "refresh of rigid_body_state" or check(refresh(sim), name)', end=RAISED,
         said="is not finite"),
    edit("no fetch_results", STATE, "                gym.fetch_results(sim, True)\n",
         "                pass\n", pipeline="cpu"),
    edit("setters at each reset", STATE, "        self._pending[env_ids] = True\n",
         "        self._pending[env_ids] = True\n        self._submit_resets()\n", end=ABORT,
         said="a second setter of root"),
    edit("the last reset wins", STATE, "        self._pending[env_ids] = True\n",
         "        self._pending[:] = False; self._pending[env_ids] = True\n"),
    edit("resets never end", STATE, "        self._pending[:] = False\n"),
    edit("resets not submitted", STATE, "            self._submit_resets()\n",
         "            pass\n"),
    edit("stale state after a reset", STATE, "        if self._pending.any():\n            ids",
         "        if False:\n            ids"),
    edit("stale bodies after a reset", STATE,
         "            rows.update(self._tree.forward(qpos, qvel))\n", "            pass\n"),
    edit("indices of joints", STATE, "indices.array[:count] = ids\n",
         "indices.array[:count] = ids * 4\n", end=ABORT, said="out of range"),
    edit("an actor twice", STATE, "indices.array[:count] = ids\n",
         "indices.array[:count] = ids[0]\n", end=ABORT, said="named twice"),
    edit("indices as floats", STATE, "staging((n,), np.int32)", "staging((n,), np.float32)",
         end=RAISED, said="dtype"),
    edit("device of a descriptor", TENSORS, "tensor.device = self._device", "tensor.device = -1",
         end=RAISED, said="is on device -1, 0 expected"),
    edit("shape of a descriptor", TENSORS, "tensor.shape = tuple(array.shape)",
         "tensor.shape = (1,)", end=RAISED, said="has 1 elements"),
    edit("a buffer that is gone", TENSORS, "self._describe(array.ctypes.data, array)",
         "self._describe(array.copy().ctypes.data, array)", end=ABORT + "|" + SEGV + "|" + DIFFERS +
         "|" + RAISED),
    edit("a buffer that is used again", STATE, _SIMULATE,
         "            self._new_root.array.fill(0)\n" + _SIMULATE, end=ABORT,
         said="changed before simulate"),
    edit("targets not sent", STATE,
         "answer = gym.set_dof_position_target_tensor(sim, self._targets.tensor)", "answer = True"),
    edit("targets in no order", STATE, "np.clip(ctrl, self._low, self._high, out=",
         "np.clip(ctrl[:, ::-1], self._low, self._high, out="),
    edit("targets not clipped", STATE, "np.clip(ctrl, self._low, self._high, out=",
         "np.clip(ctrl, -1e9, 1e9, out="),
    # -- frames
    edit("xyzw published", FRAMES, "np.copyto(quats[..., 0], rows[..., 6])",
         "np.copyto(quats[..., 0], rows[..., 3])", said="quat|qpos"),
    edit("xyzw written", FRAMES, "*quat[1:], quat[0], *vel", "*quat, *vel"),
    edit("velocity of the centre of mass published", FRAMES,
         "np.subtract(part[..., 7 + axis], change,",
         "np.subtract(part[..., 7 + axis], 0 * change,", said="linvel|qvel"),
    edit("velocity of the origin written", FRAMES, "*quat[1:], quat[0], *vel, *spin",
         "*quat[1:], quat[0], *parts(qvel[:, :3]), *spin"),
    edit("spin along world axes published", FRAMES, "        np.copyto(spin[:, axis], value)",
         "        np.copyto(spin[:, axis], rows[:, 10 + axis])", said="qvel"),
    edit("spin along body axes written", FRAMES, "spin = rotate(quat, parts(qvel[:, 3:6]))",
         "spin = parts(qvel[:, 3:6])"),
    edit("positions with the origin", FRAMES, "np.copyto(pos, rows[..., :3])",
         "np.copyto(pos, rows[..., :3] + 4.0 * (np.arange(3 * rows[..., 0].size) % 2).reshape("
         "rows[..., :3].shape))"),
    # -- a simulation that is not one, with nobody looking
    edit("create_sim unlooked at", BUILD, "        if sim is None:\n", "        if False:\n",
         end=RAISED, said="logged an error while creating", settings="create=none"),
    edit("load_asset unlooked at", BUILD, "        if asset is None:\n", "        if False:\n",
         end=RAISED, said="RuntimeError: .* while loading the asset", scene="missing"),
    edit("answers unlooked at", BUILD, "        if answer is not True:\n", "        if False:\n",
         end=RAISED, said="logged an error while simulating",
         settings="refuse=set_dof_state_tensor_indexed"),
    edit("gains unread", PROPS, "            if field in self._differ:\n", "            if False:\n",
         settings="gains=lost"),
    edit("the log unread", BUILD, "        if said is None:\n", "        if True:\n", end=RAISED,
         said="is not finite", settings="create=bad_ordinal"),
    edit("the first step unlooked at", STATE, "        if wrong:\n", "        if False:\n",
         settings="create=zeros"),
]  # fmt: skip

# The worker as it is, over an engine that fails: the message that a user gets.
FAILURES = [
    Job("create_sim gives None", end=RAISED, settings="create=none", pipeline="cpu",
        said="DevicePlanError: Isaac Gym's create_sim returned None on the CPU"),
    Job("create_sim dies", end=SEGV, settings="create=segv"),
    Job("a log line and a broken simulation", end=RAISED, settings="create=bad_ordinal",
        said="DevicePlanError: .* went on: .*invalid device ordinal"),
    Job("out of memory", end=RAISED, settings="create=oom",
        said="DevicePlanError: .* fail to allocate"),
    Job("no kernels for this GPU", end=RAISED, settings="create=no_kernel",
        said="DevicePlanError: .* no kernel image"),
    Job("zeros without a word", end=RAISED, settings="create=zeros",
        said="DevicePlanError: after one step on cuda:0 = GPU-.* holds no rotations"),
    Job("PhysX on the CPU", end=RAISED, settings="create=cpu",
        said="DevicePlanError: PhysX fell back to the CPU"),
    Job("the asset is not there", end=RAISED, scene="missing",
        said="SceneError: Isaac Gym could not import .*: .* Failed to load asset"),
    Job("prepare_sim fails", end=RAISED, settings="prepare=false",
        said="RuntimeError: Isaac Gym's prepare_sim answered False"),
    Job("an error in the log while building", end=RAISED, settings="complain=create_actor",
        said="RuntimeError: .* logged an error while creating environments, and went on"),
    Job("an error in the log while stepping", end=RAISED, settings="complain=simulate",
        said="logged an error while"),
    Job("another order", end=RAISED, settings="order=reversed",
        said="SceneError: .*\n  model: shoulder, reach.*\n  Isaac Gym: ankle, hip"),
    Job("gains are lost", end=RAISED, settings="gains=lost",
        said="RuntimeError: .* did not keep the stiffness of: shoulder, reach, hip"),
    Job("torch was first", end=RAISED, torch=True, said="WorkerLaunchError: .*a [.]pth file"),
    Job("libstdc++ is old", end=RAISED, settings="import_error=GLIBCXX_3.4.32 not found",
        said="WorkerLaunchError: .*libstdcxx-ng"),
    Job("libpython is not found", end=RAISED,
        settings="import_error=libpython3.8.so.1.0: cannot open shared object file",
        said="WorkerLaunchError: .* is not in LD_LIBRARY_PATH"),
    Job("a second simulation", end=SEGV, lives=2),
    *(
        Job(f"{method} says no", end=RAISED, settings=f"refuse={method}",
            said=f"RuntimeError: .*{said}.* answered False: .*{method} failed")
        for method, said in (
            ("set_actor_dof_properties", "set_actor_dof_properties"),
            ("set_actor_rigid_body_properties", "set_actor_rigid_body_properties"),
            ("set_actor_rigid_shape_properties", "set_actor_rigid_shape_properties"),
            ("set_dof_position_target_tensor", "set_dof_position_target_tensor"),
            ("set_actor_root_state_tensor_indexed", "set_actor_root_state_tensor_indexed"),
            ("set_dof_state_tensor_indexed", "set_dof_state_tensor_indexed"),
            ("refresh_actor_root_state_tensor", "refresh of root_state"),
            ("refresh_dof_state_tensor", "refresh of dof_state"),
            ("refresh_rigid_body_state_tensor", "refresh of rigid_body_state"),
            ("refresh_net_contact_force_tensor", "refresh of net_contact_force"),
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def workshop(gym_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("mutants")
    scenes = {name: _scene(folder, name, gym_home) for name in SCENES}
    missing = {**scenes["fixed"], "flat": str(folder / "none.xml")}
    python = gym_home / "miniconda3" / "envs" / "hsgym" / "bin" / "python3.8"
    return Workshop(
        folder, python, TESTS / "isaacgym_mutants.py", scenes, {**scenes, "missing": missing}
    )


def _scene(folder: Path, name: str, home: Path) -> dict[str, Any]:
    path = write_scene(folder, name)
    model = mjcf.inspect(path)
    flat = mjcf.export_flat(model, folder / "cache")
    options = IsaacGymCfg().options()
    options["contract"] = str(write_contract(model, flat, folder / "cache"))
    options["package_root"] = str(home / "isaacgym" / "python")
    return {"original": str(path), "flat": str(flat.path), "options": options}


@pytest.mark.parametrize("job", RIGHT, ids=[job.name for job in RIGHT])
def test_unedited_it_agrees_with_mujoco_in_every_field(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("right", RIGHT)[job.name])


@pytest.mark.parametrize("job", FAILURES, ids=[job.name for job in FAILURES])
def test_a_failure_of_the_engine_is_told(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("failures", FAILURES)[job.name])


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("job", MISTAKES, ids=[job.name for job in MISTAKES])
def test_a_mistake_is_caught(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("mistakes", MISTAKES)[job.name])


# -- habits that our worker does not meet -----------------------------------------------------------

_HABITS = """
import os, sys
sys.path[:0] = [{package!r}]
os.environ["ISAACGYM_STANDIN"] = "gpu=host"
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ.pop("DISPLAY", None)
from isaacgym import gymapi
import ctypes, numpy as np
gym = gymapi.acquire_gym()
params = gymapi.SimParams()
params.up_axis, params.substeps, params.use_gpu_pipeline = gymapi.UP_AXIS_Z, 1, {gpu}
params.physx.use_gpu, params.gravity = {gpu}, gymapi.Vec3(0, 0, 0)
sim = gym.create_sim(0, {graphics}, gymapi.SIM_PHYSX, params)
def asset(text, name="robot.xml", **options):
    made = gymapi.AssetOptions()
    for key, value in options.items():
        setattr(made, key, value)
    with open(os.path.join({folder!r}, name), "w") as file:
        file.write(text)
    return gym.load_asset(sim, {folder!r}, name, made)
BALL = "<mujoco><worldbody><body name='ball'><geom size='.1' mass='2'/></body></worldbody></mujoco>"
def robot(text=BALL, **options):
    env = gym.create_env(sim, gymapi.Vec3(0, 0, 0), gymapi.Vec3(1, 1, 1), 1)
    return env, gym.create_actor(env, asset(text, **options), gymapi.Transform(), "r", 0, 1, 0)
def seen(tensor):
    memory = (ctypes.c_float * int(np.prod(tensor.shape))).from_address(tensor.data_address)
    return np.frombuffer(memory, np.float32).reshape(tensor.shape)
"""


def habit(
    home: Path, folder: Path, code: str, *, gpu: bool = True, graphics: int = -1, python: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs `code` over a stand-in simulation; it must say "fine" at its end."""
    package = str(home / "isaacgym" / "python")
    start = _HABITS.format(package=package, folder=str(folder), gpu=gpu, graphics=graphics)
    python = python or str(home / "miniconda3" / "envs" / "hsgym" / "bin" / "python3.8")
    return subprocess.run(
        [python, "-c", start + code + "\nprint('fine')"],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip


HABITS = {
    "an address is stable and its content changes only in a refresh": """
robot(); gym.prepare_sim(sim)
t = gym.acquire_actor_root_state_tensor(sim)
assert np.isnan(seen(t)).all() and t.device == 0
gym.refresh_actor_root_state_tensor(sim)
before, address = seen(t).copy(), t.data_address
force = np.zeros((1, 3), np.float32); force[0, 0] = 1000
f = gymapi.Tensor()
f.data_address, f.device, f.dtype, f.shape = force.ctypes.data, 0, gymapi.DTYPE_FLOAT32, (1, 3)
assert gym.apply_rigid_body_force_tensors(sim, f)
gym.simulate(sim)
assert (seen(t) == before).all()
gym.refresh_actor_root_state_tensor(sim)
pushed = seen(t)[0, 7]
assert t.data_address == address and pushed > 1
gym.simulate(sim); gym.refresh_actor_root_state_tensor(sim)
assert seen(t)[0, 7] == pushed, "a force acts for one simulate"
""",
    "gym's own setter takes effect at the next simulate": """
robot(); gym.prepare_sim(sim)
t = gym.acquire_actor_root_state_tensor(sim)
new, ids = np.zeros((1, 13), np.float32), np.zeros(1, np.int32)
new[0, 2], new[0, 6] = 5, 1
def tensor(array, dtype):
    made = gymapi.Tensor()
    made.data_address, made.device, made.dtype, made.shape = array.ctypes.data, 0, dtype, array.shape
    return made
assert gym.set_actor_root_state_tensor_indexed(
    sim, tensor(new, gymapi.DTYPE_FLOAT32), tensor(ids, gymapi.DTYPE_UINT32), 1)
gym.refresh_actor_root_state_tensor(sim)
assert seen(t)[0, 2] == 0
gym.simulate(sim); gym.refresh_actor_root_state_tensor(sim)
assert seen(t)[0, 2] == 5
""",
    "the importer loses what no file of ours has": """
env, actor = robot("<mujoco><compiler angle='degree'/><default><joint range='-90 90' limited='true'/>"
    "</default><worldbody><body name='a' pos='0 0 3'><geom size='.1'/><body name='b'><joint name='j'/>"
    "<geom size='.1'/></body><body name='c'><joint name='k' range='-1 1' frictionloss='3'/>"
    "<geom size='.1'/></body></body></worldbody></mujoco>")
props = gym.get_actor_dof_properties(env, actor)
assert not props["hasLimits"].any() and not props["friction"].any()
gym.prepare_sim(sim); gym.acquire_actor_root_state_tensor(sim)
gym.refresh_actor_root_state_tensor(sim)
assert seen(gym.acquire_actor_root_state_tensor(sim))[0, 2] == 0, "the root's pose is not kept"
""",
    "what cannot be imported is None": """
assert gym.load_asset(sim, "/nowhere", "robot.xml") is None
assert asset(BALL, "robot.urd") is None
assert asset(BALL.replace("</worldbody>", "<body name='two'><geom size='1'/></body></worldbody>")) is None
assert asset("<mujoco><worldbody><body><geom size='x'/></body></worldbody></mujoco>") is None
assert asset("no xml") is None
""",
    "actors come before prepare_sim, and into the newest environment": """
env, actor = robot()
assert gym.prepare_sim(sim) and not gym.prepare_sim(sim)
assert gym.create_env(sim, gymapi.Vec3(), gymapi.Vec3(), 1) is None
assert gym.create_actor(env, asset(BALL), gymapi.Transform()) == gymapi.INVALID_HANDLE
assert not gym.set_actor_rigid_body_properties(env, actor, [])
assert gym.get_actor_dof_properties(env, 7) is None
""",
    "no camera and no viewer without graphics": """
env, actor = robot()
assert gym.create_camera_sensor(env, gymapi.CameraProperties()) == -1
assert gym.create_viewer(sim, gymapi.CameraProperties()) is None
""",
}

_CAMERA = """
props = gymapi.CameraProperties()
props.width, props.height = 40, 30
env, actor = robot()
camera = gym.create_camera_sensor(env, props)
assert camera == 0
gym.set_camera_location(camera, env, gymapi.Vec3(1, 1, 1), gymapi.Vec3())
gym.prepare_sim(sim)
take = lambda: gym.get_camera_image(sim, env, camera, gymapi.IMAGE_COLOR)
gym.simulate(sim); gym.step_graphics(sim); gym.render_all_camera_sensors(sim)
assert take().size == 0, "without fetch_results"
gym.fetch_results(sim, True); gym.render_all_camera_sensors(sim)
assert take().size == 0, "without step_graphics"
gym.step_graphics(sim)
assert take().shape == (30, 160) and not take().any(), "not rendered yet"
gym.render_all_camera_sensors(sim)
assert (take().reshape(30, 40, 4)[0, 0] == (255, 0, 0, 255)).all()
"""


@pytest.mark.parametrize("name", HABITS)
def test_habit(name: str, gym_home: Path, tmp_path: Path) -> None:
    done = habit(gym_home, tmp_path, HABITS[name])
    assert "fine\n" in done.stdout, done.stderr


def test_pictures_need_every_step_before_them(gym_home: Path, tmp_path: Path) -> None:
    done = habit(gym_home, tmp_path, _CAMERA, graphics=0)
    assert "fine\n" in done.stdout, done.stderr


def test_another_python_is_refused(gym_home: Path, tmp_path: Path) -> None:
    done = habit(gym_home, tmp_path, "", python=sys.executable)
    assert "No gym module found for the active version of Python" in done.stderr
