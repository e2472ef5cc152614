"""Names, shapes, dtypes and units of everything in the shared block, and where each of them lies.

MuJoCo conventions throughout: metres, radians, seconds, newtons; quaternions wxyz; positions relative
to the environment's origin. The host computes a Layout; the worker recomputes it and compares the
fingerprint. A worker never sizes the host's memory.
"""

import hashlib
from dataclasses import dataclass
from typing import Dict, Iterable, NamedTuple, Tuple

from .errors import UsageError

HOST, WORKER = "host", "worker"
ALIGN = 64  # one cache line: no field shares a line with another, and SIMD copies start aligned
HEADER_BYTES = 4096  # one page; `shm.py` says what is in it


class FieldSpec(NamedTuple):
    dims: Tuple[str, ...]  # names of Sizes attributes, or digits
    dtype: str  # numpy type string, little-endian where it matters
    unit: str
    written_by: str
    meaning: str


# fmt: off
FIELDS: Dict[str, FieldSpec] = {
    # name                    shape                        dtype  unit        writer  meaning
    "ctrl":          FieldSpec(("num_envs", "nu"),         "<f4", "rad or m", HOST,   "joint position targets"),  # noqa: E501
    "env_ids":       FieldSpec(("num_envs",),              "<i4", "",         HOST,   "environments of SET_STATE and RESET, the first `count` entries"),  # noqa: E501
    "set_qpos":      FieldSpec(("num_envs", "nq"),         "<f4", "m, rad",   HOST,   "SET_STATE: new qpos, row i for env_ids[i]"),  # noqa: E501
    "set_qvel":      FieldSpec(("num_envs", "nv"),         "<f4", "m/s, rad/s", HOST, "SET_STATE: new qvel, row i for env_ids[i]"),  # noqa: E501
    "qpos":          FieldSpec(("num_envs", "nq"),         "<f4", "m, rad",   WORKER, "root position (world, minus origin), root quaternion wxyz, joints"),  # noqa: E501
    "qvel":          FieldSpec(("num_envs", "nv"),         "<f4", "m/s, rad/s", WORKER, "root linear velocity (world), root angular velocity (body frame), joints"),  # noqa: E501
    "body_pos":      FieldSpec(("num_envs", "nbody", "3"), "<f4", "m",        WORKER, "body frame origin, world minus environment origin"),  # noqa: E501
    "body_quat":     FieldSpec(("num_envs", "nbody", "4"), "<f4", "",         WORKER, "body orientation in the world, wxyz"),  # noqa: E501
    "body_linvel":   FieldSpec(("num_envs", "nbody", "3"), "<f4", "m/s",      WORKER, "world axes, at the body frame's origin"),  # noqa: E501
    "body_angvel":   FieldSpec(("num_envs", "nbody", "3"), "<f4", "rad/s",    WORKER, "world axes"),
    "contact_force": FieldSpec(("num_envs", "nbody", "3"), "<f4", "N",        WORKER, "net contact force on the body, world axes"),  # noqa: E501
    "env_flags":     FieldSpec(("num_envs",),              "<u1", "",         WORKER, "ENV_NONFINITE, ENV_ENGINE_RESET: what happened to this environment in the last command"),  # noqa: E501
}
# fmt: on

ENV_NONFINITE = 1  # the state holds NaN or infinity
ENV_ENGINE_RESET = 2  # the engine put the environment back to its initial state by itself

PUBLISHABLE = tuple(n for n, f in FIELDS.items() if f.written_by == WORKER and n != "env_flags")
DEFAULT_PUBLISH = ("qpos", "qvel")
_HOST_FIELDS = tuple(n for n, f in FIELDS.items() if f.written_by == HOST)


@dataclass(frozen=True)
class Sizes:
    """The numbers that turn symbolic shapes into real ones. `nbody` counts the robot's bodies,
    without the world."""

    num_envs: int
    nq: int
    nv: int
    nu: int
    nbody: int

    def __post_init__(self) -> None:
        # 2**26 environments of one float fill a block of 256 MB; more is a corrupt message.
        limits = (
            ("num_envs", 1, 1 << 26),
            ("nq", 0, 1 << 16),
            ("nv", 0, 1 << 16),
            ("nu", 0, 1 << 16),
            ("nbody", 0, 1 << 16),
        )
        for name, low, high in limits:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, outside {low} to {high}")


class PlacedField(NamedTuple):
    name: str
    shape: Tuple[int, ...]
    dtype: str
    offset: int  # in bank 0, from the start of the block
    nbytes: int
    written_by: str


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


class Layout:
    """Where every field lies. Host-written fields exist once, worker-written ones once per bank."""

    def __init__(self, sizes: Sizes, publish: Iterable[str], banks: int = 1) -> None:
        self.sizes = sizes
        self.publish = check_publish(publish)
        if banks not in (1, 2):
            raise UsageError(f"banks must be 1 or 2, not {banks!r}")
        self.banks = banks
        placed, offset = [], HEADER_BYTES
        for name in _HOST_FIELDS:
            placed.append(self._place(name, offset))
            offset = _aligned(offset + placed[-1].nbytes)
        bank_start = offset
        for name in (*self.publish, "env_flags"):
            placed.append(self._place(name, offset))
            offset = _aligned(offset + placed[-1].nbytes)
        self.bank_bytes = offset - bank_start
        self.fields: Tuple[PlacedField, ...] = tuple(placed)
        self.total_bytes = bank_start + banks * self.bank_bytes

    def _place(self, name: str, offset: int) -> PlacedField:
        spec = FIELDS[name]
        shape = tuple(
            int(dim) if dim.isdigit() else int(getattr(self.sizes, dim)) for dim in spec.dims
        )
        nbytes = int(spec.dtype[2:])
        for dim in shape:
            nbytes *= dim
        return PlacedField(name, shape, spec.dtype, offset, nbytes, spec.written_by)

    def offset(self, field: PlacedField, bank: int) -> int:
        """Byte offset of `field` in `bank`; host-written fields are the same in every bank."""
        return field.offset + (bank * self.bank_bytes if field.written_by == WORKER else 0)

    def describe(self) -> str:
        """The table as canonical text: what the fingerprint is taken of."""
        rows = [
            "{} {} {} {} {} {}".format(
                f.name,
                f.dtype,
                "x".join(map(str, f.shape)),
                f.offset,
                FIELDS[f.name].unit,
                f.written_by,
            )
            for f in self.fields
        ]
        rows.append(f"banks {self.banks} of {self.bank_bytes} bytes, total {self.total_bytes}")
        return "\n".join(rows)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes; equal on both sides or the two do not attach."""
        return hashlib.sha256(self.describe().encode("ascii")).digest()


def check_publish(publish: Iterable[str]) -> Tuple[str, ...]:
    """`publish` in the order of the table, without repeats. UsageError lists the valid names."""
    if isinstance(publish, str):
        raise UsageError(f"publish takes a tuple of field names; write publish=({publish!r},)")
    asked = list(publish)
    unknown = [name for name in asked if name not in PUBLISHABLE]
    if unknown:
        raise UsageError(
            "cannot publish {}; the fields are {}".format(
                ", ".join(map(repr, unknown)), ", ".join(PUBLISHABLE)
            )
        )
    return tuple(name for name in PUBLISHABLE if name in asked)
