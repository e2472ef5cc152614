"""The bell: no ring is lost, none counts twice, no old answer is taken for a new one, whatever happens.

First a model: semaphores, clock and peer are simulated, hypothesis writes the schedule, and exceptions are
raised at every single instruction. Then the real thing between two processes: on one core, stopped,
dead, silent, under a wall clock that was set. At the end counts instead of clocks: sleeps, system
calls and memory of a tight exchange.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Any

import posix_ipc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outboard.ipc import doorbell, shm
from outboard.ipc.doorbell import Doorbell, History
from outboard.ipc.errors import DeadlinePassed, PeerGone
from pair import SOON_S, End, Pair, exit_code, forked, joined

# Schedules of microseconds each; a loaded machine is no failure.
many = settings(max_examples=200, deadline=None)

MS, SECOND = 1_000_000, 1_000_000_000
# What a wait may take from the ring to its return: one nap, one poll, and the scheduler's share.
PROMPT_NS = 60 * MS

# -- a simulated world -------------------------------------------------------------------------------

NOTHING, STORE, POST, STRAY = "nothing", "store", "post", "stray wake"
INTERRUPT, LATE_INTERRUPT, STOP, DEATH = "interrupt", "interrupt after", "stop", "death"


class World:
    """Clock, peer and semaphore of one waiting side. Each operation of the bell takes one action from
    the schedule; when it is used up, the peer does its duty, or is silent."""

    def __init__(self, in_order: bool, schedule: Iterable[str], silent: bool = False) -> None:
        self.in_order = in_order
        self.now_ns = 0
        self.stopped_ns = 0  # how much of it we were stopped
        self.tokens = 0
        self.asked = 0  # the last sequence number that the peer was asked for
        self.posted_ns: int | None = None  # when the peer rang for it
        self.rung_for = 0  # the sequence number in the block
        self.late_interrupt = False
        self.yields = 0
        self._schedule: Iterator[str] = iter(schedule)
        self._silent = silent
        self._owed = False  # stored, and not posted yet
        semaphore = FakeSemaphore(self)
        self.bell = Doorbell(FakeSemaphore(None), semaphore, FakeCell(self))  # type: ignore[arg-type]

    @property
    def dead(self) -> bool:
        return self.bell.gone

    @property
    def rung(self) -> bool:
        return self.posted_ns is not None

    def ask(self, sequence: int) -> None:
        self.asked = sequence
        self.posted_ns = None

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        action = next(self._schedule, None)
        if action is None:
            if not self._silent:
                self.peer(POST if self._owed else STORE)
        elif action in (STORE, POST):
            self.peer(action)
        elif action == STRAY:
            self.bell.wake()
        elif action == DEATH:
            self._owed = False
            self._silent = True
            self.bell.wake(gone=True)
        elif action == STOP:
            self.now_ns += 100 * SECOND
            self.stopped_ns += 100 * SECOND
        elif action == INTERRUPT:
            raise KeyboardInterrupt
        elif action == LATE_INTERRUPT:
            self.late_interrupt = True

    def peer(self, action: str) -> None:
        if self.dead:
            return
        if action == STORE and self.rung_for < self.asked:
            self.rung_for = self.asked
            self._owed = True
        elif action == POST and self._owed:
            self._owed = False
            # Where loads are in order a ring may find a post that is there already, and leave it at that.
            self.tokens = max(self.tokens, 1) if self.in_order else self.tokens + 1
            self.posted_ns = self.now_ns

    def take(self) -> None:
        self.tokens -= 1
        if self.late_interrupt:  # the semaphore is taken, and the caller never hears of it
            self.late_interrupt = False
            raise KeyboardInterrupt

    def wait(self, sequence: int, history: History, timeout_s: float) -> int:
        """As a user with an itchy ^C: asks again after every interrupt. Returns how many there were."""
        for interrupts in range(1000):
            try:
                self.bell.wait(sequence, history, timeout_s)
                return interrupts
            except KeyboardInterrupt:
                pass
        raise AssertionError("a thousand interrupts")


class FakeCell:
    """The u64 in the block that the peer writes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getitem__(self, _index: int) -> int:
        self._world.pass_time(30)
        return self._world.rung_for


