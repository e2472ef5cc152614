"""A training process with torch that drives MuJoCo-Warp, for what pytest must not do in its own process.

`python mjwarp_gpu_host.py DEVICE [SCENARIO...]` runs each (default: all) and says what it found, a line of
JSON each. DEVICE may be "cpu": then tensors lie over the block, which rehearses all but the GPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mjcf_scenes
from outboard.backends import MJWarpBackend, MJWarpCfg, MuJoCoBackend, OutboardError
from outboard.ipc.layout import PUBLISHABLE

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda:0"
PYTHON = os.environ.get("OUTBOARD_MJWARP_PYTHON") or sys.executable
NUM_ENVS, DECIMATION, STEPS = 64, 2, 10
_ARGUMENTS: dict[str, Any] = dict(
    scene="humanoid29", num_envs=NUM_ENVS, decimation=DECIMATION, publish=PUBLISHABLE
)

Scenario = Callable[[MJWarpBackend], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def opened(**changes: Any) -> MJWarpBackend:
    transport = "block" if DEVICE == "cpu" else "cuda"
    arguments: dict[str, Any] = {
        **_ARGUMENTS,
        "transport": transport,
        "check_finite": False,
        **changes,
    }
    return MJWarpBackend(device=DEVICE, worker_python=PYTHON, share=True, **arguments)


def finish() -> None:
    if DEVICE != "cpu":
        torch.cuda.synchronize()


def targets(sim: Any) -> np.ndarray:
    """(STEPS, num_envs, nu): no two joints or environments alike; the robot stays on its feet."""
    t = np.arange(STEPS)[:, None, None]
    phase = 0.4 * np.arange(sim.num_envs)[:, None] + 0.7 * np.arange(sim.model.nu)
    return (sim.model.default_ctrl + 0.05 * np.sin(0.1 * t + phase)).astype(np.float32)


def copied(state: Any) -> dict[str, np.ndarray]:
    return {n: torch.as_tensor(field).cpu().numpy().copy() for n, field in state.fields().items()}


def worst(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.abs(one[name] - other[name]).max()) for name in one}


_reference: dict[str, np.ndarray] = {}


def reference() -> dict[str, np.ndarray]:
    """MuJoCo's state after `targets`, computed once."""
    if not _reference:
        with MuJoCoBackend(device="cpu", worker_python=PYTHON, **_ARGUMENTS) as sim:
            states = [sim.step(ctrl) for ctrl in targets(sim)]
            _reference.update(copied(states[-1]))
    return _reference


def tensor_run(sim: Any) -> dict[str, np.ndarray]:
    sim.torch.reset()
    for ctrl in torch.as_tensor(targets(sim), device=sim.torch.device):
        sim.torch.step(ctrl)
    finish()
    return copied(sim.torch.state)


@scenario
def placed(sim: MJWarpBackend) -> dict[str, Any]:
    report = sim.report["device_report"]
    seen = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if DEVICE != "cpu" else ""
    return {"planned": sim.report["device_plan"]["uuid"], "reported": report["uuid"], "torch": seen,
            "evidence": report["evidence"], "buffer": report["buffer"], "where": sim.where(),
            "witness": sim.report["witness"], "transport": sim.report["transport"],
            "notes": sim.report["notes"], "opened_s": sim.report["opened_s"]}  # fmt: skip


@scenario
def tensors_agree_with_mujoco(sim: MJWarpBackend) -> dict[str, Any]:
    """Graphs over the arena's own addresses, nobody waiting until the end."""
    return {"worst": worst(tensor_run(sim), reference())}


@scenario
def arrays_agree_with_mujoco(sim: MJWarpBackend) -> dict[str, Any]:
    """Graphs over the page-locked block."""
    sim.reset()
    states = [sim.step(ctrl) for ctrl in targets(sim)]
    return {"worst": worst(copied(states[-1]), reference())}


