"""libcuda through ctypes: which GPUs this process sees, who they are, and where a pointer lies.

Works without torch and on Python 3.8, because the interpreter of a simulator may have no more. All
ordinals here are this process's own; a caller that sends one elsewhere sends the UUID with it.
A missing driver is a fact to report (`survey`), never a crash at import: the library is loaded, and
each entry point looked up, when it is first needed. Memory, IPC and streams: `cuda_memory.py`.
"""

import ctypes
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generator, Optional, Tuple

from .device import GPU, MIG, VisibleGpu, uuid_from_bytes

# What is tried, in this order. `libcuda.so` alone exists where only the development link is in the
# path; under WSL the driver's folder is in no search path of a foreign interpreter.
_LIBRARY_NAMES = ("libcuda.so.1", "libcuda.so", "/usr/lib/wsl/lib/libcuda.so.1")

# Codes of ours beside CUDA's, which are never negative.
NO_LIBRARY, NO_ENTRY_POINT, NO_UUID = -1, -2, -3

# What a code of cuInit means for somebody who did not write a CUDA program. 100 and 101 as measured
# with driver 580; the others from the driver API's manual.
_INIT = {
    2: "the driver found no memory to start with",
    3: "the driver is not initialised here: this process was forked from one that had started CUDA",
    34: "the libcuda that was found is the toolkit's link-time stub, not a driver",
    46: "a GPU is unavailable: busy in an exclusive compute mode, or in compute mode prohibited",
    100: "no GPU is visible to this process: CUDA_VISIBLE_DEVICES is empty or its first entry names"
    " no GPU of this machine, or the container or cgroup exposes none",
    101: "CUDA_VISIBLE_DEVICES names a GPU twice, or CUDA_DEVICE_ORDER is neither PCI_BUS_ID nor"
    " FASTEST_FIRST",
    304: "the operating system refused: /dev/nvidia* is missing or may not be opened",
    802: "the system is not ready: on NVSwitch machines the fabric manager must be running",
    803: "libcuda and the kernel's driver have different versions: reload the module or reboot",
    804: "a forward-compatibility libcuda was found, which this kind of GPU does not support",
    805: "the MPS control daemon was not reached: see CUDA_MPS_PIPE_DIRECTORY",
    806: "the MPS server did not answer",
    807: "the MPS server is not ready for new clients",
    808: "the MPS server has all the clients it can take",
    999: "the driver failed without saying why; often the kernel module nvidia_uvm is not loaded",
}

# CUdevice_attribute, CUpointer_attribute and CUmemorytype, as numbered in cuda.h.
_COMPUTE_MODE = 20
_MEMORY_TYPE, _IS_MANAGED, _ORDINAL, _LEGACY_IPC = 2, 8, 9, 10
_HOST_TYPE, _DEVICE_TYPE = 1, 2
_INVALID_VALUE = 1

DEVICE_MEMORY, HOST_MEMORY, MANAGED_MEMORY, UNKNOWN_MEMORY = "device", "host", "managed", "unknown"
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


class CudaError(Exception):
    """A call to the driver failed. `code` is CUDA's own, or one of the negative ones above."""

    def __init__(self, call: str, code: int, name: str = "", text: str = "") -> None:
        super().__init__(call, code, name, text)
        self.call, self.code, self.name, self.text = call, code, name, text

    def __str__(self) -> str:
        if self.code < 0:
            return f"{self.call}: {self.text}"
        return f"{self.call} returned {self.code} ({self.name}): {self.text}"


_library: Optional[ctypes.CDLL] = None


def library() -> ctypes.CDLL:
    """The loaded libcuda. Loading reads no mask; cuInit does."""
    global _library
    if _library is None:
        reasons = []
        for name in _LIBRARY_NAMES:
            try:
                _library = ctypes.CDLL(name)
                break
            except OSError as error:
                reasons.append(str(error))
        else:
            raise CudaError("libcuda.so.1", NO_LIBRARY, "", f"not found ({reasons[0]})")
    return _library


class Entry:
    """One entry point of libcuda: typed (a pointer passed as a plain int would be cut to 32 bits),
    looked up at its first call, its code checked."""

    __slots__ = ("_function", "argtypes", "name")

    def __init__(self, name: str, *argtypes: Any) -> None:
        self.name, self.argtypes = name, argtypes
        self._function: Any = None

    def code(self, *args: Any) -> int:
        """Call it, and leave the judgement of the code to the caller."""
        if self._function is None:
            try:
                function = getattr(library(), self.name)
            except AttributeError:
                text = "this libcuda does not have it"
                raise CudaError(self.name, NO_ENTRY_POINT, "", text) from None
            function.argtypes, function.restype = self.argtypes, ctypes.c_int
            self._function = function
        return self._function(*args)

    def __call__(self, *args: Any) -> None:
        code = self.code(*args)
        if code:
            raise CudaError(self.name, code, *_name_and_text(code))


