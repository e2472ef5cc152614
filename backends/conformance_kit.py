"""What a conformance check is made of: the table of checks, the target, and the bench they run on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..ipc.device import CPU
from ..ipc.errors import OutboardError, UsageError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Init
from . import arguments, launch, registry
from .arguments import Cfg
from .backend import Backend
from .custom import CustomBackend
from .device_plan import DevicePlan, resolve_device
from .launch import Order
from .state import Model, State

HELD, FAILED, SKIPPED = "held", "failed", "skipped"
PROTOCOL, SIMULATOR = "protocol", "simulator"
NUM_ENVS = 4  # two that a check touches and two that it must not
SEED = 7

# GPU solvers add in whatever order their threads end: over the few steps of a check this much difference
# (m, rad, m/s, rad/s) is rounding. On the CPU equal means equal in every bit.
GPU_ATOL = 1e-3
# Where even a CPU may add in another order (other origins, another batch): single precision, a few steps.
ROUNDING_ATOL = 1e-5

Fields = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Outcome:
    """What came of one check. `why` says what went wrong, or why the check does not apply."""

    name: str
    verdict: str  # HELD, FAILED or SKIPPED
    why: str = ""
    rule: str = ""
    group: str = ""


class Broken(Exception):
    """The rule does not hold."""


class NotApplicable(Exception):
    """The rule says nothing about this model, simulator or device."""


def broken(why: str) -> NoReturn:
    raise Broken(why)


def not_applicable(why: str) -> NoReturn:
    raise NotApplicable(why)


@dataclass(frozen=True)
class Check:
    name: str
    group: str
    rule: str  # the first paragraph of the function's docstring
    run: Callable[[Bench], None]


CHECKS: dict[str, Check] = {}


def check(group: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Enter a function into the table: its name is the check's, its docstring the rule."""

    def enter(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        name = function.__name__
        rule = " ".join((function.__doc__ or "").split("\n\n")[0].split())
        if name in CHECKS or not rule:
            raise ValueError(f"check {name} is there already, or states no rule")
        CHECKS[name] = Check(name, group, rule, function)
        return function

    return enter


@dataclass(frozen=True)
class Target:
    """Whom to test. `mass_kg`: of the robot, for scenes of which MuJoCo cannot tell it."""

    kind: type[Backend]
    plan: DevicePlan
    scene: str = ""
    simulator: str = ""  # FILE:CLASS when `kind` is CustomBackend
    worker_python: str | None = None
    cfg: Cfg | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mass_kg: float | None = None

    def _shared(self) -> dict[str, Any]:
        return {
            "device": self.plan,
            "scene": self.scene,
            "num_envs": NUM_ENVS,
            "seed": SEED,
            "cfg": self.cfg,
            "worker_python": self.worker_python,
            "env": self.env,
        }

    def open(self, **changes: Any) -> Backend:
        """A backend through the public API."""
        given = {**self._shared(), **changes}
        if self.simulator:
            given["simulator"] = self.simulator
        return self.kind(**given)

    def order(self) -> Order:
        """The same as `open` asks for, for a worker that a check talks to by itself."""
        name = self.simulator or self.kind.simulator
        if self.simulator:
            path, _, class_name = name.rpartition(":")
            name = f"{os.path.abspath(path)}:{class_name}"
        given = self._shared()
        given["cfg"] = arguments.check_cfg(self.cfg, self.kind.cfg_type)
        order = arguments.order(
            simulator=name, traits=self.kind.traits, dt=None, decimation=1,
            publish=("qpos", "qvel"), banks=1, transport="auto", rank=None, render=False, share=True,
            **given,
        )  # fmt: skip
        return self.kind.prepare(order)


def make_target(
    *,
    backend: str = "",
    simulator: str = "",
    device: object = CPU,
    scene: str = "",
    worker_python: str | None = None,
    **more: Any,
) -> Target:
    """A Target from what a command line says: a backend's name, or FILE:CLASS. UsageError."""
    if bool(backend) == bool(simulator):
        raise UsageError("name either a backend or a simulator as FILE:CLASS")
    return Target(
        kind=registry.find(backend) if backend else CustomBackend,
        plan=resolve_device(device),
        scene=scene,
        simulator=simulator,
        worker_python=worker_python,
        **more,
    )


class Bench:
    """The target, opened once and shared by all checks that need nothing special.

    A check that ends in an error of the worker leaves no worker for the next one: it gets a new one.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.exact = target.plan.device.kind == CPU
        self._shared: Backend | None = None
        self._fields: tuple[str, ...] | None = None

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field that the simulator offers."""
        if self._fields is None:
            with self.target.open() as sim:
                self._fields = tuple(name for name in PUBLISHABLE if name in sim.capabilities)
        return self._fields

    def open(self, **changes: Any) -> Backend:
        """A backend of its own for a check; the check closes it."""
        return self.target.open(**{"publish": self.fields, **changes})

    @property
    def sim(self) -> Backend:
        """The shared backend, all environments at the keyframe with the keyframe's targets."""
        if self._shared is None:
            self._shared = self.open()
        self._shared.ctrl_view[:] = self._shared.model.default_ctrl
        self._shared.reset()
        return self._shared

    def forget(self) -> None:
        """After an error: the next check starts with a new worker."""
        with contextlib.suppress(OutboardError):
            self.close()
        self._shared = None

    # -- what checks are written with ------------------------------------------------------------

    def require(self, *names: str) -> None:
        missing = [name for name in names if name not in self.fields]
        if missing:
            not_applicable(f"the simulator does not publish {', '.join(missing)}")

    def require_floating(self, sim: Backend) -> None:
        if not sim.model.floating_base:
            not_applicable("the model has a fixed base")

    def require_actuators(self, sim: Backend) -> None:
        if not sim.model.nu:
            not_applicable("the model has no actuators")

    def look(self, sim: Backend) -> Fields:
        """The state as published anew: a reset of no environment changes nothing."""
        return copy(sim.reset([]))

    def difference(self, a: Fields, b: Fields, rows: Any = slice(None), loose: bool = False) -> str:
        """Where two states differ, in words; "" when they agree (see GPU_ATOL). `loose`: they may differ
        by rounding, whatever the device."""
        tolerance = ROUNDING_ATOL if self.exact else GPU_ATOL
        for name in a:
            x, y = a[name][rows], b[name][rows]
            if self.exact and not loose:
                equal = x.tobytes() == y.tobytes() or np.array_equal(x, y, equal_nan=True)
            else:
                # Of a contact force only the size is comparable.
                scale = 1.0 + (np.abs(y).max() if name == "contact_force" else 0.0)
                equal = np.allclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
            if not equal:
                return f"{name} differs {_by(x, y)}"
        return ""


def _by(x: NDArray[np.float32], y: NDArray[np.float32]) -> str:
    off = np.abs(x - y)
    return f"by up to {off.max():.3g}" if np.isfinite(off).all() else "and is not finite"


def copy(state: State) -> Fields:
    return {name: array.copy() for name, array in state.fields().items()}


def swing(model: Model, num_envs: int, t: int, per_env: bool = True) -> NDArray[np.float32]:
    """(num_envs, nu) targets of step `t`: a tenth of a radian around the keyframe's, inside the range."""
    phase = 0.9 * np.arange(model.nu) + (0.7 * np.arange(num_envs)[:, None] if per_env else 0.0)
    ctrl = model.default_ctrl + 0.1 * np.sin(0.35 * (t + 1) + phase) * np.ones((num_envs, 1))
    return np.clip(ctrl, model.ctrl_range[:, 0], model.ctrl_range[:, 1]).astype(np.float32)


def run(sim: Backend, steps: int, per_env: bool = True) -> list[Fields]:
    """Step with `swing`; a copy of every state."""
    model, n = sim.model, sim.num_envs
    return [copy(sim.step(swing(model, n, t, per_env))) for t in range(steps)]


def keyframe(model: Model) -> Fields:
    """qpos and qvel of the keyframe, as published."""
    return {
        "qpos": model.default_qpos.astype(np.float32),
        "qvel": model.default_qvel.astype(np.float32),
    }


def off_keyframe(state: State | Fields, model: Model, rows: Any = slice(None)) -> str:
    """How a state differs from the keyframe, bit for bit; "" when it does not."""
    fields = state if isinstance(state, dict) else state.fields()
    for name, want in keyframe(model).items():
        have = fields[name][rows]
        if not np.array_equal(have, np.broadcast_to(want, have.shape)):
            return f"{name} is off the keyframe {_by(have, want)}"
    return ""


def launch_command(target: Target) -> tuple[Any, Init]:
    """How a worker of the target is started, and the INIT it gets."""
    order = target.order()
    return launch.worker_command(order), dataclasses.replace(order.init, nonce=os.urandom(16))


@contextlib.contextmanager
def expect_error(kind: type[OutboardError], saying: str) -> Generator[None]:
    """Broken unless the body raises `kind` with all words of `saying` in its message."""
    try:
        yield
    except kind as error:
        if error.report is not None and error.report.log_path:
            with contextlib.suppress(OSError):
                os.unlink(error.report.log_path)  # it was provoked: nobody will look for it
        missing = [word for word in saying.split() if word not in error.message]
        if missing:
            broken(f"the {kind.__name__} does not say {', '.join(missing)}: {error.message}")
        return
    broken(f"nothing was refused; {kind.__name__} belongs")
