"""The stand-in driver for machines without a GPU: builds it, and runs children that find it first.

Two shared libraries in `standins/libcuda`, a libcuda and an NVML, behave as measured on real GPUs
and lie as a test wants them to. They reach a child through LD_LIBRARY_PATH in its environment; the
product has no hook for them. What they show is called "stand-in" and proves nothing about a GPU.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "tests" / "standins" / "libcuda"
LIBRARIES = {
    "libcuda.so.1": ("machine.c", "cuda.c", "cuda_memory.c"),
    "libnvidia-ml.so.1": ("machine.c", "nvml.c"),
}

# Two GPUs in PCI order; the text form of the inventory is explained in standins/libcuda/standin.h.
U0 = "GPU-ce08eab0-0000-4000-8000-000000000006"
U1 = "GPU-d11fe77a-0000-4000-8000-000000000007"
TWO = f"{U0}@0000:00:06.0,{U1}@0000:00:07.0"
# The second GPU in MIG mode, with two instances.
M0 = "MIG-5ca1ab1e-0000-4000-8000-000000000000"
M1 = "MIG-5ca1ab1e-0000-4000-8000-000000000001"
WITH_MIG = f"{U0}@0000:00:06.0,{U1}@0000:00:07.0/{M0}/{M1}"

# Put before a child's code: `outboard.backends` without its __init__, which imports every backend and
# takes longer than all that these children do.
ONE_MODULE = f"""
import sys, types
package = types.ModuleType("outboard.backends")
package.__path__ = [{str(ROOT / "backends")!r}]
sys.modules[package.__name__] = package
"""

WORKER_PYTHON = Path(
    os.environ.get("OUTBOARD_PYTHON38") or ROOT / ".venv-worker38" / "bin" / "python"
)


@functools.cache
def standin_folder() -> str:
    """The folder to put into LD_LIBRARY_PATH of a child; built once per test session. Skips the
    calling test when there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the stand-in driver needs a C compiler (cc or gcc), and there is none")
    folder = tempfile.mkdtemp(prefix="outboard-standin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for library, sources in LIBRARIES.items():
        command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
        command += ["-Wl,-Bsymbolic", f"-Wl,-soname,{library}", "-o", f"{folder}/{library}"]
        command += [str(SOURCES / source) for source in sources]
        subprocess.run([*command, "-lpthread"], check=True)
    return folder


def standin_environment(gpus: str = TWO, state: str | Path = "", /, **extra: str) -> dict[str, str]:
    """The whole environment of a child that finds the stand-in before any driver.

    `state` is the folder through which the stand-in's processes see one another; `extra` adds
    variables (CUDA_VISIBLE_DEVICES, OUTBOARD_STANDIN_..., or launcher variables). Masks, launcher
    variables and stand-in settings of the calling process are not passed on.
    """
    return {
        **bare_environment(),
        "LD_LIBRARY_PATH": standin_folder(),
        "OUTBOARD_STANDIN_GPUS": gpus,
        "OUTBOARD_STANDIN_STATE": str(state),
        **extra,
    }


def bare_environment(**extra: str) -> dict[str, str]:
    """What a child needs to import Outboard, and no mask. The search path of this process stays: it
    may be how a real driver is found."""
    names = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT / ".src"), **extra}


def add_context(state: str | Path, pid: int, uuid: str, kind: str = "compute") -> None:
    """Make the stand-in NVML list `pid` on a GPU; `kind` is compute, graphics or mps."""
    (Path(state) / f"{pid}@{uuid}@{kind}").write_text("0")


# Runs a test with this interpreter and, where it is installed, with the oldest that a worker may have.
each_python = pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="host"),
        pytest.param(
            str(WORKER_PYTHON),
            id="worker38",
            marks=pytest.mark.skipif(
                not WORKER_PYTHON.exists(), reason="needs a Python 3.8 in .venv-worker38"
            ),
        ),
    ],
)


def run_child(code: str, environment: dict[str, str], python: str = sys.executable) -> str:
    """Standard output of `python -c code`, stripped; a failing child fails the test."""
    done = subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"
    return done.stdout.strip()


SURVEY = """
import json
from outboard.ipc import cuda_driver
gpus, why = cuda_driver.survey()
print(json.dumps([[gpu.uuid for gpu in gpus], why]))
"""


@functools.cache
def _ask_real_driver() -> tuple[list[str], str]:
    return json.loads(run_child(SURVEY, bare_environment()))


def real_gpus(count: int = 1) -> tuple[str, ...]:
    """UUIDs of this machine's real GPUs, asked in a child: a test process must not start CUDA. Skips
    the calling test when there are fewer than `count`."""
    uuids, why = _ask_real_driver()
    if len(uuids) < count:
        pytest.skip(
            f"needs {count} real GPU(s), this process sees {len(uuids)}: {why or 'no more'}"
        )
    return tuple(uuids)
