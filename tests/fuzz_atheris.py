"""Coverage-guided fuzzing of the codec and the channel, for whoever has atheris (`pip install atheris`):

    python tests/fuzz_atheris.py -max_total_time=300

Further arguments are libFuzzer's. The corpus is in memory and starts from `golden/`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / ".src")]

with atheris.instrument_imports(include=["outboard"]):  # pyright: ignore
    from outboard.ipc import codec
    from outboard.ipc.deadline import Deadline
    from outboard.ipc.errors import PeerGone, ProtocolError

import fuzz  # noqa: E402


def read(data: bytes) -> None:
    """Bytes as one frame's body and as a stream of frames: a message or a ProtocolError."""
    with contextlib.suppress(ProtocolError):
        codec.decode(data[4:])
    with fuzz.fed(data) as channel, contextlib.suppress(ProtocolError, PeerGone):
        while True:
            channel.receive(Deadline(5.0))


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for name, data in fuzz.FRAMES.items():
            Path(corpus, name).write_bytes(data)
        atheris.Setup([*sys.argv, corpus], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
