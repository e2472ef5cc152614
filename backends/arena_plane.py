"""The host's use of the arena: the two counts, the slot of each command, and which plane holds the newest
state. No torch: streams are numbers as the driver names them. `torch_view.py` puts tensors over it.

Every command publishes into the plane it was given in: numpy commands into the block, as without an arena,
ARENA_ commands into the arena. Asking for the other plane's state brings it up to date first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from ..ipc import cuda_driver, cuda_memory, shm
from ..ipc.arena import COUNT_MAX, SLOTS, DeviceFields, HostArena, PageLock, in_context
from ..ipc.cuda_driver import CudaError
from ..ipc.layout import PUBLISHABLE
from ..ipc.messages import Opcode
from .events import LOG


def lock_pages(block: shm.Block, uuid: str, arena: HostArena | None) -> PageLock | None:
    """Page-lock the block in this process too, when it uses the simulator's GPU: through an arena, or
    because its torch has started CUDA. Slower copies, and nothing worse, where it is refused."""
    try:
        if arena is not None:
            return PageLock(block, arena.ordinal)
        torch = sys.modules.get("torch")
        if not uuid or torch is None or not torch.cuda.is_initialized():
            return None
        here = [gpu.ordinal for gpu in cuda_driver.devices() if gpu.uuid == uuid]
        return PageLock(block, here[0]) if here else None
    except CudaError as error:
        LOG.warning("the shared block stays pageable, copies to the GPU are slower: %s", error)
        return None


class ArenaPlane:
    """One for the whole life of a backend: a restart keeps it, with every address.

    current_stream: the caller's stream, as a number; the default stream without torch.
    collected: called with the slot after each ARENA_ command; gives what the command returns.
    """

    def __init__(self, arena: HostArena, block: shm.Block) -> None:
        self.arena, self._block = arena, block
        self.slots: list[DeviceFields] = arena.slots
        self.ordinal = arena.ordinal
        self.current_stream: Callable[[], int] = lambda: 0
        self.collected: Callable[[int], Any] = self.slots.__getitem__
        self._count = 0  # of ARENA_ commands, of all workers together
        self._answered = 0  # of those that were answered
        self._arena_at = -1  # the command after which the arena held the newest state
        self._block_at = -1  # after which the block did too, although it came from the arena

    # -- commands --------------------------------------------------------------------------------

    @property
    def slot(self) -> int:
        """Into which the last answered ARENA_ command published; one in flight, or interrupted before it
        was sent, has another."""
        return self._answered % SLOTS

    def ring(self, backend: Any, opcode: Opcode) -> int:
        """What the caller has enqueued so far (ctrl, masks, new states, and every read of the last
        state) comes before what the worker will do. The slot into which it will publish."""
        self._count = (self._count + 1) & COUNT_MAX
        backend._request[shm.COUNT] = self._count
        with in_context(self.arena.context):
            cuda_memory.stream_write(self.current_stream(), self.arena.ctrl_ready, self._count)
        backend._send(int(opcode))
        return self._count % SLOTS

    def enqueued(self, sequence: int) -> Any:
        """The answer to an ARENA_ command: the caller's stream waits for the state, the caller does not."""
        self._arena_at, self._answered = sequence, self._count
        self.wait(self.current_stream())
        return self.collected(self.slot)

    def wait(self, stream: int) -> None:
        """`stream` waits for what the worker published last."""
        with in_context(self.arena.context):
            cuda_memory.stream_wait(stream, self.arena.state_ready, self._answered)

    # -- which plane is newest -------------------------------------------------------------------

    def mailed(self, sequence: int) -> None:
        """Command `sequence` was MAIL, which publishes nothing."""
        if self._arena_at == sequence - 1:
            self._arena_at = sequence
        if self._block_at == sequence - 1:
            self._block_at = sequence

    def newest_in_arena(self, answered: int) -> bool:
        return self._arena_at == answered

    def renew(self, answered: int, bank: int) -> None:
        """After a numpy command: bring the arena up to date from the block, in the caller's stream."""
        if self._arena_at == answered:
            return
        stream, fields = self.current_stream(), self._block.fields[bank]
        self.wait(stream)
        with in_context(self.arena.context):
            for name, field in self.slots[self.slot].items():
                if name in PUBLISHABLE and field.nbytes:
                    address = fields[name].ctypes.data
                    cuda_memory.copy_htod_async(field.pointer, address, field.nbytes, stream)
            # The block is the worker's again with the next command, also a numpy one.
            cuda_memory.stream_synchronize(stream)
        self._arena_at = self._block_at = answered

    def fetch(self, answered: int, bank: int) -> None:
        """After an ARENA_ command: bring the block up to date. Waits for the GPU."""
        if self._arena_at != answered or self._block_at == answered:
            return
        stream, fields = self.current_stream(), self._block.fields[bank]
        self.wait(stream)
        with in_context(self.arena.context):
            for name, field in self.slots[self.slot].items():
                if (name in PUBLISHABLE or name == "env_flags") and field.nbytes:
                    address = fields[name].ctypes.data
                    cuda_memory.copy_dtoh_async(address, field.pointer, field.nbytes, stream)
            cuda_memory.stream_synchronize(stream)
        self._block_at = answered

    # -- life ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A worker has just become READY: its keyframe is in the block, and targets are as the block's."""
        self._arena_at = self._block_at = -1
        ctrl, field = self._block.fields[0]["ctrl"], self.slots[0]["ctrl"]
        with in_context(self.arena.context):
            if field.nbytes:
                cuda_memory.copy_htod(field.pointer, ctrl.ctypes.data, field.nbytes)
            cuda_driver.synchronize()

    def release(self) -> None:
        """The worker died: no stream of ours may wait for it for ever."""
        with contextlib.suppress(CudaError):  # the first cause is what the caller learns
            self.arena.release(self._count)

    def close(self) -> None:
        """After the worker is gone. Tensors that the caller holds keep the memory."""
        self.arena.close()
