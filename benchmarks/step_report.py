"""The result of bench_step.py for people: rich tables, markdown, a picture. Everything from the JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peer_env
from rich.console import Console
from rich.table import Table
from step_cells import HOGS, ONE_CORE, PAYLOADS, PYTHON, SCHEMES, ZLIB, Cell
from step_goals import Missing, Numbers, judge

# What a person wrote between these lines is kept when the file is written again.
_KEEP_FROM, _KEEP_TO = "<!-- what was learned -->", "<!-- end -->"
_COMMAND = "python benchmarks/bench_step.py --json step.json --markdown step.md --plot step.png"


def machine(old_python: str) -> dict[str, Any]:
    """What the numbers depend on, without names or paths."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": ".".join(platform.release().split("-")[0].split(".")[:3]),
        "virtual": "hypervisor" in _first("/proc/cpuinfo", "flags"),
        "host_python": platform.python_version(),
        "worker_python": _version(old_python) if old_python else "",
        "nice": os.nice(0),
    }


def _cpu_model() -> str:
    return _first("/proc/cpuinfo", "model name") or platform.machine()


def _first(path: str, name: str) -> str:
    with open(path) as file:
        for line in file:
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _version(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


# -- the tables as data -------------------------------------------------------------------------------

_Grid = tuple[str, list[str], list[list[str]]]  # title, head, rows


def grids(result: dict[str, Any]) -> list[_Grid]:
    numbers = Numbers(result["runs"])
    steps = [(100, 0.0), (1000, 0.0), (5000, 0.0), (20000, 0.0), (1000, 0.2), (5000, 0.2)]
    places = {where: {"where": where} for where in (ONE_CORE, PYTHON, ZLIB, HOGS)}
    return [
        _grid(
            "Empty step by number of environments: median / p99, us",
            {str(n): {"num_envs": n} for n in PAYLOADS},
            lambda cell: _two(numbers, cell),
        ),
        _grid(
            "Added to the worker's own step time: median / p99, us / host CPU while waiting",
            {_work_words(w, v): {"work_us": w, "vary": v} for w, v in steps},
            lambda cell: _three(numbers, cell),
        ),
        _grid(
            "Awkward circumstances, empty step of one environment: median / p99 / mean, us",
            {**places, "two-core worker": {"two_cores": True}},
            lambda cell: _means(numbers, cell),
        ),
    ]


def _grid(title: str, columns: Mapping[str, dict[str, Any]], words: Callable[[Cell], str]) -> _Grid:
    rows = [
        [scheme.name, *(words(Cell(scheme.name, **column)) for column in columns.values())]
        for scheme in SCHEMES
    ]
    return title, ["scheme", *columns], [row for row in rows if any(row[1:])]


def _work_words(work_us: int, vary: float) -> str:
    words = f"{work_us // 1000} ms" if work_us >= 1000 else f"{work_us} us"
    return f"{words} +-{vary:.0%}" if vary else words


def _number(us: float) -> str:
    if abs(us) < 10:
        return f"{us:.2f}"
    return f"{us:.1f}" if abs(us) < 100 else f"{us:.0f}"


def _some(numbers: Numbers, cell: Cell, *what: str) -> str:
    try:
        return " / ".join(_number(numbers.of(cell, name)) for name in what)
    except Missing:
        return ""


def _two(numbers: Numbers, cell: Cell) -> str:
    return _some(numbers, cell, "median_us", "p99_us")


def _means(numbers: Numbers, cell: Cell) -> str:
    return _some(numbers, cell, "median_us", "p99_us", "mean_us")


def _three(numbers: Numbers, cell: Cell) -> str:
    text = _two(numbers, cell)
    return f"{text} / {numbers.of(cell, 'host_cpu'):.0%}" if text else ""


def _goal_rows(result: dict[str, Any]) -> list[list[str]]:
    rows: list[list[str]] = []
    for goal, value, verdict in judge(result["runs"]):
        limit, have = (f"{v:.3g} {goal.unit}" for v in (goal.limit, value))
        rows.append([goal.text, f"<= {limit}", have, verdict])
    return rows


def _header(result: dict[str, Any]) -> str:
    this = result["machine"]
    every = [run for runs in result["runs"].values() for run in runs]
    quiet = sum(run["foreign"] < Numbers.QUIET for run in every)
    peers = ", ".join(f"{name} {v}" for name, v in result["peers"].items() if v)
    return (
        f"{this['cpu']}, {this['cores']} cores{', virtual' if this['virtual'] else ''}; "
        f"Linux {this['kernel']}; host Python {this['host_python']}, workers on "
        f"{this['worker_python'] or 'the same'}; niceness {this['nice']}. "
        f"{len(every)} runs, {quiet} of them on a quiet machine (others took under "
        f"{Numbers.QUIET:.0%} of it). Peers: {peers or 'none'}."
    )


# -- the screen, the file, the picture ----------------------------------------------------------------


def progress(done: int, all_runs: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{all_runs}  {what}", end="", file=sys.stderr, flush=True)


def show(result: dict[str, Any]) -> None:
    console = Console(soft_wrap=False)
    console.print("\n" + _header(result))
    goals = _goal_rows(result)
    for title, head, rows in [*grids(result), ("Goals", ["goal", "limit", "here", ""], goals)]:
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        for name in head:
            table.add_column(name, justify="left" if name == head[0] else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for name, why in result["skipped"].items():
        console.print(f"skipped: {name}: {why}")


def markdown(result: dict[str, Any], existing: Path) -> str:
    parts = ["# What a step costs", "", _header(result), "", f"    {_COMMAND}", ""]
    parts += ["Every scheme makes the same two copies (29 floats in, 71 out per environment) and the same "
              "check: a stamp travels with ctrl and must come back with the state. Nobody is pinned but "
              "the C floor, which is C without Python. Medians over the runs.", ""]  # fmt: skip
    for title, head, rows in [
        *grids(result),
        ("Goals", ["goal", "limit", "here", ""], _goal_rows(result)),
    ]:
        if rows:
            parts += [f"## {title}", "", _line(head), _line(["---"] * len(head))]
            parts += [*map(_line, rows), ""]
    for name, why in result["skipped"].items():
        parts.append(f"Skipped: {name}: {why}.")
    text = existing.read_text() if existing.exists() else ""
    kept = text.partition(_KEEP_FROM)[2].partition(_KEEP_TO)[0].strip("\n")
    parts += ["", _KEEP_FROM, kept, _KEEP_TO]
    return "\n".join(parts) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(result: dict[str, Any], path: Path) -> None:
    """By matplotlib, which lives in the peers' environment."""
    numbers = Numbers(result["runs"])
    lines: dict[str, list[tuple[int, float]]] = {}
    for scheme in SCHEMES:
        for num_envs in PAYLOADS:
            try:
                point = (num_envs, numbers.of(Cell(scheme.name, num_envs)))
            except Missing:
                continue
            lines.setdefault(scheme.name, []).append(point)
    code = Path(__file__).with_name("step_plot.py")
    argv = [str(peer_env.python()), str(code), str(path)]
    done = subprocess.run(argv, input=json.dumps(lines), text=True, capture_output=True)
    if done.returncode:
        print(f"no picture: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
