"""Each habit and trap of Isaac Sim and Isaac Lab, and the mistake of a worker that it catches.

As `test_isaacgym_standin.py`: each row of MISTAKES puts one into the worker and says how it must show.
Unedited, the worker agrees with MuJoCo's own in every field.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from isaacgym_home import SCENES, write_scene
from isaacsim_home import sim_home
from mutants import ABORT, DIFFERS, OK, RAISED, SEGV, Job, check, edit
from outboard.backends import mjcf
from outboard.backends.isaacsim import IsaacSimCfg
from outboard.backends.mjcf_contract import write_contract
from workshop import Workshop

__all__ = ["sim_home"]

TESTS = Path(__file__).resolve().parent
APP, USD, SCENE, ROBOT, STATE, WORKER, CAMERA = (
    "isaacsim_app", "isaacsim_usd", "isaacsim_scene", "isaacsim_robot", "isaacsim_state",
    "isaacsim_worker", "isaacsim_camera",
)  # fmt: skip
UNANSWERED = (("OMNI_KIT_ACCEPT_EULA", ""),)


def cpu(name: str, module: str, old: str, new: str = "", **more: Any) -> Job:
    return edit(name, module, old, new, **{"pipeline": "cpu", **more})


def job(name: str, **more: Any) -> Job:
    given: dict[str, Any] = {"pipeline": "cpu", **more}
    return Job(name, **given)


RIGHT = [
    *(job(f"unedited, {scene}", end=OK, scene=scene) for scene in (*SCENES, "bent")),
    job("the engine's order is the model's", end=OK, settings="order=document"),
    job("masses and inertia are lost in the import", end=OK, settings="masses=lost"),
    job("joint limits are lost in the import", end=OK, settings="limits=lost", scene="fixed"),
    job("a renderer that is lost and not used", end=OK, settings="physics=renderer"),
    job("a picture", end=OK, render=True, said=r"\(30, 40, 3\) \[200, 0,"),
    job("SIGTERM ends it", end="SIGTERM", signal=int(signal.SIGTERM)),
    job("SIGSEGV ends it", end=SEGV, signal=int(signal.SIGSEGV)),
]

_WRITE_JOINTS = "robot.write_joint_state_to_sim(pos, vel, None, ids)"
_POSE = "        self._robot.write_root_link_pose_to_sim(pose, ids)\n"
_VELOCITY = "        self._robot.write_root_link_velocity_to_sim(velocity, ids)\n"
_SENSOR = """            if self._sensor is not None:
                # A force that ended is zero in that one step only (IsaacLab issue 7613).
                self._sensor.update(dt, force_recompute=True)
