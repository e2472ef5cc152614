"""The bell: ring the other side, wait for its ring. The same on both sides.

Ringing stores a sequence number in the shared block and posts a semaphore. Waiting polls the semaphore's
*value* and then acquires it: POSIX orders memory at post and wait on every processor, no wake-up can be
lost, and while both sides are awake nobody enters the kernel. The sequence number decides; a post is only
a reason to look, so a stray post (`wake`) costs one look and can never be taken for an answer.

A wait has four stages: look a few times; when recent waits were long, nap until shortly before the expected
end; poll, giving the processor away between looks; sleep in bounded naps. Measurements behind the
numbers: benchmarks/results/step.md.
"""

import contextlib
import ctypes
import os
import secrets
import time
from typing import Any, Callable, Generator, List, Optional, Tuple

import posix_ipc

from .errors import DeadlinePassed, PeerGone

# About 1.5 us of looking at 60 ns a look: an answer that comes while both are awake is found here.
_QUICK_LOOKS = range(24)
# Between two yields: about a microsecond. Polling without yields costs whole scheduler slices (4 ms
# each way) when the scheduler has put both sides on one processor, as it likes to after a wake-up.
_LOOKS_PER_YIELD = range(16)
# A timed sleep ends 50 to 100 us late on a virtual machine, so the nap ends this much before the expected
# end; long steps vary by some per cent, so the margin grows with them. 120 us and a tenth keep the wait at
# 9 to 12 % of a core for steps of 1 to 20 ms. It stops growing there: of a step of seconds nobody
# misses the microseconds, and a tenth of it would be a core and a deadline lost to polling.
_MARGIN_NS = 120_000
_MARGIN_FRACTION = 0.1
_MARGIN_MAX_NS = 2_000_000
# Polling past the expected end goes on for this many margins before sleeping: longer steals a core
# from a worker that wants all of them.
_POLL_MARGINS = 3
# One sleep. Bounds how late a death or a deadline is seen should a post be missed.
_NAP_S = 0.05
# From seeing a sequence number to its post: the two are an instruction apart.
_SETTLE_S = 0.001

_libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL: os.sched_yield drops it, and with a busy Python
_yield = _libc.sched_yield  # thread beside us every drop costs a 5 ms switch interval
_clock = time.monotonic_ns

_PR_SET_TIMERSLACK = 29


