"""Whatever bytes come from the other side: a message or a ProtocolError, in bounded time and memory.

`fuzz.py` has the targets and the changes; hypothesis looks where a change of bytes does not lead. A million
inputs: `python tests/fuzz.py --inputs 1000000`, result in benchmarks/results/fuzz.md.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Callable
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuzz
from outboard.backends import FakeBackend, OutboardError
from outboard.ipc import codec, shm
from outboard.ipc.errors import ProtocolError

# What five minutes of CI allow, for all targets together; the fast lane takes two seconds of it.
SLOW_S = float(os.environ.get("OUTBOARD_FUZZ_S", "60"))
FAST_S = 2.0


@pytest.fixture(scope="module")
def seed() -> int:
    """New inputs in every run; the error names it."""
    return random.SystemRandom().randrange(1 << 32)


@pytest.mark.parametrize(
    "budget_s",
    [FAST_S, pytest.param(SLOW_S, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
    ids=["fast", "slow"],
)
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_changed_bytes_are_a_message_or_a_protocol_error(
    target: str, budget_s: float, seed: int
) -> None:
    done = fuzz.campaign(target, 1_000_000, seed, within_s=budget_s / len(fuzz.TARGETS))
    assert done.inputs > 20
    assert fuzz.bounded(done)


def test_the_unchanged_conversation_comes_to_its_end_on_both_sides() -> None:
    """So a change of it is read as deep as it can be."""
    assert fuzz.hosts_end(b"".join(fuzz.BY_WORKER))
    assert fuzz.workers_end(b"".join(fuzz.BY_HOST))
    for block in fuzz._blocks:  # pyright: ignore[reportPrivateUsage]
        block.close_fd()
    fuzz._blocks.clear()  # pyright: ignore[reportPrivateUsage]


def test_a_source_that_is_no_path_is_a_protocol_error() -> None:
    """Found by the million inputs: a zero byte in a path is a ValueError of Python's."""
    hello = replace(fuzz.HELLO, source="/ip\0c")
    assert not fuzz.hosts_end(fuzz.PREAMBLE + fuzz.frame(hello))


def test_another_exception_would_be_found_and_its_input_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fragile(body: bytes) -> None:
        if body[:1] != b"\x92":
            raise KeyError("not caught")

    monkeypatch.setattr(codec, "decode", fragile)
    with pytest.raises(AssertionError, match=r"'codec' broke with seed 5, input \d+: KeyError"):
        fuzz.campaign("codec", 100_000, seed=5)


def test_an_input_beyond_the_bounds_would_be_found() -> None:
    assert fuzz.bounded(fuzz.Campaign("codec", 1, slowest_s=0.1, growth_bytes=1 << 20))
    assert not fuzz.bounded(fuzz.Campaign("codec", 1, slowest_s=0.6))
    assert not fuzz.bounded(fuzz.Campaign("codec", 1, growth_bytes=300 << 20))


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again = (fuzz.mutated(random.Random("a 1"), fuzz.MESSAGES[0]) for _ in range(2))
    assert first == again


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(sorted(codec.MESSAGES)),
    st.dictionaries(st.text(max_size=12), _PLAIN, max_size=6),
)
def test_any_fields_under_a_known_name_are_that_message_or_a_protocol_error(
    name: str, fields: dict[str, object]
) -> None:
    body = msgpack.packb([name, fields])
    assert body is not None
    with contextlib.suppress(ProtocolError):
        assert type(codec.decode(body)).__name__ == name


@settings(deadline=None, max_examples=100)
@given(st.integers(0, (1 << 32) - 1))
def test_an_announced_length_takes_no_memory_before_the_bytes_are_there(length: int) -> None:
    bodies = [b"\xdd" + struct.pack(">I", length), b"\xdf" + struct.pack(">I", length),
              b"\xdb" + struct.pack(">I", length), b"\xc6" + struct.pack(">I", length)]  # fmt: skip
    before = fuzz.peak_bytes()
    for body in bodies:
        with pytest.raises(ProtocolError):
            codec.decode(body)
    assert fuzz.peak_bytes() - before < 64 << 20


# -- the header of a living backend ------------------------------------------------------------------------

# The simulator writes what it is told into the whole first page, after the host has rung.
SCRIBBLER = """
def step(self, bank):
    import mmap
    from outboard.workers import serve
    from outboard.ipc import shm
    import gc, random
    worker = [w for w in gc.get_objects() if type(w) is serve.Worker][0]
    chance = random.Random(int(self.ctrl[0, 0]))
    page = worker.block._map
    kept = bytes(page[:4096])
    for _ in range(60):
        line = chance.choice((shm.REQUEST_AT, shm.REPLY_AT))
        at = line + 8 * chance.randrange(8) if {wild} else chance.randrange(4096)
        size = 8 if {wild} else 1
        if {wild} or not shm.REQUEST_AT <= at < shm.REQUEST_AT + 64:
            page[at : at + size] = bytes(chance.randrange(256) for _ in range(size))
    return super().step(bank)
"""


@pytest.mark.parametrize("number", range(3))
def test_random_bytes_in_the_header_beside_the_request_line_change_nothing(
    custom: Callable[..., FakeBackend], number: int
) -> None:
    sim = custom(SCRIBBLER.format(wild=False))
    for step in range(20):
        state = sim.step(np.full((3, 4), number * 100 + step, np.float32))
        assert state.qpos.shape == (3, 4) and state.qvel.shape == (3, 4)
    assert sim.timings.commands == 20


@pytest.mark.parametrize("number", range(6))
def test_random_words_in_both_lines_are_an_error_of_ours_and_never_another_one(
    custom: Callable[..., FakeBackend], number: int
) -> None:
    """An IndexError or an OverflowError would be a word that was taken for an index or a count."""
    sim = custom(SCRIBBLER.format(wild=True), step_timeout_s=0.3)
    with pytest.raises(OutboardError) as caught:
        for _ in range(5):
            sim.step(np.full((3, 4), number, np.float32))
    assert caught.value.report is not None
    sim.restart()
    assert sim.state.qpos.shape == (3, 4)


@pytest.mark.parametrize("word", [shm.SEQUENCE, shm.OPCODE, shm.COUNT])
@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 63, 255])
def test_a_word_of_the_request_line_that_the_worker_wrote_over_is_no_index(
    custom: Callable[..., FakeBackend], word: int, value: int
) -> None:
    sim = custom(
        "def step(self, bank):\n"
        "    from outboard.workers import serve\n"
        "    import gc\n"
        "    worker = [w for w in gc.get_objects() if type(w) is serve.Worker][0]\n"
        f"    worker.block.request[{word}] = {value}\n"
        "    return super().step(bank)",
        step_timeout_s=0.3,
    )
    try:
        for _ in range(2):
            sim.step_async(np.zeros((3, 4), np.float32))
            time.sleep(0.05)  # so that the host reads what the worker wrote
            sim.step_wait()
        assert word != shm.SEQUENCE
    except OutboardError as error:
        assert word == shm.SEQUENCE
        assert "wrote over the request line" in error.message
