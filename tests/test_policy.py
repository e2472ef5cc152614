"""The random policy stays where a robot can follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from outboard.backends.policy import SmoothPolicy


def model(ctrl_range: list[tuple[float, float]], default: list[float]) -> Any:
    return SimpleNamespace(
        nu=len(default), ctrl_range=np.array(ctrl_range), default_ctrl=np.array(default)
    )


def targets(robot: Any, steps: int, seed: int = 0) -> Any:
    """(steps, 16, nu) rad, at 100 Hz."""
    policy = SmoothPolicy(robot, 16, 0.01, seed)
    out = np.full((steps, 16, robot.nu), np.nan, np.float32)
    for step in range(steps):
        policy.write(step, out[step])
    return out


ROBOT = model([(-3.0, 3.0), (-0.05, 2.7), (-np.inf, np.inf)], [0.0, 0.0, 1.5])


def test_targets_stay_inside_the_control_range_and_near_the_default() -> None:
    out = targets(ROBOT, 2000)
    low, high = ROBOT.ctrl_range.T
    assert (out >= low).all() and (out <= high).all()
    assert (np.abs(out - ROBOT.default_ctrl) < 0.9).all()


def test_targets_are_smooth_and_move_every_joint() -> None:
    out = targets(ROBOT, 2000)
    assert np.abs(np.diff(out, axis=0)).max() < 0.04  # rad per 10 ms
    assert (np.ptp(out, axis=0) > 0.3).all()


def test_environments_move_differently_and_a_seed_repeats_them() -> None:
    out = targets(ROBOT, 50)
    assert (np.abs(out[:, 0] - out[:, 1]).max(axis=0) > 0.01).all()
    assert (targets(ROBOT, 50) == out).all() and (targets(ROBOT, 50, seed=1) != out).any()
