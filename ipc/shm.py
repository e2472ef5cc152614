"""The shared block: a sealed memfd. Created by the host, mapped by both, named by nobody.

The header fills one page: identity (magic, version, nonce, size, fingerprint), then a request line and a
reply line, each on cache lines of its own. The worker can write all of it, so the host takes nothing
in the header for an address, a length or an index: it compares what it reads with what it knows. With
two banks the sequence number decides: command n publishes into bank n & 1.
"""

import fcntl
import mmap
import os
import stat
import struct
from typing import Dict, List

import numpy as np

from .errors import ProtocolError
from .layout import HEADER_BYTES, Layout
from .messages import NONCE_BYTES, PROTOCOL_VERSION

BLOCK_MAGIC = b"OUTBLOCK"
_HEADER = struct.Struct("<8sII16sQ32s")

# Lines are 128 bytes apart: x86 prefetches cache lines in pairs, and one writer's line must not be
# dragged along with the other's.
REQUEST_AT, REPLY_AT = 128, 256
# u64 words of the request line and of the reply line
SEQUENCE, OPCODE, COUNT = 0, 1, 2
STATUS, SIM_NS = 1, 2  # SIM_NS: nanoseconds in the simulator since READY, summed over all commands
_WORDS = 8

# linux/fcntl.h; Python names them from 3.10 on
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW: nobody can take the pages away under us
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; older kernels answer EINVAL


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("outboard", flags | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create("outboard", flags)


class Block:
    """A mapped block. `fields[bank][name]` are numpy views; `request` and `reply` are u64 lines.

    There is no unmap call: the mapping goes with its last view, so a view the user still holds
    after close() stays valid (ndarray over `mmap`, kept alive by the buffer protocol).
    """

    def __init__(self, fd: int, layout: Layout, nonce: bytes) -> None:
        self.layout = layout
        self.nonce = nonce
        self.fd = -1  # kept by the creator only, to hand the same memory to the next worker
        self._map = mmap.mmap(fd, layout.total_bytes)
        memory = memoryview(self._map)
        self.request = memory[REQUEST_AT : REQUEST_AT + 8 * _WORDS].cast("Q")
        self.reply = memory[REPLY_AT : REPLY_AT + 8 * _WORDS].cast("Q")
        self.fields: List[Dict[str, np.ndarray]] = [
            {
                field.name: np.frombuffer(
                    self._map,
                    dtype=field.dtype,
                    count=field.nbytes // int(field.dtype[2:]),
                    offset=layout.offset(field, bank),
                ).reshape(field.shape)
                for field in layout.fields
            }
            for bank in range(layout.banks)
        ]

    @property
    def address(self) -> int:
        """Of the mapping in this process; a page boundary."""
        return np.frombuffer(self._map, np.uint8, 1).ctypes.data

    def _identity(self) -> bytes:
        layout = self.layout
        return _HEADER.pack(
            BLOCK_MAGIC,
            PROTOCOL_VERSION,
            HEADER_BYTES,
            self.nonce,
            layout.total_bytes,
            layout.fingerprint,
        )

    def write_identity(self) -> None:
        identity = self._identity()
        self._map[: len(identity)] = identity

    def check_identity(self) -> None:
        """ProtocolError names the first part of the header that is not as agreed."""
        want = self._identity()
        have = bytes(self._map[: len(want)])
        if have == want:
            return
        names = ("magic", "version", "header size", "nonce", "size", "fingerprint")
        for name, a, b in zip(names, _HEADER.unpack(have), _HEADER.unpack(want)):
            if a != b:
                raise ProtocolError(
                    f"the block's {name} is not the agreed one: {a!r} instead of {b!r}"
                )

    def close_fd(self) -> None:
        """Drop the descriptor; the mapping stays as long as a view of it does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        # For a block whose owner was interrupted or collected before it could close it.
        if hasattr(self, "fd"):
            self.close_fd()

    def restamp(self, nonce: bytes) -> None:
        """Give the same memory to a new worker: a new nonce, sequence numbers from zero. The
        fields keep what the last worker left."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"the nonce has {len(nonce)} bytes")
        self.nonce = nonce
        self._map[:HEADER_BYTES] = bytes(HEADER_BYTES)
        self.write_identity()


def create(layout: Layout, nonce: bytes) -> Block:
    """Make, reserve, seal and map a block. It keeps its descriptor until `close_fd`.

    OSError (ENOSPC, ENOMEM) when the memory is not there; the host asks the cgroups before
    (`backends/memory.py`), because the kernel's own answer can be a kill.
    """
    fd = _memfd()
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, layout.total_bytes)
        os.posix_fallocate(fd, 0, layout.total_bytes)
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        block = Block(fd, layout, nonce)
        block.write_identity()
        block.fd = fd
    except BaseException:
        os.close(fd)
        raise
    return block


def attach(fd: int, layout: Layout, nonce: bytes) -> Block:
    """Map a block that came by descriptor, after checking that it is what was announced."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != layout.total_bytes:
        raise ProtocolError(
            f"the block's descriptor has {status.st_size} bytes, not {layout.total_bytes}"
        )
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:  # a file that cannot be sealed
        seals = 0
    if seals & SEALS != SEALS:
        raise ProtocolError("the block is not sealed: its pages could be taken away")
    block = Block(fd, layout, nonce)
    block.check_identity()
    return block
