"""The faults a worker can have, the moments of its life, and what the host must make of each pair.

The moments are the phases of `ipc/states.py`; BUSY counts twice, because a step is waited for at the bell
and a message at the channel. `faulty_worker.py` commits the faults, `test_faults.py` compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outboard.backends import (
    DeviceMismatchError,
    OutboardError,
    ProtocolError,
    WorkerDied,
    WorkerFailed,
    WorkerLaunchError,
    WorkerTimeout,
)
from outboard.ipc.states import TABLE, Phase, Role

AT_ONCE_S = 1.0  # from the kernel's word to the error in the caller; the medians are in the results
# A worker that never spoke is explained by asking its interpreter, which starts it once more.
EXPLAINED_S = 15.0
STEP, MESSAGE = ", step", ", message"


@dataclass(frozen=True)
class Moment:
    phase: Phase
    doing: str = ""  # of BUSY

    @property
    def name(self) -> str:
        return self.phase.value + self.doing

    @property
    def noticed(self) -> Phase:
        """Where the host is when it can notice: after its own move, which follows without a pause."""
        own = [
            move.to
            for (phase, event), move in TABLE.items()
            if phase is self.phase and move.by is Role.HOST and event != "Close"
        ]
        return own[0] if own else self.phase


MOMENTS = [
    Moment(phase, doing)
    for phase in Phase
    for doing in ((STEP, MESSAGE) if phase is Phase.BUSY else ("",))
]


@dataclass(frozen=True)
class Expected:
    """What the caller gets in a life of: open, step, where, close."""

    error: type[OutboardError] | None  # None: every call returns
    text: str = ""
    phase: str = ""  # in the error's report
    silent: bool = False  # nothing happens, so the host waits for its deadline
    bound_s: float = AT_ONCE_S  # beyond the deadline, where there is one
    well: bool = True  # without an error: close() had nothing to kill


@dataclass(frozen=True)
class NotApplicable:
    why: str


Rule = Callable[[Moment], "Expected | NotApplicable"]


@dataclass(frozen=True)
class Fault:
    name: str
    does: str
    rule: Rule

    def expected(self, moment: Moment) -> Expected | NotApplicable:
        if moment.phase is Phase.FAILED:
            if isinstance(self.rule(moment), NotApplicable):
                return self.rule(moment)
            # Whatever comes after it: the first cause is what the user sees.
            return Expected(WorkerFailed, "reported RuntimeError in phase BUSY: scripted", "BUSY",
                            silent=self.rule is silent)  # fmt: skip
        return self.rule(moment)


def _error(
    moment: Moment, opening: tuple[type[OutboardError], str], later: tuple[type[OutboardError], str],
    silent: bool = False,
) -> Expected:  # fmt: skip
    kind, text = later if moment.noticed is Phase.BUSY else opening
    return Expected(kind, text, moment.noticed.value, silent)


def dies(how: str) -> Rule:
    def rule(moment: Moment) -> Expected | NotApplicable:
        if moment.phase in (Phase.CLOSING, Phase.CLOSED):
            return Expected(None, well=moment.phase is Phase.CLOSED)
        if moment.phase is Phase.SPAWNED:
            text = f"the worker ended before it said a word: {how}"
            return Expected(WorkerLaunchError, text, "SPAWNED", bound_s=EXPLAINED_S)
        opening = f"the worker died in phase {moment.noticed.value}.*{how}"
        return _error(moment, (WorkerDied, opening), (WorkerDied, f"died in a command.*{how}"))

    return rule


SILENCE = {
    Phase.SPAWNED: "said nothing for",
    Phase.INIT: "was not built within",
    Phase.ATTACHED: "did not map the block within",
    Phase.BUSY: "did not answer within",
}


def silent(moment: Moment) -> Expected | NotApplicable:
    if moment.phase in (Phase.CLOSING, Phase.CLOSED, Phase.FAILED):
        return Expected(None, silent=True, well=False)
    text = SILENCE[moment.noticed]
    return _error(moment, (WorkerTimeout, text), (WorkerTimeout, text), silent=True)


def harmless(moment: Moment) -> Expected | NotApplicable:
    return Expected(None)


def raises(moment: Moment) -> Expected | NotApplicable:
    if moment.phase in (Phase.CLOSING, Phase.CLOSED):
        return Expected(None, well=moment.phase is Phase.CLOSED)
    # The bell does not tell the worker's table of states, so from READY on a command is assumed.
    phase = Phase.BUSY if moment.phase is Phase.READY else moment.phase
    text = f"the worker reported RuntimeError in phase {phase.value}: scripted"
    return _error(moment, (WorkerFailed, text), (WorkerFailed, text))


def breaks(text: str) -> Rule:
    """Wrong bytes on the channel, and then on as if nothing had been. The bell carries no bytes, so a host
    at the bell notices with its next message."""

    def rule(moment: Moment) -> Expected | NotApplicable:
        if moment.phase in (Phase.CLOSING, Phase.CLOSED):
            return Expected(None, well=moment.phase is Phase.CLOSED)
        return _error(moment, (ProtocolError, text), (ProtocolError, text))

    return rule


def out_of_turn(name: str, moment: Moment) -> Expected:
    phase = Phase.BUSY if moment.doing == MESSAGE else moment.noticed
    text = f"the worker sent {name} in phase {phase.value}"
    if moment.phase is Phase.READY or moment.doing == STEP:
        text = f"the worker sent {name} in phase READY"  # seen before the next message is sent
    return _error(moment, (ProtocolError, text), (ProtocolError, text))


def replays(moment: Moment) -> Expected | NotApplicable:
    if moment.phase is Phase.SPAWNED:
        return NotApplicable("nothing was sent yet that could be sent again")
    if moment.phase in (Phase.CLOSING, Phase.CLOSED, Phase.FAILED):
        return Expected(None)  # an answer that was under way is well-formed; after BYE nobody reads
    last = {Phase.INIT: "Hello", Phase.ATTACHED: "InitReply"}.get(moment.noticed, "Ready")
    return out_of_turn(last, moment)


def leaves_early(moment: Moment) -> Expected | NotApplicable:
    if moment.phase is Phase.CLOSING:
        return NotApplicable("BYE is the right answer there")
    if moment.phase is Phase.CLOSED:
        return NotApplicable("BYE was said already")
    return out_of_turn("Bye", moment)


def ends_its_side(moment: Moment) -> Expected | NotApplicable:
    if moment.phase is Phase.READY or moment.doing == STEP:
        text = "died in a command, the other end closed the control channel"
        # Such sockets usually close because their process ends: it is given a second for that.
        return Expected(WorkerDied, text, "BUSY", bound_s=AT_ONCE_S + 1.0)
    # By PeerGone, or by what the host took away meanwhile.
    return dies("exit code [01]")(moment)


def only_in(phase: Phase, expected: Expected, why: str) -> Rule:
    def rule(moment: Moment) -> Expected | NotApplicable:
        return expected if moment.phase is phase else NotApplicable(why)

    return rule


def lies(moment: Moment) -> Expected | NotApplicable:
    if moment.phase is not Phase.INIT and moment.doing != MESSAGE:
        return NotApplicable("only InitReply and WhereReply carry a device report")
    phase = "VERIFIED" if moment.phase is Phase.INIT else "BUSY"
    return Expected(DeviceMismatchError, "planned cpu but the state lies on GPU-ce08eab0", phase)


_IN_READY = "only Ready carries it, and Ready is sent in ATTACHED"
_OTHER = Expected(ProtocolError, "READY carries another nonce or fingerprint than ATTACH", "READY")

FAULTS = [
    Fault("SIGKILL", "is killed, as by the kernel when memory ran out", dies("SIGKILL")),
    Fault("SIGSEGV", "crashes", dies("SIGSEGV")),
    Fault("SIGSTOP", "is stopped", silent),
    Fault("exit 0", "leaves without a word", dies("exit code 0")),
    Fault("exit 3", "leaves with a code", dies("exit code 3")),
    Fault("exit in a native call", "native code calls _exit(7)", dies("exit code 7")),
    Fault("hang", "sleeps for an hour", silent),
    Fault("slow", "takes 0.3 s longer", harmless),
    Fault("raise", "raises RuntimeError", raises),
    Fault("garbage", "sends a frame that is not msgpack", breaks("a frame of 8 bytes is not msgpack")),
    Fault("truncated frame", "sends 40 bytes of a frame and leaves", dies("exit code 0")),
    Fault("oversized length", "announces a frame of 2 GiB",
          breaks("a frame announces 2147483648 bytes; 1 to 16777216 are allowed")),
    Fault("replayed frame", "sends its last message twice", replays),
    Fault("wrong nonce", "READY with another nonce", only_in(Phase.ATTACHED, _OTHER, _IN_READY)),
    Fault("wrong fingerprint", "READY with another fingerprint",
          only_in(Phase.ATTACHED, _OTHER, _IN_READY)),
    Fault("lying device", "reports a GPU although the CPU was planned", lies),
    Fault("BYE too early", "says BYE and goes on", leaves_early),
    Fault("end of file", "shuts its side of the socket and goes on", ends_its_side),
    Fault("stdout flood", "writes 10 MiB without a newline to descriptor 1", harmless),
    Fault("stderr flood without reader", "prints 10 MiB into a log that nobody reads", harmless),
    Fault("inherited descriptors closed", "closes all descriptors from 3 on", dies("exit code [01]")),
    Fault("grandchild holds descriptors", "forks a child that holds them, and is killed",
          dies("SIGKILL")),
]  # fmt: skip


def after_close(moment: Moment) -> bool:
    """Whether nothing but close() is left when the fault strikes."""
    return moment.phase in (Phase.CLOSING, Phase.CLOSED)
