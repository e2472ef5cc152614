"""Simulators that break one rule each, and the two good ones they are made from: the conformance kit
must see every one. Loaded by workers as FILE:CLASS; Python 3.8.

`FakeSimulator` has a fixed base; `Glider` floats and publishes every field. A class's docstring says what
is wrong with it.
"""

# These classes reach into private parts of the worker around them, on purpose.
# pyright: reportPrivateUsage=false

import ctypes
import os
import subprocess
import time
from typing import Any

import numpy as np

from outboard.ipc import doorbell
from outboard.ipc.device import DeviceReport, cpu_report
from outboard.ipc.layout import ENV_NONFINITE, PUBLISHABLE, Sizes
from outboard.ipc.messages import Attach, Close, Init, ModelFacts, Progress, Render
from outboard.workers import fake_worker, serve
from outboard.workers.fake_worker import FakeSimulator
from outboard.workers.simulator import Simulator

Array = Any  # numpy.ndarray; numpy's types say less on Python 3.8 than they ask for
MASS_KG = 3.0
_G = 9.81
_RATE = 4.0  # 1/s


def multiply(a: Array, b: Array) -> Array:
    w, x, y, z = a.T
    p, q, r, s = b.T
    return np.stack(
        [
            w * p - x * q - y * r - z * s,
            w * q + x * p + y * s - z * r,
            w * r - x * s + y * p + z * q,
            w * s + x * r - y * q + z * p,
        ],
        axis=-1,
    )


def rotate(quats: Array, vectors: Array) -> Array:
    padded = np.concatenate([np.zeros_like(vectors[:, :1]), vectors], axis=1)
    return multiply(multiply(quats, padded), quats * (1, -1, -1, -1))[:, 1:]


def turn(vectors: Array) -> Array:
    """Quaternions of rotation vectors."""
    angle = np.linalg.norm(vectors, axis=1, keepdims=True)
    half = np.sin(angle / 2) / np.where(angle > 0, angle, 1.0)
    return np.concatenate([np.cos(angle / 2), half * vectors], axis=1)


