"""`outboard plan`: the plan of an environment, as data and as a table."""

from __future__ import annotations

from typing import TypedDict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ipc.errors import OutboardError
from .inventory import Inventory
from .rank_plan import RankPlan
from .visibility import Env


class DeviceDict(TypedDict):
    kind: str
    uuid: str
    host_index: int | None


class PlanDict(TypedDict):
    rank: int
    local_rank: int
    world_size: int
    source: str
    device: DeviceDict
    mask: str
    why: str


class ErrorDict(TypedDict):
    error: str  # class name
    message: str


def plan_as_dict(
    env: Env | None = None,
    *,
    assume_gpus: str | None = None,
    learner: object = None,
    share: bool = False,
) -> PlanDict | ErrorDict:
    """What `--json` prints. `assume_gpus`: "UUID,UUID,..." of a machine that is not here, in PCI
    order. Never raises an OutboardError: that is the other shape of the answer."""
    try:
        inventory = None if assume_gpus is None else Inventory.of_uuids(assume_gpus.split(","))
        plan = RankPlan.from_env(env, learner=learner, share=share, inventory=inventory)
    except OutboardError as error:
        return {"error": type(error).__name__, "message": error.message}
    device = plan.device
    return {
        "rank": plan.rank,
        "local_rank": plan.local_rank,
        "world_size": plan.world_size,
        "source": plan.source,
        "device": {
            "kind": device.device.kind,
            "uuid": device.device.uuid,
            "host_index": device.host_index,
        },
        "mask": device.mask,
        "why": plan.why,
    }


def exit_code(answer: PlanDict | ErrorDict) -> int:
    """0 with a plan, 2 without."""
    return 2 if "error" in answer else 0


def print_plan(answer: PlanDict | ErrorDict, console: Console | None = None) -> None:
    """The same answer as a table, for people."""
    console = Console() if console is None else console
    table = Table(show_header=False, title="outboard plan", title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if "error" in answer:
        rows = [("error", answer["error"]), ("message", answer["message"])]
    else:
        device = answer["device"]
        index = "-" if device["host_index"] is None else str(device["host_index"])
        rows = [
            ("rank", f"{answer['rank']} of {answer['world_size']}"),
            ("local rank", str(answer["local_rank"])),
            ("launcher", answer["source"]),
            ("device", f"{device['kind']} {device['uuid']}"),
            ("host index", index),
            ("worker's mask", answer["mask"]),
            ("why", answer["why"]),
        ]
    for name, value in rows:
        table.add_row(name, Text(value), end_section=name == "local rank")
    console.print(table)
