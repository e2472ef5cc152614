"""The CUDA arena on the stand-in driver: real processes, faked memory. What only a GPU can show (streams,
tensors, graphs, speed) is in test_arena_gpu.py.

Every test runs a child that finds the stand-in: it is the host, and its worker finds it too.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from outboard.ipc import arena, messages
from outboard.ipc.arena import ArenaLayout
from outboard.ipc.layout import Layout, Sizes
from standin_gpu import TWO, U0, U1, each_python, run_child, standin_environment

# Workers die here, and their logs stay.
pytestmark = pytest.mark.usefixtures("logs_may_stay")

# `sim` is a backend with an arena on the second GPU; `put` and `get` reach into its GPU memory.
HEAD = """
import json, os, sys, types
import numpy as np
from outboard.backends import *
from outboard.backends.arena_plane import ArenaPlane
from outboard.ipc import arena as arenas, cuda_driver as d, cuda_memory as m
from outboard.ipc.messages import Opcode as O

STANDIN = {k: v for k, v in os.environ.items() if k.startswith("OUTBOARD_STANDIN_")}
ALL = ("qpos", "qvel", "body_pos")

def fake(num_envs=5, device="cuda:1", transport="cuda", publish=ALL, **more):
    more.setdefault("worker_python", PYTHON)
    return FakeBackend(device=device, num_envs=num_envs, transport=transport, publish=publish,
                       env=STANDIN, **more)

def field(sim, name):
    return sim._plane.slots[sim._plane.slot][name]

def get(sim, name):
    into = np.empty(field(sim, name).shape, field(sim, name).dtype)
    with d.using(sim._plane.arena.context):
        m.copy_dtoh(into.ctypes.data, field(sim, name).pointer, into.nbytes)
    return into

def put(sim, name, array):
    array = np.ascontiguousarray(array, field(sim, name).dtype)
    assert array.shape == field(sim, name).shape
    with d.using(sim._plane.arena.context):
        m.copy_htod(field(sim, name).pointer, array.ctypes.data, array.nbytes)

def arena(sim, opcode, **fields):
    for name, array in fields.items():
        put(sim, name, array)
    sim._plane.ring(sim, opcode)
    sim.step_wait()
    return {name: get(sim, name) for name in sim.state.fields()}

def numpy_copy(state):
    return {name: array.copy() for name, array in state.fields().items()}

def same(a, b):
    return sorted(a) == sorted(b) and all(np.array_equal(a[n], b[n], equal_nan=True) for n in a)

def used(uuid):
    path = os.path.join(os.environ["OUTBOARD_STANDIN_STATE"], f"{os.getpid()}@{uuid}@compute")
    return int(open(path).read()) if os.path.exists(path) else 0     # 0: not even a context

def refused(act):
    try:
        act()
    except OutboardError as error:
        return f"{type(error).__name__}: {error.message}"
    return "was not refused"

rng = np.random.default_rng(7)
def targets(sim):
    return rng.normal(size=(sim.num_envs, sim.model.nu)).astype(np.float32)
"""


def child(code: str, state: Path, python: str = sys.executable, **extra: str) -> Any:
    """What the last line of the child's output says, as JSON."""
    whole = f"PYTHON = {python!r}\n{HEAD}\n{code}"
    # Locks and logs of this session, not those of others that use the same made-up UUIDs.
    own = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME")}
    out = run_child(whole, standin_environment(TWO, state, **own, **extra))
    return json.loads(out.splitlines()[-1])


# -- what is in it ----------------------------------------------------------------------------------

LAYOUTS = [(publish, banks) for publish in (("qpos",), ("qpos", "body_quat")) for banks in (1, 2)]


