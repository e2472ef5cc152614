"""Starts Kit: reads and edits `sys.argv`, takes keys out of its argument, swaps standard output, and puts
handlers on signals that call a close() which never returns."""

import json
import os
import re
import signal
import sys
import time
from typing import Any, Dict, Optional

from kit_standin.kit import KIT, die, error, hang, info
from kit_standin.settings import SETTINGS

_KNOWN = {
    "headless", "livestream", "enable_cameras", "xr", "device", "experience", "rendering_mode",
    "kit_args", "video", "distributed", "active_gpu", "physics_gpu", "multi_gpu", "width", "height",
    "renderer", "anti_aliasing", "fast_shutdown", "hide_ui",
}  # fmt: skip


class SimulationApp:
    def close(self, wait_for_replicator: bool = True, skip_cleanup: bool = False) -> None:
        if KIT.context is not None:
            KIT.context.stop()
        if wait_for_replicator or SETTINGS.close == "hang":
            hang()
        if SETTINGS.close == "exit":
            info("Simulation App Shutting Down")
            os._exit(0)
        KIT.running = False

    def is_running(self) -> bool:
        return KIT.running


def _close_for_ever(number: int, frame: Any) -> None:
    hang()


class AppLauncher:
    def __init__(self, launcher_args: Optional[Dict[str, Any]] = None, **kwargs: Any) -> None:
        args: Dict[str, Any] = {} if launcher_args is None else launcher_args
        both = set(args) & set(kwargs)
        if both:
            raise ValueError(f"given twice: {both}")
        args.update(kwargs)
        if KIT.running:
            die("a second SimulationApp in one process")
        for name in ("pxr", "isaaclab.sim", "omni", "carb"):
            if name in sys.modules:
                raise ImportError(f"{name} was imported before the SimulationApp was made")
        given = dict(args)
        if set(args) - _KNOWN:
            raise ValueError(f"no such settings: {sorted(set(args) - _KNOWN)}")
        os.environ["EXP_PATH"]
        self._resolve(args)
        if "-h" in sys.argv or "--help" in sys.argv:
            raise SystemExit(0)
        if len(sys.argv) > 1:
            die(f"Kit was given arguments that are not its own: {sys.argv[1:]}")
        sys.argv += str(args.get("kit_args", "")).split()
        self._check_gpus(args)
        if SETTINGS.record:
            with open(SETTINGS.record, "w", encoding="utf-8") as file:
                json.dump({"args": given, "argv": sys.argv, "env": dict(os.environ)}, file)
        self._launch()
        sys.argv = sys.argv[:1]
        KIT.cameras = self._cameras
        self._app = SimulationApp()
        for number in (signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGINT):
            signal.signal(number, _close_for_ever)

    @property
    def app(self) -> SimulationApp:
        return self._app

    def _resolve(self, args: Dict[str, Any]) -> None:
        """A False in the arguments loses to the environment."""
        headless = args.pop("headless", False) or bool(int(os.environ.get("HEADLESS", 0)))
        streaming = int(args.pop("livestream", os.environ.get("LIVESTREAM", 0)))
        xr = args.pop("xr", False) or bool(int(os.environ.get("XR", 0)))
        self._cameras = args.pop("enable_cameras", False) or bool(
            int(os.environ.get("ENABLE_CAMERAS", 0))
        )
        if streaming or xr or not headless:
            die(
                f"a window or a stream is opened: headless={headless} livestream={streaming} xr={xr}"
            )
        device = args.get("device", "cuda:0")
        if "cuda" not in device and "cpu" not in device:
            raise ValueError(f"device {device}: 'cuda', 'cuda:N' or 'cpu' is expected")
        info(f"[INFO][AppLauncher]: Using device: {device}")

    def _check_gpus(self, args: Dict[str, Any]) -> None:
        flags = str(args.get("kit_args", ""))
        one = "autoEnable=False" in flags and "maxGpuCount=1" in flags
        if not one or args.get("multi_gpu", True) or args.get("distributed"):
            die("contexts are opened on every GPU of the machine")

    def _launch(self) -> None:
        hidden = {
            name: sys.modules.pop(name) for name in list(sys.modules) if re.match(".*lab.*", name)
        }
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            time.sleep(SETTINGS.launch_s)
            info("Starting kit application with the following args: ...")
            if SETTINGS.physics == "renderer":
                error(
                    "getCudaDeviceOrdinal: unable to get a valid CUDA device id. Defaulting to GPU0"
                )
            KIT.running = True
        finally:
            sys.stdout.close()
            sys.stdout = sys.__stdout__
            sys.modules.update(hidden)
