"""Length-prefixed frames over one socket, with deadlines; also passes file descriptors.

A frame is a little-endian u32 length and that many bytes of `codec` output. Before the first frame the
worker sends the preamble: eight raw bytes, magic and version, readable by any version of this file.
"""

import array
import os
import select
import socket
import struct
from typing import List, Optional, Sequence

from . import codec
from .deadline import Deadline
from .errors import DeadlinePassed, PeerGone, ProtocolError
from .messages import MAGIC, PROTOCOL_VERSION, Message

_LENGTH = struct.Struct("<I")
_PREAMBLE = struct.Struct("<4sI")
_CHUNK = 1 << 16
_MAX_FDS = 8
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


def preamble(version: int = PROTOCOL_VERSION) -> bytes:
    return _PREAMBLE.pack(MAGIC, version)


def frame(message: Message) -> bytes:
    body = codec.encode(message)
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One end of the control socket. Not thread-safe: one conversation, one thread.

    `watch_fd`, when given, is readable once the peer's process is dead (a pidfd): the end of the
    socket alone is not enough, because a forked child may hold a copy of it. What the peer sent
    before it died is still delivered.
    """

    def __init__(self, sock: socket.socket, watch_fd: Optional[int] = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._watch_fd = watch_fd
        self._buffer = bytearray()
        self._fds: List[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    # -- sending ---------------------------------------------------------------------------------

    def send_preamble(self, deadline: Deadline) -> None:
        self._send(preamble(), (), deadline)

    def send(self, message: Message, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Send one message, and duplicates of `fds` with it. PeerGone, DeadlinePassed."""
        self._send(frame(message), fds, deadline)

    def _send(self, data: bytes, fds: Sequence[int], deadline: Deadline) -> None:
        view = memoryview(data)
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []
        )
        while view:
            try:
                sent = self._sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._await(select.POLLOUT, deadline)
                continue
            except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
                raise PeerGone("the other end of the control channel is closed") from None
            view, ancillary = view[sent:], []

    # -- receiving -------------------------------------------------------------------------------

    def receive_preamble(self, deadline: Deadline) -> int:
        """The peer's protocol version."""
        magic, version = _PREAMBLE.unpack(self._read(_PREAMBLE.size, deadline))
        if magic != MAGIC:
            raise ProtocolError(
                f"the worker does not speak this protocol: its first bytes are {magic!r}"
            )
        return version

    def receive(self, deadline: Deadline) -> Message:
        """The next message. PeerGone, DeadlinePassed, ProtocolError."""
        (length,) = _LENGTH.unpack(self._peek(_LENGTH.size, deadline))
        if not 0 < length <= codec.MAX_BODY:
            raise ProtocolError(
                f"a frame announces {length} bytes; 1 to {codec.MAX_BODY} are allowed"
            )
        return codec.decode(self._read(_LENGTH.size + length, deadline)[_LENGTH.size :])

    def take_fds(self, count: int) -> List[int]:
        """The descriptors that came with the messages so far: exactly `count`, else ProtocolError."""
        if len(self._fds) != count:
            raise ProtocolError(f"{len(self._fds)} file descriptors came, not {count}")
        fds, self._fds = self._fds, []
        return fds

    def pending(self) -> bool:
        """Whether something was sent that has not been received yet. Never waits."""
        return bool(self._buffer) or self._fill()

    def _read(self, count: int, deadline: Deadline) -> bytes:
        data = self._peek(count, deadline)
        del self._buffer[:count]
        return data

    def _peek(self, count: int, deadline: Deadline) -> bytes:
        while len(self._buffer) < count:
            if not self._fill():
                self._await(select.POLLIN, deadline)
        return bytes(self._buffer[:count])

    def _fill(self) -> bool:
        """Take what is there. False: nothing now. PeerGone: nothing ever again."""
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                _CHUNK, _FD_SPACE, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionResetError, ConnectionAbortedError):
            data, ancillary, flags = b"", [], 0
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
            raise ProtocolError(
                f"more file descriptors came than the {_MAX_FDS} allowed, or than this process may open"
            )
        if not data:
            raise PeerGone(self._torn() or "the other end closed the control channel")
        self._buffer += data
        return True

    def _torn(self) -> str:
        if not self._buffer:
            return ""
        return (
            f"the other end stopped in the middle of a frame, after {len(self._buffer)} bytes of it"
        )

    def _await(self, event: int, deadline: Deadline) -> None:
        """Wait until the socket is ready. The peer's death ends the wait, after its last words."""
        poll = select.poll()
        poll.register(self._sock, event)
        if self._watch_fd is not None:
            poll.register(self._watch_fd, select.POLLIN)
        # An answer that is there counts also after the deadline: look first, then ask the clock.
        ready = dict(deadline.nap(poll.poll))
        if self._sock.fileno() in ready:
            return
        if ready:
            if event == select.POLLIN and self._fill():
                return
            raise PeerGone(self._torn() or "the worker's process ended")
        if deadline.expired():
            raise DeadlinePassed(self._torn())
