"""What a step of the Isaac Gym worker costs above its simulate call; run under Python 3.8.

`isaacgym_cost.py SCENE OPTIONS.json NUM_ENVS [FIELDS]`: the stand-in's physics stands still, and the time in
the engine's methods is taken out. Prints JSON: calls of our Python functions in one step, and microseconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from direct import Direct
from outboard.ipc.layout import PUBLISHABLE


def counted_calls(step: Any) -> int:
    """Calls of Python functions under workers/ in one step."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "/workers/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def main(argv: list[str]) -> None:
    os.environ["ISAACGYM_STANDIN"] = "physics=frozen"
    scene, num_envs = argv[0], int(argv[2])
    with open(argv[1], encoding="utf-8") as file:
        options = json.load(file)
    publish = tuple(argv[3].split(",")) if len(argv) > 3 else PUBLISHABLE
    with Direct("isaacgym", scene, num_envs, options=options, publish=publish) as sim:
        simulator: Any = sim.simulator
        gym, engine_s = simulator._scene.gym, [0.0]
        methods = [name for name in dir(gym) if name.split("_")[0] in ("refresh", "set")]
        for name in (*methods, "simulate", "fetch_results"):
            setattr(gym, name, timed(getattr(gym, name), engine_s))
        state = simulator._state
        state._refreshes = [
            (name, getattr(gym, refresh.__name__)) for name, refresh in state._refreshes
        ]
        sim.step()
        calls = counted_calls(sim.step)
        engine_s[0] = 0.0
        started, rounds = time.perf_counter(), 50
        for _ in range(rounds):
            sim.step()
        ours_s = (time.perf_counter() - started - engine_s[0]) / rounds
        everyone = np.arange(num_envs, dtype=np.int32)
        started = time.perf_counter()
        for _ in range(10):
            sim.simulator.reset(everyone)
        reset_s = (time.perf_counter() - started) / 10
    result = {"calls": calls, "step_us": ours_s * 1e6, "reset_all_us": reset_s * 1e6}
    print("\n" + json.dumps(result))


def timed(function: Any, total: list[float]) -> Any:
    def wrapper(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            total[0] += time.perf_counter() - started

    wrapper.__name__ = function.__name__
    return wrapper


if __name__ == "__main__":
    main(sys.argv[1:])
