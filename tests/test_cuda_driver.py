"""ipc/cuda_driver.py and ipc/cuda_memory.py, on the stand-in driver and, where there is one, a real."""

from __future__ import annotations

import functools
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest

from outboard.ipc import cuda_driver, cuda_memory
from outboard.ipc.cuda_driver import CudaError
from standin_gpu import (
    M0,
    U0,
    U1,
    WITH_MIG,
    bare_environment,
    each_python,
    run_child,
    standin_environment,
    standin_folder,
)

ENUMERATE = """
import json
from outboard.ipc import cuda_driver
try:
    print(json.dumps([0, [gpu.uuid for gpu in cuda_driver.devices()]]))
except cuda_driver.CudaError as error:
    print(json.dumps([error.code, []]))
"""

Row = tuple["str | None", int, list[str]]


def measured(u0: str, u1: str) -> list[Row]:
    """Mask -> code of cuInit and GPUs, as measured on two H200s with driver 580."""
    prefix = next(u0[:n] for n in range(5, len(u0)) if not u1.startswith(u0[:n]))
    rows: list[Row] = [(None, 0, [u0, u1])]
    nothing = ("", "-1", "7", "cuda:1", "none", "NoDevFiles", ",1", "GPU-")
    nothing += (u0[4:], "gpu-" + u0[4:], f"MIG-{u0}/0/0")
    rows += [(mask, 100, []) for mask in nothing]
    rows += [(mask, 101, []) for mask in ("0,0", "0,1,0", f"{u1},{u1}")]
    rows += [(mask, 0, [u1, u0]) for mask in ("1,0", "1 ,0", f"{u1},{u0}")]
    rows += [(mask, 0, [u1]) for mask in (" 1", "1.0", "01", "+1", "1;0", f"{u1},0")]
    rows += [(mask, 0, [u0]) for mask in ("0,7,1", "0x1", "0,", "0,,1", f"0,{u1}")]
    rows += [(mask, 0, [u0]) for mask in (u0, u0[:12], prefix, "GPU-" + u0[4:].upper())]
    return rows


MEASURED = measured(U0, U1)


@pytest.mark.parametrize(("mask", "code", "uuids"), MEASURED)
def test_the_standin_enumerates_as_real_gpus_were_measured_to(
    mask: str | None, code: int, uuids: list[str]
) -> None:
    masked = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert json.loads(run_child(ENUMERATE, standin_environment(**masked))) == [code, uuids]


def test_the_standin_refuses_an_unknown_device_order_as_measured() -> None:
    environment = standin_environment(CUDA_DEVICE_ORDER="bogus")
    assert json.loads(run_child(ENUMERATE, environment)) == [101, []]


@pytest.mark.parametrize(
    ("order", "uuids"), [("FASTEST_FIRST", [U1, U0]), ("PCI_BUS_ID", [U0, U1])]
)
def test_an_ordinal_depends_on_the_order_variable_where_gpus_differ(
    order: str, uuids: list[str]
) -> None:
    unlike = {"OUTBOARD_STANDIN_FASTEST_FIRST": "1,0", "CUDA_DEVICE_ORDER": order}
    assert json.loads(run_child(ENUMERATE, standin_environment(**unlike))) == [0, uuids]


@each_python
def test_a_gpu_is_described_by_ordinal_kind_uuid_pci_id_and_name(python: str) -> None:
    code = """
from outboard.ipc import cuda_driver
for gpu in cuda_driver.survey()[0]: print(gpu.ordinal, gpu.kind, gpu.uuid, gpu.pci, gpu.name)
"""
    shown = run_child(code, standin_environment(CUDA_VISIBLE_DEVICES=U1), python)
    assert shown == f"0 gpu {U1} 0000:00:07.0 Stand-in GPU"


@each_python
def test_a_mig_instance_is_known_by_its_own_uuid(python: str) -> None:
    code = """
from outboard.ipc import cuda_driver
for gpu in cuda_driver.devices(): print(gpu.kind, gpu.uuid)
"""
    environment = standin_environment(WITH_MIG, CUDA_VISIBLE_DEVICES=M0)
    assert run_child(code, environment, python) == f"mig {M0}"