class FakeSemaphore:
    """posix_ipc.Semaphore over a World; the one we post on counts by itself."""

    def __init__(self, world: World | None) -> None:
        self._world = world
        self.posts = 0

    @property
    def value(self) -> int:
        if self._world is None:
            return self.posts
        self._world.pass_time(60)
        return self._world.tokens

    def release(self) -> None:
        if self._world is None:
            self.posts += 1
        else:
            self._world.tokens += 1

    def acquire(self, timeout_s: float | None = None) -> None:
        world = self._world
        assert world is not None
        world.pass_time(300)
        if timeout_s is None:
            assert world.tokens, "an acquire without limit would have blocked"
        asleep_until = world.now_ns + int((timeout_s or 0) * 1e9)
        while not world.tokens:
            if world.now_ns >= asleep_until:
                raise posix_ipc.BusyError("simulated")
            world.pass_time(min(MS, asleep_until - world.now_ns))
        world.take()


@contextlib.contextmanager
def simulated(
    in_order: bool, schedule: Iterable[str], silent: bool = False
) -> Generator[World, None, None]:
    """`in_order`: as on x86; otherwise as on every other processor."""

    def clock() -> int:
        return world.now_ns

    def give_way() -> None:
        world.yields += 1
        world.pass_time(500)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doorbell, "_LOADS_IN_ORDER", in_order)
        world = World(in_order, schedule, silent)
        patch.setattr(doorbell, "_clock", clock)
        patch.setattr(doorbell, "_yield", give_way)
        yield world


both_kinds = pytest.mark.parametrize("in_order", [True, False], ids=["x86", "others"])


def foretelling(low_ns: int) -> History:
    history = History()
    history.low_ns = low_ns
    return history


def schedules(*actions: str) -> st.SearchStrategy[list[str]]:
    """Up to 80 operations: quick looks, polls, naps; most of them in peace."""
    return st.lists(st.sampled_from((NOTHING,) * 4 + actions), max_size=80)


# No envelope; one that makes the bell nap for 20 ms steps; one for steps of five seconds.
foretold = st.sampled_from([0, 20 * MS, 5 * SECOND])


@both_kinds
@many
@given(schedules(STORE, POST, STRAY), foretold)
def test_a_ring_ends_the_wait_promptly(in_order: bool, schedule: list[str], low_ns: int) -> None:
    history = foretelling(low_ns)
    with simulated(in_order, schedule) as world:
        for sequence in range(1, 6):
            world.ask(sequence)
            started_ns = world.now_ns
            world.bell.wait(sequence, history, 1000.0)
            rung_ns = world.now_ns if world.posted_ns is None else world.posted_ns
            assert world.now_ns - max(started_ns, rung_ns) < PROMPT_NS


@both_kinds
@many
@given(schedules(STORE, POST, STRAY, INTERRUPT, LATE_INTERRUPT, STOP), foretold)
@example([STORE, POST, LATE_INTERRUPT], 0)
@example([NOTHING] * 40 + [STOP], 20 * MS)
def test_a_wait_never_returns_before_its_own_ring(
    in_order: bool, schedule: list[str], low_ns: int
) -> None:
    history = foretelling(low_ns)
    with simulated(in_order, schedule) as world:
        for sequence in range(1, 6):
            world.ask(sequence)
            world.wait(sequence, history, 1000.0)
            assert world.rung_for == sequence


