"""Phases of a worker's life and what may happen in each: one table for both roles.

Everything that changes a phase is here; this file does not know which side we are. The picture in the
README is drawn from TABLE (`picture()`), and the tests of illegal transitions
are generated from it.
"""

import enum
from typing import Dict, List, NamedTuple, Tuple

from .errors import ProtocolError, UsageError


class Role(enum.Enum):
    HOST = "host"
    WORKER = "worker"

    @property
    def peer(self) -> "Role":
        return Role.WORKER if self is Role.HOST else Role.HOST


class Phase(enum.Enum):
    SPAWNED = "SPAWNED"  # the process exists, nothing was heard of it
    HELLO = "HELLO"  # it said who it is; INIT not sent
    INIT = "INIT"  # it is building
    VERIFIED = "VERIFIED"  # it reported its device, and the host agreed
    ATTACHED = "ATTACHED"  # it has the block
    READY = "READY"  # idle, waiting for the bell
    BUSY = "BUSY"  # a command is in flight
    CLOSING = "CLOSING"  # asked to leave
    CLOSED = "CLOSED"  # left well
    FAILED = "FAILED"  # ended in an error


class Move(NamedTuple):
    by: Role  # who causes the event
    to: Phase


# Events are message names, and RING and ANSWER for the two directions of the bell.
RING, ANSWER = "Ring", "Answer"

_H, _W, _P = Role.HOST, Role.WORKER, Phase

TABLE: Dict[Tuple[Phase, str], Move] = {
    (_P.SPAWNED, "Hello"): Move(_W, _P.HELLO),
    (_P.HELLO, "Init"): Move(_H, _P.INIT),
    (_P.INIT, "Progress"): Move(_W, _P.INIT),
    (_P.INIT, "InitReply"): Move(_W, _P.VERIFIED),
    (_P.VERIFIED, "Attach"): Move(_H, _P.ATTACHED),
    (_P.ATTACHED, "Ready"): Move(_W, _P.READY),
    (_P.READY, RING): Move(_H, _P.BUSY),
    (_P.BUSY, ANSWER): Move(_W, _P.READY),
    (_P.READY, "Where"): Move(_H, _P.BUSY),
    (_P.BUSY, "WhereReply"): Move(_W, _P.READY),
    (_P.READY, "SetProperty"): Move(_H, _P.BUSY),
    (_P.BUSY, "SetPropertyReply"): Move(_W, _P.READY),
    (_P.READY, "Render"): Move(_H, _P.BUSY),
    (_P.BUSY, "RenderReply"): Move(_W, _P.READY),
    # An answer that was under way when the host asked the worker to leave is still well-formed.
    (_P.CLOSING, "Progress"): Move(_W, _P.CLOSING),
    (_P.CLOSING, "InitReply"): Move(_W, _P.CLOSING),
    (_P.CLOSING, "Ready"): Move(_W, _P.CLOSING),
    (_P.CLOSING, ANSWER): Move(_W, _P.CLOSING),
    (_P.CLOSING, "WhereReply"): Move(_W, _P.CLOSING),
    (_P.CLOSING, "SetPropertyReply"): Move(_W, _P.CLOSING),
    (_P.CLOSING, "RenderReply"): Move(_W, _P.CLOSING),
    (_P.CLOSING, "Bye"): Move(_W, _P.CLOSED),
}

_LIVE = (_P.HELLO, _P.INIT, _P.VERIFIED, _P.ATTACHED, _P.READY, _P.BUSY)
TABLE.update({(phase, "Close"): Move(_H, _P.CLOSING) for phase in _LIVE})
TABLE.update({(phase, "Error"): Move(_W, _P.FAILED) for phase in (_P.SPAWNED, *_LIVE, _P.CLOSING)})

ENDED = (_P.CLOSED, _P.FAILED)


class Conversation:
    """The phase of one conversation, seen from one side. Feed it every event, in order.

    `sent` and `received` change the phase; an event the table does not know leaves it unchanged and
    raises: UsageError for our own mistake, ProtocolError for the peer's.
    """

    __slots__ = ("phase", "role")

    def __init__(self, role: Role) -> None:
        self.role = role
        self.phase = Phase.SPAWNED

    def sent(self, event: str) -> None:
        move = TABLE.get((self.phase, event))
        if move is None or move.by is not self.role:
            raise UsageError(f"{event} is not possible in phase {self.phase.value}")
        self.phase = move.to

    def received(self, event: str) -> None:
        move = TABLE.get((self.phase, event))
        if move is None or move.by is self.role:
            raise ProtocolError(
                f"the {self.role.peer.value} sent {event} in phase {self.phase.value}"
            )
        self.phase = move.to

    def fail(self) -> None:
        """The conversation is over: a death, a broken rule, a passed deadline."""
        if self.phase is not Phase.CLOSED:
            self.phase = Phase.FAILED


def picture() -> str:
    """TABLE as a Mermaid state diagram."""
    edges: Dict[Tuple[Phase, Phase], List[str]] = {}
    for (phase, event), move in TABLE.items():
        if phase is not move.to:
            edges.setdefault((phase, move.to), []).append(event)
    lines = ["stateDiagram-v2", "    [*] --> SPAWNED"]
    for (phase, to), events in edges.items():
        lines.append("    {} --> {}: {}".format(phase.value, to.value, ", ".join(events)))
    lines.extend(f"    {phase.value} --> [*]" for phase in ENDED)
    return "\n".join(lines)
