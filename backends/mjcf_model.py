"""What an inspection of a model yields: plain data in SI units, radians, quaternions wxyz."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

Range = tuple[float, float]  # (low, high); (-inf, inf) when unlimited
Vector = tuple[float, ...]


@dataclass(frozen=True)
class Body:
    """One rigid body of the robot, and its pose in its parent's frame."""

    name: str
    parent: int  # index into Model.bodies, -1 for the root
    pos: Vector  # (3,) m
    quat: Vector  # (4,) wxyz
    mass: float  # kg; what the flat export says, so never 0
    com: Vector  # (3,) m, centre of mass in the body's frame
    inertia_quat: Vector  # (4,) wxyz, principal axes in the body's frame
    inertia: Vector  # (3,) kg m^2, about the principal axes


@dataclass(frozen=True)
class Joint:
    """One hinge or slide joint."""

    name: str
    type: str  # "hinge" or "slide"
    body: int  # index into Model.bodies
    axis: Vector  # (3,) in the body's frame
    pos: Vector  # (3,) m, in the body's frame
    range: Range  # rad or m
    armature: float  # kg m^2 or kg
    frictionloss: float  # N m or N
    damping: float  # N m s/rad or N s/m, as written; not 0 only when it was folded into a kv
    effort: float  # N m or N, `actuatorfrcrange`; inf when unlimited


@dataclass(frozen=True)
class Actuator:
    """force = clip(kp (clip(ctrl, ctrl_range) - q) - kv dq/dt, force_range)"""

    name: str  # its joint's name when it has none
    joint: int  # index into Model.joints
    kp: float  # N m/rad or N/m
    kv: float  # N m s/rad or N s/m
    force_range: Range  # N m or N; symmetric
    ctrl_range: Range  # rad or m


@dataclass(frozen=True)
class Floor:
    """The horizontal plane of the world, endless in every simulator."""

    height: float  # m
    friction: Vector  # (3,) sliding, torsional (m), rolling (m)


@dataclass(frozen=True)
class Flat:
    """The flat MJCF of a robot and its mesh files: (file name, content) each."""

    xml: str
    meshes: tuple[tuple[str, bytes], ...]


@dataclass(frozen=True)
class Model:
    """A model that keeps the contract. Order is MuJoCo's: depth first, as compiled."""

    path: Path
    timestep: float  # s
    gravity: Vector  # (3,) m/s^2
    floating_base: bool
    bodies: tuple[Body, ...]  # without the world
    joints: tuple[Joint, ...]  # without the free joint
    actuators: tuple[Actuator, ...]
    floor: Floor | None
    keyframe: str | None  # of the default pose; None: the model's reference pose
    default_qpos: Vector  # (nq,)
    default_qvel: Vector  # (nv,)
    default_ctrl: Vector  # (nu,) the keyframe's, else its joint positions; within ctrl_range
    sensors: tuple[str, ...]
    excludes: int  # body pairs excluded from contact
    colliding_pairs: int  # geom pairs of the robot that MuJoCo lets collide
    not_reproduced: tuple[str, ...]  # what of the model the target simulators leave out
    notes: tuple[str, ...]  # what is reproduced otherwise than written
    flat: Flat = field(repr=False)

    @property
    def root_pos(self) -> Vector:
        """(3,) m. Importers put the root at the origin: a fixed base must be placed here."""
        return self.bodies[0].pos

    @property
    def root_quat(self) -> Vector:
        """(4,) wxyz."""
        return self.bodies[0].quat

    @property
    def body_names(self) -> tuple[str, ...]:
        return tuple(body.name for body in self.bodies)

    @property
    def joint_names(self) -> tuple[str, ...]:
        return tuple(joint.name for joint in self.joints)

    @property
    def actuator_names(self) -> tuple[str, ...]:
        return tuple(actuator.name for actuator in self.actuators)

    @property
    def mass(self) -> float:
        """kg, of the whole robot."""
        return sum(body.mass for body in self.bodies)
