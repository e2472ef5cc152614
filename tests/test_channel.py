"""The control channel: whole frames or a named error, within a deadline, to the last word of the dead."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.ipc import channel, codec
from outboard.ipc.channel import Channel
from outboard.ipc.deadline import Deadline
from outboard.ipc.errors import DeadlinePassed, PeerGone, ProtocolError
from outboard.ipc.messages import PROTOCOL_VERSION, Bye, Close, Error, Progress, RenderReply
from pair import SOON_S, Channels, channels, forked, soon
from samples import SAMPLES

BIG = RenderReply(1000, 1000, bytes(3_000_000))  # many times what a socket holds


def test_every_message_arrives_as_it_was_sent() -> None:
    with channels() as pair:
        for message in SAMPLES.values():
            pair.worker.send(message, soon())
            assert pair.host.receive(soon()) == message


def test_messages_arrive_in_order_and_one_by_one() -> None:
    with channels() as pair:
        for done in range(50):
            pair.worker.send(Progress("building", done, 50), soon())
        for done in range(50):
            assert pair.host.receive(soon()) == Progress("building", done, 50)
        assert not pair.host.pending()


def test_a_message_larger_than_the_socket_arrives() -> None:
    with channels() as pair:
        sender = threading.Thread(target=pair.worker.send, args=(BIG, soon()))
        sender.start()
        assert pair.host.receive(soon()) == BIG
        sender.join()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_a_frame_in_many_small_chunks_is_one_message(sizes: list[int]) -> None:
    data = channel.frame(SAMPLES["init"]) + channel.frame(Bye())
    with channels() as pair:
        pair.worker_socket.settimeout(SOON_S)

        def drip() -> None:
            at = turn = 0
            while at < len(data):
                pair.worker_socket.sendall(data[at : at + sizes[turn % len(sizes)]])
                at += sizes[turn % len(sizes)]
                turn += 1

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert pair.host.receive(soon()) == SAMPLES["init"]
        assert pair.host.receive(soon()) == Bye()
        dripping.join()


def test_the_preamble_says_the_version() -> None:
    with channels() as pair:
        pair.worker.send_preamble(soon())
        assert pair.host.receive_preamble(soon()) == PROTOCOL_VERSION


def test_the_preamble_of_another_version_is_read() -> None:
    with channels() as pair:
        pair.worker_socket.sendall(channel.preamble(77))
        assert pair.host.receive_preamble(soon()) == 77


def test_who_does_not_speak_the_protocol_is_told_by_his_first_bytes() -> None:
    with channels() as pair:
        pair.worker_socket.sendall(b"Traceback (most recent call last)")
        with pytest.raises(ProtocolError, match="Trac"):
            pair.host.receive_preamble(soon())


# -- deadlines -----------------------------------------------------------------------------------------


def test_silence_ends_at_the_deadline() -> None:
    with channels() as pair:
        started = time.monotonic()
        with pytest.raises(DeadlinePassed):
            pair.host.receive(Deadline(0.05))
        assert 0.05 <= time.monotonic() - started < 2.0


def test_half_a_frame_does_not_stop_the_clock() -> None:
    with channels() as pair:
        pair.worker_socket.sendall(channel.frame(Bye())[:-1])
        with pytest.raises(DeadlinePassed):
            pair.host.receive(Deadline(0.05))


def test_a_frame_that_a_deadline_cut_is_read_by_the_next_call() -> None:
    data = channel.frame(SAMPLES["hello"])
    with channels() as pair:
        pair.worker_socket.sendall(data[:10])
        with pytest.raises(DeadlinePassed):
            pair.host.receive(Deadline(0.0))
        pair.worker_socket.sendall(data[10:])
        assert pair.host.receive(soon()) == SAMPLES["hello"]


def test_a_byte_now_and_then_does_not_stop_the_clock() -> None:
    stop = threading.Event()
    with channels() as pair:

        def drip() -> None:
            pair.worker_socket.sendall(struct.pack("<I", 1000))
            while not stop.wait(0.01):
                pair.worker_socket.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            with pytest.raises(DeadlinePassed):
                pair.host.receive(Deadline(0.1))
        finally:
            stop.set()
            dripping.join()


def test_sending_to_who_does_not_read_ends_at_the_deadline() -> None:
    with channels() as pair, pytest.raises(DeadlinePassed):
        pair.worker.send(BIG, Deadline(0.05))


def test_what_is_there_is_received_also_after_the_deadline() -> None:
    # We may have been suspended while it came.
    with channels() as pair:
        pair.worker.send(Bye(), soon())
        assert pair.host.receive(Deadline(-1.0)) == Bye()


def test_looking_never_waits() -> None:
    with channels() as pair:
        assert not pair.host.pending()
        pair.worker.send(Bye(), soon())
        assert pair.host.pending()


# -- garbage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, codec.MAX_BODY + 1, 0xFFFFFFFF])
def test_an_impossible_length_is_refused_before_anything_is_read(length: int) -> None:
    with channels() as pair:
        pair.worker_socket.sendall(struct.pack("<I", length))
        with pytest.raises(ProtocolError, match=f"announces {length} bytes"):
            pair.host.receive(Deadline(0.0))


@settings(deadline=None, max_examples=100)
@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_a_named_error_and_never_a_hang(garbage: bytes) -> None:
    with channels() as pair:
        pair.worker_socket.sendall(garbage)
        pair.worker_socket.shutdown(socket.SHUT_WR)
        with pytest.raises((ProtocolError, PeerGone)):
            for _ in garbage:
                pair.host.receive(soon())


def test_a_bad_frame_takes_no_bytes_of_the_next_one() -> None:
    with channels() as pair:
        pair.worker_socket.sendall(struct.pack("<I", 3) + b"\xc1\xc1\xc1" + channel.frame(Bye()))
        with pytest.raises(ProtocolError):
            pair.host.receive(soon())
        assert pair.host.receive(soon()) == Bye()


# -- the end of the other side -------------------------------------------------------------------------


def test_a_closed_channel_is_the_end() -> None:
    with channels() as pair:
        pair.worker.close()
        with pytest.raises(PeerGone):
            pair.host.receive(soon())
        with pytest.raises(PeerGone):
            pair.host.send(Close(), soon())


def test_an_end_within_a_frame_says_so() -> None:
    with channels() as pair:
        pair.worker_socket.sendall(channel.frame(Bye())[:-1])
        pair.worker.close()
        with pytest.raises(PeerGone, match="in the middle of a frame"):
            pair.host.receive(soon())


def test_last_words_are_delivered_before_the_end() -> None:
    with channels() as pair:
        pair.host.send(Close(), soon())  # never read: the kernel then reports a reset, not an end
        pair.worker.send(SAMPLES["error"], soon())
        pair.worker.close()
        assert pair.host.receive(soon()) == SAMPLES["error"]
        with pytest.raises(PeerGone):
            pair.host.receive(soon())


@contextmanager
def watched(life: str) -> Generator[tuple[Channels, int], None, None]:
    """The host's channel with a pidfd of a worker process, while this process, as a forked copy would,
    holds the worker's end open: the socket itself never ends. Yields (channels, pid of the worker)."""
    ready, tell = os.pipe()
    with channels() as pair:

        def worker() -> None:
            if "speaks" in life:
                pair.worker.send(SAMPLES["error"], soon())
            os.write(tell, b"x")
            if "lives" in life:
                signal.pause()

        with forked(worker) as pid:
            os.read(ready, 1)
            os.close(ready)
            os.close(tell)
            pidfd = os.pidfd_open(pid)
            try:
                watching = Channels(
                    Channel(pair.host_socket, pidfd),
                    pair.worker,
                    pair.host_socket,
                    pair.worker_socket,
                )
                yield watching, pid
            finally:
                os.close(pidfd)