@pytest.mark.parametrize(("publish", "banks"), LAYOUTS)
def test_fields_lie_as_in_the_block_and_none_on_another(
    publish: tuple[str, ...], banks: int
) -> None:
    layout = Layout(Sizes(3, 7, 6, 2, 5), publish, banks)
    placed = ArenaLayout(layout)
    assert placed.nbytes % (2 << 20) == 0
    base, slots = 1 << 40, placed.fields(1 << 40, None)
    for slot, fields in enumerate(slots):
        for field in layout.fields:
            if field.name == "env_flags" and slot >= banks:
                continue
            bank = slot % banks
            assert fields[field.name].pointer - base == layout.offset(field, bank) - 4096
            assert fields[field.name].nbytes == field.nbytes
    taken = sorted({(f.pointer, f.pointer + f.nbytes) for slot in slots for f in slot.values()})
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert base <= taken[0][0] and taken[-1][1] <= base + placed.nbytes
    # What the last command flagged can be read while the next one runs.
    assert slots[0]["env_flags"].pointer != slots[1]["env_flags"].pointer
    assert (slots[0]["qpos"].pointer == slots[1]["qpos"].pointer) == (banks == 1)


def test_a_field_says_what_array_libraries_ask() -> None:
    field = arena.DeviceField("x", 4096, (3, 2), "<f4", None)
    assert field.nbytes == 24
    assert field.__cuda_array_interface__ == {
        "shape": (3, 2), "typestr": "<f4", "data": (4096, False), "strides": None, "version": 3,
    }  # fmt: skip
    assert arena.DeviceField("m", 1, (3,), "<u1", None).__cuda_array_interface__["typestr"] == "|u1"


def test_a_handle_of_another_length_is_no_offer() -> None:
    with pytest.raises(ValueError, match="memory has 3 bytes"):
        messages.ArenaOffer(U0, 1, b"abc")


# -- commands ---------------------------------------------------------------------------------------

SAME_AS_NUMPY = """
with fake() as gpu, FakeBackend(device="cpu", num_envs=5, publish=ALL) as cpu:
    right = []
    for _ in range(3):
        ctrl = targets(cpu)
        right.append(same(arena(gpu, O.ARENA_STEP, ctrl=ctrl), numpy_copy(cpu.step(ctrl))))
    mask = np.array([1, 0, 0, 1, 0])
    right.append(same(arena(gpu, O.ARENA_RESET, env_mask=mask), numpy_copy(cpu.reset(mask > 0))))
    rows = rng.normal(size=(2, 5, 4)).astype(np.float32)
    mask = np.array([0, 1, 1, 0, 0])
    right.append(same(
        arena(gpu, O.ARENA_SET_STATE, env_mask=mask, set_qpos=rows[0], set_qvel=rows[1]),
        numpy_copy(cpu.set_state(mask > 0, rows[0][mask > 0], rows[1][mask > 0])),
    ))
    ctrl, mask = targets(cpu), np.array([0, 0, 0, 0, 1])
    right.append(same(
        arena(gpu, O.ARENA_STEP_RESET, ctrl=ctrl, env_mask=mask),
        numpy_copy(cpu.step(ctrl, reset=mask > 0)),
    ))
    print(json.dumps(right))
"""


@each_python
def test_commands_in_the_arena_do_what_they_do_in_the_block(python: str, tmp_path: Path) -> None:
    assert child(SAME_AS_NUMPY, tmp_path, python) == [True] * 6


MIXED = """
right = []
with fake(banks=BANKS) as gpu, FakeBackend(device="cpu", num_envs=5, publish=ALL) as cpu:
    for turn in range(12):
        ctrl = targets(cpu)
        want = numpy_copy(cpu.step(ctrl))
        if turn % 3:
            have = arena(gpu, O.ARENA_STEP, ctrl=ctrl)
            gpu.where()                                   # mail publishes nothing
            right.append(same(have, want) and same(numpy_copy(gpu.state), want))
        else:
            have = numpy_copy(gpu.step(ctrl))
            gpu.where()
            gpu._plane.renew(gpu._answered, (gpu._answered - 1) & gpu._last_bank)
            in_arena = {name: get(gpu, name) for name in ALL}
            right.append(same(have, want) and same(in_arena, want))
print(json.dumps(right))
"""


def test_numpy_and_arena_commands_may_alternate(tmp_path: Path) -> None:
    assert child(MIXED.replace("BANKS", "1"), tmp_path) == [True] * 12


