"""A simulator that is not ours: a Python file with a class that implements `Simulator`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ipc.errors import UsageError
from ..ipc.messages import Scalar
from .arguments import Cfg
from .backend import Backend
from .traits import Traits


@dataclass(frozen=True)
class CustomCfg(Cfg):
    """Whatever the simulator reads from `init.options`."""

    values: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])

    def options(self) -> dict[str, Scalar]:
        return dict(self.values)


class CustomBackend(Backend):
    """`CustomBackend(simulator="my_sim.py:MySim", device=..., num_envs=...)`.

    traits: what the simulator needs of its process; the default suits a CPU simulator that starts within
    a minute and allows a GPU.
    """

    cfg_type = CustomCfg
    traits = Traits(gpu=True)

    def __init__(
        self,
        *,
        simulator: str,
        device: object,
        traits: Traits | None = None,
        **arguments: Any,
    ) -> None:
        path, _, class_name = simulator.rpartition(":")
        if not class_name.isidentifier() or not os.path.isfile(path):
            raise UsageError(f"simulator={simulator!r} must be FILE:CLASS, and FILE must exist")
        self.simulator = f"{os.path.abspath(path)}:{class_name}"  # type: ignore[misc]
        if traits is not None:
            self.traits = traits  # type: ignore[misc]
        super().__init__(device=device, **arguments)
