"""Every message of the control plane and every opcode of the data plane. Nothing else travels.

Both sides check a message in its constructor, so an invalid one cannot exist. `codec.py` turns
messages into bytes and back; `states.py` says which may be sent when; `PROTOCOL.md` is the prose.
A change in this file, or in the bytes under `tests/golden/`, is a new PROTOCOL_VERSION.
"""

import enum
import math
from dataclasses import dataclass
from typing import Dict, Optional, Tuple, Union

from .device import DeviceReport, PlannedDevice, VisibleGpu
from .layout import Sizes

PROTOCOL_VERSION = 1
MAGIC = b"OUTB"  # then the version as a little-endian u32: the preamble, read before any decoding
NONCE_BYTES = 16
MAX_PIXELS = 2048  # each way, of a picture

Scalar = Union[bool, int, float, str]

# Whose fault an Error is: the model, the caller, the host's protocol, the environment that lacks a package,
# the planned device, or the worker itself.
FAULTS = ("scene", "usage", "protocol", "launch", "device", "worker")


TRANSPORTS = ("auto", "block", "cuda")
# A CUDA IPC handle, of memory or of an event: opaque bytes that the driver takes by value.
IPC_HANDLE_BYTES = 64


class Opcode(enum.IntEnum):
    """What a ring of the bell asks for; stands in the block's request line."""

    STEP = 1  # advance every environment by `decimation` time steps with `ctrl`
    STEP_RESET = 2  # put env_ids[:count] to the keyframe, then as STEP
    SET_STATE = 3  # set_qpos and set_qvel, rows [:count], into env_ids[:count]
    RESET = 4  # env_ids[:count] to the keyframe
    MAIL = 5  # a message waits on the control channel
    # The same four with everything in the CUDA arena; `count` is the slot to publish into. The
    # environments are those where `env_mask` is not zero, row i of set_qpos is for environment i.
    ARENA_STEP = 6
    ARENA_STEP_RESET = 7
    ARENA_SET_STATE = 8
    ARENA_RESET = 9


class Status(enum.IntEnum):
    """How a command ended; stands in the block's reply line."""

    DONE = 1
    FAILED = 2  # an Error message was sent before the bell
    FLAGGED = 3  # done, and some `env_flags` are not zero
    ENQUEUED = 4  # of an ARENA_ command: all its work is in the stream, `state_ready` last


@dataclass(frozen=True)
class Hello:
    """Worker, first of all, before it imports a simulator: who and where it is."""

    python: str  # "3.8.18"
    executable: str
    numpy: str
    msgpack: str
    pid: int
    simulator: str  # as asked for on the command line
    source: str  # the worker's own copy of this package
    mask: Optional[str]  # CUDA_VISIBLE_DEVICES as this process has it; None when unset
    order: Optional[str]  # CUDA_DEVICE_ORDER, likewise
    gpus: Tuple[VisibleGpu, ...]  # what libcuda shows this process
    driver: str  # "" when libcuda answered, else why not


@dataclass(frozen=True)
class Init:
    """Host: what to build. `device` is mandatory: there is no default to fall back to, anywhere."""

    nonce: bytes
    device: PlannedDevice
    rank: int
    scene: str  # path of an MJCF file
    num_envs: int
    dt: float  # s, one simulation step; 0 keeps the scene's own
    decimation: int  # simulation steps per STEP
    publish: Tuple[str, ...]
    transport: str  # what the caller asked for, one of TRANSPORTS
    render: bool
    seed: int
    terrain: str  # reserved: "flat"
    control: str  # reserved: "position"
    options: Dict[str, Scalar]  # the simulator's own Cfg, by field name

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce has {len(self.nonce)} bytes, not {NONCE_BYTES}")
        if self.num_envs < 1 or self.decimation < 1:
            raise ValueError("num_envs and decimation are at least 1")
        if not (math.isfinite(self.dt) and self.dt >= 0):
            raise ValueError(f"dt is {self.dt} s")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport {self.transport!r} is not one of {TRANSPORTS}")
        if self.terrain != "flat" or self.control != "position":
            raise ValueError("terrain and control are reserved: 'flat' and 'position'")