def test_two_banks_keep_a_result_until_the_second_next_command(tmp_path: Path) -> None:
    code = """
with fake(banks=2) as sim:
    first = arena(sim, O.ARENA_STEP, ctrl=targets(sim))
    arena(sim, O.ARENA_STEP, ctrl=targets(sim))
    sim._plane._answered -= 1
    print(json.dumps(same({n: get(sim, n) for n in ALL}, first)))
"""
    assert child(code, tmp_path) is True


def test_the_state_is_the_last_answered_one_while_a_command_is_in_flight(tmp_path: Path) -> None:
    code = """
with fake(banks=2) as sim:
    first = arena(sim, O.ARENA_STEP, ctrl=targets(sim))
    sim._plane.ring(sim, O.ARENA_STEP)
    right = same({n: get(sim, n) for n in ALL}, first)
    sim.step_wait()
    print(json.dumps([right, same({n: get(sim, n) for n in ALL}, first)]))
"""
    assert child(code, tmp_path) == [True, False]


def test_the_host_learns_of_flags_when_it_asks(tmp_path: Path) -> None:
    code = """
with fake() as sim:
    ctrl = targets(sim)
    ctrl[3] = np.nan
    arena(sim, O.ARENA_STEP, ctrl=ctrl)
    print(json.dumps(sim.flagged.tolist()))
"""
    assert child(code, tmp_path) == [3]


def test_an_arena_answer_to_a_command_in_the_block_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "liar.py"
    file.write_text(
        "from outboard.workers.fake_worker import FakeSimulator\n"
        "class Sim(FakeSimulator):\n"
        "    def step(self, bank):\n"
        "        return -1\n"
    )
    code = f"""
for transport in ("cuda", "block"):
    with CustomBackend(simulator={str(file)!r} + ":Sim", device="cuda:1", num_envs=2, env=STANDIN,
                       transport=transport) as sim:
        print(json.dumps(refused(sim.step)))
"""
    assert child(code, tmp_path) == "ProtocolError: a command ended with status 4"


# -- who gets one -----------------------------------------------------------------------------------


def chosen(code: str, tmp_path: Path, **extra: str) -> str:
    """`transport: why` of a backend that the code opens, or the error that it ended with."""
    whole = f"""
def act():
    with {code} as sim:
        print(json.dumps(sim.report["transport"] + ": " + sim.report["transport_why"]))
text = refused(act)
if text != "was not refused":
    print(json.dumps(text))
"""
    return child(whole, tmp_path, **extra)


TORCH = (
    "sys.modules.__setitem__('torch', types.SimpleNamespace(version=types.SimpleNamespace(cuda={}), \
Tensor=int, cuda=types.SimpleNamespace(is_initialized=lambda: False)))"
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('transport="cuda"', "cuda: this process and the worker share one GPU"),
        ('transport="block"', 'block: transport="block" was asked for'),
        ('transport="auto"', "block: torch was not imported before"),
        ('transport="auto", device="cpu"', "block: the simulator runs on the CPU"),
        ('transport="cuda", device="cpu"', "UsageError: transport=\"cuda\" needs a simulator on a GPU"),
    ],
)  # fmt: skip
def test_the_choice_and_its_reason(arguments: str, expected: str, tmp_path: Path) -> None:
    assert chosen(f"fake({arguments})", tmp_path).startswith(expected)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("'13.0'", "cuda: "), (None, "block: the torch of this process is built without CUDA")],
)
def test_auto_wants_a_torch_with_cuda(version: str | None, expected: str, tmp_path: Path) -> None:
    code = f"({TORCH.format(version)}, fake(transport='auto'))[1]"
    assert chosen(code, tmp_path).startswith(expected)


def test_a_gpu_for_one_process_alone_has_none(tmp_path: Path) -> None:
    mode = {"OUTBOARD_STANDIN_COMPUTE_MODE": "3"}
    why = f"{U1} is in compute mode exclusive process: two processes cannot share it"
    text = chosen("fake()", tmp_path, **mode)
    assert text == (
        f'UsageError: transport="cuda" cannot be had: {why}. transport="block" needs none of it'
    )
    code = f"({TORCH.format(1)}, fake(transport='auto'))[1]"
    assert chosen(code, tmp_path, **mode) == f"block: {why}"


