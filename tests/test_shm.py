"""The shared block: nobody can name it, shrink it or run it; no view of it can fault; nothing in its header
is believed."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import gc
import mmap
import os
import resource
import signal
import stat
import struct
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outboard.ipc import shm
from outboard.ipc.errors import DeadlinePassed, ProtocolError
from outboard.ipc.layout import HEADER_BYTES, HOST, PUBLISHABLE, Layout, Sizes
from outboard.ipc.shm import Block
from pair import NONCE, SIZES, blocks, exit_code, forked, joined

TABLE = Layout(SIZES, PUBLISHABLE, 2)
GET_SEALS = 1034


@pytest.fixture
def block() -> Generator[Block, None, None]:
    made = shm.create(TABLE, NONCE)
    yield made
    made.close_fd()
    vars(made).clear()  # pytest keeps the object beyond the leak guard, but not the memory


# -- what it is ----------------------------------------------------------------------------------------


def test_it_has_the_size_of_its_layout(block: Block) -> None:
    assert os.fstat(block.fd).st_size == TABLE.total_bytes


def test_its_memory_is_reserved(block: Block) -> None:
    assert os.fstat(block.fd).st_blocks * 512 >= TABLE.total_bytes


def test_only_this_user_may_open_it_and_nobody_may_run_it(block: Block) -> None:
    assert stat.S_IMODE(os.fstat(block.fd).st_mode) == 0o600


def test_it_has_no_name(block: Block) -> None:
    assert os.fstat(block.fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{block.fd}").startswith("/memfd:")


def test_it_is_not_inherited(block: Block) -> None:
    assert not os.get_inheritable(block.fd)


@pytest.mark.parametrize("size", [0, TABLE.total_bytes // 2, TABLE.total_bytes * 2])
def test_it_can_neither_shrink_nor_grow(block: Block, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, size)


def test_its_seals_are_final(block: Block) -> None:
    assert fcntl.fcntl(block.fd, GET_SEALS) & 0x7 == 0x7
    with pytest.raises(PermissionError):
        fcntl.fcntl(block.fd, 1033, 0x8)  # F_ADD_SEALS, F_SEAL_WRITE: would stop the other side


def test_what_cannot_be_reserved_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))

    def life() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        opened = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError):
            shm.create(Layout(Sizes(100_000, 10, 10, 10, 1), ("qpos",)), NONCE)
        assert len(os.listdir("/proc/self/fd")) == opened

    with forked(life) as pid:
        assert exit_code(pid) == 0
    assert len(os.listdir("/proc/self/fd")) == before


# -- what both sides see -------------------------------------------------------------------------------


def test_both_sides_see_what_one_of_them_writes() -> None:
    with blocks(TABLE) as (host, worker):
        for number, field in enumerate(TABLE.fields):
            for bank in range(TABLE.banks):
                writer, reader = (host, worker) if field.written_by == HOST else (worker, host)
                writer.fields[bank][field.name][:] = number + 100 * bank
                assert (reader.fields[bank][field.name] == number + 100 * bank).all()
        host.request[shm.COUNT] = 1 << 63
        assert worker.request[shm.COUNT] == 1 << 63


def test_a_field_full_of_ones_touches_no_other_field() -> None:
    with blocks(TABLE) as (host, worker):
        for field in TABLE.fields:
            for bank in range(TABLE.banks):
                host.fields[bank][field.name].view(np.uint8)[:] = 255
                for other in TABLE.fields:
                    for other_bank in range(TABLE.banks):
                        if TABLE.offset(other, other_bank) != TABLE.offset(field, bank):
                            assert not worker.fields[other_bank][other.name].view(np.uint8).any()
                host.fields[bank][field.name].view(np.uint8)[:] = 0
        worker.check_identity()


def test_host_fields_are_the_same_memory_in_every_bank(block: Block) -> None:
    assert np.shares_memory(block.fields[0]["ctrl"], block.fields[1]["ctrl"])
    assert not np.shares_memory(block.fields[0]["qpos"], block.fields[1]["qpos"])


@pytest.mark.parametrize("empty", ["nq", "nv", "nu", "nbody"])
def test_a_model_with_none_of_something_has_empty_fields(empty: str) -> None:
    table = Layout(dataclasses.replace(SIZES, **{empty: 0}), PUBLISHABLE, 2)
    with blocks(table) as (host, worker):
        for field in table.fields:
            assert host.fields[1][field.name].shape == field.shape
        worker.fields[1]["env_flags"][:] = 3
        assert (host.fields[1]["env_flags"] == 3).all()


def test_a_model_with_nothing_at_all_still_has_a_block() -> None:
    with blocks(Layout(Sizes(1, 0, 0, 0, 0), PUBLISHABLE)) as (host, worker):
        worker.fields[0]["env_flags"][:] = 7
        assert host.fields[0]["env_flags"].tolist() == [7]


# -- views ---------------------------------------------------------------------------------------------


def test_a_view_survives_everything_it_came_from() -> None:
    with blocks(TABLE) as (host, worker):
        view = host.fields[0]["qpos"]
        worker.fields[0]["qpos"][:] = 1.5
    del host, worker
    gc.collect()
    assert (view == 1.5).all()
    view[:] = 2.5
    assert (view == 2.5).all()


def test_memory_and_descriptor_go_with_the_last_view() -> None:
    def held() -> int:
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:outboard" in line for line in maps)
        return mapped + sum(
            "memfd:outboard" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")
        )

    gc.collect()
    before = held()
    with blocks(TABLE) as (host, worker):
        view = host.fields[0]["qpos"]
        assert held() > before
    del host, worker
    assert held() > before  # the view holds it
    del view
    assert held() == before  # and without help of the garbage collector


def test_closing_the_descriptor_twice_closes_nobody_elses(block: Block) -> None:
    block.close_fd()
    other = os.open(os.devnull, os.O_RDONLY)
    block.close_fd()
    os.fstat(other)
    os.close(other)


# -- identity ------------------------------------------------------------------------------------------

_HEADER = struct.Struct("<8sII16sQ32s")
_NAMES = ("magic", "version", "header size", "nonce", "size", "fingerprint")


def attach(block: Block) -> Block:
    return shm.attach(block.fd, TABLE, NONCE)


@pytest.mark.parametrize("index", range(6), ids=_NAMES)
def test_each_part_of_the_identity_is_checked_and_named(block: Block, index: int) -> None:
    parts: list[Any] = list(_HEADER.unpack(os.pread(block.fd, _HEADER.size, 0)))
    parts[index] = parts[index][::-1] + b"" if isinstance(parts[index], bytes) else parts[index] + 1
    with mmap.mmap(block.fd, TABLE.total_bytes) as memory:
        memory[: _HEADER.size] = _HEADER.pack(*parts)
    with pytest.raises(ProtocolError, match=f"the block's {_NAMES[index]} is not the agreed one"):
        attach(block)


def test_a_block_of_another_conversation_is_refused(block: Block) -> None:
    with pytest.raises(ProtocolError, match="nonce"):
        shm.attach(block.fd, TABLE, bytes(16))


def test_a_block_of_another_size_is_refused_before_it_is_mapped(block: Block) -> None:
    other = Layout(dataclasses.replace(SIZES, num_envs=5000), PUBLISHABLE)
    with pytest.raises(ProtocolError, match=f"not {other.total_bytes}"):
        shm.attach(block.fd, other, NONCE)


def test_a_block_that_could_shrink_is_refused() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, TABLE.total_bytes)
    with pytest.raises(ProtocolError, match="not sealed"):
        shm.attach(fd, TABLE, NONCE)
    os.close(fd)


def test_a_plain_file_is_refused(tmp_path: Any) -> None:
    fd = os.open(tmp_path / "block", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, TABLE.total_bytes)
    with pytest.raises(ProtocolError, match="not sealed"):
        shm.attach(fd, TABLE, NONCE)
    os.close(fd)


def test_what_is_no_file_is_refused() -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(ProtocolError, match="descriptor"):
        shm.attach(read_end, TABLE, NONCE)
    os.close(read_end)
    os.close(write_end)


def test_a_block_for_the_next_worker_refuses_the_last_one(block: Block) -> None:
    block.request[shm.SEQUENCE] = block.reply[shm.SEQUENCE] = 9
    block.restamp(bytes(reversed(NONCE)))
    assert (block.request[shm.SEQUENCE], block.reply[shm.SEQUENCE]) == (0, 0)
    with pytest.raises(ProtocolError, match="nonce"):
        attach(block)
    shm.attach(block.fd, TABLE, bytes(reversed(NONCE)))


# -- a header that lies --------------------------------------------------------------------------------


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(header=st.binary(min_size=64, max_size=HEADER_BYTES), at=st.integers(0, HEADER_BYTES - 64))
def test_no_bytes_in_the_header_move_a_view_of_the_host(
    block: Block, header: bytes, at: int
) -> None:
    def where() -> list[tuple[int, int]]:
        arrays = [array for bank in block.fields for array in bank.values()]
        return [(array.ctypes.data, array.nbytes) for array in arrays]

    before = where()
    with mmap.mmap(block.fd, TABLE.total_bytes) as other_side:
        other_side[at : min(HEADER_BYTES, at + len(header))] = header[: HEADER_BYTES - at]
        start = ctypes.addressof(ctypes.c_char.from_buffer(block.request.obj))
        assert where() == before
    for address, nbytes in before:
        assert start + HEADER_BYTES <= address <= address + nbytes <= start + TABLE.total_bytes
    assert len(block.request) == len(block.reply) == 8


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=8, max_size=8))
def test_no_bytes_in_the_reply_line_pass_for_an_answer(words: list[int]) -> None:
    with joined(TABLE) as pair:
        sequence = pair.host.ring()
        for index, word in enumerate(words):
            pair.worker.block.reply[index] = word
        pair.worker.bell.ring()
        if words[shm.SEQUENCE] == sequence:
            pair.host.wait(sequence)
        else:
            with pytest.raises(DeadlinePassed):
                pair.host.wait(sequence, 0.01)
