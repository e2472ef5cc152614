"""The CUDA arena: the block's fields once more, in GPU memory that the host owns and the worker maps.

The host allocates on the planned GPU's primary context and exports one handle; the worker compares UUIDs
before it opens anything, because the driver would as happily map a GPU that is hidden from it.
Nothing here needs torch: whoever has arrays of his own reads `__cuda_array_interface__`.

Order is kept by two counts in the arena itself, `ctrl_ready` and `state_ready`, which streams write and wait
for. Not by interprocess events: work behind an event that a killed worker recorded and never reached stays
in the host's stream for ever, whoever records that event again, while a count can be put right by the host
(measured, benchmarks/handover.py; both take the same time).

Offsets are those of the block without its header. Two slots exist whatever the number of banks: commands
alternate between them, so that `env_flags` of the last command can still be read while the next runs.
"""

import contextlib
import ctypes
import os
from typing import Any, Dict, Generator, List, Optional, Tuple

from . import cuda_driver, cuda_memory
from .cuda_driver import CudaError
from .layout import ALIGN, HEADER_BYTES, WORKER, Layout
from .messages import ArenaOffer
from .shm import Block

SLOTS = 2
COUNT_MAX = (1 << 32) - 1  # of ARENA_ commands; after it comes 0, in the same slot's turn
MASK = "env_mask"  # uint8 (num_envs,), host: the environments of ARENA_RESET and its kin


class NoArena(Exception):
    """There can be no arena here; the text is the one condition that is not met."""


