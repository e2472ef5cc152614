"""ipc/cuda_memory.py: copies, handles for another process and the counts that streams wait for, on the
stand-in and on real GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outboard.ipc import cuda_memory
from standin_gpu import U1, bare_environment, each_python, real_gpus, run_child, standin_environment

COPIES = """
import ctypes
from outboard.ipc import cuda_driver as d, cuda_memory as m
d.init()
d.set_current(d.retain_primary(0))
one, two = m.allocate(8), m.allocate(8)
text, back = ctypes.create_string_buffer(b"outboard", 8), ctypes.create_string_buffer(8)
m.copy_htod(one, ctypes.addressof(text), 8)
m.memset(one, ord("X"), 1)
stream = m.stream_create()
m.copy_dtod_async(two, one, 8, stream)
count = m.allocate(4)
m.memset(count, 255, 4)
m.stream_write(stream, count, 1)
m.stream_wait(0, count, 1); m.stream_wait(0, count, 0xFFFFFFFF)  # the count has run over
m.stream_synchronize()
m.copy_dtoh(ctypes.addressof(back), two, 8)
print(back.raw.decode(), m.address_range(two + 3)[0] == two)
m.stream_destroy(stream); m.free(one); m.free(two); m.free(count)
"""


@each_python
def test_memory_is_copied_in_within_and_out(python: str) -> None:
    assert run_child(COPIES, standin_environment(), python) == "Xutboard True"


def test_device_memory_cannot_be_read_by_the_cpu_on_the_standin_either() -> None:
    code = """
import ctypes
from outboard.ipc import cuda_driver as d, cuda_memory as m
d.init(); d.set_current(d.retain_primary(0))
ctypes.string_at(m.allocate(8), 8)
"""
    done = subprocess.run([sys.executable, "-c", code], env=standin_environment(), check=False)
    assert done.returncode == -11


def test_a_call_that_fails_names_itself_the_code_and_cudas_words() -> None:
    code = """
from outboard.ipc import cuda_driver as d, cuda_memory as m
d.init()
try: m.allocate(8)
except d.CudaError as error: print(error)
"""
    assert run_child(code, standin_environment()) == (
        "cuMemAlloc_v2 returned 201 (CUDA_ERROR_INVALID_CONTEXT): invalid device context"
    )


EXPORTER = """
import ctypes, sys
from outboard.ipc import cuda_driver as d, cuda_memory as m
d.init(); d.set_current(d.retain_primary(0))
memory = m.allocate(m.IPC_GRANULE_BYTES)
back = ctypes.create_string_buffer(5)
m.memset(memory, 0, 16)
d.synchronize()
m.stream_write(0, memory + 8, 7)
print(m.ipc_export(memory).hex(), flush=True)
sys.stdin.readline()
m.copy_dtoh(ctypes.addressof(back), memory, 5)
print(back.raw.decode())
"""
IMPORTER = """
import ctypes, sys
from outboard.ipc import cuda_driver as d, cuda_memory as m
memory = bytes.fromhex(sys.argv[1])
d.init(); d.set_current(d.retain_primary(0))
pointer = m.ipc_open(memory)
m.stream_wait(0, pointer + 8, 7)
text = ctypes.create_string_buffer(b"hello", 5)
m.copy_htod(pointer, ctypes.addressof(text), 5)
d.synchronize()
print(d.where_is(pointer).uuid)
m.ipc_close(pointer)
"""


def _exchange(python: str, host: dict[str, str], worker: dict[str, str]) -> tuple[str, str]:
    """(what the exporter found in its memory, the UUID on which the importer says it lies)."""
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER],
        env=host,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as exporter:
        assert exporter.stdin is not None and exporter.stdout is not None
        handles = exporter.stdout.readline().split()
        importer = subprocess.run(
            [python, "-c", IMPORTER, *handles], env=worker, capture_output=True, text=True
        )
        exporter.stdin.write("\n")
        exporter.stdin.flush()
        found = exporter.stdout.readline().strip()
    assert importer.returncode == 0, importer.stderr
    return found, importer.stdout.strip()


@each_python
def test_another_process_writes_into_exported_memory_under_another_ordinal(python: str) -> None:
    host = standin_environment(CUDA_VISIBLE_DEVICES="1,0")
    worker = standin_environment(CUDA_VISIBLE_DEVICES=U1)
    assert _exchange(python, host, worker) == ("hello", U1)


def test_a_handle_of_the_wrong_length_is_refused_before_the_driver_sees_it() -> None:

    with pytest.raises(ValueError, match="64 bytes, not 3"):
        cuda_memory.ipc_open(b"abc")


@pytest.mark.gpu
@each_python
def test_real_memory_names_its_gpu_and_is_copied(python: str) -> None:
    uuids = real_gpus()
    masked = bare_environment(CUDA_VISIBLE_DEVICES=uuids[-1])
    assert run_child(COPIES, masked, python) == "Xutboard True"


@pytest.mark.gpu
@each_python
def test_real_exported_memory_is_written_by_another_process(python: str) -> None:
    uuid = real_gpus()[-1]
    masked = bare_environment(CUDA_VISIBLE_DEVICES=uuid)
    assert _exchange(python, masked, masked) == ("hello", uuid)