_int, _uint, _handle = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_out_int, _out_uint = ctypes.POINTER(_int), ctypes.POINTER(_uint)
_out_handle, _out_text = ctypes.POINTER(_handle), ctypes.POINTER(ctypes.c_char_p)
_Uuid = ctypes.c_ubyte * 16

_error_name = Entry("cuGetErrorName", _int, _out_text)
_error_string = Entry("cuGetErrorString", _int, _out_text)
_init = Entry("cuInit", _uint)
_driver_version = Entry("cuDriverGetVersion", _out_int)
_device_count = Entry("cuDeviceGetCount", _out_int)
_device_get = Entry("cuDeviceGet", _out_int, _int)
_device_uuid_v2 = Entry("cuDeviceGetUuid_v2", ctypes.POINTER(_Uuid), _int)
_device_uuid = Entry("cuDeviceGetUuid", ctypes.POINTER(_Uuid), _int)
_device_pci = Entry("cuDeviceGetPCIBusId", ctypes.c_char_p, _int, _int)
_device_name = Entry("cuDeviceGetName", ctypes.c_char_p, _int, _int)
_device_attribute = Entry("cuDeviceGetAttribute", _out_int, _int, _int)
_primary_state = Entry("cuDevicePrimaryCtxGetState", _int, _out_uint, _out_int)
_primary_retain = Entry("cuDevicePrimaryCtxRetain", _out_handle, _int)
_primary_release = Entry("cuDevicePrimaryCtxRelease_v2", _int)
_ctx_set_current = Entry("cuCtxSetCurrent", _handle)
_ctx_get_current = Entry("cuCtxGetCurrent", _out_handle)
_ctx_push = Entry("cuCtxPushCurrent_v2", _handle)
_ctx_pop = Entry("cuCtxPopCurrent_v2", _out_handle)
_ctx_synchronize = Entry("cuCtxSynchronize")
_pointer_attribute = Entry("cuPointerGetAttribute", ctypes.c_void_p, _int, ctypes.c_uint64)


def _name_and_text(code: int) -> Tuple[str, str]:
    """CUDA's own name and sentence for a code; empty where it has none."""
    found = []
    for entry in (_error_name, _error_string):
        text = ctypes.c_char_p()
        entry.code(code, ctypes.byref(text))
        found.append((text.value or b"").decode("utf-8", "replace"))
    return found[0], found[1]


# -- who is here ---------------------------------------------------------------------------------


def init() -> None:
    """cuInit. From the first success on, this process's list of GPUs is fixed. CudaError."""
    code = _init.code(0)
    if code:
        name, text = _name_and_text(code)
        raise CudaError(_init.name, code, name, _INIT.get(code, text))


def survey() -> Tuple[Tuple[VisibleGpu, ...], str]:
    """The GPUs this process sees, and "" or why the driver did not answer. Never raises."""
    try:
        return devices(), ""
    except Exception as error:  # noqa: BLE001 - HELLO must go out whatever a broken driver does
        return (), str(error) or type(error).__name__


