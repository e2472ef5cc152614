"""A simulator in the training process itself: what an out-of-process one is compared with.

Written as its users write it: their arrays as torch tensors, their step as a graph, in torch's stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

from outboard.backends import Backend

Step = Callable[[], None]


@contextlib.contextmanager
def mjwarp(scene: str, sim: Backend, decimation: int) -> Generator[tuple[Step, Step], None, None]:
    """(reset, step) of MuJoCo-Warp with as many environments, and as much room, as `sim` has."""
    import mujoco  # type: ignore[import-untyped]
    import mujoco_warp as mjw  # type: ignore[import-not-found]
    import warp as wp  # type: ignore[import-not-found]

    wp.config.log_level = wp.LOG_WARNING
    wp.init()
    device = sim.torch.device
    wp.set_device(str(device))
    model: Any = mujoco.MjModel.from_xml_path(scene)  # pyright: ignore
    start: Any = mujoco.MjData(model)  # pyright: ignore
    mujoco.mj_resetDataKeyframe(model, start, 0)  # pyright: ignore
    m = mjw.put_model(model)
    room = next(note for note in sim.report["notes"] if note.startswith("room for"))
    nconmax, njmax = (int(word) for word in room.split() if word.isdigit())
    d = mjw.make_data(model, nworld=sim.num_envs, nconmax=nconmax, njmax=njmax)
    ctrl, qpos, qvel = (wp.to_torch(array) for array in (d.ctrl, d.qpos, d.qvel))
    base = torch.tensor(sim.model.default_ctrl, dtype=torch.float32, device=device)
    qpos0, nu = torch.tensor(start.qpos, dtype=torch.float32, device=device), model.nu

    def in_torchs_stream() -> Any:
        if device.type == "cpu":
            return contextlib.nullcontext()
        return wp.ScopedStream(wp.stream_from_torch(torch.cuda.current_stream(device)))

    # In Warp's own stream: torch's default one cannot be captured.
    for _ in range(2):
        mjw.step(m, d)
    with wp.ScopedCapture() as capture:
        for _ in range(decimation):
            mjw.step(m, d)
    wp.synchronize()

    def reset() -> None:
        mjw.reset_data(m, d)
        qpos[:] = qpos0
        qvel.zero_()

    def step() -> None:
        ctrl.copy_(base + 0.01 * qvel[:, -nu:])
        wp.capture_launch(capture.graph)

    with in_torchs_stream():
        yield reset, step


# By backend; the others are measured out of process alone.
IN_PROCESS = {"mjwarp": mjwarp}
