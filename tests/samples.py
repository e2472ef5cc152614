"""One valid message of every kind, filled so that no two fields could be exchanged unnoticed. Runs on
every Python that a worker runs on; `golden/` holds the bytes of each."""

from __future__ import annotations

import struct

from outboard.ipc.device import DeviceReport, PlannedDevice, VisibleGpu, cpu_report
from outboard.ipc.layout import Sizes
from outboard.ipc.messages import (
    ArenaOffer,
    Attach,
    Bye,
    Close,
    Error,
    Hello,
    Init,
    InitReply,
    Message,
    ModelFacts,
    Progress,
    Ready,
    Render,
    RenderReply,
    SetProperty,
    SetPropertyReply,
    Where,
    WhereReply,
)

NONCE = bytes(range(16))
FINGERPRINT = bytes(range(100, 132))
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
MIG_UUID = "MIG-ffeeddcc-bbaa-9988-7766-554433221100"

GPU_REPORT = DeviceReport(
    kind="gpu",
    uuid=UUID,
    local="cuda:0",
    pci="0000:17:00.0",
    name="a GPU",
    evidence="engine_buffer",
    buffer="qpos",
    visible=(UUID,),
    contexts=(UUID, MIG_UUID),
    driver="",
)
FACTS = ModelFacts(
    sizes=Sizes(num_envs=2, nq=3, nv=2, nu=1, nbody=2),
    timestep=0.005,
    floating_base=False,
    body_names=("base", "l\u00e4nk"),
    joint_names=("hinge", "slide"),
    actuator_names=("motor",),
    default_qpos=(0.1, -0.2, 1e300),
    default_qvel=(0.0, -0.0),
    default_ctrl=(0.5,),
    joint_range=(-1.5, 1.5, -float("inf"), float("inf")),
    ctrl_range=(-1.0, 1.0),
    kp=(20.0,),
    kv=(0.25,),
    force_range=(-5.0, 5.0),
    env_origins=struct.pack("<6f", 0, 1, 2, 3, 4, 5),
    not_reproduced=("self-collision",),
)

SAMPLES: dict[str, Message] = {
    "hello": Hello(
        python="3.8.18",
        executable="/opt/python/bin/python",
        numpy="1.24.4",
        msgpack="1.1.1",
        pid=4242,
        simulator="fake",
        source="/opt/outboard/ipc",
        mask=None,
        order="PCI_BUS_ID",
        gpus=(VisibleGpu(0, "gpu", UUID, "0000:17:00.0", "a GPU"),),
        driver="no driver",
    ),
    "init": Init(
        nonce=NONCE,
        device=PlannedDevice("gpu", UUID, "cuda:0"),
        rank=3,
        scene="/scenes/arm.xml",
        num_envs=4096,
        dt=0.005,
        decimation=4,
        publish=("qpos", "qvel"),
        transport="block",
        render=True,
        seed=-1,
        terrain="flat",
        control="position",
        options={"flag": True, "count": 7, "ratio": 0.5, "word": "yes"},
    ),
    "progress": Progress("building", 1, 300),
    "init_reply": InitReply(
        device=GPU_REPORT,
        model=FACTS,
        capabilities=("qpos", "render"),
        engine="Fake",
        engine_version="1",
        notes=("a note", "another"),
        transports=("block", "cuda"),
    ),
    "attach": Attach(
        nonce=NONCE,
        sizes=FACTS.sizes,
        publish=("qpos",),
        banks=2,
        total_bytes=1 << 33,
        fingerprint=FINGERPRINT,
        go_name="/outboard-0-g",
        done_name="/outboard-0-d",
        arena=ArenaOffer(
            uuid=UUID,
            nbytes=2 << 20,
            memory=bytes(range(64)),
        ),
    ),
    "ready": Ready(NONCE, FINGERPRINT, "no arena"),
    "where": Where(),
    "where_reply": WhereReply(cpu_report("qvel", (UUID,), "why")),
    "set_property": SetProperty("rate", (0, 70000), struct.pack("<4f", 1, 2, 3, 4)),
    "set_property_reply": SetPropertyReply("rate"),
    "render": Render(1, 4, 2, {"azimuth": 90.0, "distance": 2.5}),
    "render_reply": RenderReply(4, 2, bytes(range(24))),
    "close": Close(),
    "bye": Bye(),
    "error": Error("BUSY", "worker", "RuntimeError", "it broke", "Traceback: \u2026"),
}