class Glider(Simulator):
    """A correct one: a free root that stands on a floor, and two bodies on slides beside it."""

    engine = "glider"
    engine_version = "1"
    arms = np.array([[0.2, 0.1, 0.0], [-0.3, 0.05, 0.1]])

    def build(self, init: Init, progress: Any) -> ModelFacts:
        progress("building", 1, 1)
        n = self.n = init.num_envs
        self.dt, self.decimation = init.dt or 0.005, init.decimation
        self.default = np.array([0, 0, 0.5, 1, 0, 0, 0, 0.1, -0.1], np.float32).astype(float)
        self.qpos, self.qvel = np.zeros((n, 9)), np.zeros((n, 8))
        self.touching = np.zeros(n, bool)
        self.reset(np.arange(n))
        joints, unlimited = ("left", "right"), (-float("inf"), float("inf"))
        return ModelFacts(
            sizes=Sizes(n, 9, 8, 2, 3),
            timestep=self.dt,
            floating_base=True,
            body_names=("root", *joints),
            joint_names=joints,
            actuator_names=joints,
            default_qpos=tuple(map(float, self.default)),
            default_qvel=(0.0,) * 8,
            default_ctrl=tuple(map(float, self.default[7:])),
            joint_range=unlimited * 2,
            ctrl_range=(-2.0, 2.0) * 2,
            kp=(1.0,) * 2,
            kv=(0.0,) * 2,
            force_range=unlimited * 2,
            env_origins=self.origins(),
            not_reproduced=("inertia",),
        )

    def origins(self) -> bytes:
        return b""

    @property
    def capabilities(self) -> tuple[str, ...]:
        return PUBLISHABLE

    def report_device(self) -> DeviceReport:
        return cpu_report("qpos")

    def bind(self, banks: Any) -> None:
        self.ctrl, self.banks = banks[0]["ctrl"], banks

    def targets(self) -> Array:
        return self.ctrl.astype(float)

    def step(self, bank: int) -> int:
        for _ in range(self.decimation):
            self.advance(self.targets())
        return self.publish(bank)

    def advance(self, target: Array) -> None:
        qpos, qvel, dt = self.qpos, self.qvel, self.dt
        qvel[:, 2] -= dt * _G
        qpos[:, :3] += dt * self.root_velocity()
        self.touching = qpos[:, 2] <= 0.5
        qpos[self.touching, 2] = 0.5
        qvel[self.touching, :6] = 0
        qpos[:, 3:7] = self.turned(qpos[:, 3:7], dt * qvel[:, 3:6])
        qvel[:, 6:] = self.rates() * (target - qpos[:, 7:])
        qpos[:, 7:] += dt * qvel[:, 6:]

    def rates(self) -> Any:
        return _RATE

    def root_velocity(self) -> Array:
        return self.qvel[:, :3]

    def turned(self, quats: Array, vectors: Array) -> Array:
        return multiply(quats, turn(vectors))

    def fields(self) -> dict[str, Array]:
        """Every published field, (n, ...)."""
        qpos, qvel, quats = self.qpos, self.qvel, self.qpos[:, 3:7]
        pos, vel = [qpos[:, :3]], [self.root_velocity()]
        spin = self.spin()
        for i, arm in enumerate(self.arms):
            local = np.tile(arm, (self.n, 1))
            local[:, 2] += qpos[:, 7 + i]
            slide = np.zeros((self.n, 3))
            slide[:, 2] = qvel[:, 6 + i]
            world = rotate(quats, local)
            pos.append(qpos[:, :3] + world)
            vel.append(vel[0] + np.cross(spin, world) + rotate(quats, slide))
        force = np.zeros((self.n, 3, 3))
        force[self.touching, 0, 2] = MASS_KG * _G
        return {
            "qpos": qpos,
            "qvel": qvel,
            "body_pos": np.stack(pos, axis=1),
            "body_quat": np.repeat(quats[:, None], 3, axis=1),
            "body_linvel": np.stack(vel, axis=1),
            "body_angvel": np.repeat(spin[:, None], 3, axis=1),
            "contact_force": force,
        }

    def spin(self) -> Array:
        """World axes."""
        return rotate(self.qpos[:, 3:7], self.qvel[:, 3:6])

    def publish(self, bank: int) -> int:
        into = self.banks[bank]
        with np.errstate(all="ignore"):
            for name, field in self.fields().items():
                if name in into:
                    into[name][:] = field
        bad = ~np.isfinite(self.qpos).all(axis=1)
        into["env_flags"][:] = bad * ENV_NONFINITE
        return int(bad.sum())

    def set_state(self, env_ids: Array, qpos: Array, qvel: Array) -> None:
        self.qpos[env_ids], self.qvel[env_ids] = qpos, qvel
        self.touching[env_ids] = False

    def reset(self, env_ids: Array) -> None:
        self.qpos[env_ids], self.qvel[env_ids] = self.default, 0
        self.touching[env_ids] = False


# -- environments that know of each other ---------------------------------------------------------------


class SharedTargets(Glider):
    """Environment 2 listens a little to the targets of environment 1."""

    def targets(self) -> Array:
        ctrl = super().targets()
        if self.n > 2:
            ctrl[2] += 0.1 * np.clip(np.nan_to_num(ctrl[1] - ctrl[2]), -1, 1)
        return ctrl


class SharedStates(Glider):
    """Environment 2 feels how fast environment 1 flies."""

    def targets(self) -> Array:
        ctrl = super().targets()
        if self.n > 2:
            ctrl[2] += 0.1 * np.clip(np.nan_to_num(self.qvel[1, 0]), -1, 1)
        return ctrl


