"""Parts of the Isaac Sim worker by themselves: the arena's path, the evidence of the device, pictures on
another GPU, the USD cache."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from direct import make_init
from isaacgym_home import write_scene
from isaacsim_home import LICENCE, sim_home
from outboard.backends import IsaacSimCfg, mjcf
from outboard.backends.mjcf_contract import write_contract
from outboard.backends.mjcf_flat import XML_NAME
from outboard.ipc.device import GPU, PlannedDevice
from outboard.ipc.errors import DevicePlanError, UsageError
from outboard.workers import isaacsim_app
from outboard.workers.isaacsim_worker import IsaacSimSimulator
from standin_gpu import U0, standin_environment

__all__ = ["sim_home"]

ROOT = Path(__file__).resolve().parent.parent


def options(folder: Path, scene: Path) -> dict[str, Any]:
    model = mjcf.inspect(scene)
    flat = mjcf.export_flat(model, folder / "models")
    return {
        **IsaacSimCfg().options(), "contract": str(write_contract(model, flat, folder / "models")),
        "usd_cache": str(folder / "usd"), "physical_index": 0, "flat": str(flat.path),
    }  # fmt: skip


def in_kit(home: Path, folder: Path, code: str, **settings: str) -> Any:
    """What `code` says in `answer`, run in the stand-in's Python; it has `options`, a folder and numpy."""
    scene = write_scene(folder, "floating")
    given = folder / "options.json"
    given.write_text(json.dumps(options(folder, scene)))
    start = f"""
import json, os, sys
import numpy as np
with open({str(given)!r}) as file:
    options = json.load(file)
flat, folder, answer = options.pop("flat"), {str(folder)!r}, None
"""
    end = "\nprint('\\n' + json.dumps(answer), flush=True)\nos._exit(0)\n"
    standin = ";".join(f"{name}={value}" for name, value in {"close": "return", **settings}.items())
    done = subprocess.run(
        [str(home / "venv" / "bin" / "python"), "-c", start + code + end],
        capture_output=True, text=True, timeout=50, stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": f"{ROOT / '.src'}:{ROOT / 'tests'}", LICENCE: "YES",
             "PATH": os.environ["PATH"], "ISAACSIM_STANDIN": standin},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# -- the arena -------------------------------------------------------------------------------------

_ARENA = """
from direct import Direct, allocate
from outboard.ipc.layout import PUBLISHABLE
sim = Direct("isaacsim", flat, 3, options=options, publish=PUBLISHABLE, decimation=2)
slots = allocate(sim.layout) * 2     # arrays in the place of GPU memory: torch takes both alike
slots[1] = {name: array.copy() for name, array in slots[0].items()}
slots[1]["ctrl"] = slots[0]["ctrl"]  # host-written: the same memory in both slots
worker, names = sim.simulator, (*sim.layout.publish, "env_flags")
worker.bind_arena(slots)
rng, differ = np.random.default_rng(2), []

def same(slot):
    sim.simulator._publish(0)        # the block's copy of the state that is there now
    differ.extend(n for n in names if not np.array_equal(slots[slot][n], sim[n], equal_nan=True))

for t in range(6):
    slots[0]["ctrl"][:] = sim.facts.default_ctrl + 0.3 * rng.normal(size=slots[0]["ctrl"].shape)
    if t == 3:
        worker.reset_mask(np.array([0, 1, 0], np.uint8))
        worker.publish_arena(t % 2)
        same(t % 2)
        kept = slots[t % 2]["qpos"].copy()
    worker.step_arena(t % 2)
    same(t % 2)
reset_is_keyframe = bool((kept[1] == np.array(sim.facts.default_qpos, np.float32)).all())
others_moved = bool((kept[0] != np.array(sim.facts.default_qpos, np.float32)).any())
slots[0]["ctrl"][2] = np.nan
worker.step_arena(0)
flags = slots[0]["env_flags"].tolist()
moved = [bool((slots[0]["qpos"] != before["qpos"]).any()) for before in [slots[1]]]
answer = [differ, reset_is_keyframe, others_moved, flags, moved, worker.transports]
"""


