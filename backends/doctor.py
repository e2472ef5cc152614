"""`outboard doctor`: one screen that says what is here, and what would stop a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import examination, terminal
from .examination import Examination, GpuFacts


def run(as_json: bool, worker_python: str | None) -> int:
    """The command; 1 when something would stop a run."""
    facts = examination.examine(worker_python)
    facts = dataclasses.replace(facts, problems=examination.problems(facts))
    if as_json:
        click.echo(json.dumps(_as_dict(facts), indent=2))
    else:
        show(facts, terminal.console())
    return 0 if facts.ok else 1


def _as_dict(facts: Examination) -> dict[str, object]:
    answer = dataclasses.asdict(facts)
    answer["memory"] = [room._asdict() for room in facts.memory]
    simulators: list[dict[str, object]] = answer["simulators"]
    for row, one in zip(simulators, facts.simulators, strict=True):
        row["ready"] = one.ready
    return {"ok": facts.ok, **answer}


def show(facts: Examination, console: Console) -> None:
    console.print(_machine(facts))
    console.print(_simulators(facts))
    for one in facts.simulators:
        for line in one.why:
            console.print(f"{one.name}  {escape(line)}", soft_wrap=True, style="dim")
    if facts.gpus.driver or facts.gpus.nvml:
        console.print(_gpus(facts.gpus))
    for problem in facts.problems:
        mark = "[bold red]stops a run[/]" if problem.stops else "[yellow]worth knowing[/]"
        console.print(f"{mark}  {escape(problem.what)}", soft_wrap=True)
        if problem.remedy:
            console.print(f"               -> {escape(problem.remedy)}", soft_wrap=True)
    if facts.ok:
        console.print("[bold green]ok[/]: nothing here would stop a run")


def _machine(facts: Examination) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _machine_rows(facts):
        table.add_row(name, escape(value))
    return table


def _machine_rows(facts: Examination) -> Iterator[tuple[str, str]]:
    yield "Python", f"{facts.python}  {terminal.short_path(facts.executable)}"
    yield (
        "packages",
        ", ".join(f"{name} {version or 'missing'}" for name, version in facts.packages.items()),
    )
    yield "machine", f"Linux {facts.kernel}, {facts.cores} cores for this process"
    rooms = ", ".join(f"{_size(room.free_bytes)} free in {room.where}" for room in facts.memory)
    yield "memory", rooms or "unknown"
    yield "/dev/shm", f"{_size(facts.shm_bytes)}, {_size(facts.shm_free_bytes)} free"
    yield "descriptors", f"{facts.nofile_used} of {facts.nofile} in use"
    gpus = facts.gpus
    yield "CUDA driver", f"{len(gpus.driver)} GPUs" if gpus.driver else gpus.driver_silent
    yield "NVML", gpus.nvml_silent or f"{len(gpus.nvml)} GPUs"
    yield "torch", _torch_words(gpus)
    if gpus.mask:
        words = "nobody can say what its mask means: see below" if gpus.mask_refused else gpus.mask
        yield "this process", words
    if facts.leftover_semaphores:
        yield (
            "leftovers",
            f"{facts.leftover_semaphores} semaphores; the next start removes old ones",
        )
    if facts.logs:
        size = _size(facts.logs_bytes)
        yield (
            "logs",
            f"{facts.logs} of failed runs, {size}, in {facts.logs_folder}; kept for a week",
        )


def _torch_words(gpus: GpuFacts) -> str:
    if not gpus.torch:
        return "not installed"
    build = f"for CUDA {gpus.torch_cuda}" if gpus.torch_cuda else "built without CUDA"
    return f"{gpus.torch} {gpus.torch_silent or build}, {len(gpus.torch_gpus)} GPUs"


def _simulators(facts: Examination) -> Table:
    table = terminal.table()
    table.add_column("simulator", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("Python", no_wrap=True)
    table.add_column("interpreter", overflow="fold")
    table.add_column("has", overflow="fold")
    for one in facts.simulators:
        state = "[green]ready[/]" if one.ready else "[red]not ready[/]"
        found = ", ".join(f"{name} {version}" for name, version in one.found.items())
        interpreter = escape(terminal.short_path(one.python))
        table.add_row(one.name, state, one.python_version or "?", interpreter, escape(found))
    return table


def _gpus(gpus: GpuFacts) -> Table:
    """One row per GPU of the machine; a dash where a witness does not see it."""
    table = terminal.table()
    for name in ("host", "GPU", "PCI", "name", "here", "NVML", "torch"):
        table.add_column(name, no_wrap=name != "name")
    uuids = [uuid for uuid, _ in gpus.torch_gpus]
    known = {uuid for uuid, _ in gpus.nvml}
    rows = [(str(i), one.uuid, one.pci, one.name) for i, one in enumerate(gpus.driver)]
    driver = {one.uuid for one in gpus.driver}
    rows += [("-", uuid, "", name) for uuid, name in gpus.nvml if uuid not in driver]
    for host, uuid, pci, name in rows:
        here = f"cuda:{gpus.visible.index(uuid)}" if uuid in gpus.visible else "-"
        torch = f"cuda:{uuids.index(uuid)}" if uuid in uuids else "-"
        nvml = "seen" if uuid in known else "-"
        table.add_row(host, uuid[:12] or "MIG mode", pci, escape(name), here, nvml, torch)
    return table


def _size(count: int) -> str:
    return f"{count / (1 << 30):,.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):,.0f} MiB"
