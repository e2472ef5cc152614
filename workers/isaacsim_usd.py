"""From the host's flat MJCF to a USD file, in a cache by content. Imported after Kit has started.

The importer changes in Kit 6: whatever calls it is `convert`. What it is known to lose (Isaac Sim 5.1):
gains are written in the wrong unit, damping is lost, friction is not read; so the file carries no actuators
and `isaacsim_robot.py` sets every drive. It makes a second articulation root, `worldBody`, which is never
the robot.
"""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import hashlib
import os
import shutil
import tempfile
import time
from typing import Any, Iterator, NamedTuple

from isaaclab.sim.converters import (  # type: ignore[import-not-found]
    MjcfConverter,
    MjcfConverterCfg,
)
from isaacsim.core.utils.extensions import enable_extension  # type: ignore[import-not-found]
from pxr import Usd, UsdPhysics  # type: ignore[import-not-found]

from ..ipc.errors import SceneError, UsageError

IMPORTER = "isaacsim.asset.importer.mjcf"  # headless Kit does not load it by itself
_CACHE_VERSION = 1  # a change of what `convert` asks for must change it
_USD_NAME = "robot.usd"
_BUILDING = ".building-"
_STALE_S = 3600.0  # a conversion takes seconds: what is older was left by a process that died


def convert(xml: str, folder: str, fixed: bool, self_collision: bool) -> str:
    """Import the MJCF file into `folder`; the path of the USD file."""
    enable_extension(IMPORTER)
    cfg = MjcfConverterCfg(
        asset_path=xml,
        usd_dir=folder,
        usd_file_name=_USD_NAME,
        # Its own cache is keyed by the main file alone and marked before the work is done.
        force_usd_conversion=True,
        make_instanceable=False,  # one file, that can be renamed
        link_density=0.0,
        import_inertia_tensor=True,
        fix_base=fixed,
        import_sites=True,
        self_collision=self_collision,
    )
    return str(MjcfConverter(cfg).usd_path)


def cached(xml: str, cache: str, fixed: bool, self_collision: bool, version: str) -> str:
    """The USD file of `xml`, from the cache or made now: under a temporary name and renamed when complete, so
    any number of ranks may do this at once. SceneError when the importer makes none, UsageError when the
    cache cannot be written."""
    key = _key(xml, fixed, self_collision, version)
    folder = os.path.join(cache, key)
    final = os.path.join(folder, _USD_NAME)
    if os.path.isfile(final):
        return final
    try:
        os.makedirs(cache, exist_ok=True)
        _remove_stale(cache)
        building = tempfile.mkdtemp(prefix=_BUILDING, dir=cache)
    except OSError as error:
        raise UsageError(f"the USD cache {cache} cannot be written: {error.strerror}") from error
    try:
        made = convert(xml, building, fixed, self_collision)
        if os.path.realpath(made) != os.path.realpath(os.path.join(building, _USD_NAME)):
            raise SceneError(f"Isaac Sim's importer wrote {made}, not the file it was asked for")
        if not os.path.isfile(made) or not os.path.getsize(made):
            raise SceneError(
                f"Isaac Sim's importer made no USD file of {xml}; its words stand in the log"
            )
        _rename(building, folder, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def _rename(building: str, folder: str, final: str) -> None:
    try:
        os.rename(building, folder)
    except OSError as error:
        if not os.path.isfile(final):  # else another rank was first, with the same content
            raise UsageError(f"the USD cache {folder} cannot be written: {error}") from error


def _key(xml: str, fixed: bool, self_collision: bool, version: str) -> str:
    """Of everything that the importer reads: the whole folder of the export, meshes too."""
    digest = hashlib.sha256(
        f"{_CACHE_VERSION} {version} fixed={fixed} self_collision={self_collision}\n".encode()
    )
    folder = os.path.dirname(xml)
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _remove_stale(cache: str) -> None:
    for entry in os.scandir(cache):
        try:
            if entry.name.startswith(_BUILDING) and time.time() - entry.stat().st_mtime > _STALE_S:
                shutil.rmtree(entry.path, ignore_errors=True)
        except FileNotFoundError:
            continue  # another rank removes it too


class RobotPaths(NamedTuple):
    """Below the place where the file is referenced."""

    root: str  # the articulation's root
    bodies: str  # the folder of the bodies


def robot_paths(usd: str, root_body: str) -> RobotPaths:
    """Where the robot is in the file. SceneError when it has no articulation root, or more than one."""
    stage = Usd.Stage.Open(usd)
    top = stage.GetDefaultPrim()
    if not top:
        raise SceneError(f"Isaac Sim's importer gave {usd} no default prim")
    paths = [str(p.GetPath()) for p in _with(top, UsdPhysics.ArticulationRootAPI)]
    ours = [path for path in paths if _name(path) != "worldBody"]
    # A fixed base may carry the mark on the joint that fixes it, or on the folder of the bodies.
    chosen = [path for path in ours if _name(path) == root_body] if len(ours) > 1 else ours
    if len(chosen) != 1:
        raise SceneError(
            f"the imported robot has {len(ours)} articulation roots, not one: {', '.join(ours) or 'none'}"
        )
    bodies = [str(p.GetPath()) for p in _with(top, UsdPhysics.RigidBodyAPI)]
    hub = next((path for path in bodies if _name(path) == root_body), "")
    if not hub:
        raise SceneError(f"the imported robot has no body {root_body}: {', '.join(bodies)}")
    start = len(str(top.GetPath()))
    return RobotPaths(chosen[0][start:], hub.rpartition("/")[0][start:])


def _with(top: Any, api: Any) -> Iterator[Any]:
    return (prim for prim in Usd.PrimRange(top) if prim.HasAPI(api))


def _name(path: str) -> str:
    return path.rpartition("/")[2]