def test_a_simulator_that_knows_the_block_alone_has_none(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text(
        "from outboard.workers.fake_worker import FakeSimulator\n"
        "class Sim(FakeSimulator):\n"
        "    transports = property(lambda self: ('block',), lambda self, value: None)\n"
    )
    code = (
        f"CustomBackend(simulator={str(file)!r} + ':Sim', device='cuda:1', num_envs=2, "
        "env=STANDIN, transport={})"
    )
    why = "fake publishes through the block only"
    assert why in chosen(code.format("'cuda'"), tmp_path)
    auto = f"({TORCH.format(1)}, {code.format(repr('auto'))})[1]"
    assert chosen(auto, tmp_path) == f"block: {why}"


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        # The worker's answer to the probe does not arrive: it mapped something else.
        ("arenas.HostArena.answered = lambda *_: False", "did not arrive here"),
        # The handle names memory of nobody.
        ("m.ipc_export = lambda pointer: bytes(64)", "could not map the arena: cuIpcOpenMemHandle"),
    ],
)
def test_a_probe_that_fails_leaves_the_block(lie: str, expected: str, tmp_path: Path) -> None:
    prepare = f"exec({lie!r})"
    assert expected in chosen(f"({prepare}, fake())[1]", tmp_path)
    text = chosen(f"({prepare}, {TORCH.format(1)}, fake(transport='auto'))[2]", tmp_path)
    assert text.startswith("block: ") and expected in text


REFUSE = """
from outboard.ipc import arena, cuda_driver, cuda_memory
from outboard.ipc.layout import Layout, Sizes
from outboard.ipc.messages import ArenaOffer
opened = []
cuda_memory.ipc_open = opened.append
layout = Layout(Sizes(2, 1, 1, 1, 1), ("qpos",))
offer = ArenaOffer("{uuid}", arena.ArenaLayout(layout).nbytes, bytes(64))
try:
    arena.WorkerArena(offer, layout, bytes(16))
except arena.NoArena as error:
    print(str(error), opened)
"""


@each_python
@pytest.mark.parametrize("mask", ["1", "1,0", "0"])
def test_a_handle_for_another_gpu_is_refused_before_it_is_opened(python: str, mask: str) -> None:
    """Also with the right GPU beside another: a worker has one."""
    offered = U0 if mask == "1" else U1
    text = run_child(
        REFUSE.format(uuid=offered), standin_environment(CUDA_VISIBLE_DEVICES=mask), python
    )
    assert text.startswith(f"the arena lies on {offered}; this worker's only GPU is GPU-")
    assert text.endswith("[]")


# -- life -------------------------------------------------------------------------------------------


def test_memory_goes_when_it_is_closed_and_nobody_holds_a_field_of_it(tmp_path: Path) -> None:
    code = """
used_bytes = []
sim = fake()
held = sim._plane.slots[0]["qpos"]
used_bytes.append(used("UUID"))
sim.close()
used_bytes.append(used("UUID"))
del held
used_bytes.append(used("UUID"))
sim = fake()
used_bytes.append(used("UUID"))
del sim                                    # dropped without close()
used_bytes.append(used("UUID"))
print(json.dumps(used_bytes))
""".replace("UUID", U1)
    granule = 2 << 20
    assert child(code, tmp_path) == [granule, granule, 0, granule, 0]


def test_after_a_death_no_stream_of_the_host_waits_for_the_worker(tmp_path: Path) -> None:
    code = """
with fake(cfg=FakeCfg(fault="SIGKILL", fault_step=3)) as sim:
    def counts():
        a = sim._plane.arena
        with arenas.in_context(a.context):
            return [int.from_bytes(arenas._get(at, 4), "little") for at in (a.ctrl_ready, a.state_ready)]
    seen = []
    for _ in range(2):
        arena(sim, O.ARENA_STEP, ctrl=targets(sim))
    seen.append(counts())
    refused(lambda: arena(sim, O.ARENA_STEP))
    seen.append(counts())
    sim.restart()
    seen.append(counts())
    arena(sim, O.ARENA_STEP, ctrl=targets(sim))
    seen.append(counts())
    print(json.dumps(seen))
"""
    assert child(code, tmp_path) == [[2, 2], [3, 3], [3, 3], [4, 4]]