class UnequalEnvironments(Glider):
    """Environment 2 is faster."""

    def rates(self) -> Any:
        return _RATE * np.where(np.arange(self.n) == 2, 1.01, 1.0)[:, None]


class Deaf(Glider):
    """Targets have no effect."""

    def targets(self) -> Array:
        return np.tile(self.default[7:] + 0.01 * np.sin(self.qpos[:, 7:8]), (1, 1))


class Alone(Glider):
    """A single environment behaves in another way than one of many."""

    def rates(self) -> Any:
        return _RATE * (1.5 if self.n == 1 else 1.0)


class Random(Glider):
    """Noise from nowhere."""

    def targets(self) -> Array:
        return super().targets() + 0.1 * int.from_bytes(os.urandom(2), "little") / 65536


# -- reset and set_state ----------------------------------------------------------------------------


class OffKeyframe(Glider):
    """The state of the probe step is left over."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        self.qpos[:, 7] += 1e-4
        return facts


class ResetTouchesOthers(Glider):
    """A reset of some resets environment 0 as well."""

    def reset(self, env_ids: Array) -> None:
        super().reset(env_ids if not len(env_ids) else np.append(env_ids, 0))


class ResetKeepsVelocity(Glider):
    def reset(self, env_ids: Array) -> None:
        kept = self.qvel[env_ids].copy()
        super().reset(env_ids)
        self.qvel[env_ids] = kept


class ResetOfNobodyIsAll(Glider):
    """An empty list means everybody."""

    def reset(self, env_ids: Array) -> None:
        super().reset(env_ids if len(env_ids) else np.arange(self.n))


class LateReset(Glider):
    """A reset takes effect when the next state is published, as in an engine that applies it after
    its step."""

    pending = np.zeros(0, int)

    def reset(self, env_ids: Array) -> None:
        self.pending = np.array(env_ids)
        if not hasattr(self, "banks"):
            super().reset(self.pending)

    def publish(self, bank: int) -> int:
        super().reset(self.pending)
        self.pending = self.pending[:0]
        return super().publish(bank)


class StalePoses(Glider):
    """After set_state the poses are those of the last step."""

    stale: dict[str, Array] | None = None

    def set_state(self, env_ids: Array, qpos: Array, qvel: Array) -> None:
        fields = self.fields()
        self.stale = {name: fields[name].copy() for name in ("body_pos", "body_quat")}
        super().set_state(env_ids, qpos, qvel)

    def fields(self) -> dict[str, Array]:
        stale, self.stale = self.stale or {}, None
        return {**super().fields(), **stale}


class StaleState(StalePoses):
    """After set_state, qpos is that of the last step."""

    def set_state(self, env_ids: Array, qpos: Array, qvel: Array) -> None:
        self.stale = {"qpos": self.qpos.copy()}
        Glider.set_state(self, env_ids, qpos, qvel)


class RowsSorted(Glider):
    """Sorts the ids of set_state, and not the rows with them."""

    def set_state(self, env_ids: Array, qpos: Array, qvel: Array) -> None:
        super().set_state(np.sort(env_ids), qpos, qvel)


class SetStateTouchesOthers(Glider):
    """set_state of some stops the joints of environment 0."""

    def set_state(self, env_ids: Array, qpos: Array, qvel: Array) -> None:
        if 0 not in env_ids:
            self.qvel[0, 6:] = 0
        super().set_state(env_ids, qpos, qvel)


# -- what is published ------------------------------------------------------------------------------


class Unwritten(FakeSimulator):
    """Offers a field that it never writes."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        return (*super().capabilities, "body_linvel")


class NeedsCompany(Glider):
    """Forces are only there when poses are asked for, too."""

    def publish(self, bank: int) -> int:
        flagged = super().publish(bank)
        if "body_pos" not in self.banks[bank] and "contact_force" in self.banks[bank]:
            self.banks[bank]["contact_force"][:] = 0
        return flagged


