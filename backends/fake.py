"""`fake`: arithmetic instead of physics, for tests and benchmarks of everything else."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Cfg
from .backend import Backend
from .traits import Traits


@dataclass(frozen=True)
class FakeCfg(Cfg):
    """See `workers/fake_worker.py` for what each does."""

    nu: int = 4
    work_us: float = 0.0
    work_vary: float = 0.0
    fault: str = ""
    fault_at: str = "step"
    fault_step: int = 1
    lie: str = ""


class FakeBackend(Backend):
    simulator = "fake"
    traits = Traits(init_s=10.0, init_hard_s=30.0, gpu=True)
    cfg_type = FakeCfg