@pytest.mark.parametrize("end", ["sim.restart()", "sim.close(timeout_s=0)", "interrupted(sim)"])
def test_whatever_ends_a_worker_no_stream_of_the_host_waits_for_it(
    end: str, tmp_path: Path
) -> None:
    code = f"""
def interrupted(sim):
    end = sim._worker.end
    def then_interrupt(*args, **named):
        end(*args, **named)
        raise KeyboardInterrupt
    sim._worker.end = then_interrupt
    try:
        sim._fail(errors.WorkerFailed("x"))
    except KeyboardInterrupt:
        pass
    sim._worker.end = end
from outboard.ipc import errors
sim = fake()
plane = sim._plane
plane.ring(sim, O.ARENA_STEP)              # in flight: the count is asked for, and may never come
wanted = plane._count = plane._count + 6   # a count that no worker has reached
{end}
with arenas.in_context(plane.arena.context):
    at = arenas._get(plane.arena.state_ready, 4)
print(json.dumps(int.from_bytes(at, "little") == wanted))
sim.close()
"""
    assert child(code, tmp_path) is True


@each_python
def test_restart_keeps_every_address(python: str, tmp_path: Path) -> None:
    code = """
with fake(cfg=FakeCfg(fault="SIGKILL", fault_step=3)) as sim:
    def addresses():
        return [f.pointer for slot in sim._plane.slots for f in slot.values()]
    before, died = addresses(), []
    for _ in range(3):
        for _ in range(2):
            arena(sim, O.ARENA_STEP, ctrl=targets(sim))
        died.append(refused(lambda: arena(sim, O.ARENA_STEP)).split(":")[0])
        sim.restart()
        assert np.allclose(get(sim, "ctrl"), sim.model.default_ctrl)
        assert np.allclose(sim.state.qpos, sim.model.default_qpos)
    print(json.dumps([addresses() == before, died, sim.report["transport"]]))
"""
    assert child(code, tmp_path, python) == [True, ["WorkerDied"] * 3, "cuda"]


def test_a_restart_that_would_lose_the_arena_is_an_error(tmp_path: Path) -> None:
    code = """
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(cuda=1), Tensor=int)
with fake(transport="auto") as sim:
    arenas.HostArena.answered = lambda *_: False
    print(json.dumps(refused(sim.restart)))
"""
    text = child(code, tmp_path)
    assert text.startswith("UsageError") and "did not arrive here" in text


def test_the_block_is_page_locked_on_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "where.py"
    file.write_text(
        "from outboard.ipc import cuda_driver\n"
        "from outboard.ipc.errors import UsageError\n"
        "from outboard.workers.fake_worker import FakeSimulator\n"
        "class Sim(FakeSimulator):\n"
        "    def set_property(self, name, env_ids, values):\n"
        "        address = self.banks[0]['qpos'].ctypes.data\n"
        "        raise UsageError(cuda_driver.where_is(address).memory)\n"
    )
    code = f"""
found = []
for transport in ("cuda", "block"):
    with CustomBackend(simulator={str(file)!r} + ":Sim", device="cuda:1", num_envs=2, env=STANDIN,
                       transport=transport) as sim:
        found.append(d.where_is(sim.state.qpos.ctypes.data).memory)
        found.append(refused(lambda: sim.set_property("rate", [0], [1.0])))
        held = sim.state.qpos
    found.append(d.where_is(held.ctypes.data).memory)
print(json.dumps(found))
"""
    # Without an arena this process has no business with CUDA: only the worker locks.
    assert child(code, tmp_path) == [
        *("host", "UsageError: host", "unknown"),
        *("unknown", "UsageError: host", "unknown"),
    ]


# -- copies -----------------------------------------------------------------------------------------