class ChokesOnFields(FakeSimulator):
    """Being asked for a field it does not have is a crash."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        if not set(init.publish) <= set(self.capabilities):
            raise KeyError(init.publish[-1])
        return super().build(init, progress)


class OneBank(Glider):
    """Publishes into bank 0 whatever it is told."""

    def publish(self, bank: int) -> int:
        return super().publish(0)


class SilentNaN(Glider):
    """Never flags anything."""

    def publish(self, bank: int) -> int:
        super().publish(bank)
        self.banks[bank]["env_flags"][:] = 0
        return 0


class FlagsNeighbour(Glider):
    """Flags the next environment, too."""

    def publish(self, bank: int) -> int:
        flagged = super().publish(bank)
        flags = self.banks[bank]["env_flags"]
        flags |= np.roll(flags, 1)
        return flagged


class PicturesMoveTime(FakeSimulator):
    """Simulates a step to take a picture."""

    def render(self, request: Render) -> Array:
        self.qpos += 1e-3
        return super().render(request)


class SmallSeeds(Glider):
    """Takes seeds of 32 bits."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        np.random.RandomState(init.seed)
        return super().build(init, progress)


class WithOrigins(Glider):
    """Body positions hold the environment's origin."""

    def origins(self) -> bytes:
        self.places = np.arange(3.0 * self.n).reshape(self.n, 3)
        return self.places.astype("<f4").tobytes()

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["body_pos"] = fields["body_pos"] + self.places[:, None]
        return fields


class Wanders(FakeSimulator):
    """Its state lies somewhere else after a step."""

    def report_device(self) -> DeviceReport:
        return cpu_report("qpos" if not self.steps else "a copy of qpos")


# -- what it means ----------------------------------------------------------------------------------


class Xyzw(Glider):
    """Publishes body quaternions in the order xyzw."""

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["body_quat"] = np.roll(fields["body_quat"], -1, axis=-1)
        return fields


class ReadsXyzw(Glider):
    """Takes the root quaternion of qpos for xyzw when it computes where bodies are."""

    def fields(self) -> dict[str, Array]:
        fields, kept = super().fields(), self.qpos
        self.qpos = kept.copy()
        self.qpos[:, 3:7] = np.roll(kept[:, 3:7], 1, axis=1)
        fields["body_pos"] = super().fields()["body_pos"]
        self.qpos = kept
        return fields


class NotUnit(Glider):
    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["body_quat"] = 1.001 * fields["body_quat"]
        return fields


class BodyVelocity(Glider):
    """The root's linear velocity is along its own axes."""

    def root_velocity(self) -> Array:
        return rotate(self.qpos[:, 3:7], self.qvel[:, :3])


class WorldSpin(Glider):
    """The root's angular velocity is along world axes."""

    def turned(self, quats: Array, vectors: Array) -> Array:
        return multiply(turn(vectors), quats)

    def spin(self) -> Array:
        return self.qvel[:, 3:6]


class OtherPoint(Glider):
    """body_linvel is that of the root, not of each body's own origin."""

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["body_linvel"] = np.repeat(fields["body_linvel"][:, :1], 3, axis=1)
        return fields


class BodyAngvel(Glider):
    """body_angvel is along each body's own axes."""

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["body_angvel"] = np.repeat(self.qvel[:, None, 3:6], 3, axis=1)
        return fields


class LyingTimeStep(FakeSimulator):
    """Advances by twice the time step that it reports."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        self.dt *= 2
        return facts


class DeafToTimeStep(Glider):
    """Reports the time step that was asked for, and advances by its own."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        self.dt = 0.005
        return facts


class LyingDecimation(Glider):
    """Steps once, whatever the decimation."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        self.decimation = 1
        return facts


class Backwards(FakeSimulator):
    """Goes away from its targets."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        fake_worker._RATE = -fake_worker._RATE  # type: ignore[misc]
        return super().build(init, progress)