@both_kinds
@many
@given(schedules(STORE, POST, STRAY, INTERRUPT, LATE_INTERRUPT), foretold)
@example([STORE, POST, LATE_INTERRUPT, LATE_INTERRUPT, LATE_INTERRUPT], 0)
def test_an_interrupted_wait_goes_on_promptly(
    in_order: bool, schedule: list[str], low_ns: int
) -> None:
    history = foretelling(low_ns)
    with simulated(in_order, schedule) as world:
        for sequence in range(1, 6):
            world.ask(sequence)
            started_ns = world.now_ns
            interrupts = world.wait(sequence, history, 1000.0)
            rung_ns = world.now_ns if world.posted_ns is None else world.posted_ns
            took_ns = world.now_ns - max(started_ns, rung_ns)
            # Polling for a fraction of the foretold time is part of the bargain.
            assert took_ns < PROMPT_NS * (1 + interrupts) + low_ns // 2 * bool(interrupts)


@both_kinds
@many
@given(schedules(STRAY, STOP, INTERRUPT), foretold)
@example([STOP], 0)
@example([NOTHING] * 26 + [STOP], 20 * MS)
@example([NOTHING] * 60 + [STOP], 0)
def test_time_in_which_we_were_stopped_does_not_count_against_the_peer(
    in_order: bool, schedule: list[str], low_ns: int
) -> None:
    history = foretelling(low_ns)
    # The peer was stopped with us, as a whole container is, and rings soon after both go on.
    with simulated(in_order, [*schedule, *[NOTHING] * 20]) as world:
        world.ask(1)
        world.wait(1, history, 10.0)
        assert world.rung_for == 1


@both_kinds
@many
@given(schedules(STRAY), foretold, st.sampled_from([0.0, 0.01, 0.3, 2.0]))
def test_silence_ends_at_the_deadline_and_not_before(
    in_order: bool, schedule: list[str], low_ns: int, timeout_s: float
) -> None:
    with simulated(in_order, schedule, silent=True) as world:
        world.ask(1)
        with pytest.raises(DeadlinePassed):
            world.bell.wait(1, foretelling(low_ns), timeout_s)
        # A nap that a stray wake cuts short counts as what it lasted.
        assert world.now_ns > 0.95 * timeout_s * 1e9
        assert world.now_ns < timeout_s * 1e9 + 2 * PROMPT_NS + low_ns // 2


@both_kinds
@many
@given(schedules(STORE, POST, STRAY, DEATH), foretold)
@example([STORE, POST, DEATH], 5 * SECOND)
@example([DEATH, STRAY], 5 * SECOND)
@example([NOTHING] * 30 + [DEATH], 5 * SECOND)
def test_a_death_is_heard_promptly_and_after_the_answer(
    in_order: bool, schedule: list[str], low_ns: int
) -> None:
    with simulated(in_order, [*schedule, DEATH]) as world:
        world.ask(1)
        try:
            world.bell.wait(1, foretelling(low_ns), 1000.0)
        except PeerGone:
            assert world.dead
            assert not world.rung  # what it said before it died counts
        else:
            assert world.rung_for == 1


@both_kinds
def test_a_death_whose_wake_was_taken_by_an_earlier_wait_is_heard_promptly(in_order: bool) -> None:
    with simulated(in_order, [STORE, POST, DEATH]) as world:
        world.ask(1)
        world.tokens += 1  # a stray post: the first wait leaves with one post too many taken
        world.bell.wait(1, History(), 10.0)
        while world.tokens:
            world.take()
        world.ask(2)
        before_ns = world.now_ns
        with pytest.raises(PeerGone):
            world.bell.wait(2, foretelling(5 * SECOND), 1000.0)
        assert world.now_ns - before_ns < PROMPT_NS


@both_kinds
def test_a_ring_whose_post_is_lost_costs_one_nap(in_order: bool) -> None:
    with simulated(in_order, [NOTHING] * 3 + [STORE], silent=True) as world:
        world.ask(1)
        world.bell.wait(1, History(), 10.0)
        assert world.now_ns < 2 * PROMPT_NS