@contextmanager
def killed_soon(pid: int) -> Generator[None, None, None]:
    timer = threading.Timer(0.05, os.kill, (pid, signal.SIGKILL))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_death_is_seen_although_a_copy_of_the_socket_lives_on() -> None:
    with watched("lives") as (pair, pid):
        started = time.monotonic()
        with killed_soon(pid), pytest.raises(PeerGone, match="process ended"):
            pair.host.receive(soon())
        assert time.monotonic() - started < 2.0


def test_a_death_is_seen_while_sending_to_who_does_not_read() -> None:
    with watched("lives") as (pair, pid), killed_soon(pid), pytest.raises(PeerGone):
        pair.host.send(BIG, soon())


def test_the_last_words_of_a_dead_process_are_delivered() -> None:
    with watched("speaks") as (pair, pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert isinstance(pair.host.receive(soon()), Error)
        with pytest.raises(PeerGone):
            pair.host.receive(soon())


def test_what_arrives_in_the_instant_of_the_death_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with channels(watch_fd=77_777) as pair:

        class AllAtOnce:
            """A poll that reports the death, and misses the words that came just before it."""

            def register(self, fd: int, events: int) -> None:
                pass

            def poll(self, _timeout_ms: int) -> list[tuple[int, int]]:
                if not pair.host_socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return []
                return [(77_777, select.POLLIN)]

        class Early:
            """The host's socket, whose first read comes just before the words."""

            def recvmsg(self, *_arguments: int) -> None:
                monkeypatch.setattr(pair.host, "_sock", pair.host_socket)
                pair.worker.send(Bye(), soon())
                raise BlockingIOError

            def fileno(self) -> int:
                return pair.host_socket.fileno()

        monkeypatch.setattr(pair.host, "_sock", Early())
        monkeypatch.setattr(channel.select, "poll", AllAtOnce)
        assert pair.host.receive(soon()) == Bye()


def test_silence_of_a_living_process_is_no_death() -> None:
    with watched("lives") as (pair, _), pytest.raises(DeadlinePassed):
        pair.host.receive(Deadline(0.05))


# -- file descriptors ----------------------------------------------------------------------------------


def test_descriptors_arrive_with_their_message() -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, b"the same file")
        with channels() as pair:
            pair.host.send(SAMPLES["attach"], soon(), [fd])
            assert pair.worker.receive(soon()) == SAMPLES["attach"]
            (copy,) = pair.worker.take_fds(1)
            assert os.pread(copy, 100, 0) == b"the same file"
            assert not os.get_inheritable(copy)
            os.close(copy)
    finally:
        os.close(fd)


@pytest.mark.parametrize("sent", [0, 2])
def test_another_number_of_descriptors_is_a_protocol_error(sent: int) -> None:
    with channels() as pair:
        pair.host.send(Close(), soon(), [0] * sent)
        pair.worker.receive(soon())
        with pytest.raises(ProtocolError, match=f"{sent} file descriptors came, not 1"):
            pair.worker.take_fds(1)


def test_more_descriptors_than_allowed_are_a_protocol_error() -> None:
    with channels() as pair:
        pair.host.send(Close(), soon(), [0] * 9)
        with pytest.raises(ProtocolError, match="more file descriptors"):
            pair.worker.receive(soon())


def test_descriptors_that_nobody_took_are_closed_with_the_channel() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with channels() as pair:
        pair.host.send(Close(), soon(), [0] * 5)
        pair.worker.receive(soon())
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_twice_does_no_harm() -> None:
    with channels() as pair:
        pair.host.close()