class HalfWeight(Glider):
    """Contact forces of one foot of two."""

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["contact_force"] = fields["contact_force"] / 2
        return fields


class FloatingForces(Glider):
    """Contact forces in the air."""

    def fields(self) -> dict[str, Array]:
        fields = super().fields()
        fields["contact_force"][:, 0, 2] = MASS_KG * _G
        return fields


# -- the protocol: these reach into the worker around them ----------------------------------------------


class OutOfTotal(FakeSimulator):
    """Progress of 5 out of 3."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        progress("counting", 5, 3)
        return super().build(init, progress)


class ChattyAfterwards(FakeSimulator):
    """Goes on about its progress when it has built."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        sender = progress.__self__

        def late(message: Any, _send: Any = sender.send) -> None:
            _send(message)
            if type(message).__name__ == "InitReply":
                sender.channel.send(Progress("afterwards", 1, 1), serve.Deadline(1.0))

        sender.send = late
        return super().build(init, progress)


class TwinJoints(Glider):
    """Two joints of one name."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        object.__setattr__(facts, "joint_names", ("left", "left"))
        return facts


class LooseAttach(FakeSimulator):
    """Waits for the message it wants and overhears all others."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        worker = progress.__self__

        def expect(kind: Any) -> Any:
            while True:
                message = worker.channel.receive(serve.Deadline(float("inf")))
                if isinstance(message, (kind, Close)):
                    worker.talk.received(type(message).__name__)
                    if isinstance(message, Close):
                        raise serve._Closed
                    return message

        worker.expect = expect
        return super().build(init, progress)


class AnyFingerprint(FakeSimulator):
    """Believes the host's fingerprint."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        worker = progress.__self__
        expect = worker.expect

        def believing(kind: Any) -> Any:
            message = expect(kind)
            for name, value in self.believed(init, message).items():
                object.__setattr__(message, name, value)
            return message

        worker.expect = believing
        return super().build(init, progress)

    def believed(self, init: Init, attach: Attach) -> dict[str, bytes]:
        layout = serve.Layout(attach.sizes, attach.publish, attach.banks)
        return {"fingerprint": layout.fingerprint}


class AnyNonce(AnyFingerprint):
    """Believes the host's nonce."""

    def believed(self, init: Init, attach: Attach) -> dict[str, bytes]:
        return {"nonce": init.nonce}


class NoTime(FakeSimulator):
    """Its clock stands still."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, progress)
        time.perf_counter_ns = lambda: 0
        return facts


class HasChild(FakeSimulator):
    """Starts a helper in its own process group."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        subprocess.Popen(["sleep", "30"])
        return super().build(init, progress)


class EveryRingCounts(FakeSimulator):
    """Takes any ring for a command."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        def make_wait(self: doorbell.Doorbell) -> Any:
            def wait(expected: int, history: doorbell.History, timeout_s: float) -> None:
                self._listen.acquire()

            return wait

        doorbell.Doorbell._make_wait = make_wait
        return super().build(init, progress)


class AnyOpcode(FakeSimulator):
    """Answers DONE to what it does not know."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        worker = progress.__self__
        commands = worker.other_commands

        def answer(bank: int) -> int:
            return 0

        def lenient(block: Any) -> Any:
            return [answer, *commands(block)[1:]]

        worker.other_commands = lenient
        return super().build(init, progress)


class TakesOutput(FakeSimulator):
    """Puts its standard output somewhere else."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        return super().build(init, progress)


class Orphan(FakeSimulator):
    """Disarms the lifelines: it ends only by itself."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        os._exit = lambda code: None
        return super().build(init, progress)


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody hears of."""


class DeepBuild(Orphan):
    """And it cannot be reached while it builds."""

    def build(self, init: Init, progress: Any) -> ModelFacts:
        facts = super().build(init, _silent)
        progress("deep", 0, 1)  # from here on it says nothing that could fail
        time.sleep(10)  # twice what a clean end may take
        return facts
