"""What a backend hands to training code: the published state, the model, the timings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import InitReply

Floats = NDArray[np.float32]


class State:
    """The published fields of all environments; views of the shared block, overwritten by each command.

    Shapes, units and frames: `ipc/layout.py`. Fields that are not published are not there: asking for
    one says how to publish it.
    """

    __slots__ = PUBLISHABLE

    qpos: Floats
    qvel: Floats
    body_pos: Floats
    body_quat: Floats
    body_linvel: Floats
    body_angvel: Floats
    contact_force: Floats

    def __init__(self, fields: Mapping[str, NDArray[Any]]) -> None:
        for name in PUBLISHABLE:
            if name in fields:
                object.__setattr__(self, name, fields[name])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"the state is read-only; use set_state() to change {name!r} in the simulator"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError("the state is read-only")

    def __getattr__(self, name: str) -> Any:
        # Only called for slots that are empty and for names that do not exist.
        if name in PUBLISHABLE:
            raise AttributeError(f"{name!r} is not published; open with publish=(..., {name!r})")
        raise AttributeError(f"a state has no {name!r}; its fields are {', '.join(PUBLISHABLE)}")

    def fields(self) -> dict[str, Floats]:
        """The published fields by name."""
        return {name: getattr(self, name) for name in PUBLISHABLE if hasattr(self, name)}

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{array.shape}" for name, array in self.fields().items())
        return f"State({shapes})"


class Timings(NamedTuple):
    """Where the time of the commands since READY went.

    `wall_s` runs from each ring to the moment its answer was collected, so with `step_async` it holds what
    the caller did in between; `sim_s` is what the worker spent in its simulator.
    """

    commands: int
    wall_s: float
    sim_s: float

    @property
    def sim_us(self) -> float:
        """Mean time in the simulator of one command."""
        return self.sim_s / self.commands * 1e6 if self.commands else 0.0

    @property
    def overhead_us(self) -> float:
        """Mean time of one command that was not the simulator's: the protocol's own cost, as long as
        the caller waits right after it asks (`step`)."""
        return (self.wall_s - self.sim_s) / self.commands * 1e6 if self.commands else 0.0

    def since(self, earlier: Timings) -> Timings:
        """The part after an earlier reading."""
        return Timings(
            self.commands - earlier.commands,
            self.wall_s - earlier.wall_s,
            self.sim_s - earlier.sim_s,
        )


@dataclass(frozen=True, eq=False)
class Model:
    """The model as the simulator sees it; arrays are for one environment and read-only.

    Bodies are the robot's without the world; joints without the free joint; ranges are (n, 2), +-inf
    where unlimited; quaternions wxyz.
    """

    nq: int
    nv: int
    nu: int
    nbody: int
    timestep: float  # s
    floating_base: bool
    body_names: tuple[str, ...]
    joint_names: tuple[str, ...]
    actuator_names: tuple[str, ...]
    default_qpos: NDArray[np.float64]  # (nq,) m and rad
    default_qvel: NDArray[np.float64]  # (nv,)
    default_ctrl: NDArray[np.float64]  # (nu,) rad or m
    joint_range: NDArray[np.float64]  # (joints, 2) rad or m
    ctrl_range: NDArray[np.float64]  # (nu, 2)
    kp: NDArray[np.float64]  # (nu,) N m/rad or N/m
    kv: NDArray[np.float64]  # (nu,) N m s/rad or N s/m
    force_range: NDArray[np.float64]  # (nu, 2) N m or N
    env_origins: Floats  # (num_envs, 3) m
    not_reproduced: tuple[str, ...]

    @staticmethod
    def of(reply: InitReply) -> Model:
        facts = reply.model
        sizes = facts.sizes

        def vector(values: tuple[float, ...], *shape: int) -> NDArray[np.float64]:
            array = np.array(values, np.float64).reshape(shape or (-1,))
            array.flags.writeable = False
            return array

        origins = np.zeros((sizes.num_envs, 3), np.float32)
        if facts.env_origins:
            origins = np.frombuffer(facts.env_origins, "<f4").reshape(sizes.num_envs, 3)
        return Model(
            nq=sizes.nq,
            nv=sizes.nv,
            nu=sizes.nu,
            nbody=sizes.nbody,
            timestep=facts.timestep,
            floating_base=facts.floating_base,
            body_names=facts.body_names,
            joint_names=facts.joint_names,
            actuator_names=facts.actuator_names,
            default_qpos=vector(facts.default_qpos),
            default_qvel=vector(facts.default_qvel),
            default_ctrl=vector(facts.default_ctrl),
            joint_range=vector(facts.joint_range, -1, 2),
            ctrl_range=vector(facts.ctrl_range, -1, 2),
            kp=vector(facts.kp),
            kv=vector(facts.kv),
            force_range=vector(facts.force_range, -1, 2),
            env_origins=origins,
            not_reproduced=facts.not_reproduced,
        )
