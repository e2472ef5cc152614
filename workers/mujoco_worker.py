"""`mujoco`: MuJoCo on the CPU, the embedded default and the reference for all other simulators.

What it settles: body poses belong to the published `qpos` (after mj_step alone they are one substep behind);
the engine's silent reset of an environment that blew up is reported; `MUJOCO_LOG.TXT` is written nowhere.

Options (Cfg of the same names in `backends/mujoco.py`):

    threads     0 = as many as this process has cores; at least 4 environments for each
    keyframe    name of the keyframe that is the initial state; "" = the only one, else the reference pose

A state that is NaN, infinite or huge at the start of a substep makes MuJoCo put that environment to its
*reference pose* (not the keyframe) with zero controls, and go on: ENV_ENGINE_RESET. ENV_NONFINITE is set
where the state itself does not fit a finite float32, and where a control was NaN or infinite: MuJoCo then
takes all controls of that environment as zero.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo makes its names at run time; its stubs do not list them.)

import os
import tempfile
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mujoco
import numpy as np

from ..ipc.device import CPU, DeviceReport, cpu_report
from ..ipc.errors import DevicePlanError, UsageError
from ..ipc.layout import ENV_ENGINE_RESET, ENV_NONFINITE, PUBLISHABLE
from ..ipc.messages import Init, ModelFacts, Render
from . import mujoco_model
from .mujoco_batch import STAGE_NONE, STAGE_POS, STAGE_VEL, SlicedBatch
from .simulator import Fields, Progress, Simulator, split_fields

try:  # MuJoCo 3.17 and newer
    from mujoco.batch import Batch  # type: ignore[import-not-found]
except ImportError:
    Batch: Any = None  # type: ignore[no-redef]

# By name: their numbers differ between versions.
_RESETS = [
    int(getattr(mujoco.mjtWarning, name))
    for name in ("mjWARN_BADQPOS", "mjWARN_BADQVEL", "mjWARN_BADQACC")
]
_BAD_CTRL = int(mujoco.mjtWarning.mjWARN_BADCTRL)

# A sum of squares below it has no component beyond 1e38: all fit float32, and none is NaN.
_FINITE = 1e76

# Fewer and the threads' wake-up costs more than it saves; one environment runs on the caller's thread.
_ENVS_PER_THREAD = 4

# Environments per pass where a field takes temporaries: they stay in the core's own cache
# (4096 humanoids: 4 ms instead of 7).
_CHUNK = 256

# What the fields need beyond qpos and qvel: MjData fields, and how far to compute after the last substep.
_NEEDS: Dict[str, Tuple[Tuple[str, ...], int]] = {
    "qpos": ((), STAGE_NONE),
    "qvel": ((), STAGE_NONE),
    "body_pos": (("xpos",), STAGE_POS),
    "body_quat": (("xquat",), STAGE_POS),
    "body_linvel": (("xpos", "cvel", "subtree_com"), STAGE_VEL),
    "body_angvel": (("cvel",), STAGE_VEL),
    "contact_force": (("cfrc_ext",), STAGE_NONE),
}
_CAMERA = ("distance", "azimuth", "elevation", "lookat_x", "lookat_y", "lookat_z")


class MuJoCoSimulator(Simulator):
    engine = "MuJoCo"
    engine_version = mujoco.__version__

    def __init__(self) -> None:
        self._home: Optional[int] = None  # the working directory before ours
        self._batch: Any = None
        self._renders = False
        self._renderer: Any = None
        self._picture_size = (0, 0)

    # -- building --------------------------------------------------------------------------------

    def build(self, init: Init, progress: Progress) -> ModelFacts:
        if init.device.kind != CPU:
            raise DevicePlanError(
                f"MuJoCo simulates on the CPU, but the plan is {init.device.uuid}"
            )
        scene = os.path.abspath(init.scene)
        self._enter_private_directory()
        progress("compiling", 0, 1)
        # Batch has no call between a step's end and its copies, so mj_step itself must compute the
        # forces, in each substep: +2 % of the physics. SlicedBatch asks once per command.
        forces = "contact_force" in init.publish
        model = mujoco_model.load(scene, init.dt, contact_forces=forces and Batch is not None)
        self._model = model
        self._key = mujoco_model.keyframe_index(model, str(init.options.get("keyframe", "")))
        facts = mujoco_model.facts(model, init.num_envs, self._key, ())
        progress("compiling", 1, 1)

        threads = _threads(int(init.options.get("threads", 0)), init.num_envs)
        self._batch = _make_batch(model, init.num_envs, threads)
        self._decimation = init.decimation
        # A scene may switch it off: then a bad state is counted and stays.
        self._auto_reset = not model.opt.disableflags & int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
        self._targets = mujoco_model.targets(model)
        self._default_ctrl = np.array(facts.default_ctrl)
        self._bind_outputs(init.publish)
        self._forces_known = np.zeros(init.num_envs, bool)
        if init.render:
            self._try_renderer()
        self.notes = tuple(self._make_notes(threads, forces))

        everyone = np.arange(init.num_envs, dtype=np.int32)
        self.reset(everyone)
        self._ctrl[:] = self._default_ctrl
        self._batch.step(nstep=1, stage=self._stage)
        self.reset(everyone)
        return facts

    def _enter_private_directory(self) -> None:
        """A directory that nobody else can reach and that is gone already: MuJoCo appends to
        MUJOCO_LOG.TXT where it stands, and here cannot. Nothing is left behind, even by SIGKILL."""
        self._home = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        path = tempfile.mkdtemp(prefix="outboard-mujoco-")
        os.chdir(path)
        os.rmdir(path)

    def _bind_outputs(self, publish: Sequence[str]) -> None:
        """Batch gives zeros for a field until the call after its binding: so before the first."""
        bind, roots = self._batch.bind, self._model.body_rootid[1:]
        self._qpos, self._qvel, self._ctrl = bind("qpos"), bind("qvel"), bind("ctrl")
        self._out = {name: bind(name) for field in publish for name in _NEEDS[field][0]}
        self._stage = max([_NEEDS[field][1] for field in publish], default=STAGE_NONE)
        # cvel is about the centre of mass of the body's whole tree. One tree: a slice, not a copy.
        one_tree = len(set(roots.tolist())) == 1
        self._roots: Any = slice(roots[0], roots[0] + 1) if one_tree else roots

    def _make_notes(self, threads: int, forces: bool) -> List[str]:
        model = self._model
        way = "mujoco.batch" if Batch is not None else "one MjData per environment"
        notes = ["{} on {} thread{}".format(way, threads, "" if threads == 1 else "s")]
        notes.extend(mujoco_model.notes(model, self._key))
        implicitfast = model.opt.integrator == int(mujoco.mjtIntegrator.mjINT_IMPLICITFAST)
        if Batch is None and implicitfast and model.actuator_forcelimited.any():
            notes.append(
                "an actuator at its force limit moves slightly differently than in MuJoCo 3.17 and newer "
                f"(integrator implicitfast); this is {mujoco.__version__}"
            )
        if forces and model.neq:
            notes.append("contact_force includes the forces of connect and weld constraints")
        return notes

    @property
    def capabilities(self) -> Tuple[str, ...]:
        return (*PUBLISHABLE, "render") if self._renders else PUBLISHABLE

    def report_device(self) -> DeviceReport:
        return cpu_report("qpos")

    def bind(self, banks: Sequence[Fields]) -> None:
        self._host_ctrl = banks[0]["ctrl"]
        self._banks = split_fields(banks, (*PUBLISHABLE, "env_flags"))

    # -- commands --------------------------------------------------------------------------------

    def step(self, bank: int) -> int:
        np.copyto(self._ctrl, self._host_ctrl)
        self._batch.step(nstep=self._decimation, stage=self._stage)
        self._forces_known[:] = True
        return self._publish(self._banks[bank])

    def publish(self, bank: int) -> int:
        return self._publish(self._banks[bank])

    def set_state(self, env_ids: np.ndarray, qpos: np.ndarray, qvel: np.ndarray) -> None:
        order = np.argsort(env_ids)  # Batch takes sorted ids
        ids, new_qpos = env_ids[order], qpos[order].astype(np.float64)
        self._batch.reset(ids, keyframe=-1, stage=STAGE_NONE)  # time, warm start, all else
        self._qpos[ids] = new_qpos
        self._qvel[ids] = qvel[order]
        self._ctrl[ids] = self._targets.at(new_qpos, self._model.nu)
        self._derive(ids)

    def reset(self, env_ids: np.ndarray) -> None:
        ids = np.sort(env_ids)
        self._batch.reset(ids, keyframe=self._key, stage=STAGE_NONE)
        self._ctrl[ids] = self._default_ctrl
        self._derive(ids)

    def _derive(self, ids: np.ndarray) -> None:
        """Poses and velocities of `ids` by forward kinematics; no contact force was computed there."""
        if self._stage > STAGE_NONE:
            self._batch.forward(ids, stage=self._stage)
        self._forces_known[ids] = False

    # -- publishing ------------------------------------------------------------------------------

    def _publish(self, fields: Dict[str, np.ndarray]) -> int:
        """One conversion from double into the shared block per field, without a loop over environments.

        Humanoid29, decimation 4, two shared cores, beside about 23 and 370 ms of physics for 256 and 4096
        environments: qpos and qvel 0.03 and 0.7 ms (half of it the flags); all fields 0.5 and 6 ms (two
        thirds of it body_linvel, the one field that is computed and not just converted). What costs more
        stands elsewhere: poses and velocities that belong to qpos take Batch 7 to 12 % of the physics,
        because it computes contacts with them. A persistent Batch saves nothing and takes 0.2 MB per
        environment.
        """
        out = self._out
        with np.errstate(over="ignore", invalid="ignore"):  # ENV_NONFINITE says it
            for name, source in (("qpos", self._qpos), ("qvel", self._qvel)):
                if name in fields:
                    np.copyto(fields[name], source)
            if "body_pos" in fields:
                np.copyto(fields["body_pos"], out["xpos"][:, 1:])
            if "body_quat" in fields:
                np.copyto(fields["body_quat"], out["xquat"][:, 1:])
            if "body_angvel" in fields:
                np.copyto(fields["body_angvel"], out["cvel"][:, 1:, :3])
            if "body_linvel" in fields:
                self._publish_linvel(fields["body_linvel"])
            if "contact_force" in fields:
                # The linear part of a spatial force is the same about every point.
                np.copyto(fields["contact_force"], out["cfrc_ext"][:, 1:, 3:])
                if not self._forces_known.all():
                    fields["contact_force"][~self._forces_known] = 0
            return self._publish_flags(fields["env_flags"])

    def _publish_linvel(self, field: np.ndarray) -> None:
        """mj_objectVelocity's rule for all bodies: v(origin) = v(tree's CoM) + omega x (origin - CoM)."""
        out, roots = self._out, self._roots
        for start in range(0, len(field), _CHUNK):
            part = slice(start, start + _CHUNK)
            cvel, com = out["cvel"][part, 1:], out["subtree_com"][part, roots]
            arm = out["xpos"][part, 1:] - com
            for x, y, z in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
                sum_ = cvel[..., y] * arm[..., z]
                sum_ -= cvel[..., z] * arm[..., y]
                np.add(sum_, cvel[..., 3 + x], out=field[part, :, x], casting="same_kind")

    def _publish_flags(self, flags: np.ndarray) -> int:
        counts = self._batch.warning[:, :, 1]
        squares = np.einsum("ij,ij->i", self._qpos, self._qpos)
        squares += np.einsum("ij,ij->i", self._qvel, self._qvel)
        bad = ~(squares < _FINITE)  # also where it is NaN
        if not counts.any():
            np.multiply(bad, ENV_NONFINITE, out=flags, casting="unsafe")
        else:
            bad |= counts[:, _BAD_CTRL] > 0
            flags[:] = bad * ENV_NONFINITE
            if self._auto_reset:
                flags[counts[:, _RESETS].any(axis=1)] |= ENV_ENGINE_RESET
            # An auto-reset clears the counters before it counts itself: without this the second
            # one would look like the first.
            self._batch.warning[:] = 0
        return int(np.count_nonzero(flags))

    # -- pictures --------------------------------------------------------------------------------

    def _try_renderer(self) -> None:
        buffer = self._model.vis.global_
        buffer.offwidth = max(buffer.offwidth, 2048)  # the largest picture that may be asked for
        buffer.offheight = max(buffer.offheight, 2048)
        self._scratch = mujoco.MjData(self._model)
        try:
            self._picture(320, 240)
        except Exception as error:  # each OpenGL binding fails in its own way
            raise UsageError(
                f"MuJoCo cannot render here ({type(error).__name__}: {error}). Leave out render=True, or "
                "install OpenGL and choose a way to it with env={'MUJOCO_GL': 'egl'} or 'osmesa'"
            ) from error
        self._renders = True

    def _picture(self, width: int, height: int) -> Any:
        if self._picture_size != (width, height):
            if self._renderer is not None:
                self._renderer.close()
            self._renderer = mujoco.Renderer(self._model, height=height, width=width)
            self._picture_size = (width, height)
        return self._renderer

    def render(self, request: Render) -> np.ndarray:
        if not self._renders:
            raise UsageError("render() needs render=True when the simulator is opened")
        unknown = sorted(set(request.camera) - set(_CAMERA))
        if unknown:
            raise UsageError(
                "the camera has no {}; it has {}".format(", ".join(unknown), ", ".join(_CAMERA))
            )
        camera = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(self._model, camera)
        for name, value in request.camera.items():
            if name.startswith("lookat_"):
                camera.lookat["xyz".index(name[-1])] = value
            else:
                setattr(camera, name, value)
        self._scratch.qpos[:] = self._qpos[request.env_id]
        mujoco.mj_forward(self._model, self._scratch)  # a copy: no trajectory sees it
        renderer = self._picture(request.width, request.height)
        renderer.update_scene(self._scratch, camera=camera)
        return renderer.render()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
        if isinstance(self._batch, SlicedBatch):
            self._batch.close()
        if self._home is not None:
            os.chdir(self._home)
            os.close(self._home)
            self._home = None


def _threads(asked: int, num_envs: int) -> int:
    if asked < 0:
        raise UsageError(f"threads is {asked}; 0 means as many as there are cores")
    # Not os.cpu_count(): a container or a launcher may have given this process fewer.
    threads = asked or len(os.sched_getaffinity(0))
    # Waking a thread costs about as much as four steps of one humanoid.
    return max(1, min(threads, num_envs // _ENVS_PER_THREAD))


def _make_batch(model: Any, num_envs: int, threads: int) -> Any:
    if Batch is None:
        return SlicedBatch(model, num_envs, threads)
    # A model that lets bodies fall asleep needs its MjData kept; any other is smaller without.
    sleeps = int(getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", 0))
    return Batch(model, num_envs, threads, persistent=bool(model.opt.enableflags & sleeps))
