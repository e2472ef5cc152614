"""Who is trusted with what: secrets stay at the host, nothing has a name, nobody else takes part."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from hosts import ROOT
from outboard.backends import FakeBackend, handshake
from outboard.ipc import doorbell

Fake = Callable[..., FakeBackend]

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-aws",
    "HF_TOKEN": "s3cr3t-hub",
    "WANDB_API_KEY": "s3cr3t-wandb",
    "GITHUB_TOKEN": "s3cr3t-git",
    "DATABASE_URL": "postgres://user:s3cr3t-db@host/x",
    "SSH_AUTH_SOCK": "/run/s3cr3t-agent",
    "LD_PRELOAD": "",
    "PYTHONPATH": "/s3cr3t-path",
    "MASTER_ADDR": "s3cr3t-master",
    "SLURM_JOB_ID": "s3cr3t-slurm",
}


@pytest.fixture
def guarded(fake: Fake, monkeypatch: pytest.MonkeyPatch, worker_python: str) -> FakeBackend:
    """A worker that was started while its host's environment was full of secrets."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    return fake(worker_python=worker_python)


def test_no_secret_of_the_hosts_environment_is_in_the_workers(guarded: FakeBackend) -> None:
    environ = Path(f"/proc/{guarded.report['pid']}/environ").read_bytes()
    assert b"s3cr3t" not in environ
    assert not {name for name in SECRETS if f"\0{name}=".encode() in b"\0" + environ}


def test_no_secret_is_on_the_workers_command_line(guarded: FakeBackend) -> None:
    assert b"s3cr3t" not in Path(f"/proc/{guarded.report['pid']}/cmdline").read_bytes()


def test_a_secret_that_the_user_hands_over_does_arrive(fake: Fake) -> None:
    """So the test above would see one."""
    sim = fake(env={"HF_TOKEN": "s3cr3t-hub"})
    assert b"HF_TOKEN=s3cr3t-hub\0" in Path(f"/proc/{sim.report['pid']}/environ").read_bytes()


def descriptors(pid: int) -> dict[int, str]:
    folder = f"/proc/{pid}/fd"
    links: dict[int, str] = {}
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the one with which the folder was listed
            links[int(fd)] = os.readlink(f"{folder}/{fd}")
    return links


def test_a_worker_is_handed_its_socket_and_its_log_and_nothing_else(
    fake: Fake, worker_python: str
) -> None:
    fake(rank=1)  # another rank, of which it may get nothing
    sim = fake(rank=0, worker_python=worker_python)
    sim.step()
    kinds = sorted(re.sub(r"\d+", "N", link) for link in descriptors(sim.report["pid"]).values())
    log = re.sub(r"\d+", "N", sim.report["log_path"])
    expected = ["/dev/null", log, log, "anon_inode:[pidfd]", "socket:[N]"]
    assert [kind for kind in kinds if kind not in ("/memfd:outboard (deleted)",)] == expected


def test_the_control_channel_has_no_path(fake: Fake) -> None:
    sim = fake()
    [inode] = [
        link[8:-1] for link in descriptors(sim.report["pid"]).values() if link.startswith("socket:")
    ]
    [row] = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()
             if line.split()[6:7] == [inode]]  # fmt: skip
    assert len(row) == 7  # the eighth column would be its path


def test_once_open_a_backends_semaphores_have_no_name_any_more(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    honest = doorbell.semaphore_pair

    @contextlib.contextmanager
    def noting() -> Generator[Any, None, None]:
        with honest() as pair:
            made.extend("/dev/shm/sem." + name[1:] for name in pair[2:])
            assert all(map(os.path.exists, made))
            yield pair

    monkeypatch.setattr(doorbell, "semaphore_pair", noting)
    fake()
    assert len(made) == 2
    assert not any(map(os.path.exists, made))


def test_the_block_belongs_to_this_user_alone(fake: Fake) -> None:
    fake()
    modes = [
        stat.S_IMODE(os.stat(f"/proc/self/fd/{fd}").st_mode)
        for fd, link in descriptors(os.getpid()).items()
        if link.startswith("/memfd:outboard ")
    ]
    assert modes and set(modes) == {0o600}


def test_semaphores_are_made_for_this_user_alone() -> None:
    with doorbell.semaphore_pair() as (go, done, go_name, done_name):
        for name in (go_name, done_name):
            assert stat.S_IMODE(os.stat("/dev/shm/sem." + name[1:]).st_mode) == 0o600
    go.close()
    done.close()


def test_a_nonce_has_128_bits_and_comes_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def kernel(count: int) -> bytes:
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(handshake.secrets, "token_bytes", kernel)
    assert handshake.new_nonce() == bytes(range(16))
    assert asked == [16]


def test_every_worker_has_a_nonce_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    honest = handshake.new_nonce

    def noting() -> bytes:
        seen.append(honest())
        return seen[-1]

    monkeypatch.setattr(handshake, "new_nonce", noting)
    with FakeBackend(device="cpu", num_envs=1) as sim:
        sim.restart()
    assert len(set(seen)) == 2


def test_the_protocol_says_who_is_trusted_with_what() -> None:
    text = (ROOT / "ipc" / "PROTOCOL.md").read_text()
    [threats] = re.findall(r"^## Threats\n(.*?)^## ", text, re.M | re.S)
    flat = " ".join(threats.split())
    for promise in (
        "the user's own code with the user's rights",
        "cannot crash or mislead the host by accident",
        "is handed nothing of other ranks",
        "secrets in the host's environment do not arrive",
        "Not defended against",
    ):
        assert promise in flat