@both_kinds
@pytest.mark.parametrize("posts", [1, 2, 5])
def test_ringing_twice_is_answered_once(in_order: bool, posts: int) -> None:
    with simulated(in_order, [NOTHING] * 200, silent=True) as world:
        world.ask(1)
        world.rung_for = 1
        world.tokens = posts
        world.bell.wait(1, History(), 1.0)
        world.ask(2)
        with pytest.raises(DeadlinePassed):
            world.bell.wait(2, History(), 1.0)


@both_kinds
def test_polling_gives_the_processor_away_all_the_time(in_order: bool) -> None:
    with simulated(in_order, [], silent=True) as world:
        world.ask(1)
        with pytest.raises(DeadlinePassed):
            world.bell.wait(1, History(), 0.0)
        assert world.now_ns / world.yields < 3_000


@both_kinds
def test_a_wait_without_limit_ends_with_the_ring(in_order: bool) -> None:
    with simulated(in_order, [NOTHING] * 500) as world:
        world.ask(1)
        world.bell.wait(1, History(), float("inf"))
        assert world.rung_for == 1


# -- an exception at every instruction -----------------------------------------------------------------


class InterruptAt:
    """Raises KeyboardInterrupt before the `nth` bytecode that runs inside doorbell.py."""

    def __init__(self, nth: int) -> None:
        self._left = nth
        self.raised = False

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename != doorbell.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left < 0 and not self.raised:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> InterruptAt:
        self._previous = sys.gettrace()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_exc: object) -> None:
        sys.settrace(self._previous)
        # A trace can raise where the interpreter itself never looks for signals: just before the mask
        # of a sleep is taken off.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


