"""What is measured: every scheme, by payload, by the worker's own step time, and in awkward circumstances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

THINK_US = {0: 0, 100: 100, 1000: 300, 5000: 2000, 20000: 5000}  # what the host does between steps
PAYLOADS = (1, 64, 1024, 4096, 16384, 65536)
ONE_CORE, PYTHON, ZLIB, HOGS = "one core", "Python thread", "zlib thread", "two hogs"
TWO_CORES_US = 1700  # per thread


@dataclass(frozen=True)
class Scheme:
    """kind: the adapter in peers.py. peer: the distribution it needs, installed by peer_env.py.
    old: whether its worker runs on the old Python, like ours."""

    name: str
    kind: str
    old: bool = True
    peer: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])


OURS = Scheme("ours", "ours")
SCHEMES = (
    OURS,
    Scheme("ours, unchecked", "ours", options={"check_finite": False}),
    Scheme("ours, ctrl_view", "ours", options={"check_finite": False, "ctrl_view": True}),
    Scheme("ours, this Python", "ours", old=False),
    Scheme("C spin", ""),
    Scheme("C futex", ""),
    Scheme("in process", "in process", old=False),
    Scheme("semaphores", "semaphores"),
    Scheme("Pipe token", "pipe token"),
    Scheme("Pipe pickled", "pipe pickled", old=False),
    Scheme("PufferLib", "PufferLib", old=False, peer="pufferlib-core"),
    Scheme("gymnasium", "gymnasium", old=False, peer="gymnasium"),
    Scheme("unisim-core", "unisim-core", peer="unisim-core"),
)
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
_VARIANTS = ("ours, unchecked", "ours, ctrl_view", "in process")
# Polls throughout: two time slices of 4 ms a step on one core say nothing new.
_QUICK = ("ours", "ours, unchecked", "C spin", "semaphores", "PufferLib", "unisim-core")


@dataclass(frozen=True)
class Cell:
    scheme: str
    num_envs: int = 1
    work_us: int = 0
    vary: float = 0.0
    where: str = ""
    two_cores: bool = False

    @property
    def key(self) -> str:
        work = f"{self.work_us} us" + (f" +-{self.vary:.0%}" if self.vary else "")
        return f"{self.scheme} | {self.num_envs} | {work} | {self.where_words}"

    @property
    def where_words(self) -> str:
        return "two-core worker" if self.two_cores else self.where

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cells(quick: bool, only: tuple[str, ...] = ()) -> list[Cell]:
    chosen = list(_quick() if quick else _all())
    return [cell for cell in chosen if not only or cell.scheme in only]


def _quick() -> Iterator[Cell]:
    for name in _QUICK:
        for num_envs in (1, 4096):
            yield Cell(name, num_envs)
    for name in ("ours", "semaphores"):
        yield Cell(name, work_us=1000)
        for where in (ONE_CORE, PYTHON):
            yield Cell(name, where=where)


def _all() -> Iterator[Cell]:
    for scheme in SCHEMES:
        for num_envs in PAYLOADS:
            yield Cell(scheme.name, num_envs)
        if scheme.name in _VARIANTS:
            continue
        for work_us in (100, 1000, 5000, 20000):
            yield Cell(scheme.name, work_us=work_us)
        for work_us in (1000, 5000):
            yield Cell(scheme.name, work_us=work_us, vary=0.2)
        if scheme.name in ("C spin", "C futex", "Pipe pickled"):
            continue
        for where in (ONE_CORE, PYTHON, ZLIB, HOGS):
            yield Cell(scheme.name, where=where)
        yield Cell(scheme.name, two_cores=True)
