"""The bytes of every message of the current version, as they are on the wire.

Worker and host of one version must read each other for ever. After a change of `ipc/messages.py` or of the
codec that is meant: raise PROTOCOL_VERSION, add a row to the history in `ipc/PROTOCOL.md`, and write anew:

    python tests/test_golden.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
if __name__ == "__main__":  # pytest has these from pyproject.toml
    sys.path[:0] = [str(TESTS), str(TESTS.parent / ".src")]

from outboard.ipc import channel, codec  # noqa: E402
from outboard.ipc.messages import MESSAGES, PROTOCOL_VERSION, Message  # noqa: E402
from samples import SAMPLES  # noqa: E402

A_CHANGE = (
    "the bytes on the wire changed. If that is meant it is a new PROTOCOL_VERSION: see the top of "
    "tests/test_golden.py"
)


def contents() -> dict[str, bytes]:
    """File name -> bytes, for everything that belongs into the folder."""
    files = {name + ".bin": channel.frame(message) for name, message in SAMPLES.items()}
    files["preamble.bin"] = channel.preamble()
    return files


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(message).__name__ for message in SAMPLES.values()} == set(MESSAGES)


def test_the_folder_holds_each_message_and_nothing_else() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(contents()) | {"README.md"}


@pytest.mark.parametrize("name", sorted(contents()))
def test_the_bytes_on_the_wire_are_those_of_this_version(name: str) -> None:
    assert contents()[name] == (GOLDEN / name).read_bytes(), A_CHANGE


@pytest.mark.parametrize(("name", "message"), sorted(SAMPLES.items(), key=lambda item: item[0]))
def test_the_bytes_are_read_as_the_message(name: str, message: Message) -> None:
    frame = (GOLDEN / f"{name}.bin").read_bytes()
    assert codec.decode(frame[4:]) == message


def test_the_folder_is_of_the_current_version() -> None:
    said = int.from_bytes((GOLDEN / "preamble.bin").read_bytes()[4:], "little")
    assert said == PROTOCOL_VERSION, A_CHANGE


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.mkdir(exist_ok=True)
    for file_name, data in contents().items():
        (GOLDEN / file_name).write_bytes(data)