@both_kinds
@pytest.mark.parametrize(
    ("what", "schedule", "low_ns"),
    [
        ("the answer is there", [STORE, POST], 0),
        ("a stray post, then the answer", [STRAY, NOTHING, STORE, NOTHING, POST], 0),
        ("while it polls", [NOTHING] * 34 + [STORE, POST], 0),
        ("while it naps", [NOTHING] * 34 + [STORE, POST], 20 * MS),
        ("between store and post", [NOTHING] * 20 + [STORE] + [NOTHING] * 9 + [POST], 0),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_interrupt_at_any_instruction_loses_nothing(
    in_order: bool, what: str, schedule: list[str], low_ns: int
) -> None:
    for nth in range(100_000):
        with simulated(in_order, schedule) as world:
            world.ask(1)
            history = foretelling(low_ns)
            with InterruptAt(nth) as interrupt, contextlib.suppress(KeyboardInterrupt):
                world.bell.wait(1, history, 10.0)
            if interrupt.raised:
                world.bell.wait(1, history, 10.0)
            assert world.rung_for == 1
            world.ask(2)
            world.bell.wait(2, history, 10.0)
            assert world.rung_for == 2, f"{what}: a stale answer after instruction {nth}"
            assert world.now_ns < SECOND, f"{what}: a slow one after instruction {nth}"
        if not interrupt.raised:
            assert nth > 10  # it did interrupt
            return
    raise AssertionError("the wait never ended")


# -- ringing where loads are in order --------------------------------------------------------------------


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "_LOADS_IN_ORDER", True)


def posts_of(bell: Doorbell, semaphore: FakeSemaphore) -> int:
    bell.ring()
    return semaphore.posts


@pytest.mark.usefixtures("x86")
def test_a_ring_posts_when_no_post_is_there() -> None:
    with simulated(True, []) as world:
        semaphore = FakeSemaphore(None)
        assert posts_of(Doorbell(semaphore, semaphore, FakeCell(world)), semaphore) == 1  # type: ignore[arg-type]


@pytest.mark.usefixtures("x86")
def test_a_ring_that_found_a_post_is_made_up_for_when_the_answer_does_not_come() -> None:
    """The peer may have taken that post, looked before our number was out, and gone to sleep."""
    with simulated(True, [NOTHING] * 200) as world:
        theirs = FakeSemaphore(None)
        bell = Doorbell(theirs, FakeSemaphore(world), FakeCell(world))  # type: ignore[arg-type]
        world.bell = bell
        theirs.posts = 1
        bell.ring()
        assert theirs.posts == 1
        theirs.posts = 0  # taken, and not for us
        world.ask(1)
        bell.wait(1, History(), 10.0)
        assert theirs.posts == 1


# -- what recent waits foretell ------------------------------------------------------------------------


@many
@given(st.lists(st.integers(0, 10 * SECOND), min_size=1, max_size=50))
def test_the_envelope_never_exceeds_the_longest_wait(waits: list[int]) -> None:
    history = History()
    for waited_ns in waits:
        history.note(waited_ns)
        assert 0 <= history.low_ns <= max(waits)


def test_the_envelope_learns_a_steady_step_within_fifty_steps() -> None:
    history = History()
    for _ in range(50):
        history.note(5 * MS)
    assert history.low_ns > 4 * MS


def test_the_envelope_falls_at_once() -> None:
    history = foretelling(5 * MS)
    history.note(MS)
    assert history.low_ns == MS


def test_one_long_wait_at_most_doubles_the_envelope() -> None:
    history = foretelling(5 * MS)
    history.note(60 * SECOND)
    assert history.low_ns <= 10 * MS + 20_000


# -- two processes -------------------------------------------------------------------------------------


def echo(end: End, rounds: int, delay_s: float = 0.0) -> Callable[[], None]:
    """The life of a worker: answers `rounds` commands."""

    def life() -> None:
        for sequence in range(1, rounds + 1):
            end.wait(sequence)
            if delay_s:
                time.sleep(delay_s)
            end.ring()

    return life


def command(pair: Pair, timeout_s: float = SOON_S) -> int:
    sequence = pair.host.ring()
    pair.host.wait(sequence, timeout_s)
    assert pair.host.block.reply[shm.SEQUENCE] == sequence
    return sequence


@contextlib.contextmanager
def pinned(cores: set[int]) -> Generator[None, None, None]:
    """This process, and what it forks inside, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def one_core() -> set[int]:
    return {min(os.sched_getaffinity(0))}


def test_both_sides_on_one_core_give_way_to_each_other() -> None:
    rounds = 500
    with pinned(one_core()), joined() as pair, forked(echo(pair.worker, rounds)):
        started = time.monotonic()
        for _ in range(rounds):
            command(pair)
        # Without yielding every round costs two scheduler slices of 4 ms: 4 s.
        assert time.monotonic() - started < 2.0


def test_a_stopped_worker_is_waited_for() -> None:
    with joined() as pair, forked(echo(pair.worker, 2)) as pid:
        command(pair)
        os.kill(pid, signal.SIGSTOP)
        resume = threading.Timer(0.2, os.kill, (pid, signal.SIGCONT))
        resume.start()
        assert command(pair) == 2
        resume.join()


def test_a_worker_stopped_beyond_the_deadline_is_silent_and_its_late_answer_is_not_lost() -> None:
    with joined() as pair, forked(echo(pair.worker, 3)) as pid:
        command(pair)
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        with pytest.raises(DeadlinePassed):
            command(pair, timeout_s=0.15)
        os.kill(pid, signal.SIGCONT)
        pair.host.wait(2)
        assert command(pair) == 3


@pytest.mark.parametrize("low_ns", [0, 50 * MS], ids=["sleeping", "napping"])
def test_a_host_stopped_beyond_its_deadline_still_gets_the_answer(low_ns: int) -> None:
    with joined() as pair:

        def host() -> None:
            pair.host.history.low_ns = low_ns
            pair.host.wait(1, 0.3)

        with forked(host) as pid:
            time.sleep(0.04)
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.05)  # the worker was stopped too, and needs a moment
            pair.worker.ring()
            assert exit_code(pid) == 0


@contextlib.contextmanager
def later(delay_s: float, action: Callable[[], None]) -> Generator[None, None, None]:
    timer = threading.Timer(delay_s, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("low_ns", [0, 60 * SECOND], ids=["sleeping", "napping"])
def test_a_death_ends_the_wait_at_once(low_ns: int) -> None:
    with joined() as pair:
        pair.host.history.low_ns = low_ns
        started = time.monotonic()
        with (
            later(0.05, lambda: pair.host.bell.wake(gone=True)),
            pytest.raises(PeerGone),
        ):
            command(pair, 100.0)
        assert time.monotonic() - started < 1.0


def test_a_death_before_the_wait_ends_it_at_once_however_long_the_steps_are() -> None:
    with joined() as pair:
        pair.host.history.low_ns = 60 * SECOND
        pair.host.bell.wake(gone=True)
        started = time.monotonic()
        with pytest.raises(PeerGone):
            command(pair, 100.0)
        assert time.monotonic() - started < 1.0


def test_a_stray_wake_does_not_end_a_wait() -> None:
    with joined() as pair, later(0.02, pair.host.bell.wake), pytest.raises(DeadlinePassed):
        command(pair, 0.15)


@pytest.mark.parametrize("low_ns", [0, 10 * MS], ids=["sleeping", "napping"])
def test_an_interrupt_signal_leaves_a_wait_that_goes_on(low_ns: int) -> None:
    with joined() as pair:
        pair.host.history.low_ns = low_ns
        pair.host.ring()
        # Not SIGALRM: the outer time-out of every test is one.
        previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        try:
            with later(0.03, send_signal), pytest.raises(KeyboardInterrupt):
                pair.host.wait(1)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        pair.worker.ring()
        pair.host.wait(1)
        assert pair.exchange() == 2


def send_signal() -> None:
    """To the main thread, so that it interrupts a sleep there."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def ignore(_number: int, _frame: FrameType | None) -> None:
    pass


@pytest.mark.parametrize("low_ns", [0, 60 * SECOND], ids=["sleeping", "napping"])
def test_what_a_signal_handler_raises_ends_the_wait_and_is_not_lost(low_ns: int) -> None:
    """A scheduler's SIGTERM often ends in sys.exit(). posix_ipc alone would drop that."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(7)

    with joined() as pair:
        pair.host.history.low_ns = low_ns
        previous = signal.signal(signal.SIGUSR1, handler)
        try:
            with later(0.03, send_signal), pytest.raises(SystemExit):
                command(pair)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        pair.worker.ring()
        pair.host.wait(1)


def test_a_sleep_leaves_the_signals_of_the_thread_as_they_were() -> None:
    def mask() -> set[int]:
        return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}

    before = mask()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        with joined() as pair, pytest.raises(DeadlinePassed):
            command(pair, 0.02)
        assert mask() == before | {int(signal.SIGUSR2)}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_signal_that_raises_nothing_does_not_end_a_wait() -> None:
    with joined() as pair:
        previous = signal.signal(signal.SIGUSR1, ignore)
        try:
            with later(0.02, send_signal), later(0.05, send_signal), pytest.raises(DeadlinePassed):
                command(pair, 0.2)
        finally:
            signal.signal(signal.SIGUSR1, previous)


# -- a wall clock that is set --------------------------------------------------------------------------
# Timed semaphores end at a time of the wall clock, and no test may set the machine's.


class SetBack:
    """A semaphore under a clock that was set back 20 s during each sleep: only a post ends it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def acquire(self, timeout_s: float | None = None) -> None:
        self._real.acquire(timeout_s if not timeout_s else timeout_s + 20)


class SetForward(SetBack):
    """The clock jumped an hour ahead: each sleep ends at once."""

    def acquire(self, timeout_s: float | None = None) -> None:
        self._real.acquire(timeout_s if timeout_s is None else 0)


@contextlib.contextmanager
def under(clock: type[SetBack], low_ns: int = 0) -> Generator[Pair, None, None]:
    """A pair whose host sleeps under another clock."""
    with joined() as pair, doorbell.semaphore_pair() as (go, done, _, _):
        one = slice(shm.SEQUENCE, shm.SEQUENCE + 1)
        pair.host.bell = Doorbell(go, clock(done), pair.host.block.reply[one])
        pair.worker.bell = Doorbell(done, go, pair.worker.block.request[one])
        pair.host.history.low_ns = low_ns
        try:
            yield pair
        finally:
            pair.host.bell.close()


@pytest.mark.parametrize("low_ns", [0, 60 * SECOND], ids=["sleeping", "napping"])
def test_a_clock_set_back_does_not_hang_a_watched_wait(low_ns: int) -> None:
    with under(SetBack, low_ns) as pair:
        bell, stop = pair.host.bell, threading.Event()

        def watch() -> None:  # as the host's watcher does twice a second
            while not stop.wait(0.01):
                if bell.sleeping:
                    bell.wake()

        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.monotonic()
        try:
            with pytest.raises(DeadlinePassed):
                command(pair, 0.2)
        finally:
            stop.set()
            watcher.join()
        assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("low_ns", [0, 60 * SECOND], ids=["sleeping", "napping"])
def test_a_clock_set_forward_expires_nothing(low_ns: int) -> None:
    with under(SetForward, low_ns) as pair:
        started = time.monotonic()
        with pytest.raises(DeadlinePassed):
            command(pair, 0.2)
        assert time.monotonic() - started > 0.19


def test_a_ring_is_heard_under_a_clock_set_forward() -> None:
    with under(SetForward) as pair:

        def ring() -> None:
            pair.worker.ring()

        with later(0.05, ring):
            command(pair)


# -- counts --------------------------------------------------------------------------------------------


def test_an_answer_that_is_there_costs_no_system_call() -> None:
    """Under strict seccomp any call but read, write and exit is the process's last."""
    read_end, write_end = os.pipe()
    libc = ctypes.CDLL(None)
    with joined() as pair:
        for _ in range(100):
            pair.exchange()

        def life() -> None:
            gc.disable()
            libc.prctl(22, 1, 0, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_STRICT
            for _ in range(1000):
                pair.exchange()
            os.write(write_end, b"none")

        with forked(life) as pid:
            exit_code(pid)
        os.close(write_end)
        said = os.read(read_end, 10)
        os.close(read_end)
    assert said == b"none"


def test_a_sleep_is_a_system_call_that_the_count_sees() -> None:
    libc = ctypes.CDLL(None)
    with joined() as pair:

        def life() -> None:
            libc.prctl(22, 1, 0, 0, 0)
            with contextlib.suppress(DeadlinePassed):
                pair.host.wait(1, 0.01)

        with forked(life) as pid:
            assert exit_code(pid) == -signal.SIGKILL


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_tight_exchange_between_two_processes_sleeps_nowhere() -> None:
    rounds, tries = 200, 30
    with joined() as pair, forked(echo(pair.worker, (rounds + 1) * tries)):
        sleeps: list[int] = []
        # Other load on the machine may put a side to sleep; a bell that sleeps does so every time.
        for _ in range(tries):
            command(pair)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            for _ in range(rounds):
                command(pair)
            sleeps.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
            if sleeps[-1] == 0:
                return
    raise AssertionError(f"sleeps in each run of {rounds} exchanges: {sleeps}")


def test_a_warm_exchange_keeps_no_memory() -> None:
    with joined() as pair:
        for _ in range(500):
            pair.exchange()
        gc.collect()
        gc.disable()
        try:
            before = sys.getallocatedblocks()
            for _ in range(2000):
                pair.exchange()
            grown = sys.getallocatedblocks() - before
        finally:
            gc.enable()
    # Not one block in a hundred exchanges: CPython 3.10 keeps a dozen frames and integers of its own.
    assert grown < 20


def grown_lines(pair: Pair, exchanges: int) -> set[int]:
    """Lines of the bell that hold more memory after so many exchanges than before them."""
    only = [tracemalloc.Filter(True, doorbell.__file__)]
    before = tracemalloc.take_snapshot().filter_traces(only)
    for _ in range(exchanges):
        pair.exchange()
    after = tracemalloc.take_snapshot().filter_traces(only)
    return {
        line.traceback[0].lineno
        for line in after.compare_to(before, "lineno")
        if line.size_diff > 0
    }


def test_a_warm_wait_allocates_nothing_that_outlives_it() -> None:
    with joined() as pair:
        tracemalloc.start()
        try:
            # Twice: CPython 3.10 gives a function a cache of its own at its 1,024th call, once.
            twice = [grown_lines(pair, 1100), grown_lines(pair, 1100), grown_lines(pair, 1100)][1:]
        finally:
            tracemalloc.stop()
    assert twice[0] & twice[1] == set()


# -- the semaphores ------------------------------------------------------------------------------------


def exists(name: str) -> bool:
    return os.path.exists("/dev/shm/sem." + name[1:])


def test_the_names_are_gone_when_both_sides_hold_the_semaphores() -> None:
    with doorbell.semaphore_pair() as (go, done, go_name, done_name):
        assert exists(go_name) and exists(done_name)
        other_go, other_done = doorbell.open_semaphores(go_name, done_name)
    assert not exists(go_name) and not exists(done_name)
    go.release()
    other_go.acquire(0)  # and they still ring
    for semaphore in (go, done, other_go, other_done):
        semaphore.close()


def test_the_names_are_gone_also_when_attaching_fails() -> None:
    made: list[str] = []
    with pytest.raises(ZeroDivisionError), doorbell.semaphore_pair() as (_, _, *names):
        made += names
        raise ZeroDivisionError
    assert not any(map(exists, made))


def test_a_failed_attach_keeps_no_semaphore_mapped() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("/dev/shm/" in line for line in maps)

    before = mapped()
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), doorbell.semaphore_pair():
            raise ZeroDivisionError
    assert mapped() == before


def test_semaphores_are_for_this_user_alone() -> None:
    with doorbell.semaphore_pair() as (go, done, go_name, done_name):
        modes = {
            os.stat("/dev/shm/sem." + name[1:]).st_mode & 0o777 for name in (go_name, done_name)
        }
    go.close()
    done.close()
    assert modes == {0o600}


def test_what_a_killed_start_left_behind_is_removed_when_it_is_old(tmp_path: Any) -> None:
    for name, age_s in (("sem.outboard-old-g", 400), ("sem.outboard-new-g", 100)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (1e9 - age_s, 1e9 - age_s))
    (tmp_path / "sem.somebody-else").write_bytes(b"")
    os.utime(tmp_path / "sem.somebody-else", (0, 0))
    assert doorbell.remove_stale(str(tmp_path), now_s=1e9) == 1
    assert sorted(os.listdir(tmp_path)) == ["sem.outboard-new-g", "sem.somebody-else"]


def test_a_machine_without_the_folder_has_nothing_stale(tmp_path: Any) -> None:
    assert doorbell.remove_stale(str(tmp_path / "absent")) == 0


def test_a_closed_bell_is_freed_without_the_garbage_collector() -> None:
    class Cell(bytearray):
        pass

    memory = Cell(8)
    gone: list[bool] = []
    weakref.finalize(memory, gone.append, True)
    with doorbell.semaphore_pair() as (go, done, _, _):
        pass
    gc.disable()
    try:
        bell = Doorbell(go, done, memoryview(memory).cast("Q"))
        bell.close()
        del bell, memory
        assert gone == [True]
    finally:
        gc.enable()