def test_a_driver_older_than_uuid_v2_falls_back_to_the_plain_call() -> None:
    code = """
from outboard.ipc import cuda_driver
cuda_driver._device_uuid_v2 = cuda_driver.Entry("cuDeviceGetUuid_v2_of_the_future")
print(cuda_driver.devices()[0].kind, cuda_driver.devices()[0].uuid)
"""
    assert run_child(code, standin_environment()) == f"gpu {U0}"


def test_a_zero_uuid_is_no_identity() -> None:
    zero = "GPU-00000000-0000-0000-0000-000000000000@0000:00:06.0"
    shown = run_child(SURVEY, standin_environment(zero))
    assert "the driver did not know" in json.loads(shown)[1]


SURVEY = """
import json
from outboard.ipc import cuda_driver
gpus, why = cuda_driver.survey()
print(json.dumps([[gpu.uuid for gpu in gpus], why]))
"""


@each_python
def test_a_missing_libcuda_is_a_sentence(python: str) -> None:
    if not cuda_driver.survey()[1].startswith("libcuda.so.1: not found"):
        pytest.skip("this machine has a libcuda; the case needs one without")
    uuids, why = json.loads(run_child(SURVEY, bare_environment(), python))
    assert (uuids, why[:24]) == ([], "libcuda.so.1: not found ")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("46", "exclusive compute mode"),
        ("100", "no GPU is visible to this process"),
        ("101", "names a GPU twice"),
        ("803", "different versions"),
        ("804", "forward-compatibility"),
        ("805", "MPS control daemon"),
        ("999", "nvidia_uvm"),
    ],
)
def test_survey_says_what_the_code_of_cuinit_means(code: str, words: str) -> None:
    uuids, why = json.loads(run_child(SURVEY, standin_environment(OUTBOARD_STANDIN_CUINIT=code)))
    assert uuids == []
    assert f"cuInit returned {code}" in why
    assert words in why


def test_a_forked_child_of_a_cuda_process_is_told_so() -> None:
    code = """
import os
from outboard.ipc import cuda_driver
cuda_driver.init()
if os.fork() == 0:
    print(cuda_driver.survey()[1], flush=True)
    os._exit(0)
os.wait()
"""
    assert "forked from one that had started CUDA" in run_child(code, standin_environment())


