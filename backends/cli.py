"""`outboard`: the command line. What a command does is in a file of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from ..ipc.errors import OutboardError, UsageError
from . import (
    conformance,
    doctor,
    environments,
    examination,
    isaacgym_probes,
    plan_report,
    registry,
    run_job,
    setup_isaacgym,
    setup_isaacsim,
    setup_worker,
    terminal,
)
from .traits import Traits

_WORKER_PYTHON = click.option(
    "--worker-python",
    metavar="PATH",
    default=None,
    help="Interpreter of the workers [default: this one].",
)
_SCENE = click.option(
    "--scene",
    metavar="NAME|FILE",
    default="",
    help="An MJCF file, or a scene of ours [default: humanoid29].",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(
    examination.version("outboard") or "(not installed)", message="%(prog)s %(version)s"
)
def cli() -> None:
    """Runs each robot simulator in its own interpreter, on its own GPU, and proves where it landed."""


@cli.command()
@click.option("--backend", metavar="NAME", default=registry.EMBEDDED, show_default=True,
              help=f"One of: {', '.join(registry.BACKENDS)}.")  # fmt: skip
@click.option("--simulator", metavar="FILE:CLASS", default="", help="A simulator that is not ours.")
@_SCENE
@click.option("--num-envs", type=int, default=256, show_default=True, help="Per rank.")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=None, help="[default: one per device]")
@click.option("--devices", metavar="A,B,...", required=True,
              help='One per rank: "cpu", "cuda:1", a UUID.')  # fmt: skip
@_WORKER_PYTHON
@click.option("--decimation", type=int, default=1, show_default=True,
              help="Simulation steps per step.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Rank N gets seed + N.")
@click.option("--publish", metavar="A,B,...", default="qpos,qvel", show_default=True,
              help="State to publish.")  # fmt: skip
@click.option("--json", "json_path", metavar="PATH|-", default="", help="The result as JSON.")
def run(devices: str, publish: str, **options: Any) -> int:
    """Drive one worker per rank with a smooth random policy and say how fast it went."""
    cfg = run_job.RunCfg(devices=_list("devices", devices), publish=_list("publish", publish),
                         **options)  # fmt: skip
    return run_job.run(cfg)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--assume-gpus", metavar="UUID,...", default=None,
              help="Plan for a machine that is not here: its GPUs in PCI order.")  # fmt: skip
def plan(as_json: bool, assume_gpus: str | None) -> int:
    """Show which GPU this environment means for this rank, and why."""
    answer = plan_report.plan_as_dict(assume_gpus=assume_gpus)
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        plan_report.print_plan(answer, terminal.console())
    return plan_report.exit_code(answer)


@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the screen.")
@_WORKER_PYTHON
@click.option("--probe", type=click.Choice(("isaacgym",)), default=None,
              help="Ask a real installation what nobody knows yet of this simulator.")  # fmt: skip
def doctor_(as_json: bool, worker_python: str | None, probe: str | None) -> int:
    """Say on one screen what this machine has, and what would stop a run."""
    if probe is not None:
        return isaacgym_probes.run(as_json, worker_python)
    return doctor.run(as_json, worker_python)


@cli.command("conformance")
@click.option(
    "--backend", metavar="NAME", default="", help=f"One of: {', '.join(registry.BACKENDS)}."
)
@click.option("--simulator", metavar="FILE:CLASS", default="", help="A simulator that is not ours.")
@_SCENE
@click.option("--device", default="cpu", show_default=True, help='"cpu", "cuda:1", a UUID.')
@_WORKER_PYTHON
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def conformance_(
    backend: str, simulator: str, scene: str, device: str, worker_python: str | None, as_json: bool
) -> int:
    """Check that a worker keeps the protocol's and the simulators' rules."""
    target = conformance.make_target(
        backend=backend,
        simulator=simulator,
        device=device,
        scene=scene or (registry.default_scene(backend) if backend else ""),
        worker_python=worker_python,
    )
    with terminal.console(stderr=True).status("opening") as status:
        outcomes = conformance.run_kit(
            target, on_outcome=lambda outcome: status.update(f"{outcome.name}: {outcome.verdict}")
        )
    if as_json:
        click.echo(json.dumps(conformance.as_json(target, outcomes), indent=2))
    else:
        conformance.print_outcomes(outcomes, terminal.console())
    return conformance.exit_code(outcomes)


@cli.group()
def setup() -> None:
    """Make or fill the environment that a simulator needs."""


@setup.command("worker")
@click.option("--python", metavar="PATH", required=True, help="The interpreter of the workers.")
@click.option("--dry-run", is_flag=True, help="Only say what would be installed, and how.")
def setup_worker_(python: str, dry_run: bool) -> int:
    """Give a foreign Python what a worker needs.

    The packages go into a folder of ours; that Python's own environment is not written to.
    """
    return setup_worker.run(python, dry_run)


@setup.command("isaacgym")
@click.option("--home", metavar="DIR", default="", help="[default: where discovery looks]")
@click.option("--tarball", metavar="FILE", default="", help="Preview 4, downloaded before.")
@click.option("--python", metavar="PATH", default="", help="A Python 3.8 to use in place of conda.")
@click.option("--with-gymtorch", is_flag=True, help="Install torch and ninja too (3 GB).")
@click.option("--accept-conda-terms", is_flag=True, help="Accept Anaconda's terms of service.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
def setup_isaacgym_(**options: Any) -> int:
    """Install Isaac Gym Preview 4, or complete an installation that is there.

    Can be run again at any time: what is done already is skipped.
    """
    return setup_isaacgym.run(setup_isaacgym.Request(**options))


@setup.command("isaacsim")
@click.option("--python", metavar="PATH", default="", help="[default: where discovery looks]")
@click.option("--dry-run", is_flag=True, help="Only say what would be installed, and how.")
def setup_isaacsim_(python: str, dry_run: bool) -> int:
    """Make an Isaac Sim that is installed usable as it is.

    Checks its versions and gives its Python what a worker needs, in a folder of ours; writes nothing there.
    """
    return setup_isaacsim.run(python, dry_run)


def _add_setup(name: str, traits: Traits) -> None:
    """`outboard setup NAME`, for a simulator that has an environment of its own."""

    @setup.command(name, help=f"Make the environment that {name} has for itself, outside this one.")
    @click.option("--python", metavar="PATH", default=None,
                  help="The Python to make it from; one that has the simulator already only gets "
                  "what a worker needs.")  # fmt: skip
    @click.option("--dry-run", is_flag=True, help="Only say what would be done.")
    def command(python: str | None, dry_run: bool) -> int:  # pyright: ignore[reportUnusedFunction]
        return environments.run(traits, python, dry_run)


for _name, _backend in registry.BACKENDS.items():
    if _backend.traits.environment is not None:
        _add_setup(_name, _backend.traits)


def _list(name: str, text: str) -> tuple[str, ...]:
    entries = tuple(entry.strip() for entry in text.split(","))
    if not all(entries):
        raise UsageError(f"--{name} {text!r} holds an empty entry")
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """The console script: returns the exit code. No error of ours shows a traceback."""
    terminal.stop_on_signals()
    try:
        code = cli.main(args=argv, prog_name="outboard", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (terminal.Stopped, click.Abort) as stop:
        # click turns every KeyboardInterrupt into an Abort, and keeps it as the cause.
        return _stopped(stop if isinstance(stop, terminal.Stopped) else stop.__cause__)
    except OutboardError as error:
        return terminal.show_error(error)
    except BrokenPipeError:
        # Whoever read us has enough. Nothing may be flushed there at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _stopped(stop: BaseException | None) -> int:
    if not isinstance(stop, terminal.Stopped):
        return 1
    terminal.console(stderr=True).print(f"stopped by {stop.name}; everything is released")
    return stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
