"""A training process with torch on a real GPU, for what pytest must not do in its own process.

`python arena_gpu_host.py DEVICE SCENARIO...` runs each and says what it found, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from outboard.backends import CustomBackend, CustomCfg, OutboardError
from outboard.ipc import cuda_driver, cuda_memory

FILE = Path(__file__).resolve().parent / "gpu_simulators.py"
DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
ROUNDS = int(os.environ.get("OUTBOARD_ARENA_ROUNDS", "10000"))
_NAP_CYCLES = 300_000  # of a kernel that does nothing: about 0.15 ms

sleep_on_gpu: Any = vars(torch.cuda)["_sleep"]

Scenario = Callable[[], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def echo(num_envs: int = 256, transport: str = "cuda", banks: int = 1, **options: Any) -> Any:
    return CustomBackend(
        simulator=f"{FILE}:Echo",
        device=DEVICE,
        num_envs=num_envs,
        transport=transport,
        banks=banks,
        worker_python=os.environ.get("OUTBOARD_PYTHON38") or sys.executable,
        cfg=CustomCfg(options),
        share=True,
    )


def rounds(sim: Any, count: int, *, late_writer: int = 16, late_reader: int = 16) -> int:
    """Write random targets, compare what comes back with them and with the ones before; how many steps
    were wrong. Nobody waits until the end. Writer and reader are late in some rounds."""
    device = sim.torch.device
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    before = sim.torch.qpos.clone()
    for index in range(count):
        ctrl = torch.rand(sim.torch.ctrl.shape, device=device)
        if index % late_writer == 0:
            sleep_on_gpu(_NAP_CYCLES)
        state = sim.torch.step(ctrl)
        if index % late_reader == late_reader // 2:
            sleep_on_gpu(_NAP_CYCLES)
        wrong += (state.qpos != ctrl).any() | (state.qvel != before).any()
        before = ctrl
    return int(wrong)


def correct(banks: int) -> dict[str, Any]:
    with echo(banks=banks, delay=1) as sim:
        started = time.perf_counter()
        wrong = rounds(sim, ROUNDS)
        return {"wrong": wrong, "seconds": round(time.perf_counter() - started, 2),
                "transport": sim.report["transport"]}  # fmt: skip


@scenario
def correct_with_one_bank() -> dict[str, Any]:
    return correct(1)


@scenario
def correct_with_two_banks() -> dict[str, Any]:
    return correct(2)


@scenario
def without_the_hosts_wait() -> dict[str, Any]:
    """The caller's stream does not wait for the state: must be seen."""
    with echo(delay=4) as sim:
        right = rounds(sim, 50)

        def wait(stream: int) -> None:
            pass

        sim._plane.wait = wait
        return {"right": right, "wrong": rounds(sim, 200)}


@scenario
def without_the_workers_wait() -> dict[str, Any]:
    """The worker does not wait for ctrl: must be seen."""
    with echo(astray=True) as sim:
        return {"wrong": rounds(sim, 200, late_writer=1)}


