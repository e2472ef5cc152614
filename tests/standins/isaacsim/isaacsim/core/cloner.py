"""Clones of environment 0 on a grid, and the filter that keeps them from touching one another."""

# pyright: reportAttributeAccessIssue=false
# (USD makes its names at run time.)

import math
import time
from typing import Any, List, Optional, Sequence

from kit_standin.kit import KIT, die, require
from kit_standin.settings import SETTINGS
from pxr import UsdGeom

require(__name__)


class GridCloner:
    def __init__(self, spacing: float, num_per_row: int = -1, stage: Any = None) -> None:
        self._spacing, self._per_row, self._base = spacing, num_per_row, ""

    def define_base_env(self, base_env_path: str) -> None:
        self._base = base_env_path
        UsdGeom.Scope.Define(KIT.stage, base_env_path)

    def generate_paths(self, root_path: str, num_paths: int) -> List[str]:
        return [f"{root_path}_{i}" for i in range(num_paths)]

    def clone(
        self,
        source_prim_path: str,
        prim_paths: List[str],
        position_offsets: Any = None,
        orientation_offsets: Any = None,
        replicate_physics: bool = False,
        base_env_path: Optional[str] = None,
        root_path: Optional[str] = None,
        copy_from_source: bool = False,
        unregister_physics_replication: bool = False,
        enable_env_ids: bool = False,
        clone_in_fabric: bool = False,
    ) -> List[Any]:
        """The positions of the clones, centred on the origin."""
        if not KIT.stage.GetPrimAtPath(source_prim_path):
            raise RuntimeError(f"there is no source prim {source_prim_path}")
        if replicate_physics and (base_env_path is None or root_path is None):
            raise ValueError("replicate_physics needs base_env_path and root_path")
        count = len(prim_paths)
        per_row = self._per_row if self._per_row > 0 else int(math.sqrt(count))
        rows = math.ceil(count / per_row)
        columns = math.ceil(count / rows)
        positions = []
        for i, path in enumerate(prim_paths):
            row, column = divmod(i, columns)
            x = (rows - 1) * self._spacing / 2 - row * self._spacing
            y = column * self._spacing - (columns - 1) * self._spacing / 2
            positions.append([x, y, 0.0])
            prim = UsdGeom.Xform.Define(KIT.stage, path).GetPrim()
            UsdGeom.XformCommonAPI(prim).SetTranslate((x, y, 0.0))
            if path != source_prim_path:
                prim.GetInherits().AddInherit(source_prim_path)
            if SETTINGS.clone_s:
                time.sleep(SETTINGS.clone_s)
        KIT.env_paths, KIT.origins = list(prim_paths), [tuple(p) for p in positions]  # type: ignore[misc]
        return positions

    def filter_collisions(
        self,
        physicsscene_path: str,
        collision_root_path: str,
        prim_paths: List[str],
        global_paths: Sequence[str] = (),
    ) -> None:
        if not KIT.stage.GetPrimAtPath(physicsscene_path):
            die(f"there is no physics scene at {physicsscene_path}")
        KIT.filtered_for = list(global_paths)