"""

MISTAKES = [
    # -- Kit
    cpu("imported before the launcher", WORKER, "from .isaacsim_app import App\n",
        "from . import isaacsim_scene\nfrom .isaacsim_app import App\n", end=RAISED,
        said="before AppLauncher|No module named 'isaaclab"),
    cpu("the question is asked", APP, "        _require_licence()\n", end=RAISED, env=UNANSWERED,
        said="EOFError"),
    cpu("our arguments given to Kit", APP, "        sys.argv = sys.argv[:1]\n", end=ABORT,
        said="not its own"),
    cpu("variables not pinned", APP, "        os.environ.update(_pinned(init.render))\n", end=ABORT,
        env=(("LIVESTREAM", "1"),), said="a window or a stream"),
    cpu("a window", APP, '"HEADLESS": "1"', '"HEADLESS": "0"', end=OK),  # the argument is enough
    cpu("no isaacsim before the launcher", APP,
        "            import isaacsim  # type: ignore[import-not-found]  # noqa: F401 - tells where "
        "Kit's files are\n", end=RAISED, said="EXP_PATH"),
    cpu("device without a kind", APP, '"device": device,', '"device": "0",', end=RAISED,
        said="'cuda', 'cuda:N' or 'cpu' is expected"),
    cpu("contexts everywhere", APP, "kit_args = _ONE_GPU", 'kit_args = ""', end=ABORT,
        said="every GPU"),
    cpu("multi-GPU rendering", APP, '        "multi_gpu": False,\n', end=ABORT, said="every GPU"),
    cpu("handlers left to the launcher", APP, "            _own_signals()\n",
        "            pass\n", end="SIGALRM", signal=int(signal.SIGTERM)),
    cpu("a handler in Python for a crash", APP, "            _own_signals()\n",
        "            pass\n", end="SIGALRM", signal=int(signal.SIGSEGV)),
    # -- the import
    cpu("extension not enabled", USD, "    enable_extension(IMPORTER)\n", end=RAISED,
        said="MJCFCreateAsset"),
    cpu("no word on the base", USD, "        fix_base=fixed,\n", end=RAISED, said="fix_base"),
    cpu("base always fixed", USD, "fix_base=fixed", "fix_base=True", end=RAISED,
        said="SceneError: .* with a fixed base"),
    cpu("base never fixed", USD, "fix_base=fixed", "fix_base=False", end=RAISED, scene="fixed",
        said="SceneError: .* with a floating base"),
    cpu("two roots", ROBOT, "articulation_root_prim_path=scene.paths.root",
        "articulation_root_prim_path=None", end=RAISED, said="single articulation"),
    cpu("the importer's own root", USD, '_name(path) != "worldBody"',
        '_name(path) == "worldBody"', end=RAISED, said="worldBody has no links"),
    # -- the stage
    cpu("logs on disk", SCENE, "            save_logs_to_file=False,\n", end=ABORT, said="a log"),
    cpu("time step left alone", SCENE, "            dt=self.dt,\n"),
    cpu("gravity left alone", SCENE, "            gravity=tuple(self.contract.gravity),\n"),
    cpu("physics scene elsewhere", SCENE, "            physics_prim_path=PHYSICS,\n",
        '            physics_prim_path="/other",\n', end=ABORT, said="no physics scene"),
    cpu("Isaac Lab's own ground", SCENE, "        self._add_ground(stage)\n",
        "        ground = sim_utils.GroundPlaneCfg(); ground.func(GROUND, ground)\n", end=RAISED,
        said="asset server"),
    cpu("no ground", SCENE, "        self._add_ground(stage)\n"),
    cpu("ground not in the filter", SCENE, "global_paths=shared", "global_paths=[]"),
    cpu("ground upright", SCENE, 'CreateAxisAttr("Z")', 'CreateAxisAttr("Y")'),
    cpu("ground that cannot be touched", SCENE,
        "        UsdPhysics.CollisionAPI.Apply(plane.GetPrim())\n"),
    cpu("ground without its material", SCENE,
        '        sim_utils.bind_physics_material(GROUND + "/plane", GROUND + "/material")\n'),
    cpu("PhysX's rule of friction", SCENE, '            friction_combine_mode="max",\n'),
    cpu("clones without their root", SCENE, '            root_path=ENVS + "/env_",\n', end=RAISED,
        said="root_path"),
    cpu("no reset", SCENE, "            self.sim.reset()\n", "            pass\n", end=RAISED,
        said="AttributeError"),
    # -- the robot
    cpu("self-collision left on", ROBOT, 'enabled_self_collisions=bool(options["self_collision"])',
        "enabled_self_collisions=True"),
    cpu("joints start at zero", ROBOT,
        "joint_pos=_by_joint(contract, np.clip(start, low, high)), ", end=RAISED, scene="bent",
        said="default positions out of the limits"),
    cpu("gains per degree", ROBOT, "stiffness[driven], damping[driven] = contract.kp, contract.kv\n"
        "    effort", "stiffness[driven], damping[driven] = contract.kp * 0.01745, contract.kv\n"
        "    effort"),
    cpu("kv not written", ROBOT, "damping=_by_joint(contract, damping)", "damping=0.0", end=RAISED,
        said="did not keep the damping of"),
    cpu("no force limit", ROBOT, "        effort_limit_sim=_by_joint(contract, effort),\n",
        end=RAISED, said="did not keep the effort limit"),
    cpu("force limit given twice", ROBOT, "        velocity_limit_sim=NO_CAP,\n",
        "        velocity_limit_sim=NO_CAP, effort_limit=1.0,\n", end=RAISED,
        said="both .* are set and differ"),
    cpu("a force limit that is infinite", ROBOT, "NO_LIMIT = 1e9", 'NO_LIMIT = float("inf")',
        end=RAISED, said="not finite"),
    cpu("frictionloss not written", ROBOT,
        "        friction=_by_joint(contract, contract.frictionloss),\n"),
    cpu("a name that matches none", ROBOT, 'return "^" + re.escape(name) + "$"',
        'return "^" + re.escape(name) + "_$"', end=RAISED, said="Not all regular expressions"),
    cpu("one name for all", ROBOT, 'return "^" + re.escape(name) + "$"', 'return ".*"',
        end=RAISED + "|" + DIFFERS),
    cpu("gains unread", ROBOT, "        if wrong.any():\n            raise",
        "        if False:\n            raise", settings="gains=lost"),
    cpu("joint limits not written", ROBOT, "        _write_limits(scene)\n", settings="limits=lost",
        scene="fixed"),
    cpu("bodies not compared", ROBOT, "    _write_bodies(scene)\n", settings="masses=lost"),
    cpu("bodies by 64-bit indices", ROBOT,
        "everyone = torch.arange(scene.init.num_envs, dtype=torch.int32)",
        "everyone = torch.arange(scene.init.num_envs)", end=RAISED, said="int64 indices",
        settings="masses=lost"),
    cpu("axes of inertia", ROBOT, "turn = contract.inertia_quat[:, [1, 2, 3, 0]]",
        "turn = contract.inertia_quat", end=RAISED, said="did not keep the mass",
        settings="masses=lost"),
    cpu("friction of shapes", ROBOT, "    _write_friction(scene)\n", scene="bent"),
    # -- order
    cpu("joints in their order", STATE, "self._joint_ids = self._index(scene.joint_ids)",
        "self._joint_ids = self._index(sorted(scene.joint_ids))"),
    cpu("bodies in their order", STATE, "self._body_ids = self._index(scene.body_ids)",
        "self._body_ids = self._index(sorted(scene.body_ids))"),
    cpu("targets in their order", STATE,
        "self._driven = self._joint_ids[self._index(contract.actuator_joint)]",
        "self._driven = self._index(contract.actuator_joint)"),
    cpu("contacts in their order", STATE,
        "[names.index(name) for name in self._contract.body_names]", "range(len(names))"),
    cpu("masses in their order", ROBOT, "    masses[:, ids] =", "    masses[:, sorted(ids)] =",
        end=RAISED, said="did not keep the mass", settings="masses=lost"),
    # -- time
    cpu("targets not sent", STATE, "            self._robot.write_data_to_sim()\n"),
    cpu("targets not set", STATE, "        self._robot.set_joint_position_target(self._targets)\n"),
    cpu("targets not clipped", STATE,
        "torch.minimum(torch.maximum(ctrl, self._low), self._high)", "ctrl"),
    cpu("views not updated", STATE,
        "            self._robot.update(dt)  # until then every read is of before\n"),
    cpu("views updated once", STATE, "        for _ in range(steps):\n", "        for _ in range(1):\n"),
    cpu("rendered in each step", STATE, "self._sim.step(render=False)", "self._sim.step()",
        end=ABORT, said="without cameras"),
    cpu("contacts not updated", STATE, _SENSOR, said="contact_force"),
    cpu("contacts looked at once", STATE, _SENSOR,
        "        self._sensor.update(dt, force_recompute=True)\n", said="contact_force"),
    cpu("no contact sensor on the robot", ROBOT,
        '        activate_contact_sensors="contact_force" in scene.init.publish,\n', end=RAISED,
        said="contact reporter"),
    # -- resets
    cpu("environments as a list", STATE, _WRITE_JOINTS,
        "robot.write_joint_state_to_sim(pos, vel, None, ids.tolist())", end=RAISED,
        said="as a tensor"),
    cpu("velocity of the centre of mass", STATE, "write_root_link_velocity_to_sim(",
        "write_root_velocity_to_sim("),
    cpu("the velocity first", STATE, _POSE + "        velocity = torch.cat([qvel[:, :3], _rotate("
        "quat, qvel[:, 3:6])], dim=1)\n" + _VELOCITY,
        "        velocity = torch.cat([qvel[:, :3], _rotate(quat, qvel[:, 3:6])], dim=1)\n"
        + _VELOCITY + _POSE),
    cpu("without the origin", STATE, "qpos[:, :3] + self._origins[ids]", "qpos[:, :3]", end=RAISED,
        said="m from where it was put"),
    cpu("quaternion's order", STATE, "quat = _normalised(qpos[:, 3:7])",
        "quat = _normalised(qpos[:, [4, 5, 6, 3]])"),
    cpu("spin along the body's axes", STATE, "_rotate(quat, qvel[:, 3:6])", "qvel[:, 3:6]"),
    cpu("base not placed", STATE, "        row[:, :3] += self._origins\n", scene="fixed", end=RAISED,
        said="m from where it was put"),
    cpu("stale bodies after a reset", STATE, "                if self._any_pending:\n",
        "                if False:\n", said="body_.*vel|contact_force"),
    cpu("resets never end", STATE, "            self._pending.zero_()\n", "            pass\n"),
    # -- frames
    cpu("positions with the origin", STATE, "pose[:, :3] - self._origins, pose", "pose[:, :3], pose",
        said="qpos"),
    cpu("bodies with the origin", STATE, ":3] - self._origins[:, None]", ":3]", said="body_pos"),
    cpu("spin along the world's axes", STATE, "_rotate_back(quat, velocity[:, 3:])",
        "velocity[:, 3:]", said="qvel"),
    cpu("root's velocity of the centre of mass", STATE,
        "velocity, quat = data.root_link_vel_w, data", "velocity, quat = data.root_com_vel_w, data",
        said="qvel"),
    cpu("bodies' velocity of the centre of mass", STATE,
        "data.body_link_vel_w[:, self._body_ids, :3]", "data.body_com_vel_w[:, self._body_ids, :3]",
        said="body_linvel"),
    # -- pictures
    cpu("no cameras at the launch", APP, "init.render", "False", end=RAISED, said="enable_cameras",
        render=True),
    cpu("the first frame", CAMERA, "_WARM_UP = 8", "_WARM_UP = 1", render=True, said=r"\[0, 0, 0\]"),
    # -- a simulation that is not one, with nobody looking
    cpu("the log unread", SCENE, "            if ERROR.search(line) or", "            if False or", end=OK,
        settings="physics=log"),
    cpu("the first step unlooked at", STATE, "        if wrong:\n", "        if False:\n",
        settings="physics=zeros"),
]  # fmt: skip

# The worker as it is, over an engine that fails: the message that a user gets.
FAILURES = [
    job("nobody accepted the licence", end=RAISED, env=UNANSWERED,
        said="UsageError: .* does not accept it for anybody.*OMNI_KIT_ACCEPT_EULA=YES"),
    job("an old glibc", end=RAISED, settings="import_error=GLIBC_2.35 not found",
        said="WorkerLaunchError: .*glibc 2.35"),
    job("software in place of the GPU", end=RAISED, settings="physics=log",
        said="DevicePlanError: .* while making the simulation on the CPU, and went on: .*GPU solver"),
    job("the renderer on GPU 0", end=RAISED, settings="physics=renderer", render=True,
        said="DevicePlanError: .* went on: .*Defaulting to GPU0"),
    job("PhysX on the CPU", end=RAISED, pipeline="gpu", settings="physics=cpu",
        said="DevicePlanError: PhysX fell back to the CPU.*cuda:0 = GPU-"),
    job("zeros without a word", end=RAISED, settings="physics=zeros",
        said="DevicePlanError: after one step on the CPU the state holds no rotations"),
    job("an error in the log while stepping", end=RAISED,
        settings="complain=PhysX Internal CUDA error", said="logged an error while"),
    job("a crash", end=SEGV, settings="physics=segv"),
    job("the importer ends the process", end="nothing", settings="importer=exit"),
    job("the importer makes nothing", end=RAISED, settings="importer=none",
        said="SceneError: .* made no USD file of .*robot.xml"),
    job("other names of joints", end=RAISED, settings="names=joints",
        said="SceneError: Isaac Lab refused the robot of .* Not all regular expressions"),
    job("other names of bodies", end=RAISED, settings="names=bodies",
        said="SceneError: the imported robot has no body hub: /robot/hub_0/hub_0"),
    job("a body that is called otherwise", end=RAISED, settings="names=leg",
        said="SceneError: .*body list.*\n  model: hub, arm.*\n  Isaac Sim: .*leg_0"),
    job("gains are lost", end=RAISED, settings="gains=lost",
        said="RuntimeError: .* did not keep the stiffness of: shoulder, reach, hip"),
    job("masses are stuck", end=RAISED, settings="masses=stuck",
        said="RuntimeError: .* did not keep the mass, centre of mass or inertia of: hub"),
    job("environments in another order", end=RAISED, settings="envs=reversed",
        said="view holds 3 robots in the order"),
]  # fmt: skip


def bent(folder: Path) -> Path:
    """A joint whose range leaves out zero, and shapes with more friction than the floor."""
    path, text = folder / "bent.xml", SCENES["floating"]
    for old, new in (
        ('range="-1 1" armature="0.01"', 'range="-1 -0.1" armature="0.01"'),
        ('friction="0.4 0.005', 'friction="0.9 0.005'),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def workshop(sim_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("mutants")
    paths = {name: write_scene(folder, name) for name in SCENES}
    scenes = {name: _scene(folder, path) for name, path in {**paths, "bent": bent(folder)}.items()}
    python = sim_home / "venv" / "bin" / "python"
    return Workshop(folder, python, TESTS / "isaacsim_mutants.py", scenes, scenes)


def _scene(folder: Path, path: Path) -> dict[str, Any]:
    model = mjcf.inspect(path)
    flat = mjcf.export_flat(model, folder / "cache")
    options = IsaacSimCfg().options()
    options["contract"] = str(write_contract(model, flat, folder / "cache"))
    options["usd_cache"] = str(folder / "usd")
    options["physical_index"] = 0
    return {"original": str(path), "flat": str(flat.path), "options": options}


@pytest.mark.parametrize("job", RIGHT, ids=[job.name for job in RIGHT])
def test_unedited_it_agrees_with_mujoco_in_every_field(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("right", RIGHT)[job.name])


@pytest.mark.parametrize("job", FAILURES, ids=[job.name for job in FAILURES])
def test_a_failure_of_the_engine_is_told(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("failures", FAILURES)[job.name])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", MISTAKES, ids=[job.name for job in MISTAKES])
def test_a_mistake_is_caught(job: Job, workshop: Workshop) -> None:
    check(job, workshop.results("mistakes", MISTAKES)[job.name])