@dataclass(frozen=True)
class Progress:
    """Worker, any number while it builds. Extends the INIT deadline, never past the hard limit."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class ModelFacts:
    """The model as the worker's simulator sees it. Vectors are for one environment.

    Bodies are the robot's, without the world, in the order of `body_pos`; joints without the free
    joint; `ctrl_range`, `joint_range` are (low, high) pairs flattened, +-inf where unlimited;
    `env_origins` is little-endian float32 (num_envs, 3) in metres, or empty when all are zero.
    """

    sizes: Sizes
    timestep: float  # s
    floating_base: bool
    body_names: Tuple[str, ...]
    joint_names: Tuple[str, ...]
    actuator_names: Tuple[str, ...]
    default_qpos: Tuple[float, ...]  # nq, m and rad, root quaternion wxyz
    default_qvel: Tuple[float, ...]  # nv
    default_ctrl: Tuple[float, ...]  # nu, rad or m
    joint_range: Tuple[float, ...]  # 2 per joint name, rad or m
    ctrl_range: Tuple[float, ...]  # 2 nu
    kp: Tuple[float, ...]  # nu, N m/rad or N/m
    kv: Tuple[float, ...]  # nu, N m s/rad or N s/m
    force_range: Tuple[float, ...]  # 2 nu, N m or N
    env_origins: bytes
    not_reproduced: Tuple[str, ...]  # what of the model this simulator leaves out, by name

    def __post_init__(self) -> None:
        sizes = self.sizes
        lengths = (
            ("body_names", sizes.nbody),
            ("actuator_names", sizes.nu),
            ("default_qpos", sizes.nq),
            ("default_qvel", sizes.nv),
            ("default_ctrl", sizes.nu),
            ("joint_range", 2 * len(self.joint_names)),
            ("ctrl_range", 2 * sizes.nu),
            ("kp", sizes.nu),
            ("kv", sizes.nu),
            ("force_range", 2 * sizes.nu),
        )
        for name, length in lengths:
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, not {length}")
        if len(self.env_origins) not in (0, 12 * sizes.num_envs):
            raise ValueError(f"env_origins has {len(self.env_origins)} bytes")


@dataclass(frozen=True)
class InitReply:
    """Worker: built, simulated one step, back at the keyframe bit for bit."""

    device: DeviceReport
    model: ModelFacts
    capabilities: Tuple[str, ...]  # field names it can publish, plus "render", "set_property:NAME"
    engine: str
    engine_version: str
    notes: Tuple[str, ...]  # what a user should know, one sentence each
    transports: Tuple[str, ...]  # of "block", "cuda": what it can publish through


@dataclass(frozen=True)
class ArenaOffer:
    """Part of ATTACH: GPU memory of the host's. A handle carries no device: the worker compares `uuid`
    with its only GPU before it opens it."""

    uuid: str
    nbytes: int
    memory: bytes

    def __post_init__(self) -> None:
        if len(self.memory) != IPC_HANDLE_BYTES:
            raise ValueError(f"memory has {len(self.memory)} bytes, no IPC handle")
        if self.nbytes < 1:
            raise ValueError(f"an arena of {self.nbytes} bytes")


@dataclass(frozen=True)
class Attach:
    """Host, with the block as a file descriptor: the worker recomputes the layout and compares."""

    nonce: bytes
    sizes: Sizes
    publish: Tuple[str, ...]
    banks: int
    total_bytes: int
    fingerprint: bytes
    go_name: str  # semaphore the host posts
    done_name: str  # semaphore the worker posts
    arena: Optional[ArenaOffer]  # None: the block alone


@dataclass(frozen=True)
class Ready:
    """Worker: mapped, checked, the keyframe is published in bank 0."""

    nonce: bytes
    fingerprint: bytes
    arena: str  # why an offered arena was not taken; "" when it was, or none was offered


@dataclass(frozen=True)
class Where:
    """Host, announced by MAIL: measure the device again."""


@dataclass(frozen=True)
class WhereReply:
    device: DeviceReport


@dataclass(frozen=True)
class SetProperty:
    """Host, announced by MAIL: set a named physical property of some environments.

    `values` is little-endian float32, (len(env_ids), width)."""

    name: str
    env_ids: Tuple[int, ...]
    values: bytes

    def __post_init__(self) -> None:
        rows = len(self.env_ids)
        if len(self.values) % (4 * rows) if rows else self.values:
            raise ValueError(f"values has {len(self.values)} bytes for {rows} environments")


@dataclass(frozen=True)
class SetPropertyReply:
    name: str


@dataclass(frozen=True)
class Render:
    """Host, announced by MAIL: one RGB picture of one environment."""

    env_id: int
    width: int
    height: int
    camera: Dict[str, float]

    def __post_init__(self) -> None:
        if not (0 < self.width <= MAX_PIXELS and 0 < self.height <= MAX_PIXELS):
            raise ValueError(f"a picture is 1 to {MAX_PIXELS} pixels wide and high")


@dataclass(frozen=True)
class RenderReply:
    """uint8 (height, width, 3)"""

    width: int
    height: int
    rgb: bytes

    def __post_init__(self) -> None:
        if len(self.rgb) != 3 * self.width * self.height:
            raise ValueError(f"{len(self.rgb)} bytes are no {self.width} x {self.height} picture")


@dataclass(frozen=True)
class Close:
    """Host: end. May come in any phase from HELLO on; after READY it is announced by MAIL."""


@dataclass(frozen=True)
class Bye:
    """Worker: the last frame of a life that ended well."""


@dataclass(frozen=True)
class Error:
    """Worker: an exception. `fault` is one of FAULTS."""

    phase: str
    fault: str
    type: str
    text: str
    traceback: str

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError("fault {!r} is not one of {}".format(self.fault, ", ".join(FAULTS)))


Message = Union[
    Hello,
    Init,
    Progress,
    InitReply,
    Attach,
    Ready,
    Where,
    WhereReply,
    SetProperty,
    SetPropertyReply,
    Render,
    RenderReply,
    Close,
    Bye,
    Error,
]
MESSAGES = {cls.__name__: cls for cls in Message.__args__}  # type: ignore[attr-defined]
