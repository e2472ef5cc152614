"""Many simulations of one MuJoCo model on a few threads, for a MuJoCo that has no `mujoco.batch.Batch`.

`SlicedBatch` has the part of `Batch`'s interface that `mujoco_worker` uses, and its results, bit for bit:
`qpos`, `qvel`, `ctrl` are rows that are loaded before a call and stored after it, other fields are copied
out after a call. It keeps one MjData per environment (0.6 MB each for a humanoid): as fast as moving states
in and out of a few, and no part of a state can be forgotten.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo makes its names at run time; its stubs do not list them.)

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional

import mujoco
import numpy as np

# mjtStage of the MuJoCo versions that have Batch, by value.
STAGE_NONE, STAGE_POS, STAGE_VEL = 0, 1, 2

_ROWS = ("qpos", "qvel", "ctrl")


class SlicedBatch:
    def __init__(self, model: Any, nsim: int, nthread: int) -> None:
        self.model, self.nsim = model, nsim
        self.nthread = max(1, min(nthread, nsim))
        self._datas = [mujoco.MjData(model) for _ in range(nsim)]
        self._fields: Dict[str, np.ndarray] = {}
        # Attributes of an MjData are made anew at each access; their views stay good for its life.
        self._views: Dict[str, List[np.ndarray]] = {}
        for name in _ROWS:
            self.bind(name)
        self._counters = [data.warning.number for data in self._datas]
        self.warning = np.zeros((nsim, len(self._counters[0]), 2), np.int32)  # [..., 1] counts
        # The caller's thread takes the last slice itself: one thread less to wake.
        self._pool = ThreadPoolExecutor(self.nthread - 1) if self.nthread > 1 else None

    def bind(self, name: str) -> np.ndarray:
        """(nsim, ...) float64: a live array of the MjData field `name`."""
        if name not in self._fields:
            self._views[name] = [getattr(data, name) for data in self._datas]
            self._fields[name] = np.array(self._views[name], np.float64)
        return self._fields[name]

    def step(self, nstep: int, stage: int) -> None:
        self._each(np.arange(self.nsim), lambda ids: self._advance(ids, nstep, stage))

    def forward(self, ids: Optional[np.ndarray], stage: int) -> None:
        chosen = np.arange(self.nsim) if ids is None else ids
        self._each(chosen, lambda some: self._advance(some, 0, stage))

    def reset(self, ids: np.ndarray, keyframe: int, stage: int) -> None:
        for i in ids:
            data = self._datas[i]
            if keyframe >= 0:
                mujoco.mj_resetDataKeyframe(self.model, data, keyframe)
            else:
                mujoco.mj_resetData(self.model, data)
            self.warning[i] = 0
            for name in _ROWS:
                self._fields[name][i] = self._views[name][i]
        if stage > STAGE_NONE:
            self.forward(ids, stage)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _each(self, ids: np.ndarray, work: Callable[[np.ndarray], None]) -> None:
        """`work` on slices of `ids`, on all threads. mj_step lets the interpreter lock go."""
        parts = np.array_split(ids, min(self.nthread, max(1, len(ids))))
        jobs = [self._pool.submit(work, part) for part in parts[:-1]] if self._pool else []
        if not jobs:
            parts = [ids]
        try:
            work(parts[-1])
        finally:
            for job in jobs:  # all of them: none may still write when this call has returned
                job.exception()
        for job in jobs:
            job.result()

    def _advance(self, ids: np.ndarray, nstep: int, stage: int) -> None:
        """Load the rows, `nstep` steps, the derived quantities up to `stage`, store.

        The lock is held for about 6 us of an environment's 200 us (humanoid, 4 steps)."""
        model, fields, views = self.model, self._fields, self._views
        rows = [(fields[name], views[name]) for name in _ROWS]
        outputs = [(fields[name], views[name]) for name in fields]
        forces = nstep > 0 and "cfrc_ext" in fields
        warnings = self.warning[:, :, 1]
        for i in ids:
            data, counters = self._datas[i], self._counters[i]
            for field, view in rows:
                view[i][:] = field[i]
            counters[:] = warnings[i]
            if nstep:
                mujoco.mj_step(model, data, nstep)
            if forces:  # of the last substep, whose contacts are still there
                mujoco.mj_rnePostConstraint(model, data)
            if stage >= STAGE_POS:
                mujoco.mj_kinematics(model, data)
            if stage >= STAGE_VEL:
                mujoco.mj_comPos(model, data)
                mujoco.mj_comVel(model, data)
            for field, view in outputs:
                field[i] = view[i]
            warnings[i] = counters
