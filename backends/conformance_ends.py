"""Checks of how a worker ends: asked to, cut off, or left behind by a host that was killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator

from ..ipc.channel import frame
from ..ipc.messages import (
    Close,
    Opcode,
)
from . import handshake
from .conformance_kit import PROTOCOL, Bench, Target, broken, check, launch_command
from .conformance_raw import GONE_S, Raw

# -- the end ----------------------------------------------------------------------------------------


@check(PROTOCOL)
def close_after_hello(bench: Bench) -> None:
    """CLOSE right after HELLO is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(Close())
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def close_while_building(bench: Bench) -> None:
    """CLOSE while the worker builds is answered by BYE, at the latest when it has built, and a clean exit."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(raw.init, Close())
        raw.expect_bye(raw.traits.init_s + raw.traits.close_s)


@check(PROTOCOL)
def close_after_building(bench: Bench) -> None:
    """CLOSE instead of ATTACH is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.built()
        raw.send(Close())
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def close_when_ready(bench: Bench) -> None:
    """CLOSE, announced by MAIL, after a step is answered by BYE and a clean exit."""
    with Raw(bench.target) as raw:
        raw.ready()
        raw.wait(raw.ring(Opcode.STEP))
        raw.send(Close())
        raw.ring(Opcode.MAIL)
        raw.expect_bye(raw.traits.close_s)


@check(PROTOCOL)
def end_of_channel_while_building(bench: Bench) -> None:
    """When the channel ends while the worker builds, the worker ends, within what a clean exit may take."""
    with Raw(bench.target) as raw:
        raw.hello()
        raw.send(raw.init)
        raw.receive(raw.traits.init_s, "INIT")  # it is at work
        raw.process.control.close()
        raw.expect_end("the end of the channel")


# A host of its own, which the kit can kill: it starts a worker, has it built, and leaves a forked child
# behind that holds the channel open, as a data-loader worker does.
_HOST = """
import json, os, socket, struct, subprocess, sys, time
job = json.loads(sys.argv[1])
ours, theirs = socket.socketpair()
argv = [str(theirs.fileno()) if part == "-1" else part for part in job["argv"]]
null = subprocess.DEVNULL
worker = subprocess.Popen(argv, env=job["env"], pass_fds=[theirs.fileno()], stdin=null, stdout=null,
                          stderr=null, start_new_session=True)
theirs.close()
if os.fork() == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
def read(count):
    data = b""
    while len(data) < count:
        more = ours.recv(count - len(data))
        if not more:
            sys.exit("the worker was gone")
        data += more
    return data
read(8)
ours.sendall(bytes.fromhex(job["init"]))
while b"InitReply" not in read(struct.unpack("<I", read(4))[0])[:16]:
    pass
print(worker.pid, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _host(target: Target) -> Generator[subprocess.Popen[bytes]]:
    command, init = launch_command(target)
    job = {"argv": command.argv(-1), "env": dict(command.env), "init": frame(init).hex()}
    host = subprocess.Popen(
        [sys.executable, "-E", "-s", "-c", _HOST, json.dumps(job)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
        if host.stdout is not None:
            host.stdout.close()


@check(PROTOCOL)
def host_gone_worker_gone(bench: Bench) -> None:
    """A worker whose host was killed is gone within a second, also when a forked child of the host still
    holds the channel open."""
    with _host(bench.target) as host:
        assert host.stdout is not None
        within_s = handshake.HELLO_S + bench.target.kind.traits.init_s
        ready, _, _ = select.select([host.stdout], [], [], within_s)
        said = host.stdout.readline().strip() if ready else b""
        if not said:
            broken("the worker was not built")
        pidfd = os.pidfd_open(int(said))
        try:
            host.kill()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(GONE_S * 1e3):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                broken(f"the worker lived on {GONE_S:g} s after the host was killed")
        finally:
            os.close(pidfd)