ROWS = """
import numpy as np
from outboard.ipc import cuda_driver as d, cuda_memory as m
from outboard.ipc.arena import DeviceField
from outboard.workers import device_copy
d.init(); d.set_current(d.retain_primary(0))
def on_gpu(array):
    pointer = m.allocate(array.nbytes)
    m.copy_htod(pointer, array.ctypes.data, array.nbytes)
    return pointer
wide = np.arange(3 * 5, dtype=np.float32).reshape(3, 5)
there, stream = on_gpu(wide), m.stream_create()
field = DeviceField("qpos", on_gpu(np.zeros((3, 4), np.float32)), (3, 4), "<f4", None)
device_copy.rows_into(field, there + 4, 20, stream, at=8, width=8)      # columns 1, 2 to 2, 3
print(device_copy.to_host(field, stream).astype(int).tolist())
device_copy.rows_out_of(field, there, 20, stream)
back = np.empty_like(wide)
m.copy_dtoh(back.ctypes.data, there, back.nbytes)
print(back.astype(int).tolist())
device_copy.into(field, there, stream)
print(device_copy.to_host(field, stream).astype(int).ravel().tolist())
mask = DeviceField("m", on_gpu(np.array([0, 1, 2], np.uint8)), (3,), "<u1", None)
print(device_copy.mask_ids(mask, stream).tolist())
"""


@each_python
def test_rows_are_copied_between_unlike_pitches(python: str) -> None:
    assert run_child(ROWS, standin_environment(), python).splitlines() == [
        "[[0, 0, 1, 2], [0, 0, 6, 7], [0, 0, 11, 12]]",
        "[[0, 0, 1, 2, 4], [0, 0, 6, 7, 9], [0, 0, 11, 12, 14]]",
        "[0, 0, 1, 2, 4, 0, 0, 6, 7, 9, 0, 0]",
        "[1, 2]",
    ]


# -- tensors, as far as a torch without a GPU can go ------------------------------------------------

# The stand-in's device memory is a memfd of this process: a second mapping of it is what torch sees. The
# device, streams and events of torch are stubs, so this shows the bookkeeping and no order.
STUBS = """
import mmap
import torch
from outboard.backends import tensor_checks, torch_view

class Stream:
    cuda_stream = 0
    def wait_stream(self, other): pass

class Event:
    def query(self): return True
    def record(self, stream): pass
    def synchronize(self): pass

class Torch:
    version = types.SimpleNamespace(cuda="13.0")
    cuda = types.SimpleNamespace(current_stream=lambda device, s=Stream(): s, Event=Event)
    def device(self, *_): return torch.device("cpu")
    def zeros(self, *shape, pin_memory=False, **more): return torch.zeros(*shape, **more)
    def __getattr__(self, name): return getattr(torch, name)

torch_view.torch = tensor_checks.torch = Torch()

def memory(sim):
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.exists(path) and "standin-gpu" in os.readlink(path):
            if os.stat(path).st_size == sim._plane.arena.layout.nbytes:
                return mmap.mmap(int(fd), 0)

def tensor(field, device):
    at = field.pointer - sim._plane.arena.pointer
    array = np.frombuffer(mapped, field.dtype, int(np.prod(field.shape)), at)
    return torch.from_numpy(array.reshape(field.shape))

torch_view._tensor = tensor
"""

TENSORS = """
sim = fake(num_envs=6)
mapped = memory(sim)
cpu = FakeBackend(device="cpu", num_envs=6, publish=ALL)
right = []
def compare(tensors, arrays):
    right.append(same({n: t.numpy() for n, t in tensors.fields().items()}, numpy_copy(arrays)))
compare(sim.torch.state, cpu.state)
ctrl = torch.rand(6, 4, requires_grad=True)
plain = ctrl.detach().numpy()
mask = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool)
compare(sim.torch.step(ctrl), cpu.step(plain))
compare(sim.torch.step(ctrl, reset=mask), cpu.step(plain, reset=mask.numpy()))
rows = torch.rand(2, 6, 4)
compare(sim.torch.set_state(mask, rows[0], rows[1]),
        cpu.set_state(mask.numpy(), rows[0][mask].numpy(), rows[1][mask].numpy()))
compare(sim.torch.set_state([4, 2], rows[0, :2], rows[1, 0]),
        cpu.set_state([4, 2], rows[0, :2].numpy(), rows[1, 0].numpy()))
compare(sim.torch.reset(mask), cpu.reset(mask.numpy()))
compare(sim.torch.step(), cpu.step())
sim.step(plain); cpu.step(plain)
compare(sim.torch.state, cpu.state)
right.append(same({"qpos": sim.torch.qpos.numpy()}, {"qpos": cpu.state.qpos}))
compare(sim.torch.reset(), cpu.reset())
sim.restart(); cpu.restart()
compare(sim.torch.step(ctrl), cpu.step(plain))
print(json.dumps([right, sim.report["transport"]]))
sim.close(); cpu.close()
"""

