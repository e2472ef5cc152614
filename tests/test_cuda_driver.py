"""ipc/cuda_driver.py, on the stand-in driver and, where there is one, on a real one."""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any

import pytest

from outboard.ipc import cuda_driver
from outboard.ipc.cuda_driver import CudaError
from standin_gpu import (
    M0,
    SURVEY,
    U0,
    U1,
    WITH_MIG,
    bare_environment,
    each_python,
    real_gpus,
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


# -- the real driver -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("row", range(len(MEASURED)), ids=[str(mask) for mask, _, _ in MEASURED])
def test_the_real_driver_still_enumerates_as_it_was_measured_to(row: int) -> None:
    real = real_gpus(2)
    if len(real) != 2:
        pytest.skip(f"the table was measured with exactly two GPUs, here are {len(real)}")
    mask, code, uuids = measured(*real)[row]
    masked = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert json.loads(run_child(ENUMERATE, bare_environment(**masked))) == [code, uuids]