@scenario
def both_planes_are_one_simulation(sim: MJWarpBackend) -> dict[str, Any]:
    ctrls = targets(sim)
    sim.reset()
    for i, ctrl in enumerate(ctrls):
        if i % 2:
            sim.step(ctrl)
        else:
            sim.torch.step(torch.as_tensor(ctrl, device=sim.torch.device))
    return {"worst": worst(copied(sim.state), reference())}


@scenario
def masks_reset_and_rows_are_put(sim: MJWarpBackend) -> dict[str, Any]:
    device, right = sim.torch.device, []
    before = tensor_run(sim)
    mask = torch.arange(NUM_ENVS, device=device) % 3 == 0
    state = copied(sim.torch.reset(mask))
    chosen = mask.cpu().numpy()
    right.append(np.array_equal(state["qpos"][chosen][0], sim.model.default_qpos.astype("f4")))
    right.append(all(np.array_equal(state[n][~chosen], before[n][~chosen]) for n in PUBLISHABLE))
    right.append(not state["contact_force"][chosen].any())
    qpos = sim.torch.qpos.clone()
    qpos[:, 2] += 1.0
    qvel = torch.zeros_like(sim.torch.qvel)
    qvel[:, 3:6] = torch.tensor([1.0, 2.0, 3.0], device=device)
    put = copied(sim.torch.set_state(mask, qpos, qvel))
    right.append(np.array_equal(put["qpos"][chosen], qpos.cpu().numpy()[chosen]))
    right.append(np.array_equal(put["qpos"][~chosen], state["qpos"][~chosen]))
    right.append(bool(np.abs(put["body_pos"][chosen, 0] - put["qpos"][chosen, :3]).max() < 1e-5))
    stepped = sim.torch.step(torch.as_tensor(targets(sim)[0], device=device), reset=mask)
    finish()
    right.append(bool(torch.isfinite(stepped.qpos).all()))
    return {"right": right}


@scenario
def nonfinite_targets_are_flagged(sim: MJWarpBackend) -> dict[str, Any]:
    ctrl = np.tile(sim.model.default_ctrl, (NUM_ENVS, 1)).astype(np.float32)
    sim.reset()
    ctrl[5, 2] = np.inf
    state = sim.step(ctrl)
    finite, flagged = bool(np.isfinite(state.qpos).all()), sim.flagged.tolist()
    sim.reset([5])
    return {"flagged": flagged, "finite": finite, "after": sim.flagged.tolist()}


@scenario
def restart_keeps_the_addresses(sim: MJWarpBackend) -> dict[str, Any]:
    view = sim.torch
    names = ("ctrl", *PUBLISHABLE)
    before = [getattr(view, name).data_ptr() for name in names]
    sim.restart()
    after = [getattr(sim.torch, name).data_ptr() for name in names]
    return {"same": before == after, "worst": worst(tensor_run(sim), reference())}


@scenario
def overflow_is_told_at_a_later_bell(_: MJWarpBackend) -> dict[str, Any]:
    """A box on a leg falls from a metre and topples; the pool holds two contacts for two robots."""
    with tempfile.TemporaryDirectory() as folder:
        scene = mjcf_scenes.write(Path(folder), mjcf_scenes.leg())
        with opened(scene=str(scene), num_envs=2, decimation=1, publish=("qpos",),
                    cfg=MJWarpCfg(nconmax=1)) as sim:  # fmt: skip
            ctrl, steps, said = torch.zeros_like(sim.torch.ctrl), 0, ""
            while steps < 3000 and not said:
                steps += 1
                try:
                    sim.torch.step(ctrl)
                    if steps % 50 == 0:
                        finish()  # the learner's own pace: a bell comes after the GPU is done
                except OutboardError as error:
                    said = f"{type(error).__name__}: {error.message}"
            return {"said": said, "steps": steps}


def main() -> int:
    wanted = sys.argv[2:] or list(SCENARIOS)
    with opened() as sim:
        for name in wanted:
            try:
                found = SCENARIOS[name](sim)
            except Exception:  # noqa: BLE001 - the others are still worth their answers
                found = {"crash": traceback.format_exc()}
            print("\n" + json.dumps({"scenario": name, **found}, default=str), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
