"""The worker's side under the oldest Python it promises, with the packages of that Python and none of ours.

No static tool proves this: `str.removeprefix` and `zip(strict=)` pass every check at "3.8".
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from samples import SAMPLES
from test_golden import GOLDEN

ROOT = Path(__file__).resolve().parent.parent
# As workers/__main__.py does it: the package becomes visible, and nothing else of the host.
_PRELUDE = """
import importlib, json, sys, types
assert sys.version_info[:2] == (3, 8), sys.version
sys.modules["outboard"] = types.ModuleType("outboard")
sys.modules["outboard"].__path__ = [{root!r}]
"""


def run38(python: str, code: str, *flags: str) -> Any:
    """What `code` prints last, as JSON; a failure with everything it said."""
    ran = subprocess.run(
        [python, "-W", "error", *flags, "-c", _PRELUDE.format(root=str(ROOT)) + code],
        capture_output=True,
        text=True,
        timeout=50,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if ran.returncode:
        pytest.fail(f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}", pytrace=False)
    return json.loads(ran.stdout.splitlines()[-1])


def modules(folder: str) -> list[str]:
    return [f"outboard.{folder}.{path.stem}" for path in sorted((ROOT / folder).glob("*.py"))]


def test_every_module_of_a_worker_imports_there_without_a_warning(python38: str) -> None:
    names = modules("ipc") + modules("workers")
    code = f"""
absent = []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent.append((name.split(".")[2].split("_")[0], error.name))
print(json.dumps(absent))
"""
    # Where a simulator is not installed its own files, and no other, may miss it.
    own = {("mujoco", "mujoco"), ("mjwarp", "mujoco_warp"), ("mjwarp", "warp")}
    own |= {(name, name) for name in ("genesis", "isaacgym", "isaacsim")}
    own |= {("isaacsim", "isaaclab"), ("isaacsim", "torch")}
    assert {tuple(pair) for pair in run38(python38, code)} <= own


def test_what_every_worker_runs_imports_no_simulator(python38: str) -> None:
    shared = ["__main__", "conformance", "fake_worker", "lifeline", "serve", "simulator", "stdio"]
    names = [name for name in modules("workers") if name.split(".")[2] in shared] + modules("ipc")
    code = f"""
for name in ("torch", "mujoco", "isaacgym", "isaacsim", "genesis", "warp"):
    sys.modules[name] = None  # importing it is an error
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps("well"))
"""
    assert run38(python38, code) == "well"


def test_nothing_of_the_host_is_imported_with_a_worker(python38: str) -> None:
    code = """
importlib.import_module("outboard.workers.serve")
print(json.dumps([name for name in sys.modules if name.startswith("outboard.backends")]))
"""
    assert run38(python38, code) == []


def test_the_golden_bytes_are_read_and_written_alike(python38: str) -> None:
    code = f"""
from pathlib import Path
from outboard.ipc import channel, codec
same = []
for path in sorted(Path({str(GOLDEN)!r}).glob("*.bin")):
    frame = path.read_bytes()
    again = channel.preamble() if path.stem == "preamble" else channel.frame(codec.decode(frame[4:]))
    if again == frame:
        same.append(path.stem)
print(json.dumps(same))
"""
    assert run38(python38, code) == sorted([*SAMPLES, "preamble"])


def test_the_samples_are_the_golden_bytes_there_too(python38: str) -> None:
    code = f"""
sys.path.append({str(ROOT / "tests")!r})
from pathlib import Path
from samples import SAMPLES
from outboard.ipc import channel
print(json.dumps([name for name, message in SAMPLES.items()
                  if channel.frame(message) != (Path({str(GOLDEN)!r}) / (name + ".bin")).read_bytes()]))
"""
    assert run38(python38, code) == []


def test_the_fingerprint_of_a_layout_is_the_same_there(python38: str) -> None:
    from outboard.ipc.layout import PUBLISHABLE, Layout, Sizes

    code = """
from outboard.ipc.layout import PUBLISHABLE, Layout, Sizes
print(json.dumps(Layout(Sizes(3, 5, 4, 0, 2), PUBLISHABLE, 2).fingerprint.hex()))
"""
    assert run38(python38, code) == Layout(Sizes(3, 5, 4, 0, 2), PUBLISHABLE, 2).fingerprint.hex()


def test_block_channel_and_bell_work_there(python38: str) -> None:
    code = """
import gc, os, socket, threading
import numpy as np
from outboard.ipc import doorbell, shm
from outboard.ipc.channel import Channel
from outboard.ipc.deadline import Deadline
from outboard.ipc.errors import DeadlinePassed
from outboard.ipc.layout import PUBLISHABLE, Layout, Sizes
from outboard.ipc.messages import Close

layout, nonce = Layout(Sizes(3, 5, 4, 0, 0), PUBLISHABLE, 2), bytes(16)
left, right = map(Channel, socket.socketpair())
block = shm.create(layout, nonce)
left.send(Close(), Deadline(5), [block.fd])
assert right.receive(Deadline(5)) == Close()
(fd,) = right.take_fds(1)
other = shm.attach(fd, layout, nonce)
os.close(fd)
other.fields[1]["qpos"][:] = 4
assert (block.fields[1]["qpos"] == 4).all()

with doorbell.semaphore_pair() as (go, done, go_name, done_name):
    their_go, their_done = doorbell.open_semaphores(go_name, done_name)
mine = doorbell.Doorbell(go, done, block.reply[:1])
theirs = doorbell.Doorbell(their_done, their_go, other.request[:1])
history = doorbell.History()
for sequence in range(1, 200):
    block.request[0] = sequence
    mine.ring()
    theirs.wait(sequence, doorbell.History(), 5.0)
    other.reply[0] = sequence
    theirs.ring()
    mine.wait(sequence, history, 5.0)
try:
    mine.wait(sequence + 1, history, 0.05)
except DeadlinePassed:
    mine.close(), theirs.close(), left.close(), right.close(), block.close_fd()
    print(json.dumps("well"))
"""
    assert run38(python38, code) == "well"


def test_what_only_a_later_python_has_is_seen(python38: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="removeprefix"):
        run38(python38, "'abc'.removeprefix('a')")


def test_a_warning_is_an_error_there(python38: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="UserWarning"):
        run38(python38, "import warnings; warnings.warn('careful')")


def test_without_a_python38_the_tests_skip_and_in_ci_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import conftest

    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception, match="no Python"):
        conftest.missing("no Python 3.8")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Python"):
        conftest.missing("no Python 3.8")