def test_the_arena_gets_what_the_block_gets(sim_home: Path, tmp_path: Path) -> None:
    """On tensors of the CPU: order and content are the same code; that nothing leaves the GPU, a GPU must
    show."""
    answer = in_kit(sim_home, tmp_path, _ARENA)
    assert answer == [[], True, True, [0, 0, 1], [True], ["block"]]


# -- the device ------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused_before_kit_is_started(tmp_path: Path) -> None:
    uuid = "GPU-ce08eab0-0000-4000-8000-000000000006"
    given = options(tmp_path, write_scene(tmp_path, "fixed"))
    init = dataclasses.replace(
        make_init(given.pop("flat"), options=given), device=PlannedDevice(GPU, uuid, "cuda:0")
    )
    with pytest.raises(DevicePlanError, match=f"{uuid} is planned, but|must be {uuid}, but"):
        IsaacSimSimulator().build(init, print)
    assert not {"isaacsim", "isaaclab", "pxr"} & set(sys.modules)


_EVIDENCE = """
import json
from types import SimpleNamespace
from outboard.ipc import cuda_driver, cuda_memory
from outboard.workers.isaacsim_worker import IsaacSimSimulator
cuda_driver.init()
cuda_driver.set_current(cuda_driver.retain_primary(0))
here = cuda_memory.allocate(4096)
host = (__import__("ctypes").c_float * 8)()
said = []
for address in (here, __import__("ctypes").addressof(host)):
    worker = IsaacSimSimulator()
    worker._scene, worker._state = SimpleNamespace(gpu=True), SimpleNamespace(pointer=lambda: address)
    report = worker.report_device()
    said.append([report.kind, report.uuid, report.local, report.evidence, report.buffer])
print(json.dumps(said))
"""


