"""All environments of one model in MuJoCo-Warp, and what a command does to them: enqueued, never waited for.

Everything is allocated once, for the worker's life, because graphs hold addresses; after `warm_up` every
kernel has run. A `Port` (mjwarp_graph.py) is where controls come from and fields go to.
"""

# pyright: reportUnknownLambdaType=false
# (MuJoCo-Warp is not in the environment of the type checker.)

import os
from typing import Any, Callable, Dict, List, Mapping, Tuple

import mujoco_warp as mjw  # type: ignore[import-not-found]
import numpy as np
import warp as wp  # type: ignore[import-not-found]

from ..ipc.arena import MASK
from ..ipc.errors import SceneError
from ..ipc.messages import Init
from . import mjwarp_kernels as kernels
from . import mujoco_model
from .mjwarp_capacity import OVERFLOWS, capacity, overflow_words
from .mjwarp_graph import Mirror, Port, element
from .simulator import Progress

_NOTHING_SEEN = (0, 2**31 - 1, 2**31 - 1)  # bits, lowest environment, first command
_FATAL = {int(mjw.OverflowType[name]): name for name in OVERFLOWS}


def _constant(values: Any, dtype: Any) -> Any:
    return wp.array(np.ascontiguousarray(values), dtype=dtype)


class World:
    """`device` is Warp's default device: all that MuJoCo-Warp and we allocate goes there."""

    def __init__(self, init: Init, device: Any) -> None:
        """The scene, compiled and put on the device. SceneError when it cannot be."""
        self._init, self._device, self._n = init, device, init.num_envs
        scene, options = os.path.abspath(init.scene), init.options
        self.model = mujoco_model.load(scene, init.dt)
        self.key = mujoco_model.keyframe_index(self.model, str(options.get("keyframe", "")))
        self.facts = mujoco_model.facts(self.model, self._n, self.key, ())
        try:
            self._m = mjw.put_model(self.model)
            pairs = [(int(a), int(b)) for a, b in self._m.nxn_geom_pair_filtered.numpy()]
            self.room = capacity(
                self.model, pairs, int(options.get("nconmax", 0)), int(options.get("njmax", 0))
            )
            self._m.opt.warn_overflow = (
                0  # it would print in every step; the kernel `judge` sees more
            )
            self._d = mjw.make_data(
                self.model, nworld=self._n, nconmax=self.room.nconmax, njmax=self.room.njmax
            )
        except (NotImplementedError, ValueError) as error:
            raise SceneError(f"MuJoCo-Warp cannot simulate {scene}: {error}") from error
        self._allocate()

    def _allocate(self) -> None:
        model, facts, n = self.model, self.facts, self._n
        start_act = model.key_act[self.key] if self.key >= 0 else np.zeros(model.na)
        self._start = tuple(
            _constant(np.array(values, np.float32), float)
            for values in (facts.default_qpos, facts.default_qvel, start_act)
        )
        self._roots = _constant(np.array(model.body_rootid, np.int32), int)
        self._chosen, self._bad = wp.zeros(n, dtype=wp.bool), wp.zeros(n, dtype=wp.uint8)
        self._commands = wp.zeros(1, dtype=int)
        # What is exchanged with others is ordinary memory, not of Warp's pool.
        with wp.ScopedMempool(self._device, False):
            self._seen = Mirror(wp, self._device, {"seen": ((3,), wp.int32)})
            self.given = Mirror(
                wp,
                self._device,
                {
                    MASK: ((n,), wp.uint8),
                    "set_qpos": ((n, model.nq), wp.float32),
                    "set_qvel": ((n, model.nv), wp.float32),
                },
            )
        self._seen.host["seen"][:] = _NOTHING_SEEN
        self._seen.up()
        self._sums_forces = "contact_force" in self._init.publish
        self._force = wp.zeros((n, facts.sizes.nbody), dtype=wp.vec3)
        if self._sums_forces:
            count = self._d.naconmax
            self._wrench = wp.zeros(count, dtype=wp.spatial_vector)
            self._contact_ids = _constant(np.arange(count, dtype=np.int32), int)

    # -- before the first command ----------------------------------------------------------------

    def warm_up(self, progress: Progress, wait: Callable[[], None]) -> None:
        """Run every kernel once, stage by stage, since with an empty cache each is compiled now; simulate one
        step; and put the keyframe back."""
        m, d, given = self._m, self._d, self.given.device
        port = self._scratch_port()
        stages: Tuple[Callable[[], None], ...] = (
            lambda: self.put_rows(given[MASK], given["set_qpos"], given["set_qvel"]),
            lambda: mjw.fwd_position(m, d),
            lambda: mjw.fwd_velocity(m, d),
            lambda: mjw.fwd_actuation(m, d),
            lambda: mjw.fwd_acceleration(m, d),
            lambda: mjw.solve(m, d),
            lambda: self.publish(port),
            lambda: self.advance(port),
        )
        self.given.host[MASK][:] = 1
        self.given.up()
        for i, stage in enumerate(stages):
            progress("compiling kernels", i, len(stages))
            # Before each: the rows that the first one puts are zeros, and no state to compute from.
            self.put_default(given[MASK])
            stage()
            wait()
        progress("compiling kernels", len(stages), len(stages))
        self.put_default(given[MASK])
        self._commands.zero_()
        wait()
        self.raise_overflow()

    def _scratch_port(self) -> Port:
        """Arrays of the fields' shapes while there is no block yet."""
        bodies, n = self._m.nbody - 1, self._n
        arrays: Dict[str, Any] = {
            "ctrl": wp.zeros((n, self._m.nu), dtype=float),
            "env_flags": wp.zeros(n, dtype=wp.uint8),
        }
        widths = {"qpos": (self._m.nq,), "qvel": (self._m.nv,), "body_quat": (bodies, 4)}
        for name in self._init.publish:
            dtype, shape = element(wp, name, (n, *widths.get(name, (bodies, 3))), "<f4")
            arrays[name] = wp.zeros(shape, dtype=dtype)
        return Port(arrays)

    def notes(self) -> List[str]:
        cache = f"compiled kernels are kept in {wp.config.kernel_cache_dir}"
        return [self.room.words, *mujoco_model.notes(self.model, self.key), cache]

    @property
    def evidence(self) -> int:
        """Address of the engine's own qpos."""
        return self._d.qpos.ptr

    @property
    def own_fields(self) -> Mapping[str, Any]:
        """Arrays that have a field's layout as they are."""
        return {"qpos": self._d.qpos, "qvel": self._d.qvel, "contact_force": self._force}

    # -- commands --------------------------------------------------------------------------------

    def _launch(self, kernel: Any, over: Any, *arguments: Any) -> None:
        wp.launch(kernel, dim=over, inputs=list(arguments))

    def advance(self, port: Port) -> None:
        """Controls in, `decimation` steps, and the state out."""
        d, ctrl = self._d, port.arrays["ctrl"]
        port.fetch()
        self._launch(kernels.take_ctrl, self._n, ctrl, d.ctrl, self._bad, self._commands)
        for _ in range(self._init.decimation):
            mjw.step(self._m, d)
        if self._sums_forces:
            self._sum_forces()
        self.publish(port)

    def _sum_forces(self) -> None:
        """Of the last substep, whose contacts and constraint forces are still there."""
        d = self._d
        self._force.zero_()
        mjw.contact_force(self._m, d, self._contact_ids, True, self._wrench)
        contacts = (d.nacon, d.contact.geom, d.contact.worldid, self._m.geom_bodyid)
        self._launch(kernels.add_forces, d.naconmax, *contacts, self._wrench, self._force)

    def publish(self, port: Port) -> None:
        """The present state and what is wrong with it. Poses and velocities of the bodies belong to
        the present qpos and qvel."""
        d, m, arrays, n = self._d, self._m, port.arrays, self._n
        moving = "body_linvel" in arrays or "body_angvel" in arrays
        if moving or "body_pos" in arrays or "body_quat" in arrays:
            mjw.kinematics(m, d)
        if moving:
            mjw.com_pos(m, d)
            mjw.com_vel(m, d)
        for name, own in self.own_fields.items():
            if name in arrays and arrays[name] is not own and own.size:
                wp.copy(arrays[name], own)
        for name, kernel, sources in (
            ("body_pos", kernels.positions, (d.xpos,)),
            ("body_quat", kernels.orientations, (d.xquat,)),
            ("body_angvel", kernels.angular_velocities, (d.cvel,)),
            (
                "body_linvel",
                kernels.linear_velocities,
                (d.cvel, d.xpos, d.subtree_com, self._roots),
            ),
        ):
            if name in arrays:
                self._launch(kernel, (n, m.nbody - 1), *sources, arrays[name])
        looked_at = (d.qpos, d.qvel, self._bad, d.overflow, sum(_FATAL), self._commands)
        seen = self._seen.device["seen"]
        self._launch(kernels.judge, n, *looked_at, arrays["env_flags"], seen)
        self._seen.down()
        port.deliver()

    def put_default(self, mask: Any) -> None:
        """The environments of `mask` (uint8) to the keyframe."""
        d = self._d
        self._reset(mask)
        into = (d.qpos, d.qvel, d.act, self._bad)
        self._launch(kernels.put_default, self._n, self._chosen, *self._start, *into)

    def put_rows(self, mask: Any, qpos: Any, qvel: Any) -> None:
        """The environments of `mask` to their rows of `qpos` and `qvel`."""
        d = self._d
        self._reset(mask)
        into = (d.qpos, d.qvel, self._bad)
        self._launch(kernels.put_rows, self._n, self._chosen, qpos, qvel, *into)

    def _reset(self, mask: Any) -> None:
        """MuJoCo-Warp's own reset first: warm starts, time, sleep, whatever a version has. It leaves zeros in
        `ctrl`, which every step replaces."""
        self._launch(kernels.choose, self._n, mask, self._chosen)
        mjw.reset_data(self._m, self._d, self._chosen)
        self._launch(kernels.forget_forces, self._force.shape, self._chosen, self._force)

    def raise_overflow(self) -> None:
        """RuntimeError when a command overflowed, of those that the device has done by now. Nothing is
        waited for: the words lie in page-locked memory."""
        bits, env, command = map(int, self._seen.host["seen"])
        if bits:
            raise RuntimeError(overflow_words(bits, _FATAL, env, command, self.room))
