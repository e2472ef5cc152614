"""The bell: ring the other side, wait for its ring. The same on both sides.

Ringing stores a sequence number in the shared block and posts a semaphore. The sequence number decides; a
post is only a reason to look, so a stray post (`wake`) costs one look and can never be taken for an
answer. While both sides are awake nobody enters the kernel.

On x86, whose processors keep loads and stores in order, waiting polls the sequence number and acquires only
before it sleeps; ringing posts only when no post is there already. Of two sides that are awake neither
then touches a semaphore's cache line or lets go of the GIL. Everywhere else each ring posts, and waiting
polls the semaphore's *value* and then acquires it: POSIX orders memory there on every processor.

A wait has four stages: look a few times; when recent waits were long, nap until shortly before the expected
end; poll, giving the processor away between looks; sleep in bounded naps. Measurements behind the
numbers: benchmarks/results/step.md.
"""

import contextlib
import ctypes
import os
import time
from typing import Any, Callable, Generator, List, Optional, Tuple

import posix_ipc

from .deadline import counted_s
from .errors import DeadlinePassed, PeerGone

# Looks before the first yield, 50 to 60 ns each. An answer takes 2 to 4 us when both sides are awake; with 24
# looks half of them came later (a step took 6.5 to 8.8 us instead of 3.4 to 5.9, and beside a busy
# Python thread 14 instead of 7). After a wait that took longer only a few looks, and many again every
# 64th time: a peer on this very processor cannot run while we look (11 us; with 80 always, 18 to 31).
_QUICK_LOOKS = range(80)
_FEW_LOOKS = range(8)
_MANY_AGAIN = 64
# Between two yields: about a microsecond. Polling without yields costs whole scheduler slices (4 ms
# each way) when the scheduler has put both sides on one processor, as it likes to after a wake-up.
_LOOKS_PER_YIELD = range(16)
# A yield that took this long gave the processor to a foreign process, for one of its slices of 1 to 4 ms;
# a poll that came to nothing although waits were short may have kept the peer off it. Then waits sleep
# at once, for this many times what was lost: beside two busy processes 400 us a step became 15 to 25.
_SLOW_YIELD_NS = 100_000
_SLEEP_FACTOR = 32
# A timed sleep ends 50 to 100 us late on a virtual machine, so the nap ends this much before the expected
# end; long steps vary by some per cent, so the margin grows with them. 120 us and a tenth keep the wait at
# 9 to 12 % of a core for steps of 1 to 20 ms. It stops growing there: of a step of seconds nobody
# misses the microseconds, and a tenth of it would be a core and a deadline lost to polling.
_MARGIN_NS = 120_000
_MARGIN_FRACTION = 0.1
_MARGIN_MAX_NS = 2_000_000
_NAP_FROM_NS = _MARGIN_NS * 3 // 2  # a shorter nap is not worth its wake-up
# Polling past the expected end goes on for this many margins before sleeping: longer steals a core
# from a worker that wants all of them.
_POLL_MARGINS = 3
# Measured with the semaphores touched in every exchange and without: 6.7 and 5.0 us; 11.5 and 6.0 beside a
# busy Python thread, which takes the GIL whenever somebody acquires.
_LOADS_IN_ORDER = os.uname().machine in ("x86_64", "AMD64")
# One sleep. Bounds how late a death or a deadline is seen should a post be missed.
_NAP_S = 0.05
# From seeing a sequence number to its post: the two are an instruction apart.
_SETTLE_S = 0.001

_libc = ctypes.PyDLL(None)  # PyDLL keeps the GIL: os.sched_yield drops it, and with a busy Python
_yield = _libc.sched_yield  # thread beside us every drop costs a 5 ms switch interval
_clock = time.monotonic_ns