@scenario
def on_a_side_stream() -> dict[str, Any]:
    """Everything on a stream of the caller's, beside a learner at work on another, the worker slow."""
    with echo(delay=1) as sim:
        device = sim.torch.device
        weights = torch.rand(2048, 2048, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        for _ in range(20):
            weights = (weights @ weights).softmax(1)
        with torch.cuda.stream(side):
            wrong = rounds(sim, ROUNDS // 2)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            wrong += rounds(sim, 50)
        return {"wrong": wrong}


@scenario
def masks_and_states() -> dict[str, Any]:
    """Masks and values on the GPU, numpy and tensor commands in turn."""
    with echo(num_envs=6) as sim:
        device, right = sim.torch.device, []
        ctrl = torch.rand(6, 8, device=device)
        mask = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool, device=device)
        state = sim.step(ctrl)
        right.append(torch.equal(state.qpos, ctrl) and state.qpos.device == device)
        right.append(sim.torch.qpos.data_ptr() == sim._plane.slots[0]["qpos"].pointer)
        right.append(np.array_equal(sim.state.qpos, ctrl.cpu().numpy()))
        state = sim.reset(mask)
        right.append(torch.equal(state.qpos, torch.where(mask[:, None], 0, ctrl)))
        rows = torch.rand(2, 6, 8, device=device)
        want = torch.where(mask[:, None], rows[0], state.qpos)
        state = sim.torch.set_state(mask, rows[0], rows[1])
        right.append(torch.equal(state.qpos, want))
        want = state.qpos.clone()
        want[[4, 2]] = rows[0, :2]
        right.append(torch.equal(sim.torch.set_state([4, 2], rows[0, :2], rows[1, :2]).qpos, want))
        plain = np.random.default_rng(1).random((6, 8), np.float32)
        right.append(np.array_equal(sim.step(plain).qpos, plain))
        right.append(np.array_equal(sim.torch.qpos.cpu().numpy(), plain))
        right.append(torch.equal(sim.torch.step(ctrl, reset=[1]).qpos, ctrl))
        right.append(not sim.torch.reset().qpos.any())
        said = ""
        try:
            sim.torch.reset(torch.tensor([1], device=device))
        except OutboardError as error:
            said = error.message
        right.append("ids on the GPU" in said)
        right.append(torch.from_numpy(sim.state.qpos).is_pinned())
        return {"right": right}


@scenario
def a_bad_ctrl_is_told() -> dict[str, Any]:
    with echo(num_envs=8) as sim:
        ctrl = torch.rand(8, 8, device=sim.torch.device)
        sim.torch.step(ctrl)
        torch.cuda.synchronize()
        bad = ctrl.clone()
        bad[3, 5] = float("nan")
        bad[6, 0] = -float("inf")
        sim.torch.step(bad)
        said, after = "", 0
        while not said and after < 5:
            after += 1
            torch.cuda.synchronize()
            try:
                sim.torch.step(ctrl)
            except OutboardError as error:
                said = f"{type(error).__name__}: {error.message}"
        for _ in range(5):  # told once, and the backend goes on
            sim.torch.step(ctrl)
        return {"said": said, "bells": after}


@scenario
def nobody_waits() -> dict[str, Any]:
    """A training loop with masks under the profiler, torch's own alarm and traps in our driver calls."""
    with echo(num_envs=4096, width=29) as sim:
        device = sim.torch.device
        weights = torch.rand(29, 29, device=device)
        state = sim.torch.reset()

        def loop(count: int) -> None:
            nonlocal state
            for _ in range(count):
                done = state.qpos.sum(1) > 20
                state = sim.torch.step(state.qpos @ weights * 0.01, reset=done)
                state = sim.torch.reset(done)
                sim.torch.set_state(done, state.qpos, state.qvel)

        loop(20)
        torch.cuda.synchronize()
        trapped: list[str] = []

        def trap(name: str) -> Any:
            def trapped_call(*_: Any) -> None:
                trapped.append(name)

            return trapped_call

        kept = {
            (module, name): getattr(module, name)
            for module, names in (
                (
                    cuda_memory,
                    ("stream_synchronize", "copy_htod", "copy_dtoh"),
                ),
                (cuda_driver, ("synchronize",)),
            )
            for name in names
        }
        for module, name in kept:
            setattr(module, name, trap(name))
        torch.cuda.set_sync_debug_mode("error")
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                loop(100)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            for (module, name), function in kept.items():
                setattr(module, name, function)
        calls: dict[str, int] = {}
        for event in trace.events() or ():
            if event.name.startswith(("cuda", "cu")):
                calls[event.name] = calls.get(event.name, 0) + 1
        # The profiler itself waits once, at its end.
        waits = {name: n for name, n in calls.items() if "Synchronize" in name}
        return {"trapped": trapped, "waits": waits, "calls": calls}


@scenario
def graph_over_a_crash() -> dict[str, Any]:
    with echo(delay=8) as sim:
        view = sim.torch
        tensors = [view.ctrl, view.qpos, view.qvel]
        before = [tensor.data_ptr() for tensor in tensors]
        out = torch.zeros_like(view.qpos)
        ctrl = torch.rand(view.ctrl.shape, device=view.device)
        view.step(ctrl)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(tensors[1], tensors[2], out=out)
        graph.replay()
        first = torch.equal(out, tensors[1] + tensors[2])
        died = kill_in_a_step(sim, ctrl)
        sim.restart()
        other = torch.rand(view.ctrl.shape, device=view.device)
        sim.torch.step(other)
        graph.replay()
        after = [t.data_ptr() for t in (sim.torch.ctrl, sim.torch.qpos, sim.torch.qvel)]
        return {"first": first, "died": died, "same_addresses": before == after,
                "replays": torch.equal(out, other), "rounds_wrong": rounds(sim, 100)}  # fmt: skip


def kill_in_a_step(sim: Any, ctrl: torch.Tensor) -> dict[str, Any]:
    """Kill the worker while its work is on the GPU; how the host learns, and whether its stream is
    stuck behind a state that never comes."""
    for _ in range(20):
        sim.torch.step(ctrl)
    os.kill(sim.report["pid"], signal.SIGKILL)
    said = ""
    try:
        sim.torch.step(ctrl)
        sim.torch.step(ctrl)
    except OutboardError as error:
        said = type(error).__name__
    started = time.perf_counter()
    free = threading.Event()

    def wait() -> None:
        torch.cuda.synchronize(DEVICE_INDEX)
        free.set()

    threading.Thread(target=wait, daemon=True).start()
    found = {"said": said, "stream_is_free": free.wait(20.0),
             "after_s": round(time.perf_counter() - started, 3)}  # fmt: skip
    print(found, file=sys.stderr, flush=True)  # to be seen should the rest hang
    return found


DEVICE_INDEX = torch.device(DEVICE) if DEVICE.startswith("cuda") else torch.device("cuda", 0)


@scenario
def restarts() -> dict[str, Any]:
    count = int(os.environ.get("OUTBOARD_ARENA_RESTARTS", "20"))
    with echo() as sim:
        rounds(sim, 10)
        before = [tensor.data_ptr() for tensor in (sim.torch.ctrl, sim.torch.qpos)]
        free = [torch.cuda.mem_get_info(DEVICE_INDEX)[0]]
        wrong = 0
        for index in range(count):
            if index % 2:
                os.kill(sim.report["pid"], signal.SIGKILL)
            sim.restart()
            wrong += rounds(sim, 3)
            free.append(torch.cuda.mem_get_info(DEVICE_INDEX)[0])
        after = [tensor.data_ptr() for tensor in (sim.torch.ctrl, sim.torch.qpos)]
    return {"same_addresses": before == after, "wrong": wrong,
            "free_mb": [round(f / 2**20) for f in (free[0], free[1], free[-1])]}  # fmt: skip


@scenario
def memory_and_tensors() -> dict[str, Any]:
    """Freed when it is closed and the last tensor is gone; a tensor that is held stays good."""

    def free_mb() -> int:
        torch.cuda.synchronize()
        return round(torch.cuda.mem_get_info(DEVICE_INDEX)[0] / 2**20)

    def opened() -> Any:
        return echo(num_envs=1 << 20, width=16)  # 64 MB a field

    opened().close()
    readings = {"start": free_mb()}
    sim = opened()
    value = sim.torch.step(torch.full((1 << 20, 16), 2.0, device=sim.torch.device)).qpos
    sim.close()
    readings["closed"] = free_mb()
    still = float(value.sum())
    del value, sim
    readings["dropped"] = free_mb()
    return {"still": still == 2.0 * 16 * (1 << 20), "free_mb": readings}


@scenario
def sending_a_tensor() -> dict[str, Any]:
    import importlib
    from multiprocessing.reduction import ForkingPickler

    importlib.import_module("torch.multiprocessing")  # registers its reductions
    with echo() as sim:
        said = "it was pickled"
        try:
            ForkingPickler.dumps(sim.torch.qpos)
        except Exception as error:  # noqa: BLE001 - whatever torch says
            said = f"{type(error).__name__}: {str(error)[:200]}"
        ForkingPickler.dumps(sim.torch.qpos.cpu())
        torch.cuda.synchronize()
        return {"said": said, "wrong": rounds(sim, 20)}


@scenario
def auto_and_block() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for transport in ("auto", "block"):
        with echo(transport=transport) as sim:
            found[transport] = [sim.report["transport"], sim.report["transport_why"]]
            plain = np.ones((256, 8), np.float32)
            found[transport].append(bool((sim.step(plain).qpos == 1).all()))
            found[transport].append(torch.from_numpy(sim.state.qpos).is_pinned())
            on_gpu = torch.full((256, 8), 3.0, device=DEVICE_INDEX)
            found[transport].append(bool((sim.step(on_gpu).qpos == 3).all()))
    return found


@scenario
def forever() -> dict[str, Any]:
    """Steps until it is killed; says the worker's pid first."""
    with echo(delay=8) as sim:
        print(json.dumps({"scenario": "forever", "pid": sim.report["pid"]}), flush=True)
        ctrl = torch.rand(sim.torch.ctrl.shape, device=sim.torch.device)
        while True:
            sim.torch.step(ctrl)


def main() -> None:
    torch.cuda.set_device(DEVICE_INDEX)
    torch.zeros(1, device=DEVICE_INDEX)
    for name in sys.argv[2:]:
        started = time.perf_counter()
        try:
            found = SCENARIOS[name]()
        except BaseException:  # noqa: BLE001 - the facts of the other scenarios must come out
            found = {"crash": traceback.format_exc()[-3000:]}
        found |= {"scenario": name, "took_s": round(time.perf_counter() - started, 2)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
