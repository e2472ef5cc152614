"""Random bytes for everything that reads from the other side, seeded from `golden/`:

    python tests/fuzz.py --inputs 1000000    also writes benchmarks/results/fuzz.md

Each target takes bytes as they would come and may answer in one way only: a message, or ProtocolError (the
end of the input counts as the peer's end). Memory and time are bounded, and both are measured.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
if __name__ == "__main__":  # pytest has these from pyproject.toml
    sys.path[:0] = [str(TESTS), str(TESTS.parent / ".src")]

from outboard.backends import handshake  # noqa: E402
from outboard.backends.traits import Traits  # noqa: E402
from outboard.ipc import codec, doorbell, shm  # noqa: E402
from outboard.ipc.channel import Channel, frame  # noqa: E402
from outboard.ipc.deadline import Deadline  # noqa: E402
from outboard.ipc.errors import DeadlinePassed, OutboardError, PeerGone, ProtocolError  # noqa: E402
from outboard.ipc.layout import Layout, Sizes  # noqa: E402
from outboard.ipc.messages import Hello, Init, InitReply, Progress  # noqa: E402
from outboard.workers.fake_worker import FakeSimulator  # noqa: E402
from outboard.workers.serve import Worker  # noqa: E402
from samples import SAMPLES  # noqa: E402

# CPU time of one input; the slowest honest one takes a few milliseconds.
SLOW_S = 0.5
# Above what the process had: two of the largest frames, in bytes and as objects.
GROWTH_BYTES = 256 << 20

FRAMES = {path.stem: path.read_bytes() for path in sorted(GOLDEN.glob("*.bin"))}
PREAMBLE = FRAMES["preamble"]
MESSAGES = [data for name, data in FRAMES.items() if name != "preamble"]


# -- inputs --------------------------------------------------------------------------------------------


def mutated(chance: random.Random, data: bytes) -> bytes:  # one branch for each kind of damage
    """A few changes of `data`: bits, bytes, lengths, cuts, repeats, insertions, other frames' parts."""
    work = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(work) + 1)
        kind = chance.randrange(8)
        if kind == 0 and at < len(work):
            work[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and at < len(work):
            work[at] = chance.choice(
                (0, 0x7F, 0x80, 0xC0, 0xC1, 0xDD, 0xDF, 0xFF, chance.randrange(256))
            )
        elif kind == 2:
            del work[at:]
        elif kind == 3:
            work[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 4:
            end = at + chance.randrange(1, 33)
            work[at:at] = work[at:end]
        elif kind == 5:
            other = chance.choice(MESSAGES)
            start = chance.randrange(len(other))
            work[at : at + 16] = other[start : start + 16]
        elif kind == 6:
            work[at : at + 5] = b"\xdd" + struct.pack(">I", chance.getrandbits(32))  # a long array
        elif len(work) >= 4:
            work[:4] = struct.pack("<I", max(0, len(work) - 4 + chance.choice((0, 0, 0, 1, -1))))
    return bytes(work)


def repaired(data: bytes) -> bytes:
    """With a true length, so that the decoder is reached."""
    return struct.pack("<I", len(data) - 4) + data[4:] if len(data) > 4 else data


# -- targets -------------------------------------------------------------------------------------------


def read_codec(chance: random.Random) -> None:
    with contextlib.suppress(ProtocolError):
        codec.decode(mutated(chance, chance.choice(MESSAGES))[4:])


@contextlib.contextmanager
def fed(data: bytes, *fds: int) -> Generator[Channel, None, None]:
    """A channel whose peer sent `data`, with copies of `fds`, and left."""
    here, there = socket.socketpair()
    there.setblocking(False)
    rights = array.array("i", fds).tobytes()
    if data:
        with contextlib.suppress(BlockingIOError):
            there.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else [])
    there.shutdown(socket.SHUT_WR)
    channel = Channel(here)
    try:
        yield channel
    finally:
        channel.close()
        there.close()


def _stream(chance: random.Random, honest: list[bytes]) -> bytes:
    """An honest conversation with one part changed."""
    parts = list(honest)
    at = chance.randrange(len(parts))
    part = mutated(chance, parts[at])
    parts[at] = repaired(part) if parts[at] is not PREAMBLE and chance.random() < 0.8 else part
    if chance.random() < 0.1:
        chance.shuffle(parts)
    return b"".join(parts)


def read_channel(chance: random.Random) -> None:
    frames = [chance.choice(MESSAGES) for _ in range(3)]
    frames[chance.randrange(3)] = mutated(chance, frames[0])
    with fed(b"".join(frames)) as channel, contextlib.suppress(ProtocolError, PeerGone):
        while True:
            channel.receive(Deadline(5.0))


# A conversation that ends well, from the samples.
HELLO, REPLY = SAMPLES["hello"], SAMPLES["init_reply"]
assert isinstance(HELLO, Hello) and isinstance(REPLY, InitReply)
SIZES = REPLY.model.sizes
PLAIN = Layout(SIZES, ("qpos",))
INIT: Init = replace(
    SAMPLES["init"], num_envs=SIZES.num_envs, publish=PLAIN.publish, transport="block"
)  # type: ignore[assignment]
READY = replace(SAMPLES["ready"], nonce=INIT.nonce, fingerprint=PLAIN.fingerprint, arena="")
ATTACH = replace(
    SAMPLES["attach"], nonce=INIT.nonce, sizes=SIZES, publish=PLAIN.publish, banks=1,
    total_bytes=PLAIN.total_bytes, fingerprint=PLAIN.fingerprint, arena=None,
)  # fmt: skip
BY_WORKER = [PREAMBLE, *map(frame, (HELLO, Progress("", 1, 2), REPLY, READY))]
BY_HOST = [*map(frame, (INIT, ATTACH))]


def host_reads(chance: random.Random) -> None:
    hosts_end(_stream(chance, BY_WORKER))


def hosts_end(data: bytes) -> bool:
    """What a host makes of a worker's bytes, from HELLO to READY; whether it came there."""
    with fed(data) as channel:
        talk = handshake.Talk(channel)
        try:
            handshake.hear_hello(talk, HELLO.mask, HELLO.source)  # type: ignore[arg-type]
            reply = handshake.initialise(talk, INIT, Traits(), lambda progress: None)
            handshake.check_facts(INIT, reply)
            layout = Layout(reply.model.sizes, INIT.publish, 1)
            if layout.total_bytes > 1 << 22:  # the host asks its memory first; here nobody does
                return False
            data_plane = handshake.attach(talk, INIT, layout, None)
        except PeerGone:
            return False
        except OutboardError as error:
            require(isinstance(error, ProtocolError) or _declared(error), error)
            return False
        data_plane.bell.close()
        data_plane.block.close_fd()
        return True


def _declared(error: OutboardError) -> bool:
    """An error that a well-formed message asked for: another mask, an ERROR, another number of
    environments, fewer fields than wanted."""
    return type(error).__name__ in ("DeviceMismatchError", "WorkerFailed", "SceneError", "UsageError",
                                    "DevicePlanError", "WorkerLaunchError")  # fmt: skip


class Listener(Worker):
    """A worker's side of the handshake, without what a simulator would do."""

    def build(self, init: Init) -> Init:
        self.send(REPLY)
        return init


class Mapped(Exception):
    """The block was mapped and checked; what follows is the simulator's."""


def _mapped(go_name: str, done_name: str) -> NoReturn:
    raise Mapped


def worker_reads(chance: random.Random) -> None:
    workers_end(_stream(chance, BY_HOST))


def workers_end(data: bytes) -> bool:
    """What a worker makes of a host's bytes, INIT and ATTACH; whether it mapped the block."""
    if not _blocks:
        _blocks.append(shm.create(PLAIN, INIT.nonce))
    honest, doorbell.open_semaphores = doorbell.open_semaphores, _mapped
    try:
        with fed(data, _blocks[0].fd) as channel:
            worker = Listener(channel, "fake")
            worker.simulator = FakeSimulator()
            worker.talk.sent("Hello")
            with contextlib.suppress(PeerGone, DeadlinePassed, ProtocolError):
                worker.attach(worker.build(worker.expect(Init)))
    except Mapped:
        return True
    except Exception as error:  # noqa: BLE001 - named, or raised again
        require(type(error).__name__ == "_Closed", repr(error))
    finally:
        doorbell.open_semaphores = honest
    return False


LAYOUT = Layout(Sizes(num_envs=3, nq=5, nv=4, nu=2, nbody=2), ("qpos", "qvel"))
NONCE = bytes(16)


_blocks: list[shm.Block] = []  # of a worker, of read_header: made once for a campaign


def read_header(chance: random.Random) -> None:
    """Random bytes in the block's first page, as a worker that attaches finds them, and as a host reads the
    words of a reply."""
    if not _blocks:
        _blocks.append(shm.create(LAYOUT, NONCE))
    block = _blocks[0]
    block.restamp(NONCE)
    fresh = os.pread(block.fd, shm.HEADER_BYTES, 0)
    page = bytearray(fresh)
    for _ in range(chance.choice((1, 2, 8, 64))):
        at = chance.choice((chance.randrange(72), chance.randrange(len(page))))
        page[at] = chance.randrange(256)
    os.pwrite(block.fd, page, 0)
    same = bytes(page[:72]) == fresh[:72]
    try:
        shm.attach(block.fd, LAYOUT, NONCE)
        require(same, "a changed identity was taken")
    except ProtocolError:
        require(not same, "an unchanged identity was refused")
    words = [block.reply[word] for word in range(len(block.reply))]
    require(all(0 <= word < 1 << 64 for word in words), words)
    for bank in block.fields:
        for name, view in bank.items():
            require(view.size == _SIZES[name], name)


_SIZES = {field.name: field.nbytes // int(field.dtype[2:]) for field in LAYOUT.fields}

TARGETS: dict[str, Callable[[random.Random], None]] = {
    "codec": read_codec,
    "channel": read_channel,
    "handshake, host": host_reads,
    "handshake, worker": worker_reads,
    "header": read_header,
}
# The codec is where bytes become objects, and a hundred times cheaper than a socket.
SHARES = {
    "codec": 0.7,
    "channel": 0.1,
    "handshake, host": 0.05,
    "handshake, worker": 0.05,
    "header": 0.1,
}


def require(holds: bool, what: object) -> None:
    if not holds:
        raise AssertionError(what)


# -- campaigns -----------------------------------------------------------------------------------------


@dataclass
class Campaign:
    target: str
    inputs: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    growth_bytes: int = 0


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def campaign(target: str, inputs: int, seed: int = 0, within_s: float = float("inf")) -> Campaign:
    """`inputs` inputs, or as many as the time allows. An AssertionError or anything but a ProtocolError
    names the seed that repeats it."""
    read, done, before = TARGETS[target], Campaign(target), peak_bytes()
    started = time.monotonic()
    try:
        for number in range(inputs):
            if time.monotonic() - started > within_s:
                break
            one = time.thread_time()
            try:
                read(random.Random(f"{target} {seed} {number}"))
            except BaseException as error:
                words = f"{target!r} broke with seed {seed}, input {number}: {error!r}"
                raise AssertionError(words) from error
            done.slowest_s = max(done.slowest_s, time.thread_time() - one)
            done.inputs += 1
    finally:
        for block in _blocks:
            block.close_fd()
        _blocks.clear()
    done.seconds = time.monotonic() - started
    done.growth_bytes = peak_bytes() - before
    return done


def result(campaigns: list[Campaign], seed: int) -> str:
    total = sum(done.inputs for done in campaigns)
    lines = [
        "# Fuzzing what is read from the other side",
        "",
        f"Written by `python tests/fuzz.py --inputs {total}` on {time.strftime('%Y-%m-%d', time.gmtime())}, "
        f"Python {sys.version.split()[0]}, seed {seed}: {total:,} inputs in "
        f"{sum(done.seconds for done in campaigns):.0f} s. Every one gave a message or a ProtocolError (or "
        "what a well-formed message asked for); nothing else was raised, or this file would not be here.",
        "",
        f"Bounds: {SLOW_S} s of CPU for one input, {GROWTH_BYTES >> 20} MiB more than at the start.",
        "",
        "| target | inputs | seconds | slowest input (CPU) | memory grew by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {done.target} | {done.inputs:,} | {done.seconds:.0f} | {done.slowest_s * 1e3:.1f} ms | "
        f"{done.growth_bytes / (1 << 20):.1f} MiB |"
        for done in campaigns
    ]
    return "\n".join(lines) + "\n"


def bounded(done: Campaign) -> bool:
    return done.slowest_s < SLOW_S and done.growth_bytes < GROWTH_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    campaigns = [
        campaign(target, int(arguments.inputs * share), arguments.seed)
        for target, share in SHARES.items()
    ]
    for done in campaigns:
        print(done, "" if bounded(done) else "OVER ITS BOUND")
    if not all(map(bounded, campaigns)):
        sys.exit("a bound was passed")
    if arguments.inputs >= 1_000_000:
        (TESTS.parent / "benchmarks" / "results" / "fuzz.md").write_text(
            result(campaigns, arguments.seed)
        )


if __name__ == "__main__":
    main()