BAD = """
sim = fake(num_envs=6)
mapped = memory(sim)
good, bad = torch.rand(6, 4), torch.rand(6, 4)
bad[3, 2], bad[5, 0] = float("nan"), float("inf")
said = []
def step(ctrl):
    said.append(refused(lambda: sim.torch.step(ctrl)).replace("was not refused", ""))
step(good); step(bad); step(good)
sim.torch.reset()
for _ in range(3):
    step(good)
for ctrl in (torch.rand(6, 3), torch.ones(6, 4, dtype=torch.int64)):
    step(ctrl)
said.append(refused(lambda: sim.torch.reset(torch.ones(5, dtype=torch.bool))))
said.append(refused(lambda: sim.torch.set_state(torch.ones(6, dtype=torch.bool), good[:2], good)))
print(json.dumps(said))
sim.close()
"""


def test_tensor_commands_keep_their_books(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, which is not installed")
    assert child(STUBS + TENSORS, tmp_path) == [[True] * 11, "cuda"]


def test_a_bad_ctrl_is_told_at_the_next_bell_and_once(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, which is not installed")
    said = child(STUBS + BAD, tmp_path)
    assert said[:2] == ["", ""]
    assert said[2].startswith(
        "UsageError: ctrl was NaN or infinite in environments 3, 5 in command 2; the simulator was"
    )
    assert said[3:6] == ["", "", ""]
    assert (
        said[6] == "UsageError: ctrl has shape (6, 3); this backend takes (num_envs, nu) = (6, 4)"
    )
    assert said[7] == "UsageError: ctrl has dtype torch.int64; float32 belongs"
    assert said[8] == "UsageError: a mask has shape (6,), this one (5,)"
    assert said[9] == "UsageError: qpos has shape (2, 4); (6, 4) belongs"


OF_THE_GPU_TESTS = """
FILE = "FILE_"
ctrl = torch.rand(6, 8)
mask = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool)
rows = torch.rand(2, 6, 8)
plain = np.ones((6, 8), np.float32)
right = []
def custom(kind, publish):
    return CustomBackend(simulator=f"{FILE}:{kind}", device="cuda:1", num_envs=6, env=STANDIN,
                         transport="cuda", worker_python=PYTHON, publish=publish)
sim = custom("Echo", ("qpos", "qvel"))
mapped = memory(sim)
right.append(torch.equal(sim.torch.step(ctrl).qpos, ctrl))
right.append(torch.equal(sim.torch.reset(mask).qpos, torch.where(mask[:, None], 0, ctrl)))
want = torch.where(mask[:, None], rows[0], sim.torch.qpos)
right.append(torch.equal(sim.torch.set_state(mask, rows[0], rows[1]).qpos, want))
right.append(bool((sim.step(plain).qpos == 1).all() and (sim.torch.qpos == 1).all()))
sim.close()
for kind in ("G1Like", "G1LikePageable"):
    sim = custom(kind, ("qpos", "qvel", "body_pos", "body_quat", "body_linvel", "body_angvel"))
    mapped = memory(sim)
    sim.step(np.zeros((6, 29), np.float32))
    right.append(sim.torch.step(torch.zeros(6, 29)).body_quat.shape == (6, 30, 4))
    sim.close()
print(json.dumps(right))
"""


@each_python
def test_the_simulators_of_the_gpu_tests_do_what_they_say(python: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch, which is not installed")
    code = OF_THE_GPU_TESTS.replace("FILE_", str(Path(__file__).parent / "gpu_simulators.py"))
    assert child(STUBS + code, tmp_path, python) == [True] * 6
