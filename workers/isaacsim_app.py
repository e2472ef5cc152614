"""Starts Kit in this process, on one GPU, and ends it. No module of Isaac Sim, Isaac Lab or USD may be
imported before `App` is there, and torch should not be.

Facts that this file rests on (Isaac Sim 5.1, Isaac Lab 2.3.2): the launcher reads `sys.argv` and hands what
it does not know to Kit; an argument that is False loses to a variable of the environment; without the two
multi-GPU settings Kit opens contexts on every GPU of the machine; its handlers of SIGTERM, SIGABRT and
SIGSEGV call a `close()` that may never return; the first import asks for the licence on standard input.
"""

import faulthandler
import importlib.util
import os
import re
import signal
import sys
import threading
from importlib import metadata
from typing import Any, Dict

from ..ipc.device import CPU
from ..ipc.errors import UsageError, WorkerLaunchError
from ..ipc.messages import Init

EULA = "OMNI_KIT_ACCEPT_EULA"
_ACCEPTED = ("YES", "Y")

# Of a close that hangs. Below the host's patience (`close_s` in backends/isaacsim.py).
CLOSE_S = 5.0

# headless.kit turns multi-GPU rendering on by itself.
_ONE_GPU = "--/renderer/multiGpu/autoEnable=False --/renderer/multiGpu/maxGpuCount=1"
# Python handlers of the launcher; a handler in Python for a real SIGSEGV would never get to run.
_SIGNALS = (signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGINT)

# What a start fails with, and what to do about it.
_TROUBLE = (
    ("GLIBC_", "Isaac Sim 5 needs a Linux with glibc 2.35 or newer (Ubuntu 22.04)"),
    ("No module named 'isaacsim'", "Isaac Sim is not in this environment: set OUTBOARD_ISAACSIM_HOME or "
     "OUTBOARD_ISAACSIM_PYTHON"),
    ("No module named 'isaaclab'", "Isaac Lab is not in this environment: pip install isaaclab there, or set "
     "OUTBOARD_ISAACSIM_HOME to a folder with IsaacLab/source"),
    ("EXP_PATH", "the isaacsim package of this environment is incomplete: pip install "
     "'isaacsim[all,extscache]'"),
    ("libcuda", "the CUDA driver's library was not found"),
)  # fmt: skip


class App:
    """Kit, running. One for the life of the process."""

    def __init__(self, init: Init) -> None:
        _require_licence()
        _add_package_root(str(init.options.get("package_root", "")))
        _require_renderable(init)
        sys.argv = sys.argv[:1]
        os.environ.update(_pinned(init.render))
        try:
            import isaacsim  # type: ignore[import-not-found]  # noqa: F401 - tells where Kit's files are
            from isaaclab.app import AppLauncher  # type: ignore[import-not-found]
        except Exception as error:  # ImportError, OSError of a library, EOFError of a question
            raise _launch_error(error) from error
        try:
            launcher = AppLauncher(_arguments(init))
        except (Exception, SystemExit) as error:
            raise _launch_error(error) from error
        finally:
            _own_signals()
        self._app: Any = launcher.app
        self.version = _version("isaacsim")
        self.lab_version = _version("isaaclab")

    def close(self, sim: Any) -> None:
        """After BYE. The process usually ends inside; it ends in CLOSE_S seconds anyway."""
        watchdog = threading.Timer(CLOSE_S, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
        if sim is not None:
            # A stopped timeline makes the context render until it plays again: for ever. Its reset()
            # clears this flag, so it is set here, after the last one.
            sim._disable_app_control_on_stop_handle = True
            sim.stop()
            sim.clear_all_callbacks()
            sim.clear_instance()
        sys.stdout.flush()
        sys.stderr.flush()
        self._app.close(wait_for_replicator=False)


def _arguments(init: Init) -> Dict[str, Any]:
    """Of the launcher, which takes keys out of this dictionary. Physics and graphics on this process's first
    and only GPU: the mask decides which one that is."""
    kit_args = _ONE_GPU
    folder = str(init.options.get("cache", ""))
    if folder:
        kit_args += " --portable-root " + os.path.join(folder, "kit")
    device = CPU if init.device.kind == CPU else init.device.local
    return {
        "headless": True,
        "device": device,
        "enable_cameras": init.render,
        "multi_gpu": False,
        "kit_args": kit_args,
    }


def _pinned(render: bool) -> Dict[str, str]:
    return {"HEADLESS": "1", "ENABLE_CAMERAS": str(int(render)), "LIVESTREAM": "0", "XR": "0"}


def _require_licence() -> None:
    """UsageError: only the user can accept it, and Kit would ask on a standard input that nobody reads."""
    if os.environ.get(EULA, "").strip().upper() not in _ACCEPTED:
        raise UsageError(
            "Isaac Sim runs only for those who accepted NVIDIA's Omniverse licence, and Outboard does not "
            f"accept it for anybody. Read it, then set {EULA}=YES in this environment"
        )


def _require_renderable(init: Init) -> None:
    """UsageError when pictures are asked for on a GPU that Kit's renderer cannot be sent to."""
    index = int(init.options.get("physical_index", 0))
    if not init.render or index == 0 or _selects_by_cuda_index():
        return
    raise UsageError(
        f"render=True on GPU {index} of this machine: this Isaac Lab names the renderer's GPU by a graphics "
        "ordinal, which CUDA_VISIBLE_DEVICES does not mask, so Kit would render on GPU 0 and die of CUDA "
        "error 700 (IsaacLab issue 2756). Render on GPU 0, leave out render=True, or use an Isaac Lab whose "
        "launcher knows activeCudaGpus (IsaacLab pull request 7057)"
    )


def _selects_by_cuda_index() -> bool:
    """Whether the installed launcher can name the renderer's GPU by its CUDA index. Nothing is imported."""
    try:
        spec = importlib.util.find_spec("isaaclab")
    except (ImportError, ValueError):
        return False
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for inside in ("app", "source/isaaclab/isaaclab/app"):  # a checkout's package, the wheel's
            try:
                with open(
                    os.path.join(folder, inside, "app_launcher.py"), encoding="utf-8"
                ) as file:
                    return "activeCudaGpus" in file.read()
            except OSError:
                continue
    return False


def _add_package_root(folder: str) -> None:
    """A checkout's `source/isaaclab`, last: an installed package wins."""
    if folder and folder not in sys.path:
        sys.path.append(folder)


def _own_signals() -> None:
    """Take back what the launcher put its handlers on: a signal ends this process, at once."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()


def _launch_error(error: BaseException) -> WorkerLaunchError:
    text = f"{type(error).__name__}: {error}"
    help_ = next((said for mark, said in _TROUBLE if mark in text), "")
    return WorkerLaunchError(
        f"Isaac Sim does not start in {sys.executable} ({text})" + (help_ and f"; {help_}")
    )


def _version(package: str) -> str:
    """Of a pip package; of a binary install its VERSION file, else "unknown"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        pass
    module = sys.modules.get(package)
    start = os.path.dirname(os.path.abspath(str(getattr(module, "__file__", "") or "/")))
    for path in (os.path.join(start, "..", "..", "VERSION"), os.path.join(start, "VERSION")):
        try:
            with open(path, encoding="utf-8") as file:
                return file.readline().strip()
        except OSError:
            continue
    return "unknown"


def major(version: str) -> int:
    """5 of "5.1.0"; 0 when it is not known."""
    found: Any = re.match(r"(\d+)", version)
    return int(found.group(1)) if found else 0