def driver_version() -> Tuple[int, int]:
    """The newest CUDA version that this driver speaks, (13, 0)."""
    version = _int()
    _driver_version(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def devices() -> Tuple[VisibleGpu, ...]:
    """Every GPU or MIG instance that this process sees, in its own order. CudaError."""
    init()
    count = _int()
    _device_count(ctypes.byref(count))
    return tuple(describe(ordinal) for ordinal in range(count.value))


def describe(ordinal: int) -> VisibleGpu:
    """The identity of one visible GPU."""
    device = _device(ordinal)
    name, pci = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    _device_name(name, len(name), device)
    _device_pci(pci, len(pci), device)
    label = name.value.decode("utf-8", "replace")
    kind, raw = _identity(device, label)
    try:
        uuid = uuid_from_bytes(raw, kind)
    except ValueError as error:
        raise CudaError(_device_uuid_v2.name, NO_UUID, "", str(error)) from None
    return VisibleGpu(ordinal, kind, uuid, pci.value.decode("ascii", "replace"), label)


def _device(ordinal: int) -> int:
    device = _int()
    _device_get(ctypes.byref(device), ordinal)
    return device.value


def _identity(device: int, name: str) -> Tuple[str, bytes]:
    """Kind and UUID bytes.

    No attribute of the driver says "this is a MIG instance", and both kinds of UUID are 16 plain
    bytes. Two signs are used; either suffices:
    * `cuDeviceGetUuid_v2` is documented to give the MIG UUID, while the exported symbol without
      suffix (what ctypes finds; only the C header renames it) keeps its old meaning for programs
      built before 11.4, the physical GPU. Where they differ, this is an instance.
    * the driver appends the profile to an instance's name ("... MIG 1g.5gb"), which still tells if
      a later driver lets both calls agree.
    An instance taken for a GPU would be named with the wrong prefix and so be a mismatch, never a
    false match.
    """
    new, old = _Uuid(), _Uuid()
    try:
        _device_uuid_v2(ctypes.byref(new), device)
    except CudaError as error:
        if error.code != NO_ENTRY_POINT:
            raise
        # A driver before 11.4. Under MIG this is the physical UUID: never call it an instance.
        _device_uuid(ctypes.byref(old), device)
        return GPU, bytes(old)
    try:
        physical = bytes(old) if _device_uuid.code(ctypes.byref(old), device) == 0 else bytes(new)
    except CudaError:  # a driver that dropped the old symbol
        physical = bytes(new)
    instance = physical != bytes(new) or " MIG " in name
    return MIG if instance else GPU, bytes(new)


def compute_mode(ordinal: int) -> int:
    """One of COMPUTE_MODES. Anything but 0 forbids a learner and its worker to share the GPU."""
    mode = _int()
    _device_attribute(ctypes.byref(mode), _COMPUTE_MODE, _device(ordinal))
    return mode.value


# -- contexts ------------------------------------------------------------------------------------


def primary_contexts() -> Tuple[str, ...]:
    """UUIDs of the visible GPUs on which this process has an active primary context. Makes none."""
    active = []
    for gpu in devices():
        flags, is_active = _uint(), _int()
        device = _device(gpu.ordinal)
        _primary_state(device, ctypes.byref(flags), ctypes.byref(is_active))
        if is_active.value:
            active.append(gpu.uuid)
    return tuple(active)


def retain_primary(ordinal: int) -> int:
    """The primary context (what the runtime and torch use), made if need be; pair with release."""
    context = _handle()
    _primary_retain(ctypes.byref(context), _device(ordinal))
    return context.value or 0


def release_primary(ordinal: int) -> None:
    _primary_release(_device(ordinal))


def set_current(context: int) -> None:
    """For the calling thread; 0 for none."""
    _ctx_set_current(context or None)


def get_current() -> int:
    """The calling thread's context, 0 when it has none."""
    context = _handle()
    _ctx_get_current(ctypes.byref(context))
    return context.value or 0


@contextmanager
def using(context: int) -> Generator[None, None, None]:
    """`context` current inside the block, and the thread's own one again after it: the simulator
    and torch must not find another current device than the one they left."""
    _ctx_push(context)
    try:
        yield
    finally:
        _ctx_pop(ctypes.byref(_handle()))


def synchronize() -> None:
    """Wait for all work of the current context."""
    _ctx_synchronize()


# -- where is this pointer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a pointer lies. Only `device` memory proves a placement: managed memory migrates, and
    registered host memory names the GPU that happened to be current."""

    memory: str  # one of the four *_MEMORY words; `unknown` for what CUDA does not know
    ordinal: int = -1  # this process's numbering; -1 unless `device`
    uuid: str = ""  # "" unless `device`
    ipc_capable: bool = False  # may be exported with cuIpcGetMemHandle


def where_is(pointer: int) -> Place:
    """Ask the driver, attribute by attribute. The plural call is never used: it reports success
    and ordinal 0 for a pointer that CUDA does not know."""
    kind = _attribute(pointer, _MEMORY_TYPE) if pointer else None
    if kind is None:
        return Place(UNKNOWN_MEMORY)
    if _attribute(pointer, _IS_MANAGED):
        return Place(MANAGED_MEMORY)
    if kind == _HOST_TYPE:
        return Place(HOST_MEMORY)
    ordinal = _attribute(pointer, _ORDINAL)
    if kind != _DEVICE_TYPE or ordinal is None:
        return Place(UNKNOWN_MEMORY)
    uuid = describe(ordinal).uuid
    return Place(DEVICE_MEMORY, ordinal, uuid, bool(_attribute(pointer, _LEGACY_IPC)))


def _attribute(pointer: int, attribute: int) -> Optional[int]:
    """None where the driver has no answer for this pointer."""
    # Some attributes are written as one byte, some as four: eight zero bytes take either.
    answer = ctypes.c_uint64(0)
    code = _pointer_attribute.code(ctypes.byref(answer), attribute, pointer)
    if code == _INVALID_VALUE:
        return None
    if code:
        raise CudaError(_pointer_attribute.name, code, *_name_and_text(code))
    return answer.value & 0xFFFFFFFF


def libcuda_folder() -> str:
    """The folder in which this process finds libcuda.so.1, "" when it finds none.

    For a child's search path: its interpreter may look in other folders than ours.
    """
    try:
        library()
    except CudaError:
        return ""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = [line.split(None, 5)[5].strip() for line in maps if "/libcuda.so" in line]
    for path in paths:
        folder = os.path.dirname(path)
        # The kernel shows the file behind the link. A child asks for the link, so a folder
        # without it is of no use.
        if os.path.exists(os.path.join(folder, "libcuda.so.1")):
            return folder
    return ""
