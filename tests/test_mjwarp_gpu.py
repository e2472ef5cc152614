"""MuJoCo-Warp on a real GPU: where it is, that its graphs compute what MuJoCo computes, and what fails how.

    python -m pytest -m gpu tests/test_mjwarp_gpu.py

Needs torch with CUDA here, and OUTBOARD_MJWARP_PYTHON: an interpreter with MuJoCo-Warp and MuJoCo. Everything
runs in one child (mjwarp_gpu_host.py), because opening takes seconds; the first one compiles for a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from standin_gpu import real_gpus
from test_arena_gpu import environment, need

HOST = Path(__file__).resolve().parent / "mjwarp_gpu_host.py"
_COMPILE_S = 400.0

# Single precision, sums in whatever order the GPU takes them, 20 substeps of which most in contact.
BOUNDS = {"qpos": 1e-4, "body_pos": 1e-4, "body_quat": 1e-4, "contact_force": 5.0}
_VELOCITY_BOUND = 2e-2

Found = dict[str, dict[str, Any]]


def run_host(device: str, python: str, **extra: str) -> Found:
    """Every scenario's answer."""
    kept = {name: os.environ[name] for name in ("WARP_CACHE_PATH",) if name in os.environ}
    done = subprocess.run(
        [sys.executable, str(HOST), device],
        env={**environment(), "OUTBOARD_MJWARP_PYTHON": python, **kept, **extra},
        capture_output=True,
        text=True,
        timeout=_COMPILE_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["scenario"]: line for line in lines}


def of(found: Found, name: str) -> dict[str, Any]:
    facts = found[name]
    assert "crash" not in facts, facts["crash"]
    return facts


def check_worst(worst: dict[str, float]) -> None:
    beyond = {n: off for n, off in worst.items() if not off < BOUNDS.get(n, _VELOCITY_BOUND)}
    assert len(worst) == 7 and not beyond


def check_scenarios(found: Found) -> None:
    """What must hold on every device."""
    for name in ("tensors_agree_with_mujoco", "arrays_agree_with_mujoco",
                 "both_planes_are_one_simulation"):  # fmt: skip
        check_worst(of(found, name)["worst"])
    masks = of(found, "masks_reset_and_rows_are_put")
    assert all(masks["right"]) and len(masks["right"]) == 7, masks
    flagged = of(found, "nonfinite_targets_are_flagged")
    assert flagged["flagged"] == [5] and flagged["finite"] and flagged["after"] == [], flagged
    restarted = of(found, "restart_keeps_the_addresses")
    assert restarted["same"]
    check_worst(restarted["worst"])
    overflow = of(found, "overflow_is_told_at_a_later_bell")
    assert overflow["said"].startswith("WorkerFailed"), overflow
    assert "raise nconmax above 1 in MJWarpCfg" in overflow["said"]
    step = int(overflow["said"].split("in step ")[1].split(",")[0])
    assert step <= overflow["steps"] <= step + 51, overflow


@pytest.mark.slow
@pytest.mark.timeout(_COMPILE_S)
@pytest.mark.usefixtures("logs_may_stay")
def test_the_scenarios_hold_on_the_cpu(mjwarp_python: str) -> None:
    """The rehearsal: tensors over the block instead of the arena."""
    pytest.importorskip("torch", reason="needs torch on the host")
    check_scenarios(run_host("cpu", mjwarp_python))


@pytest.fixture(scope="module")
def found(mjwarp_python: str) -> Found:
    need(1)
    return run_host("cuda:0", mjwarp_python)


@pytest.mark.gpu
@pytest.mark.timeout(_COMPILE_S)
@pytest.mark.usefixtures("logs_may_stay")
def test_on_a_gpu_tensors_and_arrays_agree_with_mujoco_and_failures_are_told(found: Found) -> None:
    check_scenarios(found)


@pytest.mark.gpu
@pytest.mark.timeout(_COMPILE_S)
@pytest.mark.usefixtures("logs_may_stay")
def test_its_own_qpos_lies_on_the_planned_gpu(found: Found) -> None:
    facts, first = of(found, "placed"), real_gpus(1)[0]
    assert facts["reported"] == facts["planned"] == facts["torch"] == first, facts
    assert facts["evidence"] == "engine_buffer" and facts["buffer"] == "qpos", facts
    assert facts["transport"] == "cuda" and first in str(facts["where"]), facts
