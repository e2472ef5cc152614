"""A smooth random policy: something to drive a simulator with when there is no learner."""

from __future__ import annotations

import math

import numpy as np

from .state import Floats, Model

# Slow enough for a servo to follow, fast enough to be seen.
_LOW_HZ, _HIGH_HZ = 0.2, 1.2
_WAVES = 2  # per actuator; their frequencies differ, so the sum does not repeat
# At most this far from the centre, in rad or m: half of most joints' range throws a robot about.
_MOST = 0.4


class SmoothPolicy:
    """Joint targets around `default_ctrl`, inside the control range: sums of sines with random phases.

    Frequencies belong to the actuator, phases to actuator and environment; so a sine of the sum of
    both is two multiplications per environment, exact at any time, and no sine is computed there.
    """

    def __init__(self, model: Model, num_envs: int, step_s: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        low, high = model.ctrl_range[:, 0], model.ctrl_range[:, 1]
        half = np.where(np.isfinite(high - low), (high - low) / 2, np.inf)
        span = np.minimum(_MOST, half / 2)
        # Near the end of the range the motion goes inwards.
        centre = np.clip(model.default_ctrl, low + span, high - span)
        self._centre = centre.astype(np.float32)  # (nu,) rad or m
        phase = random.uniform(0.0, 2 * math.pi, (_WAVES, num_envs, model.nu))
        self._sine = (span / _WAVES * np.cos(phase)).astype(np.float32)
        self._cosine = (span / _WAVES * np.sin(phase)).astype(np.float32)
        hz = random.uniform(_LOW_HZ, _HIGH_HZ, (_WAVES, model.nu))
        self._per_step = 2 * math.pi * hz * step_s  # (_WAVES, nu) rad
        self._scratch = np.empty((num_envs, model.nu), np.float32)

    def write(self, step: int, into: Floats) -> None:
        """The targets of `step`, in place: (num_envs, nu) rad or m."""
        angle = self._per_step * step
        sines, cosines = np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)
        into[:] = self._centre
        for wave in range(_WAVES):
            np.multiply(self._sine[wave], sines[wave], out=self._scratch)
            into += self._scratch
            np.multiply(self._cosine[wave], cosines[wave], out=self._scratch)
            into += self._scratch