def test_an_error_survives_pickling_with_its_code() -> None:
    error = CudaError("cuMemAlloc_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again)) == (2, str(error))


def test_the_compute_mode_is_read() -> None:
    code = "from outboard.ipc import cuda_driver as d; d.init(); print(d.compute_mode(1))"
    assert run_child(code, standin_environment(OUTBOARD_STANDIN_COMPUTE_MODE="3")) == "3"


def test_the_libcuda_folder_is_where_the_library_was_found() -> None:
    code = "from outboard.ipc import cuda_driver as d; print(d.libcuda_folder())"
    assert run_child(code, standin_environment()) == standin_folder()


def test_the_libcuda_folder_is_empty_without_a_driver() -> None:
    if cuda_driver.libcuda_folder():
        pytest.skip("this machine has a libcuda; the case needs one without")
    code = "from outboard.ipc import cuda_driver as d; print(repr(d.libcuda_folder()))"
    assert run_child(code, bare_environment()) == "''"


CONTEXTS = """
from outboard.ipc import cuda_driver as d
d.init()
print(d.primary_contexts())
context = d.retain_primary(1)
print(d.primary_contexts())
with d.using(context): print(d.get_current() == context)
print(d.get_current())
d.release_primary(1)
print(d.primary_contexts())
"""


@each_python
def test_primary_contexts_are_seen_without_making_any(python: str) -> None:
    shown = run_child(CONTEXTS, standin_environment(), python).splitlines()
    assert shown == ["()", f"('{U1}',)", "True", "0", "()"]


PLACES = """
import ctypes, json
from dataclasses import astuple
from outboard.ipc import cuda_driver as d, cuda_memory as m
d.init()
d.set_current(d.retain_primary(1))
device = m.allocate(1 << 20)
managed = ctypes.c_uint64()
d.Entry("cuMemAllocManaged", ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t, ctypes.c_uint)(
    ctypes.byref(managed), 4096, 1)
pages = ctypes.create_string_buffer(4096)
plain = ctypes.create_string_buffer(4096)
m.host_register(ctypes.addressof(pages), 4096)
found = dict(device=d.where_is(device), inside=d.where_is(device + 4096), null=d.where_is(0))
found["managed"] = d.where_is(managed.value)
found["registered"] = d.where_is(ctypes.addressof(pages))
found["plain"] = d.where_is(ctypes.addressof(plain))
m.host_unregister(ctypes.addressof(pages))
m.free(device)
found["unregistered"], found["freed"] = d.where_is(ctypes.addressof(pages)), d.where_is(device)
print(json.dumps({name: astuple(place) for name, place in found.items()}))
"""


@functools.cache
def places(python: str) -> dict[str, list[Any]]:
    """Pointer -> memory kind, ordinal, UUID, exportable; as one process with six pointers saw them."""
    return json.loads(run_child(PLACES, standin_environment(), python))


@each_python
@pytest.mark.parametrize("pointer", ["device", "inside"])
def test_device_memory_names_its_gpu(python: str, pointer: str) -> None:
    assert places(python)[pointer] == ["device", 1, U1, True]


@each_python
def test_managed_memory_names_no_gpu_because_it_migrates(python: str) -> None:
    assert places(python)["managed"] == ["managed", -1, "", False]


@each_python
def test_registered_host_memory_names_no_gpu(python: str) -> None:
    assert places(python)["registered"] == ["host", -1, "", False]


@each_python
@pytest.mark.parametrize("pointer", ["plain", "null", "unregistered", "freed"])
def test_what_cuda_does_not_know_is_unknown_and_not_gpu_0(python: str, pointer: str) -> None:
    assert places(python)[pointer] == ["unknown", -1, "", False]


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
event = m.event_create()
m.event_record(event, stream)
m.stream_wait(0, event)
m.event_synchronize(event)
m.copy_dtoh(ctypes.addressof(back), two, 8)
print(back.raw.decode(), m.event_query(event), m.address_range(two + 3)[0] == two)
m.event_destroy(event); m.stream_destroy(stream); m.free(one); m.free(two)
"""


@each_python
def test_memory_is_copied_in_within_and_out(python: str) -> None:
    assert run_child(COPIES, standin_environment(), python) == "Xutboard True True"


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
memory, event = m.allocate(m.IPC_GRANULE_BYTES), m.event_create()
back = ctypes.create_string_buffer(5)
m.memset(memory, 0, 16)
m.event_record(event)
print(m.ipc_export(memory).hex(), m.event_export(event).hex(), flush=True)
sys.stdin.readline()
m.copy_dtoh(ctypes.addressof(back), memory, 5)
print(back.raw.decode())
"""
IMPORTER = """
import ctypes, sys
from outboard.ipc import cuda_driver as d, cuda_memory as m
memory, event = map(bytes.fromhex, sys.argv[1:])
d.init(); d.set_current(d.retain_primary(0))
pointer = m.ipc_open(memory)
m.stream_wait(0, m.event_open(event))
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


# -- the real driver -----------------------------------------------------------------------------


@functools.cache
def _ask_real() -> tuple[list[str], str]:
    return json.loads(run_child(SURVEY, bare_environment()))


def _real(count: int = 1) -> tuple[str, ...]:
    """UUIDs of this machine's GPUs, asked in a child: this process must not start CUDA."""
    uuids, why = _ask_real()
    if len(uuids) < count:
        pytest.skip(
            f"needs {count} real GPU(s), this process sees {len(uuids)}: {why or 'no more'}"
        )
    return tuple(uuids)


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(MEASURED)), ids=[str(mask) for mask, _, _ in MEASURED])
def test_the_real_driver_still_enumerates_as_it_was_measured_to(row: int) -> None:
    real = _real(2)
    if len(real) != 2:
        pytest.skip(f"the table was measured with exactly two GPUs, here are {len(real)}")
    mask, code, uuids = measured(*real)[row]
    masked = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert json.loads(run_child(ENUMERATE, bare_environment(**masked))) == [code, uuids]


@pytest.mark.gpu
@each_python
def test_real_memory_names_its_gpu_and_is_copied(python: str) -> None:
    uuids = _real()
    masked = bare_environment(CUDA_VISIBLE_DEVICES=uuids[-1])
    assert run_child(COPIES, masked, python) == "Xutboard True True"


@pytest.mark.gpu
@each_python
def test_real_exported_memory_is_written_by_another_process(python: str) -> None:
    uuid = _real()[-1]
    masked = bare_environment(CUDA_VISIBLE_DEVICES=uuid)
    assert _exchange(python, masked, masked) == ("hello", uuid)