def test_the_evidence_is_where_the_views_tensor_lies() -> None:
    """By the driver's word on its pointer, whatever torch says; a tensor in host memory is reported as
    such."""
    done = subprocess.run(
        [sys.executable, "-c", _EVIDENCE], env=standin_environment(CUDA_VISIBLE_DEVICES=U0),
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    on_gpu, on_host = json.loads(done.stdout.splitlines()[-1])
    assert on_gpu == ["gpu", U0, "cuda:0", "derived_copy", "root transforms of the physics view"]
    assert on_host[0] == "cpu" and on_host[3] == "host_memory"


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [1, -1])
def test_pictures_elsewhere_than_on_gpu_0_need_a_launcher_that_can(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed launcher is read, not imported: a checkout's package, or the wheel's."""
    init = make_init("x.xml", render=True, options={"physical_index": index})
    monkeypatch.syspath_prepend(str(tmp_path))
    for inside in ("app", "source/isaaclab/isaaclab/app"):
        launcher = tmp_path / "isaaclab" / inside / "app_launcher.py"
        launcher.parent.mkdir(parents=True)
        (tmp_path / "isaaclab" / "__init__.py").write_text("raise AssertionError('imported')\n")
        launcher.write_text("active_gpu = device_id\n")
        with pytest.raises(UsageError, match=r"IsaacLab issue 2756.*activeCudaGpus"):
            isaacsim_app._require_renderable(init)  # pyright: ignore[reportPrivateUsage]
        launcher.write_text('"--/renderer/multiGpu/activeCudaGpus=0,"\n')
        isaacsim_app._require_renderable(init)  # pyright: ignore[reportPrivateUsage]
        launcher.unlink()
    for fine in ({"physical_index": 0}, {}):
        isaacsim_app._require_renderable(make_init("x.xml", render=True, options=fine))  # pyright: ignore[reportPrivateUsage]
    assert "isaaclab" not in sys.modules


# -- the USD cache ---------------------------------------------------------------------------------

_CACHE = """
from outboard.workers.isaacsim_app import App
from direct import make_init
App(make_init(flat, options=options))
from outboard.workers import isaacsim_usd as usd
cache = options["usd_cache"]
calls = []
convert = usd.convert
def counted(*arguments):
    calls.append(arguments[2:])
    return convert(*arguments)
usd.convert = counted
"""


def test_a_model_is_converted_once_and_again_when_anything_of_it_differs(
    sim_home: Path, tmp_path: Path
) -> None:
    code = (
        _CACHE
        + """
first = usd.cached(flat, cache, False, False, "5.1.0")
again = usd.cached(flat, cache, False, False, "5.1.0")
others = [usd.cached(flat, cache, True, False, "5.1.0"), usd.cached(flat, cache, False, True, "5.1.0"),
          usd.cached(flat, cache, False, False, "6.0.0")]
with open(os.path.join(os.path.dirname(flat), "mesh_0.obj"), "w") as file:
    file.write("another mesh")
others.append(usd.cached(flat, cache, False, False, "5.1.0"))
answer = [first == again, len({first, *others}), len(calls), sorted(os.listdir(cache)),
          all(os.path.isfile(path) for path in (first, *others))]
"""
    )
    same, different, converted, entries, there = in_kit(sim_home, tmp_path, code)
    assert same and there and different == converted == 5
    assert len(entries) == 5 and not any(name.startswith(".") for name in entries)


def test_what_was_cut_off_is_never_taken_for_a_model(sim_home: Path, tmp_path: Path) -> None:
    """The converter marks its folder before the work is done; ours has the name only when it is whole.
    Another rank may be first, and what dead ranks left is removed when it is old."""
    code = (
        _CACHE
        + """
import time
def dies(*arguments):
    os.makedirs(arguments[1], exist_ok=True)
    open(os.path.join(arguments[1], ".asset_hash"), "w").close()
    raise RuntimeError("cut off")
usd.convert = dies
try:
    usd.cached(flat, cache, False, False, "5.1.0")
except RuntimeError as error:
    said = str(error)
left = os.listdir(cache)
for name, age in ((".building-old", 7200), (".building-young", 10)):
    os.makedirs(os.path.join(cache, name))
    os.utime(os.path.join(cache, name), (time.time() - age,) * 2)
def beaten(*arguments):
    usd.convert = convert
    theirs = usd.cached(flat, cache, False, False, "5.1.0")   # another rank, meanwhile
    return convert(*arguments)
usd.convert = beaten
path = usd.cached(flat, cache, False, False, "5.1.0")
answer = [said, left, os.path.isfile(path), sorted(os.listdir(cache))[0], len(os.listdir(cache))]
"""
    )
    said, left, there, young, count = in_kit(sim_home, tmp_path, code)
    assert (said, left, there) == ("cut off", [], True)
    assert (young, count) == (".building-young", 2)


def test_the_exports_name_suits_the_importer() -> None:
    """It splits the name at its dots and makes the stem a name of a prim."""
    stem, _, extension = XML_NAME.partition(".")
    assert stem.isidentifier() and extension == "xml"


# -- habits of the stand-in that our worker does not meet -------------------------------------------

HABITS = {
    "keys are taken out of the launcher's argument": """
import isaacsim
from isaaclab.app import AppLauncher
args = {"headless": True, "device": "cpu", "multi_gpu": False, "kit_args":
        "--/renderer/multiGpu/autoEnable=False --/renderer/multiGpu/maxGpuCount=1"}
AppLauncher(args)
answer = "headless" not in args and sys.stdout is sys.__stdout__ and len(sys.argv) == 1
""",
    "a key that is given twice is refused": """
import isaacsim
from isaaclab.app import AppLauncher
try:
    AppLauncher({"headless": True}, headless=True)
except ValueError as error:
    answer = "given twice" in str(error)
""",
    "a file name with two dots is refused": """
from outboard.workers.isaacsim_app import App
from direct import make_init
App(make_init(flat, options=options))
from outboard.workers import isaacsim_usd
other = os.path.join(folder, "robot.v2.xml")
__import__("shutil").copy(flat, other)
try:
    isaacsim_usd.convert(other, os.path.join(folder, "out"), False, False)
except ValueError as error:
    answer = "too many values" in str(error)
""",
    "names are regular expressions": """
from outboard.workers.isaacsim_app import App
from direct import make_init
App(make_init(flat, options=options))
from isaaclab.assets import _match
answer = _match("h.*", ["hip", "ankle", "hand"]) == [0, 2]
""",
}


@pytest.mark.parametrize("name", HABITS)
def test_habit(name: str, sim_home: Path, tmp_path: Path) -> None:
    assert in_kit(sim_home, tmp_path, HABITS[name]) is True