def sharpen_timer() -> None:
    """Let this thread's timed sleeps end within 1 us instead of 50 us of the asked time."""
    _libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class History:
    """What recent waits of one kind foretell: their lower envelope, in nanoseconds.

    Falls at once, rises slowly, and at most doubles: one long wait (a reset, a compilation) among short
    ones moves it little, and a nap that is too long costs one wake-up, not a lost ring.
    """

    __slots__ = ("low_ns",)

    def __init__(self) -> None:
        self.low_ns = 0

    def note(self, waited_ns: int) -> None:
        low = self.low_ns
        if waited_ns < low:
            self.low_ns = waited_ns
        else:
            self.low_ns = low + min((waited_ns - low) // 8, low + 20_000)


class Doorbell:
    """One side of the bell.

    post      semaphore the peer waits on
    listen    semaphore this side waits on
    cell      one u64 of the block, written by the peer: the sequence number of its last ring

    `ring()` posts; the caller has stored the sequence number before. `wait(expected, history,
    timeout_s)` returns once the peer rang with sequence number `expected`; PeerGone when it is dead and
    did not, DeadlinePassed when it is silent. An exception (KeyboardInterrupt) may leave `wait` at any
    instruction; calling it again resumes: whatever became of the post, the sequence number is there.
    """

    __slots__ = ("_cell", "_listen", "_post", "gone", "ring", "sleeping", "wait")

    def __init__(self, post: Any, listen: Any, cell: "memoryview") -> None:
        self._post = post
        self._listen = listen
        self._cell = cell
        self.gone = False  # the peer is dead; set by `wake`
        self.sleeping = False  # in a sleep, where a watcher may have to call `wake`
        self.ring: Callable[[], None] = post.release
        self.wait = self._make_wait()

    def _make_wait(self) -> Callable[[int, History, float], None]:
        """The first stage of a wait, as a closure: locals instead of attributes save a quarter of a
        microsecond of the 1.5 that a whole exchange takes."""
        listen, cell, wait_long = self._listen, self._cell, self._wait_long
        acquire = listen.acquire

        def wait(expected: int, history: History, timeout_s: float) -> None:
            for _ in _QUICK_LOOKS:
                if listen.value:
                    acquire()
                    if cell[0] == expected:
                        return
                    break
            wait_long(expected, history, timeout_s)

        return wait

    def wake(self, gone: bool = False) -> None:
        """From another thread: make the waiting side look again; `gone`: the peer is dead."""
        if gone:
            self.gone = True
        self._listen.release()

    def close(self) -> None:
        self._post.close()
        self._listen.close()
        del self.wait  # it holds us, and the block with us, until the garbage collector comes

    def _wait_long(self, expected: int, history: History, timeout_s: float) -> None:
        started = _clock()
        margin = max(_MARGIN_NS, min(int(history.low_ns * _MARGIN_FRACTION), _MARGIN_MAX_NS))
        nap_ns = history.low_ns - margin
        nap_s = min(nap_ns * 1e-9, timeout_s) if nap_ns > margin // 2 else 0.0
        if not (
            (nap_s and self._sleep(expected, nap_s))
            or self._poll(_POLL_MARGINS * margin, expected)
            or self._sleep(expected, timeout_s - nap_s)
        ):
            raise DeadlinePassed
        history.note(_clock() - started)

    def _arrived(self, expected: int) -> bool:
        """Whether the peer rang for `expected`; PeerGone when it did not and never will."""
        gone = self.gone  # read first: what it rang before it died counts
        if self._cell[0] == expected:
            return True
        if gone:
            raise PeerGone("the other side of the bell is gone")
        return False

    def _nap(self, seconds: float) -> bool:
        """Sleep until a post, which is taken: True."""
        try:
            self._listen.acquire(seconds)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        return True

    def _poll(self, budget_ns: int, expected: int) -> bool:
        listen, end = self._listen, _clock() + budget_ns
        while True:
            for _ in _LOOKS_PER_YIELD:
                if listen.value:
                    listen.acquire()
                    if self._arrived(expected):
                        return True
            if _clock() >= end:
                return False
            _yield()

    def _sleep(self, expected: int, seconds: float) -> bool:
        """Nap until the peer rang (True) or until `seconds` have been slept (False).

        A nap counts as what was asked for at most: time in which this process was stopped, or the wall
        clock was set back, does not count against the peer.
        """
        try:
            self.sleeping = True
            while not self._arrived(expected):
                if seconds <= 0:
                    return False
                asked, before = min(_NAP_S, seconds), _clock()
                if self._nap(asked) and self._arrived(expected):
                    return True
                seconds -= min(asked, (_clock() - before) * 1e-9)
        finally:
            self.sleeping = False
        # Rung, and we took no post for it: a wait that an exception left has taken it, or it comes in
        # this moment, and taking it is what orders memory.
        self._nap(_SETTLE_S)
        return True


# -- the two semaphores ------------------------------------------------------------------------------

_PREFIX = "/outboard-"
_STALE_S = 300.0  # nobody takes five minutes between creating and unlinking


@contextlib.contextmanager
def semaphore_pair() -> Generator[Tuple[Any, Any, str, str], None, None]:
    """(go, done, go_name, done_name). The names exist only inside the `with`: both sides must have
    opened them by its end. A kill inside leaves two 32-byte files, which `remove_stale` takes away."""
    remove_stale()
    stem = _PREFIX + secrets.token_hex(12)
    names = stem + "-g", stem + "-d"
    made: List[Any] = []
    try:
        for name in names:
            made.append(posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o600, initial_value=0))
        yield made[0], made[1], names[0], names[1]
    except BaseException:
        for semaphore in made:
            semaphore.close()
        raise
    finally:
        for name in names:  # by name: a closed semaphore refuses
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_semaphore(name)


def open_semaphores(go_name: str, done_name: str) -> Tuple[Any, Any]:
    return posix_ipc.Semaphore(go_name), posix_ipc.Semaphore(done_name)


def remove_stale(folder: str = "/dev/shm", now_s: Optional[float] = None) -> int:
    """Unlink our own semaphores that a killed start left behind minutes ago. Returns how many."""
    removed = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if not entry.name.startswith("sem." + _PREFIX[1:]):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                age_s = (time.time() if now_s is None else now_s) - status.st_mtime
                if status.st_uid == os.getuid() and age_s > _STALE_S:
                    os.unlink(entry.path)
                    removed += 1
    return removed