_PR_SET_TIMERSLACK = 29
_SIG_BLOCK, _SIG_SETMASK = 0, 2
_EVERY_SIGNAL = ctypes.create_string_buffer(b"\xff" * 128, 128)  # a sigset_t


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

    __slots__ = (
        *("_cell", "_listen", "_not_posted", "_post", "_sleep_until_ns"),
        *("gone", "ring", "sleeping", "wait"),
    )

    def __init__(self, post: Any, listen: Any, cell: "memoryview") -> None:
        self._post = post
        self._listen = listen
        self._cell = cell
        self._not_posted = False  # the last ring found a post that was there already
        self._sleep_until_ns = 0  # no polling until then
        self.gone = False  # the peer is dead; set by `wake`
        self.sleeping = False  # in a sleep, where a watcher may have to call `wake`
        self.ring: Callable[[], None] = self._make_ring() if _LOADS_IN_ORDER else post.release
        self.wait = self._make_wait()

    def _make_ring(self) -> Callable[[], None]:
        """Post unless a post is there: whoever takes it looks at the sequence number afterwards."""
        post = self._post
        release = post.release

        def ring() -> None:
            if post.value:
                self._not_posted = True
            else:
                release()

        return ring

    def _make_wait(self) -> Callable[[int, History, float], None]:
        """The first stage of a wait, as a closure: locals instead of attributes save a quarter of a
        microsecond of the 1.5 that a whole exchange takes."""
        listen, cell, wait_long = self._listen, self._cell, self._wait_long
        acquire, looks, misses = listen.acquire, _QUICK_LOOKS, 0

        def wait(expected: int, history: History, timeout_s: float) -> None:
            nonlocal looks, misses
            for _ in looks:
                if cell[0] == expected:
                    return
            misses += 1
            looks = _FEW_LOOKS if misses % _MANY_AGAIN else _QUICK_LOOKS
            wait_long(expected, history, timeout_s)

        def wait_posix(expected: int, history: History, timeout_s: float) -> None:
            for _ in _QUICK_LOOKS:
                if listen.value:
                    acquire()
                    if cell[0] == expected:
                        return
                    break
            wait_long(expected, history, timeout_s)

        return wait if _LOADS_IN_ORDER else wait_posix

    def wake(self, gone: bool = False) -> None:
        """From another thread: make the waiting side look again; `gone`: the peer is dead."""
        if gone:
            self.gone = True
        self._listen.release()

    def close(self) -> None:
        self._post.close()
        self._listen.close()
        del self.wait, self.ring  # they hold us, and the block with us, until the collector comes

    def _wait_long(self, expected: int, history: History, timeout_s: float) -> None:
        if self._not_posted:
            # Our processor may have read the semaphore's value before the sequence number was out, and
            # the peer may have taken the post and gone to sleep in between. Store buffers hold about
            # a hundred stores; by now several hundred have followed.
            self._not_posted = False
            self.ring()
        started = _clock()
        low, nap_s, margin = history.low_ns, 0.0, _MARGIN_NS
        if low > _NAP_FROM_NS:
            margin = max(margin, min(int(low * _MARGIN_FRACTION), _MARGIN_MAX_NS))
            nap_s = min((low - margin) * 1e-9, timeout_s)
        if not (
            (nap_s and self._sleep(expected, nap_s))
            or (started >= self._sleep_until_ns and self._poll(expected, margin, not nap_s))
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
        """Sleep until a post, which is taken: True.

        Signals wait meanwhile: posix_ipc runs their handlers inside `acquire` and drops what they raise,
        but for KeyboardInterrupt, so that a SIGTERM that calls sys.exit() would be lost.
        """
        mask = ctypes.create_string_buffer(128)
        _libc.pthread_sigmask(_SIG_BLOCK, None, mask)
        try:
            _libc.pthread_sigmask(_SIG_BLOCK, _EVERY_SIGNAL, None)
            self._listen.acquire(seconds)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            _libc.pthread_sigmask(_SIG_SETMASK, mask, None)
        return True

    def _poll(self, expected: int, margin_ns: int, soon: bool) -> bool:
        """`soon`: recent waits were short."""
        look = self._look if _LOADS_IN_ORDER else self._look_posix
        started = now = _clock()
        end = started + _POLL_MARGINS * margin_ns
        while now < end:
            before = now
            _yield()
            now = _clock()
            if look(expected):
                return True
            if now - before > _SLOW_YIELD_NS:
                self._sleep_until_ns = now + _SLEEP_FACTOR * (now - before)
                return False
        if soon:
            self._sleep_until_ns = now + _SLEEP_FACTOR * (now - started)
        return False

    def _look(self, expected: int) -> bool:
        cell = self._cell
        for _ in _LOOKS_PER_YIELD:
            if cell[0] == expected:
                return True
        return self._arrived(expected)

    def _look_posix(self, expected: int) -> bool:
        listen = self._listen
        for _ in _LOOKS_PER_YIELD:
            if listen.value:
                listen.acquire()
                if self._arrived(expected):
                    return True
        return False

    def _sleep(self, expected: int, seconds: float) -> bool:
        """Nap until the peer rang (True) or until `seconds` have been slept (False).

        Time in which this process was stopped, or for which the wall clock was set back, does not
        count against the peer: `deadline.counted_s` has the rule.
        """
        try:
            self.sleeping = True
            while not self._arrived(expected):
                if seconds <= 0:
                    return False
                asked, before = min(_NAP_S, seconds), _clock()
                if self._nap(asked) and self._arrived(expected):
                    return True
                seconds -= counted_s(asked, (_clock() - before) * 1e-9)
        finally:
            self.sleeping = False
        if _LOADS_IN_ORDER:
            return True
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
    stem = _PREFIX + os.urandom(12).hex()
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
