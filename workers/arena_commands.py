"""What an ARENA_ command does in the worker: wait for the host's count, let the simulator enqueue, write
ours. Chosen once at ATTACH; a worker without an arena has none of this in its loop."""

from typing import Any, Callable, Dict

from ..ipc import cuda_memory, shm
from ..ipc.arena import COUNT_MAX, MASK, SLOTS, WorkerArena, in_context
from ..ipc.errors import ProtocolError
from ..ipc.messages import Opcode
from .simulator import Simulator

# What `serve_commands` turns into Status.ENQUEUED; a simulator's own answers are counts, from 0 up.
ENQUEUED = -1


def commands(
    simulator: Simulator, arena: WorkerArena, request: Any
) -> Dict[Opcode, Callable[[int], int]]:
    """By opcode; each takes the block's bank, which it does not use."""
    mask, qpos, qvel = (arena.slots[0][name] for name in (MASK, "set_qpos", "set_qvel"))

    def step_reset(slot: int) -> None:
        simulator.reset_mask(mask)
        simulator.step_arena(slot)

    def set_state(slot: int) -> None:
        simulator.set_state_mask(mask, qpos, qvel)
        simulator.publish_arena(slot)

    def reset(slot: int) -> None:
        simulator.reset_mask(mask)
        simulator.publish_arena(slot)

    def ordered(act: Callable[[int], None]) -> Callable[[int], int]:
        def run(_bank: int) -> int:
            count = request[shm.COUNT]
            if count > COUNT_MAX:
                raise ProtocolError(f"an ARENA_ command with count {count}")
            stream = simulator.stream
            with in_context(arena.context):
                cuda_memory.stream_wait(stream, arena.ctrl_ready, count)
                act(count % SLOTS)
                cuda_memory.stream_write(stream, arena.state_ready, count)
            return ENQUEUED

        return run

    return {
        Opcode.ARENA_STEP: ordered(simulator.step_arena),
        Opcode.ARENA_STEP_RESET: ordered(step_reset),
        Opcode.ARENA_SET_STATE: ordered(set_state),
        Opcode.ARENA_RESET: ordered(reset),
    }