class DeviceField:
    """One field in GPU memory. It keeps the memory mapped, and so does whatever is made from it through
    `__cuda_array_interface__`."""

    __slots__ = ("dtype", "name", "nbytes", "owner", "pointer", "shape")

    def __init__(
        self, name: str, pointer: int, shape: Tuple[int, ...], dtype: str, owner: object
    ) -> None:
        self.name, self.pointer, self.shape, self.dtype = name, pointer, shape, dtype
        self.nbytes = int(dtype[2:])
        for dim in shape:
            self.nbytes *= dim
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> Dict[str, Any]:
        # No "stream": order is the business of the two counts, not of the consumer.
        return {
            "shape": self.shape,
            "typestr": self.dtype.replace("<u1", "|u1"),
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"DeviceField({self.name} {self.dtype} {self.shape} at {self.pointer:#x})"


DeviceFields = Dict[str, DeviceField]


class ArenaLayout:
    """Where every field of a Layout lies in the arena; both sides compute it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        num_envs = layout.sizes.num_envs
        self._mask_at = layout.total_bytes - HEADER_BYTES
        self._flags_at = (self._mask_at + num_envs + ALIGN - 1) // ALIGN * ALIGN
        granule = cuda_memory.IPC_GRANULE_BYTES
        self.ctrl_ready_at = (self._flags_at + num_envs + ALIGN - 1) // ALIGN * ALIGN
        self.state_ready_at = self.ctrl_ready_at + ALIGN
        end = self.state_ready_at + ALIGN
        self.nbytes = (end + granule - 1) // granule * granule

    def fields(self, pointer: int, owner: object) -> List[DeviceFields]:
        """Per slot, every field by name. With one bank both slots publish to the same addresses, but
        for `env_flags`."""
        layout, slots = self.layout, []
        for slot in range(SLOTS):
            found: DeviceFields = {}
            for field in layout.fields:
                bank = slot % layout.banks if field.written_by == WORKER else 0
                at = layout.offset(field, bank) - HEADER_BYTES
                if field.name == "env_flags" and slot >= layout.banks:
                    at = self._flags_at
                found[field.name] = DeviceField(
                    field.name, pointer + at, field.shape, field.dtype, owner
                )
            shape = (layout.sizes.num_envs,)
            found[MASK] = DeviceField(MASK, pointer + self._mask_at, shape, "<u1", owner)
            slots.append(found)
        return slots


@contextlib.contextmanager
def in_context(context: int) -> Generator[None, None, None]:
    """As `cuda_driver.using`, cheaper where the thread is in `context` anyway."""
    if cuda_driver.get_current() == context:
        yield
    else:
        with cuda_driver.using(context):
            yield


class _Memory:
    """The host's allocation and its hold on the primary context. Freed with its last owner: the arena
    and every tensor over it. Freeing under a live tensor would poison the context."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self.pointer = 0
        self.process = os.getpid()
        self.ordinal = ordinal
        self.context = cuda_driver.retain_primary(ordinal)
        try:
            with in_context(self.context):
                self.pointer = cuda_memory.allocate(nbytes)
                cuda_memory.memset(self.pointer, 0, nbytes)
                cuda_driver.synchronize()  # a memset of device memory returns early
        except BaseException:
            self._free()
            raise

    def _free(self) -> None:
        if os.getpid() != self.process:
            return  # a forked child has no CUDA
        pointer, self.pointer = self.pointer, 0
        with in_context(self.context):
            if pointer:
                cuda_memory.free(pointer)
        cuda_driver.release_primary(self.ordinal)

    def __del__(self) -> None:
        # At the end of the process the driver may have gone before us; it has freed everything then.
        with contextlib.suppress(Exception):
            if self.pointer:
                self._free()


def _ordinal_of(uuid: str) -> int:
    """This process's number for the planned GPU. NoArena."""
    gpus, why_not = cuda_driver.survey()
    for gpu in gpus:
        if gpu.uuid == uuid:
            mode = cuda_driver.compute_mode(gpu.ordinal)
            if mode:
                name = cuda_driver.COMPUTE_MODES.get(mode, str(mode))
                raise NoArena(f"{uuid} is in compute mode {name}: two processes cannot share it")
            return gpu.ordinal
    seen = why_not or ", ".join(gpu.uuid for gpu in gpus) or "no GPU"
    raise NoArena(f"this process does not see the planned {uuid} (it sees: {seen})")


class HostArena:
    """The owner's side. `offer` makes `offered`, the part of ATTACH; once per worker."""

    def __init__(self, layout: Layout, uuid: str) -> None:
        """NoArena names the condition; CudaError where the driver refuses, as without memory."""
        self.layout = ArenaLayout(layout)
        self.uuid = uuid
        self.ordinal = _ordinal_of(uuid)
        self._memory = _Memory(self.ordinal, self.layout.nbytes)
        self.context, self.pointer = self._memory.context, self._memory.pointer
        self.slots = self.layout.fields(self.pointer, self._memory)
        self.ctrl_ready = self.pointer + self.layout.ctrl_ready_at
        self.state_ready = self.pointer + self.layout.state_ready_at
        self.offered: Optional[ArenaOffer] = None

    def offer(self, nonce: bytes) -> None:
        """For a new worker: the nonce at the head of the memory, to be found and answered. The counts
        go on where they are: a stream of ours may still have to pass an old one."""
        with in_context(self.context):
            _put(self.pointer, nonce)
            cuda_driver.synchronize()
            self.offered = ArenaOffer(
                uuid=self.uuid,
                nbytes=self.layout.nbytes,
                memory=cuda_memory.ipc_export(self.pointer),
            )

    def release(self, count: int) -> None:
        """The worker is dead: count in its place, from a stream of our own, so that streams of ours that
        wait for its state go on, with whatever lies there."""
        with in_context(self.context):
            own = cuda_memory.stream_create()
            cuda_memory.stream_write(own, self.state_ready, count)
            cuda_memory.stream_destroy(own)

    def answered(self, nonce: bytes) -> bool:
        """Whether the worker's answer to the probe is in our memory."""
        with in_context(self.context):
            return _get(self.pointer, len(nonce)) == nonce[::-1]

    def close(self) -> None:
        """After the worker is gone. The memory itself goes with its last user, see `_Memory`."""
        self.slots = []


class WorkerArena:
    """The importer's side. NoArena says which condition failed; nothing is open then."""

    def __init__(self, offer: ArenaOffer, layout: Layout, nonce: bytes) -> None:
        self.layout = ArenaLayout(layout)
        if offer.nbytes != self.layout.nbytes:
            raise NoArena(f"an arena of {offer.nbytes} bytes, {self.layout.nbytes} belong here")
        gpus, why_not = cuda_driver.survey()
        # Compared before anything is opened: a handle of a hidden GPU would open too.
        if [gpu.uuid for gpu in gpus] != [offer.uuid]:
            seen = ", ".join(gpu.uuid for gpu in gpus) or why_not or "no GPU"
            raise NoArena(f"the arena lies on {offer.uuid}; this worker's only GPU is {seen}")
        self.context = cuda_driver.retain_primary(0)
        self.pointer = 0
        try:
            with in_context(self.context):
                self._open(offer, nonce)
        except CudaError as error:
            self.close()
            raise NoArena(f"this worker could not map the arena: {error}") from None
        except BaseException:
            self.close()
            raise
        self.slots = self.layout.fields(self.pointer, self)
        self.ctrl_ready = self.pointer + self.layout.ctrl_ready_at
        self.state_ready = self.pointer + self.layout.state_ready_at

    def _open(self, offer: ArenaOffer, nonce: bytes) -> None:
        self.pointer = cuda_memory.ipc_open(offer.memory)
        place = cuda_driver.where_is(self.pointer)
        if place.uuid != offer.uuid:
            raise NoArena(f"what was mapped lies in {place.memory} memory of {place.uuid or '?'}")
        if _get(self.pointer, len(nonce)) != nonce:
            raise NoArena("what was mapped is other memory than the host's: the probe is not there")
        _put(self.pointer, nonce[::-1])
        cuda_driver.synchronize()

    def close(self) -> None:
        """Before the host frees. Waits for the work of this process on the arena."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with in_context(self.context):
                cuda_driver.synchronize()
                cuda_memory.ipc_close(pointer)


def _put(pointer: int, data: bytes) -> None:
    source = ctypes.create_string_buffer(data, len(data))
    cuda_memory.copy_htod(pointer, ctypes.addressof(source), len(data))


def _get(pointer: int, nbytes: int) -> bytes:
    found = ctypes.create_string_buffer(nbytes)
    cuda_memory.copy_dtoh(ctypes.addressof(found), pointer, nbytes)
    return found.raw


class PageLock:
    """The mapping of a block, page-locked in this process: copies between it and the GPU then run at
    full speed, about five times that of pageable memory. CudaError when the driver refuses."""

    def __init__(self, block: Block, ordinal: int) -> None:
        self._address, self._ordinal, self._process = 0, ordinal, os.getpid()
        self._block = block  # the mapping must not go before the lock
        self._context = cuda_driver.retain_primary(ordinal)
        with in_context(self._context):
            cuda_memory.host_register(block.address, block.layout.total_bytes)
        self._address = block.address

    def release(self) -> None:
        """Before the mapping goes."""
        address, self._address = self._address, 0
        if address and os.getpid() == self._process:
            with contextlib.suppress(CudaError), in_context(self._context):
                cuda_memory.host_unregister(address)
                cuda_driver.release_primary(self._ordinal)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.release()
